"""Rules of ``policy.lora``."""

import importlib.util

from nemo_like.config.choices import AdapterRefit, Backend, Dtype, OptimizerKind
from nemo_like.config.rules import Effect, Ranges, check_effects, check_ranges
from nemo_like.config.run_schema import RolloutRunConfig, TrainingRunConfig
from nemo_like.errors import UserError

ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Sizes of buffers that vLLM has for adapters that it computes with."""


def check_lora(config: TrainingRunConfig) -> None:
    """Raise UserError for the first rule of adapters that ``config`` breaks."""
    check_ranges(
        config, Ranges(at_least={"policy.lora.rank": 0}, above_zero=("policy.lora.alpha",))
    )
    check_effects(config, _EFFECTS)
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
    if (
        isinstance(config, RolloutRunConfig)
        and config.policy.lora.refit is AdapterRefit.adapters
        and config.generation.backend is Backend.vllm
    ):
        _check_adapters_in_vllm(config)


def _check_adapters_in_vllm(config: RolloutRunConfig) -> None:
    rank = config.policy.lora.rank
    if rank > ADAPTER_RANKS[-1]:
        raise UserError(
            f"policy.lora.rank={rank} is more than vLLM computes with (at most "
            f"{ADAPTER_RANKS[-1]}); set policy.lora.refit=merged."
        )
    if config.cluster.gpus_per_node and config.policy.dtype is Dtype.float32:
        raise UserError(
            "policy.lora.refit=adapters does not go with policy.dtype=float32 on GPUs, where vLLM "
            "computes with adapters of 16 bits only; set policy.lora.refit=merged, which is exact "
            "in float32."
        )


_EFFECTS = (
    Effect(
        keys=("policy.lora.alpha", "policy.lora.targets", "policy.lora.refit"),
        applies=lambda c: c.policy.lora.rank > 0,
        why_not="policy.lora.rank is 0, so there are no adapters; set it too",
    ),
    Effect(
        keys=("policy.lora.refit",),
        applies=lambda c: isinstance(c, RolloutRunConfig),
        why_not="this run has no engines, so that nothing is refitted",
    ),
)
