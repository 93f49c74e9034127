"""What a reward model reads: prompt and completion by its own template, as in training it."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_like.config.environment import REWARD_MODEL_KEY, EnvironmentConfig
from nemo_like.config.reward_models import check_scores
from nemo_like.data.chat import ChatTokenizer
from nemo_like.data.conversations import Conversation, encode
from nemo_like.data.datasets import Row
from nemo_like.data.messages import Message
from nemo_like.data.token_rows import TokenRow
from nemo_like.errors import UserError
from nemo_like.models.resolve import CLASSIFIER, context_length, resolve_model

logger = logging.getLogger(__name__)


class RewardText:
    """A reward model's folder: its tokenizer, chat template and context, without its weights."""

    def __init__(self, model: str, switches: Mapping[str, Any]) -> None:
        """``switches``: the policy's, used where known; UserError if the model cannot score."""
        self.folder = resolve_model(model, REWARD_MODEL_KEY, classes=(CLASSIFIER,))
        check_scores(self.folder)
        self.chat = ChatTokenizer(str(self.folder), otherwise=switches)
        self._context = context_length(str(self.folder))

    def encode(self, messages: Sequence[Message], completion: str) -> TokenRow:
        """Up to the token that ends the completion, as in training; UserError if it is too long."""
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

    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))


def check_reward_model(
    environment: EnvironmentConfig, rows_of: Mapping[str, Sequence[Row]], chat: ChatTokenizer
) -> None:
    """Refuse a reward model that cannot read the first of these rows; say what it takes."""
    text = RewardText(str(environment.reward_model), chat.switches)
    for key, rows in rows_of.items():
        for row in rows[:1]:  # for all of them, each score checks its own
            try:
                text.encode(row.messages, "")
            except UserError as error:
                raise UserError(
                    f"{REWARD_MODEL_KEY}={environment.reward_model} cannot read row {row.index} of "
                    f"{key}: {error}"
                ) from error
    if not text.chat.has_template_of(chat):
        logger.warning(
            "The reward model's chat template or end tokens are not the policy's; completions are "
            "scored as its own template renders them."
        )
    logger.info(
        "Reward model %s: %.3g GiB in each of %d reward process(es) beside every engine.",
        text.folder,
        text.num_bytes() / 2**30,
        environment.num_processes,
    )
