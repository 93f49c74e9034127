"""Run vLLM with log-normal completion lengths, at most ten times the median.

    python benchmarks/grpo.py --workload qwen1.5b --only ours \
        generation.backend=benchmarks/long_tail.py:KIND generation.max_new_tokens=1024

Random weights never end a completion, so each would take ``max_new_tokens``. Here each request
draws its own limit from its id: a group has the same lengths whatever the lag or the layout.
"""

import math
import random
from dataclasses import replace
from typing import Any

from nemo_like.config.generation import VLLM
from nemo_like.generation.protocol import Completion, EngineConfig, GenerationRequest

SPREAD, MOST = 0.9, 10.0


def length(request_id: str, most: int) -> int:
    """Tokens of a completion: log-normal, ``most`` at most."""
    drawn = math.exp(SPREAD * random.Random(request_id).gauss(0, 1))
    return max(1, round(most / MOST * min(drawn, MOST)))


def engine(config: EngineConfig) -> Any:
    """Start vLLM, which is imported only where an engine runs."""
    from nemo_like.generation.vllm.engine import VLLMEngine

    class LongTailed(VLLMEngine):
        async def generate(self, request: GenerationRequest) -> Completion:
            tokens = length(request.request_id, request.sampling.max_new_tokens)
            sampling = replace(request.sampling, max_new_tokens=tokens)
            return await super().generate(replace(request, sampling=sampling))

    return LongTailed(config)


KIND = replace(VLLM, engine=engine)
