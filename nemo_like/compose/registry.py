"""Algorithms by name: ours, and those that other packages and scripts add through the same door."""

import functools

from nemo_like.config.run import Algorithm, RunConfig
from nemo_like.doors import Door
from nemo_like.errors import UserError

SUFFIX = "_schema"
"""Ends the name by which a YAML file's ``defaults`` ask for an algorithm's schema."""

_OURS = {
    "grpo": ("grpo.config:ALGORITHM", "GRPO and its relatives"),
    "ppo": ("ppo.config:ALGORITHM", "PPO with a critic"),
    "sft": ("sft.config:ALGORITHM", "supervised fine-tuning on conversations"),
    "dpo": ("dpo.config:ALGORITHM", "DPO and its relatives, on pairs"),
    "rm": ("rm.config:ALGORITHM", "a reward model, from pairs"),
    "distillation": (
        "distillation.config:DISTILLATION",
        "learn from a teacher on the student's own samples",
    ),
    "off_policy_distillation": (
        "distillation.config:OFF_POLICY",
        "learn from a teacher on given texts",
    ),
    "eval": ("eval.config:ALGORITHM", "measure a model"),
}
"""Where each algorithm is, below ``nemo_like.algorithms``, and what ``nemo-like --help`` says."""
ALGORITHMS = Door(
    "nemo_like.algorithms",
    {name: f"nemo_like.algorithms.{place}" for name, (place, _) in _OURS.items()},
    kind="ALGORITHM",
)
MEANINGS = {name: meaning for name, (_, meaning) in _OURS.items()}
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
    """The algorithm that has this configuration; UserError if none is known."""
    if found := next((name for name in names() if find(name).config is config), None):
        return found
    raise UserError(
        f"{config.__name__} is the configuration of no algorithm that is known here; call "
        "nemo_like.compose.registry.register(ALGORITHM) first, with your Algorithm."
    )


def of_schema(name: str) -> Algorithm | None:
    """The algorithm whose schema a YAML file calls ``name``."""
    short = name.removesuffix(SUFFIX)
    return find(short) if name != short and short in names() else None
