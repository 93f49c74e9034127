"""Checks on a small random twin that what leaves the policy is what it trains."""

import logging
from typing import Any

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from nemo_like.config.policy import Output, PolicyConfig
from nemo_like.errors import RunError, UserError
from nemo_like.models.build import model_class, one_line
from nemo_like.models.naming import is_adapter, plain_name
from nemo_like.policy.inputs import InputLayout, made_up_rows, model_inputs
from nemo_like.policy.lora import adapters_of, add_adapters, initialize_adapters
from nemo_like.policy.model import HeadSettings, LogprobModel, ValueModel
from nemo_like.policy.requests import ForwardRequest
from nemo_like.policy.state.leaving import leaving_tensors
from nemo_like.policy.state.loading import tied_names
from nemo_like.policy.state.twin import small_twin
from nemo_like.refit.manifest import Architecture

logger = logging.getLogger(__name__)

_NUM_TOKENS = 12
_STEP = 0.1
# Float32 rounding, with a wide margin: a tensor that is left out shows as 0.01 and more.
_TOLERANCE = 1e-3


def check_export(path: str, config: PolicyConfig, output: Output) -> None:
    """Train a twin for one step, load its files' tensors with transformers alone, and compare.

    Raises UserError if logprobs (or values) differ, or if a parameter that trains has no place in
    what is exported. The twin has few layers, experts and tokens: the check of a 70B model takes
    seconds. Names, shapes and merging do not depend on how many there are.
    """
    remedy = (
        "set policy.lora.rank=0, or name other layers in policy.lora.targets"
        if config.lora.rank
        else "use another architecture"
    )
    try:
        problem = _problem(path, config, output)
    except RunError as error:
        problem = str(error).rstrip(".")
    except UserError:
        raise
    except Exception as error:  # the boundary to a model's code, which may raise anything
        logger.debug("%s", config.model, exc_info=True)
        problem = f"a small model of its config.json fails in it ({one_line(error)})"
    if problem:
        raise UserError(
            f"policy.model={config.model} cannot be exported as it would be trained: {problem}; "
            f"{remedy}."
        )


def _problem(path: str, config: PolicyConfig, output: Output) -> str:
    values = output != "logprobs"
    kind, settings = model_class(path, output)
    twin = small_twin(kind, settings)
    described = Architecture.of(twin)
    if config.lora.rank:
        add_adapters(twin, config.lora)
        initialize_adapters(twin)
    model = (ValueModel if values else LogprobModel)(twin, HeadSettings(chunk_tokens=5))
    if missing := _without_place(model, described):
        return f"{missing} trains and has no place in the files"
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
    if not diff.item() <= _TOLERANCE:
        return (
            f"after one step its outputs differ by {diff.item():.3g} from those of its files in "
            "transformers"
        )
    return ""


def _without_place(model: LogprobModel, described: Architecture) -> str:
    """A parameter that trains and does not leave; "" if there is none."""
    tensors = {plain_name(name): tensor for name, tensor in model.state_dict().items()}
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
