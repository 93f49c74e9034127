"""Sections of every run, the tree that holds them, and what an algorithm registers.

All of the schema is in this folder, algorithms' own sections in ``algorithms/*/config.py``: every
key, its type, default, range and meaning. YAML files under ``configs/`` state differences only.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field

from nemo_like.config.policy import PolicyConfig
from nemo_like.config.section import Count, OnlyIf, Positive, Section
from nemo_like.config.slurm import SlurmConfig
from nemo_like.doors import Door, import_path

SINKS = Door(
    "nemo_like.sinks",
    {
        "tensorboard": "nemo_like.observe.sinks:TensorBoardSink",
        "wandb": "nemo_like.observe.wandb_sink:WandbSink",
        "mlflow": "nemo_like.observe.trackers:Mlflow",
        "trackio": "nemo_like.observe.trackers:Trackio",
        "prometheus": "nemo_like.observe.trackers:Prometheus",
    },
)
CALLBACKS = Door(
    "nemo_like.callbacks",
    {
        "early_stopping": "nemo_like.run.early_stopping.EarlyStopping",
        "push_to_hub": "nemo_like.run.push_to_hub.PushToHub",
    },
    kind="class",
)


class RunSection(Section):
    """One execution: its folder, its seed, and whether it continues."""

    dir: str | None = None
    """Folder of the run's files. None: ``runs/<algorithm>-<date>-<time>``, made new."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of generated rows, their order and the sampling of completions."""
    resume: bool = False
    """Continue from the latest complete checkpoint in ``run.dir``; without one, start afresh."""
    stop_grace_s: Annotated[float, Field(ge=0)] = 20.0
    """Longest time, after SIGTERM, to finish the step in progress and save it. A longer step is
    abandoned, and the latest checkpoint stands. Ending takes up to 8 s more: the default fits the
    30 s after which Kubernetes kills. SIGUSR1 has no such limit (``cluster.slurm.requeue``)."""
    callbacks: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Objects that the run calls at its start, after steps and validations, and at its end; they
    may stop it. ``{name: {callback: ..., key: value}}``, where a callback is ``early_stopping``
    (``patience``, ``metric``, ``min_delta``), ``push_to_hub`` (``repo``, ``private``),
    ``file.py:Class`` or ``package.module.Class`` (``nemo_like/run/callbacks.py``), and the other
    keys are its arguments."""

    def rules(self, here: str, run: Any) -> Iterator[str]:
        for name, part in self.callbacks.items():
            key = f"{here}.callbacks.{name}.callback"
            if not isinstance(spec := part.get("callback"), str):
                known = ", ".join(CALLBACKS.names)
                yield f"{key} must name a class: {known} or file.py:Class."
            elif refusal := CALLBACKS.refusal(key, spec):
                yield refusal


class ClusterConfig(Section):
    """The slice of Ray that a run reserves: bundles of one GPU, or of CPUs where there is none."""

    num_nodes: Count = 1
    """Different nodes to reserve bundles on."""
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    """GPUs, and so bundles, of each node. 0: the run uses CPUs."""
    cpu_workers_per_node: Annotated[
        Count,
        OnlyIf(
            lambda here, _: here.gpus_per_node == 0,
            "cluster.gpus_per_node decides the workers of a GPU run",
        ),
    ] = 1
    """Bundles of each node in a CPU run."""
    cpus_per_worker: Positive = 1.0
    """CPUs of each bundle; fractions let more workers than cores start."""
    num_generation_workers: int | None = None
    """Bundles set apart for generation. None: colocated, every bundle holds both."""
    mps: Annotated[
        bool,
        OnlyIf(
            lambda here, run: here.takes_turns(run) or here.packs_engines(run),
            "no processes of this run compute on one GPU at the same time; with "
            "cluster.gpus_per_node engine and policy do under rollout.max_lag=1, without "
            "cluster.num_generation_workers, and engines under generation.num_engines_per_bundle=2",
        ),
    ] = False
    """Start NVIDIA's MPS with a Ray of the run's own, or of its Slurm job: engine and policy on one
    GPU, or several engines, then compute at the same time instead of taking turns."""
    network_interface: str | None = None
    """Interface that workers talk over (gloo, NCCL), the same name on every node. None: on several
    nodes the one that has the node's Ray address, unless GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME
    was set when Ray was started; on one node the choice of gloo and NCCL."""
    start_timeout_s: Positive = 300.0
    """Longest wait for nodes, workers and engines to start."""
    call_timeout_s: Positive = 1800.0
    """Longest wait for one phase of one step; four times as long for a checkpoint or an export to
    be written, or a checkpoint to be read."""
    slurm: SlurmConfig = SlurmConfig()

    def takes_turns(self, run: Any) -> bool:
        """Whether engine and policy share GPUs and have work at the same time."""
        shares = self.gpus_per_node > 0 and self.num_generation_workers is None
        return shares and run.samples and run.overlaps and run.generation.backend != "replay"

    def packs_engines(self, run: Any) -> bool:
        """Whether several engines share each GPU."""
        return self.gpus_per_node > 0 and run.samples and run.generation.num_engines_per_bundle > 1


class CheckpointConfig(Section):
    """What survives the run."""

    every_steps: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints; the last step is always saved. 0: not by steps."""
    every_minutes: Annotated[float, Field(ge=0)] = 30.0
    """Minutes from the start of the process, and from each checkpoint, after which the step that
    ends next is saved. 0: not by time."""
    keep_last: Count = 2
    """Latest checkpoints to keep."""
    metric: str | None = None
    """Metric with the largest value in the best checkpoint (the smallest, if its name ends in
    ``loss``), which is kept too. None: ``validation/reward`` where completions are sampled, else
    ``validation/loss``."""
    export: bool = True
    """Write the final weights, in ``policy.dtype``, and the tokenizer as a Hugging Face folder,
    ``<run.dir>/final`` (adapters merged, and also by themselves in its ``adapter/``; PPO's critic
    in ``final_critic``)."""

    def rules(self, here: str, run: Any) -> Iterator[str]:
        """The metric must be one that this kind of run measures."""
        areas, example = list(run.metric_areas), "train/loss"
        if run.validates:
            areas.insert(0, "validation/")
            example = "validation/reward" if run.samples else "validation/loss"
        if self.metric is not None and not self.metric.startswith(tuple(areas)):
            yield (
                f"{here}.metric={self.metric} is not a metric of this run; it must start with one "
                f"of {', '.join(areas)} (for example {example})."
            )


class LoggingConfig(Section):
    """Where numbers go; ``metrics.jsonl`` and ``run.log`` are always written."""

    sinks: Annotated[list[str], SINKS] = Field(default_factory=lambda: ["tensorboard"])
    """Sinks besides ``metrics.jsonl``: ``tensorboard``, ``wandb`` (Weights & Biases, which reads
    WANDB_MODE and WANDB_PROJECT), ``mlflow``, ``trackio``, ``prometheus`` (on 127.0.0.1:9464, or
    any free port if that is taken), or your own ``file.py:NAME`` or ``package.module.NAME``, which
    is called with the run's folder, its configuration and the last step before a resume (None: a
    new run), and returns a ``MetricSink`` (``nemo_like/observe/sinks.py``)."""
    trajectories_gib: Annotated[float, Field(ge=0)] = 4.0
    """Size limit in GiB of ``trajectories/``, which keeps all trajectories with their tokens as
    Parquet files; beyond it the oldest are dropped. 0: keep none."""


class RunConfig(Section):
    """Sections of every run. An algorithm subclasses it and adds its own."""

    section: ClassVar[str]
    """The algorithm's own section."""
    samples: ClassVar[bool] = False
    """Whether the run samples completions, and so has engines."""
    evaluates: ClassVar[bool] = False
    """Whether the run only measures a model, which may be a checkpoint."""
    unused: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Keys and sections that do nothing in runs of this algorithm, and why."""

    run: RunSection = RunSection()
    policy: PolicyConfig = PolicyConfig()
    cluster: ClusterConfig = ClusterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def max_steps(self) -> int | None:
        """Steps of the whole run; None: as many as the data has."""
        raise NotImplementedError

    @property
    def max_updates(self) -> int | None:
        """Optimizer steps of the policy in all of them."""
        return self.max_steps

    @property
    def rows_per_step(self) -> int:
        """Rows that one step trains on."""
        raise NotImplementedError

    @property
    def keeps_reference(self) -> bool:
        """Whether a frozen copy of the model is kept."""
        return False

    @property
    def keeps_probabilities(self) -> bool:
        """Whether backward passes hold probabilities of the vocabulary as well as logits."""
        return False

    @property
    def metric_areas(self) -> tuple[str, ...]:
        """Beginnings of the names of metrics that each step measures."""
        return ("train/",)

    @property
    def scalar_heads(self) -> bool:
        """Whether a model with a scalar head trains."""
        return False

    @property
    def validates(self) -> bool:
        """Whether the run measures held-out rows at all."""
        raise NotImplementedError

    def other_models(self) -> Iterator[tuple[str, str]]:
        """Keys and names of models that work with the policy."""
        yield from ()

    def last_update(self, num_updates: int) -> str:
        """Where a schedule of ``num_updates`` optimizer steps ends, in the user's terms."""
        key = f"{self.section}.max_steps"
        if self.max_steps in (None, num_updates):
            return f"{key}={num_updates}"
        return f"{num_updates}, the optimizer steps that {key}={self.max_steps} come to"


NEEDS_VALIDATION_ROWS = OnlyIf(
    lambda here, run: here.every_steps == 0 or run.data.has_validation_rows,
    "there are no validation rows; set data.validation",
)

Loop = Callable[[Any, Any], None]
"""``run(config, session)``: from a run's processes to a trained model in ``run.dir``."""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One algorithm; see ``docs/extending.md`` for adding one from another package."""

    name: str
    """Command (``nemo-like NAME``), and name of its configuration."""
    config: type[RunConfig]
    """Class of its configuration."""
    run: str | Loop
    """A ``Loop``, or ``module:function``, imported only when a run starts: a command line needs no
    torch."""

    def loop(self) -> Loop:
        """``run``, imported."""
        return import_path(self.run) if isinstance(self.run, str) else self.run
