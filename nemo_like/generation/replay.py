"""Replay completions of an earlier run, to train, debug and profile without an engine."""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from nemo_like.doors import refuse_special
from nemo_like.errors import RunError, UserError
from nemo_like.generation.local_engine import LocalEngine
from nemo_like.generation.protocol import (
    Completion,
    EngineConfig,
    FinishReason,
    GenerationRequest,
)
from nemo_like.observe.trajectory_files import files_of

_IDENTITY = ("phase", "step", "group", "index")
_COLUMNS = ("turns", "end", "input_ids", "generation_logprobs")
_GROUPS_HELD = 2
"""Row groups of each file that stay in memory."""
Key = tuple[str, int, int, int]
"""Phase, step (0 unless validation), group, index."""


class ReplayEngine(LocalEngine):
    """Completions of a run with the same rows, seed and group sizes; implements ``Engine``.

    It receives and drops weights. Rewards are computed again.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._places: dict[Key, tuple[Path, int, int]] = {}
        """File, row group and row of each completion."""
        self._last_step = 0
        self._rows_of = _rows_of

    async def start(self) -> None:
        """Find all trajectories; UserError if there are none."""
        folder = Path(str(self._config.engine_kwargs["folder"]), "trajectories")
        refuse_special(f"generation.engine_kwargs.folder={folder.parent}", folder, depth=1)
        for path in files_of(folder):
            try:
                self._find(path)
            except (pa.ArrowException, OSError) as error:
                raise UserError(
                    f"generation.engine_kwargs.folder={folder.parent}: {path.name} in trajectories "
                    f"is damaged ({error}); copy the run again, or remove that file."
                ) from error
        num_files = len({path for path, _, _ in self._places.values()})
        self._rows_of = lru_cache(_GROUPS_HELD * max(2, num_files))(_rows_of)
        if not self._places:
            raise UserError(
                f"generation.backend=replay: {folder} has no trajectories; set "
                "generation.engine_kwargs.folder to the folder of a run."
            )

    def _find(self, path: Path) -> None:
        with pq.ParquetFile(path) as file:
            if missing := {*_IDENTITY, *_COLUMNS} - {*file.schema_arrow.names}:
                raise pa.ArrowInvalid(f"it has no column {min(missing)}")
            for number in range(file.num_row_groups):
                columns = file.read_row_group(number, _IDENTITY).select(_IDENTITY).columns
                rows = zip(*(one.to_pylist() for one in columns), strict=True)
                for place, (phase, step, group, index) in enumerate(rows):
                    self._places[_key(phase, step, group, index)] = path, number, place
                    if phase == "train":
                        self._last_step = max(self._last_step, step)

    async def generate(self, request: GenerationRequest) -> Completion:
        """The recorded completion; RunError if there is none for this prompt."""
        phase, step, group, index = request.request_id.split("-")[:4]
        place = self._places.get(_key(phase, int(step), int(group), int(index)))
        row = place and self._rows_of(*place[:2]).slice(place[2], 1).to_pylist()[0]
        count = len(request.prompt_ids)
        if row is None or row["turns"] != 1 or row["input_ids"][:count] != request.prompt_ids:
            raise RunError(
                f"No single-turn completion {index} of group {group} is recorded for this prompt "
                f"({phase}, step {step}); model, data, run.seed, batch and group sizes, "
                "validation.every_steps and max_steps (the last step validates) must be those of "
                f"the recorded run, which made {self._last_step} steps."
            )
        token_ids, logprobs = row["input_ids"][count:], row["generation_logprobs"][count:]
        if not 0 < len(token_ids) == len(logprobs):
            raise RunError(
                f"Completion {index} of group {group} has {len(token_ids)} tokens and "
                f"{len(logprobs)} logprobs in the recorded run; record it again."
            )
        assert self._version is not None
        return Completion(
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=FinishReason.length if row["end"] == "length" else FinishReason.stop,
            weight_version=self._version,
        )

    def _copy_weights(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Receive weights and drop them."""
        for _ in tensors:
            pass


def _rows_of(path: Path, number: int) -> pa.Table:
    with pq.ParquetFile(path) as file:
        return file.read_row_group(number, _COLUMNS)


def _key(phase: str, step: int, group: int, index: int) -> Key:
    return phase, step if phase == "validation" else 0, group, index
