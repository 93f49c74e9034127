"""Before Ray starts: who sits where, what a model allows, what will be in memory."""

import json
import math
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from transformers import LlamaConfig

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # scripts, which are no package

import predicted

from nemo_like.algorithms.engine_size import engine_config
from nemo_like.cli import main
from nemo_like.compose.files import SHIPPED as CONFIGS
from nemo_like.compose.load import compose_config, compose_raw
from nemo_like.config.optimizer import LoraConfig, OptimizerConfig
from nemo_like.config.policy import DDPConfig, ParallelConfig, PolicyConfig
from nemo_like.errors import UserError
from nemo_like.launch import plan_memory
from nemo_like.models.resolve import resolve_model
from nemo_like.planning.activations import layer_activations, layers_in_flight
from nemo_like.planning.layout import layer_range, parallel_sizes
from nemo_like.planning.memory import predict_memory
from nemo_like.planning.model_shape import (
    GIB,
    ModelShape,
    Role,
    read_model_shape,
    read_settings,
)
from nemo_like.planning.offload import Neighbours
from nemo_like.planning.placement import check_model_fits
from nemo_like.planning.resources import plan_run, sequences_at_once
from nemo_like.planning.step_time import (
    COLLECTIVES_S,
    FLOAT32_FLOPS,
    LAUNCH_S,
    MOMENT_S,
    PARAMETER_S,
    ROLLOUT_S,
    SHARDS_BYTES_PER_S,
    Work,
    forward_seconds,
    offload_seconds,
    predict_step,
    train_seconds,
)


def policy(**sizes):
    """A policy with sizes of ``policy.parallel``, by the short names of axes."""
    names = {
        "pp": "pipeline_parallel_size",
        "cp": "context_parallel_size",
        "tp": "tensor_parallel_size",
        "replicate": "replicate_size",
    }
    return PolicyConfig(parallel=ParallelConfig(**{names.get(k, k): v for k, v in sizes.items()}))


# Layouts.

LAYOUTS = [  # ranks, sizes -> pp, replicate, shard, cp, tp
    (8, {}, (1, 1, 8, 1, 1)),
    (8, {"data_parallel": "ddp"}, (1, 8, 1, 1, 1)),
    (8, {"replicate": 2}, (1, 2, 4, 1, 1)),
    (8, {"tp": 2}, (1, 1, 4, 1, 2)),
    (8, {"tp": 8}, (1, 1, 1, 1, 8)),
    (8, {"cp": 4, "tp": 2}, (1, 1, 1, 4, 2)),
    (8, {"pp": 2, "tp": 2}, (2, 1, 2, 1, 2)),
    (16, {"pp": 2, "replicate": 2, "cp": 2}, (2, 2, 2, 2, 1)),
    (16, {"pp": 2, "replicate": 2, "cp": 2, "tp": 2}, (2, 2, 1, 2, 2)),
    (16, {"pp": 4, "tp": 2}, (4, 1, 2, 1, 2)),
]


@pytest.mark.parametrize(("num_ranks", "sizes", "expected"), LAYOUTS, ids=str)
def test_what_no_size_claims_is_sharded(num_ranks, sizes, expected):
    found = parallel_sizes(policy(**sizes), num_ranks)
    assert (found.pp, found.replicate, found.shard, found.cp, found.tp) == expected
    assert found.num_ranks == num_ranks
    places = [tuple(found.coordinates(rank).values()) for rank in range(num_ranks)]
    assert places == sorted(set(places)), "ranks count through the grid, the last axis fastest"


def test_stages_share_layers_and_the_first_ones_take_what_is_left():
    assert [len(layer_range(10, 4, stage)) for stage in range(4)] == [3, 3, 2, 2]
    assert [i for stage in range(4) for i in layer_range(10, 4, stage)] == list(range(10))


# What a model allows.

QWEN = {  # Qwen2.5-1.5B
    "num_hidden_layers": 28,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN_7B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}


@pytest.fixture
def folder(tmp_path):
    def write(**changes):
        (tmp_path / "config.json").write_text(json.dumps(QWEN | changes))
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 8}, "tensor_parallel_size=8 does not divide the model's num_attention_heads=12"),
        ({"tp": 4}, "tensor_parallel_size=4 does not divide the model's num_key_value_heads=2"),
        ({"tp": 4}, "use 1 or 2."),
        ({"cp": 8}, "context_parallel_size=8 does not divide the model's num_attention_heads=12"),
        ({"cp": 8}, "use 1, 2, 3, 4, 6 or 12."),
        ({"cp": 4, "tp": 2}, "num_attention_heads=12 / policy.parallel.tensor_parallel_size=2"),
        ({"pp": 32}, "pipeline_parallel_size=32 makes 32 stages, and the model has 28 layers"),
        (
            {"pp": 16, "pipeline_schedule": "interleaved"},
            "with pipeline_schedule=interleaved makes 32 stages",
        ),
    ],
)
def test_a_layout_that_the_model_cannot_be_cut_into_is_refused(folder, sizes, message):
    with pytest.raises(UserError) as error:
        check_model_fits(policy(**sizes), max(8, sizes.get("pp", 1)), folder())
    assert message in str(error.value)
    assert str(error.value).startswith("policy.parallel.")


def test_completions_longer_than_the_context_are_refused_by_a_plan_too(capsys):
    for key in ("generation.max_new_tokens", "validation.max_new_tokens"):
        with pytest.raises(SystemExit):
            main(["plan", f"{key}=5000"])
        told = f"{key}=5000 does not fit the model's context of 512 tokens"
        assert told in capsys.readouterr().err


def test_models_that_graph_cannot_round_are_refused_by_a_plan_too(tmp_path, capsys):
    fp8 = ["generation.backend=graph", "generation.quantization=fp8", "policy.dtype=bfloat16"]
    settings = LlamaConfig(hidden_size=64, num_attention_heads=2, intermediate_size=72)
    for layers, gpus, told in (
        (2, 0, "needs three layers, and this model has 2"),
        (4, 0, ""),
        (4, 1, "hidden_size and intermediate_size to be multiples of 16, and one is 72"),
    ):
        settings.num_hidden_layers = layers
        settings.save_pretrained(tmp_path)
        words = [*fp8, f"policy.model={tmp_path}", f"cluster.gpus_per_node={gpus}"]
        with pytest.raises(SystemExit) if told else nullcontext():
            main(["plan", *words])
        assert told in capsys.readouterr().err


def test_layouts_that_fit_the_model_pass(folder, tmp_path):
    for sizes in ({}, {"tp": 2}, {"cp": 4}, {"pp": 4}, {"pp": 2, "tp": 2, "cp": 2}):
        check_model_fits(policy(**sizes), 8, folder())
    nested = {"text_config": QWEN, "vision_config": {"num_attention_heads": 5}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    check_model_fits(policy(tp=2), 8, tmp_path)
    with pytest.raises(UserError, match="num_attention_heads=12"):
        check_model_fits(policy(tp=8), 8, tmp_path)


def test_rows_that_tensor_and_sharding_ranks_cannot_both_split_are_refused(folder):
    # 8960 / 2 = 4480 = 2^7 x 35 rows divide by 64 ranks, 1536 = 2^9 x 3 and 256 / 2 too; 24 do not.
    check_model_fits(policy(tp=2), 128, folder())
    with pytest.raises(UserError, match=r"leaves 24 ranks .* raise policy\.parallel\.replicate"):
        check_model_fits(policy(tp=2), 48, folder())


def test_numbers_that_config_json_leaves_out_are_left_to_the_workers(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "odd"}')
    check_model_fits(policy(tp=8), 8, tmp_path)
    with pytest.raises(UserError, match="does not give hidden_size"):
        read_model_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        check_model_fits(policy(), 8, tmp_path)


def test_quantized_weights_are_refused(tmp_path):
    """Read as they are, without their scales, they would be others."""
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    with pytest.raises(UserError, match="are quantized"):
        check_model_fits(policy(), 8, tmp_path)


def test_the_shape_of_a_model_has_its_number_of_parameters():
    from transformers import AutoConfig, AutoModelForCausalLM

    path = resolve_model("embedded")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    assert read_model_shape(path).num_parameters == sum(p.numel() for p in model.parameters())


def test_other_names_of_the_same_numbers_are_read(tmp_path):
    gpt2 = {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_inner": None, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(gpt2))
    shape = read_model_shape(tmp_path)
    assert (shape.layers, shape.hidden, shape.intermediate, shape.tied) == (2, 64, 256, True)
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (4, 4, 16)
    (tmp_path / "config.json").write_text(json.dumps(gpt2 | {"model_type": "qwen3"}))
    assert read_model_shape(tmp_path).head_dim == 128, "transformers' default"
    (tmp_path / "config.json").write_text(json.dumps(gpt2 | {"num_experts": 8}))
    with pytest.raises(UserError, match="has experts"):
        read_model_shape(tmp_path)


# Memory, by hand for one tiny shape. One layer: q 16, k 8, v 8, o 16, MLP 3 x 4 x 8 = 96: 144
# parameters in matrices, 8 in norms. Embedding and head 40 each, final norm 4. In all 2 x 152 + 84.

TINY = ModelShape(
    layers=2, hidden=4, intermediate=8, heads=2, kv_heads=1, head_dim=2, vocab=10, tied=False
)
TOTAL = 388


def memory(config, num_ranks=1, shape=TINY, **options):
    """Phase -> part -> bytes, with ``host``."""
    phases = predict_memory(shape, config, num_ranks, **options)
    return {
        phase.name: {part: size * GIB for part, size in phase.parts.items()}
        | {"host": phase.host * GIB}
        for phase in phases
    }


def tiny(**changes):
    defaults = {"dtype": "bfloat16", "micro_batch_tokens": 100, "logprob_chunk_tokens": 10}
    return PolicyConfig(**defaults | changes)


def test_memory_of_one_rank_by_hand():
    assert TINY.num_parameters == TOTAL
    found = memory(tiny())
    assert found["start"] == pytest.approx({"parameters": 4 * TOTAL, "host": 0})
    assert found["optimizer"] == pytest.approx(
        {
            "parameters": 4 * TOTAL,
            "optimizer": 8 * TOTAL,
            "gradients": 4 * TOTAL,
            "working": 0,
            "host": 0,
        }
    )
    # A layer saves, a token: two norms of (4 + 2) x 4 + 2 x 4 + 4 = 36; attention 2 (2 x 4 + 2 x 2)
    # + 4 x 2 = 32; MLP 4 x 2 x 8 = 64. Above the layers: (4 + 3 x 2) x 4 = 40. Most is held in the
    # head's backward pass: root and last layer are gathered; float32 gradients of the head and of a
    # token's 4 numbers before it; logits of 10 tokens in float32, their gradient in 16 bits.
    assert found["train"] == pytest.approx(
        {
            "parameters": 4 * TOTAL,
            "optimizer": 8 * TOTAL,
            "gradients": 4 * TOTAL,
            "gathered": 2 * 152 + 2 * 84,
            "reducing": 4 * 40,
            "activations": 100 * (2 * (72 + 32 + 64) + 40 + 4 * 4),
            "working": 0,
            "logits": (4 + 2) * 10 * 10,
            "host": 0,
        }
    )
    # In a layer three tensors of width 8 and two of width 4; at the head, two of width 4.
    assert found["logprobs"]["working"] == pytest.approx(100 * 2 * (3 * 8 + 2 * 4))
    assert found["logprobs"]["logits"] == 0


def test_the_largest_moment_of_a_step_depends_on_the_vocabulary_and_on_checkpointing():
    wide = replace(TINY, vocab=1000)
    root = 2 * 4 * 1000 + 4
    # Two chunks' logits in float32 are more than one's with their gradient in 16 bits...
    forward = memory(tiny(logprob_chunk_tokens=99), shape=wide)["train"]
    assert forward["logits"] == pytest.approx(2 * 4 * 99 * 1000)
    assert (forward["reducing"], forward["activations"]) == pytest.approx((0, 100 * 376))
    # ... and a single chunk's are not.
    backward = memory(tiny(logprob_chunk_tokens=100), shape=wide)["train"]
    assert backward["logits"] == pytest.approx((4 + 2) * 100 * 1000)
    assert backward["reducing"] == pytest.approx(4 * 4000)
    # Entropies need a second tensor, which compiled code does without.
    for compiled, tensors in ((False, 2), (True, 1)):
        found = memory(tiny(logprob_chunk_tokens=100, compile=compiled), shape=wide)["logprobs"]
        assert found["logits"] == pytest.approx(tensors * 4 * 100 * 1000)
        assert found["working"] == pytest.approx(100 * 2 * 2 * 4)
    # Recomputing everything, the first layer: the whole layer again; MLP gradients; the head's.
    full = {"activation_checkpointing": "full"}
    first = memory(tiny(**full), num_micro_batches=1)["train"]
    assert first["working"] == pytest.approx(100 * (168 + 2 * (2 * 8 + 2 * 4)))
    # The last layer has the same, all inputs of layers, and fewer gradients: 4 x 152 < 100 x 8.
    assert first["activations"] == pytest.approx(2 * 100 * 8)
    assert first["reducing"] == pytest.approx(2 * 40 + (2 + 4) * 152)
    few = memory(tiny(micro_batch_tokens=10, **full), num_micro_batches=1)["train"]
    assert few["activations"] == pytest.approx(10 * 8)
    assert few["gradients"] == pytest.approx(4 * 152)
    # With almost no tokens it is the root's gradient: sent, its sum, and what is added to it.
    least = memory(tiny(micro_batch_tokens=2, **full), shape=wide)["train"]
    assert least["reducing"] == pytest.approx(12 * root)
    four = memory(tiny(micro_batch_tokens=2, **full), 4, wide)["train"]
    assert four["reducing"] == pytest.approx(6 * root)


def test_checkpointing_and_compilation_keep_less():
    def kept(**changes):
        return memory(tiny(**changes))["train"]["activations"] / 100 - 40 - 4 * 4

    assert kept() == pytest.approx(2 * 168)
    assert kept(compile=True) == pytest.approx(2 * (2 * (2 * 8 + 4) + 32 + 3 * 2 * 8))
    # Input 8; q, k, v 2 (4 + 4); attention 8 + 8; back 2 x 8, of which compiled code keeps one;
    # gate and up 32.
    parts = {"activation_checkpointing": "selective", "micro_batch_tokens": 1000}
    wide = replace(TINY, vocab=1000)
    for compiled, back in ((False, 2 * 8), (True, 8)):
        config = tiny(compile=compiled, logprob_chunk_tokens=999, **parts)
        found = memory(config, shape=wide)["train"]
        assert found["activations"] / 1000 == pytest.approx(2 * (8 + 16 + 16 + back + 32) + 40)
    assert kept(dtype="float32") > 2 * 168
    offloaded = memory(tiny(activation_offload=True))["train"]
    assert offloaded["activations"] == pytest.approx(100 * (168 + 40 + 4 * 4))
    assert offloaded["host"] == pytest.approx(100 * 168)


def test_sharding_divides_what_lasts_and_gathering_does_not():
    four = memory(tiny(), 4)
    assert four["train"]["parameters"] == pytest.approx(TOTAL)
    assert four["train"]["optimizer"] == pytest.approx(2 * TOTAL)
    assert four["train"]["gradients"] == pytest.approx(TOTAL)
    assert four["train"]["gathered"] == memory(tiny())["train"]["gathered"]
    copies = memory(tiny(parallel=ParallelConfig(replicate_size=2)), 4)
    assert copies["train"]["parameters"] == pytest.approx(2 * TOTAL)
    kept = memory(tiny(parallel=ParallelConfig(reshard_after_forward=False)), 4)
    assert kept["train"]["gathered"] == pytest.approx(2 * TOTAL)
    assert kept["train"]["gradients"] == pytest.approx(4 * TOTAL)
    assert kept["optimizer"]["gradients"] == pytest.approx(TOTAL)
    context = memory(tiny(parallel=ParallelConfig(context_parallel_size=2)), 2)
    assert context["train"]["parameters"] == pytest.approx(2 * TOTAL)
    # Half of the tokens; the one key-value head is repeated for two ranks: 2 x 2 x 2 more bytes.
    assert context["train"]["activations"] == pytest.approx(50 * 2 * (168 + 8))


def test_tensor_parallel_ranks_split_matrices_and_sequence_parallel_ones_also_norms():
    whole = memory(tiny())["train"]
    shape = replace(TINY, kv_heads=2)  # k and v twice as wide: matrices of 160
    two = memory(tiny(parallel=ParallelConfig(tensor_parallel_size=2)), 2, shape)["train"]
    assert two["parameters"] == pytest.approx(4 * (2 * (160 / 2 + 8) + 80 / 2 + 4))
    assert two["logits"] == whole["logits"] / 2
    attention, mlp = (2 * (2 * 4 + 2 * 4) + 8) / 2, 64 / 2
    assert two["activations"] == pytest.approx(100 * (2 * (72 + attention + mlp) + 40 + 16))
    sequence = ParallelConfig(tensor_parallel_size=2, sequence_parallel=True)
    split = memory(tiny(parallel=sequence), 2, shape)["train"]
    norms = 2 * ((4 + 2) * 4 / 2 + 8 + 4 / 2)
    assert split["activations"] == pytest.approx(100 * (2 * (norms + attention + mlp) + 40 + 16))


def test_ddp_holds_everything_on_every_rank():
    def gradients(**keys):
        ddp = ParallelConfig(data_parallel="ddp", ddp=DDPConfig(**keys))
        return memory(tiny(parallel=ddp), 4)["train"]

    plain = gradients()
    assert plain["parameters"] == plain["gradients"] == pytest.approx(4 * TOTAL)
    assert plain["gathered"] == pytest.approx(2 * TOTAL)
    assert plain["reducing"] == pytest.approx(4 * 40), "of the head, before it is rounded"
    ddp = ParallelConfig(data_parallel="ddp")
    assert memory(tiny(parallel=ddp), 4)["logprobs"]["gradients"] == pytest.approx(4 * TOTAL)
    assert memory(tiny(parallel=ddp), 1)["logprobs"]["gradients"] == 0, "one rank has no buckets"
    assert gradients(compression="powersgd")["gradients"] == pytest.approx(8 * TOTAL)
    assert gradients(average_every_steps=4)["gradients"] == pytest.approx(4 * TOTAL)


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("adamw", 8 * TOTAL),
        ("sgd", 4 * TOTAL),
        ("muon", 4 * 288 + 8 * (TOTAL - 288)),
        ("adafactor", 0),
    ],
)
def test_each_optimizer_has_its_state(kind, size):
    found = memory(tiny(optimizer=OptimizerConfig(kind=kind)))
    assert found["optimizer"]["optimizer"] == pytest.approx(size)


def test_what_is_offloaded_is_on_the_host():
    state = memory(tiny(offload="optimizer"))
    for phase in ("train", "optimizer"):
        assert state[phase]["host"] == pytest.approx(8 * TOTAL)
        assert state[phase]["optimizer"] == pytest.approx(8 * TOTAL), "all of it passes at once"
    rounded = OptimizerConfig(moments="bfloat16")
    state = memory(tiny(offload="optimizer", optimizer=rounded))["optimizer"]
    assert (state["host"], state["working"]) == pytest.approx((4 * TOTAL, 16 * TOTAL))
    momentum = OptimizerConfig(kind="sgd")
    moved = memory(tiny(offload="optimizer", optimizer=momentum))
    assert "optimizer" not in moved["train"]
    assert moved["train"]["host"] == moved["optimizer"]["optimizer"] == pytest.approx(4 * TOTAL)
    every = memory(tiny(offload="all"))
    assert every["train"].keys() & {"parameters", "gradients", "optimizer"} == set()
    assert every["train"]["host"] == pytest.approx(16 * TOTAL)
    assert every["optimizer"] == pytest.approx({"host": 16 * TOTAL})


def test_a_reference_model_and_a_float32_head_take_their_part():
    with_reference = memory(tiny(), role=Role(with_reference=True))
    assert with_reference["start"]["parameters"] == pytest.approx(8 * TOTAL)
    head = memory(tiny(float32_head=True))["train"]
    assert head["gathered"] == pytest.approx(2 * 152 + 4 * 84)
    assert head["logits"] == pytest.approx(4 * 10 * 10), "the gradient overwrites float32 logits"
    # Rows that predict are float32: 8 more bytes a token than with a head in 16 bits.
    assert head["activations"] == pytest.approx(100 * (2 * 168 + 40 + 8 + 16))


def test_stages_hold_their_layers_and_the_micro_batches_on_their_way():
    two = ParallelConfig(pipeline_parallel_size=2)
    first = memory(tiny(parallel=two), 2, num_micro_batches=8)["train"]
    last = memory(tiny(parallel=two), 2, num_micro_batches=8, pipeline_rank=1)["train"]
    assert first["parameters"] == pytest.approx(4 * (152 + 40))
    assert last["parameters"] == pytest.approx(4 * (152 + 44))
    assert first["activations"] == pytest.approx(100 * 2 * 168)
    assert last["activations"] == pytest.approx(100 * (168 + 40 + 16))
    assert first["logits"] == 0
    tied = memory(
        tiny(parallel=two), 2, replace(TINY, tied=True), num_micro_batches=8, pipeline_rank=1
    )
    assert tied["train"]["parameters"] == last["parameters"], "a tied head is there twice"


@pytest.mark.parametrize(
    ("schedule", "by_rank"),
    [
        # 8 layers, 4 ranks, 6 micro-batches.
        ("gpipe", [12, 12, 12, 12]),
        ("one_f_one_b", [8, 6, 4, 2]),
        # Two stages of one layer a rank: 2 (4 - r - 1) + 4 + 1 passes.
        ("interleaved", [11, 9, 7, 5]),
    ],
)
def test_schedules_differ_in_what_is_on_its_way(schedule, by_rank):
    parallel = ParallelConfig(pipeline_parallel_size=4, pipeline_schedule=schedule)
    shape = replace(TINY, layers=8)
    assert [layers_in_flight(shape, parallel, rank, 6) for rank in range(4)] == by_rank


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("compiled", "checkpointing"),
    [
        (False, "none"),
        (True, "none"),
        (True, "selective"),  # uncompiled, it keeps tensors out of autograd's sight
    ],
)
def test_activations_are_what_autograd_saves_for_a_layer_of_transformers(
    dtype, compiled, checkpointing
):
    import torch
    from transformers import Qwen2Config
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

    from nemo_like.policy.parallel.wrap import wrap_layers

    num_tokens, kept = 128, {}
    config = Qwen2Config(
        hidden_size=96,
        intermediate_size=320,
        num_attention_heads=6,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    layer = Qwen2DecoderLayer(config, 0).to(getattr(torch, dtype)).eval()
    hidden = torch.randn(1, num_tokens, 96, dtype=layer.mlp.up_proj.weight.dtype)
    rotary = Qwen2RotaryEmbedding(config)(hidden, torch.arange(num_tokens)[None])
    known = {x.untyped_storage().data_ptr() for x in (*layer.parameters(), *rotary)}

    def keep(x):
        if x.untyped_storage().data_ptr() not in known:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    layers = torch.nn.ModuleList([layer])
    wrap_layers(torch.nn.Sequential(layers), PolicyConfig(activation_checkpointing=checkpointing))
    # The backend cuts graphs as torch.compile's default does, and needs no C++ compiler.
    backend = "aot_eager_decomp_partition"
    run = torch.compile(layers[0], backend=backend) if compiled else layers[0]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        run(hidden.requires_grad_() * 1, position_embeddings=rotary)
    measured = sum(x.untyped_storage().nbytes() for x in kept.values())

    shape = ModelShape(
        layers=1,
        hidden=96,
        intermediate=320,
        heads=6,
        kv_heads=2,
        head_dim=16,
        vocab=8,
        tied=True,
    )
    changes = {"dtype": dtype, "compile": compiled, "activation_checkpointing": checkpointing}
    config = PolicyConfig(**changes)
    predicted = layer_activations(shape, config, parallel_sizes(config, 1))
    assert predicted.saved * num_tokens == pytest.approx(measured)


# Peaks that benchmarks/training.py measured on H100s, with torch 2.11: of a first logprob pass,
# before AdamW has state, and of everything after it, later logprob passes included.
RECORDS = Path(__file__).parents[1] / "benchmarks" / "results" / "training-h100.jsonl"
MEASURED = [
    record
    for record in map(json.loads, RECORDS.read_text().splitlines())
    if "train_peak_gib" in record
]
# By measured peak: records that the formulas miss by more than 1 %, and why.
MISSED = {
    50.51: "selective checkpointing did not keep results of variable-length attention",
    64.76: "unknown: compiled layers kept 4 bytes more a token and width than in a later run",
    65.63: "rows of unequal length: padded within attention, compiled for changing sizes",
}


@pytest.mark.parametrize(
    "record", MEASURED, ids=lambda r: f"{r['shape']},{r['config']},{r['attention']},{r['rows']}"
)
def test_predicted_peaks_are_measured_ones(folder, record):
    keys = OmegaConf.from_dotlist(record["config"].split(","))
    config = PolicyConfig.model_validate({"dtype": "bfloat16"} | OmegaConf.to_container(keys))
    shape = read_model_shape(folder(**(QWEN_7B if record["shape"] == "qwen2.5-7b" else {})))
    num_micro_batches = math.ceil(record["rows"] * record["length"] / config.micro_batch_tokens)
    phases = predict_memory(shape, config, record["gpus"], num_micro_batches=num_micro_batches)
    first = next(phase for phase in phases if phase.name == "logprobs")
    first = first.total - first.parts["optimizer"]
    peak = max(phase.total for phase in phases)
    assert first == pytest.approx(record["logprobs_peak_gib"], rel=0.02)
    limit = 0.06 if record["train_peak_gib"] in MISSED else 0.01
    assert peak == pytest.approx(record["train_peak_gib"], rel=limit)


def test_what_is_predicted_for_any_record_is_what_was_measured():
    """Within 15 %; calls of parts of a step vary by 0.02 s, too. What is missed has a reason."""
    compared = list(predicted.compared())
    assert len(compared) > 160
    for one in compared:
        near = pytest.approx(one.measured, rel=0.15, abs=0.0 if one.phase == "step" else 0.02)
        assert (one.predicted == near) != ((one.record, one.phase) in predicted.MISSED), one


def test_what_bounds_a_step_depends_on_the_model():
    shapes = {name: predicted.shape_of(name) for name in ("qwen2.5-1.5b", "qwen2.5-7b")}
    overrides = ("cluster.gpus_per_node=1", "policy.micro_batch_tokens=16384")
    long = ("generation.max_new_tokens=1024", "policy.dtype=bfloat16")
    config = compose_config(CONFIGS, "grpo", [*overrides, *long])
    bounds = {
        name: predict_step(config, shape, plan_run(config))[0].bound_by
        for name, shape in shapes.items()
    }
    assert bounds["qwen2.5-1.5b"] == "the engine's host process"
    assert bounds["qwen2.5-7b"] == "reading weights and cache"
    trains = [
        predict_step(config, shape, plan_run(config))[-1].bound_by
        for shape in (TINY, shapes["qwen2.5-7b"])
    ]
    assert trains == ["Python, which launches kernels", "matrix products"]


def test_a_step_has_the_passes_that_its_keys_ask_for():
    def phases(*words):
        config = compose_config(CONFIGS, "grpo", ["cluster.gpus_per_node=1", *words])
        return {one.name: one.seconds for one in predict_step(config, TINY, plan_run(config))}

    once = phases()
    assert "logprobs" not in once
    twice = phases("grpo.num_epochs_per_batch=2")
    assert twice["train"] == pytest.approx(2 * once["train"])
    with_reference = phases("loss.kl_coef=0.1")["logprobs"]
    assert twice["logprobs"] == phases("mismatch.action=mask")["logprobs"] == with_reference
    both = phases("loss.kl_coef=0.1", "grpo.num_mini_batches=2")
    assert both["logprobs"] == pytest.approx(2 * with_reference)
    on_host, parts = "policy.offload=optimizer", "grpo.num_mini_batches=2"
    updates = phases(on_host, parts, "grpo.num_epochs_per_batch=3")["optimizer"]
    assert updates == pytest.approx(6 * phases(on_host)["optimizer"])


@pytest.mark.parametrize(("schedule", "idle"), [("one_f_one_b", 3 / 8), ("interleaved", 3 / 16)])
def test_a_pipeline_waits_at_its_ends_and_gathers_nothing(schedule, idle):
    """Four ranks with eight micro-batches, against all the work of one rank without gathering."""

    def seconds(of, num_ranks, **parallel):
        config = PolicyConfig(micro_batch_tokens=1024, parallel=ParallelConfig(**parallel))
        return of(Work(config.replace(offload="optimizer"), TINY, num_ranks, 8192, 1024, 8192))

    for of in (forward_seconds, train_seconds):
        piped = seconds(of, 4, pipeline_parallel_size=4, pipeline_schedule=schedule)
        assert piped == pytest.approx((1 + idle) * seconds(of, 1) / 4)


def test_products_of_32_bits_take_as_long_as_a_gpu_takes_for_them():
    shape = predicted.shape_of("qwen2.5-7b")
    exact, rounded = (
        train_seconds(Work(PolicyConfig(dtype=dtype, compile=True), shape, 1, 8192, 1024, 8192))
        for dtype in ("float32", "bfloat16")
    )
    flops = 6 * 8192 * shape.num_parameters
    assert exact > flops / FLOAT32_FLOPS > 7 * rounded


def test_a_pass_takes_what_python_needs_to_launch_it_or_the_gpu_to_compute_it():
    """Each micro-batch costs a narrow model the launches, and a wide one all of its parameters."""

    def seconds(shape, micro_batch_tokens, ranks=1, **changes):
        parallel = ParallelConfig(data_parallel="ddp" if ranks > 1 else "fsdp")
        config = PolicyConfig(micro_batch_tokens=micro_batch_tokens, parallel=parallel)
        config = config.replace(dtype="bfloat16", offload="optimizer", compile=True, **changes)
        return train_seconds(Work(config, shape, ranks, 8192 * ranks, 1024, 8192 * ranks))

    launches = TINY.layers * LAUNCH_S
    assert (seconds(TINY, 8192), seconds(TINY, 2048)) == pytest.approx((launches, 4 * launches))
    recomputed = seconds(TINY, 8192, activation_checkpointing="full")
    assert recomputed == pytest.approx(4 / 3 * launches), "a forward pass is launched again"
    gradients = 2 * (1 - 1 / 2) * 4 * TOTAL / SHARDS_BYTES_PER_S
    exchanges = TINY.layers * COLLECTIVES_S
    assert seconds(TINY, 8192, ranks=2) == pytest.approx(launches + exchanges + gradients)
    wide = predicted.shape_of("qwen2.5-7b")
    more = seconds(wide, 4096) - seconds(wide, 8192)
    assert more == pytest.approx(PARAMETER_S * wide.num_parameters)


def test_offloading_all_has_no_predicted_time(capsys):
    words = ("cluster.gpus_per_node=1", "policy.offload=all")
    printed = lines(capsys, *words)
    assert "Time        of a step is not predicted with policy.offload=all" in printed
    assert not any("bottleneck" in line for line in printed)
    with pytest.raises(SystemExit):
        lines(capsys, "--simulate", *words)
    assert "--simulate does not predict times with policy.offload=all" in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["hf", "replay"])
def test_times_of_other_engines_than_ours_and_vllm_are_not_predicted(backend, capsys):
    words = ["cluster.gpus_per_node=1", f"generation.backend={backend}", "mismatch.action=ignore"]
    if backend == "replay":
        words += ["generation.engine_kwargs.folder=/runs/a", "generation.sleep=true"]
    text = "\n".join(lines(capsys, *words))
    assert f"Time        of a step is not predicted with generation.backend={backend}" in text


def test_completions_that_an_engine_cannot_hold_at_once_come_in_waves():
    def rollout(prompts):
        sizes = (f"grpo.num_prompts_per_step={prompts}", "grpo.num_generations_per_prompt=2")
        config = compose_config(CONFIGS, "grpo", ["cluster.gpus_per_node=1", *sizes])
        return predict_step(config, TINY, plan_run(config))[0].seconds - ROLLOUT_S

    assert rollout(1024) == pytest.approx(2 * rollout(512))  # of 1,024 completions each


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], 64),
        (["rollout.max_lag=7"], 512),
        (["rollout.max_lag=7", "generation.engine_kwargs.max_num_seqs=4"], 4),
    ],
)
def test_a_plan_sizes_engines_as_the_run_does(tmp_path, capsys, words, expected):
    numbers = {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12}
    numbers |= {"num_key_value_heads": 2, "intermediate_size": 8960, "vocab_size": 151936}
    (tmp_path / "config.json").write_text(json.dumps(numbers))
    sizes = ["cluster.gpus_per_node=8", "grpo.num_prompts_per_step=64", "policy.dtype=bfloat16"]
    more = ["generation.max_new_tokens=2048", "generation.sleep=false", "policy.batching=packed"]
    words = [*sizes, *more, f"policy.model={tmp_path}", *words]
    config = compose_raw(CONFIGS, "grpo", words).load(files_are_here=False)
    plan = plan_run(config)
    engine = engine_config(config, str(tmp_path), 2048, plan)
    assert engine.max_num_seqs == sequences_at_once(config, plan) == expected
    room = plan_memory._engines(config, plan, read_model_shape(tmp_path))
    of_run = Neighbours().and_engines(1, engine.weight_bytes, engine.kv_cache_bytes, sleeps=False)
    assert room == of_run


def test_an_engine_that_takes_few_completions_at_once_takes_longer():
    def rollout(*words):
        config = compose_config(CONFIGS, "grpo", ["cluster.gpus_per_node=1", *words])
        return predict_step(config, TINY, plan_run(config))[0].seconds

    assert rollout("generation.engine_kwargs.max_num_seqs=4") > 10 * rollout()  # 32 waves of 4


# The command.


def lines(capsys, *overrides):
    main(["plan", *overrides])
    return capsys.readouterr().out.splitlines()


def test_the_plan_of_the_default_config(capsys):
    found = lines(capsys)
    assert found[0].startswith("Cluster     1 node(s) x 1 CPU worker(s)")
    assert found[1].startswith("Policy      1 rank(s) = pp 1 x replicate 1 x shard 1 x cp 1 x tp 1")
    text = "\n".join(found)
    assert "16 prompts x 8 completions = 128 rows a step" in text
    assert "about 2 micro-batch(es) a rank" in text  # 128 x 64 tokens are 8192, without prompts
    assert found[-1].startswith("peak: 0.2")
    assert found[-1].endswith("GiB (train)")


def test_activations_that_travel_to_the_host_are_not_called_free(capsys):
    on_gpus = ("cluster.gpus_per_node=1", "policy.activation_offload=true")
    text = "\n".join(lines(capsys, *on_gpus))
    assert "of a step is not predicted with policy.activation_offload=true" in text


def test_the_plan_of_tensor_parallel_ranks_names_each_bundle(capsys):
    found = lines(
        capsys, "policy.parallel.tensor_parallel_size=2", "cluster.gpus_per_node=8", "grpo"
    )
    header = next(i for i, line in enumerate(found) if line.split()[:1] == ["node"])
    assert found[header].split() == [
        "node",
        "bundle",
        "policy",
        "pp",
        "replicate",
        "shard",
        "cp",
        "tp",
        "generation",
    ]
    assert found[header + 1].split() == ["0", "0", "0", "0", "0", "0", "0", "0", "0"]
    assert found[header + 6].split() == ["0", "5", "5", "0", "0", "2", "0", "1", "5"]
    assert "4 data-parallel rank(s) get at most about 32 rows each" in "\n".join(found)


def test_the_plan_of_a_pipeline_beside_generation_has_a_table_for_each_stage(capsys):
    found = lines(
        capsys,
        "--config-name=grpo",
        "policy.parallel.pipeline_parallel_size=2",
        "cluster.gpus_per_node=4",
        "cluster.num_generation_workers=2",
        "policy.offload=optimizer",
    )
    text = "\n".join(found)
    assert "policy, then generation" in found[0]
    assert "Generation  2 replica(s) of 1 worker(s)" in text
    assert [line for line in found if line.startswith("pp ")] == ["pp 0 (rank 0)", "pp 1 (rank 1)"]
    assert "on host" in text
    assert "0       2       -   -          -      -   -   -           0" in text


def test_the_plan_of_a_thousand_nodes_takes_less_than_a_second_and_is_short(capsys):
    started = time.thread_time()  # not that of Ray, in other threads of this process
    found = lines(
        capsys,
        "cluster.num_nodes=1000",
        "cluster.gpus_per_node=8",
        "grpo.num_prompts_per_step=8000",
        "policy.parallel.tensor_parallel_size=4",
        "policy.parallel.replicate_size=250",
    )
    assert time.thread_time() - started < 1.0
    assert len(found) < 60
    assert "(7976 bundles between the first and the last 4 are left out)" in found
    assert "999    7999    7999   0        249      7   0   3        7999" in "\n".join(found)


def test_the_plan_names_the_bottleneck_of_a_gpu_run_and_none_of_a_cpu_run(capsys):
    gpu = lines(
        capsys,
        "cluster.gpus_per_node=8",
        "generation.max_new_tokens=450",
        "policy.micro_batch_tokens=16384",
    )
    assert gpu[-1].startswith("bottleneck: rollout, 95% of 1.34 s")
    assert not any(line.startswith("bottleneck") for line in lines(capsys))


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("grpo", ["policy.model"]),
        ("sft", ["policy.model"]),
        ("ppo", ["policy.model", "critic.model"]),
        ("distillation", ["policy.model", "teacher.model"]),
    ],
)
def test_a_models_config_is_enough_to_plan_it_and_not_to_run_it(tmp_path, capsys, name, keys):
    settings = json.loads((resolve_model("embedded") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 3}))
    models = [f"{key}={tmp_path}" for key in keys]
    main(["plan", name, *models])
    printed = capsys.readouterr().out
    assert "Memory      of a policy rank" in printed
    assert "Memory is not predicted" not in printed
    with pytest.raises(UserError, match=f"^{keys[0]}=.* has no tokenizer_config.json"):
        compose_config(CONFIGS, name, models)


def test_an_evaluation_of_a_checkpoint_is_planned_by_its_runs_model(tmp_path, capsys):
    checkpoint = tmp_path / "checkpoints" / "step_1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "driver.json").write_text("{}")
    (tmp_path / "config.yaml").write_text("policy:\n  model: embedded\n")
    main(["plan", "eval", f"policy.model={checkpoint}"])
    assert "Memory      of a policy rank" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "is not a JSON object"),
        ('{"text_config": [1]}', "text"),
    ],
)
def test_a_config_that_cannot_be_read_is_named_without_a_key_that_is_not_its_own(
    tmp_path, text, sentence
):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=rf"^{tmp_path / 'config.json'}.*{sentence}"):
        read_model_shape(tmp_path)


def test_what_is_said_of_the_text_part_counts(tmp_path):
    (tmp_path / "config.json").write_text('{"a": 1, "b": 1, "text_config": {"b": 2, "c": 2}}')
    assert read_settings(tmp_path).items() >= {"a": 1, "b": 2, "c": 2}.items()


def test_models_of_a_run_on_other_machines_are_not_looked_for_here():
    for name, model in (("ppo", "critic.model=/else"), ("distillation", "teacher.model=/else")):
        composed = compose_raw(CONFIGS, name, [model])
        composed.load(files_are_here=False)
        with pytest.raises(UserError, match=f"{model}: no such folder"):
            composed.load()


def test_a_config_of_the_users_own_is_planned(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("defaults: [grpo, _self_]\ngrpo: {max_steps: 3}\n")
    assert lines(capsys, "mine", f"--config-dir={tmp_path}", "policy.scheduler.warmup_steps=2")
    with pytest.raises(SystemExit):
        main(["plan", "mine", f"--config-dir={tmp_path}", "policy.scheduler.warmup_steps=3"])


def test_a_file_that_is_not_in_the_folder_given_is_refused(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("defaults: [grpo, _self_]\n")
    (tmp_path / "other").mkdir()
    with pytest.raises(SystemExit):
        main(["plan", "--config-dir", f"{tmp_path}/other", f"{tmp_path}/mine.yaml"])
    told = f"{tmp_path}/mine.yaml is not in --config-dir={tmp_path}/other; leave one out."
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "'' is not a command of nemo-like; use grpo, ppo"),
        (["paln"], "'paln' is not a command of nemo-like"),
        (["plan", "grpo", "ppo"], "ppo is one config name too many"),
        (
            ["plan", "--gpus=8"],
            "unrecognized arguments: --gpus=8; use nemo-like plan",
        ),
        (["plan", "pqr"], "--config-name=pqr: there is no pqr.yaml"),
        (["plan", "polcy.lr=1"], "did you mean policy.optimizer.lr?"),
        (["plan", "--config-path=/no/such"], "--config-path=/no/such is not a folder"),
        (
            [
                "plan",
                "policy.parallel.tensor_parallel_size=8",
                "cluster.gpus_per_node=8",
            ],
            "tensor_parallel_size=8 does not divide the model's num_attention_heads=4; use 1, 2",
        ),
    ],
)
def test_wrong_words_end_with_one_sentence_and_code_2(words, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    assert message in err


def test_planning_imports_neither_torch_nor_ray():
    code = (
        "import sys; from nemo_like.cli import main; main(['plan']);"
        "heavy = {'torch', 'ray', 'transformers', 'numpy'} & sys.modules.keys();"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("grpo", "16 prompts x 8 completions = 128 rows"),
        ("sft", "32 rows"),
        ("dpo", "64 rows"),
        ("rm", "64 rows"),
        ("off_policy_distillation", "32 rows"),
    ],
)
def test_every_algorithm_has_a_plan(name, rows, capsys):
    teacher = ["teacher.model=embedded"] if "distillation" in name else []
    main(["plan", name, "cluster.cpu_workers_per_node=2", *teacher])
    text = capsys.readouterr().out
    assert f"{rows} a step; 2 data-parallel rank(s) get at most" in text
    assert ("Generation" in text) == (name == "grpo")
    assert "peak:" in text


def test_a_forward_pass_waits_only_for_parameters_of_others():
    def seconds(ranks, **sizes):
        return forward_seconds(Work(policy(**sizes), TINY, ranks, 8192, 1024, 8192))

    alone = seconds(1) / 8
    assert seconds(8, data_parallel="ddp") == seconds(8, replicate=8) == pytest.approx(alone)
    assert alone < seconds(8, replicate=4) < seconds(8)


def test_layers_are_gathered_once_a_micro_batch_and_pass_unless_they_stay_whole():
    """By each of two ranks for its two micro-batches; a training step passes forth and back."""

    def seconds(of, stays):
        config = policy(reshard_after_forward=not stays).replace(micro_batch_tokens=2048)
        return of(Work(config, TINY, 2, 8192, 1024, 8192))

    once = 4 * TOTAL / 2 / SHARDS_BYTES_PER_S
    # Gradients, in training, go once, or once a micro-batch.
    for of, times in ((forward_seconds, 2), (train_seconds, 4 + 1)):
        assert seconds(of, False) - seconds(of, True) == pytest.approx((times - 1) * once)


def test_copies_step_on_all_parameters_and_add_up_gradients_once():
    config = PolicyConfig(parallel=ParallelConfig(data_parallel="ddp"))
    two, four = (train_seconds(Work(config, TINY, n, 8192 * n, 1024, 8192 * n)) for n in (2, 4))
    assert four - two == pytest.approx(2 * (3 / 4 - 1 / 2) * 4 * TOTAL / SHARDS_BYTES_PER_S)
    on_host = config.replace(offload="optimizer")
    assert offload_seconds(on_host, TOTAL, 4) == offload_seconds(on_host, TOTAL, 1)


def test_gradients_of_frozen_matrices_do_not_travel():
    config = PolicyConfig(lora=LoraConfig(rank=4, targets=["of_another_kind"]))
    two, four = (train_seconds(Work(config, TINY, n, 8192 * n, 1024, 8192 * n)) for n in (2, 4))
    assert four - two == pytest.approx(2 * (3 / 4 - 1 / 2) * 4 * TOTAL / SHARDS_BYTES_PER_S)


def test_a_pipeline_gathers_and_reduces_once_a_step():
    """It does either way, whatever the micro-batches."""
    stays, goes = (
        train_seconds(Work(policy(pp=2, reshard_after_forward=one), TINY, 4, 32768, 1024, 32768))
        for one in (False, True)
    )
    assert stays == goes


def test_moments_on_the_host_take_no_time_of_the_passes():
    on_gpu, on_host = (
        train_seconds(Work(PolicyConfig(offload=offload), TINY, 1, 8192, 1024, 8192))
        for offload in ("none", "optimizer")
    )
    assert on_gpu - on_host == pytest.approx(MOMENT_S["float32"] * TOTAL)
