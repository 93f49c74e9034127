"""The safetensors files of a model's folder, reading from them what a rank has, and their size."""

import pickle
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict_loader as dcp_load
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from nemo_like.config.model_files import CONFIG
from nemo_like.errors import RunError, UserError
from nemo_like.models.naming import Naming, Translation
from nemo_like.policy.parallel.full_tensors import local_part

_UNREADABLE = "The weights of the model {} cannot be loaded"
_ROWS_AT_ONCE = 4096


def readable_as_usual(folder: Path) -> None:
    """Give an export the modes of the umask: safetensors' files are their owner's alone."""
    mode = stat.S_IMODE((folder / CONFIG).stat().st_mode)  # written by this process
    for path in (folder, *folder.rglob("*")):
        path.chmod(mode | (mode & 0o444) >> 2 if path.is_dir() else mode)


@contextmanager
def told_as(kind: type[UserError] | type[RunError], what: str) -> Iterator[None]:
    """Within, a file that cannot be read or written raises ``kind``: ``what``, and the reason."""
    try:
        yield
    except CheckpointException as error:  # no Exception; every rank gets the failures of all
        reason, _ = next(iter(error.failures.values()))
        if isinstance(reason, UserError):  # names the file already
            raise reason from None
        raise kind(f"{what}: {_first_line(reason)}") from None
    except pickle.UnpicklingError as error:  # whose text recommends to run it
        reason = "a file holds more than tensors, pickled, and was not loaded"
        raise kind(f"{what}: {reason}") from error
    except (OSError, RuntimeError, SafetensorError) as error:
        from nemo_like.distributed.failures import is_disconnection

        if is_disconnection(error):
            raise  # a collective in between
        raise kind(f"{what}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def stored_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file that holds it; UserError if two do, or one is damaged."""
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


def read_tensors(
    path: str,
    stored: Mapping[str, Path],
    wanted: Mapping[str, Tensor],
    sources: Mapping[str, Translation],
    naming: Naming,
) -> None:
    """Fill ``wanted``, by names in memory, each from its source; collective.

    A rank reads its own slices; of stacked experts, those that it has. What is converted in another
    way is read in full, one tensor at a time.
    """
    renamed = {name: one for name, one in sources.items() if one.converter is None}
    with told_as(UserError, _UNREADABLE.format(path)):
        same = {renamed[name].names[0]: wanted[name] for name in wanted if name in renamed}
        on_host = all(tensor.device.type == "cpu" for tensor in same.values())
        planner = None if on_host else AsStored()
        dcp_load.load(same, storage_reader=HuggingFaceStorageReader(path), planner=planner)
        with ExitStack() as stack:
            get = _reader(stored, stack)
            for name in wanted.keys() - renamed.keys():
                _read_converted(wanted[name], name, sources[name], naming, get)


class AsStored(DefaultLoadPlanner):
    """Tensors travel to a GPU as they are stored, and change their type there.

    Otherwise torch converts each on the host, into new memory the size of the float32 model, which
    takes some machines more than a second for each GB.
    """

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """See torch's ``LoadPlanner``."""
        self._target = super().resolve_tensor(read_item)
        assert self.metadata is not None
        stored: Any = self.metadata.state_dict_metadata[read_item.storage_index.fqn]
        return self._target.new_empty(self._target.shape, dtype=stored.properties.dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """See torch's ``LoadPlanner``."""
        self._target.detach().copy_(tensor)


def _reader(stored: Mapping[str, Path], stack: ExitStack) -> Callable[[str], Tensor]:
    files: dict[Path, Any] = {}

    def get(name: str) -> Tensor:
        path = stored[name]
        if path not in files:
            files[path] = stack.enter_context(safe_open(path, framework="pt"))
        return files[path].get_tensor(name)

    return get


@torch.no_grad()
def _read_converted(
    tensor: Tensor,
    name: str,
    source: Translation,
    naming: Naming,
    get: Callable[[str], Tensor],
) -> None:
    local = local_part(tensor)
    if isinstance(tensor, DTensor) and source.stacks and _is_rows(tensor):
        shape, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        if shape[0]:
            part = source.rows(offset[0], offset[0] + shape[0])
            local.copy_(naming.convert(part, get)[name])
        return
    full = naming.convert(source, get)[name]
    if isinstance(tensor, DTensor):
        full = full.to(local.device)
        # Every rank has read the same: nothing needs to travel.
        full = distribute_tensor(
            full, tensor.device_mesh, tensor.placements, src_data_rank=None
        ).to_local()
    local.copy_(full)


def _is_rows(tensor: DTensor) -> bool:
    """Whether a rank has neighbouring rows, or all. (A strided shard says that it equals one.)"""
    divided = [each for each in tensor.placements if not isinstance(each, Replicate)]
    return all(type(each) is Shard and each.dim == 0 for each in divided) and len(divided) < 2


def refuse_two_values(path: str, stored: Mapping[str, Path], head: str, embedding: str) -> None:
    """UserError where a head that config.json ties differs from its embedding, by names on disk.

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


def num_bytes(folder: Path) -> int:
    """Of all files in ``folder``; 0 if there is none."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # renamed meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total


def gb(count: float) -> str:
    """As people say it.

    >>> gb(3_100_000_000), gb(1_234_000)
    ('3.1 GB', '0.0012 GB')
    """
    return f"{count / 1e9:.2g} GB" if count < 1e10 else f"{count / 1e9:.0f} GB"


def written(folder: Path, expected: int) -> Callable[[], str]:
    """Progress of writing ``folder``, evaluated when the message is shown."""
    return lambda: f"{gb(num_bytes(folder))} of about {gb(expected)} are written to {folder}"


def writing_folder(target: Path) -> Path:
    """Where an export is written, aside, before it gets its name."""
    return target.with_name(f".{target.name}-writing")
