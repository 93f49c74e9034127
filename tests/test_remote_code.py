"""Code in a model's folder runs if ``policy.trust_remote_code`` says so, and only then."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nemo_like
from nemo_like.config.model_files import set_trust, trust_variables
from nemo_like.data.chat import ChatTokenizer
from nemo_like.errors import UserError
from nemo_like.generation.protocol import EngineConfig
from nemo_like.generation.vllm.settings import engine_args
from nemo_like.models.build import expected_tensors, model_class
from nemo_like.models.resolve import resolve_model
from tests.small_runs import ROOT, SMALL, run

CODE = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

class MineConfig(LlamaConfig):
    model_type = "mine"

class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig

class MineTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture(autouse=True)
def untrusted():
    set_trust(False)
    yield
    set_trust(False)


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "marker"


def change(path, **settings):
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@pytest.fixture
def known(four_layers, tmp_path, marker):
    """A Llama whose folder has code besides."""
    folder = Path(shutil.copytree(four_layers(), tmp_path / "model"))
    (folder / "mine.py").write_text(CODE.format(marker=str(marker)))
    names = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"}
    change(folder / "config.json", auto_map=names)
    return folder


@pytest.fixture
def unknown(known):
    """The same, of a kind that transformers lacks."""
    change(known / "config.json", model_type="mine", architectures=["MineForCausalLM"])
    return known


def with_own_tokenizer(folder, tokenizer_class="MineTokenizer"):
    names = {"AutoTokenizer": [None, "mine.MineTokenizer"]}
    settings = folder / "tokenizer_config.json"
    change(settings, auto_map=names, tokenizer_class=tokenizer_class)


COMMANDS = {
    "train": ["examples/run_grpo.py"],
    "sft": ["examples/run_sft.py"],
    "eval": ["examples/run_eval.py"],
    "plan": ["-c", "from nemo_like.cli import main; main()", "plan", "grpo"],
}


@pytest.mark.parametrize(
    "command", [pytest.param("sft", marks=pytest.mark.full), "train", "eval", "plan"]
)
def test_code_of_a_model_is_refused_without_a_question(command, unknown, marker, tmp_path):
    ours, theirs = os.pipe()
    os.write(theirs, b"y\ny\ny\n")
    done = subprocess.run(
        [sys.executable, *COMMANDS[command], f"policy.model={unknown}", f"run.dir={tmp_path}/run"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "NEMO_LIKE_TRUST_REMOTE_CODE": "1"},
        stdin=ours,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    os.close(theirs)
    assert done.returncode == 2, done.stderr
    assert f"policy.model={unknown} has code of its own (auto_map in config.json)" in done.stderr
    assert "set policy.trust_remote_code=true if you trust it" in done.stderr
    assert "Traceback" not in done.stderr
    assert os.read(ours, 100) == b"y\ny\ny\n"
    os.close(ours)
    assert not marker.exists()


@pytest.mark.parametrize("key", ["teacher.model", "critic.model", "environment.reward_model"])
def test_code_of_other_models_is_refused_under_their_own_keys(key, unknown, marker):
    with pytest.raises(UserError, match=rf"^{key}=.* has code of its own .*policy\.trust_remote"):
        resolve_model(str(unknown), key)
    assert not marker.exists()


@pytest.mark.parametrize("kind", [["mine"], {}, None])
def test_code_of_a_model_whose_kind_is_no_text_is_refused(unknown, marker, kind):
    change(unknown / "config.json", model_type=kind)
    with pytest.raises(UserError, match=r"has code of its own \(auto_map in config\.json\)"):
        resolve_model(str(unknown))
    assert not marker.exists()


def test_code_of_a_tokenizer_is_refused(known, marker):
    with_own_tokenizer(known)
    with pytest.raises(UserError, match=r"\(auto_map in tokenizer_config\.json\)"):
        resolve_model(str(known))
    with_own_tokenizer(known, "GPT2Tokenizer")  # which transformers has
    assert resolve_model(str(known)) == known
    assert not marker.exists()


def test_where_transformers_has_the_classes_it_takes_these(known, marker):
    with_own_tokenizer(known, "PreTrainedTokenizerFast")
    path = str(resolve_model(str(known)))
    assert ChatTokenizer(path).token_ids()
    _, settings = model_class(path, "logprobs")
    assert type(settings).__name__ == "LlamaConfig"
    import torch

    assert "lm_head.weight" in expected_tensors(path, torch.float32)
    assert not marker.exists()


def test_a_model_whose_code_is_trusted_trains_and_leaves_with_its_code(
    unknown, marker, tmp_path, local_ray
):
    with_own_tokenizer(unknown)
    lengths = tmp_path / "lengths.py"
    lengths.write_text("def reward(prompt, completion, **fields):\n    return len(completion)\n")
    steps = run(
        tmp_path / "run",
        f"policy.model={unknown}",
        "policy.trust_remote_code=true",
        "grpo.max_steps=1",
        f"environment.reward={lengths}:reward",
        f"data.train={rows(tmp_path / 'train.jsonl', 1)}",
        f"data.validation={rows(tmp_path / 'validation.jsonl', 2)}",
        small=[one for one in SMALL if "rows" not in one],
    )
    assert steps[1]["train/grad_norm"] > 0
    assert steps[1]["mismatch/max_abs"] < 1e-4
    assert marker.exists()
    assert (tmp_path / "run" / "final" / "mine.py").exists()
    assert json.loads((tmp_path / "run" / "final" / "config.json").read_text())["auto_map"]
    assert trust_variables() == {"NEMO_LIKE_TRUST_REMOTE_CODE": "1"}


def rows(file, term):
    file.write_text(
        "".join(json.dumps({"prompt": f"{i} + {term} =", "answer": "2"}) + "\n" for i in range(8))
    )
    return file


def test_vllm_is_told_what_the_key_says(four_layers):
    config = EngineConfig(
        model_path=four_layers(), dtype="float32", seed=0, max_model_len=64, engine_kwargs={}
    )
    for trusted in (False, True):
        set_trust(trusted)
        assert engine_args(config, (), 0)["trust_remote_code"] is trusted


def test_every_call_that_loads_a_model_says_whether_its_code_is_trusted():
    package, silent, found = Path(nemo_like.__file__).parent, [], 0
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr not in ("from_pretrained", "from_config"):
                continue
            found += 1
            said = {one.arg: ast.unparse(one.value) for one in node.keywords}
            if said.get("trust_remote_code") not in ("False", "trusts_code()"):
                silent.append(f"{path.relative_to(package)}:{node.lineno}")
    assert found >= 10
    assert not silent
