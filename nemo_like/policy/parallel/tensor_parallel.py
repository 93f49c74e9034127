"""Tensor and sequence parallelism from the model's own plan in transformers (``_tp_plan``).

Matrices become DTensors over the tensor-parallel ranks, by column or by row (Megatron-LM,
arXiv:1909.08053); the embedding and the output head are split by vocabulary. With sequence
parallelism (arXiv:2205.05198) what lies between them works on a share of the positions.
"""

import re
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from nemo_like.errors import UserError
from nemo_like.policy.model import LogprobModel
from nemo_like.policy.parallel.collectives import gather_positions, split_positions
from nemo_like.policy.parallel.pipeline import AbsentLayer, layers_of

_COLUMNS, _ROWS, _PARTIAL = "colwise", "rowwise", "replicated_with_grad_allreduce"
# Embedding and head: split by _split_vocabulary, whatever the plan says of them.
_VOCABULARY = {"colwise_gather_output", "embedding_rowwise"}


def apply_tensor_parallel(
    model: LogprobModel, mesh: DeviceMesh, *, sequence_parallel: bool
) -> set[str]:
    """Split ``model`` over ``mesh`` in place; UserError for a plan with styles that are not here.

    Returns the Hugging Face names of full parameters that see only a share of the heads or
    positions: their gradients must be summed over ``mesh``.
    """
    causal_lm = model.causal_lm
    plan = _plan(causal_lm)
    positions = Shard(1) if sequence_parallel else Replicate()
    partial: set[str] = set()
    parents: set[str] = set()
    for name, module in list(causal_lm.named_modules()):
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style == _COLUMNS:
            parallelize_module(module, mesh, ColwiseParallel(), src_data_rank=None)
            parents.add(name.rpartition(".")[0])
        elif style == _ROWS:
            rows = RowwiseParallel(output_layouts=positions)
            parallelize_module(module, mesh, rows, src_data_rank=None)
        elif style == _PARTIAL:
            partial |= {f"{name}.{each}" for each, _ in module.named_parameters()}
    for name in parents:
        _enter_full(causal_lm.get_submodule(name), mesh, positions)
    _split_vocabulary(model, mesh)
    if sequence_parallel:
        partial |= _split_between_layers(model, mesh.get_group())
    return partial


def _plan(causal_lm: nn.Module) -> dict[str, str]:
    plan: dict[str, str] = getattr(causal_lm, "_tp_plan", None) or {}
    unknown = sorted(set(plan.values()) - {_COLUMNS, _ROWS, _PARTIAL} - _VOCABULARY)
    if not plan or unknown:
        why = f"uses {', '.join(unknown)}, which is not supported" if unknown else "is missing"
        raise UserError(
            f"The tensor-parallel plan of {type(causal_lm).__name__} in transformers {why}; set "
            "policy.parallel.tensor_parallel_size=1."
        )
    return plan


def _enter_full(module: nn.Module, mesh: DeviceMesh, positions: Placement) -> None:
    """Give attention and MLP all positions as one DTensor: one collective for all their matrices.

    Its backward sums what the ranks' matrices contribute (and splits it by position again).
    """

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def full(x: Tensor) -> Tensor:
            return DTensor.from_local(x, mesh, (positions,), run_check=False).redistribute(
                mesh, (Replicate(),)
            )

        if args:
            return (full(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": full(kwargs["hidden_states"])}

    module.register_forward_pre_hook(enter, with_kwargs=True)


def _split_vocabulary(model: LogprobModel, mesh: DeviceMesh) -> None:
    """Embedding and head by rows, where the vocabulary divides; full on every rank otherwise."""
    embedding = model.causal_lm.get_input_embeddings()
    head = model.causal_lm.get_output_embeddings()
    if model.causal_lm.config.get_text_config().vocab_size % mesh.size():
        return
    tied = isinstance(head, nn.Module) and head.weight is getattr(embedding, "weight", None)
    if isinstance(embedding, nn.Embedding):
        rows = RowwiseParallel(input_layouts=Replicate())
        parallelize_module(embedding, mesh, rows, src_data_rank=None)
    if isinstance(head, nn.Linear):
        parallelize_module(head, mesh, ColwiseParallel(), src_data_rank=None)
        model.vocab_group = mesh.get_group()
        if tied:
            assert isinstance(embedding, nn.Embedding)
            head.weight = embedding.weight


def _split_between_layers(model: LogprobModel, group: dist.ProcessGroup) -> set[str]:
    """Split positions before the first layer here and gather them after the last one.

    Embedding, final norm and head see all positions: masks and targets stay as they are.
    """
    names = {id(module): name for name, module in model.causal_lm.named_modules()}
    present = [each for each in layers_of(model.causal_lm) if not isinstance(each, AbsentLayer)]

    def split(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (split_positions(args[0], group), *args[1:])

    def gather(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            return (gather_positions(output[0], group), *output[1:])
        return gather_positions(output, group)

    present[0].register_forward_pre_hook(split)
    present[-1].register_forward_hook(gather)
    return {
        f"{names[id(layer)]}.{name}"
        for layer in present
        for name, parameter in layer.named_parameters()
        if not isinstance(parameter, DTensor)
    }
