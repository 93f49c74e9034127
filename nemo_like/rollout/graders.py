"""From ``environment`` to what grades: a reward function, or a reward model."""

import json
import logging
from collections.abc import Mapping, Sequence

from nemo_like.config.paths import GRADER_KEY, REWARD_MODEL
from nemo_like.config.sampling import EnvironmentConfig
from nemo_like.data.chat import ChatTokenizer
from nemo_like.data.datasets import Row
from nemo_like.environments.grading_pool import GradingPool
from nemo_like.environments.rewards import absolute_reward
from nemo_like.errors import UserError
from nemo_like.rollout.reward_text import RewardText

logger = logging.getLogger(__name__)

_LOAD_TIMEOUT_S = 600.0
_GIB = 2**30


def check_reward_model(
    environment: EnvironmentConfig, rows_of: Mapping[str, Sequence[Row]], chat: ChatTokenizer
) -> None:
    """Refuse, before models load, a reward model that cannot grade; others are not looked at.

    ``rows_of``: by the key that they are from; ``chat`` is the policy's. Raises UserError.
    """
    if environment.reward != REWARD_MODEL:
        return
    config = environment.reward_model
    text = RewardText(config)
    for key, rows in rows_of.items():
        for row in rows[:1]:  # for all of them, each grade checks its own
            try:
                text.encode(row.messages, "")
            except UserError as error:
                raise UserError(
                    f"{GRADER_KEY}={config.model} cannot read row {row.index} of {key}: {error}"
                ) from error
    if not text.chat.has_template_of(chat):
        logger.warning(
            "The reward model's chat template or end tokens are not the policy's; completions are "
            "scored as its own template renders them."
        )
    logger.info(
        "Reward model %s: %.3g GiB in each of %d grading process(es) beside every engine.",
        text.folder,
        text.num_bytes(config.dtype) / _GIB,
        environment.num_processes,
    )


def for_other_folders(environment: EnvironmentConfig) -> EnvironmentConfig:
    """The same for a process that works in another folder."""
    model = environment.reward_model
    if environment.reward == REWARD_MODEL:
        model = model.replace(model=str(RewardText(model).folder))
    return environment.replace(reward=absolute_reward(environment.reward), reward_model=model)


def start_pool(environment: EnvironmentConfig) -> GradingPool:
    """Grading processes that are ready; UserError says why they are not."""
    if environment.reward != REWARD_MODEL:
        return GradingPool(
            environment.reward,
            timeout_s=environment.timeout_s,
            num_processes=environment.num_processes,
        )
    return GradingPool(
        json.dumps(environment.reward_model.model_dump()),
        timeout_s=environment.timeout_s,
        num_processes=environment.num_processes,
        module="nemo_like.rollout.reward_model",
        rows_at_once=environment.reward_model.rows_at_once,
        start_timeout_s=_LOAD_TIMEOUT_S,
    )
