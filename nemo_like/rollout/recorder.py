"""The model's side of one trajectory: messages in, a sampled message out, every token kept.

A call that continues an earlier one extends its tokens; any other call begins a new row. So a
conversation is one row, a sub-agent another, and each sampled token trains exactly once.
"""

import secrets
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from nemo_like.data.chat import ChatTokenizer
from nemo_like.data.messages import Message
from nemo_like.data.tool_calls import Tools, refuse_unread_calls, reply_of
from nemo_like.data.turns import RewrittenHistoryError, tokens_after
from nemo_like.generation.protocol import (
    Completion,
    FinishReason,
    GenerationRequest,
    SamplingParams,
)
from nemo_like.rewards.protocol import RewardResult, failed
from nemo_like.rollout.trajectory import End, RolloutTask, Segment, Trajectory, seed_of
from nemo_like.rollout.turn import Turn, digest, key_of

Generate = Callable[[GenerationRequest], Awaitable[Completion]]
"""Samples one completion."""


def _until(text: str, stop: Sequence[str]) -> str:
    """What stands before the first of the strings, as OpenAI's servers give it."""
    found = [at for one in stop if (at := text.find(one)) >= 0]
    return text[: min(found, default=len(text))]


class EndedError(Exception):
    """A call to a trajectory that has ended; the message says why."""

    def __init__(self, message: str, end: End) -> None:
        super().__init__(message)
        self.end: End = end


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one trajectory."""

    tokens: int
    """Most tokens of a row: the context."""
    turns: int
    """Most completions."""


class Recorder:
    """Samples the completions of one trajectory and keeps their tokens."""

    def __init__(
        self,
        task: RolloutTask,
        generate: Generate,
        chat: ChatTokenizer,
        sampling: SamplingParams,
        limits: Limits,
    ) -> None:
        self.task = task
        self.counts = Counter[str]()
        self._generate = generate
        self._chat = chat
        self._sampling = sampling
        self._limits = limits
        self._turns: list[Turn] = []
        self._known: dict[str, list[Turn]] = {}
        """Turns by the conversation up to and including them."""
        self._drawn = Counter[str]()
        """How often each prompt was sampled."""
        self._turn_of: dict[str, Turn | None] = {}
        """Turns by the id of their answer; an empty answer maps to the last turn with tokens."""
        self._num_begun = 0
        self._ended: EndedError | None = None
        """Why no new call may begin; calls in progress may finish."""
        self._closed: EndedError | None = None
        self._problem: str | None = None

    async def complete(
        self,
        messages: Sequence[Message] | str,
        tools: Tools = (),
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Turn:
        """Sample the assistant's next message, or the continuation of a text.

        ``max_new_tokens`` and ``stop`` may limit it further than the run does. Raises EndedError if
        the trajectory is over or has no room, UserError for messages that cannot be rendered.
        """
        if self._ended is not None:
            raise self._ended
        if self._num_begun >= self._limits.turns:
            raise self._end("turns", f"it has used its {self._limits.turns} turns")
        parent, given = self._prompt(messages, tools)
        refuse_unread_calls(self._chat, tools)
        prompt_ids = [*(parent.token_ids() if parent else ()), *given]
        room = self._limits.tokens - len(prompt_ids)
        if room <= 0:
            raise self._end(
                "context", f"{len(prompt_ids)} tokens leave no room in {self._limits.tokens}"
            )
        self._num_begun += 1
        number = self._num_begun
        completion = await self._sample(prompt_ids, min(room, max_new_tokens or room), stop)
        if self._closed is not None:  # closed meanwhile; late completions do not train
            raise self._closed
        ids, chat = completion.token_ids, self._chat
        text = chat.decode(ids)
        whole = _until(chat.decode_whole(ids), stop) if tools else None
        reply = reply_of(_until(text, stop), whole, number, tools)
        if reply.errors:
            self.counts["unreadable_tool_calls"] += len(reply.errors)
        turn = Turn(
            parent=parent,
            given=given,
            completion=completion,
            said=messages + text if isinstance(messages, str) else [*messages, reply.message],
            reply=reply,
            prompt_tokens=len(prompt_ids),
            tools=tools,
            id=f"cmpl-{secrets.token_hex(12)}",
        )
        if completion.token_ids:  # an empty answer cannot be continued
            self._turns.append(turn)
            self._known.setdefault(key_of(turn.said, tools), []).append(turn)
        self._turn_of[turn.id] = self._turns[-1] if self._turns else None
        return turn

    def _prompt(
        self, messages: Sequence[Message] | str, tools: Tools
    ) -> tuple[Turn | None, list[int]]:
        """The turn that the messages continue, and the tokens after it."""
        if isinstance(messages, str):
            return self._prompt_of_text(messages)
        for count in range(len(messages) - 1, 0, -1):
            if messages[count - 1].get("role") != "assistant":
                continue
            parent = self._parent(key_of(messages[:count], tools))
            if parent is None:
                continue
            try:
                turn_ids = parent.completion.token_ids
                added = tokens_after(
                    self._chat, turn_ids, messages[:count], messages[count:], tools
                )
            except RewrittenHistoryError:
                self.counts["rewritten_histories"] += 1
                break
            return parent, added
        if not self._turns and not tools and messages == list(self.task.row.messages):
            return None, list(self.task.row.prompt_ids)  # rendered before the run began
        return None, self._chat.render(messages, tools)

    def _prompt_of_text(self, text: str) -> tuple[Turn | None, list[int]]:
        begun = (one.said for one in self._turns if isinstance(one.said, str))
        longest = max((one for one in begun if text.startswith(one)), key=len, default=None)
        if longest is None:
            return None, self._chat.encode_prompt(text)
        return self._parent(key_of(longest, ())), self._chat.cuts.ids(text[len(longest) :])

    def _parent(self, key: str) -> Turn | None:
        parents = self._known.get(key, [])
        if len(parents) > 1:
            self.counts["ambiguous_calls"] += 1
            self._problem = "a call continues two earlier calls that look alike"
        return parents[0] if parents else None

    async def _sample(self, prompt_ids: list[int], most: int, stop: Sequence[str]) -> Completion:
        prompt = digest(array("q", prompt_ids).tobytes())
        drawn = self._drawn[prompt]
        self._drawn[prompt] += 1
        first = not self._turns and not drawn
        # By its prompt, not its arrival, since calls of sub-agents interleave.
        seed = self.task.seed if first else seed_of(self.task.seed, prompt, drawn)
        sampling = replace(
            self._sampling,
            max_new_tokens=min(self._sampling.max_new_tokens, most),
            stop=(*self._sampling.stop, *stop),
        )
        return await self._generate(
            GenerationRequest(
                request_id=f"{self.task.request_id}-{self._num_begun}",
                prompt_ids=prompt_ids,
                sampling=sampling,
                seed=seed,
            )
        )

    def _end(self, end: End, why: str) -> EndedError:
        self._ended = EndedError(f"This trajectory is over: {why}.", end)
        return self._ended

    def logprobs(self, turn: Turn) -> list[tuple[str, float]]:
        """The text and logprob of each sampled token."""
        sampled = turn.completion
        texts = [self._chat.decode([one], skip_special_tokens=False) for one in sampled.token_ids]
        return list(zip(texts, sampled.logprobs, strict=True))

    def forget(self, turns: Sequence[Turn]) -> None:
        """Drop turns that did not reach their client: they get no reward and do not train."""
        for turn in turns:
            self.counts["aborted_calls"] += 1
            if turn in self._turns and all(one.parent is not turn for one in self._turns):
                self._turns.remove(turn)
                self._known[key_of(turn.said, turn.tools)].remove(turn)

    def close(self) -> None:
        """Take no more calls."""
        self._closed = self._ended or self._end("final", "its environment has finished")

    def trajectory(self, result: RewardResult) -> Trajectory:
        """Everything sampled, with its reward."""
        end: End = "final"
        if self._ended is not None:
            end = self._ended.end
        self.close()
        if self._problem is not None and result.reward is not None:
            result = replace(failed(self._problem), metrics=result.metrics)
        if not self._turns and result.reward is not None:
            self.counts["without_calls"] += 1
            why = "the model was never called: use the given base URL"
            result = failed(why if end == "final" else str(self._ended))
        if unknown := result.steps.keys() - self._turn_of.keys() - {""}:
            result = failed(f"a reward names an answer that was never given\n{min(unknown)}")
        last = self._turns[-1] if self._turns else None
        if end == "final" and last and last.completion.finish_reason is FinishReason.length:
            end = "length"
        if result.reward is None:
            end = "failed"
        return Trajectory(
            task=self.task,
            rows=self._rows(),
            completions=[turn.completion for turn in self._turns],
            text=self._chat.decode(last.completion.token_ids) if last else "",
            result=result,
            end=end,
            messages=() if last is None or isinstance(last.said, str) else last.said,
            counts=self.counts | {"turns": len(self._turns)},
            step_rewards=self._step_rewards(result),
        )

    def _step_rewards(self, result: RewardResult) -> list[float | None]:
        rewards: list[float | None] = [None] * len(self._turns)
        for name, value in (result.steps or {"": result.reward}).items():
            if rewards and value is not None:
                turn = self._turn_of.get(name)
                number = self._turns.index(turn) if turn in self._turns else -1
                rewards[number] = (rewards[number] or 0.0) + value
        return rewards

    def _rows(self) -> list[list[Segment]]:
        """A row for each turn without a continuation; each turn trains in its first row."""
        continued = {turn.parent for turn in self._turns}
        number_of = {turn: number for number, turn in enumerate(self._turns)}
        seen: set[Turn] = set()
        rows = []
        for turn in self._turns:
            if turn not in continued:
                rows.append(turn.segments(seen, number_of))
                seen.update(turn.lineage())
        return rows or [[Segment(token_ids=self.task.row.prompt_ids)]]
