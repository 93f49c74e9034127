"""The one place where messages become token ids."""

import functools
import logging
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import render_jinja_template

from nemo_like.data.messages import Message
from nemo_like.data.templates import (
    IN_MESSAGES,
    SWITCHES,
    as_template_takes,
    check_switches,
    refuse_losses,
    refuse_lost_reasoning,
    refuse_marks,
    refuse_unasked_header,
    those_known,
    turn_marks,
)
from nemo_like.data.thinking import num_unwritten, template_block
from nemo_like.data.tokenizer import TokenCuts, end_token_ids, load_tokenizer
from nemo_like.errors import UserError

logger = logging.getLogger(__name__)

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = [{"role": role, "content": role} for role in ("user", "assistant", "user", "assistant")]
_USE_MARKERS = "use a template with {% generation %} markers around the assistant's text"


class Span(NamedTuple):
    """A range of characters or tokens."""

    start: int
    end: int


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
        self.tools: Sequence[Any] = ()
        """Schemas of functions that the template is always given."""
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
        self._warned_of_end: set[int] = set()
        self._empty_block = template_block(self.text)
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
        self, messages: Sequence[Message], from_message: int = 0
    ) -> tuple[list[int], list[bool]]:
        """Token ids of a whole conversation, and which of them the assistant wrote.

        A turn's tokens go from the first one after its header, and after an empty block (of
        thinking) that only the template wrote, to the one that ends the turn, included. Turns
        before ``from_message`` count as not the assistant's. Where they are is taken from the
        template's ``{% generation %}`` markers, if it has them around each turn; or else from what
        it renders for the messages before a turn, and with it, which must be the beginning of the
        whole.

        Raises UserError, without the row's name, if neither way leads to the tokens.
        """
        messages = self.as_taken(messages)
        turns = [
            index
            for index, message in enumerate(messages)
            if message["role"] == "assistant" and index >= from_message
        ]
        marked = self._marked(messages) if self._markers_hold else None
        if marked is None:
            text, spans = self._derived(messages, turns)
        else:
            text, spans = marked[0], marked[1][len(marked[1]) - len(turns) :]
        self.check(messages, text)
        starts = []
        for turn, span in zip(turns, spans, strict=True):
            written = text[span.start : span.end]
            if messages[turn]["content"].strip() and not self._without_end(written):
                raise UserError(
                    f"the template leaves out the text of message {turn}; use a template that "
                    "takes content as text."
                )
            refuse_lost_reasoning(messages, turn, written)
            starts.append(span.start + num_unwritten(written, messages[turn], self._empty_block))
        written_spans = [Span(start, span.end) for start, span in zip(starts, spans, strict=True)]
        return self._mask(text, written_spans)

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

    def has_tokens_of(self, other: "ChatTokenizer") -> bool:
        """Whether each id stands for the same token in both."""
        return self._tokenizer.get_vocab() == other._tokenizer.get_vocab()

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

    @functools.cached_property
    def _markers_hold(self) -> bool:
        """Whether the template's markers are around the assistant's text and nothing else."""
        if not _MARKER.search(self._tokenizer.get_chat_template()):
            return False
        marked = self._marked(_PROBE)
        if marked is None:
            return False
        try:
            derived = self._derived(_PROBE, [1, 3])
        except UserError:
            return True  # what can't be derived can't be compared: the template's word counts
        return self._mask(*marked) == self._mask(*derived)

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
                content, marks = self._without_end(content), self._answer_marks
            refuse_marks(index, content, marks)
        refuse_losses(messages, text, functools.partial(self.text, tools=tools), start)

    def text(
        self, messages: Sequence[Message], *, to_answer: bool, tools: Sequence[Any] = ()
    ) -> str:
        """What the template writes; raises UserError with its own words if it fails."""
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools or self.tools) or None,
                add_generation_prompt=to_answer,
                tokenize=False,
                **self.switches,
            )
        except Exception as error:  # the boundary of a template, which is a program of the model's
            raise UserError(f"the chat template fails: {error}") from error

    def _marked(self, messages: Sequence[Message]) -> tuple[str, list[Span]] | None:
        """The whole text and the spans in markers; None unless each turn has one of its own."""
        try:
            (text,), (found,) = render_jinja_template(
                conversations=[list(messages)],
                tools=list(self.tools) or None,
                chat_template=self._tokenizer.get_chat_template(),
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
                **self.switches,
            )
        except Exception as error:  # see text
            raise UserError(f"the chat template fails: {error}") from error
        spans = [
            Span(start, start + len(self.up_to_end(text[start:end])))
            for start, end in ((int(start), int(end)) for start, end in found)
            if end > start
        ]
        num_turns = sum(message["role"] == "assistant" for message in messages)
        return (text, spans) if len(spans) == num_turns else None

    def _derived(self, messages: Sequence[Message], turns: Sequence[int]) -> tuple[str, list[Span]]:
        """The whole text, and what each turn adds to the text that asks for its answer."""
        whole = self.text(messages, to_answer=False)
        spans = []
        for turn in turns:
            if turn == 0:
                raise UserError(
                    "the conversation begins with the assistant, so that nothing tells its header "
                    f"from its text; put a message before it, or {_USE_MARKERS}."
                )
            before = self.text(messages[:turn], to_answer=True)
            after = self.up_to_end(self.text(messages[: turn + 1], to_answer=False))
            if not after.startswith(before):
                raise UserError(
                    f"the template's text that asks for message {turn} is not the beginning of its "
                    "text with that message, so that the assistant's tokens cannot be told apart; "
                    f"{_USE_MARKERS}."
                )
            if not whole.startswith(after):
                raise UserError(
                    f"the template renders message {turn} in another way once others follow (it "
                    "may strip <think> blocks of earlier turns), so that the model would train on "
                    "what it would not have written; train on the last answer only "
                    f"(data.train_on=last_assistant), or {_USE_MARKERS}."
                )
            spans.append(Span(len(before), len(after)))
        return whole, spans

    def up_to_end(self, text: str) -> str:
        """The text without what follows the end token of its last turn."""
        end = self.ends.search(text) if self.ends else None
        return text[: end.end(1)] if end else text.rstrip()

    def _without_end(self, text: str) -> str:
        """What is left of a turn's text beside end tokens and white space around it."""
        return (self.ends.sub("", text) if self.ends else text).strip()

    def _mask(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[bool]]:
        """Token ids of ``text``, and which are in ``spans`` (characters) or end one of them."""
        ids, cuts = self.cuts.encode_at(text, list(chain.from_iterable(spans)))
        mask = [False] * len(ids)
        for start, end in zip(cuts[::2], cuts[1::2], strict=True):
            stop = self._end_of_turn(ids, Span(start, end), is_last=end == cuts[-1])
            mask[start:stop] = [True] * (stop - start)
        return ids, mask

    def _end_of_turn(self, ids: Sequence[int], turn: Span, *, is_last: bool) -> int:
        """Position after the token that ends the turn."""
        last = ids[turn.end - 1]
        if last in self.eos_token_ids:
            return turn.end
        if turn.end < len(ids) and ids[turn.end] in self.eos_token_ids:
            return turn.end + 1
        if not is_last:
            return turn.end
        if turn.end == turn.start or last not in self._tokenizer.all_special_ids:
            raise UserError(
                "the template writes no end token after the last answer, so that the model would "
                "not learn to stop; use a template that does."
            )
        if last not in self._warned_of_end:
            self._warned_of_end.add(last)
            logger.warning(
                "The chat template ends answers with %s, which sampling does not stop at; add its "
                "id %d to eos_token_id in the model's generation_config.json.",
                self._tokenizer.convert_ids_to_tokens(last),
                last,
            )
        return turn.end
