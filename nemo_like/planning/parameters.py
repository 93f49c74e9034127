"""How many of a model's parameters one pipeline and tensor-parallel rank has, and its optimizer."""

from dataclasses import dataclass
from functools import cached_property

from nemo_like.config.optimizer import LoraConfig, Moments
from nemo_like.config.policy import PolicyConfig
from nemo_like.errors import UserError
from nemo_like.planning.activations import head_bytes
from nemo_like.planning.layout import ParallelSizes, layers_of_rank
from nemo_like.planning.model_shape import BYTES, FLOAT32, ModelShape, Role

BLOCK = 256
"""Numbers of a row that share a float32 scale with ``moments=int8``."""
BUCKET_NUMBERS = 1 << 26
"""Parameters whose moments travel together to the GPU and back."""
NUM_SLOTS = 3
"""Buckets on the GPU at one time: one comes, one is in use, one goes."""
_BOTH_MOMENTS = {"float32": 2.0 * FLOAT32, "bfloat16": 4.0, "int8": 2 * (1 + FLOAT32 / BLOCK)}
"""Bytes for one parameter."""


@dataclass(frozen=True, kw_only=True)
class RankParameters:
    """Parameters that one rank computes with, before sharding, in numbers of parameters."""

    matrices: float
    norms: float
    root: float
    """Embedding, final norm and output head, as far as the rank has them."""
    table: float
    """Output head, if there is one over the vocabulary."""
    layer: float
    """One layer: the unit that FSDP gathers."""
    adapters: float = 0.0

    @property
    def total(self) -> float:
        return self.matrices + self.norms + self.adapters + self.root


def layer_adapters(shape: ModelShape, lora: LoraConfig) -> float:
    """Parameters of the adapters of one layer: rank x (inputs + outputs) of each adapted matrix."""
    sides = {
        "q_proj": shape.hidden + shape.query_width,
        "k_proj": shape.hidden + shape.key_width,
        "v_proj": shape.hidden + shape.key_width,
        "o_proj": shape.hidden + shape.query_width,
        "gate_proj": shape.hidden + shape.intermediate,
        "up_proj": shape.hidden + shape.intermediate,
        "down_proj": shape.hidden + shape.intermediate,
    }
    if unknown := sorted(set(lora.targets) - sides.keys()):
        raise UserError(
            f"policy.lora.targets: the formulas know {', '.join(sides)}, and not {unknown[0]}."
        )
    return float(lora.rank * sum(sides[name] for name in lora.targets or sides))


def moments_bytes(moments: Moments, in_matrices: float, in_vectors: float) -> float:
    """AdamW's state for so many parameters; ``int8`` is for matrices alone."""
    of_vectors = _BOTH_MOMENTS["float32" if moments == "int8" else moments]
    return _BOTH_MOMENTS[moments] * in_matrices + of_vectors * in_vectors


def stay_whole(policy: PolicyConfig, sizes: ParallelSizes) -> bool:
    """Whether parameters stay gathered, and gradients unreduced, until the step's last pass.

    A pipeline's do so too: torch reduces on the last micro-batch only.
    """
    return not policy.parallel.reshard_after_forward or sizes.pp > 1


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank of a model in a layout: its parameters, optimizer and gradients; methods give bytes.

    Tensor-parallel ranks split matrices and, where the vocabulary divides, embedding and head;
    norms are whole. A tied matrix exists on the first and on the last stage.
    """

    shape: ModelShape
    policy: PolicyConfig
    sizes: ParallelSizes
    pipeline_rank: int
    num_micro_batches: int
    role: Role

    @cached_property
    def parameters(self) -> RankParameters:
        """UserError for adapters of matrices of other names."""
        shape, parallel, tp = self.shape, self.policy.parallel, self.sizes.tp
        layers = sum(layers_of_rank(parallel, shape.layers, self.pipeline_rank))
        table = shape.vocab * shape.hidden / (tp if shape.vocab % tp == 0 else 1)
        first, last, scalar = self.pipeline_rank == 0, self.has_head, self.role.scalar_head
        tables = int(first) + int(last and not (shape.tied and first) and not scalar)
        adapters = layer_adapters(shape, self.policy.lora)
        return RankParameters(
            matrices=layers * shape.layer_matrices / tp,
            norms=layers * shape.layer_norms,
            root=tables * table + shape.hidden * ((1 + scalar) if last else 0),
            table=0.0 if scalar else table,
            layer=shape.layer_matrices / tp + shape.layer_norms + adapters,
            adapters=layers * adapters,
        )

    @cached_property
    def trained(self) -> RankParameters:
        """Those with gradients and optimizer state: all, none, or adapters and a scalar head."""
        trains, lora = self.role.trains, self.policy.lora
        if trains and not lora.rank:
            return self.parameters
        return RankParameters(
            matrices=0.0,
            norms=0.0,
            root=self.shape.hidden * float(trains and self.role.scalar_head),
            table=0.0,
            layer=layer_adapters(self.shape, lora) * trains,
            adapters=self.parameters.adapters * trains,
        )

    @property
    def has_head(self) -> bool:
        return self.pipeline_rank == self.sizes.pp - 1

    def optimizer_state(self) -> float:
        """Sharded.

        muon: momentum for matrices of layers, two moments for all else; adafactor: sums over rows
        and columns, taken as nothing.
        """
        optimizer, trained = self.policy.optimizer, self.trained
        match optimizer.kind:
            case "adamw":
                in_matrices = trained.total - trained.norms
                size = moments_bytes(optimizer.moments, in_matrices, trained.norms)
            case "sgd":
                size = FLOAT32 * trained.total if optimizer.momentum > 0 else 0.0
            case "muon":
                rest = trained.total - trained.matrices - trained.norms
                size = FLOAT32 * trained.matrices
                size += moments_bytes(optimizer.moments, rest, trained.norms)
            case "adafactor":
                size = 0.0
        return size / self.shards

    def moments_in_transit(self) -> float:
        """GPU memory of the buckets that moments in host memory pass through."""
        numbers = min(NUM_SLOTS * BUCKET_NUMBERS, self.trained.total / self.shards)
        return _BOTH_MOMENTS[self.policy.optimizer.moments] * numbers

    def update(self) -> float:
        """Temporary memory of the update.

        AdamW works in place, or on one bucket of unpacked moments and what rounding them takes. sgd
        adds decay to a copy of the gradients. Muon and Adafactor gather one matrix at a time: Muon
        one of a layer, float32 with its gradient and three 16-bit factors of Newton-Schulz;
        Adafactor the embedding at most, or an adapter's larger matrix, with gradient and update.
        """
        shape, optimizer = self.shape, self.policy.optimizer
        matrix, mine = shape.hidden * shape.intermediate, self.trained.total / self.shards
        match optimizer.kind:
            case "sgd" if optimizer.weight_decay > 0:
                return FLOAT32 * mine
            case "muon":
                return (2 * FLOAT32 + 3 * BYTES["bfloat16"]) * matrix
            case "adafactor":
                widest = max(shape.hidden, shape.intermediate, shape.query_width)
                whole = max(matrix, shape.vocab * shape.hidden)
                return 3 * FLOAT32 * (self.policy.lora.rank * widest or whole)
            case "adamw" if optimizer.moments != "float32":
                return 4 * FLOAT32 * min(BUCKET_NUMBERS, mine)
            case _:
                return 0.0

    @property
    def ddp(self) -> bool:
        return self.policy.parallel.data_parallel == "ddp"

    @property
    def whole_step(self) -> bool:
        """See ``stay_whole``; DDP has other buffers."""
        return stay_whole(self.policy, self.sizes) and not self.ddp

    @property
    def unreduced(self) -> bool:
        """Whether gradients of earlier micro-batches are whole; a single one's are reduced."""
        return self.whole_step and self.num_micro_batches > 1

    @property
    def shards(self) -> int:
        """Ranks over which FSDP shards: context-parallel ones have the same parameters."""
        return self.sizes.shard * self.sizes.cp

    def gradients(self) -> float:
        """Float32 gradients of all that train: sharded like parameters, whole until reduced.

        DDP has them in its buckets, local SGD beside them.
        """
        whole = FLOAT32 * self.trained.total
        if not self.ddp:
            return whole if self.unreduced else whole / self.shards
        return self.buckets() or whole

    def earlier_gradients(self) -> float:
        """Gradients that exist before a micro-batch's backward pass."""
        return self.gradients() if self.num_micro_batches > 1 else self.buckets()

    def gradients_before_first_layer(self) -> float:
        """Gradients in the backward pass of the first layer; those of the others are sent."""
        if self.num_micro_batches > 1 or self.ddp:
            return self.gradients()
        others = self.trained.total - self.trained.root - self.trained.layer
        return FLOAT32 * max(others, 0.0) / self.shards

    def buckets(self) -> float:
        """Buckets that DDP always holds; PowerSGD's errors take as much again.

        Local SGD and a single copy have no buckets.
        """
        ddp = self.policy.parallel.ddp
        if not self.ddp or self.sizes.replicate == 1 or ddp.average_every_steps > 1:
            return 0.0
        errors = ddp.compression == "powersgd"
        return FLOAT32 * self.trained.total * (1 + errors)

    def sent_layer(self) -> float:
        """Gradients of an FSDP unit on their way: as computed, and a float32 copy to reduce."""
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
