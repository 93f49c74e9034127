"""Rewards by a reward model: its score of prompt and completion, as its trainer would give it.

``python -m nemo_like.rewards.reward_model FD SPEC …`` is a reward process that holds the model.
"""

import json
import resource
import sys
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification
from transformers.utils.logging import disable_progress_bar

from nemo_like.config.environment import REWARD_MODEL_KEY
from nemo_like.config.model_files import TRUSTED, set_trust, trusts_code
from nemo_like.data.token_rows import TokenRow, collate
from nemo_like.errors import UserError
from nemo_like.models.build import model_settings
from nemo_like.policy.inputs import InputLayout, model_inputs
from nemo_like.policy.model import ForwardRequest, HeadSettings, ValueModel
from nemo_like.policy.state.twin import plain_attention
from nemo_like.rewards.function import to_result
from nemo_like.rewards.process import BatchReward, serve
from nemo_like.rewards.protocol import RewardResult, RewardRow, failed
from nemo_like.rewards.reward_text import RewardText

_GIB = 2**30
_CHUNK_TOKENS = 1  # of logits, which a value model does not make
_NUM_KNOWN = 10_000


class RewardModel:
    """A loaded reward model."""

    def __init__(self, model: str, switches: Mapping[str, Any]) -> None:
        """Raises UserError if it cannot be loaded, or not within this process's memory limit."""
        self.text = RewardText(model, switches)
        _check_memory(self.text)
        settings = model_settings(self.text.folder)
        try:
            loaded, info = AutoModelForSequenceClassification.from_pretrained(
                self.text.folder,
                dtype="auto",
                config=settings,
                attn_implementation=plain_attention(AutoModelForSequenceClassification, settings),
                local_files_only=True,
                output_loading_info=True,
                trust_remote_code=trusts_code(),
            )
        except (OSError, ValueError, RuntimeError) as error:
            first_line = str(error).strip().splitlines()[0]
            raise UserError(
                f"{REWARD_MODEL_KEY}={self.text.folder} cannot be loaded: {first_line}"
            ) from error
        if missing := sorted(info["missing_keys"]):  # transformers would draw them at random
            raise UserError(
                f"{REWARD_MODEL_KEY}={self.text.folder} is no whole reward model: its files lack "
                f"{missing[0]}; give the folder final/ of a run of nemo-like rm."
            )
        self._model = ValueModel(loaded, HeadSettings(chunk_tokens=_CHUNK_TOKENS))
        self._known: dict[bytes, float] = {}
        """Scores of the latest texts."""

    def scores(self, rows: Sequence[TokenRow]) -> list[float]:
        """The value at the last token of each row; a text that was scored before has that score.

        Passes of other shapes round otherwise (5e-7 in float32, 0.02 in bfloat16), which a group of
        equal completions and a single other one would have for a deviation, and divide by.
        """
        texts = [blake2b(row.ids.numpy().tobytes(), digest_size=16).digest() for row in rows]
        new = {text: row for text, row in zip(texts, rows, strict=True) if text not in self._known}
        if new:
            self._known |= zip(new, self._pass(list(new.values())), strict=True)
        found = [self._known[text] for text in texts]
        for oldest in list(self._known)[:-_NUM_KNOWN]:
            del self._known[oldest]
        return found

    @torch.inference_mode()
    def _pass(self, rows: Sequence[TokenRow]) -> list[float]:
        """One forward pass, in transformers' own layout, which every architecture supports."""
        batch = collate(rows)
        inputs = model_inputs(batch, InputLayout(batching="padded"), every_token=True)
        request = ForwardRequest(inputs=inputs, temperature=1.0)
        values = self._model(None, request)[0]
        return values[batch.starts + batch.lengths - 1].tolist()

    def score(self, rows: Sequence[RewardRow]) -> list[RewardResult]:
        """See ``BatchReward``: one pass over the rows that can be read."""
        results: list[RewardResult | None] = []
        readable: list[TokenRow] = []
        for row in rows:
            try:
                readable.append(self.text.encode(row.fields["messages"], row.completion))
                results.append(None)
            except UserError as error:
                results.append(failed(str(error)))
        try:
            scored = map(_result, self.scores(readable) if readable else [])
        except (RuntimeError, MemoryError) as error:  # no memory for a batch this large
            scored = iter([failed(f"reward model: {error}")] * len(readable))
        return [result or next(scored) for result in results]


def load(spec: str) -> BatchReward:
    """``spec``: the model's name, switches and threads, and whether its code is trusted; JSON."""
    settings = json.loads(spec)
    set_trust(settings[TRUSTED])
    torch.set_num_threads(settings["num_threads"])
    disable_progress_bar()
    return RewardModel(settings["model"], settings["switches"]).score


def _result(score: float) -> RewardResult:
    try:
        return to_result(score)
    except UserError as error:  # not finite
        return failed(f"reward model: {error}")


def _check_memory(text: RewardText) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    needed = text.num_bytes()
    if limit != resource.RLIM_INFINITY and needed > limit:
        raise UserError(
            f"{REWARD_MODEL_KEY}={text.folder} takes {needed / _GIB:.3g} GiB in every reward "
            f"process, and each may use {limit / _GIB:.3g} GiB (half of the machine's memory, "
            "shared by the reward processes of all its engines, or "
            "environment.process_memory_gib); lower "
            "environment.num_processes, or store the model in bfloat16."
        )


if __name__ == "__main__":
    serve(sys.argv[1:], load)
