"""``generation.backend=graph``: what tests/test_engines.py does not ask of every engine."""

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, MistralConfig, Qwen2Config

from nemo_like.errors import RunError, UserError
from nemo_like.generation.graph import torch_ops
from nemo_like.generation.graph.decoder import mask_unlikely
from nemo_like.generation.graph.engine import GraphEngine
from nemo_like.generation.graph.state import PAGE
from nemo_like.generation.protocol import (
    Completion,
    EngineConfig,
    EngineMemory,
    GenerationRequest,
    SamplingParams,
)
from tests.conftest import ARCHITECTURES
from tests.graph_kernels import DEVICE, state_of
from tests.small_runs import ROOT


def config_of(folder: str | Path, **changes) -> EngineConfig:
    config = EngineConfig(
        model_path=str(folder), dtype="float32", seed=0, max_model_len=256, device=DEVICE,
        engine_kwargs={},
    )  # fmt: skip
    return replace(config, **changes)


def requests_of(count: int, length: int = 70, **sampling) -> list[GenerationRequest]:
    """Four to a prompt; prompts share no token at their position and differ in length."""
    return [
        GenerationRequest(
            request_id=f"r{i}",
            prompt_ids=[3 + (7 * (i // 4) + j) % 250 for j in range(length + i // 4)],
            sampling=SamplingParams(**{"max_new_tokens": 100, "stop_token_ids": (2,)} | sampling),
            seed=i * 2**40 + i,
        )
        for i in range(count)
    ]


def give_weights(engine: GraphEngine, config: EngineConfig) -> None:
    """Those of its folder."""
    dtype = getattr(torch, config.dtype)
    model = AutoModelForCausalLM.from_pretrained(config.model_path, dtype=dtype)
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    engine._copy_weights(iter(tensors.items()))
    engine._version = 1


def sample(config: EngineConfig, requests: list[GenerationRequest]) -> list[Completion]:
    """By a new engine with the folder's weights."""

    async def run() -> list[Completion]:
        engine = GraphEngine(config)
        await engine.start()
        give_weights(engine, config)
        try:
            return await asyncio.gather(*map(engine.generate, requests))
        finally:
            await engine.shutdown()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("architecture", "tied"), [("llama", False), ("qwen2", True), ("qwen3", False)]
)
def test_greedy_tokens_and_their_logprobs_are_those_of_transformers(tiny_model, architecture, tied):
    folder = tiny_model(architecture, tied)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    requests = requests_of(6, temperature=0, max_new_tokens=40)
    for request, found in zip(requests, sample(config_of(folder), requests), strict=True):
        start = len(request.prompt_ids)
        with torch.no_grad():
            logits = model(torch.tensor([request.prompt_ids + found.token_ids])).logits[0]
        best = logits[start - 1 : -1].log_softmax(-1).max(-1)
        assert found.token_ids == best.indices.tolist()
        assert found.logprobs == pytest.approx(best.values.tolist(), abs=1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logprobs_in_16_bits_are_those_of_transformers(tiny_model, architecture):
    folder = tiny_model(architecture, True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(DEVICE)
    requests = requests_of(6, max_new_tokens=40)
    found = sample(config_of(folder, dtype="bfloat16"), requests)
    for request, one in zip(requests, found, strict=True):
        ids = torch.tensor([request.prompt_ids + one.token_ids], device=DEVICE)
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].float().log_softmax(-1)
        right = logprobs.gather(1, ids[0, 1:, None])[len(request.prompt_ids) - 1 :, 0]
        # Logits of the model's own are rounded to 16 bits.
        assert (torch.tensor(one.logprobs) - right.cpu()).abs().mean() < 6e-3


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_gpu_draws_the_tokens_that_the_cpu_does(tiny_model):
    config, requests = config_of(tiny_model("qwen3")), requests_of(40)
    ours, right = sample(config, requests), sample(replace(config, device="cpu"), requests)
    assert [one.token_ids for one in ours] == [one.token_ids for one in right]


def test_a_completion_depends_on_nothing_but_its_prompt_and_seed(tiny_model):
    """In any order, alone, and when rows give up their cache and compute it again."""
    folder = tiny_model("qwen2", True)
    requests = requests_of(13)
    whole = sample(config_of(folder), requests)
    assert len({tuple(one.token_ids) for one in whole}) == len(whole)
    assert len({len(one.token_ids) for one in whole}) > 3
    backwards = sample(config_of(folder, max_num_seqs=5), requests[::-1])[::-1]
    page_bytes = 2 * 2 * 64 * PAGE * 4
    crowded = sample(config_of(folder, kv_cache_bytes=11 * page_bytes), requests)
    alone = sample(config_of(folder), requests[6:7])
    for other in (backwards, crowded, [*whole[:6], *alone, *whole[7:]]):
        assert [one.token_ids for one in other] == [one.token_ids for one in whole]
        for one, same in zip(other, whole, strict=True):
            assert one.logprobs == pytest.approx(same.logprobs, abs=1e-5)


def test_an_engine_that_warmed_up_and_slept_samples_as_before(tiny_model):
    config = config_of(tiny_model("llama"))
    before, after = requests_of(2, max_new_tokens=20)

    async def run() -> list[Completion]:
        engine = GraphEngine(config)
        await engine.start()
        await engine.warm_up()  # a part of the start, on a GPU
        give_weights(engine, config)
        found = [await engine.generate(before)]
        await engine.sleep()
        with pytest.raises(RunError, match="no usable weights"):
            await engine.generate(after)
        await engine.wake(EngineMemory.weights)
        give_weights(engine, config)
        await engine.wake(EngineMemory.kv_cache)
        found.append(await engine.generate(after))
        await engine.shutdown()
        return found

    assert asyncio.run(run()) == [*sample(config, [before]), *sample(config, [after])]


def test_an_engine_that_sleeps_under_calls_fails_them_and_serves_after_it_wakes(tiny_model):
    """As agents leave them behind that gave up; some were not even taken yet, or come too early."""
    config = config_of(tiny_model("llama"))
    *long, after = requests_of(6, max_new_tokens=150)

    async def run() -> tuple[list[object], Completion]:
        engine = GraphEngine(config)
        await engine.start()
        give_weights(engine, config)
        calls = [asyncio.create_task(engine.generate(one)) for one in long[:3]]
        for _ in range(4):  # until their first burst runs
            await asyncio.sleep(0)
        calls += [asyncio.create_task(engine.generate(one)) for one in long[3:]]
        await asyncio.sleep(0)
        await engine.sleep()
        await engine.wake(EngineMemory.weights)
        give_weights(engine, config)
        calls.append(asyncio.create_task(engine.generate(after)))
        await asyncio.sleep(0.1)
        await engine.wake(EngineMemory.kv_cache)
        failed = await asyncio.gather(*calls, return_exceptions=True)
        found = await engine.generate(after)
        await engine.shutdown()
        return failed, found

    failed, found = asyncio.run(asyncio.wait_for(run(), 60))
    assert all(isinstance(one, RunError) for one in failed), failed
    assert "put to sleep" in str(failed[0])
    assert "asleep" in str(failed[-1])
    assert [found] == sample(config, [after])


def test_a_prompt_without_finite_numbers_spoils_no_other(tiny_model):
    """Pages that it leaves hold NaNs, which no later row may see."""
    config = config_of(tiny_model("llama", False))

    async def run() -> tuple[Completion, Completion]:
        engine = GraphEngine(config)
        await engine.start()
        give_weights(engine, config)
        weight = engine._model._named["model.embed_tokens.weight"]
        good = replace(requests_of(1, max_new_tokens=20)[0], prompt_ids=[11] * 70)
        bad = replace(good, prompt_ids=[12] * 100)  # a token that the good one does not draw
        try:
            before = await engine.generate(good)
            weight[12] = torch.nan
            await engine.generate(bad)
            return before, await engine.generate(good)
        finally:
            await engine.shutdown()

    before, after = asyncio.run(run())
    assert after.token_ids == before.token_ids
    assert after.logprobs == before.logprobs


def test_siblings_do_not_compute_their_prompt_again(tiny_model):
    found = sample(config_of(tiny_model("llama")), requests_of(8, max_new_tokens=2))
    assert [one.num_cached_tokens for one in found] == [0, 69, 69, 69, 0, 70, 70, 70]


def test_tokens_are_drawn_as_often_as_their_probability_says():
    logits = 2 * torch.randn(300, generator=torch.manual_seed(0)).to(DEVICE)
    state = state_of(20_000)
    state.temperature.fill_(1.0)
    state.seed.copy_(torch.arange(20_000))
    torch_ops.sample(logits.expand(20_000, -1), state)
    expected = 20_000 * logits.softmax(-1)
    counts = torch.bincount(state.tokens[0], minlength=300)
    # Chi-square with 299 degrees of freedom: mean 299, standard deviation 24.
    assert 220 < ((counts - expected) ** 2 / expected).sum() < 420


def test_kernels_do_what_torch_does():
    """In a process of its own: Triton's interpreter replaces its compiler as it is imported."""
    pytest.importorskip("triton")
    environment = os.environ | ({} if DEVICE == "cuda" else {"TRITON_INTERPRET": "1"})
    command = [sys.executable, "-m", "pytest", "-q", "-x", "tests/graph_kernels.py"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2Config(), "model_type=gpt2"),
        (MistralConfig(), "model_type=mistral"),
        (Qwen2Config(use_sliding_window=True, max_window_layers=1), "sliding windows"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_other_models_are_refused_with_the_engine_that_has_them(tmp_path, config, message):
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"{message}.*set generation.backend=vllm."):
        asyncio.run(GraphEngine(config_of(tmp_path)).start())


def test_rows_are_filtered_by_their_own_settings_in_parts_too():
    state = state_of(6)
    state.temperature.copy_(torch.tensor([1.0, 0.5, 2.0, 1.0, 1.0, 0.0]))
    state.top_p.copy_(torch.tensor([0.9, 0.5, 1.0, 0.3, 1.0, 0.5]))
    state.top_k.copy_(torch.tensor([0, 7, 3, 0, 0, 2]))
    logits = 3 * torch.randn(6, 50, device=DEVICE)
    whole, parts = logits.clone(), logits.clone()
    mask_unlikely(whole, state)
    for start in (0, 4):
        mask_unlikely(parts[start : start + 4], state, start)
    assert torch.equal(whole, parts)
    assert whole.isinf().sum(1).tolist()[2:] == [47, *whole[3:4].isinf().sum(1).tolist(), 0, 0]


def test_a_server_that_breaks_fails_every_request_and_those_that_come_later(tiny_model):
    """Neither one that it holds nor one that it has not taken waits for ever."""
    config = config_of(tiny_model(), max_num_seqs=4)
    requests = requests_of(6)

    async def run() -> list[object]:
        engine = GraphEngine(config)
        await engine.start()
        give_weights(engine, config)
        take, taken = engine._take, []

        def breaks(waiting):
            taken.append(waiting)
            if len(taken) == 3:
                raise KeyError("a bug")
            take(waiting)

        engine._take = breaks
        first = await asyncio.gather(*map(engine.generate, requests[:5]), return_exceptions=True)
        last = await asyncio.gather(engine.generate(requests[5]), return_exceptions=True)
        await asyncio.wait_for(engine.interrupt(), 10)
        await engine.shutdown()
        return [*first, *last]

    found = asyncio.run(asyncio.wait_for(run(), 60))
    assert [str(one) for one in found] == ["The engine failed: KeyError('a bug')."] * 6
