"""Read a run's folder for the viewer: metrics, configuration, state. Never writes."""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from nemo_like.config.typed import flat
from nemo_like.errors import UserError
from nemo_like.observe.alarms import NODES, Alarm, Alarms
from nemo_like.viewer.trajectories import Trajectories, finite

Record = dict[str, Any]

_NOT_PHASES = {
    *("step", "waiting", "driver", "refit_send", "refit_load"),  # contain others, or lie within one
    *("imports", "ray", "data", "prompts", "workers", "model"),  # before the first step
}
_SIZE = re.compile(r"(?!validation)\w+\.num_(\w+_per_step|generations_per_prompt)")
_LOG_BYTES = 20_000


class RunFolder:
    """One run, running or finished, original or copied from elsewhere."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self.trajectories = Trajectories(path / "trajectories")
        self.life = 0
        """Changes when the run is resumed, which drops records."""
        self.alarms: list[Alarm] = []
        """Alarms for the records read so far."""
        self._alarms = Alarms({})
        self._records: list[Record] = []
        self._read_until = 0

    def records(self) -> list[Record]:
        """All of ``metrics.jsonl``; later calls read only new lines."""
        try:
            with (self.path / "metrics.jsonl").open("rb") as lines:
                about = os.fstat(lines.fileno())
                if about.st_ino != self.life or about.st_size < self._read_until:
                    self._records, self._read_until, self.life = [], 0, about.st_ino
                    self._alarms, self.alarms = Alarms(self.config), []
                lines.seek(self._read_until)
                text = lines.read()
        except OSError:
            return self._records
        whole = text[: text.rfind(b"\n") + 1]
        self._read_until += len(whole)
        if not self._alarms.hosts:
            self._alarms.hosts = self._json(NODES)
        for record in _parsed(whole.splitlines()):
            self._records.append(record)
            self.alarms += self._alarms.add(record)
        return self._records

    def steps(self) -> list[Record]:
        """Records of steps, without the validation before training."""
        return [one for one in self.records() if "time/step_s" in one]

    @cached_property
    def config(self) -> dict[str, Any]:
        """Values of ``config.yaml`` by dotted key."""
        try:
            found = yaml.safe_load((self.path / "config.yaml").read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            return {}
        return flat(found) if isinstance(found, dict) else {}

    def samples_per_step(self) -> int:
        """Rows per step; 1 if the configuration does not say."""
        return math.prod(value for key, value in self.config.items() if _SIZE.fullmatch(key))

    def state(self) -> str:
        """Finished or not, and if not, the time of its last sign of life."""
        records, summary = self.records(), self.summary()
        end = f"ended with exit code {summary['exit_code']}" if "error" in summary else "finished"
        if not records:
            return f"no step yet{f', {end}' if summary else ''}"
        most = next((v for k, v in self.config.items() if k.endswith(".max_steps") and v), "?")
        step = f"step {records[-1]['step']} of {most}"
        if summary:
            return f"{step}, {end}"
        return f"{step}, at {datetime.fromtimestamp(records[-1].get('time', 0)):%Y-%m-%d %H:%M:%S}"

    def summary(self) -> dict[str, Any]:
        """What ``summary.json`` says; empty until the run has ended."""
        return self._json("summary.json")

    def _json(self, name: str) -> dict[str, Any]:
        try:
            found = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def outcome(self) -> list[str]:
        """The error that ended the run, and the command to type next."""
        summary = self.summary()
        known = {"error": "It ended with: ", "next": "Next: "}
        return [f"{text}{summary[name]}" for name, text in known.items() if name in summary]

    def log(self) -> list[str]:
        """The last lines of ``run.log``."""
        try:
            with (self.path / "run.log").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
                return file.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return []


def phases(record: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of each phase of a step, without nested ones, and the remainder as ``other``."""
    times = {
        name.removeprefix("time/").removesuffix("_s"): value
        for name, value in record.items()
        if name.startswith("time/") and value is not None
    }
    found = {name: seconds for name, seconds in times.items() if name not in _NOT_PHASES}
    if "step" in times:
        between = found.get("validation", 0.0) + found.get("checkpoint", 0.0)
        found["other"] = max(0.0, times["step"] + between - sum(found.values()))
    return found


def mean_phases(records: Sequence[Record]) -> Counter[str]:
    """Mean seconds of each phase of some steps."""
    sums: Any = Counter()
    for one in records:
        sums.update(phases(one))
    return Counter({name: total / len(records) for name, total in sums.items()})


def find_runs(paths: Iterable[str]) -> list[RunFolder]:
    """The runs in these folders; a folder of runs gives all of them."""
    found: dict[Path, None] = {}
    for text in paths:
        path = Path(text).expanduser().resolve()
        inside = sorted(one.parent for one in path.glob("*/metrics.jsonl"))
        if (path / "metrics.jsonl").is_file():
            inside = [path]
        if not inside:
            raise UserError(
                f"{text} holds no run, as it has no metrics.jsonl; give the run.dir of a run, or "
                "a folder of such folders."
            )
        found |= dict.fromkeys(inside)
    names = [path.name for path in found]
    return [
        RunFolder(path, path.name if names.count(path.name) == 1 else "/".join(path.parts[-2:]))
        for path in found
    ]


def differences(runs: Iterable[RunFolder]) -> dict[str, list[Any]]:
    """Keys that differ between runs, with each run's value."""
    configs = [run.config for run in runs]
    names = dict.fromkeys(key for one in configs for key in one if key != "run.dir")
    rows = {name: [one.get(name) for one in configs] for name in names}
    return {name: row for name, row in rows.items() if any(one != row[0] for one in row)}


def _parsed(lines: Iterable[bytes]) -> Iterator[Record]:
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # cut off by a crash
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            yield {name: finite(value) for name, value in record.items()}
