"""Seconds of AdamW's step on layers of a 7B shape: torch's, and with moments by format and place.

    python benchmarks/offload.py --layers 14 --out offload.jsonl

One GPU. Each variant takes three steps on the same parameters and gradients; parameters must then
be those of torch's own AdamW (float32), or of the same format on the other side, bit by bit.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from workloads import SHAPES

from nemo_like.config.optimizer import Moments
from nemo_like.policy.moments.flat_adamw import FlatAdamW
from nemo_like.policy.optim import ShardwiseAdamW

SHAPE = SHAPES["qwen2.5-7b"]
OPTIONS = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "fused": True}
NUM_STEPS = 3
DEVICE = torch.device("cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--out", type=Path, required=True, help="a .jsonl file to append to")
    args = parser.parse_args()
    shapes = parameter_shapes(args.layers)
    record: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "parameters": sum(torch.Size(shape).numel() for shape in shapes),
    }
    record["torch_adamw"], whole = measured(
        shapes, lambda groups: ShardwiseAdamW(groups, **OPTIONS)
    )
    for moments in get_args(Moments):
        expected = whole if moments == "float32" else None
        for on_host in (False, True):

            def flat(groups: Any, kind: Moments = moments, host: bool = on_host) -> Optimizer:
                optimizer = FlatAdamW(groups, moments=kind, on_host=host, **OPTIONS)
                optimizer.settle()  # what it takes to make and lock the pages
                return optimizer

            numbers, found = measured(shapes, flat)
            if expected is not None:
                pairs = zip(found, expected, strict=True)
                numbers["equal"] = all(torch.equal(one, other) for one, other in pairs)
            record[f"{moments}_{'host' if on_host else 'gpu'}"] = numbers
            expected = found
    with args.out.open("a") as file:
        file.write(json.dumps(record) + "\n")


def parameter_shapes(layers: int) -> list[tuple[int, ...]]:
    """Of so many layers, embedding, final norm and head."""
    width, inner = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    keys = width // SHAPE["num_attention_heads"] * SHAPE["num_key_value_heads"]
    query, key = [(width, width), (width,)], [(keys, width), (keys,)]
    mlp = [(inner, width), (inner, width), (width, inner)]
    layer = [*query, *key, *key, (width, width), *mlp, (width,), (width,)]
    return [*layer * layers, *[(SHAPE["vocab_size"], width)] * 2, (width,)]


def measured(
    shapes: list[tuple[int, ...]], make: Callable[[Any], Optimizer]
) -> tuple[dict[str, Any], list[Tensor]]:
    """Seconds to make the optimizer and of each step, and the parameters after the last."""
    torch.manual_seed(0)
    parameters = [Parameter(torch.randn(shape, device=DEVICE) * 0.02) for shape in shapes]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    begin = time.perf_counter()
    optimizer = make(groups)
    made_s = time.perf_counter() - begin
    seconds = []
    for step in range(NUM_STEPS):
        generator = torch.Generator(DEVICE).manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter).normal_(std=1e-3, generator=generator)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        optimizer.step()
        torch.cuda.synchronize()  # until all moments are back
        seconds.append(round(time.perf_counter() - begin, 3))
    found = [parameter.detach().cpu() for parameter in parameters]
    torch.cuda.empty_cache()
    return {"made_s": round(made_s, 2), "step_s": seconds}, found


if __name__ == "__main__":
    main()
