"""A scheduler of vLLM's that reports a completion once, when it is finished.

Stock, every token of every sequence is sent from the engine's process to ours and handled there by
itself, though callers wait for whole completions: half of the time of a step at 512 sequences.
"""

from collections import defaultdict
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists


class WholeCompletions(AsyncScheduler):
    """Holds the tokens of a request back until it ends, unless someone reads them earlier.

    Stop strings are found by the reader, so that requests with any are left alone.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: dict[str, list[EngineCoreOutput]] = defaultdict(list)

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, EngineCoreOutputs]:
        """See vLLM's ``Scheduler``."""
        by_client = super().update_from_output(*args, **kwargs)
        for client, message in list(by_client.items()):
            message.outputs = [whole for one in message.outputs if (whole := self._take(one))]
            has_news = message.outputs or message.finished_requests or message.scheduler_stats
            if not has_news:
                del by_client[client]
        return by_client

    def finish_requests(self, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """See vLLM's ``Scheduler``; a request that its caller gave up is forgotten here too."""
        for request_id in list(self._held) if request_ids is None else _as_list(request_ids):
            self._held.pop(request_id, None)
        return super().finish_requests(request_ids, *args, **kwargs)

    def _take(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        """The output to send for this one: itself, the whole completion, or nothing yet."""
        if output.finish_reason is not None:
            parts = self._held.pop(output.request_id, [])
            return _joined([*parts, output]) if parts else output
        params = self.requests[output.request_id].sampling_params
        if params is None or params.stop or params.output_kind is not RequestOutputKind.FINAL_ONLY:
            return output
        self._held[output.request_id].append(output)
        return None


def _joined(parts: list[EngineCoreOutput]) -> EngineCoreOutput:
    """The last output, with the tokens and logprobs of all."""
    last = parts[-1]
    last.new_token_ids = [token_id for part in parts for token_id in part.new_token_ids]
    last.prefill_stats = parts[0].prefill_stats
    logprobs = [part.new_logprobs for part in parts if part.new_logprobs is not None]
    if logprobs:
        ids, values, ranks = zip(*(one[:3] for one in logprobs), strict=True)
        last.new_logprobs = LogprobsLists(
            np.concatenate(ids), np.concatenate(values), np.concatenate(ranks)
        )
    return last


def _as_list(request_ids: Any) -> list[str]:
    return [request_ids] if isinstance(request_ids, str) else list(request_ids)
