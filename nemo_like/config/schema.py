"""Sections of every run. All of the schema is in this file and the others named ``*_schema``: every
key, its type, its default, and what it means.

Defaults live there and nowhere else; the YAML files under ``configs/`` state differences only. The
text below a field is its documentation, collected in ``docs/config.md``.
"""

from dataclasses import dataclass, field

from nemo_like.config.choices import (
    Console,
    WandbMode,
)
from nemo_like.config.launch_schema import SlurmConfig


@dataclass(kw_only=True)
class RunConfig:
    """One execution: where its files go, its seed, and whether it continues."""

    dir: str | None = None
    """Folder of the run's files. None: ``runs/<algorithm>-<date>-<time>``, made new."""
    seed: int = 0
    """Seed of generated rows, their order and the sampling of completions, >= 0."""
    resume: bool = False
    """Continue from the latest complete checkpoint in ``run.dir``; without one, start afresh."""
    stop_grace_s: float = 20.0
    """After SIGTERM, longest time to finish the step in progress and save it, >= 0; what takes
    longer is abandoned, and the latest checkpoint stands. Ending takes up to 8 s more, so that the
    default fits the 30 s after which Kubernetes kills. SIGUSR1 has no such limit."""
    self_check: bool = True
    """On the first steps, stop unless engine and policy agree, ratios are 1 and seeds differ."""


@dataclass(kw_only=True)
class ClusterConfig:
    """The slice of Ray that a run reserves: bundles of one GPU, or of CPUs where there is none."""

    num_nodes: int = 1
    """Different nodes to reserve bundles on."""
    gpus_per_node: int = 0
    """GPUs, and so bundles, of each node. 0: the run uses CPUs."""
    cpu_workers_per_node: int = 1
    """Bundles of each node in a CPU run."""
    cpus_per_worker: float = 1.0
    """CPUs of each bundle; fractions let more workers than cores start."""
    num_generation_workers: int | None = None
    """Bundles set apart for generation. None: colocated, every bundle holds both."""
    network_interface: str | None = None
    """Interface that workers talk over (gloo, NCCL), the same name on every node. None: in a run of
    several nodes the one that has the node's Ray address, unless GLOO_SOCKET_IFNAME or
    NCCL_SOCKET_IFNAME was set there when Ray was started; on one node gloo's and NCCL's choice."""
    start_timeout_s: float = 300.0
    """Longest wait for nodes, workers and engines to start."""
    call_timeout_s: float = 1800.0
    """Longest wait for one phase of one step."""
    save_timeout_s: float = 7200.0
    """Longest wait for a checkpoint or an export to be written, or a checkpoint to be read."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)


@dataclass(kw_only=True)
class CheckpointConfig:
    """What survives the run."""

    every_steps: int = 0
    """Steps between checkpoints; the last step is always saved. 0: not by steps."""
    every_minutes: float = 30.0
    """Minutes after which the step that ends next is saved, counted from the start of the process
    and from each checkpoint on, whatever it was written for. 0: not by time."""
    keep_last: int = 2
    """Latest checkpoints to keep, >= 1."""
    keep_best: bool = True
    """Also keep the checkpoint with the best ``metric``."""
    metric: str | None = None
    """Metric that decides which checkpoint is best. None: ``validation/reward`` where completions
    are sampled, else ``validation/loss``, of which the smallest is best."""
    smaller_is_better: bool = False
    """Whether the smallest value of ``metric`` is the best one."""
    export: bool = True
    """Write the final weights, in ``policy.dtype``, and the tokenizer as a Hugging Face folder,
    ``<run.dir>/final`` (of adapters merged, and apart in its ``adapter/``; PPO's critic beside it
    in ``final_critic``)."""


@dataclass(kw_only=True)
class HeldOutConfig:
    """Measuring the loss on held-out rows."""

    every_steps: int = 20
    """Steps between validations; one is made before the first and after the last step. 0: never."""


@dataclass(kw_only=True)
class LoggingConfig:
    """Where numbers go; ``metrics.jsonl`` and ``run.log`` are always written."""

    console: Console = Console.auto
    """``live``: a table updated in place; ``plain``: one line a step; ``auto``: by terminal."""
    tensorboard: bool = True
    """Write TensorBoard event files."""
    wandb: WandbMode = WandbMode.off
    """Weights & Biases: ``off``, ``offline`` or ``online``."""
    wandb_project: str = "nemo-like"
    """Project name in Weights & Biases."""
    trajectories_per_step: int = 4
    """Trajectories of the first generation replica written to ``trajectories.jsonl`` each step."""
