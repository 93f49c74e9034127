"""What a row, or a message in it, says of how much it trains. We weigh all alike, or refuse it."""

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_like.data.messages import Message
from nemo_like.errors import UserError

_FACTORS = ("weight", "loss_weight", "loss_scale", "loss_multiplier", "sample_weight")
_SWITCHES = ("train", "trainable", "training", "mask", "loss_mask")
_INVERTED = "masked"
_OF_MESSAGES = (*_FACTORS, *_SWITCHES, _INVERTED, "loss", "label", "train_detail")
_OF_ROWS = (*_FACTORS, *_SWITCHES, _INVERTED)
_YES = ("1", "1.0", "true", "yes")
_NO = ("0", "0.0", "false", "no")


def refuse_row_weight(record: Mapping[str, Any], where: str) -> None:
    """Refuse a row that is not to train, or to train more or less than others."""
    for name in _OF_ROWS:
        value = record.get(name)
        if value not in (None, "", [], {}) and _says_yes(name, value) is not True:
            raise UserError(
                f"{where}: '{name}' is {_shown(value)}, and every row trains alike; take the row "
                f"out if it is not to train, or '{name}' if it is (rename it if it means something "
                "else)."
            )


def refuse_message_weights(
    messages: Sequence[Message], trains: Sequence[bool], remedy: str, where: str
) -> None:
    """Refuse a message that says something else about its training than ``trains``.

    ``remedy``: how to keep a message from training.
    """
    for message, is_trained in zip(messages, trains, strict=True):
        for name in _OF_MESSAGES:
            if name not in message or (reason := _conflict(name, message, is_trained)) is None:
                continue
            text = message["content"]
            shown = repr(text if len(text) <= 30 else f"{text[:30]}...")
            value = _shown(message[name])
            raise UserError(
                f"{where}: '{name}' of the {message['role']}'s message {shown} is {value}, and "
                f"{reason}; {f'{remedy}, or ' if is_trained else ''}take '{name}' out."
            )


def _conflict(name: str, message: Message, is_trained: bool) -> str | None:
    """What happens instead of what an entry of a message says; None if it says the same."""
    says = _says_yes(name, message[name])
    if says is None:
        is_other = name == "label"  # of another kind, such as a class
        return None if is_other else "a message trains as a whole or not at all"
    if is_trained and not says:
        return "it would train"
    # Which answers train is said by the row's form and data.train_on; a factor of 1 says nothing.
    is_silent = message["role"] == "assistant" or name in (*_FACTORS, _INVERTED, "label")
    return "only answers train" if says and not is_trained and not is_silent else None


def _says_yes(name: str, value: object) -> bool | None:
    """Whether an entry says that its part trains; None if it is neither yes nor no."""
    text = str(value).strip().lower()
    if text in _YES or text in _NO:
        return (text in _YES) != (name == _INVERTED)
    return None


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
