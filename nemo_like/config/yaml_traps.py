"""YAML 1.1 reads some plain words as other types; such values are refused instead of guessed at.

``12:30:00`` is the integer 45000 there, ``007`` is 7, and ``off`` is False, without a warning.
"""

import re
from pathlib import Path

import yaml

from nemo_like.errors import UserError

_SEXAGESIMAL = re.compile(r"[-+]?\d[\d_]*(:[0-5]?\d)+(\.\d*)?")
_LEADING_ZERO = re.compile(r"[-+]?0\d[\d_]*")
_WORD_BOOLEANS = {"y", "n", "yes", "no", "on", "off"}


def check_yaml(path: Path) -> None:
    """Raise UserError for the first plain value or key of ``path`` that YAML would change."""
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    if root is not None:
        _walk(root, path, "")


def _walk(node: yaml.Node, path: Path, key: str) -> None:
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            _check_scalar(name, path, f"{key}.{name.value}".lstrip("."), is_key=True)
            _walk(value, path, f"{key}.{name.value}".lstrip("."))
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _walk(value, path, key)
    else:
        _check_scalar(node, path, key, is_key=False)


def _check_scalar(node: yaml.Node, path: Path, key: str, *, is_key: bool) -> None:
    if not isinstance(node, yaml.ScalarNode) or node.style is not None:
        return
    text = node.value
    trap = (
        _SEXAGESIMAL.fullmatch(text)
        or _LEADING_ZERO.fullmatch(text)
        or (is_key and text.lower() in _WORD_BOOLEANS)
    )
    if trap:
        line = node.start_mark.line + 1
        raise UserError(
            f"{path}, line {line}: {key}: YAML does not read {text} as it is written; put it in "
            f'quotes: "{text}".'
        )
