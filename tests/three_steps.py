"""Three optimizer steps of the training engine on fixed rows: what a layout must not change."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from nemo_like.batch import keys
from nemo_like.batch.micro_batches import plan_micro_batches
from nemo_like.batch.tensor_batch import TensorBatch, prompt_columns
from nemo_like.config.losses import LossConfig, PreferenceLossConfig
from nemo_like.config.optimizer import OptimizerConfig
from nemo_like.config.policy import PolicyConfig
from nemo_like.distributed.remote_batch import prompts_of
from nemo_like.losses.cross_entropy import CrossEntropyLoss
from nemo_like.losses.policy_gradient import ClippedPGLoss
from nemo_like.losses.preference import PreferenceLoss
from nemo_like.losses.protocol import Denominators
from nemo_like.observe.metrics import values
from nemo_like.planning.layout import bins_for_pipeline
from nemo_like.policy import scoring
from nemo_like.policy.state.state import model_tensors
from nemo_like.policy.trainer import Trainer
from nemo_like.policy.trainer_setup import TrainerSetup

TEMPERATURE = 0.7
# Unequal on purpose: any mean of means shows. Two rows make a preference pair. Neighbours with
# equally long prompts have the same one.
LENGTHS = [9, 30, 4, 17, 23, 6, 12, 15]
PROMPTS = [3, 3, 3, 3, 5, 5, 11, 11]
TRAINS = [True, True, True, False, True, True, True, True]
ADVANTAGES = [1.0, -0.5, 2.0, 0.3, -1.0, 0.7, 1.5, -0.8]
NUM_STEPS = 3
VOCAB = 256


@dataclass(frozen=True)
class Outcome:
    """What is compared; empty on ranks without output."""

    numbers: dict[str, list[float]]
    logprobs: dict[int, torch.Tensor]
    """Row -> its logprobs before the first step."""
    parameters: dict[str, torch.Tensor]


def make_rows(preference: bool) -> TensorBatch:
    generator = torch.Generator().manual_seed(3)
    n = sum(LENGTHS)
    mask = torch.cat(
        [torch.arange(length) >= prompt for length, prompt in zip(LENGTHS, PROMPTS, strict=True)]
    )
    ids = torch.randint(3, VOCAB, (n,), generator=generator)
    starts = (torch.tensor(LENGTHS).cumsum(0) - torch.tensor(LENGTHS)).tolist()
    for i in range(1, len(PROMPTS)):
        if PROMPTS[i] == PROMPTS[i - 1]:
            ids[starts[i] :][: PROMPTS[i]] = ids[starts[i - 1] :][: PROMPTS[i]]
    trains = [True] * len(LENGTHS) if preference else TRAINS
    batch = TensorBatch(
        lengths=torch.tensor(LENGTHS),
        tokens={
            keys.INPUT_IDS: ids,
            keys.LOSS_MASK: mask,
            keys.GENERATION_LOGPROBS: -5.5 + 0.5 * torch.randn(n, generator=generator),
        },
        rows={
            keys.ADVANTAGES: torch.tensor(ADVANTAGES),
            keys.SAMPLE_MASK: torch.tensor(trains),
            keys.NUM_LOSS_TOKENS: torch.tensor(LENGTHS) - torch.tensor(PROMPTS),
        },
    )
    batch.rows |= prompt_columns(batch)
    return batch


def make_loss(kind: str) -> Any:
    return {
        "policy_gradient": lambda: ClippedPGLoss(LossConfig(kl_coef=0.1)),
        "sft": CrossEntropyLoss,
        "preference": lambda: PreferenceLoss(PreferenceLossConfig(beta=0.1)),
    }[kind]()


def three_steps(
    model_path: str, config: dict[str, Any], loss_kind: str, device: str = "cpu"
) -> Outcome:
    """Train this rank's share for three steps; collective."""
    torch.manual_seed(0)
    # Adam divides noise by noise where a gradient is rounding only; this eps is above that.
    optimizer = OptimizerConfig(lr=3e-4, eps=1e-6)
    config = {"optimizer": optimizer, "max_grad_norm": 0.5} | config
    policy = PolicyConfig(**config)
    trainer = Trainer(
        TrainerSetup(config=policy, model_path=model_path, max_steps=10, with_reference=True),
        torch.device(device),
    )
    batch = make_rows(loss_kind == "preference")
    loss = make_loss(loss_kind)
    numbers: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    first: dict[int, torch.Tensor] = {}
    for step in range(NUM_STEPS):
        plan = plan_micro_batches(
            LENGTHS,
            num_ranks=trainer.mesh.sizes.dp,
            max_tokens=policy.micro_batch_tokens,
            max_rows=policy.micro_batch_size,
            padded=policy.batching == "padded",
            rows_per_unit=2 if loss_kind == "preference" else 1,
            prompts=prompts_of(batch) if policy.batching == "shared" else None,
            **bins_for_pipeline(trainer.mesh.parallel),
        )
        bins = plan.bins[trainer.mesh.coordinate("dp")]
        shares = [batch.select(one).to(device) if one else None for one in bins]
        with_logprobs(shares, bins, trainer, first if step == 0 else {})
        metrics = values(trainer.train(shares, loss, denominators(batch), TEMPERATURE))
        numbers["loss"].append(total_loss(metrics.get("train/loss", 0.0), trainer))
        numbers["grad_norm"].append(metrics["train/grad_norm"])
    parameters = {name: each.cpu().clone() for name, each in model_tensors(trainer, torch.float32)}
    return Outcome(numbers=numbers, logprobs=first, parameters=parameters)


def denominators(batch: TensorBatch) -> Denominators:
    trained = batch.rows[keys.SAMPLE_MASK]
    return Denominators(
        tokens=float(batch.rows[keys.NUM_LOSS_TOKENS][trained].sum()),
        sequences=float(trained.sum()),
    )


def with_logprobs(
    shares: list[TensorBatch | None],
    bins: tuple[tuple[int, ...], ...],
    trainer: Trainer,
    kept: dict[int, torch.Tensor],
) -> None:
    """Add the columns that a rollout's training starts with; the driver would bring them round."""
    columns = scoring.logprobs(trainer, shares, TEMPERATURE)
    source = [columns["policy"], columns["reference"]]
    pp = trainer.mesh.group("pp")
    if pp is not None:
        holder: list[Any] = [source]
        last = dist.get_global_rank(pp, dist.get_world_size(pp) - 1)
        dist.broadcast_object_list(holder, last, group=pp)
        source = holder[0]
    real = [(share, rows) for share, rows in zip(shares, bins, strict=True) if share is not None]
    for (share, rows), policy, reference in zip(real, *source, strict=True):
        share.tokens[keys.POLICY_LOGPROBS] = policy
        share.tokens[keys.REFERENCE_LOGPROBS] = reference
        for row, of_row in zip(rows, policy.split(share.lengths.tolist()), strict=True):
            kept[row] = of_row.cpu()


def total_loss(mine: float, trainer: Trainer) -> float:
    """The driver adds what each data-parallel rank's last stage reports."""
    mesh = trainer.mesh
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine if mesh.is_output_rank else 0.0)
    return sum(everyone)


def merged(parts: list[Outcome]) -> Outcome:
    """The whole from all ranks: rows from whoever has them, the rest from the last rank."""
    logprobs = {row: each for part in parts for row, each in part.logprobs.items()}
    return Outcome(numbers=parts[-1].numbers, logprobs=logprobs, parameters=parts[-1].parameters)
