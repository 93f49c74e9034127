"""Trajectories as a table to store; see ``observe/trajectory_files.py``."""

import json
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import pyarrow as pa
from torch import Tensor

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.observe.trajectory_files import SCHEMA
from nemo_like.rollout.trajectory import Trajectory

Part: TypeAlias = tuple[int, str, Sequence[Trajectory], TensorBatch]
"""Step, phase, trajectories and their ``collate_tokens``."""


def table_of(parts: Sequence[Part]) -> pa.Table:
    """Rows of the file."""
    trajectories = [(step, phase, t) for step, phase, group, _ in parts for t in group]
    rows = [(*one, number) for one in trajectories for number in range(len(one[2].rows))]
    tokens = TensorBatch.concatenate([one for *_, one in parts])
    lengths = tokens.lengths.numpy()
    offsets = pa.array(np.concatenate([[0], lengths.cumsum()]).astype(np.int32))
    segments = [segment for *_, t in trajectories for row in t.rows for segment in row]
    versions = np.array(
        [v for one in segments for v in one.weight_versions or [-1] * len(one.token_ids)],
        dtype=np.int32,
    )

    def lists(flat: np.ndarray | Tensor, kind: pa.DataType) -> pa.ListArray:
        return pa.ListArray.from_arrays(offsets, pa.array(np.asarray(flat), type=kind))

    each = [t for *_, t, _ in rows]
    first = [t if number == 0 else None for *_, t, number in rows]
    columns = {
        "step": [step for step, *_ in rows],
        "phase": [phase for _, phase, *_ in rows],
        "group": [t.task.group for t in each],
        "index": [t.task.index for t in each],
        "row": [number for *_, number in rows],
        "reward": [t.result.reward for t in each],
        "metrics": [list(t.result.metrics.items()) for t in each],
        "error": [_text(t.result.error) for t in each],
        "end": [t.end for t in each],
        "turns": [len(t.completions) for t in each],
        "num_tokens": [t.num_sampled for t in each],
        "weight_version": [t.weight_version for t in each],
        "prompt": [t and _text(t.task.row.prompt) for t in first],
        "text": [t and _text(t.text) for t in first],
        "messages": [t and json.dumps(t.messages or t.task.row.messages) for t in first],
        "input_ids": lists(tokens.tokens[keys.INPUT_IDS], pa.int32()),
        "loss_mask": lists(tokens.tokens[keys.LOSS_MASK], pa.bool_()),
        "generation_logprobs": lists(tokens.tokens[keys.GENERATION_LOGPROBS], pa.float32()),
        "weight_versions": lists(versions, pa.int32()),
    }
    arrays = [
        one if isinstance(one, pa.Array) else pa.array(list(one), type=SCHEMA.field(name).type)
        for name, one in columns.items()
    ]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _text(text: str | None) -> str | None:
    # A lone surrogate (half of a character cut by a tokenizer) becomes its escape.
    return text and text.encode("utf-8", "backslashreplace").decode()
