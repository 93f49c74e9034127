"""One schema an algorithm: the sections that its script can be told; see ``schema``."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

from nemo_like.config.choices import KLPlace
from nemo_like.config.data_schema import PreferenceDataConfig, SFTDataConfig
from nemo_like.config.loss_schema import AdvantageConfig, LossConfig
from nemo_like.config.policy_schema import OptimizerConfig, PolicyConfig, SchedulerConfig
from nemo_like.config.preference_schema import (
    DistillationLossConfig,
    DPOLossConfig,
    RewardModelLossConfig,
    ValueLossConfig,
)
from nemo_like.config.rollout_schema import (
    DataConfig,
    EnvironmentConfig,
    GenerationConfig,
    MismatchConfig,
    RefitConfig,
    SamplingConfig,
    ValidationConfig,
)
from nemo_like.config.schema import (
    CheckpointConfig,
    ClusterConfig,
    HeldOutConfig,
    LoggingConfig,
    RunConfig,
)


@dataclass(kw_only=True)
class TrainingRunConfig:
    """Sections of every run that trains."""

    section: ClassVar[str]
    """The algorithm's own section."""

    run: RunConfig = field(default_factory=RunConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def max_steps(self) -> int | None:
        """Steps of the whole run; None: as many as the data has."""
        raise NotImplementedError

    @property
    def rows_per_step(self) -> int:
        """Rows that one step trains on."""
        raise NotImplementedError

    @property
    def keeps_reference(self) -> bool:
        """Whether a frozen copy of the model stays beside it."""
        return False


@dataclass(kw_only=True)
class RolloutLoopConfig:
    """How much is sampled for one step, and for how many steps."""

    max_steps: int = 40
    """Steps of the whole run, resumed parts included: each samples a batch and trains on it."""
    num_prompts_per_step: int = 16
    """Distinct prompts sampled for one step."""
    num_generations_per_prompt: int = 8
    """Completions of each prompt."""


@dataclass(kw_only=True)
class RolloutRunConfig(TrainingRunConfig):
    """Sections of runs that sample completions."""

    generation: GenerationConfig = field(default_factory=GenerationConfig)
    refit: RefitConfig = field(default_factory=RefitConfig)
    mismatch: MismatchConfig = field(default_factory=MismatchConfig)
    data: DataConfig = field(default_factory=DataConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)

    @property
    def loop(self) -> RolloutLoopConfig:
        """The algorithm's own section."""
        loop = getattr(self, self.section)
        assert isinstance(loop, RolloutLoopConfig)
        return loop

    @property
    def max_steps(self) -> int:
        """Steps of the whole run."""
        return self.loop.max_steps

    @property
    def rows_per_step(self) -> int:
        """Completions of a step."""
        return self.loop.num_prompts_per_step * self.loop.num_generations_per_prompt


@dataclass(kw_only=True)
class UpdatesConfig(RolloutLoopConfig):
    """How many optimizer steps a step's completions take."""

    num_epochs_per_batch: int = 1
    """Passes over a step's completions."""
    num_mini_batches: int = 1
    """Optimizer steps of a pass; groups are dealt to them anew in each."""
    reuse_logprobs: bool = True
    """Where a batch takes one optimizer step and KL is not in the reward, the logprobs of that
    step's own forward pass are the policy's before it. False: compute them in a pass of their own,
    and check that ratios are 1."""

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
    def kl_in_reward(self) -> bool:
        """Whether rewards are less by a KL."""
        return self.loss.kl_coef > 0 and self.loss.kl_in is KLPlace.reward

    @property
    def reuses_logprobs(self) -> bool:
        """Whether a batch's only optimizer step gives the policy's logprobs."""
        return self.loop.reuse_logprobs and self.loop.num_updates == 1 and not self.kl_in_reward


@dataclass(kw_only=True)
class GRPOConfig(UpdatesConfig):
    """The loop of GRPO and its relatives."""

    num_generations_per_prompt: int = 8
    """Completions of each prompt: the group that its baseline is taken over."""
    dynamic_sampling: bool = False
    """Leave out groups whose raw rewards are all equal, and sample others in their place (DAPO,
    arXiv:2503.14476 section 3.2)."""
    max_sampling_rounds: int = 4
    """Most times that prompts are sampled for one step (dynamic_sampling)."""
    mask_truncated: bool = False
    """Completions that were cut off do not train, but count in their group (overlong filter of
    DAPO, section 3.4)."""


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
    """Subtract the mean of all tokens' advantages of the step, and divide by their unbiased
    standard deviation."""
    num_critic_warmup_steps: int = 0
    """First steps, in which only the critic trains."""


@dataclass(kw_only=True)
class CriticConfig:
    """The critic: a model with a scalar head that begins at 0. All else is as in ``policy``."""

    enabled: bool = True
    """False: there is none, and values are 0. With ``ppo.gamma=1`` and ``ppo.lam=1`` that is
    REINFORCE++ (arXiv:2501.03262), whose KL is each token's (``loss.kl_in=reward``)."""
    model: str | None = None
    """As ``policy.model``, with the same tokens; a reward model's head is kept. None: the
    policy's."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)


@dataclass(kw_only=True)
class PPORunConfig(PolicyGradientRunConfig):
    """Everything that ``examples/run_ppo.py`` can be told."""

    section = "ppo"

    ppo: PPOConfig = field(default_factory=PPOConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    value_loss: ValueLossConfig = field(default_factory=ValueLossConfig)

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

    @property
    def keeps_reference(self) -> bool:
        """For the KL term, wherever it stands."""
        return self.loss.kl_coef > 0


@dataclass(kw_only=True)
class PassesConfig:
    """How often the training rows are used."""

    num_epochs: int = 1
    """Passes over the training rows."""
    max_steps: int | None = None
    """Optimizer steps of the whole run, resumed parts included. None: those of ``num_epochs``."""
    drop_last: bool = False
    """Leave out a last step of a pass that has fewer rows than the others."""


@dataclass(kw_only=True)
class SFTConfig(PassesConfig):
    """The loop of supervised fine-tuning."""

    num_rows_per_step: int = 32
    """Conversations of one optimizer step."""


@dataclass(kw_only=True)
class SFTRunConfig(TrainingRunConfig):
    """Everything that ``examples/run_sft.py`` can be told."""

    section = "sft"

    sft: SFTConfig = field(default_factory=SFTConfig)
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    validation: HeldOutConfig = field(default_factory=HeldOutConfig)

    @property
    def max_steps(self) -> int | None:
        """See ``sft.max_steps``."""
        return self.sft.max_steps

    @property
    def rows_per_step(self) -> int:
        """Conversations of a step."""
        return self.sft.num_rows_per_step


@dataclass(kw_only=True)
class DPOConfig(PassesConfig):
    """The loop of direct preference optimization."""

    num_pairs_per_step: int = 32
    """Pairs of one optimizer step."""
    precompute_reference: bool = True
    """Score all rows with the reference model once, before the first step, and free it. False:
    keep it, and score each step's rows."""


@dataclass(kw_only=True)
class DPORunConfig(TrainingRunConfig):
    """Everything that ``examples/run_dpo.py`` can be told."""

    section = "dpo"

    dpo: DPOConfig = field(default_factory=DPOConfig)
    loss: DPOLossConfig = field(default_factory=DPOLossConfig)
    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    validation: HeldOutConfig = field(default_factory=HeldOutConfig)

    @property
    def max_steps(self) -> int | None:
        """See ``dpo.max_steps``."""
        return self.dpo.max_steps

    @property
    def rows_per_step(self) -> int:
        """Both completions of a step's pairs."""
        return 2 * self.dpo.num_pairs_per_step

    @property
    def keeps_reference(self) -> bool:
        """Only where each step scores its own rows."""
        return not (self.dpo.precompute_reference or self.loss.reference_free)


@dataclass(kw_only=True)
class RewardModelConfig(PassesConfig):
    """The loop of training a reward model."""

    num_pairs_per_step: int = 32
    """Pairs of one optimizer step."""


@dataclass(kw_only=True)
class RewardModelRunConfig(TrainingRunConfig):
    """Everything that ``examples/run_rm.py`` can be told."""

    section = "reward_model"

    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    loss: RewardModelLossConfig = field(default_factory=RewardModelLossConfig)
    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    validation: HeldOutConfig = field(default_factory=HeldOutConfig)

    @property
    def max_steps(self) -> int | None:
        """See ``reward_model.max_steps``."""
        return self.reward_model.max_steps

    @property
    def rows_per_step(self) -> int:
        """Both completions of a step's pairs."""
        return 2 * self.reward_model.num_pairs_per_step


@dataclass(kw_only=True)
class EvalConfig(SamplingConfig):
    """What an evaluation samples, and what it makes of it."""

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
    """Everything that ``examples/run_eval.py`` can be told.

    ``policy.model`` may also be a checkpoint of a run, ``<run.dir>/checkpoints/step_<n>``. Rows are
    those that a training run with the same ``data`` and ``run.seed`` validates on.
    """

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
class TeacherConfig:
    """The frozen model whose next-token distributions the student imitates.

    It is laid out as the policy is, with its dtype, on the same bundles.
    """

    model: str | None = None
    """Like ``policy.model``, and required; its vocabulary must be the student's."""
    top_k: int | None = 64
    """Most likely tokens of each distribution that are compared (``loss.tail`` says what happens to
    the others). None: the whole vocabulary. A trained token takes 12 bytes for each of them."""


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


@dataclass(kw_only=True)
class OffPolicyDistillationConfig(PassesConfig):
    """The loop of off-policy distillation: the teacher is asked about given conversations."""

    num_rows_per_step: int = 32
    """Conversations of one optimizer step."""
    temperature: float = 1.0
    """Of both models' distributions, > 0."""


@dataclass(kw_only=True)
class OffPolicyDistillationRunConfig(TrainingRunConfig):
    """Everything that ``examples/run_off_policy_distillation.py`` can be told."""

    section = "distillation"

    distillation: OffPolicyDistillationConfig = field(default_factory=OffPolicyDistillationConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    loss: DistillationLossConfig = field(default_factory=DistillationLossConfig)
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    validation: HeldOutConfig = field(default_factory=HeldOutConfig)

    @property
    def max_steps(self) -> int | None:
        """See ``distillation.max_steps``."""
        return self.distillation.max_steps


SCHEMAS: dict[str, type[TrainingRunConfig]] = {
    "grpo_schema": GRPORunConfig,
    "ppo_schema": PPORunConfig,
    "sft_schema": SFTRunConfig,
    "dpo_schema": DPORunConfig,
    "rm_schema": RewardModelRunConfig,
    "eval_schema": EvalRunConfig,
    "distillation_schema": DistillationRunConfig,
    "off_policy_distillation_schema": OffPolicyDistillationRunConfig,
}
"""By the name that a YAML file's ``defaults`` begin with."""
