"""Worker processes, which a driver starts before it imports torch itself; none has a model yet."""

from functools import partial
from typing import TYPE_CHECKING

from nemo_like.config.generation import GenerationConfig, engine_kind
from nemo_like.config.policy import PolicyConfig
from nemo_like.config.run import ClusterConfig
from nemo_like.distributed.virtual_cluster import VirtualCluster
from nemo_like.distributed.waiting import DriverMeter
from nemo_like.distributed.worker import RankLayout
from nemo_like.distributed.worker_group import WorkerGroup
from nemo_like.doors import absolute, import_path
from nemo_like.generation.vllm.environment import EngineDevices
from nemo_like.planning.layout import parallel_sizes

if TYPE_CHECKING:
    from nemo_like.policy.worker import PolicyWorker
    from nemo_like.rollout.worker import RolloutWorker


def policy_group(
    config: PolicyConfig,
    cluster_config: ClusterConfig,
    cluster: VirtualCluster,
    *,
    log_dir: str,
    role: str = "policy",
    meter: DriverMeter | None = None,
) -> "WorkerGroup[PolicyWorker]":
    """A model's ranks on the policy's bundles, named ``role`` in errors and logs."""
    bundles = [[cluster.bundles[i]] for i in cluster.plan.policy]
    return WorkerGroup(
        _policy_worker,
        role,
        bundles,
        layout=RankLayout(parallel_sizes(config, len(bundles)).axes),
        timeout_s=cluster_config.call_timeout_s,
        log_dir=log_dir,
        meter=meter,
    )


def rollout_group(
    config: GenerationConfig,
    cluster_config: ClusterConfig,
    cluster: VirtualCluster,
    *,
    log_dir: str,
    meter: DriverMeter,
) -> "WorkerGroup[RolloutWorker]":
    """Replicas of the engine."""
    devices = EngineDevices(
        device="cuda" if cluster.plan.uses_gpus else "cpu",
        tensor_parallel_size=config.tensor_parallel_size,
        engine_kwargs=dict(config.engine_kwargs),
    )
    return WorkerGroup(
        partial(_rollout_worker, absolute(config.backend), devices),
        "generation",
        [[cluster.bundles[i] for i in replica] for replica in cluster.plan.generation],
        timeout_s=cluster_config.call_timeout_s,
        log_dir=log_dir,
        meter=meter,
        asynchronous=True,
    )


def _policy_worker() -> "type[PolicyWorker]":
    from nemo_like.policy.worker import PolicyWorker

    return PolicyWorker


def _rollout_worker(backend: str, devices: EngineDevices) -> "type[RolloutWorker]":
    if (prepare := engine_kind(backend).prepare) is not None:
        import_path(prepare)(devices)  # vLLM's begins to import it beside us, which takes seconds.
    from nemo_like.generation.worker import engine_class
    from nemo_like.rollout.worker import RolloutWorker

    engine_class(backend)
    return RolloutWorker
