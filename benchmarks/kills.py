"""Kill -9 a run with lag at random moments, let it go on, and count how often each group trained.

    python benchmarks/kills.py --kills 20 --folder FOLDER

The run's advantages are its own function, which writes down the groups of each step: on the CPU,
with ``hf``. A step that was not saved when the kill came is made again, so the last one counts.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from torch import Tensor

from nemo_like.config.advantages import AdvantageConfig
from nemo_like.losses.advantages import group_advantages

HERE = Path(__file__).resolve()
GROUPS_PER_STEP = 4
NOTES = "NOTES_OF_GROUPS"


def advantages(rewards: Tensor, groups: Tensor, valid: Tensor, config: AdvantageConfig) -> Tensor:
    """Note the groups of a step."""
    with Path(os.environ[NOTES]).open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), "groups": groups.unique().tolist()}) + "\n")
    return group_advantages(rewards, groups, valid, config)


def options(folder: Path, lag: int, order: str, steps: int) -> list[str]:
    """Of the run."""
    return [
        f"run.dir={folder}/run",
        "run.resume=true",
        "generation.backend=hf",
        "generation.max_new_tokens=16",
        "cluster.cpu_workers_per_node=2",
        "cluster.num_generation_workers=1",
        "data.num_train_rows=40",
        "data.num_validation_rows=8",
        f"grpo.max_steps={steps}",
        f"grpo.num_prompts_per_step={GROUPS_PER_STEP}",
        "grpo.num_generations_per_prompt=4",
        "checkpoint.every_steps=1",
        "checkpoint.export=false",
        "logging.sinks=[]",
        f"rollout.max_lag={lag}",
        f"rollout.order={order}",
        f"advantage.function={HERE}:advantages",
    ]


def last_saved(run: Path) -> int:
    """The step that the next execution goes on after."""
    found = [int(one.name.partition("_")[2]) for one in (run / "checkpoints").glob("step_*")]
    return max(found, default=0)


def groups_of_steps(notes: Path, saved: dict[int, int]) -> dict[int, list[int]]:
    """Groups that each step trained on; ``saved``: the last step before each process."""
    made = dict(saved)
    steps: dict[int, list[int]] = {}
    for line in notes.read_text().splitlines():
        note = json.loads(line)
        made[note["pid"]] += 1
        steps[made[note["pid"]]] = note["groups"]
    return steps


def check(steps: dict[int, list[int]], lag: int) -> None:
    """Each group once, and none left out but those that the last steps had under way."""
    used = [group for step in sorted(steps) for group in steps[step]]
    assert len(used) == len(set(used)), f"some groups trained twice: {steps}"
    missing = set(range(max(used))) - set(used)
    assert len(missing) <= lag * GROUPS_PER_STEP, f"some groups are lost: {missing}"


def main() -> None:
    """Run, kill, and go on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--lag", type=int, default=2)
    parser.add_argument("--order", default="first_in")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw, notes = random.Random(args.seed), args.folder / "groups.jsonl"
    args.folder.mkdir(parents=True, exist_ok=True)
    notes.touch()
    script = str(HERE.parents[1] / "examples" / "run_grpo.py")
    saved: dict[int, int] = {}
    for number in range(args.kills + 1):
        base = last_saved(args.folder / "run")
        # The last execution makes three steps more, to its end.
        steps = 10_000 if number < args.kills else base + 3
        command = [sys.executable, script, *options(args.folder, args.lag, args.order, steps)]
        environment = os.environ | {NOTES: str(notes)}
        with (args.folder / "output.txt").open("a") as output:
            run = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        saved[run.pid] = base
        before, delay = len(notes.read_text().splitlines()), draw.uniform(0, 3)
        while number < args.kills and len(notes.read_text().splitlines()) == before:
            assert run.poll() is None, f"it ended by itself: {args.folder}/output.txt"
            time.sleep(0.02)
        if number < args.kills:
            time.sleep(delay)
            run.send_signal(signal.SIGKILL)
        code = run.wait()
        assert code == (-signal.SIGKILL if number < args.kills else 0), code
        sys.stderr.write(f"execution {number} from step {base}, ended by {code}\n")
    steps_made = groups_of_steps(notes, saved)
    check(steps_made, args.lag)
    found = {"kills": args.kills, "steps": len(steps_made), "each_group_once": True}
    sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
