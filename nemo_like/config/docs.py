"""Documentation of every key, made from the schema: ``python -m nemo_like.config.docs``."""

import ast
import dataclasses
import inspect
import itertools
import sys
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

from nemo_like.config.run_schema import GRPORunConfig

_HEADER = """# Configuration keys of `examples/run_grpo.py`

Made from `nemo_like/config/schema.py` by `python -m nemo_like.config.docs > docs/config.md`.
Set any of them on the command line (`policy.optimizer.lr=1e-4`) or in a YAML file.
"""


def render() -> str:
    """The page as Markdown."""
    return "\n".join([_HEADER, *_sections(GRPORunConfig, "")]) + "\n"


def _sections(config: type, prefix: str) -> Iterator[str]:
    documented = _field_docs(config)
    nested = []
    lines = []
    for field in dataclasses.fields(config):
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(field.type):
            nested.append((name, field.type))
        else:
            text = " ".join(documented[field.name].split())
            lines.append(f"| `{name}` | `{_default(field)}` | {text}{_choices(field.type)} |")
    if lines:
        title = inspect.cleandoc(config.__doc__ or "").splitlines()[0]
        yield f"## {prefix.rstrip('.')}\n\n{title}\n"
        yield "| key | default | meaning |\n|---|---|---|"
        yield from lines
        yield ""
    for name, section in nested:
        assert isinstance(section, type)
        yield from _sections(section, f"{name}.")


def _field_docs(config: type) -> dict[str, str]:
    """The string under each field; dataclasses do not keep it, the source does."""
    tree = ast.parse(inspect.getsource(sys.modules[config.__module__]))
    body = next(
        n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == config.__name__
    )
    docs = {}
    for field, text in itertools.pairwise(body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=doc)):
                docs[name] = str(doc)
    return docs


def _default(field: "dataclasses.Field[Any]") -> str:
    if field.default_factory is not dataclasses.MISSING:
        return str(field.default_factory())
    value = field.default
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _choices(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return f" One of {', '.join(f'`{one.value}`' for one in kind)}."
    return ""


if __name__ == "__main__":
    sys.stdout.write(render())
