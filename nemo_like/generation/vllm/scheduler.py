"""A scheduler of vLLM's that plans several steps at once and reports whole completions.

Stock, each sequence costs the engine's process the same work at every token: its slots in the KV
cache are looked up, its token is sent to our process by itself and handled there, though callers
wait for whole completions. With 128 sequences of a 1.5B model that is half of a step, and the GPU
waits for it.
"""

import dataclasses
import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

LOOKAHEAD_TOKENS = 64
"""Slots in the KV cache that a decoding sequence is given ahead, and so the most steps that need
no planning."""
STARTS = "starts"
"""In each last output: numbers of refits, with the first token that was sampled after each."""
LOGPROBS = "logprobs"
"""In each last output: logprobs of its tokens as a list, if they were held back. vLLM's own field
takes three arrays, which the reader turns into lists again, token by token."""


class WholeCompletions(AsyncScheduler):
    """Two shortcuts, and which refits a request has lived through.

    Whatever does not fit the shortcuts takes vLLM's own way.

    After a step in which every sequence decoded one token, each has slots for the next ones: those
    steps repeat it. And the tokens of a request are held back until it ends. Stop strings are found
    by the reader, so that requests with any are left alone, and so are those that ask for logprobs
    of other tokens than the sampled ones.
    """

    stuck_after_s = 60.0
    """Seconds for which requests may wait although none runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: dict[str, _Held] = {}
        self._starts: dict[str, list[tuple[int, int]]] = {}
        self._refit = -1  # The number of the last one.
        self._last: SchedulerOutput | None = None
        self._stuck_since: float | None = None
        self._repetitions = 0  # How often the last step may be repeated.
        self._can_repeat = (
            self.connector is None
            and self.ec_connector is None
            and not self.num_spec_tokens
            # Groups of other kinds of layers free and take blocks as they go.
            and len(self.kv_cache_config.kv_cache_groups) == 1
        )
        if self._can_repeat:
            self.kv_cache_manager.cache_blocks = _at_block_ends(
                self.kv_cache_manager.cache_blocks, self.block_size
            )

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """See vLLM's ``Scheduler``."""
        if self._repetitions:
            repeated = self._repeat()
            if repeated is not None:
                return repeated
        # Never at the price of keeping a request waiting or of interrupting another.
        num_running, num_waiting = self.get_request_counts()
        num_blocks = num_running * (LOOKAHEAD_TOKENS // self.block_size + 2)
        ahead = (
            self._can_repeat
            and num_waiting == 0
            and self.kv_cache_manager.block_pool.get_num_free_blocks() > num_blocks
        )
        if self._can_repeat:
            self.num_lookahead_tokens = LOOKAHEAD_TOKENS if ahead else 0
        output = super().schedule(*args, **kwargs)
        self._check_stuck(output)
        self._last = output
        self._repetitions = self._count_repetitions(output) if ahead else 0
        return output

    def _check_stuck(self, output: SchedulerOutput) -> None:
        """Raise RuntimeError if no request runs and none can start, which vLLM tries for ever."""
        num_running, num_waiting = self.get_request_counts()
        is_paused = self.pause_state is not PauseState.UNPAUSED
        if num_running or not num_waiting or is_paused or output.total_num_scheduled_tokens:
            self._stuck_since = None
            return
        self._stuck_since = self._stuck_since or time.monotonic()
        if (seconds := time.monotonic() - self._stuck_since) > self.stuck_after_s:
            request = self.waiting.peek_request()
            size = self.kv_cache_config.num_blocks * self.block_size
            raise RuntimeError(
                f"Request {request.request_id} of {request.num_tokens} tokens has waited for "
                f"{seconds:.0f} s, though nothing else runs, in a KV cache of {size} tokens."
            )

    def _count_repetitions(self, output: SchedulerOutput) -> int:
        """Steps after ``output`` in which each running request can decode one more token."""
        num_requests = len(output.num_scheduled_tokens)
        if (
            num_requests == 0
            or num_requests != output.total_num_scheduled_tokens
            or num_requests != len(self.running)
            or output.scheduled_cached_reqs.resumed_req_ids
            or output.has_structured_output_requests
            or any(request.is_prefill_chunk for request in self.running)
        ):
            return 0
        ends = (
            min(one.num_prompt_tokens + one.max_tokens, self.max_model_len)
            - one.num_computed_tokens
            for one in self.running
        )
        return max(0, min(LOOKAHEAD_TOKENS, min(ends) - 1))

    def _repeat(self) -> SchedulerOutput | None:
        """The last step, one token on, without requests that ended; None if others came."""
        last = self._last
        assert last is not None
        ids = [
            one
            for one in last.num_scheduled_tokens
            if (request := self.requests.get(one)) is not None and not request.is_finished()
        ]
        if (
            not ids
            or self.get_request_counts() != (len(ids), 0)
            or self.reset_preempted_req_ids
            or self.pause_state is not PauseState.UNPAUSED
        ):
            self._repetitions = 0
            return None
        self._repetitions -= 1
        self.current_step += 1
        self.kv_cache_manager.new_step_starts()
        requests = [self.requests[one] for one in ids]
        output = dataclasses.replace(
            last,
            scheduled_cached_reqs=dataclasses.replace(
                last.scheduled_cached_reqs,
                req_ids=ids,
                all_token_ids={},
                new_block_ids=[None] * len(ids),
                num_computed_tokens=[one.num_computed_tokens for one in requests],
                num_output_tokens=[
                    one.num_output_tokens + one.num_output_placeholders for one in requests
                ],
            ),
            num_scheduled_tokens=dict.fromkeys(ids, 1),
            total_num_scheduled_tokens=len(ids),
            finished_req_ids=self.finished_req_ids,
            new_block_ids_to_zero=None,
            kv_cache_block_copies=None,
        )
        self._update_after_schedule(output)
        self._last = output
        return output

    def add_request(self, request: Request) -> None:
        """See vLLM's ``Scheduler``."""
        params = request.sampling_params
        if params is not None and not params.stop and not params.logprobs:
            self._held[request.request_id] = _Held(with_logprobs=params.logprobs is not None)
        self._starts[request.request_id] = [(self._refit, 0)]
        super().add_request(request)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """See vLLM's ``Scheduler``; unless running requests lose their cache, a refit has ended."""
        is_reset = super().reset_prefix_cache(reset_running_requests, reset_connector)
        if is_reset and not reset_running_requests:
            self._refit += 1
            for request_id, request in self.requests.items():
                self._starts[request_id].append((self._refit, request.num_output_tokens))
        return is_reset

    def finish_requests(self, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """See vLLM's ``Scheduler``; a request that its caller gave up is forgotten here too."""
        if request_ids is not None:  # It may be an iterator, and is read twice.
            request_ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        for request_id in list(self._starts) if request_ids is None else request_ids:
            self._starts.pop(request_id, None)
            self._held.pop(request_id, None)
        return super().finish_requests(request_ids, *args, **kwargs)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """See vLLM's ``Scheduler``."""
        logprobs = model_runner_output.logprobs
        sampled: list[float] | None = None
        if logprobs is not None and len(self._held) == len(self.requests):
            # Nobody needs them by request: one conversion instead of an array each.
            sampled = logprobs.logprobs[:, 0].tolist()
            model_runner_output.logprobs = None
        by_client = super().update_from_output(scheduler_output, model_runner_output)
        rows = model_runner_output.req_id_to_index
        for client, message in list(by_client.items()):
            due = []
            for output in message.outputs:
                held = self._held.get(output.request_id)
                if held is not None:
                    held.add(output, None if sampled is None else sampled[rows[output.request_id]])
                    if output.finish_reason is None:
                        continue
                    del self._held[output.request_id]
                    held.fill(output)
                # In a field that comes back as it is, and that nothing here needs.
                output.kv_transfer_params = {
                    STARTS: self._starts[output.request_id],
                    LOGPROBS: None if held is None else held.logprobs,
                }
                if output.finish_reason is not None:
                    del self._starts[output.request_id]
                due.append(output)
            message.outputs = due
            if not (message.outputs or message.finished_requests or message.scheduler_stats):
                del by_client[client]
        return by_client


class _Held:
    """What a request has so far, in plain lists: thousands of small arrays would slow down Python's
    garbage collector, step by step."""

    def __init__(self, *, with_logprobs: bool) -> None:
        self._prefill_stats: Any = None
        self._token_ids: list[int] = []
        self.logprobs: list[float] | None = [] if with_logprobs else None

    def add(self, output: EngineCoreOutput, logprob: float | None) -> None:
        """Record one more step; its ``logprob`` is given or still in ``output``."""
        self._token_ids += output.new_token_ids
        if output.prefill_stats is not None:
            self._prefill_stats = output.prefill_stats
        if self.logprobs is None or not output.new_token_ids:
            return
        if logprob is not None:
            self.logprobs.append(logprob)
        elif output.new_logprobs is not None:
            self.logprobs += output.new_logprobs.logprobs[:, 0].tolist()

    def fill(self, output: EngineCoreOutput) -> None:
        """Move what is held into ``output``, except logprobs."""
        output.new_token_ids = self._token_ids
        output.prefill_stats = self._prefill_stats
        output.new_logprobs = None


def _at_block_ends(cache_blocks: Any, block_size: int) -> Any:
    """``cache_blocks``, which publishes whole blocks for sharing, only where one was filled.

    vLLM calls it for each decoded token.
    """

    def cache(request: Request, num_computed_tokens: int) -> None:
        if num_computed_tokens % block_size == 0:
            cache_blocks(request, num_computed_tokens)

    return cache
