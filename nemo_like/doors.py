"""Where users put in what is theirs: a key names an object of ours, of a package's, or by its path.

A path is ``file.py:name`` (relative to the current folder; the file can import its neighbours),
``package.module:name`` or ``package.module.name``. A package may also give an entry point, whose
name is then as good as one of ours. Ours are found in the same way.
"""

import ast
import difflib
import functools
import importlib
import importlib.util
import re
import stat
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from importlib.metadata import entry_points
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from nemo_like.errors import UserError

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_VERSION = "__nemo_like_version__"
"""Variable of a module from a file: when the file was written that it was read from."""

_SPECIAL = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@dataclass(frozen=True)
class Door:
    """What a key may name: the key's annotation has it."""

    group: str
    """Of entry points, ``name = "module:object"``."""
    ours: Mapping[str, str] = field(default_factory=dict)
    """Paths by name; empty for what has none."""
    kind: str = "function"
    """What is named."""

    @property
    def names(self) -> tuple[str, ...]:
        """Ours first."""
        return (*self.ours, *_installed(self.group))

    def refusal(self, key: str, spec: str) -> str | None:
        """Why ``spec`` cannot name anything, by its looks."""
        if spec in self.names or is_path(spec):
            return None
        near = difflib.get_close_matches(spec, self.names, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        known = "".join(f"{name}, " for name in self.names)
        return (
            f"{key}={spec} is not known{hint}; use {known}file.py:{self.kind} or "
            f"package.module.{self.kind}."
        )

    def look(self, key: str, spec: str) -> None:
        """Find a file and the syntax in it, without running it; raises UserError."""
        file, name = _parts(spec)
        if spec in self.names or not _is_file(file):
            return
        path = Path(file).expanduser()
        refuse_special(f"{key}={spec}: {file}", path)
        if not path.is_file():
            where = "" if path.is_absolute() else f" in {Path.cwd()}"
            raise UserError(f"{key}={spec}: there is no file {file}{where}.")
        try:
            ast.parse(path.read_text(encoding="utf-8"), filename=file)
        except (SyntaxError, ValueError) as error:
            raise UserError(f"{key}={spec}: {file} is not valid Python: {error}.") from error
        if not name.isidentifier():
            raise UserError(f"{key}={spec}: '{name}' is not a {self.kind} name.")

    def load(self, key: str, spec: str) -> Any:
        """Import what ``spec`` names; UserError, which names ``key``, says why that fails."""
        if refusal := self.refusal(key, spec):
            raise UserError(refusal)
        place, name = _parts(self.ours.get(spec) or _installed(self.group).get(spec) or spec)
        where = f"{key}={spec}"
        if _is_file(place):
            module = _module_of_file(where, Path(place).expanduser().absolute())
        else:
            module = _module_of_name(where, place, self.kind)
        if not hasattr(module, name):
            public = [key for key, value in vars(module).items() if callable(value)]
            near = difflib.get_close_matches(name, public, n=1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise UserError(f"{where}: {module.__name__} has no {name!r}{hint}")
        found = getattr(module, name)
        if self.kind == "function" and not callable(found):
            raise UserError(f"{where}: {name} is a {type(found).__name__}, not a function.")
        return found


def import_path(path: str) -> Any:
    """What ``package.module:name`` is: a path of our own, which exists."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def is_path(spec: str) -> bool:
    """Whether ``spec`` looks like a path to an object.

    >>> [is_path(one) for one in ("my.py:f", "a.b:f", "a.b.f", "math", "my.py", "0.5")]
    [True, True, True, False, False, False]
    """
    is_name = bool(_MODULE.fullmatch(spec)) and not spec.endswith(".py")
    return ":" in spec or ("." in spec and is_name)


def absolute(spec: str) -> str:
    """The same object for a process that works in another folder."""
    place, name = _parts(spec)
    return f"{Path(place).expanduser().absolute()}:{name}" if _is_file(place) else spec


def error_place(error: BaseException, folder: Path | None = None) -> str:
    """``file.py:line`` of the innermost frame below ``folder``, else of the innermost frame."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "no traceback"
    ours = [frame for frame in frames if folder and Path(frame.filename).is_relative_to(folder)]
    frame = (ours or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"


def error_text(error: BaseException) -> str:
    """``Type: message`` on one line; safe for exceptions whose ``str`` fails."""
    text = " ".join("".join(traceback.format_exception_only(error)).split())
    return text if len(text) <= 300 else text[:300] + "…"


def refuse_special(what: str, path: Path, depth: int = 0) -> None:
    """Refuse a pipe, device or socket, which one may read for ever, up to ``depth`` folders below.

    ``what`` names ``path`` in the message. What does not exist is left to whoever reads it.
    """
    below = (one for level in range(1, depth + 1) for one in path.glob("/".join("*" * level)))
    for one in (path, *sorted(below)):
        try:
            kind = _SPECIAL.get(stat.S_IFMT(one.stat().st_mode))
        except OSError:
            continue
        if kind and one == path:
            raise UserError(f"{what} is {kind}, not a file; write its content to a file.")
        if kind:
            name = one.relative_to(path)
            raise UserError(f"{what}: {name} is {kind}, not a file; put a file in its place.")


@functools.cache
def _installed(group: str) -> dict[str, str]:
    return {one.name: one.value for one in entry_points(group=group)}


def _parts(spec: str) -> tuple[str, str]:
    """Module or file, and the name in it; of a bare word the first is empty."""
    place, colon, name = spec.rpartition(":")
    if not colon:
        place, _, name = spec.rpartition(".")
    return place, name


def _is_file(place: str) -> bool:
    return bool(place) and (place.endswith(".py") or not _MODULE.fullmatch(place))


class _Newest(SourceFileLoader):
    """Reads the file itself: cached bytecode is that of any edit of equal size in one second."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _module_of_file(where: str, path: Path) -> ModuleType:
    if path.suffix != ".py" or not path.is_file():
        raise UserError(
            f"{where}: there is no Python file {path}; give a path that is absolute or relative to "
            "the folder you start in."
        )
    folder, version = str(path.parent), str(path.stat().st_mtime_ns)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    # Under its own name, for its classes to pickle, unless that name is taken (math.py).
    name = path.stem
    before = sys.modules.get(name)
    if before is not None and getattr(before, "__file__", None) != str(path):
        name = re.sub(r"\W", "_", str(path))
        before = sys.modules.get(name)
    if before is not None and getattr(before, _VERSION, version) == version:
        return before
    spec = importlib.util.spec_from_file_location(name, path, loader=_Newest(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    setattr(module, _VERSION, version)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's code, which may fail in any way
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
        raise UserError(_import_failure(where, error, path.parent)) from error
    return module


def _module_of_name(where: str, name: str, kind: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # the user's code, which may fail in any way
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent and f"{name}.".startswith(f"{absent}."):
            raise UserError(
                f"{where}: there is no module {absent}; install it, put it on PYTHONPATH or use "
                f"file.py:{kind}."
            ) from error
        raise UserError(_import_failure(where, error, None)) from error


def _import_failure(where: str, error: BaseException, folder: Path | None) -> str:
    if isinstance(error, SyntaxError):
        return f"{where} has a syntax error at {error.filename}:{error.lineno}: {error.msg}."
    place = error_place(error, folder)
    return f"{where} cannot be imported: {error_text(error)} ({place})."
