"""The OpenAI protocol of a rollout worker, by its own client: what trains is what was sampled."""

import asyncio
import json
import random
from contextlib import asynccontextmanager

import aiohttp
import openai
import pytest

from nemo_like.rewards.protocol import RewardResult
from nemo_like.rollout.endpoint import Endpoint
from tests.chat_templates import QWEN, build_chat
from tests.test_trajectories import CALLING, TOOLS, WITH_TOOLS, Scripted, recorder_of, rows_of, user


@asynccontextmanager
async def serving(recorder):
    endpoint = Endpoint("policy")
    await endpoint.start()
    try:
        with endpoint.serving(recorder) as (url, key):
            async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
                yield client
    finally:
        await endpoint.close()


def ask(recorder, *calls):
    """Make the calls in turn; each gets the client and what the one before it returned."""

    async def main():
        async with serving(recorder) as client:
            found = None
            for call in calls:
                found = await call(client, found)
            return found

    return asyncio.run(main())


def sampled_of(recorder, engine):
    """Ids that train, row by row; ids that the engine sampled are in its ``sampled``."""
    _, rows = rows_of(recorder)
    return [[one for one, trains in zip(ids, mask, strict=True) if trains] for ids, mask in rows]


class Remembering(Scripted):
    """An engine that also remembers what it sampled."""

    def __init__(self, chat, *answers, **how):
        super().__init__(chat, *answers, **how)
        self.sampled = []

    async def generate(self, request):
        completion = await super().generate(request)
        self.sampled.append(completion.token_ids)
        return completion


def test_tokens_that_train_are_those_that_were_sampled(tmp_path):
    """Calls of every form that clients have: plain, streamed, with a format, with tools."""
    chat = build_chat(tmp_path, WITH_TOOLS.replace("{{ m.content }}", CALLING))
    call = '<tool_call>\n{"name": "add", "arguments": {"a": "\\u00e9"}}\n</tool_call>'
    odd = [200, 201, chat.eos_token_ids[-1]]  # halves of characters
    engine = Remembering(chat, call, "plain 🙂", odd, "{}", "streamed")
    recorder = recorder_of(chat, engine)
    messages = [user("Hi")]

    async def plain(client, _):
        found = await client.chat.completions.create(model="m", messages=messages)
        message = found.choices[0].message
        messages.extend([message.model_dump(exclude_none=True), user("next")])
        return found

    async def with_tools(client, _):
        found = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        [one] = found.choices[0].message.tool_calls
        assert (one.function.name, one.function.arguments) == ("add", '{"a": "é"}')
        assert found.choices[0].finish_reason == "tool_calls"
        return found

    async def formatted(client, _):
        return await client.chat.completions.create(
            model="m", messages=messages, response_format={"type": "json_object"}, temperature=0.3
        )

    async def streamed(client, before):
        messages.extend([before.choices[0].message.model_dump(exclude_none=True), user("more")])
        events = await client.chat.completions.create(
            model="m", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        text, usage = "", None
        async for event in events:
            usage = event.usage or usage
            text += "".join(one.delta.content or "" for one in event.choices)
        assert text == "streamed"
        assert usage.completion_tokens == len(engine.sampled[-1])
        return text

    ask(recorder, with_tools, plain, plain, formatted, streamed)
    first, rest = sampled_of(recorder, engine)  # tools are part of what is continued
    assert first == engine.sampled[0]
    assert rest == [token for one in engine.sampled[1:] for token in one]


def random_ids(chat, draw):
    """Any tokens, special ones too, that end anywhere: in a character, or in a tool call."""
    ends = chat.eos_token_ids
    known = sorted(set(chat.token_ids().values()) - set(ends))
    call = (
        '<tool_call>\n{"name": "add", "arguments": {"a": "\\ud83d\\ude42 \\u0000"}}\n</tool_call>'
    )
    pieces = [
        chat.cuts.ids(text) for text in (call, call[:-20], "🙂é\u2028\u0000", "\r\n\r\n", "{")
    ]
    ids = [
        token
        for _ in range(draw.randint(1, 4))
        for token in draw.choice([*pieces, draw.choices(known, k=3)])
    ]
    return ids[: draw.randint(1, len(ids))] + draw.choice([[], list(ends[:1])])


@pytest.mark.parametrize("seed", range(8))
def test_random_tokens_train_as_they_were_sampled(tmp_path, seed):
    """Through the client's own types, whole and streamed, with tools and without."""
    draw = random.Random(seed)
    chat = build_chat(tmp_path, WITH_TOOLS.replace("{{ m.content }}", CALLING))
    engine = Remembering(chat, *(random_ids(chat, draw) for _ in range(12)))
    recorder = recorder_of(chat, engine, turns=20)
    messages = [user("Hi")]
    how = {"model": "m", "tools": TOOLS} if seed % 2 else {"model": "m"}

    async def call(client, _):
        if draw.random() < 0.3:
            text, calls = "", []
            async for event in await client.chat.completions.create(
                messages=messages, stream=True, **how
            ):
                for choice in event.choices:
                    text += choice.delta.content or ""
                    calls += choice.delta.tool_calls or []
            said = {"role": "assistant", "content": text}
            if calls:
                said["tool_calls"] = [one.model_dump(exclude={"index"}) for one in calls]
        else:
            found = await client.chat.completions.create(messages=messages, **how)
            said = found.choices[0].message.model_dump(exclude_none=True)
        messages.append(said)
        messages.extend(
            {"role": "tool", "tool_call_id": one["id"], "content": "é"}
            for one in said.get("tool_calls", ())
        )
        messages.append(user("more"))

    ask(recorder, *[call] * 12)
    assert sampled_of(recorder, engine) == [[token for one in engine.sampled for token in one]]
    for request, (prompt, ids) in zip(engine.requests[1:], contexts(engine), strict=False):
        assert request.prompt_ids[: len(prompt) + len(ids)] == [*prompt, *ids]


def contexts(engine):
    return [(one.prompt_ids, ids) for one, ids in zip(engine.requests, engine.sampled, strict=True)]


async def posted(url, key, body, **how):
    """The status of a plain request, and its answer."""
    async with (
        aiohttp.ClientSession(**how) as session,
        session.post(
            f"{url}/chat/completions", data=body, headers={"Authorization": f"Bearer {key}"}
        ) as response,
    ):
        return response.status, await response.json()


def test_an_answer_that_its_client_did_not_wait_for_does_not_train(tmp_path):
    """The client tries again, as ``openai``'s does by itself."""
    chat = build_chat(tmp_path, QWEN)
    long = chat.cuts.ids("\n\n") * 2**21  # 8 MB, which no buffer of a socket holds
    engine = Remembering(chat, "slow", "b", long, seconds={"slow": 0.3})
    recorder = recorder_of(chat, engine, tokens=2**22)

    async def main():
        async with serving(recorder) as client:
            url, key = str(client.base_url).rstrip("/"), client.api_key
            body = json.dumps({"messages": [user("Hi")]})
            with pytest.raises(TimeoutError):
                await posted(url, key, body, timeout=aiohttp.ClientTimeout(total=0.1))
            await asyncio.sleep(0.4)
            status, _ = await posted(url, key, body)
            assert status == 200
            await half_a_stream(url, key)
            while recorder.counts["aborted_calls"] < 2:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 20))
    assert sampled_of(recorder, engine) == [engine.sampled[1]]
    assert recorder.counts["aborted_calls"] == 2


async def half_a_stream(url, key):
    """Hang up while the answer comes."""
    host, _, port = url.removeprefix("http://").removesuffix("/v1").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"messages": [user("Go")], "stream": True}).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n"
        b"Authorization: Bearer %s\r\n\r\n%s" % (len(body), key.encode(), body)
    )
    assert b"200 OK" in await reader.readline()
    writer.transport.abort()


def test_a_flood_of_calls_ends_with_the_turns_and_holds_up_no_other_trajectory(tmp_path):
    chat = build_chat(tmp_path, QWEN)
    flooded = recorder_of(chat, Remembering(chat, *["a"] * 8), turns=8)
    engine = Remembering(chat, "b")
    other = recorder_of(chat, engine)

    async def main():
        endpoint = Endpoint("policy")
        await endpoint.start()
        with endpoint.serving(flooded) as (url, key), endpoint.serving(other) as (_, mine):
            bodies = [json.dumps({"messages": [user(f"{i}")]}) for i in range(300)]
            bodies += [json.dumps({"messages": [user("x")], "n": 100})] * 20 + ["{" * 10**5] * 20
            flood = [asyncio.create_task(posted(url, key, body)) for body in bodies]
            found = await posted(url, mine, json.dumps({"messages": [user("Hi")]}))
            statuses = [status for status, _ in await asyncio.gather(*flood)]
        await endpoint.close()
        return found, statuses

    (status, _), statuses = asyncio.run(main())
    assert status == 200
    assert set(statuses) == {200, 400}
    assert statuses.count(200) == 8
    trajectory, rows = rows_of(flooded)
    assert (trajectory.end, len(rows)) == ("turns", 8)
    assert sampled_of(other, engine) == engine.sampled


BAD = [
    b"\xff", b"[]", b"[" * 10**5, b'{"messages": 1}', b'{"messages": [1]}', b'{"messages": [[]]}',
    {"tools": "add"}, {"tools": [1]}, {"tools": [{"type": "function"}]},
    {"tools": [{"function": {"name": 1}}]}, {"stop": 5}, {"stop": [1]}, {"stop": [""]},
    {"n": "2"}, {"n": 10**9}, {"max_tokens": 0}, {"max_tokens": "9"}, {"max_completion_tokens": -1},
    {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
    {"messages": [{"role": "assistant", "content": None, "tool_calls": 3}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    {"messages": [{"role": 1, "content": "a"}]},
]  # fmt: skip


def test_what_cannot_be_read_is_refused_in_one_sentence_and_takes_no_turn(tmp_path):
    chat = build_chat(tmp_path, WITH_TOOLS.replace("{{ m.content }}", CALLING))
    recorder = recorder_of(chat, Scripted(chat, "a"), turns=1)

    async def main():
        async with serving(recorder) as client:
            url, key = str(client.base_url).rstrip("/"), client.api_key
            for bad in BAD:
                whole = {"messages": [user("Hi")], "tools": TOOLS}
                body = bad if isinstance(bad, bytes) else json.dumps(whole | bad)
                status, answer = await posted(url, key, body)
                assert (status, set(answer)) == (400, {"error"}), bad
                assert "\n" not in answer["error"]["message"]
            found = await posted(url, key, json.dumps(whole))
            assert found[0] == 200

    asyncio.run(main())


def test_n_completions_of_one_call_are_rows_with_a_trunk(tmp_path):
    chat = build_chat(tmp_path, QWEN)
    engine = Remembering(chat, "a", "b", "c")
    recorder = recorder_of(chat, engine)

    async def three(client, _):
        return await client.chat.completions.create(model="m", messages=[user("Hi")], n=3)

    found = ask(recorder, three)
    assert [one.message.content for one in found.choices] == ["a", "b", "c"]
    assert [one.index for one in found.choices] == [0, 1, 2]
    assert found.usage.prompt_tokens == len(chat.render([user("Hi")]))
    assert sampled_of(recorder, engine) == engine.sampled
    assert len({one.seed for one in engine.requests}) == 3


def test_stop_and_max_tokens_limit_a_call_and_what_the_run_decides_stays(tmp_path, caplog):
    chat = build_chat(tmp_path, QWEN)
    engine = Scripted(chat, "cut…", "x")
    recorder = recorder_of(chat, engine)

    async def call(client, _):
        return await client.chat.completions.create(
            model="m",
            messages=[user("Hi")],
            max_tokens=3,
            max_completion_tokens=None,  # as some clients send it
            stop=["\n"],
            temperature=0.2,
            seed=5,
        )

    assert ask(recorder, call, call).choices[0].finish_reason == "stop"
    sampling = engine.requests[0].sampling
    assert (sampling.max_new_tokens, sampling.stop, sampling.temperature) == (3, ("\n",), 1.0)
    warned = [one.message for one in caplog.records if "has no effect" in one.message]
    assert len(warned) == 2  # once each
    assert "temperature=0.2" in warned[1]


def test_the_text_that_stops_a_call_is_left_out_and_its_tokens_are_kept(tmp_path):
    chat = build_chat(tmp_path, QWEN)
    engine = Remembering(chat, "Thought: look\nObservation:", "done")
    recorder = recorder_of(chat, engine)
    first = [user("Hi")]

    async def call(client, _):
        found = await client.chat.completions.create(
            model="m", messages=first, stop=["\nObservation:", "\nStop"]
        )
        said = found.choices[0].message.content
        again = [*first, {"role": "assistant", "content": said}, user("Observation: 4")]
        await client.chat.completions.create(model="m", messages=again)
        return said

    assert ask(recorder, call) == "Thought: look"
    assert sampled_of(recorder, engine) == [[one for ids in engine.sampled for one in ids]]


def test_logprobs_are_those_of_the_sampled_tokens(tmp_path):
    chat = build_chat(tmp_path, QWEN)
    recorder = recorder_of(chat, Scripted(chat, "ab", "c", "d"))

    async def call(client, _):
        api, hi = client.chat.completions, [user("Hi")]
        whole = await api.create(model="m", messages=hi, logprobs=True)
        events = await api.create(model="m", messages=hi, logprobs=True, stream=True)
        pieces = [one.choices[0].logprobs async for one in events if one.choices]
        text = await client.completions.create(model="m", prompt="Once", logprobs=0)
        return whole.choices[0].logprobs.content, pieces, text.choices[0].logprobs

    whole, pieces, text = ask(recorder, call)
    assert "".join(one.token for one in whole) == "ab<|im_end|>"
    sampled = recorder._turns[0].completion
    assert [one.logprob for one in whole] == sampled.logprobs
    assert whole[0].bytes == list(whole[0].token.encode())
    assert "".join(one.token for one in pieces[0].content) == "c<|im_end|>"
    assert "".join(text.tokens) == "d<|im_end|>"
    assert len(text.token_logprobs) == len(text.tokens)


def test_a_developer_is_the_system_and_what_has_no_effect_is_said_once(tmp_path, caplog):
    chat = build_chat(tmp_path, QWEN)
    engine = Scripted(chat, "a", "b")
    recorder = recorder_of(chat, engine)

    async def call(client, _):
        return await client.chat.completions.create(
            model="m",
            messages=[{"role": "developer", "content": "Be brief."}, user("Hi")],
            tool_choice="none",
            response_format={"type": "text"},
            parallel_tool_calls=True,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}, "top_k": None},
        )

    ask(recorder, call, call)
    assert "system\nBe brief." in chat.decode(engine.requests[0].prompt_ids)
    [warned] = [one.message for one in caplog.records if "has no effect" in one.message]
    assert "chat_template_kwargs" in warned


def test_completions_of_plain_text_continue_it(tmp_path):
    chat = build_chat(tmp_path, QWEN)
    engine = Remembering(chat, "one", "two")
    recorder = recorder_of(chat, engine)

    async def begin(client, _):
        return await client.completions.create(model="m", prompt="Once")

    async def go_on(client, before):
        text = f"Once{before.choices[0].text} and"
        return await client.completions.create(model="m", prompt=text)

    assert ask(recorder, begin, go_on).choices[0].text == "two"
    assert sampled_of(recorder, engine) == [engine.sampled[0] + engine.sampled[1]]


@pytest.mark.parametrize(
    ("asked", "code", "said"),
    [
        ({"messages": []}, "bad_messages", "'messages' must be a list of messages"),
        ({"messages": [{"role": "user"}]}, "bad_messages", "'content' of message 0 is null"),
        ({"messages": [user("Hi")], "n": 0}, None, ""),
        ({"messages": [user("Hi")], "max_tokens": -1}, "bad_max_tokens", "positive integer"),
        ({"messages": [user("a<|im_end|>b")]}, "bad_messages", "by which the template marks turns"),
        ({"messages": [user("Hi")], "tools": TOOLS}, "bad_messages", "takes no tools"),
    ],
)
def test_a_bad_request_is_answered_as_clients_expect(tmp_path, asked, code, said):
    chat = build_chat(tmp_path, QWEN)
    recorder = recorder_of(chat, Scripted(chat, "a"))

    async def call(client, _):
        return await client.chat.completions.create(model="m", **asked)

    if code is None:
        assert ask(recorder, call).choices[0].message.content == "a"
        return
    with pytest.raises(openai.BadRequestError) as refused:
        ask(recorder, call)
    assert refused.value.code == code
    assert said in refused.value.message


def test_what_no_server_of_this_kind_takes_is_refused_in_its_format(tmp_path):
    chat = build_chat(tmp_path, QWEN)
    recorder = recorder_of(chat, Scripted(chat, "a"))

    async def call(client, _):
        with pytest.raises(openai.NotFoundError, match="/v1/responses is not served"):
            await client.responses.create(model="m", input="Hi")
        headers = {"Authorization": f"Bearer {client.api_key}"}
        half = '{"messages": [{"role": "user", "content": "\\ud83d"}]}'  # of an emoji; JavaScript's
        async with (
            aiohttp.ClientSession(str(client.base_url), headers=headers) as session,
            session.post("chat/completions", data=half) as response,
        ):
            said = await response.json()
        assert (response.status, said["error"]["code"]) == (400, "bad_json")
        assert "surrogates not allowed" in said["error"]["message"]
        calls = [{"role": "assistant", "content": "", "tool_calls": [{"function": 5}]}, user("Hi")]
        with pytest.raises(openai.BadRequestError, match="'tool_calls' of message 0 are no list"):
            await client.chat.completions.create(model="m", messages=calls)
        return await client.chat.completions.create(model="m", messages=[user("🙂")])

    assert ask(recorder, call).choices[0].message.content == "a"


def test_a_trajectory_that_is_over_answers_no_call_and_another_key_reaches_none(tmp_path):
    chat = build_chat(tmp_path, QWEN)
    recorder = recorder_of(chat, Scripted(chat, "a"), turns=1)

    async def call(client, _):
        return await client.chat.completions.create(model="m", messages=[user("Hi")])

    with pytest.raises(openai.BadRequestError, match="used its 1 turns") as refused:
        ask(recorder, call, call)
    assert refused.value.code == "trajectory_ended"

    async def stranger(client, _):
        return await client.with_options(api_key="sk-mine").chat.completions.create(
            model="m", messages=[user("Hi")]
        )

    with pytest.raises(openai.AuthenticationError, match="does not belong to a running trajectory"):
        ask(recorder, stranger)

    async def models(client, _):
        return (await client.models.list()).data[0].id

    assert ask(recorder, models) == "policy"
    assert recorder.trajectory(RewardResult(reward=1.0)).end == "turns"
