"""A scheduler of vLLM's that reports a completion once, when it is finished.

Stock, every token of every sequence is sent from the engine's process to ours and handled there by
itself, though callers wait for whole completions: half of the time of a step at 512 sequences.
"""

from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists


class WholeCompletions(AsyncScheduler):
    """Holds the tokens of a request back until it ends, unless someone reads them earlier.

    Stop strings are found by the reader, so that requests with any are left alone; so are those
    that ask for logprobs of other tokens than the sampled ones.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: dict[str, _Held] = {}

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, EngineCoreOutputs]:
        """See vLLM's ``Scheduler``."""
        by_client = super().update_from_output(*args, **kwargs)
        for client, message in list(by_client.items()):
            message.outputs = [one for one in message.outputs if self._is_due(one)]
            if not (message.outputs or message.finished_requests or message.scheduler_stats):
                del by_client[client]
        return by_client

    def finish_requests(self, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """See vLLM's ``Scheduler``; a request that its caller gave up is forgotten here too."""
        if request_ids is not None and not isinstance(request_ids, str):
            request_ids = list(request_ids)  # It may be an iterator, and is read twice.
        for request_id in list(self._held):
            if request_ids is None or request_id in request_ids:
                del self._held[request_id]
        return super().finish_requests(request_ids, *args, **kwargs)

    def _is_due(self, output: EngineCoreOutput) -> bool:
        """Whether to send ``output`` now: as it is, or with all that was held back."""
        held = self._held.get(output.request_id)
        if output.finish_reason is not None:
            if held is not None:
                del self._held[output.request_id]
                held.add(output)
                held.fill(output)
            return True
        if held is None:
            params = self.requests[output.request_id].sampling_params
            if (
                params is None
                or params.stop
                or params.logprobs
                or params.output_kind is not RequestOutputKind.FINAL_ONLY
            ):
                return True
            held = self._held[output.request_id] = _Held(output)
        held.add(output)
        return False


class _Held:
    """What a request has so far, in plain lists: thousands of small arrays would slow down Python's
    garbage collector, step by step."""

    def __init__(self, first: EngineCoreOutput) -> None:
        self._prefill_stats = first.prefill_stats
        self._token_ids: list[int] = []
        self._logprobs: list[float] | None = None if first.new_logprobs is None else []

    def add(self, output: EngineCoreOutput) -> None:
        self._token_ids += output.new_token_ids
        if self._logprobs is not None and output.new_logprobs is not None:
            self._logprobs += output.new_logprobs.logprobs[:, 0].tolist()

    def fill(self, output: EngineCoreOutput) -> None:
        """Make ``output`` the whole completion."""
        output.new_token_ids = self._token_ids
        output.prefill_stats = self._prefill_stats
        if self._logprobs is not None:
            ids = np.array(self._token_ids)[:, None]
            logprobs = np.array(self._logprobs, dtype=np.float32)[:, None]
            output.new_logprobs = LogprobsLists(ids, logprobs, np.zeros(len(ids), dtype=np.int64))
