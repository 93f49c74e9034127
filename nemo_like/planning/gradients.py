"""Memory of gradients on one rank: arithmetic on what trains and the layout, in bytes."""

from dataclasses import dataclass

from nemo_like.config.policy import PolicyConfig
from nemo_like.planning.activations import head_bytes
from nemo_like.planning.layout import ParallelSizes
from nemo_like.planning.model_shape import BYTES, FLOAT32
from nemo_like.planning.parameters import RankParameters


@dataclass(frozen=True, kw_only=True)
class GradientMemory:
    """What gradients take at the moments of a step."""

    trained: RankParameters
    policy: PolicyConfig
    sizes: ParallelSizes
    num_micro_batches: int

    @property
    def ddp(self) -> bool:
        """Whether ranks are copies."""
        return self.policy.parallel.data_parallel == "ddp"

    @property
    def whole_step(self) -> bool:
        """Whether parameters stay gathered, and gradients unreduced, until the step's last pass.

        A pipeline's stages do so too: torch reduces on the last micro-batch only.
        """
        stays = not self.policy.parallel.reshard_after_forward or self.sizes.pp > 1
        return stays and not self.ddp

    @property
    def unreduced(self) -> bool:
        """Whether gradients of earlier micro-batches are whole; a single one's are reduced."""
        return self.whole_step and self.num_micro_batches > 1

    @property
    def shards(self) -> int:
        """Ranks over which FSDP shards: context-parallel ones have the same parameters."""
        return self.sizes.shard * self.sizes.cp

    def all(self) -> float:
        """Float32 gradients of all parameters that train.

        Sharded like parameters; whole on each rank while they are not reduced. DDP has them in its
        buckets, local SGD beside them.
        """
        whole = FLOAT32 * self.trained.total
        if not self.ddp:
            return whole if self.unreduced else whole / self.shards
        return self.buckets() or whole

    def earlier(self) -> float:
        """Gradients that exist before a micro-batch's backward pass."""
        return self.all() if self.num_micro_batches > 1 else self.buckets()

    def before_first_layer(self) -> float:
        """All that exist in the backward pass of the first layer; those of the others are sent."""
        if self.num_micro_batches > 1 or self.ddp:
            return self.all()
        others = self.trained.total - self.trained.root - self.trained.layer
        return FLOAT32 * max(others, 0.0) / self.shards

    def buckets(self) -> float:
        """What DDP holds for gradients all the time: buckets.

        PowerSGD also keeps the errors that it feeds back, which are as large. Local SGD and a
        single copy have no buckets.
        """
        ddp = self.policy.parallel.ddp
        if not self.ddp or self.sizes.replicate == 1 or ddp.average_every_steps > 1:
            return 0.0
        errors = ddp.compression == "powersgd"
        return FLOAT32 * self.trained.total * (1 + errors)

    def sent_layer(self) -> float:
        """Gradients of an FSDP unit on their way: as they were computed, and a float32 copy.

        Gradients that stay unreduced have no copy.
        """
        if self.ddp:
            return 0.0
        copy = 0 if self.unreduced else FLOAT32
        return (BYTES[self.policy.dtype] + copy) * self.trained.layer

    def sent_root(self) -> float:
        """As for a layer, or once they are reduced: the copy, and the result if it is added up.

        A single shard is its own result; torch (2.11) divides it into one more copy.
        """
        if self.ddp:
            return 0.0
        root, alone = self.trained.root, self.shards == 1
        if self.unreduced and not alone:
            return head_bytes(self.policy) * root
        result = (self.num_micro_batches > 1 and not self.unreduced) / self.shards
        return max(head_bytes(self.policy) + FLOAT32, FLOAT32 * (1 + alone + result)) * root
