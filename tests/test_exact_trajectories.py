"""Of each environment that ships: the trainer's logprobs of the recorded ids are the engine's."""

import asyncio
import json
import sys
from collections.abc import Sequence

import pytest

from nemo_like.data import reasoning_gym
from nemo_like.data.chat import ChatTokenizer
from nemo_like.generation.hf_engine import HFEngine, _Row
from nemo_like.generation.protocol import EngineConfig, SamplingParams
from nemo_like.rollout.recorder import Limits
from tests.conftest import build_model
from tests.exact_conversations import converse, largest_gap
from tests.small_runs import ROOT
from tests.test_engines import Case
from tests.test_episodes import PROGRAM, call
from tests.test_trajectories import CALLING, WITH_TOOLS

TEMPERATURE = 0.8
LIMITS = Limits(tokens=4000, turns=6)


class _ScriptedRow(_Row):
    """Draws the tokens of a script; their logprobs are the model's."""

    script: Sequence[int] = ()

    def draw(self, logprobs):
        at = len(self.token_ids)
        drawn = super().draw(logprobs)
        return drawn.fill_(self.script[at]) if at < len(self.script) else drawn


class ScriptedHF(HFEngine):
    """Samples ``SCRIPT answer|answer END`` of a prompt, an answer a turn; else what it likes."""

    chat: ChatTokenizer

    def _sample(self, requests, version):
        rows = [self._row(request) for request in requests]
        self._decode(rows)
        return [row.completion(version) for row in rows]

    def _row(self, request):
        row = _ScriptedRow(request, self._config.max_model_len, self._config.device)
        text = self.chat.decode(request.prompt_ids, skip_special_tokens=False)
        if "SCRIPT " in text:
            script = text.split("SCRIPT ")[1].split(" END")[0].split("|")
            answer = script[text.count("<|im_start|>assistant\n") - 1]
            row.script = [*self.chat.cuts.ids(answer), self.chat.eos_token_ids[-1]]
        return row


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = build_model(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)
    (folder / "chat_template.jinja").write_text(WITH_TOOLS.replace("{{ m.content }}", CALLING))
    config = EngineConfig(
        model_path=str(folder), dtype="float32", seed=0, max_model_len=4096, engine_kwargs={}
    )
    engine = ScriptedHF(config)
    engine.chat = ChatTokenizer(str(folder))
    with asyncio.Runner() as runner:
        runner.run(engine.start())
        case = Case(engine, config, runner.run, tolerance=1e-5)
        case.connect()
        case.refit(seed=3)
        case.model.save_pretrained(folder)
        yield case
        runner.run(engine.shutdown())


def python_call(code):
    return f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>"


def search_call(query):
    return f"<tool_call>{json.dumps({'name': 'search', 'arguments': {'query': query}})}</tool_call>"


def script(*answers, **fields):
    return {"prompt": f"SCRIPT {'|'.join(answers)} END", "answer": "4"} | fields


def gym_rows():
    first, second = json.loads(json.dumps(list(reasoning_gym.rows({"chain_sum": {}}, 2, seed=1))))
    answer = f"<answer>{first['answer']}</answer>"
    return [first | {"prompt": f"{first['prompt']} SCRIPT {answer} END"}, second]


TESTS = {"inputs": ["2\n"], "outputs": ["4\n"]}
CODE = "```python\nprint(2 * int(input()))\n```"
GOOD = "def reward(prompt, completion, **_): return float('4' in completion)"
CASES = {
    "tools": (
        {"name": "tools", "options": {"tools": ["calculate", "python"]}},
        [
            script(call("2 + 2"), call("1 / 0"), "4"),
            script(python_call("print('é🙂', 2 ** 10)"), python_call("x"), "4"),
        ],
    ),
    "search": ({"name": "search"}, [script(search_call("river"), search_call("none"), "4")]),
    "guess": ({"name": "guess"}, [{"prompt": one} for one in "abc"]),
    "reasoning_gym": ({"reward": "reasoning_gym"}, gym_rows()),
    "code": ({"reward": "code"}, [script(CODE, tests=TESTS), {"prompt": "?", "tests": TESTS}]),
    "math": ({"reward": "math"}, [script("so \\boxed{4}"), {"prompt": "2 + 2?", "answer": "4"}]),
    "program": ({"name": "program"}, [script("0.5"), script("1.5")]),
    "harness": (
        {"name": f"{ROOT}/examples/custom_harness/harness.py:run"},
        [script("no", "<answer>4</answer>"), {"prompt": "2 + 2?", "answer": "4"}],
    ),
    "environment": (
        {"name": f"{ROOT}/examples/custom_environment/environment.py:TwoTries"},
        [script("no", "<answer>4</answer>"), {"prompt": "2 + 2?", "answer": "4"}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_trainers_logprobs_are_the_engines(case, tmp_path, name):
    environment, records = CASES[name]
    environment = dict(environment)
    if "reward" not in environment:
        (tmp_path / "reward.py").write_text(GOOD)
        environment["reward"] = f"{tmp_path}/reward.py:reward"
    if name == "search":
        (tmp_path / "corpus.txt").write_text("The river Aare.\n\nBread — é.\n")
        environment["options"] = {"corpus": str(tmp_path / "corpus.txt")}
    if name == "program":
        (tmp_path / "program.py").write_text(PROGRAM)
        environment["options"] = {"command": [sys.executable, str(tmp_path / "program.py")]}
    chat = case.engine.chat
    scripted = "SCRIPT" in records[0]["prompt"]
    ends = chat.eos_token_ids if scripted else range(100, 259)  # so that a turn has few tokens
    drawn = SamplingParams(max_new_tokens=300, temperature=TEMPERATURE, stop_token_ids=tuple(ends))
    found = case.run(converse(case.engine, chat, records, drawn, LIMITS, **environment))
    assert all(one.result.error is None for one in found), [one.result.error for one in found]
    gap, count = largest_gap(case.config.model_path, found, TEMPERATURE)
    assert gap < 1e-5
    assert count == sum(one.num_sampled for one in found)
    turns = [len(one.completions) for one in found]
    if scripted:
        assert turns[0] == records[0]["prompt"].count("|") + 1
        assert found[0].result.reward > 0
    else:
        assert turns == [LIMITS.turns] * 3
