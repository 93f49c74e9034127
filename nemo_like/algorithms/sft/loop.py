"""Supervised fine-tuning: the next-token loss on given conversations.

Rows come from ``data/conversations.py``, which says what of them trains; the loss is the mean of
-log p(token) over all trained tokens of a step, whatever their rows, ranks and micro-batches
(``losses/cross_entropy.py``). Left out here: a mean over rows instead of tokens, and sampling from
the model for validation (``examples/run_eval.py`` does that).
"""

from contextlib import ExitStack

from nemo_like.algorithms.processes import find_model
from nemo_like.algorithms.run import Run
from nemo_like.algorithms.sft.config import SFTConfig
from nemo_like.algorithms.text_rows import HeldOutLoss, TextSetup, prepare, restore, start
from nemo_like.data import conversations
from nemo_like.losses.cross_entropy import CrossEntropyLoss


def run_sft(config: SFTConfig) -> None:
    """Everything from a configuration to a trained model in ``run.dir``."""
    model_path = find_model(config)  # a wrong layout leaves no folder behind
    with Run(config, "sft") as run, ExitStack() as stack:
        with run.start_phase("data"):
            rows = prepare(config, conversations.load, model_path)
        setup = start(config, run, rows, stack, model_path=model_path)
        restore(config, run, setup)
        train(config, setup, run)
        if config.checkpoint.export:
            setup.policy.export(str(run.dir / "final"))
        run.finish()


def train(config: SFTConfig, setup: TextSetup, run: Run) -> None:
    """The loop."""
    loss = CrossEntropyLoss()
    for _ in run.steps(
        setup.rows.max_steps,
        {"policy": setup.policy},
        setup.rows.loader,
        HeldOutLoss(setup, loss, run) if setup.held_out is not None else None,
        config.validation.every_steps,
    ):
        batch = setup.next_batch()
        with run.span("train"):
            metrics = setup.policy.train(batch, loss)
        run.log(metrics | setup.metrics(batch))
