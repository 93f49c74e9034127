"""The training engine's state on gloo: checkpoints that go on elsewhere, folders to begin with."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nemo_like.config.optimizer import LoraConfig, OptimizerConfig
from nemo_like.config.policy import ParallelConfig
from nemo_like.models.build import model_class
from nemo_like.policy.state.loading import unused_tensors
from tests.engine_cases import CASES, TOLERANCE, ddp, largest_difference, schedule
from tests.layouts import LAYOUTS

LR = 3e-4
BOTH = (False, True)


def assert_same(actual, expected, tolerance=TOLERANCE):
    (metrics, parameters), (expected_metrics, expected_parameters) = actual, expected
    for key in ("loss", "train/grad_norm", "train/lr"):
        assert metrics[key] == pytest.approx(expected_metrics[key], abs=tolerance), key
    assert largest_difference(parameters, expected_parameters) < tolerance


# Resuming


@pytest.fixture(scope="module")
def saved(pool, four_layers, tmp_path_factory):
    """Two sharding ranks: a checkpoint after the first step, and what the second step gives."""
    results = {}

    def get(tied):
        if tied not in results:
            folder = str(tmp_path_factory.mktemp("saved") / "step_1")
            config = {"parallel": ParallelConfig()} | schedule("linear")
            path = four_layers("llama", tied)
            results[tied] = folder, pool.run(2, f"{CASES}:save_then_go_on", path, config, folder)
        return results[tied]

    return get


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "name", ["one", "dp2", "ddp2", "tp2", "cp2", "pp2_1f1b", "pp2_interleaved", "hybrid2x2"]
)
def test_a_checkpoint_goes_on_in_any_layout(name, tied, pool, saved, four_layers):
    ranks, parallel = LAYOUTS[name]
    config = {"parallel": parallel} | schedule("linear")
    folder, expected = saved(tied)
    path = four_layers("llama", tied)
    actual = pool.run(ranks, f"{CASES}:load_and_go_on", path, config, folder)
    assert_same(actual[-1], expected[-1])
    if name == "dp2":
        assert actual[-1][0] == expected[-1][0]
        assert largest_difference(actual[-1][1], expected[-1][1]) == 0


def test_a_float32_checkpoint_goes_on_in_float16(pool, saved, four_layers):
    config = {"dtype": "float16"} | schedule("linear")
    folder, expected = saved(False)
    actual = pool.run(2, f"{CASES}:load_and_go_on", four_layers(), config, folder)
    assert actual[0][0]["loss"] == pytest.approx(expected[0][0]["loss"], abs=1e-2)
    assert actual[0][0]["train/skipped_steps"] == 0


@pytest.mark.parametrize(
    ("name", "tied"),
    [
        *[(name, False) for name in ("ddp2", "cp2", "hybrid2x2", "dp2_tp2")],
        *[
            (name, tied)
            for name in ("tp2_sequence", "pp2_1f1b", "pp2_interleaved")
            for tied in BOTH
        ],
    ],
)
def test_a_checkpoint_of_any_layout_goes_on_in_one_process(name, tied, pool, four_layers, tmp_path):
    ranks, parallel = LAYOUTS[name]
    config = schedule("linear")
    path, folder = four_layers("llama", tied), str(tmp_path / "step_1")
    expected = pool.run(
        ranks, f"{CASES}:save_then_go_on", path, config | {"parallel": parallel}, folder
    )
    other = {"optimizer": OptimizerConfig(lr=1.0, beta2=0.5, weight_decay=0.5)}  # not the run's
    actual = pool.run(1, f"{CASES}:load_and_go_on", path, config | other, folder)
    assert_same(actual[0], expected[-1])
    # Ten steps, the first of which warms up: the second is the first of nine that fall to 0.
    assert actual[0][0]["train/lr"] == pytest.approx(LR * (1 - 1 / 9))


@pytest.mark.parametrize("moments", ["float32", "int8"])
def test_local_sgd_goes_on_as_it_resumes(moments, pool, four_layers, tmp_path):
    """Moments of replicas differ: a checkpoint has those of one, and all go on with them."""
    optimizer = {"optimizer": OptimizerConfig(lr=1e-3, moments=moments)}
    config, folder = ddp(average_every_steps=4) | optimizer, str(tmp_path / "step_1")
    straight = pool.run(2, f"{CASES}:save_then_go_on", four_layers(), config, folder)
    resumed = pool.run(2, f"{CASES}:load_and_go_on", four_layers(), config, folder)
    for (numbers, after), (expected, expected_after) in zip(resumed, straight, strict=True):
        assert numbers == expected
        assert largest_difference(after, expected_after) == 0


@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon", "adafactor"])
def test_a_checkpoint_before_the_first_step_changes_nothing(kind, pool, four_layers, tmp_path):
    """A critic that warms up first, or an overflow, leaves an optimizer without a step."""
    config = {"optimizer": OptimizerConfig(kind=kind, lr=1e-2, weight_decay=0.1)}
    (expected, plain), (numbers, after) = (
        pool.run(2, f"{CASES}:save_then_begin", four_layers(), config, folder)[0]
        for folder in (None, str(tmp_path / "step_0"))
    )
    assert numbers == expected
    assert largest_difference(after, plain) == 0


@pytest.mark.parametrize("kind", ["sgd", "muon", "adafactor"])
def test_every_optimizer_resumes_where_it_was(kind, pool, four_layers, tmp_path):
    optimizer = OptimizerConfig(kind=kind, lr=1e-2 if kind == "adafactor" else 1e-3)
    config = {"optimizer": optimizer, "parallel": ParallelConfig()} | schedule("cosine")
    folder = str(tmp_path / "step_1")
    straight = pool.run(2, f"{CASES}:save_then_go_on", four_layers(), config, folder)
    resumed = pool.run(2, f"{CASES}:load_and_go_on", four_layers(), config, folder)
    assert resumed[0][0] == straight[0][0]
    assert largest_difference(resumed[0][1], straight[0][1]) == 0


@pytest.mark.parametrize("name", ["one", "pp2_1f1b"])
@pytest.mark.parametrize("kind", ["sgd", "muon", "adafactor"])
def test_other_optimizers_go_on_in_other_layouts(kind, name, pool, four_layers, tmp_path):
    ranks, parallel = LAYOUTS[name]
    optimizer = OptimizerConfig(kind=kind, lr=1e-2 if kind == "adafactor" else 1e-3)
    config = {"optimizer": optimizer} | schedule("cosine")
    folder = str(tmp_path / "step_1")
    expected = pool.run(2, f"{CASES}:save_then_go_on", four_layers(), config, folder)
    config["parallel"] = parallel
    actual = pool.run(ranks, f"{CASES}:load_and_go_on", four_layers(), config, folder)
    # Muon's bfloat16 products amplify the rounding of gradients (see FullMatrixMuon).
    assert_same(actual[-1], expected[-1], 4e-5 if kind == "muon" else TOLERANCE)


def test_a_checkpoint_does_not_depend_on_what_is_recomputed(pool, four_layers, tmp_path):
    folder = str(tmp_path / "step_1")
    recomputed = {"activation_checkpointing": "full"}
    expected = pool.run(2, f"{CASES}:save_then_go_on", four_layers(), recomputed, folder)
    for parallel in (LAYOUTS["dp2"][1], LAYOUTS["pp2_1f1b"][1]):
        config = {"parallel": parallel}
        actual = pool.run(2, f"{CASES}:load_and_go_on", four_layers(), config, folder)
        assert_same(actual[-1], expected[-1])


@pytest.mark.parametrize(
    ("kind", "offload"), [("adamw", "none"), ("adamw", "optimizer"), ("muon", "none")]
)
def test_hyperparameters_are_those_of_the_checkpoint(kind, offload, pool, four_layers, tmp_path):
    folder, path = str(tmp_path / "step_1"), four_layers()
    saved = OptimizerConfig(kind=kind, lr=1e-3, weight_decay=0.1)
    config = {"optimizer": saved} | schedule("linear")
    expected = pool.run(1, f"{CASES}:save_then_go_on", path, config, folder)
    config |= {"optimizer": OptimizerConfig(kind=kind, lr=5e-2, weight_decay=0.5)}
    actual = pool.run(1, f"{CASES}:load_and_go_on", path, config | {"offload": offload}, folder)
    assert_same(actual[0], expected[0], 1e-9)


def test_a_checkpoint_of_another_optimizer_or_adapter_is_refused(pool, four_layers, tmp_path):
    folder, path = str(tmp_path / "step_1"), four_layers()
    pool.run(2, f"{CASES}:save_then_go_on", path, {}, folder)
    for config in (
        {"optimizer": OptimizerConfig(kind="sgd")},
        {"lora": LoraConfig(rank=4)},
    ):
        for said in pool.run(2, f"{CASES}:refusal", path, config, folder):
            assert said.startswith(f"{folder} does not fit this run's model, adapters or optimizer")
            assert "\n" not in said


def test_a_loss_scale_and_its_count_go_on(pool, four_layers, tmp_path):
    config = {"dtype": "float16", "loss_scale": 2.0**40}
    folder = str(tmp_path / "step_2")
    straight, resumed = pool.run(1, f"{CASES}:resumed_loss_scale", four_layers(), config, folder)[0]
    assert straight == resumed == [2.0**38, 3, LR]


# Loading


def test_each_rank_starts_with_its_shard(pool, four_layers):
    sizes = pool.run(4, f"{CASES}:local_sizes", four_layers(), {"parallel": ParallelConfig()})
    assert sum(mine for mine, _ in sizes) == sizes[0][1]
    assert all(mine < whole / 3 for mine, whole in sizes)


@pytest.mark.parametrize("name", ["dp4", "dp2_tp2", "hybrid2x2", "dp2_pp2"])
def test_a_rank_reads_no_more_than_its_shard(name, pool, four_layers):
    ranks, parallel = LAYOUTS[name]
    answers = pool.run(ranks, f"{CASES}:copied_numbers", four_layers(), {"parallel": parallel})
    for copied, held in answers:
        # Rotary frequencies are copied, too.
        assert held <= copied <= held + 64


def loaded(pool, folder, name):
    ranks, parallel = LAYOUTS[name]
    return pool.run(ranks, f"{CASES}:train", str(folder), {"parallel": parallel}, 0)[0][1]


@pytest.mark.parametrize("name", ["dp2", "ddp2", "tp2", "pp2_interleaved"])
@pytest.mark.parametrize("tied", BOTH)
def test_other_folders_load_equally(tied, name, pool, four_layers, tmp_path):
    source = Path(four_layers("llama", tied))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    expected = {key: each.float() for key, each in model.state_dict().items()}
    if tied:
        del expected["lm_head.weight"]
    model.save_pretrained(tmp_path / "in_files", max_shard_size="50KB")
    assert len(list((tmp_path / "in_files").glob("*.safetensors"))) > 3
    assert largest_difference(loaded(pool, tmp_path / "in_files", name), expected) == 0
    shutil.copytree(source, tmp_path / "bin")
    (tmp_path / "bin" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    assert largest_difference(loaded(pool, tmp_path / "bin", name), expected) == 0


def test_the_head_of_a_reward_model_in_other_files_is_kept(pool, four_layers, tmp_path):
    folder = Path(shutil.copytree(four_layers("llama", False), tmp_path / "bin"))
    kind, settings = model_class(str(folder), "values")
    model = kind.from_pretrained(folder, config=settings)
    (folder / "model.safetensors").unlink()
    for head in (0.5, None):
        state = model.state_dict()
        state["score.weight"].fill_(head or 1.0)
        if head is None:
            del state["score.weight"]
        torch.save(state, folder / "pytorch_model.bin")
        assert pool.run(1, f"{CASES}:values_head", str(folder))[0] == (head or 0.0)


def without_a_tensor(tensors, config):
    del tensors["model.layers.1.mlp.up_proj.weight"]


def of_another_size(tensors, config):
    config["vocab_size"] += 4


def with_a_head_of_its_own(tensors, config):
    config["tie_word_embeddings"] = True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_a_tensor, r"lack model\.layers\.1\.mlp\.up_proj\.weight, which its config"),
        (of_another_size, r"cannot be loaded: Size mismatch"),
        (with_a_head_of_its_own, r"ties lm_head\.weight to model\.embed_tokens\.weight, .* differ"),
    ],
)
def test_weights_that_are_not_those_of_the_config_are_refused(
    change, message, pool, four_layers, tmp_path
):
    """transformers would draw what is missing, and untie what differs."""
    folder = shutil.copytree(four_layers(), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    for said in pool.run(2, f"{CASES}:refusal", str(folder), {}):
        assert re.search(message, said), said


def test_files_of_weights_that_are_damaged_or_hold_a_tensor_twice_are_refused(
    pool, four_layers, tmp_path
):
    folder = shutil.copytree(four_layers(), tmp_path / "model")
    weights = folder / "model.safetensors"
    shutil.copy(weights, folder / "model-00001-of-00001.safetensors")
    (said,) = pool.run(1, f"{CASES}:refusal", str(folder), {})
    assert "in both model-00001-of-00001.safetensors and model.safetensors" in said
    (folder / "model-00001-of-00001.safetensors").unlink()
    weights.write_bytes(weights.read_bytes()[:-100])
    (said,) = pool.run(1, f"{CASES}:refusal", str(folder), {})
    assert said.startswith(f"{weights} cannot be read: ")
    weights.unlink()
    (said,) = pool.run(1, f"{CASES}:refusal", str(folder), {})
    assert said.startswith(f"The weights of the model {folder} cannot be loaded: ")


@pytest.mark.parametrize("tied", BOTH)
@pytest.mark.parametrize("output", ["logprobs", "values"])
def test_tensors_that_the_architecture_lacks_are_named_unless_they_are_harmless(
    output, tied, four_layers, tmp_path
):
    folder = shutil.copytree(four_layers("llama", tied), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    assert unused_tensors(str(folder), output) == []
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    extra = ["model.layers.0.self_attn.q_proj.bias", "model.layers.4.mlp.up_proj.weight"]
    tensors |= {name: torch.ones(4) for name in extra}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert unused_tensors(str(folder), output) == extra
