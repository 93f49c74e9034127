"""Rules of sbatch and bash for ``cluster.slurm``."""

import math
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from nemo_like.config.slurm import SlurmConfig

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d\d))?(?::(?P<third>\d\d))?")
_MOUNT = re.compile(r"/[^,:]*:/[^,:]*(:[^,:]+)?")
_OPTION = re.compile(r"--(?P<long>[A-Za-z][\w-]*)|-(?P<short>[A-Za-z])")
# Options that repeat a key, by the key.
_OPTIONS_OF_KEYS = {
    "cluster.num_nodes": ("nodes", "N", "ntasks", "n", "ntasks-per-node"),
    "cluster.gpus_per_node": ("gpus-per-node", "gpus", "G"),
    "--multirun": ("array", "a"),
    "the folder that you submit from": ("chdir", "D"),
    "cluster.slurm.time": ("time", "t"),
    "cluster.slurm.requeue": ("requeue", "no-requeue", "open-mode"),
    "run.stop_grace_s": ("signal",),
    "the folder slurm-logs": ("output", "o", "error", "e"),
}
_SUBMITS_OTHERWISE = ("wait", "W", "test-only", "wrap")
_LINES = ("time", "container")


def broken(slurm: SlurmConfig, here: str, run: Any) -> Iterator[str]:
    """Yield what breaks them. A line break, for one, would begin a command in sbatch's comments."""
    lines = [(name, getattr(slurm, name)) for name in _LINES]
    for name, text in [*lines, *(("extra", option) for option in slurm.extra)]:
        if text is not None and (not text.strip() or not text.isprintable()):
            yield f"{here}.{name}={text!r} must be one line of printable text."
    for mount in slurm.mounts:
        if not _MOUNT.fullmatch(mount) or not mount.isprintable():
            yield f"{here}.mounts={mount!r} must be /outside:/inside, or /outside:/inside:flags."
    for option in slurm.extra:
        yield from _option_rules(f"{here}.extra={option!r}", option)
    yield from _time_rules(slurm, here, run)


def _time_rules(slurm: SlurmConfig, here: str, run: Any) -> Iterator[str]:
    """A job that is queued again must find its own checkpoints."""
    time_s, sentence = _seconds(slurm.time) if slurm.time is not None else (None, None)
    if sentence:
        yield f"{here}.time={slurm.time!r} {sentence}"
    if not slurm.requeue:
        return
    if not run.run.resume:
        yield (
            f"{here}.requeue=true needs run.resume=true and run.dir, or the job would start "
            "afresh each time."
        )
    if run.checkpoint.every_steps == 0 and run.checkpoint.every_minutes == 0:
        yield (
            f"{here}.requeue=true needs checkpoint.every_steps or every_minutes, or a job that "
            "is killed would start afresh each time."
        )
    if time_s and (before_s := signal_before_s(run.run.stop_grace_s)) >= time_s:
        yield (
            f"{here}.time={slurm.time} leaves nothing for the run, which is stopped {before_s} "
            "s before; raise it, or lower run.stop_grace_s."
        )


def signal_before_s(stop_grace_s: float) -> int:
    """Seconds before a job's end at which it is signalled; Slurm keeps them in 16 bits."""
    return min(max(120, math.ceil(2 * stop_grace_s)), 2**16 - 1)


def _option_rules(given: str, option: str) -> Iterator[str]:
    found = _OPTION.match(option)
    if found is None:
        yield f"{given} must be an option of sbatch, such as --constraint=h100."
        return
    try:
        shlex.split(option)
    except ValueError as error:
        yield f"{given}: {error}; close the quote."
    for key, names in _OPTIONS_OF_KEYS.items():
        if _is_one_of(found, names):
            yield f"{given}: {key} decides that; use it instead."
    if _is_one_of(found, _SUBMITS_OTHERWISE):
        yield (
            f"{given}: nemo-like slurm submit hands over its script and ends with the job's id; "
            "leave it out."
        )


def _is_one_of(option: re.Match[str], names: Sequence[str]) -> bool:
    """As sbatch reads it: -N2 is -N, and a long name may be cut short."""
    if (short := option["short"]) is not None:
        return short in names
    return any(name.startswith(option["long"]) for name in names if len(name) > 1)


def _seconds(time: str) -> tuple[int | None, str | None]:
    """Seconds of Slurm's format, or what is wrong with it or means something else than it seems."""
    found = _TIME.fullmatch(time)
    if found is None:
        return None, "must be minutes, hours:minutes:seconds or days-hours:minutes:seconds."
    days, first, second, third = (int(found[name] or 0) for name in found.groupdict())
    if found["days"] is not None:
        return ((days * 24 + first) * 60 + second) * 60 + third, None
    if found["second"] is None:
        return first * 60, None
    if found["third"] is None:
        return None, (
            f"would be {first} minutes and {second} seconds; write {first}:{second:02}:00, or "
            f"0:{first:02}:{second:02}."
        )
    return (first * 60 + second) * 60 + third, None
