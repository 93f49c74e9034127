"""Seconds that the dashboard takes to open a long run, to filter it and to show one group.

    python benchmarks/dashboard.py [--steps 1000] [--rows 512] [--keep FOLDER] [--out FILE]

The run is made here, by the code that writes trajectories: prompts of 50 tokens, completions of
100, rewards in [0, 1].
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

from nemo_like.data.datasets import Row
from nemo_like.generation.protocol import Completion, FinishReason
from nemo_like.observe.trajectory_files import SCHEMA, TrajectoryFiles
from nemo_like.rewards.protocol import RewardResult
from nemo_like.rollout.trajectory import RolloutTask, Trajectory, collate_tokens, single_turn
from nemo_like.rollout.trajectory_table import table_of
from nemo_like.viewer.dashboard import Dashboard
from nemo_like.viewer.runs import RunFolder

_GROUP = 8
REQUESTS = {
    "open": ("trajectories", {}),
    "filter": ("trajectories", {"reward_min": "0.5", "end": "length", "num_tokens_min": "10"}),
    "filter and sort": ("trajectories", {"step_min": "3", "reward_max": "0.9", "sort": "-reward"}),
    "one group": ("group", {"phase": "train", "step": "7", "group": "3"}),
}


def make_run(folder: Path, steps: int, rows: int) -> None:
    """Trajectories of one worker in ``folder``; their groups have the same numbers at each step."""
    rng = np.random.default_rng(0)
    trajectories = trajectories_of(rows, prompt_tokens=50, tokens=100)
    table = table_of([(0, "train", trajectories, collate_tokens(trajectories))])
    files = TrajectoryFiles(folder / "trajectories", 0, 1e12)
    for step in range(1, steps + 1):
        ends = rng.choice(["final", "length"], rows).tolist()
        new = {"step": [step] * rows, "reward": rng.random(rows), "end": ends}
        for name, values in new.items():
            at, field = SCHEMA.get_field_index(name), SCHEMA.field(name)
            table = table.set_column(at, field, pa.array(values, type=field.type))
        files.append(table)
        files.wait()


def trajectories_of(rows: int, prompt_tokens: int, tokens: int) -> list[Trajectory]:
    """Single turns in groups of ``_GROUP``."""
    rng, found = np.random.default_rng(0), []
    for group in range(rows // _GROUP):
        prompt = {"role": "user", "content": f"What is {group} + 2? " * 4}
        ids = tuple(rng.integers(0, 500, prompt_tokens).tolist())
        row = Row(index=0, messages=(prompt,), prompt_ids=ids, fields={})
        for index in range(_GROUP):
            completion = Completion(
                token_ids=rng.integers(0, 500, tokens).tolist(),
                logprobs=(-rng.random(tokens)).tolist(),
                finish_reason=FinishReason.stop,
                weight_version=0,
            )
            task = RolloutTask(row=row, group=group, index=index, seed=0, request_id="")
            result = RewardResult(reward=1.0, metrics={"accuracy": 1.0})
            found.append(single_turn(task, completion, str(rng.random(10)), result))
    return found


def measure(folder: Path) -> Mapping[str, tuple[float, float, Any]]:
    """Wall and CPU seconds of each request, and its answer."""
    dashboard, found = Dashboard([RunFolder(folder, "made")]), {}
    for name, (path, query) in REQUESTS.items():
        wall, cpu = time.monotonic(), time.process_time()
        answer = dashboard.answer(f"api/{path}", {"run": "0", **query})
        found[name] = time.monotonic() - wall, time.process_time() - cpu, answer
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--keep", type=Path, help="keep the run here, and use one that is there")
    parser.add_argument("--out", type=Path, help="append the numbers as a JSON line")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = args.keep or Path(made)
        if not (folder / "trajectories").exists():
            make_run(folder, args.steps, args.rows)
        found = {name: (wall, cpu) for name, (wall, cpu, _) in measure(folder).items()}
    for name, (wall, cpu) in found.items():
        sys.stdout.write(f"{name:16} {wall:.3f} s, {cpu:.3f} s of CPU\n")
    if args.out:
        sizes = {"steps": args.steps, "rows": args.rows, "load": psutil.getloadavg()[0]}
        record = sizes | {
            name: dict(zip(("s", "cpu_s"), one, strict=True)) for name, one in found.items()
        }
        with args.out.open("a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
