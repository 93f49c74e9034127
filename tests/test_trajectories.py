"""Conversations with a scripted engine: which tokens are kept, which train, and how rows begin."""

import asyncio
import inspect
import json
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_like.batch import keys
from nemo_like.data.datasets import Row
from nemo_like.data.tokenizer import TokenCuts
from nemo_like.data.tool_calls import reply_of
from nemo_like.data.turns import RewrittenHistoryError, tokens_after
from nemo_like.errors import UserError
from nemo_like.generation.protocol import Completion, FinishReason, SamplingParams
from nemo_like.rewards.protocol import RewardResult
from nemo_like.rollout.recorder import EndedError, Limits, Recorder
from nemo_like.rollout.trajectory import RolloutTask, collate_rows, collate_tokens
from tests.chat_templates import (
    LLAMA3,
    MARKED,
    PHI3,
    QWEN,
    QWEN3,
    STRIPS_THINK,
    THINK_IN_PROMPT,
    build_chat,
    thinking,
    trained_texts,
)

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
WITH_TOOLS = "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + QWEN


class Scripted:
    """An engine that samples given texts, or ids, in turn; it remembers its requests."""

    def __init__(self, chat, *answers, seconds=()):
        self.chat, self.answers, self.requests = chat, list(answers), []
        self.seconds = dict(seconds)

    async def generate(self, request):
        self.requests.append(request)
        answer = self.answers.pop(0)
        await asyncio.sleep(self.seconds.get(str(answer), 0))
        if isinstance(answer, str):
            cut = answer.endswith("…")
            ids = self.chat.cuts.ids(answer.removesuffix("…"))
            ids += [] if cut else [self.chat.eos_token_ids[-1]]
        else:
            ids = list(answer)
            cut = ids[-1:] != [self.chat.eos_token_ids[-1]]
        return Completion(
            token_ids=ids,
            logprobs=[-0.1 * len(self.requests)] * len(ids),
            finish_reason=FinishReason.length if cut else FinishReason.stop,
            weight_version=2 + len(self.requests),
        )


def recorder_of(chat, engine, *, tokens=10_000, turns=8, prompt="Hi"):
    messages = ({"role": "user", "content": prompt},)
    row = Row(index=0, messages=messages, fields={}, prompt_ids=tuple(chat.render(messages)))
    return Recorder(
        RolloutTask(row=row, group=4, index=1, seed=77, request_id="r"),
        engine.generate,
        chat,
        SamplingParams(max_new_tokens=100),
        Limits(tokens=tokens, turns=turns),
    )


def user(text):
    return {"role": "user", "content": text}


async def talk(recorder, *texts, tools=()):
    """Say the texts one after the other; all messages in the end."""
    messages = []
    for text in texts:
        messages.append(user(text))
        turn = await recorder.complete(messages, tools)
        messages.append(turn.reply.message)
    return messages


def rows_of(recorder, reward=1.0):
    """Ids and mask of each row."""
    trajectory = recorder.trajectory(RewardResult(reward=reward))
    batch = collate_tokens([trajectory])
    found = []
    for start, length in zip(batch.starts.tolist(), batch.lengths.tolist(), strict=True):
        place = slice(start, start + length)
        ids, mask = batch.tokens[keys.INPUT_IDS][place], batch.tokens[keys.LOSS_MASK][place]
        found.append((ids.tolist(), mask.tolist()))
    return trajectory, found


TEMPLATES = {
    "qwen": QWEN, "llama3": LLAMA3, "phi3": PHI3, "marked": MARKED, "tools": WITH_TOOLS,
    "think_in_prompt": THINK_IN_PROMPT, "qwen3": QWEN3,
    "gpt-oss-like": thinking("<t>", "</t>"),
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_is_one_row_and_what_was_sampled_trains(tmp_path, name):
    chat = build_chat(tmp_path, TEMPLATES[name])
    engine = Scripted(chat, "Hello", "Yes\n\nno", " fine")
    recorder = recorder_of(chat, engine)
    messages = asyncio.run(talk(recorder, "Hi", "Really?", "How\n\nare you?"))
    trajectory, [(ids, mask)] = rows_of(recorder)
    assert trajectory.counts["turns"] == 3
    end = chat._tokenizer.decode([chat.eos_token_ids[-1]])
    texts = trained_texts(chat._tokenizer, ids, mask)
    assert texts == [f"{text}{end}" for text in ("Hello", "Yes\n\nno", " fine")]
    # What the engine reads at each turn begins with all that it read and wrote before.
    prompts = [request.prompt_ids for request in engine.requests]
    assert prompts[0] == chat.render(messages[:1])
    assert ids[: len(prompts[2])] == prompts[2]
    assert [len(request.prompt_ids) for request in engine.requests] == sorted(
        len(prompt) for prompt in prompts
    )
    if name not in ("think_in_prompt", "qwen3", "gpt-oss-like", "llama3"):  # these write other text
        assert prompts[2] == chat.render(messages[:5])


def test_a_line_break_after_a_turn_is_the_templates_and_the_last_turn_has_none(tmp_path):
    """As a whole render of the same chat has it, with mask 0."""
    chat = build_chat(tmp_path, QWEN)
    end = chat.eos_token_ids[0]
    [break_] = chat.cuts.ids("\n")
    recorder = recorder_of(chat, Scripted(chat, [40, 50, end], [60, end]))
    asyncio.run(talk(recorder, "Hi", "more"))
    _, [(ids, mask)] = rows_of(recorder)
    at = ids.index(end, ids.index(50))
    assert ids[at - 2 : at + 2] == [40, 50, end, break_]
    assert mask[at - 2 : at + 2] == [True, True, True, False]
    assert (ids[-1], mask[-1]) == (end, True)


def test_sampled_ids_stay_however_their_text_would_be_tokenised(tmp_path):
    chat = build_chat(tmp_path, QWEN)
    [double] = chat.cuts.ids("\n\n")
    [single] = chat.cuts.ids("\n")
    end = chat.eos_token_ids[0]
    recorder = recorder_of(chat, Scripted(chat, [single, single, end], [double, end]))
    asyncio.run(talk(recorder, "Hi", "more"))
    _, [(ids, mask)] = rows_of(recorder)
    sampled = [token for token, trains in zip(ids, mask, strict=True) if trains]
    assert sampled == [single, single, end, double, end]


def test_a_turn_that_was_cut_off_is_closed_by_the_template(tmp_path):
    chat = build_chat(tmp_path, QWEN)
    recorder = recorder_of(chat, Scripted(chat, "Hel…", "ok"))
    asyncio.run(talk(recorder, "Hi", "more"))
    _, [(ids, mask)] = rows_of(recorder)
    end = chat.eos_token_ids[0]
    assert trained_texts(chat._tokenizer, ids, mask) == ["Hel", "ok<|im_end|>"]
    at = ids.index(end, mask.index(True))
    assert (ids[at], mask[at]) == (end, False)


def test_a_long_conversation_encodes_each_token_once_and_needs_no_deep_stack(tmp_path):
    chat = build_chat(tmp_path, QWEN)
    encoded = []

    class Counting(TokenCuts):
        def ids(self, text):
            encoded.append(len(found := super().ids(text)))
            return found

    engine = Scripted(chat, *["a"] * 200)
    recorder = recorder_of(chat, engine, turns=200)
    chat.cuts = Counting(chat._tokenizer)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 150)
    try:
        asyncio.run(talk(recorder, *["Hi"] * 200))
        _, [(ids, _)] = rows_of(recorder)
    finally:
        sys.setrecursionlimit(limit)
    assert sum(encoded) < 2 * len(ids)


def test_rewritten_history_begins_another_row(tmp_path):
    chat = build_chat(tmp_path, STRIPS_THINK)
    answers = ("<think>a</think>one", "<think>b</think>two")
    recorder = recorder_of(chat, Scripted(chat, *answers))
    asyncio.run(talk(recorder, "Hi", "more"))
    trajectory, rows = rows_of(recorder)
    texts = [trained_texts(chat._tokenizer, ids, mask) for ids, mask in rows]
    assert texts == [[f"{answers[0]}<|im_end|>"], [f"{answers[1]}<|im_end|>"]]
    assert "<think>a" not in chat.decode(rows[1][0])
    assert trajectory.counts["rewritten_histories"] == 1
    columns = collate_rows([trajectory])
    assert columns[keys.REWARDS].tolist() == [1.0, 1.0]
    assert columns[keys.SIBLINGS].tolist() == [1, 1]


def test_other_tools_begin_another_row(tmp_path):
    """The template writes them into the prompt, so that no earlier turn is continued."""
    chat = build_chat(tmp_path, WITH_TOOLS.replace("{{ m.content }}", CALLING))
    recorder = recorder_of(chat, Scripted(chat, "one", "two", "three"))
    others = [{"type": "function", "function": {"name": "sub", "parameters": {"type": "object"}}}]

    async def calls():
        messages = [user("Hi")]
        for tools in (TOOLS, others, others):
            turn = await recorder.complete(messages, tools)
            messages += [turn.reply.message, user("go on")]

    asyncio.run(calls())
    _, rows = rows_of(recorder)
    texts = [trained_texts(chat._tokenizer, ids, mask) for ids, mask in rows]
    assert texts == [["one<|im_end|>"], ["two<|im_end|>", "three<|im_end|>"]]


def test_sub_agents_have_rows_of_their_own_and_each_token_trains_once(tmp_path):
    """Calls of a parent and its child, interleaved."""
    chat = build_chat(tmp_path, QWEN)
    engine = Scripted(chat, "parent 1", "child 1", "parent 2", "child 2")
    recorder = recorder_of(chat, engine)

    async def calls():
        parent, child = [user("Hi")], [user("sub")]
        for _ in range(2):
            for messages in (parent, child):
                turn = await recorder.complete(messages)
                messages += [turn.reply.message, user("go on")]

    asyncio.run(calls())
    trajectory, rows = rows_of(recorder)
    texts = [trained_texts(chat._tokenizer, ids, mask) for ids, mask in rows]
    expected = [[f"{who} {n}<|im_end|>" for n in (1, 2)] for who in ("parent", "child")]
    assert texts == expected
    assert trajectory.num_sampled == sum(sum(mask) for _, mask in rows)


def test_two_that_continue_one_turn_train_it_in_one_row(tmp_path):
    chat = build_chat(tmp_path, QWEN)
    recorder = recorder_of(chat, Scripted(chat, "trunk", "left", "right"))

    async def calls():
        messages = await talk(recorder, "Hi")
        for text in ("one way", "another"):
            await recorder.complete([*messages, user(text)])

    asyncio.run(calls())
    _, rows = rows_of(recorder)
    texts = [trained_texts(chat._tokenizer, ids, mask) for ids, mask in rows]
    assert texts == [["trunk<|im_end|>", "left<|im_end|>"], ["right<|im_end|>"]]
    assert "trunk" in chat.decode(rows[1][0])


def test_an_answer_of_nothing_is_no_parent_and_equal_answers_are_told_as_ambiguous(tmp_path):
    chat = build_chat(tmp_path, QWEN)
    recorder = recorder_of(chat, Scripted(chat, "same", [], "next"))

    async def calls():
        messages = await talk(recorder, "Hi")
        await recorder.complete([user("Hi")])
        await recorder.complete([*messages, user("more")])

    asyncio.run(calls())
    _, rows = rows_of(recorder)
    assert len(rows) == 1

    recorder = recorder_of(chat, Scripted(chat, "same", "same", "next"))
    asyncio.run(calls())
    trajectory, _ = rows_of(recorder)
    assert trajectory.result.reward is None
    assert trajectory.counts["ambiguous_calls"] == 1


def test_calls_without_a_model_and_rewards_without_a_call_do_not_train(tmp_path):
    chat = build_chat(tmp_path, QWEN)
    trajectory, rows = rows_of(recorder_of(chat, Scripted(chat)))
    assert trajectory.result.reward is None
    assert "never called" in str(trajectory.result.error)
    assert trajectory.counts["without_calls"] == 1
    assert not any(rows[0][1])
    assert collate_rows([trajectory])[keys.SAMPLE_MASK].tolist() == [False]


def test_turns_and_tokens_have_limits_and_the_end_says_which_it_was(tmp_path):
    chat = build_chat(tmp_path, QWEN)
    recorder = recorder_of(chat, Scripted(chat, "a", "b"), turns=2)
    with pytest.raises(EndedError, match="used its 2 turns"):
        asyncio.run(talk(recorder, "Hi", "more", "more"))
    assert rows_of(recorder)[0].end == "turns"

    first = len(chat.render([user("Hi")]))
    engine = Scripted(chat, "a", "b")
    recorder = recorder_of(chat, engine, tokens=first + 9)
    with pytest.raises(EndedError, match="leave no room"):
        asyncio.run(talk(recorder, "Hi", "more"))
    trajectory, _ = rows_of(recorder)
    assert (trajectory.end, trajectory.truncated) == ("context", True)
    assert engine.requests[0].sampling.max_new_tokens == 9
    for asked, room, most in ((50, 9, 9), (5, 9, 5), (None, 900, 100), (500, 900, 100)):
        engine = Scripted(chat, "a")  # a client may ask for less than the run does, and no more
        recorder = recorder_of(chat, engine, tokens=first + room)
        asyncio.run(recorder.complete([user("Hi")], max_new_tokens=asked))
        assert engine.requests[0].sampling.max_new_tokens == most
    recorder = recorder_of(chat, Scripted(chat, "cut…"))
    asyncio.run(talk(recorder, "Hi"))
    assert rows_of(recorder)[0].end == "length"


def test_a_prompt_without_room_trains_nothing_and_says_so(tmp_path):
    """Such as one that tools make too long."""
    chat = build_chat(tmp_path, WITH_TOOLS.replace("{{ m.content }}", CALLING))
    recorder = recorder_of(chat, Scripted(chat), tokens=len(chat.render([user("Hi")], TOOLS)))
    with pytest.raises(EndedError, match="leave no room"):
        asyncio.run(recorder.complete([user("Hi")], TOOLS))
    trajectory, [(_, mask)] = rows_of(recorder)
    assert trajectory.result.reward is None
    assert "tokens leave no room in" in str(trajectory.result.error)
    assert not any(mask)


def test_a_cut_inside_a_conversation_is_no_truncation_and_lengths_are_of_sampled_tokens(tmp_path):
    chat = build_chat(tmp_path, QWEN)
    recorder = recorder_of(chat, Scripted(chat, "abc…", [], "de", "f"))
    asyncio.run(talk(recorder, "Hi", "more", "and", "last"))
    trajectory, rows = rows_of(recorder)
    assert (trajectory.end, trajectory.truncated) == ("final", False)
    columns = collate_rows([trajectory])
    assert columns[keys.NUM_LOSS_TOKENS].sum() == trajectory.num_sampled == 3 + 3 + 2
    # Versions 3, none of 4, 5 and 6.
    versions = (keys.WEIGHT_VERSIONS, keys.MEAN_VERSIONS, keys.NEWEST_VERSIONS, keys.NUM_OLDER)
    expected = [[3], [(3 * 3 + 3 * 5 + 2 * 6) / 8], [6], [6]]
    assert [columns[name].tolist() for name in versions] == expected
    assert sum(sum(mask) for _, mask in rows) == 8


def test_rows_do_not_depend_on_the_order_in_which_calls_of_sub_agents_come(tmp_path):
    chat = build_chat(tmp_path, QWEN)

    def found(order):
        engine = Scripted(chat)
        recorder = recorder_of(chat, engine)
        says = {"parent": [user("Hi")], "child": [user("sub")]}

        async def calls():
            for who in order:
                engine.answers.append(f"{who} {len(says[who])}")
                turn = await recorder.complete(says[who])
                says[who] += [turn.reply.message, user("go on")]

        asyncio.run(calls())
        return sorted(rows_of(recorder)[1])

    both = ["parent", "child"]
    assert found(both * 2) == found(both[::-1] * 2) == found(sorted(both * 2))


def test_what_comes_after_the_end_does_not_train(tmp_path):
    chat = build_chat(tmp_path, QWEN)
    engine = Scripted(chat, "a", "late", seconds={"late": 0.05})
    recorder = recorder_of(chat, engine)

    async def calls():
        messages = await talk(recorder, "Hi")
        late = asyncio.create_task(recorder.complete([*messages, user("more")]))
        await asyncio.sleep(0.01)
        recorder.close()
        with pytest.raises(EndedError):
            await late
        with pytest.raises(EndedError, match="This trajectory is over"):
            await recorder.complete([user("again")])

    asyncio.run(calls())
    _, [(ids, mask)] = rows_of(recorder)
    assert trained_texts(chat._tokenizer, ids, mask) == ["a<|im_end|>"]


def test_seeds_differ_by_what_is_continued_and_not_by_when_calls_come(tmp_path):
    chat = build_chat(tmp_path, QWEN)

    def seeds(order):
        engine = Scripted(chat, *"abcd")
        recorder = recorder_of(chat, engine)

        async def calls():
            await recorder.complete([user("Hi")])
            for text in order:
                await recorder.complete([user(text)])

        asyncio.run(calls())
        return {tuple(one.prompt_ids): one.seed for one in engine.requests}, engine

    found, engine = seeds(["x", "y"])
    assert found == seeds(["y", "x"])[0]
    assert len(set(found.values())) == 3
    assert engine.requests[0].seed == 77
    twice = seeds(["x", "x"])[1].requests
    assert twice[1].seed != twice[2].seed


def test_a_text_that_continues_a_text_keeps_its_tokens(tmp_path):
    chat = build_chat(tmp_path, QWEN, prepend_bos=True)
    [single] = chat.cuts.ids("\n")
    recorder = recorder_of(chat, Scripted(chat, [single, single], "b"))

    async def calls():
        first = await recorder.complete("once")
        await recorder.complete(str(first.said) + " more")

    asyncio.run(calls())
    _, [(ids, mask)] = rows_of(recorder)
    once, more = chat.encode_prompt("once"), chat.cuts.ids(" more")
    end = chat.eos_token_ids[0]
    assert ids == [*once, single, single, *more, *chat.cuts.ids("b"), end]
    assert sum(mask) == 4


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'

XML = """<tool_call>
<function=t>
<parameter=x>
hello
</parameter>
<parameter=a>
1
</parameter>
</function>
</tool_call>"""
GLM = (
    "<tool_call>t\n<arg_key>x</arg_key>\n<arg_value>hello</arg_value>\n"
    "<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
)
LFM = "<|tool_call_start|>[add(a=1, b='x, y'), c.d(e=[None, True])]<|tool_call_end|>"
JSON_CALL = '{"name": "add", "arguments": {"a": true}}'
PARAMETERS = {"x": {"anyOf": [{"type": "string"}, {"type": "boolean"}]}, "a": {"type": "integer"}}
LISTED = {"x": {"type": ["string", "null"]}, "a": {"type": ["string", "integer"]}}
TYPED = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}
    for name, properties in (("t", PARAMETERS), ("l", LISTED))
]


@pytest.mark.parametrize(
    ("text", "calls", "errors"),
    [
        (f"Let me see.\n{CALL}", [("add", {"a": 1})], 0),
        (f"{CALL}\n{CALL.replace('1', '2')}", [("add", {"a": 1}), ("add", {"a": 2})], 0),
        ('<tool_call>{"name": "t", "arguments": {"c": "ls"}</tool_call>', [], 1),
        (CALL.replace("1", '"x\ny"'), [("add", {"a": "x\ny"})], 0),
        (f'{CALL}<tool_call>{{"nam": 1}}</tool_call>', [("add", {"a": 1})], 1),
        (CALL.removesuffix("</tool_call>"), [("add", {"a": 1})], 0),
        ('<tool_call>{"name": "t", "arguments": "{\\"c\\": 1}"}</tool_call>', [("t", {"c": 1})], 0),
        ('<tool_call>{"name": "t", "arguments": [1]}</tool_call>', [], 1),
        (CALL.replace("1", '"\\ud83d"'), [], 1),
        (CALL.replace('"add"', '"\\ud83d"').replace('{"a": 1}', "[1]"), [], 1),
        ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]', [("add", {"a": 1})], 0),
        ('[TOOL_CALLS]b[ARGS]{"a": 1}[TOOL_CALLS]b{"c": 2}', [("b", {"a": 1}), ("b", {"c": 2})], 0),
        ("[TOOL_CALLS][{]", [], 1),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}<|eom_id|>', [("add", {"a": 1})], 0),
        ('{"name": "add", "parameters": {"a": 1}}', [("add", {"a": 1})], 0),
        ('{"name": "add", "parameters": {"a": 1}', [], 1),
        ('{"name": "f", "parameters": {"q": "a; b"}}', [("f", {"q": "a; b"})], 0),
        (f'{JSON_CALL} ; {JSON_CALL};{JSON_CALL}\n', [("add", {"a": True})] * 3, 0),
        (f"{JSON_CALL}; and", [("add", {"a": True})], 1),
        (f"{JSON_CALL} and more", [], 1),
        (f"{XML}\n{XML}", [("t", {"x": "hello", "a": 1})] * 2, 0),
        (XML.replace("hello", "True"), [("t", {"x": True, "a": 1})], 0),
        (XML.replace("\n1\n", "\none\n"), [], 1),
        (XML.replace("<parameter=a>", "a"), [], 1),
        (XML.replace("=t>", "=l>"), [("l", {"x": "hello", "a": 1})], 0),
        (XML.replace("=t>", "=l>").replace("hello", "12"), [("l", {"x": "12", "a": 1})], 0),
        (XML.replace("=t>", "=l>").replace("hello", "null"), [("l", {"x": None, "a": 1})], 0),
        (GLM, [("t", {"x": "hello", "a": 1})], 0),
        ("<tool_call>t</tool_call>", [("t", {})], 0),
        (f"So{LFM}", [("add", {"a": 1, "b": "x, y"}), ("c.d", {"e": [None, True]})], 0),
        (LFM.removesuffix("<|tool_call_end|>")[:-22] + "]", [("add", {"a": 1, "b": "x, y"})], 0),
        ("<|tool_call_start|>[add(1), b(a=c), d(a={1})]<|tool_call_end|>", [], 3),
        ("<|tool_call_start|>[add(a=1<|tool_call_end|>", [], 1),
        (f"<|tool_call_start|>[{'a.' * 400}a()]<|tool_call_end|>", [], 1),
        ('<|tool_call_start|>{"name": "add", "arguments": {"a": 1}}', [("add", {"a": 1})], 0),
        (f"<|tool_call_start|>[{JSON_CALL}, {JSON_CALL}]", [("add", {"a": True})] * 2, 0),
        ("[TOOL_CALLS][]", [], 1),
        (f"<think>{CALL}?</think>No.", [], 0),
        ("The answer is {1, 2}.", [], 0),
        ('{"answer": 3}', [], 0),
    ],
)  # fmt: skip
def test_tool_calls_are_read_or_told_as_errors(text, calls, errors):
    reply = reply_of("content", text, 0, TYPED)
    assert all(len(one["id"]) == 9 for one in reply.message.get("tool_calls", ()))
    found = [
        (one["function"]["name"], json.loads(one["function"]["arguments"]))
        for one in reply.message.get("tool_calls", ())
    ]
    assert (found, len(reply.errors)) == (calls, errors)
    "".join(reply.errors).encode()  # as text that a server takes
    assert (not found) == (reply.message["content"] == "content")
    assert reply_of("content", None, 0).message == {"role": "assistant", "content": "content"}


def test_a_conversation_with_tools_keeps_the_text_of_its_calls(tmp_path):
    chat = build_chat(tmp_path, WITH_TOOLS.replace("{{ m.content }}", CALLING))
    sampled = '<tool_call> {"name": "add",  "arguments": {"a": 1}}</tool_call>'
    recorder = recorder_of(chat, Scripted(chat, sampled, "It is 2."))

    async def calls():
        messages = [user("Hi")]
        turn = await recorder.complete(messages, TOOLS)
        told = turn.reply.message
        # As a client sends it back: other white space, content null, the arguments as an object.
        call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
        messages += [{**told, "content": "", "tool_calls": [call]}]
        messages += [{"role": "tool", "content": "2", "tool_call_id": "x"}]
        await recorder.complete(messages, TOOLS)

    asyncio.run(calls())
    _, [(ids, mask)] = rows_of(recorder)
    texts = trained_texts(chat._tokenizer, ids, mask)
    assert texts == [f"{sampled}<|im_end|>", "It is 2.<|im_end|>"]


CALLING = (
    "{{ m.content }}{% for c in m.tool_calls %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}"
)


def test_a_template_without_tools_is_refused_where_there_are_any(tmp_path):
    chat = build_chat(tmp_path, QWEN)
    with pytest.raises(UserError, match="takes no tools"):
        chat.render([user("Hi")], TOOLS)


WORDS = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=12
).filter(lambda text: text == text.strip() and "<|" not in text)


@pytest.mark.parametrize("name", ["qwen", "phi3", "marked", "tools"])
def test_the_next_turn_is_what_a_whole_render_has(tmp_path, name):
    """For answers that the tokenizer would write as they were sampled."""
    chat = build_chat(tmp_path, TEMPLATES[name])

    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4), WORDS)
    def check(turns, last):
        before = [one for q, a in turns for one in (user(q), {"role": "assistant", "content": a})]
        whole, mask = chat.render_conversation(before)
        ids = whole[: len(mask) - mask[::-1].index(True)]
        added = tokens_after(chat, ids[-1:], before, [user(last)])
        assert ids + added == chat.render([*before, user(last)])

    check()


@pytest.mark.parametrize("call", ["[add()]", "to=add", ""])
def test_a_form_of_calls_that_is_not_read_is_refused(tmp_path, call):
    """Such calls would be taken for answers."""
    calls = f"{{% for c in m.tool_calls %}}<|call|>{call}{{% endfor %}}" if call else ""
    chat = build_chat(tmp_path, WITH_TOOLS.replace("{{ m.content }}", "{{ m.content }}" + calls))
    recorder = recorder_of(chat, Scripted(chat, "x"))
    reason = "in an unsupported format" if call else "leaves out the tool calls"
    with pytest.raises(UserError, match=reason):
        asyncio.run(recorder.complete([user("Hi")], TOOLS))


def test_a_rewritten_history_is_told(tmp_path):
    chat = build_chat(tmp_path, STRIPS_THINK)
    before = [user("Hi"), {"role": "assistant", "content": "<think>a</think>b"}]
    with pytest.raises(RewrittenHistoryError, match="in another way once others follow"):
        tokens_after(chat, [3], before, [user("more")])
