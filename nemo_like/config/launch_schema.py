"""How ``nemo-like slurm`` asks for machines; a run itself reads none of it. See ``schema``."""

from dataclasses import dataclass, field

from nemo_like.config.choices import ContainerRuntime


@dataclass(kw_only=True)
class SlurmConfig:
    """The batch job that ``nemo-like slurm`` writes; the run itself reads none of these keys.

    Nodes and GPUs of the job are ``cluster.num_nodes`` and ``cluster.gpus_per_node``.
    """

    partition: str | None = None
    """Partition to queue in. None: the cluster's default; so too for ``account`` and ``qos``."""
    account: str | None = None
    """Account that is charged."""
    qos: str | None = None
    """Quality of service."""
    time: str | None = None
    """Longest time of the job: minutes, ``hours:minutes:seconds`` or ``days-hours:minutes:seconds``
    (in YAML in quotes). None: the partition's default."""
    cpus_per_node: int | None = None
    """CPUs of each node. None: those of the run's bundles, ``cluster.cpus_per_worker`` each."""
    mem: str | None = None
    """Memory of each node, such as ``64G``; 0: all of it. None: the partition's default."""
    container: str | None = None
    """Image in which Ray and the run start. None: as on the node."""
    container_runtime: ContainerRuntime = ContainerRuntime.pyxis
    """What starts the image: ``pyxis`` (``srun --container-image``) or ``apptainer``."""
    mounts: list[str] = field(default_factory=list)
    """Folders to see in the container, ``outside:inside[:flags]`` each. Files that the run names
    are checked when the job is submitted, so mount them where they are outside."""
    setup: str | None = None
    """Line of bash to run on each node before Ray, such as ``source .venv/bin/activate``."""
    requeue: bool = False
    """Queue the job again before its time is over or after a node failed; it continues from its
    latest checkpoint. Needs ``run.resume``."""
    signal_before_s: int = 120
    """Seconds before the end of its time at which a run gets the signal to stop. Half of them are
    for the step in progress and its checkpoint."""
    log_dir: str = "slurm-logs"
    """Folder, seen by all nodes, of each job's output, ``JOB.out``, Ray's logs, ``JOB/``, and
    script, ``JOB.sbatch``."""
    extra: list[str] = field(default_factory=list)
    """Further options of sbatch, one ``#SBATCH`` line each, such as ``--constraint=h100``."""
