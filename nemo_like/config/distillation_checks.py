"""Rules of runs with a teacher."""

from nemo_like.config.choices import Divergence, MismatchAction, TeacherTail
from nemo_like.config.layout import resolve_mesh_shape
from nemo_like.config.plan import plan_run
from nemo_like.config.rules import Effect, Ranges, check_effects, check_ranges
from nemo_like.config.sampling_run_schema import DistillationRunConfig
from nemo_like.config.text_run_schema import OffPolicyDistillationRunConfig
from nemo_like.errors import UserError

_EFFECTS = (
    Effect(
        keys=("loss.tail",),
        applies=lambda c: c.teacher.top_k is not None,
        why_not="teacher.top_k is null, so no token is left out; set teacher.top_k",
    ),
    Effect(
        keys=("loss.alpha",),
        applies=lambda c: c.loss.kind in (Divergence.jsd, Divergence.mixed),
        why_not="forward_kl and reverse_kl have one side; set loss.kind to jsd or mixed",
    ),
)


def check_distillation(config: DistillationRunConfig | OffPolicyDistillationRunConfig) -> None:
    """Raise UserError for the first rule that ``config`` breaks."""
    teacher = config.teacher
    if teacher.model is None:
        raise UserError(
            "teacher.model is not set, and there is nothing to imitate without it; give a folder "
            "in Hugging Face format, or a hub name (organisation/model), with the student's "
            "vocabulary."
        )
    check_ranges(config, Ranges(at_least={"teacher.top_k": 1}))
    if teacher.top_k == 1 and config.loss.tail is TeacherTail.renormalize:
        raise UserError(
            "loss.tail=renormalize does not go with teacher.top_k=1: one outcome always has "
            "probability 1; raise teacher.top_k, or set loss.tail=bucket."
        )
    if not 0 < config.loss.alpha < 1:
        raise UserError(
            f"loss.alpha={config.loss.alpha} must be in (0, 1); for one side alone set loss.kind "
            "to forward_kl or reverse_kl."
        )
    check_effects(config, _EFFECTS)
    num_ranks = len(plan_run(config).policy)
    stages = resolve_mesh_shape(config.policy, num_ranks).pipeline_parallel_size
    if stages > 1:
        raise UserError(
            f"policy.parallel.pipeline_parallel_size={stages} does not go with distillation: its "
            "stages exchange one logprob a token; set it to 1, and shard by fsdp or "
            "policy.parallel.tensor_parallel_size."
        )


def check_sampled_distillation(config: DistillationRunConfig) -> None:
    """Raise UserError for the first rule of on-policy distillation that ``config`` breaks."""
    if config.mismatch.action is MismatchAction.mask:
        raise UserError(
            "mismatch.action=mask would have no effect: this loss has no importance ratio that a "
            "gap could spoil; use warn or stop."
        )
