"""From a Hugging Face folder to sharded stages on the device, without a full model anywhere.

Parameters begin on the meta device; each rank reads its own slices from the safetensors files.
"""

import logging
import re
from collections.abc import Set
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from nemo_like.config.model_files import trusts_code
from nemo_like.config.policy import Output, PolicyConfig
from nemo_like.errors import UserError
from nemo_like.models.build import architecture, model_class, new_model
from nemo_like.models.naming import is_adapter, plain_name
from nemo_like.planning.layout import num_stages, stages_of_rank
from nemo_like.policy.attention import PACKED
from nemo_like.policy.model import HeadSettings, LogprobModel, ValueModel
from nemo_like.policy.parallel.full_tensors import local_part
from nemo_like.policy.parallel.mesh import PolicyMesh
from nemo_like.policy.parallel.wrap import shard_model, wrap_layers
from nemo_like.policy.state.files import read_tensors, refuse_two_values, stored_files, told_as

logger = logging.getLogger(__name__)

SCORE = "score.weight"
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

    Second: names of parameters whose gradients tensor-parallel ranks must sum.
    """
    dtype = getattr(torch, config.dtype)
    stages, partial = [], set()
    for stage in stages_of_rank(mesh.parallel, mesh.coordinate("pp")):
        causal_lm = _empty_model(path, config, output)
        if mesh.sizes.pp > 1:
            from nemo_like.policy.parallel.pipeline import keep_stage

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
            from nemo_like.policy.parallel.tensor_parallel import apply_tensor_parallel

            partial |= apply_tensor_parallel(
                model, mesh.tp, sequence_parallel=mesh.parallel.sequence_parallel
            )
        wrap_layers(model, config)
        if not mesh.ddp:
            shard_model(model, mesh, config, dtype)
        home = torch.device("cpu") if config.offload == "all" else device
        _materialize(model, home, device)
        _load_weights(model, path, output)
        if config.lora.rank:
            from nemo_like.policy.lora import initialize_adapters

            initialize_adapters(model)
        stages.append(model)
    return stages, partial


def _empty_model(path: str, config: PolicyConfig, output: Output) -> PreTrainedModel:
    """Parameters without memory; buffers (rotary frequencies) are real."""
    attention = config.attention if config.batching == "padded" else PACKED
    with init_empty_weights(include_buffers=False):
        with no_init_weights():  # drawing none for the meta device takes a millisecond a tensor
            model = new_model(path, output, dtype=torch.float32, attn_implementation=attention)
        if config.lora.rank:
            from nemo_like.policy.lora import add_adapters

            add_adapters(model, config.lora)
    model.tie_weights()
    return model


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


def _load_weights(model: LogprobModel, path: str, output: Output) -> None:
    """Fill parameters (and saved buffers) from the folder's files; collective."""
    # Without their parameters (keep_vars=False), DTensors are what a reader fills in place.
    wanted = {
        plain_name(name): tensor
        for name, tensor in model.state_dict().items()
        if not is_adapter(name)
    }
    stored = stored_files(Path(path))
    naming = architecture(path, torch.float32, output).naming
    sources = naming.from_disk(stored)
    ties = tied_names(model)
    for head, embedding in ties.items():
        if head in sources and embedding in sources:
            pair = sources[head].names[0], sources[embedding].names[0]
            refuse_two_values(path, stored, *pair)
    state = {ties.get(name, name): tensor for name, tensor in wanted.items()}
    if isinstance(model, ValueModel) and SCORE not in sources:
        # A head that begins at 0: no score and no value favours anything before training.
        torch.nn.init.zeros_(local_part(state.pop(SCORE)))
    if sources.keys() >= state.keys():
        read_tensors(path, stored, state, sources, naming)
    else:
        logger.info(
            "%s lacks safetensors of %s; every rank reads the full model once",
            path,
            sorted(state.keys() - sources.keys())[:3],
        )
        _load_full(model, path, output, wanted.keys())


def _load_full(model: LogprobModel, path: str, output: Output, wanted: Set[str]) -> None:
    """From other formats (.bin), which are read in full; collective."""
    kind, settings = model_class(path, output)
    with told_as(UserError, f"The weights of the model {path} cannot be loaded"):
        loaded, found = kind.from_pretrained(
            path,
            config=settings,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
            trust_remote_code=trusts_code(),
        )
    # transformers would draw them at random; a head that values lack is 0 already.
    missing = set(found["missing_keys"])
    if output != "logprobs":
        wanted -= missing & {SCORE}
    if lost := sorted(missing & wanted):
        raise UserError(
            f"The files of the model {path} lack {lost[0]}, which its config.json asks for; give a "
            "complete folder."
        )
    full: dict[str, Any] = loaded.state_dict()
    own = [name for name, _ in model.causal_lm.named_parameters()]
    own += [name for name, _ in model.causal_lm.named_buffers()]
    set_model_state_dict(
        model.causal_lm,
        {name: full[plain_name(name)] for name in own if plain_name(name) in wanted},
        options=StateDictOptions(full_state_dict=True, strict=False),
    )


def unused_tensors(path: str, output: Output) -> list[str]:
    """Names in the folder's files that its architecture has no use for, without the harmless ones.

    Empty where files lack what it needs.
    """
    described = architecture(path, torch.float32, output)
    stored = stored_files(Path(path)).keys()
    sources = described.naming.from_disk(stored)
    if not sources.keys() >= described.tensors.keys() - {SCORE}:
        return []
    model = described.model
    silent = [*_UNUSED, *(model._keys_to_ignore_on_load_unexpected or ())]
    if output != "logprobs":
        silent.append(_UNUSED_BY_VALUES)
    known = {name for one in sources.values() for name in one.names}
    known |= {name for name, _ in model.named_buffers()}
    return sorted(
        name for name in stored - known if not any(re.search(one, name) for one in silent)
    )


def tied_names(model: LogprobModel) -> dict[str, str]:
    """Output head -> embedding, where the architecture ties them: files hold one of the two."""
    causal_lm = model.causal_lm
    if not causal_lm.config.get_text_config().tie_word_embeddings:
        return {}
    keys: Any = getattr(causal_lm, "_tied_weights_keys", None) or {}
    return dict(keys) if isinstance(keys, dict) else {}
