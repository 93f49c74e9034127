"""Callbacks of a run, early stopping and the upload to the hub; plots of runs."""

import base64
import json
import os
import runpy
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from nemo_like.errors import RunError, UserError
from tests.small_runs import ROOT, records
from tests.test_stops import run_counter

OURS = """
import json
from pathlib import Path

class Notes:
    def __init__(self, last=99):
        self.last = last
    def note(self, *words):
        with (self.folder / "notes").open("a") as file:
            file.write(json.dumps(words) + "\\n")
    def on_start(self, folder, config, step):
        self.folder = folder
        self.note("start", config.section, step)
    def on_step(self, step, metrics):
        self.note("step", step, metrics["train/loss"])
        return f"step {step} is enough" if step >= self.last else None
    def on_validation(self, step, metrics):
        self.note("validation", step, metrics["validation/loss"])
    def on_end(self, summary):
        self.note("end", summary["steps"])

class Breaks:
    def on_step(self, step, metrics):
        return 1 / 0

class Talks:
    def on_validation(self, step, metrics):
        return metrics

class Leaves:
    def on_end(self, summary):
        raise OSError("no network")

class Empty:
    pass
"""


@pytest.fixture
def ours(tmp_path):
    file = tmp_path / "callbacks_of_mine.py"
    file.write_text(OURS)
    return file


def test_a_callback_hears_of_everything_and_may_end_the_run(ours, tmp_path):
    folder = tmp_path / "run"
    notes = f"run.callbacks.notes={{callback: '{ours}:Notes', last: 3}}"
    run_counter(folder, notes, steps=9)
    assert [json.loads(line) for line in (folder / "notes").read_text().splitlines()] == [
        *(["start", "sft", 0], ["validation", 0, 1.0], ["step", 1, 1.0], ["step", 2, 2.0]),
        *(["validation", 2, 1 / 3], ["step", 3, 3.0]),
        *(["validation", 3, 1 / 4], ["end", 3]),
    ]
    assert json.loads((folder / "summary.json").read_text())["steps"] == 3
    assert (folder / "checkpoints" / "step_3").is_dir()
    assert (
        "Ending after step 3 of 9; run.callbacks.notes: step 3" in (folder / "run.log").read_text()
    )


def test_a_failure_after_the_end_leaves_the_results_in_the_summary(ours, tmp_path):
    with pytest.raises(RunError, match="on_end failed: OSError: no network"):
        run_counter(
            tmp_path,
            f"run.callbacks.mine={{callback: '{ours}:Leaves'}}",
            final="here",
            next="eval it",
        )
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["steps"], summary["final"], summary["exit_code"]) == (4, "here", 1)
    assert summary["next"].endswith("run.resume=true")


def test_early_stopping_waits_for_its_patience_also_over_a_resume(tmp_path):
    """Losses are 1, 1/2, 1/3, ...: steps 1 and 3 improve by 0.2, and nothing after them."""
    stop = "run.callbacks.stop={callback: early_stopping, patience: 2, min_delta: 0.2}"
    run_counter(tmp_path / "whole", stop, steps=20, every=1)
    run_counter(tmp_path / "parts", stop, steps=4, every=1)
    for _ in range(2):  # what has ended does not go on
        run_counter(tmp_path / "parts", stop, steps=20, every=1)
    for folder in ("whole", "parts"):
        assert max(records(tmp_path / folder)) == 5
        assert (
            "has not improved on 0.25 of step 3 in 2 validations"
            in (tmp_path / folder / "run.log").read_text()
        )


@pytest.mark.parametrize(
    ("part", "kind", "message"),
    [
        ("{callback: early_stoping}", UserError, r"did you mean early_stopping\?"),
        ("{callback: 'OURS.py:Mine'}", UserError, r"callback=\S+: there is no file \S+\.py\.py"),
        ("{patience: 2}", UserError, r"run\.callbacks\.mine\.callback must name a class"),
        ("{callback: early_stopping, patienc: 2}", UserError, "does not take .*'patienc'"),
        ("{callback: early_stopping, patience: 0}", UserError, "patience must be at least 1"),
        ("{callback: early_stopping, metric: loss}", UserError, "use one of validation/loss"),
        ("{callback: 'OURS:Empty'}", UserError, "has no method on_start, on_step, on_validation"),
        ("{callback: 'OURS:Breaks'}", RunError, r"on_step failed: ZeroDivisionError.*mine\.py:\d"),
        ("{callback: 'OURS:Talks'}", RunError, "on_validation returned a dict; return nothing"),
    ],
)
def test_a_callback_that_cannot_work_is_named(ours, tmp_path, part, kind, message):
    override = f"run.callbacks.mine={part.replace('OURS', str(ours))}"
    with pytest.raises(kind, match=message):
        run_counter(tmp_path / "run", override)
    is_refused = kind is UserError and "metric" not in part
    assert (tmp_path / "run").exists() != is_refused


class Hub(BaseHTTPRequestHandler):
    """The calls of the hub's protocol that make a repository and commit small files."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer = {}
        if self.path.endswith("/repos/create"):
            answer = {"url": f"http://{self.headers['Host']}/me/mine", "id": "me/mine"}
        elif "/preupload/" in self.path:
            files = [one["path"] for one in json.loads(body)["files"]]
            answer = {
                "files": [
                    {"path": one, "uploadMode": "regular", "shouldIgnore": False} for one in files
                ]
            }
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    value = line["value"]
                    self.server.got[value["path"]] = base64.b64decode(value["content"])
            answer = {
                "commitUrl": f"http://{self.headers['Host']}/me/mine/commit/1",
                "commitOid": "1" * 40,
            }
        self.answer(answer)

    def do_GET(self):
        self.answer({"id": "me/mine", "sha": "0" * 40, "siblings": []})

    def answer(self, content):
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def push(folder, endpoint):
    """Starts and ends the callback alone, as a run would."""
    code = f"""
from pathlib import Path
from nemo_like.config.run import RunConfig
from nemo_like.run.callbacks import Callbacks
callbacks = Callbacks({{"hub": {{"callback": "push_to_hub", "repo": "me/mine"}}}})
callbacks.tell("on_start", Path({str(folder)!r}), RunConfig(), 0)
callbacks.tell("on_end", {{"steps": 3}})
"""
    env = os.environ | {"HF_ENDPOINT": endpoint, "HF_TOKEN": "hf_of_a_test", "HF_HUB_OFFLINE": "0"}
    env |= {"HF_HOME": str(folder / "cache"), "no_proxy": "127.0.0.1"}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


def test_final_is_uploaded_when_a_run_has_completed(tmp_path):
    final = tmp_path / "final"
    final.mkdir()
    (final / "config.json").write_text("{}")
    server = HTTPServer(("127.0.0.1", 0), Hub)
    server.got = {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    done = push(tmp_path, f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()
    assert done.returncode == 0, done.stderr
    assert server.got == {"config.json": b"{}"}


def test_a_hub_that_cannot_be_reached_is_known_before_training(tmp_path):
    done = push(tmp_path, "http://127.0.0.1:9")
    assert done.returncode == 1
    assert "RunError: run.callbacks.hub: on_start failed: " in done.stderr


def test_runs_of_any_script_are_drawn_also_unfinished_and_in_a_sweep(tmp_path, monkeypatch):
    lines = {
        "seed=0": [{"step": 1, "rollout/reward": 0.1}, {"step": 2, "validation/accuracy": 0.5}],
        "seed=1": [{"step": 1, "train/loss": 0.1}, {"step": 2, "validation/loss": 0.5}],
    }
    for name, found in lines.items():
        folder = tmp_path / "sweep" / name
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in found))
    script, out = str(ROOT / "examples" / "plot_runs.py"), tmp_path / "out.svg"
    typed = [script, str(out), str(tmp_path / "sweep")]
    monkeypatch.setattr(sys, "argv", typed)
    runpy.run_path(script, run_name="__main__")
    drawn = out.read_text()
    for words in (*lines, "rollout/reward, train/loss, validation/accuracy, validation/loss"):
        assert f"<!-- {words} -->" in drawn
    monkeypatch.setattr(sys, "argv", [*typed, "--metric=train/lost"])
    with pytest.raises(SystemExit):
        runpy.run_path(script, run_name="__main__")
