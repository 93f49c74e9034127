"""Models that bring code of their own along, which runs only if the user trusts it."""

import json
from pathlib import Path
from typing import Any

from nemo_like.config.remote_code import trusts_code
from nemo_like.errors import UserError

_KEY = "policy.trust_remote_code"
_FILES = ("config.json", "tokenizer_config.json")


def refuse_code(folder: Path, key: str) -> None:
    """Refuse a model that cannot be loaded without code of its own, unless that is trusted.

    Where transformers has the classes itself, it takes these. ``key`` is where the configuration
    names the folder. Raises UserError.
    """
    if trusts_code():
        return
    settings, of_tokenizer = (_read(folder / name) for name in _FILES)
    for name, found, needed in (
        (_FILES[0], settings, _needs_model_code),
        (_FILES[1], of_tokenizer, _needs_tokenizer_code),
    ):
        if found.get("auto_map") and needed(settings, of_tokenizer):
            raise UserError(
                f"{key}={folder} has code of its own (auto_map in {name}), which transformers "
                f"lacks and which was not run; read it, and set {_KEY}=true if you trust it."
            )


def _needs_model_code(settings: dict[str, Any], _: dict[str, Any]) -> bool:
    # Here and below imported only where there is code: transformers takes seconds.
    from transformers import CONFIG_MAPPING

    return str(settings.get("model_type")) not in CONFIG_MAPPING


def _needs_tokenizer_code(settings: dict[str, Any], of_tokenizer: dict[str, Any]) -> bool:
    from transformers.models.auto.tokenization_auto import (
        TOKENIZER_MAPPING_NAMES,
        tokenizer_class_from_name,
    )

    if str(settings.get("model_type")) in TOKENIZER_MAPPING_NAMES:
        return False
    kind = str(of_tokenizer.get("tokenizer_class") or "")
    return not kind or tokenizer_class_from_name(kind) is None


def _read(path: Path) -> dict[str, Any]:
    """Empty for what is no JSON object, which others say."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
