"""From a Hugging Face folder to sharded stages on the device, without a whole model anywhere.

Parameters begin on the meta device; each rank reads its own slices from the safetensors files.
"""

import logging
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict_loader as dcp_load
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from nemo_like.config.policy import Output, PolicyConfig
from nemo_like.errors import UserError
from nemo_like.planning.layout import num_stages
from nemo_like.policy.attention import PACKED
from nemo_like.policy.file_errors import told_as
from nemo_like.policy.lora import add_adapters, initialize_adapters
from nemo_like.policy.mesh import PolicyMesh
from nemo_like.policy.model import HeadSettings, LogprobModel, ValueModel
from nemo_like.policy.names import hf_name
from nemo_like.policy.parallelize import shard_model, wrap_layers
from nemo_like.policy.shards import local_part
from nemo_like.policy.stages import keep_stage, stages_of_rank
from nemo_like.policy.tensor_parallel import apply_tensor_parallel
from nemo_like.weights.adapters import is_adapter

logger = logging.getLogger(__name__)

_SCORE = "score.weight"
_UNREADABLE = "The weights of the model {} cannot be loaded"
_ROWS_AT_ONCE = 4096
# Of older transformers, which saved what is computed; and the head of a model that gives values.
_UNUSED = (r"(^|\.)rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
_UNUSED_BY_VALUES = r"^(lm_head|embed_out)\.weight$"


def load_stages(
    path: str,
    config: PolicyConfig,
    mesh: PolicyMesh,
    device: torch.device,
    output: Output = "logprobs",
) -> tuple[list[LogprobModel], set[str]]:
    """This rank's stages, sharded and loaded, float32 master weights; collective.

    Second: names of parameters whose gradients must be summed over tensor-parallel ranks.
    """
    dtype = getattr(torch, config.dtype)
    stages, partial = [], set()
    for stage in stages_of_rank(mesh.parallel, mesh.coordinate("pp")):
        causal_lm = _empty_model(path, config, output)
        if mesh.sizes.pp > 1:
            keep_stage(causal_lm, mesh.parallel, stage)
        kind = ValueModel if output != "logprobs" else LogprobModel
        model = kind(
            causal_lm,
            HeadSettings(
                chunk_tokens=config.logprob_chunk_tokens,
                float32=config.float32_head,
                compile=config.compile,
            ),
            is_first=stage == 0,
            is_last=stage == num_stages(mesh.parallel) - 1,
        )
        if mesh.tp is not None:
            partial |= apply_tensor_parallel(
                model, mesh.tp, sequence_parallel=mesh.parallel.sequence_parallel
            )
        wrap_layers(model, config)
        if not mesh.ddp:
            shard_model(model, mesh, config, dtype)
        home = torch.device("cpu") if config.offload == "all" else device
        _materialize(model, home, device)
        _load_weights(model, path)
        initialize_adapters(model)
        stages.append(model)
    return stages, partial


def _empty_model(path: str, config: PolicyConfig, output: Output) -> PreTrainedModel:
    """Parameters without memory; buffers (rotary frequencies) are real."""
    attention = PACKED if config.batching == "packed" else config.attention
    kind, settings = model_class(path, output)
    with init_empty_weights(include_buffers=False):
        with no_init_weights():  # drawing none for the meta device takes a millisecond a tensor
            model = kind.from_config(settings, dtype=torch.float32, attn_implementation=attention)
        if config.lora.rank:
            add_adapters(model, config.lora)
    model.tie_weights()
    return model


def model_class(path: str, output: Output) -> tuple[Any, PreTrainedConfig]:
    """transformers' class for a folder's model with this output, and its configuration.

    Values are the one label of its model for sequence classification. Raises UserError if
    transformers has none for the architecture.
    """
    settings = AutoConfig.from_pretrained(path, local_files_only=True)
    if output == "logprobs":
        return AutoModelForCausalLM, settings
    if type(settings) not in AutoModelForSequenceClassification._model_mapping:
        raise UserError(
            f"{path}: transformers has no {type(settings).__name__} with one score a sequence; use "
            "another architecture."
        )
    settings.num_labels = 1
    named: Any = AutoModelForSequenceClassification._model_mapping[type(settings)]
    settings.architectures = [named.__name__]
    return AutoModelForSequenceClassification, settings


def _materialize(model: nn.Module, device: torch.device, buffer_device: torch.device) -> None:
    """Give meta parameters memory. ``to_empty`` alone would empty buffers and untie parameters."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    first_name: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (first := first_name.setdefault(id(parameter), name)) != name:
            ties[name] = first
    model.to_empty(device=device)
    for name, value in buffers.items():
        parent, _, child = name.rpartition(".")
        model.get_submodule(parent)._buffers[child] = value.to(buffer_device)
    for name, first in ties.items():
        parent, _, child = name.rpartition(".")
        model.get_submodule(parent)._parameters[child] = model.get_parameter(first)


def _load_weights(model: LogprobModel, path: str) -> None:
    """Fill parameters (and saved buffers) from the folder's files; collective."""
    wanted: dict[str, Tensor] = {}
    # keep_vars=False: DTensors without their parameters, which is what a reader fills in place.
    for name, tensor in model.state_dict().items():
        if not is_adapter(name):
            wanted[hf_name(name)] = tensor
    stored = _stored_files(Path(path))
    tied = tied_names(model)
    for head, embedding in tied.items():
        _refuse_two_values(path, stored, head, embedding)
    state = {tied.get(name, name): tensor for name, tensor in wanted.items()}
    if isinstance(model, ValueModel) and _SCORE not in stored:
        # A head that begins at 0: no score and no value favours anything before training.
        torch.nn.init.zeros_(local_part(state.pop(_SCORE)))
        del wanted[_SCORE]
    if stored.keys() >= state.keys():
        with told_as(UserError, _UNREADABLE.format(path)):
            dcp_load.load(state, storage_reader=HuggingFaceStorageReader(path))
        return
    # Other formats (.bin, weights that transformers converts on loading) are read whole.
    missing = sorted(state.keys() - stored.keys())
    logger.info(
        "%s lacks safetensors named %s; every rank reads the whole model once", path, missing[:3]
    )
    auto_class: Any = AutoModelForCausalLM  # whose types know nothing of output_loading_info
    with told_as(UserError, _UNREADABLE.format(path)):
        whole, found = auto_class.from_pretrained(
            path, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    # transformers would draw them at random.
    if lost := sorted(name for name in found["missing_keys"] if name in wanted):
        raise UserError(
            f"The files of the model {path} lack {lost[0]}, which its config.json asks for; give a "
            "complete folder."
        )
    full: dict[str, Any] = whole.state_dict()
    own = [name for name, _ in model.causal_lm.named_parameters()]
    own += [name for name, _ in model.causal_lm.named_buffers()]
    set_model_state_dict(
        model.causal_lm,
        {name: full[hf_name(name)] for name in own if hf_name(name) in wanted},
        options=StateDictOptions(full_state_dict=True, strict=False),
    )


def _stored_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file that holds it; UserError if two do, or one is damaged.

    What reads them takes all files of the folder, whatever an index says.
    """
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with told_as(UserError, f"{path} cannot be read"), safe_open(path, framework="pt") as file:
            names = file.keys()
        for name in names:
            if (first := found.setdefault(name, path)) != path:
                raise UserError(
                    f"The model {folder} has {name} in both {first.name} and {path.name}; remove "
                    "the files that do not belong to it."
                )
    return found


def unused_tensors(path: str, config: PolicyConfig, output: Output) -> list[str]:
    """Names in the folder's files that its architecture has no use for, without the harmless ones.

    None where transformers converts names on loading, since there it is not known.
    """
    model = _empty_model(path, config, output)
    stored = _stored_files(Path(path)).keys()
    saved = {hf_name(name) for name in model.state_dict() if not is_adapter(name)}
    if not stored >= saved - {_SCORE, *_ties(model)}:
        return []
    silent = [*_UNUSED, *(model._keys_to_ignore_on_load_unexpected or ())]
    if output != "logprobs":
        silent.append(_UNUSED_BY_VALUES)
    known = saved | {name for name, _ in model.named_buffers()}
    return sorted(
        name for name in stored - known if not any(re.search(one, name) for one in silent)
    )


def _refuse_two_values(path: str, stored: dict[str, Path], head: str, embedding: str) -> None:
    """Raise UserError where a head that config.json ties differs from its embedding.

    transformers would leave it untied, engines would drop it.
    """
    if head not in stored or embedding not in stored:
        return
    with (
        told_as(UserError, _UNREADABLE.format(path)),
        safe_open(stored[head], framework="pt") as ours,
        safe_open(stored[embedding], framework="pt") as theirs,
    ):
        one, other = ours.get_slice(head), theirs.get_slice(embedding)
        same = one.get_shape() == other.get_shape() and all(
            torch.equal(one[row : row + _ROWS_AT_ONCE], other[row : row + _ROWS_AT_ONCE])
            for row in range(0, one.get_shape()[0], _ROWS_AT_ONCE)
        )
    if not same:
        raise UserError(
            f"The config.json of the model {path} ties {head} to {embedding}, and its files hold "
            "two that differ; set tie_word_embeddings to false there, or remove the wrong one."
        )


def tied_names(model: LogprobModel) -> dict[str, str]:
    """Output head -> embedding, where the architecture ties them: files hold one of the two."""
    return _ties(model.causal_lm)


def _ties(model: PreTrainedModel) -> dict[str, str]:
    if not model.config.get_text_config().tie_word_embeddings:
        return {}
    keys: Any = getattr(model, "_tied_weights_keys", None) or {}
    return dict(keys) if isinstance(keys, dict) else {}
