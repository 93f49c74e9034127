"""Pipeline stages: which layers a rank holds, and a model with only those left in it."""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from nemo_like.config.policy import ParallelConfig
from nemo_like.errors import UserError
from nemo_like.planning.layout import layer_range, num_stages


class AbsentLayer(nn.Module):
    """Stands where another stage's layer is: names of the layers that stay do not change."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # Some models choose a layer's attention mask by this attribute.
        self.attention_type = getattr(layer, "attention_type", None)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """The hidden states, untouched."""
        return hidden_states


def stages_of_rank(parallel: ParallelConfig, pipeline_rank: int) -> list[int]:
    """Stages of one pipeline rank; interleaved ranks hold every ``pp``-th.

    >>> two = {"pipeline_parallel_size": 2, "pipeline_schedule": "interleaved"}
    >>> stages_of_rank(ParallelConfig(**two), 1)
    [1, 3]
    """
    size = parallel.pipeline_parallel_size
    return list(range(pipeline_rank, num_stages(parallel), size))


def bins_for_pipeline(parallel: ParallelConfig) -> dict[str, int]:
    """What the schedules ask of the number of micro-batches, as arguments of its plan.

    1F1B needs one for each rank to begin with, interleaved whole rounds of them.
    """
    size = parallel.pipeline_parallel_size
    interleaved = parallel.pipeline_schedule == "interleaved"
    return {"min_bins": size, "bins_multiple": size if interleaved else 1}


def layers_of(causal_lm: PreTrainedModel) -> nn.ModuleList:
    """The model's one list of layers.

    Raises UserError if it has none or several: such a model cannot be cut by layers.
    """
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

    transformers' own plan for pipelines says which modules come before and after the layers.
    Raises UserError for an architecture without one.
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
