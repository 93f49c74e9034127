"""Which completions are sampled, where their cache is, and what happens between two bursts."""

import asyncio
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from nemo_like.generation.graph.decoder import Decoder
from nemo_like.generation.graph.state import BURST, PAGE
from nemo_like.generation.local_engine import Ends, GrowingRow
from nemo_like.generation.protocol import (
    Completion,
    GenerationRequest,
)

PREFILL_TOKENS = 8192
"""Most tokens of prompts that one forward computes, or one longer prompt."""
SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, *range(128, 1025, 64))
"""Rows of a batch, filled up with idle ones: each has a graph."""


class Row(GrowingRow):
    """A completion that grows, and where it stands."""

    def __init__(
        self, request: GenerationRequest, done: "asyncio.Future[Completion]", max_model_len: int
    ) -> None:
        super().__init__(request, max_model_len)
        self.done = done
        self.slot = -1
        self.pages: list[int] = []
        self._seed = ((request.seed ^ request.seed >> 32) & 0xFFFFFFFF) - 2**31  # 32 bits, signed
        self.end = len(request.prompt_ids) + self.most - 1
        """Positions to compute until the last token is drawn."""

    @property
    def ids(self) -> list[int]:
        """Prompt and completion; all but the last have keys and values in the cache."""
        return self.request.prompt_ids + self.token_ids

    @property
    def ints(self) -> tuple[int, ...]:
        """See ``INTS``."""
        prompt, sampled = self.request.prompt_ids, self.token_ids
        position = len(prompt) + len(sampled) - 1
        top_k = self.request.sampling.top_k
        return (sampled or prompt)[-1], position, self.end - 1, self.slot, self._seed, top_k

    @property
    def floats(self) -> tuple[float, float]:
        """See ``FLOATS``."""
        return self.request.sampling.temperature, self.request.sampling.top_p


class Sampler:
    """Rows that wait, rows that are sampled, and the pages of the cache.

    Waiting rows start in order of arrival as slots and pages are free. Pages are given out as rows
    grow; if none is left, the youngest row gives its own back and waits, and later computes its
    keys and values again. Its tokens don't change: they follow from seed and position.
    """

    def __init__(self, decoder: Decoder, ends: Ends) -> None:
        self.waiting: deque[Row] = deque()
        self._running: list[Row] = []
        self._decoder, self._ends = decoder, ends
        self._pages = list(range(1, decoder.state.keys.shape[1]))
        self._table = np.zeros(decoder.state.table.shape, dtype=np.int32)
        self._slots = list(range(len(self._table) - 1))
        most = len(self._slots)
        self._sizes = [*(size for size in SIZES if size < most), most]

    def clear(self) -> list[Row]:
        """Give up all rows, which are returned."""
        rows = [*self._running, *self.waiting]
        self._release(self._running)
        self._running, self.waiting = [], deque()
        return rows

    @torch.inference_mode()
    def burst(self) -> list[Row]:
        """Sample up to ``BURST`` tokens of each row; returns rows that ended."""
        self._end(row for row in self._running if row.done.done())  # Its caller has given up.
        self._cover_running()
        ended = self._admit()
        rows = self._running
        if not rows:
            return ended
        self._decoder.state.table.copy_(torch.from_numpy(self._table))
        idle = next(size for size in self._sizes if size >= len(rows)) - len(rows)
        ints = [*(row.ints for row in rows), *[(0, 0, 0, len(self._table) - 1, 0, 0)] * idle]
        floats = [*(row.floats for row in rows), *[(1.0, 1.0)] * idle]
        num_steps = min(BURST, max(row.most - len(row.logprobs) for row in rows))
        tokens, logprobs = self._decoder.run(ints, floats, num_steps)
        for row, drawn, their in zip(rows, tokens, logprobs, strict=False):
            row.extend(drawn, their, self._ends)
        return ended + self._end(row for row in rows if row.finish_reason is not None)

    def _admit(self) -> list[Row]:
        """Start rows that wait, while there is room; returns those that end before they start."""
        ended, started = [], []
        while self.waiting:
            row = self.waiting[0]
            if row.finish_reason is not None or row.done.done():
                ended.append(row)
            elif not self._slots:
                break
            else:
                row.slot = self._slots.pop()
                if not self._cover(row):
                    self._slots.append(row.slot)
                    break
                started.append(row)
                self._running.append(row)
            self.waiting.popleft()
        self._prefill(started)
        return ended

    def _cover_running(self) -> None:
        """Give rows the pages of their next burst, the oldest first."""
        covered = 0
        while covered < len(self._running):
            if self._cover(self._running[covered]):
                covered += 1
            else:
                self.waiting.appendleft(self._running[-1])
                self._release([self._running.pop()])

    def _cover(self, row: Row) -> bool:
        """Give a row the pages of its next burst; False if there are too few."""
        num_positions = min(row.ints[1] + BURST, row.end)
        missing = -(-num_positions // PAGE) - len(row.pages)
        if missing > len(self._pages):
            return False
        for _ in range(missing):
            self._table[row.slot, len(row.pages)] = self._pages[-1]
            row.pages.append(self._pages.pop())
        return True

    def _end(self, rows: Iterable[Row]) -> list[Row]:
        ended = list(rows)
        if ended:
            self._release(ended)
            slots = {row.slot for row in ended}
            self._running = [row for row in self._running if row.slot not in slots]
        return ended

    def _release(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._slots.append(row.slot)
            self._pages += row.pages
            row.pages = []

    def _prefill(self, rows: Sequence[Row]) -> None:
        """Compute keys and values of all tokens but each row's last, siblings' once."""
        siblings: dict[tuple[int, ...], list[Row]] = defaultdict(list)
        for row in rows:
            siblings[tuple(row.ids[:-1])].append(row)
        for prompt, group in siblings.items():
            for row in group[1:]:
                row.num_cached_tokens = row.num_cached_tokens or len(prompt)
        for prompts in _portions(sorted(filter(None, siblings), key=len)):
            length = len(prompts[-1])
            ids = np.zeros((len(prompts), length), dtype=np.int64)
            places = []
            for i, prompt in enumerate(prompts):
                ids[i, : len(prompt)] = prompt
                at = np.arange(len(prompt))
                for row in siblings[prompt]:
                    places.append((i * length + at, np.array(row.pages)[at // PAGE], at % PAGE))
            device = self._decoder.state.table.device
            source, page, offset = (
                torch.from_numpy(np.concatenate(part)).to(device)
                for part in zip(*places, strict=True)
            )
            self._decoder.prefill(torch.from_numpy(ids).to(device), (source, page, offset))


def _portions(prompts: Sequence[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """Split prompts, the shortest first, into batches that one forward takes."""
    portion: list[tuple[int, ...]] = []
    for prompt in prompts:
        if portion and (len(portion) + 1) * len(prompt) > PREFILL_TOKENS:
            yield portion
            portion = []
        portion.append(prompt)
    if portion:
        yield portion
