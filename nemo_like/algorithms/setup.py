"""From a configuration and its processes to live parts: the data, then what runs in the workers."""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass
from typing import Any

from nemo_like.algorithms.engine_size import engine_config
from nemo_like.algorithms.processes import Processes, check_folders
from nemo_like.algorithms.rows import Rows
from nemo_like.algorithms.self_check import warn_of_adapters
from nemo_like.config.policy import PolicyConfig
from nemo_like.config.sampling import SamplingRunConfig
from nemo_like.data.chat import ChatTokenizer
from nemo_like.data.datasets import Row, check_lengths, fingerprint
from nemo_like.data.loader import PromptLoader
from nemo_like.distributed.driver_meter import DriverMeter
from nemo_like.distributed.progress import IMPORTING_ENGINE, STARTING_ENGINE
from nemo_like.distributed.virtual_cluster import VirtualCluster
from nemo_like.distributed.worker import Worker
from nemo_like.errors import UserError
from nemo_like.generation.generation import Generation
from nemo_like.models.context import context_for
from nemo_like.planning.resources import ResourcePlan
from nemo_like.policy.policy import Policy
from nemo_like.policy.process import policy_group
from nemo_like.refit.weight_sync import WeightSync
from nemo_like.rollout import graders
from nemo_like.rollout.sources import SyncRolloutSource
from nemo_like.rollout.worker import RolloutSetup, RolloutWorker

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What is known before models and engines start."""

    loader: PromptLoader[Row]
    validation_rows: list[Row]
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    """Tokens of the longest prompt and the longest completion together."""


@dataclass(frozen=True, kw_only=True)
class CriticSetup:
    """What a critic is made of."""

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


def prepare(config: SamplingRunConfig, rows: Rows, model_path: str) -> Prepared:
    """Render and check every prompt; raises UserError."""
    chat = ChatTokenizer(model_path, config.data.template_switches)
    check_stop_ids(config, chat)
    most_new = max(config.generation.max_new_tokens, config.validation.max_new_tokens or 0)
    is_longer = most_new > config.generation.max_new_tokens
    section = "validation" if is_longer else "generation"
    context = context_for(model_path, f"{section}.max_new_tokens", most_new)
    data = config.data
    longest = 0
    checked: dict[str, list[Row]] = {}
    rows_of = {"data.train": rows.train, "data.validation": rows.validation}
    graders.check_reward_model(config.environment, rows_of, chat)
    for key, unchecked in rows_of.items():
        checked[key], most = check_lengths(
            unchecked, chat, config.policy.micro_batch_tokens, context, most_new, data, key
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
    warn_of_adapters(config)
    return Prepared(
        loader=PromptLoader(
            checked["data.train"],
            fingerprint=fingerprint(checked["data.train"]),
            seed=config.run.seed,
            shuffle=data.shuffle,
        ),
        validation_rows=checked["data.validation"],
        eos_token_ids=chat.eos_token_ids,
        max_model_len=longest + most_new,
    )


def check_stop_ids(config: SamplingRunConfig, chat: ChatTokenizer) -> None:
    """Raise UserError for an id that ends completions and that the model never writes."""
    known = set(chat.token_ids().values())
    for one in config.generation.stop_token_ids:
        if one not in known:
            raise UserError(
                f"generation.stop_token_ids: {one} is no token of the model's tokenizer; leave it "
                "out."
            )


def start(
    config: SamplingRunConfig,
    processes: Processes,
    prepared: Prepared,
    *,
    with_reference: bool = False,
    critic: CriticSetup | None = None,
) -> Setup:
    """Bring up models and engines in a run's processes, in parallel."""
    run, cluster, stack = processes.run, processes.cluster, processes.stack
    policy = Policy(
        config.policy,
        config.cluster,
        processes.policy,
        model_path=processes.model_path,
        temperature=config.generation.temperature,
        max_steps=config.max_updates,
        with_reference=with_reference,
    )
    generation = Generation(processes.generation)
    stack.callback(generation.shutdown)
    asked = list(processes.missing)
    of_critic = None
    if critic is not None:
        of_critic = _critic(config, processes, critic)
        stack.callback(of_critic.shutdown)
        asked.append(of_critic.group.submit_missing([critic.model_path]))
    models = _by_role(policy, of_critic)
    rollout_setup = _rollout_setup(config, processes, prepared)
    with run.start_phase("workers"):
        if (grading_model := rollout_setup.environment.reward_model.model) is not None:
            asked.append(generation.group.submit_missing([grading_model]))
        check_folders(asked)
        _start_workers(config, list(models.values()), generation, rollout_setup, cluster.plan)
    run.restore(models, prepared.loader)
    sync = WeightSync(config.refit, policy, generation, cluster.plan, rollout_setup.engine)
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
        policy=policy,
        critic=of_critic,
        rollouts=rollouts,
        loader=prepared.loader,
        meter=processes.meter,
        cluster=cluster,
    )


def _by_role(policy: Policy, critic: Policy | None) -> dict[str, Policy]:
    return {"policy": policy} if critic is None else {"policy": policy, "critic": critic}


def _critic(config: SamplingRunConfig, processes: Processes, critic: CriticSetup) -> Policy:
    group = policy_group(
        critic.config,
        config.cluster,
        processes.cluster,
        log_dir=processes.run.log_dir,
        role="critic",
        on=processes.cluster.plan.critic,
        meter=processes.meter,
    )
    return Policy(
        critic.config,
        config.cluster,
        group,
        model_path=critic.model_path,
        max_steps=critic.max_updates,
        output="values_before",
    )


def _start_workers(
    config: SamplingRunConfig,
    models: Sequence[Policy],
    generation: Generation[RolloutWorker],
    setup: RolloutSetup,
    plan: ResourcePlan,
) -> None:
    """Bring all sides up at once; the first failure, or an interrupt, ends all.

    An engine that measures how much of a shared GPU it may use waits for the models: what becomes
    used meanwhile, it would take for its own.
    """
    limit_s = config.cluster.start_timeout_s

    def start_engines() -> None:
        # Ray unpickles arguments beside a worker that still imports; two threads that import the
        # same modules may find them half done. ``ready`` has no arguments.
        group = generation.group
        group.waiting(limit_s, "start_timeout_s", IMPORTING_ENGINE).call(Worker.ready)
        starting = group.waiting(limit_s, "start_timeout_s", STARTING_ENGINE)
        starting.call(RolloutWorker.start, setup)
        generation.watch()

    with ThreadPoolExecutor(len(models) + 1) as threads:
        try:
            starts: list[Future[Any]] = [threads.submit(model.start) for model in models]
            if plan.uses_gpus and plan.colocated and setup.engine.kv_cache_bytes is None:
                wait(starts)
            starts.append(threads.submit(start_engines))
            for one in as_completed(starts):
                one.result()
        except BaseException:
            for model in models:
                model.shutdown()
            generation.group.shutdown()
            raise


def _rollout_setup(
    config: SamplingRunConfig, processes: Processes, prepared: Prepared
) -> RolloutSetup:
    run, plan = processes.run, processes.cluster.plan
    return RolloutSetup(
        backend=config.generation.backend,
        engine=engine_config(config, processes.model_path, prepared.max_model_len, plan),
        environment=graders.for_other_folders(config.environment, config.data.template_switches),
        engines_per_node=plan.engines_per_node,
        trajectories_path=str(run.dir / "trajectories.jsonl"),
        resumed_step=run.first_step,
    )
