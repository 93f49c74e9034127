"""Our scheduler beside vLLM's own, on an engine that is simulated: what is scheduled at each step,
and what reaches the caller, are the same.
"""

import collections
import dataclasses
import inspect
import time
import zlib

import numpy as np
import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu import warmup
from vllm.v1.worker.gpu.sample import sampler

import nemo_like.generation.vllm.processes  # noqa: F401, it replaces parts of vLLM
from nemo_like.generation.protocol import SamplingParams as OurParams
from nemo_like.generation.vllm.completions import sampling_params
from nemo_like.generation.vllm.scheduler import LOGPROBS, LOOKAHEAD_TOKENS, STARTS, WholeCompletions
from nemo_like.generation.vllm.worker import _keeping_adapters, use_cheap_logprobs

BLOCK = 16
STOP_ID = 2
QUEUE = 2  # Steps in flight, as in vLLM's asynchronous engine.


def make(cls, model, num_blocks, max_num_seqs, more=()):
    """``more``: groups of other layers in the KV cache."""
    config = EngineArgs(
        model=model, max_model_len=256, max_num_seqs=max_num_seqs, max_num_batched_tokens=512,
        dtype="float32", enforce_eager=True, block_size=BLOCK,
    ).create_engine_config()  # fmt: skip
    config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32)
    init_none_hash(sha256)
    return cls(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec), *more],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=False,
    )


def request_of(name, prompt, max_tokens, kind=RequestOutputKind.FINAL_ONLY, stop=()):
    params = SamplingParams(
        max_tokens=max_tokens, logprobs=0, ignore_eos=True, stop_token_ids=[STOP_ID],
        detokenize=bool(stop), stop=list(stop), output_kind=kind,
    )  # fmt: skip
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=params,
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


def token_of(name, position):
    """What the model samples: a stop token in one of 80."""
    drawn = zlib.crc32(f"{name} {position}".encode()) % 400
    return STOP_ID if drawn < 5 else drawn


class Run:
    """Feeds a scheduler until nothing is left, ``arrivals`` and ``aborts`` by step."""

    def __init__(self, scheduler, arrivals, aborts=()):
        self.scheduler = scheduler
        self.steps = []
        self.completions = collections.defaultdict(list)
        self.logprobs = collections.defaultdict(list)
        self.num_outputs = collections.Counter()
        self.reasons = {}
        self.starts = {}
        pending = collections.deque()
        number = 0
        while scheduler.has_requests() or pending or number <= max(arrivals):
            for request in arrivals.get(number, ()):
                scheduler.add_request(request)
            for name in dict(aborts).get(number, ()):
                scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            output = scheduler.schedule()
            self._check_slots(output)
            self.steps.append(dict(output.num_scheduled_tokens))
            if output.total_num_scheduled_tokens:
                pending.append((output, self._sample(output)))
            if pending and (len(pending) == QUEUE or not output.total_num_scheduled_tokens):
                self._collect(scheduler.update_from_output(*pending.popleft()))
            number += 1

    def _check_slots(self, output):
        """Every scheduled token has a slot in the KV cache, and tokens are counted right."""
        for name in output.num_scheduled_tokens:
            (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
            assert len(blocks) * BLOCK >= self.scheduler.requests[name].num_computed_tokens
        cached = output.scheduled_cached_reqs
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            scheduled = output.num_scheduled_tokens[name]
            assert computed + scheduled == self.scheduler.requests[name].num_computed_tokens
        for name, drawn in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            one = self.scheduler.requests[name]  # with this step's token, if there is one
            with_this = drawn + (not one.is_prefill_chunk)
            assert with_this == one.num_output_tokens + one.num_output_placeholders

    def _sample(self, output):
        names = list(output.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in names]
        tokens = [
            [] if one.is_prefill_chunk else [token_of(name, one.num_computed_tokens)]
            for name, one in zip(names, requests, strict=True)
        ]
        logprobs = np.array([[-(t[0] if t else 0) / 7] for t in tokens], dtype=np.float32)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=tokens,
            logprobs=LogprobsLists(np.zeros_like(logprobs, dtype=np.int64), logprobs, logprobs),
        )

    def _collect(self, by_client):
        for message in by_client.values():
            for output in message.outputs:
                name = output.request_id
                self.num_outputs[name] += 1
                self.completions[name] += output.new_token_ids
                if output.new_logprobs is None:  # ours
                    self.logprobs[name] += output.kv_transfer_params[LOGPROBS]
                else:
                    self.logprobs[name] += output.new_logprobs.logprobs[:, 0].tolist()
                if output.finish_reason is not None:
                    self.reasons[name] = output.finish_reason
                    self.starts[name] = output.kv_transfer_params


def both(model, arrivals, aborts=(), num_blocks=2000, max_num_seqs=32):
    """(vLLM's, ours); arrivals are made anew for each, as requests are changed by a run."""
    return [
        Run(make(cls, model, num_blocks, max_num_seqs), arrivals(), aborts)
        for cls in (AsyncScheduler, WholeCompletions)
    ]


def late_arrivals():
    first = [request_of(f"a{i}", list(range(3, 20 + i)), 150) for i in range(20)]
    group = [request_of(f"b{i}", list(range(3, 60)), 40) for i in range(20)]
    one = request_of("c", [5, 6], 240, RequestOutputKind.DELTA)
    told = request_of("d", [5, 6], 60, RequestOutputKind.DELTA, stop=["whose reader finds it"])
    return {0: first, 7: group, 20: [told], 90: [one]}


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model()


def test_every_step_and_completion_is_vllms(model):
    theirs, ours = both(model, late_arrivals, aborts=[(4, ["a3", "a4"]), (5, ["a5"])])
    assert ours.steps == theirs.steps
    gone = {"a3", "a4", "a5"}
    for name in theirs.completions.keys() - gone:
        assert ours.completions[name] == theirs.completions[name], name
        assert ours.logprobs[name] == theirs.logprobs[name], name
    assert ours.num_outputs["d"] == theirs.num_outputs["d"] > ours.num_outputs["c"] == 1
    assert ours.reasons == theirs.reasons
    assert len(ours.reasons) == 42 - len(gone)
    ours.scheduler.schedule()  # frees what the last step ended
    assert not ours.scheduler._held
    assert not ours.scheduler._starts
    pools = [one.scheduler.kv_cache_manager.block_pool for one in (theirs, ours)]
    assert pools[0].get_num_free_blocks() == pools[1].get_num_free_blocks()


def test_most_steps_are_repeated(model):
    def arrivals():
        return {0: [request_of(f"r{i}", [4] * 30, 200) for i in range(8)]}

    calls = []

    class Counting(WholeCompletions):
        def _count_repetitions(self, output):
            calls.append(output)
            return super()._count_repetitions(output)

    run = Run(make(Counting, model, 2000, 32), arrivals())
    # One to start with, then one in 65, and the end's.
    assert len(run.steps) > 150
    assert len(calls) <= 4 + len(run.steps) / LOOKAHEAD_TOKENS


def test_with_few_blocks_it_preempts_no_earlier_than_vllm(model):
    def arrivals():
        return {0: [request_of(f"r{i}", [4] * 30, 100) for i in range(12)]}

    theirs, ours = both(model, arrivals, num_blocks=60)
    assert ours.steps == theirs.steps
    assert ours.completions == theirs.completions


def test_a_request_that_fits_no_empty_cache_ends_the_engine_and_is_named(model):
    scheduler = make(WholeCompletions, model, 6, 32)
    scheduler.stuck_after_s = 0.05
    scheduler.add_request(request_of("long", [4] * 100, 10))
    scheduler.schedule()
    time.sleep(0.1)
    with pytest.raises(RuntimeError, match=r"Request long of 100 tokens .* cache of 96 tokens"):
        scheduler.schedule()
    scheduler.finish_requests("long", RequestStatus.FINISHED_ABORTED)
    scheduler.add_request(request_of("short", [4] * 60, 10))
    assert scheduler.schedule().num_scheduled_tokens == {"short": 60}


@pytest.mark.parametrize("reset_at", [20, 60])
def test_requests_that_lose_their_cache_are_computed_again_as_vllm_does(model, reset_at):
    """As a refit has it that interrupts sampling: every running request is preempted."""

    def arrivals():
        return {0: [request_of(f"r{i}", list(range(3, 30 + i)), 120) for i in range(8)]}

    def resetting(cls):
        class Resetting(cls):
            num_calls = 0

            def schedule(self, *args, **kwargs):
                self.num_calls += 1
                if self.num_calls == reset_at:
                    assert self.reset_prefix_cache(reset_running_requests=True)
                return super().schedule(*args, **kwargs)

        return Run(make(Resetting, model, 2000, 32), arrivals())

    theirs, ours = resetting(AsyncScheduler), resetting(WholeCompletions)
    assert ours.steps == theirs.steps
    assert ours.completions == theirs.completions
    assert max(ours.steps[reset_at - 1].values()) > 1  # prompts once more


def test_each_request_knows_its_first_token_after_each_refit_that_it_lived_to_see(model):
    """Two refits come while requests run, one before the first of them and one after the last."""
    sampled = []

    class Refitting(WholeCompletions):
        num_calls = 0

        def schedule(self, *args, **kwargs):
            self.num_calls += 1
            if self.num_calls in (20, 60):
                assert self.reset_prefix_cache(reset_running_requests=True)
                sampled.append({name: len(held._token_ids) for name, held in self._held.items()})
                assert self.reset_prefix_cache()
            return super().schedule(*args, **kwargs)

    scheduler = make(Refitting, model, 2000, 32)
    assert scheduler.reset_prefix_cache()
    early = [request_of(f"r{i}", list(range(3, 30 + i)), 40 + 10 * i) for i in range(8)]
    run = Run(scheduler, {0: early, 30: [request_of("late", [5, 6], 100)]})
    assert len(run.starts) == 9
    for name, found in run.starts.items():
        seen = [(1 + i, counts[name]) for i, counts in enumerate(sampled) if name in counts]
        assert found[STARTS] == [(1 if name == "late" else 0, 0), *seen]
    assert len(run.starts["r7"][STARTS]) == 3
    assert not scheduler._starts


def test_no_step_is_repeated_over_requests_that_were_preempted_or_came_back(model):
    scheduler = make(WholeCompletions, model, 2000, 32)
    for i in range(3):
        scheduler.add_request(request_of(f"r{i}", [4] * 30, 100))
    outputs = [scheduler.schedule() for _ in range(2)]  # prompts, and a step that can be repeated
    last = outputs[-1]
    assert scheduler._count_repetitions(last) > 1
    cached = dataclasses.replace(last.scheduled_cached_reqs, resumed_req_ids={"r0"})
    assert not scheduler._count_repetitions(dataclasses.replace(last, scheduled_cached_reqs=cached))
    # Workers must hear of a preempted request, also of one that ended right after.
    scheduler.reset_preempted_req_ids = {"gone"}
    assert scheduler.schedule().preempted_req_ids == {"gone"}


@pytest.mark.parametrize("state", [PauseState.PAUSED_ALL, PauseState.PAUSED_NEW])
def test_nothing_is_scheduled_that_vllm_would_not_while_it_is_paused(model, state):
    def arrivals():
        return {0: [request_of(f"r{i}", [4] * 30, 120) for i in range(4)]}

    def pausing(cls):
        class Pausing(cls):
            num_calls = 0

            def schedule(self, *args, **kwargs):
                self.num_calls += 1
                is_paused = 20 <= self.num_calls < 30
                self.set_pause_state(state if is_paused else PauseState.UNPAUSED)
                output = super().schedule(*args, **kwargs)
                self.set_pause_state(PauseState.UNPAUSED)  # or there would be nothing left to do
                return output

        return Run(make(Pausing, model, 2000, 32), arrivals())

    theirs, ours = pausing(AsyncScheduler), pausing(WholeCompletions)
    assert ours.steps == theirs.steps
    assert ours.completions == theirs.completions
    assert (ours.steps[24] == {}) is (state is PauseState.PAUSED_ALL)


def test_completions_of_every_length_leave_as_much_in_the_cache_as_vllms(model):
    def cached(cls):
        found = []
        for length in range(BLOCK + 1):
            prompt = [7] * 2 * BLOCK
            first = Run(make(cls, model, 2000, 32), {0: [request_of("a1", prompt, 20 + length)]})
            first.scheduler.schedule()
            told = [*prompt, *first.completions["a1"], *range(20, 60)]
            first.scheduler.add_request(request_of("second", told, 5))
            output = first.scheduler.schedule()
            found.append(len(told) - output.num_scheduled_tokens["second"])
        return found

    ours = cached(WholeCompletions)
    assert ours == cached(AsyncScheduler)
    assert len(set(ours)) > 1


def test_a_shared_prompt_is_found_in_the_cache_also_after_decoding(model):
    # The second request's prompt is the first one's prompt and completion: whole blocks are there.
    first = Run(make(WholeCompletions, model, 2000, 32), {0: [request_of("a1", [4] * 30, 100)]})
    told = [4] * 30 + first.completions["a1"]
    scheduler = first.scheduler
    scheduler.schedule()
    scheduler.add_request(request_of("second", told, 5))
    output = scheduler.schedule()
    cached = len(told) - output.num_scheduled_tokens["second"]
    assert len(first.completions["a1"]) > 2 * BLOCK
    assert cached == (len(told) - 1) // BLOCK * BLOCK


def test_adapters_outlive_the_buffers_that_brought_them():
    buffer, kept = torch.zeros(1), {}
    names = ("a.lora_A.weight", "a.weight", "a.lora_B.weight")
    others = _keeping_adapters(((name, buffer.fill_(i)) for i, name in enumerate(names)), kept)
    assert [name for name, _ in others] == ["a.weight"]
    assert {name: one.item() for name, one in kept.items()} == {names[0]: 0, names[2]: 2}


def test_no_step_is_repeated_where_layers_with_a_window_free_blocks_as_they_go(model):
    spec = SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32, sliding_window=BLOCK
    )
    group = KVCacheGroupSpec(["windowed"], spec)
    scheduler = make(WholeCompletions, model, 2000, 32, [group])
    scheduler.add_request(request_of("r", [4] * 30, 100))
    for _ in range(2):
        scheduler.schedule()
    assert not scheduler._repetitions


def test_requests_differ_by_their_seeds_and_by_what_was_asked():
    asked = OurParams(max_new_tokens=9, temperature=0.5, stop_token_ids=(3,))
    first, second = [sampling_params(asked, seed, 5) for seed in (1, 2)]
    other = sampling_params(dataclasses.replace(asked, temperature=1.0), 3, 5)
    shorter = sampling_params(asked, 4, 4)
    found = [(p.seed, p.temperature, p.max_tokens) for p in (first, second, other, shorter)]
    assert found == [(1, 0.5, 5), (2, 0.5, 5), (3, 1.0, 5), (4, 0.5, 4)]
    assert first.stop_token_ids == [3]


def test_logprobs_of_sampled_tokens_are_float32_and_of_whole_distributions():
    """In place of kernels of vLLM's that only a GPU has."""
    use_cheap_logprobs()
    draw = torch.Generator().manual_seed(0)
    logits = 8 * torch.randn(5, 40, generator=draw).bfloat16()
    ids = torch.tensor([0, 39, 7, 7, 21], dtype=torch.int32)
    found = sampler.compute_topk_scores(logits, 0, ids)
    assert found.logprob_token_ids.flatten().tolist() == ids.tolist()
    expected = logits.double().log_softmax(-1)[range(5), ids.long()]
    assert found.logprobs.dtype == torch.float32
    assert torch.allclose(found.logprobs[:, 0].double(), expected, rtol=0, atol=1e-5)


def test_an_engine_warms_up_what_training_samples_with():
    assert "SamplingParams.for_sampler_warmup()" in inspect.getsource(warmup)
    sampled = SamplingParams.for_sampler_warmup()
    assert (sampled.top_k, sampled.top_p, sampled.logprobs) == (0, 1.0, 0)
    assert sampled.temperature not in (0.0, 1.0), "no kernel would apply it"
