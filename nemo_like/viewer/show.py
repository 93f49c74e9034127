"""``nemo-like show RUN``: state, latest metrics, phases and samples in the terminal."""

import argparse
import json
import re
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_like.errors import UserError
from nemo_like.observe.console import printable
from nemo_like.viewer.runs import Record, RunFolder, find_runs, mean_phases

_AREAS = ("rollout/", "validation/", "train/", "mismatch/")
_SHOWN_PHASES = 10
_BAD = re.compile(r" ERROR | WARNING (?!.*: Alarm at step )")


def run(arguments: Sequence[str]) -> None:
    """Print one run, or each of several; raises UserError."""
    parser = argparse.ArgumentParser(
        prog="nemo-like show", description="Print a run's progress and samples."
    )
    parser.add_argument("runs", nargs="+", help="run.dir of a run, or a folder of such folders")
    parser.add_argument("--step", type=int, help="show this step (default: the last one)")
    parser.add_argument("--samples", type=int, default=2, help="trajectories to print (default: 2)")
    options = parser.parse_args(arguments)
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    for one in find_runs(options.runs):
        _show(console, one, options.step, options.samples)


def _show(console: Console, run: RunFolder, step: int | None, num_samples: int) -> None:
    if step is not None and step not in (made := [one["step"] for one in run.records()]):
        has = f"it has {made[0]} to {made[-1]}" if made else "it has none yet"
        raise UserError(f"{run.name} has no step {step}; {has}.")
    _say(console, f"{run.name}: {run.state()}", "bold")
    _say(console, str(run.path))
    for line in run.outcome():
        _say(console, line)
    records = [one for one in run.records() if step is None or one["step"] <= step]
    if records:
        console.print(_numbers(records))
        console.print(_phases([one for one in records if one["step"]][-_SHOWN_PHASES:]))
    _samples(console, run, step, num_samples)
    for alarm in run.alarms:
        _say(console, f"Alarm at step {alarm.step}: {alarm.text}", "yellow")
    for line in [one for one in run.log() if _BAD.search(one)][-3:]:
        _say(console, line, "yellow")


def _say(console: Console, text: str, style: str = "") -> None:
    if text:
        console.print(Text(printable(text), style=style))


def _numbers(records: Sequence[Record]) -> Table:
    """Metrics of the last step and the last validation."""
    table = Table("metric", "value", "step", box=None, pad_edge=False, header_style="bold")
    latest = {
        name: (value, one["step"])
        for one in records
        for name, value in one.items()
        if name.startswith("validation/") or (one is records[-1] and name.startswith(_AREAS))
    }
    for name, (value, step) in sorted(latest.items()):
        shown = "not finite" if value is None else f"{value:.5g}"
        table.add_row(Text(printable(name)), shown, str(step))
    return table


def _phases(records: Sequence[Record]) -> Table:
    """Mean seconds of each phase over some steps."""
    table = Table("phase", "s/step", "share", box=None, pad_edge=False, header_style="bold")
    means = mean_phases(records)
    for name, seconds in means.most_common():
        share = seconds / (means.total() or 1)
        table.add_row(name, f"{seconds:.3f}", f"{share:.0%} {'█' * round(30 * share)}")
    return table


def _samples(console: Console, run: RunFolder, step: int | None, count: int) -> None:
    """The first completion of some groups of the step (default: the last one)."""
    kept = run.trajectories
    kept.refresh()
    steps = kept.columns["step"]
    found = kept.chosen({"index_max": "0", "step_max": "" if step is None else str(step)})
    found = found[steps[found] == (steps[found].max(initial=0) if step is None else step)]
    for one in kept.read(found[:count]):
        reward = "failed" if one["reward"] is None else f"{one['reward']:.3f}"
        title = f"\nstep {one['step']}, {one['phase']}, group {one['group']}: reward {reward}"
        _say(console, f"{title}, {one['end']}, {one['num_tokens']} tokens", "bold")
        for message in one["messages"]:
            said = message.get("content") or json.dumps(message.get("tool_calls"))
            _say(console, f"{message.get('role')}: {said}")
        _say(console, one["text"] if one["turns"] == 1 else "", "cyan")
        _say(console, one["error"] or "", "red")
