"""transformers' configuration of a model folder, for all code that needs one.

What config.json says about *how* to compute is dropped: which attention and which experts' code to
use is the run's decision, and some names make transformers look for kernels on the hub.
"""

from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

from nemo_like.config.model_files import CONFIG
from nemo_like.config.remote_code import trusts_code
from nemo_like.errors import UserError

_LONGEST_REASON = 160


def model_settings(folder: Path | str) -> PreTrainedConfig:
    """A new one at each call, which the caller may change; UserError if transformers refuses it."""
    try:
        settings = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trusts_code()
        )
        # Setters, which reach the parts of a multimodal model too. None is what is not configured.
        settings._attn_implementation = None
        settings._experts_implementation = None
    except Exception as error:  # the boundary to a model's code, which may raise anything
        raise UserError(
            f"{Path(folder) / CONFIG} is refused by transformers ({one_line(error)}); repair it, "
            "or use another model."
        ) from error
    return settings


def one_line(error: BaseException) -> str:
    """An error of a library or of a model's code, short enough for a sentence."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."
