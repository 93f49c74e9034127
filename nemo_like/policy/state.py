"""The policy's state in other forms: tensors for a refit, checkpoints, a Hugging Face folder."""

import json
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict_loader as dcp_load
import torch.distributed.checkpoint.state_dict_saver as dcp_save
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from nemo_like.data.end_tokens import padding_id
from nemo_like.errors import RunError, UserError
from nemo_like.models.adapters import sent_name
from nemo_like.policy.engine import TrainEngine
from nemo_like.policy.file_errors import told_as
from nemo_like.policy.loading import model_class, tied_names
from nemo_like.policy.lora import Adapter, adapters_of, write_adapter
from nemo_like.policy.loss_scale import LossScale
from nemo_like.policy.model import LogprobModel
from nemo_like.policy.names import hf_name
from nemo_like.policy.whole import whole, whole_tensors
from nemo_like.weights.adapters import is_adapter, travels_apart
from nemo_like.weights.manifest import expected_tensors

_OTHER = "{} does not fit this run's model, adapters or optimizer"
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth", "*.index.json")


def refit_tensors(
    engine: TrainEngine, dtype: torch.dtype, *, adapters_only: bool
) -> Iterator[tuple[str, Tensor]]:
    """What a refit carries, in the order of ``plan_refit``; collective."""
    if not travels_apart(engine.config.lora):
        yield from full_tensors(engine, dtype)
        return
    if not adapters_only:
        yield from full_tensors(engine, dtype, merged=False)
    yield from adapter_tensors(engine, dtype)


def adapter_tensors(engine: TrainEngine, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of an adapter by the name that it travels by, whole; collective."""
    engine.synchronize()
    adapters = {
        sent_name(hf_name(name)): tensor
        for stage in engine.stages
        for name, tensor in stage.state_dict().items()
        if is_adapter(name)
    }
    parts = ((tensor.detach(), dtype) for tensor in adapters.values())
    yield from zip(adapters, whole_tensors(parts, engine.device), strict=True)


def full_tensors(
    engine: TrainEngine, dtype: torch.dtype, *, merged: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the architecture once, by its Hugging Face name, whole, in ``dtype``.

    ``merged``: adapters are added to their matrices, in float32. A value model has ``score`` in
    place of an output head. Collective: all ranks must draw from it at the same pace. With a
    pipeline, each tensor is sent from the stage that has it to the others.
    """
    engine.synchronize()
    state: dict[str, Tensor] = {}
    adapters: dict[str, Adapter] = {}
    for stage in engine.stages:
        ties = tied_names(stage) if stage.is_first else {}
        for name, tensor in stage.state_dict().items():
            if hf_name(name) not in ties:
                state[hf_name(name)] = tensor
        if merged:
            adapters |= adapters_of(stage, state)
    pp = engine.mesh.group("pp")
    owners = _owners(list(state), pp)
    if engine.setup.output != "logprobs":  # one stage, which has all of them
        expected = {
            name: (tuple(tensor.shape), _stored(tensor, dtype))
            for name, tensor in state.items()
            if not is_adapter(name)
        }
    else:
        expected = expected_tensors(engine.setup.model_path, dtype)
    gather = partial(whole, dtype=torch.float32, device=engine.device)
    plain = whole_tensors(
        (
            (state[name].detach(), stored)
            for name, (_, stored) in expected.items()
            if name in state and name not in adapters
        ),
        engine.device,
    )
    for name, (shape, stored) in expected.items():
        if name in adapters:
            tensor = adapters[name].merged(gather(state[name].detach()), gather).to(stored)
        elif name in state:
            tensor = next(plain)
        else:
            tensor = torch.empty(shape, dtype=stored, device=engine.device)
        if pp is not None:
            tensor = tensor.contiguous()
            dist.broadcast(tensor, dist.get_global_rank(pp, owners[name]), group=pp)
        yield name, tensor


def _stored(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if tensor.is_floating_point() else tensor.dtype


def _owners(names: list[str], pp: dist.ProcessGroup | None) -> dict[str, int]:
    """Tensor name -> the first pipeline rank that has it."""
    if pp is None:
        return {}
    everyone: list[Any] = [None] * dist.get_world_size(pp)
    dist.all_gather_object(everyone, names, group=pp)
    return {name: rank for rank in reversed(range(len(everyone))) for name in everyone[rank]}


def save_checkpoint(folder: Path, engine: TrainEngine) -> None:
    """Each rank writes its own shards of model and optimizer; collective."""
    engine.synchronize()
    with told_as(RunError, str(folder)):
        dcp_save.save(_joined(engine, _stage_states(engine)), checkpoint_id=str(folder))


def load_checkpoint(folder: Path, engine: TrainEngine) -> None:
    """Restore in place, from any number of ranks in any layout, hyperparameters included.

    Raises UserError for a checkpoint of another model, optimizer or adapter.
    """
    states = _stage_states(engine)
    loaded = _joined(engine, states)
    with told_as(UserError, _OTHER.format(folder)):
        dcp_load.load(loaded, checkpoint_id=str(folder))
    for state in states:
        set_state_dict(
            state.stage,
            state.optimizers,
            model_state_dict={k: loaded["model"][state.stored(k)] for k in state.model},
            optim_state_dict={k: loaded["optimizer"][state.stored(k)] for k in state.optimizer},
            options=_strict_if_whole(engine),
        )
    engine.num_steps = loaded["num_steps"]
    if engine.loss_scale is not None:
        engine.loss_scale.load_state_dict(loaded["loss_scale"])
    for scheduler in engine.schedulers:
        # A run that is extended follows the new schedule from its first step on; its peak, like all
        # that the optimizer was told, is the checkpoint's.
        groups = scheduler.optimizer.param_groups
        scheduler.last_epoch = loaded["schedule_step"]
        scheduler.base_lrs = [group["initial_lr"] for group in groups]
        lrs = [
            base * factor(scheduler.last_epoch)
            for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        ]
        for group, lr in zip(groups, lrs, strict=True):
            group["lr"] = lr
        scheduler._last_lr = lrs


def load_weights(folder: Path, engine: TrainEngine) -> None:
    """The model of a checkpoint without its optimizer, whatever that was; see above."""
    parts = [
        (stage, get_model_state_dict(stage, options=_options(engine))) for stage in engine.stages
    ]
    model = {_stored_name(stage, name): part[name] for stage, part in parts for name in part}
    with told_as(UserError, _OTHER.format(folder)):
        dcp_load.load({"model": model}, checkpoint_id=str(folder))
    for stage, part in parts:
        weights = {name: model[_stored_name(stage, name)] for name in part}
        set_model_state_dict(stage, weights, options=_strict_if_whole(engine))


def export_folder(engine: TrainEngine, target: Path, write: bool) -> None:
    """Write a Hugging Face folder: new weights, and all else as in the model's own; collective.

    Tokenizer, chat template and generation settings are copied as they are.
    """
    state: dict[str, Tensor] = {}
    for name, tensor in full_tensors(engine, engine.dtype):
        if write:
            # A gathered tensor may be a view of a padded buffer, which safetensors would refuse.
            state[name] = tensor.cpu().clone(memory_format=torch.contiguous_format)
    adapters = {
        name: tensor.cpu().contiguous() for name, tensor in adapter_tensors(engine, torch.float32)
    }
    if write:
        with told_as(RunError, f"{target} could not be written"):
            _write_folder(engine, state, adapters, target)


def _write_folder(
    engine: TrainEngine, state: dict[str, Tensor], adapters: dict[str, Tensor], target: Path
) -> None:
    """Aside first, so that what stands at ``target`` is whole."""
    source = Path(engine.setup.model_path)
    aside = target.with_name(f".{target.name}-writing")
    shutil.rmtree(aside, ignore_errors=True)
    # Contents alone: files of a model that others may only read must be writable here. The model
    # may be the export of a run with adapters, which are in its weights.
    ignored = shutil.ignore_patterns(*_WEIGHT_FILES, "adapter")
    shutil.copytree(source, aside, ignore=ignored, copy_function=shutil.copyfile)
    aside.chmod(aside.stat().st_mode | stat.S_IRWXU)
    if adapters:
        write_adapter(aside / "adapter", adapters, engine.config.lora, engine.config.model)
    dtype = next(t.dtype for t in state.values() if t.is_floating_point())
    config = json.loads((aside / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    if engine.setup.output != "logprobs":
        _, settings = model_class(str(source), "values")
        config["architectures"] = settings.architectures
        config["id2label"], config["label2id"] = {"0": "LABEL_0"}, {"LABEL_0": 0}
        config["pad_token_id"] = padding_id(source, config.get("pad_token_id"))
    (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_torch_state_dict(state, aside, metadata={"format": "pt"})
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)


@dataclass(frozen=True, kw_only=True)
class _StageState:
    """State of one stage and its optimizers, under the names of the wrapped model."""

    stage: LogprobModel
    optimizers: list[Optimizer]
    model: dict[str, Any]
    optimizer: dict[str, Any]

    def stored(self, name: str) -> str:
        """The name in a checkpoint: a tied head, on whatever stage, goes by its embedding's."""
        return _stored_name(self.stage, name)


def _stored_name(stage: LogprobModel, name: str) -> str:
    for head, embedding in tied_names(stage).items():
        name = name.replace(head, embedding)
    return name


def _options(engine: TrainEngine) -> StateDictOptions:
    """Optimizer state by parameter name, whatever groups the optimizer keeps it in; of a model with
    adapters, these alone."""
    return StateDictOptions(
        flatten_optimizer_state_dict=True, ignore_frozen_params=engine.config.lora.rank > 0
    )


def _strict_if_whole(engine: TrainEngine) -> StateDictOptions:
    return replace(_options(engine), strict=engine.config.lora.rank == 0)


def _stage_states(engine: TrainEngine) -> list[_StageState]:
    states = []
    for stage, optimizers in zip(engine.stages, engine.optimizers, strict=True):
        model, optimizer = get_state_dict(stage, optimizers, options=_options(engine))
        states.append(
            _StageState(stage=stage, optimizers=optimizers, model=model, optimizer=optimizer)
        )
    return states


def _joined(engine: TrainEngine, states: list[_StageState]) -> dict[str, Any]:
    """What a checkpoint holds, by names that do not depend on the layout."""
    joined: dict[str, Any] = {
        "model": {s.stored(name): value for s in states for name, value in s.model.items()},
        "optimizer": {s.stored(name): value for s in states for name, value in s.optimizer.items()},
        "schedule_step": engine.schedulers[0].last_epoch,
        "num_steps": engine.num_steps,
    }
    # Saved in every precision, so that a run can go on in float16.
    scale = engine.loss_scale or LossScale(engine.config.loss_scale)
    joined["loss_scale"] = scale.state_dict()
    return joined
