"""TRL's own trainers on the same tiny model and rows: equal losses and gradients, or a difference
that is stated and pinned. No formula of TRL is repeated here."""

from typing import get_args

import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.losses import (
    DistillationLossConfig,
    PreferenceKind,
    PreferenceLossConfig,
    RewardModelLossConfig,
    TeacherTail,
)
from nemo_like.losses.cross_entropy import CrossEntropyLoss
from nemo_like.losses.distillation import DistillationLoss
from nemo_like.losses.preference import PreferenceLoss, RewardModelLoss
from nemo_like.losses.protocol import Denominators

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

PROMPTS = [[40, 41], [50], [60, 61, 62]]
CHOSEN = [[70, 71, 72], [80, 81, 82, 83], [90, 91]]
REJECTED = [[75], [85, 86, 87, 88, 89], [95, 96]]
SAME_LENGTH = [[70, 71, 72], [80, 81, 82], [90, 91, 92]]
BETA = 0.3


@pytest.fixture(autouse=True, scope="module")
def quiet_datasets():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def settings(folder, **changes):
    """What keeps a trainer of TRL from anything but its loss."""
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "gradient_checkpointing": False,
        **changes,
    }


def causal_model(path, seed=None):
    """The model at ``path``; a ``seed`` moves it away, so that there is something to compare."""
    model = AutoModelForCausalLM.from_pretrained(path)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


def rows_of(prompts, completions):
    """Flat ids, and a mask that is True at completions; no padding."""
    rows = [p + c for p, c in zip(prompts, completions, strict=True)]
    mask = [i >= len(p) for p, r in zip(prompts, rows, strict=True) for i in range(len(r))]
    return TensorBatch(
        lengths=torch.tensor([len(row) for row in rows]),
        tokens={
            keys.INPUT_IDS: torch.tensor([token for row in rows for token in row]),
            keys.LOSS_MASK: torch.tensor(mask),
        },
        rows={keys.SAMPLE_MASK: torch.ones(len(rows), dtype=torch.bool)},
    )


def pairs_of(prompts, chosen, rejected):
    twice = [p for p in prompts for _ in range(2)]
    return rows_of(twice, [row for pair in zip(chosen, rejected, strict=True) for row in pair])


def by_row(batch, per_row):
    """``per_row(ids [1, T]) -> [T]`` of each row alone, end to end [N]."""
    rows = batch.tokens[keys.INPUT_IDS].split(batch.lengths.tolist())
    return torch.cat([per_row(row[None]) for row in rows])


def logprobs_of(model, batch):
    def per_row(ids):
        logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        picked = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        return torch.cat([picked.new_zeros(1), picked])

    return by_row(batch, per_row)


def denominators_of(batch):
    tokens = float(batch.tokens[keys.LOSS_MASK].sum())
    return Denominators(tokens=tokens, sequences=float(len(batch)))


def gradients_of(loss, model):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(ours, theirs):
    """Loss, and the gradient of every parameter."""
    (loss, gradients), (their_loss, their_gradients) = ours, theirs
    assert loss == pytest.approx(their_loss, abs=1e-5)
    assert gradients.keys() == their_gradients.keys()
    assert max(gradient.abs().max() for gradient in gradients.values()) > 1e-3
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, their_gradients[name], rtol=1e-4, atol=1e-5), name


class Pairs:
    """Both sides on one batch of pairs."""

    def __init__(self, path, folder, prompts=PROMPTS, chosen=CHOSEN, rejected=REJECTED):
        self.path, self.folder = path, folder
        self.rows = {"prompt_ids": prompts, "chosen_ids": chosen, "rejected_ids": rejected}
        self.batch = pairs_of(prompts, chosen, rejected)
        with torch.no_grad():
            reference = logprobs_of(causal_model(path, seed=1), self.batch)
        self.batch.tokens[keys.REFERENCE_LOGPROBS] = reference

    def ours(self, **config):
        model = causal_model(self.path)
        loss_of = PreferenceLoss(PreferenceLossConfig(beta=BETA, **config))
        loss, metrics = loss_of(
            logprobs_of(model, self.batch), self.batch, denominators_of(self.batch)
        )
        self.metrics = {name: metric.value for name, metric in metrics.items()}
        return loss.item(), gradients_of(loss, model)

    def theirs(self, loss_type, **config):
        config = trl.DPOConfig(**settings(self.folder, beta=BETA, loss_type=loss_type, **config))
        trainer = trl.DPOTrainer(
            model=causal_model(self.path),
            ref_model=causal_model(self.path, seed=1),
            args=config,
            # Only to be constructed; the loss is asked about the rows above.
            train_dataset=datasets.Dataset.from_list(
                [{"prompt": "a", "chosen": "b", "rejected": "c"}]
            ),
            processing_class=AutoTokenizer.from_pretrained(self.path),
        )
        columns = zip(*self.rows.values(), strict=True)
        inputs = trainer.data_collator([dict(zip(self.rows, row, strict=True)) for row in columns])
        loss = trainer.compute_loss(trainer.model.train(), inputs)
        self.their_metrics = {name: v[-1] for name, v in trainer._metrics["train"].items()}
        return loss.item(), gradients_of(loss, trainer.model)


@pytest.fixture
def pairs(tiny_model, tmp_path):
    return lambda **rows: Pairs(tiny_model(), tmp_path, **rows)


SIGMOID, IPO, HINGE, ROBUST = get_args(PreferenceKind)


@pytest.mark.parametrize(
    ("loss_type", "their_config", "our_config"),
    [
        ("sigmoid", {}, {}),
        ("hinge", {}, {"kind": HINGE}),
        ("ipo", {}, {"kind": IPO, "length_normalized": True}),
        ("sigmoid_norm", {}, {"length_normalized": True}),
        ("robust", {"label_smoothing": 0.2}, {"label_smoothing": 0.2, "kind": ROBUST}),
    ],
)
def test_dpo_is_that_of_trl(pairs, loss_type, their_config, our_config):
    both = pairs()
    assert_equal(both.ours(**our_config), both.theirs([loss_type], **their_config))


def test_the_sft_term_is_that_of_trl_where_chosen_completions_have_one_length(pairs):
    both = pairs(chosen=SAME_LENGTH)
    theirs = both.theirs(["sigmoid", "sft"], loss_weights=[1.0, 0.7])
    assert_equal(both.ours(sft_coef=0.7), theirs)


def test_label_smoothing_is_that_of_trl_where_trl_has_it(pairs):
    # Of one pair, which leaves nothing to sort, "aot" is the smoothed sigmoid loss.
    both = pairs(prompts=PROMPTS[:1], chosen=CHOSEN[:1], rejected=REJECTED[:1])
    theirs = both.theirs(["aot"], label_smoothing=0.2)
    assert_equal(both.ours(label_smoothing=0.2), theirs)


def test_metrics_of_dpo_are_those_of_trl(pairs):
    both = pairs()
    both.ours()
    both.theirs(["sigmoid"])
    names = {
        "train/accuracy": "rewards/accuracies",
        "train/reward_margin": "rewards/margins",
        "train/chosen_reward": "rewards/chosen",
        "train/rejected_reward": "rewards/rejected",
        "train/chosen_logprob": "logps/chosen",
        "train/rejected_logprob": "logps/rejected",
    }
    theirs = {ours: both.their_metrics[name] for ours, name in names.items()}
    assert {name: both.metrics[name] for name in names} == pytest.approx(theirs, abs=1e-4)


def test_simpo_is_that_of_trl(tiny_model, tmp_path):
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    config = {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 0.5}
    trainer = CPOTrainer(
        model=causal_model(tiny_model()),
        args=CPOConfig(**settings(tmp_path, max_length=64, **config)),
        train_dataset=datasets.Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}]),
        processing_class=AutoTokenizer.from_pretrained(tiny_model()),
    )
    batch = pairs_of(PROMPTS, CHOSEN, REJECTED)
    with torch.no_grad():
        logprobs = logprobs_of(causal_model(tiny_model()), batch)
    logprobs.requires_grad_()
    means = torch.stack(
        [
            logprobs[batch.row_of_token.eq(row) & batch.tokens[keys.LOSS_MASK]].mean()
            for row in range(len(batch))
        ]
    )
    theirs = trainer.cpo_loss(means[0::2], means[1::2])[0].mean()
    simpo = PreferenceLossConfig(
        reference_free=True, length_normalized=True, beta=2.0, target_margin=0.5
    )
    ours, _ = PreferenceLoss(simpo)(logprobs, batch, denominators_of(batch))
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)
    (gradient,) = torch.autograd.grad(ours, logprobs)
    (their_gradient,) = torch.autograd.grad(theirs, logprobs)
    assert torch.allclose(gradient, their_gradient, atol=1e-6)
    # Where it differs on purpose: the target of a pair that is labelled the wrong way round.
    trainer.label_smoothing = 0.2
    theirs = trainer.cpo_loss(means[0::2], means[1::2])[0].mean()
    ours, _ = PreferenceLoss(simpo.replace(label_smoothing=0.2))(
        logprobs, batch, denominators_of(batch)
    )
    z = 2 * (means[0::2] - means[1::2])
    by_hand = -0.8 * logsigmoid(z - 0.5) - 0.2 * logsigmoid(-z - 0.5)
    assert ours.item() == pytest.approx(by_hand.mean().item(), abs=1e-6)
    assert ours.item() > theirs.item() + 0.01


# Where DPO differs from TRL's, on purpose.


def test_difference_trl_ignores_label_smoothing_in_its_sigmoid_loss(pairs):
    both = pairs()
    theirs, _ = both.theirs(["sigmoid"], label_smoothing=0.2)
    assert both.ours()[0] == pytest.approx(theirs, abs=1e-5)
    assert both.ours(label_smoothing=0.2)[0] != pytest.approx(theirs, abs=1e-3)


def test_difference_ipo_has_the_sums_of_its_paper_unless_told_otherwise(pairs):
    both = pairs()
    theirs, _ = both.theirs(["ipo"])
    assert both.ours(kind=IPO)[0] != pytest.approx(theirs, abs=1e-2)
    one_token = pairs(chosen=[[70], [80], [90]], rejected=[[75], [85], [95]])
    assert_equal(one_token.ours(kind=IPO), one_token.theirs(["ipo"]))


def test_difference_the_sft_term_is_a_mean_over_pairs_and_in_trl_over_tokens(pairs):
    both = pairs()
    ours = both.ours(sft_coef=1.0)[0] - both.ours()[0]
    theirs = both.theirs(["sft"])[0]
    with torch.no_grad():
        logprobs = logprobs_of(causal_model(both.path), rows_of(PROMPTS, CHOSEN))
    rows = logprobs.split([len(p) + len(c) for p, c in zip(PROMPTS, CHOSEN, strict=True)])
    nll = [-row[len(p) :] for row, p in zip(rows, PROMPTS, strict=True)]
    assert ours == pytest.approx(sum(one.mean().item() for one in nll) / 3, abs=1e-5)
    assert theirs == pytest.approx(torch.cat(nll).mean().item(), abs=1e-5)
    assert ours != pytest.approx(theirs, abs=1e-3)


# Reward model.


@pytest.mark.parametrize("center", [0.0, 0.5], ids=["plain", "center"])
def test_the_reward_model_loss_is_that_of_trl(tiny_model, tmp_path, center):
    def make():
        torch.manual_seed(5)  # of the head
        return AutoModelForSequenceClassification.from_pretrained(tiny_model(), num_labels=1)

    batch = pairs_of(PROMPTS, CHOSEN, REJECTED)
    ids = batch.tokens[keys.INPUT_IDS].split(batch.lengths.tolist())
    rows = [
        {"chosen_ids": chosen.tolist(), "rejected_ids": rejected.tolist()}
        for chosen, rejected in zip(ids[0::2], ids[1::2], strict=True)
    ]
    trainer = trl.RewardTrainer(
        model=make(),
        args=trl.RewardConfig(**settings(tmp_path, center_rewards_coefficient=center or None)),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(tiny_model()),
    )
    their_loss = trainer.compute_loss(trainer.model.train(), trainer.data_collator(rows))
    theirs = their_loss.item(), gradients_of(their_loss, trainer.model)

    model = make()
    values = by_row(
        batch, lambda ids: model.score(model.model(input_ids=ids).last_hidden_state)[0, :, 0]
    )
    loss_of = RewardModelLoss(RewardModelLossConfig(center_coef=center))
    loss, metrics = loss_of(values, batch, denominators_of(batch))
    assert_equal((loss.item(), gradients_of(loss, model)), theirs)
    their_metrics = trainer._metrics["train"]
    assert metrics["train/accuracy"].value == pytest.approx(their_metrics["accuracy"][0])
    assert metrics["train/reward_margin"].value == pytest.approx(
        their_metrics["margin"][0], abs=1e-5
    )


# Supervised fine-tuning.


def sft_trainer(path, folder):
    rows = [
        {
            "input_ids": prompt + completion,
            "completion_mask": [0] * len(prompt) + [1] * len(completion),
        }
        for prompt, completion in zip(PROMPTS, CHOSEN, strict=True)
    ]
    return trl.SFTTrainer(
        model=causal_model(path),
        args=trl.SFTConfig(**settings(folder, completion_only_loss=True)),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(path),
    )


def our_sft(path):
    batch, model = rows_of(PROMPTS, CHOSEN), causal_model(path)
    loss, _ = CrossEntropyLoss()(logprobs_of(model, batch), batch, denominators_of(batch))
    return loss.item(), gradients_of(loss, model)


def test_the_loss_of_sft_is_that_of_trl(tiny_model, tmp_path):
    trainer = sft_trainer(tiny_model(), tmp_path)
    loss = trainer.compute_loss(
        trainer.model.train(), trainer.data_collator(list(trainer.train_dataset))
    )
    assert_equal(our_sft(tiny_model()), (loss.item(), gradients_of(loss, trainer.model)))


def test_micro_batches_of_trl_add_up_to_our_global_mean_if_it_is_told_the_tokens(
    tiny_model, tmp_path
):
    trainer = sft_trainer(tiny_model(), tmp_path)
    parts = [trainer.data_collator([row]) for row in trainer.train_dataset]
    tokens = torch.tensor(sum(len(row) for row in CHOSEN))
    loss = sum(
        trainer.compute_loss(trainer.model.train(), part, num_items_in_batch=tokens)
        for part in parts
    )
    assert_equal(our_sft(tiny_model()), (loss.item(), gradients_of(loss, trainer.model)))


# Distillation.


@pytest.mark.parametrize("tail", get_args(TeacherTail))
@pytest.mark.parametrize(
    ("kind", "alpha"),
    [
        ("forward_kl", 0.0),
        ("reverse_kl", 1.0),
        ("jsd", 0.5),
        ("jsd", 0.1),
    ],
)
def test_divergences_over_the_whole_vocabulary_are_those_of_trl(kind, alpha, tail):
    """TRL's ``beta`` is our alpha; at 0 and 1, where the formula of its paper is 0, TRL has KLs."""
    from trl.experimental.gkd import GKDTrainer

    torch.manual_seed(0)
    teacher, student = 3 * torch.randn(2, 6, 11), 3 * torch.randn(2, 6, 11)
    student.requires_grad_()
    labels = torch.tensor([[-100, 1, 1, 1, 1, -100], [-100, -100, 1, -100, 1, 1]])
    theirs = GKDTrainer.generalized_jsd_loss(
        student, teacher, labels=labels, beta=alpha, temperature=0.7
    )
    batch = TensorBatch(
        lengths=torch.tensor([6, 6]),
        tokens={
            keys.LOSS_MASK: labels.flatten() != -100,
            keys.TEACHER_LOGPROBS: (teacher / 0.7).log_softmax(-1).flatten(0, 1),
        },
        rows={keys.SAMPLE_MASK: torch.ones(2, dtype=torch.bool)},
    )
    mixture = {"alpha": alpha} if kind == "jsd" else {}
    config = DistillationLossConfig(kind=kind, tail=tail, **mixture)
    ours, _ = DistillationLoss(config)(
        (student / 0.7).log_softmax(-1).flatten(0, 1), batch, denominators_of(batch)
    )
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-5)
    (gradient,) = torch.autograd.grad(ours, student)
    (their_gradient,) = torch.autograd.grad(theirs, student)
    assert torch.allclose(gradient, their_gradient, atol=1e-6)
