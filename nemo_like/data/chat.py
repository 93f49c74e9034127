"""The one place where messages become token ids."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from nemo_like.errors import UserError

Message = dict[str, Any]
"""``{"role": ..., "content": ...}``, as chat templates take it."""


class ChatTokenizer:
    """A model folder's tokenizer and chat template.

    The length filter and the rollout use the same ``render``, so they cannot disagree.
    """

    def __init__(self, model_path: str) -> None:
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        except (OSError, ValueError) as error:
            first_line = str(error).strip().splitlines()[0]
            raise UserError(
                f"The tokenizer of {model_path} could not be loaded: {first_line}"
            ) from error
        if self._tokenizer.chat_template is None:
            raise UserError(
                f"The tokenizer of {model_path} has no chat template; add chat_template.jinja to "
                "the folder, or use an instruct model."
            )
        self.eos_token_ids = _eos_token_ids(Path(model_path), self._tokenizer.eos_token_id)
        """Every id that ends a turn: the tokenizer's, and all of the generation config."""

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation up to where the assistant answers.

        The template writes the special tokens; none are added on top (no second BOS).
        """
        ids: list[int] = self._tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a completion without special tokens."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text


def _eos_token_ids(folder: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    ids = {tokenizer_eos} if tokenizer_eos is not None else set()
    path = folder / "generation_config.json"
    if path.exists():
        extra = json.loads(path.read_text()).get("eos_token_id", [])
        ids |= set(extra) if isinstance(extra, list) else {extra}
    return tuple(sorted(i for i in ids if i is not None))


@functools.cache
def context_length(model_path: str) -> int:
    """Most positions that the model of a folder was made for."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_path, local_files_only=True).get_text_config()
    return int(config.max_position_embeddings)
