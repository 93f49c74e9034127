"""Weights that leave the policy are those that trained: in every family, in every spelling."""

import json
import os
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from nemo_like.config.optimizer import LoraConfig
from nemo_like.config.policy import ParallelConfig, PolicyConfig
from nemo_like.errors import RunError, UserError
from nemo_like.models.adapter_places import expected_adapters
from nemo_like.models.build import expected_tensors
from nemo_like.models.naming import Naming
from nemo_like.policy.state.checks import check_export
from nemo_like.policy.state.files import stored_files
from nemo_like.policy.state.twin import small_twin
from nemo_like.refit.buckets import announced_tensors, plan_buckets
from tests import engine_cases
from tests.conftest import build_tokenizer
from tests.export_cases import CASES, FAST, settings, vllm_gaps
from tests.exported_models import EXPERTS, FAMILIES, build
from tests.small_runs import run

TOLERANCE = 1e-5
# On the CPU vLLM lacks linear attention, and its latent attention is another than transformers'.
NOT_IN_VLLM = {"qwen3-next", "deepseek-v2", "deepseek-v3"}


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    built = {}
    tokenizer = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(tokenizer)

    def get(family):
        if family not in built:
            built[family] = str(build(family, tmp_path_factory.mktemp(family), tokenizer))
        return built[family]

    return get


@pytest.fixture(scope="module")
def trained(pool, model_of, tmp_path_factory):
    """``trained(family, rank)`` -> gaps, folder; each is trained once."""
    done = {}

    def get(family, rank):
        if (family, rank) not in done:
            folder = tmp_path_factory.mktemp(f"{family}-{rank}") / "final"
            config = settings(family, rank)
            case = f"{CASES}:train_and_export", model_of(family), config, str(folder)
            done[family, rank] = pool.run(1, *case)[0], folder
        return done[family, rank]

    return get


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rank", [0, 8], ids=["whole", "lora"])
def test_the_exported_folder_has_the_logprobs_of_the_trainer(family, rank, trained):
    gaps, folder = trained(family, rank)
    assert len(gaps) == (2 if rank else 1)
    assert max(gaps) < TOLERANCE
    usual = 0o666 & ~os.umask(0o022)  # which it is by default, here and in the pool
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()} == {usual}


def _in_vllm(family, rank, marks=()):
    return pytest.param(family, rank, marks=marks, id=f"{family}-{'lora' if rank else 'whole'}")


@pytest.mark.parametrize(
    ("family", "rank"),
    [
        *(_in_vllm(family, 0) for family in FAMILIES if family not in NOT_IN_VLLM),
        *(
            _in_vllm(family, 8, pytest.mark.full)
            for family in FAMILIES
            if family not in NOT_IN_VLLM
        ),
    ],
)
def test_vllm_has_the_logprobs_of_the_trainer_after_three_refits(
    family, rank, trained, vllm_process
):
    _, folder = trained(family, rank)
    prefill, decode = vllm_process.submit(vllm_gaps, str(folder)).result(timeout=120)
    assert prefill < TOLERANCE
    assert decode < TOLERANCE


# Last parts of the names under which publishers, and transformers before version 5, have experts.
PUBLISHED = {
    "qwen3-moe": "mlp.experts.{}.{gate_proj,up_proj,down_proj}.weight",
    "qwen3-moe-tied": "mlp.experts.{}.{gate_proj,up_proj,down_proj}.weight",
    "qwen2-moe": "mlp.experts.{}.{gate_proj,up_proj,down_proj}.weight",
    "mixtral": "block_sparse_moe.experts.{}.{w1,w3,w2}.weight",
    "olmoe": "mlp.experts.{}.{gate_proj,up_proj,down_proj}.weight",
    "deepseek-v2": "mlp.experts.{}.{gate_proj,up_proj,down_proj}.weight",
    "deepseek-v3": "mlp.experts.{}.{gate_proj,up_proj,down_proj}.weight",
    "glm4-moe": "mlp.experts.{}.{gate_proj,up_proj,down_proj}.weight",
    "qwen3-next": "mlp.experts.{}.{gate_proj,up_proj,down_proj}.weight",
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_experts_leave_one_by_one_under_the_names_of_their_publishers(family, trained):
    _, folder = trained(family, 0)
    start, _, rest = PUBLISHED[family].partition("{}")
    matrices, end = rest.removeprefix(".{").split("}")
    wanted = {f"{start}{i}.{one}{end}" for i in range(4) for one in matrices.split(",")}
    names = [name for name in stored_files(folder) if "experts." in name and "shared" not in name]
    assert {name.split(".", 3)[3] for name in names} == wanted
    assert "gate_up_proj" not in "".join(names)


def test_the_output_head_of_gpt_neox_has_its_published_name(trained):
    assert "embed_out.weight" in stored_files(trained("neox", 0)[1])


LAYOUTS = {
    "fsdp2": (2, {"activation_checkpointing": "full"}),
    "fsdp3": (3, {}),
    "ddp2": (2, {"parallel": ParallelConfig(data_parallel="ddp")}),
    "pp2": (2, {"parallel": ParallelConfig(pipeline_parallel_size=2)}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("family", "rank"),
    [
        pytest.param("qwen3-moe-tied", 0, id="qwen3-moe-tied-whole"),
        pytest.param("mixtral", 8, id="mixtral-lora"),
        pytest.param("qwen3-moe-tied", 8, marks=pytest.mark.full, id="qwen3-moe-tied-lora"),
        pytest.param("mixtral", 0, marks=pytest.mark.full, id="mixtral-whole"),
    ],
)
def test_experts_are_read_trained_and_leave_alike_in_every_layout(
    family, rank, layout, pool, model_of
):
    config = settings(family, rank) | {"optimizer": FAST["optimizer"].replace(eps=1e-6)}
    case = f"{engine_cases.CASES}:train", model_of(family)
    expected = pool.run(1, *case, config, 2)[0]
    ranks, changes = LAYOUTS[layout]
    metrics, parameters = pool.run(ranks, *case, config | changes, 2)[0]
    assert metrics[-1]["loss"] == pytest.approx(expected[0][-1]["loss"], abs=TOLERANCE)
    assert list(parameters) == list(expected_tensors(model_of(family), torch.float32))
    assert engine_cases.largest_difference(parameters, expected[1]) < 1e-4


def test_a_checkpoint_of_experts_goes_on_on_one_and_on_four_ranks(pool, model_of, tmp_path):
    path, config = model_of("qwen3-moe"), settings("qwen3-moe", 0)
    config |= {"optimizer": FAST["optimizer"].replace(eps=1e-6)}
    case = f"{engine_cases.CASES}:save_then_go_on", path, config, str(tmp_path)
    metrics, expected = pool.run(2, *case)[0]
    for ranks in (1, 4):
        case = f"{engine_cases.CASES}:load_and_go_on", path, config, str(tmp_path)
        again, parameters = pool.run(ranks, *case)[0]
        assert again["loss"] == pytest.approx(metrics["loss"], abs=TOLERANCE)
        assert engine_cases.largest_difference(parameters, expected) < 1e-4


def test_tensors_of_another_type_are_read_into_each_ranks_rows(pool, tmp_path):
    matrix = torch.randn(5, 3).bfloat16()
    save_file({"matrix": matrix}, tmp_path / "model.safetensors")
    for found, types in pool.run(2, f"{CASES}:sharded_as_stored", str(tmp_path)):
        assert types == {torch.bfloat16}
        assert torch.equal(found, matrix.float())


def test_a_rank_reads_its_own_experts_alone(pool, model_of):
    first, second = pool.run(2, f"{CASES}:reads_own_experts", model_of("qwen3-moe"))
    assert {name.split(".")[5] for name in first} == {"0", "1"}
    assert {name.split(".")[5] for name in second} == {"2", "3"}


def test_a_tensor_that_comes_twice_is_refused(model_of):
    buckets = plan_buckets(expected_tensors(model_of("qwen3-moe"), torch.float32), 2**20)
    with pytest.raises(RunError, match=r"holds model\.embed_tokens\.weight twice"):
        announced_tensors([*buckets, buckets[0]])


def _lora(*targets, rank=8, **changes):
    return {"lora": LoraConfig(rank=rank, targets=list(targets), **changes)}


# Layers with experts, and the [out, in] of their stacked matrices that no other layer is called.
GATE_UP, DOWN = "gate_up_proj", "down_proj"
SMALL = {GATE_UP: (64, 64)}
WIDE = {GATE_UP: (128, 64), DOWN: (64, 64)}
STACKS = {
    "qwen3-moe": (2, SMALL | {DOWN: (64, 32)}),
    "qwen2-moe": (2, SMALL),
    "mixtral": (2, WIDE),
    "olmoe": (2, WIDE),
    "deepseek-v2": (1, SMALL),
    "deepseek-v3": (1, SMALL),
    "glm4-moe": (1, SMALL),
    "gpt-oss": (2, WIDE),
    "qwen3-next": (2, SMALL),
}
ON_DISK = {GATE_UP: ("gate_up_proj", "gate_proj", "up_proj", "w1", "w3"), DOWN: ("down_proj", "w2")}


@pytest.mark.parametrize("family", STACKS)
def test_adapters_of_experts_alone_learn_and_leave(family, pool, model_of):
    layers, shapes = STACKS[family]
    path, config = model_of(family), settings(family, 8) | _lora(*shapes)
    losses, names, moved, changed, count = pool.run(1, f"{CASES}:experts_learn", path, config)[0]
    # The first factors' gradients are 0 while the second ones are.
    assert moved[0] == {name for name in names if "lora_B" in name}
    assert moved[1] == set(names)
    assert abs(losses[5] - losses[0]) > 1e-3
    assert count == layers * 4 * 8 * sum(sum(shape) for shape in shapes.values())
    leaves = {leaf for target in shapes for leaf in ON_DISK[target]}
    assert changed == {
        name
        for name in expected_tensors(path, torch.float32)
        if ".experts." in name and name.removesuffix(".weight").rpartition(".")[2] in leaves
    }


def test_an_adapter_of_a_router_learns_and_leaves(pool, model_of):
    config = settings("qwen3-moe", 8) | _lora("gate")
    case = f"{CASES}:experts_learn", model_of("qwen3-moe"), config
    _, _, _, changed, count = pool.run(1, *case)[0]
    assert changed == {f"model.layers.{i}.mlp.gate.weight" for i in range(2)}
    assert count == 2 * 8 * (64 + 4)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("gate_up_projs", "did you mean gate_up_proj"),
        ("gate_proj", "did you mean .*gate_up_proj.*There are down_proj, gate, gate_up_proj, k_pr"),
    ],
)
def test_a_target_without_a_parameter_is_refused_with_near_names(target, message, pool, model_of):
    (said,) = pool.run(1, f"{CASES}:refused", model_of("qwen3-moe"), _lora(target))
    assert re.search(f"{target} names no linear layer.*{message}", said)


def test_refits_of_adapters_alone_are_refused_for_experts_and_accepted_for_linear_layers(
    pool, model_of
):
    apart = {"refit": "adapters"}
    (said,) = pool.run(1, f"{CASES}:refused", model_of("qwen3-moe"), _lora(**apart))
    assert "no place for adapters of gate_up_proj" in said
    assert "set policy.lora.refit=merged, or name linear layers" in said
    lora = LoraConfig(rank=8, targets=["q_proj", "o_proj"], **apart)
    specs = expected_adapters(model_of("qwen3-moe"), torch.float32, lora)
    assert len(specs) == 2 * 2 * 2
    assert pool.run(1, f"{CASES}:refused", model_of("qwen3-moe"), {"lora": lora}) == [""]


def test_the_adapter_folder_of_shared_experts_does_not_name_what_peft_takes_for_experts(trained):
    _, folder = trained("deepseek-v3", 8)
    said = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert not {"gate_proj", "up_proj", "down_proj", "gate"} & set(said["target_modules"])
    assert "mlp.shared_experts.gate_proj.weight" in said["target_parameters"]
    assert "mlp.experts.gate_up_proj" in said["target_parameters"]


@pytest.mark.parametrize("output", ["logprobs", "values"])
@pytest.mark.parametrize("rank", [0, 8], ids=["whole", "lora"])
def test_the_start_up_check_passes_what_is_right(rank, output, model_of):
    for family in ("llama-tied", "gpt2-tied", "qwen3-moe", "mixtral", "deepseek-v3"):
        config = PolicyConfig(model=family, lora=LoraConfig(rank=rank))
        check_export(model_of(family), config, output)


class GainConfig(LlamaConfig):
    """Of a model with a parameter of its own."""

    model_type = "llama-with-gain"


class GainModel(LlamaForCausalLM):
    """Its files lack ``gain``, or have what it began with, as its configuration says."""

    config_class = GainConfig

    def __init__(self, config):
        super().__init__(config)
        self.gain = nn.Parameter(torch.ones(config.hidden_size))
        self.model.norm.register_forward_hook(lambda _, args, out: out * self.gain)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}gain"]
        if self.config.keeps_gain:
            destination[f"{prefix}gain"] = torch.ones_like(self.gain)


@pytest.mark.parametrize(
    ("keeps", "message"),
    [
        (False, "cannot be exported as it would be trained: gain trains but is missing from the"),
        (
            True,
            r"after one step its outputs differ by \d.* from those of its files in transformers",
        ),
    ],
)
def test_what_would_leave_otherwise_than_it_trained_is_refused_before_training(
    keeps, message, tmp_path
):
    AutoConfig.register(GainConfig.model_type, GainConfig, exist_ok=True)
    AutoModelForCausalLM.register(GainConfig, GainModel, exist_ok=True)
    known = FAMILIES["llama"]().to_dict() | {"model_type": GainConfig.model_type}
    (tmp_path / "config.json").write_text(json.dumps(known | {"keeps_gain": keeps}))
    with pytest.raises(UserError, match=message):
        check_export(str(tmp_path), PolicyConfig(model="gain"), "logprobs")


def test_without_targets_experts_have_adapters_and_routers_have_not(trained, model_of):
    refit = load_file(trained("qwen3-moe", 8)[1].with_name("refit-2.safetensors"))
    before = load_file(model_of("qwen3-moe") + "/model.safetensors")
    same = {name for name in refit if torch.equal(refit[name], before[name])}
    assert not [name for name in same if "_proj" in name]
    assert {name for name in same if "mlp.gate." in name} == {
        f"model.layers.{i}.mlp.gate.weight" for i in range(2)
    }


def _stripped(name):
    return name.removeprefix("transformer.")


@pytest.mark.parametrize("family", ["mixtral", "gpt2-tied"])
def test_folders_with_other_names_are_read_like_the_usual_ones(family, pool, model_of, tmp_path):
    """With names in memory, as ours had until now; without the prefix, as GPT-2's on the hub."""
    path = model_of(family)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tensors = {
        n: t for n, t in model.state_dict().items() if n != "lm_head.weight" or "gpt" not in family
    }
    save_file(
        {_stripped(name): tensor for name, tensor in tensors.items()},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    model.config.save_pretrained(tmp_path)
    case = f"{engine_cases.CASES}:train"
    (_, expected), (_, found) = (
        pool.run(2, case, folder, settings(family, 0), 0)[0] for folder in (path, str(tmp_path))
    )
    assert engine_cases.largest_difference(found, expected) == 0


def test_experts_are_put_together_from_buffers_that_are_used_again(model_of):
    path = model_of("mixtral")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    files = load_file(path + "/model.safetensors")
    buffer = torch.empty(max(each.numel() for each in files.values()))

    def one_after_the_other():
        for name, each in files.items():
            view = buffer[: each.numel()].view(each.shape)
            yield name, view.copy_(each)

    found = {name: each.clone() for name, each in Naming(model).in_memory(one_after_the_other())}
    assert engine_cases.largest_difference(found, model.state_dict()) == 0


@pytest.mark.parametrize("family", EXPERTS)
def test_a_twin_has_all_kinds_of_layers_and_few_of_everything(family):
    config = FAMILIES[family]()
    config.num_hidden_layers = 24
    config.layer_types = None
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
    full = type(config).from_dict(config.to_dict() | heads)
    twin = small_twin(AutoModelForCausalLM, full)
    names = Naming(twin).to_disk(twin.state_dict())
    assert any("experts" in name for one in names for name in one.names)
    assert sum(each.numel() for each in twin.parameters()) < 2_000_000


@pytest.mark.full  # each half is in this file, and in test_exports_in_engines.py
def test_a_mixture_of_experts_runs_through_vllm(model_of, tmp_path, local_ray):
    steps = run(
        tmp_path,
        f"policy.model={model_of('qwen3-moe')}",
        "policy.lora.rank=8",
        "policy.optimizer.lr=1e-2",
        "generation.backend=vllm",
        "grpo.max_steps=5",
        "validation.every_steps=0",
    )
    assert sorted(step for step in steps if step) == [1, 2, 3, 4, 5]
    assert max(steps[step]["mismatch/max_abs"] for step in range(1, 6)) < TOLERANCE
    sides = 2 * (64 + 64) + 2 * (64 + 32) + 4 * (64 + 64) + 4 * (64 + 32)  # q, o; k, v; experts
    assert f"{2 * 8 * sides:,} parameters train" in (tmp_path / "run.log").read_text()
