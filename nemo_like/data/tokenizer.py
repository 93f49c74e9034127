"""A model folder's tokenizer, its end tokens, and cutting texts by tokens."""

from collections.abc import Sequence
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
    """A tokenizer that cuts texts by tokens."""

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

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, with nothing added."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids
