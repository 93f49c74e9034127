"""What a vLLM engine is started with, as arithmetic: no engine, no GPU."""

import json
import tempfile

import pytest

from nemo_like.algorithms.engine_size import engine_config
from nemo_like.compose.load import compose_config
from nemo_like.config.generation import GenerationConfig
from nemo_like.errors import UserError
from nemo_like.generation.protocol import EngineConfig
from nemo_like.generation.vllm.environment import EngineDevices, start_fork_server
from nemo_like.generation.vllm.settings import CPU_KV_CACHE_BYTES, WORKSPACE_BYTES, engine_args
from nemo_like.models.resolve import resolve_model
from nemo_like.planning.model_shape import (
    ModelShape,
    engine_bytes,
    kv_bytes_per_sequence,
    read_model_shape,
)
from nemo_like.planning.resources import plan_run
from tests.small_runs import ROOT

GIB = 2**30
GPU_BYTES = 80 * GIB
KNOWN = (
    "max_num_seqs",
    "kv_cache_memory_bytes",
    "gpu_memory_utilization",
    "logprobs_mode",
    "enable_chunked_prefill",
)


def config_of(**changes):
    config = {
        "model_path": str(resolve_model("embedded")),
        "dtype": "bfloat16",
        "seed": 0,
        "max_model_len": 1000,
        "max_num_seqs": 100,
        "device": "cuda",
        "gpu_memory_share": 0.5,
        "weight_bytes": 3 * GIB,
        "kv_cache_bytes": 10 * GIB,
        "engine_kwargs": {},
    }
    return EngineConfig(**config | changes)


def args_of(**changes):
    return engine_args(config_of(**changes), KNOWN, GPU_BYTES)


def test_the_kv_cache_of_a_sequence_by_hand():
    qwen = ModelShape(
        layers=28, hidden=1536, intermediate=8960, heads=12, kv_heads=2, head_dim=128, vocab=151936,
        tied=True,
    )  # fmt: skip
    # 562 tokens are 18 blocks of 32, and one is to spare; keys and values of two heads, two bytes.
    assert kv_bytes_per_sequence(qwen, 562, 2, 1) == 19 * 32 * 28 * 2 * 2 * 128 * 2
    assert kv_bytes_per_sequence(qwen, 562, 2, 2) == 19 * 32 * 28 * 2 * 1 * 128 * 2
    assert kv_bytes_per_sequence(qwen, 562, 2, 4) == 19 * 32 * 28 * 2 * 1 * 128 * 2


def test_the_kv_cache_is_what_the_step_needs_within_the_share():
    args = args_of()
    assert (args["kv_cache_memory_bytes"], args["max_num_seqs"]) == (10 * GIB, 100)
    assert args["gpu_memory_utilization"] == 0.01  # so that it says nothing of the cache
    room = 40 * GIB - WORKSPACE_BYTES - 3 * GIB
    assert args_of(kv_cache_bytes=50 * GIB)["kv_cache_memory_bytes"] == room
    kwargs = {"gpu_memory_utilization": 0.25}
    small = args_of(kv_cache_bytes=50 * GIB, engine_kwargs=kwargs)
    assert small["kv_cache_memory_bytes"] == room - 20 * GIB


def test_a_share_without_room_for_one_sequence_is_refused():
    with pytest.raises(UserError, match=r"24.0 GiB .* next to 30.0 GiB of weights; set generation"):
        args_of(gpu_memory_share=0.3, weight_bytes=30 * GIB)
    most = 40 * GIB - WORKSPACE_BYTES - 10 * GIB // 100
    args_of(weight_bytes=most)
    with pytest.raises(UserError, match="leaves no KV cache"):
        args_of(weight_bytes=most + 1)


def test_nested_engine_kwargs_join_ours():
    kwargs = {"compilation_config": {"mode": 0}, "hf_overrides": {"rope_theta": 1}}
    args = engine_args(config_of(engine_kwargs=kwargs), (*KNOWN, *kwargs), GPU_BYTES)
    assert args["hf_overrides"] == {"head_dtype": "float32", "rope_theta": 1}
    assert args["compilation_config"]["mode"] == 0
    assert args["compilation_config"]["cudagraph_mode"] == "FULL_DECODE_ONLY"


def test_an_engine_with_a_gpu_to_itself_measures():
    args = args_of(kv_cache_bytes=None)
    assert "kv_cache_memory_bytes" not in args
    assert args["gpu_memory_utilization"] == 0.5


def test_the_users_own_size_of_the_kv_cache_is_kept():
    args = args_of(engine_kwargs={"kv_cache_memory_bytes": 7 * GIB})
    assert args["kv_cache_memory_bytes"] == 7 * GIB
    on_cpu = {"device": "cpu", "kv_cache_bytes": None}
    assert args_of(**on_cpu)["kv_cache_memory_bytes"] == CPU_KV_CACHE_BYTES
    assert args_of(**on_cpu | {"kv_cache_bytes": 5})["kv_cache_memory_bytes"] == 5


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_row_that_an_empty_kv_cache_cannot_hold_is_refused(device):
    kwargs = {"kv_cache_memory_bytes": GIB // 10}  # 100 sequences take 10 GiB
    args_of(device=device, engine_kwargs=kwargs)
    kwargs = {"kv_cache_memory_bytes": GIB // 10 - 1}
    with pytest.raises(UserError, match=r"cannot hold one row of 1000 tokens, .* takes 107374182;"):
        args_of(device=device, engine_kwargs=kwargs)


FULL = ["full_attention"]


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        # Five of six layers keep 100 of 1,000 tokens.
        ({"sliding_window": 100, "layer_types": ["sliding_attention"] * 5 + FULL}, 0.25),
        ({"sliding_window": None, "layer_types": ["linear_attention"] * 3 + FULL}, 0.25),
        ({"sliding_window": 100}, 0.1),
        ({"sliding_window": 4096}, 1.0),
        ({"sliding_window": None}, 1.0),
        ({"sliding_window": 100, "use_sliding_window": False}, 1.0),
    ],
    ids=str,
)
def test_layers_with_a_window_keep_no_more_of_a_row_than_it(settings, share, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(settings))
    needed = int(share * GIB / 10)

    def start(size):
        args_of(model_path=str(tmp_path), engine_kwargs={"kv_cache_memory_bytes": size})

    start(needed + 1)
    with pytest.raises(UserError, match=f"cannot hold one row of 1000 tokens, .* {needed};"):
        start(needed - 1)


def test_a_window_also_holds_the_tokens_of_one_pass(tmp_path):
    (tmp_path / "config.json").write_text('{"sliding_window": 100}')
    of_cpu = {"device": "cpu", "max_model_len": 10_000, "model_path": str(tmp_path)}
    # 100 and 10,000 tokens at once, more than the row has.
    with pytest.raises(UserError, match=r"row of 10000 tokens, .* takes 107374182;"):
        args_of(**of_cpu, engine_kwargs={"kv_cache_memory_bytes": GIB // 20})


@pytest.mark.parametrize(("most", "last"), [(100, [96, 100]), (128, [96, 128]), (1, [1])])
def test_graphs_are_captured_up_to_the_most_sequences(most, last):
    sizes = args_of(max_num_seqs=most)["compilation_config"]["cudagraph_capture_sizes"]
    assert sizes[-2:] == last
    assert sizes == sorted(set(sizes))


def test_unknown_arguments_are_refused():
    with pytest.raises(UserError, match=r"engine_kwargs\.max_num_seq is not an argument"):
        args_of(engine_kwargs={"max_num_seq": 1})


def test_prompts_in_parts_are_refused_where_they_end_the_engine():
    kwargs = {"enable_chunked_prefill": True}
    with pytest.raises(UserError, match="enable_chunked_prefill=true ends vLLM's engine"):
        args_of(device="cpu", engine_kwargs=kwargs)
    assert args_of(engine_kwargs=kwargs)["enable_chunked_prefill"]


@pytest.mark.parametrize("settings", [{"kv_lora_rank": 512}, {"num_experts": 8}], ids=str)
def test_8_bits_are_refused_where_no_refit_makes_them(settings, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=f"is for dense models .* has {next(iter(settings))}"):
        args_of(model_path=str(tmp_path), quantization="fp8")
    assert args_of(quantization="fp8")["quantization"] == "fp8_per_channel"
    assert "quantization" not in args_of()


@pytest.mark.parametrize("part", ["whole", "text_config"])
def test_latent_attention_is_refused_where_the_engine_has_other_logprobs(part, tmp_path):
    kind = {"kv_lora_rank": 512}
    (tmp_path / "config.json").write_text(json.dumps(kind if part == "whole" else {part: kind}))
    with pytest.raises(UserError, match=r"latent attention .*; set generation\.backend=hf\."):
        args_of(device="cpu", model_path=str(tmp_path))
    args_of(model_path=str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"kv_lora_rank": None, "text_config": None}))
    args_of(device="cpu", model_path=str(tmp_path))


def test_a_folder_too_deep_for_sockets_is_refused(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/" + "é" * 30)  # 61 bytes
    devices = EngineDevices(device="cpu", tensor_parallel_size=1, engine_kwargs={})
    with pytest.raises(UserError, match=r"TMPDIR=/é+ is too long .* of at most 59 characters"):
        start_fork_server(devices)


def of_run(*overrides):
    """The engine of a run on two GPUs with 5 prompts a step, 4 completions each."""
    small = ("grpo.num_prompts_per_step=5", "grpo.num_generations_per_prompt=4")
    gpus = ("cluster.gpus_per_node=2", "policy.dtype=bfloat16")
    config = compose_config(ROOT / "configs", "grpo", [*small, *gpus, *overrides])
    return engine_config(config, str(resolve_model("embedded")), 64, plan_run(config))


@pytest.mark.parametrize(
    ("overrides", "share"),
    [
        ([], 0.6),
        (["generation.sleep=false"], 0.3),
        (["generation.num_engines_per_bundle=2"], 0.3),
        (["cluster.num_generation_workers=1"], 0.85),
    ],
    ids=str,
)
def test_an_engine_takes_less_of_a_gpu_that_it_shares(overrides, share):
    assert of_run(*overrides).gpu_memory_share == pytest.approx(share)


def test_an_engine_holds_the_completions_that_are_sampled_together():
    shape = read_model_shape(resolve_model("embedded"))
    found = of_run("run.seed=7")
    weights, cache = engine_bytes(GenerationConfig(), "bfloat16", shape, 64)
    assert (found.max_num_seqs, found.seed) == (3 * 4, 7)  # of 5 prompts one engine has 3
    assert (found.weight_bytes, found.kv_cache_bytes) == (weights, 12 * cache)
    on_two = GenerationConfig(tensor_parallel_size=2)
    assert engine_bytes(on_two, "bfloat16", shape, 64) == (weights // 2, cache // 2)
    assert of_run("grpo.num_prompts_per_step=5000").max_num_seqs == 1024
    assert of_run("generation.engine_kwargs.max_num_seqs=3").kv_cache_bytes == 3 * cache
    assert of_run("cluster.num_generation_workers=1").kv_cache_bytes is None


def test_an_engine_has_adapters_only_if_they_travel_apart():
    lora = "policy.lora.rank=4"
    assert of_run(lora).lora is None
    assert of_run(lora, "policy.lora.refit=adapters").lora.rank == 4


def test_engines_that_sleep_while_the_policy_trains_cannot_sample_then():
    with pytest.raises(UserError, match=r"rollout\.max_lag=1 .* they sleep then.*sleep=false"):
        of_run("rollout.max_lag=1")
    assert not of_run("rollout.max_lag=1", "generation.sleep=false").sleep
