"""The rows of a run that samples, as far as they are known without a tokenizer."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from nemo_like.algorithms.eval.config import EvalConfig
from nemo_like.config.paths import REASONING_GYM, REWARD_MODEL
from nemo_like.config.sampling import SamplingRunConfig
from nemo_like.data.datasets import VALIDATION_SEED_OFFSET, Row, load_rows, without_overlap
from nemo_like.environments.rewards import resolve_reward
from nemo_like.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What a run reads; an evaluation only has held-out rows."""

    train: list[Row]
    validation: list[Row]


def read_rows(config: SamplingRunConfig) -> Rows:
    """Read or generate the rows, and check them against the reward; raises UserError."""
    required: frozenset[str] = frozenset()
    if config.environment.reward != REWARD_MODEL:  # whose errors need its tokenizer
        required = resolve_reward(config.environment.reward).required_fields
    data, seed = config.data, config.run.seed
    train: list[Row] = []
    validation: list[Row] = []
    source = data.validation or REASONING_GYM
    if not isinstance(config, EvalConfig):
        train = load_rows(data.train, data, data.num_train_rows, seed, "data.train")
        source = data.validation or data.train
    if isinstance(config, EvalConfig) or config.validates:
        held_out = seed + VALIDATION_SEED_OFFSET
        validation = load_rows(source, data, data.num_validation_rows, held_out, "data.validation")
    if train and validation:
        train = without_overlap(train, validation)
    for key, rows in (("data.train", train), ("data.validation", validation)):
        _check_fields(rows, required, config.environment.reward, key)
    if isinstance(config, EvalConfig):
        _check_category(validation, config.eval.category_field)
    return Rows(train=train, validation=validation)


def _check_fields(rows: Sequence[Row], required: Collection[str], reward: str, key: str) -> None:
    """Refuse rows that the reward function could not be called with."""
    for row in rows:
        for name in sorted(required):
            if name not in row.fields:
                found = ", ".join(row.fields) or "none"
                raise UserError(
                    f"environment.reward={reward} needs the field '{name}', and row {row.index} of "
                    f"{key} does not have it (its fields: {found})."
                )


def _check_category(rows: list[Row], field: str | None) -> None:
    for row in rows:
        if field is not None and field not in row.fields:
            found = ", ".join(row.fields) or "none"
            raise UserError(
                f"eval.category_field={field}: row {row.index} of data.validation has no such "
                f"field (its fields: {found}); name one that every row has."
            )
