"""Any Hugging Face causal language model, or some of its layers, as a module that gives logprobs.

Legend: ``N`` tokens of the micro-batch, ``M`` wanted ones, ``H`` hidden width.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from nemo_like.policy.distributions import logprobs_at, top_logprobs
from nemo_like.policy.head import Head
from nemo_like.policy.logprobs import token_logprobs
from nemo_like.policy.parallel.collectives import join_parts
from nemo_like.policy.parallel.full_tensors import local_part
from nemo_like.policy.requests import ForwardRequest, RequestQueue

# The head is applied here in chunks, so what a model does to its logits after it is applied too.
_DIVIDES_LOGITS = "logits_scaling"  # Granite
_MULTIPLIES_LOGITS = "logit_scale"  # Cohere
_CAPS_LOGITS = "final_logit_softcapping"  # Gemma 2


@dataclass(frozen=True, kw_only=True)
class HeadSettings:
    """How logprobs are computed from the last hidden states."""

    chunk_tokens: int
    """Tokens whose logits exist at one time."""
    float32: bool = False
    """Multiply in float32."""
    compile: bool = False
    """Fuse what follows the matrix product."""


class LogprobModel(nn.Module):
    """Wraps a causal model so that everything from tokens to logprobs is one forward.

    One forward matters under FSDP: the output head is gathered and freed with the root module.
    The model runs in eval mode always: dropout would make importance ratios differ from 1.
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
        """Whether this stage has the embedding."""
        self.is_last = is_last
        """Whether this stage has the output head."""
        self.vocab_group: dist.ProcessGroup | None = None
        """Ranks that hold the other rows of the output head."""

    def forward(self, hidden: Tensor | None, requests: ForwardRequest | RequestQueue) -> Tensor:
        """Hidden states [.., H] of the last layer here; from the last stage, float32 [R, N]:

        logprobs and entropies (zeros unless requested), then logprobs of any ``request.ids``; or,
        with ``request.top_k``, K logprobs and K ids (exact in float32 below 2^24). 0 where none
        is wanted. ``hidden`` comes from the previous stage; the first ignores it.
        """
        request = requests.next_for(self)
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
                return self._several(at, head, request)
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

    def _several(self, at: Tensor, head: Head, request: ForwardRequest) -> Tensor:
        """Float32 [2 K or 2 + K, M]: of the most likely tokens, or of each token and given ids."""
        chunks = {"temperature": request.temperature, "chunk_tokens": self.settings.chunk_tokens}
        if request.top_k:
            common = head if request.vocabulary is None else head.below(request.vocabulary)
            logprobs, ids = top_logprobs(at, common, request.top_k, **chunks)
            return torch.cat([logprobs.t(), ids.t().to(logprobs.dtype)])
        assert request.ids is not None
        own_ids = request.inputs.target_ids[:, None]
        if request.vocabulary is None:
            ids = torch.cat([own_ids, request.ids], dim=1)
            logprobs, entropy = logprobs_at(
                at, ids, head, with_entropy=request.with_entropy, **chunks
            )
            own, others = logprobs[:, :1].t(), logprobs[:, 1:].t()
        else:  # the token itself was sampled from all of the vocabulary
            own, entropy = logprobs_at(
                at.detach(), own_ids, head, with_entropy=request.with_entropy, **chunks
            )
            common = head.below(request.vocabulary)
            own, others = own.t(), logprobs_at(at, request.ids, common, **chunks)[0].t()
        return torch.cat([own, own.detach() * 0 if entropy is None else entropy[None], others])

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
