"""Measure a model on held-out prompts, with the engines, environment and prompts of training.

The model's weights reach the engines as in training: a policy loads them, and a refit brings them.
With the ``data``, ``run.seed`` and sampling of a training run's validations, an evaluation of its
checkpoint samples the very same completions. Left out here: several models in one run.
"""

import logging
import math
from pathlib import Path

from nemo_like.algorithms.eval.config import EvalConfig
from nemo_like.algorithms.eval.report import Measured, write_report
from nemo_like.algorithms.processes import Processes
from nemo_like.algorithms.rows import Rows
from nemo_like.algorithms.setup import Prepared, check_stop_ids, start
from nemo_like.checkpoint import open_checkpoint
from nemo_like.config.paths import is_checkpoint
from nemo_like.data.chat import ChatTokenizer
from nemo_like.data.datasets import check_lengths, fingerprint
from nemo_like.data.loader import PromptLoader
from nemo_like.models.context import context_for
from nemo_like.observe.jsonl import JsonlFile
from nemo_like.policy.policy import Policy
from nemo_like.rollout import graders

logger = logging.getLogger(__name__)


def run_eval(config: EvalConfig, processes: Processes) -> None:
    """Everything from a run's processes to ``eval.json`` and ``samples.jsonl`` in ``run.dir``."""
    run, name = processes.run, config.policy.model
    with run.start_phase("prompts"):
        prepared = prepare(config, processes.rows, processes.model_path)
    setup = start(config, processes, prepared)
    if is_checkpoint(name):
        with run.start_phase("checkpoint"):
            load_checkpoint(setup.policy, Path(name).expanduser().resolve())
    rows, size = prepared.validation_rows, config.eval.num_prompts_per_step
    measured = Measured(config, rows)
    file = JsonlFile(run.dir / "samples.jsonl")
    processes.stack.callback(file.close)
    for step in run.rounds(math.ceil(len(rows) / size)):
        first = (step - 1) * size
        samples, metrics = setup.rollouts.sample(
            step, rows[first : first + size], first, config.eval
        )
        for record in measured.add(samples):
            file.append(record)
        run.log(metrics | setup.meter.pop())
    write_report(measured.report(), run.dir / "eval.json")


def prepare(config: EvalConfig, rows: Rows, model_path: str) -> Prepared:
    """Render and check every prompt; raises UserError."""
    chat = ChatTokenizer(model_path, config.data.template_switches)
    check_stop_ids(config, chat)
    most_new = config.eval.max_new_tokens or config.generation.max_new_tokens
    section = "generation" if config.eval.max_new_tokens is None else "eval"
    context = context_for(model_path, f"{section}.max_new_tokens", most_new)
    graders.check_reward_model(config.environment, {"data.validation": rows.validation}, chat)
    checked, longest = check_lengths(
        rows.validation, chat, context, context, most_new, config.data, "data.validation"
    )
    return Prepared(
        loader=PromptLoader(
            checked, fingerprint=fingerprint(checked), seed=config.run.seed, shuffle=False
        ),
        validation_rows=checked,
        eos_token_ids=chat.eos_token_ids,
        max_model_len=longest + most_new,
    )


def load_checkpoint(policy: Policy, folder: Path) -> None:
    """Bring the policy to a run's checkpoint, which is checked byte for byte."""
    state = open_checkpoint(folder)
    policy.load_weights(str(folder / "policy"), state.weight_versions["policy"])
    logger.info("Weights of %s, after step %d.", folder, state.step)
