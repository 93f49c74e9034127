"""From a configuration to live parts: data first, then the cluster, then the workers on it."""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_like.algorithms.engine_size import engine_config
from nemo_like.algorithms.run import Run
from nemo_like.config.choices import Output
from nemo_like.config.model_checks import check_model_fits
from nemo_like.config.plan import ResourcePlan, plan_run
from nemo_like.config.policy_schema import PolicyConfig
from nemo_like.config.rollout_checks import has_validation
from nemo_like.config.run_schema import RolloutRunConfig, TrainingRunConfig
from nemo_like.data.chat import ChatTokenizer
from nemo_like.data.datasets import (
    VALIDATION_SEED_OFFSET,
    Row,
    check_lengths,
    fingerprint,
    load_rows,
    without_overlap,
)
from nemo_like.data.loader import PromptLoader
from nemo_like.distributed.connection import connect
from nemo_like.distributed.driver_meter import DriverMeter
from nemo_like.distributed.virtual_cluster import VirtualCluster, reserve
from nemo_like.distributed.worker import Worker
from nemo_like.distributed.worker_group import WorkerGroup
from nemo_like.errors import UserError
from nemo_like.generation.generation import Generation
from nemo_like.models.context import context_length
from nemo_like.models.resolve import resolve_model
from nemo_like.observe.metrics import Metric, Metrics, Reduce
from nemo_like.policy.policy import Policy
from nemo_like.refit.weight_sync import WeightSync
from nemo_like.rollout import graders
from nemo_like.rollout.sources import SyncRolloutSource
from nemo_like.rollout.worker import RolloutSetup, RolloutWorker

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What is known before Ray starts."""

    model_path: str
    loader: PromptLoader[Row]
    validation_rows: list[Row]
    eos_token_ids: tuple[int, ...]
    max_model_len: int


@dataclass(frozen=True, kw_only=True)
class CriticSetup:
    """A critic on the policy's bundles."""

    config: PolicyConfig
    model_path: str
    max_updates: int
    """Optimizer steps of the whole run."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Live parts of a run."""

    policy: Policy
    critic: Policy | None
    rollouts: SyncRolloutSource
    loader: PromptLoader[Row]
    meter: DriverMeter
    cluster: VirtualCluster

    @property
    def models(self) -> dict[str, Policy]:
        """All that trains, by role."""
        return _by_role(self.policy, self.critic)

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
        is_longer = most_new > config.generation.max_new_tokens
        section = "validation" if is_longer else "generation"
        raise UserError(
            f"{section}.max_new_tokens={most_new} does not fit the model's context of {context} "
            "tokens with a prompt; use less."
        )
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
    rows_of = {"data.train": train_rows, "data.validation": validation_rows}
    graders.check_rows(config.environment, rows_of, chat)
    for key, rows in rows_of.items():
        checked[key], most = check_lengths(
            rows, chat, config.policy.micro_batch_tokens, context, most_new, data, key
        )
        longest = max(longest, most)
    count, least = len(checked["data.train"]), config.loop.num_prompts_per_step
    if count < least:
        logger.warning(
            "data.train has %d prompts, and %s.num_prompts_per_step=%d repeats some within a step.",
            count,
            config.section,
            least,
        )
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
    max_updates: int | None = None,
    with_reference: bool = False,
    critic: CriticSetup | None = None,
) -> Setup:
    """Reserve the cluster and bring up models and engines, in parallel; ``stack`` ends them.

    ``max_updates``: the policy's optimizer steps in the whole run; None: one a step.
    """
    with run.start_phase("ray"):
        stack.callback(connect())
        plan = plan_run(config)
        cluster = stack.enter_context(reserve(plan, config.cluster))
    meter = DriverMeter()
    log_dir = str(run.dir / "logs")
    policy = Policy(
        config.policy,
        config.cluster,
        cluster,
        model_path=prepared.model_path,
        temperature=config.generation.temperature,
        max_steps=max_updates or config.max_steps,
        with_reference=with_reference,
        log_dir=log_dir,
        meter=meter,
    )
    of_critic = _critic(config, cluster, critic, log_dir, meter)
    models = _by_role(policy, of_critic)
    for model in models.values():
        stack.callback(model.shutdown)
    generation = _generation(config, cluster, log_dir, meter)
    stack.callback(generation.shutdown)
    rollout_setup = _rollout_setup(config, run, prepared, plan)
    with run.start_phase("workers"):
        engine = rollout_setup.engine
        generation.group.submit(RolloutWorker.preload, config.generation.backend, engine)
        models_of = (critic and critic.model_path, rollout_setup.environment.reward_model.model)
        folders = [str(run.dir / "config.yaml"), prepared.model_path, *filter(None, models_of)]
        _check_folders([policy.group, generation.group], folders, config.cluster.start_timeout_s)
        _start_workers(config, list(models.values()), generation, rollout_setup, plan)
    run.restore(models, prepared.loader)
    sync = WeightSync(config.refit, policy, generation, plan, engine)
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
        policy=policy, critic=of_critic, rollouts=rollouts, loader=prepared.loader, meter=meter,
        cluster=cluster,
    )  # fmt: skip


def _by_role(policy: Policy, critic: Policy | None) -> dict[str, Policy]:
    return {"policy": policy} if critic is None else {"policy": policy, "critic": critic}


def _critic(
    config: RolloutRunConfig,
    cluster: VirtualCluster,
    critic: CriticSetup | None,
    log_dir: str,
    meter: DriverMeter,
) -> Policy | None:
    if critic is None:
        return None
    return Policy(
        critic.config,
        config.cluster,
        cluster,
        model_path=critic.model_path,
        max_steps=critic.max_updates,
        log_dir=log_dir,
        output=Output.values_before,
        role="critic",
        on=cluster.plan.critic,
        meter=meter,
    )


def _generation(
    config: RolloutRunConfig, cluster: VirtualCluster, log_dir: str, meter: DriverMeter
) -> Generation[RolloutWorker]:
    group = WorkerGroup(
        RolloutWorker,
        "generation",
        [[cluster.bundles[i] for i in replica] for replica in cluster.plan.generation],
        timeout_s=config.cluster.call_timeout_s,
        log_dir=log_dir,
        meter=meter,
    )
    return Generation(group)


def _check_folders(groups: Sequence[WorkerGroup[Any]], paths: list[str], timeout_s: float) -> None:
    """Refuse a run folder or a model that some worker's node does not see."""
    for group in groups:
        found = group.waiting(timeout_s).call(Worker.missing, paths)
        for context, missing in zip(group.contexts, found, strict=True):
            if missing:
                raise UserError(
                    f"{context.name} on {context.address} does not see {missing[0]}; run.dir and "
                    "the model must be in folders that every node of the run shares."
                )


def _start_workers(
    config: RolloutRunConfig,
    models: Sequence[Policy],
    generation: Generation[RolloutWorker],
    setup: RolloutSetup,
    plan: ResourcePlan,
) -> None:
    """Bring all sides up at once; the first failure, or an interrupt, ends all.

    An engine that measures how much of a shared GPU it may use waits for the models: what becomes
    used meanwhile, it would take for its own.
    """
    engines = generation.group.waiting(config.cluster.start_timeout_s)
    with ThreadPoolExecutor(len(models) + 1) as threads:
        try:
            starts: list[Future[Any]] = [threads.submit(model.start) for model in models]
            if plan.uses_gpus and plan.colocated and setup.engine.kv_cache_bytes is None:
                wait(starts)
            starts.append(threads.submit(engines.call, RolloutWorker.start, setup))
            for one in as_completed(starts):
                one.result()
        except BaseException:
            for model in models:
                model.shutdown()
            generation.group.shutdown()
            raise


def _rollout_setup(
    config: RolloutRunConfig, run: Run, prepared: Prepared, plan: ResourcePlan
) -> RolloutSetup:
    return RolloutSetup(
        backend=config.generation.backend,
        engine=engine_config(config, prepared.model_path, prepared.max_model_len, plan),
        environment=graders.for_other_folders(config.environment),
        model_path=prepared.model_path,
        trajectories_path=str(Path(run.dir) / "trajectories.jsonl"),
        resumed_step=run.first_step,
    )
