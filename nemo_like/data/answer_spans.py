"""Which tokens of a given conversation the assistant wrote."""

import functools
import logging
import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import render_jinja_template

from nemo_like.data.chat import ChatTokenizer
from nemo_like.data.messages import Message
from nemo_like.data.templates import without_space
from nemo_like.data.thinking import EMPTY, REASONING
from nemo_like.errors import UserError

logger = logging.getLogger(__name__)

_HEADER_CHARS = 64
"""Enough of a prompt for its last two tokens not to depend on where it was cut off."""
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = [{"role": role, "content": role} for role in ("user", "assistant", "user", "assistant")]
_USE_MARKERS = "use a template with {% generation %} markers around the assistant's text"


class Span(NamedTuple):
    """A range of characters or tokens."""

    start: int
    end: int


class AnswerSpans:
    """Renders whole conversations with a chat template."""

    def __init__(self, chat: ChatTokenizer, tokenizer: Any) -> None:
        """``tokenizer``: that of ``chat``, of the transformers library."""
        self._chat = chat
        self._tokenizer = tokenizer
        self._warned_of_end: set[int] = set()

    def render(
        self, messages: Sequence[Message], from_message: int = 0, tools: Sequence[Any] = ()
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
        messages = self._chat.as_taken(messages)
        turns = [
            index
            for index, message in enumerate(messages)
            if message["role"] == "assistant" and index >= from_message
        ]
        marked = self._marked(messages, tools) if self._markers_hold else None
        if marked is None:
            text, spans = self._derived(messages, turns, tools)
        else:
            text, spans = marked[0], marked[1][len(marked[1]) - len(turns) :]
        self._chat.check(messages, text, tools)
        starts = []
        for turn, span in zip(turns, spans, strict=True):
            written = text[span.start : span.end]
            if messages[turn]["content"].strip() and not self._chat.without_end(written):
                raise UserError(
                    f"the template leaves out the text of message {turn}; use a template that "
                    "takes content as text."
                )
            _refuse_lost_reasoning(messages, turn, written)
            unwritten = num_unwritten(written, messages[turn], self._chat.empty_block)
            starts.append(span.start + unwritten)
        written_spans = [Span(start, span.end) for start, span in zip(starts, spans, strict=True)]
        return self._mask(text, written_spans)

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

    def _marked(
        self, messages: Sequence[Message], tools: Sequence[Any] = ()
    ) -> tuple[str, list[Span]] | None:
        """The whole text and the spans in markers; None unless each turn has one of its own."""
        try:
            (text,), (found,) = render_jinja_template(
                conversations=[list(messages)],
                tools=list(tools) or None,
                chat_template=self._tokenizer.get_chat_template(),
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
                **self._chat.switches,
            )
        except Exception as error:  # see text
            raise UserError(f"the chat template fails: {error}") from error
        spans = [
            Span(start, start + len(self._chat.up_to_end(text[start:end])))
            for start, end in ((int(start), int(end)) for start, end in found)
            if end > start
        ]
        num_turns = sum(message["role"] == "assistant" for message in messages)
        return (text, spans) if len(spans) == num_turns else None

    def _derived(
        self, messages: Sequence[Message], turns: Sequence[int], tools: Sequence[Any] = ()
    ) -> tuple[str, list[Span]]:
        """The whole text, and what each turn adds to the text that asks for its answer."""
        text = functools.partial(self._chat.text, tools=tools)
        whole = text(messages, to_answer=False)
        spans = []
        for turn in turns:
            if turn == 0:
                raise UserError(
                    "the conversation begins with the assistant, so that nothing tells its header "
                    f"from its text; put a message before it, or {_USE_MARKERS}."
                )
            before = text(messages[:turn], to_answer=True)
            after = self._chat.up_to_end(text(messages[: turn + 1], to_answer=False))
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

    def _mask(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[bool]]:
        """Token ids of ``text``, and which are in ``spans`` (characters) or end one of them."""
        ids, cuts = self._encode_at(text, list(chain.from_iterable(spans)))
        mask = [False] * len(ids)
        for start, end in zip(cuts[::2], cuts[1::2], strict=True):
            stop = self._end_of_turn(ids, Span(start, end), is_last=end == cuts[-1])
            mask[start:stop] = [True] * (stop - start)
        return ids, mask

    def _end_of_turn(self, ids: Sequence[int], turn: Span, *, is_last: bool) -> int:
        """Position after the token that ends the turn."""
        last = ids[turn.end - 1]
        if last in self._chat.eos_token_ids:
            return turn.end
        if turn.end < len(ids) and ids[turn.end] in self._chat.eos_token_ids:
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

    def _encode_at(self, text: str, cuts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Token ids of ``text``, and how many of them stand before each of the rising ``cuts``."""
        encoding = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=self._tokenizer.is_fast
        )
        ids: list[int] = encoding["input_ids"]
        offsets: list[tuple[int, int]] = encoding.get("offset_mapping", [])
        positions = [self._position(text, ids, offsets, cut) for cut in cuts]
        found = [position for position in positions if position is not None]
        if len(found) == len(cuts) and self._as_sampled(text, ids, cuts, found):
            return ids, found
        # A token reaches over a cut (a newline of the header and one of the answer), or the text
        # after it changes those before (GPT-2 takes two newlines apart if letters follow). Sampling
        # never sees that, because there the header is tokenised alone; so do we.
        pieces = [self._chat.cuts.ids(text[a:b]) for a, b in pairwise([0, *cuts, len(text)])]
        joined = list(chain.from_iterable(pieces))
        if self._tokenizer.decode(joined) != self._tokenizer.decode(ids):
            raise UserError(
                "the tokenizer joins the beginning of an answer with what stands before it; remove "
                "white space from the beginning of the assistant's text."
            )
        return joined, list(accumulate(len(piece) for piece in pieces))[:-1]

    def _as_sampled(
        self, text: str, ids: list[int], cuts: Sequence[int], positions: Sequence[int]
    ) -> bool:
        """Whether the last tokens before each answer are those of a prompt that ends there."""
        for cut, position in zip(cuts[::2], positions[::2], strict=True):
            first = max(0, cut - _HEADER_CHARS)
            alone = self._chat.cuts.ids(text[first:cut])
            near = alone[-2:] if first == 0 or len(alone) > 2 else []
            if near != ids[position - len(near) : position]:
                return False
        return True

    def _position(
        self, text: str, ids: list[int], offsets: Sequence[tuple[int, int]], cut: int
    ) -> int | None:
        """Number of tokens of ``text[:cut]``; None if a token of the whole reaches over the cut."""
        position = bisect_left(offsets, cut, key=lambda offset: offset[0])
        start = offsets[position][0] if position < len(offsets) else len(text)
        if position and start == cut == offsets[position - 1][1]:
            return position
        # Offsets leave out white space, or count it to special tokens, in some tokenizers.
        before = self._chat.cuts.ids(text[:cut])
        return len(before) if ids[: len(before)] == before else None


def _refuse_lost_reasoning(messages: Sequence[Message], turn: int, written: str) -> None:
    """Refuse a turn whose reasoning is not in what the template has the assistant write."""
    for name in REASONING:
        if without_space(messages[turn].get(name) or "") not in without_space(written):
            raise UserError(
                f"the template leaves out the '{name}' of message {turn}; write it into the "
                "content as the model would, or use a template that takes it."
            )


def num_unwritten(written: str, message: Message, block: str) -> int:
    """Characters at the beginning of a turn's text that only the template wrote.

    ``block`` is ``template_block``'s. What the row's author wrote, if only an empty block, counts.
    """
    if any(str(message.get(name) or "").strip() for name in REASONING):
        return 0
    if block and written.startswith(block):
        found = block
    elif match := EMPTY.match(written):
        found = match[0] + _space_after(written[match.end() :], message["content"])
    else:
        return 0
    content = "".join(message["content"].split())
    return 0 if content.startswith("".join(found.split())) else len(found)


def _space_after(text: str, content: str) -> str:
    """White space at the beginning of the text, without that of the content."""
    space = text[: len(text) - len(text.lstrip())]
    own = content[: len(content) - len(content.lstrip())]
    return space.removesuffix(own) if own else space
