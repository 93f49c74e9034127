"""Training a reward model on given pairs: a scalar head that scores the chosen completion higher.

The model is the language model with one number in place of its vocabulary, read at the last token
of prompt and completion; the loss is Bradley-Terry's (``losses/reward_model.py``). What is exported
is transformers' own model for sequence classification with one label. Left out here: tensor,
context and pipeline parallelism, which the scalar head does not know.
"""

from contextlib import ExitStack

from nemo_like.algorithms.processes import find_model
from nemo_like.algorithms.rm.config import RewardModelConfig
from nemo_like.algorithms.run import Run
from nemo_like.algorithms.text_rows import HeldOutLoss, TextSetup, prepare, restore, start
from nemo_like.data import preferences
from nemo_like.losses.reward_model import RewardModelLoss


def run_reward_model(config: RewardModelConfig) -> None:
    """Everything from a configuration to a trained model in ``run.dir``."""
    model_path = find_model(config)
    with Run(config, "rm") as run, ExitStack() as stack:
        with run.start_phase("data"):
            rows = prepare(config, preferences.load, model_path)
        setup = start(config, run, rows, stack, model_path=model_path, output="values")
        restore(config, run, setup)
        train(config, setup, run)
        if config.checkpoint.export:
            setup.policy.export(str(run.dir / "final"))
        run.finish()


def train(config: RewardModelConfig, setup: TextSetup, run: Run) -> None:
    """The loop."""
    loss = RewardModelLoss(config.loss)
    for _ in run.steps(
        setup.rows.max_steps,
        {"policy": setup.policy},
        setup.rows.loader,
        HeldOutLoss(setup, loss, run) if setup.held_out is not None else None,
        config.validation.every_steps,
    ):
        batch = setup.next_batch()
        with run.span("train"):
            metrics = setup.policy.train(batch, loss, rows_per_unit=2)
        run.log(metrics | setup.metrics(batch))
