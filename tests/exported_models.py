"""Tiny random models of many architectures, made from configurations."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig

SHAPE = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "tie_word_embeddings": False,
}
HEAD = {"head_dim": 32}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "num_key_value_heads": 2,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
GPT = {"vocab_size": 259, "bos_token_id": 2, "eos_token_id": 2}


def _make(name: str, **changes: Any) -> PreTrainedConfig:
    return getattr(transformers, name)(**(SHAPE | changes))


def _opt() -> PreTrainedConfig:
    return transformers.OPTConfig(
        **GPT,
        hidden_size=64,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        word_embed_proj_dim=64,
        pad_token_id=0,
    )


def _neox() -> PreTrainedConfig:
    # Without keys that it does not know, which vLLM would heed.
    shape = {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"}
    return transformers.GPTNeoXConfig(**shape)


def _falcon() -> PreTrainedConfig:
    return transformers.FalconConfig(
        **GPT, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, bias=False
    )


def _moe(name: str, **changes: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: _make(name, **changes)


DENSE: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": _moe("LlamaConfig", **HEAD),
    "llama-tied": _moe("LlamaConfig", **HEAD, tie_word_embeddings=True),
    "qwen2-tied": _moe("Qwen2Config", tie_word_embeddings=True),
    "qwen3": _moe("Qwen3Config", **HEAD),
    "mistral": _moe("MistralConfig", **HEAD, sliding_window=None),
    "phi3": _moe("Phi3Config", original_max_position_embeddings=256),
    "gemma2": _moe("Gemma2Config", **HEAD, query_pre_attn_scalar=32, tie_word_embeddings=True),
    "gemma3": _moe(
        "Gemma3TextConfig",
        **HEAD,
        query_pre_attn_scalar=32,
        tie_word_embeddings=True,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "cohere": _moe("CohereConfig", logit_scale=0.25, tie_word_embeddings=True),
    "granite": _moe("GraniteConfig", logits_scaling=8.0, attention_multiplier=0.1),
    "olmo2": _moe("Olmo2Config"),
    "glm4": _moe("Glm4Config", **HEAD),
    "gpt2-tied": lambda: transformers.GPT2Config(
        **GPT, n_embd=64, n_layer=2, n_head=2, n_positions=256
    ),
    "neox": _neox,
    "opt-tied": _opt,
    "falcon-tied": _falcon,
}
EXPERTS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3-moe": _moe("Qwen3MoeConfig", **HEAD, **MOE, norm_topk_prob=True),
    "qwen3-moe-tied": _moe("Qwen3MoeConfig", **HEAD, **MOE, tie_word_embeddings=True),
    "qwen2-moe": _moe("Qwen2MoeConfig", **MOE, shared_expert_intermediate_size=64),
    "mixtral": _moe("MixtralConfig", **HEAD, num_local_experts=4, num_experts_per_tok=2),
    "olmoe": _moe("OlmoeConfig", num_experts=4, num_experts_per_tok=2, num_key_value_heads=2),
    "deepseek-v2": _moe(
        "DeepseekV2Config", **LATENT, **ROUTED, q_lora_rank=None, topk_method="greedy"
    ),
    "deepseek-v3": _moe(
        "DeepseekV3Config",
        **LATENT,
        **ROUTED,
        q_lora_rank=32,
        n_group=2,
        topk_group=1,
    ),
    "glm4-moe": _moe("Glm4MoeConfig", **HEAD, **ROUTED, n_group=1, topk_group=1),
    "gpt-oss": _moe(
        "GptOssConfig", **HEAD, num_local_experts=4, num_experts_per_tok=2, sliding_window=128
    ),
    "qwen3-next": _moe(
        "Qwen3NextConfig",
        **HEAD,
        **MOE,
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=2,
        linear_num_key_heads=1,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        shared_expert_intermediate_size=32,
    ),
}
FAMILIES = DENSE | EXPERTS
# What the policy computes with where its own attention has no place for what the model adds.
EAGER = ("gemma2", "gpt-oss")


def build(family: str, folder: Path, tokenizer: Path) -> Path:
    """Save a model with random weights, norms and biases too, and the files of ``tokenizer``."""
    config = FAMILIES[family]()
    config.initializer_range = 0.08
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    model.save_pretrained(folder)
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
    return folder
