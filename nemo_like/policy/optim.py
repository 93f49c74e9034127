"""Optimizers, and the learning rate in optimizer steps.

Parameters are plain tensors or DTensors under any mesh. AdamW and SGD work element by element, so
each rank updates its shard; Muon and Adafactor look at full matrices and have subclasses here.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import Parameter
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from nemo_like.config.optimizer import OptimizerConfig, SchedulerConfig
from nemo_like.errors import UserError
from nemo_like.policy.parallel.full_tensors import local_part

_Named = list[tuple[str, Parameter]]


def make_optimizers(
    named_parameters: Iterable[tuple[str, Parameter]],
    config: OptimizerConfig,
    *,
    on_host: bool = False,
) -> list[Optimizer]:
    """The optimizers that together step on all parameters that require a gradient.

    One, or for ``muon`` two: Muon for the matrices of layers and AdamW for embeddings, output head,
    norms and biases. Sharded parameters move as those of a single process do, except with
    ``adamw8bit``: it rounds moments in blocks of 256 numbers of a shard, and not at all in shards
    of fewer than 4096, so its rounding, and that alone, depends on how parameters are sharded.
    ``on_host``: state is kept in host memory; see ``step_with``.
    Raises UserError if the kind's package is missing or if no parameter suits it.
    """
    named = [(name, p) for name, p in named_parameters if p.requires_grad]
    match config.kind:
        case "adamw":
            return [_adamw(named, config, on_host)]
        case "sgd":
            return [SGD(_groups(named, config), lr=config.lr, momentum=config.momentum)]
        case "adafactor":
            return [FullMatrixAdafactor(_groups(named, config), lr=config.lr)]
        case "adamw8bit":
            return [_adamw8bit(named, config)]
        case "muon":
            return _muon_and_adamw(named, config, on_host)


def make_schedulers(
    optimizers: Iterable[Optimizer], config: SchedulerConfig, max_steps: int
) -> list[LambdaLR]:
    """One for each optimizer: step i of 0..max_steps-1 uses lr * ``lr_factor(i)``."""
    return [
        LambdaLR(optimizer, lambda step: lr_factor(step, config, max_steps))
        for optimizer in optimizers
    ]


def step_with(optimizer: Optimizer, device: torch.device, *, on_host: bool) -> None:
    """Step on ``device``; state that is kept ``on_host`` comes and goes, AdamW's by itself."""
    moves = on_host and not isinstance(optimizer, AdamW)
    if moves:
        _move_state(optimizer, device)
    optimizer.step()
    if moves:
        _move_state(optimizer, torch.device("cpu"))


def _move_state(optimizer: Optimizer, device: torch.device) -> None:
    """Move moments to ``device``; step counts stay where the optimizer put them."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                state[name] = value.to(device)


def lr_factor(step: int, config: SchedulerConfig, max_steps: int) -> float:
    """Share of the peak learning rate at optimizer step ``step``, counted from 0.

    >>> config = SchedulerConfig(kind="linear", warmup_steps=2, min_lr_ratio=0.0)
    >>> [round(lr_factor(i, config, 5), 3) for i in range(5)]
    [0.5, 1.0, 0.667, 0.333, 0.0]
    >>> config = SchedulerConfig(kind="wsd", decay_steps=2)
    >>> [lr_factor(i, config, 5) for i in range(5)]
    [1.0, 1.0, 1.0, 0.5, 0.0]
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.kind == "constant":
        return 1.0
    last = max_steps - 1
    # The last step at the peak: where warm-up ends, or where the decay of ``wsd`` begins.
    peak = max(config.warmup_steps - 1, 0)
    if config.kind == "wsd":
        peak = max(peak, last - config.decay_steps)
    progress = min(max(step - peak, 0) / max(last - peak, 1), 1.0)
    shape = 1 - progress
    if config.kind == "cosine":
        shape = (1 + math.cos(math.pi * progress)) / 2
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * shape


class ShardwiseAdamW(AdamW):
    """torch.optim.AdamW on the shards that are here: the same numbers, without DTensor's dispatch.

    Of each new shape that costs tens of milliseconds, so that a first step took seconds.
    """

    def _init_group(
        self,
        group: dict[str, Any],
        params_with_grad: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        state_steps: list[Tensor],
    ) -> bool:
        """What ``step`` works on; moments are kept as DTensors, as checkpoints need."""
        ours = (params_with_grad, grads, exp_avgs, exp_avg_sqs)
        has_complex = super()._init_group(group, *ours, max_exp_avg_sqs, state_steps)
        for tensors in ours:
            tensors[:] = map(local_part, tensors)
        return has_complex


class FullMatrixMuon(Muon):
    """torch.optim.Muon (https://kellerjordan.github.io/posts/muon) for sharded matrices.

    torch's own orthogonalises DTensors by distributed products in bfloat16, whose rounding depends
    on the number of shards (4e-4 after three steps at lr 0.01). Here momentum stays sharded, while
    every rank gathers and orthogonalises one full matrix at a time: a step costs one all-gather of
    all matrices, and no rank spares another the products. The bfloat16 products still amplify what
    gradients themselves differ by: a relative 1e-7 becomes 4e-5 after three steps at lr 0.001.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step on all matrices that have a gradient; collective."""
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

    ``lr`` is relative to a parameter's root mean square. Parameter and gradient are gathered, one
    parameter at a time; every rank holds the row and column moments, which are small.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step on all parameters that have a gradient; collective."""
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


def _adamw(named: _Named, config: OptimizerConfig, on_host: bool) -> AdamW:
    """AdamW (arXiv:1711.05101)."""
    on_gpu = all(p.device.type == "cuda" for _, p in named)
    groups = _groups(named, config)
    options: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "fused": True if on_gpu else None,
    }
    if not on_host and config.moments == "float32":
        return ShardwiseAdamW(groups, **options)
    from nemo_like.policy.moments.flat_adamw import FlatAdamW

    return FlatAdamW(groups, moments=config.moments, on_host=on_host, **options)


def _adamw8bit(named: _Named, config: OptimizerConfig) -> Optimizer:
    """AdamW with 8-bit moments (arXiv:2110.02861)."""
    try:
        from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            "policy.optimizer.kind=adamw8bit needs the package torchao, which is not installed; "
            "run pip install torchao, or set policy.optimizer.kind=adamw."
        ) from error
    return AdamW8bit(
        _groups(named, config),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )


def _muon_and_adamw(named: _Named, config: OptimizerConfig, on_host: bool) -> list[Optimizer]:
    matrices = [(name, p) for name, p in named if p.ndim == 2 and _is_in_a_layer(name)]
    if not matrices:
        raise UserError(
            "policy.optimizer.kind=muon finds no matrix in a numbered layer of this model; set "
            "policy.optimizer.kind=adamw."
        )
    optimizers: list[Optimizer] = [
        FullMatrixMuon(
            _groups(matrices, config),
            lr=config.lr,
            momentum=config.momentum,
            # Updates as large as AdamW's (arXiv:2502.16982), so that one lr serves both.
            adjust_lr_fn="match_rms_adamw",
        )
    ]
    taken = {name for name, _ in matrices}
    if rest := [(name, p) for name, p in named if name not in taken]:
        optimizers.append(_adamw(rest, config, on_host))
    return optimizers


def _is_in_a_layer(name: str) -> bool:
    """Layers are numbered in every architecture; embeddings and output heads are not.

    >>> _is_in_a_layer("model.layers.0.mlp.up_proj.weight"), _is_in_a_layer("lm_head.weight")
    (True, False)
    """
    return any(part.isdecimal() for part in name.split("."))


def _groups(named: _Named, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Parameters by whether they decay, and by mesh.

    torch's foreach and fused kernels refuse lists that mix meshes, and FSDP2 with tensor
    parallelism has norms on one mesh and matrices on another.
    """
    groups: dict[tuple[bool, DeviceMesh | None], list[Parameter]] = {}
    for _, p in named:
        mesh = p.device_mesh if isinstance(p, DTensor) else None
        groups.setdefault((p.ndim > 1, mesh), []).append(p)
    return [
        {"params": params, "weight_decay": config.weight_decay if decays else 0.0}
        for (decays, _), params in groups.items()
    ]


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _shard_like(parameter: Tensor, full: Tensor) -> Tensor:
    """This rank's part of ``full``, cut as ``parameter`` is; moves no data between ranks."""
    if not isinstance(parameter, DTensor):
        return full
    mesh = parameter.device_mesh
    copies = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return copies.redistribute(placements=parameter.placements).to_local()
