"""Predicted seconds of a step by phase on H100s or H200s, and what bounds each: arithmetic.

Rates are those that ``benchmarks/results/grpo-h200.jsonl`` and ``training-h100.jsonl`` measured for
models of 1.5 B parameters and more; smaller ones train slower. Completions are taken to be as long
as they may be; prompts, scoring and a critic are left out.
"""

import math
from dataclasses import dataclass

from nemo_like.config.policy import PolicyConfig
from nemo_like.config.sampling import SamplingRunConfig
from nemo_like.planning.activations import BYTES
from nemo_like.planning.model_shape import MOST_SEQUENCES, ModelShape, engine_bytes
from nemo_like.planning.parameters import moments_bytes
from nemo_like.planning.resources import ResourcePlan

PEAK_FLOPS = 989e12
"""Of an H100 or H200 in 16 bits, dense."""
TRAINING_SHARE = 0.45
"""Of ``PEAK_FLOPS`` that training and logprob passes reach."""
MEMORY_BYTES_PER_S = 0.6 * 3.35e12
"""Of weights and cache that decoding reads: 0.6 of what an H100's memory gives."""
DECODE_HOST_S = 0.004
"""An engine's work on the host for one token of all its sequences."""
REFIT_BYTES_PER_S = 55e9
"""From policy to engine, gathering and loading included."""
OFFLOAD_BYTES_PER_S = 42e9
"""Of AdamW's moments on their way through a GPU, in both directions at the same time
(``benchmarks/results/offload-h200.jsonl``)."""


@dataclass(frozen=True, kw_only=True)
class PhaseTime:
    name: str
    seconds: float
    bound_by: str


def predict_step(
    config: SamplingRunConfig, shape: ModelShape, plan: ResourcePlan
) -> list[PhaseTime]:
    policy, tokens = config.policy, config.rows_per_step * config.generation.max_new_tokens
    size = BYTES[policy.dtype]
    refit = shape.num_parameters * size / REFIT_BYTES_PER_S
    flops_per_s = len(plan.policy) * PEAK_FLOPS * TRAINING_SHARE
    forward_s = 2 * shape.num_parameters * tokens / flops_per_s
    again = 1 if policy.activation_checkpointing == "full" else 0
    phases = [
        _rollout(config, shape, plan),
        PhaseTime(name="refit", seconds=refit, bound_by="copies between processes"),
        PhaseTime(name="train", seconds=(3 + again) * forward_s, bound_by="matrix products"),
    ]
    if (transit_s := offload_seconds(policy, shape.num_parameters, len(plan.policy))) > 0:
        by_bus = "moments to and from the host"
        phases.append(PhaseTime(name="optimizer", seconds=transit_s, bound_by=by_bus))
    if config.keeps_reference:
        phases.insert(2, PhaseTime(name="logprobs", seconds=forward_s, bound_by="matrix products"))
    return phases


def offload_seconds(policy: PolicyConfig, num_parameters: float, num_ranks: int) -> float:
    """What AdamW's step takes where its moments are in host memory; 0 where they are not."""
    optimizer = policy.optimizer
    if policy.offload != "optimizer" or optimizer.kind != "adamw" or policy.lora.rank:
        return 0.0
    moments = moments_bytes(optimizer.moments, num_parameters, 0)
    return moments / num_ranks / OFFLOAD_BYTES_PER_S


def _rollout(config: SamplingRunConfig, shape: ModelShape, plan: ResourcePlan) -> PhaseTime:
    generation = config.generation
    rows = math.ceil(config.rows_per_step / len(plan.generation))
    together = min(rows, MOST_SEQUENCES)
    half = generation.max_new_tokens // 2
    weights, cache = engine_bytes(generation, config.policy.dtype, shape, half)
    read_s = (weights + together * cache) / MEMORY_BYTES_PER_S
    num_steps = generation.max_new_tokens * math.ceil(rows / MOST_SEQUENCES)
    by_memory = read_s > DECODE_HOST_S
    return PhaseTime(
        name="rollout",
        seconds=num_steps * max(read_s, DECODE_HOST_S),
        bound_by="reading weights and cache" if by_memory else "the engine's host process",
    )
