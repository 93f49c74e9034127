"""Which tokens end a turn, by a model's folder."""

import json
from pathlib import Path

from nemo_like.errors import UserError


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
