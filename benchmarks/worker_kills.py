"""Kill the engine's or the policy's process with SIGKILL in mid-run, then resume the run.

    python benchmarks/worker_kills.py engine policy --folder FOLDER --out kills.jsonl \
        policy.model=smollm2 cluster.gpus_per_node=2 policy.dtype=bfloat16

Each run samples one step ahead, on one worker for the engine and one for the policy. It records the
seconds until the run ends, its exit code and message, what it left running, and the steps in its
metrics after it was resumed.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "run_grpo.py"
NUM_STEPS, KILLED_AFTER = 14, 7
OPTIONS = (
    "run.resume=true",
    "cluster.num_generation_workers=1",
    "generation.backend=vllm",
    "generation.max_new_tokens=64",
    "rollout.max_lag=1",
    f"grpo.max_steps={NUM_STEPS}",
    "grpo.num_prompts_per_step=16",
    "checkpoint.every_steps=5",
    "checkpoint.export=false",
    "validation.every_steps=0",
    "logging.sinks=[]",
)


def start(folder: Path, overrides: list[str]) -> subprocess.Popen[bytes]:
    """Start the run, or the rest of it."""
    # A key that is typed twice is refused; overrides win.
    keys = {one.partition("=")[0]: one for one in (*OPTIONS, *overrides)}
    command = [sys.executable, str(SCRIPT), f"run.dir={folder}/run", *keys.values()]
    with (folder / "output.txt").open("a") as output:
        return subprocess.Popen(command, stdout=output, stderr=output)


def steps(folder: Path) -> list[int]:
    """Steps in the run's metrics."""
    file = folder / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line)["step"] for line in lines]


def find(run: psutil.Process, victim: str) -> psutil.Process:
    """The last worker of the policy, or the process that computes for the last engine's worker."""
    name = "PolicyWorker" if victim == "policy" else "GenerationWorker"
    *_, worker = (one for one in run.children(recursive=True) if f"ray::{name}" in _words(one))
    if victim == "policy":
        return worker
    leaves = (one for one in worker.children(recursive=True) if not one.children())
    engines = [one for one in leaves if "vllm" in _words(one).lower()]
    return engines[-1]


def _words(process: psutil.Process) -> str:
    return " ".join([process.name(), *process.cmdline()])


def case(folder: Path, victim: str, overrides: list[str], limit_s: float) -> dict[str, Any]:
    """Kill one run and resume it."""
    folder.mkdir(parents=True)
    run = start(folder, overrides)
    deadline = time.monotonic() + limit_s
    while max(steps(folder), default=0) < KILLED_AFTER:
        assert run.poll() is None, f"it ended by itself: {folder}/output.txt"
        assert time.monotonic() < deadline, f"it is too slow: {folder}/output.txt"
        time.sleep(0.1)
    children = psutil.Process(run.pid).children(recursive=True)
    begin = time.monotonic()
    find(psutil.Process(run.pid), victim).kill()
    code = run.wait(limit_s)
    seconds = time.monotonic() - begin
    said = (folder / "output.txt").read_text().splitlines()
    time.sleep(1)
    left = [one.pid for one in children if one.is_running() and one.status() != "zombie"]
    return {
        "victim": victim,
        "seconds_to_exit": round(seconds, 2),
        "code": code,
        "said": next(line for line in reversed(said) if line.startswith("Error: ")),
        "left_running": left,
        "resumed_code": start(folder, overrides).wait(limit_s),
        "steps": steps(folder),
    }


def main() -> None:
    """Run one case per victim."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("victims", nargs="+", choices=["engine", "policy"])
    parser.add_argument("--folder", type=Path, required=True, help="for the runs and their output")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=300.0)
    args, overrides = parser.parse_known_args()
    failed = False
    for victim in args.victims:
        found = case(args.folder.resolve() / victim, victim, overrides, args.limit_s)
        with args.out.open("a") as file:
            file.write(json.dumps(found) + "\n")
        sys.stdout.write(f"{json.dumps(found)}\n")
        failed |= found["resumed_code"] != 0 or bool(found["left_running"])
        failed |= found["steps"] != [*range(1, NUM_STEPS + 1)]
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
