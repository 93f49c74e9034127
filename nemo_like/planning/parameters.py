"""How many of a model's parameters one pipeline and tensor-parallel rank has, and its optimizer."""

from dataclasses import dataclass

from nemo_like.config.lora import LoraConfig
from nemo_like.config.optimizer import Moments, OptimizerConfig
from nemo_like.config.policy import PolicyConfig
from nemo_like.errors import UserError
from nemo_like.planning.layout import layer_range, num_stages
from nemo_like.planning.model_shape import BYTES, FLOAT32, ModelShape

BLOCK = 256
"""Numbers that share a float32 scale: of a row with ``moments=int8``, of a shard in torchao."""
BUCKET_NUMBERS = 1 << 26
"""Parameters whose moments travel together to the GPU and back."""
NUM_SLOTS = 3
"""Buckets on the GPU at one time: one comes, one is in use, one goes."""
_8BIT_MOMENT = 1 + FLOAT32 / BLOCK
_BOTH_MOMENTS = {"float32": 2.0 * FLOAT32, "bfloat16": 4.0, "int8": 2 * _8BIT_MOMENT}
"""Bytes for one parameter."""


@dataclass(frozen=True, kw_only=True)
class RankParameters:
    """Parameters that one rank computes with, before sharding, in numbers of parameters."""

    matrices: float
    """In matrices of layers."""
    norms: float
    """In norms of layers."""
    root: float
    """Embedding, final norm and output head, as far as the rank has them."""
    table: float
    """Output head, if there is one over the vocabulary."""
    layer: float
    """One layer: the unit that FSDP gathers."""
    adapters: float = 0.0
    """In adapters of layers."""

    @property
    def total(self) -> float:
        """All of them."""
        return self.matrices + self.norms + self.adapters + self.root


def rank_parameters(
    shape: ModelShape, policy: PolicyConfig, tp: int, pipeline_rank: int, *, scalar_head: bool
) -> RankParameters:
    """A stage has its layers; the first also the embedding, the last also norm and head.

    Tensor-parallel ranks split matrices and, where the vocabulary divides, embedding and head;
    norms are whole. A tied matrix exists on the first and on the last stage. A scalar head is one
    row in place of the output head. Raises UserError for adapters of matrices of other names.
    """
    size, stages = policy.parallel.pipeline_parallel_size, num_stages(policy.parallel)
    layers = sum(
        len(layer_range(shape.layers, stages, stage))
        for stage in range(pipeline_rank, stages, size)
    )
    table = shape.vocab * shape.hidden / (tp if shape.vocab % tp == 0 else 1)
    first, last = pipeline_rank == 0, pipeline_rank == size - 1
    tables = int(first) + int(last and not (shape.tied and first) and not scalar_head)
    adapters = layer_adapters(shape, policy.lora)
    return RankParameters(
        matrices=layers * shape.layer_matrices / tp,
        norms=layers * shape.layer_norms,
        root=tables * table + shape.hidden * ((1 + scalar_head) if last else 0),
        table=0.0 if scalar_head else table,
        layer=shape.layer_matrices / tp + shape.layer_norms + adapters,
        adapters=layers * adapters,
    )


def trained_parameters(
    shape: ModelShape,
    lora: LoraConfig,
    parameters: RankParameters,
    *,
    trains: bool,
    scalar_head: bool,
) -> RankParameters:
    """Those of a rank's ``parameters`` that have gradients and optimizer state: all, none, or
    adapters and a scalar head."""
    if trains and not lora.rank:
        return parameters
    return RankParameters(
        matrices=0.0,
        norms=0.0,
        root=shape.hidden * float(trains and scalar_head),
        table=0.0,
        layer=layer_adapters(shape, lora) * trains,
        adapters=parameters.adapters * trains,
    )


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


def transit_bytes(moments: Moments, num_parameters: float) -> float:
    """GPU memory of the buckets that moments in host memory pass through."""
    return _BOTH_MOMENTS[moments] * min(NUM_SLOTS * BUCKET_NUMBERS, num_parameters)


def state_bytes(optimizer: OptimizerConfig, parameters: RankParameters) -> float:
    """Bytes of optimizer state, before sharding.

    adamw: two moments; sgd: momentum; muon: momentum for matrices of layers, two moments
    for all else; adamw8bit: two moments of a byte with their scales; adafactor: sums over rows and
    columns, taken as nothing.
    """
    match optimizer.kind:
        case "adamw":
            in_matrices = parameters.total - parameters.norms
            return moments_bytes(optimizer.moments, in_matrices, parameters.norms)
        case "sgd":
            return FLOAT32 * parameters.total if optimizer.momentum > 0 else 0.0
        case "muon":
            rest = parameters.total - parameters.matrices - parameters.norms
            momentum = FLOAT32 * parameters.matrices
            return momentum + moments_bytes(optimizer.moments, rest, parameters.norms)
        case "adamw8bit":
            return 2 * _8BIT_MOMENT * parameters.total
        case "adafactor":
            return 0.0


def update_bytes(
    shape: ModelShape, policy: PolicyConfig, parameters: RankParameters, shards: int
) -> float:
    """Bytes that the update itself needs.

    AdamW works in place, or on one bucket of unpacked moments and what rounding them takes. sgd
    adds decay to a copy of the gradients. Muon and Adafactor gather one matrix at a time: Muon one
    of a layer, float32 with its gradient and three 16-bit factors of Newton-Schulz; Adafactor the
    embedding at most, or an adapter's larger matrix, with gradient and update.
    """
    optimizer, matrix = policy.optimizer, shape.hidden * shape.intermediate
    match optimizer.kind:
        case "sgd" if optimizer.weight_decay > 0:
            return FLOAT32 * parameters.total / shards
        case "muon":
            return (2 * FLOAT32 + 3 * BYTES["bfloat16"]) * matrix
        case "adafactor":
            widest = max(shape.hidden, shape.intermediate, shape.query_width)
            whole = max(matrix, shape.vocab * shape.hidden)
            return 3 * FLOAT32 * (policy.lora.rank * widest or whole)
        case "adamw" if optimizer.moments != "float32":
            return 4 * FLOAT32 * min(BUCKET_NUMBERS, parameters.total / shards)
        case _:
            return 0.0
