"""What a model's config.json says about its size, read as plain JSON."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_like.batch.micro_batches import USUAL_ATTENTION_TOKENS
from nemo_like.config.generation import GenerationConfig
from nemo_like.config.model_files import CONFIG, read_object
from nemo_like.errors import UserError

if TYPE_CHECKING:
    from nemo_like.config.run import RunConfig

# Names of the same number in older architectures (GPT-2, Falcon, T5-like code).
_ALIASES = {
    "num_hidden_layers": ("n_layer", "num_layers"),
    "num_attention_heads": ("n_head", "num_heads"),
    "hidden_size": ("n_embd", "d_model"),
    "intermediate_size": ("n_inner", "ffn_dim"),
}
GIB = 2**30
FLOAT32 = 4
BYTES = {"float32": FLOAT32, "bfloat16": 2, "float16": 2}
KV_BLOCK_TOKENS = 32
"""Tokens of a block of vLLM's KV cache: ours on the CPU; a multiple of those on GPUs."""
MOST_SEQUENCES = 1024
"""Most completions that an engine works on at a time."""
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The numbers that memory depends on, for a dense decoder with gated MLPs (Llama and kin)."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    """Embedding and output head are one matrix."""

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Numbers in all keys of a token, and in all values."""
        return self.kv_heads * self.head_dim

    @property
    def layer_matrices(self) -> int:
        """Parameters of one layer's matrices: q, k, v, o; gate, up, down. (Biases: below 0.1 %.)"""
        attention = 2 * self.hidden * self.query_width + 2 * self.hidden * self.key_width
        return attention + self.mlp_matrices

    @property
    def inner_layers(self) -> range:
        """All but the first and the last."""
        return range(1, self.layers - 1)

    @property
    def mlp_matrices(self) -> int:
        """Parameters of one layer's gate, up and down."""
        return 3 * self.hidden * self.intermediate

    @property
    def layer_norms(self) -> int:
        return 2 * self.hidden

    @property
    def num_parameters(self) -> int:
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * (self.layer_matrices + self.layer_norms) + tables + self.hidden


@dataclass(frozen=True, kw_only=True)
class Role:
    trains: bool = True
    """False: it only answers, as a teacher does."""
    scalar_head: bool = False
    """Critics and reward models have one number a token in place of a vocabulary."""
    with_reference: bool = False
    """A frozen copy stays in memory too. (With adapters, it is the model itself.)"""
    keeps_probabilities: bool = False
    """Backward passes hold probabilities as well as logits: a student's logprobs are of many ids
    per token, or entropies train."""


def role_of(config: "RunConfig", *, scalar_head: bool = False) -> Role:
    """The role of a run's policy, which all but evaluations train."""
    return Role(
        trains=getattr(config, "trains", True),
        scalar_head=scalar_head,
        with_reference=config.keeps_reference,
        keeps_probabilities=config.keeps_probabilities,
    )


def read_settings(model_folder: Path) -> dict[str, Any]:
    """config.json, or its part about text; UserError if it is no JSON object."""
    path = model_folder / CONFIG
    settings = read_object(path)
    of_text = settings.get("text_config") or {}
    if not isinstance(of_text, dict):
        raise UserError(f"{path}: text_config={of_text} is not a JSON object; repair it.")
    found = {**settings, **of_text}
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        if (value := number(found, key)) is not None and value < 1:
            raise UserError(f"{path}: {key}={value} must be at least 1; repair it.")
    return found


_HEAD_DIMS = {
    **dict.fromkeys(("ernie4_5", "glm", "glm4", "helium", "ministral3", "qwen3", "seed_oss"), 128),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), 256),
}
"""By ``model_type``, what transformers takes where config.json has no ``head_dim``. Others take
hidden size over heads."""


def number(settings: dict[str, Any], key: str) -> int | None:
    """The number called ``key`` or one of its older names; None where config.json leaves it out."""
    for name in (key, *_ALIASES.get(key, ())):
        if isinstance(value := settings.get(name), int):
            return value
    return None


def experts_key(settings: dict[str, Any]) -> str | None:
    """The key that gives several experts; None for a dense model."""
    return next((key for key in _EXPERT_KEYS if (number(settings, key) or 0) > 1), None)


def read_model_shape(model_folder: Path) -> ModelShape:
    """UserError for a model whose size config.json does not give, or that has experts."""
    settings = read_settings(model_folder)
    if experts := experts_key(settings):
        raise UserError(
            f"{model_folder} has experts ({experts}={settings[experts]}), "
            "which the formulas do not cover; they are for dense models."
        )

    def wanted(key: str) -> int:
        if (value := number(settings, key)) is None:
            raise UserError(
                f"{model_folder / 'config.json'} does not give {key}, which the "
                "formulas need; they are for Llama-like models."
            )
        return value

    hidden, heads = wanted("hidden_size"), wanted("num_attention_heads")
    return ModelShape(
        layers=wanted("num_hidden_layers"),
        hidden=hidden,
        intermediate=number(settings, "intermediate_size") or 4 * hidden,
        heads=heads,
        kv_heads=number(settings, "num_key_value_heads") or heads,
        head_dim=head_dim(settings, hidden, heads),
        vocab=wanted("vocab_size"),
        # transformers leaves out what equals the default of PreTrainedConfig, which is true.
        tied=bool(settings.get("tie_word_embeddings", True)),
    )


def attention_tokens(model_folder: Path) -> int:
    """Row length at which a model's attention costs as much as its products with weights.

    A token takes a multiply-add with each weight that it meets (of experts, those that it is sent
    to), and with k tokens in view 2 q k more in attention, q numbers in all queries. In a causal
    row of n tokens k is n / 2 on average, so attention takes q n a token.
    """
    settings = read_settings(model_folder)
    hidden, heads = number(settings, "hidden_size"), number(settings, "num_attention_heads")
    if not hidden or not heads:
        return USUAL_ATTENTION_TOKENS
    dim = head_dim(settings, hidden, heads)
    queries, keys = heads * dim, (number(settings, "num_key_value_heads") or heads) * dim
    weights = 2 * hidden * (queries + keys) + 3 * hidden * _inner_width(settings, hidden)
    return max(1, round(weights / queries))


def head_dim(settings: dict[str, Any], hidden: int, heads: int) -> int:
    """Numbers of one head."""
    default = _HEAD_DIMS.get(settings.get("model_type", ""), hidden // heads)
    return number(settings, "head_dim") or default


def _inner_width(settings: dict[str, Any], hidden: int) -> int:
    """Numbers between the two halves of the feed-forward part that a token meets."""
    whole = number(settings, "intermediate_size") or 4 * hidden
    if not experts_key(settings):
        return whole
    of_expert = number(settings, "moe_intermediate_size") or whole
    shared = number(settings, "shared_expert_intermediate_size")
    if shared is None:
        shared = (number(settings, "n_shared_experts") or 0) * of_expert
    return (number(settings, "num_experts_per_tok") or 1) * of_expert + shared


def kv_bytes_per_sequence(
    shape: ModelShape, num_tokens: int, bytes_per_number: int, tensor_parallel_size: int
) -> int:
    """KV cache of one sequence on one GPU, in whole blocks and one to spare."""
    heads = max(1, shape.kv_heads // tensor_parallel_size)
    tokens = (math.ceil(num_tokens / KV_BLOCK_TOKENS) + 1) * KV_BLOCK_TOKENS
    return tokens * shape.layers * 2 * heads * shape.head_dim * bytes_per_number


def kept_share(settings: dict[str, Any], num_tokens: int, at_once: int = 0) -> float:
    """Share of a row's keys and values that an engine keeps at least, the rest being out of sight.

    A layer with a sliding window keeps that, and the ``at_once`` tokens that one pass computes;
    one without attention keeps none. Without ``layer_types`` any layer may have a window.
    """
    window = number(settings, "sliding_window")
    if window is None or settings.get("use_sliding_window") is False:
        window = num_tokens
    kept = {"full_attention": 1.0, "sliding_attention": min(1.0, (window + at_once) / num_tokens)}
    kinds = settings.get("layer_types") or ["sliding_attention"]
    return sum(kept.get(kind, 0.0) for kind in kinds) / len(kinds)


def _numbers_in_8_bits(generation: GenerationConfig, shape: ModelShape) -> int:
    if generation.quantization is None:
        return 0
    if generation.kind.quantizes == "layers":
        return shape.layers * shape.layer_matrices
    return len(shape.inner_layers) * shape.mlp_matrices


def engine_bytes(
    generation: GenerationConfig, dtype: str, shape: ModelShape, num_tokens: int
) -> tuple[int, int]:
    """An engine's weights, and its KV cache of one sequence, on each of its GPUs."""
    size, tp = BYTES[dtype], generation.tensor_parallel_size
    saved = (size - 1) * _numbers_in_8_bits(generation, shape)
    of_number = 1 if generation.kv_cache_is_quantized else size
    cache = kv_bytes_per_sequence(shape, num_tokens, of_number, tp)
    return (shape.num_parameters * size - saved) // tp, cache
