"""Sections of runs that sample completions; see ``schema``."""

from dataclasses import dataclass, field
from typing import Any

from nemo_like.config.choices import (
    Backend,
    Dtype,
    MismatchAction,
    OverlongPrompts,
    Transport,
)


@dataclass(kw_only=True)
class MismatchConfig:
    """The gap between the logprobs of the engine that sampled and of the policy, same weights."""

    action: MismatchAction = MismatchAction.warn
    """What to do above the limit. ``warn``: say so; ``mask``: completions whose own mean gap is
    above it do not train, which takes a pass for the policy's logprobs before the step; ``stop``:
    end the run before the optimizer step."""
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
    """Passed to vLLM's engine as they are; those that follow from other keys are refused."""


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
    template_switches: dict[str, Any] = field(default_factory=dict)
    """Variables for the model's chat template, ``{name: value}``, such as
    ``{enable_thinking: false}``; the same for every prompt. A name that the template does not use
    is refused."""
    shuffle: bool = True
    """New order every epoch, derived from ``run.seed``."""
    overlong_prompts: OverlongPrompts = OverlongPrompts.refuse
    """Prompts that do not fit the model's context with ``generation.max_new_tokens``:
    ``refuse`` to start, or ``drop`` them and say how many."""


@dataclass(kw_only=True)
class GradingModelConfig:
    """The reward model of ``environment.reward=reward_model``. It runs on the CPU, and every
    grading process holds a copy of it: parameters x 4 bytes, or x 2 in 16 bits."""

    model: str | None = None
    """Folder ``final/`` of a run of ``run_rm.py``, or another of transformers' models for sequence
    classification with one label; or a hub name. Its own tokenizer and chat template render prompt
    and completion, and the score is read at the token that ends the completion, as in training it.
    A completion that was cut off is scored as if it ended there."""
    template_switches: dict[str, Any] = field(default_factory=dict)
    """Variables for its chat template, ``{name: value}``. Empty: those of
    ``data.template_switches`` that its template uses."""
    dtype: Dtype | None = None
    """Parameters in compute. None: the folder's own, which is that of training."""
    num_threads: int = 1
    """CPU threads of each grading process."""
    rows_at_once: int = 8
    """Most completions of one forward pass: as many as wait when a grading process is free."""


@dataclass(kw_only=True)
class EnvironmentConfig:
    """What grades a completion."""

    reward: str = "reasoning_gym"
    """``reasoning_gym``, ``math`` (needs an ``answer`` field), ``reward_model`` (the score of
    ``environment.reward_model``), ``file.py:function`` or ``package.module.function``; ``def
    reward(prompt, completion, **fields) -> float | dict``, where fields are the row's, and
    ``messages``, all of the prompt."""
    timeout_s: float = 10.0
    """Seconds that one completion may take to grade; after them its row is masked and counted."""
    num_processes: int = 1
    """Grading processes beside each generation worker."""
    rows_at_once: int = 32
    """Completions that each grading process grades at once where the reward function is an ``async
    def``: on one event loop that lives as long as the process. Others grade one after the other."""
    process_memory_gib: float | None = None
    """GiB of data that each grading process may hold; a process that keeps half of them is
    replaced. None: half of the node's memory, shared by all of the run's on that node."""
    pass_variables: list[str] = field(default_factory=list)
    """Names of environment variables that the reward function needs, such as
    ``[OPENAI_API_KEY]``. It gets those for programs, folders, languages, threads, caches and
    proxies (``nemo_like/environments/variables.py``), and no others."""
    reward_model: GradingModelConfig = field(default_factory=GradingModelConfig)


@dataclass(kw_only=True)
class SamplingConfig:
    """How completions are sampled that measure a model and do not train it."""

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
class ValidationConfig(SamplingConfig):
    """Measuring on held-out prompts: training rows with the same prompt are left out."""

    every_steps: int = 5
    """Steps between validations; one is made before the first and after the last step. 0: never."""
