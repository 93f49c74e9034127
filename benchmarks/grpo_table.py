"""From the records that ``grpo.py`` collects to one table: steps, phases, floors, ratios.

Times are medians over the steps after the first three, without the last (which this project also
saves). Steps with lag are long and short in turn: compare their means, over all after the fourth.
"""

from collections.abc import Sequence
from statistics import mean, median
from typing import Any

from workloads import Workload

from nemo_like.planning.step_time import PEAK_FLOPS

Record = dict[str, Any]

NUM_WARMUP_STEPS = 3
PHASES = ("rollout", "refit", "logprobs", "train")


def steps_of(record: Record) -> list[Record]:
    """Steps of a peer or of this project.

    Each has ``step``, ``wall_s``, ``reward``, ``tokens``, ``<phase>_s``.

    ``wall_s`` is from the end of the step before to its own end; validation is left out.
    """
    if record["contender"] != "ours":
        return [
            each | {"rollout_s": each["generation_s"]}
            for each in record["records"]
            if "step" in each
        ]
    steps, before = [], {}
    for each in record["records"]:
        if "time/step_s" in each:
            alone = not before or "time/validation_s" in each
            wall_s = each["time/step_s"] if alone else each["time"] - before["time"]
            steps.append(
                {
                    "step": each["step"],
                    "wall_s": wall_s,
                    "reward": each["rollout/reward"],
                    "tokens": each["rollout/num_tokens"],
                }
                | {f"{one}_s": each[f"time/{one}_s"] for one in PHASES if f"time/{one}_s" in each}
            )
        before = each
    return steps


def accuracies(record: Record) -> tuple[float, float] | None:
    """Held-out mean reward before and after training, where it was measured."""
    if record["contender"] == "ours":
        found = [e["validation/reward"] for e in record["records"] if "validation/reward" in e]
        return (found[0], found[-1]) if len(found) > 1 else None
    last = record["records"][-1] if record["records"] else {}
    return (last["accuracy_before"], last["accuracy_after"]) if "accuracy_after" in last else None


def medians(record: Record) -> dict[str, float]:
    """Of each number over the steps that count, with what no phase claims as ``rest_s``.

    ``mean_s``: of whole steps after the fourth, the last one included.
    """
    later = [each for each in steps_of(record) if each["step"] > NUM_WARMUP_STEPS]
    counted = later[:-1]
    if not counted:
        return {}
    names = ("wall_s", "tokens", *(f"{phase}_s" for phase in PHASES))
    found = {n: median(e[n] for e in counted) for n in names if all(n in e for e in counted)}
    parts = sum(found.get(f"{phase}_s", 0.0) for phase in PHASES)
    return found | {
        "rest_s": found["wall_s"] - parts,
        "num_steps": float(len(counted)),
        "mean_s": mean(each["wall_s"] for each in later[1:]),
    }


def floor_times(record: Record) -> dict[str, float]:
    """Least seconds of generation, training and refit.

    Training is 6 FLOP a parameter and token, prompts included, at half of 989 TFLOP/s; refit is one
    copy of the bfloat16 weights within the GPU.
    """
    measured = record["records"][-1]
    parameters, generated = measured["num_parameters"], median(measured["logprobs"]["tokens"])
    flops = 6 * parameters * (measured["prompt_tokens"] + generated)
    times: dict[str, float] = {
        "generation_s": median(measured["logprobs"]["seconds"]),
        "tokens_s": median(measured["tokens"]["seconds"]),
        "bare_s": median(measured["bare"]["seconds"]),
        "train_s": flops / (0.5 * PEAK_FLOPS),
        "refit_s": 2 * parameters / measured.get("copy_bytes_per_s", float("inf")),
        "tokens": generated,
    }
    return times | {"sum_s": sum(times[f"{part}_s"] for part in ("generation", "train", "refit"))}


def table(workload: Workload, records: Sequence[Record]) -> list[str]:
    """Lines on the latest record of each contender that has any step."""
    latest = {
        each["contender"]: each
        for each in records
        if each["workload"]["name"] == workload.name and each["records"]
    }
    lines = [
        f"{workload.name}: {workload.num_prompts} x {workload.num_generations} completions of at "
        f"most {workload.max_new_tokens} tokens; "
        + ", ".join(sorted({each["gpu"] or "CPU" for each in latest.values()}))
    ]
    floor = floor_times(latest["floor"]) if "floor" in latest else {}
    lines += _floor_lines(floor)
    steps = {name: medians(one) for name, one in latest.items() if name != "floor"}
    for name, numbers in steps.items():
        lines += _step_lines(name, numbers, accuracies(latest[name]))
    ours = steps.get("ours")
    if ours:
        for name in ("trl", "trl-uncorrected", "verl"):
            if steps.get(name):
                lines.append(_ratio(f"ours / {name}", ours["wall_s"], steps[name]["wall_s"]))
        if floor:
            lines.append(_ratio("ours / floor", ours["wall_s"], floor["sum_s"]))
            lines.append(_ratio("rollout / floor", ours["rollout_s"], floor["generation_s"]))
    return lines


def _floor_lines(floor: dict[str, float]) -> list[str]:
    if not floor:
        return []
    return [
        _line("floor: stock vLLM engine", floor["generation_s"], floor["tokens"]),
        _line("  without text", floor["tokens_s"]),
        _line("  without logprobs", floor["bare_s"]),
        _line("floor: training at half of 989 TFLOP/s", floor["train_s"]),
        _line("floor: one copy of the weights", floor["refit_s"]),
        _line("floor: sum", floor["sum_s"]),
    ]


def _step_lines(
    name: str, numbers: dict[str, float], validated: tuple[float, float] | None
) -> list[str]:
    if not numbers:
        return [f"{name}: no step that counts"]
    title = f"{name}: step (median of {numbers['num_steps']:.0f})"
    lines = [_line(title, numbers["wall_s"], numbers["tokens"])]
    # As many steps: without the fourth, with the last.
    title = f"  mean of {numbers['num_steps']:.0f} after the fourth"
    lines.append(_line(title, numbers["mean_s"]))
    lines += [
        _line(f"  {phase}", numbers[f"{phase}_s"])
        for phase in (*PHASES, "rest")
        if f"{phase}_s" in numbers
    ]
    if validated is not None:
        lines.append(f"  held-out reward {validated[0]:.3f} -> {validated[1]:.3f}")
    return lines


def _line(title: str, seconds: float, tokens: float | None = None) -> str:
    suffix = "" if tokens is None else f"  {tokens:8,.0f} tokens"
    return f"{title:42}{seconds:8.3f} s{suffix}"


def _ratio(title: str, ours: float, other: float) -> str:
    return f"{title:42}{ours / other:8.2f}"
