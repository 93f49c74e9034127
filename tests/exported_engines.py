"""vLLM in this process, refitted as a run refits it, to compare with what a folder holds.

    with RefittedEngine(folder) as engine:
        engine.refit(load_file(other / "model.safetensors"))
        engine.prompt_logprobs([[5, 6, 7]])
        engine.complete([[5, 6, 7]], 8)

The engine starts without weights, as ours do, and gets them through our senders and our worker
extension. Several may follow one another in one process. An import takes 5 s, a start 0.5 s.

vLLM runs some architectures (OLMo 2, SmolLM3) by transformers' own classes, which it changes:
inside the ``with`` block transformers cannot make a plain model of that class; before and after,
it can. Attention heads of width 64 are fine on the CPU; of 32, the first call takes 20 s.
"""

import gc
import logging
import os
import pickle
import threading
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import vllm
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModel
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.registry import ModelRegistry, _LazyRegisteredModel

from nemo_like.generation.protocol import EngineConfig
from nemo_like.generation.vllm.environment import EngineDevices, start_environment
from nemo_like.generation.vllm.settings import engine_args
from nemo_like.refit.buckets import plan_buckets
from nemo_like.refit.ipc import IpcLink, IpcSender

CONTEXT = 128
TIMEOUT_S = 60.0
BUCKET_BYTES = 500_000
CPU = torch.device("cpu")


class RefittedEngine:
    """One engine of the architecture that ``folder`` describes, without weights at first."""

    def __init__(self, folder: str | Path, dtype: str = "float32", **engine_kwargs: Any) -> None:
        config = EngineConfig(
            model_path=str(folder),
            dtype=dtype,
            seed=0,
            max_model_len=CONTEXT,
            max_num_seqs=16,
            engine_kwargs={"kv_cache_memory_bytes": 2**25} | engine_kwargs,
        )
        args = engine_args(config, [field.name for field in fields(EngineArgs)], 0)
        # It holds a request's tokens back, prompt logprobs among them.
        del args["scheduler_cls"]
        args["skip_tokenizer_init"] = True  # The folder may have none.
        devices = EngineDevices(
            device="cpu", tensor_parallel_size=1, engine_kwargs=config.engine_kwargs
        )
        self._plain_class = _PlainClass(config.model_path)
        with start_environment(devices):
            _register(config.model_path)
            gc.freeze()  # vLLM collects several times, which takes half a second each otherwise
            logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
            self._llm = vllm.LLM(**args)
        self._dtype = getattr(torch, dtype)
        self._sender: IpcSender | None = None
        self._version = 0

    def __enter__(self) -> "RefittedEngine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def refit(self, tensors: Mapping[str, Tensor]) -> None:
        """Bring in all ``tensors``, named as on disk, as the next version.

        The first call agrees on names and shapes; later ones bring the same.
        """
        if self._sender is None:
            self._connect(tensors)
        self._version += 1
        with _Beside(self._sender.send, iter(tensors.items()), self._version):
            self._llm.collective_rpc("load_refit", args=(self._version, False))
        self._llm.reset_prefix_cache()

    def prompt_logprobs(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        """Logprobs [T - 1] of each row's tokens after its first, by a prefill."""
        params = vllm.SamplingParams(
            max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False
        )
        outputs = self._llm.generate(_prompts(rows), params, use_tqdm=False)
        found = []
        for row, output in zip(rows, outputs, strict=True):
            columns = output.prompt_logprobs[1:]
            pairs = zip(columns, row[1:], strict=True)
            found.append(torch.tensor([column[token].logprob for column, token in pairs]))
        return found

    def complete(
        self, prompts: Sequence[Sequence[int]], num_tokens: int
    ) -> list[tuple[list[int], Tensor]]:
        """``num_tokens`` sampled token ids for each prompt, and their logprobs, by decoding."""
        params = vllm.SamplingParams(
            max_tokens=num_tokens,
            temperature=1.0,
            seed=0,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
        )
        found = []
        for output in self._llm.generate(_prompts(prompts), params, use_tqdm=False):
            (sampled,) = output.outputs
            ids = list(sampled.token_ids)
            pairs = zip(sampled.logprobs, ids, strict=True)
            found.append((ids, torch.tensor([column[token].logprob for column, token in pairs])))
        return found

    def close(self) -> None:
        """End the engine, so that the next one finds the process as this one did."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        self._sender = None
        cleanup_dist_env_and_memory()
        self._plain_class.restore()
        gc.collect()

    def _connect(self, tensors: Mapping[str, Tensor]) -> None:
        specs = {name: (tuple(each.shape), each.dtype) for name, each in tensors.items()}
        buckets = plan_buckets(specs, BUCKET_BYTES)
        self._sender = IpcSender(buckets, CPU, 1, TIMEOUT_S)
        link = IpcLink((self._sender.address,))
        with _Beside(self._sender.accept):
            pickled = pickle.dumps((link, buckets, TIMEOUT_S, None))
            self._llm.collective_rpc("connect_refit", args=(pickled,))


def tensors_on_disk(folder: str | Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files, by their names there."""
    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def _register(folder: str) -> None:
    """Spare vLLM a process per architecture that imports it to see what the model can do."""
    for name in AutoConfig.from_pretrained(folder).architectures or ():
        known = ModelRegistry.models.get(name)
        if isinstance(known, _LazyRegisteredModel):
            ModelRegistry.register_model(name, known.load_model_cls())


class _PlainClass:
    """transformers' class for the layers of ``folder``'s model, as it is before vLLM."""

    def __init__(self, folder: str) -> None:
        self._class: Any = AutoModel._model_mapping[type(AutoConfig.from_pretrained(folder))]
        self._bases = self._class.__bases__
        self._own = {name: vars(self._class).get(name) for name in ("__init__", "__call__")}

    def restore(self) -> None:
        if self._class.__bases__ == self._bases:
            return
        self._class.__bases__ = self._bases
        for name, value in self._own.items():
            if value is not None:
                setattr(self._class, name, value)
            elif name in vars(self._class):
                delattr(self._class, name)


def _prompts(rows: Sequence[Sequence[int]]) -> list[Any]:
    return [{"prompt_token_ids": list(row)} for row in rows]


class _Beside:
    """Runs ``action`` in a thread beside the body; what it raises is raised at the end."""

    def __init__(self, action: Any, *args: Any) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(action, *args))

    def _run(self, action: Any, *args: Any) -> None:
        try:
            action(*args)
        except BaseException as error:
            self._error = error

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._thread.join(TIMEOUT_S)
        if error is None and self._error is not None:
            raise self._error
