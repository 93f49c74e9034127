"""Checks on small random twins of a model, before it is loaded.

Does this worker compute what transformers computes, and can it export what it trains?
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch, prompt_columns
from nemo_like.config.model_files import trusts_code
from nemo_like.config.policy import Attention, Batching, Output, PolicyConfig
from nemo_like.errors import RunError, UserError
from nemo_like.models.build import Architecture, model_class, model_settings, one_line
from nemo_like.models.naming import is_adapter, plain_name
from nemo_like.policy.attention import PACKED
from nemo_like.policy.inputs import InputLayout, made_up_rows, model_inputs
from nemo_like.policy.model import ForwardRequest, HeadSettings, LogprobModel, ValueModel
from nemo_like.policy.state.loading import tied_names
from nemo_like.policy.state.state import leaving_tensors
from nemo_like.policy.state.twin import PROBE_SPREAD, VOCAB, random_model, shortened, small_twin

logger = logging.getLogger(__name__)

# Float32 rounding of logprobs, with a wide margin: a wrong term shows as 0.1 and more.
_LOGPROB_TOLERANCE = 1e-2


@dataclass(frozen=True)
class _Layout:
    """Batching and attention of the policy; ``attention`` has no effect with packed rows."""

    batching: Batching
    attention: Attention

    @property
    def implementation(self) -> str:
        if self.batching != "padded":
            return PACKED
        if self.attention == "flash_attention_2":  # on a GPU only; its layout is sdpa's
            return "sdpa"
        return self.attention


_LAYOUTS = (
    _Layout("packed", "sdpa"),
    _Layout("padded", "sdpa"),
    _Layout("padded", "eager"),
)
"""Layouts that can be configured, fastest first."""


@torch.no_grad()
def check_architecture(path: str, config: PolicyConfig, role: str = "policy") -> None:
    """Compare two short rows in the configured layout with each row alone in transformers' own.

    Refuses (UserError) what would silently be wrong: attention with extra terms, recurrent
    layers that run from one packed row into the next, logits changed in a way that the head does
    not know. It then tries the other layouts, and names one that is right. Layers are as wide as
    the real ones, and of every kind that the model has. ``role``: the section that names it.
    """
    told = f"{role}.model={config.model}"
    full = _load_config(path, told)
    try:
        rows = _rows(full)
        expected = _plain_logprobs(_twin(full, "eager"), rows)
    except Exception as error:  # the boundary to a model's code, which may raise anything
        raise UserError(
            f"{told}: transformers itself cannot run a small model of its "
            f"config.json ({one_line(error)}); repair config.json or use another model."
        ) from error
    asked = _Layout(config.batching, config.attention)
    if problem := _problem(full, asked, rows, expected):
        classes: Any = AutoModelForCausalLM._model_mapping
        # The folder's own code is not in transformers' table.
        name = (classes[type(full)] if type(full) in classes else type(full)).__name__
        raise UserError(
            f"{told}: {name} cannot be {'computed' if role == 'teacher' else 'trained'} with "
            f"{_keys(asked)}: {problem}; "
            f"{_remedy(full, asked, config, rows, expected)}."
        )


def _problem(
    full: PreTrainedConfig, layout: _Layout, rows: TensorBatch, expected: torch.Tensor
) -> str:
    """Why a layout is wrong; empty if it gives the ``expected`` logprobs."""
    text = full.get_text_config()
    window = getattr(text, "sliding_window", None)
    # Packed attention sees full rows; refuse a window now, not when the first long row comes.
    in_use = window is not None and getattr(text, "use_sliding_window", True)
    packed = layout.batching != "padded"
    if in_use and packed and window < text.max_position_embeddings:
        return f"it has a sliding window of {window} tokens, which packed rows do not support"
    try:
        model = LogprobModel(_twin(full, layout.implementation), HeadSettings(chunk_tokens=5))
        inputs = model_inputs(rows, InputLayout(batching=layout.batching))
        actual = model(None, ForwardRequest(inputs=inputs, temperature=1.0))[0]
    except Exception as error:  # the boundary to a model's code, which may raise anything
        logger.debug("%s", layout, exc_info=True)
        return f"it fails ({one_line(error)})"
    diff = (actual - expected).abs().max().item()
    if diff <= _LOGPROB_TOLERANCE:
        return ""
    return f"its logprobs differ by {diff:.3g} from those of the plain model"


def _remedy(
    full: PreTrainedConfig,
    asked: _Layout,
    config: PolicyConfig,
    rows: TensorBatch,
    expected: torch.Tensor,
) -> str:
    others = (one for one in _LAYOUTS if one.implementation != asked.implementation)
    right = next((one for one in others if not _problem(full, one, rows, expected)), None)
    if right is None:
        return "no other values of policy.batching and policy.attention help, so use another model"
    remedy = f"set {_keys(right)}, with which it is exact"
    if right.batching == "padded" and config.parallel.context_parallel_size > 1:
        remedy += ", and policy.parallel.context_parallel_size=1"
    return remedy


def _keys(layout: _Layout) -> str:
    batching = f"policy.batching={layout.batching}"
    if layout.batching != "padded":
        return batching
    return f"{batching} and policy.attention={layout.attention}"


def _rows(full: PreTrainedConfig) -> TensorBatch:
    generator = torch.Generator().manual_seed(0)
    size = min(full.get_text_config().vocab_size, VOCAB)
    ids = torch.randint(0, size, (12,), generator=generator)
    ids[7:9] = ids[:2]  # a prompt in common
    rows = made_up_rows([7, 5], ids=ids)
    rows.tokens[keys.LOSS_MASK][[1, 8]] = False
    rows.rows = prompt_columns(rows)
    return rows


def _load_config(path: str, told: str) -> PreTrainedConfig:
    loaded = model_settings(path)
    own = "AutoModelForCausalLM" in getattr(loaded, "auto_map", ()) and trusts_code()
    if not own and type(loaded) not in AutoModelForCausalLM._model_mapping:
        raise UserError(
            f"{told}: {type(loaded).__name__} is not a causal language model; "
            "give a folder that transformers' AutoModelForCausalLM can load."
        )
    return loaded


def _twin(full: PreTrainedConfig, attention: str) -> PreTrainedModel:
    """A small model with the real one's classes and widths."""
    config = shortened(full, spread=PROBE_SPREAD)
    return random_model(AutoModelForCausalLM, config, attention)


def _plain_logprobs(twin: PreTrainedModel, rows: TensorBatch) -> torch.Tensor:
    """Each row alone, through transformers' plainest attention and its own head."""
    parts = []
    for row in rows.tokens[keys.INPUT_IDS].split(rows.lengths.tolist()):
        logprobs = twin(input_ids=row[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        parts += [torch.zeros(1), logprobs.gather(-1, row[1:, None])[:, 0]]
    return torch.cat(parts) * rows.tokens[keys.LOSS_MASK]


_NUM_TOKENS = 12
_STEP = 0.1
# Float32 rounding, with a wide margin: a tensor that is left out shows as 0.01 and more.
_EXPORT_TOLERANCE = 1e-3


def check_export(path: str, config: PolicyConfig, output: Output, role: str = "policy") -> None:
    """Train a twin for one step, load its files' tensors with transformers alone, and compare.

    Raises UserError if logprobs (or values) differ, or if a trained parameter is missing from the
    export. Names, shapes and merging do not depend on the number of layers or experts.
    """
    remedy = (
        "set policy.lora.rank=0, or name other layers in policy.lora.targets"
        if config.lora.rank
        else "use another architecture"
    )
    try:
        problem = _export_problem(path, config, output)
    except RunError as error:
        problem = str(error).rstrip(".")
    except UserError:
        raise
    except Exception as error:  # the boundary to a model's code, which may raise anything
        logger.debug("%s", config.model, exc_info=True)
        problem = f"a small model of its config.json fails in it ({one_line(error)})"
    if problem:
        raise UserError(
            f"{role}.model={config.model} cannot be exported as it would be trained: {problem}; "
            f"{remedy}."
        )


def _export_problem(path: str, config: PolicyConfig, output: Output) -> str:
    values = output != "logprobs"
    kind, settings = model_class(path, output)
    twin = small_twin(kind, settings)
    described = Architecture.of(twin)
    if config.lora.rank:
        from nemo_like.policy.lora import add_adapters, initialize_adapters

        add_adapters(twin, config.lora)
        initialize_adapters(twin)
    model = (ValueModel if values else LogprobModel)(twin, HeadSettings(chunk_tokens=5))
    if missing := _without_place(model, described):
        return f"{missing} trains but is missing from the files"
    ids = torch.arange(_NUM_TOKENS) * 7 % twin.config.get_text_config().vocab_size
    _train_one_step(model, ids, values)
    with torch.no_grad():
        ours = _outputs(model, ids, values)
    plain = _exported(model, described)
    with torch.no_grad():
        logits = plain(input_ids=ids[None], use_cache=False).logits[0]
    if values:
        diff = (ours[-1] - logits.flatten()[-1]).abs()
    else:
        logprobs = logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        diff = (ours[1:] - logprobs).abs().max()
    if not diff.item() <= _EXPORT_TOLERANCE:
        return (
            f"after one step its outputs differ by {diff.item():.3g} from those of its files in "
            "transformers"
        )
    return ""


def _without_place(model: LogprobModel, described: Architecture) -> str:
    """A trained parameter that is missing from the export; "" if none is."""
    tensors = {plain_name(name): tensor for name, tensor in model.state_dict().items()}
    adapters = {}
    if any(map(is_adapter, tensors)):
        from nemo_like.policy.lora import adapters_of

        adapters = adapters_of(model, tensors)
    kept = {id(one) for adapter in adapters.values() for one in (adapter.a, adapter.b)}
    placed = described.tensors.keys() | tied_names(model).keys()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        own = plain_name(name)
        if not (id(tensors.get(own)) in kept if is_adapter(own) else own in placed):
            return own
    lost = sorted(adapters.keys() - placed)
    return f"the adapter of {lost[0]}" if lost else ""


def _train_one_step(model: LogprobModel, ids: Tensor, values: bool) -> None:
    """Move every parameter that trains, far enough to show."""
    outputs = _outputs(model, ids, values)
    weights = torch.linspace(-1.0, 1.0, len(outputs))
    (outputs * weights).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                scale = parameter.square().mean().sqrt()
                parameter -= _STEP * torch.where(scale > 0, scale, 1.0) * parameter.grad.sign()


def _outputs(model: LogprobModel, ids: Tensor, values: bool) -> Tensor:
    batch = made_up_rows([len(ids)], ids=ids)
    inputs = model_inputs(batch, InputLayout(batching="padded"), every_token=values)
    return model(None, ForwardRequest(inputs=inputs, temperature=1.0))[0]


def _exported(model: LogprobModel, described: Architecture) -> Any:
    """The twin as transformers alone loads it from its files, which need not be written for it."""
    leaving = leaving_tensors([model], described, torch.device("cpu"))
    state = {name: tensor.clone() for name, tensor in leaving}
    disable_progress_bar()
    kind: Any = type(model.causal_lm)
    settings = type(model.causal_lm.config).from_dict(model.causal_lm.config.to_dict())
    return kind.from_pretrained(
        None,
        config=settings,
        state_dict=state,
        dtype=torch.float32,
        attn_implementation="eager",
        trust_remote_code=False,
    ).eval()
