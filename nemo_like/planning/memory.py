"""Predicted memory of one policy rank by phase: arithmetic on the model's shape and the layout.

Counted are tensors that grow with the model or the batch; activations with adapters are taken as
those without, and what a teacher says of each token is left out. CUDA's context and libraries
(0.5 to 1 GiB), NCCL's buffers, and memory between an allocator's blocks come on top.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from nemo_like.config.policy import PolicyConfig
from nemo_like.planning.activations import (
    backward_logits,
    forward_logits,
    head_activations,
    head_bytes,
    layer_activations,
    layers_in_flight,
)
from nemo_like.planning.layout import parallel_sizes
from nemo_like.planning.model_shape import BYTES, FLOAT32, GIB, ModelShape, Role
from nemo_like.planning.parameters import Rank

_TRAINED = Role()
_Parts = dict[str, float]
"""Bytes by what they hold."""
# What only some moments have.
_NOTHING: _Parts = dict.fromkeys(("reducing", "activations", "working", "logits"), 0.0)


@dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """The most that one rank holds in one phase, GiB."""

    name: str
    parts: dict[str, float]
    host: float = 0.0
    """In host memory by offloading."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def predict_memory(
    shape: ModelShape,
    policy: PolicyConfig,
    num_ranks: int,
    *,
    pipeline_rank: int = 0,
    num_micro_batches: int = 2,
    role: Role = _TRAINED,
) -> tuple[PhaseMemory, ...]:
    """Peaks of the phases ``start``, ``logprobs`` (with a scalar head ``values``), ``train`` and
    ``optimizer``, in this order; of a model that does not train, the first two.

    All ranks with one ``pipeline_rank`` are alike; the ``num_micro_batches`` of a rank's step are
    taken as full. Raises UserError for sizes that do not divide.
    """
    rank = _Rank(
        shape=shape,
        policy=policy,
        sizes=parallel_sizes(policy, num_ranks),
        pipeline_rank=pipeline_rank,
        num_micro_batches=num_micro_batches,
        role=role,
    )
    asked = (rank.start(), rank.logprobs())
    return (*asked, rank.train(), rank.optimizer_step()) if role.trains else asked


class _Rank(Rank):
    """Methods give bytes, phases give GiB."""

    def start(self) -> PhaseMemory:
        """Each rank reads its own share of the files; nothing is whole anywhere."""
        return self._phase("start", {"parameters": self._masters()})

    def logprobs(self) -> PhaseMemory:
        """The larger of two moments of a forward pass without gradients: in a layer, at the head.

        At the head layers' tensors have gone; there are the last hidden states and the rows of them
        that predict. The reference model's pass is alike: the policy's units are freed before it.
        """
        layer = layer_activations(self.shape, self.policy, self.sizes)
        whole = not self.policy.parallel.reshard_after_forward
        hidden = (BYTES[self.policy.dtype] + self._row_bytes) * self.shape.hidden * self.has_head
        in_layer = _NOTHING | {
            "gradients": self.buckets(),
            "gathered": self._gathered(2, whole=whole),
            "working": self._tokens * layer.scoring,
        }
        at_head = in_layer | {
            "gathered": self._gathered(1, whole=whole),
            "working": self._tokens * hidden,
            "logits": forward_logits(*self._head_sizes, with_entropy=True) * self._has_logits,
        }
        name = "values" if self.role.scalar_head else "logprobs"
        return self._largest(name, (in_layer, at_head))

    def train(self) -> PhaseMemory:
        """The largest of the moments of one micro-batch: at the head, in layers, at the end."""
        layer = layer_activations(self.shape, self.policy, self.sizes)
        in_flight = layers_in_flight(
            self.shape, self.policy.parallel, self.pipeline_rank, self.num_micro_batches
        )
        one_layer = self._tokens * layer.saved
        saved = one_layer * in_flight
        kept = one_layer if self.policy.activation_offload else saved
        end = _NOTHING | {
            "gathered": self._gathered(0, whole=self.whole_step),
            "gradients": self.gradients(),
            "reducing": self.sent_root(),
        }
        in_layers = self._layer_moments(kept, one_layer, self._tokens * layer.working)
        moments = (*self._head_moments(kept), *in_layers, end)
        return self._largest("train", moments, saved - kept)

    def _head_moments(self, kept: float) -> tuple[_Parts, ...]:
        """Forward and backward pass of the head, where activations of all layers exist.

        Gradients are those of earlier micro-batches. The backward pass sums those of the head's
        matrix and of the rows before it over chunks, in float32.
        """
        above = head_activations(self.shape, self.policy, self._row_bytes)
        head = kept + self._tokens * above * self.has_head
        rows = self._tokens * FLOAT32 * self.shape.hidden * self.has_head
        forward = _NOTHING | {
            "gathered": self._gathered(1, whole=self.whole_step),
            "gradients": self.earlier_gradients(),
            "activations": head,
            "logits": forward_logits(*self._head_sizes, with_entropy=self.role.keeps_probabilities)
            * self._has_logits,
        }
        backward = {
            "reducing": FLOAT32 * self.trained.table * self.has_head,
            "activations": head + rows,
            "logits": backward_logits(
                *self._head_sizes,
                head_trains=self.trained.table > 0,
                with_shares=self.role.keeps_probabilities,
            )
            * self._has_logits,
        }
        return forward, forward | backward

    def _layer_moments(self, kept: float, one_layer: float, working: float) -> tuple[_Parts, ...]:
        """Backward pass of the last layer, where all activations exist, and of the first.

        There, activations are one layer's, and gradients of the others have been sent. The head's
        gradient waits for the embedding's from one to the other.
        """
        head = head_bytes(self.policy) * self.trained.table * self.has_head
        last = _NOTHING | {
            "gathered": self._gathered(2, whole=self.whole_step),
            "gradients": self.earlier_gradients(),
            "reducing": (0.0 if self.ddp else head) + self.sent_layer(),
            "activations": kept,
            "working": working,
        }
        sent = self.gradients_before_first_layer()
        return last, last | {"gradients": sent, "activations": one_layer}

    def optimizer_step(self) -> PhaseMemory:
        """Activations and gathered parameters are gone, and gradients reduced."""
        parts = {
            "parameters": self._masters(),
            "optimizer": self.optimizer_state(),
            "gradients": self.gradients() / (self.shards if self.unreduced else 1),
            "working": self.update(),
        }
        return self._phase("optimizer", parts)

    def _phase(self, name: str, parts: _Parts, host: float = 0.0) -> PhaseMemory:
        """Leave out what is offloaded: all but unreduced gradients, or the optimizer's state."""
        away: set[str] = set()
        if self.policy.offload == "all":
            away = {"parameters", "optimizer"}
            if name == "optimizer":
                away |= {"gradients", "working"}
            elif not self.unreduced:
                away |= {"gradients"}
        elif self.policy.offload == "optimizer":
            if self.policy.optimizer.kind == "adamw":
                # Always there, with room on the GPU for the buckets that pass through.
                parts = parts | {"optimizer": self.moments_in_transit()}
                host += self.optimizer_state()
            elif name != "optimizer":
                away = {"optimizer"}
        return PhaseMemory(
            name=name,
            parts={part: size / GIB for part, size in parts.items() if part not in away},
            host=(host + sum(size for part, size in parts.items() if part in away)) / GIB,
        )

    def _largest(self, name: str, moments: Iterable[_Parts], host: float = 0.0) -> PhaseMemory:
        always = {"parameters": self._masters(), "optimizer": self.optimizer_state()}
        phases = [self._phase(name, always | parts, host) for parts in moments]
        return max(phases, key=lambda phase: phase.total)

    @property
    def _tokens(self) -> float:
        """Tokens of a full micro-batch on this rank."""
        return self.policy.micro_batch_tokens / self.sizes.cp

    @property
    def _has_logits(self) -> bool:
        return self.has_head and not self.role.scalar_head

    @property
    def _row_bytes(self) -> int:
        """Of a number in the rows that the head multiplies."""
        return FLOAT32 if self.role.scalar_head else head_bytes(self.policy)

    def _masters(self) -> float:
        """Float32 parameters, sharded; a reference model of its own has as many."""
        copies = 2 if self.role.with_reference and not self.policy.lora.rank else 1
        return FLOAT32 * self.parameters.total / self.shards * copies

    def _gathered(self, num_layers: int, *, whole: bool) -> float:
        """Parameters in compute format.

        FSDP holds the root unit and ``num_layers``: two within layers (the one in use and the
        next), one at the head; or all, where they stay ``whole``. DDP gathers nothing, but autocast
        keeps copies.
        """
        s, parameters = BYTES[self.policy.dtype], self.parameters
        if self.ddp:
            return 0.0 if self.policy.dtype == "float32" else s * parameters.total
        layers = parameters.matrices + parameters.norms
        held = layers if whole else min(num_layers * parameters.layer, layers)
        return s * held + head_bytes(self.policy) * parameters.root

    @property
    def _head_sizes(self) -> tuple[ModelShape, PolicyConfig, float, int]:
        return self.shape, self.policy, self._tokens, self.sizes.tp
