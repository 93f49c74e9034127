"""The table of ``test_every_key.py``: for each algorithm and key a changed value and its effect.

In overrides ``{s}`` is the algorithm's own section; other names in braces are files of the test.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tests.key_probes import again, critic_trained, loop, placed, queued, trained


@dataclass(frozen=True)
class Entry:
    """A key's changed value; ``beside`` is set with and without it."""

    change: str
    beside: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The dotted key that changes."""
        return self.change.partition("=")[0]


@dataclass(frozen=True)
class Seen(Entry):
    """``by`` gives something else with the changed value; ``also`` is what that value asks for."""

    by: Callable[[Any], Any] = loop
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refused(Entry):
    """The changed value is refused, and the sentence has ``why`` in it."""

    why: str = ""


@dataclass(frozen=True)
class Proven(Entry):
    """A test shows the effect, in a file that names the key."""

    test: str = ""


def seen(by: Callable[[Any], Any], *changes: str, beside: str = "") -> list[Entry]:
    return [Seen(one, tuple(beside.split()), by) for one in changes]


def refused(why: str, *changes: str, beside: str = "") -> list[Entry]:
    return [Refused(one, tuple(beside.split()), why) for one in changes]


def proven(test: str, *changes: str, beside: str = "") -> list[Entry]:
    return [Proven(one, tuple(beside.split()), test) for one in changes]


_OPTIMIZER, _SCHEDULER = "policy.optimizer", "policy.scheduler"
_RANKS = "cluster.cpu_workers_per_node=4"
_GPU = "cluster.gpus_per_node=1"
_DDP = f"{_RANKS} policy.parallel.data_parallel=ddp"
_ENGINE = "tests/test_training_engine.py::test_"
_HERE = "tests/test_every_key.py::test_"

_OUTSIDE = (
    "tests/test_doors.py::test_loss_advantage_engine_and_logger_come_from_one_file_of_the_user"
)

_LIMIT = "tests/test_trajectory_files.py::test_a_limit_drops_the_oldest_trajectories_first"

_SLURM = "cluster.slurm"
ANY_RUN = [
    *seen(queued, f"{_SLURM}.time=10"),
    *seen(queued, f"{_SLURM}.setup=a", f"{_SLURM}.extra=['--x']"),
    *seen(queued, f"{_SLURM}.container=a"),
    *seen(
        queued,
        f"{_SLURM}.mounts=['/a:/b']",
        beside=f"{_SLURM}.container=a",
    ),
    *proven(
        "tests/test_command_line.py::"
        "test_a_sweep_of_the_users_own_config_runs_every_job_in_a_folder_of_its_own",
        "run.dir={folder}",
    ),
    *seen(loop, "run.seed=1"),
    *seen(placed, "cluster.num_nodes=2", f"{_GPU[:-1]}2", "cluster.cpu_workers_per_node=2"),
    *seen(placed, "cluster.cpus_per_worker=2"),
    *proven(
        "tests/test_network.py::test_the_configured_interface_wins_over_all",
        "cluster.network_interface=eth0",
    ),
    *proven(
        "tests/test_remote_code.py::test_code_of_a_model_is_refused_without_a_question",
        "policy.trust_remote_code=true",
    ),
    *proven(
        f"{_HERE}limits_of_waits_end_a_run",
        "cluster.start_timeout_s=5",
        "cluster.call_timeout_s=5",
    ),
    *seen(loop, "logging.sinks=[tensorboard]"),
    *proven(
        "tests/test_data.py::test_template_switches_reach_every_text_that_is_rendered",
        "data.template_switches={{think: false}}",
    ),
    *seen(placed, "policy.parallel.replicate_size=2", beside=_RANKS),
]

_SAVES = "checkpoint.every_steps=1"
_KEPT = f"checkpoint.keep_last=1 {_SAVES}"
_RESUMED = "run.resume=true run.dir={folder} checkpoint.every_steps=1"
TRAINING = [
    *ANY_RUN,
    *seen(again, "run.resume=true", beside="run.dir={folder}"),
    *seen(queued, f"{_SLURM}.requeue=true", beside=_RESUMED),
    *seen(loop, "checkpoint.every_steps=2"),
    *seen(loop, "checkpoint.keep_last=1", beside=_SAVES),
    *proven(
        "tests/test_stops.py::"
        "test_a_run_saves_by_time_and_reasons_that_coincide_make_one_checkpoint",
        "checkpoint.every_minutes=1",
    ),
    *proven(
        "tests/test_stops.py::test_what_takes_longer_than_the_grace_is_abandoned",
        "run.stop_grace_s=5",
    ),
    *proven(
        "tests/test_callbacks.py::test_a_callback_hears_of_everything_and_may_end_the_run",
        "run.callbacks={{stop: {{callback: early_stopping}}}}",
    ),
    *seen(loop, "checkpoint.metric=train/loss", beside=_KEPT),
    *seen(loop, "checkpoint.export=false"),
    *seen(trained, "policy.model={other}", "policy.dtype=bfloat16", "policy.compile=true"),
    *seen(trained, "policy.parallel.data_parallel=ddp"),
    *proven(
        f"{_ENGINE}sharded_ranks_reduce_gradients_once_a_step_if_they_keep_parameters",
        "policy.parallel.reshard_after_forward=false",
    ),
    *proven(
        f"{_ENGINE}compressed_gradients_differ_a_little_and_still_train",
        "policy.parallel.ddp.compression=fp16",
        beside=_DDP,
    ),
    *seen(trained, "policy.attention=eager", beside="policy.batching=padded"),
    *seen(trained, "policy.lora.rank=4"),
    *seen(
        trained, "policy.lora.alpha=4", "policy.lora.targets=[q_proj]", beside="policy.lora.rank=4"
    ),
    *seen(trained, f"{_OPTIMIZER}.kind=sgd", f"{_OPTIMIZER}.lr=1e-3", f"{_OPTIMIZER}.beta1=0.5"),
    *seen(trained, f"{_OPTIMIZER}.beta2=0.9", f"{_OPTIMIZER}.eps=1e-3"),
    *seen(trained, f"{_OPTIMIZER}.weight_decay=0.1", f"{_OPTIMIZER}.moments=bfloat16"),
    *seen(trained, f"{_OPTIMIZER}.momentum=0.5", beside=f"{_OPTIMIZER}.kind=sgd"),
    *seen(trained, f"{_SCHEDULER}.kind=linear", f"{_SCHEDULER}.warmup_steps=2"),
    *seen(
        trained,
        f"{_SCHEDULER}.decay_steps=2",
        beside=f"{_SCHEDULER}.kind=wsd {{s}}.max_steps=10",
    ),
    *seen(trained, f"{_SCHEDULER}.min_lr_ratio=0.5", beside=f"{_SCHEDULER}.kind=linear"),
    *seen(trained, "policy.max_grad_norm=0.1", "policy.batching=padded"),
    *seen(trained, "policy.micro_batch_tokens=40", "policy.micro_batch_size=2"),
    *seen(trained, "policy.activation_checkpointing=full"),
    *seen(trained, "policy.activation_offload=true", beside=_GPU),
    *proven(
        "tests/test_plan.py::test_what_is_offloaded_is_on_the_host",
        "policy.offload=all",
        beside=_GPU,
    ),
    *proven(
        f"{_ENGINE}all_checks_pass_where_nothing_is_wrong_and_measure",
        "policy.debug.checks=true",
        beside=_DDP,
    ),
    *seen(trained, "policy.debug.metrics=true"),
    *seen(trained, "policy.debug.hang_report_s=100"),
    *seen(trained, "policy.debug.profile_steps=[1]"),
]

LOGITS = seen(trained, "policy.logprob_chunk_tokens=8") + seen(
    trained, "policy.float32_head=true", beside="policy.dtype=bfloat16"
)
CONTEXT_AND_TENSOR = [
    *seen(
        placed,
        "policy.parallel.context_parallel_size=2",
        "policy.parallel.tensor_parallel_size=2",
        beside=_RANKS,
    ),
    *proven(
        f"{_ENGINE}the_checks_find_one_copy_of_a_layers_norm_on_four_ranks",
        "policy.parallel.sequence_parallel=true",
        beside=f"{_RANKS} policy.parallel.tensor_parallel_size=2",
    ),
]
PIPELINE = [
    *seen(placed, "policy.parallel.pipeline_parallel_size=2", beside=_RANKS),
    *seen(
        placed,
        "policy.parallel.pipeline_schedule=interleaved",
        beside=f"{_RANKS} policy.parallel.pipeline_parallel_size=2",
    ),
]
NO_PIPELINE = [
    *refused(
        "does not go with",
        "policy.parallel.pipeline_parallel_size=2",
        beside=_RANKS,
    ),
    *refused("there is no pipeline", "policy.parallel.pipeline_schedule=gpipe"),
]
SCALAR_HEAD = [
    *refused(
        "does not go with a scalar head",
        "policy.parallel.context_parallel_size=2",
        "policy.parallel.tensor_parallel_size=2",
        beside=_RANKS,
    ),
    *refused("set policy.parallel.tensor_parallel_size", "policy.parallel.sequence_parallel=true"),
    *NO_PIPELINE,
]

_FILE = (
    "data.num_train_rows=4000",
    "validation.every_steps=5",
    "data.num_validation_rows=256",
    "environment.reward=math",
)
_VALIDATED = ("data.validation={prompts}", *_FILE[2:])
_OWN = "environment.reward=nemo_like.data.reasoning_gym.reward"
_JUDGE = "tests/test_judge.py::test_"
_JUDGED = "environment.reward=judge environment.judge.url=http://x environment.judge.model=a"
_TALKS = "environment.name=guess"
_SCORED = "environment.reward=reward_model environment.reward_model={scores}"
ENGINES = [
    *proven(
        "tests/test_mps.py::test_a_run_asks_for_it_where_it_can_have_it",
        "cluster.mps=true",
        beside=f"{_GPU} generation.num_engines_per_bundle=2",
    ),
    *seen(placed, "cluster.num_generation_workers=1", beside="cluster.cpu_workers_per_node=2"),
    *seen(loop, "generation.backend=hf", "generation.engine_kwargs={{max_num_seqs: 3}}"),
    *seen(placed, "generation.tensor_parallel_size=2", beside="cluster.cpu_workers_per_node=2"),
    *seen(placed, "generation.num_engines_per_bundle=2"),
    *seen(loop, "generation.sleep=false", beside=_GPU),
    *seen(loop, "refit.transport=broadcast"),
    Seen("data.validation={prompts}", (), loop, _FILE[2:]),
    *seen(loop, "data.tasks={{gcd: {{}}}}", "data.num_validation_rows=8", "data.system_prompt=Hi"),
    *seen(loop, "environment.reward=math", "environment.timeout_s=3"),
    *seen(loop, "environment.num_processes=2", "environment.process_memory_gib=2"),
    *seen(loop, "environment.rows_at_once=8", beside=_OWN),
    *seen(loop, "environment.name=guess"),
    *seen(loop, "environment.rewards={{one: {{function: math}}}}"),
    *proven(
        f"{_JUDGE}a_verdict_is_the_last_score_in_the_judges_words",
        "environment.judge.verdicts={{a: 1}}",
        beside=_JUDGED,
    ),
    *proven(
        f"{_JUDGE}a_template_has_the_row_and_only_the_named_key_is_sent",
        "environment.judge.template={prompts}",
        "environment.judge.parameters={{temperature: 0}}",
        "environment.judge.url=http://y",
        "environment.judge.model=b",
        beside=_JUDGED,
    ),
    *proven(
        f"{_JUDGE}what_is_no_verdict_is_a_failure_and_not_a_reward_of_0",
        "environment.judge.pattern=(.)",
        beside=_JUDGED,
    ),
    *proven(
        f"{_JUDGE}a_judge_that_hangs_or_is_down_costs_its_rows_in_time",
        beside=_JUDGED,
    ),
    *proven(
        "tests/test_tasks.py::test_a_run_of_several_tasks_logs_and_trains_each",
        "environment.tasks={{game: {{name: guess}}}}",
    ),
    *proven(
        "tests/test_rollout.py::test_more_failed_rewards_than_are_allowed_stop_a_run",
        "environment.max_failed_share=0.5",
    ),
    *seen(loop, "environment.options={{high: 9}}", beside=_TALKS),
    *seen(loop, "environment.max_turns=3", "environment.max_tokens=200", beside=_TALKS),
    *seen(loop, "environment.trajectory_timeout_s=5", beside=_TALKS),
    *seen(loop, "environment.pass_variables=[JUDGE_KEY]", beside=_OWN),
    *proven(
        "tests/test_code_reward.py::test_options_reach_the_programs",
        "environment.code_credit=partial",
        "environment.code_seconds=1",
        "environment.code_memory_gib=1",
        beside="environment.reward=code",
    ),
    *seen(loop, "environment.reward_model={other_scores}", beside=_SCORED),
]
ROLLOUTS = [
    *TRAINING,
    *ENGINES,
    *seen(loop, "policy.lora.refit=adapters", beside="policy.lora.rank=4"),
    *seen(loop, "generation.temperature=0.5"),
    *proven(_LIMIT, "logging.trajectories_gib=1"),
    *seen(loop, "generation.max_new_tokens=20", "generation.stop=[x]"),
    *seen(loop, "mismatch.action=stop"),
    *seen(loop, "mismatch.max_mean_abs=1e-5", beside="mismatch.action=stop"),
    *refused("step moves weights", "policy.parallel.ddp.average_every_steps=2", beside=_DDP),
    Seen("data.train={prompts}", (), loop, _FILE),
    *seen(loop, "data.num_train_rows=30", "data.shuffle=false"),
    Seen("data.columns={{prompt: answer, answer: prompt}}", ("data.train={prompts}", *_FILE), loop),
    Seen("data.overlong=drop", ("data.train={overlong_prompts}", *_FILE), loop),
    *seen(loop, "validation.num_generations_per_prompt=2", "validation.temperature=0.5"),
    *seen(loop, "validation.top_p=0.5", "validation.top_k=5", "validation.max_new_tokens=9"),
    *seen(loop, "validation.every_steps=2", "{s}.max_steps=5"),
    *seen(loop, "{s}.num_prompts_per_step=4", "{s}.num_generations_per_prompt=3"),
]

_TWO = "{s}.num_mini_batches=2"
POLICY_GRADIENT = [
    *ROLLOUTS,
    *LOGITS,
    *seen(loop, "{s}.num_epochs_per_batch=2", _TWO),
    *seen(loop, "loss.objective=reinforce"),
    *seen(
        loop,
        "loss.ratio_level=sequence",
        "loss.clip_low=0.1",
        "loss.clip_high=0.1",
        "loss.dual_clip=1.5",
        beside=_TWO,
    ),
    *proven(
        "tests/test_quantization.py::"
        "test_each_refit_rounds_the_new_weights_and_leaves_none_of_the_old",
        "generation.quantization=fp8",
        beside="policy.dtype=bfloat16",
    ),
    *seen(loop, "loss.normalization=sequence"),
    *seen(loop, "loss.constant_tokens=7", beside="loss.normalization=constant"),
    *seen(loop, "loss.importance=none", "loss.importance_level=sequence"),
    *seen(loop, "rollout.max_lag=1"),
    *proven(
        "tests/test_lag.py::test_no_group_is_ever_older_than_the_lag_and_none_is_lost",
        "rollout.order=ready",
        beside="rollout.max_lag=1",
    ),
    *seen(loop, "loss.importance_cap=1.2", "loss.entropy_coef=0.1", "loss.kl_coef=0.1"),
    *seen(loop, "loss.importance_floor=0.8", beside="loss.importance=mask"),
    *seen(loop, "loss.kl_estimator=k1", "loss.kl_in=reward", beside="loss.kl_coef=0.1"),
]
GRPO = [
    *POLICY_GRADIENT,
    *proven(
        "tests/test_overlap.py::test_a_step_in_parts_is_the_plain_step",
        "rollout.overlap=true",
    ),
    *CONTEXT_AND_TENSOR,
    *PIPELINE,
    *seen(loop, "grpo.dynamic_sampling=true", "grpo.mask_truncated=true"),
    *proven(_OUTSIDE, "advantage.function=json:loads"),
    *seen(loop, "advantage.baseline=mean", "advantage.scale=none"),
    *proven(
        "tests/test_several_rewards.py::"
        "test_each_reward_is_normalised_in_its_group_then_added_then_the_step_is",
        "advantage.each_reward=true",
        beside='environment.rewards={{"one":{{"function":"math"}}}}',
    ),
    *proven(
        "tests/test_step_rewards.py::test_credit_by_step_is_what_the_paper_says",
        "advantage.credit=step",
        beside=f"advantage.baseline=mean {_TALKS}",
    ),
    *proven(
        "tests/test_tasks.py::test_advantages_of_a_step_are_those_of_each_task_by_choice",
        "advantage.per_task=true",
        beside="advantage.scale=batch",
    ),
    *seen(loop, "advantage.overlong_buffer_tokens=14"),
    *seen(loop, "advantage.count_untrained=true", beside="grpo.mask_truncated=true"),
]
PPO = [
    *POLICY_GRADIENT,
    *refused("PPO whitens advantages", "rollout.overlap=true"),
    *SCALAR_HEAD,
    *seen(loop, "ppo.gamma=0.9", "ppo.lam=0.5"),
    *seen(loop, "ppo.num_critic_warmup_steps=1"),
    *seen(loop, "critic.enabled=false", beside="ppo.lam=1"),
    *seen(critic_trained, "critic.model={other}"),
    *seen(critic_trained, "critic.lr=1e-3"),
    *seen(loop, "value_loss.clip=0.01", beside=_TWO),
]
_TEACHER = [
    *seen(loop, "teacher.model={other}"),
    *seen(loop, "teacher.top_k=3", "loss.kind=reverse_kl", "loss.tail=ignore"),
    *seen(loop, "loss.alpha=0.3", beside="loss.kind=jsd"),
]
_EXACT = refused("this run does not correct", "generation.quantization=fp8")
DISTILLATION = [*ROLLOUTS, *LOGITS, *CONTEXT_AND_TENSOR, *NO_PIPELINE, *_TEACHER, *_EXACT]

_ONE_EPOCH = (
    "data.num_train_rows=4000",
    "validation.every_steps=20",
    "data.num_validation_rows=256",
)
_NO_SAMPLES = (
    "cluster.num_generation_workers=1",
    "logging.trajectories_gib=1",
)
TEXTS = [
    *TRAINING,
    *refused("this run samples no completions", *_NO_SAMPLES),
    *refused("no processes of this run compute on one GPU", "cluster.mps=true", beside=_GPU),
    *refused("no engines to refit", "policy.lora.refit=adapters", beside="policy.lora.rank=4"),
    *proven(
        f"{_ENGINE}local_sgd_averages_every_so_many_steps_and_before_weights_leave",
        "policy.parallel.ddp.average_every_steps=2",
        beside=_DDP,
    ),
    *seen(loop, "validation.every_steps=2", "{s}.num_epochs=2", "{s}.max_steps=2"),
    *seen(loop, "data.tasks={{gcd: {{}}}}", "data.num_train_rows=30", "data.num_validation_rows=8"),
    *seen(loop, "data.system_prompt=Hi", "data.shuffle=false"),
    *seen(loop, "data.max_length=38", beside="data.overlong=truncate_right"),
    *seen(loop, "data.overlong=drop", beside="data.max_length=38"),
]
_TEXTS = ("data.train={texts}", *_ONE_EPOCH)
_PAIRS = ("data.train={pairs}", *_ONE_EPOCH)
ROWS = [
    *TEXTS,
    Seen("data.train={texts}", (), loop, _ONE_EPOCH),
    Seen("data.validation={texts}", (), loop, _ONE_EPOCH[2:]),
    Seen("data.columns={{prompt: completion, completion: prompt}}", _TEXTS, loop),
    *seen(loop, "{s}.num_rows_per_step=5"),
    *seen(loop, "data.train_on=all"),
]
PAIRS = [
    *TEXTS,
    Seen("data.train={pairs}", (), loop, _ONE_EPOCH),
    Seen("data.validation={pairs}", (), loop, _ONE_EPOCH[2:]),
    Seen("data.columns={{chosen: rejected, rejected: chosen}}", _PAIRS, loop),
    *seen(loop, "{s}.num_pairs_per_step=2"),
]
SFT = [*ROWS, *LOGITS, *CONTEXT_AND_TENSOR, *PIPELINE]
DPO = [
    *PAIRS,
    *LOGITS,
    *CONTEXT_AND_TENSOR,
    *PIPELINE,
    *seen(loop, "loss.kind=ipo", "loss.beta=0.5"),
    *seen(loop, "loss.length_normalized=true", "loss.reference_free=true"),
    *seen(loop, "loss.target_margin=0.1", "loss.label_smoothing=0.1", "loss.sft_coef=0.1"),
]
REWARD_MODEL = [
    *PAIRS,
    *SCALAR_HEAD,
    *refused("no logits", "policy.logprob_chunk_tokens=8"),
    *refused("multiplied in float32", "policy.float32_head=true", beside="policy.dtype=bfloat16"),
    *seen(loop, "loss.center_coef=0.1", "loss.label_smoothing=0.1"),
]
OFF_POLICY_DISTILLATION = [
    *ROWS,
    *LOGITS,
    *CONTEXT_AND_TENSOR,
    *NO_PIPELINE,
    *_TEACHER,
    *proven(
        f"{_HERE}the_temperature_of_given_texts_reaches_both_models", "distillation.temperature=2"
    ),
]

_NOTHING_TRAINS = (
    "policy.float32_head=true "
    "policy.parallel.reshard_after_forward=false policy.parallel.sequence_parallel=true "
    "policy.parallel.pipeline_schedule=gpipe "
    "policy.parallel.ddp.compression=fp16 "
    "policy.parallel.ddp.average_every_steps=2 policy.attention=eager policy.optimizer.kind=sgd "
    "policy.optimizer.lr=1 policy.optimizer.beta1=0.5 policy.optimizer.beta2=0.5 "
    "policy.optimizer.eps=1 policy.optimizer.moments=int8 policy.optimizer.momentum=0.5 "
    "policy.optimizer.weight_decay=1 "
    "policy.scheduler.kind=linear policy.scheduler.warmup_steps=1 "
    "policy.scheduler.decay_steps=1 policy.scheduler.min_lr_ratio=0.5 policy.max_grad_norm=2 "
    "policy.batching=padded policy.micro_batch_tokens=9000 policy.micro_batch_size=1 "
    "policy.logprob_chunk_tokens=8 policy.compile=true policy.activation_checkpointing=full "
    "policy.activation_offload=true policy.debug.checks=true "
    "policy.debug.metrics=true policy.debug.hang_report_s=100 policy.debug.profile_steps=[1] "
    "checkpoint.every_steps=1 checkpoint.every_minutes=1 "
    "checkpoint.keep_last=1 checkpoint.metric=train/loss "
    "checkpoint.export=false"
)
EVAL = [
    *ANY_RUN,
    *refused("SIGTERM ends it at once", "run.stop_grace_s=5"),
    *ENGINES,
    *proven(
        "tests/test_quantization.py::"
        "test_an_evaluation_may_sample_in_8_bits_and_distillation_may_not",
        "generation.quantization=fp8",
        beside="policy.dtype=bfloat16",
    ),
    *CONTEXT_AND_TENSOR[:2],
    *PIPELINE[:1],
    *refused("an evaluation trains nothing", *_NOTHING_TRAINS.split()),
    *refused("no checkpoint to continue from", "run.resume=true"),
    *refused("has no steps to follow", "run.callbacks={{stop: {{callback: early_stopping}}}}"),
    *refused("nothing is compared", "mismatch.action=stop"),
    *refused("nothing is compared", "mismatch.max_mean_abs=1"),
    Refused("data.train={prompts}", _FILE[2:], "set data.validation"),
    *refused("reads validation rows only", "data.num_train_rows=30"),
    *refused("its order changes nothing", "data.shuffle=false"),
    *seen(placed, "policy.parallel.data_parallel=ddp", beside=_RANKS),
    *proven(
        "tests/test_evaluation.py::test_another_checkpoint_gives_other_completions",
        "policy.model={other}",
    ),
    *seen(loop, "policy.dtype=bfloat16"),
    *refused("is a full model", "policy.lora.rank=4"),
    *refused("there are no adapters", "policy.lora.alpha=4", "policy.lora.targets=[q_proj]"),
    *refused("there are no adapters", "policy.lora.refit=adapters"),
    *refused("no optimizer state", "policy.offload=optimizer", beside=_GPU),
    *proven(_LIMIT, "logging.trajectories_gib=1"),
    *refused("needs run.resume=true", f"{_SLURM}.requeue=true"),
    *refused("as the section validation says", "generation.temperature=0.5"),
    *refused("measures once", "validation.every_steps=2"),
    *seen(loop, "generation.max_new_tokens=20", "generation.stop=[x]"),
    *seen(loop, "validation.num_generations_per_prompt=3"),
    *seen(loop, "validation.temperature=0.5", "validation.top_p=0.5", "validation.top_k=5"),
    Seen("validation.max_new_tokens=9", (), loop, ("generation.max_new_tokens=64",)),
    Seen("data.columns={{prompt: answer, answer: prompt}}", _VALIDATED, loop),
    Seen("data.overlong=drop", ("data.validation={overlong_prompts}", *_FILE[2:]), loop),
    *seen(loop, "eval.pass_at=[2]", "eval.majority_at=[2]", "eval.pass_reward=0.5"),
    *seen(loop, "eval.category_field=task"),
]

_OFTEN = "validation.every_steps=1"
_HELD_OUT = ("data.num_validation_rows=6", "logging.sinks=[]")
_SMALL = (*_HELD_OUT, "data.num_train_rows=24")
_SAMPLED = ("generation.max_new_tokens=16", "{s}.num_prompts_per_step=8")
_LOOP = (*_SMALL, *_SAMPLED, _OFTEN, "{s}.max_steps=4")
_ROWS = (*_SMALL, _OFTEN, "{s}.num_rows_per_step=6")
_PAIRS = (*_SMALL, _OFTEN, "{s}.num_pairs_per_step=3")
_TAUGHT = ("teacher.model=embedded",)


def by_key(*parts: Iterable[Entry]) -> dict[str, Entry]:
    """Entries by key, which must differ."""
    entries = [entry for part in parts for entry in part]
    table = {entry.key: entry for entry in entries}
    assert len(table) == len(entries), "a key has two entries"
    return table


TABLES: dict[str, tuple[list[Entry], tuple[str, ...]]] = {
    "grpo": (GRPO, _LOOP),
    "ppo": (PPO, _LOOP),
    "sft": (SFT, _ROWS),
    "dpo": (DPO, _PAIRS),
    "rm": (REWARD_MODEL, _PAIRS),
    "eval": (EVAL, (*_HELD_OUT, _SAMPLED[0], "validation.num_generations_per_prompt=2")),
    "distillation": (DISTILLATION, (*_LOOP, *_TAUGHT)),
    "off_policy_distillation": (OFF_POLICY_DISTILLATION, (*_ROWS, *_TAUGHT)),
}
"""By the name of the schema: its entries, and what makes its runs small."""
