"""From ``environment`` to what scores: a reward function, or a reward model."""

import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from nemo_like.config.environment import CODE, SINGLE_TURN, EnvironmentConfig
from nemo_like.config.paths import REWARD_MODEL, REWARD_MODEL_KEY
from nemo_like.config.remote_code import TRUSTED, trusts_code
from nemo_like.data.chat import ChatTokenizer
from nemo_like.data.datasets import Row
from nemo_like.doors import absolute
from nemo_like.errors import UserError
from nemo_like.rewards.function import reward_spec
from nemo_like.rewards.pool import RewardPool, memory_share

logger = logging.getLogger(__name__)

_LOAD_TIMEOUT_S = 600.0
_ROWS_OF_A_PASS = 8
_ROWS_OF_A_LOOP = 32
_CONVERSATIONS_OF_A_LOOP = 1024
_GIB = 2**30


def check_reward_model(
    environment: EnvironmentConfig, rows_of: Mapping[str, Sequence[Row]], chat: ChatTokenizer
) -> None:
    """Refuse, before models load, a reward model that cannot score; others are not looked at.

    ``rows_of``: by the key that they are from; ``chat`` is the policy's. Raises UserError.
    """
    if environment.reward != REWARD_MODEL:
        return
    from nemo_like.rewards.reward_text import RewardText

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
        text.num_bytes() / _GIB,
        environment.num_processes,
    )


def for_other_folders(environment: EnvironmentConfig) -> EnvironmentConfig:
    """The same for a process that works in another folder."""
    model = environment.reward_model
    if environment.reward == REWARD_MODEL:
        from nemo_like.rewards.reward_text import RewardText

        model = str(RewardText(str(model), {}).folder)
    parts = {
        name: {**part, "function": absolute(part["function"])}
        for name, part in environment.rewards.items()
    }
    return environment.replace(
        name=absolute(environment.name),
        reward=absolute(environment.reward),
        rewards=parts,
        reward_model=model,
    )


def start_pool(
    environment: EnvironmentConfig,
    engines_per_node: int = 1,
    *,
    switches: Mapping[str, Any] | None = None,
    num_threads: int = 1,
) -> RewardPool:
    """Reward processes that are ready; UserError says why they are not.

    ``engines_per_node``: engines that have such processes on one node, and share its memory.
    ``switches`` of the policy's template; ``num_threads`` of each process that has a reward model.
    """
    gib = environment.process_memory_gib
    num_processes = environment.num_processes
    limit = memory_share(num_processes * engines_per_node) if gib is None else int(gib * _GIB)
    is_single = environment.name == SINGLE_TURN
    pool_of = partial(
        RewardPool,
        timeout_s=environment.timeout_s if is_single else environment.trajectory_timeout_s,
        num_processes=num_processes,
        memory_limit_bytes=limit,
    )
    if environment.reward == REWARD_MODEL:
        return pool_of(
            json.dumps(
                {
                    "model": environment.reward_model,
                    "switches": dict(switches or {}),
                    "num_threads": num_threads,
                    TRUSTED: trusts_code(),
                }
            ),
            module="nemo_like.rewards.reward_model",
            rows_at_once=environment.rows_at_once or _ROWS_OF_A_PASS,
            most_rows=None,  # another would round the scores of known texts otherwise
            start_timeout_s=_LOAD_TIMEOUT_S,
        )
    if not is_single:
        spec = {name: getattr(environment, name) for name in ("name", "options", "timeout_s")}
        return pool_of(
            json.dumps(spec | {"reward": reward_spec(environment)}),
            module="nemo_like.environments.episode",
            pass_variables=environment.pass_variables,
            concurrency=environment.rows_at_once or _CONVERSATIONS_OF_A_LOOP,
        )
    if environment.reward == CODE:
        return pool_of(_code_options(environment), module="nemo_like.rewards.code.reward")
    pool = pool_of(
        reward_spec(environment),
        pass_variables=environment.pass_variables,
        concurrency=environment.rows_at_once or _ROWS_OF_A_LOOP,
    )
    if not pool.is_concurrent and environment.rows_at_once is not None:
        pool.shutdown()
        raise UserError(
            f"environment.rows_at_once={environment.rows_at_once} would have no effect: "
            f"{environment.reward} is not an async def, and scores one completion after the other; "
            "leave it out, or set environment.num_processes."
        )
    return pool


def _code_options(environment: EnvironmentConfig) -> str:
    return json.dumps(
        {
            "credit": environment.code_credit,
            "seconds": environment.code_seconds,
            "memory_gib": environment.code_memory_gib,
            "timeout_s": environment.timeout_s,
        }
    )
