"""Processes that stay: importing torch and transformers once for many small distributed tests."""

import importlib
import multiprocessing
import os
import socket
import traceback
from typing import Any


class ProcessPool:
    """``size`` processes; ``run(world_size, "module:function", *args)`` makes the first of them a
    gloo world of their own and returns what the function returned on each rank.
    """

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes = []
        self._processes = []
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, world_size: int, target: str, *args: Any, timeout_s: float = 300.0) -> list[Any]:
        port = _free_port()
        for rank, pipe in enumerate(self._pipes[:world_size]):
            pipe.send((rank, world_size, port, target, args))
        results = []
        for rank, pipe in enumerate(self._pipes[:world_size]):
            assert pipe.poll(timeout_s), f"{target}{args}: rank {rank} did not answer"
            results.append(pipe.recv())
        failures = [str(value) for ok, value in results if not ok]
        assert not failures, "\n".join(failures)
        return [value for _, value in results]

    def close(self) -> None:
        for process in self._processes:
            process.kill()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _serve(pipe: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            rank, world_size, port, target, args = pipe.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"tcp://127.0.0.1:{port}",
                rank=rank,
                world_size=world_size,
            )
            module, _, function = target.partition(":")
            value = getattr(importlib.import_module(module), function)(*args)
            pipe.send((True, value))
        except BaseException:  # the boundary of a process: the test must see why it failed
            pipe.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
