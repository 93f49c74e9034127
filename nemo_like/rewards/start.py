"""From ``environment`` to what scores: a reward function, or a reward model."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nemo_like.config.environment import CODE, REWARD_MODEL, EnvironmentConfig
from nemo_like.config.model_files import TRUSTED, trusts_code
from nemo_like.data.chat import ChatTokenizer
from nemo_like.data.datasets import Row
from nemo_like.doors import absolute
from nemo_like.errors import UserError
from nemo_like.rewards.find import MOST_REQUESTS, reward_spec
from nemo_like.rewards.pool import RewardPool, memory_share

_LOAD_TIMEOUT_S = 600.0
_ROWS_OF_A_PASS = 8
_ROWS_OF_A_LOOP = 32
_CONVERSATIONS_OF_A_LOOP = 1024
_GIB = 2**30


def check_reward_models(
    environment: EnvironmentConfig, rows_of: Mapping[str, Sequence[Row]], chat: ChatTokenizer
) -> None:
    """Refuse, before models load, reward models that cannot score; ignore other rewards.

    ``rows_of``: by the key that they are from; ``chat`` is the policy's. Raises UserError.
    """
    for name, one in environment.by_name.items():
        if one.reward == REWARD_MODEL:
            from nemo_like.rewards.reward_text import check_reward_model

            answered = {
                key: [row for row in rows if row.environment == name]
                for key, rows in rows_of.items()
            }
            check_reward_model(one, answered, chat)


def with_absolute_paths(environment: EnvironmentConfig) -> EnvironmentConfig:
    """The same for a process that works in another folder."""
    model = environment.reward_model
    if environment.reward == REWARD_MODEL:
        from nemo_like.rewards.reward_text import RewardText

        model = str(RewardText(str(model), {}).folder)
    parts = {
        name: part.replace(function=absolute(part.function))
        for name, part in environment.rewards.items()
    }
    judge, template = environment.judge, environment.judge.template
    if template is not None and "{{" not in template:
        judge = judge.replace(template=str(Path(template).expanduser().absolute()))
    return environment.replace(
        judge=judge,
        name=absolute(environment.name),
        reward=absolute(environment.reward),
        rewards=parts,
        reward_model=model,
        tasks={name: with_absolute_paths(one) for name, one in environment.tasks.items()},
    )


def start_pool(
    environment: EnvironmentConfig,
    engines_per_node: int = 1,
    *,
    num_engines: int = 1,
    switches: Mapping[str, Any] | None = None,
    num_threads: int = 1,
    log: Path | None = None,
) -> RewardPool:
    """Reward processes that are ready; UserError says why they are not.

    ``engines_per_node``: engines on one node, whose reward processes share its memory;
    ``num_engines``: engines of the run, whose processes share the requests to a judge;
    ``switches``: of the policy's template; ``num_threads``: of each process with a reward model;
    ``log``: file for their output.
    """
    gib = environment.process_memory_gib
    num_processes = environment.num_processes
    limit = memory_share(num_processes * engines_per_node) if gib is None else int(gib * _GIB)
    is_single = environment.is_single_turn
    pool_of = partial(
        RewardPool,
        timeout_s=environment.timeout_s if is_single else environment.trajectory_timeout_s,
        num_processes=num_processes,
        memory_limit_bytes=limit,
        log=log,
    )
    if environment.reward == REWARD_MODEL:
        model = {"model": environment.reward_model, "switches": dict(switches or {})}
        return pool_of(
            json.dumps(model | {"num_threads": num_threads, TRUSTED: trusts_code()}),
            module="nemo_like.rewards.reward_model",
            concurrency=environment.rows_at_once or _ROWS_OF_A_PASS,
            most_rows=None,  # another would round the scores of known texts otherwise
            start_timeout_s=_LOAD_TIMEOUT_S,
        )
    if environment.reward == CODE and is_single:
        return pool_of(_code_options(environment), module="nemo_like.rewards.code.reward")
    return _functions(environment, num_processes * num_engines, pool_of)


def _functions(
    environment: EnvironmentConfig, num_processes: int, pool_of: Callable[..., RewardPool]
) -> RewardPool:
    """The pool for functions and environments; ``num_processes``: of the whole run."""
    rows_at_once, passed = environment.rows_at_once, environment.pass_variables
    if environment.judges and rows_at_once is None:
        rows_at_once = MOST_REQUESTS // num_processes
        if not rows_at_once:
            raise UserError(
                f"A judge gets at most {MOST_REQUESTS} requests at once, which is less than the "
                f"{num_processes} reward processes of the run; lower environment.num_processes, "
                "or set environment.rows_at_once=1."
            )
    reward = reward_spec(environment, num_processes)
    if not environment.is_single_turn:
        spec = {name: getattr(environment, name) for name in ("name", "options", "timeout_s")}
        at_once = environment.rows_at_once or _CONVERSATIONS_OF_A_LOOP
        return pool_of(
            json.dumps(spec | {"reward": reward, "at_once": at_once}),
            module="nemo_like.environments.episode",
            pass_variables=passed,
            concurrency=at_once,
        )
    pool = pool_of(reward, pass_variables=passed, concurrency=rows_at_once or _ROWS_OF_A_LOOP)
    if not pool.takes_several and environment.rows_at_once is not None:
        pool.shutdown()
        raise UserError(
            f"environment.rows_at_once={environment.rows_at_once} would have no effect: "
            f"{environment.reward} scores one completion after the other, since it is not async; "
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
