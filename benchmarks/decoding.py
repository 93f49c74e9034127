"""Rollouts of ``generation.backend=graph`` alone, in one process, with random weights.

    python benchmarks/decoding.py --out decoding.jsonl [--fp8] smollm2 qwen1.5b qwen7b

A record has the seconds of three rollouts of the workload's size, of which the first captures CUDA
graphs; those that ran on the device; tokens; and the share of completions equal to the run before.
Lengths of ``smollm2`` are drawn (mean 150), those of the other shapes are the longest.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from kernels import kernel_times
from torch import Tensor
from transformers import AutoConfig
from workloads import SHAPES, SMOLLM2, WORKLOADS

from nemo_like.generation.graph.engine import GraphEngine
from nemo_like.generation.graph.state import BURST
from nemo_like.generation.protocol import EngineConfig, GenerationRequest, SamplingParams
from nemo_like.models.build import TensorSpec, expected_tensors

PROMPT_TOKENS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="+", choices=("smollm2", "qwen1.5b", "qwen7b", "tiny"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kernels", action="store_true", help="profile a burst a third of the way")
    parser.add_argument("--fp8", action="store_true", help="generation.quantization=fp8")
    args = parser.parse_args()
    for name in args.workloads:
        found = asyncio.run(measured(name, kernels=args.kernels, fp8=args.fp8))
        record = {"workload": name, "fp8": args.fp8, **found}
        with args.out.open("a") as file:
            file.write(json.dumps(record) + "\n")


async def measured(name: str, *, kernels: bool, fp8: bool) -> dict[str, Any]:
    """Three rollouts with the same seeds; with ``kernels`` a fourth, under the profiler."""
    workload = WORKLOADS[name]
    shape = SMOLLM2 if name == "smollm2" else SHAPES[name.replace("qwen", "qwen2.5-")]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = AutoConfig.for_model("llama" if name == "smollm2" else "qwen2", **shape)
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    folder = tempfile.mkdtemp()
    config.save_pretrained(folder)
    engine = GraphEngine(
        EngineConfig(
            model_path=folder,
            dtype="bfloat16",
            seed=0,
            max_model_len=64 + workload.max_new_tokens,
            max_num_seqs=workload.num_completions,
            device=device,
            gpu_memory_share=0.6,
            quantization="fp8" if fp8 else None,
            engine_kwargs={},
        )
    )
    await engine.start()
    engine._copy_weights(random_weights(expected_tensors(folder, torch.bfloat16), device))
    engine._version = 1
    on_device = 0.0
    run = engine._sampler._decoder.run

    def timed(*arguments: Any) -> Any:
        nonlocal on_device
        begin = time.perf_counter()
        found = run(*arguments)
        on_device += time.perf_counter() - begin
        return found

    engine._sampler._decoder.run = timed  # pyright: ignore[reportAttributeAccessIssue]
    runs, before = [], None
    for _ in range(3):
        on_device, begin = 0.0, time.perf_counter()
        found = await asyncio.gather(*map(engine.generate, requests(name, shape["vocab_size"])))
        seconds, ids = time.perf_counter() - begin, [one.token_ids for one in found]
        same = before and sum(a == b for a, b in zip(ids, before, strict=True)) / len(ids)
        tokens = sum(map(len, ids))
        runs.append({"s": seconds, "on_device_s": on_device, "tokens": tokens, "same": same})
        before = ids
    record: dict[str, Any] = {"runs": runs}
    if kernels:
        num_bursts = 0

        def profiled(*arguments: Any) -> Any:
            nonlocal num_bursts
            num_bursts += 1
            if num_bursts != max(1, workload.max_new_tokens // (3 * BURST)):
                return run(*arguments)
            found: list[Any] = []
            record["burst"] = {"batch": len(arguments[0]), "steps": arguments[-1]}
            record["burst"] |= kernel_times(lambda: found.append(run(*arguments)))
            return found[0]

        engine._sampler._decoder.run = profiled  # pyright: ignore[reportAttributeAccessIssue]
        await asyncio.gather(*map(engine.generate, requests(name, shape["vocab_size"])))
    await engine.shutdown()
    return {"device": torch.cuda.get_device_name() if device == "cuda" else device, **record}


def random_weights(specs: Mapping[str, TensorSpec], device: str) -> Iterator[tuple[str, Tensor]]:
    draw = torch.Generator(device).manual_seed(0)
    for name, (shape, dtype) in specs.items():
        tensor = torch.ones(shape, dtype=dtype, device=device)
        yield name, tensor if "norm" in name else tensor.normal_(0, 0.02, generator=draw)


def requests(name: str, vocab: int) -> list[GenerationRequest]:
    """One rollout, the same each time."""
    workload, draw = WORKLOADS[name], torch.Generator().manual_seed(0)
    count, most = workload.num_completions, workload.max_new_tokens
    limits = [most] * count
    if name == "smollm2":
        normal = torch.randn(count, generator=draw) * 70 + 150
        limits = normal.round().clamp(16, most).int().tolist()
    shape = workload.num_prompts, PROMPT_TOKENS
    prompts = torch.randint(0, vocab, shape, generator=draw).tolist()
    return [
        GenerationRequest(
            request_id=str(i),
            prompt_ids=prompts[i // workload.num_generations],
            sampling=SamplingParams(max_new_tokens=limits[i]),
            seed=i,
        )
        for i in range(count)
    ]


if __name__ == "__main__":
    main()
