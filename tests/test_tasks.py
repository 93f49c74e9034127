"""Rows with an environment of their own: where they go, what is logged, what is normalised."""

import json

import pytest
import torch

from nemo_like.algorithms.grpo.loop import add_advantages
from nemo_like.algorithms.rows import read_rows
from nemo_like.batch import keys
from nemo_like.compose.load import check
from nemo_like.errors import UserError
from nemo_like.losses.advantages import whiten
from tests.small_runs import SMALL_ON_A_FILE, run, small_config
from tests.test_judge import serving
from tests.test_several_rewards import batch_of

TASKS = "environment.tasks={game: {name: guess, options: {high: 7}}, sums: {reward: math}}"


def rows_file(folder, *rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def read(*overrides):
    return read_rows(small_config("never", *overrides, small=SMALL_ON_A_FILE))["data.train"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{game: {name: gues}}", r"tasks\.game\.name=gues is not known \(did you mean guess"),
        ("{game: {nme: guess}}", r"tasks\.game\.nme is not a key"),
        ("{game: {max_turns: 3}}", r"tasks\.game\.max_turns=3 would have no effect"),
        ("{game: {name: guess, reward: code}}", r"tasks\.game\.reward=code scores one completion"),
        ("{a b: {name: guess}}", "'a b' must be a name of letters"),
        ("{a: {tasks: {b: {name: guess}}}}", r"tasks\.a\.tasks would have no effect"),
        ("{a: {reward: reward_model}}", "reward_model is not set"),
        ("{a: {reward: absent.py:f}}", "there is no file absent.py"),
    ],
)
def test_a_task_is_checked_as_the_section_is(value, message):
    with pytest.raises(UserError, match=message):
        check(small_config("never", f"environment.tasks={value}"))


def test_a_row_names_its_environment_or_its_file_does(tmp_path):
    row = {"prompt": "1 + 1", "answer": "2"}
    path = rows_file(tmp_path, row, row | {"environment": "game"})
    keys = (TASKS, "environment.reward=math")
    assert [one.environment for one in read(*keys, f"data.train={path}")] == ["", "game"]
    mixture = f"data.train={{a: {{path: {path}, environment: sums}}, b: {{path: {path}}}}}"
    found = [(one.task, one.environment) for one in read(*keys, mixture)]
    assert found == [("sums", "sums"), ("game", "game"), ("b", ""), ("game", "game")]


def test_a_row_without_its_environment_or_what_its_reward_needs_is_refused(tmp_path):
    path = rows_file(tmp_path, {"prompt": "a", "environment": "chess"})
    with pytest.raises(UserError, match=r"row 0 of data.train has environment=chess, and .*game"):
        read(TASKS, f"data.train={path}")
    with pytest.raises(UserError, match=r"environment.tasks is empty; .*data.columns.place"):
        read("environment.reward=math", f"data.train={path}")
    path = rows_file(tmp_path, {"prompt": "a", "environment": "sums"})
    with pytest.raises(UserError, match=r"environment.reward=math needs the field 'answer'"):
        read(TASKS, f"data.train={path}")
    path = rows_file(tmp_path, {"prompt": "a", "environment": {"scene": 1}})
    with pytest.raises(UserError, match=r"'environment' must be a name of environment.tasks"):
        read(TASKS, f"data.train={path}")


def test_advantages_of_a_step_are_those_of_each_task_by_choice():
    """By hand: two tasks, one with rewards a hundred times as large."""
    overrides = ("advantage.scale=batch", "advantage.baseline=mean")
    rewards = [1.0, 0.0, 300.0, 100.0]
    found = {}
    for choice in ("true", "false"):
        batch = batch_of([0, 0, 1, 1], total=rewards)
        batch.rows[keys.TASKS] = torch.tensor([5, 5, 9, 9])
        config = small_config("never", *overrides, f"advantage.per_task={choice}")
        add_advantages(batch, config)
        found[choice] = batch.rows[keys.ADVANTAGES]
    half = 0.5**0.5
    assert found["true"].tolist() == pytest.approx([half, -half, half, -half])
    centred = torch.tensor([0.5, -0.5, 100.0, -100.0])
    assert torch.allclose(found["false"], whiten(centred, torch.ones(4).bool()))
    with pytest.raises(UserError, match="per_task=true would have no effect"):
        check(small_config("never", "advantage.per_task=true"))


FORMS = """
def forms(prompts, completions, **columns):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    chat = [isinstance(p, list) and isinstance(c, list) for p, c in zip(prompts, completions)]
    return [{"reward": sum(map(ord, t)) / 100, "chat": one} for t, one in zip(texts, chat)]

def brief(prompt, completion):
    return -float(len(completion))
"""


def test_a_run_of_several_tasks_logs_and_trains_each(tmp_path):
    """Two rewards, one of them a function of TRL, a game of several turns, and a judge."""
    (tmp_path / "forms.py").write_text(FORMS)
    say = "SAY wait 0, then Score: 5 END"
    rows = [{"prompt": f"{n}"} for n in range(2)]
    rows += [{"prompt": [{"role": "user", "content": f"chat {n}"}]} for n in range(2)]
    rows += [{"prompt": f"game {n}", "environment": "game"} for n in range(2)]
    rows += [{"prompt": f"{say} {n}", "environment": "judged"} for n in range(2)]
    ours = f"forms: {{function: '{tmp_path}/forms.py:forms'}}"
    ours += f", brief: {{function: '{tmp_path}/forms.py:brief', weight: 0.1}}"
    with serving() as (server, url):
        judge = f"{{url: '{url}', model: a, template: '{{{{ prompt }}}}'}}"
        game = "{name: guess, options: {high: 3}, max_turns: 2}"
        steps = run(
            tmp_path / "run",
            f"data.train={rows_file(tmp_path, *rows)}",
            f"environment.rewards={{{ours}}}",
            f"environment.tasks={{game: {game}, judged: {{reward: judge, judge: {judge}}}}}",
            "advantage.scale=batch",
            "advantage.per_task=true",
            "advantage.baseline=mean",
            "advantage.credit=step",
            "policy.batching=shared",
            "grpo.max_steps=1",
            "grpo.num_prompts_per_step=8",
            "grpo.num_generations_per_prompt=2",
            "generation.max_new_tokens=4",
            small=("logging.sinks=[]",),
        )
        assert len(server.bodies) == 4
    one = steps[1]
    assert one["rollout/forms/chat"] == 0.5
    assert one["rollout/reward_forms"] > 0 > one["rollout/reward_brief"]
    assert one["rollout/judged/reward"] == 0.5
    assert 0 <= one["rollout/game/reward"] <= 1
    assert one["rollout/trajectory/turns"] >= 1
    assert one["rollout/num_failed"] == one["rollout/judged/failed_share"] == 0
    assert one["train/grad_norm"] > 0
