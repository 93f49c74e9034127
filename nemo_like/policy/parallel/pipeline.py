"""Micro-batches through pipeline stages, on torch.distributed.pipelining's schedules."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import Schedule1F1B

from nemo_like.config.policy import ParallelConfig, PipelineSchedule
from nemo_like.planning.layout import num_stages
from nemo_like.policy.model import LogprobModel
from nemo_like.policy.parallel.stages import stages_of_rank
from nemo_like.policy.requests import ForwardRequest, RequestQueue

_SCHEDULES: dict[PipelineSchedule, Any] = {
    "gpipe": ScheduleGPipe,
    "one_f_one_b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}


class Pipeline:
    """One pipeline: the stages of this rank, and the ranks that hold the others."""

    def __init__(
        self,
        stages: Sequence[LogprobModel],
        parallel: ParallelConfig,
        group: dist.ProcessGroup,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._modules = stages
        self._parallel = parallel
        self._group = group
        self._device = device
        self._dtype = dtype
        self._rank = dist.get_rank(group)
        self._indices = stages_of_rank(parallel, self._rank)
        self._width = stages[0].causal_lm.config.get_text_config().hidden_size

    def train(
        self,
        requests: Sequence[ForwardRequest],
        loss: Callable[[Tensor, int], Tensor],
        hidden_shape: list[int],
    ) -> None:
        """Forward and backward of all requests; ``loss(output, i)`` is called on the last stage.

        ``hidden_shape``: leading dimensions of all stages' hidden states, equal for all requests.
        """
        count = len(requests)
        stages = self._make_stages(hidden_shape, requests[0].inputs.num_outputs)
        done = iter(range(count))

        def next_loss(output: Tensor, _: Tensor) -> Tensor:
            return loss(output, next(done))

        kind = self._parallel.pipeline_schedule
        several = kind == "interleaved"
        schedule = _SCHEDULES[kind](
            stages if several else stages[0],
            n_microbatches=count,
            loss_fn=next_loss,
            scale_grads=False,  # losses are shares of one sum already
        )
        arguments = (self._dummies(count),) if 0 in self._indices else ()
        last = num_stages(self._parallel) - 1 in self._indices
        target = self._dummies(count) if last else None
        # Outputs would be concatenated and kept, where torch cannot leave that out.
        known = "return_outputs" in inspect.signature(schedule.step).parameters
        options = {"return_outputs": False} if known else {}
        schedule.step(*arguments, target=target, requests=RequestQueue(requests), **options)

    @torch.no_grad()
    def score(self, requests: Sequence[ForwardRequest], hidden_shape: list[int]) -> list[Tensor]:
        """Outputs of the last stage for all requests there; nothing elsewhere.

        Stages of one rank take turns for each request, in the order of the pipeline: with sends and
        receives in one global order no backend can deadlock.
        """
        outputs: list[Tensor] = []
        sends: list[Any] = []
        for request in requests:
            for index, module in zip(self._indices, self._modules, strict=True):
                hidden = None
                if index > 0:
                    hidden = self._empty_hidden(hidden_shape)
                    dist.recv(hidden, self._neighbour(-1), group=self._group)
                out = module(hidden, request)
                if index == num_stages(self._parallel) - 1:
                    outputs.append(out)
                else:
                    out = out.to(self._dtype).contiguous()
                    work = dist.isend(out, self._neighbour(1), group=self._group)
                    sends.append((work, out))
        for work, _ in sends:
            work.wait()
        return outputs

    def _make_stages(self, hidden_shape: list[int], num_outputs: int) -> list[PipelineStage]:
        """Fresh stages for this step's shape: torch fixes the shape of a stage for its life."""
        result = torch.empty(2, num_outputs, device="meta")
        hidden = self._empty_hidden(hidden_shape, device="meta")
        total = num_stages(self._parallel)
        return [
            PipelineStage(
                module,
                index,
                total,
                self._device,
                input_args=(torch.empty(1, device="meta"),) if index == 0 else (hidden,),
                output_args=(result,) if index == total - 1 else (hidden,),
                group=self._group,
            )
            for index, module in zip(self._indices, self._modules, strict=True)
        ]

    def _empty_hidden(self, shape: list[int], device: Any = None) -> Tensor:
        return torch.empty(
            *shape,
            self._width,
            dtype=self._dtype,
            device=device or self._device,
            requires_grad=device == "meta",
        )

    def _dummies(self, count: int) -> Tensor:
        return torch.zeros(count, device=self._device)

    def _neighbour(self, step: int) -> int:
        size = dist.get_world_size(self._group)
        return dist.get_global_rank(self._group, (self._rank + step) % size)
