"""The JSON files of a model's folder, and whether code that it brings along (``auto_map``) may run.

The latter is one decision for a run and all of its models. It travels in the environment of the
run's own processes, which the driver sets, whatever was there: every call that loads a model states
it, so that transformers never asks on stdin.
"""

import json
import os
from pathlib import Path
from typing import Any

from nemo_like.errors import UserError

CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
_VARIABLE = "NEMO_LIKE_TRUST_REMOTE_CODE"
TRUSTED = "trust_remote_code"
"""The decision's name in what a reward process is given."""
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


def set_trust(trusted: bool) -> None:
    """For this process, and those that it starts: ``policy.trust_remote_code`` of the run."""
    os.environ[_VARIABLE] = str(int(trusted))


def trusts_code() -> bool:
    """What every loader of transformers and vLLM takes for ``trust_remote_code``."""
    return os.environ.get(_VARIABLE) == "1"


def trust_variables() -> dict[str, str]:
    """The environment that tells a worker of this run."""
    return {_VARIABLE: str(int(trusts_code()))}
