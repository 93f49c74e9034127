"""Schemas of runs that sample completions, one a script; see ``schema``."""

from dataclasses import dataclass, field, replace

from nemo_like.config.choices import KLPlace, MismatchAction
from nemo_like.config.loss_schema import AdvantageConfig, LossConfig
from nemo_like.config.policy_schema import CriticConfig, PolicyConfig, TeacherConfig
from nemo_like.config.preference_schema import DistillationLossConfig, ValueLossConfig
from nemo_like.config.rollout_schema import SamplingConfig
from nemo_like.config.run_schema import RolloutLoopConfig, RolloutRunConfig


@dataclass(kw_only=True)
class UpdatesConfig(RolloutLoopConfig):
    """How many optimizer steps a step's completions take."""

    num_epochs_per_batch: int = 1
    """Passes over a step's completions."""
    num_mini_batches: int = 1
    """Optimizer steps of a pass; groups are dealt to them anew in each."""
    reuse_logprobs: bool = True
    """Where a batch takes one optimizer step, and neither rewards (``loss.kl_in=reward``) nor masks
    (``mismatch.action=mask``) need them before it, the logprobs of that step's own forward pass are
    the policy's before it. False: compute them in a pass of their own, and check that ratios are
    1."""

    @property
    def num_updates(self) -> int:
        """Optimizer steps of one step."""
        return self.num_epochs_per_batch * self.num_mini_batches


@dataclass(kw_only=True)
class PolicyGradientRunConfig(RolloutRunConfig):
    """Sections of runs that make completions with high advantages more likely."""

    loss: LossConfig = field(default_factory=LossConfig)

    @property
    def loop(self) -> UpdatesConfig:
        """The algorithm's own section."""
        loop = getattr(self, self.section)
        assert isinstance(loop, UpdatesConfig)
        return loop

    @property
    def max_updates(self) -> int:
        """Optimizer steps of the policy in the whole run."""
        return self.max_steps * self.loop.num_updates

    @property
    def kl_in_reward(self) -> bool:
        """Whether rewards are less by a KL."""
        return self.loss.kl_coef > 0 and self.loss.kl_in is KLPlace.reward

    @property
    def masks_mismatch(self) -> bool:
        """Whether rows that engine and policy disagree about do not train."""
        return self.mismatch.action is MismatchAction.mask

    @property
    def reuses_logprobs(self) -> bool:
        """Whether a batch's only optimizer step gives the policy's logprobs."""
        one_update = self.loop.reuse_logprobs and self.loop.num_updates == 1
        return one_update and not self.kl_in_reward and not self.masks_mismatch

    @property
    def keeps_reference(self) -> bool:
        """For the KL term, wherever it stands."""
        return self.loss.kl_coef > 0


@dataclass(kw_only=True)
class GRPOConfig(UpdatesConfig):
    """The loop of GRPO and its relatives."""

    num_generations_per_prompt: int = 8
    """Completions of each prompt: the group that its baseline is taken over."""
    dynamic_sampling: bool = False
    """Leave out groups whose raw rewards are all equal (of completions that count, see
    ``advantage.count_untrained``), and sample others in their place (DAPO,
    arXiv:2503.14476 section 3.2)."""
    max_sampling_rounds: int = 4
    """Most times that prompts are sampled for one step (dynamic_sampling). The groups with a signal
    that were found by then train; if there is none, the step trains on nothing."""
    mask_truncated: bool = False
    """Completions that were cut off do not train (overlong filter of DAPO, section 3.4, with
    ``advantage.count_untrained``)."""


@dataclass(kw_only=True)
class GRPORunConfig(PolicyGradientRunConfig):
    """Everything that ``examples/run_grpo.py`` can be told."""

    section = "grpo"

    grpo: GRPOConfig = field(default_factory=GRPOConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)


@dataclass(kw_only=True)
class PPOConfig(UpdatesConfig):
    """The loop of PPO, and its advantages."""

    gamma: float = 1.0
    """Discount of what comes one token later, in [0, 1]."""
    lam: float = 0.95
    """GAE's lambda (arXiv:1506.02438), in [0, 1]. 1: returns are sums of rewards, and values are
    only a baseline; 0: each token's advantage is by the values of two tokens alone."""
    whiten_advantages: bool = True
    """Subtract the mean of all trained tokens' advantages of the step, and divide by their unbiased
    standard deviation."""
    num_critic_warmup_steps: int = 0
    """First steps, in which only the critic trains."""


@dataclass(kw_only=True)
class PPORunConfig(PolicyGradientRunConfig):
    """Everything that ``examples/run_ppo.py`` can be told."""

    section = "ppo"

    ppo: PPOConfig = field(default_factory=PPOConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    value_loss: ValueLossConfig = field(default_factory=ValueLossConfig)

    @property
    def max_updates(self) -> int:
        """Those of the steps in which the policy trains."""
        return (self.max_steps - self.ppo.num_critic_warmup_steps) * self.ppo.num_updates

    @property
    def max_critic_updates(self) -> int:
        """Optimizer steps of the critic in the whole run."""
        return self.max_steps * self.ppo.num_updates

    @property
    def critic_policy(self) -> PolicyConfig:
        """What ``policy`` would be if the critic were it."""
        critic = self.critic
        return replace(
            self.policy,
            model=critic.model or self.policy.model,
            optimizer=critic.optimizer,
            scheduler=critic.scheduler,
        )


@dataclass(kw_only=True)
class EvalConfig(SamplingConfig):
    """What an evaluation samples, and what it makes of it.

    ``policy.model`` may also be a checkpoint of a run, ``<run.dir>/checkpoints/step_<n>``. Rows are
    those that a training run with the same ``data`` and ``run.seed`` validates on.
    """

    num_prompts_per_step: int = 64
    """Prompts sampled at one time."""
    pass_at: list[int] = field(default_factory=list)
    """Values of k for pass@k: the chance that at least one of k completions of a prompt passes,
    without bias (arXiv:2107.03374 Eq. 1). At most ``num_generations_per_prompt``. (pass@1 is the
    accuracy, which is always given.)"""
    pass_reward: float = 1.0
    """Least reward of a completion that passes."""
    majority_at: list[int] = field(default_factory=list)
    """Values of k for maj@k: the chance that the most frequent answer of k completions of a prompt
    passes, ties drawn by lot (arXiv:2203.11171). Answers are equal as text; completions without one
    have no vote. Needs a reward that reports ``answer``, as ``reasoning_gym`` and ``math`` do."""
    category_field: str | None = None
    """Field of the rows by which results are also given apart, such as reasoning_gym's ``task``."""


@dataclass(kw_only=True)
class EvalRunConfig(RolloutRunConfig):
    """Everything that ``examples/run_eval.py`` can be told."""

    section = "eval"

    eval: EvalConfig = field(default_factory=EvalConfig)

    @property
    def loop(self) -> RolloutLoopConfig:
        """One step of sampling, which sizes the engines."""
        return RolloutLoopConfig(
            max_steps=1,
            num_prompts_per_step=self.eval.num_prompts_per_step,
            num_generations_per_prompt=self.eval.num_generations_per_prompt,
        )


@dataclass(kw_only=True)
class DistillationConfig(RolloutLoopConfig):
    """The loop of on-policy distillation: the student samples what the teacher is asked about."""

    num_generations_per_prompt: int = 4
    """Completions of each prompt."""


@dataclass(kw_only=True)
class DistillationRunConfig(RolloutRunConfig):
    """Everything that ``examples/run_distillation.py`` can be told."""

    section = "distillation"

    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    loss: DistillationLossConfig = field(default_factory=DistillationLossConfig)
