"""How long a refit takes, and how many bytes a second it moves, between real policy and engines.

    python benchmarks/refit.py --shape qwen2.5-1.5b --out refit.jsonl cluster.gpus_per_node=1
    python benchmarks/refit.py --shape qwen2.5-7b --out refit.jsonl cluster.gpus_per_node=4 \\
        cluster.num_generation_workers=2 generation.tensor_parallel_size=2

Starts everything that a GRPO run starts, with random weights, and repeats the refit. A time is that
from the driver's call to the moment when engines may sample: gathering, casting, sending, loading,
resetting caches and, where engines sleep, waking them.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from workloads import SHAPES, random_model, set_environment

from nemo_like.algorithms.sampling import start_sampling
from nemo_like.algorithms.session import opened
from nemo_like.compose.load import compose_config
from nemo_like.observe.metrics import values

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--work", type=Path, default=Path("runs/benchmarks"))
    parser.add_argument("--out", type=Path, required=True, help="a .jsonl file to append to")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    set_environment()
    model = args.work.resolve() / args.shape
    random_model(args.shape, model)
    record = measure(model, args.times, args.overrides)
    record |= {"shape": args.shape, "overrides": args.overrides}
    with args.out.open("a") as file:
        file.write(json.dumps(record) + "\n")
    sys.stdout.write(json.dumps(record, indent=2) + "\n")


def measure(model: Path, times: int, overrides: list[str]) -> dict[str, Any]:
    """Seconds of each refit, the first (which makes connections and buffers) included."""
    import torch
    import vllm

    folder = tempfile.mkdtemp()
    settings = [
        f"run.dir={folder}",
        f"policy.model={model}",
        "policy.dtype=bfloat16",
        "data.num_train_rows=64",
        "validation.every_steps=0",
        "generation.max_new_tokens=512",
        "policy.micro_batch_tokens=4096",
        "logging.sinks=[]",
        *overrides,
    ]
    config = compose_config(CONFIGS, "grpo", settings)
    seconds, parts = [], []
    with opened(config, "refit") as session:
        setup = start_sampling(config, session)
        for _ in range(times):
            setup.rollouts.sync.give_to_policy()
            setup.policy.weight_version += 1
            begin = time.monotonic()
            metrics = setup.rollouts.refit()
            seconds.append(time.monotonic() - begin)
            parts.append(values(metrics))
    num_bytes = parts[-1]["refit/bytes"]
    later = sorted(seconds[1:])
    median = later[len(later) // 2]
    return {
        "median_s": median,
        "gb_per_s": num_bytes / median / 1e9,
        "bytes": num_bytes,
        "seconds": seconds,
        "parts": parts,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {"torch": torch.__version__, "vllm": vllm.__version__},
    }


if __name__ == "__main__":
    main()
