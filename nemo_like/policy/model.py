"""Any Hugging Face causal language model, or some of its layers, as a module that gives logprobs.

Legend: ``N`` tokens of the micro-batch, ``M`` wanted ones, ``H`` hidden width, ``K`` vocabulary ids
for each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.losses.protocol import Loss, Needs
from nemo_like.policy.head import Head
from nemo_like.policy.inputs import ModelInputs
from nemo_like.policy.logprobs import token_logprobs
from nemo_like.policy.parallel.full_tensors import local_part

# The head is applied here in chunks, so what a model does to its logits after it is applied too.
_DIVIDES_LOGITS = "logits_scaling"  # Granite
_MULTIPLIES_LOGITS = "logit_scale"  # Cohere
_CAPS_LOGITS = "final_logit_softcapping"  # Gemma 2

MicroBatches = Sequence[TensorBatch | None]
"""None stands for a micro-batch that only other data-parallel ranks have."""


@dataclass(frozen=True, kw_only=True)
class ForwardRequest:
    """One forward pass; opaque to the wrappers (FSDP, pipeline stages) that it passes through."""

    inputs: ModelInputs
    temperature: float
    with_entropy: bool = False
    entropy_trains: bool = False
    ids: Tensor | None = None
    """int64 [M, K]: further vocabulary ids to compute logprobs of."""
    top_k: int = 0
    """Above 0: return only this many of the most likely tokens."""
    vocabulary: int | None = None
    """Distributions of ``ids`` and ``top_k`` leave out ids from here on, exactly as if their logits
    were -infinity. None: none."""

    def next_for(self, _: nn.Module) -> "ForwardRequest":
        """As in a pipeline's ``RequestQueue``: a single pass needs no queue."""
        return self


def forward_requests(
    inputs: Sequence[ModelInputs],
    micro_batches: MicroBatches,
    loss: Loss | None = None,
    **wanted: Any,
) -> list[ForwardRequest]:
    """One request per micro-batch, for what ``loss`` needs and the ``wanted`` fields."""
    needs = Needs() if loss is None else loss.needs
    requests = [
        ForwardRequest(inputs=one, entropy_trains=needs.entropy, **wanted) for one in inputs
    ]
    if not (column := needs.ids_column):
        return requests

    def ids(of: ModelInputs, batch: TensorBatch | None) -> Tensor:
        # For an empty micro-batch any value will do.
        return of.target_ids[:, None] if batch is None else batch.tokens[column][of.targets]

    return [
        replace(one, ids=ids(one.inputs, batch), vocabulary=needs.vocabulary)
        for one, batch in zip(requests, micro_batches, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class HeadSettings:
    chunk_tokens: int
    """Tokens whose logits exist at one time."""
    float32: bool = False
    compile: bool = False


class LogprobModel(nn.Module):
    """Wraps a causal model so that everything from tokens to logprobs is one forward.

    One forward matters under FSDP: the output head is gathered and freed with the root module.
    The model runs in eval mode always: dropout would make importance ratios differ from 1.
    ``is_first``: this stage has the embedding; ``is_last``: the output head.
    """

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        settings: HeadSettings,
        *,
        is_first: bool = True,
        is_last: bool = True,
    ) -> None:
        super().__init__()
        self.causal_lm = causal_lm.eval()
        self.settings = settings
        self.is_first = is_first
        self.is_last = is_last
        self.vocab_group: dist.ProcessGroup | None = None
        """Ranks that hold the other rows of the output head."""

    def forward(self, hidden: Tensor | None, requests: Any) -> Tensor:
        """Hidden states [.., H] of the last layer here; from the last stage, float32 [R, N]:

        logprobs and entropies (zeros unless requested), then logprobs of any ``request.ids``; or,
        with ``request.top_k``, K logprobs and K ids (exact in float32 below 2^24). 0 where none
        is wanted. ``hidden`` comes from the previous stage; the first ignores it. ``requests``: a
        ForwardRequest, or a pipeline's queue of them.
        """
        request: ForwardRequest = requests.next_for(self)
        inputs = request.inputs
        forward = dict(inputs.forward)
        if not self.is_first:
            forward["inputs_embeds"] = hidden
            del forward["input_ids"]
        hidden = self.causal_lm.base_model(**forward).last_hidden_state
        assert hidden is not None
        if not self.is_last:
            return hidden
        wanted = self._wanted(hidden, request)
        out = wanted.new_zeros(len(wanted), inputs.num_outputs)
        out = out.index_copy(1, inputs.targets, wanted)
        if inputs.context_group is not None:
            from nemo_like.policy.parallel.collectives import join_parts

            out = join_parts(out, inputs.context_group)
        return out

    def _wanted(self, hidden: Tensor, request: ForwardRequest) -> Tensor:
        """Float32 [R, M] from hidden states [.., H]: what is put at the targets."""
        inputs = request.inputs
        device = hidden.device.type
        if self.settings.float32:
            hidden = hidden.float()
        elif torch.is_autocast_enabled(device):
            hidden = hidden.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):  # it does not look into our own gradient
            at, head = hidden.flatten(0, 1)[inputs.predictors], self._head(hidden.dtype)
            if request.top_k or request.ids is not None:
                from nemo_like.policy.distributions import several

                return several(at, head, request, self.settings.chunk_tokens)
            logprobs, entropy = token_logprobs(
                at,
                inputs.target_ids,
                head,
                temperature=request.temperature,
                chunk_tokens=self.settings.chunk_tokens,
                with_entropy=request.with_entropy,
                entropy_trains=request.entropy_trains,
                compile=self.settings.compile,
            )
        return torch.stack([logprobs, logprobs.detach() * 0 if entropy is None else entropy])

    def _head(self, dtype: torch.dtype) -> Head:
        module = self.causal_lm.get_output_embeddings()
        assert isinstance(module, nn.Module)
        weight, bias = module.weight, getattr(module, "bias", None)
        assert isinstance(weight, Tensor)
        config = self.causal_lm.config
        scale = getattr(config, _MULTIPLIES_LOGITS, None) or 1.0
        if (divisor := getattr(config, _DIVIDES_LOGITS, None)) is not None:
            scale = scale / divisor
        group = self.vocab_group
        rank = dist.get_rank(group) if group is not None else 0
        local = local_part(weight).to(dtype)
        return Head(
            weight=local,
            bias=None if bias is None else local_part(bias).to(dtype),
            scale=scale,
            softcap=getattr(config, _CAPS_LOGITS, None),
            float32=self.settings.float32,
            first_token_id=rank * len(local),  # slices are equal: tensor_parallel.py sees to it
            group=group,
        )


class ValueModel(LogprobModel):
    """A model with one number for each token in place of logprobs: ``score`` of its hidden state.

    Where inputs ask for every token (``Output.values``), entry t of the output is the value where
    the model has read token t and all before it. Where they ask for predictions of trained tokens
    (``Output.values_before``), it is the value where token t was to be predicted, which is that
    after token t - 1; like logprobs it speaks of the token at t, and is 0 elsewhere.
    """

    def _wanted(self, hidden: Tensor, request: ForwardRequest) -> Tensor:
        at = hidden.flatten(0, 1)[request.inputs.predictors]
        weight = self.causal_lm.get_parameter("score.weight")
        with torch.autocast(hidden.device.type, enabled=False):  # values are sums of many terms
            values = (at.float() @ local_part(weight).float().t()).squeeze(-1)
        return torch.stack([values, values.detach() * 0])
