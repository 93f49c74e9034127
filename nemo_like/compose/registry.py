"""Algorithms by name: ours, and those that other packages and scripts add through the same door."""

import functools
from importlib import import_module
from importlib.metadata import entry_points

from nemo_like.config.algorithm import Algorithm
from nemo_like.config.run import RunConfig

ENTRY_POINTS = "nemo_like.algorithms"
"""Group of a package's entry points, ``name = "module:ALGORITHM"``."""
SUFFIX = "_schema"
"""Ends the name by which a YAML file's ``defaults`` ask for an algorithm's schema."""

_OURS = {
    "grpo": "nemo_like.algorithms.grpo.config:ALGORITHM",
    "ppo": "nemo_like.algorithms.ppo.config:ALGORITHM",
    "sft": "nemo_like.algorithms.sft.config:ALGORITHM",
    "dpo": "nemo_like.algorithms.dpo.config:ALGORITHM",
    "rm": "nemo_like.algorithms.rm.config:ALGORITHM",
    "distillation": "nemo_like.algorithms.distillation.config:DISTILLATION",
    "off_policy_distillation": "nemo_like.algorithms.distillation.config:OFF_POLICY",
    "eval": "nemo_like.algorithms.eval.config:ALGORITHM",
}
_of_scripts: dict[str, Algorithm] = {}


def register(algorithm: Algorithm) -> None:
    """Make the algorithm of a script known; it takes the place of another of this name."""
    _of_scripts[algorithm.name] = algorithm


def names() -> tuple[str, ...]:
    """All algorithms, ours first."""
    return (*_OURS, *(name for name in (*_installed(), *_of_scripts) if name not in _OURS))


def find(name: str) -> Algorithm:
    """The algorithm of this name; KeyError if there is none. Imports its configuration only."""
    if name in _of_scripts:
        return _of_scripts[name]
    return _imported(_OURS.get(name) or _installed()[name])


def name_of(config: type[RunConfig]) -> str:
    """The algorithm whose configuration is of this class."""
    return next(name for name in names() if find(name).config is config)


def of_schema(name: str) -> Algorithm | None:
    """The algorithm whose schema a YAML file calls ``name``."""
    short = name.removesuffix(SUFFIX)
    return find(short) if name != short and short in names() else None


@functools.cache
def _installed() -> dict[str, str]:
    return {one.name: one.value for one in entry_points(group=ENTRY_POINTS)}


@functools.cache
def _imported(path: str) -> Algorithm:
    module, _, attribute = path.partition(":")
    found = getattr(import_module(module), attribute)
    assert isinstance(found, Algorithm), path
    return found
