"""The output head: its weights, what a model does to its logits, and products in chunks.

Legend: ``H`` hidden width, ``V`` rows of this rank's slice of the vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Head:
    """An output head: logits = cap(scale * (hidden @ weight.T + bias))."""

    weight: Tensor
    """[V, H], local."""
    bias: Tensor | None = None
    scale: float = 1.0
    """What the architecture multiplies logits by (Cohere; 1 / divisor for Granite)."""
    softcap: float | None = None
    """tanh(logits / softcap) * softcap (Gemma 2)."""
    float32: bool = False
    """Multiply in float32, in the backward pass too."""
    first_token_id: int = 0
    group: dist.ProcessGroup | None = None
    """Ranks that hold the other slices, of any sizes above 0. None: ``weight`` is all."""
    widest: int | None = None
    """Rows of the largest slice. None: all have as many."""

    def below(self, end: int) -> "Head":
        """The head over the ids below ``end`` alone, of which every rank must have one.

        Its distributions are this one's with the other logits at -infinity, exactly.
        """
        rows = min(end - self.first_token_id, len(self.weight))
        assert rows > 0, (end, self.first_token_id)
        bias = None if self.bias is None else self.bias[:rows]
        return replace(self, weight=self.weight[:rows], bias=bias, widest=len(self.weight))


@dataclass(frozen=True)
class Transform:
    """From the product x of hidden states and weight (and bias) to logits / temperature:

    z = rate * x, or limit * tanh(rate * x / limit).
    """

    rate: float
    limit: float | None

    def apply_(self, products: Tensor, bias: Tensor | None) -> Tensor:
        """In place, but for compiled code, where the copy is fused with what follows."""
        if torch.compiler.is_compiling():
            products = products.clone()
        if bias is not None:
            products.add_(bias)
        if self.limit is not None:
            return products.mul_(self.rate / self.limit).tanh_().mul_(self.limit)
        return products if self.rate == 1 else products.mul_(self.rate)

    def bend_(self, logits: Tensor) -> Tensor:
        """In place: the slope where the transform gave ``logits``, as a share of ``rate``."""
        if self.limit is None:
            return logits.fill_(1)
        return logits.square_().mul_(-1 / self.limit**2).add_(1)


@dataclass(frozen=True, kw_only=True)
class HeadCall:
    """A head's settings without its tensors, which reach a backward pass through autograd only."""

    transform: Transform
    float32: bool
    first_token_id: int
    group: dist.ProcessGroup | None
    chunk_tokens: int
    with_entropy: bool = False
    entropy_trains: bool = False
    compile: bool = False

    @classmethod
    def of(cls, head: Head, temperature: float, chunk_tokens: int, **options: bool) -> "HeadCall":
        limit = None if head.softcap is None else head.softcap / temperature
        return cls(
            transform=Transform(rate=head.scale / temperature, limit=limit),
            float32=head.float32,
            first_token_id=head.first_token_id,
            group=head.group,
            chunk_tokens=chunk_tokens,
            **options,
        )

    def chunks(self, num_tokens: int) -> Iterator[slice]:
        for start in range(0, num_tokens, self.chunk_tokens):
            yield slice(start, start + self.chunk_tokens)

    def factor_dtype(self, hidden: Tensor, weight: Tensor) -> torch.dtype:
        """What the head's factors are cast to.

        Only a GPU has 16-bit products with a float32 result; elsewhere the logits would be rounded.
        """
        half = hidden.is_cuda and hidden.dtype == weight.dtype and hidden.dtype in _HALF
        return hidden.dtype if half and not self.float32 else torch.float32

    def own_rows(self, token_ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor | None]:
        """The row of ``weight`` of each token, and which tokens have one here (None: all).

        Without a group nothing is clamped, so that an id out of range is an error of the gather.
        """
        rows = token_ids - self.first_token_id
        if self.group is None:
            return rows, None
        return rows.clamp(0, num_rows - 1), (rows >= 0) & (rows < num_rows)

    def gradients(
        self,
        ctx: Any,
        inputs: tuple[Tensor, Tensor, Tensor | None],
        of_products: Callable[[slice, Tensor], Tensor],
    ) -> tuple[Tensor | None, ...]:
        """Gradients by ``inputs`` (hidden states, weight, bias), as far as ``ctx`` wants them.

        ``of_products``: a chunk's rows and float32 product [C, V], which it may overwrite, to the
        gradient by that product in the dtype of the factors. Sums over chunks are float32.
        """
        hidden, weight, _ = inputs
        dtype = self.factor_dtype(hidden, weight)
        factor = weight.to(dtype)
        d_hidden, d_weight, d_bias = totals = [
            torch.zeros_like(x, dtype=torch.float32) if x is not None and wanted else None
            for x, wanted in zip(inputs, ctx.needs_input_grad, strict=False)
        ]
        for rows in self.chunks(len(hidden)):
            chunk = hidden[rows].to(dtype)
            d_products = of_products(rows, multiply(chunk, factor.t()))
            if d_hidden is not None:
                d_hidden[rows] = multiply(d_products, factor)
            if d_weight is not None:
                add_product_(d_weight, d_products.t(), chunk)
            if d_bias is not None:
                d_bias += d_products.sum(0, dtype=torch.float32)
            del d_products  # before the next chunk's product exists
        if d_hidden is not None and self.group is not None:
            dist.all_reduce(d_hidden, group=self.group)
        return tuple(totals)  # which autograd casts to the inputs' dtypes


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32."""
    return a @ b if a.dtype == torch.float32 else torch.mm(a, b, out_dtype=torch.float32)


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b without a second tensor of that size."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
