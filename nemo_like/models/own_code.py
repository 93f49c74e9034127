"""Models with code of their own, which runs only if the user trusts it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_like.config.model_files import (
    CONFIG,
    TOKENIZER_CONFIG,
    read_object,
    read_object_if_there,
)
from nemo_like.config.remote_code import trusts_code
from nemo_like.errors import UserError
from nemo_like.models.kinds import has_class, is_known, why_not

_KEY = "policy.trust_remote_code"


def refuse_code(folder: Path, key: str, classes: Sequence[str]) -> None:
    """Refuse a model that no class makes, or only code of its own that is not trusted.

    ``classes``: transformers' auto classes that must make it. Where transformers has them itself,
    it takes its own. ``key`` is where the configuration names the folder. Raises UserError.
    """
    settings = read_object(folder / CONFIG)
    kind = settings.get("model_type")
    if lacking := [one for one in classes if not has_class(kind, one)]:
        brought = settings.get("auto_map")
        if brought and not trusts_code() and (not is_known(kind) or _brings(settings, lacking)):
            _refuse(folder, key, CONFIG)
        if not (trusts_code() and _brings(settings, lacking)):
            raise UserError(f"{key}={folder} {why_not(kind, lacking)}")
    of_tokenizer = read_object_if_there(folder / TOKENIZER_CONFIG)
    if trusts_code() or not of_tokenizer.get("auto_map"):
        return
    if _needs_tokenizer_code(settings, of_tokenizer):
        _refuse(folder, key, TOKENIZER_CONFIG)


def _refuse(folder: Path, key: str, file: str) -> None:
    raise UserError(
        f"{key}={folder} has code of its own (auto_map in {file}), which transformers "
        f"lacks and which was not run; read it, and set {_KEY}=true if you trust it."
    )


def _brings(settings: dict[str, Any], lacking: Sequence[str]) -> bool:
    """Whether a folder's own code has every class that transformers is ``lacking``."""
    brought = settings.get("auto_map")
    if not isinstance(brought, dict):
        return False
    has_config = "AutoConfig" in brought or is_known(settings.get("model_type"))
    return has_config and all(one in brought for one in lacking)


def _needs_tokenizer_code(settings: dict[str, Any], of_tokenizer: dict[str, Any]) -> bool:
    # Imported only where there is code: transformers takes seconds.
    from transformers.models.auto.tokenization_auto import (
        TOKENIZER_MAPPING_NAMES,
        tokenizer_class_from_name,
    )

    if str(settings.get("model_type")) in TOKENIZER_MAPPING_NAMES:
        return False
    kind = str(of_tokenizer.get("tokenizer_class") or "")
    return not kind or tokenizer_class_from_name(kind) is None
