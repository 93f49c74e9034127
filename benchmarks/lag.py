"""Sampling ahead of training against waiting for each step, where some completions take long.

    python benchmarks/lag.py --out lag.jsonl --lags 0 1 2 --seeds 0 1 2

Two engines and a policy in processes of their own, on the CPU. The engine is ``hf`` with a pace: a
completion is held back for a time that is log-normal, at most ten times the median, and an engine
works on as many at once as a step has for it. So a step waits for its slowest completion as it does
on GPUs, and the figures hardly depend on how fast the processors are.
"""

import argparse
import asyncio
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from nemo_like.config.generation import EngineKind
from nemo_like.generation.hf_engine import HFEngine
from nemo_like.generation.protocol import Completion, EngineConfig, GenerationRequest
from nemo_like.launch.simulation import Workload, log_normal, simulate

MEDIAN_S, SPREAD, MOST = 0.2, 0.9, 10.0
PROMPTS, GROUP = 8, 8
HERE = Path(__file__).resolve()
EXAMPLE = HERE.parents[1] / "examples" / "custom_reward"


def seconds_of(seed: int) -> float:
    """How long the completion of this seed takes."""
    drawn = math.exp(SPREAD * random.Random(seed).gauss(0, 1))
    return MEDIAN_S * min(drawn, MOST)


class PacedEngine(HFEngine):
    """``hf``, slower."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(replace(config, engine_kwargs={}))
        self._slots = asyncio.Semaphore(PROMPTS * GROUP // 2)

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample, then wait until its time has come."""
        async with self._slots:
            ends = time.monotonic() + seconds_of(request.seed)
            completion = await super().generate(request)
            await asyncio.sleep(max(0.0, ends - time.monotonic()))
            return completion


KIND = EngineKind(engine=PacedEngine)


def measured(lag: int, order: str, seed: int, steps: int) -> dict[str, object]:
    """One run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            str(HERE.parents[1] / "examples" / "run_grpo.py"),
            f"run.dir={folder}/run",
            f"run.seed={seed}",
            f"generation.backend={HERE}:KIND",
            "generation.max_new_tokens=16",
            "cluster.cpu_workers_per_node=3",
            "cluster.cpus_per_worker=0.5",
            "cluster.num_generation_workers=2",
            f"data.train={EXAMPLE}/rows.jsonl",
            f"environment.reward={EXAMPLE}/reward.py:reward",
            f"grpo.max_steps={steps}",
            f"grpo.num_prompts_per_step={PROMPTS}",
            f"grpo.num_generations_per_prompt={GROUP}",
            "policy.optimizer.lr=3e-4",
            "checkpoint.export=false",
            "logging.sinks=[]",
            f"rollout.max_lag={lag}",
            *([f"rollout.order={order}"] if lag else []),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    made = [record for record in map(json.loads, lines) if record["step"]]
    later = made[3:]
    spent = [one["time/step_s"] - one["time/rollout_s"] for one in later]
    work = Workload(
        groups=PROMPTS,
        group_size=GROUP,
        engines=2,
        slots=PROMPTS * GROUP // 2,
        train_s=statistics.mean(spent),
        tokens=log_normal(MEDIAN_S, SPREAD, MOST),
        token_s=lambda _: 1.0,
        lag=lag,
        by_readiness=order == "ready",
    )
    tokens = sum(one["train/num_tokens"] for one in later)
    seconds = sum(one["time/step_s"] for one in later)
    return {
        "lag": lag,
        "order": order,
        "seed": seed,
        "tokens_per_s": round(tokens / seconds, 1),
        "step_s_mean": round(statistics.mean(one["time/step_s"] for one in later), 3),
        "step_s_simulated": round(simulate(work).step_s, 3),
        "train_s": round(statistics.median(one["time/train_s"] for one in later), 3),
        "reward_first": round(statistics.mean(one["rollout/reward"] for one in made[:3]), 4),
        "reward_last": round(statistics.mean(one["rollout/reward"] for one in made[-5:]), 4),
        "staleness": round(statistics.mean(one.get("staleness/mean", 0.0) for one in later), 3),
        "staleness_max": max(one.get("staleness/max", 0.0) for one in later),
    }


def main() -> None:
    """Run all, and append a record of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--orders", nargs="+", default=["first_in"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=24)
    args = parser.parse_args()
    for seed in args.seeds:
        for lag in args.lags:
            for order in args.orders if lag else args.orders[:1]:
                record = measured(lag, order, seed, args.steps)
                sys.stderr.write(f"{record}\n")
                with args.out.open("a") as file:
                    file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
