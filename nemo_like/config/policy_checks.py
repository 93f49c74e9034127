"""The rules of ``policy``: ranges, layouts that cannot work, keys that would have no effect."""

import importlib.util
import math
from dataclasses import replace

from nemo_like.config.choices import (
    Attention,
    Batching,
    Compression,
    DataParallel,
    Dtype,
    Offload,
    PipelineSchedule,
)
from nemo_like.config.layout import ParallelSizes, parallel_sizes, resolve_mesh_shape
from nemo_like.config.optimizer_checks import check_optimizer, check_scheduler, last_update
from nemo_like.config.plan import ResourcePlan, plan_run
from nemo_like.config.rules import Effect, Ranges, check_effects, check_ranges
from nemo_like.config.run_schema import TrainingRunConfig
from nemo_like.errors import UserError

_RANGES = Ranges(
    at_least={
        "policy.loss_scale.growth_steps": 1,
        "policy.parallel.replicate_size": 1,
        "policy.parallel.context_parallel_size": 1,
        "policy.parallel.tensor_parallel_size": 1,
        "policy.parallel.pipeline_parallel_size": 1,
        "policy.parallel.pipeline_stages_per_rank": 2,
        "policy.parallel.ddp.powersgd_rank": 1,
        "policy.parallel.ddp.powersgd_start_step": 2,
        "policy.parallel.ddp.average_every_steps": 1,
        "policy.micro_batch_tokens": 2,
        "policy.micro_batch_size": 1,
        "policy.logprob_chunk_tokens": 1,
    },
    above_zero=(
        "policy.loss_scale.initial",
        "policy.loss_scale.min",
        "policy.parallel.ddp.bucket_mib",
        "policy.max_grad_norm",
        "policy.debug.hang_report_s",
    ),
)


def check_policy(config: TrainingRunConfig) -> None:
    """Raise UserError for the first rule of ``policy`` that ``config`` breaks."""
    check_ranges(config, _RANGES)
    check_optimizer(config, "policy")
    plan = plan_run(config)
    num_ranks = len(plan.policy)
    parallel = resolve_mesh_shape(config.policy, num_ranks)
    # From here on the layout is written in one way, whichever the user chose.
    config = replace(config, policy=replace(config.policy, parallel=parallel, mesh_shape=None))
    _check_ddp(config)
    sizes = parallel_sizes(config.policy, num_ranks)
    _check_axes(config, sizes, plan)
    check_effects(config, _EFFECTS)
    check_effects(config, _rank_effects(sizes))
    _check_precision(config)
    if config.max_updates is not None:
        check_schedule(config, config.max_updates)


def check_scalar_head(config: TrainingRunConfig) -> None:
    """Raise UserError unless layers are split over data-parallel ranks only.

    A scalar head knows no other ranks.
    """
    parallel = resolve_mesh_shape(config.policy, len(plan_run(config).policy))
    for name in ("tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size"):
        if getattr(parallel, name) > 1:
            raise UserError(
                f"policy.parallel.{name}={getattr(parallel, name)} does not go with a scalar head; "
                "set it to 1: ranks then share the rows."
            )


def _check_ddp(config: TrainingRunConfig) -> None:
    """DDP replicates whole models on ranks that each see other rows, in float32 with autocast."""
    policy, parallel = config.policy, config.policy.parallel
    if parallel.data_parallel is not DataParallel.ddp:
        return
    for key in (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "context_parallel_size",
        "replicate_size",
    ):
        if (size := getattr(parallel, key)) > 1:
            raise UserError(
                f"policy.parallel.{key}={size} does not go with data_parallel=ddp, where every "
                f"rank holds the whole model; set policy.parallel.data_parallel=fsdp or {key}=1."
            )
    if not parallel.reshard_after_forward:
        raise UserError(
            "policy.parallel.reshard_after_forward=false does not go with data_parallel=ddp, which "
            "shards nothing; set policy.parallel.data_parallel=fsdp or leave it true."
        )
    if policy.offload is not Offload.none:
        raise UserError(
            f"policy.offload={policy.offload} does not go with data_parallel=ddp, which keeps "
            "everything on the GPU; set policy.parallel.data_parallel=fsdp or policy.offload=none."
        )
    if policy.dtype is Dtype.float16:
        raise UserError(
            "policy.dtype=float16 does not go with data_parallel=ddp, whose autocast is for "
            "bfloat16; set policy.dtype=bfloat16 or policy.parallel.data_parallel=fsdp."
        )
    ddp = parallel.ddp
    if ddp.average_every_steps > 1 and ddp.compression is not Compression.none:
        raise UserError(
            f"policy.parallel.ddp.compression={ddp.compression} does not go with "
            f"average_every_steps={ddp.average_every_steps}, where gradients do not travel; set "
            "policy.parallel.ddp.compression=none or average_every_steps=1."
        )


def _check_axes(config: TrainingRunConfig, sizes: ParallelSizes, plan: ResourcePlan) -> None:
    """Tensor-parallel groups stay within a node; context parallelism needs our own attention."""
    by_node: dict[int, int] = {}
    for bundle in plan.policy:
        by_node[plan.node_of(bundle)] = by_node.get(plan.node_of(bundle), 0) + 1
    common = math.gcd(*by_node.values())
    if common % sizes.tp:
        valid = [str(size) for size in range(1, common + 1) if common % size == 0]
        key = "gpus_per_node" if plan.uses_gpus else "cpu_workers_per_node"
        counts = " or ".join(str(count) for count in sorted(set(by_node.values()), reverse=True))
        raise UserError(
            f"policy.parallel.tensor_parallel_size={sizes.tp} does not divide the {counts} policy "
            f"ranks of a node (cluster.{key}={plan.bundles_per_node[0]}), and a group must not "
            f"cross nodes; use {' or '.join(valid)}."
        )
    if sizes.cp > 1 and config.policy.batching is Batching.padded:
        raise UserError(
            f"policy.parallel.context_parallel_size={sizes.cp} does not go with "
            "policy.batching=padded, whose attention is transformers' own; set "
            "policy.batching=packed."
        )


def _check_precision(config: TrainingRunConfig) -> None:
    policy = config.policy
    scale = policy.loss_scale
    if math.frexp(scale.initial)[0] != 0.5:
        raise UserError(
            f"policy.loss_scale.initial={scale.initial:g} must be a power of two, so that scaling "
            "is exact; use 65536."
        )
    if scale.min > scale.initial:
        raise UserError(
            f"policy.loss_scale.min={scale.min:g} must be at most "
            f"policy.loss_scale.initial={scale.initial:g}; lower it."
        )
    can_flash = policy.dtype is not Dtype.float32 and config.cluster.gpus_per_node > 0
    can_flash = can_flash and importlib.util.find_spec("flash_attn") is not None
    if policy.attention is Attention.flash_attention_2 and not can_flash:
        raise UserError(
            "policy.attention=flash_attention_2 needs a GPU, 16 bits and its package: set "
            "cluster.gpus_per_node, policy.dtype=bfloat16, pip install flash-attn; or use sdpa."
        )


def check_schedule(config: TrainingRunConfig, max_updates: int) -> None:
    """What begins or ends at an optimizer step must do so within the run's ``max_updates``."""
    check_scheduler(config, "policy", max_updates)
    ddp = config.policy.parallel.ddp
    if ddp.compression is Compression.powersgd and ddp.powersgd_start_step >= max_updates:
        raise UserError(
            f"policy.parallel.ddp.powersgd_start_step={ddp.powersgd_start_step} must be below "
            f"{last_update(config, max_updates)}, or PowerSGD never begins; lower it."
        )
    if ddp.compression is Compression.bf16 and not config.cluster.gpus_per_node:
        raise UserError(
            "policy.parallel.ddp.compression=bf16 needs NCCL, which the run's CPUs do not have; "
            "use fp16, or set cluster.gpus_per_node."
        )
    hang_s, limit_s = config.policy.debug.hang_report_s, config.cluster.call_timeout_s
    if hang_s is not None and hang_s >= limit_s:
        raise UserError(
            f"policy.debug.hang_report_s={hang_s:g} must be below "
            f"cluster.call_timeout_s={limit_s:g}, at which the run ends; lower it."
        )


_EFFECTS = (
    Effect(
        keys=("policy.loss_scale",),
        applies=lambda c: c.policy.dtype is Dtype.float16,
        why_not="only float16 gradients are scaled; set policy.dtype=float16",
    ),
    Effect(
        keys=("policy.float32_head",),
        applies=lambda c: c.policy.dtype is not Dtype.float32,
        why_not="policy.dtype=float32 computes everything in float32",
    ),
    Effect(
        keys=("policy.tf32", "policy.offload", "policy.activation_offload"),
        applies=lambda c: c.cluster.gpus_per_node > 0,
        why_not="the run uses no GPU; set cluster.gpus_per_node",
    ),
    Effect(
        keys=("policy.tf32",),
        applies=lambda c: c.policy.dtype is Dtype.float32 or c.policy.float32_head,
        why_not="nothing is multiplied in float32; set policy.dtype=float32 or "
        "policy.float32_head=true",
    ),
    Effect(
        keys=("policy.attention",),
        applies=lambda c: c.policy.batching is Batching.padded,
        why_not="packed rows have their own attention; set policy.batching=padded",
    ),
    Effect(
        keys=("policy.parallel.ddp",),
        applies=lambda c: c.policy.parallel.data_parallel is DataParallel.ddp,
        why_not="FSDP synchronises gradients in its own way; set policy.parallel.data_parallel=ddp",
    ),
    Effect(
        keys=(
            "policy.parallel.ddp.bucket_mib",
            "policy.parallel.ddp.gradient_as_bucket_view",
            "policy.parallel.ddp.find_unused_parameters",
            "policy.debug.check_gradients",
            "policy.debug.check_replicas",
        ),
        applies=lambda c: c.policy.parallel.ddp.average_every_steps == 1,
        why_not="policy.parallel.ddp.average_every_steps above 1 lets each rank keep its own "
        "gradients; set it to 1",
    ),
    Effect(
        keys=("policy.parallel.ddp.powersgd_rank", "policy.parallel.ddp.powersgd_start_step"),
        applies=lambda c: c.policy.parallel.ddp.compression is Compression.powersgd,
        why_not="only policy.parallel.ddp.compression=powersgd has it",
    ),
    Effect(
        keys=("policy.parallel.sequence_parallel",),
        applies=lambda c: c.policy.parallel.tensor_parallel_size > 1,
        why_not="positions are split over tensor-parallel ranks; set "
        "policy.parallel.tensor_parallel_size above 1",
    ),
    Effect(
        keys=("policy.parallel.pipeline_schedule",),
        applies=lambda c: c.policy.parallel.pipeline_parallel_size > 1,
        why_not="there is no pipeline; set policy.parallel.pipeline_parallel_size above 1",
    ),
    Effect(
        keys=("policy.parallel.pipeline_stages_per_rank",),
        applies=lambda c: (
            c.policy.parallel.pipeline_parallel_size > 1
            and c.policy.parallel.pipeline_schedule is PipelineSchedule.interleaved
        ),
        why_not="only a pipeline with policy.parallel.pipeline_schedule=interleaved has several "
        "stages a rank; set it, and pipeline_parallel_size above 1",
    ),
)


def _rank_effects(sizes: ParallelSizes) -> tuple[Effect, ...]:
    """Synchronising and comparing need ranks to do it with."""
    return (
        Effect(
            keys=("policy.parallel.ddp",),
            applies=lambda _: sizes.replicate > 1,
            why_not="the policy has one rank, so nothing is synchronised; use more workers",
        ),
        Effect(
            keys=("policy.debug.check_replicas", "policy.debug.check_gradients"),
            applies=lambda _: max(sizes.replicate, sizes.tp) > 1,
            why_not="no two ranks hold the same parameters; set policy.parallel.replicate_size or "
            "tensor_parallel_size above 1, or data_parallel=ddp on several ranks",
        ),
        Effect(
            keys=("policy.debug.check_data",),
            applies=lambda _: sizes.num_ranks > 1,
            why_not="the policy has one rank; use more workers",
        ),
    )
