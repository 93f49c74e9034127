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
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.policy import Batching
from nemo_like.policy.attention import row_index


@dataclass(frozen=True, kw_only=True)
class InputShape:
    """Positions of a forward pass: [1, positions] packed, [rows, positions] padded."""

    rows: int
    positions: int

    @property
    def size(self) -> int:
        """Positions of all rows: no fewer than tokens."""
        return self.rows * self.positions


@dataclass(frozen=True, kw_only=True)
class InputLayout:
    """How rows are laid out on this rank; one per worker."""

    batching: Batching
    multiple: int = 1
    """What the number of positions must divide by."""
    context_group: dist.ProcessGroup | None = None
    """Ranks that share the tokens of a packed pass, in equal contiguous parts."""

    def shape_of(self, batch: TensorBatch) -> InputShape:
        """The least shape that holds ``batch``."""
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
    """Length of the result: ``N``, or more in a pipeline, where all passes have one shape."""
    context_group: dist.ProcessGroup | None = field(default=None)
    """Ranks that hold the other positions."""


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


def empty_batch(device: torch.device | str) -> TensorBatch:
    """One row of two tokens: what a rank feeds when others have a micro-batch more.

    It has one target, so that its pass reaches every parameter; its loss is taken times zero.
    """
    return made_up_rows([2], device)


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
    """All rows in one line; positions restart with each row, and so does attention."""
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
