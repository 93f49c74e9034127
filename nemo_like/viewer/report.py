"""``nemo-like report RUN [RUN2]``: where time went, what slowed the run, and what to change."""

import argparse
import html
import json
import math
import re
import statistics
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nemo_like.errors import UserError
from nemo_like.observe.phase_trace import SUFFIX
from nemo_like.viewer.runs import Record, RunFolder, differences, find_runs, mean_phases

_END = 10
"""Steps averaged at the beginning, and at the end, of a run."""
_SHOWN = (
    *("rollout/reward", "rollout/reward_std", "validation/reward", "validation/accuracy"),
    *("validation/loss", "train/loss", "policy/entropy", "mismatch/mean_abs", "train/grad_norm"),
    *("rollout/completion_tokens", "rollout/truncated_share", "rollout/zero_variance_share"),
    *("train/tokens_per_s", "time/step_s", "rollout/memory_gib", "train/memory_gib"),
    "train/gpu_memory_gib",
)
_MOST_VALIDATION, _MOST_CHECKPOINT, _MOST_DRIVER = 0.1, 0.05, 0.1
"""Shares of a run's time above which something is recommended."""
_STYLE = (
    "body{font:14px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{padding:2px 12px 2px 0;text-align:left}"
    "svg{width:160px;height:28px}path{fill:none;stroke:#1d4ed8}"
)

_ITEM = textwrap.TextWrapper(
    120, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
)

Block = tuple[str, Any]
"""``title``, ``text``, ``list`` or ``table``, and what it holds; ``curve`` cells hold numbers."""


def run(arguments: Sequence[str]) -> None:
    """Write ``report.html`` and ``report.md``; raises UserError."""
    parser = argparse.ArgumentParser(prog="nemo-like report", description=__doc__)
    parser.add_argument("run", help="run.dir of a run, where the report is written")
    parser.add_argument("other", nargs="?", help="run.dir of a run to compare with")
    parser.add_argument("--out", type=Path, help="folder for the report instead")
    parser.add_argument("--trace", type=Path, help="write all processes' phases here, for Perfetto")
    options = parser.parse_args(arguments)
    runs = find_runs([options.run, *([options.other] if options.other else [])])[:2]
    blocks, out = [*report(runs)], options.out or runs[0].path
    out.mkdir(parents=True, exist_ok=True)
    for name, text in (("report.html", as_html(blocks)), ("report.md", as_markdown(blocks))):
        (out / name).write_text(text, encoding="utf-8")
        sys.stdout.write(f"{out / name}\n")
    if options.trace:
        if not (trace := joined_trace(runs[0].path / "logs"))["traceEvents"]:
            raise UserError(f"--trace: {runs[0].path}/logs has no *.trace.jsonl; copy them too.")
        options.trace.write_text(json.dumps(trace), encoding="utf-8")
        sys.stdout.write(f"{options.trace}\n")


def joined_trace(log_dir: Path) -> dict[str, Any]:
    """The trace of all processes."""
    events: list[dict[str, Any]] = []
    for number, path in enumerate(sorted(log_dir.glob(f"*{SUFFIX}"))):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                events.append(json.loads(line) | {"pid": number})
            except ValueError:  # cut off by a crash
                continue
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def report(runs: Sequence[RunFolder]) -> Iterator[Block]:
    """The blocks of a report on one run, or on two side by side."""
    yield "title", " and ".join(run.name for run in runs)
    yield "list", [line for run in runs for line in (_about(run), *run.outcome())]
    yield "title", "Metrics"
    yield "text", f"First and last: means over {_END} steps or validations, or over half of fewer."
    yield "table", _numbers(runs)
    yield "title", "Where the time went"
    yield "table", _times(runs)
    for run in runs:
        yield "title", f"{run.name}: what slowed it down, and what to change"
        yield "list", [*_findings(run)] or ["Nothing stands out."]
    if len(runs) > 1:
        rows = [[key, *map(str, values)] for key, values in differences(runs).items()]
        yield "title", "Keys that differ"
        yield "table", [["key", *(run.name for run in runs)], *rows]


def _about(run: RunFolder) -> str:
    in_steps = len(run.steps()) * mean_phases(run.steps()).total()
    text = f"{run.name}: {run.state()}, model {run.config.get('policy.model')}"
    if (whole := run.summary().get("wall_s")) is None:
        return f"{text}, {in_steps:.0f} s in steps so far"
    return f"{text}, {whole:.0f} s in total, {in_steps:.0f} s of it in steps"


def _numbers(runs: Sequence[RunFolder]) -> list[list[Any]]:
    rows: list[list[Any]] = [["metric", "run", "first", "last", "min", "max", ""]]
    for name in _SHOWN:
        for run in runs:
            values = [one[name] for one in run.records() if one.get(name) is not None]
            if values:
                count = min(_END, (len(values) + 1) // 2)
                ends = map(statistics.fmean, (values[:count], values[-count:]))
                cells = [f"{value:.4g}" for value in (*ends, min(values), max(values))]
                rows.append([name, run.name, *cells, values])
    return rows


def _times(runs: Sequence[RunFolder]) -> list[list[str]]:
    rows = [["phase", *(f"{run.name}, s/step" for run in runs), "share"]]
    of_runs = [mean_phases(run.steps()) for run in runs]
    names = dict.fromkeys(name for one in of_runs for name, _ in one.most_common())
    for name in names:
        of_each = [f"{one[name]:.3f}" for one in of_runs]
        rows.append([name, *of_each, f"{of_runs[0][name] / (of_runs[0].total() or 1):.0%}"])
    return rows


def _findings(run: RunFolder) -> Iterator[str]:
    """The bottleneck with its evidence, then recommended settings and what each saves."""
    records = run.steps()
    if not (seconds := mean_phases(records)):
        return
    total = seconds.total()
    (phase, most), *_ = seconds.most_common()
    yield (
        f"Bottleneck: {phase} takes {most:.3g} of {total:.3g} s of a step ({most / total:.0%})"
        f"{_evidence(phase, records)}."
    )
    yield from _rarer(run, "validation", seconds, _MOST_VALIDATION)
    yield from _rarer(run, "checkpoint", seconds, _MOST_CHECKPOINT)
    driver = statistics.fmean(one.get("time/driver_s") or 0.0 for one in records)
    size = next((key for key in run.config if re.fullmatch(r".*\.num_\w+_per_step", key)), "")
    if driver > _MOST_DRIVER * total and size:
        yield (
            f"Workers wait {driver:.3g} s of a step for the driver; "
            f"{size}={2 * run.config[size]} (now {run.config[size]}) halves that per sample."
        )
    for alarm in run.alarms:
        yield f"Alarm at step {alarm.step}: {alarm.text}."


def _evidence(phase: str, records: Sequence[Record]) -> str:
    names = {
        "rollout": ("rollout/completion_tokens_max", "rollout/completion_tokens"),
        "train": ("train/tokens_per_s", "train/num_tokens"),
        "refit": ("refit/bytes", "time/refit_send_s", "time/refit_load_s"),
    }
    found = {
        name: statistics.fmean(one[name] for one in records)
        for name in names.get(phase, ())
        if all(one.get(name) is not None for one in records)
    }
    return "".join(f"; {name} {value:.4g}" for name, value in found.items())


def _rarer(run: RunFolder, phase: str, seconds: Counter[str], most: float) -> Iterator[str]:
    """Recommend doing something less often if its share of the time is above ``most``."""
    key, total = f"{phase}.every_steps", seconds.total()
    every, each = run.config.get(key) or 0, seconds[phase]
    if not (every and each > most * total):
        return
    times = max(2, math.ceil(each * (1 - most) / (most * max(total - each, 1e-9))))
    new = min(every * times, len(run.steps()))
    saved = each * (1 - every / new)
    if new > every:
        yield (
            f"{phase} takes {each / total:.0%} of the time; {key}={new} (now {every}) saves about "
            f"{saved:.2g} s of {total:.3g} s a step, {saved / total:.0%}."
        )


def as_markdown(blocks: Sequence[Block]) -> str:
    """The report as Markdown, without curves."""
    parts = []
    for number, (kind, found) in enumerate(blocks):
        if kind == "table":
            rows = [[_cell(cell) for cell in row if not isinstance(cell, list)] for row in found]
            rows[0] = [cell for cell in rows[0] if cell]
            lines = [f"| {' | '.join(row)} |" for row in rows]
            lines.insert(1, "|---" * len(rows[0]) + "|")
        elif kind == "list":
            lines = [_ITEM.fill(_cell(one)) for one in found]
        else:
            sign = "" if kind == "text" else "# " if number == 0 else "## "
            lines = [f"{sign}{_cell(found)}"]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return re.sub(r"([|<>*_`\\])", r"\\\1", text.replace("\n", " "))


def as_html(blocks: Sequence[Block]) -> str:
    """The report as one page that needs nothing else."""
    parts = [f"<!doctype html><meta charset=utf-8><title>nemo-like</title><style>{_STYLE}</style>"]
    for number, (kind, found) in enumerate(blocks):
        if kind == "table":
            rows = ["".join(f"<td>{_html(cell)}" for cell in row) for row in found]
            parts.append(f"<table><tr>{'<tr>'.join(rows)}</table>")
        elif kind == "list":
            parts.append(f"<ul>{''.join(f'<li>{_html(one)}' for one in found)}</ul>")
        else:
            tag = "p" if kind == "text" else "h1" if number == 0 else "h2"
            parts.append(f"<{tag}>{_html(found)}</{tag}>")
    return "\n".join(parts) + "\n"


def _html(cell: Any) -> str:
    """Text, or the curve of a list of numbers."""
    if not isinstance(cell, list):
        return html.escape(cell)
    low, high = min(cell), max(cell)
    points = [
        f"{160 * i / max(1, len(cell) - 1):.1f} {26 - 24 * (one - low) / ((high - low) or 1):.1f}"
        for i, one in enumerate(cell)
    ]
    return f'<svg><path d="M{" L".join(points)}"/></svg>'
