"""Measure a model on held-out prompts, with the engines, environment and prompts of training.

The model's weights reach the engines as in training: a policy loads them, and a refit brings them.
With the ``data``, ``run.seed`` and sampling of a training run's validations, an evaluation of its
checkpoint samples the very same completions. Left out here: several models in one run.
"""

import logging
import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from nemo_like.algorithms.eval_report import Measured, write_report
from nemo_like.algorithms.run import Run
from nemo_like.algorithms.setup import Prepared, find_model, start
from nemo_like.checkpoint import open_checkpoint
from nemo_like.config.file_checks import REASONING_GYM, is_checkpoint, model_of_checkpoint
from nemo_like.config.sampling_run_schema import EvalRunConfig
from nemo_like.data.chat import ChatTokenizer
from nemo_like.data.datasets import (
    VALIDATION_SEED_OFFSET,
    Row,
    check_lengths,
    fingerprint,
    load_rows,
)
from nemo_like.data.loader import PromptLoader
from nemo_like.errors import UserError
from nemo_like.models.context import context_length
from nemo_like.observe.jsonl import JsonlFile
from nemo_like.policy.policy import Policy
from nemo_like.rollout import graders

logger = logging.getLogger(__name__)


def run_eval(config: EvalRunConfig) -> None:
    """Everything from a configuration to ``eval.json`` and ``samples.jsonl`` in ``run.dir``."""
    name = config.policy.model
    model = model_of_checkpoint(name) if is_checkpoint(name) else name
    model_path = find_model(replace(config, policy=replace(config.policy, model=model)))
    with Run(config, "eval") as run, ExitStack() as stack:
        with run.start_phase("data"):
            prepared = prepare(config, model_path)
        setup = start(config, run, prepared, stack)
        if is_checkpoint(name):
            with run.start_phase("checkpoint"):
                load_checkpoint(setup.policy, Path(name).expanduser().resolve())
        rows, size = prepared.validation_rows, config.eval.num_prompts_per_step
        measured = Measured(config, rows)
        file = JsonlFile(run.dir / "samples.jsonl")
        stack.callback(file.close)
        for step in run.rounds(math.ceil(len(rows) / size)):
            first = (step - 1) * size
            samples, metrics = setup.rollouts.sample(
                step, rows[first : first + size], first, config.eval
            )
            for record in measured.add(samples):
                file.append(record)
            run.log(metrics | setup.driver_metrics())
        write_report(measured.report(), run.dir / "eval.json")


def prepare(config: EvalRunConfig, model_path: str) -> Prepared:
    """Read the validation rows, check every prompt's length; raises UserError."""
    chat = ChatTokenizer(model_path)
    context = context_length(model_path)
    most_new = config.eval.max_new_tokens or config.generation.max_new_tokens
    if most_new >= context:
        section = "generation" if config.eval.max_new_tokens is None else "eval"
        raise UserError(
            f"{section}.max_new_tokens={most_new} does not fit the model's context of {context} "
            "tokens with a prompt; use less."
        )
    key, source = "data.validation", config.data.validation or REASONING_GYM
    seed = config.run.seed + VALIDATION_SEED_OFFSET
    rows = load_rows(source, config.data, config.data.num_validation_rows, seed, key)
    graders.check_rows(config.environment, {key: rows}, chat)
    _check_category(rows, config.eval.category_field, key)
    rows, longest = check_lengths(rows, chat, context, context, most_new, config.data, key)
    return Prepared(
        model_path=model_path,
        loader=PromptLoader(
            rows, fingerprint=fingerprint(rows), seed=config.run.seed, shuffle=False
        ),
        validation_rows=rows,
        eos_token_ids=chat.eos_token_ids,
        max_model_len=longest + most_new,
    )


def load_checkpoint(policy: Policy, folder: Path) -> None:
    """Bring the policy to a run's checkpoint, which is checked byte for byte."""
    state = open_checkpoint(folder)
    policy.load_weights(str(folder / "policy"), state.weight_versions["policy"])
    logger.info("Weights of %s, after step %d.", folder, state.step)


def _check_category(rows: list[Row], field: str | None, key: str) -> None:
    for row in rows:
        if field is not None and field not in row.fields:
            found = ", ".join(row.fields) or "none"
            raise UserError(
                f"eval.category_field={field}: row {row.index} of {key} has no such field (its "
                f"fields: {found}); name one that every row has."
            )
