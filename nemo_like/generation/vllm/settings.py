"""What vLLM is started with: engine arguments, with our reasons.

Pure, and without an import of vLLM.
"""

import difflib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from nemo_like.config.model_files import trusts_code
from nemo_like.errors import UserError
from nemo_like.generation.protocol import EngineConfig
from nemo_like.planning.model_shape import experts_key, kept_share, read_settings
from nemo_like.planning.offload import WORKSPACE_BYTES

_ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Sizes of buffers that vLLM has for adapters that it computes with."""
CPU_KV_CACHE_BYTES = 2**30
"""Most KV cache of each rank on the CPU; by default vLLM takes nearly all memory."""
CPU_BATCHED_TOKENS = 4096
"""Most tokens of one forward pass on the CPU, where the context does not ask for more."""
CPU_BLOCK_TOKENS = 32
"""Tokens of a KV block on the CPU. Only whole blocks of a prompt are shared between siblings, and
with vLLM's 128 short prompts have none; the CPU kernels want multiples of 32."""

ADAPTER_ID = 1
"""Of the one adapter, in vLLM."""

GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Numbers of sequences that decoding has a CUDA graph for; vLLM's own 70 take 20 s to capture, and
a step of one with fewer sequences is hardly faster."""


def engine_args(
    config: EngineConfig, known: Collection[str], gpu_memory_bytes: int
) -> dict[str, Any]:
    """Merge what we need with the user's ``engine_kwargs``.

    ``known`` are the arguments of the installed vLLM, ``gpu_memory_bytes`` is all memory of a GPU.
    Raises UserError for a key that may not or cannot be passed.
    """
    for key in config.engine_kwargs:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            remedy = f"did you mean {near[0]}?" if near else "remove it."
            raise UserError(
                f"generation.engine_kwargs.{key} is not an argument of the installed vLLM; {remedy}"
            )
    args = {
        "model": config.model_path,
        "dtype": config.dtype,
        "seed": config.seed,
        "max_model_len": config.max_model_len,
        "trust_remote_code": trusts_code(),
        "tensor_parallel_size": config.tensor_parallel_size,
        "max_num_seqs": config.max_num_seqs,
        "logprobs_mode": "processed_logprobs",
        "load_format": "dummy",  # The first refit brings the weights.
        "generation_config": "vllm",  # Not the model folder's own sampling defaults.
        "worker_extension_cls": "nemo_like.generation.vllm.worker.RefitExtension",
        "scheduler_cls": "nemo_like.generation.vllm.scheduler.WholeCompletions",
        # Inside a Ray actor vLLM would choose Ray, and look for bundles of its own in our group.
        "distributed_executor_backend": "mp" if config.tensor_parallel_size > 1 else "uni",
        "disable_log_stats": True,
    }
    args |= _adapter_args(config) | _quantization_args(config)
    if config.device == "cpu":
        args |= _cpu_args(config) | config.engine_kwargs
    else:
        args |= _gpu_args(config, gpu_memory_bytes)
    _refuse_small_cache(config, args)
    return args


def _refuse_small_cache(config: EngineConfig, args: dict[str, Any]) -> None:
    """Raise UserError if the longest row does not fit: it would wait for ever."""
    cache_bytes = args.get("kv_cache_memory_bytes")
    if config.kv_cache_bytes is None or cache_bytes is None:
        return
    seen = kept_share(
        read_settings(Path(config.model_path)),
        config.max_model_len,
        args.get("max_num_batched_tokens", 0),
    )
    needed = int(seen * config.kv_cache_bytes) // config.max_num_seqs
    if cache_bytes < needed:
        raise UserError(
            f"A KV cache of {cache_bytes} bytes cannot hold one row of {config.max_model_len} "
            f"tokens, which takes {needed}; lower generation.max_new_tokens, or raise "
            "generation.engine_kwargs.kv_cache_memory_bytes."
        )


def _adapter_args(config: EngineConfig) -> dict[str, Any]:
    if config.lora is None:
        return {}
    from nemo_like.models.adapter_places import expected_adapters

    expected = expected_adapters(config.model_path, getattr(torch, config.dtype), config.lora)
    layers = {name.rsplit(".", 3)[-3] for name in expected}
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(one for one in _ADAPTER_RANKS if one >= config.lora.rank),
        # All others stay as they are, without a place for adapters.
        "lora_target_modules": sorted(layers),
    }


def _quantization_args(config: EngineConfig) -> dict[str, Any]:
    if config.quantization is None:
        return {}
    settings = read_settings(Path(config.model_path))
    if odd := "kv_lora_rank" if settings.get("kv_lora_rank") else experts_key(settings):
        raise UserError(
            f"generation.quantization={config.quantization} is for dense models without latent "
            f"attention, and the config.json of {config.model_path} has {odd}; leave it out."
        )
    return {"quantization": "fp8_per_channel"}


def _gpu_args(config: EngineConfig, memory_bytes: int) -> dict[str, Any]:
    """The user's ``engine_kwargs`` included."""
    sizes = [size for size in GRAPH_SIZES if size < config.max_num_seqs]
    args: dict[str, Any] = {
        "enable_sleep_mode": config.sleep,
        "gpu_memory_utilization": config.gpu_memory_share,
        # Prefills of a rollout are few and long; without graphs for them an engine starts sooner.
        "compilation_config": {
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [*sizes, config.max_num_seqs],
        },
    }
    if config.dtype != "float32":
        # The trainer's logits are float32 too; rounded, one of 16 to 32 in bfloat16 is off by 1/16,
        # and so is the distribution that is sampled from.
        args["hf_overrides"] = {"head_dtype": "float32"}
    for key, value in config.engine_kwargs.items():
        ours = args.get(key)
        args[key] = ours | value if isinstance(ours, dict) and isinstance(value, dict) else value
    if config.kv_cache_bytes is not None and "kv_cache_memory_bytes" not in args:
        share = int(memory_bytes * args["gpu_memory_utilization"])
        room = share - WORKSPACE_BYTES - config.weight_bytes
        if room < config.kv_cache_bytes // config.max_num_seqs:
            raise UserError(
                f"An engine may take {share / 2**30:.1f} GiB of its GPU, which leaves no KV cache "
                f"next to {config.weight_bytes / 2**30:.1f} GiB of weights; set "
                "generation.sleep=true, a larger generation.engine_kwargs.gpu_memory_utilization, "
                "a larger generation.tensor_parallel_size, or fewer engines on each GPU "
                "(generation.num_engines_per_bundle)."
            )
        args["kv_cache_memory_bytes"] = min(config.kv_cache_bytes, room)
    if "kv_cache_memory_bytes" in args:
        # Of no further effect then, but compared with what is free, which others are changing.
        args["gpu_memory_utilization"] = 0.01
    return args


def _cpu_args(config: EngineConfig) -> dict[str, Any]:
    if config.engine_kwargs.get("enable_chunked_prefill"):
        raise UserError(
            "generation.engine_kwargs.enable_chunked_prefill=true ends vLLM's engine at the first "
            "long prompt on the CPU; remove it."
        )
    if read_settings(Path(config.model_path)).get("kv_lora_rank"):
        raise UserError(
            "generation.backend=vllm: on the CPU vLLM (0.32) has other logprobs than transformers "
            f"for models with latent attention (kv_lora_rank in the config.json of "
            f"{config.model_path}), by 0.1 and more; set generation.backend=hf."
        )
    return {
        # Compiling takes half a minute and a C++ compiler.
        "enforce_eager": True,
        "kv_cache_memory_bytes": min(
            CPU_KV_CACHE_BYTES, config.kv_cache_bytes or CPU_KV_CACHE_BYTES
        ),
        "block_size": CPU_BLOCK_TOKENS,
        # A prompt that is prefilled in parts makes vLLM (0.26 to 0.32) rewind its request's
        # generator, which ends the engine: "CPU Generator does not use offset".
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(config.max_model_len, CPU_BATCHED_TOKENS),
    }
