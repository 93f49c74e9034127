"""Trajectories: who wrote which tokens, and how they become rows of a batch.

A trajectory is a conversation of the policy with its environment, as segments of tokens. Sampled
ids are kept as they are, never decoded and encoded again.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.data.datasets import Row
from nemo_like.generation.protocol import Completion, FinishReason
from nemo_like.rewards.protocol import RewardResult, failed

End = Literal["final", "length", "context", "turns", "failed"]
"""Why a trajectory ended: by itself, truncated, out of context, after ``environment.max_turns``, or
by a failure of its environment or harness."""
ENDS: tuple[End, ...] = ("final", "length", "context", "turns", "failed")


@dataclass(frozen=True, kw_only=True)
class RolloutTask:
    """One trajectory to sample. Results are joined by its id, not by order."""

    row: Row
    group: int
    """Number of the group in the run, in the order that prompts were drawn."""
    index: int
    """Position in the group."""
    seed: int
    request_id: str
    record: bool = False
    """Whether the trajectory is written to trajectories.jsonl."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive tokens, either all sampled or all given."""

    token_ids: Sequence[int]
    logprobs: Sequence[float] | None = None
    """Logprob of each token, if the policy sampled them and they train; None: given tokens."""
    weight_versions: Sequence[int] | None = None
    """Version of the weights that sampled each token; None: given tokens."""
    turn: int = 0
    """Number of the completion within the trajectory."""


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """The result of a task."""

    task: RolloutTask
    rows: Sequence[Sequence[Segment]]
    """Most trajectories have one row. Rewritten histories and branches make more, and each sampled
    token trains in one of them."""
    completions: Sequence[Completion]
    """In call order."""
    text: str
    """The last completion without special tokens; a single turn is scored by it."""
    result: RewardResult
    end: End = "final"
    messages: Sequence[Mapping[str, Any]] = ()
    """Messages of the first row, including the prompt's; empty for a single turn."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Counts of events by name, such as tool calls that could not be parsed."""
    step_rewards: Sequence[float | None] = ()
    """Reward of each completion, if the environment gives any; the last one includes the rest."""

    @property
    def num_sampled(self) -> int:
        """Sampled tokens of all completions."""
        return sum(len(one.token_ids) for one in self.completions)

    @property
    def truncated(self) -> bool:
        """Whether it ended out of tokens."""
        return self.end in ("length", "context")

    @property
    def weight_version(self) -> int:
        """Version of the oldest weights that sampled any of it."""
        return min((one.weight_version for one in self.completions), default=-1)

    @property
    def mean_version(self) -> float:
        """Mean version of the weights over all sampled tokens."""
        total = sum(sum(one.versions) for one in self.completions)
        return total / self.num_sampled if self.num_sampled else float(self.weight_version)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A trajectory as text without tokens, for the driver."""

    prompt: int
    """Position of the prompt among all that are sampled."""
    index: int
    """Position in the group."""
    text: str
    result: RewardResult
    num_tokens: int
    """Sampled tokens, including the stop token."""
    truncated: bool


def as_sample(trajectory: Trajectory) -> Sample:
    """See ``Sample``."""
    return Sample(
        prompt=trajectory.task.group,
        index=trajectory.task.index,
        text=trajectory.text,
        result=trajectory.result,
        num_tokens=trajectory.num_sampled,
        truncated=trajectory.truncated,
    )


def single_turn(
    task: RolloutTask, completion: Completion, text: str, result: RewardResult
) -> Trajectory:
    """A trajectory of one completion."""
    rows = [
        Segment(token_ids=task.row.prompt_ids),
        Segment(
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            weight_versions=completion.versions,
        ),
    ]
    if result.steps:
        result = failed("'steps' is for several turns, and there is only one; return 'reward'")
    truncated = completion.finish_reason is FinishReason.length
    return Trajectory(
        task=task,
        rows=[rows],
        completions=[completion],
        text=text,
        result=result,
        step_rewards=[result.reward],
        end="length" if truncated else "final",
    )


def seed_of(*parts: object) -> int:
    """A seed that fits an int64 column, hashed from what identifies a draw."""
    text = "/".join(map(str, parts))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def collate_tokens(trajectories: Iterable[Trajectory], most_turns: int = 1) -> TensorBatch:
    """Token columns of all rows; tokens train where a segment has logprobs.

    ``most_turns``: limit of any trajectory; above 1, tokens have the number of their turn.
    """
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    turns: list[int] = []
    lengths = []
    for row in (row for trajectory in trajectories for row in trajectory.rows):
        begin = len(ids)
        for segment in row:
            count = len(segment.token_ids)
            assert segment.logprobs is None or len(segment.logprobs) == count
            ids += segment.token_ids
            mask += [segment.logprobs is not None] * count
            logprobs += [0.0] * count if segment.logprobs is None else segment.logprobs
            turns += [segment.turn] * count
        lengths.append(len(ids) - begin)
    numbers = {keys.TURNS: torch.tensor(turns, dtype=torch.int64)} if most_turns > 1 else {}
    return TensorBatch(
        lengths=torch.tensor(lengths, dtype=torch.int64),
        tokens=numbers
        | {
            keys.INPUT_IDS: torch.tensor(ids, dtype=torch.int64),
            keys.LOSS_MASK: torch.tensor(mask, dtype=torch.bool),
            keys.GENERATION_LOGPROBS: torch.tensor(logprobs, dtype=torch.float32),
        },
    )


def collate_rows(
    trajectories: Sequence[Trajectory], parts: Iterable[str] = (), most_turns: int = 1
) -> dict[str, Tensor]:
    """Row columns: what the driver needs to know; rows of one trajectory share all of them.

    ``parts``: names of several rewards; ``most_turns``: see ``collate_tokens``.
    """
    of_row = [t for t in trajectories for _ in t.rows]
    versions = [_trained_versions(row) for t in trajectories for row in t.rows]
    newest = [one[-1] if one else -1 for one in versions]
    older = [bisect_left(one, last) for one, last in zip(versions, newest, strict=True)]
    nan = float("nan")
    rewards = [nan if t.result.reward is None else t.result.reward for t in of_row]
    of_part = {
        f"{keys.REWARD_OF}{name}": [
            t.result.metrics.get(f"{keys.REWARD_OF}{name}", nan) for t in of_row
        ]
        for name in parts
    }
    steps = {}
    if most_turns > 1:
        found = torch.full((len(of_row), most_turns), nan, dtype=torch.float64)
        for row, t in zip(found, of_row, strict=True):
            given = [nan if one is None else one for one in t.step_rewards]
            row[: len(given)] = torch.tensor(given, dtype=torch.float64)
        steps = {keys.STEP_REWARDS: found}
    return {
        **steps,
        **{name: torch.tensor(one, dtype=torch.float64) for name, one in of_part.items()},
        keys.REWARDS: torch.tensor(rewards, dtype=torch.float64),
        keys.SAMPLE_MASK: torch.tensor([t.result.reward is not None for t in of_row]).bool(),
        keys.NUM_LOSS_TOKENS: torch.tensor([*map(len, versions)], dtype=torch.int64),
        keys.TRUNCATED: torch.tensor([t.truncated for t in of_row]).bool(),
        keys.TASKS: torch.tensor([seed_of(t.task.row.task) for t in of_row], dtype=torch.int64),
        keys.GROUP_IDS: torch.tensor([t.task.group for t in of_row], dtype=torch.int64),
        keys.SIBLINGS: torch.tensor([t.task.index for t in of_row], dtype=torch.int64),
        keys.SEEDS: torch.tensor([t.task.seed for t in of_row], dtype=torch.int64),
        keys.MEAN_VERSIONS: torch.tensor([t.mean_version for t in of_row], dtype=torch.float64),
        keys.WEIGHT_VERSIONS: torch.tensor([t.weight_version for t in of_row], dtype=torch.int64),
        keys.NEWEST_VERSIONS: torch.tensor(newest, dtype=torch.int64),
        keys.NUM_OLDER: torch.tensor(older, dtype=torch.int64),
    }


def _trained_versions(row: Sequence[Segment]) -> list[int]:
    return [
        version
        for segment in row
        if segment.logprobs is not None
        for version in segment.weight_versions or [-1] * len(segment.token_ids)
    ]


def first_rows(rows: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Index [N] of the first row of each trajectory, and the trajectory [B] of each row.

    Properties of a trajectory (reward, truncation) count once, however many rows it trains in.
    """
    pairs = torch.stack([rows[keys.GROUP_IDS], rows[keys.SIBLINGS]], dim=1)
    unique, trajectory = pairs.unique(dim=0, return_inverse=True)
    count = torch.full((len(unique),), len(pairs))
    first = count.scatter_reduce(0, trajectory, torch.arange(len(pairs)), "amin")
    return first, trajectory
