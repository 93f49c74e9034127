"""Trajectories as a table to store; see ``observe/trajectory_files.py``."""

import json
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from torch import Tensor

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.observe.trajectory_files import SCHEMA
from nemo_like.rollout.trajectory import Trajectory


def table_of(
    step: int, phase: str, trajectories: Sequence[Trajectory], tokens: TensorBatch
) -> pa.Table:
    """Rows of the file; ``tokens``: ``collate_tokens`` of the same trajectories."""
    rows = [(t, number) for t in trajectories for number in range(len(t.rows))]
    lengths = tokens.lengths.numpy()
    offsets = pa.array(np.concatenate([[0], lengths.cumsum()]).astype(np.int32))
    segments = [segment for t in trajectories for row in t.rows for segment in row]
    versions = np.array(
        [v for one in segments for v in one.weight_versions or [-1] * len(one.token_ids)],
        dtype=np.int32,
    )

    def lists(flat: np.ndarray | Tensor, kind: pa.DataType) -> pa.ListArray:
        return pa.ListArray.from_arrays(offsets, pa.array(np.asarray(flat), type=kind))

    first = [t if number == 0 else None for t, number in rows]
    columns = {
        "step": [step] * len(rows),
        "phase": [phase] * len(rows),
        "group": [t.task.group for t, _ in rows],
        "index": [t.task.index for t, _ in rows],
        "row": [number for _, number in rows],
        "reward": [t.result.reward for t, _ in rows],
        "metrics": [list(t.result.metrics.items()) for t, _ in rows],
        "error": [_text(t.result.error) for t, _ in rows],
        "end": [t.end for t, _ in rows],
        "turns": [len(t.completions) for t, _ in rows],
        "num_tokens": [t.num_sampled for t, _ in rows],
        "weight_version": [t.weight_version for t, _ in rows],
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
