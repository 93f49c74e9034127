"""The invariance matrix of tests/test_invariance.py on GPUs with NCCL, as numbers.

    python benchmarks/invariance.py --gpus 4 --out invariance.jsonl

For each layout that fits, in float32 and in bfloat16: the largest difference of losses, gradient
norms, logprobs and parameters after three steps from one GPU that takes one padded row at a time.
"""

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.conftest import build_model
from tests.layouts import FOUR_LAYERS, LAYOUTS
from tests.process_pool import ProcessPool
from tests.three_steps import Outcome, merged

TARGET = "tests.three_steps:three_steps"
FLOAT32_LIMIT = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--out", type=Path, default=Path("invariance.jsonl"))
    args = parser.parse_args()
    pool = ProcessPool(args.gpus, "cpu:gloo,cuda:nccl")
    worst = 0.0
    try:
        for record in records(pool, args.gpus):
            sys.stdout.write(json.dumps(record) + "\n")
            sys.stdout.flush()
            with args.out.open("a") as file:
                file.write(json.dumps(record) + "\n")
            if record["dtype"] == "float32":
                worst = max(worst, record["largest"])
    finally:
        pool.close()
    sys.stdout.write(f"largest difference in float32: {worst:.2e} (limit {FLOAT32_LIMIT:g})\n")
    sys.exit(worst > FLOAT32_LIMIT)


def records(pool: ProcessPool, gpus: int) -> Any:
    """One record a case."""
    folder = Path(tempfile.mkdtemp())
    baselines: dict[tuple[Any, ...], Outcome] = {}
    for dtype in "float32", "bfloat16":
        for name, changes, loss, architecture, tied in cases(gpus, dtype):
            ranks, parallel = LAYOUTS[name]
            model = folder / f"{architecture}-{tied}"
            if not model.exists():
                build_model(model, architecture, tied, **FOUR_LAYERS)

            def outcome(ranks: int, config: dict[str, Any], path: str, loss: str) -> Outcome:
                return merged(pool.run(ranks, TARGET, path, config, loss, "cuda", timeout_s=60.0))

            key = (dtype, loss, architecture, tied)
            record = {
                "layout": name,
                "ranks": ranks,
                "dtype": dtype,
                "loss_kind": loss,
                "model": f"{architecture}{'-tied' if tied else ''}",
                "changes": {k: str(v) for k, v in changes.items()},
                "torch": torch.__version__,
                "gpu": torch.cuda.get_device_name(),
            }
            try:
                if key not in baselines:
                    rows = 2 if loss == "preference" else 1
                    plain = {"batching": "padded", "micro_batch_size": rows, "dtype": dtype}
                    baselines[key] = outcome(1, plain, str(model), loss)
                config = {"parallel": parallel, "micro_batch_tokens": 64, "dtype": dtype, **changes}
                gaps = differences(outcome(ranks, config, str(model), loss), baselines[key])
            except AssertionError as error:
                yield record | {"error": str(error)[-1500:], "largest": math.inf}
                continue
            yield record | gaps | {"largest": max(gaps.values())}


def cases(gpus: int, dtype: str) -> Any:
    """Layout, changes, loss, architecture, tied."""
    names = [name for name, (ranks, _) in LAYOUTS.items() if ranks <= gpus]
    padded = {"batching": "padded", "micro_batch_size": 1}
    recomputed = {"activation_checkpointing": "full", "logprob_chunk_tokens": 5}
    kinds: list[tuple[dict[str, Any], str, str, bool]] = [
        ({}, "policy_gradient", "llama", False),
        ({}, "sft", "llama", False),
        ({}, "preference", "llama", False),
        ({}, "policy_gradient", "qwen2", True),
        ({}, "policy_gradient", "qwen3", True),
        (recomputed, "policy_gradient", "llama", False),
        (padded, "policy_gradient", "llama", False),
    ]
    for changes, loss, architecture, tied in kinds if dtype == "float32" else kinds[:1]:
        for name in names:
            if not (changes is padded and "cp" in name):
                yield name, changes, loss, architecture, tied


def differences(actual: Outcome, expected: Outcome) -> dict[str, float]:
    gaps = {
        name: max(abs(a - b) for a, b in zip(actual.numbers[name], numbers, strict=True))
        for name, numbers in expected.numbers.items()
    }
    for name, mine, theirs in (
        ("logprobs", actual.logprobs, expected.logprobs),
        ("parameters", actual.parameters, expected.parameters),
    ):
        assert mine.keys() == theirs.keys()
        gaps[name] = max((mine[key] - theirs[key]).abs().max().item() for key in theirs)  # pyright: ignore
    return gaps


if __name__ == "__main__":
    main()
