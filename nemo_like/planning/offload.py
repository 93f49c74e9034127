"""``policy.offload=auto``: from which size of GPU on a rank needs no host memory; arithmetic."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_like.config.policy import Offload, PolicyConfig
from nemo_like.errors import UserError
from nemo_like.planning.layout import parallel_sizes
from nemo_like.planning.model_shape import GIB, ModelShape, Role, read_model_shape

if TYPE_CHECKING:
    from nemo_like.planning.memory import PhaseMemory

CONTEXT_BYTES = 1.2 * GIB
"""CUDA and its libraries in one process; a sleeping engine holds as much."""
WORKSPACE_BYTES = 2 * GIB
"""What an engine takes of a GPU besides weights and KV cache: CUDA, graphs, activations."""
SLACK = 0.05
"""Of what is predicted: what an allocator cannot use between blocks, and padding."""

_LEAST_SAVED = 0.01
"""Of a rank's memory, for which state is worth moving at every step."""


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """Bytes that engines and other models take of the GPU of a model's rank."""

    training: float = 0.0
    sampling: float = 0.0
    on_host: float = 0.0
    """Of host memory, should the models offload too."""
    is_known: bool = True
    """False: an engine takes what it measures, or the formulas do not cover a model."""

    def and_engines(
        self, count: int, weight_bytes: float, kv_cache_bytes: float | None, *, sleeps: bool
    ) -> "Neighbours":
        """Also ``count`` engines; those without a size of their cache measure it."""
        if kv_cache_bytes is None:
            return replace(self, is_known=False)
        awake = count * (weight_bytes + kv_cache_bytes + WORKSPACE_BYTES)
        training = count * CONTEXT_BYTES if sleeps else awake
        return replace(self, training=self.training + training, sampling=self.sampling + awake)

    def and_model(
        self, path: str, policy: PolicyConfig, num_ranks: int, role: Role
    ) -> "Neighbours":
        """Also another model, all the time, taken as without offloading."""
        try:
            return self.and_shape(read_model_shape(Path(path)), policy, num_ranks, role)
        except UserError:
            return replace(self, is_known=False)

    def and_shape(
        self, shape: ModelShape, policy: PolicyConfig, num_ranks: int, role: Role
    ) -> "Neighbours":
        """``and_model`` by its shape; raises UserError."""
        size = max(map(lasting, _phases(shape, policy, num_ranks, role))) * GIB
        on_host = memory_needs(shape, policy, num_ranks, role, Neighbours()).on_host
        return replace(
            self,
            training=self.training + size,
            sampling=self.sampling + size,
            on_host=self.on_host + on_host,
        )


@dataclass(frozen=True, kw_only=True)
class MemoryNeeds:
    """The most that any rank of a model needs, in bytes."""

    resident: float
    """Of its GPU, where all stays there."""
    offloaded: float
    """Of its GPU, where the optimizer's state is on the host."""
    on_host: float
    """Of host memory then."""
    others_on_host: float = 0.0
    """Of host memory, what the others take."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    offload: Offload
    """Never ``auto``."""
    reason: str = ""
    host_bytes: float = 0.0
    """What the rank takes of its host's memory, where that is known."""
    too_small: bool = False
    """Whether the GPU is predicted to be too small all the same."""


def memory_needs(
    shape: ModelShape, policy: PolicyConfig, num_ranks: int, role: Role, neighbours: Neighbours
) -> MemoryNeeds:
    away = "all" if policy.offload == "all" else "optimizer"
    kept, moved = (
        _phases(shape, policy.replace(offload=where), num_ranks, role) for where in ("none", away)
    )
    return MemoryNeeds(
        resident=_on_gpu(kept, neighbours),
        offloaded=_on_gpu(moved, neighbours),
        on_host=max(phase.host for phases in moved for phase in phases) * GIB,
        others_on_host=neighbours.on_host,
    )


def lasting(phases: "Sequence[PhaseMemory]") -> float:
    """GiB between a model's turns; in the second phase gradients are only DDP's buckets."""
    return sum(phases[1].parts.get(part, 0.0) for part in ("parameters", "optimizer", "gradients"))


def choose(policy: PolicyConfig, of_rank: MemoryNeeds | None, gpu_bytes: float) -> Placement:
    """What ``auto`` comes to on a GPU of this size; nothing moves if sizes are not known."""
    if of_rank is None:
        return Placement(offload="none", reason="its size is not known beforehand")
    resident, moved, size = (one / GIB for one in (of_rank.resident, of_rank.offloaded, gpu_bytes))
    if resident > size and _helps(policy, of_rank):
        return Placement(
            offload="optimizer",
            reason=f"without it a rank would take {resident:.1f} of the GPU's {size:.1f} GiB, with "
            f"it {moved:.1f}",
            too_small=moved > size,
        )
    why = f"training and sampling take at most {resident:.1f} of the GPU's {size:.1f} GiB"
    if not _can_offload(policy):
        why = "DDP keeps everything on the GPU"
    elif resident > size:
        why = f"a rank would take {moved:.1f} of the GPU's {size:.1f} GiB with offloading, too"
    return Placement(offload="none", reason=why, too_small=resident > size)


def auto_line(policy: PolicyConfig, of_model: MemoryNeeds, ranks_per_node: int) -> str:
    resident, moved = of_model.resident / GIB, of_model.offloaded / GIB
    if not _can_offload(policy):
        return f"none, as with DDP; a GPU of {resident:.1f} GiB holds everything"
    if not _helps(policy, of_model):
        return f"none, as it would save nothing; a GPU of {resident:.1f} GiB holds everything"
    host = of_model.on_host / GIB * ranks_per_node
    return (
        f"none on GPUs of {resident:.1f} GiB and more; on smaller ones, which should have "
        f"{moved:.1f} GiB, optimizer: {host:.1f} GiB of each node's memory"
    )


def _helps(policy: PolicyConfig, needs: MemoryNeeds) -> bool:
    """Whether offloading lowers a peak that has optimizer state in it."""
    saved = needs.resident - needs.offloaded
    return _can_offload(policy) and saved > _LEAST_SAVED * needs.resident


def _can_offload(policy: PolicyConfig) -> bool:
    return policy.parallel.data_parallel == "fsdp"


def _phases(
    shape: ModelShape, policy: PolicyConfig, num_ranks: int, role: Role
) -> "list[tuple[PhaseMemory, ...]]":
    """Of each stage of a pipeline, with two micro-batches for each stage: more than 1F1B and
    interleaved schedules hold at once; gpipe holds all of a step's."""
    from nemo_like.planning.memory import predict_memory

    stages = parallel_sizes(policy, num_ranks).pp
    return [
        predict_memory(
            shape, policy, num_ranks, pipeline_rank=rank, num_micro_batches=2 * stages, role=role
        )
        for rank in range(stages)
    ]


def _on_gpu(of_ranks: "Iterable[tuple[PhaseMemory, ...]]", neighbours: Neighbours) -> float:
    most = 0.0
    for phases in of_ranks:
        peak = max(phase.total for phase in phases) * GIB + neighbours.training
        most = max(most, peak, lasting(phases) * GIB + neighbours.sampling)
    return most * (1 + SLACK) + CONTEXT_BYTES
