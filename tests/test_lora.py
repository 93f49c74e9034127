"""Adapters: training begins with the model itself, in any layout, and what leaves is merged."""

import json
import math

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from nemo_like.algorithms.eval.config import EvalConfig
from nemo_like.config.optimizer import LoraConfig, OptimizerConfig
from nemo_like.config.policy import ParallelConfig
from nemo_like.errors import UserError
from nemo_like.models.adapter_places import expected_adapters
from nemo_like.models.naming import plain_name
from nemo_like.models.resolve import resolve_model
from nemo_like.planning.model_shape import role_of
from nemo_like.policy.lora import adapters_of, add_adapters, initialize_adapters
from nemo_like.refit.buckets import is_adapter, plan_refit
from tests.engine_cases import CASES, TOLERANCE, ddp, largest_difference
from tests.export_cases import CASES as EXPORTS
from tests.small_runs import run, small_config
from tests.test_evaluation import evaluate

LORA = {"lora": LoraConfig(rank=4, alpha=8), "optimizer": OptimizerConfig(lr=1e-2, eps=1e-6)}


@pytest.fixture(scope="module")
def one_rank(pool, four_layers):
    """Metrics of three steps on one rank, and the merged parameters before and after."""
    before = pool.run(1, f"{CASES}:train", four_layers(), LORA, 0)[0][1]
    metrics, after = pool.run(1, f"{CASES}:train", four_layers(), LORA, 3)[0]
    return before, metrics, after


def test_training_begins_with_the_model_itself_and_moves_all_matrices_but_the_head(
    one_rank, four_layers
):
    before, metrics, after = one_rank
    plain = AutoModelForCausalLM.from_pretrained(four_layers(), dtype=torch.float32).state_dict()
    assert all(torch.equal(before[name], plain[name]) for name in before)
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert moved == {name for name in after if "_proj." in name}
    assert metrics[-1]["loss"] < metrics[0]["loss"]


def small_model():
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=9, intermediate_size=64, **heads))
    add_adapters(model, LoraConfig(rank=4, alpha=24))
    return model


def test_first_factors_are_drawn_by_name_each_its_own_with_or_without_recomputing():
    def first_factors(wrapped):
        model = small_model()
        if wrapped:
            model.model.layers[1] = checkpoint_wrapper(model.model.layers[1])
        initialize_adapters(model)
        return {plain_name(n): p for n, p in model.named_parameters() if "lora_A" in n}

    found, expected = first_factors(True), first_factors(False)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len({one.sum().item() for one in found.values()}) == len(found) == 2 * 7
    most = max(one.abs().max().item() for one in found.values())
    assert most == pytest.approx(64**-0.5, rel=0.01)  # as peft has it, and torch in linear layers


@torch.no_grad()
def test_what_leaves_is_a_matrix_and_what_peft_adds_to_it():
    model = small_model()
    tensors = dict(model.named_parameters())
    for name, parameter in tensors.items():
        if "lora_" in name:
            parameter.normal_()
    found = adapters_of(model, {plain_name(name): one for name, one in tensors.items()})
    assert len(found) == 2 * 7
    for name, adapter in found.items():
        layer = model.get_submodule(name.removesuffix(".weight"))
        expected = layer.base_layer.weight + layer.get_delta_weight("default")
        merged = adapter.merged(layer.base_layer.weight, lambda shard: shard)
        assert torch.allclose(merged, expected, rtol=0, atol=1e-4)  # of numbers up to 100


@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        (2, {}),
        (2, {"parallel": ParallelConfig(context_parallel_size=2)}),
        (2, ddp()),
        (1, {"micro_batch_size": 1}),
    ],
    ids=["fsdp", "cp", "ddp", "one-row"],
)
def test_every_layout_takes_the_same_steps(ranks, config, pool, four_layers, one_rank):
    _, expected, after = one_rank
    metrics, parameters = pool.run(ranks, f"{CASES}:train", four_layers(), LORA | config, 3)[0]
    for ours, theirs in zip(metrics, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=TOLERANCE)
        assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], abs=TOLERANCE)
    assert largest_difference(parameters, after) < TOLERANCE


def test_refits_of_adapters_carry_the_model_as_it_was_and_what_trains(pool, four_layers):
    path, lora = four_layers(), LORA["lora"].replace(refit="adapters")
    case = f"{CASES}:refits_after_one_step", path, LORA | {"lora": lora}
    (first, later), (first_of_two, later_of_two) = (pool.run(n, *case)[0] for n in (1, 2))
    plan = [s for b in plan_refit(path, torch.float32, lora, 2**20) for s in b.slots]
    assert [slot.name for slot in plan] == list(first) == list(first_of_two)
    assert list(later) == list(later_of_two) == [name for name in first if is_adapter(name)]
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    assert all(torch.equal(plain[name], first[name]) for name in first.keys() - later.keys())
    assert all(later[name].any() for name in later)
    assert largest_difference(first, first_of_two) < TOLERANCE


def test_a_checkpoint_holds_adapters_alone_and_goes_on_in_another_layout(
    pool, four_layers, tmp_path
):
    expected = pool.run(2, f"{CASES}:save_then_go_on", four_layers(), LORA, str(tmp_path))[0]
    actual = pool.run(1, f"{CASES}:load_and_go_on", four_layers(), LORA, str(tmp_path))[0]
    assert largest_difference(actual[1], expected[1]) < TOLERANCE
    stored = json.loads((tmp_path / "index.json").read_text())["tensors"]
    matrices = [name for name in stored if name.startswith("model/")]
    assert matrices
    assert all("lora_" in name for name in matrices)


@pytest.mark.parametrize("target", ["q_prj", "lm_head"])
def test_a_target_that_matches_no_layer_is_refused(target, pool, four_layers):
    config = LORA | {"lora": LoraConfig(rank=4, targets=["q_proj", target])}
    near = {"q_prj": "did you mean q_proj.*There are", "lm_head": "there are"}[target]
    message = rf"{target} names no linear layer.*output head cannot.*{near} down_proj, gate_proj"
    with pytest.raises(AssertionError, match=message):
        pool.run(1, f"{CASES}:train", four_layers(), config, 0)


def test_only_the_targets_train(pool, four_layers, one_rank):
    config = LORA | {"lora": LORA["lora"].replace(targets=["q_proj", "v_proj"])}
    _, after = pool.run(1, f"{CASES}:train", four_layers(), config, 1)[0]
    moved = {name for name in after if not torch.equal(after[name], one_rank[0][name])}
    assert moved == {name for name in after if "q_proj." in name or "v_proj." in name}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["policy.lora.alpha=8"], "policy.lora.alpha=8.0 would have no effect: policy.lora.rank"),
        (
            ["policy.lora.refit=adapters"],
            "refit=adapters would have no effect: policy.lora.rank",
        ),
        (
            ["policy.lora.rank=513", "policy.lora.refit=adapters", "generation.backend=vllm"],
            "rank=513 is more than .* computes with .* set policy.lora.refit=merged",
        ),
        (["policy.lora.rank=-1"], "policy.lora.rank=-1 must be at least 0"),
        (
            ["policy.lora.rank=4", "policy.parallel.tensor_parallel_size=2"],
            "tensor_parallel_size=2 does not go with policy.lora",
        ),
        (["policy.lora.rank=4", "policy.optimizer.kind=muon"], "muon orthogonalises"),
    ],
)
def test_what_adapters_do_not_go_with_is_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        small_config("never-made", *overrides, "cluster.cpu_workers_per_node=2")


def test_engines_on_gpus_compute_with_adapters_in_16_bits_only():
    overrides = ["policy.lora.rank=4", "policy.lora.refit=adapters", "generation.backend=vllm"]
    with pytest.raises(UserError, match=r"does not go with policy.dtype=float32 on GPUs"):
        small_config("never-made", *overrides, "cluster.gpus_per_node=1")
    small_config("never-made", *overrides, "cluster.gpus_per_node=1", "policy.dtype=bfloat16")


RUN = (
    "policy.lora.rank=4",
    "policy.optimizer.lr=1e-3",
    "loss.kl_coef=0.01",
    "grpo.max_steps=3",
    "validation.every_steps=3",
)


@pytest.fixture(scope="module")
def merged_run(local_ray, tmp_path_factory):
    """Folder and records of a run that refits merged weights."""
    folder = tmp_path_factory.mktemp("merged")
    return folder, run(folder, *RUN)


APART = (*RUN, "policy.lora.refit=adapters", "checkpoint.every_steps=2")
EQUAL = ("train/loss", "train/grad_norm", "train/kl", "rollout/reward", "validation/reward")


def assert_same_training(steps, expected):
    for step, record in steps.items():
        for name in EQUAL:
            if name in expected[step]:
                assert record[name] == pytest.approx(expected[step][name], abs=1e-5), (step, name)


def test_a_run_that_refits_adapters_alone_takes_the_steps_of_one_that_merges(merged_run, tmp_path):
    _, expected = merged_run
    steps = run(tmp_path, *APART)
    assert_same_training(steps, expected)
    assert any("validation/reward" in record for record in steps.values())
    assert all(steps[step]["mismatch/max_abs"] < 1e-5 for step in (1, 2, 3))
    lora = LoraConfig(rank=4, refit="adapters")
    specs = expected_adapters(str(resolve_model("embedded")), torch.float32, lora)
    adapter_bytes = sum(4 * math.prod(shape) for shape, _ in specs.values())
    found = {step: record.get("refit/bytes") for step, record in steps.items()}
    assert found[2] == found[3] == adapter_bytes
    assert adapter_bytes < expected[2]["refit/bytes"] / 5


@pytest.mark.full
def test_refits_of_adapters_go_on_after_a_resume_and_measure_a_checkpoint(merged_run, tmp_path):
    _, expected = merged_run
    run(tmp_path, *APART, "grpo.max_steps=2")
    steps = run(tmp_path, *APART, "run.resume=true")
    assert_same_training(steps, expected)
    checkpoint = next((tmp_path / "checkpoints").glob("*3"))
    results = [
        evaluate(
            tmp_path / f"eval-{refit}",
            f"policy.model={checkpoint}",
            "policy.lora.rank=4",
            f"policy.lora.refit={refit}",
        )[0]
        for refit in ("merged", "adapters")
    ]
    assert results[0] == results[1]


def test_an_evaluation_trains_nothing_and_has_the_adapters_of_its_checkpoint(
    pool, four_layers, tmp_path, one_rank
):
    assert not role_of(EvalConfig()).trains
    case = f"{CASES}:saved_and_measured", four_layers(), LORA, str(tmp_path)
    saved, measured = pool.run(2, *case)[0]
    assert largest_difference(saved, measured) == 0
    assert largest_difference(saved, one_rank[0]) > 0


def test_the_adapter_of_a_model_of_values_has_its_head(pool, four_layers, tmp_path):
    pytest.importorskip("peft")
    case = f"{EXPORTS}:values_of_the_adapter", four_layers(), LORA, str(tmp_path / "final")
    merged, adapted = pool.run(1, *case)[0]
    assert abs(merged) > 1e-3
    assert adapted == pytest.approx(merged, abs=1e-5)


def test_a_run_refits_merged_weights_and_exports_both_forms(merged_run):
    peft = pytest.importorskip("peft")
    tmp_path, steps = merged_run
    # The engine samples with what the trainer computes, and the reference is the model without
    # adapters: the KL to it is 0 before the first step alone.
    assert all(steps[step]["mismatch/max_abs"] < 1e-5 for step in (1, 2, 3))
    assert steps[1]["train/kl"] == 0
    assert steps[3]["train/kl"] > 0
    final = tmp_path / "final"
    merged = AutoModelForCausalLM.from_pretrained(final, dtype=torch.float32)
    settings = json.loads((final / "adapter" / "adapter_config.json").read_text())
    assert settings["r"] == 4
    base = AutoModelForCausalLM.from_pretrained(resolve_model("embedded"), dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, final / "adapter")
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        difference = (merged(ids).logits - adapted(ids).logits).abs().max()
    assert difference < 1e-4
