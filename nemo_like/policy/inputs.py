"""From flat rows to what a model's forward takes, packed or padded.

Legend: ``B`` rows, ``N`` their tokens end to end, ``T`` the longest row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch, num_skipped, shared_layout
from nemo_like.config.policy import Batching
from nemo_like.policy.attention import row_index


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
        if self.batching != "padded":
            tokens = batch.num_tokens
            if self.batching == "shared":
                tokens -= int(num_skipped(batch).sum())
            return InputShape(rows=1, positions=_round_up(tokens, self.multiple))
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
    if layout.batching != "padded":
        return _packed(batch, targets - 1, targets, shape, num_outputs, layout)
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
    if layout.batching != "padded":
        return _packed(batch, every, every, shape, len(every), layout)
    inputs = _padded(batch, every[:0], shape, len(every))
    return replace(inputs, predictors=_flat_index(batch, shape), targets=every)


def _packed(
    batch: TensorBatch,
    predictors: Tensor,
    targets: Tensor,
    shape: InputShape,
    num_outputs: int,
    layout: InputLayout,
) -> ModelInputs:
    """All rows in one line; positions restart with each row, and so does attention.

    ``predictors`` and ``targets`` are tokens of the batch.
    """
    ids, key_lengths, tokens = batch.tokens[keys.INPUT_IDS], batch.lengths, batch.num_tokens
    within = torch.arange(tokens, device=ids.device) - batch.starts[batch.row_of_token]
    here, lengths, place = ids, key_lengths, None
    if layout.batching == "shared":
        shared = shared_layout(batch)
        lengths, place = shared.lengths, shared.place
        predictors = place[predictors]
        here, within = ids[shared.kept], within[shared.kept]
    if (extra := shape.positions - len(here)) > 0:  # pad with rows no longer than others
        longest = int(key_lengths.max())
        full_rows, rest = divmod(extra, longest)
        filler = lengths.new_tensor([longest] * full_rows + [rest] * (rest > 0))
        more = torch.arange(extra, device=ids.device)
        lengths, key_lengths = torch.cat([lengths, filler]), torch.cat([key_lengths, filler])
        place = None if place is None else torch.cat([place, more + len(here)])
        here, within = torch.cat([here, ids.new_zeros(extra)]), torch.cat([within, more % longest])
    first, last = 0, shape.positions
    if (group := layout.context_group) is not None:
        share = shape.positions // dist.get_world_size(group)
        first = share * dist.get_rank(group)
        last = first + share
        mine = (predictors >= first) & (predictors < last)
        targets, predictors = targets[mine], predictors[mine]
    return ModelInputs(
        forward={
            "input_ids": here[None, first:last],
            "position_ids": within[None, first:last],
            "use_cache": False,
            "context_group": group,
            **row_index(lengths, None if place is None else key_lengths, place),
        },
        predictors=predictors - first,
        target_ids=ids[targets],
        targets=targets,
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
