"""From flat rows to what a model's forward takes, packed or padded.

Legend: ``B`` rows, ``N`` their tokens end to end, ``T`` the longest row.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.choices import Batching
from nemo_like.policy.attention import row_index


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """Keyword arguments of one forward pass, and where its flat tokens are in the output."""

    forward: dict[str, Any]
    flat_index: Tensor
    """int64 [N]: position of each token among the forward's positions, batch-major."""
    targets: Tensor
    """int64 [M]: flat positions of the tokens whose logprob is wanted; never a row's first."""
    target_ids: Tensor
    """int64 [M]: the tokens there."""
    num_tokens: int
    """``N``."""


def model_inputs(batch: TensorBatch, batching: Batching) -> ModelInputs:
    """Lay one micro-batch's rows out for the model; logprobs are wanted where the mask is True."""
    ids = batch.tokens[keys.INPUT_IDS]
    within = torch.arange(len(ids), device=ids.device) - batch.starts[batch.row_of_token]
    targets = batch.tokens[keys.LOSS_MASK].nonzero(as_tuple=True)[0]
    if batching is Batching.packed:
        forward, flat_index = _packed(batch, ids, within)
    else:
        forward, flat_index = _padded(batch, ids, within)
    return ModelInputs(
        forward={**forward, "use_cache": False},
        flat_index=flat_index,
        targets=targets,
        target_ids=ids[targets],
        num_tokens=len(ids),
    )


def empty_inputs(batching: Batching, device: torch.device | str) -> ModelInputs:
    """One token and no targets: what a rank feeds when others have a micro-batch more."""
    one = TensorBatch(
        lengths=torch.tensor([1], device=device),
        tokens={
            keys.INPUT_IDS: torch.zeros(1, dtype=torch.int64, device=device),
            keys.LOSS_MASK: torch.zeros(1, dtype=torch.bool, device=device),
        },
    )
    return model_inputs(one, batching)


def _packed(batch: TensorBatch, ids: Tensor, within: Tensor) -> tuple[dict[str, Any], Tensor]:
    """All rows in one line; positions restart with each row, and so does attention."""
    forward = {
        "input_ids": ids[None],
        "position_ids": within[None],
        **row_index(batch.lengths, within, batch.row_of_token),
    }
    return forward, torch.arange(len(ids), device=ids.device)


def _padded(batch: TensorBatch, ids: Tensor, within: Tensor) -> tuple[dict[str, Any], Tensor]:
    """One row a line, padded on the right, where causal attention never looks."""
    shape = (len(batch), int(batch.lengths.max()))
    flat_index = batch.row_of_token * shape[1] + within
    input_ids = ids.new_zeros(shape)
    input_ids.view(-1)[flat_index] = ids
    mask = torch.zeros(shape, dtype=torch.int64, device=ids.device)
    mask.view(-1)[flat_index] = 1
    positions = torch.arange(shape[1], device=ids.device).expand(shape)
    return {"input_ids": input_ids, "attention_mask": mask, "position_ids": positions}, flat_index
