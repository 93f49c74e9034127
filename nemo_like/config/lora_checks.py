"""Rules of ``policy.lora``."""

import importlib.util

from nemo_like.config.choices import OptimizerKind
from nemo_like.config.rules import Effect, Ranges, check_effects, check_ranges
from nemo_like.config.run_schema import TrainingRunConfig
from nemo_like.errors import UserError


def check_lora(config: TrainingRunConfig) -> None:
    """Raise UserError for the first rule of adapters that ``config`` breaks."""
    check_ranges(
        config, Ranges(at_least={"policy.lora.rank": 0}, above_zero=("policy.lora.alpha",))
    )
    check_effects(config, [_EFFECT])
    if config.policy.lora.rank == 0:
        return
    if importlib.util.find_spec("peft") is None:
        raise UserError(
            f"policy.lora.rank={config.policy.lora.rank} needs the package peft, which is not "
            "installed; pip install peft."
        )
    parallel = config.policy.parallel
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if getattr(parallel, name) > 1:
            raise UserError(
                f"policy.parallel.{name}={getattr(parallel, name)} does not go with policy.lora; "
                "set it to 1: frozen weights are sharded over all ranks anyway."
            )
    if config.policy.optimizer.kind is OptimizerKind.muon:
        raise UserError(
            "policy.optimizer.kind=muon orthogonalises whole matrices and does not go with "
            "policy.lora, which trains factors of them; use adamw."
        )


_EFFECT = Effect(
    keys=("policy.lora.alpha", "policy.lora.targets"),
    applies=lambda c: c.policy.lora.rank > 0,
    why_not="policy.lora.rank is 0, so there are no adapters; set it too",
)
