"""Which tokens end a turn, by a model's folder."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from nemo_like.config.model_files import CONFIG, GENERATION_CONFIG, read_object_if_there
from nemo_like.config.remote_code import trusts_code
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
