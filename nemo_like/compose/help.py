"""``--help``, ``--help SECTION`` and ``--help KEY``, made from the schema."""

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic.fields import FieldInfo

from nemo_like.compose import registry
from nemo_like.compose.files import find_file, schema_of
from nemo_like.compose.names import unknown_key
from nemo_like.config.run import Algorithm, RunConfig
from nemo_like.config.section import OnlyIf, Section, choices, keys_of, range_of, section_of
from nemo_like.doors import Door
from nemo_like.errors import UserError

_WIDTH = 100
_GROUP = "model"
_OPTIONS = """\
  FILE.yaml, --config FILE   run with this file: your own, or the config.yaml of a run
  --config-name NAME         run with one of the recipes below
  --config-dir FOLDER        look for NAME in your own folder too
  --multirun, -m             one run for each combination: run.seed=0,1,2
  --cfg job                  print the whole configuration, and run nothing
  --help SECTION, --help KEY
  --hydra-help               the other options, which are Hydra's
"""


def show(algorithm: Algorithm, folders: Sequence[Path], arguments: Sequence[str]) -> None:
    """Print what ``arguments`` ask about, ``--help`` among them; UserError for an unknown key."""
    names = [one.removeprefix("--help=") for one in arguments]
    names = [one for one in names if not re.search("^-|[=/]", one)]  # no option or its value
    schema = algorithm.config
    lines = [line for name in names for line in _about(name, schema, folders)]
    sys.stdout.write("\n".join([*(lines or _page(algorithm, folders)), ""]))


def _about(name: str, schema: type[RunConfig], folders: Sequence[Path]) -> Iterator[str]:
    fields = dict(keys_of(schema))
    if name == _GROUP:
        yield f"model={'|'.join(_choices(folders))}"
        yield _wrapped("A model with settings that fit it. Any other: policy.model=FOLDER.", 4)
    elif name not in fields:
        raise unknown_key(name, schema)
    elif (section := section_of(fields[name])) is not None:
        yield from _section(name, section)
    else:
        yield from _key(name, fields[name], whole=True)


def _section(name: str, kind: type[Section]) -> Iterator[str]:
    yield _wrapped(_plain(inspect.cleandoc(kind.__doc__ or "")), 0)
    for inner, field in kind.model_fields.items():
        if section_of(field) is None:
            yield from _key(f"{name}.{inner}", field)
    for inner, field in kind.model_fields.items():
        if (below := section_of(field)) is not None:
            yield f"{name}.{inner}.*"
            yield _wrapped(f"{_first(below)} (--help {name}.{inner})", 4)


def _key(key: str, field: FieldInfo, *, whole: bool = False) -> Iterator[str]:
    """The key with its default, meaning, range and choices; ``whole``: where it is refused too."""
    yield f"{key}={default_of(field)}"
    text = _plain(field.description or "")
    if (limits := range_of(field)) and limits not in text:
        text += f" {limits[0].upper()}{limits[1:]}."
    if words := words_of(field):
        text += f" One of {', '.join(words)}."
    yield _wrapped(text, 4)
    for one in field.metadata if whole else ():
        if isinstance(one, OnlyIf):
            why = one.otherwise.format(here=key.rpartition(".")[0])
            yield _wrapped(f"Refused where it has no effect: {why}.", 4)


def _page(algorithm: Algorithm, folders: Sequence[Path]) -> Iterator[str]:
    """One page: options, the algorithm's own keys, the other sections, models and recipes."""
    schema = algorithm.config
    yield f"usage: nemo-like {algorithm.name} [FILE.yaml] [key=value ...]\n"
    yield _OPTIONS
    own = section_of(schema.model_fields[schema.section])
    assert own is not None
    for name, field in own.model_fields.items():
        key = f"{schema.section}.{name}={default_of(field)}"
        meaning = _plain(field.description or "")
        yield _row(key, re.split(r"(?<=\.) (?=[A-Z])", meaning)[0], 42)
    yield "\nSections with more keys:"
    for name, field in keys_of(schema):
        if (section := section_of(field)) is not None and name != schema.section:
            yield _row(name, _first(section), 22)
    yield ""
    if find_file(folders, algorithm.name) and not schema.evaluates:
        yield f"Models (model=NAME): {', '.join(_choices(folders))}; any other: policy.model=FOLDER"
    if recipes := _recipes(schema, folders):
        yield _wrapped(f"Recipes (--config-name NAME): {', '.join(recipes)}", 0)


def _choices(folders: Sequence[Path]) -> list[str]:
    return sorted(path.stem for folder in folders for path in folder.glob(f"{_GROUP}/*.yaml"))


def _recipes(schema: type[RunConfig], folders: Sequence[Path]) -> list[str]:
    found = {f"recipes/{path.stem}" for folder in folders for path in folder.glob("recipes/*.yaml")}
    return [name for name in sorted(found) if schema_of(folders, name) is schema]


def _first(kind: type[Section]) -> str:
    return _plain(inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0])


def _plain(text: str) -> str:
    return " ".join(text.replace("``", "").split())


def _row(left: str, right: str, column: int) -> str:
    """Two columns; the second begins on a line of its own where the first is too long."""
    text = textwrap.fill(right, _WIDTH, initial_indent=" " * column, subsequent_indent=" " * column)
    head = f"  {left}"
    return head + text[len(head) :] if len(head) < column else f"{head}\n{text}"


def _wrapped(text: str, indent: int) -> str:
    space = " " * indent
    return textwrap.fill(text, _WIDTH, initial_indent=space, subsequent_indent=space)


_HEADER = """# Configuration keys

Made by `nemo-like keys > docs/config.md`.
Set any of them on the command line (`policy.optimizer.lr=1e-4`) or in a YAML file.
"""


def run(arguments: Sequence[str]) -> None:
    if arguments:
        raise UserError(f"nemo-like keys takes no words, and got {arguments[0]}; leave it out.")
    sys.stdout.write(render())


def render() -> str:
    seen: set[tuple[str, type]] = set()
    lines = [_HEADER, "| command | sections |", "|---|---|"]
    pages: list[str] = []
    for name in registry.names():
        schema, command = registry.find(name).config, f"nemo-like {name}"
        fields = ", ".join(f"`{field}`" for field in schema.model_fields)
        lines.append(f"| `{command}` | {fields} |")
        pages += _sections(schema, "", seen, command)
    return "\n".join([*lines, "", *pages]) + "\n"


def _sections(
    kind: type[Section], prefix: str, seen: set[tuple[str, type]], command: str
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
        yield f"## {section}{'' if shared else f' ({command})'}\n\n{about}\n"
        yield "| key | default | meaning |\n|---|---|---|"
        yield from lines
        yield ""
    for name, inner in nested:
        if (name, inner) not in seen:
            yield from _sections(inner, f"{name}.", seen, command)
            seen.add((name, inner))


def default_of(field: FieldInfo) -> str:
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
