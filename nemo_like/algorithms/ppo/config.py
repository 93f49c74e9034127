"""Configuration of PPO with a critic; ``loop`` has the algorithm."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import Field

from nemo_like.config.losses import ValueLossConfig
from nemo_like.config.policy import PolicyConfig
from nemo_like.config.run import Algorithm
from nemo_like.config.sampling import PolicyGradientRunConfig, UpdatesLoop
from nemo_like.config.section import OnlyIf, Positive, Section

_CRITIC = OnlyIf(lambda _, run: run.critic.enabled, "critic.enabled=false leaves the critic out")


class PPOSection(UpdatesLoop):
    """The loop of PPO, and its advantages."""

    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount of what comes one token later, in [0, 1]."""
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95
    """GAE's lambda (arXiv:1506.02438), in [0, 1]. 1: returns are sums of rewards, and values are
    only a baseline; 0: each token's advantage is by the values of two tokens alone."""
    num_critic_warmup_steps: Annotated[int, Field(ge=0), _CRITIC] = 0
    """First steps, in which only the critic trains."""

    def rules(self, here: str, run: Any) -> Iterator[str]:
        """The policy trains at some time, and lambda weighs values that exist."""
        yield from super().rules(here, run)
        if self.num_critic_warmup_steps >= self.max_steps:
            yield (
                f"{here}.num_critic_warmup_steps={self.num_critic_warmup_steps} must be below "
                f"{here}.max_steps={self.max_steps}, or the policy never trains."
            )
        if not run.critic.enabled and self.lam != 1:
            yield (
                f"{here}.lam={self.lam:g} weighs values, and critic.enabled=false leaves them out; "
                f"set {here}.lam=1 ({here}.gamma discounts)."
            )


class CriticConfig(Section):
    """The critic: a model with a scalar head that begins at 0. All else is as in ``policy``."""

    enabled: bool = True
    """False: there is none, and values are 0. With ``ppo.gamma=1`` and ``ppo.lam=1`` that is
    REINFORCE++ (arXiv:2501.03262), whose KL is each token's (``loss.kl_in=reward``)."""
    model: Annotated[str | None, _CRITIC] = None
    """As ``policy.model``, with the same tokens; a reward model's head is kept. None: the
    policy's."""
    lr: Annotated[Positive, _CRITIC] = 1e-4
    """Peak learning rate; the rest of optimizer and schedule is the policy's."""


class PPOConfig(PolicyGradientRunConfig):
    """Configuration of ``nemo-like ppo``."""

    section: ClassVar[str] = "ppo"

    ppo: PPOSection = PPOSection()
    critic: CriticConfig = CriticConfig()
    value_loss: Annotated[ValueLossConfig, _CRITIC] = ValueLossConfig()

    @property
    def needs_whole_batch(self) -> str:
        """Adds whitening of advantages, which needs all groups."""
        return "PPO whitens advantages over all of them; leave it out"

    @property
    def metric_areas(self) -> tuple[str, ...]:
        areas = super().metric_areas
        return (*areas, "critic/") if self.critic.enabled else areas

    @property
    def scalar_heads(self) -> bool:
        return self.critic.enabled

    @property
    def max_updates(self) -> int:
        return (self.max_steps - self.ppo.num_critic_warmup_steps) * self.ppo.num_updates

    @property
    def max_critic_updates(self) -> int:
        """Optimizer steps of the critic in the whole run."""
        return self.max_steps * self.ppo.num_updates

    @property
    def critic_policy(self) -> PolicyConfig:
        """The section ``policy`` as it would be for the critic."""
        critic = self.critic
        return self.policy.replace(
            model=critic.model or self.policy.model,
            debug=self.policy.debug.replace(profile_steps=[]),
            optimizer=self.policy.optimizer.replace(lr=critic.lr),
        )

    def other_models(self) -> Iterator[tuple[str, str]]:
        if self.critic.enabled and self.critic.model is not None:
            yield "critic.model", self.critic.model


ALGORITHM = Algorithm(name="ppo", config=PPOConfig, run="nemo_like.algorithms.ppo.loop:run")
