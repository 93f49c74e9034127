"""Measure a model on held-out prompts, with the engines, environment and prompts of training.

The model's weights reach the engines as in training: a policy loads them, and a refit brings them.
With the ``data``, ``run.seed`` and sampling of a training run's validations, an evaluation of its
checkpoint samples the very same completions. Left out here: several models in one run.
"""

import logging
import math
from collections.abc import Sequence
from pathlib import Path

from nemo_like.algorithms.eval.config import PROMPTS_AT_ONCE, EvalConfig
from nemo_like.algorithms.eval.report import Measured, write_report
from nemo_like.algorithms.sampling import start_sampling
from nemo_like.algorithms.session import Session
from nemo_like.config.paths import is_checkpoint
from nemo_like.data.datasets import Row
from nemo_like.errors import UserError
from nemo_like.observe.sinks import JsonlFile
from nemo_like.planning.resources import plan_run
from nemo_like.policy.remote_model import RemoteModel
from nemo_like.run.continued import open_checkpoint

logger = logging.getLogger(__name__)


def run(config: EvalConfig, session: Session) -> None:
    """From a run's processes to ``eval.json`` and ``samples.jsonl`` in ``run.dir``."""
    run, name = session.run, config.policy.model
    check_category(session.rows["data.validation"], config.eval.category_field)
    live = start_sampling(config, session)
    if is_checkpoint(name):
        with run.start_phase("checkpoint"):
            load_checkpoint(live.policy, Path(name).expanduser().resolve())
    rows = live.validation_rows
    size = max(PROMPTS_AT_ONCE, len(plan_run(config).generation))  # some for each engine
    measured = Measured(config, rows)
    (path := run.dir / "samples.jsonl").unlink(missing_ok=True)  # of an evaluation that was ended
    file = JsonlFile(path)
    session.stack.callback(file.close)
    for step in run.rounds(math.ceil(len(rows) / size)):
        first = (step - 1) * size
        samples, metrics = live.rollouts.sample(
            step, rows[first : first + size], first, config.validation
        )
        for record in measured.add(samples):
            file.append(record)
        run.log(metrics | session.meter.pop())
    live.failures.check_parts("the evaluation")
    write_report(measured.report(), run.dir / "eval.json")


def check_category(rows: Sequence[Row], field: str | None) -> None:
    """Raise UserError for a row without the field that results are broken down by."""
    for row in rows:
        if field is not None and field not in row.fields:
            found = ", ".join(row.fields) or "none"
            raise UserError(
                f"eval.category_field={field}: row {row.index} of data.validation has no such "
                f"field (its fields: {found}); name one that every row has."
            )


def load_checkpoint(policy: RemoteModel, folder: Path) -> None:
    """Bring the policy to a run's checkpoint, which is checked byte for byte."""
    state = open_checkpoint(folder)
    policy.load(str(folder / "policy"), state.weight_versions["policy"], weights_only=True)
    logger.info("Weights of %s, after step %d.", folder, state.step)
