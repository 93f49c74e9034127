"""Sampling in 8 bits: what is refused, and a real engine against matrices rounded by hand."""

import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from vllm.model_executor.model_loader.reload.layerwise import (
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)

from nemo_like.algorithms.checks import mismatch_check, say_logits
from nemo_like.algorithms.distillation.config import DistillationConfig, TeacherConfig
from nemo_like.algorithms.eval.config import EvalConfig
from nemo_like.algorithms.grpo.config import GRPOConfig
from nemo_like.config.generation import GenerationConfig
from nemo_like.config.section import check_sections
from nemo_like.errors import UserError
from nemo_like.generation.graph import fp8
from nemo_like.generation.graph.engine import GraphEngine
from nemo_like.generation.protocol import EngineConfig
from nemo_like.generation.vllm.engine import VLLMEngine
from nemo_like.generation.vllm.loading import refuse_incomplete
from nemo_like.planning.model_shape import ModelShape, engine_bytes
from nemo_like.planning.placement import refuse_8_bits
from tests.test_engines import SMALL_CACHE, Case, make_config, run

__all__ = ["run"]

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max


class Rounded(nn.Module):
    """A linear layer in 8 bits with float32 sums: one scale for each output and for each token."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.dtype = linear.weight.dtype
        self.weight = rounded(linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return (rounded(x) @ self.weight.T).to(self.dtype)


def rounded(rows: Tensor) -> Tensor:
    """The nearest numbers that 8 bits hold, with one scale for each row."""
    scale = rows.float().abs().amax(-1, keepdim=True) / LARGEST
    return (rows.float() / scale).to(FP8).float() * scale


ALL = "layers"
INNER_MLPS = "layers.[12].mlp"


def round_layers(model: nn.Module, which: str) -> None:
    """Round matrices that have the pattern ``which`` in their names."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and re.search(which, name):
            model.set_submodule(name, Rounded(module))


def rescale(model: LlamaForCausalLM) -> None:
    """Same function, other matrices: what one of a chain gains, a power of two, the next loses."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for one, following in (
            (attention.v_proj, attention.o_proj),
            (mlp.up_proj, mlp.down_proj),
        ):
            one.weight.data *= 4
            following.weight.data /= 4


def four_layers(folder: Path) -> None:
    """Let the model have four, of which two are neither the first nor the last."""
    file = folder / "model" / "config.json"
    settings = json.loads(file.read_text()) | {"num_hidden_layers": 4}
    file.write_text(json.dumps(settings))


@pytest.mark.parametrize(("engine_class", "which"), [(VLLMEngine, ALL), (GraphEngine, INNER_MLPS)])
def test_each_refit_rounds_the_new_weights_and_leaves_none_of_the_old(
    tmp_path, run, engine_class, which
):
    """Rounding is that of 8 bits by its size; what is left of an old matrix would show in bits.

    Matrices that are rescaled by powers of two have the same 8 bits and other scales.
    """
    config = make_config(tmp_path, True, dtype="bfloat16", quantization="fp8", **SMALL_CACHE)
    four_layers(tmp_path)
    engine = engine_class(config)
    run(engine.start())
    try:
        case = Case(engine, config, run, tolerance=0)
        case.connect()
        found = []
        for seed, change in ((0, None), (1, None), (0, rescale)):
            case.refit(seed, change)
            requests = case.requests(32)
            found.append(case.generate(requests))
            pairs = list(zip(requests, found[-1], strict=True))
            sampled = torch.cat([torch.tensor(one.logprobs) for one in found[-1]])
            exact = torch.cat([case.reference(asked, one.token_ids) for asked, one in pairs])
            round_layers(case.model, which)
            by_hand = torch.cat([case.reference(asked, one.token_ids) for asked, one in pairs])
            noise = (by_hand - exact).abs().mean()
            assert (sampled - by_hand).abs().mean() < noise
            assert 0.8 * noise < (sampled - exact).abs().mean() < 1.25 * noise
        assert [one.token_ids for one in found[2]] == [one.token_ids for one in found[0]]
        assert [one.logprobs for one in found[2]] == [one.logprobs for one in found[0]]
    finally:
        run(engine.shutdown())


def test_a_layer_of_8_bits_that_did_not_get_all_its_tensors_is_refused_by_name():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    record_metadata_for_reloading(model)
    refuse_incomplete(model)
    initialize_layerwise_reload(model[1])
    for name in ("weight", "bias"):
        with pytest.raises(RuntimeError, match="did not load all of 1 of Sequential"):
            refuse_incomplete(model)
        parameter = getattr(model[1], name)
        parameter.weight_loader(parameter, torch.ones(parameter.shape))
    refuse_incomplete(model)
    assert model[1].weight.eq(1).all()


def test_a_product_in_8_bits_is_off_by_what_three_bits_of_a_mantissa_leave():
    """At most 2^-4 of a number; of a product that of both factors, as squares add."""
    x, w = torch.randn(2, 512, 256, generator=torch.manual_seed(0))
    # Smaller numbers have fewer bits.
    normal = x.abs() > 2**-6 * x.abs().amax(-1, keepdim=True) / LARGEST
    error = ((rounded(x) - x) / x)[normal]
    assert error.abs().max() <= 2**-4
    assert error.square().mean().sqrt().item() == pytest.approx(0.026, abs=1e-3)
    exact = x @ w.T
    noise = (rounded(x) @ rounded(w).T - exact).std() / exact.std()
    assert noise.item() == pytest.approx(0.037, abs=1e-3)


def config_of(**changes):
    """A run on one GPU that samples in 8 bits."""
    standard = GRPOConfig()
    policy = standard.policy.replace(dtype=changes.pop("dtype", "bfloat16"))
    policy = policy.replace(lora=policy.lora.replace(**changes.pop("lora", {})))
    loss = standard.loss.replace(importance=changes.pop("importance", "truncate"))
    return standard.replace(policy=policy, loss=loss, generation=GenerationConfig(**changes))


FP8_CACHE = {"engine_kwargs": {"kv_cache_dtype": "fp8"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization": "fp8", "importance": "none"}, "loss.importance=none does not correct"),
        (FP8_CACHE | {"importance": "none"}, "kv_cache_dtype .* set truncate or mask"),
        ({"quantization": "fp8", "dtype": "float32"}, "needs policy.dtype=bfloat16"),
        (FP8_CACHE | {"dtype": "float32"}, "kv_cache_dtype needs policy.dtype=bfloat16"),
        ({"quantization": "fp8", "lora": {"rank": 4, "refit": "adapters"}}, "set merged"),
        ({"quantization": "fp8", "backend": "hf"}, "generation.backend=vllm or graph does"),
    ],
    ids=str,
)
def test_sampling_in_8_bits_needs_a_correction_and_16_bits(changes, message):
    with pytest.raises(UserError, match=message):
        check_sections(config_of(**changes))


@pytest.mark.parametrize(
    "changes",
    [{"quantization": "fp8"}, FP8_CACHE, {"engine_kwargs": {"kv_cache_dtype": "auto"}}],
    ids=str,
)
def test_sampling_in_8_bits_with_a_correction_is_taken(changes):
    check_sections(config_of(**changes))


@pytest.mark.parametrize("changes", [{"quantization": "fp8"}, FP8_CACHE], ids=str)
def test_an_evaluation_may_sample_in_8_bits_and_distillation_may_not(changes):
    def of(config):
        return config.replace(
            policy=config.policy.replace(dtype="bfloat16"), generation=GenerationConfig(**changes)
        )

    check_sections(of(EvalConfig()))
    with pytest.raises(UserError, match="this run does not correct"):
        check_sections(of(DistillationConfig(teacher=TeacherConfig(model="large"))))


def test_the_first_steps_may_differ_by_what_8_bits_round_away():
    def limits(**changes):
        return {one.metric: one.limit for one in mismatch_check(config_of(**changes), 1).limits}

    both = {"mismatch/mean_abs": 0.1, "mismatch/max_abs": 2.0}
    assert limits() == limits(engine_kwargs={"kv_cache_dtype": "auto"}) == both
    assert limits(quantization="fp8") == limits(**FP8_CACHE) == {"mismatch/mean_abs": 0.5}


@pytest.mark.parametrize(
    ("backend", "device", "kwargs", "level", "head"),
    [
        ("vllm", "cuda", {}, "INFO", "float32"),
        ("vllm", "cpu", {}, "WARNING", "bfloat16"),
        ("vllm", "cuda", {"hf_overrides": {"head_dtype": "bfloat16"}}, "WARNING", "bfloat16"),
        ("graph", "cpu", {}, "INFO", "float32"),
        ("hf", "cuda", {}, "WARNING", "bfloat16"),
    ],
)
def test_the_log_says_in_which_format_an_engine_has_its_logits(
    backend, device, kwargs, level, head, caplog
):
    engine = EngineConfig(
        model_path="",
        dtype="bfloat16",
        seed=0,
        max_model_len=8,
        device=device,
        engine_kwargs=kwargs,
    )
    with caplog.at_level(logging.INFO):
        say_logits(config_of(backend=backend), replace(engine, dtype="float32"))
        say_logits(config_of(backend=backend), engine)
    ((_, levelno, said),) = caplog.record_tuples
    assert (logging.getLevelName(levelno), said.split()[-4]) == (level, head)


SHAPE = ModelShape(
    layers=2, hidden=8, intermediate=16, heads=2, kv_heads=1, head_dim=4, vocab=10, tied=False
)


@pytest.mark.parametrize(
    ("changes", "capability", "message"),
    [
        ({}, None, "needs three layers, and this model has 2; leave generation.quantization out"),
        ({"layers": 3}, (8, 6), "capability 8.9 or newer, and this one has 8.6"),
        ({"layers": 3}, (9, 0), "multiples of 16, and one is 8"),
        ({"layers": 3, "hidden": 32, "intermediate": 24}, (9, 0), "of 16, and one is 24"),
    ],
)
def test_what_graph_cannot_round_is_refused(changes, capability, message):
    with pytest.raises(UserError, match=message):
        refuse_8_bits(
            replace(SHAPE, **changes), on_gpu=capability is not None, capability=capability
        )


def test_what_graph_can_round_is_not_refused():
    refuse_8_bits(replace(SHAPE, layers=3), on_gpu=False)
    refuse_8_bits(replace(SHAPE, layers=3, hidden=32), on_gpu=True, capability=(8, 9))


def test_small_numbers_keep_their_bits():
    x = torch.randn(4, 64, generator=torch.manual_seed(0))
    exact = fp8.rounded(x)
    for power in (-60, -20, 20):
        found = fp8.rounded(x * 2.0**power)
        assert torch.equal(found.numbers.float(), exact.numbers.float())


def test_a_graph_engine_counts_and_clears_what_it_rounds(tmp_path, run):
    config = make_config(tmp_path, False, dtype="bfloat16", quantization="fp8")
    with pytest.raises(UserError, match="needs three layers"):
        run(GraphEngine(config).start())
    four_layers(tmp_path)
    engine = GraphEngine(config)
    run(engine.start())
    assert engine._model is not None
    shape = engine._model.shape
    mlp = 3 * shape.hidden * shape.intermediate
    scales = 4 * (2 * shape.intermediate + shape.hidden)
    assert engine._model.num_bytes == 2 * shape.num_parameters - 2 * (mlp - scales)
    engine._model.zero()
    assert not any(each.float().any() for each in engine._model._tensors())
    run(engine.shutdown())


def test_an_engine_in_8_bits_is_as_small_as_its_numbers():
    shape = SHAPE
    matrices = 2 * (8 * 8 * 2 + 8 * 4 * 2 + 3 * 8 * 16)
    rest = 2 * 10 * 8 + 2 * 2 * 8 + 8
    cache = 64 * 2 * 2 * 4  # a block of 32 tokens and one to spare, two layers, keys and values
    sizes = engine_bytes(GenerationConfig(), "bfloat16", shape, 32)
    assert sizes == (2 * (matrices + rest), 2 * cache)
    both = GenerationConfig(quantization="fp8", **FP8_CACHE)
    assert engine_bytes(both, "bfloat16", shape, 32) == (matrices + 2 * rest, cache)
    mlps = GenerationConfig(backend="graph", quantization="fp8")
    assert engine_bytes(mlps, "bfloat16", shape, 32) == sizes
    saved = 2 * 3 * 8 * 16
    four = replace(shape, layers=4)
    whole, _ = engine_bytes(GenerationConfig(), "bfloat16", four, 32)
    assert engine_bytes(mlps, "bfloat16", four, 32)[0] == whole - saved
