"""One sentence, key, value, rule and remedy, from exceptions of Hydra, OmegaConf and pydantic."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, ValidationError

from nemo_like.compose.names import hint_for, unknown_key
from nemo_like.config.run import RunConfig
from nemo_like.config.section import Instead, Section, choices, keys_of, range_of
from nemo_like.errors import UserError

_KEY = re.compile(r"~?\+{0,2}[A-Za-z0-9_]+([./@-][A-Za-z0-9_]+)*")


def explain(error: Exception, schema: type[RunConfig]) -> UserError:
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    lines = [line.strip() for line in str(cause).strip().splitlines()]
    if len(lines) > 1 and "raised while composing config" in lines[0]:
        lines = lines[1:]
    key = getattr(cause, "full_key", None) or _full_key(lines)
    text = lines[0].rstrip(".")
    if key and "not in" in text:
        return unknown_key(key, schema)
    if group := re.match(r"In '.*': Could not find '(\w+)/(.*)'", text):
        first = next(i for i, line in enumerate(lines) if line.startswith("Available options")) + 1
        last = next(i for i, line in enumerate(lines) if line.startswith("Config search path"))
        options = ", ".join(lines[first:last])
        other = f", or policy.model={group[2]} for a folder or a hub name"
        return UserError(
            f"{group[1]}={group[2]} is not a choice; use one of {options}"
            f"{other if group[1] == 'model' else ''}."
        )
    if "Ambiguous value" in text:
        return UserError(f"{text}: a list of values needs --multirun (one run each), or brackets.")
    if "Cannot merge DictConfig with ListConfig" in text:
        return UserError(f"{key} must be a dictionary, {key}={{name: value}}, not a list.")
    if "HydraConfig was not set" in text:
        return UserError(f"{key}: ${{hydra:...}} is not known here; use keys, as in ${{run.seed}}.")
    text = re.sub(r"^\w+ raised while resolving interpolation: ", "", text).strip('"')
    return UserError(f"{key}: {text}." if key and key not in text else f"{text}.")


def _full_key(lines: Sequence[str]) -> str | None:
    for line in lines:
        if line.startswith("full_key: "):
            return line.removeprefix("full_key: ")
    return None


_OUT_OF_RANGE = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")


_NUMBERS = ("int_type", "float_type")


_KINDS = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "finite_number": "must be a finite number",
    "dict_type": "must be a dictionary, {key}={{name: value}}",
}


def first_refusal(error: ValidationError, schema: type[Section]) -> UserError:
    """The first key that does not exist, before values that may follow from it."""
    found = error.errors(include_url=False)
    unknown = [one for one in found if one["type"] == "extra_forbidden"]
    one = (unknown or found)[0]
    names = [str(part) for part in one["loc"]]
    key = ".".join(name for name in names if not name.isdigit())
    return UserError(_sentence(one, key, schema))


def _sentence(error: Any, key: str, schema: type[Section]) -> str:
    kind, value = error["type"], error["input"]
    field = dict(keys_of(schema)).get(key)
    if kind == "extra_forbidden":
        return str(unknown_key(key, schema))
    if value is None:
        return f"{key}=null: this key needs a value; leave it out for its default."
    if kind == "model_type":
        return f"{key} is a section, not a value; set one of the keys in it."
    if kind == "list_type":
        return f"{key} must be a list; put brackets around it: {key}=[...]."
    if kind == "string_type":
        if isinstance(value, dict | list):
            return f"{key} must be text, not a list or dictionary."
        return f"{key}={value} would be read as {value}; put text in quotes: '{key}=\"{value}\"'."
    if field is not None and (words := choices(field.annotation)):
        return f"{key}={_shown(value)} must be one of {', '.join(words)}."
    if kind in _OUT_OF_RANGE:
        # Of an entry of a dictionary, and of ``Count | None``, the error alone has the limit.
        limits = (range_of(field) if field else "") or range_of(Field(**error["ctx"]))
        remedies = [one.text for one in field.metadata if isinstance(one, Instead)] if field else []
        return f"{key}={_shown(value)} {'; '.join([f'must be {limits}', *remedies])}."
    if rule := _KINDS.get(kind):
        if isinstance(value, str) and kind in _NUMBERS and _is_number(value):
            rule += ", and this is text: leave out the quotes"
        if isinstance(value, float) and value.is_integer() and kind == "int_type":
            rule += f"; write {int(value)}"
        return f"{key}={_shown(value)} {rule.format(key=key)}."
    return f"{key}={_shown(value)}: {error['msg']}."


def _shown(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def no_such_file(folders: Sequence[Path], name: str, where: str) -> UserError:
    """A path in the place of a name gets its name; a misspelt name the nearest one."""
    start = f"{where}: there is no {name.removesuffix('.yaml')}.yaml"
    path = Path(f"{name.removesuffix('.yaml')}.yaml").resolve()
    if path.is_file():
        inside = [folder.resolve() for folder in folders if path.is_relative_to(folder.resolve())]
        if inside:
            remedy = f"--config-name={path.relative_to(inside[0]).with_suffix('')}"
        else:
            remedy = f"--config-dir={path.parent} --config-name={path.stem}"
        return UserError(f"{start} among the configurations; give that file by {remedy}.")
    names = sorted(
        str(path.relative_to(folder).with_suffix(""))
        for folder in folders
        for path in (*folder.glob("*.yaml"), *folder.glob("*/*.yaml"))
        if "defaults:" in path.read_text(encoding="utf-8", errors="replace")
    )
    if not names:
        return UserError(f"{start}, nor another one in {' or '.join(map(str, folders))}.")
    same = [one for one in names if Path(one).name == Path(name).name]
    nearest = difflib.get_close_matches(name, same or names, n=1, cutoff=0.0)[0]
    group = [one for one in names if Path(one).parent == Path(nearest).parent]
    return UserError(f"{start}; did you mean {nearest}? There are {', '.join(group)}.")


def unreadable(typed: str, schema: type[RunConfig]) -> UserError:
    """Refuse a word that Hydra cannot read as ``key=value``."""
    key, equals, value = typed.partition("=")
    if not equals and typed in dict(keys_of(schema)):
        return UserError(f"'{typed}' is not key=value; write {typed}=VALUE, without blanks.")
    if not equals or not key:
        return UserError(f"'{typed}' is not key=value.")
    if not _KEY.fullmatch(key):
        return unknown_key(key, schema)
    if re.search(r"\.[0-9]+[A-Za-z_]", key):
        section, _, name = key.rpartition(".")
        return UserError(
            f"{typed}: Hydra reads no key that begins with a digit here; write it in a dictionary, "
            f"'{section}={{{name}: {value}}}'."
        )
    quoted = value.replace('"', r"\"")
    piece = "each piece of text" if value.startswith(("[", "{")) else "text"
    example = "" if value.startswith(("[", "{")) else f": '{key}=\"{quoted}\"'"
    return UserError(
        f"{typed}: Hydra cannot read this value; put {piece} that has more than letters, digits "
        f"and -_./:+%@ in quotes{example}."
    )


def no_option(typed: str, schema: type[RunConfig]) -> UserError:
    """Refuse ``--learning_rate`` and name the key that was meant."""
    name = typed.lstrip("-").partition("=")[0]
    hint = hint_for(name.replace("-", "_"), schema) or ""
    if name in dict(keys_of(schema)):
        hint = f"Write {name}=VALUE."
    return UserError(
        f"{typed} is not an option; keys are given without dashes, key=value, and --hydra-help "
        f"lists the options. {hint[:1].upper()}{hint[1:]}".rstrip()
    )
