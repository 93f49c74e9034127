"""Which tokens end a turn, by a model's folder."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from nemo_like.config.remote_code import trusts_code
from nemo_like.errors import UserError


def load_tokenizer(folder: Path | str) -> Any:
    """A model folder's own."""
    return AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=trusts_code()
    )


def end_token_ids(folder: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """The tokenizer's, and all that ``generation_config.json`` has; UserError if it has others."""
    ids = {tokenizer_eos} if tokenizer_eos is not None else set()
    path = folder / "generation_config.json"
    if path.exists():
        try:
            extra = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise UserError(f"{path} is no JSON object ({error}); repair or remove it.") from error
        listed = extra if isinstance(extra, list) else [] if extra is None else [extra]
        if not all(isinstance(one, int) for one in listed):
            raise UserError(f"{path}: eos_token_id={extra} must be token ids; repair it.")
        ids |= set(listed)
    return tuple(sorted(ids))


def padding_id(folder: Path, configured: int | None) -> int | None:
    """The ``configured`` id, or else the tokenizer's, that pads and does not end turns; else None.

    transformers takes the score of a row at its last token that is no padding: with a padding that
    also ends rows, at the one before. Without any it takes the last, of one row at a time.
    """
    tokenizer = load_tokenizer(folder)
    ends = end_token_ids(folder, tokenizer.eos_token_id)
    found = (one for one in (configured, tokenizer.pad_token_id) if one not in (None, *ends))
    return next(found, None)
