"""Compare what ``nemo-like plan`` predicts with the records in ``results/``.

    python benchmarks/predicted.py

One line for each record and phase: predicted and measured seconds or GiB, and their ratio. Records
with lag, or a simulated step, are compared with ``nemo-like plan --simulate``. Left out are other
contenders and algorithms, runs in ``LEFT_OUT`` and ``*-smollm2-h200.metrics.jsonl``, which shared
their GPU, and starts, which depend on what was cached: the same command took 43 to 151 s.
"""

import json
import math
import statistics
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from workloads import SHAPES, SMOLLM2, WORKLOADS, read_rows

from nemo_like.compose.load import compose_config
from nemo_like.config.optimizer import OptimizerConfig
from nemo_like.config.policy import ParallelConfig, PolicyConfig
from nemo_like.config.sampling import SamplingRunConfig
from nemo_like.launch import plan_lag
from nemo_like.planning.memory import predict_memory
from nemo_like.planning.model_shape import ModelShape
from nemo_like.planning.resources import ResourcePlan, plan_run
from nemo_like.planning.step_time import (
    ROLLOUT_S,
    RowTokens,
    Work,
    decoding,
    forward_seconds,
    offload_seconds,
    predict_step,
    refit_seconds,
    train_seconds,
)

RESULTS = Path(__file__).parent / "results"
CONFIGS = Path(__file__).parents[1] / "configs"
_PLANS = "before commit 20317f1 cuDNN planned attention anew for each number and length of rows"
_TAIL = (4, 5, 7, 8, 9, 10, 11, 16, 17)
"""Lines of ``lag-h200`` before 53 that are not of SmolLM2."""
LEFT_OUT = {
    **dict.fromkeys(
        [
            *[("lag-h200", i) for i in range(53) if i not in _TAIL],
            *[("learning-h200", i) for i in range(2)],
            *[("learning-225-steps-h200", i) for i in range(2)],
            *[("grpo-h200", 3), ("peers-h200", 2), ("fp8-h200", 2), ("fp8-h200", 3)],
        ],
        f"{_PLANS}: half of SmolLM2's training",
    ),
    **dict.fromkeys([("lag-h200", i) for i in (8, 54)], "overlap at lag 0 is not predicted"),
}
_TURNS = "two `graph` engines on a GPU take turns, which one would not have to"
_SHARED = "sampling by `graph` and training keep the same GPU busy, which plans count apart"
_TWO_ENGINES = "unknown: two engines at once were slower than one, which of them changed by step"
_WAKE = (
    "the engine took 0.1 s longer to wake than on another machine; rounding to 8 bits takes 0.06 s"
)
_PARTS = "an engine then sent tokens in parts of eight, and got its requests anew at each refit"
_CORES = "vLLM waits for Python, which this host with 32 cores runs in 0.6 to 0.8 of the time"
MISSED = {
    **{
        (f"lag-h200 {name}, two GPUs{engines}", phase): _CORES
        for name, engines, phases in (
            ("55 tail colocated", "", ("step", "rollout")),
            ("56 tail lag1", "", ("step",)),
            ("59 learning colocated", ", two engines", ("rollout",)),
            ("60 learning lag0", " with MPS, two engines", ("step", "rollout")),
            ("61 learning lag1", " with MPS, two engines", ("step",)),
        )
        for phase in phases
    },
    ("lag-h200 4 tail colocated, two GPUs", "train"): _PLANS,
    ("lag-h200 9 tail lag1, two GPUs", "step"): _PARTS,
    ("lag-h200 11 tail lag4, two GPUs", "step"): _PARTS,
    ("lag-h200 17 tail lag1, one GPU with MPS", "step"): _PLANS,
    **{("graph-h200 5 smollm2", phase): _TURNS for phase in ("step", "rollout")},
    **{
        (f"lag-h200 {name}, one GPU with MPS, graph", "step"): _SHARED
        for name in ("66 learning lag1", "67 learning lag1 seed1", "68 smollm2 lag1")
    },
    ("fp8-h200 6 learning", "train"): "each pass is Python's, which took longer than in line 5",
    ("fp8-h200 0 qwen7b", "refit"): _WAKE,
    ("fp8-h200 1 qwen7b", "refit"): _WAKE,
    **{("scaling-h200 6 qwen1.5b", phase): _TWO_ENGINES for phase in ("step", "rollout")},
    ("lag-lr1e-3-cpu seed 1 lag 0", "step"): "other work took the cores from sampling, too",
    ("scaling-h200 1 qwen1.5b", "refit"): "ranks then gathered each parameter by itself",
}
"""Records and phases that are off by more than 15 %, and why."""
PROMPT_TOKENS = 50
"""Of the workloads' prompts, by their tokenizer."""
_WITHOUT_EFFECT = (
    *("run.", "data.", "environment.", "logging.", "policy.model=", "validation.", "checkpoint."),
    *("grpo.max_steps=", "policy.optimizer.lr="),
)
"""Settings that change no prediction, or name files."""


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
    for path in sorted(RESULTS.glob("*.jsonl")):
        for i, record in enumerate(read_rows(path)):
            if (path.stem, i) in LEFT_OUT:
                continue
            if record.get("contender") == "ours" and record["records"]:
                name = record.get("case", record["workload"]["name"])
                yield from _run(f"{path.stem} {i} {name}", record)
            elif "step_s_simulated" in record:
                name = f"{path.stem} seed {record['seed']} lag {record['lag']}"
                predicted, measured = record["step_s_simulated"], record["step_s_mean"]
                yield Compared(name, "step", predicted, measured)
            elif "train_s" in record:
                yield from _training(path.stem, record)
    yield from _offload()
    for record in read_rows(RESULTS / "refit-h200.jsonl"):
        shape = shape_of(record["shape"] or "qwen2.5-1.5b")
        predicted = refit_seconds(shape, "bfloat16", num_ranks=1, sleeps=False, backend="vllm")
        yield Compared(f"refit-h200 {record['shape']}", "refit", predicted, record["median_s"])
    for i, record in enumerate(read_rows(RESULTS / "decoding-h200.jsonl")):
        yield _decoding(i, record)


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


@cache
def _config(*words: str) -> SamplingRunConfig:
    config = compose_config(CONFIGS, "grpo", list(words))
    assert isinstance(config, SamplingRunConfig)
    return config


def _run(name: str, record: dict[str, Any]) -> Iterator[Compared]:
    words = [
        word
        for word in record["command"][2:]
        if not word.startswith(_WITHOUT_EFFECT) and "long_tail.py" not in word
    ]
    latest = {word.partition("=")[0]: word for word in words}
    if "with MPS" in name:
        latest["cluster.mps"] = "cluster.mps=true"  # It was started by hand.
    config = _config(*latest.values())
    rows = [row for row in record["records"] if row["step"] > 2]  # the first ones compile
    rows = rows[len(rows) % (1 + config.max_lag) :]  # with lag, steps take turns
    shape, plan = shape_of(record["workload"]["model"].partition(",")[0]), plan_run(config)
    lengths = [_longest(config, row) for row in rows]
    mean = statistics.mean(row["rollout/completion_tokens"] for row in rows)
    tokens = RowTokens(prompt=PROMPT_TOKENS, completion=mean, longest=statistics.mean(lengths))

    def measured(phase: str) -> float:
        # A few refits take seconds.
        mean = statistics.median if phase == "refit" else statistics.mean
        return mean(row[f"time/{phase}_s"] for row in rows)

    if config.overlaps:
        yield Compared(
            name, "step", _simulated(config, shape, plan, tokens, record), measured("step")
        )
    else:
        phases = predict_step(config, shape, plan, tokens)
        yield Compared(name, "step", sum(one.seconds for one in phases), measured("step"))
        for one in phases:
            yield Compared(name, one.name, one.seconds, measured(one.name))
    if "train/gpu_memory_gib" in rows[0] and not config.overlaps:
        yield _memory(name, config, shape, plan, rows, record)


def _longest(config: SamplingRunConfig, row: dict[str, Any]) -> float:
    """Of a step; older records say only whether a completion was cut off."""
    most = config.generation.max_new_tokens
    guess = most if row["rollout/truncated_share"] else 2 * row["rollout/completion_tokens"]
    return row.get("rollout/completion_tokens_max", guess)


def _simulated(
    config: SamplingRunConfig,
    shape: ModelShape,
    plan: ResourcePlan,
    tokens: RowTokens,
    record: dict[str, Any],
) -> float:
    lengths = None
    if "long_tail.py" not in " ".join(record["command"]):
        others = config.rows_per_step // 4 - 1
        rest = ((1 + others) * tokens.completion - tokens.longest) / others
        lengths = [tokens.longest] + [rest] * others
    times = plan_lag.predicted(config, shape, plan, lengths, tokens.prompt)
    sampling = None if plan.colocated else len(set().union(*plan.generation))
    planner = plan_lag.Planner(config, times, plan)
    return planner.outcome(plan.num_bundles, sampling, config.max_lag).found.step_s


def _memory(
    name: str,
    config: SamplingRunConfig,
    shape: ModelShape,
    plan: ResourcePlan,
    rows: list[dict[str, Any]],
    record: dict[str, Any],
) -> Compared:
    """Peak of a policy rank, in micro-batches as full as they were."""
    ranks, policy = len(plan.policy), config.policy
    prompt = PROMPT_TOKENS
    if policy.batching == "shared":
        prompt /= record["workload"]["num_generations"]
    filled = []
    for row in rows:
        tokens = (row["rollout/completion_tokens"] + prompt) * config.rows_per_step / ranks
        count = math.ceil(tokens / policy.micro_batch_tokens)
        filled.append((math.ceil(tokens / count), count))
    full, count = max(filled)
    policy = policy.replace(micro_batch_tokens=full)
    phases = predict_memory(shape, policy, ranks, num_micro_batches=count)
    measured = max(row["train/gpu_memory_gib"] for row in rows)
    return Compared(name, "memory", max(phase.total for phase in phases), measured)


def _decoding(i: int, record: dict[str, Any]) -> Compared:
    """Of ``backend=graph`` alone."""
    workload = WORKLOADS[record["workload"]]
    rounds = ["generation.quantization=fp8"] * record.get("fp8", False)
    config = _config("generation.backend=graph", "policy.dtype=bfloat16", *rounds)
    run, most = record["runs"][-1], workload.max_new_tokens
    at_once = run["tokens"] / most
    seen = round(60 + at_once / workload.num_completions * most / 2)
    token_s, _ = decoding(config, shape_of(workload.model.partition(",")[0]), seen)(at_once)
    return Compared(
        f"decoding-h200 {i} {workload.name}", "rollout", ROLLOUT_S + most * token_s, run["s"]
    )


def _training(name: str, record: dict[str, Any]) -> Iterator[Compared]:
    changes: dict[str, Any] = {"dtype": "bfloat16"}
    parallel: dict[str, Any] = {}
    for word in record["config"].split(","):
        key, _, value = word.partition("=")
        target, key = (parallel, key[9:]) if key.startswith("parallel.") else (changes, key)
        is_word = key in ("activation_checkpointing", "batching")
        target[key] = value if is_word else json.loads(value)
    policy = PolicyConfig(parallel=ParallelConfig(**parallel)).replace(**changes)
    mean = record["length"] * (0.625 if record.get("vary") else 1.0)
    ranks, prompt = record["gpus"], record.get("prompt", 0)
    trained = record["rows"] * (mean - prompt) * ranks
    shares = record["siblings"] if policy.batching == "shared" else 1
    count = trained + record["rows"] * prompt / shares * ranks
    name = f"{name} {record['shape']} {ranks} {record['rows']} {record['config']}"
    for phase, predict in (("logprobs", forward_seconds), ("train", train_seconds)):
        predicted = predict(Work(policy, shape_of(record["shape"]), ranks, count, mean, trained))
        yield Compared(name[:64], phase, predicted, min(record[f"{phase}_s"][2:]))
    # Micro-batches have whole rows, or whole groups.
    unit = mean if shares == 1 else (mean - prompt) * shares + prompt
    full = math.floor(policy.micro_batch_tokens / unit) * unit
    phases = predict_memory(
        shape_of(record["shape"]),
        policy.replace(micro_batch_tokens=round(full)),
        ranks,
        num_micro_batches=math.ceil(count / ranks / full),
    )
    most = max(phase.total for phase in phases)
    yield Compared(name[:64], "memory", most, record["train_peak_gib"])


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
