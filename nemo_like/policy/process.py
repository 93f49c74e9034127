"""The processes of a model's ranks, which a driver may start before it imports torch itself."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nemo_like.config.policy import PolicyConfig
from nemo_like.config.run import ClusterConfig
from nemo_like.distributed.virtual_cluster import VirtualCluster
from nemo_like.distributed.waiting import DriverMeter
from nemo_like.distributed.worker import RankLayout
from nemo_like.distributed.worker_group import WorkerGroup
from nemo_like.planning.layout import parallel_sizes

if TYPE_CHECKING:
    from nemo_like.policy.worker import PolicyWorker


def policy_group(
    config: PolicyConfig,
    cluster_config: ClusterConfig,
    cluster: VirtualCluster,
    *,
    log_dir: str,
    role: str = "policy",
    on: Sequence[int] = (),
    meter: DriverMeter | None = None,
) -> "WorkerGroup[PolicyWorker]":
    """Ranks without a model as yet, named ``role`` in errors and logs.

    ``on``: their own bundles, if not the policy's.
    """
    bundles = [[cluster.bundles[i]] for i in on or cluster.plan.policy]
    return WorkerGroup(
        _worker_class,
        role,
        bundles,
        layout=RankLayout(parallel_sizes(config, len(bundles)).axes),
        timeout_s=cluster_config.call_timeout_s,
        log_dir=log_dir,
        meter=meter,
    )


def _worker_class() -> "type[PolicyWorker]":
    from nemo_like.policy.worker import PolicyWorker

    return PolicyWorker
