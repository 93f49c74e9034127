"""Why the logprobs of the engine and of the policy differ in 16 bits, layer by layer.

    python benchmarks/mismatch.py --out mismatch.json                  # SmolLM2-135M, one GPU
    python benchmarks/mismatch.py --model embedded --out mismatch.json # tries the script on a CPU

Engines sample completions, each with other settings in a process of its own; policies compute the
logprobs of all these tokens with other settings again, one of them in float32. Printed are, for
each pair, the means of |d| and exp |d| of the sampled tokens, d being the difference; and for a few
rows how far the hidden states after each layer are from those in float32, and from each other, as
shares of their size (root mean squares). What needs a GPU is left out on a CPU.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from workloads import WORKLOADS, make_rows, render, set_environment

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.policy import PolicyConfig
from nemo_like.models.resolve import resolve_model

_GRAPHS = {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}
_EAGER = {"enforce_eager": True}
_FLOAT32_HEAD = {"hf_overrides": {"head_dtype": "float32"}}
ENGINES: dict[str, tuple[dict[str, Any], dict[str, str], bool]] = {
    "eager": (_EAGER | _FLOAT32_HEAD, {}, False),
    "16-bit head": (_EAGER, {}, True),
    "as in runs": (_GRAPHS | _FLOAT32_HEAD, {}, True),
    "batch-invariant": (_EAGER | _FLOAT32_HEAD, {"VLLM_BATCH_INVARIANT": "1"}, True),
    "float16": (_GRAPHS | _FLOAT32_HEAD | {"dtype": "float16"}, {}, True),
    "float32": (_EAGER | {"dtype": "float32"}, {}, False),
}
"""Arguments of ``vllm.LLM``, environment variables, and whether it needs a GPU."""
PROBED_ENGINE = "eager"
"""Its layers can be watched: others are compiled, or round in another way."""

POLICIES: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "float32": ({"dtype": "float32"}, False, False),
    "eager": ({}, False, False),
    "float32 head": ({"float32_head": True}, False, False),
    "compiled": ({"compile": True}, False, True),
    "compiled, casts emulated": ({"compile": True}, True, True),
    "float16, compiled": ({"compile": True, "dtype": "float16"}, False, True),
}
"""Changed policy keys, Inductor's ``emulate_precision_casts``, and whether it needs a GPU."""
EXACT = "float32"
NUM_PROBED = 8
"""Rows with hidden states on record."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="what policy.model takes")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--siblings", type=int, default=4, help="completions of each prompt")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, required=True, help="a .json file")
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    set_environment()
    if args.engine:
        torch.save(sample(args), args.out)
        return
    with tempfile.TemporaryDirectory() as folder:
        sampled = start_engines(args, Path(folder))
    result = compare(args, sampled)
    args.out.write_text(json.dumps(result, indent=1))
    sys.stdout.write(json.dumps(result) + "\n")


def start_engines(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What each engine sampled; all at the same time, and one that fails is left out."""
    running = {}
    for name, (_, variables, needs_gpu) in ENGINES.items():
        if needs_gpu and not torch.cuda.is_available():
            continue
        words = ["--engine", name, "--out", str(folder / f"{name}.pt")]
        for key in ("model", "prompts", "siblings", "max_new_tokens"):
            words += [f"--{key.replace('_', '-')}", str(getattr(args, key))]
        command = [sys.executable, __file__, *words]
        running[name] = subprocess.Popen(command, env={**os.environ, **variables})
    for name, process in running.items():
        if process.wait() != 0:
            sys.stderr.write(f"the engine {name} failed\n")
    files = {name: folder / f"{name}.pt" for name in running}
    return {name: torch.load(file) for name, file in files.items() if file.exists()}


def sample(args: argparse.Namespace) -> dict[str, Any]:
    """Rows of one engine with its logprobs, and hidden states of some."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the model within reach of hooks
    cuda = torch.cuda.is_available()
    if not cuda:
        os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    from vllm import LLM, SamplingParams

    model = resolve_model(args.model)
    task = WORKLOADS["smollm2"]
    questions = [row["prompt"] for row in make_rows(task, args.prompts, 0, set())]
    prompts = [ids for ids in render(model, questions) for _ in range(args.siblings)]
    arguments = {"dtype": "bfloat16", "enable_prefix_caching": False, "seed": 0}
    arguments |= {"max_num_seqs": len(prompts), "kv_cache_memory_bytes": 2**32 if cuda else 2**28}
    arguments |= {"gpu_memory_utilization": 0.01}  # compared with what is free, beside the others
    arguments |= ENGINES[args.engine][0]
    llm = LLM(model=str(model), logprobs_mode="processed_logprobs", **arguments)
    sampling = SamplingParams(temperature=1.0, max_tokens=args.max_new_tokens, logprobs=0)
    given = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = [one.outputs[0] for one in llm.generate(given, sampling, use_tqdm=False)]
    rows = []
    for ids, one in zip(prompts, outputs, strict=True):
        new, of_each = list(one.token_ids), one.logprobs or []
        rows.append((ids, new, [at[t].logprob for at, t in zip(of_each, new, strict=True)]))
    states = []
    if args.engine == PROBED_ENGINE:
        watched: list[list[Tensor]] = []
        llm.collective_rpc(partial(watch_worker, watched=watched))
        once = SamplingParams(max_tokens=1)
        for ids, new, _ in rows[:NUM_PROBED]:
            watched.append([])
            llm.generate([{"prompt_token_ids": ids + new}], once, use_tqdm=False)
        states = [
            torch.stack(layers)[:, : len(ids) + len(new)]  # without padding
            for layers, (ids, new, _) in zip(watched, rows, strict=False)
        ]
    return {"rows": rows, "states": states}


def watch_worker(worker: Any, watched: list[list[Tensor]]) -> None:
    """Keep what each layer of vLLM's model gives: its sum and the residual stream."""

    def keep(module: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        watched[-1].append((output[0].float() + output[1].float()).cpu())

    for layer in worker.model_runner.get_model().model.layers:
        layer.register_forward_hook(keep)


def compare(args: argparse.Namespace, sampled: dict[str, Any]) -> dict[str, Any]:
    """Every policy on every engine's rows."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    start_alone(device)
    model, logprobs, states = str(resolve_model(args.model)), {}, {}
    rows = {name: one["rows"] for name, one in sampled.items()}
    probed = sampled[PROBED_ENGINE]
    for name, (changes, emulated, needs_gpu) in POLICIES.items():
        if needs_gpu and device.type == "cpu":
            continue
        torch._inductor.config.emulate_precision_casts = emulated  # pyright: ignore
        torch.compiler.reset()
        logprobs[name], states[name] = compute(model, changes, rows, device)
        gc.collect()
    engine = torch.cat(probed["states"], dim=1)
    return {
        "model": args.model,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "pairs": [
            {"engine": e, "policy": p, **gap(logprobs[p][e], engine_logprobs(rows[e]))}
            for e in rows
            for p in logprobs
        ],
        "policies_from_float32": {
            p: gap(logprobs[p][PROBED_ENGINE], logprobs[EXACT][PROBED_ENGINE]) for p in logprobs
        },
        "layers": {
            "engine from float32": distances(engine, states[EXACT], states[EXACT]),
            **{
                f"{p} from float32": distances(states[p], states[EXACT], states[EXACT])
                for p in states
            },
            **{f"{p} from engine": distances(states[p], engine, states[EXACT]) for p in states},
        },
    }


def start_alone(device: torch.device) -> None:
    """The process group of one rank that the policy's layouts need."""
    store = torch.distributed.HashStore()
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(0)
        backend = "cpu:gloo,cuda:nccl"
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)


def compute(
    model: str, changes: dict[str, Any], rows: dict[str, Any], device: torch.device
) -> tuple[dict[str, Tensor], Tensor]:
    """One policy's logprobs of each engine's tokens, and its hidden states of the probed rows."""
    from nemo_like.policy import scoring
    from nemo_like.policy.trainer import Trainer
    from nemo_like.policy.trainer_setup import TrainerSetup

    config = PolicyConfig().replace(**{"dtype": "bfloat16", "micro_batch_tokens": 2**20} | changes)
    trainer = Trainer(
        TrainerSetup(config=config, model_path=model, max_steps=1, with_reference=False), device
    )
    found = {}
    for name, of_engine in rows.items():
        parts = []
        for first in range(0, len(of_engine), 64):  # rows at a time
            batch = batch_of(of_engine[first : first + 64]).to(device)
            (one,) = scoring.scores(trainer, [batch], 1.0)
            parts.append(one[: batch.num_tokens][batch.tokens[keys.LOSS_MASK]].double().cpu())
        found[name] = torch.cat(parts)
    watched: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(partial(keep_output, watched=watched))
        for layer in trainer.stages[0].causal_lm.model.layers
    ]
    batch = batch_of(rows[PROBED_ENGINE][:NUM_PROBED]).to(device)
    scoring.scores(trainer, [batch], 1.0)
    for hook in hooks:
        hook.remove()
    return found, torch.stack([one.flatten(0, -2)[: batch.num_tokens] for one in watched])


def keep_output(module: Any, inputs: Any, output: Any, watched: list[Tensor]) -> None:
    watched.append((output if isinstance(output, Tensor) else output[0]).detach().float().cpu())


def batch_of(rows: list[tuple[list[int], list[int], list[float]]]) -> TensorBatch:
    masks = [torch.arange(len(ids) + len(new)) >= len(ids) for ids, new, _ in rows]
    return TensorBatch(
        lengths=torch.tensor([len(ids) + len(new) for ids, new, _ in rows]),
        tokens={
            keys.INPUT_IDS: torch.tensor([t for ids, new, _ in rows for t in ids + new]),
            keys.LOSS_MASK: torch.cat(masks),
        },
        rows={keys.SAMPLE_MASK: torch.ones(len(rows), dtype=torch.bool)},
    )


def engine_logprobs(rows: list[tuple[list[int], list[int], list[float]]]) -> Tensor:
    return torch.tensor([one for _, _, logprobs in rows for one in logprobs], dtype=torch.float64)


def gap(a: Tensor, b: Tensor) -> dict[str, float]:
    """Of two models' logprobs of the same tokens."""
    d = (a - b).abs()
    numbers = {"mean_abs": d.mean(), "mean_exp_abs": d.exp().mean(), "p999_abs": d.quantile(0.999)}
    numbers |= {"mean": (a - b).mean()}
    return {name: round(one.item(), 6) for name, one in numbers.items()} | {"tokens": len(d)}


def distances(a: Tensor, b: Tensor, of: Tensor) -> list[float]:
    """RMS of the difference after each layer, as a share of that of ``of``; [L, N, H] each."""
    squares, size = (a - b).square().sum((1, 2)), of.square().sum((1, 2))
    return [round(one, 6) for one in (squares / size).sqrt().tolist()]


if __name__ == "__main__":
    main()
