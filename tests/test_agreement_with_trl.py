"""TRL's own GRPOTrainer on the same tiny model and rows: equal losses and gradients, or a
difference that is stated and pinned. TRL's ``_compute_loss`` runs; no formula of it is repeated.

Ours is the whole path, packed rows and fused head included.
"""

from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.losses import LossConfig
from nemo_like.losses.policy_gradient import ClippedPGLoss, importance_weights
from nemo_like.losses.protocol import Denominators, apply_loss
from nemo_like.policy.attention import PACKED
from nemo_like.policy.inputs import InputLayout, model_inputs
from nemo_like.policy.model import ForwardRequest, HeadSettings, LogprobModel

trl = pytest.importorskip("trl", reason="the peer that is compared with is not installed")
datasets = pytest.importorskip("datasets", reason="TRL's trainers need it")

TEMPERATURE = 0.7
PROMPTS = [[40, 41], [40, 41], [60, 61, 62], [60, 61, 62]]
COMPLETIONS = [[70, 71, 72], [80, 81, 82, 83, 84, 85], [90], [95, 96, 97, 98]]
# The second completion has two tokens of a tool in its middle.
TRAINED = [[1, 1, 1], [1, 1, 0, 0, 1, 1], [1], [1, 1, 1, 1]]
ADVANTAGES = [1.0, -0.5, 2.0, -1.5]
LONGEST = 6
LOW, HIGH, DUAL, BETA, ENTROPY = 0.2, 0.28, 3.0, 0.1, 0.05
# Log ratios of the new policy to the old: within the bounds, beyond each, and far beyond.
LOG_RATIOS = [0.1, -0.4, 0.5, 0.02, -0.3, 0.0, 0.0, 1.5, 0.1, 0.3, -0.1, 0.05, 1.3, -0.6]
TO_REFERENCE = [0.3, -0.2, 0.1, 0.0, 0.9, 0.0, 0.0, -1.0, 0.2, -0.4, 0.5, -0.1, 0.6, 0.05]
ENGINE_GAPS = [0.0, 0.9, -0.3, 0.1, 0.2, 0.0, 0.0, -0.5, 0.0, 0.4, 1.2, -0.1, 0.0, 0.3]

TOKEN, SEQUENCE, CONSTANT = (
    {"normalization": "token"},
    {"normalization": "sequence"},
    {"normalization": "constant", "constant_tokens": LONGEST},
)
WITH_KL = {"kl_coef": BETA}


@pytest.fixture(autouse=True, scope="module")
def quiet_datasets():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@dataclass
class Sides:
    """One batch, for both: columns [N] as we have them, and padded as TRL has them."""

    path: str
    folder: str

    def __post_init__(self):
        mask = [
            i >= len(prompt) and bool(trained[i - len(prompt)])
            for prompt, completion, trained in zip(PROMPTS, COMPLETIONS, TRAINED, strict=True)
            for i in range(len(prompt) + len(completion))
        ]
        rows = [p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
        self.batch = TensorBatch(
            lengths=torch.tensor([len(row) for row in rows]),
            tokens={
                keys.INPUT_IDS: torch.tensor([token for row in rows for token in row]),
                keys.LOSS_MASK: torch.tensor(mask),
            },
            rows={
                keys.SAMPLE_MASK: torch.ones(len(rows), dtype=torch.bool),
                keys.ADVANTAGES: torch.tensor(ADVANTAGES),
            },
        )
        with torch.no_grad():
            now = self.forward(self.model(), with_entropy=True)
        self.entropies = now[1]
        columns = self.batch.tokens
        columns[keys.POLICY_LOGPROBS] = now[0] - self.flat(LOG_RATIOS)
        columns[keys.REFERENCE_LOGPROBS] = now[0] + self.flat(TO_REFERENCE)
        columns[keys.GENERATION_LOGPROBS] = columns[keys.POLICY_LOGPROBS] - self.flat(ENGINE_GAPS)

    def model(self):
        return AutoModelForCausalLM.from_pretrained(self.path)

    def forward(self, model, with_entropy=False, entropy_trains=False):
        """Logprobs and entropies [2, N]."""
        model.set_attn_implementation(PACKED)
        inputs = model_inputs(self.batch, InputLayout(batching="packed"))
        request = ForwardRequest(
            inputs=inputs,
            temperature=TEMPERATURE,
            with_entropy=with_entropy,
            entropy_trains=entropy_trains,
        )
        return LogprobModel(model, HeadSettings(chunk_tokens=5))(None, request)

    def flat(self, of_completions):
        """A number a completion token -> [N], 0 at prompts."""
        column, given = torch.zeros(self.batch.num_tokens), iter(of_completions)
        starts = self.batch.starts.tolist()
        for start, prompt, completion in zip(starts, PROMPTS, COMPLETIONS, strict=True):
            for i in range(len(completion)):
                column[start + len(prompt) + i] = next(given)
        return column

    def padded(self, column):
        """[N] -> [B, LONGEST], completions on the left."""
        rows = column.split(self.batch.lengths.tolist())
        out = torch.zeros(len(rows), LONGEST, dtype=column.dtype)
        for line, row, prompt in zip(out, rows, PROMPTS, strict=True):
            line[: len(row) - len(prompt)] = row[len(prompt) :]
        return out

    @property
    def whole(self):
        return Denominators(
            tokens=float(self.batch.tokens[keys.LOSS_MASK].sum()), sequences=float(len(PROMPTS))
        )

    def ours(self, *, token_advantages=None, on_policy=False, importance="none", **config):
        """Loss, and the gradient of every parameter."""
        loss = ClippedPGLoss(LossConfig(importance=importance, **config))
        batch = self.batch.select(range(len(PROMPTS)))
        if on_policy:
            del batch.tokens[keys.POLICY_LOGPROBS]
        if token_advantages is not None:
            batch.tokens[keys.ADVANTAGES] = token_advantages
        model = self.model()
        logprobs, entropies = self.forward(model, entropy_trains=loss.needs.entropy)
        value, _ = apply_loss(loss, torch.stack([logprobs, entropies]), batch, self.whole)
        return value.item(), gradients_of(value, model)

    def theirs(self, *, on_policy=False, importance_sampling_ratio=None, **config):
        """The same of TRL."""
        trainer = trl.GRPOTrainer(
            model=self.model(),
            processing_class=AutoTokenizer.from_pretrained(self.path),
            reward_funcs=lambda **_: [0.0],
            train_dataset=datasets.Dataset.from_list([{"prompt": "a"}] * 4),
            args=trl.GRPOConfig(
                output_dir=self.folder,
                use_cpu=True,
                bf16=False,
                report_to=[],
                gradient_checkpointing=False,
                per_device_train_batch_size=4,
                num_generations=2,
                max_completion_length=LONGEST,
                temperature=TEMPERATURE,
                **{"epsilon": LOW, "epsilon_high": HIGH, "beta": 0.0} | config,
            ),
        )
        trainer.model.eval()  # so that it divides by no accumulated steps
        width = max(map(len, PROMPTS))
        inputs = {
            "prompt_ids": torch.tensor([[0] * (width - len(p)) + p for p in PROMPTS]),
            "prompt_mask": torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS]),
            "completion_ids": self.padded(self.batch.tokens[keys.INPUT_IDS]),
            "completion_mask": torch.tensor(
                [[1] * len(c) + [0] * (LONGEST - len(c)) for c in COMPLETIONS]
            ),
            "tool_mask": self.padded(self.batch.tokens[keys.LOSS_MASK]).long(),
            "advantages": self.batch.rows[keys.ADVANTAGES],
            "ref_per_token_logps": self.padded(self.batch.tokens[keys.REFERENCE_LOGPROBS]),
            "num_items_in_batch": self.batch.tokens[keys.LOSS_MASK].sum(),
        }
        if not on_policy:
            inputs["old_per_token_logps"] = self.padded(self.batch.tokens[keys.POLICY_LOGPROBS])
        if importance_sampling_ratio is not None:
            trainer.use_vllm = True  # a branch of the loss; its engine is not started
            inputs["importance_sampling_ratio"] = self.padded(importance_sampling_ratio)
        value = trainer._compute_loss(trainer.model, inputs)
        return value.item(), gradients_of(value, trainer.model)

    def k3(self):
        """[N], of the rows as they are."""
        d = self.flat(TO_REFERENCE)
        return d.exp() - d - 1

    def mean(self, normalization, column):
        """Of trained tokens, as the formulas have it."""
        mask = self.padded(self.batch.tokens[keys.LOSS_MASK])
        column = self.padded(column) * mask
        if normalization == "token":
            return (column.sum() / mask.sum()).item()
        return (column.sum(1) / mask.sum(1)).mean().item()


def gradients_of(loss, model):
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def minus(a, b):
    """Difference of losses, and of gradients."""
    return a[0] - b[0], {name: a[1][name] - b[1][name] for name in a[1]}


def assert_equal(ours, theirs):
    """Loss, and the gradient of every parameter."""
    assert ours[0] == pytest.approx(theirs[0], abs=1e-5)
    assert ours[1].keys() == theirs[1].keys()
    assert max(gradient.abs().max() for gradient in ours[1].values()) > 1e-3
    for name, gradient in ours[1].items():
        assert torch.allclose(gradient, theirs[1][name], rtol=0, atol=1e-5), name


@pytest.fixture(scope="module")
def sides(tiny_model, tmp_path_factory):
    return Sides(tiny_model(), str(tmp_path_factory.mktemp("trl")))


CLIP = {"clip_low": LOW, "clip_high": HIGH}
# TRL's CISPO bounds ratios from above only, and by the bound itself.
CISPO = {"objective": "cispo", "clip_low": None, "clip_high": HIGH}
OF_SEQUENCES = {"ratio_level": "sequence"}
CASES = {
    "grpo": (CLIP | SEQUENCE, {"loss_type": "grpo"}),
    "bnpo": (CLIP | TOKEN, {"loss_type": "bnpo"}),
    "dapo": (CLIP | TOKEN, {"loss_type": "dapo"}),
    "dr_grpo": (CLIP | CONSTANT, {"loss_type": "dr_grpo"}),
    "gspo": (
        CLIP | SEQUENCE | OF_SEQUENCES,
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    ),
    "gspo over tokens": (
        CLIP | TOKEN | OF_SEQUENCES,
        {"loss_type": "dapo", "importance_sampling_level": "sequence"},
    ),
    "cispo": (CISPO | TOKEN, {"loss_type": "cispo", "epsilon_high": 1 + HIGH}),
    "cispo of sequences": (
        CISPO | TOKEN | OF_SEQUENCES,
        {
            "loss_type": "cispo",
            "epsilon_high": 1 + HIGH,
            "importance_sampling_level": "sequence",
        },
    ),
    # Both are min(r, delta) A for a negative A; a delta above 1 + clip_high leaves positive ones.
    "dual clip": (CLIP | TOKEN | {"dual_clip": DUAL}, {"loss_type": "dapo", "delta": DUAL}),
    "kl": (
        CLIP | SEQUENCE | WITH_KL,
        {"loss_type": "grpo", "beta": BETA, "use_bias_correction_kl": True},
    ),
    "cispo with kl": (
        CISPO | TOKEN | WITH_KL,
        {
            "loss_type": "cispo",
            "epsilon_high": 1 + HIGH,
            "beta": BETA,
            "use_bias_correction_kl": True,
        },
    ),
    "entropy": (
        CLIP | TOKEN | {"entropy_coef": ENTROPY},
        {"loss_type": "dapo", "entropy_coef": ENTROPY},
    ),
    "all": (
        CLIP | TOKEN | WITH_KL | {"dual_clip": DUAL, "entropy_coef": ENTROPY},
        {
            "loss_type": "dapo",
            "delta": DUAL,
            "beta": BETA,
            "use_bias_correction_kl": True,
            "entropy_coef": ENTROPY,
        },
    ),
}


@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_trl(sides, name, on_policy):
    ours, theirs = CASES[name]
    assert_equal(
        sides.ours(on_policy=on_policy, **ours), sides.theirs(on_policy=on_policy, **theirs)
    )


def test_some_tokens_are_clipped_on_each_side_so_that_there_is_something_to_agree_on(sides):
    plain = sides.ours(clip_low=None, clip_high=None)[0]
    by_case = [sides.ours(**CASES[name][0])[0] for name in ("dapo", "dual clip")]
    assert len({round(each, 4) for each in [plain, *by_case]}) == 3


# Where definitions differ.


def test_without_its_correction_the_kl_of_trl_lacks_the_gradient_of_the_sampling_distribution(
    sides,
):
    """Equal values; our gradient has a term more, mean(k3 * grad log p): see ``kl_loss``."""
    ours = sides.ours(on_policy=True, **CLIP, **SEQUENCE, **WITH_KL)
    theirs = sides.theirs(on_policy=True, loss_type="grpo", beta=BETA, use_bias_correction_kl=False)
    loss, difference = minus(ours, theirs)
    assert loss == pytest.approx(0, abs=1e-5)
    score = sides.ours(objective="reinforce", token_advantages=-BETA * sides.k3(), **SEQUENCE)
    assert_equal((0.0, difference), (0.0, score[1]))


def test_the_kl_of_trl_has_the_ratio_of_the_sequence_where_the_objective_has_it(sides):
    """Ours has that of the token, with which the KL's own expectation is exact."""
    config = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    theirs = sides.theirs(beta=BETA, use_bias_correction_kl=True, **config)
    ours = sides.ours(**CLIP, **SEQUENCE, **OF_SEQUENCES, **WITH_KL)
    row = sides.batch.row_of_token
    of_row = [
        sides.flat(LOG_RATIOS)[(row == i) & sides.batch.tokens[keys.LOSS_MASK]].mean()
        for i in range(len(PROMPTS))
    ]
    difference = sides.flat(LOG_RATIOS).exp() - torch.stack(of_row)[row].exp()
    expected = BETA * sides.mean("sequence", difference * sides.k3())
    assert abs(expected) > 1e-3
    assert ours[0] - theirs[0] == pytest.approx(expected, abs=1e-5)


def test_the_entropy_of_trl_is_a_mean_over_tokens_whatever_the_loss_is(sides):
    """Ours has the mean of the rest of the loss."""
    theirs = sides.theirs(loss_type="grpo", entropy_coef=ENTROPY)
    ours = sides.ours(entropy_coef=ENTROPY, **CLIP, **SEQUENCE)
    means = [sides.mean(kind, sides.entropies) for kind in ("sequence", "token")]
    assert abs(means[0] - means[1]) > 1e-3
    assert ours[0] - theirs[0] == pytest.approx(-ENTROPY * (means[0] - means[1]), abs=1e-5)


def test_importance_weights_of_trl_leave_its_kl_alone(sides):
    """Ours multiply the KL too: a token whose weight is 0 does not train. Without KL both agree."""
    config = LossConfig(importance="truncate", importance_cap=2.0)
    weights, was_cut = importance_weights(sides.flat(ENGINE_GAPS), torch.zeros(0), 0, config)
    assert was_cut.any()
    plain = CLIP | TOKEN | {"importance": "truncate", "importance_cap": 2.0}
    dapo = {"loss_type": "dapo", "importance_sampling_ratio": weights}
    assert_equal(sides.ours(**plain), sides.theirs(**dapo))
    ours = sides.ours(**plain, **WITH_KL)
    theirs = sides.theirs(**dapo, beta=BETA, use_bias_correction_kl=True)
    of_token = (weights - 1) * sides.flat(LOG_RATIOS).exp() * sides.k3()
    expected = BETA * sides.mean("token", of_token)
    assert abs(expected) > 1e-3
    assert ours[0] - theirs[0] == pytest.approx(expected, abs=1e-5)
