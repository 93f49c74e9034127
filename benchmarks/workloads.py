"""What the contenders of ``grpo.py`` work on: one model folder, one file of prompts, one reward.

A reward process imports this file for its reward function alone, so that everything heavy is
imported where it is used.
"""

import argparse
import json
import multiprocessing
import os
import re
import shutil
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

# Entry i of a chain_sum data set follows from its seed plus i: streams must start far apart.
_SEED_STRIDE = 1_000_000
_VALIDATION_SEED = 900_000_000

RANDOM = ", random weights"
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "qwen2.5-14b": {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
}
SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
"""The shape of SmolLM2-135M, a Llama, whose weights are real."""
_EVERY = (
    "cluster.gpus_per_node=1",
    "policy.compile=true",
    "policy.batching=shared",
)
ONE_GPU = (
    *_EVERY,
    "policy.dtype=float16",
    "policy.parallel.reshard_after_forward=false",
    "generation.backend=graph",
    "generation.sleep=false",
)
LARGE = (
    *_EVERY,
    "policy.dtype=bfloat16",
    "policy.activation_checkpointing=full",
    "policy.logprob_chunk_tokens=4096",
)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One GRPO step: ``num_prompts`` x ``num_generations`` completions, one optimizer step."""

    name: str
    model: str
    """What ``policy.model`` takes, or a name of ``SHAPES`` with ``RANDOM`` at its end."""
    num_prompts: int
    num_generations: int
    max_new_tokens: int
    lr: float
    steps: int = 12
    """Optimizer steps, unless the command line says otherwise."""
    task: dict[str, int] = field(default_factory=dict)
    """Parameters of reasoning-gym's chain_sum."""
    reward: str = "reward"
    """Name of a function of this file."""
    num_validation: int = 0
    """Held-out prompts, answered before and after training. 0: speed alone is measured."""
    trl_rows: int
    """Completions of one forward and backward pass of TRL; without checkpointing, 80 GB hold it."""
    verl_tokens: int = 16384
    """Tokens of one forward and backward pass of verl."""
    is_large: bool = False
    """Whether peers train with checkpointing, and beside an engine that sleeps."""
    overrides: tuple[str, ...]
    """This project's settings."""

    @property
    def num_completions(self) -> int:
        """Completions of one step."""
        return self.num_prompts * self.num_generations


WORKLOADS = {
    each.name: each
    for each in (
        Workload(
            name="smollm2",
            model="smollm2",
            num_prompts=64,
            num_generations=8,
            max_new_tokens=256,
            lr=1e-6,  # small, so that lengths stay those of the floor's engine
            trl_rows=64,
            verl_tokens=32768,
            overrides=(
                *ONE_GPU,
                "policy.micro_batch_tokens=65536",
            ),
        ),
        Workload(
            name="qwen1.5b",
            model=f"qwen2.5-1.5b{RANDOM}",
            num_prompts=16,
            num_generations=8,
            max_new_tokens=512,
            lr=1e-6,
            # Random weights answer nothing: with equal rewards there would be nothing to train on.
            reward="coin",
            trl_rows=16,
            overrides=(
                *ONE_GPU,
                "policy.micro_batch_tokens=16384",
                "policy.logprob_chunk_tokens=4096",
            ),
        ),
        Workload(
            name="qwen7b",
            model=f"qwen2.5-7b{RANDOM}",
            num_prompts=16,
            num_generations=8,
            max_new_tokens=1024,
            lr=1e-6,
            steps=8,
            reward="coin",
            trl_rows=8,
            is_large=True,
            overrides=(
                *_EVERY,
                "policy.dtype=bfloat16",
                "policy.parallel.reshard_after_forward=false",
                "policy.optimizer.moments=bfloat16",
                "policy.micro_batch_tokens=5376",  # five rows
                "generation.backend=graph",
            ),
        ),
        Workload(
            name="qwen14b-lora",
            model=f"qwen2.5-14b{RANDOM}",
            num_prompts=16,
            num_generations=8,
            max_new_tokens=512,
            lr=1e-5,
            steps=10,
            reward="coin",
            trl_rows=8,
            is_large=True,
            overrides=(*LARGE, "policy.micro_batch_tokens=16384", "policy.lora.rank=16"),
        ),
        Workload(
            name="qwen7b-long",
            model=f"qwen2.5-7b{RANDOM}",
            num_prompts=2,
            num_generations=8,
            max_new_tokens=8192,
            lr=1e-6,
            steps=10,
            reward="coin",
            trl_rows=1,
            verl_tokens=17408,
            is_large=True,
            overrides=(*LARGE, "policy.micro_batch_tokens=17408"),  # two rows
        ),
        Workload(
            name="learning",
            model="smollm2",
            num_prompts=32,
            num_generations=8,
            max_new_tokens=64,
            lr=1e-5,
            steps=150,
            task={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
            num_validation=256,
            trl_rows=128,
            verl_tokens=32768,
            # The group's mean is TRL's baseline.
            overrides=(*ONE_GPU, "policy.micro_batch_tokens=32768", "advantage.baseline=mean"),
        ),
        Workload(  # for trying this suite on a CPU
            name="tiny",
            model="embedded",
            num_prompts=4,
            num_generations=4,
            max_new_tokens=16,
            lr=1e-6,
            steps=5,
            num_validation=8,
            trl_rows=8,
            overrides=(),
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What all contenders read."""

    model: Path
    """Folder in Hugging Face format, bfloat16."""
    prompts: Path
    """Rows ``{"prompt", "answer"}``, those of the first step first."""
    validation: Path | None
    """Rows of the same kind whose prompts are not among them."""


def reward(prompt: str, completion: str, answer: str, **fields: Any) -> float:
    """1 if the last number of the completion is the answer, else 0."""
    text = completion.replace("\N{MINUS SIGN}", "-")
    # A minus after a digit subtracts; commas group thousands.
    numbers = re.findall(r"(?:(?<!\d)-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?", text)
    return float(bool(numbers) and Decimal(numbers[-1].replace(",", "")) == Decimal(answer))


def coin(prompt: str, completion: str, **fields: Any) -> float:
    """0 or 1 as the text's checksum has it: what a model with random weights can be paid for."""
    return float(crc32(completion.encode("utf-8", "replace")) & 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that every script of the suite has."""
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--steps", type=int, help="optimizer steps (by default the workload's)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, sampling and order")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmarks"), help="for models")


def prepare(workload: Workload, folder: Path, steps: int, seed: int) -> Inputs:
    """The workload's inputs below ``folder``; what is there already is used again."""
    folder = folder.expanduser().resolve() / workload.name
    folder.mkdir(parents=True, exist_ok=True)
    validation = folder / "validation.jsonl" if workload.num_validation else None
    held_out: set[str] = set()
    if validation is not None:
        rows = list(make_rows(workload, workload.num_validation, _VALIDATION_SEED, held_out))
        _write_rows(validation, rows)
        held_out = {row["prompt"] for row in rows}
    prompts = folder / f"prompts-{steps}-seed{seed}.jsonl"
    first = _SEED_STRIDE * (seed + 1)
    _write_rows(prompts, make_rows(workload, steps * workload.num_prompts, first, held_out))
    return Inputs(model=_model(workload.model, folder), prompts=prompts, validation=validation)


def make_rows(
    workload: Workload, count: int, seed: int, held_out: set[str]
) -> Iterator[dict[str, str]]:
    """``count`` rows of chain_sum whose prompts are not in ``held_out``."""
    import reasoning_gym

    data = reasoning_gym.create_dataset("chain_sum", seed=seed, size=2 * count, **workload.task)
    kept = (entry for entry in data if entry["question"] not in held_out)
    for _, entry in zip(range(count), kept, strict=False):
        yield {"prompt": entry["question"], "answer": entry["answer"]}


def read_rows(path: Path) -> list[Any]:
    """The objects of a .jsonl file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def render(model: Path, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of each prompt as a user's message, up to where the assistant answers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        for prompt in prompts
    ]


def count_parameters(model: Path) -> int:
    """Elements of all tensors of a folder's safetensors files; a tied head counts once."""
    total = 0
    for path in model.glob("*.safetensors"):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        total += sum(prod(tensor["shape"]) for tensor in header.values())
    return total


def set_environment() -> None:
    """What this process and those that it starts need for any vLLM, without a network."""
    from nemo_like.generation.vllm.environment import common_variables

    for name, value in {"HF_HUB_OFFLINE": "1", **common_variables()}.items():
        os.environ.setdefault(name, value)


def _write_rows(path: Path, rows: Any) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def _model(name: str, folder: Path) -> Path:
    from nemo_like.models.resolve import resolve_model

    if not name.endswith(RANDOM):
        return resolve_model(name)
    return random_model(name.removesuffix(RANDOM), folder / "model")


def random_model(shape: str, folder: Path) -> Path:
    """``make_random_model`` if ``folder`` is not there, in a process of its own.

    Its hold on the GPU ends with it.
    """
    if not folder.exists():
        context = multiprocessing.get_context("spawn")
        child = context.Process(target=make_random_model, args=(shape, folder))
        child.start()
        child.join()
        assert child.exitcode == 0, child.exitcode
    return folder


def make_random_model(shape: str, folder: Path) -> None:
    """A Qwen2 folder with random bfloat16 weights and SmolLM2's tokenizer.

    Written aside, then renamed: a folder that exists is complete.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from nemo_like.models.resolve import resolve_model

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("smollm2"))
    ends = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = AutoConfig.for_model("qwen2", **SHAPES[shape], **ends, max_position_embeddings=16384)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # seconds, not minutes
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config.update(**ends)
    aside = folder.with_name(f"{folder.name}-writing")
    shutil.rmtree(aside, ignore_errors=True)
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    aside.rename(folder)
