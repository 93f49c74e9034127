"""What the first pass of attention over rows of new sizes costs on a GPU, by kernel.

    python benchmarks/attention.py --out attention.jsonl

Rows are equally long. Each record has the seconds of three passes, forward and backward, with one
kernel after another: what PyTorch takes by itself, cuDNN's and flash attention, and the
variable-length kernel of ``policy/attention.py``. ``default`` runs first and makes cuDNN's plans;
``cudnn`` then finds them.
"""

import argparse
import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from nemo_like.policy.attention import packed_attention, row_index

SHAPES = {
    "smollm2": (9, 3, 64, [(256, 80), (250, 81), (255, 79), (128, 200), (130, 222), (131, 240)]),
    "qwen1.5b": (12, 2, 128, [(28, 560), (29, 561), (27, 559)]),
    "qwen7b": (28, 4, 128, [(5, 1040), (7, 1041), (5, 1043), (4, 4096), (2, 8192)]),
}
"""Heads, key heads, numbers of a head, and sizes: rows and their length."""
KERNELS = {
    "default": nullcontext,
    "cudnn": partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION),
    "flash": partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    for shape, (heads, key_heads, dim, sizes) in SHAPES.items():
        for rows, length in sizes:
            record = {"shape": shape, "rows": rows, "length": length}
            record |= measure(rows, length, heads, key_heads, dim)
            with out.open("a") as file:
                file.write(json.dumps(record) + "\n")


def measure(rows: int, length: int, heads: int, key_heads: int, dim: int) -> dict[str, list[float]]:
    """Seconds of three passes by each kernel."""

    def made(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    shapes = [(each, length, dim) for each in (heads, key_heads, key_heads)]
    q, k, v = (made(rows, *shape) for shape in shapes)
    seconds = {}
    dense = partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    for name, kernel in KERNELS.items():
        seconds[name] = []
        for _ in range(3):
            with kernel():
                seconds[name].append(timed(lambda: dense(q, k, v)))
    q, k, v = (made(1, each, rows * length, dim) for each in (heads, key_heads, key_heads))
    index = row_index(torch.full((rows,), length, device="cuda"))
    index["equal_rows"] = False
    module = torch.nn.Identity()
    seconds["packed"] = [
        timed(lambda: packed_attention(module, q, k, v, None, **index)[0]) for _ in range(3)
    ]
    return seconds


def timed(attention: Callable[[], Tensor]) -> float:
    """Seconds of a pass forward and backward."""
    torch.cuda.synchronize()
    began = perf_counter()
    attention().sum().backward()
    torch.cuda.synchronize()
    return round(perf_counter() - began, 5)


if __name__ == "__main__":
    main()
