"""Trajectories as columns. Sampled ids are kept as they are, never decoded and encoded again."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.generation.protocol import FinishReason
from nemo_like.rollout.rollout import Trajectory


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
