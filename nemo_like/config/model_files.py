"""The JSON files of a model's folder: one reader, one wording."""

import json
from pathlib import Path
from typing import Any

from nemo_like.errors import UserError

CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
_REMEDY = "repair it, or give another folder in Hugging Face format."


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; raises UserError, which begins with ``path``, if it has none."""
    if not path.is_file():  # a pipe would keep the reader waiting
        raise UserError(f"{path} is not a file; {_REMEDY}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}); {_REMEDY}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object ({type(content).__name__}); {_REMEDY}")
    return content


def read_object_if_there(path: Path) -> dict[str, Any]:
    """The same; empty if there is no ``path``."""
    return read_object(path) if path.exists() else {}
