"""Predicted memory of one policy rank by phase: arithmetic on the model's shape and the layout.

Counted are tensors that grow with the model or the batch. CUDA's context and libraries (0.5 to
1 GiB), NCCL's buffers, and memory that the allocator cannot use between blocks come on top.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from nemo_like.config.activation_memory import (
    BYTES,
    FLOAT32,
    backward_logits,
    forward_logits,
    head_activations,
    head_bytes,
    layer_activations,
    layers_in_flight,
)
from nemo_like.config.choices import Compression, DataParallel, Dtype, Offload
from nemo_like.config.layout import ParallelSizes, parallel_sizes, resolve_mesh_shape
from nemo_like.config.model_shape import ModelShape
from nemo_like.config.policy_schema import ParallelConfig, PolicyConfig
from nemo_like.config.rank_parameters import (
    RankParameters,
    rank_parameters,
    state_bytes,
    update_bytes,
)

GIB = 2**30
_Parts = dict[str, float]
"""Bytes by what they hold."""
# What only some moments have.
_NOTHING: _Parts = dict.fromkeys(("reducing", "activations", "working", "logits"), 0.0)


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
        """The larger of two moments of a forward pass without gradients: in a layer, at the head.

        At the head layers' tensors have gone; there are the last hidden states and the rows of them
        that predict. The reference model's pass is alike: the policy's units are freed before it.
        (Before the first step there is no optimizer state.)
        """
        layer = layer_activations(self.shape, self.policy, self.parallel, self.sizes)
        whole = not self.parallel.reshard_after_forward
        hidden = 2 * head_bytes(self.policy) * self.shape.hidden * self._has_head
        in_layer = _NOTHING | {
            "gradients": self._buckets(),
            "gathered": self._gathered(2, whole=whole),
            "working": self._tokens * layer.scoring,
        }
        at_head = in_layer | {
            "gathered": self._gathered(1, whole=whole),
            "working": self._tokens * hidden,
            "logits": forward_logits(*self._head_sizes, with_entropy=True) * self._has_head,
        }
        return self._largest("logprobs", (in_layer, at_head))

    def train(self) -> PhaseMemory:
        """The largest of the moments of one micro-batch: at the head, in layers, at the end."""
        layer = layer_activations(self.shape, self.policy, self.parallel, self.sizes)
        in_flight = layers_in_flight(
            self.shape, self.parallel, self.pipeline_rank, self.num_micro_batches
        )
        one_layer = self._tokens * layer.saved
        saved = one_layer * in_flight
        kept = one_layer if self.policy.activation_offload else saved
        end = _NOTHING | {
            "gathered": self._gathered(0, whole=self._whole_step),
            "gradients": self._gradients(),
            "reducing": self._sent_root(),
        }
        in_layers = self._layer_moments(kept, one_layer, self._tokens * layer.working)
        moments = (*self._head_moments(kept), *in_layers, end)
        return self._largest("train", moments, saved - kept)

    def _head_moments(self, kept: float) -> tuple[_Parts, ...]:
        """Forward and backward pass of the head, where activations of all layers exist.

        Gradients are those of earlier micro-batches. The backward pass sums those of the head's
        matrix and of the rows before it over chunks, in float32.
        """
        head = kept + self._tokens * head_activations(self.shape, self.policy) * self._has_head
        rows = self._tokens * FLOAT32 * self.shape.hidden * self._has_head
        forward = _NOTHING | {
            "gathered": self._gathered(1, whole=self._whole_step),
            "gradients": self._earlier(),
            "activations": head,
            "logits": forward_logits(*self._head_sizes, with_entropy=False) * self._has_head,
        }
        backward = {
            "reducing": FLOAT32 * self._parameters.table * self._has_head,
            "activations": head + rows,
            "logits": backward_logits(*self._head_sizes) * self._has_head,
        }
        return forward, forward | backward

    def _layer_moments(self, kept: float, one_layer: float, working: float) -> tuple[_Parts, ...]:
        """Backward pass of the last layer, where all activations exist, and of the first.

        There, activations are those of one layer, and gradients of the other layers have been sent.
        The head's gradient waits for the embedding's from one to the other.
        """
        head = head_bytes(self.policy) * self._parameters.table * self._has_head
        last = _NOTHING | {
            "gathered": self._gathered(2, whole=self._whole_step),
            "gradients": self._earlier(),
            "reducing": (0.0 if self._ddp else head) + self._sent_layer(),
            "activations": kept,
            "working": working,
        }
        others = self._parameters.total - self._parameters.root - self._parameters.layer
        all_exist = self.num_micro_batches > 1 or self._ddp
        sent = self._gradients() if all_exist else FLOAT32 * max(others, 0.0) / self._shards
        return last, last | {"gradients": sent, "activations": one_layer}

    def optimizer_step(self) -> PhaseMemory:
        """Activations and gathered parameters are gone, and gradients reduced."""
        update = update_bytes(self.shape, self.policy.optimizer, self._parameters, self._shards)
        parts = {
            "parameters": self._masters(),
            "optimizer": self._state(),
            "gradients": self._gradients() / (self._shards if self._unreduced else 1),
            "working": update,
        }
        return self._phase("optimizer", parts)

    def _phase(self, name: str, parts: _Parts, host: float = 0.0) -> PhaseMemory:
        """Leave out what is offloaded: all but unreduced gradients, or the state between steps."""
        away: set[str] = set()
        if self.policy.offload is Offload.all:
            away = {"parameters", "optimizer"}
            if name == "optimizer":
                away |= {"gradients", "working"}
            elif not self._unreduced:
                away |= {"gradients"}
        elif self.policy.offload is Offload.optimizer and name != "optimizer":
            away = {"optimizer"}
        return PhaseMemory(
            name=name,
            parts={part: size / GIB for part, size in parts.items() if part not in away},
            host=(host + sum(size for part, size in parts.items() if part in away)) / GIB,
        )

    def _largest(self, name: str, moments: Iterable[_Parts], host: float = 0.0) -> PhaseMemory:
        always = {"parameters": self._masters(), "optimizer": self._state()}
        phases = [self._phase(name, always | parts, host) for parts in moments]
        return max(phases, key=lambda phase: phase.total)

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
    def _unreduced(self) -> bool:
        """Whether gradients of earlier micro-batches are whole; a single one's are reduced."""
        return self._whole_step and self.num_micro_batches > 1

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

    def _masters(self) -> float:
        """Float32 parameters, sharded; the reference model has as many."""
        return FLOAT32 * self._parameters.total / self._shards * (2 if self.with_reference else 1)

    def _state(self) -> float:
        return state_bytes(self.policy.optimizer, self._parameters) / self._shards

    def _gathered(self, num_layers: int, *, whole: bool) -> float:
        """Parameters in compute format.

        FSDP holds the root unit (in float32 with ``float32_head``) and ``num_layers``: two within
        layers, the one in use and the next; one at the head, the last. Or all, where they stay
        ``whole``. DDP gathers nothing, but autocast keeps the copies that it makes.
        """
        s, parameters = BYTES[self.policy.dtype], self._parameters
        if self._ddp:
            return 0.0 if self.policy.dtype is Dtype.float32 else s * parameters.total
        layers = parameters.matrices + parameters.norms
        held = layers if whole else min(num_layers * parameters.layer, layers)
        return s * held + head_bytes(self.policy) * parameters.root

    def _gradients(self) -> float:
        """Float32 gradients of all parameters.

        Sharded like parameters; whole on each rank while they are not reduced. DDP has them in its
        buckets, or beside them without ``gradient_as_bucket_view``.
        """
        whole = FLOAT32 * self._parameters.total
        if not self._ddp:
            return whole if self._unreduced else whole / self._shards
        beside = self._buckets() == 0 or not self.parallel.ddp.gradient_as_bucket_view
        return self._buckets() + whole * beside

    def _earlier(self) -> float:
        """Gradients that exist before a micro-batch's backward pass."""
        return self._gradients() if self.num_micro_batches > 1 else self._buckets()

    def _buckets(self) -> float:
        """What DDP holds for gradients all the time: buckets.

        PowerSGD also keeps the errors that it feeds back, which are as large. Local SGD and a
        single copy have no buckets.
        """
        ddp = self.parallel.ddp
        if not self._ddp or self.sizes.replicate == 1 or ddp.average_every_steps > 1:
            return 0.0
        errors = ddp.compression is Compression.powersgd
        return FLOAT32 * self._parameters.total * (1 + errors)

    def _sent_layer(self) -> float:
        """Gradients of an FSDP unit on their way: as they were computed, and a float32 copy.

        Gradients that stay unreduced have no copy.
        """
        if self._ddp:
            return 0.0
        copy = 0 if self._unreduced else FLOAT32
        return (BYTES[self.policy.dtype] + copy) * self._parameters.layer

    def _sent_root(self) -> float:
        """As for a layer, or once they are reduced: the copy, and the result if it is added up.

        A single shard is its own result; torch (2.11) divides it into one more copy.
        """
        if self._ddp:
            return 0.0
        root, alone = self._parameters.root, self._shards == 1
        if self._unreduced and not alone:
            return head_bytes(self.policy) * root
        result = (self.num_micro_batches > 1 and not self._unreduced) / self._shards
        return max(head_bytes(self.policy) + FLOAT32, FLOAT32 * (1 + alone + result)) * root

    @property
    def _head_sizes(self) -> tuple[ModelShape, PolicyConfig, float, int]:
        """What formulas of the logits take."""
        return self.shape, self.policy, self._tokens, self.sizes.tp
