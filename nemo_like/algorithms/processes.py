"""Ray and a run's processes, started before this one imports torch: all import at once."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_like.algorithms.eval.config import EvalConfig
from nemo_like.algorithms.rows import Rows, read_rows
from nemo_like.algorithms.run import Run
from nemo_like.config.paths import is_checkpoint, model_of_checkpoint
from nemo_like.config.remote_code import set_trust
from nemo_like.config.run import RunConfig
from nemo_like.config.sampling import SamplingRunConfig
from nemo_like.distributed.connection import connect
from nemo_like.distributed.driver_meter import DriverMeter
from nemo_like.distributed.virtual_cluster import VirtualCluster, reserve
from nemo_like.distributed.worker import Worker
from nemo_like.distributed.worker_group import Pending, WorkerGroup, wait_together
from nemo_like.errors import UserError
from nemo_like.models.resolve import resolve_model
from nemo_like.planning.model_fit import check_model_fits
from nemo_like.planning.resources import plan_run
from nemo_like.policy.process import policy_group
from nemo_like.rollout.process import rollout_group

if TYPE_CHECKING:
    from nemo_like.policy.worker import PolicyWorker
    from nemo_like.rollout.worker import RolloutWorker


@dataclass(frozen=True, kw_only=True)
class Processes:
    """A run and its processes, without models and engines as yet; ``stack`` ends them."""

    run: Run
    stack: ExitStack
    model_path: str
    rows: Rows
    cluster: VirtualCluster
    meter: DriverMeter
    policy: "WorkerGroup[PolicyWorker]"
    generation: "WorkerGroup[RolloutWorker]"
    missing: list[Pending[list[str]]]
    """What was asked of each group: which of the folders that nodes share its nodes do not see."""


@contextmanager
def started(config: SamplingRunConfig, name: str) -> Iterator[Processes]:
    """A run that samples, named ``name``; all that it starts ends with the context."""
    model_path = find_model(config)  # a wrong layout leaves no folder behind
    with Run(config, name) as run, ExitStack() as stack:
        with run.start_phase("data"):
            rows = read_rows(config)
        with run.start_phase("ray"):
            stack.callback(connect())
            cluster = stack.enter_context(reserve(plan_run(config), config.cluster))
        meter = DriverMeter()
        of_policy = policy_group(
            config.policy, config.cluster, cluster, log_dir=run.log_dir, meter=meter
        )
        stack.callback(of_policy.shutdown)
        replicas = rollout_group(
            config.generation, config.cluster, cluster, log_dir=run.log_dir, meter=meter
        )
        stack.callback(replicas.shutdown)
        paths = [str(run.dir / "config.yaml"), model_path]
        groups: list[WorkerGroup[Any]] = [of_policy, replicas]
        missing = [
            group.waiting(
                config.cluster.start_timeout_s, "start_timeout_s", "Ray starts its process"
            ).submit_missing(paths)
            for group in groups
        ]
        for group in groups:
            group.submit(Worker.ready)  # A process imports at its first call; nobody waits for it.
        yield Processes(
            run=run,
            stack=stack,
            model_path=model_path,
            rows=rows,
            cluster=cluster,
            meter=meter,
            policy=of_policy,
            generation=replicas,
            missing=missing,
        )


def check_folders(asked: Sequence[Pending[list[str]]]) -> None:
    """Refuse a run folder or a model that some worker's node does not see."""
    for call, found in zip(asked, wait_together(*asked), strict=True):
        for context, missing in zip(call.group.contexts, found, strict=True):
            if missing:
                raise UserError(
                    f"{context.name} on {context.address} does not see {missing[0]}; run.dir and "
                    "the model must be in folders that every node of the run shares."
                )


def find_model(config: RunConfig) -> str:
    """The model's folder; raises UserError if it can't be laid out as configured."""
    set_trust(config.policy.trust_remote_code)
    model = config.policy.model
    if isinstance(config, EvalConfig) and is_checkpoint(model):
        model = model_of_checkpoint(model)
    folder = resolve_model(model)
    plan = plan_run(config)
    check_model_fits(config.policy, len(plan.policy), folder)
    return str(folder)
