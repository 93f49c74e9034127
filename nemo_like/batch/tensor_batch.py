"""A batch without padding: columns of tokens laid end to end, and columns of one entry per row.

Prompts that neighbouring rows share have columns that tell, so that a forward pass computes each
once.

Legend: ``B`` rows (sequences), ``N`` tokens of all rows together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_like.batch import keys


@dataclass(kw_only=True)
class TensorBatch:
    """Rows of unequal length, kept flat: no code below can mistake padding for data.

    >>> batch = TensorBatch(lengths=torch.tensor([2, 1]), tokens={"x": torch.tensor([5, 6, 7])})
    >>> batch.row_of_token.tolist()
    [0, 0, 1]
    >>> batch.select([1, 0]).tokens["x"].tolist()
    [7, 5, 6]
    """

    lengths: Tensor
    """int64 [B], tokens of each row."""
    tokens: dict[str, Tensor] = field(default_factory=dict)
    """Columns of shape [N, ...]."""
    rows: dict[str, Tensor] = field(default_factory=dict)
    """Columns of shape [B, ...]."""

    def __post_init__(self) -> None:
        for name, column in self.tokens.items():
            assert len(column) == self.num_tokens, (name, len(column), self.num_tokens)
        for name, column in self.rows.items():
            assert len(column) == len(self), (name, len(column), len(self))

    def __len__(self) -> int:
        return len(self.lengths)

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_arrays, (self.lengths.numpy(), as_arrays(self.tokens), as_arrays(self.rows))

    @cached_property
    def num_tokens(self) -> int:
        """``N``; read from the device once."""
        return int(self.lengths.sum())

    @property
    def starts(self) -> Tensor:
        """int64 [B]: position of each row's first token."""
        return self.lengths.cumsum(0) - self.lengths

    @property
    def row_of_token(self) -> Tensor:
        """int64 [N]: the row that each token belongs to."""
        index = torch.arange(len(self), device=self.lengths.device)
        return index.repeat_interleave(self.lengths, output_size=self.num_tokens)

    def select(self, indices: Sequence[int] | Tensor) -> "TensorBatch":
        index = torch.as_tensor(indices, dtype=torch.int64)
        lengths = self.lengths[index]
        starts = self.starts[index]
        first = lengths.cumsum(0) - lengths
        within = torch.arange(int(lengths.sum())) - first.repeat_interleave(lengths)
        flat = starts.repeat_interleave(lengths) + within
        return TensorBatch(
            lengths=lengths,
            tokens={name: column[flat] for name, column in self.tokens.items()},
            rows={name: column[index] for name, column in self.rows.items()},
        )

    @staticmethod
    def concatenate(batches: Sequence["TensorBatch"]) -> "TensorBatch":
        """Rows of several batches one after the other; all must have the same columns."""
        first = batches[0]
        for other in batches:
            assert other.tokens.keys() == first.tokens.keys()
            assert other.rows.keys() == first.rows.keys()
        return TensorBatch(
            lengths=torch.cat([batch.lengths for batch in batches]),
            tokens={n: torch.cat([batch.tokens[n] for batch in batches]) for n in first.tokens},
            rows={n: torch.cat([batch.rows[n] for batch in batches]) for n in first.rows},
        )

    def to(self, device: torch.device | str) -> "TensorBatch":
        return TensorBatch(
            lengths=self.lengths.to(device),
            tokens={name: column.to(device) for name, column in self.tokens.items()},
            rows={name: column.to(device) for name, column in self.rows.items()},
        )


def as_arrays(columns: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """What to pickle: tensors of the CPU take ten times as long."""
    return {name: column.numpy() for name, column in columns.items()}


def as_tensors(columns: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Inverse of ``as_arrays``; copies, since arrays in Ray's store cannot be written."""
    return {name: torch.tensor(column) for name, column in columns.items()}


def _from_arrays(
    lengths: np.ndarray, tokens: dict[str, np.ndarray], rows: dict[str, np.ndarray]
) -> TensorBatch:
    return TensorBatch(
        lengths=torch.tensor(lengths), tokens=as_tensors(tokens), rows=as_tensors(rows)
    )


def prompt_columns(batch: TensorBatch) -> dict[str, Tensor]:
    """Row columns ``PROMPTS`` and ``PROMPT_TOKENS`` of rows with ids and a loss mask."""
    ids = batch.tokens[keys.INPUT_IDS].split(batch.lengths.tolist())
    masks = batch.tokens[keys.LOSS_MASK].split(batch.lengths.tolist())
    counts = [int(mask.int().argmax()) if mask.any() else len(mask) for mask in masks]
    return {
        keys.PROMPTS: torch.tensor(
            [_digest(row[:count]) for row, count in zip(ids, counts, strict=True)],
            dtype=torch.int64,
        ),
        keys.PROMPT_TOKENS: torch.tensor(counts, dtype=torch.int64),
    }


def _digest(ids: Tensor) -> int:
    return int.from_bytes(blake2b(ids.numpy().tobytes(), digest_size=8).digest(), signed=True)


@dataclass(frozen=True)
class SharedLayout:
    """Rows end to end; a row omits its prompt if the row before has the same one."""

    kept: Tensor
    """bool [N]: tokens that are not omitted."""
    lengths: Tensor
    """int64 [B]: kept tokens of each row."""
    place: Tensor
    """int64 [N]: the position of each token; for omitted ones, that of the earlier row's token."""


def shared_layout(batch: TensorBatch) -> SharedLayout:
    """The layout of rows in order; without prompt columns all tokens are kept."""
    row_of_token, starts = batch.row_of_token, batch.starts
    tokens = torch.arange(batch.num_tokens, device=batch.lengths.device)
    skipped = num_skipped(batch)
    rows = torch.arange(len(batch), device=batch.lengths.device)
    leader = torch.where(skipped == 0, rows, 0).cummax(0).values
    within = tokens - starts[row_of_token]
    kept = within >= skipped[row_of_token]
    source = torch.where(kept, tokens, starts[leader[row_of_token]] + within)
    return SharedLayout(
        kept=kept, lengths=batch.lengths - skipped, place=(kept.cumsum(0) - 1)[source]
    )


def num_skipped(batch: TensorBatch) -> Tensor:
    """int64 [B]: tokens that each row omits, since the row before has the same prompt."""
    skipped = torch.zeros_like(batch.lengths)
    if keys.PROMPTS in batch.rows:
        which = batch.rows[keys.PROMPTS]
        skipped[1:] = torch.where(which[1:] == which[:-1], batch.rows[keys.PROMPT_TOKENS][1:], 0)
    return skipped
