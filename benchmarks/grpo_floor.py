"""What a GRPO step can't be faster than: the stock vLLM engine, a bare matmul, a bare copy.

    python benchmarks/grpo_floor.py --workload smollm2 --out floor.jsonl

Generation is ``vllm.LLM`` with its own defaults (its engine in a process beside it, CUDA graphs,
prefix caching) on the first step's prompts, the prefix cache reset before each repetition:

* ``logprobs``: the sampled token's logprob and text, as TRL asks for: the floor;
* ``tokens``: without text;
* ``bare``: without logprobs, which can't train.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workloads import (
    WORKLOADS,
    Inputs,
    Workload,
    add_arguments,
    count_parameters,
    prepare,
    read_rows,
    render,
    set_environment,
)

VARIANTS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 0},
    "tokens": {"logprobs": 0, "detokenize": False},
    "bare": {},
}
MATMUL_SIZE = 8192
COPIED_BYTES = 2**30
NUM_LOOPS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repetitions", type=int, default=5, help="after one to warm up")
    parser.add_argument("--engine", type=json.loads, default={}, help="JSON: arguments of LLM")
    args = parser.parse_args()
    set_environment()
    workload = WORKLOADS[args.workload]
    inputs = prepare(workload, args.work, args.steps or workload.steps, args.seed)
    record = {"num_parameters": count_parameters(inputs.model)}
    record |= measure_generation(workload, inputs, args.repetitions, args.engine)
    # After the engine has started: it forks, which a process that uses CUDA can't.
    record |= measure_device()
    with args.out.open("a") as file:
        file.write(json.dumps(record) + "\n")


def measure_generation(
    workload: Workload, inputs: Inputs, repetitions: int, engine: dict[str, Any]
) -> dict[str, Any]:
    """Seconds and sampled tokens of each repetition, by variant."""
    from vllm import LLM, SamplingParams

    options = {"max_num_seqs": workload.num_completions, "gpu_memory_utilization": 0.5} | engine
    rows = read_rows(inputs.prompts)[: workload.num_prompts]
    ids = render(inputs.model, [row["prompt"] for row in rows])
    prompts = [{"prompt_token_ids": one} for one in ids for _ in range(workload.num_generations)]
    llm = LLM(model=str(inputs.model), dtype="bfloat16", **options)
    record: dict[str, Any] = {
        "engine": options,
        "prompt_tokens": sum(len(one["prompt_token_ids"]) for one in prompts),
    }
    for name, asked in VARIANTS.items():
        # No seed: requests with seeds of their own are sampled one by one.
        sampling = SamplingParams(temperature=1.0, max_tokens=workload.max_new_tokens, **asked)
        seconds, tokens = [], []
        for _ in range(repetitions + 1):
            llm.reset_prefix_cache()
            begin = time.perf_counter()
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            seconds.append(time.perf_counter() - begin)
            tokens.append(sum(len(output.outputs[0].token_ids) for output in outputs))
        record[name] = {"seconds": seconds[1:], "tokens": tokens[1:]}
    return record


def measure_device() -> dict[str, Any]:
    """bfloat16 TFLOP/s of a large matrix product, bytes copied a second within the GPU."""
    import torch

    if not torch.cuda.is_available():
        return {}
    a = torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.bfloat16)
    source = torch.empty(COPIED_BYTES, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    return {
        "gpu": torch.cuda.get_device_name(),
        "matmul_tflops": 2e-12 * MATMUL_SIZE**3 / _seconds_each(lambda: a @ a),
        "copy_bytes_per_s": COPIED_BYTES / _seconds_each(lambda: target.copy_(source)),
    }


def _seconds_each(work: Callable[[], Any]) -> float:
    import torch

    for count in (3, NUM_LOOPS):  # the first to warm up
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            work()
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / NUM_LOOPS


if __name__ == "__main__":
    main()
