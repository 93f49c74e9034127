"""Documentation of every key, made from the schema: ``python -m nemo_like.config.docs``."""

import ast
import dataclasses
import inspect
import itertools
import sys
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

from nemo_like.config.schemas import SCHEMAS

_HEADER = """# Configuration keys

Made from `nemo_like/config/` by `python -m nemo_like.config.docs > docs/config.md`.
Set any of them on the command line (`policy.optimizer.lr=1e-4`) or in a YAML file.
"""


def render() -> str:
    """The page as Markdown."""
    seen: set[tuple[str, type]] = set()
    lines = [_HEADER, "| script | sections |", "|---|---|"]
    pages: list[str] = []
    for name, schema in SCHEMAS.items():
        script = f"examples/run_{name.removesuffix('_schema')}.py"
        fields = ", ".join(f"`{field.name}`" for field in dataclasses.fields(schema))
        lines.append(f"| `{script}` | {fields} |")
        pages += _sections(schema, "", seen, script)
    return "\n".join([*lines, "", *pages]) + "\n"


def _sections(config: type, prefix: str, seen: set[tuple[str, type]], script: str) -> Iterator[str]:
    """Lines of the sections that are not ``seen``; same name and type mean the same section."""
    documented = _field_docs(config)
    nested = []
    lines = []
    for field in dataclasses.fields(config):
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(field.type):
            nested.append((name, field.type))
        else:
            text = " ".join(documented[field.name].split()).replace("|", r"\|")  # a cell's end
            lines.append(f"| `{name}` | `{_default(field)}` | {text}{_choices(field.type)} |")
    if lines:
        paragraphs = inspect.cleandoc(config.__doc__ or "").split("\n\n")
        about = "\n\n".join(" ".join(one.split()) for one in paragraphs)
        section = prefix.rstrip(".")
        shared = all(section != other or config is kind for other, kind in seen)
        yield f"## {section}{'' if shared else f' ({script})'}\n\n{about}\n"
        yield "| key | default | meaning |\n|---|---|---|"
        yield from lines
        yield ""
    for name, section in nested:
        assert isinstance(section, type)
        if (name, section) not in seen:
            yield from _sections(section, f"{name}.", seen, script)
            seen.add((name, section))


def _field_docs(config: type) -> dict[str, str]:
    """The string under each field; dataclasses do not keep it, the source does."""
    docs: dict[str, str] = {}
    for kind in config.__mro__:
        if not dataclasses.is_dataclass(kind):
            continue
        tree = ast.parse(inspect.getsource(sys.modules[kind.__module__]))
        body = next(
            n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == kind.__name__
        )
        for field, text in itertools.pairwise(body):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=doc)),
                ):
                    docs.setdefault(name, str(doc))
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
