"""The steps of ``triton_ops`` in plain torch: for the CPU, and for tests to compare with.

Shapes: N rows of a batch, H query heads, K key heads, D numbers of a head, V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn import functional

from nemo_like.generation.graph.fp8 import Product, Rounded, rounded
from nemo_like.generation.graph.state import PAGE, State

_MASK = 2**32 - 1


def multiply(x: Rounded, weight: Rounded) -> Product:
    """The product of x [N, E] and ``weight`` [O, E], summed in float32."""
    numbers = x.numbers.float() @ weight.numbers.float().t()
    return Product(numbers, x.scale, weight.scale)


def add_norm(
    x: Tensor | Product | None,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    rounds: bool = False,
) -> Tensor | Rounded:
    """Add ``x`` to ``residual`` in place; returns its RMS norm, in 8 bits if it ``rounds``."""
    if x is not None:
        residual += x.whole() if isinstance(x, Product) else x
    wide = residual.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = normed.to(residual.dtype) * weight
    return rounded(normed) if rounds else normed


def silu_mul(gate_up: Tensor | Product) -> Tensor | Rounded:
    """SiLU of the first half times the second, [N, 2 I] -> [N, I]; of a ``Product`` in 8 bits."""
    if isinstance(gate_up, Product):
        gate, up = gate_up.whole().chunk(2, -1)
        return rounded(functional.silu(gate) * up)
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [..., D] by tables that broadcast to [..., D / 2]."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def attend(qkv: Tensor, layer: int, state: State) -> Tensor:
    """Put each row's new key and value into the cache and attend to all of its sequence.

    ``qkv`` [N, (H + 2 K) D], before rotation -> [N, H D].
    """
    keys, values = state.keys[layer], state.values[layer]
    num_rows, num_keys, dim = len(qkv), keys.shape[1], keys.shape[3]
    position = state.position[:num_rows].long()
    pages = state.table[state.slot[:num_rows].long()].long()
    q, k, v = qkv.view(num_rows, -1, dim).tensor_split([-2 * num_keys, -num_keys], 1)
    angles = state.cos[position][:, None], state.sin[position][:, None]
    page, offset = pages.gather(1, position[:, None] // PAGE)[:, 0], position % PAGE
    keys[page, :, offset] = rotate(k, *angles)
    values[page, :, offset] = v
    pages = pages[:, : int(position.max()) // PAGE + 1]
    k, v = (each[pages].transpose(1, 2).flatten(2, 3) for each in (keys, values))
    seen = torch.arange(k.shape[2], device=qkv.device) <= position[:, None]
    # Pages keep numbers of rows before, and a mask of zero leaves their NaNs.
    k, v = (each.masked_fill(~seen[:, None, :, None], 0) for each in (k, v))
    q = rotate(q, *angles)[:, :, None]
    mask = seen[:, None, None]
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out.reshape(num_rows, -1)


def sample(logits: Tensor, state: State) -> None:
    """Draw a token of each row of float32 logits [N, V], note it, and advance the row.

    A row is drawn by its own seed and position, so its batch makes no difference.
    """
    num_rows = len(logits)
    temperature = state.temperature[:num_rows, None]
    greedy = temperature == 0
    logits = logits / torch.where(greedy, 1.0, temperature)
    drawn = logits - _log_exponential(state.seed[:num_rows], state.position[:num_rows], logits)
    token = torch.where(greedy, logits, drawn).argmax(-1, keepdim=True)
    step = int(state.step)
    state.logprobs[step, :num_rows] = logits.log_softmax(-1).gather(1, token)[:, 0]
    state.tokens[step, :num_rows] = state.token[:num_rows] = token[:, 0].int()
    last = state.last[:num_rows]
    state.position[:num_rows] = torch.minimum(state.position[:num_rows] + 1, last)


def _log_exponential(seed: Tensor, position: Tensor, logits: Tensor) -> Tensor:
    """Logs [N, V] of exponential variables: the argmin of one over its share is a fair draw."""
    key = _mixed((_mixed(seed.long() & _MASK) + position.long()) & _MASK)
    ids = torch.arange(logits.shape[1], device=logits.device) * 0x9E3779B9 & _MASK
    uniform = (_mixed(key[:, None] ^ ids).float() + 0.5) * 2.0**-32
    return torch.log(-torch.log1p(-uniform))


def _mixed(x: Tensor) -> Tensor:
    """A bijection of 32 bits that looks random (lowbias32 of C. Wellons)."""
    x = (x ^ x >> 16) * 0x7FEB352D & _MASK
    x = (x ^ x >> 15) * 0x846CA68B & _MASK
    return x ^ x >> 16
