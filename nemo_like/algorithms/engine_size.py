"""Memory of shared GPUs: an engine's, by its step's completions, and each model's neighbours'."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_like.config.sampling import SamplingRunConfig
from nemo_like.errors import UserError
from nemo_like.generation.protocol import EngineConfig
from nemo_like.planning.model_shape import engine_bytes, read_model_shape
from nemo_like.planning.offload import Neighbours
from nemo_like.planning.resources import ResourcePlan, engines_sleep, sequences_at_once
from nemo_like.refit.buckets import travels_apart

if TYPE_CHECKING:
    from nemo_like.policy.remote_model import RemoteModel

# Most of a GPU that its engines take: where one has it to itself, where several have, of which one
# holds four buckets of a refit, where they sleep while the policy trains, and where the policy
# trains next to them.
_GPU_SHARE_SEPARATE = 0.85
_GPU_SHARE_SEVERAL = 0.75
_GPU_SHARE_SLEEPING = 0.6
_GPU_SHARE_BESIDE = 0.3


def engine_config(
    config: SamplingRunConfig, model_path: str, max_model_len: int, plan: ResourcePlan
) -> EngineConfig:
    """One replica's engine, as large as the completions need that are sampled together."""
    generation = config.generation
    sleep = engines_sleep(generation, plan)
    several = generation.num_engines_per_bundle > 1
    share = _GPU_SHARE_SEVERAL if several else _GPU_SHARE_SEPARATE
    if plan.colocated:
        share = _GPU_SHARE_SLEEPING if sleep else _GPU_SHARE_BESIDE
    engine = EngineConfig(
        model_path=model_path,
        dtype=config.policy.dtype,
        seed=config.run.seed,
        max_model_len=max_model_len,
        max_num_seqs=sequences_at_once(config, plan),
        tensor_parallel_size=generation.tensor_parallel_size,
        device="cuda" if plan.uses_gpus else "cpu",
        gpu_memory_share=share / generation.num_engines_per_bundle,
        eager_attention=config.policy.batching == "padded" and config.policy.attention == "eager",
        lora=config.policy.lora if travels_apart(config.policy.lora) else None,
        sleep=sleep,
        quantization=generation.quantization,
        engine_kwargs=dict(generation.engine_kwargs),
    )
    if plan.uses_gpus and not plan.colocated and generation.num_engines_per_bundle == 1:
        return engine
    try:
        shape = read_model_shape(Path(model_path))
    except UserError:  # A model that the formulas do not cover: the engine has to measure.
        return engine
    weights, cache = engine_bytes(generation, engine.dtype, shape, engine.max_model_len)
    return replace(engine, weight_bytes=weights, kv_cache_bytes=engine.max_num_seqs * cache)


def share_gpus(
    config: SamplingRunConfig,
    engine: EngineConfig,
    plan: ResourcePlan,
    neighbours: Neighbours,
    policy: "RemoteModel",
    critic: "RemoteModel | None",
) -> None:
    """Give each model what else takes memory of its GPUs; ``neighbours``: a teacher."""
    if not plan.uses_gpus:
        return
    if plan.colocated:
        neighbours = neighbours.and_engines(
            config.generation.num_engines_per_bundle,
            engine.weight_bytes,
            engine.kv_cache_bytes,
            sleeps=engine.sleep,
        )
    policy.gpu_neighbours = neighbours
    if critic is not None:
        policy.gpu_neighbours, critic.gpu_neighbours = (
            critic.with_this_model(neighbours),
            policy.with_this_model(neighbours),
        )
