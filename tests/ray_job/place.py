"""A job of tests/test_ray_jobs.py: writes what each worker of two GPUs sees, in rank order."""

import json
import os
import sys
from pathlib import Path

import ray

import nemo_like
from nemo_like.config.run import ClusterConfig
from nemo_like.distributed.connection import connect
from nemo_like.distributed.virtual_cluster import VirtualCluster
from nemo_like.distributed.worker import Worker
from nemo_like.distributed.worker_group import WorkerGroup
from nemo_like.planning.resources import plan_resources


class Place(Worker):
    """Tells what its process got."""

    def seen(self) -> dict[str, object]:
        return {
            "node": ray.get_runtime_context().get_node_id(),
            "package": nemo_like.__file__,
            "files": sorted(path.name for path in Path.cwd().iterdir()),
            "environment": dict(os.environ),
        }


def main(report: Path) -> None:
    leave = connect()
    with VirtualCluster(plan_resources(ClusterConfig(gpus_per_node=2), 1), 60.0) as cluster:
        bundles = [[bundle] for bundle in cluster.bundles]
        log_dir = str(report.parent / "logs")
        group = WorkerGroup(lambda: Place, "place", bundles, timeout_s=300, log_dir=log_dir)
        report.write_text(json.dumps(group.call(Place.seen)))
        group.shutdown()
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
