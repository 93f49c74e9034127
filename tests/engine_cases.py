"""What processes do in test_training_engine.py and test_training_state.py: short trainings with one
option each. Also what both files say of them.
"""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_like.batch import keys
from nemo_like.batch.micro_batches import plan_micro_batches
from nemo_like.config.optimizer import OptimizerConfig, Schedule, SchedulerConfig
from nemo_like.config.policy import DDPConfig, ParallelConfig, PolicyConfig
from nemo_like.errors import RunError, UserError
from nemo_like.observe.metrics import values
from nemo_like.planning.layout import bins_for_pipeline
from nemo_like.policy import scoring
from nemo_like.policy.gradients import LossScale
from nemo_like.policy.inputs import made_up_rows
from nemo_like.policy.parallel.full_tensors import local_part
from nemo_like.policy.state.state import (
    load_checkpoint,
    load_weights,
    model_tensors,
    refit_tensors,
    save_checkpoint,
)
from nemo_like.policy.trainer import Trainer
from nemo_like.policy.trainer_setup import TrainerSetup
from nemo_like.policy.warm_up import warm_up
from tests.three_steps import LENGTHS, TEMPERATURE, denominators, make_loss, make_rows

CASES = __name__
TOLERANCE = 1e-5
DEFAULTS: dict[str, Any] = {
    "optimizer": OptimizerConfig(lr=3e-4, eps=1e-6),
    "micro_batch_tokens": 64,
}


def ddp(**changes: Any) -> dict[str, Any]:
    """Whole replicas, and several micro-batches a step."""
    return {
        "parallel": ParallelConfig(data_parallel="ddp", ddp=DDPConfig(**changes)),
        "micro_batch_tokens": 40,
    }


def schedule(kind: Schedule) -> dict[str, Any]:
    return {"scheduler": SchedulerConfig(kind=kind, warmup_steps=1)}


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def make_trainer(model_path: str, config: dict[str, Any]) -> Trainer:
    """With the first ``loss_scale``, if there is one."""
    config = dict(config)
    first_scale = config.pop("loss_scale", None)
    setup = TrainerSetup(
        config=PolicyConfig().replace(**(DEFAULTS | config)),
        model_path=model_path,
        max_steps=10,
        with_reference=False,
    )
    trainer = Trainer(setup, torch.device("cpu"))
    if first_scale:
        trainer.loss_scale = LossScale(first_scale)
    return trainer


def step(trainer: Trainer, advantage: float = 0.0) -> dict[str, float]:
    """One SFT step on this rank's share (policy gradient with ``advantage`` for all, if given)."""
    rows = make_rows(preference=False)
    for name in (keys.POLICY_LOGPROBS, keys.REFERENCE_LOGPROBS):
        rows.tokens[name] = rows.tokens[keys.GENERATION_LOGPROBS]
    rows.rows[keys.ADVANTAGES] = torch.full((len(LENGTHS),), advantage)
    plan = plan_micro_batches(
        LENGTHS,
        num_ranks=trainer.mesh.sizes.dp,
        max_tokens=trainer.config.micro_batch_tokens,
        **bins_for_pipeline(trainer.mesh.parallel),
    )
    bins = plan.bins[trainer.mesh.coordinate("dp")]
    shares = [rows.select(one) if one else None for one in bins]
    scoring.logprobs(trainer, shares, TEMPERATURE)  # as between two steps of a run
    loss = make_loss("policy_gradient" if advantage else "sft")
    metrics = values(trainer.train(shares, loss, denominators(rows), TEMPERATURE))
    everyone: list[Any] = [None] * dist.get_world_size()
    mine = metrics.get("train/loss", 0.0) if trainer.mesh.is_output_rank else 0.0
    dist.all_gather_object(everyone, mine)
    return metrics | {"loss": sum(everyone)}


def parameters(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: each.clone() for name, each in model_tensors(trainer, torch.float32)}


def train(model_path: str, config: dict[str, Any], num_steps: int) -> Any:
    """Metrics of each step, final parameters."""
    trainer = make_trainer(model_path, config)
    return [step(trainer) for _ in range(num_steps)], parameters(trainer)


def values_head(model_path: str) -> float:
    """The largest number of the head of a model that gives values."""
    setup = TrainerSetup(config=PolicyConfig(), model_path=model_path, max_steps=1, output="values")
    trainer = Trainer(setup, torch.device("cpu"))
    return parameters(trainer)["score.weight"].abs().max().item()


def train_warmed_up(model_path: str, config: dict[str, Any], num_steps: int) -> Any:
    """``train``, after a warm-up."""
    trainer = make_trainer(model_path, config)
    warm_up(trainer, TEMPERATURE)
    return [step(trainer) for _ in range(num_steps)], parameters(trainer)


def graphs_compiled(model_path: str, config: dict[str, Any]) -> tuple[int, list[int]]:
    """Graphs that a warm-up traced and did not compile, and new ones of each of three steps."""
    stats, compiled = (torch._dynamo.utils.counters[name] for name in ("stats", "aot_autograd"))
    trainer = make_trainer(model_path, config)
    warm_up(trainer, TEMPERATURE)
    counts = [stats["unique_graphs"]]
    traced = counts[0] - compiled["total"]
    loss = make_loss("policy_gradient")
    for lengths in ([9, 30, 4], [20] * 8, [25]):
        rows = made_up_rows(lengths)
        rows.tokens |= {
            name: torch.zeros(rows.num_tokens)
            for name in (keys.GENERATION_LOGPROBS, keys.REFERENCE_LOGPROBS)
        }
        rows.rows = {
            keys.ADVANTAGES: torch.ones(len(lengths)),
            keys.SAMPLE_MASK: torch.ones(len(lengths), dtype=torch.bool),
            keys.NUM_LOSS_TOKENS: torch.tensor(lengths) - 1,
        }
        trainer.train([rows], loss, denominators(rows), TEMPERATURE, on_policy=True)
        counts.append(stats["unique_graphs"])
    return traced, [after - before for before, after in pairwise(counts)]


def save_then_go_on(model_path: str, config: dict[str, Any], folder: str) -> Any:
    trainer = make_trainer(model_path, config)
    step(trainer)
    save_checkpoint(Path(folder), trainer)
    return step(trainer), parameters(trainer)


def save_then_begin(model_path: str, config: dict[str, Any], folder: str | None) -> Any:
    """A first step, after a checkpoint if there is a folder for it."""
    trainer = make_trainer(model_path, config)
    if folder is not None:
        save_checkpoint(Path(folder), trainer)
    return step(trainer), parameters(trainer)


def in_two_parts(model_path: str, config: dict[str, Any]) -> Any:
    """Gradient norm and final parameters of a step whose rows come in two calls."""
    trainer, rows = make_trainer(model_path, config), make_rows(preference=False)
    for part in ([0, 1, 2], [3, 4, 5, 6, 7]):
        bins = plan_micro_batches(
            [LENGTHS[row] for row in part],
            num_ranks=trainer.mesh.sizes.dp,
            max_tokens=trainer.config.micro_batch_tokens,
            **bins_for_pipeline(trainer.mesh.parallel),
        ).bins[trainer.mesh.coordinate("dp")]
        shares = [rows.select([part[i] for i in one]) if one else None for one in bins]
        trainer.add(shares, make_loss("sft"), denominators(rows), TEMPERATURE)
    return values(trainer.finish())["train/grad_norm"], parameters(trainer)


def validated(model_path: str, config: dict[str, Any]) -> tuple[float, float]:
    """The loss of all rows after one step, before and after weights leave the policy."""
    trainer, rows = make_trainer(model_path, config), make_rows(preference=False)
    step(trainer)
    found = []
    for _ in range(2):
        measured = scoring.evaluate(
            trainer, [rows], make_loss("sft"), denominators(rows), TEMPERATURE
        )
        found.append(values(measured)["train/loss"])
        parameters(trainer)
    return found[0], found[1]


def load_and_go_on(model_path: str, config: dict[str, Any], folder: str) -> Any:
    trainer = make_trainer(model_path, config)
    load_checkpoint(Path(folder), trainer)
    return step(trainer), parameters(trainer)


def saved_and_measured(model_path: str, config: dict[str, Any], folder: str) -> Any:
    """Parameters of a checkpoint as they were saved, and in a model that does not train."""
    trainer = make_trainer(model_path, config)
    step(trainer)
    save_checkpoint(Path(folder), trainer)
    measured = Trainer(replace(trainer.setup, trains=False), torch.device("cpu"))
    assert not measured.optimizers
    load_weights(Path(folder), measured)
    return parameters(trainer), parameters(measured)


def refusal(
    model_path: str,
    config: dict[str, Any],
    folder: str | None = None,
    weights_only: bool = False,
) -> str:
    """What loading a model, or then a checkpoint into it, is refused with."""
    try:
        trainer = make_trainer(model_path, config)
        if folder is not None:
            (load_weights if weights_only else load_checkpoint)(Path(folder), trainer)
    except UserError as error:
        return str(error)
    return ""


def replicas_by_step(model_path: str, config: dict[str, Any]) -> list[bool]:
    """After each of four steps: whether this rank's parameters are those of rank 0, bit for bit."""
    trainer = make_trainer(model_path, config)
    equal = []
    for _ in range(4):
        step(trainer)
        mine = torch.cat([each.detach().flatten() for each in trainer.parameters.values()])
        first = mine.clone()
        dist.broadcast(first, 0)
        equal.append(torch.equal(mine, first))
    return equal


def exported_by_rank(model_path: str, config: dict[str, Any]) -> tuple[Any, Any]:
    """Own parameters after one step, and those that leave the policy then."""
    trainer = make_trainer(model_path, config)
    step(trainer)
    own = {name: each.detach().clone() for name, each in trainer.parameters.items()}
    return own, parameters(trainer)


def refits_after_one_step(model_path: str, config: dict[str, Any]) -> Any:
    """What a first refit and one of adapters alone carry, in order."""
    trainer = make_trainer(model_path, config)
    step(trainer)
    return [
        {n: t.clone() for n, t in refit_tensors(trainer, torch.float32, adapters_only=alone)}
        for alone in (False, True)
    ]


def float16_overflow(model_path: str, config: dict[str, Any]) -> Any:
    """Metrics by step, whether the first changed parameters, and the learning rates used."""
    trainer = make_trainer(model_path, config)
    before = parameters(trainer)
    first = step(trainer)
    after = parameters(trainer)
    unchanged = all(torch.equal(before[name], after[name]) for name in before)
    rest = [step(trainer) for _ in range(20)]
    return [first, *rest], unchanged, trainer.num_steps


def not_finite(model_path: str, config: dict[str, Any]) -> tuple[str, bool]:
    """What a NaN advantage raises, and whether parameters stayed."""
    trainer = make_trainer(model_path, config)
    before = parameters(trainer)
    try:
        step(trainer, advantage=float("nan"))
    except RunError as error:
        message = str(error)
    else:
        message = ""
    after = parameters(trainer)
    return message, all(torch.equal(before[name], after[name]) for name in before)


def perturbed(model_path: str, config: dict[str, Any], name: str) -> str:
    """The message when the last rank's copy of a parameter is one rounding off."""
    trainer = make_trainer(model_path, config)
    if dist.get_rank() == dist.get_world_size() - 1:
        parameter = trainer.parameters[name]
        local = parameter.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        flat = local.flatten()
        flat[0] = torch.nextafter(flat[0], flat[0] + 1)
        local.copy_(flat.view_as(local))
    try:
        step(trainer)
    except RunError as error:
        return str(error)
    return ""


def local_sizes(model_path: str, config: dict[str, Any]) -> tuple[int, int]:
    """Numbers in this rank's parameters, and in the whole model."""
    trainer = make_trainer(model_path, config)
    mine = sum(local_part(each).numel() for each in trainer.parameters.values())
    return mine, sum(each.numel() for each in trainer.parameters.values())


def logprobs(model_path: str, config: dict[str, Any], temperature: float) -> torch.Tensor:
    """Of this rank's rows, before any step; of none where another rank answers for them."""
    trainer = make_trainer(model_path, config)
    rows = make_rows(preference=False)
    share = range(trainer.mesh.coordinate("dp"), len(LENGTHS), trainer.mesh.sizes.dp)
    columns = scoring.logprobs(trainer, [rows.select(list(share))], temperature)
    return torch.cat(columns["policy"]) if trainer.mesh.is_output_rank else torch.zeros(0)


def averaged_after_one_step(model_path: str, config: dict[str, Any]) -> Any:
    trainer = make_trainer(model_path, config)
    metrics = step(trainer)
    trainer.synchronize()
    return metrics, parameters(trainer)


def resumed_loss_scale(model_path: str, config: dict[str, Any], folder: str) -> list[list[float]]:
    """Scale, skipped steps and learning rate of the third step: going on, and resumed.

    The first two steps overflow.
    """
    trainer = make_trainer(model_path, config)
    step(trainer)
    step(trainer)
    save_checkpoint(Path(folder), trainer)
    resumed = make_trainer(model_path, config)
    load_checkpoint(Path(folder), resumed)
    names = ("train/loss_scale", "train/skipped_steps", "train/lr")
    return [[metrics[name] for name in names] for metrics in (step(trainer), step(resumed))]


class _Copies(TorchDispatchMode):
    """Counts the numbers that are copied while it is entered.

    (Files are mapped into memory: what is not copied is not read.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].device.type != "meta":
            self.count += args[1].numel()
        return func(*args, **(kwargs or {}))


def copied_numbers(model_path: str, config: dict[str, Any]) -> tuple[int, int]:
    """Numbers that starting the engine reads, and those in this rank's parameters."""
    with _Copies() as copies:
        trainer = make_trainer(model_path, config)
    locals_ = [
        each.to_local() if isinstance(each, DTensor) else each
        for each in trainer.parameters.values()
    ]
    return copies.count, sum(each.numel() for each in locals_)


def tied_matrix(model_path: str, config: dict[str, Any]) -> torch.Tensor:
    """This rank's copy of embedding or tied head after three steps."""
    trainer = make_trainer(model_path, config)
    for _ in range(3):
        step(trainer)
    ends = ("embed_tokens.weight", "lm_head.weight")
    (found,) = (each for name, each in trainer.parameters.items() if name.endswith(ends))
    return local_part(found).detach().clone()
