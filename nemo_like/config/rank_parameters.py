"""How many of a model's parameters one pipeline and tensor-parallel rank computes with."""

from dataclasses import dataclass

from nemo_like.config.layout import layer_range, num_stages
from nemo_like.config.model_shape import ModelShape
from nemo_like.config.policy_schema import ParallelConfig


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
