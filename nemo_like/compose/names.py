"""What an unknown key was meant to be: a misspelt one, or a name of another project.

Those of TRL, verl, OpenRLHF and NeMo RL stand in ``names.txt``; ``nemo-like names`` prints them.
"""

import difflib
import functools
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_like.compose import registry
from nemo_like.compose.overrides import is_in_free_dict
from nemo_like.config.section import Section, keys_of, section_of
from nemo_like.errors import UserError

_OWN = "*."
"""Begins a key of the algorithm's own section."""
_HEADER = """# Names of other projects

Made by `nemo-like names > docs/migrate.md`.

What people type in TRL, verl, OpenRLHF and NeMo RL, or typed in early versions of this project, and
the key that does it here; `*` is the algorithm's own section, such as `grpo`. Names that mean the
same in two projects stand under the first. A command that gets one of these names answers with the
same words, and [config.md](config.md) says what each key means.

| there | here |
|---|---|
| `GRPOTrainer(model, reward_funcs, args, train_dataset)` | `nl.grpo(model=, reward=, ...)` |
| `RayPPOTrainer.fit` | `train` in `nemo_like/algorithms/grpo/loop.py` |
| `ActorRolloutRefWorker` | `nemo_like/policy/worker.py`, `nemo_like/rollout/worker.py` |
| `DataProto` | `TensorBatch`, `RemoteBatch` |
| `ResourcePoolManager` | `VirtualCluster` |
| sharding manager | `nemo_like/rollout/weight_sync.py`, `nemo_like/refit/` |
| reward manager | `nemo_like/rewards/pool.py` |
| `AgentLoop` | an environment or a harness ([agents.md](agents.md)) |
"""


@dataclass(frozen=True)
class Name:
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
    if arguments:
        raise UserError(f"nemo-like names takes no words, and got {arguments[0]}; leave it out.")
    sys.stdout.write(render())


def exists(key: str, schema: type[Section]) -> bool:
    return key in dict(keys_of(schema)) or is_in_free_dict(key, schema)


@functools.cache
def read() -> tuple[Name, ...]:
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
    lines, project = [_HEADER], ""
    for one in read():
        if one.project != project:
            project = one.project
            lines.append(f"\n## {project}\n\n| {project} | here | |\n|---|---|---|")
        keys = ", ".join(f"`{key}`" for key in one.keys) or "nothing"
        lines.append(f"| `{one.name}` | {keys} | {one.note} |")
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


_TYPO = 0.75
"""Least similarity between a word and its correction."""


_LETTERS = 2
"""Most letters that a typo adds or leaves out."""


_LONG = 6
"""Least letters of a word without a section in which a typo is still seen for one."""


_MOST = 3
"""Most keys in one hint."""


_WEAK = {"num", "max", "new", "per", "step", "steps", "size", "every"}
"""Words in names that do not change the meaning."""


def hint_for(key: str, schema: type[Section]) -> str | None:
    """What was meant by ``key``, as the end of a sentence; None if nothing comes near it.

    A wrong hint is worse than none: words may have typos and lack their sections, no more.
    """
    fields = dict(keys_of(schema))
    keys = [one for one in fields if "." in key or section_of(fields[one]) is None]
    if key in fields:  # as one word of a YAML file
        ends = "}" * key.count(".")
        return f"write its parts below each other, as in {key.replace('.', ': {')}: ...{ends}."
    if (lower := key.strip().lower()) in fields:
        return f"did you mean {lower}? Keys are in lower case."
    if found := [one for one in keys if _letters(one) == _letters(lower)]:
        return f"did you mean {' or '.join(found)}?"
    others = {name: registry.find(name).config for name in registry.names()}
    if owners := [name for name, other in others.items() if key in dict(keys_of(other))]:
        return f"it is a key of {', '.join(owners)}."
    if found := answer(key, schema):
        return found
    if found := _nearest(lower, keys):
        return f"did you mean {' or '.join(found)}?"
    if "." in key:
        return None
    close = {one.name: _likeness(lower, one.name, bare=True) for one in read()}
    best = max(close, key=close.__getitem__)
    return answer(best, schema) if close[best] else None


def _letters(key: str) -> str:
    """Without what separates words: ``maxlag`` is ``max_lag``."""
    return re.sub("[._-]", "", key)


def _nearest(key: str, keys: Sequence[str]) -> list[str]:
    """At most three keys with the words of ``key`` apart from typos."""
    *sections, leaf = [part for part in re.split(r"[^a-z0-9_-]+", key) if part] or [key]
    found: dict[str, float] = {}
    for other in keys:
        *inside, name = other.split(".")
        rest = iter(inside)
        if all(any(_is_typo(typed, one) for one in rest) for typed in sections):
            found[other] = _likeness(leaf, name, bare=not sections)
    best = max(found.values(), default=0.0)
    top = [one for one in found if found[one] == best > 0]
    is_ours = any(one.startswith(f"{sections[0]}.") for one in keys) if sections else False
    if not top and is_ours:  # in another section, if the name is long enough to be meant
        top = [one for one in keys if one.endswith(f".{leaf}") and "_" in leaf]
    return top if len(top) <= _MOST else []


def _likeness(typed: str, name: str, *, bare: bool) -> float:
    """Similarity: 1 if equal, 0 if a word differs, or if ``bare`` a word is added.

    >>> _likeness("max_tokens", "max_new_tokens", bare=False) > 0
    True
    >>> _likeness("expert_parallel_size", "context_parallel_size", bare=False)
    0.0
    """
    if typed == name:
        return 1.0
    if bare and len(typed) < _LONG:
        return 0.0
    words, others = re.split("[_-]", typed), name.split("_")
    fewer, more = sorted((words, others), key=len)
    left, score = list(more), 1.0
    for word in fewer:
        one = next((one for one in left if _is_typo(word, one)), None)
        if one is None:
            return 0.0
        left.remove(one)
        score *= difflib.SequenceMatcher(None, word, one).ratio()
    return 0.0 if set(left) - _WEAK or (bare and left) else score * 0.9 ** len(left)


def _is_typo(one: str, other: str) -> bool:
    """Whether the words are the same but for a few letters, which are not the first."""
    if one[:1] != other[:1] or abs(len(one) - len(other)) > _LETTERS:
        return False
    swapped = sorted(one) == sorted(other)  # which in a short word is a large part
    return swapped or difflib.SequenceMatcher(None, one, other).ratio() >= _TYPO


def unknown_key(key: str, schema: type[Section]) -> UserError:
    """Refuse a key that ``schema`` lacks, and suggest the key that was meant."""
    section = key.partition(".")[0]
    help_ = "--help lists the sections, and --help SECTION its keys."
    if section in schema.model_fields:
        help_ = f"--help {section} lists those of its section."
    return UserError(f"{key} is not a key of the configuration; {hint_for(key, schema) or help_}")
