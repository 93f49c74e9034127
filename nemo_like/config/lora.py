"""Section ``policy.lora``."""

import importlib.util
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from nemo_like.config.section import OnlyIf, Positive, Section

_HAS_ADAPTERS = OnlyIf(
    lambda here, _: here.rank > 0, "policy.lora.rank is 0, so there are no adapters; set it too"
)


class LoraConfig(Section):
    """Low-rank adapters (arXiv:2106.09685): the model is frozen, and small added matrices train."""

    rank: Annotated[int, Field(ge=0)] = 0
    """Rank of the adapters. 0: none, the full model trains."""
    alpha: Annotated[Positive, _HAS_ADAPTERS] = 16.0
    """An adapter's output is multiplied by alpha / rank."""
    targets: Annotated[list[str], _HAS_ADAPTERS] = Field(default_factory=list)
    """Matrices that get an adapter, by the last part of their name: linear layers (``q_proj``),
    experts, which transformers stacks (``gate_up_proj``, ``down_proj``), routers (``gate``). Empty:
    all linear layers and experts. (The output head cannot have one.)"""
    refit: Annotated[
        Literal["merged", "adapters"],
        _HAS_ADAPTERS,
        OnlyIf(lambda _, run: run.samples, "this run has no engines to refit"),
    ] = "merged"
    """``merged``: each refit carries the full model, with adapters added and rounded to
    ``policy.dtype``; ``adapters``: engines keep model and adapters apart, as the policy does, and
    refits after the first carry adapters alone (vLLM samples more slowly). Engines that sleep drop
    the model, and each refit brings it again: see ``generation.sleep``."""

    def rules(self, here: str, run: Any) -> Iterator[str]:
        """What adapters do not go with."""
        if self.rank == 0:
            return
        if importlib.util.find_spec("peft") is None:
            yield (
                f"{here}.rank={self.rank} needs the package peft, which is not installed; "
                "pip install peft."
            )
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if (size := getattr(run.policy.parallel, name)) > 1:
                yield (
                    f"policy.parallel.{name}={size} does not go with {here}; set it to 1: frozen "
                    "weights are sharded over all ranks anyway."
                )
        if run.policy.optimizer.kind == "muon":
            yield (
                "policy.optimizer.kind=muon orthogonalises whole matrices and does not go with "
                f"{here}, which trains factors of them; use adamw."
            )
        if run.samples and self.refit == "adapters":
            yield from self._in_engine(here, run)

    def _in_engine(self, here: str, run: Any) -> Iterator[str]:
        engine = f"generation.backend={run.generation.backend}"
        if self.rank > (most := run.generation.kind.most_adapter_rank):
            yield (
                f"{here}.rank={self.rank} is more than {engine} computes with (at most {most}); "
                f"set {here}.refit=merged."
            )
        exact = run.generation.kind.float32_adapters_on_gpus
        if run.cluster.gpus_per_node and run.policy.dtype == "float32" and not exact:
            yield (
                f"{here}.refit=adapters does not go with policy.dtype=float32 on GPUs, where "
                f"{engine} computes with adapters of 16 bits only; set {here}.refit=merged, which "
                "is exact in float32."
            )
