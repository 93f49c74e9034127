"""Completions are scored by a reward model exactly as its trainer would score them."""

import asyncio
import json
import re
import resource
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from nemo_like.compose.load import compose_config
from nemo_like.config.environment import REWARD_MODEL_KEY, EnvironmentConfig
from nemo_like.errors import UserError
from nemo_like.rewards.reward_model import RewardModel
from nemo_like.rewards.start import start_pool
from tests.small_runs import ROOT, SEEDS, prompts_of, records, run, run_config, small_config

pytestmark = pytest.mark.usefixtures("local_ray")

SYSTEM = "Be even."
HELD_OUT = [(f"{a} + {b} =", "8" * (a + 1), "7 no" * b) for a, b in ((1, 2), (3, 4), (9, 1))]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A reward model after a few steps, and what its trainer says of pairs that it held out."""
    folder = tmp_path_factory.mktemp("rm")
    train = [(f"{a} + {b} =", f"{2 * a}", f"{2 * b + 1}") for a in range(20, 30) for b in range(9)]
    for name, pairs in (("train", train), ("validation", HELD_OUT)):
        rows = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in pairs]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = compose_config(
        ROOT / "configs",
        "rm",
        [
            *(f"data.{name}={folder}/{name}.jsonl" for name in ("train", "validation")),
            f"data.system_prompt={SYSTEM}",
            "policy.optimizer.lr=3e-3",
            "reward_model.max_steps=6",
            "logging.sinks=[]",
            f"run.dir={folder}/run",
        ],
    )
    run_config(config)
    return SimpleNamespace(final=folder / "run" / "final", said=records(folder / "run")[6])


@pytest.fixture(scope="module")
def scorer(trained):
    """The model in this process, one text at a time."""
    model = RewardModel(str(trained.final), {})
    return lambda messages, text: model.scores([model.text.encode(messages, text)])[0]


def environment(model):
    return EnvironmentConfig(reward="reward_model", reward_model=str(model))


def scored(model, conversations):
    pool = start_pool(environment(model))

    async def all_of_them():
        return await asyncio.gather(
            *(pool.score("", text, {"messages": messages}) for messages, text in conversations)
        )

    try:
        return asyncio.run(all_of_them())
    finally:
        pool.shutdown()


def asked(prompt):
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]


def test_a_reward_is_the_score_that_the_trainer_gives_the_same_text(trained, scorer):
    texts = [(asked(p), text) for p, *pair in HELD_OUT for text in pair]
    alone = [scorer(*one) for one in texts]
    for i, name in enumerate(("chosen", "rejected")):
        mean = sum(alone[i::2]) / len(HELD_OUT)
        assert mean == pytest.approx(trained.said[f"validation/{name}_reward"], abs=2e-6)
    assert len({round(score, 3) for score in alone}) == len(texts)
    too_long, *results = scored(trained.final, [(asked("1"), "1" * 600), *texts])  # one batch
    assert [score.reward for score in results] == pytest.approx(alone, abs=2e-6)
    assert too_long.reward is None
    assert "tokens, and its context is 512" in too_long.error


def test_a_text_has_one_score_whatever_it_is_batched_with(trained):
    model = RewardModel(str(trained.final), {})

    def rows(*texts):
        return [model.text.encode([{"role": "user", "content": "1 + 2 ="}], one) for one in texts]

    (alone,) = model.scores(rows("88"))
    for length in (5, 40, 90):
        others = [f"{i} no" * length for i in range(6)]
        found = model.scores(rows(*others, "88", others[0], "88"))
        assert found[6] == found[8] == alone
        assert found[7] == found[0] != alone


def test_the_exported_model_scores_alike_in_transformers(trained, scorer):
    model = AutoModelForSequenceClassification.from_pretrained(trained.final, dtype=torch.float32)
    settings = json.loads((trained.final / "config.json").read_text())
    assert settings["architectures"] == [type(model).__name__]
    tokenizer = AutoTokenizer.from_pretrained(trained.final)
    prompt, chosen, _ = HELD_OUT[0]
    answer = {"role": "assistant", "content": chosen}
    text = tokenizer.apply_chat_template([*asked(prompt), answer], tokenize=False).rstrip()
    with torch.no_grad():
        score = model(tokenizer(text, return_tensors="pt")["input_ids"]).logits.item()
    assert scorer(asked(prompt), chosen) == pytest.approx(score, abs=2e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_grpo_learns_what_a_reward_model_likes(trained, seed, tmp_path):
    steps = run(
        tmp_path,
        "environment.reward=reward_model",
        f"environment.reward_model={trained.final}",
        f"run.seed={seed}",
        "grpo.max_steps=10",
        "validation.every_steps=10",
        "grpo.num_prompts_per_step=8",
        "policy.optimizer.lr=3e-4",
        "generation.max_new_tokens=8",
        "data.num_validation_rows=32",
        "checkpoint.export=false",
    )
    before, after = (steps[step]["validation/reward"] for step in (0, 10))
    assert after > before + 1


def damaged(good, folder, kind):
    """A copy of the reward model that is none, and what is said of it."""
    if kind == "absent":
        return folder, f"{REWARD_MODEL_KEY}={folder}: no such folder"
    shutil.copytree(good, folder)
    settings = json.loads((folder / "config.json").read_text())
    match kind:
        case "language model":
            settings["architectures"] = ["LlamaForCausalLM"]
            said = "is not a reward model: a LlamaForCausalLM has no scalar head"
        case "classifier":
            settings["id2label"] = {"0": "bad", "1": "good"}
            said = "its LlamaForSequenceClassification has 2 labels, and a score is one number"
        case "no template":
            (folder / "chat_template.jinja").unlink()
            said = "its tokenizer has no chat template"
        case "picky template":
            template = "{{ raise_exception('no user may ask') }}"
            (folder / "chat_template.jinja").write_text(template)
            said = "cannot read row 0 of data.train: reward model: the chat template fails: no user"
        case _:
            raise AssertionError(kind)
    (folder / "config.json").write_text(json.dumps(settings))
    return folder, said


@pytest.mark.parametrize(
    "kind", ["absent", "language model", "classifier", "no template", "picky template"]
)
def test_a_folder_that_is_no_reward_model_is_refused_before_anything_starts(
    trained, kind, tmp_path
):
    folder, said = damaged(trained.final, tmp_path / "model", kind)
    reward = ("environment.reward=reward_model", f"{REWARD_MODEL_KEY}={folder}")
    with pytest.raises(UserError, match=re.escape(said)):
        prompts_of(small_config(tmp_path / "run", *reward))


def test_what_only_loading_shows_is_one_sentence_too(trained, tmp_path, monkeypatch):
    folder = tmp_path / "headless"
    shutil.copytree(trained.final, folder)
    weights = load_file(folder / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="no whole reward model: its files lack score"):
        RewardModel(str(folder), {})
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**20, 2**20))
    with pytest.raises(UserError, match="GiB in every reward process, and each may use 0"):
        RewardModel(str(trained.final), {})


def test_another_template_is_allowed_and_said(trained, tmp_path, caplog):
    folder = tmp_path / "model"
    shutil.copytree(trained.final, folder)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text("Judge this: " + template)
    reward = ("environment.reward=reward_model", f"{REWARD_MODEL_KEY}={folder}")
    prompts_of(small_config(tmp_path / "run", *reward))
    assert "template or end tokens are not the policy's" in caplog.text


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["environment.reward=reward_model"], f"{REWARD_MODEL_KEY} is not set"),
        (
            [f"{REWARD_MODEL_KEY}=embedded"],
            "would have no effect: environment.reward is not reward_model",
        ),
    ],
)
def test_half_a_choice_is_refused(overrides, message, tmp_path):
    with pytest.raises(UserError, match=re.escape(message)):
        small_config(tmp_path, *overrides)
