"""TRL's GRPOTrainer on a workload, with vLLM in its own process (``vllm_mode="colocate"``).

    python benchmarks/grpo_trl.py --workload smollm2 --out trl.jsonl

Read from TRL 1.16, for speed on one GPU that has the memory: no sleep mode and no activation
checkpointing but where the workload is large, one generation for each optimizer step, the largest
micro-batch that fits (they are padded to the step's longest completion), Liger's layer kernels
where they are installed. Left as TRL has it: float32 master weights under bfloat16 autocast, fused
AdamW, sdpa, the chunked fused output head, loss ``dapo`` (a mean over the step's tokens, this
project's too), no KL term.

The importance correction is this project's (tokens, truncated at 2). TRL's own is by sequence, and
either needs a forward pass before the training one; ``--no-correction`` goes without.

A record a step: seconds from the end of one optimizer step to the end of the next, and of
generation and refit within them. A last record: validation, peak memory, settings.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import workloads
from transformers import AutoTokenizer, TrainerCallback
from workloads import (
    WORKLOADS,
    Inputs,
    Workload,
    add_arguments,
    prepare,
    read_rows,
    render,
    set_environment,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, help="completions of a micro-batch")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.2)
    parser.add_argument("--model-dtype", help="of the weights that train; else float32")
    parser.add_argument("--correction", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--liger",
        action=argparse.BooleanOptionalAction,
        default=importlib.util.find_spec("liger_kernel") is not None,
    )
    args = parser.parse_args()
    set_environment()
    workload = WORKLOADS[args.workload]
    args.steps = args.steps or workload.steps
    inputs = prepare(workload, args.work, args.steps, args.seed)
    settings = trl_settings(workload, inputs, args)
    log = StepLog(args.out, workload.num_completions)
    trainer = make_trainer(workload, inputs, settings, log)
    summary: dict[str, Any] = {"settings": settings, "trl": importlib.metadata.version("trl")}
    if inputs.validation is not None:
        summary["accuracy_before"] = accuracy(trainer, workload, inputs)
    trainer.train()
    summary["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    if inputs.validation is not None:
        trainer.vllm_generation.sync_weights()
        summary["accuracy_after"] = accuracy(trainer, workload, inputs)
    log.write(summary)


def trl_settings(workload: Workload, inputs: Inputs, args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of GRPOConfig."""
    rows = args.rows or workload.trl_rows
    prompts = [row["prompt"] for row in read_rows(inputs.prompts)]
    if inputs.validation is not None:
        prompts += [row["prompt"] for row in read_rows(inputs.validation)]
    longest = max(len(ids) for ids in render(inputs.model, prompts))
    settings: dict[str, Any] = {
        "output_dir": str(args.out.with_suffix("")),
        "max_steps": args.steps,
        "seed": args.seed,
        "shuffle_dataset": False,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": workload.num_completions // rows,
        "num_generations": workload.num_generations,
        "max_completion_length": workload.max_new_tokens,
        "learning_rate": workload.lr,
        "lr_scheduler_type": "constant",
        "bf16": True,
        "gradient_checkpointing": workload.is_large,
        "use_liger_kernel": args.liger,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": args.gpu_memory_utilization,
        "vllm_enable_sleep_mode": workload.is_large,
        "vllm_max_model_length": longest + workload.max_new_tokens,
        "vllm_importance_sampling_correction": args.correction,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    if args.model_dtype is not None:
        settings["model_init_kwargs"] = {"dtype": args.model_dtype}
    if args.correction:
        settings["vllm_importance_sampling_mode"] = "token_truncate"
        settings["vllm_importance_sampling_clip_max"] = 2.0
    return settings


def make_trainer(
    workload: Workload, inputs: Inputs, settings: dict[str, Any], log: "StepLog"
) -> Any:
    """A GRPOTrainer whose generation and refit are timed."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer  # imports vLLM, which reads the environment

    rows = [
        {"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]}
        for row in read_rows(inputs.prompts)
    ]
    trainer = GRPOTrainer(
        model=str(inputs.model),
        args=GRPOConfig(**settings),
        reward_funcs=scorer(getattr(workloads, workload.reward)),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(
            inputs.model, padding_side="left", truncation_side="left"
        ),
        callbacks=[log],
    )
    engine = trainer.vllm_generation
    engine.generate = log.timed("generation_s", engine.generate)
    engine.sync_weights = log.timed("refit_s", engine.sync_weights)
    return trainer


def scorer(function: Callable[..., float]) -> Callable[..., list[float]]:
    """A reward function of ``workloads.py`` as TRL calls it, on lists of conversations."""

    def reward(
        prompts: list[Any], completions: list[Any], answer: list[str], **columns: Any
    ) -> list[float]:
        return [
            function(prompt[-1]["content"], completion[0]["content"], answer=one)
            for prompt, completion, one in zip(prompts, completions, answer, strict=True)
        ]

    return reward


def accuracy(trainer: Any, workload: Workload, inputs: Inputs) -> float:
    """Mean reward of one completion of each held-out prompt, seeded, from the trainer's engine."""
    from vllm import SamplingParams

    assert inputs.validation is not None
    rows = read_rows(inputs.validation)
    ids = render(inputs.model, [row["prompt"] for row in rows])
    outputs = trainer.vllm_generation.llm.generate(
        [{"prompt_token_ids": one} for one in ids],
        [
            SamplingParams(temperature=1.0, max_tokens=workload.max_new_tokens, seed=seed)
            for seed in range(len(rows))
        ],
        use_tqdm=False,
    )
    reward = getattr(workloads, workload.reward)
    scores = [
        reward(row["prompt"], output.outputs[0].text, answer=row["answer"])
        for row, output in zip(rows, outputs, strict=True)
    ]
    return sum(scores) / len(scores)


class StepLog(TrainerCallback):
    """Writes a record for each optimizer step, at once, so that a killed run leaves its steps."""

    def __init__(self, path: Path, num_completions: int) -> None:
        self._path = path
        self._num_completions = num_completions
        self._parts: dict[str, float] = {}
        self._last = 0.0
        self._wall_s = 0.0

    def write(self, record: dict[str, Any]) -> None:
        """Append a line to the file."""
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its seconds added to the step's ``name``."""

        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            self._parts[name] = self._parts.get(name, 0.0) + time.perf_counter() - begin
            return result

        return call

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._parts.clear()
        self._last = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        self._wall_s, self._last = now - self._last, now

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "reward" not in logs:  # the summary at the end of training
            return
        tokens = logs["completions/mean_length"] * self._num_completions
        self.write(
            {"step": state.global_step, "wall_s": self._wall_s, "tokens": tokens}
            | self._parts
            | {name: value for name, value in logs.items() if isinstance(value, int | float)}
        )
        self._parts.clear()


if __name__ == "__main__":
    main()
