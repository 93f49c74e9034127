"""Weights & Biases; the only file that uses ``wandb``."""

import logging
import os
import secrets
from pathlib import Path
from typing import Any

from nemo_like.config.run import RunConfig
from nemo_like.errors import UserError
from nemo_like.observe.sinks import Details
from nemo_like.observe.trackers import masked, package

logger = logging.getLogger(__name__)

_INIT_TIMEOUT_S = 60.0
# The rest of an upload that takes longer stays on disk for `wandb sync`.
_FINISH_TIMEOUT_S = 120.0
_WITHOUT_SERVER = ("offline", "dryrun", "disabled")
"""Values of WANDB_MODE that upload nothing."""


class WandbSink:
    """One W&B run; a resumed run goes on under the id kept in ``<run_dir>/wandb_run_id``.

    Offline records lie in ``<run_dir>/wandb``; ``wandb sync`` uploads them. Credentials are W&B's
    own business (``wandb login`` or WANDB_API_KEY) and are never read here.
    """

    def __init__(self, run_dir: Path, config: RunConfig, last_step: int | None) -> None:
        """Secrets in the configuration are masked."""
        wandb = self._wandb = package("wandb")
        logging.getLogger("wandb").setLevel(logging.WARNING)
        run_dir.mkdir(parents=True, exist_ok=True)
        run_id, is_resumed = _run_id(run_dir)
        online = os.environ.get("WANDB_MODE") not in _WITHOUT_SERVER
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "nemo-like"),
                name=run_dir.name,
                dir=str(run_dir),
                id=run_id,
                resume="allow" if online and is_resumed else None,  # offline: `wandb sync` joins
                config=masked(config.model_dump()),
                reinit="create_new",  # several runs in one process (--multirun) stay apart
                settings=wandb.Settings(
                    silent=True,
                    console="off",  # run.log has the console; captured output may hold anything
                    x_disable_meta=True,  # it holds the command line, with any secret typed there
                    init_timeout=_INIT_TIMEOUT_S,
                    finish_timeout=_FINISH_TIMEOUT_S,
                ),
            )
        except (wandb.Error, ValueError) as error:
            raise UserError(
                "logging.sinks=[wandb] could not start; run `wandb login`, or set "
                "WANDB_MODE=offline and upload later with `wandb sync`. W&B says: "
                f"{' '.join(str(error).split())}"
            ) from error
        # An axis of our own: W&B's step counter drops what a resumed run logs for steps that an
        # earlier process had reached.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        where = self._run.url if online else f"offline, in {run_dir / 'wandb'}"
        if self._run.disabled:
            where = "disabled, records nothing (WANDB_MODE=disabled)"
        logger.info("wandb: %s", where)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Hand one record to W&B's own process, which uploads in the background."""
        self._run.log({"step": step, **values})

    def log_details(self, step: int, details: Details) -> None:
        """Histograms, and samples as a table."""
        found: dict[str, Any] = {
            name: self._wandb.Histogram([*values]) for name, values in details.histograms.items()
        }
        if details.samples:
            rows: list[Any] = [[*sample.values()] for sample in details.samples]
            found["samples"] = self._wandb.Table(columns=[*details.samples[0]], data=rows)
        self._run.log({"step": step, **found})

    def close(self) -> None:
        """Upload what is left, for a bounded time."""
        self._run.finish()

    def fail(self) -> None:
        """The same, of a run that an error ends."""
        self._run.finish(exit_code=1)


def _run_id(run_dir: Path) -> tuple[str, bool]:
    """The run's id, and whether an earlier process has used it."""
    path = run_dir / "wandb_run_id"
    if path.exists() and (run_id := path.read_text(encoding="utf-8").strip()):
        return run_id, True
    run_id = secrets.token_hex(4)
    path.write_text(run_id + "\n", encoding="utf-8")
    return run_id, False
