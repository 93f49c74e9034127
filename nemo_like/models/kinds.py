"""Which models transformers has a class for, usually without importing it."""

import ast
import functools
import importlib.util
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

CAUSAL_LM = "AutoModelForCausalLM"
CLASSIFIER = "AutoModelForSequenceClassification"
_SOURCE = "models/auto/modeling_auto.py"
_TABLES = {
    CAUSAL_LM: "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    CLASSIFIER: "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
}
_WHAT = {CAUSAL_LM: "language model", CLASSIFIER: "model with a score for each sequence"}


def has_class(model_type: object, auto_class: str) -> bool:
    """Whether ``auto_class`` makes models of the ``model_type`` that a config.json names."""
    if not isinstance(model_type, str):
        return False
    if model_type in _listed(auto_class):
        return True
    if not is_known(model_type):
        return False
    import transformers

    kind = transformers.CONFIG_MAPPING[model_type]
    return kind in getattr(transformers, auto_class)._model_mapping


def is_known(model_type: object) -> bool:
    """Whether transformers has a configuration of ``model_type``; imports torch."""
    # Imported only for what is probably refused: it takes seconds.
    from transformers import CONFIG_MAPPING

    return isinstance(model_type, str) and model_type in CONFIG_MAPPING


def why_not(model_type: object, lacking: Sequence[str]) -> str:
    """End of a sentence about a model that needs the ``lacking`` classes."""
    if not isinstance(model_type, str):
        return (
            "has no model_type in its config.json, by which transformers finds a model's classes; "
            "add it, or use another model."
        )
    name = f"transformers {version('transformers')}"
    if not is_known(model_type):
        return (
            f"has model_type={model_type} in its config.json, which {name} does not know; install "
            "a version that does, or use another model."
        )
    return (
        f"has model_type={model_type} in its config.json, for which {name} has no "
        f"{_WHAT[lacking[0]]} ({lacking[0]}); use another model."
    )


@functools.cache
def _listed(auto_class: str) -> frozenset[str]:
    """The types in transformers' own table, read from its source: to import it takes torch.

    Empty if the source has no such table; then the import decides.
    """
    found = importlib.util.find_spec("transformers")
    assert found is not None
    assert found.origin is not None
    source = Path(found.origin).parent / _SOURCE
    try:
        for node in ast.parse(source.read_text(encoding="utf-8")).body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(args=[pairs])):
                    if name == _TABLES[auto_class]:
                        return frozenset(dict(ast.literal_eval(pairs)))
    except (OSError, SyntaxError, ValueError, TypeError):
        pass
    return frozenset()
