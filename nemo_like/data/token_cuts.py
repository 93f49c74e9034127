"""Where characters of a text are among its tokens, as sampling would have tokenised them."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

from nemo_like.errors import UserError

_HEADER_CHARS = 64
"""Enough of a prompt for its last two tokens not to depend on where it was cut off."""


class TokenCuts:
    """A tokenizer that tells how many tokens stand before a character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode_at(self, text: str, cuts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Token ids of ``text``, and how many of them stand before each of the rising ``cuts``."""
        encoding = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=self._tokenizer.is_fast
        )
        ids: list[int] = encoding["input_ids"]
        offsets: list[tuple[int, int]] = encoding.get("offset_mapping", [])
        positions = [self._position(text, ids, offsets, cut) for cut in cuts]
        found = [position for position in positions if position is not None]
        if len(found) == len(cuts) and self._as_sampled(text, ids, cuts, found):
            return ids, found
        # A token reaches over a cut (a newline of the header and one of the answer), or the text
        # after it changes those before (GPT-2 takes two newlines apart if letters follow). Sampling
        # never sees that, because there the header is tokenised alone; so do we.
        pieces = [self.ids(text[a:b]) for a, b in pairwise([0, *cuts, len(text)])]
        joined = list(chain.from_iterable(pieces))
        if self._tokenizer.decode(joined) != self._tokenizer.decode(ids):
            raise UserError(
                "the tokenizer joins the beginning of an answer with what stands before it; remove "
                "white space from the beginning of the assistant's text."
            )
        return joined, list(accumulate(len(piece) for piece in pieces))[:-1]

    def _as_sampled(
        self, text: str, ids: list[int], cuts: Sequence[int], positions: Sequence[int]
    ) -> bool:
        """Whether the last tokens before each answer are those of a prompt that ends there."""
        for cut, position in zip(cuts[::2], positions[::2], strict=True):
            first = max(0, cut - _HEADER_CHARS)
            alone = self.ids(text[first:cut])
            near = alone[-2:] if first == 0 or len(alone) > 2 else []
            if near != ids[position - len(near) : position]:
                return False
        return True

    def _position(
        self, text: str, ids: list[int], offsets: Sequence[tuple[int, int]], cut: int
    ) -> int | None:
        """Number of tokens of ``text[:cut]``; None if a token of the whole reaches over the cut."""
        position = bisect_left(offsets, cut, key=lambda offset: offset[0])
        start = offsets[position][0] if position < len(offsets) else len(text)
        if position and start == cut == offsets[position - 1][1]:
            return position
        # Offsets leave out white space, or count it to special tokens, in some tokenizers.
        before = self.ids(text[:cut])
        return len(before) if ids[: len(before)] == before else None

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, with nothing added."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids
