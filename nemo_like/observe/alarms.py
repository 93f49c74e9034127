"""Alarms: problems that spoil a run without ending it, reported once each, with a remedy.

Rules compare the last steps with the first ones, by the names in ``metrics.jsonl``. A metric that
the run does not have raises no alarm.
"""

import json
import math
import shlex
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

NODES = "nodes.json"
"""File with the node of each worker."""
_WINDOW = 10
"""Steps on each side of a comparison."""
_SETTLED = 4 * _WINDOW
"""Steps after which memory should no longer grow."""

_SAVED_EVERY = 10
"""Minutes between checkpoints of a run that may run out of memory."""

_LENGTH = "rollout/completion_tokens"

Row = Mapping[str, Any]


class Alarm(NamedTuple):
    """One rule that a run broke."""

    name: str
    step: int
    text: str


class _Steps:
    """Metrics of some steps; NaN, which fails every comparison, where a step lacks one."""

    def __init__(self, rows: Sequence[Row], hosts: Mapping[str, str] | None = None) -> None:
        self.rows, self.hosts = rows, hosts or {}

    def of(self, name: str) -> list[float]:
        found = [row.get(name) for row in self.rows]
        return [math.nan if one is None else one for one in found] or [math.nan]

    def mean(self, name: str) -> float:
        return statistics.fmean(self.of(name))

    def median(self, name: str) -> float:
        values = self.of(name)
        return math.nan if any(map(math.isnan, values)) else statistics.median(values)


Rule = Callable[[_Steps, _Steps, Mapping[str, Any]], str | None]
"""Takes first steps, last steps and configuration by dotted key; returns a sentence or None."""


class Alarms:
    """Checks the metrics of each step and returns new alarms."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """``settings``: the run's configuration by dotted key, to compute recommended values."""
        self._settings = settings
        self.hosts: Mapping[str, str] = {}
        """The node of each worker, by the name of its log."""
        self._known = set[str]()
        self._first: list[Row] = []
        self._last = deque[Row](maxlen=_WINDOW)
        self._count = 0

    def add(self, row: Row) -> list[Alarm]:
        """``row``: the next record of ``metrics.jsonl``; records that are not steps are ignored."""
        if "time/step_s" not in row:
            return []
        self._count += 1
        self._last.append(row)
        if len(self._first) < 2 * _WINDOW:
            self._first.append(row)
        found = [
            Alarm(rule.__name__.strip("_"), row["step"], text)
            for rule, least in _RULES.items()
            if self._count >= least and rule.__name__.strip("_") not in self._known
            if (text := rule(self._begin(least), _Steps(self._last, self.hosts), self._settings))
        ]
        self._known |= {alarm.name for alarm in found}
        return found

    def _begin(self, least: int) -> _Steps:
        """First steps to compare with; for memory later ones, since the first steps fill caches."""
        return _Steps(self._first[_WINDOW:] if least == _SETTLED else self._first[:_WINDOW])


def _is_learned(last: _Steps) -> bool:
    """Whether completions earn nearly the most that any of them does: then they may be alike."""
    return last.mean("rollout/reward") >= 0.95 * last.mean("rollout/reward_max") > 0


def _groups_without_signal(_: _Steps, last: _Steps, settings: Mapping[str, Any]) -> str | None:
    if settings.get("grpo.dynamic_sampling"):
        return None  # Each step says how many of its groups have a signal.
    share = last.mean("rollout/zero_variance_share")
    if not share >= 0.95 or last.mean("rollout/reward_std") == 0 or _is_learned(last):
        return None
    return (
        f"in {share:.0%} of groups all rewards are equal (their mean is "
        f"{last.mean('rollout/reward'):.3g}), so these groups train nothing; sample others "
        "in their place with grpo.dynamic_sampling=true, or choose prompts that the model "
        "sometimes answers correctly"
    )


def _equal_rewards(_: _Steps, last: _Steps, settings: Mapping[str, Any]) -> str | None:
    if last.mean("rollout/reward_std") != 0:
        return None
    return (
        f"all completions have the same reward, {last.mean('rollout/reward'):.3g}; read some with "
        "`nemo-like show`, and check whether environment.reward="
        f"{settings.get('environment.reward')} finds their answers"
    )


def _entropy_collapse(first: _Steps, last: _Steps, settings: Mapping[str, Any]) -> str | None:
    before, now = first.mean("policy/entropy"), last.mean("policy/entropy")
    if not (now < 0.01 and now < before / 10) or _is_learned(last):
        return None
    return (
        f"the policy's entropy fell from {before:.3g} to {now:.3g}, so completions of a "
        f"prompt are alike; {_smaller_rate(settings)}"
    )


def _length_explosion(first: _Steps, last: _Steps, settings: Mapping[str, Any]) -> str | None:
    if not _growth(first, last) >= 3 or _reward_rose(first, last):
        return None
    # From twice the first length on: a short buffer at the end bounds truncation, not growth.
    buffer = max(1, settings.get("generation.max_new_tokens", 0) - round(2 * first.mean(_LENGTH)))
    remedy = f", or penalise longer ones with advantage.overlong_buffer_tokens={buffer}"
    known = "advantage.overlong_buffer_tokens" in settings
    if not known or settings.get("environment.name") != "single_turn":
        remedy = ""  # it is about one completion
    return f"completions grew {_lengths(first, last)}; {_smaller_rate(settings)}{remedy}"


def _length_collapse(first: _Steps, last: _Steps, settings: Mapping[str, Any]) -> str | None:
    if not _growth(first, last) <= 1 / 4 or _reward_rose(first, last):
        return None
    return (
        f"completions shrank {_lengths(first, last)}; read some with `nemo-like show`, and check "
        f"whether environment.reward={settings.get('environment.reward')} pays for short ones"
    )


def _growth(first: _Steps, last: _Steps) -> float:
    before, now = first.mean(_LENGTH), last.mean(_LENGTH)
    return now / before if before > 0 else math.nan


def _reward_rose(first: _Steps, last: _Steps) -> bool:
    """Also true where it is not known."""
    return not last.mean("rollout/reward") - first.mean("rollout/reward") <= 0


def _lengths(first: _Steps, last: _Steps) -> str:
    before, now = first.mean(_LENGTH), last.mean(_LENGTH)
    return f"from {before:.0f} to {now:.0f} tokens, but the reward did not rise"


def _truncation(_: _Steps, last: _Steps, settings: Mapping[str, Any]) -> str | None:
    share = last.mean("rollout/truncated_share")
    if not share >= 0.5:
        return None
    doubled = 2 * settings.get("generation.max_new_tokens", 0)
    return f"{share:.0%} of completions are cut off; set generation.max_new_tokens={doubled}"


def _mismatch_growth(first: _Steps, last: _Steps, settings: Mapping[str, Any]) -> str | None:
    before, now = first.mean("mismatch/mean_abs"), last.mean("mismatch/mean_abs")
    if not (now >= 3 * before and now >= 1e-4):
        return None
    what, action = "leave out completions that exceed it", "mask"
    if "loss.clip_low" not in settings:
        what, action = "end the run when it grows on", "stop"  # no ratio that a mask could save
    remedy = f"{what} with mismatch.action={action} mismatch.max_mean_abs={now:.2g}"
    merged = settings.get("policy.lora.rank") and settings.get("policy.lora.refit") == "merged"
    rounded = settings.get("generation.quantization") is not None
    if merged and not rounded and settings.get("generation.backend") != "graph":
        remedy = "set policy.lora.refit=adapters"
    return (
        f"the logprobs of engine and policy differ by {now:.2g} on average, up from "
        f"{before:.2g} at first; {remedy}"
    )


def _memory_growth(first: _Steps, last: _Steps, settings: Mapping[str, Any]) -> str | None:
    remedy = "when memory has run out, continue with run.resume=true"
    if (settings.get("checkpoint.every_minutes") or math.inf) > _SAVED_EVERY:
        remedy = f"set checkpoint.every_minutes={_SAVED_EVERY} to lose little; {remedy}"
    for name in [name for name in last.rows[-1] if name.endswith("memory_gib")]:
        before, now = first.mean(name), last.mean(name)
        if now - before > max(0.5, 0.3 * before):
            longer = "rows are longer or " if "gpu" in name else ""
            grew = f"{name} grew from {before:.2f} to {now:.2f}, so {longer}something leaks"
            return f"{grew}; {remedy}"
    return None


def _tight_memory(_: _Steps, last: _Steps, settings: Mapping[str, Any]) -> str | None:
    retries = last.median("train/gpu_memory_retries")
    if not retries >= 1:
        return None
    tokens = settings.get("policy.micro_batch_tokens", 2) // 2
    return (
        f"the policy's GPU ran out of memory {retries:.0f} times in a step; torch then waits for "
        "it and frees what it caches, which slows training; set "
        f"policy.micro_batch_tokens={tokens}, if your longest row fits, or offload more "
        "(policy.offload)"
    )


def _slow_steps(first: _Steps, last: _Steps, settings: Mapping[str, Any]) -> str | None:
    before, now = first.median("time/step_s"), last.median("time/step_s")
    slower = last.median("train/tokens_per_s") <= first.median("train/tokens_per_s") / 2
    if not (now >= 2 * before and slower):
        return None
    grown = {
        name: last.median(name) - first.median(name)
        for name in ("time/rollout_s", "time/refit_s", "time/train_s", "time/logprobs_s")
        if not math.isnan(last.median(name) - first.median(name))
    }
    phase = max(grown, key=grown.__getitem__, default="time/step_s")
    remedy = f"keep other programs off the nodes (Slurm: {_with_option('--exclusive', settings)})"
    if phase == "time/rollout_s":
        processes = 2 * settings.get("environment.num_processes", 1)
        halves = "halves the time of rewards, if they are slow"
        remedy = f"environment.num_processes={processes} {halves}; or {remedy}"
    return (
        f"a step takes {now:.3g} s, up from {before:.3g} s at first; of these, {phase} went from "
        f"{first.median(phase):.3g} to {last.median(phase):.3g}; {remedy}"
    )


def _straggler(_: _Steps, last: _Steps, settings: Mapping[str, Any]) -> str | None:
    ranks = last.of("rollout/slowest_rank")
    rank, ratio = statistics.mode(ranks), last.mean("rollout/slowest_over_median")
    if not (ratio >= 1.5 and ranks.count(rank) >= 0.8 * len(ranks)):
        return None
    where = out = ""
    if host := last.hosts.get(f"generation-{rank:.0f}"):
        where = f" on node {host}"
        out = f", or leave the node out (Slurm: {_with_option(f'--exclude={host}', settings)})"
    return (
        f"generation rank {rank:.0f}{where} takes {ratio:.1f} times as long as most others, which "
        f"wait for it; check what else runs there{out}"
    )


_RULES: dict[Rule, int] = {
    **dict.fromkeys((_groups_without_signal, _equal_rewards, _truncation), _WINDOW),
    **dict.fromkeys((_tight_memory, _straggler), _WINDOW),
    **dict.fromkeys((_entropy_collapse, _length_explosion, _length_collapse), 2 * _WINDOW),
    **dict.fromkeys((_mismatch_growth, _slow_steps), 2 * _WINDOW),
    _memory_growth: _SETTLED,
}
"""Number of steps that each rule needs."""


def _smaller_rate(settings: Mapping[str, Any]) -> str:
    return f"set policy.optimizer.lr={settings.get('policy.optimizer.lr', 0) / 3:.1g}"


def _with_option(option: str, settings: Mapping[str, Any]) -> str:
    """``cluster.slurm.extra`` with one more option of sbatch, as it is typed in a shell."""
    extra = [*settings.get("cluster.slurm.extra", ()), option]
    # Without blanks, where a report would break the line.
    return shlex.quote(f"cluster.slurm.extra={json.dumps(extra, separators=(',', ':'))}")
