"""The rows of a run that samples, before tokenization."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nemo_like.config.environment import REWARD_MODEL, EnvironmentConfig
from nemo_like.config.sampling import SamplingRunConfig
from nemo_like.data.datasets import (
    VALIDATION_SEED_OFFSET,
    Row,
    check_lengths,
    load_rows,
    without_overlap,
)
from nemo_like.errors import UserError
from nemo_like.models.resolve import context_for
from nemo_like.rewards.find import load_reward, reward_spec

if TYPE_CHECKING:
    from nemo_like.data.chat import ChatTokenizer


def read_rows(config: SamplingRunConfig) -> dict[str, list[Row]]:
    """Read or generate ``data.train`` and ``data.validation``; raises UserError.

    Each row has an environment, and the fields that its reward needs. An evaluation has validation
    rows only.
    """
    data, seed = config.data, config.run.seed
    train: list[Row] = []
    validation: list[Row] = []
    if config.trains:
        train = load_rows(data.train_parts, data, data.num_train_rows, seed)
    if config.evaluates or config.validates:
        held_out = seed + VALIDATION_SEED_OFFSET
        validation = load_rows(data.validation_parts, data, data.num_validation_rows, held_out)
    if train and validation:
        train = without_overlap(train, validation)
    found = {"data.train": train, "data.validation": validation}
    for key, rows in found.items():
        _check_environments(rows, config.environment, key)
        for name, one in config.environment.by_name.items():
            _check_fields([row for row in rows if row.environment == name], one, key)
    return found


def check_rows(
    config: SamplingRunConfig, key: str, rows: Sequence[Row], model_path: str, chat: "ChatTokenizer"
) -> tuple[list[Row], int]:
    """Rendered rows that fit with a completion, and the most tokens that the two may have.

    Raises UserError as ``check_lengths`` does, for rows of ``key``.
    """
    if not rows:
        return [], 0
    completion = config.longest_completion(key)
    context = context_for(model_path, *completion)
    each = config.environment.by_name.values()
    # What is only measured needs no room in a micro-batch; turns are cut where training's are.
    measured = key == "data.validation" and all(one.is_single_turn for one in each)
    most = context if measured or not config.trains else config.policy.micro_batch_tokens
    kept, longest = check_lengths(rows, chat, most, context, completion, config.data, key)
    return kept, longest + completion[1]


def _check_environments(rows: Sequence[Row], environment: EnvironmentConfig, key: str) -> None:
    """Refuse rows that name an unknown environment."""
    known = environment.by_name
    for row in rows:
        if row.environment not in known:
            names = ", ".join(environment.tasks) or "empty"
            raise UserError(
                f"row {row.index} of {key} has environment={row.environment}, and "
                f"environment.tasks is {names}; add it there, or set data.columns.place="
                "environment if the column is the reward function's own."
            )


def _check_fields(rows: Sequence[Row], environment: EnvironmentConfig, key: str) -> None:
    """Refuse rows that lack an argument of the reward function."""
    # A reward model's errors need its tokenizer; conversations may have rewards of their own.
    if not rows or environment.reward == REWARD_MODEL or not environment.is_single_turn:
        return
    reward, required = environment.reward, load_reward(reward_spec(environment)).required_fields
    for row in rows:
        for name in sorted(required):
            if name not in row.fields:
                from nemo_like.data.columns import paths_of

                found = ", ".join(paths_of(row.fields)) or "none"
                raise UserError(
                    f"environment.reward={reward} needs the field '{name}', and row {row.index} of "
                    f"{key} does not have it (its fields: {found}); set data.columns.{name} to the "
                    "column that has it."
                )
