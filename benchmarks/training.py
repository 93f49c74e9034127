"""Tokens a second, FLOP utilisation and peak memory of the training engine, beside a bare matmul.

    python benchmarks/training.py --shape qwen2.5-1.5b --gpus 1 --out results.jsonl

One optimizer step is ``--rows`` sequences of ``--length`` tokens a GPU, packed, in micro-batches of
``policy.micro_batch_tokens``, through ``Trainer``: policy-gradient loss on every token, float32
master weights, AdamW. Weights are random. Several configurations may be given, each a
comma-separated list of policy keys (``--config micro_batch_tokens=16384,compile=true``).

With ``--prompt P --siblings S`` the first P tokens of each S rows are the same and do not train:
compare ``--config batching=packed`` with ``--config batching=shared``, whose loss must be equal.

MFU = tokens/s/GPU x (6 x parameters + 6 x layers x width x length) / 989e12; recomputation is not
counted.
"""

import argparse
import gc
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from kernels import kernel_times
from transformers import AutoConfig, AutoModelForCausalLM
from workloads import SHAPES, count_parameters

from nemo_like.batch import keys
from nemo_like.batch.micro_batches import plan_micro_batches
from nemo_like.batch.tensor_batch import TensorBatch, prompt_columns
from nemo_like.config.losses import LossConfig
from nemo_like.config.policy import ParallelConfig, PolicyConfig
from nemo_like.losses.policy_gradient import ClippedPGLoss
from nemo_like.losses.protocol import Denominators
from nemo_like.observe.metrics import values
from nemo_like.planning.step_time import PEAK_FLOPS
from nemo_like.policy import scoring
from nemo_like.policy.remote_model import prompts_of
from nemo_like.policy.trainer import Trainer
from nemo_like.policy.trainer_setup import TrainerSetup

_WORDS = ("dtype", "activation_checkpointing", "offload", "batching", "data_parallel")
"""Keys with values that are text."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-1.5b")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--rows", type=int, default=16, help="sequences a step and GPU")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--vary", action="store_true", help="lengths from a quarter to the whole")
    parser.add_argument("--prompt", type=int, default=1, help="tokens that do not train")
    parser.add_argument("--siblings", type=int, default=1, help="rows with one prompt")
    parser.add_argument("--steps", type=int, default=3, help="measured steps")
    parser.add_argument("--kernels", action="store_true", help="profile one more step")
    parser.add_argument("--config", action="append", default=[])
    parser.add_argument("--out", type=Path, default=Path("training.jsonl"))
    parser.add_argument("--model-dir", type=Path, default=None, help="keep the random model here")
    args = parser.parse_args()
    folder = args.model_dir or Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        make_model(args.shape, folder)
        port = free_port()
        mp.spawn(run_rank, args=(args, str(folder), port), nprocs=args.gpus)
    finally:
        if args.model_dir is None:
            shutil.rmtree(folder)


def make_model(shape: str, folder: Path) -> None:
    """A folder with random bfloat16 weights of the shape, made on the GPU if there is one."""
    if (folder / "config.json").exists():
        return
    config = AutoConfig.for_model("qwen2", **SHAPES[shape], max_position_embeddings=32768)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_rank(rank: int, args: argparse.Namespace, folder: str, port: int) -> None:
    """All configurations in turn, in one process a GPU."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=args.gpus,
        device_id=device if cuda else None,
    )
    for text in args.config or ["micro_batch_tokens=16384"]:
        record = {"shape": args.shape, "gpus": args.gpus, "rows": args.rows, "length": args.length}
        record |= {"vary": args.vary, "prompt": args.prompt, "siblings": args.siblings}
        record |= {"config": text, "torch": torch.__version__}
        try:
            record |= measure(args, folder, device, text)
        except torch.OutOfMemoryError as error:
            record["error"] = str(error).split(".")[0]
        if rank == 0:
            sys.stdout.write(json.dumps(record) + "\n")
            sys.stdout.flush()
            with args.out.open("a") as file:
                file.write(json.dumps(record) + "\n")
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
        dist.barrier()
    dist.destroy_process_group()


def measure(
    args: argparse.Namespace, folder: str, device: torch.device, text: str
) -> dict[str, Any]:
    """Seconds and memory of logprob passes and training steps after two to warm up."""
    policy = parse(text)
    start = time.perf_counter()
    trainer = Trainer(
        TrainerSetup(config=policy, model_path=folder, max_steps=100, with_reference=False), device
    )
    record: dict[str, Any] = {"start_s": round(time.perf_counter() - start, 2)}
    vocab = trainer.stages[0].causal_lm.config.vocab_size
    sizes = trainer.mesh.sizes
    # Rows belong to a data-parallel rank: with model parallelism several GPUs share them.
    rows = args.rows * args.gpus // sizes.dp
    lengths = draw_lengths(args, rows)
    batch = make_batch(lengths, args, vocab)
    plan = plan_micro_batches(
        lengths,
        num_ranks=1,
        max_tokens=policy.micro_batch_tokens,
        prompts=prompts_of(batch) if policy.batching == "shared" else None,
    )
    batches = [batch.select(one).to(device) for one in plan.bins[0]]
    total = float(sizes.dp * (sum(lengths) - rows * args.prompt))
    denominators = Denominators(tokens=total, sequences=float(rows * sizes.dp))
    loss = ClippedPGLoss(LossConfig())
    reset_peak(device)
    seconds: dict[str, list[float]] = {"logprobs": [], "train": []}
    for step in range(args.steps + 2):
        begin = clock(device)
        columns = scoring.logprobs(trainer, batches, 1.0)
        seconds["logprobs"].append(clock(device) - begin)
        record.setdefault("logprobs_peak_gib", peak(device))  # before there is optimizer state
        if step == 0:
            for batch, logprobs in zip(batches, columns["policy"], strict=False):
                batch.tokens[keys.POLICY_LOGPROBS] = logprobs
                batch.tokens[keys.GENERATION_LOGPROBS] = logprobs
        reset_peak(device)
        begin = clock(device)
        metrics = values(trainer.train(batches, loss, denominators, 1.0))
        seconds["train"].append(clock(device) - begin)
        record["train_peak_gib"] = peak(device)
    if args.kernels:
        record["profile"] = kernel_times(lambda: trainer.train(batches, loss, denominators, 1.0))
    record["loss"], record["grad_norm"] = metrics.get("train/loss"), metrics["train/grad_norm"]
    tokens = sum(lengths) * sizes.dp / args.gpus
    shape = SHAPES[args.shape]
    num_parameters = count_parameters(Path(folder))
    attention = shape["num_hidden_layers"] * shape["hidden_size"] * args.length
    flops = {
        "train": 6 * (num_parameters + attention),
        "logprobs": 2 * (num_parameters + attention),
    }
    record["num_parameters"] = num_parameters
    matmul = matmul_rate(device)
    record["matmul_tflops"] = round(matmul / 1e12, 1)
    for name, measured in seconds.items():
        best = min(measured[2:])
        rate = tokens / best
        record[f"{name}_s"] = [round(each, 4) for each in measured]
        record[f"{name}_tokens_per_s_per_gpu"] = round(rate)
        record[f"{name}_mfu_989"] = round(rate * flops[name] / PEAK_FLOPS, 4)
        record[f"{name}_mfu_of_matmul"] = round(rate * flops[name] / matmul, 4)
    if device.type == "cuda":
        record["gpu"] = torch.cuda.get_device_name(device)
    return record


def draw_lengths(args: argparse.Namespace, rows: int) -> list[int]:
    """Equal, or spread evenly from a quarter to the whole; the same on every rank."""
    if not args.vary:
        return [args.length] * rows
    least = args.length // 4
    return [least + (args.length - least) * i // max(rows - 1, 1) for i in range(rows)]


def make_batch(lengths: list[int], args: argparse.Namespace, vocab: int) -> TensorBatch:
    """Random rows; siblings have their prompt from the first of them."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank())
    rows = [torch.randint(0, vocab, (length,), generator=generator) for length in lengths]
    for i, row in enumerate(rows):
        row[: args.prompt] = rows[i - i % args.siblings][: args.prompt]
    masks = [torch.arange(length) >= args.prompt for length in lengths]
    batch = TensorBatch(
        lengths=torch.tensor(lengths),
        tokens={keys.INPUT_IDS: torch.cat(rows), keys.LOSS_MASK: torch.cat(masks)},
        rows={
            keys.ADVANTAGES: torch.randn(len(lengths), generator=generator),
            keys.SAMPLE_MASK: torch.ones(len(lengths), dtype=torch.bool),
        },
    )
    batch.rows |= prompt_columns(batch)
    return batch


def parse(text: str) -> PolicyConfig:
    """``micro_batch_tokens=16384,parallel.tensor_parallel_size=2`` -> a policy's configuration."""
    changes: dict[str, Any] = {"dtype": "bfloat16"}
    parallel: dict[str, Any] = {}
    for item in text.split(","):
        key, _, value = item.partition("=")
        target, name = (parallel, key[9:]) if key.startswith("parallel.") else (changes, key)
        target[name] = value if name in _WORDS else json.loads(value)
    return PolicyConfig(parallel=ParallelConfig(**parallel)).replace(**changes)


def matmul_rate(device: torch.device) -> float:
    """FLOP/s of a large bfloat16 matrix product, the best of ten."""
    size = 8192 if device.type == "cuda" else 256
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    best = float("inf")
    for _ in range(10):
        begin = clock(device)
        for _ in range(10):
            a @ a
        best = min(best, (clock(device) - begin) / 10)
    return 2 * size**3 / best


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def peak(device: torch.device) -> float:
    return round(torch.cuda.max_memory_allocated(device) / 2**30, 2) if device.type == "cuda" else 0


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "4")
    main()
