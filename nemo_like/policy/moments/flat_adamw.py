"""AdamW whose moments lie flat: in host memory, in fewer bits, or both.

Its numbers are those of torch's own AdamW bit by bit where moments are float32, and wherever they
lie the same for one format. Checkpoints have each parameter's moments under their usual names.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.adamw import adamw

from nemo_like.config.optimizer import Moments
from nemo_like.planning.parameters import BUCKET_NUMBERS
from nemo_like.policy.moments.formats import Stored
from nemo_like.policy.moments.layout import Bucket, MomentLayout, Piece
from nemo_like.policy.moments.transit import HostMemory, Transit
from nemo_like.policy.parallel.full_tensors import local_part

_SPREAD, _SEEDS = 0x9E3779B1, 1 << 32
"""Seeds of steps that follow each other are far apart; a CPU's generator takes 32 bits."""


class FlatAdamW(AdamW):
    """See the module. ``moments``: their format; vectors keep float32 with ``int8``."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        moments: Moments,
        on_host: bool,
        bucket_numbers: int = BUCKET_NUMBERS,
        **options: Any,
    ) -> None:
        super().__init__(groups, **options)
        self._num_steps = 0
        device = local_part(self.param_groups[0]["params"][0]).device
        self._noise = torch.Generator(device)
        layout = MomentLayout(self.param_groups, moments, bucket_numbers)
        self._memory: HostMemory | None = None
        self._transit: Transit | None = None
        if on_host:
            self._memory = HostMemory(layout.num_bytes, locked=device.type == "cuda")
            self._buckets, own = layout.place(self._memory.bytes)
            self._transit = Transit(self._buckets, device)
        else:
            kept = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
            self._buckets, own = layout.place(kept)
        counted_on = device if options.get("fused") else torch.device("cpu")
        for parameter, its_moments in own.items():
            step = torch.zeros((), dtype=torch.float32, device=counted_on)
            self.state[parameter] = {"step": step} | its_moments

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step on all parameters that have a gradient.

        Moments may be on their way to the host for a while after it.
        """
        assert closure is None
        self._num_steps += 1
        used = [bucket for bucket in self._buckets if any(map(_has_gradient, bucket.pieces))]
        if self._memory is not None and self._transit is not None:
            self._memory.wait()
            self._transit.run(used, self._step_on)
            return
        for bucket in used:
            self._step_on(bucket, bucket.kept)

    def _step_on(self, bucket: Bucket, moments: Stored) -> None:
        taken: list[tuple[Piece, Stored, Tensor, Tensor]] = []
        for piece, stored in bucket.split(moments):
            if _has_gradient(piece):
                taken.append((piece, stored, *piece.shard.format.unpack(stored)))
        group, pieces = bucket.group, [piece for piece, *_ in taken]
        adamw(
            [piece.of(piece.shard.parameter) for piece in pieces],
            [piece.of(_gradient(piece)) for piece in pieces],
            [first for _, _, first, _ in taken],
            [second for _, _, _, second in taken],
            [],
            [self._count(piece) for piece in pieces],
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for piece, stored, first, second in taken:
            # Nothing that differs between ranks that hold copies of a parameter.
            self._noise.manual_seed((self._num_steps * _SPREAD + piece.first) % _SEEDS)
            piece.shard.format.pack(first, second, stored, self._noise)

    def _count(self, piece: Piece) -> Tensor:
        """The parameter's step count, which its last piece raises."""
        count: Tensor = self.state[piece.shard.parameter]["step"]
        return count if piece.is_last else count.clone()

    def settle(self) -> None:
        """Wait until all moments are where they are kept."""
        if self._memory is not None and self._transit is not None:
            self._memory.wait()
            self._transit.settle()

    def state_dict(self) -> dict[str, Any]:
        """As torch's; its tensors are the optimizer's own."""
        self.settle()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """In place; torch's would make float32 tensors on the GPU of all moments."""
        self.settle()
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, key in zip(group["params"], saved["params"], strict=True):
                for name, value in state_dict["state"].get(key, {}).items():
                    local_part(self.state[parameter][name]).copy_(local_part(value))
            group.update({name: value for name, value in saved.items() if name != "params"})
        self._num_steps = max(int(state["step"]) for state in self.state.values())


def _has_gradient(piece: Piece) -> bool:
    return piece.shard.parameter.grad is not None


def _gradient(piece: Piece) -> Tensor:
    gradient = piece.shard.parameter.grad
    assert gradient is not None
    return gradient
