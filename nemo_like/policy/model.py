"""Any Hugging Face causal language model, as a module from tokens to logprobs.

Legend: ``N`` tokens of the micro-batch, ``M`` wanted ones.
"""

import logging

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from nemo_like.config.choices import Batching
from nemo_like.config.schema import PolicyConfig
from nemo_like.errors import UserError
from nemo_like.policy.attention import PACKED
from nemo_like.policy.inputs import ModelInputs
from nemo_like.policy.logprobs import token_logprobs

logger = logging.getLogger(__name__)

# The head is applied here in chunks, so what a model does to its logits after it is applied too.
_DIVIDES_LOGITS = "logits_scaling"  # Granite
_MULTIPLIES_LOGITS = "logit_scale"  # Cohere
_CAPS_LOGITS = "final_logit_softcapping"  # Gemma 2
_HEAD_TOLERANCE = 1e-4


class LogprobModel(nn.Module):
    """Wraps a causal model so that everything from tokens to logprobs is one forward.

    One forward matters under FSDP: the output head is gathered and freed with the root module.
    The model runs in eval mode always: dropout would make importance ratios differ from 1.
    """

    def __init__(self, causal_lm: PreTrainedModel, chunk_tokens: int) -> None:
        super().__init__()
        self.causal_lm = causal_lm.eval()
        self.chunk_tokens = chunk_tokens

    def forward(
        self, inputs: ModelInputs, temperature: float, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Logprobs float32 [N], 0 where none is wanted; entropies [M] of the wanted ones."""
        hidden = self.causal_lm.base_model(**inputs.forward).last_hidden_state.flatten(0, 1)
        # The token at i is predicted by the hidden state of i - 1 in the same row.
        before = hidden[inputs.flat_index[inputs.targets - 1]]
        logprobs, entropy = token_logprobs(
            before,
            inputs.target_ids,
            self.logits,
            temperature=temperature,
            chunk_tokens=self.chunk_tokens,
            with_entropy=with_entropy,
        )
        flat = logprobs.new_zeros(inputs.num_tokens)
        return flat.index_copy(0, inputs.targets, logprobs), entropy

    def logits(self, hidden: Tensor) -> Tensor:
        """[C, H] -> [C, V], as the wrapped model computes them."""
        head = self.causal_lm.get_output_embeddings()
        assert head is not None
        logits = head(hidden)
        config = self.causal_lm.config
        if (divisor := getattr(config, _DIVIDES_LOGITS, None)) is not None:
            logits = logits / divisor
        if (factor := getattr(config, _MULTIPLIES_LOGITS, None)) is not None:
            logits = logits * factor
        if (cap := getattr(config, _CAPS_LOGITS, None)) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits


def load_model(path: str, config: PolicyConfig) -> LogprobModel:
    """The model of a folder with float32 master weights on the CPU.

    Raises UserError if the folder does not hold a causal language model that this worker can train.
    """
    attention = PACKED if config.batching is Batching.packed else config.attention
    try:
        causal_lm = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation=attention, local_files_only=True
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise UserError(
            f"policy.model={config.model} could not be loaded: {first_line} Give a folder that "
            "transformers' AutoModelForCausalLM can load."
        ) from error
    model = LogprobModel(causal_lm, config.logprob_chunk_tokens)
    _check_head(model, config)
    return model


@torch.no_grad()
def _check_head(model: LogprobModel, config: PolicyConfig) -> None:
    """Refuse an architecture that treats its logits in a way that ``logits`` does not know."""
    ids = torch.arange(4)[None] % model.causal_lm.config.get_text_config().vocab_size
    attention = str(model.causal_lm.config._attn_implementation)
    model.causal_lm.set_attn_implementation("eager")
    expected = model.causal_lm(input_ids=ids, use_cache=False).logits[0]
    hidden = model.causal_lm.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    model.causal_lm.set_attn_implementation(attention)
    gap = (model.logits(hidden) - expected).abs().max().item()
    if not gap <= _HEAD_TOLERANCE * max(1.0, expected.abs().max().item()):
        raise UserError(
            f"policy.model={config.model}: {type(model.causal_lm).__name__} changes its logits in "
            f"a way that is not supported (they differ by {gap:.3g}); use another architecture."
        )
