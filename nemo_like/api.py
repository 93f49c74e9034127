"""Runs from Python, in a script or a notebook, on the same path as the command line.

    import nemo_like as nl
    run = nl.grpo(model="embedded", train=rows, reward=score, overrides={"grpo.max_steps": 20})
    run.metrics, run.model_dir

Rows and functions become files in ``<run.dir>/inputs``, which the command line can name too. Errors
are exceptions (UserError, RunError, KeyboardInterrupt); after any end nothing but the folder stays.
"""

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nemo_like.compose import registry
from nemo_like.compose.files import SHIPPED
from nemo_like.compose.load import check, check_algorithm, compose_raw
from nemo_like.config.paths import check_run_dir, readable
from nemo_like.config.run import RunConfig
from nemo_like.config.typed import as_typed
from nemo_like.distributed.worker import keep_compiler_cache
from nemo_like.errors import UserError
from nemo_like.run.ending import told_to_end
from nemo_like.run.folder import make_run_dir

Rows = str | Path | Iterable[Mapping[str, Any]] | None
"""A ``.jsonl`` file, a list of dictionaries, or one split of a Hugging Face dataset."""
Reward = str | Callable[..., Any] | None
"""A reward function, or a value of ``environment.reward``."""
Model = str | Path | None
Keys = Mapping[str, Any] | None
"""Dotted keys (docs/config.md) and their values."""

_REWARD_FILE = '''"""The reward function of this run as it was passed; see ``nemo_like.api``."""
import sys
from pathlib import Path
from ray import cloudpickle
sys.path.extend(one for one in {path!r} if one not in sys.path)
reward = cloudpickle.loads(Path(__file__).with_suffix(".pickle").read_bytes())
'''


@dataclass(frozen=True)
class RunResult:
    """A run that has ended, by its folder."""

    dir: Path

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The record of each step; see ``metrics.jsonl``."""
        with (self.dir / "metrics.jsonl").open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]

    @property
    def summary(self) -> dict[str, Any]:
        """What the run came to; of an evaluation its whole report."""
        name = "eval.json" if (self.dir / "eval.json").exists() else "summary.json"
        return json.loads((self.dir / name).read_text(encoding="utf-8"))

    @property
    def model_dir(self) -> Path:
        """The trained model in Hugging Face format; UserError if none was exported."""
        if not (self.dir / "final").is_dir():
            raise UserError(f"{self.dir} has no model: it evaluates, or checkpoint.export=false.")
        return self.dir / "final"


def _texts(
    name: str,
    *,
    model: Model = None,
    train: Rows = None,
    validation: Rows = None,
    config_name: str | None = None,
    overrides: Keys = None,
) -> RunResult:
    """None keeps what the configuration says that ``config_name`` names; ``overrides`` win."""
    return _run(name, config_name, overrides, model, train=train, validation=validation)


def _samples(
    name: str,
    *,
    model: Model = None,
    train: Rows = None,
    validation: Rows = None,
    reward: Reward = None,
    config_name: str | None = None,
    overrides: Keys = None,
) -> RunResult:
    """As ``_texts``, of a run whose completions get rewards."""
    rows = {"train": train, "validation": validation}
    return _run(name, config_name, overrides, model, **rows, reward=reward)


grpo = partial(_samples, "grpo")
ppo = partial(_samples, "ppo")
sft = partial(_texts, "sft")
dpo = partial(_texts, "dpo")
rm = partial(_texts, "rm")
distill = partial(_samples, "distillation")
distill_texts = partial(_texts, "off_policy_distillation")
"""Both need ``overrides={"teacher.model": ...}``."""
eval = partial(_samples, "eval")
"""Measures on ``validation``; ``summary`` is the whole report."""


def train(
    config: RunConfig, *, train: Rows = None, validation: Rows = None, reward: Reward = None
) -> RunResult:
    """Run a typed configuration, such as ``nl.GRPOConfig(...)``; see ``grpo`` for the others."""
    algorithm = registry.find(registry.name_of(type(config)))
    with readable():
        check_run_dir(config)  # nothing is written into the folder of another run
    is_new = config.run.dir is None or not Path(config.run.dir).expanduser().exists()
    folder = make_run_dir(config, algorithm.name)
    try:
        found = {"data.train": _rows_file(folder, "train", train)}
        found["data.validation"] = _rows_file(folder, "validation", validation)
        found["environment.reward"] = _reward_spec(folder, reward)
        for key, value in {"run.dir": str(folder), **found}.items():
            section, _, name = key.partition(".")
            if value is not None:
                config = config.replace(
                    **{section: getattr(config, section).replace(**{name: value})}
                )
        check(config)
        keep_compiler_cache()
        from nemo_like.algorithms.session import launch  # imports Ray

        launch(algorithm, config)
    except Exception as error:
        if (told := told_to_end(error)) is not None:
            raise told from None
        raise
    finally:
        if (inputs := str(folder / "inputs")) in sys.path:  # since its signature was read
            sys.path.remove(inputs)
        if is_new and not (folder / "run.log").exists():  # it never began
            shutil.rmtree(folder)
    return RunResult(folder)


def _run(name: str, config: str | None, keys: Keys, model: Model, **inputs: Any) -> RunResult:
    keys = dict(keys or {})
    if model is not None:
        is_choice = (SHIPPED / "model" / f"{model}.yaml").is_file() and name != "eval"
        keys = {"model" if is_choice else "policy.model": model, **keys}
    composed = compose_raw(SHIPPED, config or name, as_typed(keys))
    check_algorithm(f"nl.{name}", composed.schema, registry.find(name).config)
    return train(composed.typed(), **inputs)


def _rows_file(folder: Path, name: str, rows: Rows) -> str | None:
    """The file of ``rows``, written if they are not in one."""
    if rows is None or isinstance(rows, str | Path):
        return None if rows is None else str(rows)
    lines = []
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise UserError(
                f"{name}: row {index} is a {type(row).__name__}, not a dictionary; of a dataset, "
                'give one split, such as dataset["train"].'
            )
        try:
            lines.append(json.dumps(dict(row), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise UserError(f"{name}: row {index} cannot be written as JSON: {error}.") from error
    return str(_write(folder, name, ".jsonl", "".join(f"{line}\n" for line in lines).encode()))


def _reward_spec(folder: Path, reward: Reward) -> str | None:
    """``environment.reward``: a function is pickled next to a file that loads it."""
    if reward is None or isinstance(reward, str):
        return reward
    from ray.cloudpickle.cloudpickle import dumps

    try:
        pickled = dumps(reward)
    except Exception as error:  # of the objects that the function refers to
        remedy = "make clients, locks and open files inside the function"
        raise UserError(f"reward cannot be pickled ({error}); {remedy}.") from error
    file = _write(folder, "reward", ".pickle", pickled).with_suffix(".py")
    file.write_text(_REWARD_FILE.format(path=sys.path), encoding="utf-8")
    return f"{file}:reward"


def _write(folder: Path, name: str, suffix: str, content: bytes) -> Path:
    """A file named after its content: inputs of an earlier part of the run stay as they were."""
    path = folder / "inputs" / f"{name}_{hashlib.sha256(content).hexdigest()[:8]}{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path
