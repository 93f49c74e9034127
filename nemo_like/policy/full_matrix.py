"""Muon and Adafactor on sharded parameters: they need full matrices."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import Parameter
from torch.optim import Adafactor, Muon, Optimizer

from nemo_like.config.optimizer import OptimizerConfig
from nemo_like.errors import UserError
from nemo_like.policy.optim import Named, adamw, groups_of
from nemo_like.policy.parallel.full_tensors import local_part


class FullMatrixMuon(Muon):
    """torch.optim.Muon (https://kellerjordan.github.io/posts/muon) for sharded matrices.

    torch's own orthogonalises DTensors by distributed products in bfloat16, whose rounding depends
    on the number of shards (4e-4 after three steps at lr 0.01). Here every rank gathers and
    orthogonalises one full matrix at a time. The bfloat16 products still amplify what gradients
    themselves differ by: a relative 1e-7 becomes 4e-5 after three steps at lr 0.001.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_on(parameter, group)

    def _step_on(self, parameter: Parameter, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        # Without momentum and decay, a step from zero is the orthogonalised update itself.
        change = Parameter(torch.zeros(parameter.shape, device=parameter.device))
        change.grad = _full(update)
        options = {
            key: group[key] for key in ("ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
        }
        Muon(
            [change], group["lr"], weight_decay=0.0, momentum=0.0, nesterov=False, **options
        ).step()
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        local_part(parameter).add_(_shard_like(parameter, change.detach()))


class FullMatrixAdafactor(Adafactor):
    """torch.optim.Adafactor (arXiv:1804.04235) for sharded parameters, which torch's own refuses.

    They are gathered one at a time; every rank holds the row and column moments, which are small.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None
        for group in self.param_groups:
            options = {key: group[key] for key in ("lr", "beta2_decay", "eps", "d", "weight_decay")}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                full = Parameter(_full(parameter))
                full.grad = _full(parameter.grad)
                optimizer = Adafactor([full], **options)
                optimizer.state[full] = self.state[parameter]
                optimizer.step()
                local_part(parameter).copy_(_shard_like(parameter, full.detach()))


def muon_and_adamw(named: Named, config: OptimizerConfig, on_host: bool) -> list[Optimizer]:
    matrices = [(name, p) for name, p in named if p.ndim == 2 and _is_in_a_layer(name)]
    if not matrices:
        raise UserError(
            "policy.optimizer.kind=muon finds no matrix in a numbered layer of this model; set "
            "policy.optimizer.kind=adamw."
        )
    optimizers: list[Optimizer] = [
        FullMatrixMuon(
            groups_of(matrices, config),
            lr=config.lr,
            momentum=config.momentum,
            # Updates as large as AdamW's (arXiv:2502.16982), so that one lr serves both.
            adjust_lr_fn="match_rms_adamw",
        )
    ]
    taken = {name for name, _ in matrices}
    if rest := [(name, p) for name, p in named if name not in taken]:
        optimizers.append(adamw(rest, config, on_host))
    return optimizers


def _is_in_a_layer(name: str) -> bool:
    """Layers are numbered in every architecture; embeddings and output heads are not.

    >>> _is_in_a_layer("model.layers.0.mlp.up_proj.weight"), _is_in_a_layer("lm_head.weight")
    (True, False)
    """
    return any(part.isdecimal() for part in name.split("."))


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _shard_like(parameter: Tensor, full: Tensor) -> Tensor:
    """This rank's part of ``full``; moves no data between ranks."""
    if not isinstance(parameter, DTensor):
        return full
    mesh = parameter.device_mesh
    copies = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return copies.redistribute(placements=parameter.placements).to_local()
