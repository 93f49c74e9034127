"""From ``policy.model``, or another model's key, to a local folder in Hugging Face format."""

import re
from collections.abc import Sequence
from pathlib import Path

from nemo_like.config.paths import (
    BUILT_IN_MODELS,
    REWARD_MODEL,
    REWARD_MODEL_KEY,
    is_checkpoint,
    model_of_checkpoint,
)
from nemo_like.config.remote_code import trusts_code
from nemo_like.config.run import RunConfig
from nemo_like.config.sampling import SamplingRunConfig
from nemo_like.errors import UserError
from nemo_like.models.kinds import CAUSAL_LM, CLASSIFIER
from nemo_like.models.own_code import refuse_code

EMBEDDED = "embedded"
SMOLLM2 = "smollm2"
_CONFIG = ["config.json"]
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


GIVES_LOGPROBS = (CAUSAL_LM,)
GIVES_VALUES = (CAUSAL_LM, CLASSIFIER)
"""A model with a scalar head is checked as a language model before."""


def resolve_policy(config: RunConfig, *, only_config: bool = False) -> Path:
    """The folder of the policy's model, of a checkpoint's run too; see ``resolve_model``."""
    model = config.policy.model
    if is_checkpoint(model):
        model = model_of_checkpoint(model)
    with_values = config.scalar_heads and not any(config.other_models())
    classes = GIVES_VALUES if with_values else GIVES_LOGPROBS
    return resolve_model(model, only_config=only_config, classes=classes)


def refuse_other_models(config: RunConfig) -> None:
    """Refuse critics, teachers and reward models that cannot serve, by their config.json.

    Raises UserError.
    """
    others = list(config.other_models())
    if isinstance(config, SamplingRunConfig) and config.environment.reward == REWARD_MODEL:
        assert config.environment.reward_model is not None
        others.append((REWARD_MODEL_KEY, config.environment.reward_model))
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
    transformers' auto classes that must make it. Raises UserError, which names ``key``, if there is
    no such model, if no class makes it, or if it needs code of its own that the run does not trust.
    """
    if name == EMBEDDED:
        return Path(__file__).parent / "embedded"
    if name == SMOLLM2:
        from nemo_like.models.smollm2 import smollm2_folder

        return smollm2_folder()
    if Path(name).expanduser().is_dir():
        folder = Path(name).expanduser().resolve()
        refuse_code(folder, key, classes)
        return folder
    if _HUB_NAME.fullmatch(name) and not name.startswith("."):
        folder = _from_hub(name, key, _CONFIG if only_config else _FILES)
        refuse_code(folder, key, classes)
        return folder
    raise UserError(
        f"{key}={name}: no such folder; give {EMBEDDED}, {SMOLLM2}, a folder in Hugging "
        "Face format, or a hub name (organisation/model)."
    )


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
