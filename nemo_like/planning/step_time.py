"""Predicted seconds of a step by phase on H200s, and what bounds each: arithmetic.

Rates are fitted to ``benchmarks/results``: see ``benchmarks/predicted.py``. H100s train as fast,
but read weights and cache 0.7 times as fast. Scoring, a critic and starts, which depend on what a
machine has cached, are left out.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from nemo_like.config.policy import PolicyConfig
from nemo_like.config.sampling import PolicyGradientRunConfig, SamplingRunConfig
from nemo_like.planning.activations import BYTES
from nemo_like.planning.layout import ParallelSizes, num_stages, parallel_sizes
from nemo_like.planning.model_shape import FLOAT32, ModelShape, engine_bytes
from nemo_like.planning.parameters import moments_bytes, stay_whole
from nemo_like.planning.resources import ResourcePlan, engines_sleep, sequences_at_once

PEAK_FLOPS = 989e12
"""Of an H100 or H200 in 16 bits, dense."""
FLOAT32_FLOPS = 67e12
"""In 32 bits: the data sheet's number, which no run here has measured."""
PRODUCTS_SHARE = 0.8
"""Of ``PEAK_FLOPS`` that matrix products reach in 16 bits."""
BETWEEN_PRODUCTS_S = 4.5e-11
"""Of a forward pass, for each token, layer and number of its hidden state: what norms, activations
and attention read and write."""
EAGER_LOGIT_S = 1.95e-11
"""Of a pass without ``policy.compile``, for each logit of a token that trains."""
NARROW = 600
"""Numbers that a hidden state seems to have on top, since kernels of narrow ones are less busy."""
PARAMETER_S = 4e-12
"""Of a forward and backward pass, for each parameter, whatever the tokens: reading it, and writing
and adding up its gradient."""
LAUNCH_S = 5e-3
"""Of Python, to launch the kernels of a layer's forward and backward pass; the GPU computes
meanwhile."""
COLLECTIVES_S = 1e-3
"""Of Python, for a layer's exchanges with other ranks."""
RECOMPUTED = {"none": 0.0, "selective": 0.2, "full": 1.0}
"""Part of a forward pass that a backward pass makes again."""
SHARDS_BYTES_PER_S = 400e9
"""Of parameters and gradients between ranks that share them."""
TRAIN_ROW_S = 0.03e-3
"""Of each row that a worker fetches and makes ready for a training step."""
DECODE_BYTES_PER_S = 0.85 * 4.8e12
"""Of weights and cache that decoding reads: 0.85 of what an H200's memory gives."""
LAYER_S = 42e-6
"""Of a layer's kernels for one token, on top of what they read."""
DECODE_HOST_S, DECODE_ROW_S = 2.5e-3, 7.3e-6
"""vLLM's work on the host per token: for all sequences together, while the GPU computes, and for
each of them, while it waits."""
ROW_S = 0.51e-3
"""Of vLLM's host process to take in a row and give it back."""
ROLLOUT_S = 0.086
"""Of calls and rewards, on top of sampling."""
REFIT_S, REFIT_BYTES_PER_S = 0.033, 1e12
"""Of a refit: calls to workers, then copies."""
VLLM_REFIT_S = 0.02
"""Of vLLM's calls to its own processes, on top of them."""
GATHERED_BYTES_PER_S = 150e9
"""Of weights that policy ranks hold in parts."""
WAKE_BYTES_PER_S = 80e9
"""Of weights, in a refit to an engine that sleeps while the policy trains."""
GRAPH_WAKE_BYTES_PER_S = 140e9
"""The same with ``graph``, which only makes room for them."""
OFFLOAD_BYTES_PER_S = 42e9
"""Of AdamW's moments on their way through a GPU, in both directions at the same time."""
MOMENT_S = {"float32": 0.9e-11, "bfloat16": 2.5e-11, "int8": 7.6e-11}
"""Of AdamW's step on a GPU, for each parameter, by the format of its moments."""
_PRODUCTS = "matrix products"


@dataclass(frozen=True, kw_only=True)
class PhaseTime:
    name: str
    seconds: float
    bound_by: str


@dataclass(frozen=True, kw_only=True)
class RowTokens:
    """Tokens of a step's rows: the mean of prompts and completions, and the longest completion."""

    prompt: float = 0.0
    completion: float
    longest: float


def predict_step(
    config: SamplingRunConfig,
    shape: ModelShape,
    plan: ResourcePlan,
    tokens: RowTokens | None = None,
) -> list[PhaseTime]:
    """Each phase; by default completions are as long as they may be, and prompts are left out."""
    policy, most = config.policy, config.generation.max_new_tokens
    tokens = tokens or RowTokens(completion=most, longest=most)
    row, prompt = tokens.prompt + tokens.completion, tokens.prompt
    if policy.batching == "shared":
        prompt /= config.loop.num_generations_per_prompt
    ranks, count = len(plan.policy), config.rows_per_step * (prompt + tokens.completion)
    trained = config.rows_per_step * tokens.completion
    updates, parts, logprob_passes = 1, 1, int(config.keeps_reference)
    if isinstance(config, PolicyGradientRunConfig):
        updates, parts = config.loop.num_updates, config.loop.num_mini_batches
        logprob_passes += not config.reuses_logprobs
    generation = config.generation
    update = Work(policy, shape, ranks, count / parts, row, trained / parts)
    update_s = TRAIN_ROW_S * config.rows_per_step / ranks / parts + train_seconds(update)
    by_python = update.on_host_s > update.on_gpu_s
    bound_by = "Python, which launches kernels" if by_python else _PRODUCTS
    refit_s = refit_seconds(
        shape,
        policy.dtype,
        num_ranks=ranks,
        sleeps=engines_sleep(generation, plan),
        backend=generation.backend,
    )
    phases = [
        _rollout(config, shape, plan, tokens),
        PhaseTime(name="refit", seconds=refit_s, bound_by="copies and calls"),
        PhaseTime(name="train", seconds=updates * update_s, bound_by=bound_by),
    ]
    if (transit_s := offload_seconds(policy, shape.num_parameters, ranks)) > 0:
        by_bus = "moments to and from the host"
        phases.append(PhaseTime(name="optimizer", seconds=updates * transit_s, bound_by=by_bus))
    if logprob_passes:
        rows = Work(policy, shape, ranks, count, row, trained)
        forward_s = logprob_passes * forward_seconds(rows)
        phases.insert(2, PhaseTime(name="logprobs", seconds=forward_s, bound_by=_PRODUCTS))
    return phases


@dataclass(frozen=True)
class Work:
    """What a policy's ranks compute together, in one pass over some rows or one step on them."""

    policy: PolicyConfig
    shape: ModelShape
    num_ranks: int
    num_tokens: float
    row_tokens: float
    """Of one row."""
    num_trained: float
    """Tokens that are not of prompts."""

    @cached_property
    def sizes(self) -> ParallelSizes:
        """Of the layout."""
        return parallel_sizes(self.policy, self.num_ranks)

    @cached_property
    def num_micro_batches(self) -> int:
        """Of one rank."""
        return math.ceil(self.num_tokens / self.sizes.dp / self.policy.micro_batch_tokens)

    @cached_property
    def forward_s(self) -> float:
        """Of a forward pass, on one GPU alone."""
        policy, shape = self.policy, self.shape
        numbers = shape.layers * shape.hidden
        flops = 2 * (shape.num_parameters + numbers * self.row_tokens)
        between = BETWEEN_PRODUCTS_S * shape.layers * (shape.hidden + NARROW)
        logits_s = 0.0 if policy.compile else self.num_trained * shape.vocab * EAGER_LOGIT_S
        rate = FLOAT32_FLOPS if policy.dtype == "float32" else PEAK_FLOPS * PRODUCTS_SHARE
        return self.num_tokens * (flops / rate + between) + logits_s

    @cached_property
    def on_gpu_s(self) -> float:
        """Of forward and backward passes, what each GPU computes."""
        # Frozen weights get no gradients.
        passes = (2 if self.policy.lora.rank else 3) + self._recomputed
        of_pass = self.shape.num_parameters / (self.sizes.pp * self.sizes.tp)
        parameters_s = self.num_micro_batches * PARAMETER_S * of_pass
        return passes * self.forward_s / self.num_ranks + parameters_s

    @cached_property
    def on_host_s(self) -> float:
        """Of forward and backward passes, what Python needs to launch them."""
        launched_s = LAUNCH_S + COLLECTIVES_S * (self.num_ranks > self.sizes.pp)
        layers = self.shape.layers / self.sizes.pp
        return self.num_micro_batches * launched_s * layers * (1 + self._recomputed / 3)

    @property
    def bubble(self) -> float:
        """A pipeline's time over that of its work, 1 + (p - 1) / (v m): p ranks, v stages each, m
        micro-batches (arXiv:2104.04473, section 2.2)."""
        parallel = self.policy.parallel
        size = parallel.pipeline_parallel_size
        per_rank = num_stages(parallel) // size
        count = max(size, self.num_micro_batches)
        if parallel.pipeline_schedule == "interleaved":
            count = math.ceil(count / size) * size
        return 1 + (size - 1) / (per_rank * count)

    def from_others(self, num_parameters: float) -> float:
        """Of so many parameters, those that a rank gets from others when layers are gathered."""
        sizes = self.sizes
        return num_parameters / (sizes.pp * sizes.tp) * (1 - 1 / (sizes.shard * sizes.cp))

    @property
    def _recomputed(self) -> float:
        return RECOMPUTED[self.policy.activation_checkpointing]


def forward_seconds(work: Work) -> float:
    """One forward pass."""
    policy = work.policy
    gathered = work.num_micro_batches if policy.parallel.reshard_after_forward else 1
    moved = gathered * BYTES[policy.dtype] * work.from_others(work.shape.num_parameters)
    return work.forward_s * work.bubble / work.num_ranks + moved / SHARDS_BYTES_PER_S


def train_seconds(work: Work) -> float:
    """Forward and backward passes, and the optimizer where its state is on the GPU."""
    policy, sizes = work.policy, work.sizes
    # What stays whole is gathered once, and its gradients travel once, like those of DDP.
    once = stay_whole(policy, sizes) or policy.parallel.data_parallel == "ddp"
    reduced = 1 if once else work.num_micro_batches
    gathered = 1 if once else 2 * reduced
    # Gradients and state of adapters are too small to count.
    trained = 0 if policy.lora.rank else work.shape.num_parameters
    moved = gathered * BYTES[policy.dtype] * work.from_others(work.shape.num_parameters)
    moved += reduced * FLOAT32 * work.from_others(trained)
    # Copies add up their gradients, each sending and receiving all of its own.
    of_rank = trained * sizes.replicate / work.num_ranks
    moved += reduced * FLOAT32 * 2 * (1 - 1 / sizes.replicate) * of_rank
    state_s = MOMENT_S[policy.optimizer.moments] * of_rank
    if policy.offload == "optimizer":
        state_s = 0.0
    passes_s = max(work.on_gpu_s, work.on_host_s) * work.bubble
    return passes_s + state_s + moved / SHARDS_BYTES_PER_S


def offload_seconds(policy: PolicyConfig, num_parameters: float, num_ranks: int) -> float:
    """What AdamW's step takes where its moments are in host memory; 0 where they are not."""
    optimizer = policy.optimizer
    if policy.offload != "optimizer" or optimizer.kind != "adamw" or policy.lora.rank:
        return 0.0
    of_rank = num_parameters * parallel_sizes(policy, num_ranks).replicate / num_ranks
    moved_s = moments_bytes(optimizer.moments, of_rank, 0) / OFFLOAD_BYTES_PER_S
    return max(moved_s, MOMENT_S[optimizer.moments] * of_rank)


def refit_seconds(
    shape: ModelShape, dtype: str, *, num_ranks: int, sleeps: bool, backend: str
) -> float:
    """From ``num_ranks`` of the policy to engines."""
    size = shape.num_parameters * BYTES[dtype]
    gathered_s = size / GATHERED_BYTES_PER_S if num_ranks > 1 else 0.0
    wake_rate = GRAPH_WAKE_BYTES_PER_S if backend == "graph" else WAKE_BYTES_PER_S
    wake_s = size / wake_rate if sleeps else 0.0
    calls_s = REFIT_S + VLLM_REFIT_S * (backend != "graph")
    return calls_s + size / REFIT_BYTES_PER_S + gathered_s + wake_s


def row_seconds(config: SamplingRunConfig) -> float:
    """Time in which an engine makes no token, since it takes in a row or gives it back."""
    return 0.0 if config.generation.backend == "graph" else ROW_S


def decoding(
    config: SamplingRunConfig, shape: ModelShape, seen: int
) -> Callable[[float], tuple[float, str]]:
    """Gives seconds, and what bounds them, of one more token of each of so many rows.

    ``seen``: tokens that a row has already.
    """
    weights, cache = engine_bytes(config.generation, config.policy.dtype, shape, seen)
    in_python = config.generation.backend != "graph"

    def token(rows: float) -> tuple[float, str]:
        read_s = (weights + rows * cache) / DECODE_BYTES_PER_S + LAYER_S * shape.layers
        if in_python and read_s < DECODE_HOST_S:
            return DECODE_HOST_S + rows * DECODE_ROW_S, "the engine's host process"
        return read_s + rows * DECODE_ROW_S * in_python, "reading weights and cache"

    return token


def _rollout(
    config: SamplingRunConfig, shape: ModelShape, plan: ResourcePlan, tokens: RowTokens
) -> PhaseTime:
    rows = math.ceil(config.rows_per_step / len(plan.generation))
    waves = math.ceil(rows / sequences_at_once(config, plan))
    seen = round(tokens.prompt + tokens.completion / 2)
    # Shorter rows leave the engine to the others.
    at_once = rows / waves * tokens.completion / tokens.longest
    token_s, by = decoding(config, shape, seen)(at_once)
    seconds = ROLLOUT_S + rows * row_seconds(config) + waves * tokens.longest * token_s
    return PhaseTime(name="rollout", seconds=seconds, bound_by=by)
