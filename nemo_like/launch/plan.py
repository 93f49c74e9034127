"""``nemo-like plan``: who sits where, how batches divide and what fits, without Ray or torch."""

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from nemo_like.config.choices import Batching
from nemo_like.config.layout import ParallelSizes, parallel_sizes, resolve_mesh_shape
from nemo_like.config.memory import PhaseMemory, predict_memory
from nemo_like.config.model_checks import check_model_fits
from nemo_like.config.model_shape import ModelShape, read_model_shape
from nemo_like.config.plan import ResourcePlan, plan_run
from nemo_like.config.rules import value_of
from nemo_like.config.run_schema import RolloutRunConfig, TrainingRunConfig
from nemo_like.config.sampling_run_schema import PPORunConfig
from nemo_like.config.step_time import predict_step
from nemo_like.config.text_run_schema import TextRunConfig
from nemo_like.errors import UserError
from nemo_like.launch.console import ConfigParser
from nemo_like.models.resolve import resolve_model

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
# Rows of a table at most, and how many of its end are among them.
_MOST_ROWS = 24
_LAST_ROWS = 4
_USAGE = "nemo-like plan [config name] [key=value ...] [--config-name NAME] [--config-dir DIR]"


def run(arguments: Sequence[str]) -> None:
    """Print the plan of the configuration that ``arguments`` give; raises UserError."""
    parser = ConfigParser("plan", _USAGE, __doc__)
    config = parser.load(parser.parse_intermixed_args(arguments))
    lines = plan_lines(config, resolve_model(config.policy.model))
    # At once, so that a reader that leaves early (head) has all it takes in its pipe.
    sys.stdout.write("\n".join([*lines, ""]))


def plan_lines(config: TrainingRunConfig, model_folder: Path) -> Iterator[str]:
    """The whole report on a checked configuration, line by line.

    Raises UserError, before the first line, if the model cannot be cut as configured.
    """
    plan = plan_run(config)
    check_model_fits(config.policy, len(plan.policy), model_folder)
    sizes = parallel_sizes(config.policy, len(plan.policy))
    yield from _summary(config, plan, sizes)
    yield ""
    yield from _places(plan, sizes)
    yield ""
    yield from _batch(config, sizes)
    yield ""
    if config.policy.lora.rank:
        yield "Memory is not predicted for adapters (policy.lora)."
        return
    try:
        shape = read_model_shape(model_folder)
    except UserError as error:
        yield f"Memory is not predicted: {error}"
        return
    yield from _memory(config, shape, sizes)
    if isinstance(config, RolloutRunConfig) and plan.uses_gpus:
        yield ""
        yield from _times(config, shape, plan)


def _summary(config: TrainingRunConfig, plan: ResourcePlan, sizes: ParallelSizes) -> Iterator[str]:
    kind = "GPU" if plan.uses_gpus else "CPU worker"
    roles = "the policy has all"
    if plan.generation:
        roles = "policy, then generation"
        if plan.colocated:
            roles = f"policy and generation share {'them' if plan.critic else 'all bundles'}"
        if plan.critic:
            roles += f", but for {len(plan.critic)} of the critic"
    data_parallel = resolve_mesh_shape(config.policy, sizes.num_ranks).data_parallel
    yield (
        f"Cluster     {len(plan.bundles_per_node)} node(s) x {plan.bundles_per_node[0]} {kind}(s), "
        f"one bundle each: {roles}"
    )
    grid = " x ".join(f"{axis} {getattr(sizes, axis)}" for axis in sizes.coordinates(0))
    yield f"Policy      {sizes.num_ranks} rank(s) = {grid} ({data_parallel})"
    if isinstance(config, RolloutRunConfig):
        yield (
            f"Generation  {len(plan.generation)} replica(s) of {len(plan.generation[0])} worker(s) "
            f"({config.generation.backend})"
        )


def _places(plan: ResourcePlan, sizes: ParallelSizes) -> Iterator[str]:
    """One row a bundle: its node, policy rank with coordinates, and generation replica."""
    rank_of = {bundle: rank for rank, bundle in enumerate(plan.policy)}
    critic_of = {bundle: str(rank) for rank, bundle in enumerate(plan.critic)}
    replicas_of: dict[int, list[str]] = {}
    for i, replica in enumerate(plan.generation):
        for bundle in replica:
            replicas_of.setdefault(bundle, []).append(str(i))
    axes = list(sizes.coordinates(0))
    header = ["node", "bundle", "policy", *axes, "generation", *(["critic"] if critic_of else [])]

    def row(bundle: int) -> list[str]:
        rank = rank_of.get(bundle)
        where = ["-"] * len(axes)
        if rank is not None:
            where = [str(position) for position in sizes.coordinates(rank).values()]
        names = ["-" if rank is None else str(rank), *where, ",".join(replicas_of.get(bundle, "-"))]
        names += [critic_of.get(bundle, "-")] if critic_of else []
        return [str(plan.node_of(bundle)), str(bundle), *names]

    yield from _table(header, [row(bundle) for bundle in _abbreviated(sum(plan.bundles_per_node))])
    if (hidden := sum(plan.bundles_per_node) - _MOST_ROWS) > 0:
        yield f"({hidden} bundles between the first and the last {_LAST_ROWS} are left out)"


def _abbreviated(count: int) -> list[int]:
    """Indices to show of ``count``: all, or the first ones and the last few."""
    if count <= _MOST_ROWS:
        return list(range(count))
    return [*range(_MOST_ROWS - _LAST_ROWS), *range(count - _LAST_ROWS, count)]


def _batch(config: TrainingRunConfig, sizes: ParallelSizes) -> Iterator[str]:
    policy, rows = config.policy, config.rows_per_step
    what = ""
    if isinstance(config, RolloutRunConfig):
        loop = config.loop
        what = f"{loop.num_prompts_per_step} prompts x {loop.num_generations_per_prompt} "
        what += "completions = "
    yield (
        f"Batch       {what}{rows} rows a step; {sizes.dp} data-parallel rank(s) get at most about "
        f"{math.ceil(rows / sizes.dp)} rows each"
    )
    bound = f"policy.micro_batch_tokens={policy.micro_batch_tokens}"
    if policy.micro_batch_size is not None:
        bound += f", policy.micro_batch_size={policy.micro_batch_size}"
    layout = "padded" if policy.batching is Batching.padded else "packed"
    yield (
        f"            {bound}: about {_micro_batches(config, sizes)} micro-batch(es) a rank, "
        f"{layout}, if rows have {_row_tokens(config)}"
    )


def _micro_batches(config: TrainingRunConfig, sizes: ParallelSizes) -> int:
    """Micro-batches of one rank if every row is as long as it may be, without prompts."""
    policy = config.policy
    fitting = policy.micro_batch_tokens // _longest(config)
    rows = math.ceil(config.rows_per_step / sizes.dp)
    return math.ceil(rows / min(fitting, policy.micro_batch_size or fitting))


def _longest(config: TrainingRunConfig) -> int:
    """Most tokens of a row, without its prompt where that is not known."""
    if isinstance(config, RolloutRunConfig):
        return config.generation.max_new_tokens
    assert isinstance(config, TextRunConfig)
    longest: int | None = value_of(config, "data.max_length")
    return longest or config.policy.micro_batch_tokens // config.passes.rows_per_unit


def _row_tokens(config: TrainingRunConfig) -> str:
    if isinstance(config, RolloutRunConfig):
        return f"{_longest(config)} new tokens; prompts add to it"
    return f"{_longest(config)} tokens; shorter ones share micro-batches"


def _memory(config: TrainingRunConfig, shape: ModelShape, sizes: ParallelSizes) -> Iterator[str]:
    gpu = config.cluster.gpus_per_node > 0
    yield (
        f"Memory      of a policy rank on its {'GPU' if gpu else 'host'}, GiB, predicted for full "
        f"micro-batches of {config.policy.model} ({shape.num_parameters / 1e6:.4g} M parameters)"
    )
    on_top = "CUDA's context, NCCL's buffers" if gpu else "The process itself"
    yield f"            {on_top}, fragmentation and a generation engine beside it come on top."
    if isinstance(config, PPORunConfig) and config.critic.num_workers is None:
        yield f"            So does the critic, {config.critic_policy.model}, on the same bundles."
    for pipeline_rank in _abbreviated(sizes.pp):
        phases = predict_memory(
            shape,
            config.policy,
            sizes.num_ranks,
            pipeline_rank=pipeline_rank,
            num_micro_batches=_micro_batches(config, sizes),
            with_reference=config.keeps_reference,
        )
        yield ""
        if sizes.pp > 1:
            per_stage = sizes.num_ranks // sizes.pp
            first = pipeline_rank * per_stage
            ranks = (
                f"ranks {first} to {first + per_stage - 1}" if per_stage > 1 else f"rank {first}"
            )
            yield f"pp {pipeline_rank} ({ranks})"
        yield from _phase_table(phases)


def _phase_table(phases: Sequence[PhaseMemory]) -> Iterator[str]:
    parts = [part for part in _PARTS if any(part in phase.parts for phase in phases)]
    hosts = any(phase.host for phase in phases)
    rows = [
        [
            phase.name,
            *(_gib(phase.parts.get(part, 0.0)) for part in parts),
            _gib(phase.total),
            *([_gib(phase.host)] if hosts else []),
        ]
        for phase in phases
    ]
    yield from _table(["phase", *parts, "total", *(["on host"] if hosts else [])], rows)
    most = max(phases, key=lambda phase: phase.total)
    yield f"peak: {_gib(most.total)} GiB ({most.name})"


def _times(config: RolloutRunConfig, shape: ModelShape, plan: ResourcePlan) -> Iterator[str]:
    phases = predict_step(config, shape, plan)
    total = sum(phase.seconds for phase in phases)
    yield "Time        of a step on H100s, predicted for completions of full length, at least:"
    rows = [[phase.name, f"{phase.seconds:.3g} s", phase.bound_by] for phase in phases]
    yield from _table(["phase", "seconds", "bound by"], rows)
    most = max(phases, key=lambda phase: phase.seconds)
    yield f"bottleneck: {most.name}, {most.seconds / total:.0%} of {total:.3g} s ({most.bound_by})"


def _gib(size: float) -> str:
    """Three digits where there are that many.

    >>> [_gib(size) for size in (0.0, 0.00012, 0.0456, 23.04, 1234.5)]
    ['-', '<0.001', '0.0456', '23.0', '1234']
    """
    if size == 0:
        return "-"
    if size < 0.001:
        return "<0.001"
    return f"{size:#.3g}" if size < 100 else f"{size:.0f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
