"""What processes do in test_distillation.py: steps of a student beside its teacher, without Ray."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from nemo_like.batch import keys
from nemo_like.batch.micro_batches import plan_micro_batches
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.losses import DistillationLossConfig
from nemo_like.config.optimizer import OptimizerConfig
from nemo_like.config.policy import PolicyConfig
from nemo_like.losses.distillation import DistillationLoss
from nemo_like.observe.metrics import values
from nemo_like.policy.scoring import evaluate, top_logprobs
from nemo_like.policy.trainer import Trainer
from nemo_like.policy.trainer_setup import TrainerSetup
from tests.three_steps import (
    LENGTHS,
    TEMPERATURE,
    VOCAB,
    denominators,
    make_rows,
    total_loss,
)

CASES = __name__
CPU = torch.device("cpu")


def make_trainer(path: str, config: dict[str, Any], trains: bool) -> Trainer:
    # Adam divides noise by noise where a gradient is rounding only; this eps is above that.
    policy = PolicyConfig(**{"optimizer": OptimizerConfig(lr=3e-4, eps=1e-6)} | config)
    return Trainer(TrainerSetup(config=policy, model_path=path, max_steps=10, trains=trains), CPU)


def two_steps(
    student: str,
    teacher: str,
    config: dict[str, Any],
    loss: DistillationLossConfig,
    k: int,
    ends: tuple[int | None, int | None] = (None, None),
) -> tuple[list[dict[str, float]], bool]:
    """Of each step the loss, its value by ``evaluate`` and the gradient's norm.

    Second: whether the teacher has nothing to train with. ``ends``: where common ids end, if the
    student or the teacher has more.
    """
    trainer, frozen = make_trainer(student, config, True), make_trainer(teacher, config, False)
    batch, loss_of = make_rows(preference=False), DistillationLoss(loss, ends[0])
    plan = plan_micro_batches(
        LENGTHS,
        num_ranks=trainer.mesh.sizes.dp,
        max_tokens=trainer.config.micro_batch_tokens,
        max_rows=trainer.config.micro_batch_size,
        padded=trainer.config.batching == "padded",
    )
    bins = plan.bins[trainer.mesh.coordinate("dp")]
    shares = [batch.select(one) if one else None for one in bins]
    answer(frozen, shares, k, ends[1])
    whole, steps = denominators(batch), []
    for _ in range(2):
        asked = values(evaluate(trainer, shares, loss_of, whole, TEMPERATURE))
        metrics = values(trainer.train(shares, loss_of, whole, TEMPERATURE))
        steps.append(
            {
                "loss": total_loss(metrics.get("train/loss", 0.0), trainer),
                "evaluated": total_loss(asked.get("train/loss", 0.0), trainer),
                "grad_norm": metrics["train/grad_norm"],
            }
        )
    parameters = frozen.parameters.values()
    return steps, not frozen.optimizers and all(one.grad is None for one in parameters)


def answer(
    frozen: Trainer, shares: list[TensorBatch | None], k: int, end: int | None = None
) -> None:
    """Add the teacher's columns to each share."""
    real = [each for each in shares if each is not None]
    for share, (ids, logprobs) in zip(
        real, top_logprobs(frozen, shares, TEMPERATURE, k, end), strict=True
    ):
        share.tokens[keys.TEACHER_IDS] = ids
        share.tokens[keys.TEACHER_LOGPROBS] = logprobs


def loss_of_full_logits(student: str, teacher: str) -> float:
    """torch's forward KL over the whole vocabulary, of transformers' own logits in float64."""
    models = [AutoModelForCausalLM.from_pretrained(path).double() for path in (student, teacher)]
    batch = make_rows(preference=False)
    total = 0.0
    for row in range(len(batch)):
        one = batch.select([row])
        if not one.rows[keys.SAMPLE_MASK][0]:
            continue
        ids, mask = one.tokens[keys.INPUT_IDS], one.tokens[keys.LOSS_MASK]
        with torch.no_grad():
            ours, theirs = (
                (model(ids[None]).logits[0, :-1][mask[1:]] / TEMPERATURE).log_softmax(-1)
                for model in models
            )
        assert ours.shape[1] == VOCAB
        total += torch.nn.functional.kl_div(ours, theirs, reduction="sum", log_target=True).item()
    return total / denominators(batch).tokens
