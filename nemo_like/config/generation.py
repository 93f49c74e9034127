"""Sections ``generation``, ``refit`` and ``mismatch``: engines, their weights, and their agreement
with the policy."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from nemo_like.config.section import Count, Instead, OnlyIf, Positive, Section

Backend = Literal["vllm", "hf"]
"""Engine that samples completions."""
Transport = Literal["ipc", "broadcast"]
"""How weights travel from the policy to generation."""
_VLLM = OnlyIf(lambda here, _: here.backend == "vllm", "only generation.backend=vllm has it")
LOWEST_TEMPERATURE = 0.01
"""vLLM samples at this temperature where it is asked for less, and logprobs would not match."""


class GenerationConfig(Section):
    """The engine that samples completions for training."""

    backend: Backend = "vllm"
    """``vllm``, or ``hf``: a plain loop over the transformers model, for odd models and exact
    tests."""
    temperature: Annotated[
        Positive, Instead("only validation and evaluation have greedy sampling")
    ] = 1.0
    """Sampling temperature; the policy's logprobs use it too. (Top-p and top-k exist for validation
    only: truncated sampling has no exact importance ratio.)"""
    max_new_tokens: Count = 64
    """Most tokens of one completion."""
    stop: list[str] = Field(default_factory=list)
    """Strings that end a completion; the tokens that form them are kept and trained."""
    stop_token_ids: list[int] = Field(default_factory=list)
    """Token ids that end a completion, in addition to the model's end-of-sequence ids."""
    tensor_parallel_size: Annotated[Count, _VLLM] = 1
    """Workers that share one engine (vllm)."""
    num_engines_per_bundle: Count = 1
    """Engines that share each bundle (GPU). Two help small models, which an engine's CPU side
    slows down."""
    sleep: bool = True
    """Free the engine's GPU memory while the policy trains on the same GPU (vllm). False saves
    about 0.1 s per step where memory holds both."""
    engine_kwargs: Annotated[dict[str, Any], _VLLM] = Field(default_factory=dict)
    """Passed to vLLM's engine unchanged; arguments that follow from other keys are refused."""

    def rules(self, here: str, run: Any) -> Iterator[str]:
        """Ids that exist, and a temperature that vLLM samples at."""
        for token in self.stop_token_ids:
            if token < 0:
                yield f"{here}.stop_token_ids: {token} is no token's id; leave it out."
        if self.backend == "vllm" and self.temperature < LOWEST_TEMPERATURE:
            yield f"{here}.temperature={self.temperature:g} must be at least {LOWEST_TEMPERATURE}."


class RefitConfig(Section):
    """The policy's weights on their way to generation."""

    transport: Transport | None = None
    """``ipc``: each bundle's policy rank shares its memory with the engines on it (CUDA IPC; mapped
    memory on the CPU); ``broadcast``: policy rank 0 sends to all engines (NCCL; gloo on the CPU).
    None: ``ipc`` where both sides share bundles, else ``broadcast``."""
    bucket_mib: Count = 512
    """Most MiB of tensors in one bucket (a larger tensor gets its own). A sender holds three: two
    on their way and one that is gathered."""


class MismatchConfig(Section):
    """Difference between the logprobs of the sampling engine and of the policy, same weights."""

    action: Literal["warn", "mask", "stop"] = "warn"
    """What to do above the limit. ``warn``: log it; ``mask``: completions above it do not train,
    which takes a pass for the policy's logprobs before the step; ``stop``: end the run before the
    optimizer step."""
    max_mean_abs: Positive | None = None
    """Limit of the mean absolute difference. None: by ``policy.dtype``: 1e-3, 0.1 (bfloat16),
    0.0125 (float16)."""
