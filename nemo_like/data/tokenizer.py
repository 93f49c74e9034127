"""A model folder's tokenizer: its end tokens, and where characters of a text are among tokens."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from nemo_like.config.model_files import (
    CONFIG,
    GENERATION_CONFIG,
    read_object_if_there,
    trusts_code,
)
from nemo_like.errors import UserError

_HEADER_CHARS = 64
"""Enough of a prompt for its last two tokens not to depend on where it was cut off."""


def load_tokenizer(folder: Path | str) -> Any:
    """A model folder's own."""
    return AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=trusts_code()
    )


def end_token_ids(folder: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """The tokenizer's, and all that ``generation_config.json`` and ``config.json`` have.

    Some models list several in one of the files only, multimodal ones in the part on text.
    Raises UserError if a file has something else there.
    """
    ids = {tokenizer_eos} if tokenizer_eos is not None else set()
    path = folder / GENERATION_CONFIG
    ids |= _listed(path, read_object_if_there(path))
    path = folder / CONFIG
    config = read_object_if_there(path)
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        # Tiny models and those with a new tokenizer keep ids of the one that their class was made
        # for; no token of theirs has them.
        size = part.get("vocab_size") or config.get("vocab_size")
        ids |= {one for one in _listed(path, part) if not isinstance(size, int) or one < size}
    return tuple(sorted(ids))


def _listed(path: Path, content: dict[str, Any]) -> set[int]:
    ids = content.get("eos_token_id")
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(isinstance(one, int) for one in listed):
        raise UserError(f"{path}: eos_token_id={ids} must be token ids; repair it.")
    return set(listed)


def padding_id(folder: Path, configured: int | None) -> int | None:
    """The ``configured`` id, or else the tokenizer's, that pads and does not end turns; else None.

    transformers takes the score of a row at its last token that is no padding: with a padding that
    also ends rows, at the one before. Without any it takes the last, of one row at a time.
    """
    tokenizer = load_tokenizer(folder)
    ends = end_token_ids(folder, tokenizer.eos_token_id)
    found = (one for one in (configured, tokenizer.pad_token_id) if one not in (None, *ends))
    return next(found, None)


class TokenCuts:
    """A tokenizer that tells how many tokens stand before a character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def begins_twice(self, ids: Sequence[int]) -> bool:
        """Whether there are two BOS at the beginning."""
        bos = self._tokenizer.bos_token_id
        return bos is not None and list(ids[:2]) == [bos, bos]

    def without_tokens(self, text: str, count: int, *, at_start: bool) -> str:
        """Plain text without its first or last ``count`` tokens, or whole characters in them."""
        if not self._tokenizer.is_fast:
            ids = self.ids(text)
            return self._tokenizer.decode(
                ids[count:] if at_start else ids[: max(0, len(ids) - count)]
            )
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        places: list[tuple[int, int]] = found["offset_mapping"]
        if count >= len(places):
            return ""
        return text[places[count - 1][1] :] if at_start else text[: places[-count][0]]

    def save_vocabulary(self, path: Path) -> None:
        """Write what turns ids into text as ``tokenizers`` reads it, where there is such a form."""
        if self._tokenizer.is_fast:
            aside = path.with_suffix(".tmp")
            self._tokenizer.backend_tokenizer.save(str(aside))
            aside.replace(path)

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
