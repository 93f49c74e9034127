"""How many of a model's parameters one pipeline and tensor-parallel rank has, and its optimizer."""

from dataclasses import dataclass

from nemo_like.config.activation_memory import BYTES, FLOAT32
from nemo_like.config.choices import Dtype, OptimizerKind
from nemo_like.config.layout import layer_range, num_stages
from nemo_like.config.model_shape import ModelShape
from nemo_like.config.policy_schema import OptimizerConfig, ParallelConfig

_8BIT_MOMENT = 1 + FLOAT32 / 256  # torchao: a float32 scale for each block of 256 bytes


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
    """Embedding or output head."""
    layer: float
    """One layer: the unit that FSDP gathers."""

    @property
    def total(self) -> float:
        """All of them."""
        return self.matrices + self.norms + self.root


def rank_parameters(
    shape: ModelShape, parallel: ParallelConfig, tp: int, pipeline_rank: int
) -> RankParameters:
    """A stage has its layers; the first also the embedding, the last also norm and head.

    Tensor-parallel ranks split matrices and, where the vocabulary divides, embedding and head;
    norms are whole. A tied matrix exists on the first and on the last stage.
    """
    size, stages = parallel.pipeline_parallel_size, num_stages(parallel)
    layers = sum(
        len(layer_range(shape.layers, stages, stage))
        for stage in range(pipeline_rank, stages, size)
    )
    table = shape.vocab * shape.hidden / (tp if shape.vocab % tp == 0 else 1)
    first, last = pipeline_rank == 0, pipeline_rank == size - 1
    tables = int(first) + int(last and not (shape.tied and first))
    return RankParameters(
        matrices=layers * shape.layer_matrices / tp,
        norms=layers * shape.layer_norms,
        root=tables * table + (shape.hidden if last else 0),
        table=table,
        layer=shape.layer_matrices / tp + shape.layer_norms,
    )


def state_bytes(optimizer: OptimizerConfig, parameters: RankParameters) -> float:
    """Bytes of optimizer state, before sharding.

    adamw: two float32 moments; sgd: momentum; muon: momentum for matrices of layers, two moments
    for all else; adamw8bit: two moments of a byte with their scales; adafactor: sums over rows and
    columns, taken as nothing.
    """
    match optimizer.kind:
        case OptimizerKind.adamw:
            return 2 * FLOAT32 * parameters.total
        case OptimizerKind.sgd:
            return FLOAT32 * parameters.total if optimizer.momentum > 0 else 0.0
        case OptimizerKind.muon:
            return FLOAT32 * (2 * parameters.total - parameters.matrices)
        case OptimizerKind.adamw8bit:
            return 2 * _8BIT_MOMENT * parameters.total
        case OptimizerKind.adafactor:
            return 0.0


def update_bytes(
    shape: ModelShape, optimizer: OptimizerConfig, parameters: RankParameters, shards: int
) -> float:
    """Bytes that the update itself needs.

    AdamW works in place. sgd adds decay to a copy of the gradients. Muon and Adafactor gather one
    matrix at a time: Muon one of a layer, float32 with its gradient and three 16-bit factors of
    Newton-Schulz; Adafactor the embedding at most, with gradient and update.
    """
    matrix = shape.hidden * shape.intermediate
    match optimizer.kind:
        case OptimizerKind.sgd if optimizer.weight_decay > 0:
            return FLOAT32 * parameters.total / shards
        case OptimizerKind.muon:
            return (2 * FLOAT32 + 3 * BYTES[Dtype.bfloat16]) * matrix
        case OptimizerKind.adafactor:
            return 3 * FLOAT32 * max(matrix, shape.vocab * shape.hidden)
        case _:
            return 0.0
