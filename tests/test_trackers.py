"""MLflow, trackio and Prometheus get a run's numbers, samples and keys, without secrets."""

import importlib
import json
import sqlite3
import urllib.request

import pytest
from prometheus_client import parser

from nemo_like.algorithms.grpo.config import GRPOConfig
from nemo_like.config.run import SINKS
from nemo_like.errors import UserError
from nemo_like.observe.sinks import Details, Sinks
from nemo_like.observe.trackers import Prometheus
from tests.not_here import cannot_test

SAMPLES = [{"prompt": "1 + 1 =", "completion": "2", "reward": 1.0}]
DETAILS = Details(histograms={"rollout/rewards": [0.0, 1.0, 1.0]}, samples=SAMPLES)
CONFIG = GRPOConfig.model_validate({"generation": {"engine_kwargs": {"hf_token": "s3cret"}}})


def logged(name, folder):
    """Steps 1 and 2 by two executions of a run, through the key that names the sink."""
    make = SINKS.load("logging.sinks", name)
    for step, last in ((1, None), (2, 1)):
        sinks = Sinks([make(folder, CONFIG, last)], last)
        sinks.log(step, {"train/loss": 0.5 / step, "train/bad": float("nan")}, DETAILS)
        sinks.close()
        assert not sinks.num_failures
    found = [path for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in found if b"s3cret" in path.read_bytes()]


def installed(name):
    try:
        return importlib.import_module(name)
    except ImportError:
        cannot_test(f"the package {name} is not installed", "NEMO_LIKE_REQUIRE_TRACKERS")


def test_mlflow_has_one_run_of_both_executions(tmp_path, monkeypatch):
    mlflow = installed("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    logged("mlflow", tmp_path)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    run = client.get_run((tmp_path / "mlflow_run_id").read_text())
    assert run.data.params["policy.optimizer.lr"] == "0.0001"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(one.step, one.value) for one in history] == [(1, 0.5), (2, 0.25)]
    (kept,) = tmp_path.rglob("samples/step_1.json")
    assert json.loads(kept.read_text()) == SAMPLES


def test_trackio_has_one_run_of_both_executions(tmp_path, monkeypatch):
    trackio = installed("trackio")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    logged("trackio", tmp_path)
    assert len(trackio.Api().runs("nemo-like")) == 1
    with sqlite3.connect(tmp_path / "trackio" / "nemo-like.db") as file:
        rows = file.execute("select step, metrics from metrics order by step").fetchall()
    assert {step for step, _ in rows} == {1, 2}
    text = "".join(str(metrics) for _, metrics in rows)
    assert [word for word in ("train/loss", "rollout/rewards", "1 + 1 =") if word not in text] == []


def test_prometheus_reads_the_latest_numbers_on_this_machine_only(tmp_path):
    first, second = Prometheus(tmp_path, CONFIG, None), Prometheus(tmp_path, CONFIG, None)
    try:
        assert first.url != second.url
        assert second.url.startswith("http://127.0.0.1:")
        second.log(1, {"train/loss": 0.5, "train/bad": float("nan"), "a/far": float("inf")})
        second.log(2, {"train/loss": 0.25, "train/bad": float("nan"), "a/far": float("inf")})
        text = urllib.request.urlopen(second.url, timeout=5).read().decode()
    finally:
        first.close()
        second.close()
    (sample,) = [
        one
        for family in parser.text_string_to_metric_families(text)
        for one in family.samples
        if one.name == "nemo_like_train_loss"
    ]
    assert sample.value == 0.25
    assert sample.labels == {"run": tmp_path.name}
    assert "nemo_like_step" in text


@pytest.mark.parametrize("name", ["mlflow", "trackio"])
def test_a_missing_package_is_named_with_its_remedy(name, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(UserError, match=rf"needs the package {name} .*pip install {name}, or"):
        SINKS.load("logging.sinks", name)(tmp_path, CONFIG, None)
