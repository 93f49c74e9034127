"""From ``policy.model``, or another model's key, to a local folder in Hugging Face format."""

import re
from pathlib import Path

from nemo_like.config.remote_code import trusts_code
from nemo_like.errors import UserError
from nemo_like.models.own_code import refuse_code

EMBEDDED = "embedded"
SMOLLM2 = "smollm2"
_CONFIG = ["config.json"]
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def resolve_model(name: str, key: str = "policy.model", *, only_config: bool = False) -> Path:
    """The folder of ``embedded``, ``smollm2``, a path, or a hub name; ``key`` is for errors.

    ``only_config``: of a model of the hub, config.json is all that is downloaded.
    Raises UserError, which names ``key``, if there is no such model, or if it needs code of its own
    that the run does not trust.
    """
    if name == EMBEDDED:
        return Path(__file__).parent / "embedded"
    if name == SMOLLM2:
        from nemo_like.models.smollm2 import smollm2_folder

        return smollm2_folder()
    if Path(name).expanduser().is_dir():
        folder = Path(name).expanduser().resolve()
        refuse_code(folder, key)
        return folder
    if _HUB_NAME.fullmatch(name) and not name.startswith("."):
        folder = _from_hub(name, key, _CONFIG if only_config else _FILES)
        refuse_code(folder, key)
        return folder
    raise UserError(
        f"{key}={name}: no such folder; give {EMBEDDED}, {SMOLLM2}, a folder in Hugging "
        "Face format, or a hub name (organisation/model)."
    )


def _from_hub(name: str, key: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    if trusts_code():
        patterns = [*patterns, "*.py"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the boundary of a network client with many kinds of failure
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"{key}={name} is neither a folder here nor a model that the hub gives: {reason}"
        ) from error
