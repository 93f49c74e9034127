"""Rules about files that the configuration names: model, data, reward function, run folder.

They are looked at, never loaded or run.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nemo_like.config.data import RowsConfig
from nemo_like.config.environment import REWARD_MODEL
from nemo_like.config.model_files import CONFIG, TOKENIZER_CONFIG, read_object
from nemo_like.config.run import CALLBACKS, RunConfig
from nemo_like.config.sampling import SamplingRunConfig
from nemo_like.config.section import named_outside, value_of
from nemo_like.config.sources import REASONING_GYM, find
from nemo_like.doors import refuse_special
from nemo_like.errors import UserError

BUILT_IN_MODELS = ("embedded", "smollm2")
_HUB_NAME = re.compile(r"(?!\.)[\w.-]+/[\w.-]+")
_PART_BYTES = 2**16
# Below each node's own folder: where Ray unpacks what `ray job submit --working-dir` uploads.
_RAY_PACKAGES = "/runtime_resources/working_dir_files/"


@contextmanager
def readable() -> Iterator[None]:
    """Within, paths that cannot be looked at become a UserError; decorates functions too."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename} cannot be read: {error.strerror}; correct the path, or its "
            "permissions."
        ) from error
    except RuntimeError as error:
        if "home directory" not in str(error):  # of Path.expanduser
            raise
        raise UserError(
            "A path begins with ~ and a name that no user of this machine has; write it in full."
        ) from error


def check_files(config: RunConfig, *, runs: bool = True) -> None:
    """Raise UserError for the first file or folder that cannot serve.

    ``runs`` is false where only sizes are read, for which a model's config.json is enough.
    """
    model = config.policy.model
    if is_checkpoint(model):
        if not config.evaluates:
            raise UserError(
                f"policy.model={model} is a checkpoint, not a model; give the folder final/ of its "
                "run, or continue that run with run.resume=true."
            )
        from nemo_like.config.checkpoints import check_adapters, model_of_checkpoint

        model = model_of_checkpoint(model)
        check_adapters(config)
    check_model("policy.model", model, has_tokenizer=runs)
    for key, other in config.other_models():
        check_model(key, other, has_tokenizer=runs)
    if isinstance(config, SamplingRunConfig):
        environment = config.environment
        alone = environment.is_single_turn and not environment.rewards and not environment.tasks
        _check_data(config.data, environment.reward if alone else None)
        for one in environment.by_name.values():
            if one.reward == REWARD_MODEL:
                from nemo_like.config.reward_models import check_reward_model

                check_reward_model(one.reward_model, has_tokenizer=runs)
    else:
        _check_data(value_of(config, "data"))
    for key, door, spec in named_outside(config):
        door.look(key, spec)
    for name, part in config.run.callbacks.items():
        CALLBACKS.look(f"run.callbacks.{name}.callback", part["callback"])
    check_run_dir(config)


def is_checkpoint(model: str) -> bool:
    """Whether ``policy.model`` is a checkpoint, ``<run.dir>/checkpoints/step_<n>``."""
    return (Path(model).expanduser() / "driver.json").is_file()


def check_model(key: str, model: str, *, has_tokenizer: bool = True) -> None:
    """A folder must look like a model with a chat template; names are looked up later.

    ``key`` is where the configuration has it; without ``has_tokenizer`` config.json is enough.
    Raises UserError.
    """
    path = Path(model).expanduser()
    if model in BUILT_IN_MODELS or is_hub_name(model):
        return
    if not path.is_dir():
        raise UserError(
            f"{key}={model}: no such folder; give {' or '.join(BUILT_IN_MODELS)}, a folder "
            "in Hugging Face format, or a hub name (organisation/model)."
        )
    refuse_special(f"{key}={model}", path, depth=2)
    if (path / "checkpoints").is_dir():
        raise UserError(
            f"{key}={model} is the folder of a run; give its final/, or to evaluate one of "
            "its checkpoints/step_<n>."
        )
    if not (path / CONFIG).is_file():
        raise UserError(f"{key}={model}: the folder has no config.json; it is not a model.")
    if not has_tokenizer:
        return
    if not (path / TOKENIZER_CONFIG).is_file():
        raise UserError(f"{key}={model}: the folder has no {TOKENIZER_CONFIG}.")
    templates = [path / "chat_template.jinja", path / "chat_template.json"]
    of_tokenizer = read_object(path / TOKENIZER_CONFIG)
    if not any(one.is_file() for one in templates) and not of_tokenizer.get("chat_template"):
        raise UserError(
            f"{key}={model}: its tokenizer has no chat template; add chat_template.jinja to "
            "the folder, or use an instruct model."
        )


def is_hub_name(model: str) -> bool:
    """Whether ``model`` reads like ``organisation/model`` of the hub, and is no path here."""
    return bool(_HUB_NAME.fullmatch(model)) and not Path(model).exists()


def _check_data(data: RowsConfig, reward: str | None = None) -> None:
    """``reward``: what scores the rows, if anything does."""
    for part in data.all_parts:
        for source in (one for one in part.sources if one != REASONING_GYM):
            found = find(part.key, source)
            for path in found if isinstance(found, list) else ():
                refuse_special(f"{part.key}={source}", path)
                if not _has_text(path):
                    raise UserError(
                        f"{part.key}={path} is empty; give a file with at least one row."
                    )
            if reward == REASONING_GYM:
                raise UserError(
                    f"environment.reward={REASONING_GYM} scores reasoning_gym's own rows, and "
                    f"{part.key} is a file; set environment.reward to math or to your "
                    "file.py:function."
                )


def _has_text(path: Path) -> bool:
    """Whether a file has anything but white space; reads no more than it takes to see it."""
    with path.open("rb") as file:
        return any(part.strip() for part in iter(lambda: file.read(_PART_BYTES), b""))


def check_run_dir(config: RunConfig) -> None:
    """Raise UserError for a folder that another run has, or that cannot be written."""
    run = config.run
    if run.dir is None and run.resume:
        raise UserError("run.resume=true needs run.dir, the folder of the run to continue.")
    if _RAY_PACKAGES in str(Path(run.dir or "runs").expanduser().absolute()):
        raise UserError(
            f"run.dir={run.dir or 'null'} is inside the copy of the working dir that Ray made for "
            "this job, and that Ray deletes afterwards; set run.dir to an absolute path in a "
            "folder that every node of the run shares."
        )
    if run.dir is None:
        return
    path = Path(run.dir).expanduser()
    refuse_special(f"run.dir={run.dir}", path, depth=1)
    # An evaluation has samples before it has a result; it starts over in its folder.
    starts_over = (path / "samples.jsonl").is_file() and not (path / "eval.json").exists()
    if _holds_run(path) and not (run.resume or (config.evaluates and starts_over)):
        raise UserError(
            f"run.dir={run.dir} already holds a run; continue it with run.resume=true, or choose "
            "another folder."
        )
    nearest = path
    while not nearest.exists():
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise UserError(f"run.dir={run.dir} cannot be written ({nearest}); choose another folder.")


def _holds_run(folder: Path) -> bool:
    """Whether a run got as far as a record or a checkpoint; one that was refused did not."""
    records, checkpoints = folder / "metrics.jsonl", folder / "checkpoints"
    has_records = records.is_file() and records.stat().st_size > 0
    return has_records or (checkpoints.is_dir() and any(checkpoints.iterdir()))
