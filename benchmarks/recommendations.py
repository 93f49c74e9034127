"""Whether the settings that ``nemo-like report`` recommends help the run that they came from.

    python benchmarks/recommendations.py [--out FILE] [--keep FOLDER] [CASE ...]
    python benchmarks/recommendations.py mismatch_growth   # needs a GPU

Each case is a run with a fault, its report, and the same run with the recommended key and value.
A record has the recommendation, what it claims (seconds per step, or a factor), and what both runs
measured. What a setting saves is measured in the phase that it is about: of whole steps
(``step_s``), a busy machine may take more from one run than from the other.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_like.viewer.runs import RunFolder, find_runs, mean_phases

_REWARDS = Path(__file__).with_name("faulty_rewards.py")
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


def driver_s_per_sample(run: RunFolder) -> float:
    found = statistics.median(one["time/driver_s"] for one in run.steps())
    return found / run.samples_per_step()


def growth(run: RunFolder) -> float:
    """By what factor completions grew or shrank."""
    tokens = [one["rollout/completion_tokens"] for one in run.steps()]
    ratio = statistics.fmean(tokens[-_LAST:]) / statistics.fmean(tokens[:_LAST])
    return max(ratio, 1 / ratio)


@dataclass(frozen=True, kw_only=True)
class Case:
    """``says``: a pattern of the recommendation, with groups ``key``, ``value`` and maybe ``saves``
    (seconds) or else ``factor`` (by which ``measure`` should change)."""

    faults: tuple[str, ...]
    says: str
    measure: Measure
    unit: str
    factor: float | None = None
    needs_gpu: bool = False
    """Whether a CPU cannot show it: it runs if it is named."""


def _case(faults: Sequence[str], key: str, measure: Measure, unit: str, **more: Any) -> Case:
    saves = r" \(now \d+\) saves about (?P<saves>[\d.]+) s" if unit == _SAVED else ""
    says = rf"(?P<key>{re.escape(key)})=(?P<value>[\w.-]*\w){saves}"
    return Case(faults=tuple(faults), says=says, measure=measure, unit=unit, **more)


def _reward(name: str) -> str:
    return f"environment.reward={_REWARDS}:{name}"


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
        factor=0.5,
    ),
    "truncation": _case(
        ["generation.max_new_tokens=24"],
        "generation.max_new_tokens",
        last("rollout/truncated_share"),
        "share of completions cut off",
    ),
    "groups_without_signal": _case(
        [_reward("seldom_differs")],
        "grpo.dynamic_sampling",
        last("rollout/zero_variance_share"),
        "share of groups without signal in the batch",
    ),
    "slow_steps": _case(
        [_reward("slow_rows"), "data.train={rows}", "data.shuffle=false"],
        "environment.num_processes",
        last("time/rollout_s"),
        "s of rollout",
    ),
    "entropy_collapse": _case(
        ["policy.optimizer.lr=3e-3", "grpo.max_steps=60"],
        "policy.optimizer.lr",
        last("policy/entropy"),
        "nats",
    ),
    "length_explosion": _case(
        [_reward("longer_but_never_enough"), "policy.optimizer.lr=1e-3"],
        "policy.optimizer.lr",
        growth,
        "times as long",
    ),
    "length_collapse": _case(
        [_reward("shorter_but_never_enough"), "policy.optimizer.lr=1e-3"],
        "policy.optimizer.lr",
        growth,
        "times as short",
    ),
    "mismatch_growth": _case(
        [
            *("cluster.gpus_per_node=1", "model=smollm2", "policy.dtype=bfloat16"),
            *("generation.backend=vllm", "policy.lora.rank=16", "policy.optimizer.lr=3e-3"),
            *("policy.lora.refit=merged", "grpo.max_steps=60", "mismatch.max_mean_abs=1"),
        ],
        "policy.lora.refit",
        last("mismatch/mean_abs"),
        "mean difference of logprobs",
        needs_gpu=True,
    ),
}


def train(folder: Path, overrides: Sequence[str]) -> RunFolder:
    """One run; later overrides win."""
    merged = dict(one.split("=", 1) for one in (*_SMALL, *overrides))
    merged["run.dir"] = str(folder)
    words = [f"{key}={value}" for key, value in merged.items()]
    subprocess.run([*_NEMO_LIKE, "grpo", *words], check=True)
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
    before = train(folder / f"{name}-before", faults)
    found = re.search(case.says, recommendations(before))
    if found is None:
        raise SystemExit(f"{name}: the report recommends nothing that matches {case.says}")
    setting = f"{found['key']}={found['value']}"
    after = train(folder / f"{name}-after", [*faults, setting])
    was, now = case.measure(before), case.measure(after)
    saves = found.groupdict().get("saves")
    claim = float(saves) if saves else was * case.factor if case.factor else None
    record = {"case": name, "faults": [one.rpartition("/")[2] for one in case.faults]}
    record |= {"recommended": setting, "unit": case.unit, "before": was, "after": now}
    steps = [mean_phases(one.steps()).total() for one in (before, after)]
    return record | {"claimed_gain": claim, "gain": abs(was - now), "step_s": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--out", type=Path, help="append a JSON line for each case")
    parser.add_argument("--keep", type=Path, help="folder of the runs, kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        here = [name for name, case in CASES.items() if not case.needs_gpu]
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
