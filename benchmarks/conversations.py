"""Many conversations whose environment takes its time, some of which fail or hang.

    python benchmarks/conversations.py --count 10000 --at-once 100 --out conversations.jsonl

Each step takes 0 to 2 s at random, every second one in a thread. Of 1,000 conversations three
raise, three hang in a coroutine and four in a thread; those that hang hold their place until
``environment.timeout_s``. Sampling is free. In the ideal the next begins when another ends.
"""

import argparse
import asyncio
import heapq
import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nemo_like
from nemo_like.config.environment import EnvironmentConfig
from nemo_like.data.chat import ChatTokenizer
from nemo_like.data.datasets import Row
from nemo_like.environments.protocol import ENDPOINT
from nemo_like.generation.protocol import (
    Completion,
    FinishReason,
    GenerationRequest,
    SamplingParams,
)
from nemo_like.rewards.pool import RewardPool
from nemo_like.rewards.start import start_pool
from nemo_like.rollout.endpoint import Endpoint
from nemo_like.rollout.recorder import Limits, Recorder
from nemo_like.rollout.trajectory import RolloutTask, Trajectory

TIMEOUT_S = 5.0
HANGS, FAILS = ("hangs", "hangs in a thread"), "raises"
ENVIRONMENT = """
import asyncio, time
from nemo_like.environments.protocol import Observation, StepResult

class Waits:
    def reset(self, row):
        self.kind, self.seconds = row["kind"], row["seconds"]
        self.step = self.in_thread if row["thread"] else self.on_loop
        return Observation()
    async def on_loop(self, action):
        await asyncio.sleep(self.seconds)
        return self.result()
    def in_thread(self, action):
        time.sleep(self.seconds)
        return self.result()
    def result(self):
        if self.kind == "raises":
            raise ValueError("as it was asked to")
        return StepResult(reward=1.0, done=True)
    def step(self, action):
        raise NotImplementedError
"""


class FreeEngine:
    """Samples the same answer at once."""

    def __init__(self, chat: ChatTokenizer) -> None:
        self._ids = [*chat.cuts.ids("go"), chat.eos_token_ids[-1]]

    async def generate(self, request: GenerationRequest) -> Completion:
        return Completion(
            token_ids=self._ids,
            logprobs=[-1.0] * len(self._ids),
            finish_reason=FinishReason.stop,
            weight_version=0,
        )


def rows(count: int, longest_s: float) -> Iterator[dict[str, Any]]:
    """What each conversation does; 1 % of them badly."""
    draw = random.Random(0)
    for index in range(count):
        seconds, thread, kind = draw.uniform(0, longest_s), index % 2 == 1, ""
        if index % 100 == 50:
            kind = (FAILS, HANGS[0], HANGS[1])[min(2, index // 100 % 10 // 3)]
            thread = kind == HANGS[1]
            seconds = seconds if kind == FAILS else 10**5
        yield {"kind": kind, "seconds": seconds, "thread": thread}


async def converse(
    given: list[dict[str, Any]], chat: ChatTokenizer, pool: RewardPool
) -> list[Trajectory]:
    """All of them at once, as a rollout worker has them."""
    endpoint, engine = Endpoint("policy"), FreeEngine(chat)
    await endpoint.start()
    messages = ({"role": "user", "content": "Go."},)
    prompt_ids = tuple(chat.render(messages))

    async def one(index: int, fields: dict[str, Any]) -> Trajectory:
        row = Row(index=index, messages=messages, fields=fields, prompt_ids=prompt_ids)
        task = RolloutTask(row=row, group=index, index=0, seed=index, request_id=str(index))
        sampling = SamplingParams(max_new_tokens=16)
        recorder = Recorder(task, engine.generate, chat, sampling, Limits(tokens=512, turns=2))
        with endpoint.serving(recorder) as address:
            sent = fields | {"messages": list(messages), ENDPOINT: list(address)}
            result = await pool.score(row.prompt, "", sent)
        return recorder.trajectory(result)

    try:
        return await asyncio.gather(*(one(i, fields) for i, fields in enumerate(given)))
    finally:
        await endpoint.close()


def ideal_s(each_s: list[float], at_once: int) -> float:
    """Seconds, if the next one always began when another ended.

    >>> ideal_s([2, 1, 1, 1], 2)
    3
    """
    free = [0.0] * at_once
    for seconds in each_s:
        heapq.heappush(free, heapq.heappop(free) + seconds)
    return max(free)


def measure(count: int, at_once: int, processes: int, longest_s: float = 2.0) -> dict[str, Any]:
    """Seconds, the ideal, and what was lost."""
    given = list(rows(count, longest_s))
    chat = ChatTokenizer(str(Path(nemo_like.__file__).parent / "models" / "embedded"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "waits.py"
        path.write_text(ENVIRONMENT)
        config = EnvironmentConfig(
            name=f"{path}:Waits",
            timeout_s=TIMEOUT_S,
            rows_at_once=at_once // processes,
            num_processes=processes,
        )
        pool = start_pool(config)
        try:
            begin, cpu = time.monotonic(), time.process_time()
            found = asyncio.run(converse(given, chat, pool))
            seconds, cpu = time.monotonic() - begin, time.process_time() - cpu
        finally:
            pool.shutdown()
    ideal = ideal_s([min(one["seconds"], TIMEOUT_S) for one in given], at_once)
    bad = {index for index, one in enumerate(given) if one["kind"]}
    lost = {index for index, one in enumerate(found) if one.result.reward is None}
    errors = Counter((one.result.error or "")[:60] for one in found if one.result.reward is None)
    return {
        "count": count,
        "at_once": at_once,
        "processes": processes,
        "seconds": round(seconds, 2),
        "ideal_s": round(ideal, 2),
        "of_ideal": round(ideal / seconds, 3),
        "worker_cpu_s": round(cpu, 2),
        "bad": len(bad),
        "lost": len(lost),
        "lost_though_good": len(lost - bad),
        "bad_though_kept": len(bad - lost),
        "errors": dict(errors),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=100, help="conversations under way")
    parser.add_argument("--processes", type=int, default=1, help="environment.num_processes")
    parser.add_argument("--out", type=Path, required=True, help="a .jsonl file to append to")
    args = parser.parse_args()
    record = measure(args.count, args.at_once, args.processes)
    print(json.dumps(record))  # noqa: T201
    with args.out.open("a") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
