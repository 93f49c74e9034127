"""Rules of PPO: its loop, the critic and what the critic learns."""

from nemo_like.config.layout import resolve_mesh_shape
from nemo_like.config.loss_checks import one_update
from nemo_like.config.optimizer_checks import check_optimizer, check_scheduler
from nemo_like.config.plan import plan_run
from nemo_like.config.policy_checks import check_scalar_head
from nemo_like.config.rollout_checks import check_updates
from nemo_like.config.rules import Effect, Ranges, check_effects, check_ranges
from nemo_like.config.sampling_run_schema import PPORunConfig
from nemo_like.errors import UserError

_RANGES = Ranges(
    at_least={"ppo.gamma": 0, "ppo.lam": 0, "ppo.num_critic_warmup_steps": 0},
    above_zero=("value_loss.clip",),
    at_most={"ppo.gamma": 1, "ppo.lam": 1},
)


def check_ppo(config: PPORunConfig) -> None:
    """Raise UserError for the first rule of PPO that ``config`` breaks."""
    check_ranges(config, _RANGES)
    check_updates(config)
    if not config.critic.enabled:
        _check_without_critic(config)
        return
    check_effects(config, [one_update(config, "value_loss.clip")])
    check_optimizer(config, "critic")
    check_scheduler(config, "critic", config.max_critic_updates)
    check_scalar_head(config)
    if apart := plan_run(config).critic:
        resolve_mesh_shape(config.critic_policy, len(apart))
    warmup = config.ppo.num_critic_warmup_steps
    if warmup >= config.max_steps:
        raise UserError(
            f"ppo.num_critic_warmup_steps={warmup} must be below ppo.max_steps={config.max_steps}, "
            "or the policy never trains."
        )


def _check_without_critic(config: PPORunConfig) -> None:
    of_critic = ("model", "num_workers", "optimizer", "scheduler")
    effect = Effect(
        keys=(
            *(f"critic.{name}" for name in of_critic),
            "value_loss",
            "ppo.num_critic_warmup_steps",
        ),
        applies=lambda _: False,
        why_not="critic.enabled=false leaves the critic out",
    )
    check_effects(config, [effect])
    if config.ppo.lam != 1:
        raise UserError(
            f"ppo.lam={config.ppo.lam:g} weighs values, and critic.enabled=false leaves them out; "
            "set ppo.lam=1 (ppo.gamma discounts)."
        )
