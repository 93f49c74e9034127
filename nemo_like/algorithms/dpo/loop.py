"""Direct preference optimization (arXiv:2305.18290) and its relatives, on given pairs.

Each pair's loss is a function of how much more the policy prefers the chosen completion to the
rejected one than the reference does (``losses/preference.py``: sigmoid, IPO, hinge, smoothed,
length-normalised, reference-free, with an SFT term). The reference is the model that training
begins with. Left out here: pairs sampled during training, references that follow the policy.
"""

from contextlib import ExitStack
from dataclasses import replace

from nemo_like.algorithms.dpo.config import DPOConfig
from nemo_like.algorithms.processes import find_model
from nemo_like.algorithms.run import Run
from nemo_like.algorithms.text_rows import HeldOutLoss, TextSetup, in_parts, prepare, restore, start
from nemo_like.batch import keys
from nemo_like.data import preferences
from nemo_like.distributed.remote_batch import RemoteBatch
from nemo_like.losses.preference import PreferenceLoss


def run_dpo(config: DPOConfig) -> None:
    """Everything from a configuration to a trained model in ``run.dir``."""
    model_path = find_model(config)
    live = config.keeps_reference
    with Run(config, "dpo") as run, ExitStack() as stack:
        with run.start_phase("data"):
            rows = prepare(config, preferences.load, model_path)
        setup = start(config, run, rows, stack, model_path=model_path, with_reference=live)
        if not config.loss.reference_free:
            with run.start_phase("reference"):
                setup = with_reference_logprobs(setup, live)
        restore(config, run, setup)
        train(config, setup, run, live)
        if config.checkpoint.export:
            setup.policy.export(str(run.dir / "final"))
        run.finish()


def with_reference_logprobs(setup: TextSetup, live: bool) -> TextSetup:
    """Score the rows with the policy as it is: before its first step, and before a checkpoint is
    restored, it is the reference. ``live``: held-out rows alone; steps score their own."""

    def scored(batch: RemoteBatch) -> RemoteBatch:
        return in_parts(batch, lambda part: setup.policy.score(part, keys.REFERENCE_LOGPROBS))

    return replace(
        setup,
        train=setup.train if live else scored(setup.train),
        held_out=None if setup.held_out is None else scored(setup.held_out),
    )


def train(config: DPOConfig, setup: TextSetup, run: Run, live: bool) -> None:
    """The loop."""
    policy, loss = setup.policy, PreferenceLoss(config.loss)
    for _ in run.steps(
        setup.rows.max_steps,
        {"policy": policy},
        setup.rows.loader,
        HeldOutLoss(setup, loss, run) if setup.held_out is not None else None,
        config.validation.every_steps,
    ):
        batch = setup.next_batch()
        if live:
            with run.span("logprobs"):
                policy.logprobs(batch, with_policy=False)
        with run.span("train"):
            metrics = policy.train(batch, loss, rows_per_unit=2)
        run.log(metrics | setup.metrics(batch))
