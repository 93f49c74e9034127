"""The one authority on which rank stands where: a device mesh, and the groups cut from it."""

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nemo_like.config.policy import PolicyConfig
from nemo_like.planning.layout import ParallelSizes, parallel_sizes


class PolicyMesh:
    """Ranks as a grid ``pp x replicate x shard x cp x tp``, the last fastest; collective to make.

    It is seen in two ways. For parameters, ``shard`` and ``cp`` are one axis, ``fsdp``: a
    context-parallel rank sees other tokens, so its gradients add up like those of a data-parallel
    one. For rows, ``replicate`` and ``shard`` are one axis, ``dp``.
    """

    def __init__(self, config: PolicyConfig, device_type: str) -> None:
        world_size = dist.get_world_size()
        sizes = parallel_sizes(config, world_size)
        self.sizes: ParallelSizes = sizes
        self.parallel = config.parallel
        self.ddp = self.parallel.data_parallel == "ddp"
        self.rank = dist.get_rank()
        self._parameters = init_device_mesh(
            device_type,
            (sizes.pp, sizes.replicate, sizes.shard * sizes.cp, sizes.tp),
            mesh_dim_names=("pp", "replicate", "fsdp", "tp"),
        )
        self._rows = init_device_mesh(
            device_type,
            (sizes.pp, sizes.dp, sizes.cp, sizes.tp),
            mesh_dim_names=("pp", "dp", "cp", "tp"),
        )
        self.first_and_last_stage = self._join_ends()
        """This rank and its counterpart at the other end of the pipeline; None on other stages."""

    @property
    def fsdp(self) -> DeviceMesh:
        """What parameters are sharded over, preceded by what they are copied over."""
        if self.sizes.replicate > 1:
            return self._parameters["replicate", "fsdp"]
        return self._parameters["fsdp"]

    @property
    def drifts(self) -> bool:
        """Whether replicas differ between two averages (local SGD)."""
        return self.ddp and self.parallel.ddp.average_every_steps > 1

    @property
    def tp(self) -> DeviceMesh | None:
        return self._parameters["tp"] if self.sizes.tp > 1 else None

    @property
    def sequence_multiple(self) -> int:
        """What the positions of a forward pass must divide by."""
        return self.sizes.cp * (self.sizes.tp if self.parallel.sequence_parallel else 1)

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Ranks that differ along ``axis`` only; None if this rank is alone there."""
        mesh = self._mesh_of(axis)[axis]
        if mesh.size() == 1:
            return None
        return mesh.get_group()

    def coordinate(self, axis: str) -> int:
        return self._mesh_of(axis)[axis].get_local_rank()

    def _mesh_of(self, axis: str) -> DeviceMesh:
        return self._rows if axis in ("dp", "cp") else self._parameters

    def _join_ends(self) -> dist.ProcessGroup | None:
        mine = None
        if self.sizes.pp > 1:
            for line in self._parameters.mesh.flatten(1).T.tolist():
                # Every rank makes every group, in one order: that is how torch makes groups.
                group: Any = dist.new_group([line[0], line[-1]])
                if self.rank in (line[0], line[-1]):
                    mine = group
        return mine

    @property
    def is_output_rank(self) -> bool:
        """Whether the driver reads this rank's results: the last stage has the loss."""
        last_stage = self.coordinate("pp") == self.sizes.pp - 1
        return last_stage and self.coordinate("cp") == 0 and self.coordinate("tp") == 0
