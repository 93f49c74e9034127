"""``nemo-like plan``: who sits where, how batches divide and what fits, without Ray or torch."""

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from nemo_like.algorithms.eval.config import EvalConfig
from nemo_like.compose import registry
from nemo_like.compose.files import is_name
from nemo_like.compose.load import check, compose_raw
from nemo_like.config.model_files import set_trust
from nemo_like.config.run import RunConfig
from nemo_like.config.sampling import SamplingRunConfig
from nemo_like.config.section import leaves
from nemo_like.errors import UserError
from nemo_like.launch.command import ConfigParser
from nemo_like.launch.plan_memory import (
    LAST_ROWS,
    MOST_ROWS,
    abbreviated,
    longest_row,
    memory_lines,
    micro_batches,
    predict_models,
    table,
)
from nemo_like.models.resolve import refuse_other_models, resolve_policy
from nemo_like.planning.layout import ParallelSizes, parallel_sizes
from nemo_like.planning.model_shape import ModelShape, read_model_shape
from nemo_like.planning.placement import check_context, check_model_fits, check_rounding
from nemo_like.planning.resources import ResourcePlan, plan_run
from nemo_like.planning.step_time import predict_step

_USAGE = (
    "nemo-like plan [config name] [key=value ...] [--config-name NAME] [--config-dir DIR] "
    "[--simulate] [--from RUN]"
)

_IGNORED = (
    *("run.", "cluster.", "rollout.", "data.", "logging.", "checkpoint.", "validation."),
    "policy.optimizer.lr",
)
"""Keys that the simulation handles itself, or that change no time."""


def run(arguments: Sequence[str]) -> None:
    parser = ConfigParser("plan", _USAGE, __doc__)
    parser.add_argument("--simulate", action="store_true", help="sampling ahead, on more GPUs too")
    parser.add_argument(
        "--from", dest="earlier", type=Path, help="folder of a run whose times to simulate with"
    )
    options = parser.parse_intermixed_args(arguments)
    earlier = options.earlier and earlier_run(options.earlier)
    if earlier and not options.config_name and not any(map(is_name, options.words)):
        options.config_name = f"{options.earlier}/config.yaml"
        # That folder is full, and nothing is to be continued in it.
        for key in ("run.dir=null", "run.resume=false", "cluster.slurm.requeue=false"):
            if not any(word.startswith(f"{key.partition('=')[0]}=") for word in options.words):
                options.words.append(key)
    config = parser.load(options, runs=False)
    set_trust(config.policy.trust_remote_code)
    folder = resolve_policy(config, only_config=True)
    refuse_other_models(config)
    lines = [*plan_lines(config, folder)]
    if earlier or options.simulate:
        lines += simulated_lines(config, folder, options.earlier, earlier)
    # At once, so that a reader that leaves early (head) has all it takes in its pipe.
    sys.stdout.write("\n".join([*lines, ""]))


def plan_lines(config: RunConfig, model_folder: Path) -> Iterator[str]:
    """The whole report, line by line; UserError before the first if the model cannot be cut so."""
    plan = plan_run(config)
    check_model_fits(config.policy, len(plan.policy), model_folder)
    check_context(config, model_folder)
    check_rounding(config, model_folder)
    sizes = parallel_sizes(config.policy, len(plan.policy))
    yield from _summary(config, plan, sizes)
    yield ""
    yield from _places(plan, sizes)
    yield ""
    yield from _batch(config, sizes)
    yield ""
    try:
        predicted = predict_models(config, plan, model_folder)
    except UserError as error:
        yield f"Memory is not predicted: {error}"
        return
    yield from memory_lines(config, predicted)
    trains = not isinstance(config, EvalConfig)
    if isinstance(config, SamplingRunConfig) and trains and plan.uses_gpus:
        yield ""
        yield from _times(config, read_model_shape(model_folder), plan)


def earlier_run(folder: Path) -> RunConfig:
    """What the run in ``folder`` ran with; raises UserError."""
    if not (folder / "config.yaml").is_file():
        raise UserError(f"--from={folder} has no config.yaml; give the folder of a run.")
    return compose_raw(folder, "config", []).load(files_are_here=False)


def simulated_lines(
    config: RunConfig, model_folder: Path, folder: Path | None, earlier: RunConfig | None
) -> Iterator[str]:
    """What sampling ahead comes to, with the times of the ``earlier`` run in ``folder`` if given.

    Raises UserError for configurations that do not both sample and train.
    """
    from nemo_like.launch.plan_lag import Planner, lag_lines, measured, predicted

    plan = plan_run(config)
    if not (isinstance(config, SamplingRunConfig) and config.trains):
        raise UserError("--simulate and --from are for runs that sample what they train on.")
    shape = None
    if plan.uses_gpus:
        try:
            shape = read_model_shape(model_folder)
        except UserError:  # no formula covers it
            if folder is None:
                raise
    if folder is not None:
        if not isinstance(earlier, SamplingRunConfig):
            raise UserError(f"--from={folder} is a run that did not sample; give one that did.")
        _refuse_unlike(config, earlier, folder)
        times = measured(folder, earlier, shape)
    elif key := _unpredicted(config):
        raise UserError(
            f"--simulate does not predict times with {key}; add --from with the folder of a run."
        )
    elif shape is not None:
        times = predicted(config, shape, plan)
    else:
        raise UserError(
            "--simulate predicts times of GPUs alone; add --from with the folder of a run on "
            "these CPUs, or set cluster.gpus_per_node."
        )
    yield ""

    def takes(changed: RunConfig) -> bool:
        try:
            check(changed, files_are_here=False)
            check_model_fits(changed.policy, len(plan_run(changed).policy), model_folder)
        except UserError:
            return False
        return True

    yield from lag_lines(Planner(config, times, plan, takes), times, plan)
    if earlier and (others := _others_than(config, earlier)):
        yield f"The times are of {folder}, which ran with other values of {', '.join(others)}."


def _others_than(config: RunConfig, earlier: RunConfig) -> list[str]:
    """Keys whose values differ from those of the ``earlier`` run and may change its times."""
    sizes = ("num_prompts_per_step", "num_generations_per_prompt", "max_steps")
    taken = (*_IGNORED, *(f"{config.section}.{size}" for size in sizes))
    then = dict(leaves(earlier))
    return [
        key for key, value in leaves(config) if then.get(key) != value and not key.startswith(taken)
    ]


def _refuse_unlike(config: RunConfig, earlier: RunConfig, folder: Path) -> None:
    """Raise UserError where times of the ``earlier`` run say nothing of this one."""
    if type(earlier) is not type(config):
        raise UserError(
            f"--from={folder} ran {registry.name_of(type(earlier))}, and the plan is for "
            f"{registry.name_of(type(config))}; give a run of the same algorithm, or leave --from "
            "out."
        )
    ran, planned = ("GPUs" if plan_run(one).uses_gpus else "CPUs" for one in (earlier, config))
    if ran != planned:
        raise UserError(
            f"--from={folder} ran on {ran}, and the plan is for {planned}; give a run on "
            f"{planned}, or leave --from out."
        )


def _summary(config: RunConfig, plan: ResourcePlan, sizes: ParallelSizes) -> Iterator[str]:
    kind = "GPU" if plan.uses_gpus else "CPU worker"
    roles = "the policy has all"
    if plan.generation:
        roles = "policy, then generation"
        if plan.colocated:
            roles = "policy and generation share all bundles"
    data_parallel = config.policy.parallel.data_parallel
    yield (
        f"Cluster     {len(plan.bundles_per_node)} node(s) x {plan.bundles_per_node[0]} {kind}(s), "
        f"one bundle each: {roles}"
    )
    grid = " x ".join(f"{axis} {getattr(sizes, axis)}" for axis in sizes.coordinates(0))
    yield f"Policy      {sizes.num_ranks} rank(s) = {grid} ({data_parallel})"
    if isinstance(config, SamplingRunConfig):
        yield (
            f"Generation  {len(plan.generation)} replica(s) of {len(plan.generation[0])} worker(s) "
            f"({config.generation.backend})"
        )


def _places(plan: ResourcePlan, sizes: ParallelSizes) -> Iterator[str]:
    """One row a bundle: its node, policy rank with coordinates, and generation replica."""
    rank_of = {bundle: rank for rank, bundle in enumerate(plan.policy)}
    replicas_of: dict[int, list[str]] = {}
    for i, replica in enumerate(plan.generation):
        for bundle in replica:
            replicas_of.setdefault(bundle, []).append(str(i))
    axes = list(sizes.coordinates(0))
    header = ["node", "bundle", "policy", *axes, "generation"]

    def row(bundle: int) -> list[str]:
        rank = rank_of.get(bundle)
        where = ["-"] * len(axes)
        if rank is not None:
            where = [str(position) for position in sizes.coordinates(rank).values()]
        names = ["-" if rank is None else str(rank), *where, ",".join(replicas_of.get(bundle, "-"))]
        return [str(plan.node_of(bundle)), str(bundle), *names]

    yield from table(header, [row(bundle) for bundle in abbreviated(sum(plan.bundles_per_node))])
    if (hidden := sum(plan.bundles_per_node) - MOST_ROWS) > 0:
        yield f"({hidden} bundles between the first and the last {LAST_ROWS} are left out)"


def _batch(config: RunConfig, sizes: ParallelSizes) -> Iterator[str]:
    policy, rows = config.policy, config.rows_per_step
    what = ""
    if isinstance(config, SamplingRunConfig):
        loop = config.loop
        what = f"{loop.num_prompts_per_step} prompts x {loop.num_generations_per_prompt} "
        what += "completions = "
    if isinstance(config, EvalConfig):
        yield f"Batch       {what}{rows} rows a step, which train nothing"
        return
    yield (
        f"Batch       {what}{rows} rows a step; {sizes.dp} data-parallel rank(s) get at most about "
        f"{math.ceil(rows / sizes.dp)} rows each"
    )
    bound = f"policy.micro_batch_tokens={policy.micro_batch_tokens}"
    if policy.micro_batch_size is not None:
        bound += f", policy.micro_batch_size={policy.micro_batch_size}"
    layout = policy.batching
    tokens = f"{longest_row(config)} tokens; shorter ones share micro-batches"
    if isinstance(config, SamplingRunConfig):
        tokens = f"{longest_row(config)} new tokens; prompts add to it"
    yield (
        f"            {bound}: about {micro_batches(config, sizes)} micro-batch(es) a rank, "
        f"{layout}, if rows have {tokens}"
    )


def _unpredicted(config: SamplingRunConfig) -> str:
    """What times by arithmetic do not cover, or are far off with; or ""."""
    if config.generation.backend not in ("vllm", "graph"):
        return f"generation.backend={config.generation.backend}"
    if config.policy.offload == "all":
        return "policy.offload=all"
    return "policy.activation_offload=true" if config.policy.activation_offload else ""


def _times(config: SamplingRunConfig, shape: ModelShape, plan: ResourcePlan) -> Iterator[str]:
    if key := _unpredicted(config):
        yield f"Time        of a step is not predicted with {key}"
        return
    phases = predict_step(config, shape, plan)
    total = sum(phase.seconds for phase in phases)
    yield "Time        of a step on H200s, predicted for completions of full length, at least:"
    rows = [[phase.name, f"{phase.seconds:.3g} s", phase.bound_by] for phase in phases]
    yield from table(["phase", "seconds", "bound by"], rows)
    most = max(phases, key=lambda phase: phase.seconds)
    yield f"bottleneck: {most.name}, {most.seconds / total:.0%} of {total:.3g} s ({most.bound_by})"
