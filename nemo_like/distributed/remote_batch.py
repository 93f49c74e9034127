"""A batch by reference: the driver reads a few numbers per row, and no tokens.

Legend: ``B`` rows of the whole batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import ray
import torch
from ray import ObjectRef
from torch import Tensor

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.losses.protocol import Denominators


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Where rows of some token columns lie: row i is row ``position[i]`` of ``refs[chunk[i]]``."""

    refs: tuple[ObjectRef, ...]
    chunk: Tensor
    position: Tensor

    def select(self, indices: Tensor) -> "_Source":
        """The given rows; references to chunks that hold none of them are dropped."""
        used, chunk = self.chunk[indices].unique(return_inverse=True)
        return _Source(
            refs=tuple(self.refs[i] for i in used.tolist()),
            chunk=chunk,
            position=self.position[indices],
        )

    def fetch(self, lengths: Tensor) -> dict[str, Tensor]:
        """Token columns of all rows, in order; none at all where there are no rows."""
        if not self.refs:
            return {}
        chunks: list[TensorBatch] = ray.get(list(self.refs))
        offset = torch.tensor([0] + [len(chunk) for chunk in chunks]).cumsum(0)
        rows = TensorBatch.concatenate(chunks).select(offset[self.chunk] + self.position)
        assert torch.equal(rows.lengths, lengths), "a column's rows are not those of its batch"
        return rows.tokens


@dataclass(kw_only=True)
class RemoteBatch:
    """Rows by reference. Row columns are here; token columns are Ray's objects."""

    lengths: Tensor
    """int64 [B], tokens of each row."""
    rows: dict[str, Tensor]
    sources: list[_Source] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.lengths)

    @staticmethod
    def from_chunks(
        refs: Sequence[ObjectRef], lengths: Sequence[Tensor], rows: Sequence[dict[str, Tensor]]
    ) -> "RemoteBatch":
        """Join chunks of workers: row j of chunk i is row j of ``refs[i]``."""
        batch = RemoteBatch(
            lengths=torch.cat(list(lengths)),
            rows={name: torch.cat([chunk[name] for chunk in rows]) for name in rows[0]},
        )
        batch.add_columns(refs, torch.arange(len(batch)).split([len(one) for one in lengths]))
        return batch

    @staticmethod
    def put(batch: TensorBatch, rows_per_chunk: int) -> "RemoteBatch":
        """Put local rows into the store, in chunks: what is fetched later are whole chunks."""
        chunks = [
            batch.select(range(first, min(first + rows_per_chunk, len(batch))))
            for first in range(0, len(batch), rows_per_chunk)
        ]
        refs = [ray.put(TensorBatch(lengths=one.lengths, tokens=one.tokens)) for one in chunks]
        return RemoteBatch.from_chunks(
            refs, [one.lengths for one in chunks], [one.rows for one in chunks]
        )

    @staticmethod
    def concatenate(batches: Sequence["RemoteBatch"]) -> "RemoteBatch":
        """Rows of several batches one after the other; columns came to all in the same order."""
        sources = []
        for parts in zip(*(batch.sources for batch in batches), strict=True):
            first = torch.tensor([0] + [len(part.refs) for part in parts]).cumsum(0)
            chunks = [part.chunk + n for part, n in zip(parts, first, strict=False)]
            refs = tuple(ref for part in parts for ref in part.refs)
            position = torch.cat([part.position for part in parts])
            sources.append(_Source(refs=refs, chunk=torch.cat(chunks), position=position))
        names = batches[0].rows
        return RemoteBatch(
            lengths=torch.cat([batch.lengths for batch in batches]),
            rows={name: torch.cat([batch.rows[name] for batch in batches]) for name in names},
            sources=sources,
        )

    def select(self, indices: Sequence[int] | Tensor) -> "RemoteBatch":
        index = torch.as_tensor(indices, dtype=torch.int64)
        return RemoteBatch(
            lengths=self.lengths[index],
            rows={name: column[index] for name, column in self.rows.items()},
            sources=[source.select(index) for source in self.sources],
        )

    def add_columns(
        self, refs: Sequence[ObjectRef], rows_of: Sequence[Sequence[int] | Tensor]
    ) -> None:
        """Add token columns: row j of ``refs[i]`` belongs to row ``rows_of[i][j]`` here."""
        chunk = torch.full((len(self),), -1)
        position = torch.zeros(len(self), dtype=torch.int64)
        for i, rows in enumerate(rows_of):
            index = torch.as_tensor(rows, dtype=torch.int64)
            chunk[index] = i
            position[index] = torch.arange(len(rows))
        assert bool((chunk >= 0).all()), "a new column must cover every row"
        self.sources.append(_Source(refs=tuple(refs), chunk=chunk, position=position))

    def fetch(self) -> TensorBatch:
        """All columns as local tensors; for workers, never for the driver."""
        tokens: dict[str, Tensor] = {}
        for source in self.sources:
            tokens |= source.fetch(self.lengths)
        return TensorBatch(lengths=self.lengths, tokens=tokens, rows=self.rows)


def trained(batch: RemoteBatch, rows_per_unit: int = 1) -> RemoteBatch:
    """Rows of the units in which all rows train."""
    trains = batch.rows[keys.SAMPLE_MASK] & (batch.rows[keys.NUM_LOSS_TOKENS] > 0)
    together = trains.view(-1, rows_per_unit).all(1).repeat_interleave(rows_per_unit)
    return batch.select(together.nonzero(as_tuple=True)[0])


def counts_of(batch: RemoteBatch) -> Denominators:
    """Denominators of means over these rows."""
    tokens = float(batch.rows[keys.NUM_LOSS_TOKENS].sum())
    return Denominators(tokens=tokens, sequences=float(len(batch)))


def prompts_of(batch: RemoteBatch | TensorBatch) -> list[tuple[int, int]]:
    """Each row's prompt, and the tokens of it."""
    columns = batch.rows[keys.PROMPTS], batch.rows[keys.PROMPT_TOKENS]
    return list(zip(*(column.tolist() for column in columns), strict=True))
