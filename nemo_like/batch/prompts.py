"""Prompts that neighbouring rows share, so that a forward pass computes each once.

Legend: ``B`` rows, ``N`` tokens of all rows together.
"""

from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch


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
