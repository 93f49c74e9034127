"""Compare what ``nemo-like plan`` predicts with the records in ``results/``.

    python benchmarks/predicted.py

One line for each record and phase: predicted and measured seconds, and their ratio. Memory is
compared by ``tests/test_plan.py``. It leaves out other algorithms than GRPO, runs that shared their
GPU (``*-smollm2-h200.metrics.jsonl``), other contenders, runs on a CPU, and starts, which depend on
what was cached: the same command took 49 to 151 s.
"""

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from workloads import SHAPES, SMOLLM2, read_rows

from nemo_like.compose.load import compose_config
from nemo_like.config.optimizer import OptimizerConfig
from nemo_like.config.policy import ParallelConfig, PolicyConfig
from nemo_like.config.sampling import SamplingRunConfig
from nemo_like.planning.model_shape import ModelShape
from nemo_like.planning.resources import plan_run
from nemo_like.planning.step_time import (
    RowTokens,
    forward_seconds,
    offload_seconds,
    predict_step,
    refit_seconds,
    train_seconds,
)

RESULTS = Path(__file__).parent / "results"
CONFIGS = Path(__file__).parents[1] / "configs"
STEPS = ("grpo-h200", "peers-h200", "scaling-h200", "learning-h200", "learning-225-steps-h200")
PROMPT_TOKENS = 50
"""Of the workloads' prompts, by their tokenizer."""
_OF_THE_MACHINE = ("run.", "data.", "environment.", "logging.", "policy.model=", "validation.")


class Compared(NamedTuple):
    record: str
    phase: str
    predicted: float
    measured: float


def main() -> None:
    for name, phase, predicted, measured in compared():
        numbers = f"{predicted:8.3f} {measured:8.3f} {predicted / measured:6.2f}"
        sys.stdout.write(f"{name:64} {phase:10} {numbers}\n")


def compared() -> Iterator[Compared]:
    """Every record and phase that can be predicted."""
    for name in STEPS:
        for i, record in enumerate(read_rows(RESULTS / f"{name}.jsonl")):
            if record["contender"] == "ours":
                yield from _steps(f"{name} {i} {record['workload']['name']}", record)
    for record in read_rows(RESULTS / "training-h100.jsonl"):
        yield from _training(record)
    yield from _offload()
    for record in read_rows(RESULTS / "refit-h200.jsonl"):
        shape = shape_of(record["shape"] or "qwen2.5-1.5b")
        predicted = refit_seconds(shape, "bfloat16", num_ranks=1, sleeps=False)
        yield Compared(f"refit-h200 {record['shape']}", "refit", predicted, record["median_s"])


def shape_of(name: str) -> ModelShape:
    numbers = SHAPES.get(name, SMOLLM2)
    return ModelShape(
        layers=numbers["num_hidden_layers"],
        hidden=numbers["hidden_size"],
        intermediate=numbers["intermediate_size"],
        heads=numbers["num_attention_heads"],
        kv_heads=numbers["num_key_value_heads"],
        head_dim=numbers["hidden_size"] // numbers["num_attention_heads"],
        vocab=numbers["vocab_size"],
        tied=numbers["tie_word_embeddings"],
    )


def _steps(name: str, record: dict[str, Any]) -> Iterator[Compared]:
    words = [word for word in record["command"][2:] if not word.startswith(_OF_THE_MACHINE)]
    latest = {word.partition("=")[0]: word for word in words}
    config = compose_config(CONFIGS, "grpo", [*latest.values()])
    assert isinstance(config, SamplingRunConfig)
    # The first steps compile; learning changes lengths, so that a mean of all steps is compared.
    rows = [row for row in record["records"] if row["step"] > 2]
    mean = {
        key: statistics.mean(row[key] for row in rows) for key in ("rollout/completion_tokens",)
    }
    median = {
        phase: statistics.median(row[f"time/{phase}_s"] for row in rows)
        for phase in ("rollout", "refit", "train")
    }
    tokens = RowTokens(
        prompt=PROMPT_TOKENS,
        completion=mean["rollout/completion_tokens"],
        longest=config.generation.max_new_tokens,
    )
    shape = shape_of(record["workload"]["model"].partition(",")[0])
    for phase in predict_step(config, shape, plan_run(config), tokens):
        if phase.name in median:
            yield Compared(name, phase.name, phase.seconds, median[phase.name])


def _training(record: dict[str, Any]) -> Iterator[Compared]:
    changes: dict[str, Any] = {"dtype": "bfloat16"}
    parallel: dict[str, Any] = {}
    for word in record["config"].split(","):
        key, _, value = word.partition("=")
        target, key = (parallel, key[9:]) if key.startswith("parallel.") else (changes, key)
        target[key] = value if key == "activation_checkpointing" else json.loads(value)
    policy = PolicyConfig(parallel=ParallelConfig(**parallel)).replace(**changes)
    mean = record["length"] * (0.625 if record.get("vary") else 1.0)
    ranks = record["gpus"]
    count = record["rows"] * mean * ranks
    name = f"training-h100 {record['shape']} {ranks} {record['rows']} {record['config']}"
    for phase, predict in (("logprobs", forward_seconds), ("train", train_seconds)):
        predicted = predict(policy, shape_of(record["shape"]), ranks, count, mean)
        yield Compared(name[:64], phase, predicted, min(record[f"{phase}_s"][2:]))


def _offload() -> Iterator[Compared]:
    (record,) = read_rows(RESULTS / "offload-h200.jsonl")
    for moments in ("float32", "bfloat16", "int8"):
        optimizer = OptimizerConfig().replace(moments=moments)
        policy = PolicyConfig(offload="optimizer").replace(optimizer=optimizer)
        predicted = offload_seconds(policy, record["parameters"], 1)
        measured = statistics.median(record[f"{moments}_host"]["step_s"])
        yield Compared(f"offload-h200 {moments}", "optimizer", predicted, measured)


if __name__ == "__main__":
    main()
