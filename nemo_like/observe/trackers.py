"""Experiment trackers: ``logging.sinks=[mlflow]``, ``[trackio]``, ``[prometheus]``.

Each takes the run's folder, its configuration and the last step before a resume.
"""

import importlib
import logging
import re
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from nemo_like.config.run import RunConfig
from nemo_like.config.typed import flat
from nemo_like.errors import UserError
from nemo_like.observe.sinks import Details

logger = logging.getLogger(__name__)

_SECRET_KEY = re.compile(r"(^|_)(token|api_key|secret|password)$", re.IGNORECASE)
_PROMETHEUS_PORT = 9464
_MOST_CHARS, _MOST_AT_ONCE = 500, 100
"""MLflow's limits: characters of a parameter, and parameters per call."""


class Mlflow:
    """An MLflow run, which a resumed run continues.

    It goes to ``MLFLOW_TRACKING_URI``, or else into the run's folder:
    ``mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db``.
    """

    def __init__(self, run_dir: Path, config: RunConfig, last_step: int | None) -> None:
        mlflow = package("mlflow")
        here = not mlflow.is_tracking_uri_set()
        uri = f"sqlite:///{run_dir}/mlflow.db" if here else None
        self._make = mlflow.entities.Metric
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        id_file = run_dir / "mlflow_run_id"
        if last_step is not None and id_file.exists():
            self._id = id_file.read_text()
            self._client.update_run(self._id, "RUNNING")
            return
        name = "nemo-like"
        found = self._client.get_experiment_by_name(name)
        files = str(run_dir / "mlflow") if here else None
        experiment = found.experiment_id if found else self._client.create_experiment(name, files)
        self._id = self._client.create_run(experiment, run_name=run_dir.name).info.run_id
        id_file.write_text(self._id)
        values = flat(masked(config.model_dump(mode="json"))).items()
        params = [mlflow.entities.Param(key, str(one)[:_MOST_CHARS]) for key, one in values]
        for begin in range(0, len(params), _MOST_AT_ONCE):
            self._client.log_batch(self._id, params=params[begin : begin + _MOST_AT_ONCE])

    def log(self, step: int, values: dict[str, float]) -> None:
        now = round(time.time() * 1000)
        found = [self._make(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=found)

    def log_details(self, step: int, details: Details) -> None:
        """Samples as a table, one file for each validation."""
        if details.samples:
            name = f"samples/step_{step}.json"
            self._client.log_dict(self._id, [*map(dict, details.samples)], name)

    def close(self) -> None:
        self._client.set_terminated(self._id)

    def fail(self) -> None:
        self._client.set_terminated(self._id, "FAILED")


class Trackio:
    """A trackio run on this machine (``TRACKIO_DIR``); ``trackio show`` opens its page."""

    def __init__(self, run_dir: Path, config: RunConfig, last_step: int | None) -> None:
        self._trackio = package("trackio")
        resume = "never" if last_step is None else "allow"
        self._run = self._trackio.init(
            project="nemo-like",
            name=run_dir.name,
            config=flat(masked(config.model_dump(mode="json"))),
            resume=resume,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def log_details(self, step: int, details: Details) -> None:
        """Histograms, and samples as a table."""
        import pandas as pd

        found = {name: self._trackio.Histogram(one) for name, one in details.histograms.items()}
        if details.samples:
            found["samples"] = self._trackio.Table(dataframe=pd.DataFrame([*details.samples]))
        self._run.log(found, step=step)

    def close(self) -> None:
        self._run.finish()


class Prometheus:
    """Serves the latest metrics at ``http://127.0.0.1:9464/metrics``, or on a free port."""

    def __init__(self, run_dir: Path, config: RunConfig, last_step: int | None) -> None:
        client, self._run = package("prometheus_client"), run_dir.name
        registry = client.CollectorRegistry()
        self._gauge = partial(client.Gauge, labelnames=("run",), registry=registry)
        self._gauges: dict[str, Any] = {}
        serve = partial(client.start_http_server, addr="127.0.0.1", registry=registry)
        try:
            self._server, _ = serve(_PROMETHEUS_PORT)
        except OSError:
            self._server, _ = serve(0)
        self.url = f"http://127.0.0.1:{self._server.server_port}/metrics"
        logger.info("Prometheus: %s", self.url)

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in {"step": step, **values}.items():
            metric = "nemo_like_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
            if metric not in self._gauges:
                self._gauges[metric] = self._gauge(metric, name)
            self._gauges[metric].labels(self._run).set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"logging.sinks=[{name}] needs the package {name} ({error}); pip install {name}, or "
            "leave it out."
        ) from error


def masked(config: Mapping[str, Any]) -> dict[str, Any]:
    """Copy without the text under keys like ``hf_token`` or ``api_key``."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        is_secret = isinstance(value, str) and _SECRET_KEY.search(key)
        plain = masked(value) if isinstance(value, Mapping) else value
        found[key] = "***" if is_secret else plain
    return found
