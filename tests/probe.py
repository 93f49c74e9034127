"""Workers of tests of placement and failures; apart, since their processes import this file."""

import asyncio
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import ray

from nemo_like.distributed.worker import Worker, tokens_apart
from nemo_like.errors import RunError, UserError, WorkerDiedError


class Probe(Worker):
    """A worker that reports, fails or dies on demand."""

    def place(self) -> tuple[int, str]:
        return self.context.rank, ray.get_runtime_context().get_node_id()

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def echo(self, value: object) -> object:
        return value

    def fail(self, message: str) -> None:
        if self.context.rank == 1:
            raise RunError(message)
        time.sleep(60)

    def refuse(self) -> None:
        raise UserError("generation.engine_kwargs.enforce_eagr is not a setting of vLLM.")

    def bug(self) -> None:
        raise KeyError("a bug")

    def die(self) -> None:
        if self.context.rank == 1:
            sys.stderr.write("about to break\n")
            os._exit(9)
        time.sleep(60)

    def lose_its_engine(self) -> None:
        raise WorkerDiedError("the process of its engine died.")

    def hang(self) -> None:
        time.sleep(600)


@dataclass(frozen=True)
class Found:
    num_bytes: int
    tokens: object = None


class Sampling(Worker):
    """As a rollout worker: its results and tokens are returned apart."""

    async def pid(self) -> int:
        return os.getpid()

    async def hang(self) -> None:
        await asyncio.sleep(60)

    @tokens_apart
    async def sample(self, num_bytes: int) -> tuple[Found, bytes]:
        if num_bytes < 0:
            raise RunError("no tokens")
        return Found(num_bytes), bytes(num_bytes)


class Ending(Worker):
    """As a generation worker, with an engine that takes a while to end."""

    def shutdown_engine(self) -> None:
        time.sleep(3.0)  # longer than a wait goes on without a look at idle workers
        Path(self.context.log_dir, "ended").touch()
