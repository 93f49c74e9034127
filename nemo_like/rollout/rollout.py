"""One trajectory: sample a completion, score it."""

from dataclasses import dataclass

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
