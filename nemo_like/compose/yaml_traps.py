"""YAML 1.1 reads some plain words as other types; such values are refused instead of guessed at.

``12:30:00`` is the integer 45000 there, ``007`` is 7, and ``off`` is False, without a warning.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from nemo_like.compose.keys import changes_as_text
from nemo_like.errors import UserError

_SEXAGESIMAL = re.compile(r"[-+]?\d[\d_]*(:[0-5]?\d)+(\.\d*)?")
_LEADING_ZERO = re.compile(r"[-+]?0\d[\d_]*")
_WORD_BOOLEANS = {"y", "n", "yes", "no", "on", "off"}


def read_yaml(path: Path) -> Any:
    """What ``path`` holds; raises UserError if it cannot be read."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a text file in UTF-8.") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from error


def check_yaml(path: Path, kinds: Mapping[str, Any]) -> None:
    """Raise UserError for the first plain value or key of ``path`` that would be changed.

    ``kinds``: types by dotted key. The file is one that ``read_yaml`` reads.
    """
    root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    if isinstance(root, yaml.MappingNode):
        _check_order(root, path)
    if root is not None:
        _walk(root, path, "", kinds)


def _check_order(root: yaml.MappingNode, path: Path) -> None:
    """A file's own values have no effect where ``_self_`` comes before what it is based on."""
    for name, value in root.value:
        if name.value == "defaults" and isinstance(value, yaml.SequenceNode):
            words = [str(entry.value) for entry in value.value if entry.tag.endswith(":str")]
            bases = [word for word in words if not word.startswith("override ")]
            if "_self_" in bases[:-1] and len(root.value) > 1:
                raise UserError(
                    f"{path}: {bases[-1]} comes after _self_ in its defaults, so it would "
                    "undo what the file says; put _self_ behind it."
                )


def _walk(node: yaml.Node, path: Path, key: str, kinds: Mapping[str, Any]) -> None:
    if isinstance(node, yaml.MappingNode):
        names = [name.value for name, _ in node.value]
        for name, value in node.value:
            inner = f"{key}.{name.value}".lstrip(".")
            if names.count(name.value) > 1:
                raise UserError(f"{path}, {_line(value)}: {inner} is given twice; give it once.")
            _check_scalar(name, path, inner, None)
            _walk(value, path, inner, kinds)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _walk(value, path, key, kinds)
    else:
        _check_scalar(node, path, key, kinds)


def _check_scalar(node: yaml.Node, path: Path, key: str, kinds: Mapping[str, Any] | None) -> None:
    """``kinds`` None: the node is a key itself."""
    if not isinstance(node, yaml.ScalarNode):
        return
    text = node.value
    kind = kinds.get(key) if kinds is not None else None
    if node.style is not None:
        return
    trap = (
        _SEXAGESIMAL.fullmatch(text)
        or _LEADING_ZERO.fullmatch(text)
        or (kinds is None and text.lower() in _WORD_BOOLEANS)
        or changes_as_text(kind, OmegaConf.create(f"x: {text}").x if kind else None, text)
    )
    if trap:
        raise UserError(
            f"{path}, {_line(node)}: {key}: YAML does not read {text} as it is written; put it in "
            f'quotes: "{text}".'
        )


def _line(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}"
