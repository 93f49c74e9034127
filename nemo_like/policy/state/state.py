"""The policy's state in other forms: tensors for a refit, checkpoints, a Hugging Face folder."""

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
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
from nemo_like.errors import RunError, UserError
from nemo_like.models.build import Architecture, architecture, model_class
from nemo_like.models.naming import is_adapter, plain_name
from nemo_like.policy.gradients import LossScale
from nemo_like.policy.model import LogprobModel
from nemo_like.policy.optim import make_state
from nemo_like.policy.parallel.full_tensors import full_tensor, full_tensors
from nemo_like.policy.state.checkpoint_files import read_sections, write_sections
from nemo_like.policy.state.files import readable_as_usual, told_as, writing_folder
from nemo_like.policy.state.loading import SCORE, tied_names
from nemo_like.refit.buckets import travels_apart

if TYPE_CHECKING:
    from nemo_like.policy.lora import Adapter
    from nemo_like.policy.trainer import Trainer

_OTHER = "{} does not fit this run's model, adapters or optimizer"
_StageState = tuple[LogprobModel, list[Optimizer], dict[str, Any], dict[str, Any]]
"""A stage, its optimizers, and the state of both under the names of the wrapped model."""
_SKIPPED = re.compile(r"\..*|.*\.(safetensors|bin|gguf|pt|pth|index\.json|h5|msgpack|onnx)")


def refit_tensors(
    trainer: "Trainer", dtype: torch.dtype, *, adapters_only: bool
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
    trainer: "Trainer", dtype: torch.dtype, *, merged: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """``leaving_tensors`` in ``dtype``; a value model has ``score`` in place of an output head."""
    trainer.synchronize()
    described = architecture(trainer.setup.model_path, dtype, trainer.setup.output)
    yield from leaving_tensors(
        trainer.stages, described, trainer.device, merged=merged, pp=trainer.mesh.group("pp")
    )


def state_bytes(trainer: "Trainer") -> int:
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


def save_checkpoint(folder: Path, trainer: "Trainer") -> None:
    trainer.synchronize(with_optimizers=True)
    with told_as(RunError, str(folder)):
        write_sections(folder, _joined(trainer, _stage_states(trainer)))


def load_checkpoint(folder: Path, trainer: "Trainer") -> None:
    """Restore in place, in any layout; UserError if model, optimizer or adapter are others."""
    states = _stage_states(trainer)
    loaded = _joined(trainer, states)
    with told_as(UserError, _OTHER.format(folder)):
        read_sections(folder, loaded)
    for stage, optimizers, model, optimizer in states:
        weights, moments = (
            {name: loaded[section][_stored_name(stage, name)] for name in part}
            for section, part in (("model", model), ("optimizer", optimizer))
        )
        set_state_dict(
            stage,
            optimizers,
            model_state_dict=weights,
            optim_state_dict=moments,
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


def load_weights(folder: Path, trainer: "Trainer") -> None:
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


def export_folder(trainer: "Trainer", target: Path, write: bool) -> None:
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
    trainer: "Trainer", state: dict[str, Tensor], adapters: dict[str, Tensor], target: Path
) -> None:
    """Aside first, so that what stands at ``target`` is complete."""
    source = Path(trainer.setup.model_path)
    aside = writing_folder(target)
    shutil.rmtree(aside, ignore_errors=True)
    # The model's folder may hold anything, this run too; files without their modes, to write here.
    for path in (*source.iterdir(), *source.glob("additional_chat_templates/*")):
        if path.is_file() and not _SKIPPED.fullmatch(path.name):
            place = aside / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
    if adapters:
        plain = architecture(str(source), torch.float32, trainer.setup.output).model
        if trainer.setup.output != "logprobs":  # its head is no adapter, and trains
            adapters |= {SCORE: state[SCORE]}
        from nemo_like.policy.lora import write_adapter

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
    readable_as_usual(aside)
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)


def _stored_name(stage: LogprobModel, name: str) -> str:
    """The name in a checkpoint: a tied head, on whatever stage, goes by its embedding's."""
    for head, embedding in tied_names(stage).items():
        name = name.replace(head, embedding)
    return name


def _options(trainer: "Trainer") -> StateDictOptions:
    """Optimizer state by parameter name, whatever its groups; with adapters, these alone."""
    adapts = trainer.config.lora.rank > 0
    return StateDictOptions(
        flatten_optimizer_state_dict=True, ignore_frozen_params=adapts, strict=not adapts
    )


def _stage_states(trainer: "Trainer") -> list[_StageState]:
    options = _options(trainer)
    for stage, optimizers in zip(trainer.stages, trainer.optimizers, strict=True):
        make_state(stage, optimizers, options)
    return [
        (stage, optimizers, *get_state_dict(stage, optimizers, options=options))
        for stage, optimizers in zip(trainer.stages, trainer.optimizers, strict=True)
    ]


def _joined(trainer: "Trainer", states: list[_StageState]) -> dict[str, Any]:
    """What a checkpoint holds, by names that do not depend on the layout."""
    joined: dict[str, Any] = {"model": {}, "optimizer": {}}
    for stage, _, model, optimizer in states:
        joined["model"] |= {_stored_name(stage, name): one for name, one in model.items()}
        joined["optimizer"] |= {_stored_name(stage, name): one for name, one in optimizer.items()}
    # Saved in every precision, since a run may continue in float16.
    scale = trainer.loss_scale or LossScale()
    return joined | {
        "schedule_step": trainer.schedulers[0].last_epoch,
        "num_steps": trainer.num_steps,
        "loss_scale": scale.state_dict(),
    }


def leaving_tensors(
    stages: Sequence[LogprobModel],
    architecture: Architecture,
    device: torch.device,
    *,
    merged: bool = True,
    pp: dist.ProcessGroup | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of ``architecture`` once, by its name on disk, full, in its dtype.

    ``merged``: adapters are added to their matrices, in float32. Collective: all ranks must draw at
    the same pace. With a pipeline, each tensor is sent from the stage that has it.
    """
    state, adapters = _parts(stages, merged=merged)
    naming, translations = architecture.naming, architecture.translations
    names = [name for each in translations for name in each.names]
    full = _full(state, adapters, names, architecture, device, pp)
    for each in translations:
        if each.converter is None:
            yield each.targets[0], next(full)
        else:
            own = {name: next(full) for name in each.names}
            yield from naming.convert(each, own.pop).items()


def adapter_tensors(
    stages: Sequence[LogprobModel], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of an adapter by the name that it travels by, full; collective."""
    adapters = {
        plain_name(name): tensor
        for stage in stages
        for name, tensor in stage.state_dict().items()
        if is_adapter(name)
    }
    parts = ((tensor.detach(), dtype) for tensor in adapters.values())
    yield from zip(adapters, full_tensors(parts, device), strict=True)


def _parts(
    stages: Sequence[LogprobModel], *, merged: bool
) -> "tuple[dict[str, Tensor], dict[str, Adapter]]":
    """This rank's part of each tensor, and the adapters to merge, by names in memory."""
    state: dict[str, Tensor] = {}
    adapters: dict[str, Adapter] = {}
    for stage in stages:
        ties = tied_names(stage) if stage.is_first else {}
        tensors = {plain_name(n): tensor.detach() for n, tensor in stage.state_dict().items()}
        state |= {name: tensor for name, tensor in tensors.items() if name not in ties}
        if merged and any(map(is_adapter, tensors)):
            from nemo_like.policy.lora import adapters_of

            adapters |= adapters_of(stage, tensors)
    return state, adapters


def _full(
    state: dict[str, Tensor],
    adapters: "dict[str, Adapter]",
    names: Sequence[str],
    architecture: Architecture,
    device: torch.device,
    pp: dist.ProcessGroup | None,
) -> Iterator[Tensor]:
    stored = {name: architecture.tensors[name].dtype for name in names}
    owners: dict[str, int] = {}  # tensor name -> the first pipeline rank that has it
    if pp is not None:
        everyone: list[Any] = [None] * dist.get_world_size(pp)
        dist.all_gather_object(everyone, list(state), group=pp)
        owners = {n: rank for rank in reversed(range(len(everyone))) for n in everyone[rank]}
    gather = partial(full_tensor, dtype=torch.float32, device=device)
    plain = full_tensors(
        ((state[name], stored[name]) for name in names if name in state and name not in adapters),
        device,
    )
    for name in names:
        if name in adapters:
            tensor = adapters[name].merged(gather(state[name]), gather).to(stored[name])
        elif name in state:
            tensor = next(plain)
        else:
            tensor = torch.empty_like(architecture.tensors[name], device=device)
        if pp is not None:
            tensor = tensor.contiguous()
            dist.broadcast(tensor, dist.get_global_rank(pp, owners[name]), group=pp)
        yield tensor
