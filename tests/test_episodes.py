"""Conversations in reward processes, over the endpoint of a worker, with scripted answers."""

import asyncio
import json
import re
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from nemo_like.config.environment import EnvironmentConfig
from nemo_like.data.datasets import Row
from nemo_like.environments.guess import Guess
from nemo_like.environments.protocol import ENDPOINT, Action, ToolCall
from nemo_like.environments.search import Index, Search
from nemo_like.environments.tools import Tools, calculate, python, shortened
from nemo_like.errors import UserError
from nemo_like.generation.protocol import Completion, FinishReason, SamplingParams
from nemo_like.rewards.start import start_pool
from nemo_like.rollout.endpoint import Endpoint
from nemo_like.rollout.recorder import Limits, Recorder
from nemo_like.rollout.trajectory import RolloutTask
from tests.chat_templates import MARKED, build_chat
from tests.small_runs import ROOT, run, small_config
from tests.test_trajectories import CALLING, WITH_TOOLS

OURS = '''
import asyncio, os, time
from nemo_like.environments.protocol import Observation, StepResult

class Acts:
    """Each answer says what to do."""
    def __init__(self, bonus=0.0):
        self.bonus = bonus
    def reset(self, row):
        self.n = 0
        return Observation()
    def step(self, action):
        self.n += 1
        if action.text == "raise": raise KeyError("no such thing")
        if action.text == "hang": time.sleep(30)
        if action.text == "die": os._exit(3)
        if action.text == "nothing": return StepResult()
        if action.text.startswith("done"):
            return StepResult(reward=float(action.text[4:] or 0) + self.bonus, done=True)
        return StepResult(messages=[{"role": "user", "content": "go on"}], reward=0.25,
                          metrics={"steps": 1})

class Returns(Acts):
    """Each answer says what to return."""
    def step(self, action):
        results = {"none": None, "dict": {"reward": 1.0}, "text": StepResult(reward="1", done=True),
                   "huge": StepResult(reward=10**400, done=True)}
        return next(iter(())) if action.text == "next" else results[action.text]

class Waits(Acts):
    async def reset(self, row):
        self.n = 0
        return Observation()
    async def step(self, action):
        await asyncio.sleep(float(action.text))
        return StepResult(reward=1.0, done=True)

class Half:
    def reset(self, row): ...

async def raises(row, base_url, api_key):
    raise ValueError(row["prompt"])

async def silent(row, base_url, api_key):
    return 1.0
'''


class ByPrompt:
    """An engine whose answers are the lines of a prompt's row, one a turn."""

    def __init__(self, chat):
        self.chat, self.open, self.most_open = chat, 0, 0

    async def generate(self, request):
        text = self.chat.decode(request.prompt_ids)
        script = text.split("SCRIPT ")[1].split(" END")[0].split("|")
        answer = script[text.count("assistant\n") - 1]
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        await asyncio.sleep(1.0 if answer == "slow" else 0)
        self.open -= 1
        ids = [*self.chat.cuts.ids(answer), self.chat.eos_token_ids[-1]]
        return Completion(
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            finish_reason=FinishReason.stop,
            weight_version=1,
        )


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    template = WITH_TOOLS.replace("{{ m.content }}", CALLING)
    return build_chat(tmp_path_factory.mktemp("chat"), template)


@pytest.fixture
def ours(tmp_path):
    path = tmp_path / "ours.py"
    path.write_text(textwrap.dedent(OURS))
    return path


def conversations(chat, scripts, turns=8, tokens=10_000, linger_s=0.0, **environment):
    """Trajectories of scripts, ``answer|answer``, all at once."""
    config = EnvironmentConfig(**{"timeout_s": 1.0, "trajectory_timeout_s": 20.0} | environment)
    pool = start_pool(config.replace(max_turns=turns))

    async def one(endpoint, engine, index, script):
        messages = ({"role": "user", "content": f"SCRIPT {script} END"},)
        row = Row(
            index=0, messages=messages, fields={"answer": "4"},
            prompt_ids=tuple(chat.render(messages)),
        )  # fmt: skip
        recorder = Recorder(
            RolloutTask(row=row, group=0, index=index, seed=index, request_id=str(index)),
            engine.generate,
            chat,
            SamplingParams(max_new_tokens=100),
            Limits(tokens=tokens, turns=turns),
        )
        with endpoint.serving(recorder) as address:
            fields = row.fields | {"messages": list(messages), ENDPOINT: list(address)}
            result = await pool.score(row.prompt, "", fields)
        return recorder.trajectory(result)

    async def main():
        endpoint, engine = Endpoint("policy"), ByPrompt(chat)
        await endpoint.start()
        try:
            return await asyncio.gather(
                *(one(endpoint, engine, i, script) for i, script in enumerate(scripts))
            )
        finally:
            await asyncio.sleep(linger_s)
            await endpoint.close()

    try:
        return asyncio.run(main())
    finally:
        pool.shutdown()


def test_step_rewards_add_up_and_failures_cost_their_own_trajectory(chat, ours):
    scripts = ["done1", "more|more|done2", "raise", "nothing", "hang", "done"]
    found = conversations(chat, scripts, name=f"{ours}:Acts", options={"bonus": 0.5})
    rewards = [one.result.reward for one in found]
    assert rewards == [1.5, 3.0, None, None, None, 0.5]
    errors = [one.result.error or "" for one in found]
    assert "KeyError: 'no such thing' (" in errors[2]
    assert "step() gave neither messages nor done=True" in errors[3]
    assert "step() took longer than 1 s" in errors[4]
    assert found[1].result.metrics["environment/steps"] == 2
    assert [one.step_rewards for one in found[:2]] == [[1.5], [0.25, 0.25, 2.5]]
    assert [one.end for one in found] == ["final", "final", "failed", "failed", "failed", "final"]
    assert [one.counts["turns"] for one in found] == [1, 3, 1, 1, 1, 1]


def test_what_a_step_cannot_return_is_named_in_one_sentence(chat, ours):
    scripts = ["none", "dict", "text", "huge", "next"]
    found = conversations(chat, scripts, name=f"{ours}:Returns")
    assert [one.result.reward for one in found] == [None] * 5
    none, dictionary, text, huge, stop = (one.result.error or "" for one in found)
    assert "step() returned NoneType and must return StepResult" in none
    assert "step() returned dict and must return StepResult" in dictionary
    assert "is a str, not a number" in text
    assert "not one number" in huge
    assert "RuntimeError: StopIteration" in stop


def test_steps_that_never_return_take_no_threads_from_others(chat, ours):
    scripts = ["hang"] * 6 + ["done1"] * 4
    found = conversations(chat, scripts, name=f"{ours}:Acts", rows_at_once=3, timeout_s=0.5)
    assert [one.result.reward for one in found] == [None] * 6 + [1.0] * 4


def test_an_environment_that_ends_its_process_costs_what_the_process_holds(chat, ours):
    found = conversations(chat, ["die"], name=f"{ours}:Acts")
    assert found[0].result.reward is None
    assert "exit code 3" in str(found[0].result.error)


def test_the_number_of_turns_and_the_room_end_a_conversation_with_its_reward(chat, ours):
    [found] = conversations(chat, ["more|more|done1"], turns=2, name=f"{ours}:Acts")
    assert (found.result.reward, found.counts["turns"], found.end) == (0.5, 2, "turns")
    [found] = conversations(chat, ["more|more|done1"], tokens=80, name=f"{ours}:Acts")
    assert (found.result.reward, found.end) == (0.25, "context")


def test_many_conversations_wait_at_once_and_slow_ones_hold_up_none(chat, ours):
    """2,000 s of waiting; one process, one event loop."""
    scripts = [f"{(i * 37 % 100) / 50:.2f}" for i in range(500)]
    begin = time.monotonic()
    found = conversations(chat, scripts, name=f"{ours}:Waits", timeout_s=20.0)
    assert [one.result.reward for one in found] == [1.0] * 500
    assert time.monotonic() - begin < 60  # 2 s, the start of a process, and 500 requests


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Half", {}, "has no step()"),
        ("Acts", {"bones": 1}, r"does not take environment.options=.*bones"),
        ("Absent", {}, "has no 'Absent'"),
    ],
)
def test_an_environment_that_cannot_be_used_is_refused_at_the_start(
    chat, ours, name, options, message
):
    with pytest.raises(UserError, match=message):
        conversations(chat, [], name=f"{ours}:{name}", options=options)


def test_a_harness_that_fails_or_calls_no_model_trains_on_nothing(chat, ours):
    [found] = conversations(chat, ["x"], name=f"{ours}:raises")
    assert "ValueError: SCRIPT x END" in str(found.result.error)
    [found] = conversations(chat, ["x"], name=f"{ours}:silent")
    assert found.result.reward is None
    assert "the model was never called" in str(found.result.error)


PROGRAM = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"messages": row["messages"]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
text = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print("working")
if text == "fail": sys.exit("no luck")
print(json.dumps({"reward": float(text), "length": len(text)}))
"""


def test_a_program_is_a_harness_by_two_variables(chat, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    options = {"command": [sys.executable, str(path)]}
    found = conversations(chat, ["0.5", "fail", "2"], name="program", options=options)
    assert [one.result.reward for one in found] == [0.5, None, 2.0]
    assert found[0].result.metrics == {"length": 3}
    assert "exit code 1: no luck" in str(found[1].result.error)


def test_the_program_of_the_first_page_on_agents_is_a_harness(chat, tmp_path):
    page = (ROOT / "docs" / "start" / "agent.md").read_text()
    (text,) = re.findall(r'^```python title="agent.py"\n(.*?)^```', page, re.DOTALL | re.MULTILINE)
    path = tmp_path / "agent.py"
    path.write_text(text)
    options = {"command": [sys.executable, str(path)]}
    right, wrong = "<answer>4</answer>", "<answer>5</answer>"
    found = conversations(chat, [right, wrong], name="program", options=options)
    assert [one.result.reward for one in found] == [1.0, 0.0]


ROGUES = """
import asyncio, json, os, signal, sys, threading, time, urllib.request
row = json.load(sys.stdin)
key = os.environ["OPENAI_API_KEY"]
def ask(text, key=key):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"messages": [{"role": "user", "content": text}]}).encode(),
        {"Authorization": "Bearer " + key},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
kind = ask(row["prompt"])
if kind == "dies": os.kill(os.getpid(), signal.SIGKILL)
if kind == "dies amid a call":
    threading.Thread(target=ask, args=("SCRIPT slow END",), daemon=True).start()
    time.sleep(0.2)
    os._exit(7)
if kind == "hangs": time.sleep(100)
harness = os.getpid()
if kind == "leaves" and os.fork() == 0:  # and holds its standard output
    while os.getppid() == harness: time.sleep(0.05)
    time.sleep(2)
    ask("SCRIPT late END")
    os._exit(0)
if kind == "strange":
    try: ask("SCRIPT x END", key[:-1] + ("0" if key[-1] != "0" else "1"))
    except urllib.error.HTTPError as error: assert error.code == 401
if kind == "floods":
    for i in range(100):
        try: ask(f"SCRIPT {i} END")
        except urllib.error.HTTPError as error: assert error.code == 400
print(1.0)
"""


def test_a_harness_that_misbehaves_costs_its_own_trajectory(chat, tmp_path):
    """Processes of two pools at once; each has what it sampled itself and nothing else."""
    path = tmp_path / "rogues.py"
    path.write_text(ROGUES)
    kinds = ["dies", "dies amid a call", "hangs", "leaves", "strange", "floods", "good", "fine"]
    found = conversations(
        chat, kinds, name="program", options={"command": [sys.executable, str(path)]},
        trajectory_timeout_s=9.0, num_processes=2,
    )  # fmt: skip
    rewards = [one.result.reward for one in found]
    assert rewards == [None, None, None, 1.0, 1.0, 1.0, 1.0, 1.0]
    errors = [one.result.error or "" for one in found[:3]]
    assert "exit code -9" in errors[0]
    assert "exit code 7" in errors[1]
    assert "took longer than 9 s" in errors[2]
    said = [[chat.decode(c.token_ids) for c in one.completions] for one in found]
    assert said[:5] == [[kind] for kind in kinds[:5]]
    assert said[5] == ["floods", *map(str, range(7))]
    assert (found[5].end, found[5].counts["turns"]) == ("turns", 8)
    assert said[6:] == [["good"], ["fine"]]
    for one in found:
        trained = [
            list(segment.token_ids)
            for row in one.rows
            for segment in row
            if segment.logprobs is not None
        ]
        assert sorted(trained) == sorted(c.token_ids for c in one.completions)
    left = [p for p in psutil.process_iter(["cmdline"]) if str(path) in (p.info["cmdline"] or [])]
    _, alive = psutil.wait_procs(left, timeout=5)  # killed ones take a moment to end
    assert not alive


KEYS = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
key = os.environ["OPENAI_API_KEY"]
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"messages": row["messages"]}).encode(),
    {"Authorization": "Bearer " + key},
)
urllib.request.urlopen(request)
seen = json.dumps([row, dict(os.environ)])
own = float(key.startswith("trajectory-"))
print(json.dumps({"reward": own, "seen": float("sk-mine" in seen)}))
"""


def test_a_harness_never_gets_the_key_of_a_provider(chat, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-mine")
    (tmp_path / "keys.py").write_text(KEYS)
    options = {"command": [sys.executable, str(tmp_path / "keys.py")]}
    [found] = conversations(chat, ["x"], name="program", options=options)
    assert found.result.reward == 1.0
    assert found.result.metrics == {"seen": 0.0}


@pytest.mark.parametrize("key", ["max_turns", "max_tokens"])
def test_a_limit_of_nothing_is_refused_and_not_taken_for_none(key):
    with pytest.raises(UserError, match=f"environment.{key}=0"):
        small_config("never-made", "environment.name=guess", f"environment.{key}=0")


@pytest.mark.parametrize(
    "own",
    [
        ("environment.name=guess",),
        ("environment.rewards={one: {function: 'json:loads'}, two: {function: math}}",),
        ("environment.tasks={game: {name: guess, rows_at_once: 8, pass_variables: [HOME]}}",),
    ],
)
def test_several_rewards_and_conversations_have_what_one_function_has(own):
    named = own[0].startswith("environment.tasks")
    ours = () if named else ("environment.rows_at_once=8", "environment.pass_variables=[HOME]")
    small_config("never-made", *own, *ours)


LATE = """
import asyncio, openai
async def run(row, base_url, api_key):
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    async def ask():
        found = await client.chat.completions.create(model="m", messages=row["messages"])
        return found.choices[0].message.content
    async def late():
        await asyncio.sleep(0.3)
        try:
            await ask()
        except openai.AuthenticationError:
            open(row["prompt"].split()[1], "w").write("refused")
    asyncio.get_running_loop().late = asyncio.create_task(late())
    return float(await ask() != "")
"""


def test_a_call_after_the_end_is_refused(chat, tmp_path):
    (tmp_path / "late.py").write_text(LATE)
    told = tmp_path / "told"
    scripts = [str(told), str(tmp_path / "too")]  # the second lets the first one's task run on

    found = conversations(chat, scripts, name=f"{tmp_path}/late.py:run", linger_s=1.5)
    assert [one.result.reward for one in found] == [1.0, 1.0]
    assert [one.counts["turns"] for one in found] == [1, 1]
    assert told.read_text() == "refused"


def call(expression):
    arguments = json.dumps({"expression": expression})
    return f'<tool_call>{{"name": "calculate", "arguments": {arguments}}}</tool_call>'


def test_tools_are_called_until_there_is_an_answer(chat, tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def reward(prompt, completion, answer, **_): return float(completion == answer)"
    )
    scripts = [
        f"{call('2 + 2')}|4",
        "5",
        f"{call('1 / 0')}|{call('2 **')}|4",
        '<tool_call>{"name": "calculate"|4',
        '<tool_call>{"name": "paint", "arguments": {}}</tool_call>|4',
    ]
    found = conversations(chat, scripts, name="tools", reward=f"{reward}:reward")
    assert [one.result.reward for one in found] == [1.0, 0.0, 1.0, 1.0, 1.0]
    said = [[m["content"] for m in one.messages if m["role"] == "tool"] for one in found]
    assert said[0] == ["4"]
    assert said[1] == []
    ids = [m["tool_call_id"] for one in found for m in one.messages if m["role"] == "tool"]
    assert {len(one) for one in ids} == {9}  # as Mistral's templates demand
    assert "ZeroDivisionError" in said[2][0]
    assert "SyntaxError" in said[2][1]
    assert said[3][0].startswith("Error: the tool call is not valid JSON: Expecting ',' delimiter")
    assert said[3][0].endswith("Write the call again.")
    assert said[4] == ["Error: there is no tool paint; use calculate."]
    assert found[2].result.metrics["environment/failed_calls"] == 2
    assert found[3].counts["unreadable_tool_calls"] == 1
    assert found[3].result.metrics["environment/unreadable_calls"] == 1


WAITS = '''
import time

def wait(seconds: float) -> str:
    """
    Wait.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "done"

def reward(prompt, completion, **_):
    return float(completion)
'''


def test_tools_that_wait_run_at_once_however_few_processors_there_are(chat, tmp_path):
    (tmp_path / "waits.py").write_text(WAITS)
    script = '<tool_call>{"name": "wait", "arguments": {"seconds": 2}}</tool_call>|4'
    options = {"tools": [f"{tmp_path}/waits.py:wait"]}
    reward = f"{tmp_path}/waits.py:reward"
    found = conversations(
        chat, [script] * 40, name="tools", options=options, reward=reward, timeout_s=3.5
    )
    assert [one.result.reward for one in found] == [4.0] * 40


FAILS = '''
def look(name: str) -> str:
    """
    Look.

    Args:
        name: Whose.
    """
    return next(one for one in ("a",) if one == name)

def pairs() -> dict:
    """Pairs."""
    return {(1, 2): 3}

def reward(prompt, completion, **_):
    return float(completion)
'''


def test_a_tool_that_finds_nothing_or_returns_what_json_lacks_tells_the_policy(chat, tmp_path):
    (tmp_path / "fails.py").write_text(FAILS)
    scripts = [
        '<tool_call>{"name": "look", "arguments": {"name": "b"}}</tool_call>|4',
        '<tool_call>{"name": "pairs", "arguments": {}}</tool_call>|4',
    ]
    options = {"tools": [f"{tmp_path}/fails.py:look", f"{tmp_path}/fails.py:pairs"]}
    reward = f"{tmp_path}/fails.py:reward"
    found = conversations(chat, scripts, name="tools", options=options, reward=reward)
    assert [one.result.reward for one in found] == [4.0, 4.0]
    said = [next(m["content"] for m in one.messages if m["role"] == "tool") for one in found]
    assert "RuntimeError: StopIteration" in said[0]
    assert "TypeError: keys must be str" in said[1]


CALL_2_2 = '<tool_call>{"name": "calculate", "arguments": {"expression": "2 + 2"}}</tool_call>'


def test_tools_work_with_a_template_that_has_none(tmp_path):
    bare = build_chat(tmp_path / "bare", MARKED)
    scripts = [f"{CALL_2_2}|4", "<tool_call>{oops|4", "4", f"{CALL_2_2}|5"]
    how = {"reward": "math", "options": {"in_messages": True}}
    found = conversations(bare, scripts, name="tools", **how)
    assert [one.result.reward for one in found] == [1.0, 1.0, 1.0, 0.0]
    assert [one.result.metrics["environment/tool_calls"] for one in found] == [1, 0, 0, 1]
    assert [one.result.metrics["environment/unreadable_calls"] for one in found] == [0, 1, 0, 0]
    system, _, call, result, answer = found[0].messages
    assert '"name": "calculate"' in system["content"]
    assert call == {"role": "assistant", "content": CALL_2_2}
    assert result == {"role": "user", "content": "<tool_response>\n4\n</tool_response>"}
    assert answer["content"] == "4"
    assert "Error: the tool call is not valid JSON" in found[1].messages[3]["content"]
    assert [len(one.rows) for one in found] == [1] * 4


def test_the_example_of_tool_use_pays_for_a_call_and_for_the_answer(tmp_path):
    bare = build_chat(tmp_path / "bare", MARKED)
    call, fails = CALL_2_2, CALL_2_2.replace("2 + 2", "two")
    scripts = [f"|{call}|4", f"|{call}|{call}|4", f"|{call}|5", f"|{fails}|4", "|4", "|5"]
    name = f"{ROOT}/examples/tool_use/environment.py:Calculator"
    found = conversations(bare, scripts, name=name, options={"examples": 1})
    rewards = [one.result.reward for one in found]
    assert rewards == pytest.approx([1.2, 1.2, 0.2, 1.0, 1.0, 0.0])
    called = [one.result.metrics.get("environment/right_after_call") for one in found]
    assert called == [1, 1, 0, 0, 0, 0]


def test_a_tool_that_ends_is_called_once_and_no_turn_follows():
    def submit(value: str) -> str:
        """
        Hand in.

        Args:
            value: What.
        """
        return value

    tools = Tools([submit], ends=["submit"])
    action = Action(text="", tool_calls=[ToolCall(id="1", name="submit", arguments={"value": "4"})])
    result = asyncio.run(tools.step(action))
    assert result.done
    assert result.messages[0]["content"] == "4"
    with pytest.raises(UserError, match="ends names stop"):
        Tools(ends=["stop"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 * (3 + 4)", "14"),
        ("7 / 2", "3.5"),
        ("6 / 2", "3"),
        ("-2 ** 2", "-4"),
        ("7 % 4 // 2", "1"),
    ],
)
def test_the_calculator_computes(text, value):
    assert calculate(text) == value


@pytest.mark.parametrize(
    "text", ["__import__('os')", "'a' * 9", "9 ** 9 ** 9", "a", "1 if 1 else 2", "True", "(" * 300]
)
def test_the_calculator_computes_nothing_else(text):
    with pytest.raises((ValueError, SyntaxError)):
        calculate(text)


def test_the_python_tool_runs_programs_apart():
    assert asyncio.run(python("print(2 ** 10)")) == "1024\n"
    assert "NameError" in asyncio.run(python("print(x)"))
    assert asyncio.run(python("import os; print(os.environ.get('USER'))")) == "None\n"


def test_the_side_that_is_cut_is_the_side_that_goes():
    text = "ABCDEFGHIJ"
    found = [shortened(text, 4, side) for side in ("left", "right", "middle")]
    assert found == ["GHIJ", "ABCD", "AB…IJ"]
    assert shortened(text, 10, "left") == text


def test_a_search_finds_the_documents_that_have_rare_words(tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("The river Aare\nflows north.\n\nThe river Rhone flows south.\n\nBread.\n")
    search = Search(str(corpus), num_results=1)
    action = Action(
        text="", tool_calls=[ToolCall(id="1", name="search", arguments={"query": "river Rhone"})]
    )
    [message] = asyncio.run(search.step(action)).messages
    assert message["content"] == "[1] The river Rhone flows south."
    assert Index(["a b", "c"]).best("z", 3) == []
    with pytest.raises(UserError, match="cannot be read"):
        Search(str(tmp_path / "none.txt"))


def test_lines_of_a_corpus_may_have_any_character(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    texts = ["one\u2028two", "three\x85four"]
    corpus.write_text("".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in texts))
    search = Search(str(corpus), num_results=1)
    action = Action(
        text="", tool_calls=[ToolCall(id="1", name="search", arguments={"query": "four"})]
    )
    [message] = asyncio.run(search.step(action)).messages
    assert "three" in message["content"]


def test_a_number_of_very_many_digits_is_no_guess():
    game = Guess()
    game.reset({"prompt": "a"})
    result = game.step(Action(text="9" * 5000))
    assert result.messages[0]["content"].startswith("That is no number")


def test_a_number_is_found_by_halving():
    for prompt in "abcdefgh":
        game, low, high = Guess(), 1, 15
        game.reset({"prompt": prompt})
        for _ in range(4):
            middle = (low + high) // 2
            result = game.step(Action(text=f"I say {middle}"))
            if result.done:
                break
            if result.messages[0]["content"] == "Higher.":
                low = middle + 1
            else:
                high = middle - 1
        assert result.done
        assert result.reward >= 1 - 3 / 8
    assert "no number" in Guess.step(game, Action(text="?")).messages[0]["content"]
    game = Guess(low=3, high=3)
    game.reset({"prompt": "a"})
    assert game.step(Action(text="3")).reward == 1.0


@pytest.mark.parametrize(
    "name", ["custom_environment/environment.py:TwoTries", "custom_harness/harness.py:run"]
)
def test_an_example_learns_and_engine_and_trainer_agree(tmp_path, name):
    path = ROOT / "examples" / name.partition(":")[0]
    assert len(path.read_text().splitlines()) <= 40
    small = ("grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4")
    rows = ("data.num_train_rows=200", "data.num_validation_rows=24", "validation.every_steps=8")
    steps = run(
        tmp_path,
        f"environment.name={ROOT / 'examples' / name}",
        "grpo.max_steps=8",
        "logging.sinks=[]",
        small=(*small, *rows),
    )
    assert steps[8]["validation/reward"] > steps[0]["validation/reward"] + 0.15
    assert steps[1]["rollout/trajectory/turns"] > 1.3
    assert max(one["mismatch/mean_abs"] for n, one in steps.items() if n) < 1e-5
    first = (Path(tmp_path) / "trajectories.jsonl").read_text().splitlines()[0]
    assert json.loads(first)["messages"][1]["role"] == "assistant"
