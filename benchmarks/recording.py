"""What it costs a run to record itself: trajectories, TensorBoard with histograms, alarms, phases.

    python benchmarks/recording.py [--steps 200] [--out FILE] [key=value ...]
    python benchmarks/recording.py --alone [--trajectories N --tokens N --step-s S] [--out FILE]

One GRPO run records every other step only. The paired difference between neighbouring steps, in
seconds and in CPU seconds of all its processes, is what a user would notice, with the noise of the
machine. What recording takes by itself is measured too: seconds that it holds up a step, and CPU
seconds of its code, those of the thread that writes files included. ``--alone`` measures that code
without a run: CPU seconds that a step waits for (``delay``, ``driver``), and those of the thread
that writes files meanwhile.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from nemo_like.config.generation import VLLM

_FIRST = 6
"""Step from which on steps count: compiled code and caches are there."""
_WORKER, _DRIVER = "recording-worker.jsonl", "recording-driver.jsonl"


class Costs:
    """Seconds that wrapped calls took, as a line per step in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.wall_s = self.cpu_s = 0.0

    def wrap(self, owner: Any, name: str, *, delays: bool) -> None:
        """``delays``: whether the step waits for it."""
        original: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            wall, cpu = time.monotonic(), time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                self.cpu_s += time.thread_time() - cpu
                self.wall_s += time.monotonic() - wall if delays else 0.0

        setattr(owner, name, timed)

    def write(self, step: int, **more: float) -> None:
        record = {"step": step, "wall_s": self.wall_s, "cpu_s": self.cpu_s, **more}
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self.wall_s = self.cpu_s = 0.0


def records(step: int) -> bool:
    return step % 2 == 0


def engine(config: Any) -> Any:
    """vLLM's engine, in a worker that records every other step."""
    from nemo_like.generation.vllm.engine import VLLMEngine
    from nemo_like.observe.phase_trace import PhaseTrace
    from nemo_like.observe.trajectory_files import TrajectoryFiles
    from nemo_like.rollout import worker

    kind: Any = worker.RolloutWorker
    costs, rollout = Costs(Path(_folder_of_worker()) / _WORKER), kind.rollout
    costs.wrap(worker, "table_of", delays=True)
    costs.wrap(kind, "_record", delays=True)
    costs.wrap(PhaseTrace, "add", delays=True)
    costs.wrap(TrajectoryFiles, "wait", delays=True)
    costs.wrap(TrajectoryFiles, "_append", delays=False)

    async def some(self: Any, request: Any) -> Any:
        kept = self._files, self._trajectories
        if not records(request.step):
            self._files = self._trajectories = None
        try:
            return await rollout(self, request)
        finally:
            self._files, self._trajectories = kept
            costs.write(request.step)

    kind.rollout = some
    return VLLMEngine(config)


def _folder_of_worker() -> str:
    """The run's folder: standard error of a worker is a file in its ``logs``."""
    return str(Path("/proc/self/fd/2").resolve().parents[1])


ENGINE = replace(VLLM, engine=engine)


def run(folder: Path, steps: int, overrides: Sequence[str]) -> None:
    """The run, in this process, whose sinks log every other step only."""
    from nemo_like.algorithms.session import launch
    from nemo_like.compose import registry
    from nemo_like.compose.files import SHIPPED
    from nemo_like.compose.load import compose_config
    from nemo_like.observe.alarms import Alarms
    from nemo_like.observe.phase_trace import PhaseTrace
    from nemo_like.observe.sinks import Details, Sinks

    costs, me = Costs(folder / _DRIVER), psutil.Process()
    costs.wrap(Sinks, "log", delays=True)
    costs.wrap(Alarms, "add", delays=True)
    costs.wrap(PhaseTrace, "add", delays=True)
    log = Sinks.log

    def some(self: Any, step: int, numbers: Any, details: Any = None) -> None:
        used = sum(sum(one.cpu_times()[:2]) for one in (me, *me.children(recursive=True)))
        costs.write(step, time=time.time(), used_s=used)
        sinks = self._sinks
        # What is logged here falls into the next step.
        if not records(step + 1):
            self._sinks = [one for one in sinks if type(one).__name__ in ("JsonlFile", "Progress")]
        log(self, step, numbers, details if details and records(step + 1) else Details())
        self._sinks = sinks

    Sinks.log = some
    ours = [f"run.dir={folder}", f"grpo.max_steps={steps}", "validation.every_steps=0"]
    ours += [f"generation.backend={Path(__file__).resolve()}:ENGINE", "checkpoint.export=false"]
    config = compose_config(SHIPPED, "grpo", [*ours, *overrides])
    launch(registry.find("grpo"), config)


def summary(folder: Path) -> dict[str, Any]:
    """Medians, trimmed means with their intervals, and what recording took by itself."""
    lines = {
        name: {one["step"]: one for one in map(json.loads, (folder / name).open())}
        for name in (_WORKER, _DRIVER)
    }
    driver = lines[_DRIVER]
    steps = [step for step in driver if step > _FIRST and step - 1 in driver]
    took = {
        name: {step: driver[step][key] - driver[step - 1][key] for step in steps}
        for name, key in (("wall", "time"), ("cpu", "used_s"))
    }
    found: dict[str, Any] = {"steps": len(steps), "load": psutil.getloadavg()[0]}
    for name, of in took.items():
        off = [of[step] for step in steps if not records(step)]
        pairs = [of[step] - of[step + 1] for step in steps if records(step) and step + 1 in of]
        found[f"{name}_s_per_step"] = statistics.median(off)
        found[f"{name}_s_difference"] = _trimmed(pairs)
        found[f"{name}_s_difference_95"] = _interval(pairs)
    on = [step for step in steps if records(step)]
    for key in ("wall_s", "cpu_s"):
        each = [[of[step][key] for step in on if step in of] for of in lines.values()]
        found[f"recording_{key}"] = sum(map(statistics.fmean, each))
    found["delay_share"] = found["recording_wall_s"] / found["wall_s_per_step"]
    found["cpu_share"] = found["recording_cpu_s"] / found["cpu_s_per_step"]
    return found


def alone(count: int, length: int, step_s: float, repeats: int = 200) -> dict[str, Any]:
    """Medians of CPU seconds per step, without a run."""
    from dashboard import trajectories_of

    from nemo_like.algorithms.grpo.config import GRPOConfig
    from nemo_like.config.typed import flat
    from nemo_like.observe.alarms import Alarms
    from nemo_like.observe.phase_trace import PhaseTrace
    from nemo_like.observe.sinks import Details, JsonlFile, Sinks, TensorBoardSink
    from nemo_like.observe.trajectory_files import TrajectoryFiles
    from nemo_like.rollout.trajectory import collate_tokens
    from nemo_like.rollout.trajectory_table import table_of

    known = Path(__file__).parent / "results" / "grpo-embedded-cpu-seed0.metrics.jsonl"
    *_, numbers = map(json.loads, known.open())
    trajectories = trajectories_of(count, prompt_tokens=30, tokens=length)
    tokens = collate_tokens(trajectories)
    took: dict[str, list[float]] = {"delay": [], "writing": [], "driver": []}
    with tempfile.TemporaryDirectory() as folder:
        files = TrajectoryFiles(Path(folder), 0, 1e12, table_of)
        board = TensorBoardSink(Path(folder), GRPOConfig(), None)
        sinks = Sinks([JsonlFile(Path(folder, "m")), board])
        alarms, trace = Alarms(flat({})), PhaseTrace(Path(folder), "driver")
        histograms = {name: [random.random() for _ in range(count)] for name in "abc"}
        for step in range(1, repeats + 1):
            begin = time.process_time()
            files.append((step, "train", trajectories, tokens))
            made = time.process_time()
            files.wait()
            written = time.process_time()
            alarms.add(numbers | {"step": step})
            sinks.log(step, dict(numbers), Details(histograms=histograms))
            for name in ("step", "rollout", "train", "refit", "logprobs") * 3:  # of all processes
                trace.add(name, 0.0, 0.0)
            ends = (made - begin, written - made, time.process_time() - written)
            for name, seconds in zip(took, ends, strict=True):
                took[name].append(seconds)
    # Small files are put together at some steps, so means, without the first one.
    found: dict[str, Any] = {f"{n}_cpu_s": statistics.fmean(of[1:]) for n, of in took.items()}
    delay_s = found["delay_cpu_s"] + found["driver_cpu_s"]
    about = {"trajectories": count, "tokens": length, "load": psutil.getloadavg()[0]}
    return about | found | {"step_s": step_s, "delay_share": delay_s / step_s}


def _trimmed(values: Sequence[float]) -> float:
    ordered, cut = sorted(values), len(values) // 5
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def _interval(values: Sequence[float]) -> list[float]:
    draw = random.Random(0)
    means = sorted(_trimmed(draw.choices(values, k=len(values))) for _ in range(1000))
    return [means[25], means[974]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, help="append the result as a JSON line")
    parser.add_argument("--alone", action="store_true", help="without a run")
    parser.add_argument("--trajectories", type=int, default=128, help="of --alone")
    parser.add_argument("--tokens", type=int, default=60, help="of each, for --alone")
    parser.add_argument("--step-s", type=float, default=1.1, help="seconds of a step, for --alone")
    options = parser.parse_args()
    if options.alone:
        found = alone(options.trajectories, options.tokens, options.step_s)
        return _write(found, options.out)
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), options.steps, options.overrides)
        _write(summary(Path(folder)) | {"overrides": options.overrides}, options.out)
    return None


def _write(found: dict[str, Any], out: Path | None) -> None:
    line = json.dumps(found)
    sys.stdout.write(f"{line}\n")
    if out:
        with out.open("a") as file:
            file.write(f"{line}\n")


if __name__ == "__main__":
    main()
