"""Documentation of every key, made from the schema: ``nemo-like keys``."""

import inspect
import sys
import textwrap
from collections.abc import Iterator, Sequence

from pydantic.fields import FieldInfo

from nemo_like.compose import registry
from nemo_like.config.section import Section, choices, section_of
from nemo_like.doors import Door
from nemo_like.errors import UserError

_HEADER = """# Configuration keys

Made by `nemo-like keys > docs/config.md`.
Set any of them on the command line (`policy.optimizer.lr=1e-4`) or in a YAML file.
"""


def run(arguments: Sequence[str]) -> None:
    """``nemo-like keys``: print the page."""
    if arguments:
        raise UserError(f"nemo-like keys takes no words, and got {arguments[0]}; leave it out.")
    sys.stdout.write(render())


def render() -> str:
    """The page as Markdown."""
    seen: set[tuple[str, type]] = set()
    lines = [_HEADER, "| script | sections |", "|---|---|"]
    pages: list[str] = []
    for name in registry.names():
        schema, script = registry.find(name).config, f"examples/run_{name}.py"
        fields = ", ".join(f"`{field}`" for field in schema.model_fields)
        lines.append(f"| `{script}` | {fields} |")
        pages += _sections(schema, "", seen, script)
    return "\n".join([*lines, "", *pages]) + "\n"


def _sections(
    kind: type[Section], prefix: str, seen: set[tuple[str, type]], script: str
) -> Iterator[str]:
    """Lines of the sections that are not ``seen``; same name and type mean the same section."""
    nested, lines = [], []
    for name, field in kind.model_fields.items():
        if (inner := section_of(field)) is not None:
            nested.append((f"{prefix}{name}", inner))
        else:
            text = " ".join((field.description or "").split()).replace("|", r"\|")  # a cell's end
            words = ", ".join(f"`{word}`" for word in words_of(field))
            text += f" One of {words}." if words else ""
            lines.append(f"| `{prefix}{name}` | `{default_of(field)}` | {text} |")
    if lines:
        paragraphs = inspect.cleandoc(kind.__doc__ or "").split("\n\n")
        about = "\n\n".join(textwrap.fill(" ".join(one.split()), 120) for one in paragraphs)
        section = prefix.rstrip(".")
        shared = all(section != other or kind is of for other, of in seen)
        yield f"## {section}{'' if shared else f' ({script})'}\n\n{about}\n"
        yield "| key | default | meaning |\n|---|---|---|"
        yield from lines
        yield ""
    for name, inner in nested:
        if (name, inner) not in seen:
            yield from _sections(inner, f"{name}.", seen, script)
            seen.add((name, inner))


def default_of(field: FieldInfo) -> str:
    """The default as one would type it."""
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def words_of(field: FieldInfo) -> tuple[str, ...]:
    """The words that a field takes, or may take besides names of the user's own."""
    words = choices(field.annotation)
    for door in (one for one in field.metadata if isinstance(one, Door)):
        words += tuple(door.ours)
    return words
