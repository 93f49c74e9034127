"""Predicted memory of one policy rank by phase: arithmetic on the model's shape and the layout.

Counted are tensors that grow with the model or the batch. CUDA's context and libraries (0.5 to
1 GiB), NCCL's buffers, and memory that the allocator cannot use between blocks come on top.
"""

from dataclasses import dataclass

from nemo_like.config.activation_memory import (
    BYTES,
    FLOAT32,
    head_activations,
    layer_activations,
    layers_in_flight,
    logits_bytes,
)
from nemo_like.config.choices import Compression, DataParallel, Dtype, Offload, OptimizerKind
from nemo_like.config.layout import ParallelSizes, parallel_sizes, resolve_mesh_shape
from nemo_like.config.model_shape import ModelShape
from nemo_like.config.policy_schema import ParallelConfig, PolicyConfig
from nemo_like.config.rank_parameters import RankParameters, rank_parameters

GIB = 2**30
_8BIT_MOMENT = 1 + FLOAT32 / 256  # torchao: a float32 scale for each block of 256 bytes


@dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """The most that one rank holds in one phase, GiB."""

    name: str
    parts: dict[str, float]
    """What holds how much on the rank's device."""
    host: float = 0.0
    """In host memory by offloading."""

    @property
    def total(self) -> float:
        """All parts on the device."""
        return sum(self.parts.values())


def predict_memory(
    shape: ModelShape,
    policy: PolicyConfig,
    num_ranks: int,
    *,
    pipeline_rank: int = 0,
    num_micro_batches: int = 2,
    with_reference: bool = False,
) -> tuple[PhaseMemory, ...]:
    """Peaks of the phases ``start``, ``logprobs``, ``train`` and ``optimizer``, in this order.

    All ranks with one ``pipeline_rank`` are alike. ``num_micro_batches`` are those of one rank in
    one step; micro-batches are taken as full. Raises UserError for sizes that do not divide.
    """
    rank = _Rank(
        shape=shape,
        policy=policy,
        parallel=resolve_mesh_shape(policy, num_ranks),
        sizes=parallel_sizes(policy, num_ranks),
        pipeline_rank=pipeline_rank,
        num_micro_batches=num_micro_batches,
        with_reference=with_reference,
    )
    return (rank.start(), rank.logprobs(), rank.train(), rank.optimizer_step())


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """One rank; methods give bytes, phases give GiB."""

    shape: ModelShape
    policy: PolicyConfig
    parallel: ParallelConfig
    sizes: ParallelSizes
    pipeline_rank: int
    num_micro_batches: int
    with_reference: bool

    def start(self) -> PhaseMemory:
        """Each rank reads its own share of the files; nothing is whole anywhere."""
        return self._phase("start", {"parameters": self._masters()})

    def logprobs(self) -> PhaseMemory:
        """A forward pass of the policy, then of the reference, whose root is gathered as well."""
        gathered = self._gathered(not self.parallel.reshard_after_forward)
        if self.with_reference and not self._ddp:
            gathered += self._root_bytes * self._parameters.root
        layer = layer_activations(self.shape, self.policy, self.parallel, self.sizes)
        return self._phase(
            "logprobs",
            {
                "parameters": self._masters(),
                "optimizer": self._state(),
                "gathered": gathered,
                "working": self._tokens * layer.scoring,
                "logits": self._logits(),
            },
        )

    def train(self) -> PhaseMemory:
        """The larger of two moments: the backward pass begins, or it ends.

        At its begin all activations exist, the root's gradients are there first, and the others are
        those of earlier micro-batches (none, if this is the only one). At its end all gradients
        exist, activations are those of one layer, and the root's gradients are reduced.
        """
        layer = layer_activations(self.shape, self.policy, self.parallel, self.sizes)
        in_flight = layers_in_flight(
            self.shape, self.parallel, self.pipeline_rank, self.num_micro_batches
        )
        one_layer = self._tokens * layer.saved
        saved = one_layer * in_flight
        kept = one_layer if self.policy.activation_offload else saved
        head = self._tokens * head_activations(self.shape, self.policy) * self._has_head
        always = {
            "parameters": self._masters(),
            "optimizer": self._state(),
            "gathered": self._gathered(self._whole_step),
            "working": self._tokens * layer.working,
        }
        begin = {
            "gradients": self._gradients() if self.num_micro_batches > 1 else 0.0,
            "reducing": self._reducing(at_end=False),
            "activations": kept + head,
            "logits": self._logits(),
        }
        end = {
            "gradients": self._gradients(),
            "reducing": self._reducing(at_end=True),
            "activations": one_layer,
            "logits": 0.0,
        }
        phases = [self._phase("train", always | parts, saved - kept) for parts in (begin, end)]
        return max(phases, key=lambda phase: phase.total)

    def optimizer_step(self) -> PhaseMemory:
        """Activations and gathered parameters are gone, and gradients reduced."""
        return self._phase(
            "optimizer",
            {
                "parameters": self._masters(),
                "optimizer": self._state(),
                "gradients": self._gradients() / (self._shards if self._whole_step else 1),
                "working": self._update(),
            },
        )

    def _phase(self, name: str, parts: dict[str, float], host: float = 0.0) -> PhaseMemory:
        """Leave out what is offloaded: all but unreduced gradients, or the state between steps."""
        away: set[str] = set()
        if self.policy.offload is Offload.all:
            away = {"parameters", "optimizer"}
            if name == "optimizer":
                away |= {"gradients", "working"}
            elif not self._whole_step:
                away |= {"gradients"}
        elif self.policy.offload is Offload.optimizer and name != "optimizer":
            away = {"optimizer"}
        return PhaseMemory(
            name=name,
            parts={part: size / GIB for part, size in parts.items() if part not in away},
            host=(host + sum(size for part, size in parts.items() if part in away)) / GIB,
        )

    @property
    def _ddp(self) -> bool:
        return self.parallel.data_parallel is DataParallel.ddp

    @property
    def _whole_step(self) -> bool:
        """Whether parameters stay gathered, and gradients unreduced, until the step's last pass.

        A pipeline's stages do so too: torch reduces on the last micro-batch only.
        """
        return not self._ddp and (not self.parallel.reshard_after_forward or self.sizes.pp > 1)

    @property
    def _parameters(self) -> RankParameters:
        return rank_parameters(self.shape, self.parallel, self.sizes.tp, self.pipeline_rank)

    @property
    def _shards(self) -> int:
        """Ranks over which FSDP shards: context-parallel ones have the same parameters."""
        return self.sizes.shard * self.sizes.cp

    @property
    def _tokens(self) -> float:
        """Tokens of a full micro-batch on this rank."""
        return self.policy.micro_batch_tokens / self.sizes.cp

    @property
    def _has_head(self) -> bool:
        return self.pipeline_rank == self.sizes.pp - 1

    @property
    def _root_bytes(self) -> int:
        return FLOAT32 if self.policy.float32_head else BYTES[self.policy.dtype]

    def _masters(self) -> float:
        """Float32 parameters, sharded; the reference model has as many."""
        return FLOAT32 * self._parameters.total / self._shards * (2 if self.with_reference else 1)

    def _gathered(self, whole: bool) -> float:
        """Parameters in compute format.

        FSDP holds the layer in use, the next one, and the root unit (in float32 with
        ``float32_head``); or all layers, where they stay ``whole``. DDP gathers nothing, but
        autocast keeps the copies that it makes.
        """
        s, parameters = BYTES[self.policy.dtype], self._parameters
        if self._ddp:
            return 0.0 if self.policy.dtype is Dtype.float32 else s * parameters.total
        layers = parameters.matrices + parameters.norms
        held = layers if whole else min(2 * parameters.layer, layers)
        return s * held + self._root_bytes * parameters.root

    def _gradients(self) -> float:
        """Float32 gradients between two micro-batches.

        Sharded like parameters; whole on each rank while they are not reduced. DDP has them once in
        its buckets, twice without ``gradient_as_bucket_view``; PowerSGD also keeps the errors that
        it feeds back, which are as large.
        """
        whole = FLOAT32 * self._parameters.total
        if not self._ddp:
            return whole if self._whole_step else whole / self._shards
        ddp = self.parallel.ddp
        if self.sizes.replicate == 1 or ddp.average_every_steps > 1:
            return whole
        errors = ddp.compression is Compression.powersgd
        return whole * (1 + (not ddp.gradient_as_bucket_view) + errors)

    def _reducing(self, *, at_end: bool) -> float:
        """Gradients of FSDP units on their way: as they were computed, and a float32 copy to send.

        The root's exist from the head's backward pass to the embedding's and are sent at the end;
        before that, one layer's are on their way. The head's is summed over chunks of logits in
        float32 first. Unreduced gradients have no copy.
        """
        if self._ddp:
            return 0.0
        root, copy = self._parameters.root, 0 if self._whole_step else FLOAT32
        if at_end:
            return (self._root_bytes + copy) * root
        layer = (BYTES[self.policy.dtype] + copy) * self._parameters.layer
        has_sum = self._has_head and self._root_bytes < FLOAT32
        head = FLOAT32 * self._parameters.table if has_sum else 0.0
        return self._root_bytes * root + layer + head

    def _logits(self) -> float:
        if not self._has_head:
            return 0.0
        return logits_bytes(self.shape, self.policy, self._tokens, self.sizes.tp)

    def _state(self) -> float:
        """Optimizer state of this rank's shard.

        adamw: two float32 moments; sgd: momentum; muon: momentum for matrices of layers, two
        moments for all else; adamw8bit: two moments of a byte with their scales; adafactor: sums
        over rows and columns, taken as nothing.
        """
        optimizer, parameters = self.policy.optimizer, self._parameters
        match optimizer.kind:
            case OptimizerKind.adamw:
                size = 2 * FLOAT32 * parameters.total
            case OptimizerKind.sgd:
                size = FLOAT32 * parameters.total if optimizer.momentum > 0 else 0.0
            case OptimizerKind.muon:
                size = FLOAT32 * (2 * parameters.total - parameters.matrices)
            case OptimizerKind.adamw8bit:
                size = 2 * _8BIT_MOMENT * parameters.total
            case OptimizerKind.adafactor:
                size = 0.0
        return size / self._shards

    def _update(self) -> float:
        """What the update itself needs.

        AdamW works in place. sgd adds decay to a copy of the gradients. Muon and Adafactor gather
        one matrix at a time: Muon one of a layer, float32 with its gradient and three 16-bit
        factors of Newton-Schulz; Adafactor the embedding at most, with gradient and update.
        """
        optimizer = self.policy.optimizer
        matrix = self.shape.hidden * self.shape.intermediate
        match optimizer.kind:
            case OptimizerKind.sgd if optimizer.weight_decay > 0:
                return FLOAT32 * self._parameters.total / self._shards
            case OptimizerKind.muon:
                return (2 * FLOAT32 + 3 * BYTES[Dtype.bfloat16]) * matrix
            case OptimizerKind.adafactor:
                return 3 * FLOAT32 * max(matrix, self.shape.vocab * self.shape.hidden)
            case _:
                return 0.0
