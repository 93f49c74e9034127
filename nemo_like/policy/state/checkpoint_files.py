"""A checkpoint's files: torch's distributed checkpoint without its pickles.

torch pickles the list of tensors (``.metadata``) and every number that is no tensor: whoever can
write to the folder could run code in whoever reads it. Here both are JSON. Tensors stay in torch's
format, which is read with ``weights_only=True``.
"""

import io
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict_loader as dcp_load
import torch.distributed.checkpoint.state_dict_saver as dcp_save
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, WriteItem
from torch.distributed.checkpoint.planner import WriteItemType as Kind
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from nemo_like.errors import UserError

_INDEX = "index.json"
_PICKLED_INDEX = ".metadata"
_FORMAT = 1
_SHARD = re.compile(r"__\d+_\d+\.distcp")

Sections = dict[str, Any]
"""Dictionaries of tensors and plain values by name, and plain values beside them."""


def write_sections(folder: Path, sections: Sections) -> None:
    planner = _PlainSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp_save.save(_flat(sections), storage_writer=_PlainWriter(folder), planner=planner)


def read_sections(folder: Path, sections: Sections) -> None:
    """Fill the tensors of ``sections``, and replace its plain values; collective.

    Nothing in the folder is run. Raises UserError naming a file that is not one that we write.
    """
    flat = _flat(sections)
    planner = _PlainLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp_load.load(flat, storage_reader=_PlainReader(folder), planner=planner)
    for name, value in sections.items():
        if isinstance(value, dict):
            value.update({key: flat[f"{name}/{key}"] for key in value})
        else:
            sections[name] = flat[name]


def _flat(sections: Sections) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in sections.items():
        if isinstance(value, dict):
            flat |= {f"{name}/{key}": one for key, one in value.items()}
        else:
            flat[name] = value
    return flat


class _PlainSavePlanner(DefaultSavePlanner):
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type is Kind.BYTE_IO:
            return io.BytesIO(json.dumps(object).encode())
        return object


class _PlainLoadPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        if isinstance(self.state_dict[name], Tensor):
            raise ValueError(f"{name} is a plain value there, and a tensor here")
        self.state_dict[name] = _as_tuples(json.loads(value.getvalue()))


def _as_tuples(value: Any) -> Any:
    """JSON has no tuples, and hyperparameters such as ``betas`` are."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


class _PlainWriter(FileSystemWriter):
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {one.index: one.storage_data for of_rank in results for one in of_rank}
        index = {
            "format": _FORMAT,
            "values": {
                name: _place(places[MetadataIndex(name)])
                for name, one in metadata.state_dict_metadata.items()
                if isinstance(one, BytesStorageMetadata)
            },
            "tensors": {
                name: {
                    "dtype": str(one.properties.dtype).removeprefix("torch."),
                    "shape": list(one.size),
                    "chunks": [
                        {"offset": list(chunk.offsets), "shape": list(chunk.sizes)}
                        | _place(places[MetadataIndex(name, chunk.offsets)])
                        for chunk in one.chunks
                    ],
                }
                for name, one in metadata.state_dict_metadata.items()
                if isinstance(one, TensorStorageMetadata)
            },
        }
        (Path(self.path) / _INDEX).write_text(json.dumps(index))


def _place(info: _StorageInfo) -> dict[str, Any]:
    return {"file": info.relative_path, "start": info.offset, "length": info.length}


class _PlainReader(FileSystemReader):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder
        # Here rather than in ``read_metadata``, of whose errors torch makes its own.
        self._metadata = _read_index(folder)

    def read_metadata(self) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """File by file, so that an error names one."""
        files: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            files.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for file, items in files.items():
            try:
                super().read_data(replace(plan, items=items), planner).wait()
            except Exception as error:  # the boundary to what anyone may have written
                raise _refusal(self._folder / file, error) from error
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _read_index(folder: Path) -> Metadata:
    if (pickled := folder / _PICKLED_INDEX).exists():
        raise UserError(
            f"Checkpoint file {pickled} is a pickle, which can run code when it is read, so it was "
            f"not; this version writes {_INDEX} instead: begin a new run from the folder final/ of "
            "the run that wrote it, or go on from a checkpoint of this version."
        )
    path = folder / _INDEX
    try:
        index = json.loads(path.read_text())
        if index["format"] != _FORMAT:
            raise ValueError(f"format {index['format']}, and this version reads {_FORMAT}")
        storage: dict[MetadataIndex, _StorageInfo] = {}
        entries: dict[str, Any] = {}
        for name, place in index["values"].items():
            entries[name] = BytesStorageMetadata()
            storage[MetadataIndex(name)] = _info(place)
        for name, tensor in index["tensors"].items():
            chunks = [
                ChunkStorageMetadata(_size(one["offset"]), _size(one["shape"]))
                for one in tensor["chunks"]
            ]
            size = _size(tensor["shape"])
            _expect_all(name, size, chunks)
            entries[name] = TensorStorageMetadata(
                TensorProperties(dtype=_dtype(tensor["dtype"])), size, chunks
            )
            for chunk, place in zip(chunks, tensor["chunks"], strict=True):
                storage[MetadataIndex(name, chunk.offsets)] = _info(place)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _refusal(path, error) from error
    return Metadata(entries, storage_data=storage, storage_meta=StorageMeta())


def _expect_all(name: str, size: torch.Size, chunks: Sequence[ChunkStorageMetadata]) -> None:
    """ValueError unless the chunks make up the tensor: torch leaves missing parts as they are."""
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        raise ValueError(f"the parts of {name} do not make up its shape {list(size)}")


def _refusal(path: Path, error: Exception) -> UserError:
    # torch's own words on a pickle recommend to run it.
    said = "" if path.name != _INDEX else f": {str(error).splitlines()[0] if str(error) else ''}"
    return UserError(
        f"Checkpoint file {path} does not hold what this version writes ({type(error).__name__}"
        f"{said}), and was not read any further; go on from another checkpoint, or restore it."
    )


def _info(place: dict[str, Any]) -> _StorageInfo:
    file = place["file"]
    if not _SHARD.fullmatch(file):  # nor one of another folder
        raise ValueError(f"{file!r} is not a file of tensors")
    start, length = _numbers((place["start"], place["length"]))
    return _StorageInfo(file, start, length)


def _size(numbers: Iterable[Any]) -> torch.Size:
    return torch.Size(_numbers(numbers))


def _numbers(values: Iterable[Any]) -> list[int]:
    numbers = list(values)
    for one in numbers:
        if type(one) is not int or one < 0:
            raise ValueError(f"{one!r} is not a number of elements or bytes")
    return numbers


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return found
