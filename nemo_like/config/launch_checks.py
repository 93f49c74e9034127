"""Rules of ``cluster.slurm``, which are those of sbatch and of bash."""

import math
import re
import shlex
from collections.abc import Sequence

from nemo_like.config.rules import Effect, Ranges, check_effects, check_ranges, value_of
from nemo_like.config.run_schema import TrainingRunConfig
from nemo_like.errors import UserError

_SECTION = "cluster.slurm"
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d\d))?(?::(?P<third>\d\d))?")
_MEMORY = re.compile(r"\d+[KMGT]?")
_MOUNT = re.compile(r"/[^,:]*:/[^,:]*(:[^,:]+)?")
_OPTION = re.compile(r"--(?P<long>[A-Za-z][\w-]*)|-(?P<short>[A-Za-z])")

# Options that say what a key says already, by the key.
_OPTIONS_OF_KEYS = {
    "cluster.num_nodes": ("nodes", "N", "ntasks", "n", "ntasks-per-node"),
    "cluster.gpus_per_node": ("gpus-per-node", "gpus", "G"),
    "--multirun": ("array", "a"),
    "the folder that you submit from": ("chdir", "D"),
    f"{_SECTION}.partition": ("partition", "p"),
    f"{_SECTION}.account": ("account", "A"),
    f"{_SECTION}.qos": ("qos", "q"),
    f"{_SECTION}.time": ("time", "t"),
    f"{_SECTION}.cpus_per_node": ("cpus-per-task", "c"),
    f"{_SECTION}.mem": ("mem",),
    f"{_SECTION}.requeue": ("requeue", "no-requeue", "open-mode"),
    f"{_SECTION}.signal_before_s": ("signal",),
    f"{_SECTION}.log_dir": ("output", "o", "error", "e"),
}
_SUBMITS_OTHERWISE = ("wait", "W", "test-only", "wrap")


def check_slurm(config: TrainingRunConfig) -> None:
    """Raise UserError for the first rule that ``cluster.slurm`` breaks."""
    check_ranges(config, _RANGES)
    check_effects(config, _EFFECTS)
    slurm = config.cluster.slurm
    for key in ("partition", "account", "qos", "time", "mem", "container", "log_dir"):
        _check_line(f"{_SECTION}.{key}", value_of(slurm, key))
    _check_format("mem", slurm.mem, _MEMORY, "a number with K, M, G or T, such as 64G")
    for mount in slurm.mounts:
        _check_format("mounts", mount, _MOUNT, "/outside:/inside, or /outside:/inside:flags")
    for option in slurm.extra:
        _check_line(f"{_SECTION}.extra", option)
        _check_option(option)
    time_s = None if slurm.time is None else _seconds(slurm.time)
    _check_cpus(config)
    if slurm.requeue:
        _check_requeue(config, time_s)


def cpus_per_node(config: TrainingRunConfig) -> int:
    """CPUs that the run's bundles reserve on each node."""
    cluster = config.cluster
    bundles = cluster.gpus_per_node or cluster.cpu_workers_per_node
    return math.ceil(bundles * cluster.cpus_per_worker)


def _check_line(key: str, value: str | None) -> None:
    """A line break would end the comment that sbatch reads, and begin a command."""
    if value is not None and (not value.strip() or not value.isprintable()):
        raise UserError(f"{key}={value!r} must be one line of printable text.")


def _check_format(key: str, value: str | None, pattern: re.Pattern[str], what: str) -> None:
    if value is not None and (not pattern.fullmatch(value) or not value.isprintable()):
        raise UserError(f"{_SECTION}.{key}={value!r} must be {what}.")


def _check_option(option: str) -> None:
    found = _OPTION.match(option)
    if found is None:
        raise UserError(
            f"{_SECTION}.extra={option!r} must be an option of sbatch, such as --constraint=h100."
        )
    try:
        shlex.split(option)
    except ValueError as error:
        raise UserError(f"{_SECTION}.extra={option!r}: {error}; close the quote.") from error
    for key, names in _OPTIONS_OF_KEYS.items():
        if _is_one_of(found, names):
            raise UserError(f"{_SECTION}.extra={option!r}: {key} decides that; use it instead.")
    if _is_one_of(found, _SUBMITS_OTHERWISE):
        raise UserError(
            f"{_SECTION}.extra={option!r}: nemo-like slurm submit hands over its script and ends "
            "with the job's id; leave it out."
        )


def _is_one_of(option: re.Match[str], names: Sequence[str]) -> bool:
    """As sbatch reads it: -N2 is -N, and a long name may be cut short."""
    if (short := option["short"]) is not None:
        return short in names
    return any(name.startswith(option["long"]) for name in names if len(name) > 1)


def _seconds(time: str) -> int:
    """Raise UserError for a time that is not Slurm's, or means something else than it seems to."""
    found = _TIME.fullmatch(time)
    if found is None:
        raise UserError(
            f"{_SECTION}.time={time!r} must be minutes, hours:minutes:seconds or "
            "days-hours:minutes:seconds."
        )
    days, first, second, third = (int(found[name] or 0) for name in found.groupdict())
    if found["days"] is not None:
        return ((days * 24 + first) * 60 + second) * 60 + third
    if found["second"] is None:
        return first * 60
    if found["third"] is None:
        raise UserError(
            f"{_SECTION}.time={time!r} would be {first} minutes and {second} seconds; write "
            f"{first}:{second:02}:00, or 0:{first:02}:{second:02}."
        )
    return (first * 60 + second) * 60 + third


def _check_cpus(config: TrainingRunConfig) -> None:
    cpus, needed = config.cluster.slurm.cpus_per_node, cpus_per_node(config)
    if cpus is not None and cpus < needed:
        raise UserError(
            f"{_SECTION}.cpus_per_node={cpus} is less than the {needed} that the run's bundles "
            "reserve (cluster.cpus_per_worker each); raise it, or leave it null."
        )


def _check_requeue(config: TrainingRunConfig, time_s: int | None) -> None:
    """A job that is queued again must find its own checkpoints."""
    key = f"{_SECTION}.requeue=true"
    if not config.run.resume:
        raise UserError(
            f"{key} needs run.resume=true and run.dir, or the job would start afresh each time."
        )
    if config.checkpoint.every_steps == 0 and config.checkpoint.every_minutes == 0:
        raise UserError(
            f"{key} needs checkpoint.every_steps or every_minutes, or a job that is killed would "
            "start afresh each time."
        )
    before = config.cluster.slurm.signal_before_s
    if time_s and before >= time_s:
        raise UserError(
            f"{_SECTION}.signal_before_s={before} leaves nothing of "
            f"{_SECTION}.time={config.cluster.slurm.time}; lower it, or raise that."
        )


_RANGES = Ranges(
    at_least={f"{_SECTION}.cpus_per_node": 1, f"{_SECTION}.signal_before_s": 1},
    # Slurm keeps it in 16 bits.
    at_most={f"{_SECTION}.signal_before_s": 65535},
)

_EFFECTS = (
    Effect(
        keys=(f"{_SECTION}.container_runtime", f"{_SECTION}.mounts"),
        applies=lambda c: c.cluster.slurm.container is not None,
        why_not=f"{_SECTION}.container names no image",
    ),
    Effect(
        keys=(f"{_SECTION}.signal_before_s",),
        applies=lambda c: c.cluster.slurm.requeue,
        why_not=f"{_SECTION}.requeue=false lets the job end with its time",
    ),
)
