"""Every architecture in every layout of rows is exact, or refused with a layout that is."""

from typing import Any

import pytest
import transformers

from nemo_like.config.policy import ParallelConfig, PolicyConfig
from nemo_like.errors import UserError
from nemo_like.policy.state.checks import check_architecture
from tests.exported_models import HEAD, LATENT, MOE, ROUTED

LAYOUTS = {
    "policy.batching=packed": {"batching": "packed"},
    "policy.batching=padded and policy.attention=sdpa": {"batching": "padded"},
    "policy.batching=padded and policy.attention=eager": {
        "batching": "padded",
        "attention": "eager",
    },
}
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
}
FOUR = {"num_hidden_layers": 4}
WINDOW = {"sliding_window": 128}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
LONG_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 256,
    "rope_theta": 500000.0,
}

# The outcome in each of LAYOUTS: exact (+) or refused (-).
ALL, NONE, PADDED, EAGER = "+++", "---", "-++", "--+"
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", ALL, HEAD | {"rope_parameters": LONG_ROPE}),
    "smollm3": ("SmolLM3Config", ALL, FOUR | {"no_rope_layers": [1, 1, 1, 0]}),
    "gemma": ("GemmaConfig", ALL, HEAD),
    "gemma2": ("Gemma2Config", EAGER, HEAD | WINDOW | {"query_pre_attn_scalar": 32}),
    "gemma3": ("Gemma3TextConfig", ALL, HEAD | {"sliding_window": 512, "num_hidden_layers": 6}),
    "gemma3-window": ("Gemma3TextConfig", PADDED, HEAD | WINDOW | {"num_hidden_layers": 6}),
    "phi": ("PhiConfig", ALL, {"num_key_value_heads": 2}),
    "phi3": ("Phi3Config", ALL, {"original_max_position_embeddings": 512}),
    "phi3-window": ("Phi3Config", PADDED, WINDOW | {"original_max_position_embeddings": 512}),
    "mistral": ("MistralConfig", ALL, HEAD | {"sliding_window": None}),
    "mistral-window": ("MistralConfig", PADDED, HEAD | WINDOW),
    "ministral3": ("Ministral3Config", ALL, HEAD),
    "olmo2": ("Olmo2Config", ALL, {}),
    "olmo3": ("Olmo3Config", PADDED, FOUR | WINDOW),
    "olmoe": ("OlmoeConfig", ALL, {"num_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2Config", ALL, {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", ALL, HEAD | {"tie_word_embeddings": True}),
    "qwen2-moe": ("Qwen2MoeConfig", ALL, MOE | {"shared_expert_intermediate_size": 64}),
    "qwen3-moe": ("Qwen3MoeConfig", ALL, HEAD | MOE),
    "qwen3-next": (
        "Qwen3NextConfig",
        PADDED,
        FOUR | HEAD | LINEAR | MOE | {"shared_expert_intermediate_size": 32},
    ),
    "qwen3.5": ("Qwen3_5TextConfig", PADDED, FOUR | HEAD | LINEAR),
    "mixtral": (
        "MixtralConfig",
        ALL,
        HEAD | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "gpt-oss": (
        "GptOssConfig",
        EAGER,
        HEAD | WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    # Whatever its rows' length, its attention has a term of its own.
    "gpt-oss-no-window": (
        "GptOssConfig",
        EAGER,
        HEAD | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 512},
    ),
    "deepseek-v2": (
        "DeepseekV2Config",
        ALL,
        LATENT | ROUTED | {"q_lora_rank": None, "topk_method": "greedy"},
    ),
    "deepseek-v3": (
        "DeepseekV3Config",
        ALL,
        LATENT | ROUTED | {"q_lora_rank": 32, "n_group": 2, "topk_group": 1},
    ),
    "glm4": ("Glm4Config", ALL, HEAD),
    "glm4-moe": ("Glm4MoeConfig", ALL, HEAD | ROUTED | {"n_group": 1, "topk_group": 1}),
    "granite": ("GraniteConfig", ALL, {"logits_scaling": 8.0, "attention_multiplier": 0.1}),
    "cohere": ("CohereConfig", ALL, {"logit_scale": 0.25}),
    "cohere2": ("Cohere2Config", PADDED, FOUR | HEAD | WINDOW | {"logit_scale": 0.25}),
    "gpt2": ("GPT2Config", ALL, {"n_embd": 64, "n_layer": 2, "n_head": 2}),
    "gpt-neox": ("GPTNeoXConfig", ALL, {"num_key_value_heads": None}),
    "opt": ("OPTConfig", ALL, {"ffn_dim": 64, "word_embed_proj_dim": 64}),
    "falcon": ("FalconConfig", PADDED, {"bias": False}),
    "starcoder2": ("Starcoder2Config", ALL, {"sliding_window": None}),
    "stablelm": ("StableLmConfig", PADDED, {}),
    "exaone4": ("Exaone4Config", PADDED, FOUR | WINDOW | {"sliding_window_pattern": 4}),
    "lfm2": (
        "Lfm2Config",
        PADDED,
        {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    ),
    # It scales logits in a way of its own.
    "falcon-h1": (
        "FalconH1Config",
        NONE,
        HEAD
        | {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16}
        | {"lm_head_multiplier": 0.5, "embedding_multiplier": 2.0},
    ),
    "hunyuan": ("HunYuanDenseV1Config", ALL, HEAD),
    "ernie4.5": ("Ernie4_5Config", ALL, HEAD),
    "seed-oss": ("SeedOssConfig", ALL, HEAD),
    "nanochat": ("NanoChatConfig", ALL, {}),
    # transformers does not find the layers in it.
    "llama4": (
        "Llama4TextConfig",
        NONE,
        FOUR
        | HEAD
        | {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 64},
    ),
    "gemma4": (
        "Gemma4TextConfig",
        ALL,
        HEAD
        | {"num_hidden_layers": 6, "sliding_window": 512, "global_head_dim": 32}
        | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layout_is_exact_or_refused_with_the_first_that_is(family, tmp_path):
    kind, outcomes, changes = FAMILIES[family]
    sizes = {name: value for name, value in (SIZES | changes).items() if value is not None}
    if "sliding_window" in changes:
        sizes["sliding_window"] = changes["sliding_window"]
    getattr(transformers, kind)(**sizes).save_pretrained(tmp_path)
    policy = PolicyConfig(model=str(tmp_path))
    exact = [keys for keys, outcome in zip(LAYOUTS, outcomes, strict=True) if outcome == "+"]
    for keys, layout in LAYOUTS.items():
        if keys in exact:
            check_architecture(str(tmp_path), policy.replace(**layout))
            continue
        with pytest.raises(UserError) as refused:
            check_architecture(str(tmp_path), policy.replace(**layout))
        message = str(refused.value)
        assert message.startswith(f"policy.model={tmp_path}: ")
        assert f"cannot be trained with {keys}: " in message
        assert message.endswith(
            f"; set {exact[0]}, with which it is exact." if exact else "so use another model."
        )
        assert "\n" not in message
        assert len(message) < 500


def test_a_layout_that_context_parallelism_lacks_is_named_with_what_else_it_needs(tmp_path):
    transformers.StableLmConfig(**SIZES).save_pretrained(tmp_path)
    policy = PolicyConfig(model=str(tmp_path), parallel=ParallelConfig(context_parallel_size=2))
    remedy = r"set policy\.batching=padded .*, and policy\.parallel\.context_parallel_size=1\.$"
    with pytest.raises(UserError, match=remedy):
        check_architecture(str(tmp_path), policy)


def test_a_configuration_that_transformers_itself_cannot_run_is_refused(tmp_path):
    transformers.LlamaConfig(**(SIZES | {"num_key_value_heads": 3})).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"transformers itself cannot run .*; repair config\.json"):
        check_architecture(str(tmp_path), PolicyConfig(model=str(tmp_path)))
