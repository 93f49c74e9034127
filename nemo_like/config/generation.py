"""Sections ``generation``, ``refit`` and ``mismatch``: engines, their weights, and their agreement
with the policy."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from nemo_like.config.section import Count, Instead, OnlyIf, Positive, Section
from nemo_like.doors import Door
from nemo_like.errors import UserError

_KEY = "generation.backend"
_ARGUMENTS = "generation.engine_kwargs"
_OWNED_BY_RUN = (
    "model",
    "tokenizer",
    "skip_tokenizer_init",
    "dtype",
    "seed",
    "max_model_len",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "logprobs_mode",
    "load_format",
    "trust_remote_code",
    "generation_config",
    "override_generation_config",
    "worker_extension_cls",
    "scheduler_cls",
    "enable_sleep_mode",
    "distributed_executor_backend",
    "enable_lora",
    "max_loras",
    "max_lora_rank",
    "lora_dtype",
    "lora_target_modules",
    "quantization",
    "quantization_config",
    # With drafts, logprobs of accepted tokens are not those of the distribution (0.32, on the CPU).
    "speculative_config",
)
"""Arguments of vLLM that follow from the rest of the configuration or that exactness needs."""
_COUNTS = ("max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes")
_SHARE = "gpu_memory_utilization"
"""Arguments that the run computes with."""
_PLAIN_KV_CACHES = ("auto", "bfloat16", "float16", "half", "float32")

Transport = Literal["ipc", "broadcast"]
_QUANTIZED = ("layers", "inner_mlps")


def _refused_by_vllm(given: Mapping[str, Any]) -> Iterator[str]:
    for key, value in given.items():
        if key in _OWNED_BY_RUN:
            yield (
                f"{_ARGUMENTS}.{key} follows from the rest of the configuration, or would make "
                "completions or their logprobs other ones; remove it."
            )
        if key in _COUNTS and (type(value) is not int or value < 1):
            yield f"{_ARGUMENTS}.{key}={value} must be a whole number, at least 1."
    share = given.get(_SHARE, 1)
    if type(share) not in (int, float) or not 0 < share <= 1:
        yield f"{_ARGUMENTS}.{_SHARE}={share} must be a number above 0 and at most 1."


def _refused_by_replay(given: Mapping[str, Any]) -> Iterator[str]:
    for key in given.keys() - {"folder"}:
        yield f"{_ARGUMENTS}.{key} has no effect on {_KEY}=replay, which takes folder; remove it."
    if not Path(folder := str(given.get("folder", ""))).is_absolute():
        yield (
            f"{_ARGUMENTS}.folder={folder or 'null'} must be the absolute path of a run, which "
            f"{_KEY}=replay replays."
        )


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """What an engine can do, and where it is. Keys that need more than it can are refused."""

    engine: Any
    """A class with the methods of ``Engine`` (``generation/protocol.py``), called with an
    ``EngineConfig``; or its path, ``package.module:name``, imported only where an engine runs."""
    transports: tuple[Transport, ...] = ("ipc", "broadcast")
    """How weights can reach it."""
    tensor_parallel: bool = False
    """Whether several workers can share it."""
    takes_kwargs: bool = False
    """Whether ``engine_kwargs`` means anything to it."""
    refused_kwargs: Callable[[Mapping[str, Any]], Iterable[str]] = lambda _: ()
    """Sentences on arguments that are wrong, as far as that shows without importing the engine."""
    sleeps: bool = False
    """Whether ``sleep`` frees memory."""
    lowest_temperature: float = 0.01
    """Least temperature above 0 whose logprobs are right: vLLM raises lower ones to 0.01, and
    float32 logits over lower ones are off by more than 4e-4."""
    most_adapter_rank: int = 0
    """Largest rank of LoRA adapters that it computes with apart from the model. 0: none."""
    float32_adapters_on_gpus: bool = True
    """Whether it computes with adapters of 32 bits there."""
    quantizes: Literal["layers", "inner_mlps"] | None = None
    """Whose matrices it can hold in 8 bits, made anew at each refit: all layers', or those of MLPs
    but for the first and the last layer."""
    has_turns: bool = True
    """Whether it can go on in a conversation."""
    float32_logits_on: tuple[str, ...] = ()
    """Devices on which its logits are float32, whatever ``policy.dtype`` is."""
    prepare: str | None = None
    """``module:function``, called with ``EngineDevices`` before its process imports the engine."""


VLLM = EngineKind(
    engine="nemo_like.generation.vllm.engine:VLLMEngine",
    tensor_parallel=True,
    takes_kwargs=True,
    refused_kwargs=_refused_by_vllm,
    sleeps=True,
    most_adapter_rank=512,
    float32_adapters_on_gpus=False,
    quantizes="layers",
    float32_logits_on=("cuda",),
    prepare="nemo_like.generation.vllm.environment:start_fork_server",
)
HF = EngineKind(engine="nemo_like.generation.hf_engine:HFEngine", most_adapter_rank=2**31)
GRAPH = EngineKind(
    engine="nemo_like.generation.graph.engine:GraphEngine",
    sleeps=True,
    quantizes="inner_mlps",
    float32_logits_on=("cuda", "cpu"),
)
REPLAY = EngineKind(
    engine="nemo_like.generation.replay:ReplayEngine",
    takes_kwargs=True,
    refused_kwargs=_refused_by_replay,
    most_adapter_rank=2**31,
    has_turns=False,
)
ENGINES = Door(
    "nemo_like.engines",
    {
        "vllm": "nemo_like.config.generation:VLLM",
        "graph": "nemo_like.config.generation:GRAPH",
        "hf": "nemo_like.config.generation:HF",
        "replay": "nemo_like.config.generation:REPLAY",
    },
    kind="EngineKind",
)


def engine_kind(backend: str) -> EngineKind:
    """That of ``generation.backend``; raises UserError."""
    kind = ENGINES.load(_KEY, backend)
    if not isinstance(kind, EngineKind):
        raise UserError(f"{_KEY}={backend} is a {type(kind).__name__}, not an EngineKind.")
    if kind.quantizes not in (None, *_QUANTIZED):
        raise UserError(
            f"{_KEY}={backend} has quantizes={kind.quantizes}, which must be "
            f"{' or '.join(_QUANTIZED)}."
        )
    return kind


def _needs(ability: str, backends: str = "vllm") -> OnlyIf:
    return OnlyIf(
        lambda here, _: bool(getattr(here.kind, ability)),
        f"this generation.backend does not have it; generation.backend={backends} does",
    )


class GenerationConfig(Section):
    """The engine that samples completions for training."""

    backend: Annotated[str, ENGINES] = "vllm"
    """``vllm``; ``graph``: our own, which samples without waiting for the host, for dense Llama,
    Qwen2 and Qwen3 models on one GPU each; ``hf``: a plain loop over the transformers model, for
    odd models and exact tests; ``replay``: the single-turn completions that an earlier run, with
    the same rows, seed and sizes, left in the folder ``engine_kwargs.folder``
    (``mismatch.action=ignore`` if its policy differed); or your own ``EngineKind``,
    ``file.py:NAME`` or ``package.module.NAME``."""
    temperature: Annotated[
        Positive, Instead("only validation and evaluation have greedy sampling")
    ] = 1.0
    """Sampling temperature; the policy's logprobs use it too. (Top-p and top-k exist for validation
    only: truncated sampling has no exact importance ratio.)"""
    max_new_tokens: Count = 64
    """Most tokens of one completion."""
    stop: list[str] = Field(default_factory=list)
    """Strings that end a completion, special tokens such as ``<|im_end|>`` too, besides the model's
    end tokens; the tokens that form them are kept and trained."""
    tensor_parallel_size: Annotated[Count, _needs("tensor_parallel")] = 1
    """Workers that share one engine (vllm)."""
    num_engines_per_bundle: Count = 1
    """Engines that share each bundle (GPU). With vllm, two help small models, which an engine's CPU
    side slows down."""
    quantization: Annotated[Literal["fp8"] | None, _needs("quantizes", "vllm or graph")] = None
    """Sample with matrices in 8 bits (dense models; vllm: all layers'; graph: those of MLPs, but
    for the first and the last layer). ``fp8``: one scale for each row of a matrix, made at each
    refit, and one for each token. The policy keeps ``policy.dtype``, so ``mismatch`` grows, and
    ``loss.importance`` must correct for it."""
    sleep: bool = True
    """Free the engine's GPU memory while the policy trains on the same GPU (vllm, graph). False
    saves about 0.1 s per step where memory holds both; ``graph`` also keeps its CUDA graphs."""
    engine_kwargs: Annotated[dict[str, Any], _needs("takes_kwargs")] = Field(default_factory=dict)
    """Passed to the engine unchanged (vllm; replay: ``folder``, an absolute path); arguments that
    follow from other keys are refused. ``kv_cache_dtype: fp8`` halves the KV cache."""

    @property
    def kind(self) -> EngineKind:
        """What the engine can do."""
        return engine_kind(self.backend)

    @property
    def kv_cache_is_quantized(self) -> bool:
        """Whether keys and values have fewer bits than the engine computes with."""
        return self.engine_kwargs.get("kv_cache_dtype", "auto") not in _PLAIN_KV_CACHES

    @property
    def samples_in_8_bits(self) -> bool:
        """Whether weights, keys or values have fewer bits than the policy computes with."""
        return self.quantization is not None or self.kv_cache_is_quantized

    def _rounding(self, here: str, run: Any) -> Iterator[str]:
        """Sampling in fewer bits needs a policy in 16 bits, and a correction where it trains."""
        found = [f"{here}.quantization={self.quantization}"] * (self.quantization is not None)
        found += [f"{here}.engine_kwargs.kv_cache_dtype"] * self.kv_cache_is_quantized
        importance = getattr(getattr(run, "loss", None), "importance", None)
        for key in found:
            if run.trains and importance in (None, "none"):
                remedy = "set truncate or mask" if importance else "leave it out"
                what = "loss.importance=none" if importance else "this run"
                yield f"{key} samples in 8 bits, for which {what} does not correct; {remedy}."
            if run.policy.dtype == "float32":
                yield f"{key} needs policy.dtype=bfloat16 or float16; set one of them."
        if self.quantization and run.policy.lora.rank and run.policy.lora.refit == "adapters":
            yield f"{found[0]} does not go with policy.lora.refit=adapters; set merged."

    def rules(self, here: str, run: Any) -> Iterator[str]:
        """The engine's arguments and lowest temperature, and corrected rounding."""
        yield from self.kind.refused_kwargs(self.engine_kwargs)
        yield from self._rounding(here, run)
        environments = run.environment.by_name.values()
        if not self.kind.has_turns and any(not one.is_single_turn for one in environments):
            yield (
                f"{here}.backend={self.backend} gives single completions alone, and this run's "
                "environment holds conversations; use another backend."
            )
        if self.temperature < (least := self.kind.lowest_temperature):
            yield f"{here}.temperature={self.temperature:g} must be at least {least:g}."


class RefitConfig(Section):
    """The policy's weights on their way to generation."""

    transport: Transport | None = None
    """``ipc``: each bundle's policy rank shares its memory with the engines on it (CUDA IPC; mapped
    memory on the CPU); ``broadcast``: policy rank 0 sends to all engines (NCCL; gloo on the CPU).
    None: ``ipc`` where both sides share bundles, else ``broadcast``."""


class MismatchConfig(Section):
    """Difference between the logprobs of the sampling engine and of the policy, same weights."""

    action: Literal["warn", "mask", "stop", "ignore"] = "warn"
    """What to do above the limit. ``warn``: log it; ``mask``: completions above it do not train,
    which takes a pass for the policy's logprobs before the step; ``stop``: end the run before the
    optimizer step. Unless it is ``ignore``, the first steps also stop where engine and policy
    differ far more, a ratio is not 1 or two seeds are equal."""
    max_mean_abs: Annotated[
        Positive | None,
        OnlyIf(lambda here, _: here.action != "ignore", "mismatch.action=ignore has no limit"),
    ] = None
    """Limit of the mean absolute difference. None: by ``policy.dtype``: 1e-3, 0.1 (bfloat16),
    0.0125 (float16); 0.5 where engines sample in 8 bits."""
