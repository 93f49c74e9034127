"""The one way to look at this rank's part of a tensor."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """The shard of a DTensor that is here; a plain tensor is full on every rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
