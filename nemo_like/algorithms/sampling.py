"""From a session to the live parts of a run that samples: models, engines, a source of batches."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nemo_like.algorithms.checks import (
    MismatchCheck,
    check_sampled,
    mismatch_check,
    say_logits,
    warn_of_adapters,
    warn_of_mismatch,
)
from nemo_like.algorithms.engine_size import engine_config, share_gpus
from nemo_like.algorithms.rows import check_rows
from nemo_like.algorithms.session import Session
from nemo_like.config.policy import PolicyConfig
from nemo_like.config.sampling import SamplingRunConfig
from nemo_like.data.chat import ChatTokenizer
from nemo_like.data.datasets import Row, fingerprint
from nemo_like.data.loader import GroupFeed, PromptLoader, RowLoader
from nemo_like.distributed.remote_batch import RemoteBatch
from nemo_like.distributed.waiting import IMPORTING_ENGINE, STARTING_ENGINE
from nemo_like.distributed.worker import Worker
from nemo_like.doors import absolute
from nemo_like.generation.protocol import EngineConfig
from nemo_like.generation.worker import Generation
from nemo_like.models.resolve import context_length
from nemo_like.observe.metrics import Metrics
from nemo_like.observe.trajectory_files import Resumed
from nemo_like.planning.model_shape import role_of
from nemo_like.planning.offload import Neighbours
from nemo_like.planning.resources import ResourcePlan
from nemo_like.policy.remote_model import RemoteModel
from nemo_like.rewards.start import check_reward_models, with_absolute_paths
from nemo_like.rollout.failures import RewardFailures
from nemo_like.rollout.rounds import histograms, staleness
from nemo_like.rollout.sources import RolloutSource
from nemo_like.rollout.weight_sync import WeightSync
from nemo_like.rollout.worker import RolloutSetup, RolloutWorker

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Sampling:
    """Live parts of a run that samples."""

    config: SamplingRunConfig
    session: Session
    policy: RemoteModel
    critic: RemoteModel | None
    rollouts: RolloutSource
    feed: GroupFeed[Row]
    validation_rows: list[Row]
    failures: RewardFailures
    num_made: int = 0
    """Steps that this execution has begun."""
    batch: RemoteBatch | None = None
    """The batch of the step in progress."""

    def batches(
        self,
        keep: Callable[[RemoteBatch], Tensor] | None = None,
        early: Callable[[RemoteBatch], None] | None = None,
    ) -> Iterator[tuple[int, RemoteBatch, Metrics]]:
        """A batch for each step and what its rollout measured; arguments as of ``next_batch``.

        It runs inside ``Run.steps``: when the loop asks for its next batch, the step before is
        validated, logged and saved.
        """
        config, run = self.config, self.session.run
        models = _by_role(self.policy, self.critic)
        validator = self.rollouts if config.validates else None
        every = config.validation.every_steps
        for step in run.steps(config.max_steps, models, self.feed, validator, every):
            self.session.meter.pop()  # what start-up, a validation and a checkpoint came to
            batch, metrics = self.rollouts.next_batch(step, keep, early)
            self.num_made, self.batch = step - run.first_step, batch
            check_sampled(config, batch, self.policy.weight_version, self.num_made)
            metrics |= staleness(config, batch, self.policy.weight_version)
            yield step, batch, metrics

    def mismatch_check(self) -> MismatchCheck:
        """What the logprobs of the step in progress must pass before its optimizer step."""
        return mismatch_check(self.config, self.num_made)

    def log(self, metrics: Metrics) -> None:
        """Keep the metrics of the step in progress for ``Run.log``; a second call replaces them."""
        warn_of_mismatch(self.config, metrics)
        metrics |= self.feed.loader.pop_metrics()
        found = histograms(self.batch) if self.batch is not None else {}
        self.session.run.log(metrics | self.session.meter.pop(), found)


def start_sampling(
    config: SamplingRunConfig,
    session: Session,
    critic: RemoteModel | None = None,
    neighbours: Neighbours | None = None,
) -> Sampling:
    """Render and check every prompt, then bring up models and engines; raises UserError.

    ``critic`` starts at the same time; ``neighbours``, which share the policy's GPUs, later.
    """
    run, plan, path = session.run, session.cluster.plan, session.model_path
    with run.start_phase("prompts"):
        chat = ChatTokenizer(path, config.data.template_switches)
        loader, validation_rows, longest = read_prompts(config, session.rows, path, chat)
    policy = RemoteModel(
        _trained(config),
        config.cluster,
        session.policy_group,
        model_path=path,
        temperature=config.generation.temperature,
        max_steps=config.max_updates,
        role=role_of(config),
    )
    assert session.rollout_group is not None
    generation = Generation(session.rollout_group)
    session.stack.callback(generation.shutdown)
    models = _by_role(policy, critic)
    engine = engine_config(config, path, longest, plan)
    say_logits(config, engine)
    share_gpus(config, engine, plan, neighbours or Neighbours(), policy, critic)
    run.restore_position(feed := GroupFeed(loader))
    setup = rollout_setup(config, session, engine, feed)
    with run.start_phase("workers"):
        models_asked = filter(None, (e.reward_model for e in setup.environments.values()))
        session.look_for_folders(generation.group, *models_asked)
        session.check_folders()
        _start_workers(config, list(models.values()), generation, setup, plan)
    run.restore(models)
    failures = RewardFailures(config.environment, run.dir, run.first_step or -1)
    rollouts = RolloutSource(
        config,
        generation=generation,
        sync=WeightSync(config.refit, policy, generation, plan, setup.engine),
        feed=feed,
        validation_rows=validation_rows,
        stop_token_ids=chat.eos_token_ids,
        failures=failures,
        span=run.span,
        show=run.show,
    )
    return Sampling(
        config=config,
        session=session,
        policy=policy,
        critic=critic,
        rollouts=rollouts,
        feed=feed,
        validation_rows=validation_rows,
        failures=failures,
    )


def _trained(config: SamplingRunConfig) -> PolicyConfig:
    """The policy's configuration.

    One that never trains has no optimizer state to offload, and computes nothing: it takes any
    model that transformers can run.
    """
    policy = config.policy
    if config.trains:
        return policy
    offload = "none" if policy.offload == "auto" else policy.offload
    return policy.replace(offload=offload, batching="padded", attention="eager")


def rollout_setup(
    config: SamplingRunConfig, session: Session, engine: EngineConfig, feed: GroupFeed[Row]
) -> RolloutSetup:
    """The setup of a generation worker, with only the environments that rows use."""
    run, rows = session.run, [row for rows in session.rows.values() for row in rows]
    used = {row.environment for row in rows}
    each = with_absolute_paths(config.environment).by_name
    environments = {name: one for name, one in each.items() if name in used}
    most_tokens = engine.max_model_len  # validations may need more than training does
    if config.trains:
        most_tokens = min(most_tokens, config.policy.micro_batch_tokens)
    num_processes = sum(one.num_processes for one in environments.values())
    return RolloutSetup(
        backend=absolute(config.generation.backend),
        engine=engine,
        environments=environments,
        template_switches=config.data.template_switches,
        num_reward_threads=max(1, int(config.cluster.cpus_per_worker) // num_processes),
        engines_per_node=session.cluster.plan.engines_per_node,
        run_dir=str(run.dir),
        resumed=Resumed(
            step=run.first_step or -1,
            validated=run.logged_step,
            first_open=feed.first_open,
            used=feed.used,
        ),
        most_tokens=most_tokens,
        most_turns=config.environment.most_turns,
        shares_prompts=config.policy.batching == "shared",
        trajectories_gib=config.logging.trajectories_gib,
    )


def _by_role(policy: RemoteModel, critic: RemoteModel | None) -> dict[str, RemoteModel]:
    return {"policy": policy} if critic is None else {"policy": policy, "critic": critic}


def read_prompts(
    config: SamplingRunConfig,
    rows_of: Mapping[str, list[Row]],
    model_path: str,
    chat: ChatTokenizer,
) -> tuple[RowLoader[Row], list[Row], int]:
    """Training rows in order, validation rows, and the tokens of the longest row.

    ``rows_of``: see ``Session.rows``. Raises UserError for a row that does not fit.
    """
    check_reward_models(config.environment, rows_of, chat)
    checked: dict[str, list[Row]] = {}
    most = 0
    for name, rows in rows_of.items():
        checked[name], longest = check_rows(config, name, rows, model_path, chat)
        most = max(most, longest)
    train = checked["data.train"]
    least = config.loop.num_prompts_per_step
    if config.trains and len(train) < least:
        logger.warning(
            "data.train has %d prompts, and %s.num_prompts_per_step=%d repeats some within a step.",
            len(train),
            config.section,
            least,
        )
    room = context_length(model_path)
    if config.trains:
        warn_of_adapters(config)
        room = min(room, config.policy.micro_batch_tokens)
    for environment in config.environment.by_name.values():
        if not environment.is_single_turn:
            most = max(most, min(room, environment.max_tokens or room))
    return _loader(config, train), checked["data.validation"], most


def _loader(config: SamplingRunConfig, rows: Sequence[Row]) -> RowLoader[Row]:
    data, seed = config.data, config.run.seed
    if not (data.mixes and config.trains):
        return PromptLoader(rows, fingerprint=fingerprint(rows), seed=seed, shuffle=data.shuffle)
    from nemo_like.data.mixtures import MixtureLoader

    weights = data.weights
    return MixtureLoader(
        {name: [row for row in rows if row.part == name] for name in weights},
        weights,
        fingerprint=fingerprint,
        batch_size=config.loop.num_prompts_per_step,
        seed=seed,
        shuffle=data.shuffle,
    )


def _start_workers(
    config: SamplingRunConfig,
    models: Sequence[RemoteModel],
    generation: Generation[RolloutWorker],
    setup: RolloutSetup,
    plan: ResourcePlan,
) -> None:
    """Start models and engines at once; the first failure, or an interrupt, ends all.

    An engine that measures how much of a shared GPU it may use waits for the models: what becomes
    used meanwhile, it would take for its own.
    """
    limit_s = config.cluster.start_timeout_s

    def start_engines() -> None:
        # Ray unpickles arguments while a worker still imports; two threads that import the same
        # modules may find them half done. ``ready`` has no arguments.
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
                model.group.shutdown()
            generation.group.shutdown()
            raise
