"""Checks ``environment.reward_model`` by its files."""

from pathlib import Path

from nemo_like.config.environment import REWARD_MODEL
from nemo_like.config.environment import REWARD_MODEL_KEY as KEY
from nemo_like.config.model_files import CONFIG, read_object
from nemo_like.config.paths import check_model, is_checkpoint
from nemo_like.errors import UserError

_SCORES = "ForSequenceClassification"


def check_reward_model(model: str | None, *, has_tokenizer: bool) -> None:
    if model is None:
        raise UserError(
            f"{KEY} is not set, and environment.reward={REWARD_MODEL} scores by it; give the "
            "folder final/ of a run of nemo-like rm."
        )
    if is_checkpoint(model):
        raise UserError(f"{KEY}={model} is a checkpoint; give the folder final/ of its run.")
    check_model(KEY, model, has_tokenizer=has_tokenizer)
    if Path(model).expanduser().is_dir():
        check_scores(Path(model).expanduser())


def check_scores(folder: Path) -> None:
    """Refuse a reward model without a scalar head, by its config.json."""
    settings = read_object(folder / CONFIG)
    listed = settings.get("architectures")
    first = listed[0] if isinstance(listed, list) and listed else None
    kind = first if isinstance(first, str) else "model of unknown class"
    labels = settings.get("id2label")
    # transformers leaves out two, its default
    num_labels = len(labels) if isinstance(labels, dict) and labels else 2
    if not kind.endswith(_SCORES):
        raise UserError(
            f"{KEY}={folder} is not a reward model: a {kind} has no scalar head; give the folder "
            f"final/ of a run of nemo-like rm, or another ...{_SCORES} with one label."
        )
    if num_labels != 1:
        raise UserError(
            f"{KEY}={folder} is not a reward model: its {kind} has {num_labels} labels, and a "
            "score is one number."
        )
