"""The part of ``nemo-like plan`` on memory: of each model, and of those that share bundles."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nemo_like.algorithms.distillation.config import DistillationConfig, OffPolicyDistillationConfig
from nemo_like.algorithms.eval.config import EvalConfig
from nemo_like.algorithms.ppo.config import PPOConfig
from nemo_like.algorithms.rm.config import RewardModelConfig
from nemo_like.config.optimizer import LoraConfig
from nemo_like.config.policy import PolicyConfig
from nemo_like.config.run import RunConfig
from nemo_like.config.sampling import SamplingRunConfig
from nemo_like.config.section import value_of
from nemo_like.config.texts import TextRunConfig
from nemo_like.models.resolve import resolve_model
from nemo_like.planning.layout import ParallelSizes, parallel_sizes
from nemo_like.planning.memory import PhaseMemory, predict_memory
from nemo_like.planning.model_shape import (
    ModelShape,
    Role,
    engine_bytes,
    read_model_shape,
    role_of,
)
from nemo_like.planning.offload import Neighbours, auto_line, lasting, memory_needs
from nemo_like.planning.resources import ResourcePlan, plan_run, sequences_at_once

# Rows of a table at most, and how many of its end are among them.
MOST_ROWS = 24
LAST_ROWS = 4
# Columns of the memory table, from what lasts to what comes and goes.
_PARTS = (
    "parameters",
    "optimizer",
    "gradients",
    "gathered",
    "reducing",
    "activations",
    "working",
    "logits",
)


@dataclass(frozen=True, kw_only=True)
class _Model:
    name: str
    config: PolicyConfig
    shape: ModelShape
    sizes: ParallelSizes
    role: Role


_Predicted = Sequence[tuple[_Model, dict[int, tuple[PhaseMemory, ...]]]]
"""Each model, the policy first, with its phases by pipeline rank, of those that are shown."""


def predict_models(config: RunConfig, plan: ResourcePlan, folder: Path) -> _Predicted:
    """What ``memory_lines`` shows; UserError for an unknown size. ``folder``: the policy's."""
    distills = isinstance(config, DistillationConfig | OffPolicyDistillationConfig)
    role = role_of(config, scalar_head=isinstance(config, RewardModelConfig))
    sizes = parallel_sizes(config.policy, len(plan.policy))
    shape = read_model_shape(folder)
    policy = _Model(name="policy", config=config.policy, shape=shape, sizes=sizes, role=role)
    models = [policy]
    if isinstance(config, PPOConfig) and config.critic.enabled:
        critic = config.critic_policy
        models.append(
            _Model(
                name="critic",
                config=critic,
                shape=_shape_of(critic.model, "critic.model"),
                sizes=parallel_sizes(critic, len(plan.policy)),
                role=Role(scalar_head=True),
            )
        )
    if distills:
        assert config.teacher.model is not None
        teacher = config.policy.replace(model=config.teacher.model, lora=LoraConfig())
        shape = _shape_of(teacher.model, "teacher.model")
        asked = Role(trains=False)
        models.append(replace(policy, name="teacher", config=teacher, shape=shape, role=asked))
    return [(model, _phases(config, model)) for model in models]


def _shape_of(model: str, key: str) -> ModelShape:
    return read_model_shape(resolve_model(model, key, only_config=True))


def _phases(config: RunConfig, model: _Model) -> dict[int, tuple[PhaseMemory, ...]]:
    shown = 1 if isinstance(config, EvalConfig) else None  # it starts, and refits once
    return {
        pipeline_rank: predict_memory(
            model.shape,
            model.config,
            model.sizes.num_ranks,
            pipeline_rank=pipeline_rank,
            num_micro_batches=micro_batches(config, model.sizes),
            role=model.role,
        )[:shown]
        for pipeline_rank in abbreviated(model.sizes.pp)
    }


def memory_lines(config: RunConfig, predicted: _Predicted) -> Iterator[str]:
    """A table for each model (and stage), and the peak of models that share bundles."""
    gpu = config.cluster.gpus_per_node > 0
    for model, phases_of in predicted:
        if model.name == "policy":
            yield (
                f"Memory      of a policy rank on its {'GPU' if gpu else 'host'}, GiB, predicted "
                f"for full micro-batches of {config.policy.model} "
                f"({model.shape.num_parameters / 1e6:.4g} M parameters)"
            )
            on_top = "CUDA's context, NCCL's buffers" if gpu else "The process itself"
            yield f"            {on_top}, fragmentation and a generation engine come on top."
        else:
            yield ""
            yield f"Memory      of a {model.name} rank, {model.config.model}"
        for pipeline_rank, phases in phases_of.items():
            yield ""
            if model.sizes.pp > 1:
                yield _stage_name(model.sizes, pipeline_rank)
            yield from _phase_table(phases)
    yield from _together([(one.name, of[0]) for one, of in predicted])
    if gpu and not isinstance(config, EvalConfig):
        yield from _offload_lines(config, predicted)


def _offload_lines(config: RunConfig, predicted: _Predicted) -> Iterator[str]:
    plan = plan_run(config)
    ranks_per_node = max(Counter(map(plan.node_of, plan.policy)).values())
    for model, _ in predicted:
        if not model.role.trains or model.config.offload != "auto":
            continue
        neighbours = _engines(config, plan, predicted[0][0].shape)
        for one, _ in predicted:
            if one is not model:
                neighbours = neighbours.and_shape(
                    one.shape, one.config, one.sizes.num_ranks, one.role
                )
        of_model = memory_needs(
            model.shape, model.config, model.sizes.num_ranks, model.role, neighbours
        )
        line = auto_line(model.config, of_model, ranks_per_node)
        yield from ("", f"policy.offload=auto, {model.name}: {line}")


def _engines(config: RunConfig, plan: ResourcePlan, shape: ModelShape) -> Neighbours:
    """Engines for completions of full length, without prompts."""
    if not isinstance(config, SamplingRunConfig) or not plan.colocated:
        return Neighbours()
    generation = config.generation
    most = max(generation.max_new_tokens, config.validation.max_new_tokens or 0)
    weights, cache = engine_bytes(generation, config.policy.dtype, shape, most)
    return Neighbours().and_engines(
        generation.num_engines_per_bundle,
        weights,
        sequences_at_once(config, plan) * cache,
        sleeps=generation.sleep and generation.kind.sleeps,
    )


def _stage_name(sizes: ParallelSizes, pipeline_rank: int) -> str:
    per_stage = sizes.num_ranks // sizes.pp
    first = pipeline_rank * per_stage
    ranks = f"ranks {first} to {first + per_stage - 1}" if per_stage > 1 else f"rank {first}"
    return f"pp {pipeline_rank} ({ranks})"


def _together(models: Sequence[tuple[str, Sequence[PhaseMemory]]]) -> Iterator[str]:
    """The peak of a bundle with several models, of which one is at work: others keep what lasts.

    (They have no pipeline: neither a scalar head nor distillation goes with one.)
    """
    if len(models) == 1:
        return
    lasts = {name: lasting(phases) for name, phases in models}
    peaks = [
        (phase.total + sum(size for other, size in lasts.items() if other != name), name, phase)
        for name, phases in models
        for phase in phases
    ]
    size, name, phase = max(peaks, key=lambda peak: peak[0])
    others = " and ".join(other for other in lasts if other != name)
    yield ""
    yield (
        f"together: {gib(size)} GiB in the {name}'s {phase.name}, beside what lasts of the {others}"
    )


def _phase_table(phases: Sequence[PhaseMemory]) -> Iterator[str]:
    parts = [part for part in _PARTS if any(part in phase.parts for phase in phases)]
    hosts = any(phase.host for phase in phases)
    rows = [
        [
            phase.name,
            *(gib(phase.parts.get(part, 0.0)) for part in parts),
            gib(phase.total),
            *([gib(phase.host)] if hosts else []),
        ]
        for phase in phases
    ]
    yield from table(["phase", *parts, "total", *(["on host"] if hosts else [])], rows)
    most = max(phases, key=lambda phase: phase.total)
    yield f"peak: {gib(most.total)} GiB ({most.name})"


def micro_batches(config: RunConfig, sizes: ParallelSizes) -> int:
    """Micro-batches of one rank if every row is as long as it may be, with a token of prompt."""
    policy, prompt = config.policy, int(isinstance(config, SamplingRunConfig))
    fitting = max(1, policy.micro_batch_tokens // (longest_row(config) + prompt))
    rows = math.ceil(config.rows_per_step / sizes.dp)
    return math.ceil(rows / min(fitting, policy.micro_batch_size or fitting))


def longest_row(config: RunConfig) -> int:
    """Most tokens of a row, without its prompt where that is not known."""
    if isinstance(config, SamplingRunConfig):
        return config.generation.max_new_tokens
    assert isinstance(config, TextRunConfig)
    longest: int | None = value_of(config, "data.max_length")
    return longest or config.policy.micro_batch_tokens // config.passes.rows_per_unit


def abbreviated(count: int) -> list[int]:
    """Indices to show of ``count``: all, or the first ones and the last few."""
    if count <= MOST_ROWS:
        return list(range(count))
    return [*range(MOST_ROWS - LAST_ROWS), *range(count - LAST_ROWS, count)]


def gib(size: float) -> str:
    """Three digits where there are that many.

    >>> [gib(size) for size in (0.0, 0.00012, 0.0456, 23.04, 1234.5)]
    ['-', '<0.001', '0.0456', '23.0', '1234']
    """
    if size == 0:
        return "-"
    if size < 0.001:
        return "<0.001"
    return f"{size:#.3g}" if size < 100 else f"{size:.0f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
