"""Section ``cluster.slurm``; ``slurm_rules.py`` checks it."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from nemo_like.config.section import OnlyIf, Section

_CONTAINER = OnlyIf(lambda here, _: here.container is not None, "{here}.container names no image")


class SlurmConfig(Section):
    """The batch job that ``nemo-like slurm`` writes; the run itself reads none of these keys.

    Nodes and GPUs of the job are ``cluster.num_nodes`` and ``cluster.gpus_per_node``. Each job's
    output (``JOB.out``), Ray's logs (``JOB/``) and script (``JOB.sbatch``) are in ``slurm-logs`` of
    the folder from which it is submitted, which all nodes must see.
    """

    time: str | None = None
    """Time limit of the job: minutes, ``hours:minutes:seconds`` or ``days-hours:minutes:seconds``
    (quoted in YAML). None: the partition's default."""
    container: str | None = None
    """Image in which Ray and the run start, ``*.sif`` by apptainer, others by pyxis (``srun
    --container-image``). None: no container."""
    mounts: Annotated[list[str], _CONTAINER] = Field(default_factory=list)
    """Folders to see in the container, ``outside:inside[:flags]`` each. Files that the run names
    are checked when the job is submitted, so mount them under the same path."""
    setup: str | None = None
    """Line of bash to run on each node before Ray, such as ``source .venv/bin/activate``."""
    requeue: bool = False
    """Queue the job again when its time is nearly over or a node failed; it continues from its
    latest checkpoint. Needs ``run.resume``. The run gets the signal to stop twice
    ``run.stop_grace_s`` before the end, but at least 120 s, of which half are for the step in
    progress and its checkpoint."""
    extra: list[str] = Field(default_factory=list)
    """Further options of sbatch, one ``#SBATCH`` line each: ``--partition=gpu`` and
    ``--account=lab`` (or set SBATCH_PARTITION and SBATCH_ACCOUNT), ``--mem=64G``, or
    ``--cpus-per-task=96`` for more CPUs of each node than the run's bundles reserve
    (``cluster.cpus_per_worker`` each)."""

    def rules(self, here: str, run: Any) -> Iterator[str]:
        if self != SlurmConfig():
            from nemo_like.config.slurm_rules import broken

            yield from broken(self, here, run)
