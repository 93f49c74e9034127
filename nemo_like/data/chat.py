"""The one place where messages become token ids."""

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_like.data.messages import Message
from nemo_like.data.templates import (
    IN_MESSAGES,
    SWITCHES,
    as_template_takes,
    check_switches,
    refuse_losses,
    refuse_marks,
    refuse_unasked_header,
    those_known,
    turn_marks,
)
from nemo_like.data.thinking import template_block
from nemo_like.data.tokenizer import TokenCuts, end_token_ids, load_tokenizer
from nemo_like.errors import UserError

if TYPE_CHECKING:
    from nemo_like.data.answer_spans import AnswerSpans


class ChatTokenizer:
    """A model folder's tokenizer and chat template.

    The length filter and the rollout use the same ``render``, so they cannot disagree.
    """

    def __init__(
        self,
        model_path: str,
        switches: Mapping[str, Any] | None = None,
        key: str = SWITCHES,
        otherwise: Mapping[str, Any] | None = None,
    ) -> None:
        """``switches`` of the template, and the configuration's ``key`` that has them.

        Without any, those of ``otherwise`` are taken that the template has.
        Raises UserError if there is no such tokenizer, and for switches that its template lacks.
        """
        try:
            self._tokenizer = load_tokenizer(model_path)
        except (OSError, ValueError) as error:
            why = str(error).strip().splitlines()[0]
            raise UserError(f"The tokenizer of {model_path} could not be loaded: {why}") from error
        if self._tokenizer.chat_template is None:
            raise UserError(
                f"The tokenizer of {model_path} has no chat template; add chat_template.jinja to "
                "the folder, or use an instruct model."
            )
        template = self._tokenizer.get_chat_template()
        check_switches(template, switches or {}, key)
        self.switches = dict(switches or those_known(template, otherwise or {}))
        """Variables for the template, by name."""
        self.cuts = TokenCuts(self._tokenizer)
        self.eos_token_ids = end_token_ids(Path(model_path), self._tokenizer.eos_token_id)
        """Every id that ends a turn: the tokenizer's, and all that the folder's files name."""
        tokens = self._tokenizer.convert_ids_to_tokens(self.eos_token_ids)
        self.end_tokens = [token for token in tokens if token is not None]
        ends = "|".join(map(re.escape, self.end_tokens))
        self.ends = re.compile(rf"({ends})(?:\s|{ends})*\Z") if ends else None
        """Finds the end of a last turn; the first group is its end token."""
        special = [t.content for t in self._tokenizer.added_tokens_decoder.values() if t.special]
        self._marks, self._answer_marks = turn_marks(special, tokens, self.text)
        self.empty_block = template_block(self.text)
        """Block of thinking that the template alone writes before answers."""
        refuse_unasked_header(self.text)

    def token_ids(self) -> dict[str, int]:
        """The id of every token."""
        return dict(self._tokenizer.get_vocab())

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
        """Token ids of a conversation up to where the assistant answers.

        The template writes the special tokens; none are added on top (no second BOS).
        ``tools``: schemas of functions, for templates that take them.
        """
        messages = self.as_taken(messages)
        text = self.text(messages, to_answer=True, tools=tools)
        if tools and text == self.text(messages, to_answer=True):
            raise UserError(f"the model's chat template takes no tools; {IN_MESSAGES}.")
        self.check(messages, text, tools)
        return self.cuts.ids(text)

    def render_conversation(
        self, messages: Sequence[Message], from_message: int = 0, tools: Sequence[Any] = ()
    ) -> tuple[list[int], list[bool]]:
        """Token ids of a whole conversation, and which the assistant wrote; see ``AnswerSpans``."""
        return self._spans.render(messages, from_message, tools)

    @functools.cached_property
    def _spans(self) -> "AnswerSpans":
        from nemo_like.data.answer_spans import AnswerSpans

        return AnswerSpans(self, self._tokenizer)

    def encode_text(self, text: str) -> list[int]:
        """Token ids of plain text without the template: one BOS if the tokenizer has it put one,
        and one end token, which a text that is rendered already has."""
        is_ended = self.ends is not None and self.ends.search(text)
        ids: list[int] = self._tokenizer(self.up_to_end(text) if is_ended else text)["input_ids"]
        if self.cuts.begins_twice(ids):
            del ids[0]
        end = self._tokenizer.eos_token_id
        if end is not None and (not ids or ids[-1] not in self.eos_token_ids):
            ids.append(end)
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of text to continue, after what the tokenizer puts before any text."""
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids[:-1] if ids and ids[-1] in self.eos_token_ids else ids

    def has_template_of(self, other: "ChatTokenizer") -> bool:
        """Whether both render conversations with the same template, and end turns alike."""
        ours, theirs = (
            (one._tokenizer.chat_template, one._tokenizer.convert_ids_to_tokens(one.eos_token_ids))
            for one in (self, other)
        )
        return ours == theirs

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a completion, without special tokens unless they are asked for."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def decode_whole(self, token_ids: Sequence[int]) -> str:
        """Text of a completion with its special tokens, but the one that ends it."""
        ended = token_ids and token_ids[-1] in self.eos_token_ids
        return self.decode(token_ids[:-1] if ended else token_ids, skip_special_tokens=False)

    def as_taken(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages with arguments of tool calls in the form that the template writes."""
        return as_template_takes(messages, lambda given: self.text(given, to_answer=False))

    def check(
        self, messages: Sequence[Message], text: str, tools: Any = (), start: int = 0
    ) -> None:
        """What the template made of the messages must be all of them, and no other turns."""
        for index, message in enumerate(messages[start:], start):
            content, marks = message["content"], self._marks
            if message["role"] == "assistant":  # may have its end token already
                content, marks = self.without_end(content), self._answer_marks
            refuse_marks(index, content, marks)
        refuse_losses(messages, text, functools.partial(self.text, tools=tools), start)

    def text(
        self, messages: Sequence[Message], *, to_answer: bool, tools: Sequence[Any] = ()
    ) -> str:
        """What the template writes; raises UserError with its own words if it fails."""
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                add_generation_prompt=to_answer,
                tokenize=False,
                **self.switches,
            )
        except Exception as error:  # the boundary of a template, which is a program of the model's
            raise UserError(f"the chat template fails: {error}") from error

    def up_to_end(self, text: str) -> str:
        """The text without what follows the end token of its last turn."""
        end = self.ends.search(text) if self.ends else None
        return text[: end.end(1)] if end else text.rstrip()

    def without_end(self, text: str) -> str:
        """What is left of a turn's text beside end tokens and white space around it."""
        return (self.ends.sub("", text) if self.ends else text).strip()
