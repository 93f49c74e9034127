"""Rules between a configuration and the ranks and bundles that it asks for; arithmetic only."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nemo_like.config.policy import PolicyConfig
from nemo_like.config.run import RunConfig
from nemo_like.config.sampling import SamplingRunConfig
from nemo_like.errors import UserError
from nemo_like.planning.layout import ParallelSizes, common_divisors, num_stages, parallel_sizes
from nemo_like.planning.model_shape import (
    ModelShape,
    head_dim,
    number,
    read_model_shape,
    read_settings,
)
from nemo_like.planning.resources import (
    ResourcePlan,
    engines_sleep,
    plan_run,
    refit_transport,
)


def check_placement(config: RunConfig) -> None:
    plan = plan_run(config)
    sizes = parallel_sizes(config.policy, len(plan.policy))
    if isinstance(config, SamplingRunConfig):
        transport, usable = refit_transport(config.refit, plan), config.generation.kind.transports
        if transport not in usable:
            remedy = f"set it to {' or '.join(usable)}"
            if not plan.colocated:
                remedy = "set cluster.num_generation_workers=null"
            elif plan.uses_gpus:
                remedy = "set GPUs apart for engines with cluster.num_generation_workers"
            raise UserError(
                f"refit.transport={transport}, which fits the bundles, does not reach an engine of "
                f"generation.backend={config.generation.backend}; {remedy}."
            )
    for sentence in _broken_rules(config, sizes, plan):
        raise UserError(sentence)


def _broken_rules(config: RunConfig, sizes: ParallelSizes, plan: ResourcePlan) -> Iterator[str]:
    """Errors in order: scalar heads, nodes, keys that need several ranks, engines."""
    parallel = config.policy.parallel
    for name in ("tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size"):
        if config.scalar_heads and getattr(parallel, name) > 1:
            yield (
                f"policy.parallel.{name}={getattr(parallel, name)} does not go with a scalar head; "
                "set it to 1: ranks then share the rows."
            )
    per_node = set(Counter(map(plan.node_of, plan.policy)).values())
    if sizes.tp not in (valid := common_divisors(*per_node)):
        key = "gpus_per_node" if plan.uses_gpus else "cpu_workers_per_node"
        counts = " or ".join(map(str, sorted(per_node, reverse=True)))
        yield (
            f"policy.parallel.tensor_parallel_size={sizes.tp} does not divide the {counts} policy "
            f"ranks of a node (cluster.{key}={plan.bundles_per_node[0]}), and a group must not "
            f"cross nodes; use {' or '.join(map(str, valid))}."
        )
    standard = type(parallel.ddp)()
    changed = [(name, one) for name, one in parallel.ddp if one != getattr(standard, name)]
    if changed and sizes.replicate == 1:
        yield (
            f"policy.parallel.ddp.{changed[0][0]}={changed[0][1]} would have no effect: the policy "
            "has one rank, so nothing is synchronised; use more workers."
        )
    if config.policy.debug.checks and sizes.num_ranks == 1:
        yield (
            "policy.debug.checks=true would have no effect: the policy has one rank; use more "
            "workers."
        )
    if not isinstance(config, SamplingRunConfig):
        return
    if config.overlaps and engines_sleep(config.generation, plan):
        key = f"max_lag={config.max_lag}" if config.max_lag else "overlap=true"
        yield (
            f"rollout.{key} lets engines sample while the policy trains, but here they sleep then, "
            "since they share its GPUs; set generation.sleep=false, or give them their own GPUs "
            "with cluster.num_generation_workers."
        )
    replicas = len(plan.generation)
    if config.loop.num_prompts_per_step < replicas and not config.evaluates:
        yield (
            f"{config.section}.num_prompts_per_step={config.loop.num_prompts_per_step} leaves some "
            f"of the {replicas} generation replicas without work; use at least {replicas}."
        )


_TENSOR = "policy.parallel.tensor_parallel_size"
_CONTEXT = "policy.parallel.context_parallel_size"


def check_model_fits(policy: PolicyConfig, num_ranks: int, model_folder: Path) -> None:
    """Refuse a model that cannot be trained, and a layout that it cannot be cut into.

    Numbers that config.json leaves out, and architectures without a plan for tensor or pipeline
    parallelism, are left to the workers. Raises UserError.
    """
    settings = read_settings(model_folder)
    if settings.get("quantization_config"):
        raise UserError(
            f"The weights of the model {model_folder} are quantized (quantization_config in its "
            "config.json), which cannot be trained; give the model that they were made "
            "from."
        )
    sizes = parallel_sizes(policy, num_ranks)
    _check_heads(settings, sizes)
    _check_rows(settings, sizes)
    layers = number(settings, "num_hidden_layers")
    stages = num_stages(policy.parallel)
    if layers is not None and stages > layers:
        key = "policy.parallel.pipeline_parallel_size"
        shown = f"{key}={sizes.pp}"
        if stages > sizes.pp:
            shown += " with pipeline_schedule=interleaved"
        raise UserError(
            f"{shown} makes {stages} stages, and the model has {layers} layers; each stage needs "
            "at least one."
        )


def check_context(config: RunConfig, model_folder: Path) -> None:
    """Refuse completions that are too long for the context in config.json, if it has one."""
    if isinstance(config, SamplingRunConfig):
        context = number(read_settings(model_folder), "max_position_embeddings")
        if context is not None:
            for rows in ("data.train", "data.validation"):
                refuse_long(*config.longest_completion(rows), context)


def refuse_long(key: str, max_new_tokens: int, context: int) -> None:
    """Raise UserError, naming ``key``, if completions leave no room for a prompt."""
    if max_new_tokens >= context:
        raise UserError(
            f"{key}={max_new_tokens} does not fit the model's context of {context} tokens with a "
            "prompt; use less."
        )


def check_rounding(config: RunConfig, model_folder: Path) -> None:
    """Refuse a model whose inner MLPs ``generation.quantization`` cannot round."""
    if not (isinstance(config, SamplingRunConfig) and config.generation.quantization):
        return
    if config.generation.kind.quantizes == "inner_mlps":
        refuse_8_bits(read_model_shape(model_folder), on_gpu=plan_run(config).uses_gpus)


def refuse_8_bits(
    shape: ModelShape, *, on_gpu: bool, capability: tuple[int, int] | None = None
) -> None:
    """Raise UserError if nothing would be rounded, or a GPU could not multiply so.

    ``capability``: the GPU's, where it is known.
    """
    odd = [each for each in (shape.hidden, shape.intermediate) if each % 16]
    problem = ""
    if not shape.inner_layers:
        problem = f"three layers, and this model has {shape.layers}"
    elif capability is not None and capability < (8, 9):
        problem = "a GPU of compute capability 8.9 or newer, and this one has {}.{}".format(
            *capability
        )
    elif on_gpu and odd:
        problem = f"hidden_size and intermediate_size to be multiples of 16, and one is {odd[0]}"
    if problem:
        raise UserError(
            f"generation.quantization=fp8 with generation.backend=graph needs {problem}; leave "
            "generation.quantization out."
        )


def _check_heads(settings: dict[str, Any], sizes: ParallelSizes) -> None:
    """Tensor-parallel ranks split heads; context-parallel ranks trade tokens for what is left.

    (Key-value heads need not divide by context ranks: they are repeated.)
    """
    heads = number(settings, "num_attention_heads")
    if heads is None:
        return
    kv_heads = number(settings, "num_key_value_heads") or heads
    for name, count in (("num_attention_heads", heads), ("num_key_value_heads", kv_heads)):
        if count % sizes.tp:
            valid = _either(common_divisors(heads, kv_heads))
            raise UserError(
                f"{_TENSOR}={sizes.tp} does not divide the model's {name}={count}; use {valid}."
            )
    left = heads // sizes.tp
    if left % sizes.cp:
        by_tensor = f" / {_TENSOR}={sizes.tp}" if sizes.tp > 1 else ""
        raise UserError(
            f"{_CONTEXT}={sizes.cp} does not divide the model's num_attention_heads={heads}"
            f"{by_tensor}; use {_either(common_divisors(left))}."
        )


def _check_rows(settings: dict[str, Any], sizes: ParallelSizes) -> None:
    """Rows of matrices split by tensor-parallel ranks are split again by sharding ranks, evenly:

    torch has uneven shards for parameters that one of the two splits, not for those of both.
    """
    if sizes.tp == 1:
        return
    inner = number(settings, "intermediate_size")
    if inner is not None and inner % sizes.tp:
        raise UserError(
            f"{_TENSOR}={sizes.tp} does not divide the model's intermediate_size={inner}; use a "
            "divisor of it."
        )
    again = sizes.shard * sizes.cp
    for name, rows in _split_rows(settings, sizes.tp).items():
        if rows % again:
            raise UserError(
                f"{_TENSOR}={sizes.tp} leaves {again} ranks (shard x context) to shard the "
                f"model's {name}={rows} rows, which they do not divide; raise "
                "policy.parallel.replicate_size, or change tensor_parallel_size or the cluster."
            )


def _split_rows(settings: dict[str, Any], tp: int) -> dict[str, int]:
    """Rows that a tensor-parallel rank has of each kind of matrix."""
    hidden, heads = number(settings, "hidden_size"), number(settings, "num_attention_heads")
    inner, vocab = number(settings, "intermediate_size"), number(settings, "vocab_size")
    rows: dict[str, int] = {}
    if hidden is not None:
        rows["hidden_size"] = hidden
        if heads is not None:
            dim = head_dim(settings, hidden, heads)
            kv_heads = number(settings, "num_key_value_heads") or heads
            rows["num_attention_heads x head_dim / tensor_parallel_size"] = heads * dim // tp
            rows["num_key_value_heads x head_dim / tensor_parallel_size"] = kv_heads * dim // tp
    if inner is not None:
        rows["intermediate_size / tensor_parallel_size"] = inner // tp
    if vocab is not None and vocab % tp == 0:  # a vocabulary that does not divide stays whole
        rows["vocab_size / tensor_parallel_size"] = vocab // tp
    return rows


def _either(valid: Sequence[int]) -> str:
    return ", ".join(map(str, valid[:-1])) + f" or {valid[-1]}" if len(valid) > 1 else "1"
