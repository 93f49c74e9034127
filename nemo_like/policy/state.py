"""The policy's state in other forms: tensors for a refit, checkpoints, a Hugging Face folder."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict_loader as dcp_load
import torch.distributed.checkpoint.state_dict_saver as dcp_save
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from nemo_like.errors import RunError
from nemo_like.policy.model import LogprobModel
from nemo_like.weights.buckets import plan_buckets
from nemo_like.weights.manifest import expected_tensors, refit_metadata

# What wrappers put into parameter names.
_WRAPPERS = ("causal_lm.", "_checkpoint_wrapped_module.")
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth", "*.index.json")


def full_tensors(
    model: LogprobModel, model_path: str, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the architecture once, by its Hugging Face name, whole, in ``dtype``.

    Collective: all ranks must draw from it at the same pace.
    """
    state = {_hf_name(name): tensor for name, tensor in model.state_dict().items()}
    for name in expected_tensors(model_path, dtype):
        tensor = state[name]
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        yield name, whole.detach().to(dtype) if whole.is_floating_point() else whole.detach()


def write_buckets(
    tensors: Iterator[tuple[str, Tensor]],
    sizes_bytes: dict[str, int],
    folder: Path,
    version: int,
    bucket_bytes: int,
    write: bool,
) -> list[str]:
    """Write tensors as versioned safetensors files, one a bucket; returns their paths.

    Ranks that do not ``write`` only take part in gathering.
    """
    paths: list[str] = []
    if write:
        folder.mkdir(parents=True, exist_ok=True)
        _check_room(folder, sum(sizes_bytes.values()))
    for i, names in enumerate(plan_buckets(sizes_bytes, bucket_bytes)):
        bucket = dict(next(tensors) for _ in names)
        if write:
            path = folder / f"bucket-{i:05d}.safetensors"
            whole = {name: tensor.cpu().contiguous() for name, tensor in bucket.items()}
            save_file(whole, path, metadata=refit_metadata(version))
            paths.append(str(path))
    return paths


def _check_room(folder: Path, num_bytes: int) -> None:
    """Raise RunError before a full file system becomes a half-written file."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise RunError(
            f"A refit needs {num_bytes / 2**20:.0f} MiB in {folder.parent}, and {free / 2**20:.0f} "
            "MiB are free; make it larger (Docker: --shm-size), or set refit.transport=disk."
        )


def save_checkpoint(
    folder: Path, model: LogprobModel, optimizer: AdamW, scheduler: LambdaLR
) -> None:
    """Each rank writes its own shards of model and optimizer; collective."""
    state = _checkpoint_state(model, optimizer, scheduler)
    dcp_save.save(state, checkpoint_id=str(folder))


def load_checkpoint(
    folder: Path, model: LogprobModel, optimizer: AdamW, scheduler: LambdaLR
) -> None:
    """Restore in place, from any number of ranks, the optimizer's hyperparameters included."""
    state = _checkpoint_state(model, optimizer, scheduler)
    dcp_load.load(state, checkpoint_id=str(folder))
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    scheduler.load_state_dict(state["scheduler"])
    # A run that is extended follows the new schedule from its first step on.
    for group, base, factor in zip(
        optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
    ):
        group["lr"] = base * factor(scheduler.last_epoch)


def export_folder(
    tensors: Iterator[tuple[str, Tensor]], source: Path, target: Path, write: bool
) -> None:
    """Write a Hugging Face folder: new weights, and all else as in ``source``; collective.

    Tokenizer, chat template and generation settings are copied as they are.
    """
    state: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if write:
            # A gathered tensor may be a view of a padded buffer, which safetensors would refuse.
            state[name] = tensor.cpu().clone(memory_format=torch.contiguous_format)
    if not write:
        return
    aside = target.with_name(f".{target.name}-writing")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(source, aside, ignore=shutil.ignore_patterns(*_WEIGHT_FILES))
    dtype = next(t.dtype for t in state.values() if t.is_floating_point())
    config = json.loads((aside / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_torch_state_dict(state, aside, metadata={"format": "pt"})
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)


def _checkpoint_state(model: LogprobModel, optimizer: AdamW, scheduler: LambdaLR) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {
        "model": model_state,
        "optimizer": optimizer_state,
        "scheduler": scheduler.state_dict(),
    }


def _hf_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
