"""An engine that is wrong about some requests, more so with each refit; an alarm names it."""

from collections.abc import Sequence
from dataclasses import replace

from nemo_like.config.generation import HF
from nemo_like.generation.hf_engine import HFEngine
from nemo_like.generation.protocol import Completion, GenerationRequest

_DRIFT = 1e-3
"""What each refit adds to the logprobs of every fourth request."""


class DriftingEngine(HFEngine):
    """As a kernel that is wrong for some shapes."""

    def _sample(self, requests: Sequence[GenerationRequest], version: int) -> list[Completion]:
        found = super()._sample(requests, version)
        return [
            replace(one, logprobs=[logprob - _DRIFT * version for logprob in one.logprobs])
            if request.seed % 4 == 0
            else one
            for request, one in zip(requests, found, strict=True)
        ]


DRIFTING = replace(HF, engine=DriftingEngine)
