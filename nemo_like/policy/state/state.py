"""The policy's state in other forms: tensors for a refit, checkpoints, a Hugging Face folder."""

import json
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
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

from nemo_like.config.model_files import CONFIG, read_object
from nemo_like.data.tokenizer import padding_id
from nemo_like.distributed.waiting import writing_folder
from nemo_like.errors import RunError, UserError
from nemo_like.models.build import model_class
from nemo_like.policy.lora import write_adapter
from nemo_like.policy.loss_scale import LossScale
from nemo_like.policy.model import LogprobModel
from nemo_like.policy.state.checkpoint_files import read_sections, write_sections
from nemo_like.policy.state.files import told_as
from nemo_like.policy.state.leaving import adapter_tensors, leaving_tensors
from nemo_like.policy.state.loading import tied_names
from nemo_like.policy.trainer import Trainer
from nemo_like.refit.adapters import travels_apart
from nemo_like.refit.manifest import architecture

_OTHER = "{} does not fit this run's model, adapters or optimizer"
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth", "*.index.json")


def refit_tensors(
    trainer: Trainer, dtype: torch.dtype, *, adapters_only: bool
) -> Iterator[tuple[str, Tensor]]:
    """What a refit carries, in the order of ``plan_refit``; collective."""
    if not travels_apart(trainer.config.lora):
        yield from model_tensors(trainer, dtype)
        return
    if not adapters_only:
        yield from model_tensors(trainer, dtype, merged=False)
    trainer.synchronize()
    yield from adapter_tensors(trainer.stages, dtype, trainer.device)


def model_tensors(
    trainer: Trainer, dtype: torch.dtype, *, merged: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the architecture once, by its name on disk, full, in ``dtype``; collective.

    A value model has ``score`` in place of an output head.
    """
    trainer.synchronize()
    described = architecture(trainer.setup.model_path, dtype, trainer.setup.output)
    yield from leaving_tensors(
        trainer.stages, described, trainer.device, merged=merged, pp=trainer.mesh.group("pp")
    )


def state_bytes(trainer: Trainer) -> int:
    """About what a checkpoint of the stages on this rank has, whoever else holds parts of them."""
    total = 0
    for stage, optimizers in zip(trainer.stages, trainer.optimizers, strict=True):
        adapts = trainer.config.lora.rank > 0
        tensors = [one for one in stage.parameters() if one.requires_grad or not adapts]
        for optimizer in optimizers:
            for state in optimizer.state.values():
                tensors += [one for one in state.values() if isinstance(one, Tensor)]
        total += sum(one.numel() * one.element_size() for one in tensors)
    return total


def save_checkpoint(folder: Path, trainer: Trainer) -> None:
    """Each rank writes its own shards of model and optimizer; collective."""
    trainer.synchronize()
    with told_as(RunError, str(folder)):
        write_sections(folder, _joined(trainer, _stage_states(trainer)))


def load_checkpoint(folder: Path, trainer: Trainer) -> None:
    """Restore in place, from any number of ranks in any layout, hyperparameters included.

    Raises UserError for a checkpoint of another model, optimizer or adapter.
    """
    states = _stage_states(trainer)
    loaded = _joined(trainer, states)
    with told_as(UserError, _OTHER.format(folder)):
        read_sections(folder, loaded)
    for state in states:
        set_state_dict(
            state.stage,
            state.optimizers,
            model_state_dict={k: loaded["model"][state.stored(k)] for k in state.model},
            optim_state_dict={k: loaded["optimizer"][state.stored(k)] for k in state.optimizer},
            options=_options(trainer),
        )
    trainer.num_steps = loaded["num_steps"]
    if trainer.loss_scale is not None:
        trainer.loss_scale.load_state_dict(loaded["loss_scale"])
    for scheduler in trainer.schedulers:
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


def load_weights(folder: Path, trainer: Trainer) -> None:
    """The model of a checkpoint without its optimizer, whatever that was; see above."""
    parts = [
        (stage, get_model_state_dict(stage, options=_options(trainer))) for stage in trainer.stages
    ]
    model = {_stored_name(stage, name): part[name] for stage, part in parts for name in part}
    with told_as(UserError, _OTHER.format(folder)):
        read_sections(folder, {"model": model})
    for stage, part in parts:
        weights = {name: model[_stored_name(stage, name)] for name in part}
        set_model_state_dict(stage, weights, options=_options(trainer))


def export_folder(trainer: Trainer, target: Path, write: bool) -> None:
    """Write a Hugging Face folder: new weights, and all else as in the model's own; collective.

    Tokenizer, chat template and generation settings are copied as they are.
    """
    state: dict[str, Tensor] = {}
    for name, tensor in model_tensors(trainer, trainer.dtype):
        if write:
            # A gathered tensor may be a view of a padded buffer, which safetensors would refuse.
            state[name] = tensor.cpu().clone(memory_format=torch.contiguous_format)
    adapters = {
        name: tensor.cpu().contiguous()
        for name, tensor in adapter_tensors(trainer.stages, torch.float32, trainer.device)
    }
    if write:
        with told_as(RunError, f"{target} could not be written"):
            _write_folder(trainer, state, adapters, target)


def _write_folder(
    trainer: Trainer, state: dict[str, Tensor], adapters: dict[str, Tensor], target: Path
) -> None:
    """Aside first, so that what stands at ``target`` is complete."""
    source = Path(trainer.setup.model_path)
    aside = writing_folder(target)
    shutil.rmtree(aside, ignore_errors=True)
    # Contents alone: files of a model that others may only read must be writable here. The model
    # may be the export of a run with adapters, which are in its weights.
    ignored = shutil.ignore_patterns(*_WEIGHT_FILES, "adapter")
    shutil.copytree(source, aside, ignore=ignored, copy_function=shutil.copyfile)
    aside.chmod(stat.S_IRWXU)
    if adapters:
        plain = architecture(str(source), torch.float32, trainer.setup.output).model
        write_adapter(aside / "adapter", adapters, trainer.config.lora, trainer.config.model, plain)
    dtype = next(t.dtype for t in state.values() if t.is_floating_point())
    config = read_object(aside / CONFIG)
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    if trainer.setup.output != "logprobs":
        _, settings = model_class(str(source), "values")
        config["architectures"] = settings.architectures
        config["id2label"], config["label2id"] = {"0": "LABEL_0"}, {"LABEL_0": 0}
        config["pad_token_id"] = padding_id(source, config.get("pad_token_id"))
    (aside / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    save_torch_state_dict(state, aside, metadata={"format": "pt"})
    _readable_as_usual(aside)
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)


def _readable_as_usual(folder: Path) -> None:
    """Modes that the umask gives: safetensors' files are their owner's alone otherwise."""
    mode = stat.S_IMODE((folder / CONFIG).stat().st_mode)  # written by this process
    for path in (folder, *folder.rglob("*")):
        path.chmod(mode | (mode & 0o444) >> 2 if path.is_dir() else mode)


@dataclass(frozen=True)
class _StageState:
    """State of one stage and its optimizers, under the names of the wrapped model."""

    stage: LogprobModel
    optimizers: list[Optimizer]
    model: dict[str, Any]
    optimizer: dict[str, Any]

    def stored(self, name: str) -> str:
        return _stored_name(self.stage, name)


def _stored_name(stage: LogprobModel, name: str) -> str:
    """The name in a checkpoint: a tied head, on whatever stage, goes by its embedding's."""
    for head, embedding in tied_names(stage).items():
        name = name.replace(head, embedding)
    return name


def _options(trainer: Trainer) -> StateDictOptions:
    """Optimizer state by parameter name, whatever its groups; with adapters, these alone."""
    adapts = trainer.config.lora.rank > 0
    return StateDictOptions(
        flatten_optimizer_state_dict=True, ignore_frozen_params=adapts, strict=not adapts
    )


def _stage_states(trainer: Trainer) -> list[_StageState]:
    return [
        _StageState(
            stage, optimizers, *get_state_dict(stage, optimizers, options=_options(trainer))
        )
        for stage, optimizers in zip(trainer.stages, trainer.optimizers, strict=True)
    ]


def _joined(trainer: Trainer, states: list[_StageState]) -> dict[str, Any]:
    """What a checkpoint holds, by names that do not depend on the layout."""
    joined: dict[str, Any] = {
        "model": {s.stored(name): value for s in states for name, value in s.model.items()},
        "optimizer": {s.stored(name): value for s in states for name, value in s.optimizer.items()},
        "schedule_step": trainer.schedulers[0].last_epoch,
        "num_steps": trainer.num_steps,
    }
    # Saved in every precision, so that a run can go on in float16.
    scale = trainer.loss_scale or LossScale(trainer.config.loss_scale)
    joined["loss_scale"] = scale.state_dict()
    return joined
