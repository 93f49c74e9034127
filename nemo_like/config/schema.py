"""The schema of a run: every key, its type, its default, and what it means.

Defaults live here and nowhere else; the YAML files under ``configs/`` state differences only. The
text below a field is its documentation, printed by ``--help`` and collected in ``docs/config.md``.
"""

from dataclasses import dataclass, field
from typing import Any

from nemo_like.config.choices import (
    AdvantageScale,
    Backend,
    Baseline,
    Console,
    ImportanceCorrection,
    ImportanceLevel,
    KLEstimator,
    MismatchAction,
    Normalization,
    OverlongPrompts,
    Transport,
    WandbMode,
)
from nemo_like.config.policy_schema import PolicyConfig


@dataclass(kw_only=True)
class RunConfig:
    """One execution: where its files go, its seed, and whether it continues."""

    dir: str | None = None
    """Folder of the run's files. None: ``runs/<algorithm>-<date>-<time>``, made new."""
    seed: int = 0
    """Seed of data order, sampling and initialisation, >= 0."""
    resume: bool = False
    """Continue from the latest complete checkpoint in ``run.dir``; without one, start afresh."""
    self_check: bool = True
    """On the first steps, stop unless engine and policy agree, ratios are 1 and seeds differ."""


@dataclass(kw_only=True)
class GRPOConfig:
    """The loop: how much is sampled for one optimizer step, and for how many steps."""

    max_steps: int = 40
    """Optimizer steps of the whole run, resumed parts included."""
    num_prompts_per_step: int = 16
    """Distinct prompts sampled for one step."""
    num_generations_per_prompt: int = 8
    """Completions of each prompt: the group that its baseline is taken over, >= 2."""
    reuse_logprobs: bool = True
    """A batch takes one optimizer step, so the logprobs of that step's own forward pass are the
    policy's before it. False: compute them in a pass of their own, and check that ratios are 1."""


@dataclass(kw_only=True)
class AdvantageConfig:
    """From rewards to advantages, within the group of one prompt."""

    baseline: Baseline = Baseline.leave_one_out
    """``leave_one_out``: mean reward of siblings (RLOO); ``mean``: of the whole group (GRPO)."""
    scale: AdvantageScale = AdvantageScale.std
    """``std``: divide by the unbiased standard deviation of the baseline's rewards; ``none``: do
    not."""


@dataclass(kw_only=True)
class LossConfig:
    """The clipped policy-gradient loss."""

    clip_low: float = 0.2
    """Ratios below 1 - clip_low carry no gradient for negative advantages."""
    clip_high: float = 0.2
    """Ratios above 1 + clip_high carry no gradient for positive advantages."""
    normalization: Normalization = Normalization.token
    """``token``: mean over all trained tokens of the step; ``sequence``: mean over sequences of the
    mean over their tokens. Both denominators are global: ranks and micro-batches do not change
    them."""
    importance: ImportanceCorrection = ImportanceCorrection.truncate
    """Correction for sampling with another engine, by w = exp(policy_logprobs -
    generation_logprobs). ``truncate``: the loss is weighted by min(w, importance_cap); ``mask``: by
    w where it lies in [importance_floor, importance_cap], and by 0 elsewhere; ``none``."""
    importance_level: ImportanceLevel = ImportanceLevel.token
    """``token``: each token has its own w; ``sequence``: all tokens of a completion share the
    product of theirs."""
    importance_cap: float = 2.0
    """Upper bound of w."""
    importance_floor: float = 0.0
    """Lower bound of w (mask)."""
    kl_coef: float = 0.0
    """Weight of KL(policy || reference) in the loss. 0: no reference model is loaded."""
    kl_estimator: KLEstimator = KLEstimator.k3
    """Estimator of that KL."""


@dataclass(kw_only=True)
class MismatchConfig:
    """The gap between the logprobs of the engine that sampled and of the policy, same weights."""

    action: MismatchAction = MismatchAction.warn
    """What to do above the limit. ``warn``: say so; ``mask``: completions whose own mean gap is
    above it do not train; ``stop``: end the run before the optimizer step."""
    max_mean_abs: float | None = None
    """Limit of the mean absolute gap. None: by ``policy.dtype``: 1e-3, 0.1 (bfloat16), 0.0125
    (float16)."""


@dataclass(kw_only=True)
class GenerationConfig:
    """The engine that samples completions for training."""

    backend: Backend = Backend.vllm
    """``vllm``, or ``hf``: a plain loop over the transformers model, for odd models and exact
    tests."""
    temperature: float = 1.0
    """Sampling temperature, > 0; the policy's logprobs use it too. (Top-p and top-k exist for
    validation only: truncated sampling has no exact importance ratio.)"""
    max_new_tokens: int = 64
    """Most tokens of one completion."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a completion; the tokens that form them are kept and trained."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Token ids that end a completion, beside the model's own end-of-sequence ids."""
    tensor_parallel_size: int = 1
    """Workers that share one engine (vllm)."""
    num_engines_per_bundle: int = 1
    """Engines that share each bundle (GPU). Small models are bound by an engine's CPU side, so that
    two are faster than one."""
    sleep: bool = True
    """Free the engine's GPU memory while the policy trains on the same GPU (vllm). False is faster
    by some 0.1 s a step where memory holds both."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to vLLM's engine as they are."""


@dataclass(kw_only=True)
class RefitConfig:
    """The policy's weights on their way to generation."""

    transport: Transport | None = None
    """``ipc``: each bundle's policy rank hands over its memory to the engines beside it (CUDA IPC;
    mapped memory on the CPU); ``broadcast``: policy rank 0 sends to all engines (NCCL; gloo on the
    CPU). None: ``ipc`` where both sides share bundles, else ``broadcast``."""
    bucket_mib: int = 512
    """Most MiB of tensors in one bucket (a larger tensor gets its own). A sender holds three: two
    on their way and one that is gathered."""


DEFAULT_TASKS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 5, "max_terms": 5, "min_digits": 1, "max_digits": 1}
}


@dataclass(kw_only=True)
class DataConfig:
    """The prompts."""

    train: str = "reasoning_gym"
    """``reasoning_gym`` (tasks below), or a .jsonl file whose rows have ``prompt`` (text) or
    ``messages`` (chat); other fields reach the reward function."""
    validation: str | None = None
    """Like ``train``. None: held-out rows of reasoning_gym; no validation for a file."""
    tasks: dict[str, Any] = field(default_factory=dict)
    """reasoning_gym data sets and their parameters, ``{name: {parameter: value}}``; rows are drawn
    from them in turn. Empty: sums of five one-digit numbers, ``DEFAULT_TASKS``."""
    num_train_rows: int = 4000
    """Rows generated for training (reasoning_gym)."""
    num_validation_rows: int = 256
    """Rows generated for validation (reasoning_gym)."""
    system_prompt: str | None = None
    """System message put before prompts that have none. None: no system message."""
    shuffle: bool = True
    """New order every epoch, derived from ``run.seed``."""
    overlong_prompts: OverlongPrompts = OverlongPrompts.refuse
    """Prompts that do not fit the model's context with ``generation.max_new_tokens``:
    ``refuse`` to start, or ``drop`` them and say how many."""


@dataclass(kw_only=True)
class EnvironmentConfig:
    """What grades a completion."""

    reward: str = "reasoning_gym"
    """``reasoning_gym``, ``math`` (needs an ``answer`` field), ``file.py:function`` or
    ``package.module.function``; ``def reward(prompt, completion, **fields) -> float | dict``."""
    timeout_s: float = 10.0
    """Seconds that one completion may take to grade; after them its row is masked and counted."""
    num_processes: int = 1
    """Grading processes beside each generation worker."""


@dataclass(kw_only=True)
class ValidationConfig:
    """Measuring on held-out prompts: training rows with the same prompt are left out."""

    every_steps: int = 5
    """Steps between validations; one is made before the first and after the last step. 0: never."""
    num_generations_per_prompt: int = 1
    """Completions of each validation prompt; all of them count."""
    temperature: float = 1.0
    """Sampling temperature; 0: greedy."""
    top_p: float = 1.0
    """Nucleus sampling, in (0, 1]."""
    top_k: int = 0
    """Most likely tokens to sample from. 0: all."""
    max_new_tokens: int | None = None
    """Most tokens of one completion. None: ``generation.max_new_tokens``."""


@dataclass(kw_only=True)
class ClusterConfig:
    """The slice of Ray that a run reserves: bundles of one GPU, or of CPUs where there is none."""

    num_nodes: int = 1
    """Nodes to reserve bundles on."""
    gpus_per_node: int = 0
    """GPUs, and so bundles, of each node. 0: the run uses CPUs."""
    cpu_workers_per_node: int = 1
    """Bundles of each node in a CPU run."""
    cpus_per_worker: float = 1.0
    """CPUs of each bundle; fractions let more workers than cores start."""
    num_generation_workers: int | None = None
    """Bundles set apart for generation. None: colocated, every bundle holds both."""
    start_timeout_s: float = 300.0
    """Longest wait for nodes, placement groups, workers and engines to start."""
    call_timeout_s: float = 1800.0
    """Longest wait for one phase of one step."""


@dataclass(kw_only=True)
class CheckpointConfig:
    """What survives the run."""

    every_steps: int = 0
    """Steps between checkpoints; the last step is always saved. 0: the last step only."""
    keep_last: int = 2
    """Latest checkpoints to keep, >= 1."""
    keep_best: bool = True
    """Also keep the checkpoint with the best ``metric``."""
    metric: str = "validation/reward"
    """Metric that decides which checkpoint is best (larger is better)."""
    export: bool = True
    """Write the final weights and tokenizer as a Hugging Face folder, ``<run.dir>/final``."""


@dataclass(kw_only=True)
class LoggingConfig:
    """Where numbers go; ``metrics.jsonl`` and ``run.log`` are always written."""

    console: Console = Console.auto
    """``live``: a table updated in place; ``plain``: one line a step; ``auto``: by terminal."""
    tensorboard: bool = True
    """Write TensorBoard event files."""
    wandb: WandbMode = WandbMode.off
    """Weights & Biases: ``off``, ``offline`` or ``online``."""
    wandb_project: str = "nemo-like"
    """Project name in Weights & Biases."""
    trajectories_per_step: int = 4
    """Trajectories of the first generation replica written to ``trajectories.jsonl`` each step."""


@dataclass(kw_only=True)
class GRPORunConfig:
    """Everything that ``examples/run_grpo.py`` can be told."""

    run: RunConfig = field(default_factory=RunConfig)
    grpo: GRPOConfig = field(default_factory=GRPOConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    mismatch: MismatchConfig = field(default_factory=MismatchConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    refit: RefitConfig = field(default_factory=RefitConfig)
    data: DataConfig = field(default_factory=DataConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
