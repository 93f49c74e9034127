"""Options and words of the commands that start from a configuration, given as a run's would be."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from nemo_like.compose.files import SHIPPED, find_file, is_name, located
from nemo_like.compose.load import compose_raw
from nemo_like.compose.overrides import refuse_twice
from nemo_like.config.paths import readable
from nemo_like.errors import UserError


def whole_number(least: int) -> Callable[[str], int]:
    """The type of an option."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} must be a whole number of at least {least}")
        return int(text)

    return read


class CommandParser(argparse.ArgumentParser):
    """Options and words of one command; what argparse would say becomes a UserError."""

    def __init__(self, command: str, usage: str, description: str | None) -> None:
        super().__init__(
            prog=f"nemo-like {command}", usage=usage, description=description, allow_abbrev=False
        )

    def error(self, message: str) -> NoReturn:
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

    def load(self, options: argparse.Namespace, **checks: bool) -> Any:
        """The checked configuration; raises UserError. See ``Composed.load`` for ``checks``."""
        return compose_raw(*self.source(options)).load(**checks)

    @readable()
    def source(self, options: argparse.Namespace) -> tuple[Path, str, list[str], Path | None]:
        """Folder, name, overrides and the user's folder, for ``compose_raw``; raises UserError."""
        # Hydra's ~key deletes an override.
        names = [word for word in options.words if is_name(word) and not word.startswith("~")]
        if len(names) + (options.config_name is not None) > 1:
            raise UserError(f"{names[-1]} is one config name too many; use {self.usage}.")
        folder = options.config_path or SHIPPED
        name = options.config_name or (names[0] if names else "grpo")
        overrides = [word for word in options.words if word not in names]
        refuse_twice(overrides)
        folders = [folder, *([options.config_dir] if options.config_dir else [])]
        extra_dir = options.config_dir
        if name.endswith(".yaml") and Path(name).is_file() and find_file(folders, name) is None:
            file, (found, name) = name, located(name, folders)
            if found and extra_dir:
                raise UserError(f"{file} is not in --config-dir={extra_dir}; leave one out.")
            extra_dir = found or extra_dir
        return folder, name, overrides, extra_dir
