"""What other people's model folders say is refused in one sentence, or has no say in a run."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

import nemo_like
from nemo_like.algorithms.session import find_model
from nemo_like.cli import main
from nemo_like.compose.files import SHIPPED as CONFIGS
from nemo_like.compose.load import compose_config
from nemo_like.config.model_files import set_trust
from nemo_like.config.policy import PolicyConfig
from nemo_like.config.reward_models import check_scores
from nemo_like.data.tokenizer import end_token_ids
from nemo_like.errors import UserError
from nemo_like.generation.hf_engine import build_model
from nemo_like.generation.protocol import EngineConfig
from nemo_like.models.build import architecture, model_class, model_settings
from nemo_like.models.resolve import CAUSAL_LM, CLASSIFIER, context_length, has_class, resolve_model
from nemo_like.planning.model_shape import read_settings
from nemo_like.policy.state.checks import check_architecture, check_export
from nemo_like.policy.state.twin import plain_attention
from nemo_like.rewards.reward_model import RewardModel
from tests import conftest
from tests.small_runs import run


@pytest.fixture(autouse=True)
def untrusted():
    set_trust(False)
    yield
    set_trust(False)


@pytest.fixture
def model(tiny_model, tmp_path):
    """A Llama whose config.json takes changes; None removes a key."""
    folder = Path(shutil.copytree(tiny_model(), tmp_path / "model"))

    def changed(file="config.json", **changes):
        settings = json.loads((folder / file).read_text()) | changes
        kept = {name: value for name, value in settings.items() if value is not None}
        (folder / file).write_text(json.dumps(kept))
        return str(folder)

    return changed


def refusals(name, key, path, capsys):
    """What plan and the start of a run say of a model, both before Ray."""
    with pytest.raises(SystemExit) as ended:
        main(["plan", name, f"{key}={path}"])
    assert ended.value.code == 2
    yield capsys.readouterr().err
    config = compose_config(CONFIGS, name, [f"{key}={path}"])
    with pytest.raises(UserError) as error:
        find_model(config)
    yield str(error.value)


MINE = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
KINDS = {
    "unknown": ({"model_type": "lama"}, "has model_type=lama in its config.json, which transf"),
    "missing": ({"model_type": None}, "has no model_type in its config.json"),
    "no-text": ({"model_type": ["llama"]}, "has no model_type in its config.json"),
    "wrong": ({"model_type": "clip_text_model"}, "no language model (AutoModelForCausalLM)"),
    "encoder": ({"model_type": "distilbert"}, "no language model (AutoModelForCausalLM)"),
    "wrong-code": (
        {"model_type": "clip_text_model", "auto_map": {"AutoModel": "mine.Model"}},
        "no language model (AutoModelForCausalLM)",
    ),
    "own-code": (
        {"model_type": "clip_text_model", "auto_map": MINE},
        "has code of its own (auto_map in config.json)",
    ),
}


@pytest.mark.parametrize(("changes", "sentence"), KINDS.values(), ids=KINDS)
def test_a_model_that_no_class_makes_is_refused_at_once(model, changes, sentence, capsys):
    path = model(**changes)
    for said in refusals("grpo", "policy.model", path, capsys):
        assert f"policy.model={path} has " in said
        assert sentence in said
        assert "\n" not in said.strip()


def test_trusted_code_must_bring_the_class_that_lacks(model):
    set_trust(True)
    path = model(model_type="lama", auto_map=MINE)
    assert str(resolve_model(path)) == path
    for brought in ({"AutoModelForCausalLM": "mine.Model"}, {"AutoConfig": "mine.Config"}, ["x"]):
        path = model(model_type="lama", auto_map=brought)
        with pytest.raises(UserError, match="has model_type=lama in its"):
            resolve_model(path)


@pytest.mark.parametrize(
    ("name", "key"), [("rm", "policy.model"), ("ppo", "policy.model"), ("ppo", "critic.model")]
)
def test_what_gives_values_must_have_a_class_that_scores(model, name, key, capsys):
    path = model(model_type="granite")
    assert str(resolve_model(path)) == path
    for said in refusals(name, key, path, capsys):
        assert f"{key}={path} has model_type=granite" in said
        assert "(AutoModelForSequenceClassification); use another model." in said


def test_a_reward_model_of_an_unknown_kind_is_refused_in_a_plan_too(model, capsys):
    key, kind = "environment.reward_model", "LamaForSequenceClassification"
    path = model(model_type="lama", architectures=[kind], id2label={"0": "x"})
    with pytest.raises(SystemExit) as ended:
        main(["plan", "environment.reward=reward_model", f"{key}={path}"])
    assert ended.value.code == 2
    assert f"{key}={path} has model_type=lama in its config.json" in capsys.readouterr().err


def test_the_kinds_that_are_read_are_those_that_transformers_makes():
    import transformers
    from transformers.models.auto import modeling_auto

    tables = {
        CAUSAL_LM: modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        CLASSIFIER: modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    }
    from nemo_like.models.resolve import _listed

    for auto_class, table in tables.items():
        assert _listed(auto_class) == table.keys()
        for kind in table.keys() & transformers.CONFIG_MAPPING.keys():
            assert has_class(kind, auto_class)
    assert not has_class("clip_text_model", CAUSAL_LM)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '"llama"', "[" * 100_000, "\x00"],
    ids=["cut", "list", "text", "deep", "binary"],
)
def test_a_broken_config_is_said_alike_wherever_it_is_read(model, text):
    folder = Path(model())
    (folder / "config.json").write_text(text)
    said = set()
    for read in (resolve_model, read_settings, check_scores, end_token_ids):
        arguments = {resolve_model: (str(folder),), end_token_ids: (folder, 2)}
        with pytest.raises(UserError) as error:
            read(*arguments.get(read, (folder,)))
        said.add(str(error.value))
    (one,) = said
    assert one.startswith(f"{folder}/config.json ")
    assert one.endswith("; repair it, or give another folder in Hugging Face format.")


@pytest.mark.parametrize("width", ["wide", None, 0, [128]])
def test_values_that_transformers_refuses_are_one_sentence(model, width):
    folder = Path(model())
    settings = json.loads((folder / "config.json").read_text()) | {"hidden_size": width}
    (folder / "config.json").write_text(json.dumps(settings))
    path, config = str(folder), PolicyConfig(model="x")
    wrong = rf"^({re.escape(path)}/config\.json|policy\.model=x).* (repair|use another)"
    with pytest.raises(UserError, match=wrong):
        check_architecture(path, config)
    if width == "wide":
        for read in (context_length, model_settings, lambda one: architecture(one, torch.float32)):
            with pytest.raises(UserError, match=wrong):
                read(path)


IMPLEMENTATIONS = {
    "not-installed": {"attn_implementation": "flash_attention_2"},
    "from-the-hub": {"attn_implementation": "somebody/some-kernels"},
    "underscored": {"_attn_implementation": "kernels-community/flash-attn2"},
    "by-part": {"attn_implementation": {"": "somebody/some-kernels"}},
    "unknown": {"attn_implementation": "fastest"},
    "eager": {"attn_implementation": "eager"},
    "experts": {"experts_implementation": "somebody/some-kernels"},
    "experts-underscored": {"_experts_implementation": "fastest"},
}


@pytest.mark.parametrize("changes", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_a_models_config_has_no_say_in_how_it_is_computed(model, changes):
    path, config = model(**changes), PolicyConfig(model="x")
    engine = EngineConfig(
        model_path=path, dtype="float32", seed=0, max_model_len=64, engine_kwargs={}
    )
    built = [
        architecture(path, torch.float32).model,
        architecture(path, torch.float32, "values").model,
        build_model(engine),
    ]
    for one in built:
        assert one.config._attn_implementation == "sdpa"
        assert one.config._experts_implementation == "eager"
    check_architecture(path, config)
    check_export(path, config, "logprobs")


def test_a_models_config_has_no_say_in_its_parts_either(tmp_path):
    said = {"attn_implementation": "somebody/kernels", "experts_implementation": "fastest"}
    written = {"model_type": "gemma3", "text_config": said} | said
    (tmp_path / "config.json").write_text(json.dumps(written))
    settings = model_settings(tmp_path)
    for part in (settings, settings.text_config, settings.vision_config):
        assert part._attn_implementation is None
        assert part._experts_implementation is None


def test_configurations_are_read_in_one_place():
    package = Path(nemo_like.__file__).parent
    files = [
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"\bAutoConfig\.|PreTrainedConfig\.from_pretrained", path.read_text())
    ]
    assert files == ["models/build.py"]


@pytest.fixture
def capped(tmp_path):
    """A model that caps its scores, which transformers' sdpa leaves out."""
    changes = {"attn_logit_softcapping": 0.5, "initializer_range": 0.5}
    return str(conftest.build_model(tmp_path / "capped", "gemma2", **changes))


def test_the_hf_engine_computes_with_the_policys_attention(capped, tmp_path, local_ray):
    lengths = tmp_path / "lengths.py"
    lengths.write_text("def reward(prompt, completion, **fields):\n    return len(completion)\n")
    steps = run(
        tmp_path / "run",
        f"policy.model={capped}",
        "policy.batching=padded",
        "policy.attention=eager",
        "generation.backend=hf",
        "grpo.max_steps=1",
    )
    assert steps[1]["mismatch/max_abs"] < 1e-4


@pytest.mark.parametrize("says", [{}, {"attn_implementation": "somebody/some-kernels"}])
def test_a_reward_model_computes_as_its_trainer_whatever_its_config_says(capped, tmp_path, says):
    torch.manual_seed(0)
    exact = AutoModelForSequenceClassification.from_pretrained(
        capped, num_labels=1, dtype=torch.float32, attn_implementation="eager"
    )
    folder = Path(shutil.copytree(capped, tmp_path / "scores"))
    exact.save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | says))
    scorer = RewardModel(str(folder), {})
    row = scorer.text.encode([{"role": "user", "content": "1 + 2 ="}], "3, which is odd")
    with torch.no_grad():
        score = exact(input_ids=row.ids[None]).logits.item()
    assert scorer.scores([row]) == [pytest.approx(score, abs=1e-5)]


@pytest.mark.parametrize(
    ("kind", "attention"),
    [("llama", "sdpa"), ("qwen3", "sdpa"), ("gpt2", "sdpa"), ("gemma2", "eager")],
)
def test_only_models_that_sdpa_gets_wrong_are_scored_without_it(kind, attention, tiny_model):
    _, settings = model_class(tiny_model(kind), "values")
    assert plain_attention(AutoModelForSequenceClassification, settings) == attention


class OneWayConfig(LlamaConfig):
    """Of a model whose code fails when it trains."""

    model_type = "llama-one-way"


class OneWayModel(LlamaForCausalLM):
    """Works without gradients alone."""

    config_class = OneWayConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.norm.register_forward_hook(self.refuse)

    @staticmethod
    def refuse(*_):
        if torch.is_grad_enabled():
            raise KeyError("no way back")


def test_a_models_code_that_fails_in_the_check_of_exports_is_one_sentence(model):
    AutoConfig.register(OneWayConfig.model_type, OneWayConfig, exist_ok=True)
    AutoModelForCausalLM.register(OneWayConfig, OneWayModel, exist_ok=True)
    path, config = model(model_type=OneWayConfig.model_type), PolicyConfig(model="x")
    check_architecture(path, config)
    wrong = r"^policy\.model=x cannot be exported .*: .*no way back.*; use another architecture\.$"
    with pytest.raises(UserError, match=wrong):
        check_export(path, config, "logprobs")
