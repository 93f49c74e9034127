"""From flat rows to what a model's forward takes, packed or padded, and attention over packed rows.

Packed, each row sees itself only, and no mask is ever built. The attention is registered with
transformers as ``PACKED``. It alone works on padded rows, which costs B * T^2 instead of N^2 and
keeps causal kernels; on a GPU a variable-length flash kernel takes over where rows are too unequal.

Legend: ``B`` rows, ``N`` their tokens end to end, ``T`` the longest row.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.policy import Batching


@dataclass(frozen=True, kw_only=True)
class InputShape:
    """[1, positions] packed, [rows, positions] padded."""

    rows: int
    positions: int

    @property
    def size(self) -> int:
        return self.rows * self.positions


@dataclass(frozen=True, kw_only=True)
class InputLayout:
    batching: Batching
    multiple: int = 1
    """What the number of positions must divide by."""
    context_group: dist.ProcessGroup | None = None
    """Ranks that share the tokens of a packed pass, in equal contiguous parts."""

    def shape_of(self, batch: TensorBatch) -> InputShape:
        if self.batching == "packed":
            return InputShape(rows=1, positions=_round_up(batch.num_tokens, self.multiple))
        longest = int(batch.lengths.max())
        return InputShape(rows=len(batch), positions=_round_up(longest, self.multiple))


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """Keyword arguments of one forward pass, and which of its positions predict what."""

    forward: dict[str, Any]
    predictors: Tensor
    """int64 [M]: positions of this rank's output, batch-major, whose next token is wanted."""
    target_ids: Tensor
    """int64 [M]: the tokens that follow them."""
    targets: Tensor
    """int64 [M]: where those tokens are among the batch's N."""
    num_outputs: int
    """Length of the result: ``N``, or more in a pipeline, whose passes have one shape."""
    context_group: dist.ProcessGroup | None = field(default=None)


def model_inputs(
    batch: TensorBatch,
    layout: InputLayout,
    shape: InputShape | None = None,
    *,
    every_token: bool = False,
) -> ModelInputs:
    """Lay one micro-batch's rows out for the model; logprobs are wanted where the mask is True.

    ``shape``: fill up to it (pipeline stages exchange equal shapes). ``every_token``: something is
    wanted at each token itself, instead of a prediction of masked ones.
    """
    if every_token:
        assert layout.context_group is None
        return _at_every_token(batch, layout)
    ids = batch.tokens[keys.INPUT_IDS]
    targets = batch.tokens[keys.LOSS_MASK].nonzero(as_tuple=True)[0]
    num_outputs = len(ids) if shape is None else shape.size
    shape = shape or layout.shape_of(batch)
    if layout.batching == "packed":
        return _packed(batch, targets, shape, num_outputs, layout.context_group)
    return _padded(batch, targets, shape, num_outputs)


def made_up_rows(
    lengths: Sequence[int], device: torch.device | str = "cpu", ids: Tensor | None = None
) -> TensorBatch:
    """Rows of zeros, or of ``ids``, all of whose tokens are targets but each first one."""
    batch = TensorBatch(lengths=torch.tensor(lengths, device=device))
    if ids is None:
        ids = torch.zeros(batch.num_tokens, dtype=torch.int64, device=device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[batch.starts] = False
    batch.tokens = {keys.INPUT_IDS: ids, keys.LOSS_MASK: mask}
    return batch


def _at_every_token(batch: TensorBatch, layout: InputLayout) -> ModelInputs:
    every = torch.arange(batch.num_tokens, device=batch.lengths.device)
    shape = layout.shape_of(batch)
    if layout.batching == "packed":
        inputs = _packed(batch, every[:0], shape, len(every), None)
        return replace(inputs, predictors=every, targets=every)
    inputs = _padded(batch, every[:0], shape, len(every))
    return replace(inputs, predictors=_flat_index(batch, shape), targets=every)


def _packed(
    batch: TensorBatch,
    targets: Tensor,
    shape: InputShape,
    num_outputs: int,
    group: dist.ProcessGroup | None,
) -> ModelInputs:
    """All rows in one line; positions restart with each row."""
    ids = batch.tokens[keys.INPUT_IDS]
    lengths = batch.lengths
    if (extra := shape.positions - len(ids)) > 0:  # filled up with rows of their own, none longer
        longest = int(lengths.max())
        whole_rows, rest = divmod(extra, longest)
        filler = [longest] * whole_rows + [rest] * (rest > 0)
        lengths = torch.cat([lengths, lengths.new_tensor(filler)])
    whole = TensorBatch(lengths=lengths)
    row_of_token = whole.row_of_token
    within = torch.arange(shape.positions, device=ids.device) - whole.starts[row_of_token]
    input_ids = torch.cat([ids, ids.new_zeros(extra)])
    first, last = 0, shape.positions
    if group is not None:
        share = shape.positions // dist.get_world_size(group)
        first = share * dist.get_rank(group)
        last = first + share
    mine = targets[(targets > first) & (targets <= last)]
    return ModelInputs(
        forward={
            "input_ids": input_ids[None, first:last],
            "position_ids": within[None, first:last],
            "use_cache": False,
            "context_group": group,
            **row_index(lengths, within, row_of_token),
        },
        predictors=mine - 1 - first,
        target_ids=ids[mine],
        targets=mine,
        num_outputs=num_outputs,
        context_group=group,
    )


def _padded(
    batch: TensorBatch, targets: Tensor, shape: InputShape, num_outputs: int
) -> ModelInputs:
    """One row a line, padded on the right, where causal attention never looks."""
    ids = batch.tokens[keys.INPUT_IDS]
    size = (shape.rows, shape.positions)
    flat_index = _flat_index(batch, shape)
    input_ids = ids.new_zeros(size)
    input_ids.view(-1)[flat_index] = ids
    mask = torch.zeros(size, dtype=torch.int64, device=ids.device)
    mask.view(-1)[flat_index] = 1
    mask[len(batch) :] = 1  # a row that sees nothing at all would be NaN
    positions = torch.arange(shape.positions, device=ids.device).expand(size)
    return ModelInputs(
        forward={
            "input_ids": input_ids,
            "attention_mask": mask,
            "position_ids": positions,
            "use_cache": False,
        },
        predictors=flat_index[targets - 1],
        target_ids=ids[targets],
        targets=targets,
        num_outputs=num_outputs,
    )


def _flat_index(batch: TensorBatch, shape: InputShape) -> Tensor:
    """int64 [N]: where each token is among padded rows laid end to end."""
    row_of_token = batch.row_of_token
    within = torch.arange(len(row_of_token), device=row_of_token.device)
    return row_of_token * shape.positions + within - batch.starts[row_of_token]


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


PACKED = "nemo_like_packed"

# Terms of attention that some architectures add and this one lacks: left out, they would go unseen.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
# The dense kernel is the faster one: on an H100 with rows of 4096 tokens, a training step of a 1.5B
# model took 1.43 s with it and 1.53 s with the variable-length one. It is worth this much padding.
_MOST_PADDING = 1.25
_HAS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters


def row_index(lengths: Tensor, within: Tensor, row_of_token: Tensor) -> dict[str, Any]:
    """Keyword arguments for a packed forward, in the names that transformers' kernels share.

    ``lengths`` [B]; ``within`` [N] position in the row; ``row_of_token`` [N].
    """
    longest = int(lengths.max())
    ends = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
        "padded_index": row_of_token * longest + within,
    }


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    padded_index: Tensor,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    context_group: dist.ProcessGroup | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row.

    ``query`` [1, H, N, D], ``key`` and ``value`` [1, H_kv, N, D] -> [1, N, H, D]; N is this rank's
    share of the tokens under context parallelism. AssertionError for a window shorter than a row,
    or terms that it lacks.
    """
    assert attention_mask is None
    assert dropout == 0.0
    assert sliding_window is None or sliding_window >= max_length_q, (
        "sliding windows shorter than a sequence need policy.batching=padded"
    )
    for name in _UNSUPPORTED:
        assert others.get(name) is None, f"attention with {name} needs policy.batching=padded"
    # [N, H, D] from here on.
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if context_group is not None:
        from nemo_like.policy.parallel.collectives import heads_for_tokens

        q, k, v = heads_for_tokens(q, k, v, context_group)
    shape = (len(cu_seq_lens_q) - 1, max_length_q)
    can_vary = q.is_cuda and q.dtype != torch.float32
    if can_vary and shape[0] * shape[1] > _MOST_PADDING * len(q):
        out = _flash(q, k, v, cu_seq_lens_q, max_length_q, scaling)
    else:
        out = _in_rows(q, k, v, padded_index, shape, scaling)
    if context_group is not None:
        from nemo_like.policy.parallel.collectives import tokens_for_heads

        out = tokens_for_heads(out, context_group)
    return out[None], None


def _in_rows(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, shape: tuple[int, int], scale: float | None
) -> Tensor:
    out = scaled_dot_product_attention(
        _pad(q, index, shape),
        _pad(k, index, shape),
        _pad(v, index, shape),
        is_causal=True,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    flat = out.transpose(1, 2).flatten(0, 1)
    return flat if len(flat) == len(index) else flat[index]


def _pad(x: Tensor, index: Tensor, shape: tuple[int, int]) -> Tensor:
    """[N, H, D] -> [B, H, T, D] with zeros behind each row."""
    padded = x
    if len(x) < shape[0] * shape[1]:  # else rows are equally long, and lie where they should
        padded = x.new_zeros(shape[0] * shape[1], *x.shape[1:]).index_copy(0, index, x)
    return padded.view(*shape, *x.shape[1:]).transpose(1, 2)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float | None
) -> Tensor:
    options: dict[str, Any] = {"window_size": (-1, 0)}  # causal
    if q.shape[1] != k.shape[1] and _HAS_GQA:
        options["enable_gqa"] = True
    return varlen_attn(q, k, v, ends, ends, longest, longest, scale=scale, **options)  # pyright: ignore


AttentionInterface.register(PACKED, packed_attention)
