"""Callbacks: objects that a run calls at its start, steps, validations and end."""

from collections.abc import Mapping
from typing import Any

from nemo_like.config.run import CALLBACKS
from nemo_like.doors import error_place, error_text
from nemo_like.errors import RunError, UserError

EVENTS = ("on_start", "on_step", "on_validation", "on_end")


class Callbacks:
    """The objects of ``run.callbacks``. Each needs at least one of these methods:

    - ``on_start(folder, config, step)``: before models load; ``step`` is the last one completed.
    - ``on_step(step, metrics)``, ``on_validation(step, metrics)``: after each; step 0 is the
      validation before training. Returning a string ends the run with that reason; a last
      validation is made first.
    - ``on_end(summary)``: after a completed run, once ``final/`` is written.
    """

    def __init__(self, section: Mapping[str, Mapping[str, Any]]) -> None:
        """Create the objects; UserError if one cannot be created."""
        self.stop: str | None = None
        """Why the run should end after the latest step."""
        self._made = {f"run.callbacks.{name}": _make(name, one) for name, one in section.items()}

    def tell(self, event: str, *arguments: Any) -> None:
        """Call a method of ``EVENTS`` on each object that has it; RunError if one fails."""
        for key, one in self._made.items():
            if (method := getattr(one, event, None)) is None:
                continue
            try:
                said = method(*arguments)
            except (UserError, RunError):
                raise
            except Exception as error:  # the user's code
                what = f"{key}: {event} failed: {error_text(error)} ({error_place(error)})"
                raise RunError(what) from error
            if said is not None and not isinstance(said, str):
                raise RunError(
                    f"{key}: {event} returned a {type(said).__name__}; return nothing, or a string "
                    "that says why the run should end."
                )
            self.stop = self.stop or (said and f"{key}: {said}")


def _make(name: str, part: Mapping[str, Any]) -> Any:
    key, spec = f"run.callbacks.{name}", part["callback"]
    made = CALLBACKS.load(key, spec)
    options = {name: value for name, value in part.items() if name != "callback"}
    try:
        one = made(**options)
    except Exception as error:  # the user's code
        raise UserError(f"{key}: {spec} does not take {options}: {error_text(error)}") from error
    if not any(callable(getattr(one, event, None)) for event in EVENTS):
        raise UserError(f"{key}: {spec} has no method {', '.join(EVENTS[:-1])} or {EVENTS[-1]}.")
    return one
