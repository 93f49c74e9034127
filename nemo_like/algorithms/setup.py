"""From a configuration to live parts: data first, then the cluster, then the workers on it."""

import logging
import math
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nemo_like.algorithms.run import Run
from nemo_like.config.choices import Backend
from nemo_like.config.model_checks import check_model_fits
from nemo_like.config.model_shape import kv_bytes_per_sequence, read_model_shape
from nemo_like.config.plan import ResourcePlan, plan_run
from nemo_like.config.rollout_checks import has_validation
from nemo_like.config.run_schema import RolloutRunConfig, TrainingRunConfig
from nemo_like.data.chat import ChatTokenizer, context_length
from nemo_like.data.datasets import (
    VALIDATION_SEED_OFFSET,
    Row,
    check_lengths,
    fingerprint,
    load_rows,
    without_overlap,
)
from nemo_like.data.loader import PromptLoader
from nemo_like.distributed.driver_meter import DriverMeter
from nemo_like.distributed.virtual_cluster import VirtualCluster, connect
from nemo_like.distributed.worker import Worker
from nemo_like.distributed.worker_group import WorkerGroup
from nemo_like.environments.rewards import absolute_reward, resolve_reward
from nemo_like.errors import UserError
from nemo_like.generation.generation import Generation
from nemo_like.generation.protocol import EngineConfig
from nemo_like.models.resolve import resolve_model
from nemo_like.observe.metrics import Metric, Metrics, Reduce
from nemo_like.policy.policy import Policy
from nemo_like.refit.weight_sync import WeightSync
from nemo_like.rollout.sources import SyncRolloutSource
from nemo_like.rollout.worker import RolloutSetup, RolloutWorker

logger = logging.getLogger(__name__)

# Most of a GPU that its engines take: where they have it to themselves, where they sleep while the
# policy trains, and where the policy trains beside them.
_GPU_SHARE_SEPARATE = 0.85
_GPU_SHARE_SLEEPING = 0.6
_GPU_SHARE_BESIDE = 0.3
_MOST_SEQUENCES = 1024


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What is known before Ray starts."""

    model_path: str
    loader: PromptLoader[Row]
    validation_rows: list[Row]
    eos_token_ids: tuple[int, ...]
    max_model_len: int


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Live parts of a run."""

    policy: Policy
    rollouts: SyncRolloutSource
    loader: PromptLoader[Row]
    meter: DriverMeter
    cluster: VirtualCluster

    def driver_metrics(self) -> Metrics:
        """What passed through the driver since the last call."""
        num_bytes, waited_s = self.meter.pop()
        return {
            "driver/bytes": Metric(num_bytes, reduce=Reduce.sum),
            "time/waiting_s": Metric(waited_s, reduce=Reduce.sum),
        }


def find_model(config: TrainingRunConfig) -> str:
    """The model's folder; raises UserError if it can't be laid out as configured."""
    folder = resolve_model(config.policy.model)
    plan = plan_run(config)
    check_model_fits(config.policy, len(plan.policy), folder)
    return str(folder)


def prepare(config: RolloutRunConfig, model_path: str) -> Prepared:
    """Read the data, check every prompt's length; raises UserError."""
    chat = ChatTokenizer(model_path)
    context = context_length(model_path)
    most_new = max(config.generation.max_new_tokens, config.validation.max_new_tokens or 0)
    if most_new >= context:
        raise UserError(
            f"generation.max_new_tokens={most_new} does not fit the model's context of {context} "
            "tokens with a prompt; use less."
        )
    reward = resolve_reward(config.environment.reward)  # its errors come now, not from a worker
    data, seed = config.data, config.run.seed
    train_rows = load_rows(data.train, data, data.num_train_rows, seed, "data.train")
    validation_rows: list[Row] = []
    if has_validation(config):
        key, source = "data.validation", data.validation or data.train
        held_out = seed + VALIDATION_SEED_OFFSET
        validation_rows = load_rows(source, data, data.num_validation_rows, held_out, key)
        train_rows = without_overlap(train_rows, validation_rows)
    longest = 0
    checked: dict[str, list[Row]] = {}
    for key, rows in (("data.train", train_rows), ("data.validation", validation_rows)):
        check_fields(rows, reward.required_fields, config.environment.reward, key)
        checked[key], most = check_lengths(
            rows, chat, config.policy.micro_batch_tokens, context, most_new, data, key
        )
        longest = max(longest, most)
    return Prepared(
        model_path=model_path,
        loader=PromptLoader(
            checked["data.train"],
            fingerprint=fingerprint(checked["data.train"]),
            seed=seed,
            shuffle=data.shuffle,
        ),
        validation_rows=checked["data.validation"],
        eos_token_ids=chat.eos_token_ids,
        max_model_len=longest + most_new,
    )


def start(
    config: RolloutRunConfig,
    run: Run,
    prepared: Prepared,
    stack: ExitStack,
    *,
    num_updates_per_step: int = 1,
    with_reference: bool = False,
) -> Setup:
    """Reserve the cluster and bring up policy and engines, in parallel; ``stack`` ends them."""
    with run.start_phase("ray"):
        stack.callback(connect())
        plan = plan_run(config)
        cluster = stack.enter_context(VirtualCluster(plan, config.cluster.start_timeout_s))
    meter = DriverMeter()
    log_dir = str(run.dir / "logs")
    policy = Policy(
        config.policy,
        config.cluster,
        cluster,
        model_path=prepared.model_path,
        temperature=config.generation.temperature,
        max_steps=config.max_steps * num_updates_per_step,
        with_reference=with_reference,
        log_dir=log_dir,
        meter=meter,
    )
    stack.callback(policy.shutdown)
    bundles = [[cluster.bundles[i] for i in replica] for replica in plan.generation]
    group = WorkerGroup(
        RolloutWorker,
        "generation",
        bundles,
        timeout_s=config.cluster.call_timeout_s,
        log_dir=log_dir,
        meter=meter,
    )
    generation = Generation(group)
    stack.callback(generation.shutdown)
    rollout_setup = _rollout_setup(config, run, prepared, plan)
    with run.start_phase("workers"):
        group.submit(RolloutWorker.preload, config.generation.backend)
        _check_folders(policy, generation, [str(run.dir / "config.yaml"), prepared.model_path])
        _start_workers(config, policy, generation, rollout_setup, plan)
    run.restore({"policy": policy}, prepared.loader)
    sync = WeightSync(config.refit, policy, generation, plan, sleep=rollout_setup.engine.sleep)
    rollouts = SyncRolloutSource(
        config,
        generation=generation,
        sync=sync,
        loader=prepared.loader,
        validation_rows=prepared.validation_rows,
        stop_token_ids=prepared.eos_token_ids,
        span=run.span,
    )
    return Setup(
        policy=policy, rollouts=rollouts, loader=prepared.loader, meter=meter, cluster=cluster
    )


def _check_folders(policy: Policy, generation: Generation[Any], paths: list[str]) -> None:
    """Refuse a run folder or a model that some worker's node does not see."""
    for group in (policy.group, generation.group):
        for context, missing in zip(group.contexts, group.call(Worker.missing, paths), strict=True):
            if missing:
                raise UserError(
                    f"{context.name} on {context.address} does not see {missing[0]}; run.dir and "
                    "the model must be in folders that every node of the run shares."
                )


def _start_workers(
    config: RolloutRunConfig,
    policy: Policy,
    generation: Generation[RolloutWorker],
    setup: RolloutSetup,
    plan: ResourcePlan,
) -> None:
    """Bring both sides up at once; the first failure, or an interrupt, ends both.

    An engine that measures how much of a shared GPU it may use waits for the policy: what becomes
    used meanwhile, it would take for its own.
    """
    engines = generation.group.waiting(config.cluster.start_timeout_s)
    with ThreadPoolExecutor(2) as threads:
        try:
            starts: list[Future[Any]] = [threads.submit(policy.start)]
            if plan.uses_gpus and plan.colocated and setup.engine.kv_cache_bytes is None:
                wait(starts)
            starts.append(threads.submit(engines.call, RolloutWorker.start, setup))
            for one in as_completed(starts):
                one.result()
        except BaseException:
            policy.shutdown()
            generation.group.shutdown()
            raise


def check_fields(rows: Sequence[Row], required: Collection[str], reward: str, key: str) -> None:
    """Refuse rows that the reward function could not be called with."""
    for row in rows:
        for name in required:
            if name not in row.fields:
                found = ", ".join(row.fields) or "none"
                raise UserError(
                    f"environment.reward={reward} needs the field '{name}', and row {row.index} of "
                    f"{key} does not have it (its fields: {found})."
                )


def _rollout_setup(
    config: RolloutRunConfig, run: Run, prepared: Prepared, plan: ResourcePlan
) -> RolloutSetup:
    return RolloutSetup(
        backend=config.generation.backend,
        engine=_engine_config(config, prepared, plan),
        environment=replace(config.environment, reward=absolute_reward(config.environment.reward)),
        model_path=prepared.model_path,
        trajectories_path=str(Path(run.dir) / "trajectories.jsonl"),
        resumed_step=run.first_step,
    )


def _engine_config(
    config: RolloutRunConfig, prepared: Prepared, plan: ResourcePlan
) -> EngineConfig:
    """One replica's engine, as large as a step's completions need."""
    generation = config.generation
    prompts = math.ceil(config.loop.num_prompts_per_step / len(plan.generation))
    most = min(_MOST_SEQUENCES, prompts * config.loop.num_generations_per_prompt)
    on_shared_gpus = plan.uses_gpus and plan.colocated
    sleep = generation.sleep and on_shared_gpus and generation.backend is Backend.vllm
    share = _GPU_SHARE_SEPARATE
    if plan.colocated:
        share = _GPU_SHARE_SLEEPING if sleep else _GPU_SHARE_BESIDE
    engine = EngineConfig(
        model_path=prepared.model_path,
        dtype=config.policy.dtype.value,
        seed=config.run.seed,
        max_model_len=prepared.max_model_len,
        max_num_seqs=generation.engine_kwargs.get("max_num_seqs", most),
        tensor_parallel_size=generation.tensor_parallel_size,
        device="cuda" if plan.uses_gpus else "cpu",
        gpu_memory_share=share / generation.num_engines_per_bundle,
        sleep=sleep,
        engine_kwargs=dict(generation.engine_kwargs),
    )
    if plan.uses_gpus and not plan.colocated and generation.num_engines_per_bundle == 1:
        return engine
    try:
        shape = read_model_shape(Path(prepared.model_path))
    except UserError:  # A model that the formulas do not cover: the engine has to measure.
        return engine
    size = getattr(torch, engine.dtype).itemsize
    return replace(
        engine,
        weight_bytes=shape.num_parameters * size // engine.tensor_parallel_size,
        kv_cache_bytes=engine.max_num_seqs
        * kv_bytes_per_sequence(shape, engine.max_model_len, size, engine.tensor_parallel_size),
    )
