"""Random conversations under the chat templates of current families.

What trains is what was sampled, in the context in which it was sampled. What stands between is what
the template writes, and a history that it rewrites begins a row or fails the trajectory.
"""

import asyncio
import json
import random

import pytest

from nemo_like.data.messages import cleaned
from nemo_like.errors import UserError
from nemo_like.generation.protocol import Completion, FinishReason
from nemo_like.rewards.protocol import RewardResult
from nemo_like.rollout.trajectory import collate_tokens
from tests.real_templates import FAMILIES, build
from tests.test_trajectories import recorder_of, user

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "description": "What."}},
                "required": ["a"],
            },
        },
    }
]
NAMES = [family.name for family in FAMILIES]
OF_NAME = {family.name: family for family in FAMILIES}
REFUSALS = (  # by templates, of what few conversations say
    "only supports single tool-calls",
    "cannot have both content and tool calls",
    "must have a string or a list of chunks",
)


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    return {name: build(folder / str(i), OF_NAME[name]) for i, name in enumerate(NAMES)}


class Sampling:
    """An engine that samples what ``answer`` makes up, and remembers it."""

    def __init__(self, answer):
        self.answer, self.calls = answer, []

    async def generate(self, request):
        ids, finish_reason = self.answer()
        logprobs = [-0.001 * (len(self.calls) + 1)] * len(ids)
        self.calls.append((list(request.prompt_ids), ids, logprobs))
        return Completion(
            token_ids=ids, logprobs=logprobs, finish_reason=finish_reason, weight_version=1
        )


class Chatter:
    """Makes up what both sides of a conversation say."""

    def __init__(self, chat, family, seed):
        self.chat, self.family, self.draw = chat, family, random.Random(seed)
        self.tools = TOOLS if family.call and self.draw.random() < 0.5 else []

    def words(self):
        """Text with odd characters, never empty and without marks of turns."""
        pieces = [
            "a",
            "Zürich",
            "日本",
            "🙂",
            "\n",
            "\n\n",
            " ",
            "  ",
            "{",
            '"',
            "\\n",
            "</",
            "1.",
            "é",
        ]
        count = self.draw.randint(1, 6)
        return "x" + "".join(self.draw.choice(pieces) for _ in range(count)) + "y"

    def text(self):
        """What the model writes, before its end token."""
        family, kind = self.family, self.draw.random()
        if self.tools and kind < 0.4:
            text = self.draw.choice(["", "", self.words()]) + family.call
            text += self.draw.choice(["", "", family.between + family.call])
            return self.draw.choice([text, text, text[:-9]])
        if family.thought and kind < 0.7:
            return family.thought.replace("{}", self.words()) + self.words()
        return self.draw.choice([self.words(), self.words(), "", "\n\n", " a "])

    def answer(self):
        """Sampled ids."""
        ends = self.chat.eos_token_ids
        if self.draw.random() < 0.15:  # any tokens, as a model at its beginning samples them
            known = sorted(set(self.chat.token_ids().values()) - set(ends))
            ids = self.draw.choices(known, k=self.draw.randint(1, 8))
        else:
            ids = self.chat.cuts.ids(self.text() + self.draw.choice([self.family.closes, ""]))
        if ids and self.draw.random() < 0.15:
            return ids, FinishReason.length
        end = self.chat.token_ids()[self.family.ends[0]]
        return [
            *ids,
            end if self.draw.random() < 0.9 else self.draw.choice(ends),
        ], FinishReason.stop

    def next_messages(self, reply):
        """What the other side says, as an environment with tools does."""
        calls = reply.message.get("tool_calls") or []
        results = [
            {"role": "tool", "tool_call_id": f"unread{i:03}", "content": error}
            for i, error in enumerate(reply.errors)
        ]
        results += [
            {"role": "tool", "name": "add", "tool_call_id": one["id"], "content": self.words()}
            for one in calls
        ]
        return results or [user(self.words())]


def as_sent_back(message, draw):
    """A message in one of the forms that clients send."""
    sent = json.loads(json.dumps(message))
    if sent.get("tool_calls") and not sent["content"]:
        sent["content"] = draw.choice([None, ""])
    return sent


def converse(chat, family, seed):
    """A conversation, and what is checked of it; the number of turns and of rewritten histories."""
    chatter = Chatter(chat, family, seed)
    engine, draw = Sampling(chatter.answer), chatter.draw
    recorder = recorder_of(chat, engine, tokens=10**6, turns=20)
    messages = [user("Hi")]
    if family.system and draw.random() < 0.3:
        messages = [{"role": "system", "content": chatter.words()}, *messages]
    refused = None

    async def talk():
        previous = None
        for _ in range(draw.randint(1, 5)):
            shown = cleaned([as_sent_back(one, draw) for one in messages])
            turn = await recorder.complete(shown, chatter.tools)
            check_given(chat, family, turn, previous, messages, chatter.tools)
            messages.append(turn.reply.message)
            messages.extend(chatter.next_messages(turn.reply))
            previous = turn

    try:
        asyncio.run(talk())
    except UserError as error:
        refused = str(error)
        assert any(reason in refused for reason in REFUSALS), refused
    check_rows(recorder, engine)
    return len(engine.calls), recorder.counts["rewritten_histories"], refused


def check_given(chat, family, turn, previous, messages, tools):
    """Tokens that were not sampled are the template's, and all of them."""
    given = chat.decode(turn.given, skip_special_tokens=False)
    if turn.parent is None:
        assert given == chat.text(chat.as_taken(messages), to_answer=True, tools=tools)
        return
    assert turn.parent is previous
    text = bare(chat.text(chat.as_taken(messages), to_answer=True, tools=tools))
    begin = len(turn.lineage()[0].said) - 1  # the row has what was said since, word for word
    said = [one for one in messages[begin:] if one["role"] == "assistant"]
    assert all(bare(one["content"]) in text for one in said)
    at = max(i for i, one in enumerate(messages) if one["role"] == "assistant")
    other = [*messages[:at], {"role": "assistant", "content": "SAID"}, *messages[at + 1 :]]
    rest = chat.text(chat.as_taken(other), to_answer=True, tools=tools).rpartition("SAID")[2]
    rest = rest.removeprefix(family.closes)
    last = turn.parent.completion.token_ids[-1]
    if last in chat.eos_token_ids:
        mark = (
            chat.decode([last], skip_special_tokens=False) if family.ends_begin else family.ends[0]
        )
        assert family.ends_begin or rest.startswith(mark)
        rest = rest.removeprefix(mark)
    assert given == rest


def bare(text):
    return "".join(text.split())


def check_rows(recorder, engine):
    """Each sampled token trains once, behind the very tokens that the engine had read."""
    trajectory = recorder.trajectory(RewardResult(reward=1.0))
    expected = [call for call in engine.calls if call[1]]
    found = []
    for row in trajectory.rows:
        before = []
        for segment in row:
            if segment.logprobs is not None:
                found.append((list(before), list(segment.token_ids), list(segment.logprobs)))
            before += segment.token_ids
    assert sorted(found) == sorted(expected)
    batch = collate_tokens([trajectory])
    assert int(batch.tokens["loss_mask"].sum()) == sum(len(ids) for _, ids, _ in expected)
    rows = 1 + recorder.counts["rewritten_histories"]
    assert len(trajectory.rows) == rows


@pytest.mark.parametrize("name", NAMES)
def test_what_trains_is_what_was_sampled_in_its_context(chats, name):
    fuzz(chats[name], OF_NAME[name], range(50))


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_a_thousand_conversations(chats, name):
    fuzz(chats[name], OF_NAME[name], range(50, 1050))


def fuzz(chat, family, seeds):
    found = [converse(chat, family, seed) for seed in seeds]
    turns = [one[0] for one in found]
    assert sum(turns) > 2 * len(found)
    assert (sum(one[1] for one in found) > 0) == family.rewrites
    assert sum(one[2] is not None for one in found) < len(found) / 3
