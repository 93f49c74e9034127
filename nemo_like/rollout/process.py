"""The processes of replicas, which a driver may start before it imports torch itself."""

from functools import partial
from typing import TYPE_CHECKING

from nemo_like.config.generation import GenerationConfig, engine_kind
from nemo_like.config.run import ClusterConfig
from nemo_like.distributed.virtual_cluster import VirtualCluster
from nemo_like.distributed.waiting import DriverMeter
from nemo_like.distributed.worker_group import WorkerGroup
from nemo_like.doors import absolute, import_path
from nemo_like.generation.vllm.environment import EngineDevices

if TYPE_CHECKING:
    from nemo_like.rollout.worker import RolloutWorker


def rollout_group(
    config: GenerationConfig,
    cluster_config: ClusterConfig,
    cluster: VirtualCluster,
    *,
    log_dir: str,
    meter: DriverMeter,
) -> "WorkerGroup[RolloutWorker]":
    """Replicas without an engine as yet."""
    devices = EngineDevices(
        device="cuda" if cluster.plan.uses_gpus else "cpu",
        tensor_parallel_size=config.tensor_parallel_size,
        engine_kwargs=dict(config.engine_kwargs),
    )
    return WorkerGroup(
        partial(_worker_class, absolute(config.backend), devices),
        "generation",
        [[cluster.bundles[i] for i in replica] for replica in cluster.plan.generation],
        timeout_s=cluster_config.call_timeout_s,
        log_dir=log_dir,
        meter=meter,
        asynchronous=True,
    )


def _worker_class(backend: str, devices: EngineDevices) -> "type[RolloutWorker]":
    if (prepare := engine_kind(backend).prepare) is not None:
        import_path(prepare)(devices)  # vLLM's begins to import it beside us, which takes seconds.
    from nemo_like.generation.worker import engine_class
    from nemo_like.rollout.worker import RolloutWorker

    engine_class(backend)
    return RolloutWorker
