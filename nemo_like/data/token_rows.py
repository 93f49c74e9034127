"""Rows as token ids: which of them fit, and how they become the batches of a run.

Legend: ``T`` tokens of a row, ``B`` rows, ``N`` tokens of all rows.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.data import Overlong, TextsConfig
from nemo_like.config.sources import Part
from nemo_like.data.chat import ChatTokenizer
from nemo_like.data.datasets import VALIDATION_SEED_OFFSET, R, without_overlap
from nemo_like.errors import UserError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TokenRow:
    """One row."""

    ids: Tensor
    """int64 [T]."""
    mask: Tensor
    """bool [T]: tokens that train."""


def collate(rows: Sequence[TokenRow]) -> TensorBatch:
    """Columns ``INPUT_IDS`` and ``LOSS_MASK`` [N]; of rows [B], ``SAMPLE_MASK`` and
    ``NUM_LOSS_TOKENS``."""
    return TensorBatch(
        lengths=torch.tensor([len(row.ids) for row in rows], dtype=torch.int64),
        tokens={
            keys.INPUT_IDS: torch.cat([row.ids for row in rows]),
            keys.LOSS_MASK: torch.cat([row.mask for row in rows]),
        },
        rows={
            keys.SAMPLE_MASK: torch.ones(len(rows), dtype=torch.bool),
            keys.NUM_LOSS_TOKENS: torch.stack([row.mask.sum() for row in rows]),
        },
    )


def _cut(row: TokenRow, first: int, most: int) -> TokenRow:
    """The ``most`` tokens from ``first`` on; the first never trains, since nothing predicts it."""
    mask = row.mask[first : first + most].clone()
    mask[:1] = False
    return TokenRow(ids=row.ids[first : first + most], mask=mask)


def _num_common(one: Tensor, other: Tensor) -> int:
    """How many tokens two rows have in common at their beginning."""
    shorter = min(len(one), len(other))
    return int((one[:shorter] == other[:shorter]).cumprod(0).sum())


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Most tokens of a row, and what happens to a longer one."""

    num_tokens: int
    key: str
    """What sets the number, for messages."""
    overlong: Overlong


def length_limit(
    config: TextsConfig, *, context: int, micro_batch_tokens: int, rows_per_unit: int = 1
) -> Limit:
    """``data.max_length``, or what the model's context and a micro-batch hold.

    ``rows_per_unit`` rows must share a micro-batch. Raises UserError if ``data.max_length`` is
    above what they hold.
    """
    share = "policy.micro_batch_tokens"
    if rows_per_unit > 1:
        share += f" for {rows_per_unit} rows"
    bounds = {"the model's context": context, share: micro_batch_tokens // rows_per_unit}
    key = min(bounds, key=bounds.__getitem__)
    most = bounds[key]
    if config.max_length is None:
        return Limit(num_tokens=most, key=key, overlong=config.overlong)
    if config.max_length > most:
        raise UserError(
            f"data.max_length={config.max_length} is above the {most} tokens that {key} allows; "
            "use at most that."
        )
    return Limit(num_tokens=config.max_length, key="data.max_length", overlong=config.overlong)


@dataclass(kw_only=True)
class LengthFilter:
    """Keeps the rows of one data set that fit, and counts the others."""

    limit: Limit
    num_truncated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Units left out, by reason."""

    def fit(self, unit: Sequence[TokenRow], where: str) -> list[TokenRow]:
        """All rows of a unit (a row, or the two of a pair), cut if need be; or none of them.

        Raises UserError for a row that is too long and to be refused.
        """
        most, overlong = self.limit.num_tokens, self.limit.overlong
        length = max(len(row.ids) for row in unit)
        if length > most and overlong == "refuse":
            raise UserError(
                f"{where}: the row has {length} tokens, and {self.limit.key} allows {most}; "
                "shorten it, raise the limit, or set data.overlong to drop, truncate_left or "
                "truncate_right."
            )
        if length > most and overlong == "drop":
            self.dropped[f"longer than {most} tokens"] += 1
            return []
        first = max(0, length - most) if overlong == "truncate_left" else 0
        kept = [_cut(row, first, most) for row in unit]
        side = "last" if first else "first"
        if not all(row.mask.any() for row in kept):
            self.dropped[f"without a token to train within the {side} {most}"] += 1
            return []
        if len(kept) == 2 and torch.equal(kept[0].ids, kept[1].ids):
            self.dropped[f"of two rows with the same {side} {most} tokens"] += 1
            return []
        if len(kept) == 2 and first >= _num_common(unit[0].ids, unit[1].ids):
            self.dropped["of two rows of which nothing common would be left"] += 1
            return []
        self.num_truncated += length > most
        return kept

    def report(self, key: str, num_units: int, noun: str) -> None:
        """Log what was cut or left out; UserError if nothing is left."""
        if self.num_truncated:
            logger.warning(
                "%s: cut %d of %d %s to %d tokens",
                key,
                self.num_truncated,
                num_units,
                noun,
                self.limit.num_tokens,
            )
        for reason, count in self.dropped.items():
            logger.warning("%s: dropped %d of %d %s as %s", key, count, num_units, noun, reason)
        if self.dropped.total() == num_units:
            reasons = "; ".join(f"{count} {reason}" for reason, count in self.dropped.items())
            raise UserError(f"{key}: none of {num_units} {noun} is left: {reasons}.")


def load_both(
    read: Callable[[Any, Part, int, int], list[R]],
    tokenize: Callable[[Any, list[R], ChatTokenizer, Limit, str], TensorBatch],
    config: TextsConfig,
    chat: ChatTokenizer,
    *,
    rows_per_unit: int,
    micro_batch_tokens: int,
    context: int,
    seed: int,
    with_validation: bool,
) -> tuple[TensorBatch, TensorBatch | None]:
    """Training rows, and validation rows if there are any and they are asked for; see ``collate``.

    ``read(config, part, num_rows, seed)`` gives the rows of one part, ``tokenize`` the batch that
    they make. Rows of a mixture have the column ``PART``. Raises UserError, with key, file and
    line, for files and rows that break a rule.
    """
    limit = length_limit(
        config,
        context=context,
        micro_batch_tokens=micro_batch_tokens,
        rows_per_unit=rows_per_unit,
    )
    held_out: list[R] = []
    if with_validation:
        for part in config.validation_parts:
            later = seed + VALIDATION_SEED_OFFSET
            held_out += read(config, part, config.num_validation_rows, later)
    batches = []
    for index, part in enumerate(config.train_parts):
        if not part.weight:
            continue
        rows = without_overlap(read(config, part, config.num_train_rows, seed), held_out)
        batches.append(tokenize(config, rows, chat, limit, part.key))
        if config.mixes:
            batches[-1].rows[keys.PART] = torch.full((len(batches[-1]),), index)
    train = TensorBatch.concatenate(batches)
    if not held_out:
        return train, None
    return train, tokenize(config, held_out, chat, limit, "data.validation")
