"""Any Hugging Face causal language model, as a module from tokens to logprobs.

Legend: ``N`` tokens of the micro-batch, ``M`` wanted ones.
"""

import logging

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.choices import Attention, Batching
from nemo_like.config.policy_schema import PolicyConfig
from nemo_like.errors import UserError
from nemo_like.policy.attention import PACKED
from nemo_like.policy.inputs import ModelInputs, model_inputs
from nemo_like.policy.logprobs import token_logprobs

logger = logging.getLogger(__name__)

# The head is applied here in chunks, so what a model does to its logits after it is applied too.
_DIVIDES_LOGITS = "logits_scaling"  # Granite
_MULTIPLIES_LOGITS = "logit_scale"  # Cohere
_CAPS_LOGITS = "final_logit_softcapping"  # Gemma 2
# Float32 rounding of logprobs, with a wide margin: a wrong term shows as 0.1 and more.
_EXACT_TOLERANCE = 1e-2


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
    attention = PACKED if config.batching is Batching.packed else config.attention.value
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
    _check_window(causal_lm, config)
    _check_exact(model, config)
    return model


def _check_window(causal_lm: PreTrainedModel, config: PolicyConfig) -> None:
    """Packed attention sees whole rows; refuse a window now, not when the first long row comes."""
    text = causal_lm.config.get_text_config()
    window = getattr(text, "sliding_window", None)
    in_use = window is not None and getattr(text, "use_sliding_window", True)
    if in_use and config.batching is Batching.packed and window < text.max_position_embeddings:
        raise UserError(
            f"policy.model={config.model} has a sliding window of {window} tokens, which packed "
            "rows do not support; set policy.batching=padded."
        )


@torch.no_grad()
def _check_exact(model: LogprobModel, config: PolicyConfig) -> None:
    """Compare two short rows in the configured layout with each row alone in transformers' own.

    Refuses what would silently be wrong: attention with terms of its own, recurrent layers that run
    from one packed row into the next, logits changed in a way that ``logits`` does not know.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([7, 5])
    vocab_size = model.causal_lm.config.get_text_config().vocab_size
    ids = torch.randint(0, vocab_size, (12,), generator=generator)
    mask = torch.ones(12, dtype=torch.bool)
    mask[[0, 7]] = False
    batch = TensorBatch(lengths=lengths, tokens={keys.INPUT_IDS: ids, keys.LOSS_MASK: mask})
    configured = str(model.causal_lm.config._attn_implementation)
    if configured == Attention.flash_attention_2:  # runs on a GPU only; the layout is sdpa's
        model.causal_lm.set_attn_implementation(Attention.sdpa.value)
    problem, actual = "", torch.zeros(12)
    try:
        actual, _ = model(model_inputs(batch, config.batching), temperature=1.0)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        problem = f"it fails ({error})"
    model.causal_lm.set_attn_implementation(Attention.eager.value)
    rows = [
        model.causal_lm(input_ids=row[None], use_cache=False).logits[0] for row in ids.split([7, 5])
    ]
    expected = torch.cat(
        [
            torch.cat([torch.zeros(1), one[:-1].log_softmax(-1).gather(-1, row[1:, None])[:, 0]])
            for one, row in zip(rows, ids.split([7, 5]), strict=True)
        ]
    )
    model.causal_lm.set_attn_implementation(configured)
    if not problem and not (gap := (actual - expected).abs().max().item()) <= _EXACT_TOLERANCE:
        problem = f"its logprobs differ by {gap:.3g} from those of the plain model"
    if problem:
        padded = config.batching is Batching.padded
        remedy = "use another architecture" if padded else "set policy.batching=padded"
        raise UserError(
            f"policy.model={config.model}: {type(model.causal_lm).__name__} cannot be trained with "
            f"policy.batching={config.batching}: {problem}; {remedy}."
        )
