"""Where the time from the command to the end of the first step goes, in every process.

    python benchmarks/starts.py --workload qwen1.5b --runs 2 --out starts.jsonl [key=value ...]

Each run takes two steps. The first one on a new machine fills the caches, later ones find them. The
table has the phases of driver, policy and engine (from ``logs/*.trace.jsonl``), and what vLLM says
of its own start, in seconds from the command. ``--out`` gets a record of each run.
"""

import argparse
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from grpo import facts, ours_command, run
from workloads import WORKLOADS, add_arguments, prepare, set_environment

from nemo_like.viewer.report import joined_trace

_OF_START = re.compile(r"Start to the end of the first step: .*")
_OF_VLLM = re.compile(r"(\d\d-\d\d \d\d:\d\d:\d\d) \[.*?\] (.*\d seconds?.*|.*took .*)")
"""Lines in which vLLM says what took how long."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True, help="a .jsonl file to append to")
    parser.add_argument("--limit-s", type=float, default=300.0, help="most seconds of each run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="this project's settings")
    args = parser.parse_intermixed_args()
    args.steps = args.steps or 2
    set_environment()
    os.environ |= {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    workload, failed = WORKLOADS[args.workload], False
    inputs = prepare(workload, args.work, args.steps, args.seed)
    for number in range(args.runs):
        folder = args.work.expanduser().resolve() / workload.name / "start"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        command, _ = ours_command(workload, inputs, args, folder)
        began = time.time()
        record = facts(workload, args) | {"run": number, "command": command}
        record |= run(command, folder / "output.log", args.limit_s)
        failed |= record["failed"]
        found = _OF_START.search((folder / "output.log").read_text(errors="replace"))
        record |= {"start": found and found[0], "phases": list(phases(folder / "run", began))}
        with args.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        sys.stdout.write(table(record))
    sys.exit(int(failed))


def phases(run_dir: Path, began: float) -> Iterator[dict[str, Any]]:
    """Phases up to the end of the first step, and vLLM's lines, by when they ended."""
    events = joined_trace(run_dir / "logs")["traceEvents"]
    names = {each["pid"]: each["args"]["name"].split()[0] for each in events if each["ph"] == "M"}
    spans = [each for each in events if each["ph"] == "X"]
    steps = [each["ts"] + each["dur"] for each in spans if each["name"] == "step"]
    found = [
        {
            "process": names[each["pid"]],
            "name": each["name"],
            "begin": round(each["ts"] / 1e6 - began, 2),
            "end": round((each["ts"] + each["dur"]) / 1e6 - began, 2),
        }
        for each in spans
        if each["ts"] < min(steps, default=float("inf"))
    ]
    for log in run_dir.glob("logs/generation-*.log"):
        for stamp, text in _OF_VLLM.findall(log.read_text(errors="replace")):
            at = datetime.strptime(f"{datetime.now().year}-{stamp}", "%Y-%m-%d %H:%M:%S")
            end = round(at.timestamp() - began, 2)
            found.append({"process": log.stem, "name": text[:100], "begin": None, "end": end})
    yield from sorted(found, key=lambda each: each["end"])


def table(record: dict[str, Any]) -> str:
    """A line for each phase of 0.1 s or more, in the order of their ends."""
    lines = [f"run {record['run']}: {record['start'] or 'no first step'}"]
    for each in record["phases"]:
        begin, end = each["begin"], each["end"]
        if begin is None:
            lines.append(f"{'':>8} {end:8.1f} {'':>7}  {each['process']:<14} vLLM: {each['name']}")
        elif end - begin >= 0.1:
            line = f"{begin:8.2f} {end:8.2f} {end - begin:7.2f}  {each['process']:<14} "
            lines.append(line + each["name"])
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
