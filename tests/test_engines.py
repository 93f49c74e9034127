"""Both engines against the transformers model that they are meant to sample from.

The engines are real and hold tiny models made from a config. Equality is asked of logprobs that a
plain forward over the finished tokens gives, to rounding error.
"""

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from nemo_like.errors import RunError, UserError
from nemo_like.generation.hf_engine import HFEngine
from nemo_like.generation.protocol import (
    Completion,
    Engine,
    EngineConfig,
    FinishReason,
    GenerationRequest,
    SamplingParams,
)
from nemo_like.generation.vllm_engine import VLLMEngine
from nemo_like.refit.manifest import expected_tensors, refit_metadata

VOCAB_SIZE = 300
CONTEXT = 96
EOS_ID = 1
PROMPT = list(range(10, 30))

Tensors = dict[str, torch.Tensor]


def make_model_folder(folder: Path, tied: bool) -> str:
    """Write a two-layer Llama's config and a byte-level tokenizer, without weights."""
    vocab = {"<pad>": 0, "<eos>": EOS_ID}
    for char in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[char] = len(vocab)
    for filler in range(VOCAB_SIZE - len(vocab)):
        vocab[f"<{filler}>"] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)
    LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        initializer_range=0.05,
        eos_token_id=EOS_ID,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    return str(folder)


@dataclass
class Case:
    """An engine under test, and the model whose weights it was last given."""

    engine: Engine
    config: EngineConfig
    folder: Path
    run: Callable
    """Run a coroutine on the engine's event loop."""
    tolerance: float
    """Largest difference of a logprob that rounding explains."""
    version: int = 0
    model: LlamaForCausalLM | None = None
    request_ids: Iterator[int] = field(default_factory=itertools.count)

    def refit(self, seed: int, change: Callable[[Tensors], None] | None = None) -> None:
        """Load freshly initialised weights as the next version, after ``change`` spoilt them."""
        torch.manual_seed(seed)
        config = LlamaConfig.from_pretrained(self.config.model_path)
        model = LlamaForCausalLM(config).to(getattr(torch, self.config.dtype)).eval()
        tensors = dict(model.state_dict())
        if config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        if change is not None:
            change(tensors)
        self.run(self.engine.load_weights(self.write(tensors, self.version + 1), self.version + 1))
        self.version += 1
        self.model = model

    def write(self, tensors: Tensors, version: int) -> list[str]:
        """Spread ``tensors`` over two files of a refit."""
        names = sorted(tensors)
        paths = []
        for part in (names[::2], names[1::2]):
            path = self.folder / f"{version}-{len(paths)}.safetensors"
            save_file({name: tensors[name] for name in part}, path, refit_metadata(version))
            paths.append(str(path))
        return paths

    def requests(self, count: int, prompt: list[int] = PROMPT, **sampling) -> list:
        """Make requests that differ in their seeds and first prompt token."""
        params = SamplingParams(**({"max_new_tokens": 12} | sampling))
        return [
            GenerationRequest(
                request_id=f"r{next(self.request_ids)}",
                prompt_ids=[*prompt, 40 + seed] if count > 1 else prompt,
                sampling=params,
                seed=seed,
            )
            for seed in range(count)
        ]

    def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        """Sample all requests at the same time."""

        async def all_of_them() -> list[Completion]:
            return await asyncio.gather(*(self.engine.generate(each) for each in requests))

        return self.run(all_of_them())

    def gap(self, requests: list[GenerationRequest]) -> float:
        """Largest difference between the engine's logprobs and a forward's over the same tokens."""
        completions = self.generate(requests)
        assert all(completion.token_ids for completion in completions)
        return max(
            (torch.tensor(completion.logprobs) - self.reference(request, completion.token_ids))
            .abs()
            .max()
            .item()
            for request, completion in zip(requests, completions, strict=True)
        )

    @torch.no_grad()
    def reference(self, request: GenerationRequest, token_ids: list[int]) -> torch.Tensor:
        """Logprobs [T] of ``token_ids`` after the prompt, by one forward without a cache."""
        sampling = request.sampling
        logits = self.model(torch.tensor([request.prompt_ids + token_ids])).logits[0].float()
        logits = logits[len(request.prompt_ids) - 1 : -1] / (sampling.temperature or 1.0)
        if sampling.top_k:
            kept = logits.topk(sampling.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < kept, -torch.inf)
        return logits.log_softmax(-1).gather(1, torch.tensor(token_ids)[:, None])[:, 0]


CASES = {
    f"{engine.__name__}-{dtype}-{'tied' if tied else 'untied'}": (engine, dtype, tied)
    for engine in (HFEngine, VLLMEngine)
    for dtype, tied in (("float32", False), ("float32", True), ("bfloat16", True))
}


@pytest.fixture(scope="module")
def run() -> Iterator[Callable]:
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def case(request, tmp_path_factory, run) -> Iterator[Case]:
    engine_class, dtype, tied = request.param
    folder = tmp_path_factory.mktemp("engine")
    config = EngineConfig(
        model_path=make_model_folder(folder / "model", tied),
        dtype=dtype,
        seed=0,
        max_model_len=CONTEXT,
        max_num_seqs=32,
        engine_kwargs={} if engine_class is HFEngine else {"kv_cache_memory_bytes": 2**26},
    )
    engine = engine_class(config)
    t = time.monotonic()
    run(engine.start())
    print("START", request.node.name, time.monotonic() - t)
    yield Case(engine, config, folder, run, tolerance=1e-5 if dtype == "float32" else 2e-2)
    run(engine.shutdown())


def test_generating_before_the_first_refit_is_refused(case):
    with pytest.raises(RunError, match="weights"):
        case.generate(case.requests(1))


def test_logprobs_are_exact_after_each_of_five_refits(case):
    for seed in range(5):
        t = time.monotonic()
        case.refit(seed)
        dt = time.monotonic() - t
        g = case.gap(case.requests(4))
        print("GAP", g, "refit_s", dt)
        assert g < case.tolerance


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0}, {"temperature": 0.5}, {"top_k": 2}, {"temperature": 0.5, "top_k": 2}],
    ids=str,
)
def test_logprobs_are_those_of_the_distribution_sampled_from(case, sampling):
    # The rounding of logits grows as they are divided by the temperature.
    g = case.gap(case.requests(4, **sampling))
    print("GAP", sampling, g)
    assert g < case.tolerance / (sampling.get("temperature") or 1)
