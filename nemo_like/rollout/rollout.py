"""One trajectory: sample a completion and score it; and trajectories as columns of a batch.

Sampled ids are kept as they are, never decoded and encoded again.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.data.chat import ChatTokenizer
from nemo_like.data.datasets import Row
from nemo_like.generation.protocol import (
    Completion,
    Engine,
    FinishReason,
    GenerationRequest,
    SamplingParams,
)
from nemo_like.rewards.protocol import Environment, RewardResult


@dataclass(frozen=True, kw_only=True)
class RolloutTask:
    """One completion to make. It carries its identity: results are joined by id, not by order."""

    row: Row
    prompt: int
    """Position of the prompt in the step: tasks of one group share it."""
    index: int
    """Position in the group."""
    seed: int
    request_id: str
    record: bool = False
    """Whether the trajectory is written to trajectories.jsonl."""


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """What came of a task."""

    task: RolloutTask
    prompt_ids: list[int]
    completion: Completion
    text: str
    """Completion without special tokens: what was scored."""
    result: RewardResult


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A trajectory as text, for a driver that asks for it; without its tokens."""

    prompt: int
    """Position of the prompt among all that are sampled."""
    index: int
    """Position in the group."""
    text: str
    result: RewardResult
    num_tokens: int
    """Sampled tokens, the stop token included."""
    truncated: bool


def as_sample(trajectory: Trajectory) -> Sample:
    """See ``Sample``."""
    completion = trajectory.completion
    return Sample(
        prompt=trajectory.task.prompt,
        index=trajectory.task.index,
        text=trajectory.text,
        result=trajectory.result,
        num_tokens=len(completion.token_ids),
        truncated=completion.finish_reason is FinishReason.length,
    )


async def run_task(
    task: RolloutTask,
    engine: Engine,
    environment: Environment,
    chat: ChatTokenizer,
    sampling: SamplingParams,
) -> Trajectory:
    """Sample and score one completion; a failed reward is a result, not an exception."""
    prompt_ids = list(task.row.prompt_ids)
    completion = await engine.generate(
        GenerationRequest(
            request_id=task.request_id, prompt_ids=prompt_ids, sampling=sampling, seed=task.seed
        )
    )
    text = chat.decode(completion.token_ids)
    fields = task.row.fields | {"messages": list(task.row.messages)}
    result = await environment.score(task.row.prompt, text, fields)
    return Trajectory(
        task=task, prompt_ids=prompt_ids, completion=completion, text=text, result=result
    )


def completion_seed(run_seed: int, phase: str, step: int, prompt: int, index: int) -> int:
    """Seed of completion ``index`` of prompt ``prompt`` in ``step`` of ``phase``.

    >>> completion_seed(0, "train", 1, 2, 3) == completion_seed(0, "train", 1, 2, 3)
    True
    """
    text = f"{run_seed}/{phase}/{step}/{prompt}/{index}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # fits an int64 column


def collate_tokens(trajectories: Sequence[Trajectory]) -> TensorBatch:
    """Token columns: prompt, then completion, which alone is trained."""
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    lengths = []
    for trajectory in trajectories:
        prompt, completion = trajectory.prompt_ids, trajectory.completion
        assert len(completion.token_ids) == len(completion.logprobs)
        ids += prompt + completion.token_ids
        mask += [False] * len(prompt) + [True] * len(completion.token_ids)
        logprobs += [0.0] * len(prompt) + completion.logprobs
        lengths.append(len(prompt) + len(completion.token_ids))
    return TensorBatch(
        lengths=torch.tensor(lengths, dtype=torch.int64),
        tokens={
            keys.INPUT_IDS: torch.tensor(ids, dtype=torch.int64),
            keys.LOSS_MASK: torch.tensor(mask, dtype=torch.bool),
            keys.GENERATION_LOGPROBS: torch.tensor(logprobs, dtype=torch.float32),
        },
    )


def collate_rows(trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
    """Row columns: what the driver needs to know of each trajectory."""
    nan = float("nan")
    rewards = [nan if t.result.reward is None else t.result.reward for t in trajectories]
    num_tokens = [len(t.completion.token_ids) for t in trajectories]
    scored = [t.result.reward is not None for t in trajectories]
    return {
        keys.REWARDS: torch.tensor(rewards, dtype=torch.float64),
        keys.SAMPLE_MASK: torch.tensor(scored, dtype=torch.bool),
        keys.NUM_LOSS_TOKENS: torch.tensor(num_tokens, dtype=torch.int64),
        keys.TRUNCATED: torch.tensor(
            [t.completion.finish_reason is FinishReason.length for t in trajectories]
        ),
        keys.GROUP_IDS: torch.tensor([t.task.prompt for t in trajectories]),
        keys.SEEDS: torch.tensor([t.task.seed for t in trajectories]),
        keys.WEIGHT_VERSIONS: torch.tensor([t.completion.weight_version for t in trajectories]),
    }
