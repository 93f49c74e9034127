"""Reward functions in TRL's signature, ``(prompts, completions, **columns)``, as they are."""

import asyncio

import pytest

from nemo_like.api import _reward_spec
from nemo_like.config.data import PromptsConfig
from nemo_like.config.environment import EnvironmentConfig
from nemo_like.data.datasets import load_rows
from nemo_like.errors import UserError
from nemo_like.rewards.find import resolve_reward
from nemo_like.rewards.protocol import IS_CHAT, RewardRow
from nemo_like.rewards.several import combined
from nemo_like.rewards.start import start_pool

FUNCTIONS = '''
import re, time

CALLS = []

def accuracy(completions, answer, **kwargs):
    """As TRL's own examples: completions are messages."""
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if c == a else 0.0 for c, a in zip(contents, answer)]

def lengths(prompts, completions):
    CALLS.append(len(completions))
    time.sleep(0.05)
    return [{"reward": float(len(p) + len(c)), "together": len(completions)}
            for p, c in zip(prompts, completions)]

def some(prompts, completions, task, **kwargs):
    return [float(len(c)) if t == "long" else None for c, t in zip(completions, task)]

async def awaited(completions, **kwargs):
    return [len(c) * 1.0 for c in completions]

def fails(prompts, completions, **kwargs):
    if "bad" in completions: raise KeyError("bad")
    return [1.0] * len(completions)

def short(prompts, completions): return [1.0]
def number(prompts, completions): return 1.0
def both(prompt, completions): return 1.0
def of_trainer(completions, trainer_state, **kwargs): return [0.0]
def half(completions, answer): return [0.0]
def with_column(prompt, completion, prompts=()): return float(len(prompts))
'''


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    path = tmp_path_factory.mktemp("trl") / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def scored(reward, *rows, **environment):
    """Results of ``(prompt, completion, fields)``, all at once."""
    pool = start_pool(EnvironmentConfig(reward=str(reward), **environment))

    async def all_of_them():
        return await asyncio.gather(*(pool.score(*row) for row in rows))

    try:
        return asyncio.run(all_of_them())
    finally:
        pool.shutdown()


def test_a_function_of_trl_is_called_with_lists_and_its_columns(functions):
    chat = {IS_CHAT: True, "messages": [{"role": "user", "content": "2 + 2"}], "other": 1}
    rows = [("2 + 2", text, chat | {"answer": "4"}) for text in ("4", "5", "4")]
    found = scored(f"{functions}:accuracy", *rows)
    assert [one.reward for one in found] == [1.0, 0.0, 1.0]
    assert resolve_reward(f"{functions}:accuracy").required_fields == {"answer"}
    assert resolve_reward(f"{functions}:with_column")("p", "c", {"prompts": [1, 2]}) == 2.0


def test_what_waits_goes_in_one_call_of_at_most_so_many(functions):
    rows = [("p", "x" * n, {}) for n in range(20)]
    found = scored(f"{functions}:lengths", *rows, rows_at_once=8)
    assert [one.reward for one in found] == [1.0 + n for n in range(20)]
    together = [one.metrics["together"] for one in found]
    assert max(together) == 8
    assert 3 <= round(sum(1 / one for one in together), 6) <= 5


def test_an_async_one_and_one_alone_take_the_same_lists(functions):
    found = scored(f"{functions}:awaited", ("p", "abc", {}), ("p", "", {}))
    assert [one.reward for one in found] == [3.0, 0.0]
    assert resolve_reward(f"{functions}:lengths")("pp", "abc", {})["reward"] == 5.0


def test_a_call_that_fails_is_made_again_for_each_row(functions):
    rows = [("p", text, {}) for text in ("good", "bad", "good", "good")]
    found = scored(f"{functions}:fails", *rows)
    assert [one.reward for one in found] == [1.0, None, 1.0, 1.0]
    assert "KeyError: 'bad'" in str(found[1].error)


def test_none_means_that_a_reward_does_not_apply_and_others_count(functions):
    rows = [("p", "abc", {"task": "long"}), ("p", "abcd", {"task": "x"})]
    [first, second] = scored(f"{functions}:some", *rows)
    assert first.reward == 3.0
    assert (second.reward, second.error) == (None, "returned None")
    parts = {name: {"function": f"{functions}:{name}"} for name in ("some", "lengths")}
    together = combined(parts)
    assert together("p", "abcd", {"task": "x"})["reward"] == 5.0
    assert "reward_some" not in together("p", "abcd", {"task": "x"})
    assert together("p", "abcd", {"task": "long"})["reward"] == 9.0
    alone = combined({"some": parts["some"]})
    assert alone("p", "abcd", {"task": "x"}) == {"reward": None, "error": "no reward applies"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "both",
            r"takes \(prompt, completions\); write def reward\(prompt, completion, \*\*fields",
        ),
        ("of_trainer", "needs trainer_state, which only TRL's trainer has; give it a default"),
        (
            "half",
            r"or def reward\(prompts, completions, \*\*columns\) for lists of them, as in TRL",
        ),
    ],
)
def test_a_signature_that_is_neither_is_refused_in_one_sentence(functions, name, message):
    with pytest.raises(UserError, match=message):
        resolve_reward(f"{functions}:{name}")


@pytest.mark.parametrize(
    ("name", "message"),
    [("short", "returned 1 rewards for 2"), ("number", "returned a float, not a list")],
)
def test_a_list_of_another_length_is_no_reward(functions, name, message):
    function = resolve_reward(f"{functions}:{name}")
    with pytest.raises(UserError, match=message):
        function.of_rows([_row("a"), _row("b")])


def _row(completion):
    return RewardRow("", "p", completion, {})


def test_rows_know_whether_their_prompt_was_a_text_or_messages(tmp_path):
    path = tmp_path / "rows.jsonl"
    messages = '[{"role": "user", "content": "b"}]'
    path.write_text(f'{{"prompt": "a"}}\n{{"prompt": {messages}}}\n{{"messages": {messages}}}\n')
    data = PromptsConfig(train=str(path))
    assert [row.is_chat for row in load_rows(data.train_parts, data, 0, 0)] == [False, True, True]


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("think_format_reward", ["<think>a</think>b", "b"]),
        ("accuracy_reward", [r"\boxed{\frac{1}{2}}", r"\boxed{\frac{1}{3}}", "nothing"]),
    ],
)
def test_trls_own_functions_give_here_what_they_give_there(name, texts):
    theirs = getattr(pytest.importorskip("trl.rewards"), name)
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    solution = r"$\frac{1}{2}$"
    expected = theirs(completions=completions, solution=[solution] * len(texts))
    fields = {IS_CHAT: True, "messages": [{"role": "user", "content": "q"}], "solution": solution}
    found = scored(f"trl.rewards.{name}", *(("q", text, fields) for text in texts))
    assert [one.reward for one in found] == expected
    assert len(set(expected)) > 1


def test_a_function_of_a_script_is_taken_too(tmp_path):
    def sized(completions, **columns):
        return [float(len(one)) for one in completions]

    function = resolve_reward(str(_reward_spec(tmp_path, sized)))
    assert function.is_batched
    assert function("p", "abc", {}) == 3.0
