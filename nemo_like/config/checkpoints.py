"""Checks of a checkpoint as ``policy.model``, which evaluations accept."""

from pathlib import Path
from typing import Any

import yaml

from nemo_like.config.run import RunConfig
from nemo_like.doors import refuse_special
from nemo_like.errors import UserError


def model_of_checkpoint(folder: str) -> str:
    """The model of the run that wrote a checkpoint; UserError if unknown, or a reward model."""
    settings = _settings_of_run(folder)
    if "reward_model" in settings:
        raise UserError(
            f"policy.model={folder} is a checkpoint of a reward model, which samples nothing; give "
            "one of a language model."
        )
    return settings["policy"]["model"]


def _settings_of_run(folder: str) -> dict[str, Any]:
    """``config.yaml`` of the run that wrote a checkpoint."""
    path = Path(folder).expanduser().resolve().parent.parent / "config.yaml"
    refuse_special(f"policy.model={folder} is a checkpoint, and {path}", path)
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(settings["policy"]["model"], str):
            raise TypeError
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise UserError(
            f"policy.model={folder} is a checkpoint, and {path}, which names its model, cannot be "
            f"read ({type(error).__name__}); leave checkpoints in their run's folder, or give its "
            "folder final/."
        ) from error
    return settings


def check_adapters(config: RunConfig) -> None:
    """Adapters of a checkpoint are applied as in its run: with another alpha they weigh more."""
    saved = _settings_of_run(config.policy.model)["policy"].get("lora", {})
    for name in ("rank", "alpha", "targets"):
        value = getattr(config.policy.lora, name)
        if value != (wanted := saved.get(name, value)):
            raise UserError(
                f"policy.lora.{name}={value} is not that of the checkpoint {config.policy.model}; "
                f"set it to {wanted}."
            )
