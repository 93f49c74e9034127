"""A small random model of a configuration's architecture: all kinds of layers, few of each."""

import logging
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from nemo_like.config.model_files import trusts_code

logger = logging.getLogger(__name__)

_LAYERS = 2
PROBE_SPREAD = 4.0
"""Queries and keys of this size saturate softmax and caps: what attention adds of its own shows."""
_TOLERANCE = 1e-3
VOCAB = 256
"""Most tokens of a twin."""
_EXPERTS = 4
_LEAST_WIDTH = 16

_HEADS = "num_attention_heads"
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads")
_WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "intermediate_size_mlp",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "ffn_dim",
    "word_embed_proj_dim",
)
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")


def small_twin(kind: Any, full: PreTrainedConfig) -> PreTrainedModel:
    """One that ``kind`` (of transformers' auto classes) makes, narrower too if that works."""
    try:
        twin = random_model(kind, shortened(full, narrower=True))
        with torch.no_grad():
            twin(input_ids=torch.arange(5)[None], use_cache=False)
    except Exception:  # the boundary to a model's code, which may raise anything
        logger.debug("%s cannot be narrower", type(full).__name__, exc_info=True)
        return random_model(kind, shortened(full))
    return twin


def random_model(kind: Any, config: PreTrainedConfig, attention: str = "eager") -> PreTrainedModel:
    """In float32; the same weights each time, whatever the ``attention``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind.from_config(
            config,
            dtype=torch.float32,
            attn_implementation=attention,
            trust_remote_code=trusts_code(),
        ).eval()


@torch.no_grad()
def plain_attention(kind: Any, full: PreTrainedConfig) -> str:
    """``sdpa`` if a model that ``kind`` makes gives with it what it gives with ``eager``.

    transformers' sdpa leaves out what its kernel lacks, such as a cap of scores, and says nothing.
    """
    ids = torch.arange(12)[None] * 7 % min(full.get_text_config().vocab_size, VOCAB)
    try:
        config = shortened(full, spread=PROBE_SPREAD, narrower=True)
        fast, exact = (
            random_model(kind, config, one)(input_ids=ids, use_cache=False).logits
            for one in ("sdpa", "eager")
        )
    except Exception:  # the boundary to a model's code, which may raise anything
        logger.debug("%s has no sdpa", type(full).__name__, exc_info=True)
        return "eager"
    diff = (fast - exact).abs().max().item()
    return "sdpa" if diff <= _TOLERANCE * exact.abs().max().item() else "eager"


def shortened(
    full: PreTrainedConfig, *, spread: float = 1.0, narrower: bool = False
) -> PreTrainedConfig:
    """With few layers, experts and tokens.

    At a ``spread`` of 1 each layer changes what it is given by about as much again: all of them
    show.
    """
    config = type(full).from_dict(full.to_dict())
    text = config.get_text_config()
    changes: dict[str, Any] = _fewer_layers(text) | _fewer_experts(text)
    changes |= {"vocab_size": min(text.vocab_size, VOCAB), "pad_token_id": None}
    if narrower:
        changes |= _narrower(text)
    changes["initializer_range"] = spread * changes.get("hidden_size", text.hidden_size) ** -0.5
    for name, value in changes.items():
        setattr(text, name, value)
    return config


def _fewer_layers(text: PreTrainedConfig) -> dict[str, Any]:
    """The first layers, up to one of each kind that the configuration lists or derives."""
    num_layers = text.num_hidden_layers
    lists = {
        name: value
        for name, value in text.to_dict().items()
        if isinstance(value, list) and len(value) == num_layers
    }
    derived = getattr(text, "layer_types", None) or []
    depth = min(num_layers, _LAYERS)
    every = [*lists.values(), derived]
    while any(any(one not in kinds[:depth] for one in kinds) for kinds in every):
        depth += 1
    changes: dict[str, Any] = {name: kinds[:depth] for name, kinds in lists.items()}
    if getattr(text, "first_k_dense_replace", None) and "mlp_layer_types" not in lists:
        changes["first_k_dense_replace"] = 1  # and the second is a mixture
    return changes | {"num_hidden_layers": depth}


def _fewer_experts(text: PreTrainedConfig) -> dict[str, Any]:
    chosen = max((getattr(text, name, None) or 0 for name in _TOP_K), default=0)
    changes: dict[str, Any] = {
        name: min(count, max(_EXPERTS, chosen))
        for name in _NUM_EXPERTS
        if isinstance(count := getattr(text, name, None), int)
    }
    return changes | {
        name: 1 for name in ("n_group", "topk_group") if getattr(text, name, None) is not None
    }


def _narrower(text: PreTrainedConfig) -> dict[str, Any]:
    """As many heads as keep their groups, as wide as before; all other widths in proportion."""
    heads = getattr(text, _HEADS, None) or 1
    groups = {name: getattr(text, name) for name in _KEY_HEADS if getattr(text, name, None)}
    few = next(
        (
            n
            for n in range(2, heads)
            if not heads % n and not any(g * n % heads for g in groups.values())
        ),
        heads,
    )
    widths = {
        name: value for name in _WIDTHS if isinstance(value := getattr(text, name, None), int)
    }
    changes = {
        name: value * few // heads
        for name, value in widths.items()
        if not value * few % heads and value * few // heads >= _LEAST_WIDTH
    }
    changes |= {name: group * few // heads for name, group in groups.items()}
    return changes | {_HEADS: few}
