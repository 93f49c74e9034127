"""What a decoding step reads and writes on the device."""

import math

import numpy as np
import torch
from torch import Tensor

from nemo_like.planning.model_shape import ModelShape

PAGE = 64
"""Positions of a page of the cache. Attention reads 32 or 64 at a time."""
BURST = 16
"""Steps between two looks from the host."""
INTS = ("token", "position", "last", "slot", "seed", "top_k")
FLOATS = ("temperature", "top_p")


class State:
    """Row i of a step is entry i of each vector; a row's cache is found by its slot.

    Page 0 and the last slot belong to rows that only fill a batch up.
    """

    token: Tensor
    """The last token of each row: input of the next step."""
    position: Tensor
    """That token's."""
    last: Tensor
    """Where a row stands still, once all of its tokens are drawn."""
    slot: Tensor
    seed: Tensor
    top_k: Tensor
    temperature: Tensor
    top_p: Tensor

    def __init__(
        self,
        shape: ModelShape,
        angles: tuple[Tensor, Tensor],
        num_rows: int,
        num_pages: int,
        dtype: torch.dtype,
    ) -> None:
        self.cos, self.sin = angles
        device = self.cos.device
        self.ints = torch.zeros(len(INTS), num_rows, dtype=torch.int32, device=device)
        self.floats = torch.zeros(len(FLOATS), num_rows, device=device)
        vars(self).update(zip(INTS, self.ints, strict=True))
        vars(self).update(zip(FLOATS, self.floats, strict=True))
        pages = -(-len(self.cos) // PAGE)
        self.table = torch.zeros(num_rows + 1, pages, dtype=torch.int32, device=device)
        """Pages of each slot, in order."""
        size = (shape.layers, num_pages, shape.kv_heads, PAGE, shape.head_dim)
        self.keys, self.values = (_zeros(size, dtype, device) for _ in range(2))
        self.step = torch.zeros(1, dtype=torch.int32, device=device)
        """Steps of this burst so far."""
        self.tokens = torch.zeros(BURST, num_rows, dtype=torch.int32, device=device)
        self.logprobs = torch.zeros(BURST, num_rows, device=device)
        """What each step of the burst drew."""


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a host they are numpy's, which take memory as they are written."""
    if device.type == "cuda":
        return torch.zeros(size, dtype=dtype, device=device)
    numbers = np.zeros(math.prod(size) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(numbers).view(dtype).view(size)
