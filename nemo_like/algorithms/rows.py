"""The rows of a run that samples, before tokenization."""

from collections.abc import Collection, Sequence

from nemo_like.config.environment import REWARD_MODEL, SINGLE_TURN
from nemo_like.config.sampling import SamplingRunConfig
from nemo_like.data.columns import paths_of
from nemo_like.data.datasets import VALIDATION_SEED_OFFSET, Row, load_rows, without_overlap
from nemo_like.errors import UserError
from nemo_like.rewards.function import load_reward, reward_spec


def read_rows(config: SamplingRunConfig) -> dict[str, list[Row]]:
    """Read or generate ``data.train`` and ``data.validation``; raises UserError.

    Each row has the fields that the reward needs. An evaluation has validation rows only.
    """
    required: frozenset[str] = frozenset()
    environment = config.environment
    # A reward model's errors need its tokenizer; conversations may have rewards of their own.
    if environment.reward != REWARD_MODEL and environment.name == SINGLE_TURN:
        required = load_reward(reward_spec(environment)).required_fields
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
        _check_fields(rows, required, environment.reward, key)
    return found


def _check_fields(rows: Sequence[Row], required: Collection[str], reward: str, key: str) -> None:
    """Refuse rows that lack an argument of the reward function."""
    for row in rows:
        for name in sorted(required):
            if name not in row.fields:
                found = ", ".join(paths_of(row.fields)) or "none"
                raise UserError(
                    f"environment.reward={reward} needs the field '{name}', and row {row.index} of "
                    f"{key} does not have it (its fields: {found}); set data.columns.{name} to the "
                    "column that has it."
                )
