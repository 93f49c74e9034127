"""A judge behind a real server that speaks the OpenAI protocol, also when it is slow or down."""

import asyncio
import contextlib
import json
import re
import socket
import threading
import time
from collections import Counter

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from nemo_like.compose.load import check
from nemo_like.config.environment import EnvironmentConfig, JudgeConfig, RewardPart
from nemo_like.errors import UserError
from nemo_like.rewards.start import start_pool, with_absolute_paths
from tests.small_runs import small_config


class Server:
    """Says what the question tells it to: ``SAY a, then b``, where a number of three digits is a
    status; the last one is repeated."""

    def __init__(self):
        self.asked = Counter()
        self.times, self.bodies, self.keys = [], [], []
        self.open = self.most_open = 0

    async def answer(self, request):
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            return await self._answer(await request.json(), request.headers)
        finally:
            self.open -= 1

    async def _until_open(self, count, limit_s=20.0):
        """Until there have been so many at a time, and then for as long as one more would take."""
        end = time.monotonic() + limit_s
        while self.most_open < count and time.monotonic() < end:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)

    async def _answer(self, body, headers):
        self.times.append(time.monotonic())
        self.bodies.append(body)
        self.keys.append(headers.get("authorization"))
        script = re.search(r"SAY (.*) END", body["messages"][-1]["content"])[1].split(", then ")
        said = script[min(self.asked[script[0]], len(script) - 1)]
        self.asked[script[0]] += 1
        if said.startswith("wait "):
            await asyncio.sleep(float(said[5:]))
            said = "Score: 5"
        if said.startswith("among "):
            await self._until_open(int(said.split()[1]))
            said = "Score: 5"
        if said == "429":
            return JSONResponse({"error": "busy"}, 429, {"Retry-After": "1"})
        if re.fullmatch(r"\d{3}", said):
            return PlainTextResponse("no luck", int(said))
        if said == "no choices":
            return JSONResponse({"score": 1})
        return JSONResponse({"choices": [{"message": {"role": "assistant", "content": said}}]})


@contextlib.contextmanager
def serving():
    """The server and its address."""
    server = Server()
    app = Starlette(routes=[Route("/v1/chat/completions", server.answer, methods=["POST"])])
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off")
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        time.sleep(0.01)
    port = running.servers[0].sockets[0].getsockname()[1]
    yield server, f"http://127.0.0.1:{port}/v1"
    running.should_exit = running.force_exit = True
    thread.join()


@pytest.fixture
def server():
    with serving() as found:
        yield found


def environment(url, timeout_s=6.0, num_processes=1, rows_at_once=None, **judge):
    return EnvironmentConfig(
        reward="judge",
        timeout_s=timeout_s,
        num_processes=num_processes,
        rows_at_once=rows_at_once,
        judge=JudgeConfig(url=url, model="judge-1", **judge),
    )


def judged(config, *scripts, num_engines=1, **fields):
    """Results of completions that say what the judge is to answer."""
    pool = start_pool(config, num_engines=num_engines)

    async def all_of_them():
        rows = (pool.score("q", f"SAY {one} END", {"messages": [], **fields}) for one in scripts)
        return await asyncio.gather(*rows)

    try:
        return asyncio.run(all_of_them())
    finally:
        pool.shutdown()


def test_a_verdict_is_the_last_score_in_the_judges_words(server):
    _, url = server
    scripts = ["Score: 7", "The answer claims 'score: 10', but no. **Score: 2.5**", "Score: 0"]
    found = judged(environment(url), *scripts)
    assert [one.reward for one in found] == [0.7, 0.25, 0.0]
    assert [one.metrics["judge_requests"] for one in found] == [1, 1, 1]
    words = environment(url, pattern=r"\b([ABC])\b", verdicts={"A": 1.0, "B": 0.0})
    found = judged(words, "It is A", "not A but B", "C", "?")
    assert [one.reward for one in found] == [1.0, 0.0, None, None]


def test_what_is_no_verdict_is_a_failure_and_not_a_reward_of_0(server):
    _, url = server
    config = environment(url, pattern=r"Score: (\S+)")
    found = judged(config, "fine", "Score: 11", "Score: nan", "Score: x", "no choices")
    assert [one.reward for one in found] == [None] * 5
    assert "gave no verdict\n'fine'" in str(found[0].error)
    assert "gave no verdict\n''" in str(found[4].error)


def test_a_failure_of_the_server_is_tried_again_and_a_refusal_is_not(server):
    found_by, url = server
    scripts = ["500, then Score: 10", "429, then Score: 5", "400, then Score: 1", "503"]
    found = judged(environment(url, timeout_s=9.0), *scripts)
    assert [one.reward for one in found] == [1.0, 0.5, None, None]
    assert [one.metrics["judge_requests"] for one in found[:2]] == [2, 2]
    assert "gave no verdict in 1 tries: 400\nno luck" in str(found[2].error)
    assert "in 3 tries: 503\nno luck" in str(found[3].error)
    asked = [one["messages"][-1]["content"] for one in found_by.bodies]
    times = [at for at, text in zip(found_by.times, asked, strict=True) if "429" in text]
    assert times[1] - times[0] >= 1  # as the server asked for
    assert found_by.asked == {"500": 2, "429": 2, "400": 1, "503": 3}


def test_processes_share_the_requests_that_may_be_under_way(server):
    found_by, url = server
    config = environment(url, rows_at_once=2, num_processes=2, timeout_s=30.0)
    scripts = [f"among 8 {n:02}" for n in range(64)]
    pools = []

    def one_engine(half):
        pools.append(judged(config, *half, num_engines=2))

    threads = [threading.Thread(target=one_engine, args=[scripts[n::2]]) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.reward for pool in pools for one in pool] == [0.5] * 64
    assert found_by.most_open == 8
    with pytest.raises(UserError, match="less than the 34 reward processes"):
        judged(environment(url, num_processes=2), num_engines=17)


def test_a_judge_that_hangs_or_is_down_costs_its_rows_in_time(server):
    asked, url = server
    begin = time.monotonic()
    [slow, quick] = judged(environment(url, timeout_s=1.5), "wait 30", "Score: 1")
    assert (slow.reward, quick.reward) == (None, 0.1)
    assert time.monotonic() - begin < 20
    assert asked.asked["wait 30"] == 1  # it had all of the time
    [enough] = judged(environment(url, timeout_s=4.0), "wait 2")
    assert enough.reward == 0.5
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{nobody.getsockname()[1]}/v1"
        [down] = judged(environment(address), "Score: 1")
    assert down.reward is None
    assert f"the judge judge-1 at {address} gave no verdict in 3 tries" in str(down.error)


def test_a_template_has_the_row_and_only_the_named_key_is_sent(server, monkeypatch, tmp_path):
    found_by, url = server
    monkeypatch.setenv("OPENAI_API_KEY", "secret-a")
    monkeypatch.setenv("JUDGE_API_KEY", "secret-b")
    path = tmp_path / "template.j2"
    path.write_text("{{ answer }} or {{ completion }}?{% for m in messages %}{{ m }}{% endfor %}")
    monkeypatch.chdir(tmp_path)
    config = environment(url, template=path.name, parameters={"temperature": 0})
    config = with_absolute_paths(config)
    monkeypatch.chdir("/")
    [found] = judged(config, "Score: 1", answer="42")
    assert found.reward == 0.1
    assert found_by.bodies[0] == {
        "model": "judge-1",
        "messages": [{"role": "user", "content": "42 or SAY Score: 1 END?"}],
        "temperature": 0,
    }
    judged(environment(url).replace(pass_variables=["JUDGE_API_KEY"]), "Score: 1")
    assert found_by.keys == [None, "Bearer secret-b"]
    [lacks] = judged(config, "Score: 1")
    assert "the row lacks answer, which judge needs" in str(lacks.error)
    monkeypatch.delenv("JUDGE_API_KEY")
    with pytest.raises(UserError, match="JUDGE_API_KEY is not set where the engines run"):
        judged(environment(url).replace(pass_variables=["JUDGE_API_KEY"]))
    assert "secret" not in json.dumps(config.model_dump())


def test_a_judge_scores_among_others_by_weight(server, tmp_path):
    _, url = server
    (tmp_path / "own.py").write_text("def brief(prompt, completion): return -len(completion)")
    parts = {
        "style": RewardPart(function="judge", weight=2),
        "brief": RewardPart(function=f"{tmp_path}/own.py:brief", weight=0.1),
    }
    config = environment(url).replace(rewards=parts)
    [found, failed] = judged(config, "Score: 5", "nothing")
    assert found.reward == pytest.approx(2 * 0.5 - 0.1 * len("SAY Score: 5 END"))
    assert found.metrics["reward_style"] == 0.5
    assert failed.reward is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("{url: 'http://x/v1'}", "judge.model is not set; a judge needs url and model"),
        ("{url: localhost, model: a}", "must begin with http:// or https://"),
        ("{url: 'http://x', model: a, pattern: yes}", r"pattern=yes has no group"),
        ("{url: 'http://x', model: a, pattern: '('}", "is no regular expression"),
        ("{url: 'http://x', model: a, template: none.j2}", "neither a file nor a template"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_refused(keys, message):
    with pytest.raises(UserError, match=message):
        check(small_config("never", "environment.reward=judge", f"environment.judge={keys}"))


def test_keys_of_the_judge_are_refused_without_one():
    with pytest.raises(UserError, match=r"judge\.url=a would have no effect"):
        check(small_config("never", "environment.judge.url=a"))
