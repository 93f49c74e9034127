"""From ``policy.model``, or another model's key, to a local folder in Hugging Face format."""

import ast
import contextlib
import functools
import importlib.util
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeGuard

from nemo_like.config.environment import REWARD_MODEL, REWARD_MODEL_KEY
from nemo_like.config.model_files import (
    CONFIG,
    TOKENIZER_CONFIG,
    read_object,
    read_object_if_there,
    trusts_code,
)
from nemo_like.config.paths import BUILT_IN_MODELS, check_model, is_checkpoint, is_hub_name
from nemo_like.config.run import RunConfig
from nemo_like.config.sampling import SamplingRunConfig
from nemo_like.errors import UserError
from nemo_like.planning.placement import refuse_long

EMBEDDED = "embedded"
SMOLLM2 = "smollm2"
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]

CAUSAL_LM = "AutoModelForCausalLM"
CLASSIFIER = "AutoModelForSequenceClassification"
GIVES_LOGPROBS = (CAUSAL_LM,)
GIVES_VALUES = (CAUSAL_LM, CLASSIFIER)
"""A model with a scalar head is checked as a language model before."""
_SOURCE = "models/auto/modeling_auto.py"
_TABLES = {
    CAUSAL_LM: "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    CLASSIFIER: "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
}
_WHAT = {CAUSAL_LM: "language model", CLASSIFIER: "model with a score for each sequence"}


def resolve_policy(config: RunConfig, *, only_config: bool = False) -> Path:
    """The folder of the policy's model, of a checkpoint's run too; see ``resolve_model``."""
    model = config.policy.model
    if is_checkpoint(model):
        from nemo_like.config.checkpoints import model_of_checkpoint

        model = model_of_checkpoint(model)
    with_values = config.scalar_heads and not any(config.other_models())
    classes = GIVES_VALUES if with_values else GIVES_LOGPROBS
    return resolve_model(model, only_config=only_config, classes=classes)


def refuse_other_models(config: RunConfig) -> None:
    """UserError for critics, teachers and reward models that cannot serve, by their config.json."""
    others = list(config.other_models())
    environments = config.environment.by_name if isinstance(config, SamplingRunConfig) else {}
    for one in environments.values():
        if one.reward == REWARD_MODEL:
            assert one.reward_model is not None
            others.append((REWARD_MODEL_KEY, one.reward_model))
    classes = {"critic.model": GIVES_VALUES, REWARD_MODEL_KEY: (CLASSIFIER,)}
    for key, name in others:
        if name not in BUILT_IN_MODELS:
            resolve_model(name, key, only_config=True, classes=classes.get(key, GIVES_LOGPROBS))


def resolve_model(
    name: str,
    key: str = "policy.model",
    *,
    only_config: bool = False,
    classes: Sequence[str] = GIVES_LOGPROBS,
) -> Path:
    """The folder of ``embedded``, ``smollm2``, a path, or a hub name; ``key`` is for errors.

    ``only_config``: of a model of the hub, config.json is all that is downloaded. ``classes``:
    transformers' auto classes that must make it. Raises UserError if there is no such model, if no
    class makes it, or if it needs custom code that the run does not trust.
    """
    if name == EMBEDDED:
        return Path(__file__).parent / "embedded"
    if name == SMOLLM2:
        from nemo_like.models.smollm2 import smollm2_folder

        return smollm2_folder()
    if is_hub_name(name):
        folder = _from_hub(name, key, [CONFIG] if only_config else _FILES)
    else:
        check_model(key, name, has_tokenizer=False)
        folder = Path(name).expanduser().resolve()
    refuse_code(folder, key, classes)
    return folder


def _from_hub(name: str, key: str, patterns: list[str]) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    if trusts_code():
        patterns = [*patterns, "*.py"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "no network reaches the hub"
        raise UserError(
            f"{key}={name}: {why}, and the model is not in the cache of this machine; run "
            f"`hf download {name} --local-dir FOLDER` where there is a network, copy the folder "
            f"here, and set {key} to it."
        ) from error
    except Exception as error:  # the boundary of a network client with many kinds of failure
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"{key}={name} is neither a folder here nor a model that the hub gives: {reason}"
        ) from error


def has_class(model_type: object, auto_class: str) -> bool:
    """Whether ``auto_class`` makes models of the ``model_type`` that a config.json names."""
    if isinstance(model_type, str) and model_type in _listed(auto_class):
        return True
    if not is_known(model_type):
        return False
    import transformers

    kind = transformers.CONFIG_MAPPING[model_type]
    return kind in getattr(transformers, auto_class)._model_mapping


def is_known(model_type: object) -> TypeGuard[str]:
    """Whether transformers has a configuration of ``model_type``; imports torch."""
    # Imported only for what is probably refused: it takes seconds.
    from transformers import CONFIG_MAPPING

    return isinstance(model_type, str) and model_type in CONFIG_MAPPING


def why_not(model_type: object, lacking: Sequence[str]) -> str:
    """End of a sentence about a model that needs the ``lacking`` classes."""
    if not isinstance(model_type, str):
        return (
            "has no model_type in its config.json, by which transformers finds a model's classes; "
            "add it, or use another model."
        )
    has, name = f"has model_type={model_type} in its config.json", version("transformers")
    if not is_known(model_type):
        unknown = f"which transformers {name} does not know; install a version that does"
        return f"{has}, {unknown}, or use another model."
    what = f"{_WHAT[lacking[0]]} ({lacking[0]})"
    return f"{has}, for which transformers {name} has no {what}; use another model."


@functools.cache
def _listed(auto_class: str) -> frozenset[str]:
    """The types in transformers' table, read from its source without torch; empty without one."""
    found = importlib.util.find_spec("transformers")
    assert found is not None
    assert found.origin is not None
    source = Path(found.origin).parent / _SOURCE
    with contextlib.suppress(OSError, SyntaxError, ValueError, TypeError):
        for node in ast.parse(source.read_text(encoding="utf-8")).body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(args=[pairs])):
                    if name == _TABLES[auto_class]:
                        return frozenset(dict(ast.literal_eval(pairs)))
    return frozenset()


def refuse_code(folder: Path, key: str, classes: Sequence[str]) -> None:
    """Refuse a model that no class makes, or only code of its own that is not trusted.

    ``classes``: transformers' auto classes that must make it. Where transformers has them itself,
    it takes its own. Raises UserError.
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
    untrusted = not trusts_code() and of_tokenizer.get("auto_map")
    if untrusted and _needs_tokenizer_code(settings, of_tokenizer):
        _refuse(folder, key, TOKENIZER_CONFIG)


def _refuse(folder: Path, key: str, file: str) -> None:
    raise UserError(
        f"{key}={folder} has code of its own (auto_map in {file}), which transformers lacks and "
        "which was not run; read it, and set policy.trust_remote_code=true if you trust it."
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
    from transformers.models.auto import tokenization_auto as auto

    if str(settings.get("model_type")) in auto.TOKENIZER_MAPPING_NAMES:
        return False
    kind = str(of_tokenizer.get("tokenizer_class") or "")
    return not kind or auto.tokenizer_class_from_name(kind) is None


@functools.cache
def context_length(model_path: str) -> int:
    from nemo_like.models.build import model_settings

    config = model_settings(model_path).get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int):
        raise UserError(
            f"policy.model={model_path}: its config.json has no max_position_embeddings, the most "
            "tokens of a row; add it."
        )
    return positions


def context_for(model_path: str, key: str, max_new_tokens: int) -> int:
    """``context_length``; UserError, naming ``key``, if completions leave no room for a prompt."""
    context = context_length(model_path)
    refuse_long(key, max_new_tokens, context)
    return context
