"""What ``policy`` (and ``critic``) keys do to a training engine: two steps in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import torch
import torch.distributed as dist

from nemo_like.batch.micro_batches import plan_micro_batches
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.policy import Output, PolicyConfig
from nemo_like.losses.protocol import Denominators, Needs, as_metrics, trained_tokens
from nemo_like.observe.metrics import Metrics, values
from nemo_like.policy.trainer import Trainer
from nemo_like.policy.trainer_setup import TrainerSetup
from tests.three_steps import LENGTHS, denominators, make_rows

TEMPERATURE = 1.0
_TIMED = ("_gib", "_s")
"""Ends of metrics that are never the same twice."""


@contextmanager
def alone() -> Iterator[None]:
    """A process group of this process."""
    with TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


class SumOfSquares:
    """A loss for logprobs and for values alike."""

    needs = Needs()

    def __call__(
        self, outputs: torch.Tensor, batch: TensorBatch, denominators: Denominators
    ) -> tuple[torch.Tensor, Metrics]:
        at, _ = trained_tokens(batch)
        loss = (outputs[at].float() - 1).square().sum() / denominators.tokens
        return loss, as_metrics(sums={"train/loss": loss}, means={})


sum_of_squares = SumOfSquares()


@cache
def two_steps(model_path: str, shown: str, output: Output, max_steps: int) -> Any:
    """Everything that can be seen of two steps: numbers, passes, what autograd keeps, modules.

    ``shown``: the configuration as text, by which equal ones are made once.
    """
    config = _CONFIGS[shown]
    setup = TrainerSetup(
        config=config,
        model_path=model_path,
        max_steps=max_steps,
        output=output,
        log_dir=(logs := mkdtemp(dir=_LOGS.name)),
    )
    torch.manual_seed(0)
    trainer = Trainer(setup, torch.device("cpu"))
    seen: dict[str, Any] = {
        "modules": [type(each).__name__ for stage in trainer.stages for each in stage.modules()],
        "compiled": sum(
            each._compiled_call_impl is not None
            for stage in trainer.stages
            for each in stage.modules()
        ),
        "head": str(trainer.stages[0].settings) if output == "logprobs" else "",
        "hangs": getattr(trainer.diagnostics, "_hangs", None) is not None,
    }
    if not (seen["compiled"] or "OffloadWrapper" in seen["modules"]):  # a minute; a GPU's
        seen["steps"] = [_step(trainer) for _ in range(2)]
        seen["profiles"] = [one.name for one in Path(logs).glob("profile-*")]
        seen["parameters"] = {n: _digest(p) for n, p in trainer.parameters.items()}
    return seen


def policy_steps(
    model_path: str, config: PolicyConfig, output: Output = "logprobs", max_steps: int = 4
) -> Any:
    """``two_steps``, once for each configuration."""
    _CONFIGS[repr(config)] = config
    return two_steps(model_path, repr(config), output, max_steps)


_CONFIGS: dict[str, PolicyConfig] = {}
_LOGS = TemporaryDirectory()


def _step(trainer: Trainer) -> dict[str, Any]:
    rows, config = make_rows(preference=False), trainer.config
    plan = plan_micro_batches(
        LENGTHS,
        num_ranks=1,
        max_tokens=config.micro_batch_tokens,
        max_rows=config.micro_batch_size,
        padded=config.batching == "padded",
    )
    shares = [rows.select(one) for one in plan.bins[0]]
    kept = [0, 0]

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[0] += 1
        kept[1] += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        metrics = values(trainer.train(shares, sum_of_squares, denominators(rows), TEMPERATURE))
    numbers = {n: None if n.endswith(_TIMED) else value for n, value in metrics.items()}
    return {"bins": len(shares), "kept": kept, **numbers}


def _digest(parameter: torch.Tensor) -> float:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    weights = torch.arange(1, local.numel() + 1, dtype=torch.float64)
    return float((local.detach().double().flatten() * weights).sum())
