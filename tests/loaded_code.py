"""Files that would run code when they are loaded: they make a marker file."""

import io
import json
import pickle
import zlib
from pathlib import Path

import torch

DCP = "torch.distributed.checkpoint"


class Marker:
    """Its unpickling makes an empty file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self):
        return Path.touch, (self._path,)


def saved(marker: Path) -> bytes:
    """A file of ``torch.save`` that makes the marker."""
    buffer = io.BytesIO()
    torch.save(Marker(marker), buffer)
    return buffer.getvalue()


def with_pickled_index(model: Path, marker: Path) -> Path:
    """torch's own list of tensors, which is a pickle; returns the file."""
    file = model / ".metadata"
    file.write_bytes(pickle.dumps(Marker(marker)))
    return file


def with_pickle_for_index(model: Path, marker: Path) -> Path:
    file = model / "index.json"
    file.write_bytes(pickle.dumps(Marker(marker)))
    return file


def _append(model: Path, place: dict, data: bytes) -> Path:
    file = model / place["file"]
    place["start"], place["length"] = file.stat().st_size, len(data)
    with file.open("ab") as stream:
        stream.write(data)
    return file


def with_pickled_value(model: Path, marker: Path) -> Path:
    """A number that is no tensor, as torch would write it."""
    index = json.loads((model / "index.json").read_text())
    file = _append(model, index["values"]["num_steps"], saved(marker))
    (model / "index.json").write_text(json.dumps(index))
    return file


def with_pickled_weights(model: Path, marker: Path) -> Path:
    return _with_pickled_tensor(model, marker, "model/")


def with_pickled_moments(model: Path, marker: Path) -> Path:
    return _with_pickled_tensor(model, marker, "optimizer/state.")


def _with_pickled_tensor(model: Path, marker: Path, prefix: str) -> Path:
    index = json.loads((model / "index.json").read_text())
    tensor = next(one for name, one in index["tensors"].items() if name.startswith(prefix))
    file = _append(model, tensor["chunks"][0], saved(marker))
    (model / "index.json").write_text(json.dumps(index))
    return file


def with_file_elsewhere(model: Path, marker: Path) -> Path:
    """A tensor of a file outside of the folder."""
    index = json.loads((model / "index.json").read_text())
    (model.parent / "elsewhere").write_bytes(saved(marker))
    tensor = next(iter(index["tensors"].values()))
    tensor["chunks"][0]["file"] = "../elsewhere"
    (model / "index.json").write_text(json.dumps(index))
    return model / "index.json"


OF_WEIGHTS = (
    with_pickled_index,
    with_pickle_for_index,
    with_pickled_weights,
    with_file_elsewhere,
)
ATTACKS = (*OF_WEIGHTS, with_pickled_value, with_pickled_moments)


def renew_checksums(checkpoint: Path) -> None:
    """As who wrote to the folder would."""
    files = [one for one in checkpoint.rglob("*") if one.is_file() and one.name != "files.json"]
    listed = {
        str(one.relative_to(checkpoint)): [one.stat().st_size, zlib.crc32(one.read_bytes())]
        for one in files
    }
    (checkpoint / "files.json").write_text(json.dumps(listed))
