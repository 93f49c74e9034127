"""Algorithms by name: ours, and those that other packages and scripts add through the same door."""

import functools

from nemo_like.config.run import Algorithm, RunConfig
from nemo_like.doors import Door
from nemo_like.errors import UserError

SUFFIX = "_schema"
"""Ends the name by which a YAML file's ``defaults`` ask for an algorithm's schema."""

ALGORITHMS = Door(
    "nemo_like.algorithms",
    {
        "grpo": "nemo_like.algorithms.grpo.config:ALGORITHM",
        "ppo": "nemo_like.algorithms.ppo.config:ALGORITHM",
        "sft": "nemo_like.algorithms.sft.config:ALGORITHM",
        "dpo": "nemo_like.algorithms.dpo.config:ALGORITHM",
        "rm": "nemo_like.algorithms.rm.config:ALGORITHM",
        "distillation": "nemo_like.algorithms.distillation.config:DISTILLATION",
        "off_policy_distillation": "nemo_like.algorithms.distillation.config:OFF_POLICY",
        "eval": "nemo_like.algorithms.eval.config:ALGORITHM",
    },
    kind="ALGORITHM",
)
_of_scripts: dict[str, Algorithm] = {}


def register(algorithm: Algorithm) -> None:
    """Make the algorithm of a script known; it takes the place of another of this name."""
    _of_scripts[algorithm.name] = algorithm


def names() -> tuple[str, ...]:
    return tuple(dict.fromkeys((*ALGORITHMS.names, *_of_scripts)))


@functools.cache
def _found(name: str) -> Algorithm:
    found = ALGORITHMS.load("algorithm", name)
    if not isinstance(found, Algorithm):
        raise UserError(f"algorithm={name} is a {type(found).__name__}, not an Algorithm.")
    return found


def find(name: str) -> Algorithm:
    """The algorithm of this name or path; UserError if there is none. Imports its configuration
    only."""
    return _of_scripts.get(name) or _found(name)


def name_of(config: type[RunConfig]) -> str:
    return next(name for name in names() if find(name).config is config)


def of_schema(name: str) -> Algorithm | None:
    """The algorithm whose schema a YAML file calls ``name``."""
    short = name.removesuffix(SUFFIX)
    return find(short) if name != short and short in names() else None
