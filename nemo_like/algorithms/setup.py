"""From a configuration to live parts: data first, then the cluster, then the workers on it."""

import logging
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from nemo_like.algorithms.run import Run
from nemo_like.config.checks import has_validation
from nemo_like.config.plan import plan_resources
from nemo_like.config.schema import GRPORunConfig
from nemo_like.data.chat import ChatTokenizer, context_length
from nemo_like.data.datasets import Row, check_lengths, load_rows
from nemo_like.data.loader import PromptLoader
from nemo_like.distributed.payload import PayloadMeter
from nemo_like.distributed.virtual_cluster import VirtualCluster, connect
from nemo_like.distributed.worker_group import WorkerGroup
from nemo_like.environments.rewards import resolve_reward
from nemo_like.errors import UserError
from nemo_like.generation.generation import Generation
from nemo_like.generation.protocol import EngineConfig
from nemo_like.models.resolve import resolve_model
from nemo_like.observe.metrics import Metric, Metrics, Reduce
from nemo_like.policy.policy import Policy
from nemo_like.refit.files import FileTransport
from nemo_like.rollout.sources import SyncRolloutSource
from nemo_like.rollout.worker import RolloutSetup, RolloutWorker

logger = logging.getLogger(__name__)

# Held-out reasoning_gym rows come from another seed than any training run is likely to use.
_VALIDATION_SEED_OFFSET = 1_000_003
# Share of a GPU that the engine takes where a policy trains beside it, and where it is alone.
_GPU_SHARE_COLOCATED = 0.4
_GPU_SHARE_SEPARATE = 0.85


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What is known before Ray starts."""

    model_path: str
    loader: PromptLoader
    validation_rows: list[Row]
    eos_token_ids: tuple[int, ...]
    max_model_len: int


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Live parts of a run."""

    policy: Policy
    rollouts: SyncRolloutSource
    loader: PromptLoader
    meter: PayloadMeter

    def driver_metrics(self) -> Metrics:
        """What passed through the driver since the last call."""
        return {"driver/bytes": Metric(self.meter.pop(), reduce=Reduce.sum)}


def prepare(config: GRPORunConfig) -> Prepared:
    """Find the model, read the data, check every prompt's length; raises UserError."""
    model_path = str(resolve_model(config.policy.model))
    chat = ChatTokenizer(model_path)
    context = context_length(model_path)
    most_new = config.generation.max_new_tokens
    if most_new >= context:
        raise UserError(
            f"generation.max_new_tokens={most_new} does not fit the model's context of {context} "
            f"tokens with a prompt; use less."
        )
    reward = resolve_reward(config.environment.reward)  # its errors come now, not from a worker
    data = config.data
    train_rows = _rows(config, data.train, data.num_train_rows, 0, "data.train", chat, context)
    validation_rows: list[Row] = []
    if has_validation(config):
        validation_rows = _rows(
            config,
            data.validation or data.train,
            data.num_validation_rows,
            _VALIDATION_SEED_OFFSET,
            "data.validation",
            chat,
            context,
        )
    for rows, key in ((train_rows, "data.train"), (validation_rows, "data.validation")):
        _check_fields(rows, reward.required_fields, config.environment.reward, key)
    return Prepared(
        model_path=model_path,
        loader=PromptLoader(train_rows, seed=config.run.seed, shuffle=data.shuffle),
        validation_rows=validation_rows,
        eos_token_ids=chat.eos_token_ids,
        max_model_len=context,
    )


def start(config: GRPORunConfig, run: Run, prepared: Prepared, stack: ExitStack) -> Setup:
    """Reserve the cluster and bring up policy and engines, in parallel; ``stack`` ends them."""
    with run.start_phase("ray"):
        stack.callback(connect())
        plan = plan_resources(config.cluster, config.generation.tensor_parallel_size)
        cluster = stack.enter_context(VirtualCluster(plan, config.cluster.start_timeout_s))
    meter = PayloadMeter()
    log_dir = str(run.dir / "logs")
    policy = Policy(
        config.policy,
        config.cluster,
        cluster,
        model_path=prepared.model_path,
        temperature=config.generation.temperature,
        max_steps=config.grpo.max_steps,
        with_reference=config.loss.kl_coef > 0,
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
    rollout_setup = _rollout_setup(config, run, prepared, plan.colocated)
    starting = group.waiting(config.cluster.start_timeout_s)
    with run.start_phase("workers"), ThreadPoolExecutor(2) as threads:
        starts = [
            threads.submit(policy.start),
            threads.submit(starting.call, RolloutWorker.start, rollout_setup),
        ]
        for one in starts:
            one.result()
    run.restore(policy, prepared.loader)
    transport = FileTransport(config.refit, run.dir, policy, generation)
    stack.callback(transport.close)
    rollouts = SyncRolloutSource(
        config,
        policy=policy,
        generation=generation,
        transport=transport,
        loader=prepared.loader,
        validation_rows=prepared.validation_rows,
        stop_token_ids=prepared.eos_token_ids,
        spans=run.spans,
    )
    return Setup(policy=policy, rollouts=rollouts, loader=prepared.loader, meter=meter)


def _rows(
    config: GRPORunConfig,
    source: str,
    num_rows: int,
    seed_offset: int,
    key: str,
    chat: ChatTokenizer,
    context: int,
) -> list[Row]:
    rows = load_rows(source, config.data, num_rows, config.run.seed + seed_offset, key)
    return check_lengths(
        rows,
        chat,
        max_prompt_tokens=min(context, config.policy.micro_batch_tokens)
        - config.generation.max_new_tokens,
        overlong=config.data.overlong_prompts,
        key=key,
    )


def _check_fields(rows: Sequence[Row], required: Collection[str], reward: str, key: str) -> None:
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
    config: GRPORunConfig, run: Run, prepared: Prepared, colocated: bool
) -> RolloutSetup:
    uses_gpus = config.cluster.gpus_per_node > 0
    return RolloutSetup(
        backend=config.generation.backend,
        engine=EngineConfig(
            model_path=prepared.model_path,
            dtype=config.policy.dtype.value,
            seed=config.run.seed,
            max_model_len=prepared.max_model_len,
            tensor_parallel_size=config.generation.tensor_parallel_size,
            device="cuda" if uses_gpus else "cpu",
            gpu_memory_utilization=_GPU_SHARE_COLOCATED if colocated else _GPU_SHARE_SEPARATE,
            engine_kwargs=dict(config.generation.engine_kwargs),
        ),
        environment=config.environment,
        model_path=prepared.model_path,
        trajectories_path=str(Path(run.dir) / "trajectories.jsonl"),
        resumed_step=run.first_step,
    )
