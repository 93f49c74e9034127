"""Training on groups as they finish: the step, and what it is refused with."""

import random

import pytest
import torch

from nemo_like.algorithms.grpo.config import GRPOConfig
from nemo_like.algorithms.ppo.config import PPOConfig
from nemo_like.batch import keys
from nemo_like.config.losses import LossConfig
from nemo_like.config.optimizer import OptimizerConfig
from nemo_like.config.policy import PolicyConfig
from nemo_like.errors import UserError
from nemo_like.losses.policy_gradient import ClippedPGLoss
from nemo_like.losses.protocol import Denominators
from nemo_like.models.resolve import resolve_model
from nemo_like.observe.metrics import values
from nemo_like.policy.state.state import model_tensors
from nemo_like.policy.trainer import Trainer
from nemo_like.policy.trainer_setup import TrainerSetup
from tests.key_steps import alone
from tests.small_runs import accept
from tests.three_steps import denominators, make_rows

CPU = torch.device("cpu")
MOST = 64.0
"""Divides early gradients, in place of denominators that are not known yet."""


@pytest.fixture(scope="module", autouse=True)
def process_group():
    with alone():
        yield


def outcome(loss, order, dtype="float32", most=MOST):
    """Numbers of three steps and the parameters; ``order``: the parts of each, None: at once."""
    torch.manual_seed(0)
    config = PolicyConfig(
        optimizer=OptimizerConfig(lr=3e-4, eps=1e-6), max_grad_norm=0.05, micro_batch_tokens=64
    ).replace(dtype=dtype)
    setup = TrainerSetup(config=config, model_path=str(resolve_model("embedded")), max_steps=10)
    trainer, rows, numbers = Trainer(setup, CPU), make_rows(preference=False), []
    rows.tokens.pop(keys.POLICY_LOGPROBS, None)
    whole = denominators(rows)
    for step in range(3):
        if order is None:
            metrics = trainer.train([rows], loss, whole, 1.0, on_policy=True)
        else:
            for part in order(step, len(rows)):
                instead = Denominators(tokens=most, sequences=most)
                trainer.add([rows.select(part)], loss, instead, 1.0, on_policy=True)
            by_token = loss.config.normalization == "token"
            count = whole.tokens if by_token else whole.sequences
            metrics = trainer.finish(None, count / most)
        found = values(metrics)
        numbers.append([found[name] for name in sorted(found)])
    return torch.tensor(numbers), dict(model_tensors(trainer, torch.float32))


def one_by_one(step, count):
    return [[row] for row in random.Random(step).sample(range(count), count)]


def unequal_parts(step, count):
    return [list(range(3 - step, count)), list(range(3 - step))]


@pytest.mark.parametrize(
    "loss",
    [
        LossConfig(normalization="token", entropy_coef=0.01),
        LossConfig(normalization="sequence", importance="mask"),
        LossConfig(normalization="constant", constant_tokens=7),
    ],
    ids=["token", "sequence", "constant"],
)
def test_a_step_in_parts_is_the_plain_step(loss):
    """With rollout.overlap: loss, gradient norm, all metrics and parameters, in any order."""
    expected, parameters = outcome(ClippedPGLoss(loss), None)
    for order in (one_by_one, unequal_parts):
        numbers, changed = outcome(ClippedPGLoss(loss), order)
        torch.testing.assert_close(numbers, expected, rtol=1e-5, atol=1e-5)
        for name, tensor in parameters.items():
            assert (tensor - changed[name]).abs().max() < 1e-5, name


def test_parts_fit_into_float16_where_their_sum_does_not():
    """The first step: the second one overflows by itself."""
    loss = ClippedPGLoss(LossConfig())
    (expected, *_), (found, *_), (sums, *_) = (
        outcome(loss, order, "float16", most)[0]
        for order, most in ((None, 1.0), (one_by_one, 512.0), (one_by_one, 2.0**-10))
    )  # the last: what a sum over 1,024 times these tokens would be
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-5)
    assert expected.isfinite().all()
    assert not sums.isfinite().all()


@pytest.mark.parametrize(
    ("schema", "changes", "reason"),
    [
        (PPOConfig, {}, "whitens"),
        (GRPOConfig, {"rollout": {"overlap": True, "max_lag": 1}}, "overlap anyway"),
        (GRPOConfig, {"grpo": {"num_mini_batches": 2}}, "logprobs of all first"),
        (GRPOConfig, {"mismatch": {"action": "mask"}}, "logprobs of all first"),
        (GRPOConfig, {"advantage": {"scale": "batch"}}, "look at all of them"),
        (GRPOConfig, {"grpo": {"dynamic_sampling": True}}, "chooses among all"),
        (
            GRPOConfig,
            {
                "policy": {"parallel": {"data_parallel": "ddp", "ddp": {"compression": "fp16"}}},
                "cluster": {"cpu_workers_per_node": 2},
            },
            "once more with each",
        ),
    ],
)
def test_what_needs_the_whole_batch_is_refused_with_the_reason(schema, changes, reason):
    with pytest.raises(UserError, match=reason):
        accept(schema, **({"rollout": {"overlap": True}} | changes))
    accept(GRPOConfig, rollout={"overlap": True})
