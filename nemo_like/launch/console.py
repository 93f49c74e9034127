"""``nemo-like COMMAND``: every command starts from a configuration, given as a run's would be."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from nemo_like.compose.load import compose_raw, load
from nemo_like.compose.main import end_on_error
from nemo_like.config.run import RunConfig
from nemo_like.errors import UserError

# Modules are imported when asked for; each has ``run(arguments)``.
COMMANDS = {
    "plan": "nemo_like.launch.plan",
    "ray-config": "nemo_like.launch.ray_config",
    "slurm": "nemo_like.launch.slurm",
}
CONFIGS = Path(__file__).parent.parent.parent / "configs"


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script; wrong input ends it with code 2 and one sentence."""
    end_on_error(lambda: _run(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: Sequence[str]) -> None:
    command = arguments[0] if arguments else ""
    if command in ("-h", "--help"):
        sys.stdout.write(f"usage: nemo-like {{{','.join(COMMANDS)}}} ...\n")
        return
    if command not in COMMANDS:
        raise UserError(
            f"'{command}' is not a command of nemo-like; use nemo-like {' or '.join(COMMANDS)}."
        )
    importlib.import_module(COMMANDS[command]).run(arguments[1:])


class CommandParser(argparse.ArgumentParser):
    """Options and words of one command; what argparse would say becomes a UserError."""

    def __init__(self, command: str, usage: str, description: str | None) -> None:
        super().__init__(
            prog=f"nemo-like {command}", usage=usage, description=description, allow_abbrev=False
        )

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting."""
        raise UserError(f"{message}; use {self.usage}.")


class ConfigParser(CommandParser):
    """``[config name] [key=value ...]`` with Hydra's options for where configurations are."""

    def __init__(self, command: str, usage: str, description: str | None) -> None:
        super().__init__(command, usage, description)
        self.add_argument("words", nargs="*", help="configuration, and key=value")
        self.add_argument("--config-name", "-cn", help="YAML file without its ending (grpo)")
        self.add_argument("--config-dir", "-cd", type=Path, help="folder of your own YAML files")
        self.add_argument(
            "--config-path", "-cp", type=Path, help="folder to use instead of the shipped one"
        )

    def load(
        self, options: argparse.Namespace, *, files_are_here: bool = True, runs: bool = True
    ) -> RunConfig:
        """The checked configuration; raises UserError. For the others see ``checks.check``."""
        raw = compose_raw(*self.source(options))
        return load(raw, files_are_here=files_are_here, runs=runs)

    def source(self, options: argparse.Namespace) -> tuple[Path, str, list[str], Path | None]:
        """What ``compose_raw`` needs: folder, name, overrides and the user's folder.

        Raises UserError for more than one name, and for a folder that does not exist.
        """
        # Words without "=" are no overrides, but Hydra's ~key deletes one.
        names = [word for word in options.words if "=" not in word and not word.startswith("~")]
        if len(names) + (options.config_name is not None) > 1:
            raise UserError(f"{names[-1]} is one config name too many; use {self.usage}.")
        folder = options.config_path or CONFIGS
        if not folder.is_dir():
            raise UserError(f"--config-path={folder} is no folder; give one with YAML files.")
        name = options.config_name or (names[0] if names else "grpo")
        overrides = [word for word in options.words if word not in names]
        return folder, name, overrides, options.config_dir
