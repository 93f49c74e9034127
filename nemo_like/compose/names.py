"""What names of TRL, verl, OpenRLHF and NeMo RL are here: ``nemo-like names``, and refusals.

The names stand in ``names.txt``.
"""

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_like.compose import registry
from nemo_like.compose.keys import is_in_free_dict
from nemo_like.config.section import Section, keys_of
from nemo_like.errors import UserError

_OWN = "*."
"""Begins a key of the algorithm's own section."""
_HEADER = """# Names of other projects

Made by `nemo-like names > docs/migrate.md`.

What people type in TRL, verl, OpenRLHF and NeMo RL, and the key that does it here; `*` is the
algorithm's own section, such as `grpo`. Names that mean the same in two projects stand under the
first. A command that gets one of these names answers with the same words, and
[config.md](config.md) says what each key means.
"""


@dataclass(frozen=True)
class Name:
    """One name of another project."""

    project: str
    name: str
    keys: tuple[str, ...]
    """Ours, with ``*`` for the algorithm's section; empty if nothing corresponds."""
    note: str

    def keys_in(self, schema: type[Section]) -> tuple[str, ...]:
        """The keys as ``schema`` calls them; none if it lacks one of them."""
        section = f"{getattr(schema, 'section', '')}."
        keys = tuple(key.replace(_OWN, section) for key in self.keys)
        return keys if all(exists(key, schema) for key in keys) else ()


def run(arguments: Sequence[str]) -> None:
    """``nemo-like names``: print the page."""
    if arguments:
        raise UserError(f"nemo-like names takes no words, and got {arguments[0]}; leave it out.")
    sys.stdout.write(render())


def exists(key: str, schema: type[Section]) -> bool:
    """Whether ``key`` is one of ``schema``, or an entry of one of its dictionaries."""
    return key in dict(keys_of(schema)) or is_in_free_dict(key, schema)


@functools.cache
def read() -> tuple[Name, ...]:
    """All of them, in the order of the file."""
    found, project = [], ""
    for line in Path(__file__).with_name("names.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            project = line.removeprefix("## ")
        elif line and not line.startswith("#"):
            name, keys, note = (part.strip() for part in line.split("|"))
            found.append(Name(project, name, tuple(keys.split()), note))
    return tuple(found)


def answer(key: str, schema: type[Section]) -> str | None:
    """What another project's ``key`` is in runs of ``schema``, as the end of a sentence."""
    named = [one for one in read() if one.name == key]
    for one in named:
        if keys := one.keys_in(schema):
            return f"{one.project}'s {key} is {_and(keys)} here{_colon(one.note)}."
    if named and not any(one.keys for one in named):
        return f"{named[0].project}'s {key} has no counterpart here{_colon(named[0].note)}."
    if elsewhere := [text for one in named if (text := _elsewhere(one))]:
        return f"{named[0].project}'s {key} is {', '.join(elsewhere)}, and nothing here."
    if section := next((one for one in read() if one.name.startswith(f"{key}.")), None):
        return f"it is a section of {section.project}, whose keys nemo-like names translates."
    return None


def _elsewhere(one: Name) -> str:
    """Its keys, and the algorithms that have them."""
    owners = [name for name in registry.names() if one.keys_in(registry.find(name).config)]
    keys = [key.removeprefix(_OWN) for key in one.keys]
    return f"{_and(keys)} in {_and(owners)}" if owners else ""


def _and(keys: Sequence[str]) -> str:
    return " and ".join(keys)


def _colon(note: str) -> str:
    return f": {note}" if note else ""


def render() -> str:
    """The page as Markdown."""
    lines, project = [_HEADER], ""
    for one in read():
        if one.project != project:
            project = one.project
            lines.append(f"\n## {project}\n\n| {project} | here | |\n|---|---|---|")
        keys = ", ".join(f"`{key}`" for key in one.keys) or "nothing"
        lines.append(f"| `{one.name}` | {keys} | {one.note} |")
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"
