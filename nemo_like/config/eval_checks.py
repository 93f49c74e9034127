"""Rules of evaluations: what they measure, and what of a training run means nothing to them."""

from nemo_like.config.choices import Offload
from nemo_like.config.file_checks import REASONING_GYM, is_checkpoint
from nemo_like.config.rules import Effect, Ranges, check_effects, check_ranges
from nemo_like.config.sampling_run_schema import EvalRunConfig
from nemo_like.errors import UserError

_RANGES = Ranges(
    at_least={"eval.temperature": 0, "eval.top_k": 0, "eval.max_new_tokens": 1},
    above_zero=("eval.top_p",),
    at_most={"eval.top_p": 1},
)


def check_eval(config: EvalRunConfig) -> None:
    """Raise UserError for the first rule that ``config`` breaks."""
    check_ranges(config, _RANGES)
    check_effects(config, _EFFECTS)
    count = config.eval.num_generations_per_prompt
    if config.eval.temperature == 0 and count > 1:
        raise UserError(
            f"eval.num_generations_per_prompt={count} with eval.temperature=0 would sample the "
            "same completion again; set it to 1, or eval.temperature above 0."
        )
    for name in ("pass_at", "majority_at"):
        for k in getattr(config.eval, name):
            if not 1 <= k <= count:
                raise UserError(
                    f"eval.{name}={getattr(config.eval, name)}: {k} must be between 1 and "
                    f"eval.num_generations_per_prompt={count}; raise that, or leave {k} out."
                )


_EFFECTS = (
    Effect(
        keys=(
            "policy.float32_head",
            "policy.tf32",
            "policy.loss_scale",
            "policy.attention",
            "policy.optimizer",
            "policy.scheduler",
            "policy.max_grad_norm",
            "policy.batching",
            "policy.micro_batch_tokens",
            "policy.micro_batch_size",
            "policy.logprob_chunk_tokens",
            "policy.compile",
            "policy.activation_checkpointing",
            "policy.activation_offload",
            "policy.parallel.reshard_after_forward",
            "policy.parallel.sequence_parallel",
            "policy.parallel.pipeline_schedule",
            "policy.parallel.pipeline_stages_per_rank",
            "policy.parallel.ddp",
            "policy.debug",
            "checkpoint",
        ),
        applies=lambda _: False,
        why_not="an evaluation trains nothing",
    ),
    Effect(
        keys=("run.resume",),
        applies=lambda _: False,
        why_not="an evaluation saves no checkpoint to continue from; start it again",
    ),
    Effect(
        keys=("run.stop_grace_s",),
        applies=lambda _: False,
        why_not="an evaluation saves nothing, so that SIGTERM ends it at once",
    ),
    Effect(
        keys=("run.self_check", "mismatch"),
        applies=lambda _: False,
        why_not="only the engine computes logprobs in an evaluation, so nothing is compared",
    ),
    Effect(
        keys=("data.train", "data.num_train_rows"),
        applies=lambda _: False,
        why_not="an evaluation reads validation rows only; set data.validation, or "
        "data.num_validation_rows",
    ),
    Effect(
        keys=("data.shuffle",),
        applies=lambda _: False,
        why_not="an evaluation uses every row once, and its order changes nothing",
    ),
    Effect(
        keys=("policy.offload",),
        applies=lambda c: c.policy.offload is not Offload.optimizer,
        why_not="an evaluation has no optimizer state; all offloads the parameters",
    ),
    Effect(
        keys=("policy.lora",),
        applies=lambda c: is_checkpoint(c.policy.model),
        why_not="policy.model is a whole model; only a run's checkpoint has adapters apart",
    ),
    Effect(
        keys=("generation.max_new_tokens",),
        applies=lambda c: c.eval.max_new_tokens is None,
        why_not="eval.max_new_tokens is set too; leave one of them out",
    ),
    Effect(
        keys=("generation.temperature", "validation"),
        applies=lambda _: False,
        why_not="an evaluation measures once, and samples as the section eval says",
    ),
    Effect(
        keys=("logging.trajectories_per_step",),
        applies=lambda _: False,
        why_not="samples.jsonl has every completion",
    ),
    Effect(
        keys=("data.tasks",),
        applies=lambda c: c.data.validation in (None, REASONING_GYM),
        why_not="data.validation is a file",
    ),
    Effect(
        keys=("eval.top_p", "eval.top_k"),
        applies=lambda c: c.eval.temperature > 0,
        why_not="eval.temperature=0 is greedy",
    ),
)
