"""What a reward model reads: prompt and completion by its own template, as in training it."""

from collections.abc import Sequence

import torch
from transformers import AutoConfig

from nemo_like.config.paths import GRADER_KEY, check_scores
from nemo_like.config.policy import Dtype
from nemo_like.config.remote_code import trusts_code
from nemo_like.config.sampling import GradingModelConfig
from nemo_like.data.chat import ChatTokenizer
from nemo_like.data.conversations import Conversation, encode
from nemo_like.data.messages import Message
from nemo_like.data.token_rows import TokenRow
from nemo_like.errors import UserError
from nemo_like.models.context import context_length
from nemo_like.models.resolve import resolve_model
from nemo_like.planning.activations import BYTES, FLOAT32

GRADER_SWITCHES = "environment.reward_model.template_switches"


class RewardText:
    """A reward model's folder: its tokenizer, chat template and context, without its weights."""

    def __init__(self, config: GradingModelConfig) -> None:
        """Raises UserError if there is no such model, or if it has no scalar head."""
        assert config.model is not None
        self.folder = resolve_model(config.model, GRADER_KEY)
        check_scores(self.folder)
        self.chat = ChatTokenizer(str(self.folder), config.template_switches, GRADER_SWITCHES)
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
        own = AutoConfig.from_pretrained(
            self.folder, local_files_only=True, trust_remote_code=trusts_code()
        ).dtype
        return stored * BYTES[dtype] // (own.itemsize if isinstance(own, torch.dtype) else FLOAT32)
