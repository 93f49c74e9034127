"""The training engine of one rank, without Ray: any layout, one exact step.

Every micro-batch's loss is its share of one global mean (see losses/protocol.py), so gradients of
micro-batches, data-parallel and context-parallel ranks add up. Tensor-parallel ranks and stages of
a pipeline hold parts of one model; full parameters that they share are kept equal.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from nemo_like.losses.mismatch import MismatchSums
from nemo_like.losses.protocol import Denominators, Loss, apply_loss
from nemo_like.models.naming import plain_name
from nemo_like.observe.metrics import Metric, Metrics, Reduce, divided_sums, merge
from nemo_like.policy.diagnostics import diagnostics_of
from nemo_like.policy.gradients import (
    LossScale,
    SharedParameters,
    any_bad_loss,
    clip_gradients,
    divide_gradients,
    explain_non_finite,
    forget_gradients,
    gradient_norm,
)
from nemo_like.policy.inputs import InputLayout, InputShape, made_up_rows, model_inputs
from nemo_like.policy.model import ForwardRequest, LogprobModel, MicroBatches, forward_requests
from nemo_like.policy.optim import make_optimizers, make_schedulers, place_state, step_with
from nemo_like.policy.parallel.mesh import PolicyMesh
from nemo_like.policy.state.loading import load_stages, tied_names
from nemo_like.policy.trainer_setup import TrainerSetup

if TYPE_CHECKING:
    from nemo_like.policy.parallel.pipeline import Pipeline


class Trainer:
    """One rank's share of model, optimizer and schedule; all methods are collective."""

    def __init__(self, setup: TrainerSetup, device: torch.device) -> None:
        config = setup.config
        self.setup = setup
        self.config = config
        self.device = device
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        torch.backends.cudnn.allow_tf32 = False  # as PyTorch has it for matrix products
        if config.batching == "padded":
            torch.backends.cuda.enable_cudnn_sdp(False)  # It plans each new size: see attention.py.
        self.mesh = PolicyMesh(config, device.type)
        self._layout = InputLayout(
            batching=config.batching,
            multiple=self.mesh.sequence_multiple,
            context_group=self.mesh.group("cp"),
        )
        self.diagnostics = diagnostics_of(setup, self.mesh, device)
        where = (setup.model_path, config, self.mesh, device)
        self.stages, partial = load_stages(*where, setup.output)
        self.parameters: dict[str, nn.Parameter] = {
            plain_name(name): parameter
            for stage in self.stages
            for name, parameter in stage.named_parameters()
            if parameter.requires_grad
        }
        """This rank's shards by their names in memory. Taken now: between a forward pass and a
        reshard, FSDP2 shows full parameters under the same names."""
        ties = tied_names(self.stages[0])
        self._shared = SharedParameters(self.mesh, self.parameters, partial, ties)
        self.reference: list[LogprobModel] = []
        if setup.with_reference and not config.lora.rank:  # else it is the model without adapters
            self.reference, _ = load_stages(*where)
        for stage in self.reference:
            stage.requires_grad_(False)
        self._ddp: DistributedDataParallel | None = None
        if self.mesh.ddp and setup.trains:
            from nemo_like.policy.parallel.ddp import wrap_ddp

            self._ddp = wrap_ddp(self.stages[0], self.mesh)
        self.placement = place_state(config, setup.memory, setup.ranks_per_node, device)
        self._on_host = self.placement.offload == "optimizer"
        self.optimizers = [
            make_optimizers(stage.named_parameters(), config.optimizer, on_host=self._on_host)
            for stage in (self.stages if setup.trains else ())
        ]
        self.schedulers = make_schedulers(
            chain(*self.optimizers), config.scheduler, setup.max_steps
        )
        self.loss_scale = LossScale() if config.dtype == "float16" else None
        self.num_steps = 0
        self._parts: list[Metrics] = []
        """Metrics of the step in progress, like ``_sums``."""
        self._sums: MismatchSums | None = None

    def train(
        self,
        micro_batches: MicroBatches,
        loss: Loss,
        denominators: Denominators,
        temperature: float,
        *,
        on_policy: bool = False,
        check: Callable[[Metrics], None] | None = None,
    ) -> Metrics:
        """``add`` this rank's micro-batches, and ``finish``."""
        self.add(micro_batches, loss, denominators, temperature, on_policy=on_policy)
        return self.finish(check)

    def add(
        self,
        micro_batches: MicroBatches,
        loss: Loss,
        denominators: Denominators,
        temperature: float,
        *,
        on_policy: bool = False,
    ) -> None:
        """Forward and backward over this rank's micro-batches of a step or part of a step.

        ``on_policy``: these weights sampled the rows, so their mismatch is measured on the way; it
        is that of all ranks.
        """
        self.diagnostics.begin(self.num_steps + 1)
        self.diagnostics.check_rows(micro_batches)
        if on_policy and self._sums is None:
            self._sums = MismatchSums(self.device)
        sums = self._sums if on_policy else None
        with self.diagnostics.phase("backward"):
            self._parts += self.backward(micro_batches, loss, denominators, temperature, sums)

    def finish(
        self, check: Callable[[Metrics], None] | None = None, divide_by: float = 1.0
    ) -> Metrics:
        """One step of all ranks together, on the gradients added, after division.

        ``check`` may refuse the metrics by a RunError. The returned ones are this data-parallel
        rank's share; others return what all ranks know.

        Raises RunError on all ranks before the optimizer step if ``check`` does, or if the gradient
        norm is not finite (in float16: skips the step and counts it; in local SGD: on the rank
        whose norm it is).
        """
        parameters, parts, sums = self.parameters, self._parts, self._sums
        self._parts, self._sums = [], None
        with self.diagnostics.phase("backward"):
            divide_gradients(parameters, divide_by)
            self._shared.complete_gradients()
            norm = gradient_norm(
                parameters,
                pipeline_group=self.mesh.group("pp"),
                counted_elsewhere=self._shared.counted_elsewhere,
            )
        self._check_copies({n: p.grad for n, p in parameters.items()}, "gradients")
        scale = self.loss_scale.factor if self.loss_scale is not None else 1.0
        true_norm = norm.item() / scale
        metrics = divided_sums(merge(parts), divide_by)
        if sums is not None:
            sums.all_reduce()
            metrics |= sums.metrics()
        if check is not None:
            check(metrics)
        metrics["train/grad_norm"] = Metric(true_norm, reduce=Reduce.max)
        metrics["train/lr"] = Metric(float(self.schedulers[0].get_last_lr()[0]), reduce=Reduce.max)
        finite = bool(torch.isfinite(norm))
        if not finite and (self.loss_scale is None or any_bad_loss(parts, self.device)):
            key = "critic.lr" if self.setup.role == "critic" else "policy.optimizer.lr"
            raise explain_non_finite(norm, parameters, self.mesh.rank, key)
        if finite:
            clip_gradients(parameters, norm / scale, self.config.max_grad_norm, scale)
            with self.diagnostics.phase("optimizer"):
                self._optimizer_step()
        forget_gradients(parameters)
        self.diagnostics.end()
        self._check_copies(parameters, "parameters")
        metrics |= self.diagnostics.pop()
        if self.loss_scale is not None:
            metrics["train/loss_scale"] = Metric(scale, reduce=Reduce.max)
            self.loss_scale.update(overflowed=not finite)
            skipped = float(self.loss_scale.skipped_steps)
            metrics["train/skipped_steps"] = Metric(skipped, reduce=Reduce.max)
        return metrics

    def _check_copies(self, tensors: Mapping[str, Tensor | None], what: str) -> None:
        if not self.mesh.drifts:
            self.diagnostics.check_copies(tensors, what)

    def num_parameters(self) -> int:
        """Parameters that train, those of other stages too; collective."""
        mine = sum(
            each.numel()  # of all shards
            for name, each in self.parameters.items()
            if name not in self._shared.counted_elsewhere
        )
        total = torch.tensor(mine, device=self.device)
        if (pp := self.mesh.group("pp")) is not None:
            dist.all_reduce(total, group=pp)
        return int(total)

    def synchronize(self, *, with_optimizers: bool = False) -> None:
        """Average replicas' parameters (local SGD); ``with_optimizers``: take the first's state."""
        if self.mesh.drifts:
            from nemo_like.policy.parallel.ddp import adopt_state, average_parameters

            average_parameters(self.parameters, group := self.mesh.group("replicate"))
            if with_optimizers:
                adopt_state(chain(*self.optimizers), group)

    def backward(
        self,
        micro_batches: MicroBatches,
        loss: Loss,
        denominators: Denominators,
        temperature: float,
        sums: MismatchSums | None,
    ) -> list[Metrics]:
        """Accumulate the gradient, and ``sums``; the metrics of each real micro-batch."""
        requests, shape = self.requests(
            micro_batches, loss=loss, temperature=temperature, with_entropy=sums is not None
        )
        # Undoes DDP's mean over ranks (local SGD: a rank's own mean), and scales for float16.
        factor = float(self.mesh.sizes.replicate) if self.mesh.ddp else 1.0
        factor *= self.loss_scale.factor if self.loss_scale is not None else 1.0
        parts: list[Metrics] = []

        def value_of(output: Tensor, i: int) -> Tensor:
            micro_batch = micro_batches[i]
            if micro_batch is None:
                return output.sum() * 0
            rows = output[:, : micro_batch.num_tokens]
            if sums is not None and self.mesh.is_output_rank:
                sums.add(rows[0].detach(), rows[1], micro_batch)
            value, metrics = apply_loss(loss, rows, micro_batch, denominators)
            parts.append(metrics)
            return value * factor

        if shape is not None:
            self._pipeline(self.stages, shape).train(requests, value_of)
        else:
            self._accumulate(requests, value_of)
        return parts

    def _accumulate(
        self, requests: Sequence[ForwardRequest], value_of: Callable[[Tensor, int], Tensor]
    ) -> None:
        model = self.stages[0]
        sync_once = isinstance(model, FSDPModule) and not self.mesh.parallel.reshard_after_forward
        for i, request in enumerate(requests):
            last = i == len(requests) - 1
            if sync_once and isinstance(model, FSDPModule):
                # Gradients add up unsharded and are reduced once.
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(last)
            with nullcontext() if last or self._ddp is None else self._ddp.no_sync():
                with self.precision():
                    output = (self._ddp or model)(None, request)
                value_of(output, i).backward()  # autocast would round inside the head's gradient

    def _optimizer_step(self) -> None:
        for optimizer in chain(*self.optimizers):
            step_with(optimizer, self.device, on_host=self._on_host)
        for scheduler in self.schedulers:
            scheduler.step()
        self.num_steps += 1
        if self.mesh.drifts and self.num_steps % self.mesh.parallel.ddp.average_every_steps == 0:
            self.synchronize()

    def score(
        self,
        stages: list[LogprobModel],
        requests: Sequence[ForwardRequest],
        shape: InputShape | None,
    ) -> list[Tensor]:
        """Outputs of the passes, without gradient; none on ranks without a head."""
        if shape is not None:
            outputs = self._pipeline(stages, shape).score(requests)
        else:
            outputs = [stages[0](None, request) for request in requests]
        for stage in stages:
            # Without a backward pass some units stay gathered; free them.
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return outputs

    def _pipeline(self, stages: list[LogprobModel], shape: InputShape) -> "Pipeline":
        from nemo_like.policy.parallel.pipeline import Pipeline

        return Pipeline(stages, self.mesh, shape, self.device, self.dtype)

    def requests(
        self, micro_batches: MicroBatches, **wanted: Any
    ) -> tuple[list[ForwardRequest], InputShape | None]:
        """A request per micro-batch, see ``forward_requests``; in a pipeline all have one shape."""
        # Where only other ranks have a micro-batch, a row with one target reaches all parameters.
        batches = [each or made_up_rows([2], self.device) for each in micro_batches]
        shape = None
        if self.mesh.sizes.pp > 1:
            from nemo_like.policy.parallel.pipeline import common_shape

            shape = common_shape(batches, self._layout)
        every_token = self.setup.output == "values"
        inputs = [
            model_inputs(batch, self._layout, shape, every_token=every_token) for batch in batches
        ]
        return forward_requests(inputs, micro_batches, **wanted), shape

    def precision(self) -> AbstractContextManager[object]:
        """Of forward passes. FSDP casts by itself; DDP keeps float32 and uses autocast."""
        if self.mesh.ddp and self.dtype != torch.float32:
            return torch.autocast(self.device.type, self.dtype)
        return nullcontext()
