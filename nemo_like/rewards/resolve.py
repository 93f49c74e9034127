"""From ``environment.reward`` to a function: found, imported and checked before anything starts."""

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from nemo_like.errors import UserError

BUILTIN_REWARDS = {
    "reasoning_gym": "nemo_like.data.reasoning_gym.reward",
    "math": "nemo_like.rewards.math.reward.reward",
}
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class RewardFunction:
    """A reward function and the names of the row fields that it takes."""

    spec: str
    function: Callable[..., Any]
    accepted_fields: frozenset[str] | None
    """None: every field (the function has ``**fields``)."""
    required_fields: frozenset[str]
    """Fields without a default: a row that lacks one cannot be graded."""
    is_async: bool = False
    """An ``async def``, or an object with one as its ``__call__``."""

    def __call__(self, prompt: str, completion: str, fields: Mapping[str, Any]) -> Any:
        """Call the function with those fields that it names; its result is not checked here."""
        missing = sorted(self.required_fields - fields.keys())
        if missing:
            raise UserError(f"the row lacks {', '.join(missing)}, which {self.spec} needs.")
        passed = {
            name: value
            for name, value in fields.items()
            if self.accepted_fields is None or name in self.accepted_fields
        }
        return self.function(**(passed | {"prompt": prompt, "completion": completion}))


def resolve_reward(spec: str) -> RewardFunction:
    """Import the function that ``spec`` names; UserError says why it cannot be used.

    ``spec`` is ``reasoning_gym``, ``math``, ``file.py:function`` (the path is relative to the
    current folder; the file can import its neighbours) or ``package.module.function``.
    """
    target = BUILTIN_REWARDS.get(spec, spec)
    path, colon, name = target.rpartition(":")
    if colon:
        module = _module_of_file(spec, Path(path))
    else:
        module_name, dot, name = target.rpartition(".")
        if not dot or name == "py":
            raise UserError(_unknown_spec(spec))
        module = _module_of_name(spec, module_name)
    return _checked(spec, _function_of(spec, module, name))


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


def absolute_reward(spec: str) -> str:
    """The same function for a process that works in another folder."""
    path, colon, function = spec.rpartition(":")
    return f"{Path(path).expanduser().absolute()}:{function}" if colon else spec


def _unknown_spec(spec: str) -> str:
    near = difflib.get_close_matches(spec, BUILTIN_REWARDS, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return (
        f"environment.reward={spec} is not known{hint}; use reasoning_gym, math, reward_model, "
        "file.py:function or package.module.function."
    )


def _module_of_file(spec: str, path: Path) -> ModuleType:
    path = path.expanduser().absolute()
    if path.suffix != ".py" or not path.is_file():
        raise UserError(
            f"environment.reward={spec}: there is no Python file {path}; give a path that is "
            "absolute or relative to the folder you start in."
        )
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    # Under its own name, so that its classes pickle, unless that name is taken (math.py).
    name = path.stem if path.stem not in sys.modules else f"_reward_file_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's code, which may fail in any way
        del sys.modules[name]
        raise UserError(_import_failure(spec, error, path.parent)) from error
    return module


def _module_of_name(spec: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's code, which may fail in any way
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent and f"{module_name}.".startswith(f"{absent}."):
            raise UserError(
                f"environment.reward={spec}: there is no module {absent}; "
                "install it, put it on PYTHONPATH or use file.py:function."
            ) from error
        raise UserError(_import_failure(spec, error, None)) from error


def _import_failure(spec: str, error: BaseException, folder: Path | None) -> str:
    if isinstance(error, SyntaxError):
        return (
            f"environment.reward={spec} has a syntax error at "
            f"{error.filename}:{error.lineno}: {error.msg}."
        )
    place = error_place(error, folder)
    return f"environment.reward={spec} cannot be imported: {error_text(error)} ({place})."


def _function_of(spec: str, module: ModuleType, name: str) -> Callable[..., Any]:
    if not hasattr(module, name):
        public = [key for key, value in vars(module).items() if callable(value)]
        near = difflib.get_close_matches(name, public, n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise UserError(f"environment.reward={spec}: {module.__name__} has no {name!r}{hint}")
    function = getattr(module, name)
    if not callable(function):
        kind = type(function).__name__
        raise UserError(f"environment.reward={spec}: {name} is a {kind}, not a function.")
    return function


def _checked(spec: str, function: Callable[..., Any]) -> RewardFunction:
    """Read the signature; prompt and completion are passed by name, so that order is free."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise UserError(f"environment.reward={spec} has no readable signature.") from error
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    named = frozenset(p.name for p in parameters if p.kind in _NAMED)
    required = {p.name for p in parameters if p.default is p.empty and p.kind in _NAMED}
    positional_only = [
        p.name
        for p in parameters
        if p.kind is inspect.Parameter.POSITIONAL_ONLY and p.default is p.empty
    ]
    fits = not positional_only and (takes_all or {"prompt", "completion"} <= named)
    if not fits:
        raise UserError(
            f"environment.reward={spec} takes {inspect.signature(function)}, but is called with "
            "prompt=…, completion=… and the row's fields; write "
            "def reward(prompt, completion, **fields)."
        )
    own = {"prompt", "completion"}
    accepted = None if takes_all else named - own
    is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    required_fields = frozenset(required - own - {"messages"})
    return RewardFunction(spec, function, accepted, required_fields, is_async)
