"""Both engines against the transformers model that they are meant to sample from.

The engines are real and hold tiny models made from a config. Equality is asked of logprobs that a
plain forward over the finished tokens gives, to rounding error.
"""

import asyncio
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from vllm.model_executor.models import registry

from nemo_like.data.chat import ChatTokenizer
from nemo_like.data.tokenizer import end_token_ids
from nemo_like.distributed.worker import listening_store
from nemo_like.errors import RunError, UserError
from nemo_like.generation.graph.engine import GraphEngine
from nemo_like.generation.hf_engine import HFEngine
from nemo_like.generation.protocol import (
    Completion,
    Engine,
    EngineConfig,
    FinishReason,
    GenerationRequest,
    SamplingParams,
)
from nemo_like.generation.vllm.engine import VLLMEngine
from nemo_like.generation.vllm.settings import CPU_BATCHED_TOKENS
from nemo_like.generation.worker import GenerationWorker
from nemo_like.models.build import TensorSpec, expected_tensors
from nemo_like.refit.broadcast import BroadcastLink, BroadcastSender
from nemo_like.refit.buckets import plan_buckets
from nemo_like.refit.ipc import IpcLink, IpcSender
from nemo_like.rollout.recorder import Limits
from tests.exact_conversations import converse, largest_gap

VOCAB_SIZE = 300
CONTEXT = 128
EOS_ID = 1
PROMPT = list(range(10, 50))
"""Longer than a block of the prefix cache."""

CPU = torch.device("cpu")
TIMEOUT_S = 60.0
BUCKET_BYTES = 200_000
"""A layer of the model spans several, and its output head has one of its own."""
SMALL_CACHE = {"engine_kwargs": {"kv_cache_memory_bytes": 2**26}}

SHORT = """
from nemo_like.environments.protocol import Observation, StepResult

class Short:
    def reset(self, row):
        return Observation()
    def step(self, action):
        return StepResult(messages=[{"role": "user", "content": "on"}], reward=0.5)
"""

NOWHERE = IpcLink(())
Specs = dict[str, TensorSpec]


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
    # None of which may reach the sampler: logprobs would be those of another distribution.
    (folder / "generation_config.json").write_text(
        json.dumps({"temperature": 0.1, "top_k": 2, "min_p": 0.5, "repetition_penalty": 5.0})
    )
    return str(folder)


@dataclass
class Case:
    """An engine under test, and the model whose weights it was last given."""

    engine: Engine
    config: EngineConfig
    run: Callable
    """Run a coroutine on the engine's event loop."""
    tolerance: float
    """Largest difference of a logprob that rounding explains."""
    version: int = 0
    model: LlamaForCausalLM | None = None
    senders: list[Any] = field(default_factory=list)
    request_ids: Iterator[int] = field(default_factory=itertools.count)

    def connect(self) -> None:
        """Open a sender and connect the engine to it, as a policy would."""
        dtype = getattr(torch, self.config.dtype)
        buckets = plan_buckets(expected_tensors(self.config.model_path, dtype), BUCKET_BYTES)
        num_ranks = self.config.tensor_parallel_size
        if self.config.dtype == "float32" and num_ranks == 1:
            sender = BroadcastSender(listening_store("127.0.0.1", None), buckets, CPU, 1, TIMEOUT_S)
            self.senders = [sender]
            link = BroadcastLink("127.0.0.1", sender.port, 1, 2)
        else:  # One sender a rank, as on GPUs that policy and engine share.
            self.senders = [IpcSender(buckets, CPU, 1, TIMEOUT_S) for _ in range(num_ranks)]
            link = IpcLink(tuple(sender.address for sender in self.senders))
        accepts = [sender.accept for sender in self.senders]
        self.all(accepts, self.engine.connect(link, buckets, TIMEOUT_S))

    def all(self, sends: list[Callable[[], None]], receive: Coroutine[Any, Any, None]) -> None:
        """Let all sides work at once."""

        async def together() -> None:
            await asyncio.gather(*map(asyncio.to_thread, sends), receive)

        self.run(together())

    def refit(self, seed: int, change: Callable[[LlamaForCausalLM], None] | None = None) -> None:
        """Load freshly initialised weights, after ``change``, as the next version."""
        self.all(*self.next_refit(seed, change=change))
        self.version += 1

    def next_refit(
        self,
        seed: int,
        load: Callable[..., Coroutine[Any, Any, Any]] | None = None,
        change: Callable[[LlamaForCausalLM], None] | None = None,
    ) -> tuple[list[Callable[[], None]], Coroutine[Any, Any, Any]]:
        """Both sides of a refit with fresh weights, which are ``model`` from then on.

        ``load``: the engine's own, or its worker's.
        """
        torch.manual_seed(seed)
        config = LlamaConfig.from_pretrained(self.config.model_path)
        model = LlamaForCausalLM(config).to(getattr(torch, self.config.dtype)).eval()
        if change is not None:
            change(model)
        tensors = dict(model.state_dict())
        if config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        version = self.version + 1
        sends = [partial(each.send, iter(tensors.items()), version) for each in self.senders]
        self.model = model
        return sends, (load or self.engine.load_weights)(version, adapters_only=False)

    def requests(
        self, count: int, prompt: list[int] = PROMPT, **sampling: Any
    ) -> list[GenerationRequest]:
        """Make requests for one prompt that differ in their seeds."""
        params = SamplingParams(**({"max_new_tokens": 12} | sampling))
        return [
            GenerationRequest(
                request_id=f"r{next(self.request_ids)}",
                prompt_ids=prompt,
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

    def mismatch(self, requests: list[GenerationRequest]) -> float:
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
    def logits(self, request: GenerationRequest, token_ids: list[int]) -> torch.Tensor:
        """Logits [T, V] that ``token_ids`` are drawn from, by one forward without a cache."""
        logits = self.model(torch.tensor([request.prompt_ids + token_ids])).logits[0].float()
        return logits[len(request.prompt_ids) - 1 : -1]

    def reference(self, request: GenerationRequest, token_ids: list[int]) -> torch.Tensor:
        """Logprobs [T] of ``token_ids`` under the processed distribution."""
        sampling = request.sampling
        logits = self.logits(request, token_ids) / (sampling.temperature or 1.0)
        if sampling.top_k:
            kept = logits.topk(sampling.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < kept, -torch.inf)
        if sampling.top_p < 1:
            ordered = logits.softmax(-1).sort(descending=True)
            outside = ordered.values.cumsum(-1) - ordered.values >= sampling.top_p
            logits = logits.masked_fill(
                torch.zeros_like(outside).scatter(1, ordered.indices, outside), -torch.inf
            )
        return logits.log_softmax(-1).gather(1, torch.tensor(token_ids)[:, None])[:, 0]


CASES = {
    "hf-float32-untied": (HFEngine, {}, False),
    "hf-float32-tied": (HFEngine, {}, True),
    "hf-bfloat16-tied": (HFEngine, {"dtype": "bfloat16"}, True),
    "graph-float32-untied": (GraphEngine, {}, False),
    "graph-bfloat16-tied": (GraphEngine, {"dtype": "bfloat16"}, True),
    "vllm-float32-untied": (VLLMEngine, SMALL_CACHE, False),
    "vllm-bfloat16-tied": (VLLMEngine, SMALL_CACHE | {"dtype": "bfloat16"}, True),
    "vllm-float32-tied-two-ranks": (VLLMEngine, SMALL_CACHE | {"tensor_parallel_size": 2}, True),
}
"""Engine, changes to its configuration, tied embeddings. An engine of vLLM takes 10 s to start."""


def make_config(folder: Path, tied: bool = False, **changes: Any) -> EngineConfig:
    return EngineConfig(
        **{
            "model_path": make_model_folder(folder / "model", tied),
            "dtype": "float32",
            "seed": 0,
            "max_model_len": CONTEXT,
            "max_num_seqs": 64,
            "engine_kwargs": {},
        }
        | changes
    )


@pytest.fixture(scope="module")
def run() -> Iterator[Callable]:
    """One event loop for all: an engine stays on the loop that it was started on."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def case(request, tmp_path_factory, run) -> Iterator[Case]:
    engine_class, changes, tied = request.param
    folder = tmp_path_factory.mktemp("engine")
    config = make_config(folder, tied, **changes)
    engine = engine_class(config)
    run(engine.start())
    case = Case(engine, config, run, tolerance=1e-5 if config.dtype == "float32" else 2e-2)
    case.connect()
    yield case
    run(engine.shutdown())


def test_generating_before_the_first_refit_is_refused(case):
    with pytest.raises(RunError, match="no usable weights"):
        case.generate(case.requests(1))


def test_logprobs_are_exact_after_each_of_five_refits(case):
    for seed in range(5):
        case.refit(seed)
        assert case.mismatch(case.requests(4)) < case.tolerance


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 0.5},
        {"top_k": 2},
        {"temperature": 0.5, "top_k": 2},
        {"top_p": 0.5},
    ],
    ids=str,
)
def test_logprobs_are_those_of_the_distribution_sampled_from(case, sampling):
    if case.config.dtype == "bfloat16" and sampling.keys() & {"top_k", "top_p"}:
        pytest.skip("rounding decides which of two nearly equal tokens passes the filter")
    # The rounding of logits grows as they are divided by the temperature.
    tolerance = case.tolerance / (sampling.get("temperature") or 1)
    assert case.mismatch(case.requests(4, **sampling)) < tolerance


def test_greedy_completions_are_the_most_likely_tokens(case):
    for filters in ({}, {"top_k": 2, "top_p": 0.5}):  # which do nothing then
        (request,) = case.requests(1, temperature=0, **filters)
        (completion,) = case.generate([request])
        best = case.logits(request, completion.token_ids).log_softmax(-1).max(-1).values
        assert completion.logprobs == pytest.approx(best.tolist(), abs=case.tolerance)


def test_more_prompt_tokens_than_one_forward_takes_give_exact_logprobs(case):
    prompts = [[first, *range(10, 109)] for first in range(64)]
    assert len(prompts) * len(prompts[0]) > CPU_BATCHED_TOKENS
    requests = [case.requests(1, prompt, max_new_tokens=3)[0] for prompt in prompts]
    assert case.mismatch(requests) < case.tolerance


def test_the_same_seed_gives_the_same_completion_and_other_seeds_others(case):
    once, again = (case.generate(case.requests(8)) for _ in range(2))
    assert [each.token_ids for each in once] == [each.token_ids for each in again]
    if isinstance(case.engine, HFEngine):
        assert once == again  # To the bit: nothing but the requests' order decides its batches.
    assert len({tuple(each.token_ids) for each in once}) == 8


def test_a_completion_ends_at_the_limit_of_new_tokens(case):
    (completion,) = case.generate(case.requests(1, max_new_tokens=5))
    assert len(completion.token_ids) == len(completion.logprobs) == 5
    assert completion.finish_reason is FinishReason.length
    assert completion.weight_version == case.version


def test_a_stop_token_ends_a_completion_and_is_kept(case):
    (free,) = case.generate(case.requests(1))
    stop_id = free.token_ids[3]
    (stopped,) = case.generate(case.requests(1, stop_token_ids=(EOS_ID, stop_id)))
    assert stopped.finish_reason is FinishReason.stop
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop_id) + 1]
    assert len(stopped.logprobs) == len(stopped.token_ids)


def test_ends_that_only_the_models_configuration_names_end_completions(case, tmp_path):
    (free,) = case.generate(case.requests(1))
    stop_id = free.token_ids[3]
    config = json.loads((Path(case.config.model_path) / "config.json").read_text())
    config["eos_token_id"] = [EOS_ID, stop_id]
    (tmp_path / "config.json").write_text(json.dumps(config))
    ends = end_token_ids(tmp_path, EOS_ID)
    (stopped,) = case.generate(case.requests(1, stop_token_ids=ends))
    assert stopped.finish_reason is FinishReason.stop
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop_id) + 1]


def test_the_models_own_end_of_sequence_ends_nothing_by_itself(case):
    completions = case.generate(case.requests(32, max_new_tokens=60))
    assert any(EOS_ID in completion.token_ids[:-1] for completion in completions)
    assert {completion.finish_reason for completion in completions} == {FinishReason.length}


def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it(case):
    (free,) = case.generate(case.requests(1, max_new_tokens=60))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(case.config.model_path)
    texts = [tokenizer.decode([token_id]) for token_id in free.token_ids]
    start = next(i for i in range(60) if (texts[i] + texts[i + 1]).isascii())
    (stopped,) = case.generate(
        case.requests(1, max_new_tokens=60, stop=("never", texts[start] + texts[start + 1]))
    )
    assert stopped.finish_reason is FinishReason.stop
    assert stopped.token_ids == free.token_ids[: start + 2]


def test_the_text_of_a_special_token_ends_a_completion_too(case):
    """``generation.stop`` serves for token ids."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(case.config.model_path)
    end = tokenizer.decode([EOS_ID])
    assert tokenizer.decode([EOS_ID], skip_special_tokens=True) == ""
    free = case.generate(case.requests(32, max_new_tokens=60))
    ended = case.generate(case.requests(32, max_new_tokens=60, stop=(end,)))
    found = [(a.token_ids, b) for a, b in zip(free, ended, strict=True) if EOS_ID in a.token_ids]
    assert found
    for ids, one in found:
        assert one.finish_reason is FinishReason.stop
        assert one.token_ids == ids[: ids.index(EOS_ID) + 1]


@pytest.mark.parametrize("room", [3, 1, 0, -1])
def test_a_completion_ends_with_the_context(case, room):
    prompt = [10 + i % 200 for i in range(CONTEXT - room)]
    (completion,) = case.generate(case.requests(1, prompt))
    assert len(completion.token_ids) == max(room, 0)
    assert completion.finish_reason is FinishReason.length


def test_a_prompt_that_the_model_cannot_read_is_refused_with_a_reason(case):
    with pytest.raises(RunError, match=str(VOCAB_SIZE + 5)):
        case.generate(case.requests(1, [10, VOCAB_SIZE + 5]))


def test_a_refit_leaves_no_trace_of_the_old_weights_in_caches(case):
    requests = case.requests(2)
    (before, _), _ = case.generate(requests), case.generate(case.requests(2))
    case.refit(seed=8)
    after, _ = case.generate(case.requests(2))
    assert after.token_ids != before.token_ids
    assert case.mismatch(case.requests(2)) < case.tolerance


def drop(specs: Specs) -> None:
    del specs["model.layers.1.mlp.up_proj.weight"]


def rename(specs: Specs) -> None:
    specs["model.layers.9.mlp.up_proj.weight"] = specs.pop("model.layers.1.mlp.up_proj.weight")


def reshape(specs: Specs) -> None:
    specs["model.norm.weight"] = ((127,), specs["model.norm.weight"][1])


def recast(specs: Specs) -> None:
    specs["model.norm.weight"] = ((128,), torch.float16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, "missing: model.layers.1.mlp.up_proj.weight"),
        (rename, "unexpected: model.layers.9.mlp.up_proj.weight"),
        (reshape, r"model.norm.weight is \w+\[127\], not \w+\[128\]"),
        (recast, r"model.norm.weight is float16\[128\]"),
    ],
)
def test_a_sender_of_other_tensors_is_refused_and_the_weights_stay(case, change, message):
    specs = dict(expected_tensors(case.config.model_path, getattr(torch, case.config.dtype)))
    change(specs)
    with pytest.raises(RunError, match=message):
        case.run(case.engine.connect(NOWHERE, plan_buckets(specs, BUCKET_BYTES), TIMEOUT_S))
    assert case.mismatch(case.requests(2)) < case.tolerance


def test_repeated_tensors_and_stale_refits_are_refused_and_the_weights_stay(case):
    specs = expected_tensors(case.config.model_path, getattr(torch, case.config.dtype))
    buckets = plan_buckets(specs, BUCKET_BYTES)
    with pytest.raises(RunError, match="twice"):
        case.run(case.engine.connect(NOWHERE, [*buckets, buckets[0]], TIMEOUT_S))
    with pytest.raises(RunError, match="stale"):
        case.run(case.engine.load_weights(case.version))
    assert case.mismatch(case.requests(2)) < case.tolerance


@pytest.mark.parametrize("fault", ["version", "name"])
def test_an_engine_whose_refit_failed_midway_refuses_to_generate(tmp_path, run, fault):
    config = make_config(tmp_path, dtype="bfloat16")
    case = Case(HFEngine(config), config, run, tolerance=2e-2)
    run(case.engine.start())
    case.connect()
    case.refit(0)
    tensors = {**case.model.state_dict()}
    if fault == "name":
        tensors["model.norm.wait"] = tensors.pop("model.norm.weight")

    async def both() -> list[BaseException | None]:
        send = asyncio.to_thread(
            case.senders[0].send, iter(tensors.items()), 99 if fault == "version" else 2
        )
        return await asyncio.gather(send, case.engine.load_weights(2), return_exceptions=True)

    sent, loaded = run(both())
    assert isinstance(sent, RunError)
    assert isinstance(loaded, RunError)
    reason = "Refit 2 was announced, and the sender began refit 99"
    if fault == "name":
        reason = "announced model.norm.weight .* came with lm_head.weight"
    assert re.search(reason, str(loaded))
    with pytest.raises(RunError, match="no usable weights"):
        case.generate(case.requests(1))
    run(case.engine.shutdown())


@pytest.mark.parametrize("case", [CASES["vllm-bfloat16-tied"]], ids=[""], indirect=True)
def test_after_a_failed_refit_vllm_refuses_to_generate_until_the_next_one(case):
    case.refit(0)
    tensors = dict(case.model.state_dict())

    async def both() -> list[BaseException | None]:
        sends = (asyncio.to_thread(one.send, iter(tensors.items()), 99) for one in case.senders)
        load = case.engine.load_weights(case.version + 1)
        return await asyncio.gather(load, *sends, return_exceptions=True)

    assert all(isinstance(one, RunError) for one in case.run(both()))
    with pytest.raises(RunError, match="no usable weights"):
        case.generate(case.requests(1))
    case.version += 1
    case.connect()
    case.refit(1)
    assert case.mismatch(case.requests(2)) < case.tolerance


def test_the_trainers_logprobs_of_a_conversation_are_the_engines(case, tmp_path):
    """Turns of a few tokens, which sometimes end with what ends a turn and sometimes do not."""
    folder = case.config.model_path
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] }} {{ m.content }}<eos>\n{% endfor %}"
        "{% if add_generation_prompt %}a {% endif %}"
    )
    tokenizer.save_pretrained(tmp_path)
    case.refit(seed=12)
    case.model.save_pretrained(tmp_path)
    (tmp_path / "short.py").write_text(SHORT)
    chat = ChatTokenizer(str(tmp_path))
    drawn = SamplingParams(max_new_tokens=9, temperature=0.8, stop_token_ids=tuple(range(200)))
    records = [{"prompt": text} for text in ("é", "two", "3")]
    limits = Limits(tokens=CONTEXT, turns=5)
    environment = {"name": f"{tmp_path}/short.py:Short"}
    found = case.run(converse(case.engine, chat, records, drawn, limits, **environment))
    assert [one.result.error for one in found] == [None] * 3
    assert min(len(one.completions) for one in found) > 1
    gap, count = largest_gap(str(tmp_path), found, 0.8)
    assert gap < case.tolerance
    assert count == sum(one.num_sampled for one in found)


def test_a_refit_amid_sampling_is_refused(case):
    case.refit(0)

    async def refit_amid_sampling() -> Completion:
        (request,) = case.requests(1)
        sampling = asyncio.create_task(case.engine.generate(request))
        await asyncio.sleep(0)
        with pytest.raises(RunError, match="1 completions"):
            await case.engine.load_weights(case.version + 1)
        return await sampling

    assert len(case.run(refit_amid_sampling()).token_ids) == 12


def test_interrupted_completions_go_on_with_new_weights_and_know_which_sampled_what(case):
    """Each token has the logprob that the weights of its version give it, with a fresh cache."""
    models = {}
    count = 200 if case.config.dtype == "float32" else 24
    requests = case.requests(count, max_new_tokens=60)
    if isinstance(case.engine, VLLMEngine) and count < 200:  # another way through its scheduler
        requests[::2] = case.requests(count // 2, max_new_tokens=60, stop=("never said",))
    # A burst is 16 tokens of 60.
    num_refits = 2 if isinstance(case.engine, GraphEngine) else 5
    worker = GenerationWorker(context=None)  # pyright: ignore
    worker._engine = case.engine

    async def refit(seed):
        sends, load = case.next_refit(seed, worker.load_weights)
        await asyncio.gather(*map(asyncio.to_thread, sends), load)
        case.version += 1
        models[case.version] = case.model

    async def main():
        sampling = asyncio.gather(*map(worker.generate, requests))
        for seed in range(num_refits):
            await asyncio.sleep(0.01)
            await refit(seed)
        return await sampling

    case.refit(77)
    models[case.version] = case.model
    found = case.run(main())
    last = [[one.weight_version, *(v for _, v in one.later_versions)][-1] for one in found]
    assert set(last) == {case.version}  # all of them lived to see the last refit
    sampled = torch.tensor([one.token_ids for one in found])
    rows = torch.cat([torch.tensor([PROMPT]).expand(len(found), -1), sampled], 1)
    with torch.no_grad():
        expected = {
            version: model(rows).logits[:, len(PROMPT) - 1 : -1].float().log_softmax(-1)
            for version, model in models.items()
        }
    # In 16 bits the largest of 1,440 differences is larger than that of a few.
    most = case.tolerance * (1 if case.config.dtype == "float32" else 2)
    for row, completion in enumerate(found):
        starts = [(0, completion.weight_version), *completion.later_versions, (60, None)]
        for (begin, version), (end, _) in itertools.pairwise(starts):
            right = expected[version][row, range(begin, end), sampled[row, begin:end]]
            got = torch.tensor(completion.logprobs[begin:end])
            assert (got - right).abs().max() < most


def test_the_event_loop_turns_while_the_engine_samples(case):
    async def longest_stall_s() -> float:
        task = asyncio.gather(
            *(case.engine.generate(each) for each in case.requests(32, max_new_tokens=60))
        )
        stall_s, last = 0.0, time.monotonic()
        while not task.done():
            await asyncio.sleep(0.001)
            stall_s, last = max(stall_s, time.monotonic() - last), time.monotonic()
        return stall_s

    assert case.run(longest_stall_s()) < 0.5


def test_vllm_looks_at_a_models_class_in_a_fork(case):
    """Its own way imports vLLM anew, which takes as long as all else of an engine's start."""
    if not isinstance(case.engine, VLLMEngine):
        pytest.skip("no vLLM")
    servers = {process.ppid() for process in case.engine._processes}
    assert registry._run_in_subprocess(os.getppid) in servers


def test_the_end_of_an_engine_fails_what_is_pending_and_leaves_no_process(case):
    """The last test of each engine, which does not survive it."""
    processes: list[psutil.Process] = [*vars(case.engine).get("_processes", [])]
    assert bool(processes) == isinstance(case.engine, VLLMEngine)

    async def end_amid_sampling() -> list[BaseException | Completion]:
        tasks = [
            asyncio.create_task(case.engine.generate(each))
            for each in case.requests(8, max_new_tokens=60)
        ]
        await asyncio.sleep(0.02)
        if processes and case.config.dtype == "float32":
            processes[0].kill()
        else:
            await case.engine.shutdown()
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)

    results = case.run(end_amid_sampling())
    assert all(isinstance(result, RunError) for result in results)
    assert any(word in str(results[0]) for word in ("its process died", "shut down", "abort"))
    with pytest.raises(RunError):
        case.generate(case.requests(1))
    case.run(case.engine.shutdown())
    assert not any(process.is_running() for process in processes)


def test_positions_begin_at_0_for_a_model_that_learns_them(tmp_path, run):
    """Rotary embeddings would not notice. Prompts are of unequal length."""
    config = make_config(tmp_path)
    folder = Path(config.model_path)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB_SIZE, n_positions=CONTEXT, n_embd=32, n_layer=1, n_head=2)
    ).eval()
    model.save_pretrained(folder)
    engine = HFEngine(config)
    run(engine.start())
    engine._copy_weights(iter(load_file(folder / "model.safetensors").items()))
    engine._version = 1
    case = Case(engine, config, run, tolerance=1e-5, model=model)  # pyright: ignore
    requests = [case.requests(1, PROMPT[:length])[0] for length in (3, 20)]
    assert case.mismatch(requests) < case.tolerance
    run(engine.shutdown())


@pytest.mark.parametrize("kind", [HFEngine, GraphEngine])
def test_a_request_fails_wherever_the_end_of_its_engine_finds_it(tmp_path, run, kind):
    """In the queue, taken from it, or being sampled: after any turn of the event loop."""
    config = make_config(tmp_path)
    (request,) = Case(kind(config), config, run, tolerance=0).requests(1, max_new_tokens=60)

    async def ended_after(turns: int) -> None:
        engine = kind(config)
        await engine.start()
        engine._version = 1
        sampling = asyncio.create_task(engine.generate(request))
        for _ in range(turns):
            await asyncio.sleep(0)
        await engine.shutdown()
        with pytest.raises(RunError, match="shut down"):
            await asyncio.wait_for(sampling, 10)

    for turns in range(6):
        run(ended_after(turns))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine_kwargs": {"max_num_seq": 4}}, "engine_kwargs.max_num_seq .*max_num_seqs"),
        ({"engine_kwargs": {"max_num_batched_tokens": 1}}, "vLLM refuses"),
        ({"device": "cuda"}, "built for cpu"),
    ],
)
def test_a_configuration_that_vllm_cannot_take_is_a_user_error(tmp_path, run, changes, message):
    with pytest.raises(UserError, match=message):
        run(VLLMEngine(make_config(tmp_path, **changes)).start())


@pytest.mark.parametrize("changes", [{"engine_kwargs": {"x": 1}}, {"tensor_parallel_size": 2}])
def test_settings_without_effect_on_the_hf_engine_are_a_user_error(tmp_path, run, changes):
    with pytest.raises(UserError, match="has no effect"):
        run(HFEngine(make_config(tmp_path, **changes)).start())


@pytest.mark.parametrize("tied", [False, True])
def test_the_manifest_lists_what_the_model_saves(tmp_path, tied):
    specs = expected_tensors(make_model_folder(tmp_path, tied), torch.bfloat16)
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(tmp_path)).bfloat16()
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert specs == {name: (tuple(each.shape), each.dtype) for name, each in saved.items()}
    assert ("lm_head.weight" in specs) is not tied
