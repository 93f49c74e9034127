"""Whether the settings that ``nemo-like report`` recommends help the run that they came from.

    python benchmarks/recommendations.py [--out FILE] [--keep FOLDER] [CASE ...]
    python benchmarks/recommendations.py mismatch_growth   # needs a GPU

Each case is a run with a fault, its report, and the same run with the recommended setting. A record
has the setting, the gain that it claims, what both runs measured, and whether each raised the
alarm. A report claims seconds per step or a factor; an alarm, that it will be silent.
What a setting saves is measured in the phase that it is about: of whole steps (``step_s``), a busy
machine may take more from one run than from the other. With ``--keep``, a run that is there already
is not run again.
"""

import argparse
import hashlib
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_like.viewer.runs import RunFolder, find_runs, mean_phases

_HERE = Path(__file__).resolve().parent
_SMALL = (
    "generation.backend=hf",
    *("grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=4", "grpo.max_steps=30"),
    *("validation.every_steps=0", "checkpoint.export=false", "generation.max_new_tokens=64"),
)
_NEMO_LIKE = (sys.executable, "-c", "from nemo_like.cli import main; main()")
_FAST_ROWS = 60
"""Rows before those that score slowly: 15 steps of four."""
_SAVED = "s of the phase per step"
_LAST = 10
"""Steps at the end whose means are compared."""

Measure = Callable[[RunFolder], float]


def phase_s(name: str) -> Measure:
    """Seconds of a phase, per step."""
    return lambda run: mean_phases(run.steps())[name]


def last(name: str) -> Measure:
    """The mean of a metric over the last steps."""
    return lambda run: statistics.fmean(one[name] for one in run.steps()[-_LAST:])


def at_worst(worst: Callable[[Iterable[float]], float], name: str) -> Measure:
    """The worst mean of a metric over as many steps in a row as an alarm looks at."""

    def measure(run: RunFolder) -> float:
        found = [one[name] for one in run.steps()]
        parts = (found[begin : begin + _LAST] for begin in range(len(found) - _LAST + 1))
        return worst(map(statistics.fmean, parts))

    return measure


def share_that_trains(run: RunFolder) -> float:
    masked = statistics.fmean(one.get("mismatch/masked_rows", 0) for one in run.steps()[-_LAST:])
    return 1 - masked / run.samples_per_step()


def driver_s_per_sample(run: RunFolder) -> float:
    found = statistics.median(one["time/driver_s"] for one in run.steps())
    return found / run.samples_per_step()


def grown(run: RunFolder) -> float:
    """By what factor completions grew."""
    tokens = [one["rollout/completion_tokens"] for one in run.steps()]
    return statistics.fmean(tokens[-_LAST:]) / statistics.fmean(tokens[:_LAST])


@dataclass(frozen=True, kw_only=True)
class Case:
    """``says``: a pattern of the recommendation: ``setting``, and maybe ``saves`` (seconds).

    ``claim``: what ``measure`` becomes by a setting without ``saves``, from what it was.
    """

    faults: tuple[str, ...]
    says: str
    measure: Measure
    unit: str
    claim: Callable[[float], float] | None = None
    alarm: str = ""
    needs: str = ""
    """What it takes besides two CPU cores: the case runs if it is named."""


def _case(faults: Sequence[str], key: str, measure: Measure, unit: str, **more: Any) -> Case:
    saves = r" \(now \d+\) saves about (?P<saves>[\d.]+) s" if unit == _SAVED else ""
    setting = rf"{re.escape(key)}=[\w.-]*\w( \w+\.\w+=[\d.e-]*\d)?"
    says = rf"(?P<setting>{setting}){saves}"
    return Case(faults=tuple(faults), says=says, measure=measure, unit=unit, **more)


def _reward(name: str) -> str:
    return f"environment.reward={_HERE / 'faulty_rewards.py'}:{name}"


def _at(limit: float) -> Callable[[float], float]:
    """The limit of an alarm."""
    return lambda _: limit


_LONGER = (
    *(_reward("longer_but_never_enough"), "generation.max_new_tokens=128"),
    *("policy.optimizer.lr=1e-3", "policy.scheduler.warmup_steps=20", "grpo.max_steps=40"),
)
_SHORTER = (
    _reward("shorter_but_never_enough"),
    *("policy.optimizer.lr=3e-3", "policy.scheduler.warmup_steps=40", "grpo.max_steps=50"),
)
"""A warm-up leaves the first steps as they were."""
_SELDOM = ("grpo.num_prompts_per_step=24", "grpo.max_steps=12", "generation.max_new_tokens=6")
_RATE, _KINDS = "policy.optimizer.lr", "share of groups without signal"

CASES = {
    "validation": _case(
        ["validation.every_steps=1", "data.num_validation_rows=32"],
        "validation.every_steps",
        phase_s("validation"),
        _SAVED,
    ),
    "checkpoint": _case(
        ["checkpoint.every_steps=1"], "checkpoint.every_steps", phase_s("checkpoint"), _SAVED
    ),
    "driver": _case(
        ["grpo.num_prompts_per_step=1", "generation.max_new_tokens=8"],
        "grpo.num_prompts_per_step",
        driver_s_per_sample,
        "s of the driver per sample",
        claim=lambda was: was / 2,
    ),
    "truncation": _case(
        ["generation.max_new_tokens=8"],
        "generation.max_new_tokens",
        at_worst(max, "rollout/truncated_share"),
        "share of completions cut off",
        claim=_at(0.5),
        alarm="truncation",
    ),
    "other_groups": _case(
        [_reward("seldom_differs"), *_SELDOM],
        "grpo.dynamic_sampling",
        last("rollout/zero_variance_share"),
        _KINDS,
        claim=lambda was: 1 - 4 * (1 - was),  # of four rounds
        alarm="groups_without_signal",
    ),
    "slow_steps": _case(
        [_reward("slow_rows"), "data.train={rows}", "data.shuffle=false"],
        "environment.num_processes",
        last("time/rollout_s"),
        "s of rollout",
        claim=lambda was: was / 2,
    ),
    "entropy_rate": _case(
        _SHORTER,
        _RATE,
        at_worst(min, "policy/entropy"),
        "nats",
        claim=_at(0.01),
        alarm="entropy_collapse",
    ),
    "longer_rate": _case(
        _LONGER, _RATE, grown, "times as long", claim=_at(3), alarm="length_explosion"
    ),
    "longer_penalty": _case(
        _LONGER,
        "advantage.overlong_buffer_tokens",
        grown,
        "times as long",
        claim=_at(3),
        alarm="length_explosion",
    ),
    "mismatch_mask": _case(
        [f"generation.backend={_HERE / 'faulty_engine.py'}:DRIFTING"],
        "mismatch.action",
        share_that_trains,
        "share of completions that train",
        claim=lambda _: 0.75,  # the engine is wrong about a quarter
        alarm="mismatch_growth",
    ),
    "mismatch_adapters": _case(
        [
            *("cluster.gpus_per_node=1", "model=smollm2", "policy.dtype=bfloat16"),
            *("generation.backend=vllm", "policy.lora.rank=16", "policy.optimizer.lr=3e-3"),
            *("policy.lora.refit=merged", "grpo.max_steps=60", "mismatch.max_mean_abs=1"),
        ],
        "policy.lora.refit",
        last("mismatch/mean_abs"),
        "mean difference of logprobs",
        claim=lambda was: was / 3,
        alarm="mismatch_growth",
        needs="a GPU",
    ),
}


NOT_MEASURED = {
    "policy.lora.refit": "mismatch_adapters, which needs a GPU",
    "policy.micro_batch_tokens": "tight_memory, which needs a GPU",
    "cluster.slurm.extra": "needs Slurm, with other jobs on the nodes or a slow one",
    "checkpoint.every_minutes": "bounds what is lost by the clock, at ten minutes",
    "run.resume": "continues a run, and claims no gain",
    "environment.reward": "is what to check, not what to set",
}
"""Keys that alarms recommend without a record, and the reason."""


def train(runs: Path, overrides: Sequence[str]) -> RunFolder:
    """One run, unless it is there, as cases share some; later overrides win."""
    merged = dict(one.split("=", 1) for one in (*_SMALL, *overrides))
    folder = runs / hashlib.sha256(repr(merged).encode()).hexdigest()[:8]
    words = [f"{key}={value}" for key, value in merged.items()]
    summary = folder / "summary.json"
    if not summary.exists() or "error" in json.loads(summary.read_text()):
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([*_NEMO_LIKE, "grpo", *words, f"run.dir={folder}"], check=True)
    return find_runs([str(folder)])[0]


def recommendations(run: RunFolder) -> str:
    """The report as one line of plain text."""
    subprocess.run([*_NEMO_LIKE, "report", str(run.path)], check=True)
    text = (run.path / "report.md").read_text(encoding="utf-8")
    return re.sub(r"\\([|<>*_`\\])", r"\1", " ".join(text.split()))


def compare(name: str, folder: Path) -> dict[str, Any]:
    """Run a case, apply what its report recommends, and measure both."""
    case = CASES[name]
    rows = folder / "rows.jsonl"
    lines = [{"prompt": f"1 + 2 + {i} =", "slow": i >= _FAST_ROWS} for i in range(200)]
    rows.write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    faults = [one.format(rows=rows) for one in case.faults]
    before = train(folder, faults)
    found = re.search(case.says, recommendations(before))
    if found is None:
        raise SystemExit(f"{name}: the report recommends nothing that matches {case.says}")
    after = train(folder, [*faults, *found["setting"].split()])
    was, now = case.measure(before), case.measure(after)
    saves, claim = found.groupdict().get("saves"), case.claim and abs(was - case.claim(was))
    record = {"case": name, "faults": [one.rpartition("/")[2] for one in case.faults]}
    record |= {"recommended": found["setting"], "unit": case.unit, "before": was, "after": now}
    record |= {"claimed_gain": float(saves) if saves else claim, "gain": abs(was - now)}
    if case.alarm:
        raised = [case.alarm in {one.name for one in run.alarms} for run in (before, after)]
        record |= {"alarm": case.alarm, "raised": raised}
    steps = [mean_phases(one.steps()).total() for one in (before, after)]
    return record | {"step_s": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--out", type=Path, help="append a JSON line for each case")
    parser.add_argument("--keep", type=Path, help="folder of the runs, kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        here = [name for name, case in CASES.items() if not case.needs]
        for name in options.cases or here:
            record = compare(name, options.keep or Path(made))
            line = json.dumps(record)
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
            if options.out:
                with options.out.open("a") as file:
                    file.write(f"{line}\n")


if __name__ == "__main__":
    main()
