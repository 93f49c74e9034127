"""Micro-batches through pipeline stages, on torch.distributed.pipelining's schedules."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import Schedule1F1B
from transformers import PreTrainedModel

from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.policy import ParallelConfig, PipelineSchedule
from nemo_like.errors import UserError
from nemo_like.planning.layout import layer_range, num_stages, stages_of_rank
from nemo_like.policy.inputs import InputLayout, InputShape
from nemo_like.policy.model import ForwardRequest, LogprobModel
from nemo_like.policy.parallel.mesh import PolicyMesh

_SCHEDULES: dict[PipelineSchedule, Any] = {
    "gpipe": ScheduleGPipe,
    "one_f_one_b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}


def common_shape(batches: Sequence[TensorBatch], layout: InputLayout) -> InputShape:
    """Stages exchange tensors of one shape; elsewhere each batch has its own."""
    shapes = [layout.shape_of(batch) for batch in batches]
    return InputShape(
        rows=max(shape.rows for shape in shapes), positions=max(shape.positions for shape in shapes)
    )


class RequestQueue:
    """What each stage's forward passes work on; schedules keep that order per stage.

    (They can split tensors into equal parts only, and our micro-batches are not.)
    """

    def __init__(self, requests: Sequence[ForwardRequest]) -> None:
        self._requests = requests
        self._next: dict[int, int] = {}

    def next_for(self, module: nn.Module) -> ForwardRequest:
        i = self._next.get(id(module), 0)
        self._next[id(module)] = i + 1
        return self._requests[i]


class Pipeline:
    """One pipeline: the stages of this rank, and the ranks that hold the others."""

    def __init__(
        self,
        stages: Sequence[LogprobModel],
        mesh: PolicyMesh,
        shape: InputShape,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._modules = stages
        self._parallel = parallel = mesh.parallel
        group = mesh.group("pp")
        assert group is not None
        self._group = group
        self._hidden_shape = (shape.rows, shape.positions // mesh.sizes.cp)
        self._device = device
        self._dtype = dtype
        self._rank = dist.get_rank(group)
        self._indices = stages_of_rank(parallel, self._rank)
        self._width = stages[0].causal_lm.config.get_text_config().hidden_size

    def train(
        self, requests: Sequence[ForwardRequest], loss: Callable[[Tensor, int], Tensor]
    ) -> None:
        """Forward and backward of all requests; ``loss(output, i)`` is called on the last stage."""
        count = len(requests)
        stages = self._make_stages(requests[0].inputs.num_outputs)
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
        with _gradients_set_aside(self._modules):
            schedule.step(*arguments, target=target, requests=RequestQueue(requests), **options)

    @torch.no_grad()
    def score(self, requests: Sequence[ForwardRequest]) -> list[Tensor]:
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
                    hidden = self._empty_hidden()
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

    def _make_stages(self, num_outputs: int) -> list[PipelineStage]:
        """Fresh stages for this step's shape: torch fixes the shape of a stage for its life."""
        result = torch.empty(2, num_outputs, device="meta")
        hidden = self._empty_hidden("meta")
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

    def _empty_hidden(self, device: Any = None) -> Tensor:
        return torch.empty(
            *self._hidden_shape,
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


@contextmanager
def _gradients_set_aside(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Add those of earlier calls to new ones: the first step of a schedule forgets them."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    earlier = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    yield
    for parameter, gradient in zip(parameters, earlier, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)


class AbsentLayer(nn.Module):
    """Stands where another stage's layer is: names of the layers that stay do not change."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # Some models choose a layer's attention mask by this attribute.
        self.attention_type = getattr(layer, "attention_type", None)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


def layers_of(causal_lm: PreTrainedModel) -> nn.ModuleList:
    """The model's one list of layers; UserError if it cannot be cut by layers."""
    found = [
        module
        for module in causal_lm.base_model.children()
        if isinstance(module, nn.ModuleList) and len(module)
    ]
    if len(found) != 1:
        raise UserError(
            f"{type(causal_lm).__name__} does not have one list of layers, which "
            "policy.parallel.pipeline_parallel_size and sequence_parallel need; set them to 1 and "
            "false."
        )
    return found[0]


def keep_stage(causal_lm: PreTrainedModel, parallel: ParallelConfig, stage: int) -> None:
    """Remove from ``causal_lm`` what other stages hold; its forward then runs this stage.

    By transformers' own plan for pipelines; UserError for an architecture without one.
    """
    stages = num_stages(parallel)
    plan = getattr(causal_lm, "_pp_plan", None)
    if not plan:
        raise UserError(
            f"{type(causal_lm).__name__} has no pipeline plan in transformers; set "
            "policy.parallel.pipeline_parallel_size=1."
        )
    layers = layers_of(causal_lm)
    mine = layer_range(len(layers), stages, stage)
    for i, layer in enumerate(layers):
        if i not in mine:
            layers[i] = AbsentLayer(layer)
    for name, (_, outputs) in plan.items():
        module = causal_lm.get_submodule(name)
        if module is layers:
            continue
        first_only = "inputs_embeds" in outputs
        if stage != (0 if first_only else stages - 1):
            parent, _, child = name.rpartition(".")
            absent = nn.Identity() if "hidden_states" in outputs else None
            setattr(causal_lm.get_submodule(parent), child, absent)
