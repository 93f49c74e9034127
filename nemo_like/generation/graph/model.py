"""Llama, Qwen2 and Qwen3 with fused matrices, from token ids to float32 logits.

Shapes: N tokens of any sequences, H query heads, K key heads, D numbers of a head, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from nemo_like.errors import UserError
from nemo_like.generation.graph.fp8 import FP8, Rounded, rounded
from nemo_like.generation.protocol import EngineConfig
from nemo_like.models.build import expected_tensors, model_settings
from nemo_like.planning.model_shape import read_model_shape
from nemo_like.planning.placement import refuse_8_bits

MODEL_TYPES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Those with frequencies that don't depend on a sequence's length."""

HEAD_DIMS = (32, 64, 128, 256)
"""Those that kernels take."""

LAYER = {
    "norm": ("input_layernorm.weight",),
    "qkv": tuple(f"self_attn.{each}_proj.weight" for each in "qkv"),
    "qkv_bias": tuple(f"self_attn.{each}_proj.bias" for each in "qkv"),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "output": ("self_attn.o_proj.weight",),
    "mlp_norm": ("post_attention_layernorm.weight",),
}
"""What is computed with, and the tensors on disk that it is made of, one below the other."""

MLP = {
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down": ("mlp.down_proj.weight",),
}
"""``generation.quantization`` rounds these, but for the first and the last layer, which is most of
what a step reads; the rest moves logprobs more for its size (benchmarks/README.md)."""

Attend = Callable[[Tensor, int], Tensor]
"""Queries, keys and values [N, (H + 2 K) D] before rotation, and the layer's number -> [N, H D]."""


class Model:
    """A model without weights, which ``load`` copies into its fused matrices."""

    def __init__(self, config: EngineConfig, ops: ModuleType) -> None:
        settings = model_settings(config.model_path)
        if problem := _unknown(settings, config.device):
            raise _refusal(config.model_path, problem)
        self.shape = read_model_shape(Path(config.model_path))
        if config.quantization:
            on_gpu = config.device == "cuda"
            capability = torch.cuda.get_device_capability() if on_gpu else None
            refuse_8_bits(self.shape, on_gpu=on_gpu, capability=capability)
        self._ops, self._eps = ops, settings.rms_norm_eps
        self._options: dict[str, Any] = {
            "device": config.device,
            "dtype": getattr(torch, config.dtype),
        }
        self._specs = expected_tensors(config.model_path, self._options["dtype"])
        self._named: dict[str, Tensor | Rounded] = {}
        self._embedding = self._fused("model.embed_tokens.weight")
        self._layers = [self._parts(LAYER, i, self._fused) for i in range(self.shape.layers)]
        in_8_bits = self.shape.inner_layers if config.quantization else ()
        self._mlps = [
            self._parts(MLP, i, self._fused_in_8_bits if i in in_8_bits else self._fused)
            for i in range(self.shape.layers)
        ]
        self._norm = self._fused("model.norm.weight")
        tied = "lm_head.weight" not in self._specs
        self._head = self._embedding if tied else self._fused("lm_head.weight")
        if others := self._specs.keys() - self._named.keys():
            raise _refusal(config.model_path, f"the tensor {min(others)}")
        # As transformers: angles in float32, their sine and cosine in the model's dtype.
        positions, like = torch.arange(config.max_model_len)[None], self._norm.new_empty(0)
        self.angles = tuple(
            each[0, :, : self.shape.head_dim // 2].float().contiguous().to(config.device)
            for each in LlamaRotaryEmbedding(settings)(like.cpu(), positions)  # pyright: ignore
        )
        """Cosines and sines [positions, D / 2]."""

    @property
    def num_bytes(self) -> int:
        """Of all weights."""
        return sum(each.nbytes for each in self._tensors())

    def load(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Overwrite weights in place."""
        for name, tensor in tensors:
            place = self._named[name]
            if isinstance(place, Rounded):
                for mine, new in zip(place, rounded(tensor), strict=True):
                    mine.copy_(new)
            else:
                place.copy_(tensor)

    def zero(self) -> None:
        """Set all weights to zero, with which every token is as likely as any other."""
        for each in self._tensors():
            each.zero_()

    def hidden(self, ids: Tensor, attend: Attend) -> Tensor:
        """Normed hidden states [N, E] of ids [N]."""
        residual, x = functional.embedding(ids, self._embedding), None
        for number, (weights, mlp) in enumerate(zip(self._layers, self._mlps, strict=True)):
            h = self._ops.add_norm(x, residual, weights["norm"], self._eps)
            h = attend(self._queries_keys_values(h, weights), number) @ weights["output"].t()
            rounds = isinstance(mlp["gate_up"], Rounded)
            h = self._ops.add_norm(h, residual, weights["mlp_norm"], self._eps, rounds=rounds)
            multiply = self._ops.multiply if rounds else functional.linear
            x = multiply(self._ops.silu_mul(multiply(h, mlp["gate_up"])), mlp["down"])
        return self._ops.add_norm(x, residual, self._norm, self._eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 [N, V], as the trainer's are: products of 16 bits, sums of 32."""
        if hidden.dtype == torch.float32:
            return hidden @ self._head.t()
        if hidden.is_cuda:
            return torch.mm(hidden, self._head.t(), out_dtype=torch.float32)
        return hidden.float() @ self._head.float().t()

    def _queries_keys_values(self, h: Tensor, weights: dict[str, Tensor]) -> Tensor:
        qkv = functional.linear(h, weights["qkv"], weights.get("qkv_bias"))
        if "q_norm" not in weights:
            return qkv
        shape, dim = self.shape, self.shape.head_dim
        widths = [shape.query_width, shape.key_width, shape.key_width]
        q, k, v = qkv.split(widths, 1)
        q = self._ops.add_norm(None, q.reshape(-1, dim), weights["q_norm"], self._eps)
        # With one key head reshape gives a view, whose rows have gaps that kernels don't know of.
        k = self._ops.add_norm(None, k.reshape(-1, dim).contiguous(), weights["k_norm"], self._eps)
        return torch.cat([q.view(len(h), -1), k.view(len(h), -1), v], 1)

    def _parts(
        self, names: Mapping[str, Sequence[str]], layer: int, make: Callable[..., Any]
    ) -> dict[str, Any]:
        """What ``make`` makes of a layer's tensors, where the model has them."""
        paths = {part: [f"model.layers.{layer}.{one}" for one in names[part]] for part in names}
        return {part: make(*each) for part, each in paths.items() if each[0] in self._specs}

    def _fused(self, *names: str) -> Tensor:
        """One tensor, without values, that holds those on disk one below the other."""
        shapes = [self._specs[name][0] for name in names]
        whole = torch.empty(sum(each[0] for each in shapes), *shapes[0][1:], **self._options)
        views = whole.split([each[0] for each in shapes])
        self._named.update(zip(names, views, strict=True))
        return whole

    def _fused_in_8_bits(self, *names: str) -> Rounded:
        """As ``_fused``, of matrices."""
        heights = [self._specs[name][0][0] for name in names]
        width = self._specs[names[0]][0][1]
        numbers = torch.empty(sum(heights), width, dtype=FP8, device=self._options["device"])
        whole = Rounded(numbers, numbers.new_empty(sum(heights), 1, dtype=torch.float32))
        views = zip(*(each.split(heights) for each in whole), strict=True)
        self._named.update(zip(names, map(Rounded._make, views), strict=True))
        return whole

    def _tensors(self) -> Iterator[Tensor]:
        for each in self._named.values():
            yield from each if isinstance(each, Rounded) else (each,)


def _unknown(settings: PreTrainedConfig, device: str) -> str:
    """What of a configuration this engine does not compute; empty if there is nothing."""
    rope = (getattr(settings, "rope_parameters", None) or {}).get("rope_type", "default")
    if settings.model_type not in MODEL_TYPES:
        return f"model_type={settings.model_type} (it knows {', '.join(MODEL_TYPES)})"
    if rope not in ROPE_TYPES:
        return f"rope_type={rope}"
    if "sliding_attention" in (getattr(settings, "layer_types", None) or ()):
        return "sliding windows"
    dim = getattr(settings, "head_dim", None)
    dim = dim or settings.hidden_size // settings.num_attention_heads
    if device == "cuda" and dim not in HEAD_DIMS:
        return f"head_dim={dim}"
    return "" if settings.hidden_act == "silu" else f"hidden_act={settings.hidden_act}"


def _refusal(path: str, problem: str) -> UserError:
    return UserError(
        f"generation.backend=graph cannot compute {path} with {problem}; set "
        "generation.backend=vllm or hf."
    )
