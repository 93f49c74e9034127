"""Does this worker compute what transformers computes? Asked of a small random twin."""

import logging
import math
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.policy import PolicyConfig
from nemo_like.errors import UserError
from nemo_like.policy.attention import PACKED
from nemo_like.policy.calls import Call, Calls
from nemo_like.policy.inputs import InputLayout, model_inputs
from nemo_like.policy.model import HeadSettings, LogprobModel

logger = logging.getLogger(__name__)

_PROBE_VOCAB = 512
_PROBE_LAYERS = 2
# Queries and keys of this size saturate softmax and caps: what attention adds of its own shows.
_PROBE_SPREAD = 4.0
# Float32 rounding of logprobs, with a wide margin: a wrong term shows as 0.1 and more.
_TOLERANCE = 1e-2


@torch.no_grad()
def check_architecture(path: str, config: PolicyConfig) -> None:
    """Compare two short rows in the configured layout with each row alone in transformers' own.

    Refuses (UserError) what would silently be wrong: attention with terms of its own, recurrent
    layers that run from one packed row into the next, logits changed in a way that the head does
    not know. Weights are random and the vocabulary and depth small, so that a 70B model costs
    seconds; layers are as wide as the real ones, and of every kind that the model has.
    """
    full = _load_config(path, config)
    _check_window(full, config)
    twin = _twin(full)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, twin.config.get_text_config().vocab_size, (12,), generator=generator)
    mask = torch.ones(12, dtype=torch.bool)
    mask[[0, 7]] = False
    batch = TensorBatch(
        lengths=torch.tensor([7, 5]), tokens={keys.INPUT_IDS: ids, keys.LOSS_MASK: mask}
    )
    attention = PACKED if config.batching == "packed" else config.attention
    if attention == "flash_attention_2":  # runs on a GPU only; the layout is sdpa's
        attention = "sdpa"
    problem, actual = "", torch.zeros(12)
    twin.set_attn_implementation(attention)
    model = LogprobModel(twin, HeadSettings(chunk_tokens=5))
    try:
        inputs = model_inputs(batch, InputLayout(batching=config.batching))
        actual = model(None, Calls([Call(inputs=inputs, temperature=1.0)]))[0]
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        problem = f"it fails ({error})"
    expected = _plain_logprobs(twin, ids.split([7, 5]))
    if not problem and not (gap := (actual - expected).abs().max().item()) <= _TOLERANCE:
        problem = f"its logprobs differ by {gap:.3g} from those of the plain model"
    if problem:
        padded = config.batching == "padded"
        remedy = "use another architecture" if padded else "set policy.batching=padded"
        raise UserError(
            f"policy.model={config.model}: {type(twin).__name__} cannot be trained with "
            f"policy.batching={config.batching}: {problem}; {remedy}."
        )


def _load_config(path: str, config: PolicyConfig) -> PreTrainedConfig:
    try:
        loaded = AutoConfig.from_pretrained(path, local_files_only=True)
        if type(loaded) not in AutoModelForCausalLM._model_mapping:
            raise ValueError(f"{type(loaded).__name__} is no causal language model.")
    except (OSError, ValueError, ImportError, KeyError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise UserError(
            f"policy.model={config.model} could not be loaded: {first_line} Give a folder that "
            "transformers' AutoModelForCausalLM can load."
        ) from error
    return loaded


def _check_window(full: PreTrainedConfig, config: PolicyConfig) -> None:
    """Packed attention sees whole rows; refuse a window now, not when the first long row comes."""
    text = full.get_text_config()
    window = getattr(text, "sliding_window", None)
    in_use = window is not None and getattr(text, "use_sliding_window", True)
    if in_use and config.batching == "packed" and window < text.max_position_embeddings:
        raise UserError(
            f"policy.model={config.model} has a sliding window of {window} tokens, which packed "
            "rows do not support; set policy.batching=padded."
        )


def _twin(full: PreTrainedConfig) -> PreTrainedModel:
    """A model of the same classes and widths with few layers, few tokens and random weights."""
    config = type(full).from_dict(full.to_dict())
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    depth = min(text.num_hidden_layers, _PROBE_LAYERS)
    while kinds and set(kinds[:depth]) != set(kinds):
        depth += 1
    changes: dict[str, Any] = {
        "num_hidden_layers": depth,
        "vocab_size": min(text.vocab_size, _PROBE_VOCAB),
        "initializer_range": _PROBE_SPREAD / math.sqrt(text.hidden_size),
        "pad_token_id": None,
    }
    if kinds:
        changes["layer_types"] = kinds[:depth]
    for name, value in changes.items():
        setattr(text, name, value)
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    twin = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    torch.random.set_rng_state(state)
    return twin


def _plain_logprobs(twin: PreTrainedModel, rows: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Each row alone, through transformers' plainest attention and its own head."""
    twin.set_attn_implementation("eager")
    parts = []
    for row in rows:
        logprobs = twin(input_ids=row[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        parts += [torch.zeros(1), logprobs.gather(-1, row[1:, None])[:, 0]]
    return torch.cat(parts)
