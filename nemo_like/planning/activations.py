"""What one forward pass leaves in memory for the backward pass: bytes per token, arithmetic only.

For a decoder layer like Llama's with fused attention (no matrix of [tokens, tokens] exists).
Legend: ``s`` bytes of a number in compute, ``h`` hidden width, ``q`` width of all queries, ``k`` of
all keys, ``i`` width of the MLP, ``tp`` tensor-parallel ranks, ``sp`` the same with sequence
parallelism and 1 without.
"""

import math
from dataclasses import dataclass

from nemo_like.config.policy import ParallelConfig, PolicyConfig
from nemo_like.planning.layout import ParallelSizes, layers_of_rank
from nemo_like.planning.model_shape import BYTES, FLOAT32, ModelShape


@dataclass(frozen=True, kw_only=True)
class LayerActivations:
    """Bytes per token of a rank's share, for one layer."""

    saved: float
    """Kept from forward to backward."""
    working: float
    """Exists while the layer is computed backwards, beyond what is saved."""
    scoring: float
    """Exists while the layer is computed without a backward pass."""


def layer_activations(
    shape: ModelShape, policy: PolicyConfig, sizes: ParallelSizes
) -> LayerActivations:
    """What checkpointing keeps, and what one layer needs on top while it is computed.

    Recomputing brings back what a plain pass saves and checkpointing did not keep. The backward
    pass adds most within the MLP, when gradients of its product, of silu(gate) and of up exist and
    the product itself has gone: 2 s i / tp, and two gradients of width h. A forward pass alone
    holds silu(gate), up and their product, and two tensors of width h.
    """
    whole = _whole_layer(shape, policy, sizes)
    s, inner = BYTES[policy.dtype], shape.intermediate / sizes.tp
    saved, recomputed = whole, 0.0
    if policy.activation_checkpointing == "full":
        saved, recomputed = s * shape.hidden / _sp(policy, sizes), whole
    elif policy.activation_checkpointing == "selective":
        saved = _selective_layer(shape, policy, sizes)
        recomputed = max(whole - saved, 0.0)
    return LayerActivations(
        saved=saved,
        working=recomputed + s * (2 * inner + 2 * shape.hidden),
        scoring=s * (3 * inner + 2 * shape.hidden),
    )


def _whole_layer(shape: ModelShape, policy: PolicyConfig, sizes: ParallelSizes) -> float:
    """Everything that one layer saves; exact for transformers' Llama and Qwen2 (by test).

    * Each of two norms: its input in float32, the normalised numbers (for the gradient of its
      weight) and its result (input of the next matrices): (4 + s) h / sp + s h; its float32 root.
      Sequence-parallel results are gathered, so they are whole.
    * Attention: q, k, v after rotation, its result: s (2 q + 2 k) / tp, and a float32 logarithm a
      head. Context-parallel ranks hold all tokens of some heads instead of some tokens of all: as
      much, but keys and values are repeated until their heads divide.
    * MLP: gate, silu(gate), up, and their product: 4 s i / tp.

    Compiled layers compute again in the backward pass what is cheap and not the input of a matrix:
    of a norm its input and result stay, 2 s h; of the MLP gate, up and the product, 3 s i.
    (torch's min-cut partitioner, which bans recomputing what a backward matrix product reads.)
    """
    s, h, sp = BYTES[policy.dtype], shape.hidden, _sp(policy, sizes)
    norm = s * h / sp + s * h if policy.compile else (FLOAT32 + s) * h / sp + s * h
    norm += FLOAT32 / sp
    mlp = (3 if policy.compile else 4) * s * shape.intermediate / sizes.tp
    return 2 * norm + _attention(shape, s, sizes) + mlp


def _selective_layer(shape: ModelShape, policy: PolicyConfig, sizes: ParallelSizes) -> float:
    """Results of matrix products and of attention, and the layer's input.

    s h / sp for the input; s (q + 2 k) / tp for three projections; attention's result and
    logarithms; s h for each projection back (before tensor-parallel ranks add up); 2 s i / tp for
    gate and up. Nothing is computed from the MLP's projection back, so compiled layers, which keep
    what the backward pass reads, drop it (exact, by test); otherwise every result is kept.
    """
    s, h = BYTES[policy.dtype], shape.hidden
    projections = s * (shape.query_width + 2 * shape.key_width) / sizes.tp
    attended = (s * shape.query_width + FLOAT32 * shape.heads) / sizes.tp
    back = (1 if policy.compile else 2) * s * h
    mlp = 2 * s * shape.intermediate / sizes.tp
    return s * h / _sp(policy, sizes) + projections + attended + back + mlp


def _attention(shape: ModelShape, s: int, sizes: ParallelSizes) -> float:
    kv_heads = max(shape.kv_heads // sizes.tp, 1)
    repeated = sizes.cp // math.gcd(kv_heads, sizes.cp)
    widths = 2 * shape.query_width + 2 * shape.key_width * repeated
    return (s * widths + FLOAT32 * shape.heads) / sizes.tp


def head_activations(shape: ModelShape, policy: PolicyConfig, row_bytes: int) -> float:
    """Bytes per token between the last layer and the logits.

    The final norm, not compiled: (4 + 2 s) h; and the rows that predict, ``row_bytes`` a number.
    """
    return (FLOAT32 + 2 * BYTES[policy.dtype] + row_bytes) * shape.hidden


def head_bytes(policy: PolicyConfig) -> int:
    """Bytes of a number in the root unit: embedding, final norm and head."""
    return FLOAT32 if policy.float32_head else BYTES[policy.dtype]


def forward_logits(
    shape: ModelShape, policy: PolicyConfig, tokens: float, tp: int, *, with_entropy: bool
) -> float:
    """Bytes of float32 tensors [chunk, V / tp]: one, or two.

    Two if there are several chunks (a product exists before the last one is freed), and where
    entropies need exponentials as well as logits, which compiled code fuses.
    """
    chunk = min(policy.logprob_chunk_tokens, tokens)
    two = tokens > chunk or (with_entropy and not policy.compile)
    return (2 if two else 1) * FLOAT32 * chunk * _vocab(shape, tp)


def backward_logits(
    shape: ModelShape,
    policy: PolicyConfig,
    tokens: float,
    tp: int,
    *,
    head_trains: bool,
    with_shares: bool,
) -> float:
    """Bytes of the logits of one chunk and of their gradient, [chunk, V / tp].

    The gradient overwrites the float32 logits (``with_shares``: it does not), and is rounded to
    another tensor if the head multiplies in 16 bits. After the last chunk the gradient of a head
    [V / tp, h] that trains is rounded as well, which is more if chunks are short.
    """
    factor = head_bytes(policy)
    rounded = factor if factor < FLOAT32 else 0
    chunk = min(policy.logprob_chunk_tokens, tokens)
    logits = (FLOAT32 * (1 + with_shares) + rounded) * chunk
    return max(logits, rounded * shape.hidden * head_trains) * _vocab(shape, tp)


def _vocab(shape: ModelShape, tp: int) -> float:
    """Rows of a rank's head: a vocabulary that tp does not divide stays whole on every rank."""
    return shape.vocab / tp if shape.vocab % tp == 0 else shape.vocab


def layers_in_flight(
    shape: ModelShape, parallel: ParallelConfig, pipeline_rank: int, num_micro_batches: int
) -> int:
    """Layers x micro-batches whose activations a rank holds at once, at most.

    Without a pipeline, or under gpipe: every layer for 1, or for all M, micro-batches. one_f_one_b:
    rank r of pp starts min(M, pp - r) forward passes before the first backward. Interleaved, v
    stages a rank (arXiv:2104.04473, section 2.2): 2 (pp - r - 1) + (v - 1) pp + 1 passes of a
    stage.
    """
    size = parallel.pipeline_parallel_size
    mine = layers_of_rank(parallel, shape.layers, pipeline_rank)
    if size == 1:
        return sum(mine)
    match parallel.pipeline_schedule:
        case "gpipe":
            return num_micro_batches * sum(mine)
        case "one_f_one_b":
            return min(num_micro_batches, size - pipeline_rank) * sum(mine)
        case "interleaved":
            passes = 2 * (size - pipeline_rank - 1) + (len(mine) - 1) * size + 1
            return min(passes * max(mine), num_micro_batches * sum(mine))


def _sp(policy: PolicyConfig, sizes: ParallelSizes) -> int:
    return sizes.tp if policy.parallel.sequence_parallel else 1
