"""From a configuration to a run's folder, Ray, and the processes of its workers.

Workers start as soon as Ray is up, and import at the same time as this process. Nothing here
imports torch; the algorithm's loop is imported last.
"""

import shlex
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_like.algorithms.processes import policy_group, rollout_group
from nemo_like.algorithms.rows import read_rows
from nemo_like.config.model_files import set_trust
from nemo_like.config.policy import PolicyConfig
from nemo_like.config.run import Algorithm, RunConfig
from nemo_like.config.sampling import SamplingRunConfig
from nemo_like.config.section import keys_of, named_outside, section_of
from nemo_like.config.typed import as_typed
from nemo_like.data.datasets import Row
from nemo_like.distributed.connection import connect
from nemo_like.distributed.virtual_cluster import VirtualCluster
from nemo_like.distributed.waiting import DriverMeter
from nemo_like.distributed.worker import Worker
from nemo_like.distributed.worker_group import Pending, WorkerGroup, wait_together
from nemo_like.errors import UserError
from nemo_like.imports import without_collector
from nemo_like.models.resolve import refuse_other_models, resolve_policy
from nemo_like.planning.placement import check_context, check_model_fits, check_rounding
from nemo_like.planning.resources import plan_run
from nemo_like.run.outputs import note_nodes
from nemo_like.run.run import Run

if TYPE_CHECKING:
    from nemo_like.policy.remote_model import RemoteModel
    from nemo_like.policy.worker import PolicyWorker
    from nemo_like.rollout.worker import RolloutWorker

_MEASURED = (
    *("run.seed", "policy.dtype", "policy.trust_remote_code", "data.", "environment."),
    *("generation.backend", "generation.max_new_tokens", "generation.stop", "validation."),
)
"""Beginnings of keys that change what a validation measures."""


@dataclass(kw_only=True)
class Session:
    """A run and its processes, without models and engines yet; ``stack`` ends them."""

    run: Run
    stack: ExitStack
    model_path: str
    cluster: VirtualCluster
    meter: DriverMeter
    policy_group: "WorkerGroup[PolicyWorker]"
    rollout_group: "WorkerGroup[RolloutWorker] | None"
    rows: Mapping[str, list[Row]] = field(default_factory=dict)
    """Rows of a run that samples, by key: ``data.train`` and ``data.validation``."""
    _looking: list[Pending[list[str]]] = field(default_factory=list)

    def new_group(
        self, config: PolicyConfig, model_path: str, role: str
    ) -> "WorkerGroup[PolicyWorker]":
        """Processes of another model, on the policy's bundles."""
        cluster_config = self.run.config.cluster
        group = policy_group(
            config,
            cluster_config,
            self.cluster,
            log_dir=self.run.log_dir,
            role=role,
            meter=self.meter,
        )
        self.stack.callback(group.shutdown)
        self.look_for_folders(group, model_path)
        return group

    def look_for_folders(self, group: WorkerGroup[Any], *folders: str) -> None:
        """Start checking that the nodes of a group see the shared folders."""
        starting = group.waiting(
            self.run.config.cluster.start_timeout_s, "start_timeout_s", "Ray starts its process"
        )
        self._looking.append(starting.submit_missing(list(folders)))

    def check_folders(self) -> None:
        """Refuse a run folder or model that a worker's node does not see."""
        for call, found in zip(self._looking, wait_together(*self._looking), strict=True):
            for context, missing in zip(call.group.contexts, found, strict=True):
                if missing:
                    raise UserError(
                        f"{context.name} on {context.address} does not see {missing[0]}; run.dir "
                        "and the model must be in folders that every node of the run shares."
                    )
        self._looking.clear()

    def finish(self, models: "Mapping[str, RemoteModel]", **facts: Any) -> None:
        """Export each model to its folder in ``run.dir``, and write the summary with ``facts``."""
        if self.run.config.checkpoint.export:
            for folder, model in models.items():
                model.export(str(self.run.dir / folder))
            final = str(self.run.dir / next(iter(models)))
            facts |= {"final": final, "next": next_command(self.run.config, final)}
        self.run.finish(**facts)


def next_command(config: RunConfig, final: str) -> str:
    """A command that uses the model in ``final``: evaluate it, or train on its scores."""
    words = ["nemo-like", "eval", f"policy.model={final}"]
    if isinstance(config, SamplingRunConfig):
        words += as_typed(_measured_as(config))
    elif config.scalar_heads:
        words = ["nemo-like", "grpo", "environment.reward=reward_model"]
        words.append(f"environment.reward_model={final}")
    if config.cluster.gpus_per_node:
        words.append("cluster.gpus_per_node=1")
    return shlex.join(words)


def _measured_as(config: SamplingRunConfig) -> dict[str, Any]:
    """Settings with which an evaluation scores as the run's validations do, by key."""
    generated = {part.generates for part in config.data.validation_parts}
    unused = {
        *("data.train", "data.num_train_rows", "data.shuffle", "validation.every_steps"),
        *(["data.tasks"] if True not in generated else []),
        *(["data.columns"] if False not in generated else []),
        *(["generation.backend"] if config.generation.backend == "replay" else []),
        *(["generation.max_new_tokens"] if config.validation.max_new_tokens else []),
        *(["validation.num_generations_per_prompt"] if not config.validation.temperature else []),
    }
    changed, found = config.model_dump(mode="json", exclude_defaults=True), {}
    for key, one in keys_of(SamplingRunConfig):
        if key.startswith(_MEASURED) and key not in unused and section_of(one) is None:
            value: Any = changed
            for part in key.split("."):
                value = value.get(part, {})
            found |= {key: value} if value != {} else {}
    return found


def launch(algorithm: Algorithm, config: RunConfig, began: float | None = None) -> None:
    """A whole run: its processes, then the algorithm's loop; everything it starts ends with it.

    ``began``: see ``Run``.
    """
    with opened(config, algorithm.name, began) as session:
        with session.run.start_phase("imports"), without_collector():
            loop = algorithm.loop()
        loop(config, session)


@contextmanager
def opened(config: RunConfig, name: str, began: float | None = None) -> Iterator[Session]:
    """A session of a run that is called ``name``."""
    model_path = find_model(config)  # what is refused here leaves no folder behind
    for key, door, spec in named_outside(config):
        if spec not in door.ours:
            door.load(key, spec)
    with Run(config, name, began) as run, ExitStack() as stack:
        run.callbacks.tell("on_start", run.dir, config, run.first_step)
        rows: Mapping[str, list[Row]] = {}
        if isinstance(config, SamplingRunConfig):
            with run.start_phase("data"):
                rows = read_rows(config)
        with run.start_phase("ray"):
            if config.cluster.takes_turns(config) and not config.cluster.mps:
                from nemo_like.distributed.mps import recommend_mps

                recommend_mps()
            stack.callback(connect(Path(run.log_dir, "mps") if config.cluster.mps else None))
            limit_s, interface = config.cluster.start_timeout_s, config.cluster.network_interface
            cluster = stack.enter_context(VirtualCluster(plan_run(config), limit_s, interface))
        meter = DriverMeter()
        trainers = policy_group(
            config.policy, config.cluster, cluster, log_dir=run.log_dir, meter=meter
        )
        stack.callback(trainers.shutdown)
        replicas = None
        if isinstance(config, SamplingRunConfig):
            replicas = rollout_group(
                config.generation, config.cluster, cluster, log_dir=run.log_dir, meter=meter
            )
            stack.callback(replicas.shutdown)
        session = Session(
            run=run,
            stack=stack,
            model_path=model_path,
            cluster=cluster,
            meter=meter,
            policy_group=trainers,
            rollout_group=replicas,
            rows=rows,
        )
        groups: list[WorkerGroup[Any]] = [trainers, *([replicas] if replicas else [])]
        hosts = {one.log_path.stem: one.host for each in groups for one in each.contexts}
        note_nodes(run.dir, run.alarms, hosts)
        for group in groups:
            session.look_for_folders(group, str(run.dir / "config.yaml"), model_path)
        for group in groups:
            group.submit(Worker.ready)  # A process imports at its first call; nobody waits for it.
        yield session


def find_model(config: RunConfig) -> str:
    """The model's folder; raises UserError if it can't be laid out as configured."""
    set_trust(config.policy.trust_remote_code)
    folder = resolve_policy(config)
    refuse_other_models(config)
    check_model_fits(config.policy, len(plan_run(config).policy), folder)
    check_context(config, folder)
    check_rounding(config, folder)
    return str(folder)
