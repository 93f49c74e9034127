"""What a reward model reads: prompt and completion by its own template, as in training it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nemo_like.config.paths import GRADER_KEY, check_scores
from nemo_like.config.policy import Dtype
from nemo_like.config.sampling import GradingModelConfig
from nemo_like.data.chat import ChatTokenizer
from nemo_like.data.conversations import Conversation, encode
from nemo_like.data.messages import Message
from nemo_like.data.token_rows import TokenRow
from nemo_like.errors import UserError
from nemo_like.models.context import context_length
from nemo_like.models.kinds import CLASSIFIER
from nemo_like.models.resolve import resolve_model
from nemo_like.models.settings import model_settings
from nemo_like.planning.activations import BYTES, FLOAT32

GRADER_SWITCHES = "environment.reward_model.template_switches"


class RewardText:
    """A reward model's folder: its tokenizer, chat template and context, without its weights."""

    def __init__(
        self, config: GradingModelConfig, of_policy: Mapping[str, Any] | None = None
    ) -> None:
        """``of_policy``: switches of the policy's template, for a model that has none set.

        Raises UserError if there is no such model, or if it has no scalar head.
        """
        assert config.model is not None
        self.folder = resolve_model(config.model, GRADER_KEY, classes=(CLASSIFIER,))
        check_scores(self.folder)
        self.chat = ChatTokenizer(
            str(self.folder), config.template_switches, GRADER_SWITCHES, of_policy
        )
        self._context = context_length(str(self.folder))

    def encode(self, messages: Sequence[Message], completion: str) -> TokenRow:
        """Prompt and completion up to the token that ends it, as reward models train on them.

        Raises UserError for what the template refuses, and for a text that is too long.
        """
        answer = {"role": "assistant", "content": completion}
        whole = Conversation(
            where="reward model", messages=(*messages, answer), num_prompt_messages=len(messages)
        )
        row = encode(whole, self.chat, "assistant")
        if len(row.ids) > self._context:
            raise UserError(
                f"reward model: prompt and completion have {len(row.ids)} tokens, and its context "
                f"is {self._context}."
            )
        return row

    def num_bytes(self, dtype: Dtype | None) -> int:
        """What the weights take in memory."""
        stored = sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))
        if dtype is None:
            return stored
        own = model_settings(self.folder).dtype
        return stored * BYTES[dtype] // (own.itemsize if isinstance(own, torch.dtype) else FLOAT32)
