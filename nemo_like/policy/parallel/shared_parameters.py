"""Whole parameters that several ranks hold and see parts of the work of: their gradients add up."""

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from nemo_like.policy.model import LogprobModel
from nemo_like.policy.parallel.full_tensors import local_part
from nemo_like.policy.parallel.mesh import PolicyMesh
from nemo_like.policy.state.loading import tied_names


class SharedParameters:
    """Of one rank: what it shares with tensor-parallel neighbours and with the pipeline's far end.

    ``partial`` are those that see a share of the heads or positions (see tensor_parallel.py).
    """

    def __init__(
        self,
        mesh: PolicyMesh,
        stages: Sequence[LogprobModel],
        parameters: Mapping[str, nn.Parameter],
        partial: Collection[str],
    ) -> None:
        self._mesh, self._parameters = mesh, parameters
        self._tp = mesh.group("tp")
        self._partial = [parameters[name] for name in sorted(partial)]
        self._ends = mesh.first_and_last_stage
        # Embedding on the first stage, head on the last: two copies of one tied parameter.
        ties = tied_names(stages[0]) if self._ends is not None else {}
        tied = [name for name in (*ties, *ties.values()) if name in parameters]
        self._tied = [parameters[name] for name in tied]
        self.counted_elsewhere = frozenset(tied if mesh.coordinate("pp") > 0 else ())
        """Copies that the first stage counts in the gradient norm."""

    def num_parameters(self) -> int:
        """Parameters that train, those of other stages too; collective."""
        mine = sum(
            each.numel()  # of all shards
            for name, each in self._parameters.items()
            if name not in self.counted_elsewhere
        )
        if (pp := self._mesh.group("pp")) is None:
            return mine
        total = torch.tensor(mine, device=next(iter(self._parameters.values())).device)
        dist.all_reduce(total, group=pp)
        return int(total)

    def complete_gradients(self) -> None:
        """Sum the gradients of shared parameters over the ranks that share them; collective."""
        if self._tp is not None:
            _sum_gradients(self._partial, self._tp)
        if self._ends is not None:
            _sum_gradients(self._tied, self._ends)


def _sum_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    for parameter in parameters:
        gradient = parameter.grad
        assert gradient is not None
        dist.all_reduce(local_part(gradient), group=group)
