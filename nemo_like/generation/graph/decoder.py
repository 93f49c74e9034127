"""What runs on the device: prompts into the cache, and steps that need nothing from the host."""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

from nemo_like.generation.graph.model import Model
from nemo_like.generation.graph.state import State
from nemo_like.generation.graph.torch_ops import rotate

Place = tuple[Tensor, Tensor, Tensor]
"""For each number that is put into the cache: its token's row among those computed, its page, and
its offset there."""


FILTERED_ROWS = 64
"""Rows whose vocabularies are sorted at once, which takes some 40 bytes for each of their ids."""


class Decoder:
    """A model with a batch's state; on a GPU each size of a batch has a CUDA graph of one step.

    A graph is captured when its size is first used. Refits change weights in place, which the
    graphs go on reading.
    """

    def __init__(self, model: Model, ops: ModuleType, state: State) -> None:
        self._model, self._ops, self.state = model, ops, state
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._pool = None

    def prefill(self, ids: Tensor, place: Place) -> None:
        """Put keys and values of prompts [P, T], padded on the right, into the cache."""
        num_prompts, length = ids.shape
        cos, sin = (each[:length, None] for each in self._model.angles)
        source, page, offset = place

        def attend(qkv: Tensor, layer: int) -> Tensor:
            keys, values = self.state.keys[layer], self.state.values[layer]
            num_keys, dim = keys.shape[1], keys.shape[3]
            qkv = qkv.view(num_prompts, length, -1, dim)
            q, k, v = qkv.tensor_split([-2 * num_keys, -num_keys], 2)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            keys[page, :, offset] = k.flatten(0, 1)[source]
            values[page, :, offset] = v.flatten(0, 1)[source]
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).reshape(num_prompts * length, -1)

        self._model.hidden(ids.flatten(), attend)

    def run(
        self, ints: Sequence[Sequence[int]], floats: Sequence[Sequence[float]], num_steps: int
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Decode ``num_steps`` tokens of every row; returns each row's tokens and logprobs.

        ``ints`` and ``floats`` have the numbers of ``INTS`` and ``FLOATS`` for each row.
        """
        state, num_rows = self.state, len(ints)
        state.ints[:, :num_rows] = torch.tensor(ints, dtype=torch.int32).t()
        state.floats[:, :num_rows] = torch.tensor(floats).t()
        state.step.zero_()
        some_filtered = any(top_p < 1 for _, top_p in floats) or any(row[-1] for row in ints)
        for _ in range(num_steps):
            self._advance(num_rows, some_filtered)
        tokens = state.tokens[:num_steps, :num_rows].t().tolist()
        return tokens, state.logprobs[:num_steps, :num_rows].t().tolist()

    def _advance(self, num_rows: int, filtered: bool) -> None:
        key = num_rows, filtered
        if key in self._graphs:
            self._graphs[key].replay()
            return
        self._step(*key)
        if self.state.ints.is_cuda:
            # After a step outside of it, which compiles kernels and sets up libraries.
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._step(*key)
            self._pool = graph.pool()
            self._graphs[key] = graph

    def _step(self, num_rows: int, filtered: bool) -> None:
        """From each row's last token to its next."""
        state = self.state

        def attend(qkv: Tensor, layer: int) -> Tensor:
            return self._ops.attend(qkv, layer, state)

        logits = self._model.logits(self._model.hidden(state.token[:num_rows], attend))
        for start in range(0, num_rows if filtered else 0, FILTERED_ROWS):
            mask_unlikely(logits[start : start + FILTERED_ROWS], state, start)
        self._ops.sample(logits, state)
        state.step += 1


def mask_unlikely(logits: Tensor, state: State, first: int = 0) -> None:
    """Set to -inf, in place, the logits [N, V] that top-k and then top-p leave out of each row.

    ``first``: the row of the state that is the first one here.
    """
    vocab, rows = logits.shape[1], slice(first, first + len(logits))
    temperature, top_p = state.temperature[rows, None], state.top_p[rows, None]
    greedy = temperature == 0
    ordered, order = (logits / torch.where(greedy, 1.0, temperature)).sort(descending=True)
    top_k = state.top_k[rows, None].long()
    top_k = torch.where((top_k == 0) | greedy, vocab, top_k).clamp(max=vocab)
    ordered.masked_fill_(ordered < ordered.gather(1, top_k - 1), -torch.inf)
    probs = ordered.softmax(-1)
    likelier = probs.cumsum(-1) - probs  # Mass before each token; 0 for the first, which stays.
    out = (likelier >= torch.where((top_p == 1) | greedy, torch.inf, top_p)) | ordered.isinf()
    logits.masked_fill_(torch.zeros_like(out).scatter_(1, order, out), -torch.inf)
