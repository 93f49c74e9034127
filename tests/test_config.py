"""Configuration: strict keys, the nearest valid one named, and no key without an effect."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from nemo_like.algorithms.grpo.config import GRPOConfig
from nemo_like.compose import registry
from nemo_like.compose.load import check, compose_config, compose_raw
from nemo_like.compose.overrides import check_overrides
from nemo_like.config.run import ClusterConfig
from nemo_like.config.section import keys_of
from nemo_like.config.typed import as_typed
from nemo_like.errors import UserError
from nemo_like.planning.resources import NodeResources, check_fits, plan_resources

CONFIGS = Path(__file__).parent.parent / "configs"
SHIPPED = [
    ("grpo", ["model=embedded"]),
    ("grpo", ["model=smollm2"]),
    *((name, []) for name in registry.names() if name != "grpo"),
]


def refusal(*overrides):
    with pytest.raises(UserError) as error:
        compose_config(CONFIGS, "grpo", overrides)
    return str(error.value)


@pytest.mark.parametrize(("name", "choice"), SHIPPED, ids=str)
def test_every_schema_key_can_be_overridden_in_every_shipped_config(name, choice):
    raw, schema = compose_raw(CONFIGS, name, choice).raw, registry.find(name).config
    leaves = [key for key, _ in keys_of(schema) if not hasattr(value(raw, key), "keys")]
    assert len(leaves) > 60
    for key in leaves:
        check_overrides([f"{key}={literal(value(raw, key))}"], schema)
    overrides = [f"{key}={literal(value(raw, key))}" for key in leaves]
    assert compose_raw(CONFIGS, name, [*choice, *overrides]).raw == raw


def test_sizes_that_do_not_divide_each_other_are_accepted():
    sizes = ("num_prompts_per_step=3", "num_generations_per_prompt=8", "num_mini_batches=2")
    workers = ("cluster.cpu_workers_per_node=2", "policy.micro_batch_size=5")
    compose_config(CONFIGS, "grpo", [*(f"grpo.{one}" for one in sizes), *workers])


def value(raw, key):
    for part in key.split("."):
        raw = raw[part]
    return raw


def literal(value):
    if value is None:
        return "null"
    return f"'{value}'" if isinstance(value, str) and value else str(value)


def test_the_default_config_is_the_schema():
    assert compose_config(CONFIGS, "grpo") == GRPOConfig()


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("polcy.lr", "policy.optimizer.lr"),
        ("policy.lr", "policy.optimizer.lr"),
        ("grpo.num_prompts_per_steps", "grpo.num_prompts_per_step"),
        ("lr", "policy.optimizer.lr"),
        ("validation.temprature", "validation.temperature"),
        ("policy.optimizer.beta", "policy.optimizer.beta1 or policy.optimizer.beta2"),
        ("generation.max_tokens", "generation.max_new_tokens"),
        ("cluster.num_gpus_per_node", "cluster.gpus_per_node"),
    ],
)
def test_a_misspelt_key_is_answered_with_the_nearest_one(key, nearest):
    assert f"{key} is not a key of the configuration; did you mean {nearest}?" in refusal(
        f"{key}=1"
    )


def test_a_key_added_with_plus_is_refused_too():
    assert "policy.lr is not a key" in refusal("+policy.lr=1")
    assert "policy.lr is not a key" in refusal("++policy.lr=1")


def test_an_unknown_key_in_a_yaml_file_is_refused(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [grpo_schema, _self_]\npolicy:\n  optimiser:\n    lr: 1.0\n"
    )
    with pytest.raises(UserError, match=r"policy\.optimiser is not a key .* policy\.optimizer"):
        compose_config(tmp_path, "mine")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy.optimizer.lr=abc", "policy.optimizer.lr=abc must be a number"),
        ("grpo.max_steps=1.5", "grpo.max_steps=1.5 must be a whole number"),
        ("policy.dtype=fp8", "policy.dtype=fp8 must be one of float32, bfloat16"),
        ("data.shuffle=perhaps", "data.shuffle=perhaps must be true or false"),
        ("policy.compile=5", "policy.compile=5 must be true or false"),
        ("policy.compile=0", "policy.compile=0 must be true or false"),
        ("run.resume='1'", "run.resume=1 must be true or false"),
        ("policy={compile: 1}", "policy.compile=1 must be true or false"),
        ("grpo.max_steps=0", "grpo.max_steps=0 must be at least 1"),
        ("policy.optimizer.lr=-1", "policy.optimizer.lr=-1 must be above 0"),
        ("policy.optimizer.lr=nan", "policy.optimizer.lr=nan must be a finite number"),
        ("validation.top_p=1.5", "validation.top_p=1.5 must be in [1e-06, 1]."),
        ("grpo.num_generations_per_prompt=1", "a group of one has no baseline"),
        ("policy=3", "policy is a section"),
        ("model=gpt5", "model=gpt5 is not a choice; use one of embedded, smollm2"),
        ("grpo.max_steps=1,2", "--multirun"),
        ("policy.micro_batch_tokens=60", "policy.micro_batch_tokens=60 cannot hold"),
        ("policy.scheduler.warmup_steps=40", "must be below grpo.max_steps=40"),
        ("run.resume=true", "run.resume=true needs run.dir"),
        ("checkpoint.metric=val:accuracy", "checkpoint.metric=val:accuracy is not a metric"),
        ("environment.reward=exact", "environment.reward=exact is not known"),
        ("environment.reward=no.py:f", "there is no file no.py"),
        ("data.train=no.jsonl", "data.train=no.jsonl: no such file"),
        ("policy.model=/no/such", "policy.model=/no/such: no such folder"),
        ("cluster.num_generation_workers=1", "needs at least two workers"),
        ("refit.transport=disk", "must be one of ipc, broadcast"),
        ("run.dir=", "run.dir='': empty text has no meaning here; leave it out"),
        ("generation.stop=['']", "generation.stop=['']: empty text has no meaning here"),
        ("run.seed=99999999999999999999", "run.seed=99999999999999999999 must be below 2147483648"),
        ("cluster.gpus_per_node=99999999999999999999", "must be below 2147483648"),
        ("loss.kl_coef=inf", "loss.kl_coef=inf must be a finite number"),
        ("validation.temperature=inf", "validation.temperature=inf must be a finite number"),
        ("validation.temperature=0.001", "must be at least 0.01, or 0, which is greedy"),
        ("generation.temperature=0.001", "generation.temperature=0.001 must be at least 0.01."),
        ("grpo.max_steps=null", "grpo.max_steps=null: this key needs a value"),
        ("policy.lora.targets=q_proj", "must be a list; put brackets around it: policy.lora.targ"),
        ("data.tasks=[chain_sum]", "data.tasks must be a dictionary"),
        ("loss.importance_cap=0", "loss.importance_cap=0 must be above 0"),
        ("mismatch.max_mean_abs=0", "mismatch.max_mean_abs=0 must be above 0"),
        ("environment.tasks={a: {max_turns: 0}}", "tasks.a.max_turns=0 must be at least 1"),
    ],
)
def test_a_bad_value_is_refused_with_key_value_and_rule(override, message):
    assert message in refusal(override)


@pytest.mark.parametrize(
    ("algorithm", "override", "sentence"),
    [
        ("ppo", "ppo.num_generations_per_prompt=0", "must be at least 1."),
        ("eval", "validation.num_generations_per_prompt=0", "must be at least 1."),
        ("distillation", "distillation.num_generations_per_prompt=0", "must be at least 1."),
        ("dpo", "policy.micro_batch_size=1", "holds no pair of rows; use at least 2."),
        ("rm", "policy.micro_batch_size=1", "holds no pair of rows; use at least 2."),
        (
            "grpo",
            "grpo.num_generations_per_prompt=1",
            "must be at least 2, as a group of one has no baseline; raise it, or set it to 1 with "
            "advantage.baseline=none.",
        ),
        (
            "grpo grpo.dynamic_sampling=true advantage.baseline=none",
            "grpo.num_generations_per_prompt=1",
            "must be at least 2, as a group of one always has equal rewards; raise it, or set it "
            "to 1 with grpo.dynamic_sampling=false.",
        ),
        (
            "grpo advantage.baseline=none",
            "grpo.num_generations_per_prompt=0",
            "must be at least 1.",
        ),
        (
            "grpo",
            "generation.temperature=0",
            "; only validation and evaluation have greedy sampling.",
        ),
        ("grpo", "cluster.num_generation_workers=0", "must be at least 1, or null to colocate."),
        ("dpo", "loss.label_smoothing=-1", "must be in [0, 0.5); "),
        ("dpo", "loss.label_smoothing=0.7", "if most labels are wrong, swap chosen and rejected."),
        ("eval", "run.resume=true", "an evaluation saves no checkpoint to continue from"),
        (
            "eval",
            "data.train=rows.jsonl",
            "an evaluation reads validation rows only; set data.vali",
        ),
    ],
)
def test_each_refusal_gives_the_reason_of_its_own_key(algorithm, override, sentence):
    name, *beside = algorithm.split()
    beside += ["teacher.model=embedded"] if name == "distillation" else []
    with pytest.raises(UserError) as refused:
        compose_config(CONFIGS, name, [*beside, override])
    assert str(refused.value).startswith(override.partition("=")[0])
    assert sentence in str(refused.value)
    assert "baseline" not in str(refused.value) or "baseline" in sentence


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("loss.kl_estimator=k1", "loss.kl_coef is 0"),
        ("loss.importance_floor=0.1", "only loss.importance=mask has a lower bound"),
        ("policy.scheduler.min_lr_ratio=0.5", "a constant schedule has no minimum"),
        ("policy.attention=eager", "packed rows have their own attention"),
        ("policy.optimizer.momentum=0.5", "only policy.optimizer.kind=sgd and muon have it"),
        ("policy.scheduler.decay_steps=5", "only policy.scheduler.kind=wsd has it"),
        ("policy.float32_head=true", "policy.dtype=float32 computes everything in float32"),
        ("policy.offload=all", "the run uses no GPU; set cluster.gpus_per_node"),
        ("policy.offload=optimizer", "the run uses no GPU; set cluster.gpus_per_node"),
        ("policy.activation_offload=true", "the run uses no GPU; set cluster.gpus_per_node"),
        ("policy.parallel.ddp.compression=powersgd", "set policy.parallel.data_parallel=ddp"),
        ("policy.parallel.ddp.average_every_steps=2", "set policy.parallel.data_parallel=ddp"),
        ("policy.parallel.sequence_parallel=true", "set policy.parallel.tensor_parallel_size"),
        ("policy.parallel.pipeline_schedule=gpipe", "there is no pipeline; set policy.parallel"),
        ("policy.debug.checks=true", "the policy has one rank"),
    ],
)
def test_a_key_that_would_do_nothing_is_refused(override, why):
    key = override.partition("=")[0]
    message = refusal(override)
    assert message.startswith(f"{key}=")
    assert "would have no effect" in message
    assert why in message


RANKS = "cluster.cpu_workers_per_node=4"
DDP = "policy.parallel.data_parallel=ddp"


@pytest.mark.parametrize(
    ("overrides", "key", "why"),
    [
        (["policy.optimizer.kind=sgd", "policy.optimizer.beta1=0.8"], "policy.optimizer.beta1", ""),
        (["policy.optimizer.kind=adafactor", "policy.optimizer.eps=1"], "policy.optimizer.eps", ""),
        (
            [
                DDP,
                RANKS,
                "policy.parallel.ddp.average_every_steps=4",
                "policy.debug.checks=true",
            ],
            "policy.debug.checks",
            "average_every_steps above 1",
        ),
        (
            [DDP, "policy.parallel.ddp.compression=fp16"],
            "policy.parallel.ddp.compression",
            "the policy has one rank",
        ),
    ],
)
def test_a_key_that_would_do_nothing_beside_others_is_refused(overrides, key, why):
    message = refusal(*overrides)
    assert message.startswith(f"{key}=")
    assert "would have no effect" in message
    assert why in message


@pytest.mark.parametrize(
    ("overrides", "problem", "remedy"),
    [
        ([DDP, "tensor_parallel_size=2"], "tensor_parallel_size=2 does not go with", "=fsdp or"),
        ([DDP, "pipeline_parallel_size=2"], "pipeline_parallel_size=2 does not go with", "=fsdp"),
        ([DDP, "context_parallel_size=2"], "context_parallel_size=2 does not go with", "=fsdp or"),
        ([DDP, "replicate_size=2"], "replicate_size=2 does not go with", "replicate_size=1."),
        ([DDP, "reshard_after_forward=false"], "reshard_after_forward=false", "leave it true"),
        ([DDP, "policy.dtype=float16"], "policy.dtype=float16 does not go", "=bfloat16"),
        (
            [DDP, "ddp.average_every_steps=2", "ddp.compression=bf16"],
            "ddp.compression=bf16 does not go with average_every_steps=2",
            "average_every_steps=1.",
        ),
        (
            [DDP, "ddp.compression=bf16"],
            "ddp.compression=bf16 needs NCCL",
            "use fp16",
        ),
        (
            [DDP, "ddp.compression=powersgd"],
            "ddp.compression=powersgd needs NCCL",
            "use fp16",
        ),
        (
            [DDP, "ddp.compression=powersgd", "grpo.max_steps=10"],
            "powersgd begins after 10 optimizer steps, and the last is grpo.max_steps=10",
            "set it to none",
        ),
        ([DDP, "ddp.average_every_steps=2"], "would have no effect here", "set it to 1"),
        (["tensor_parallel_size=3"], "tensor_parallel_size=3 does not divide", "1, 2, 4"),
        (
            ["tensor_parallel_size=2", "policy.compile=true"],
            "tensor_parallel_size=2 does not go with policy.compile=true",
            "leave one of them out",
        ),
        (
            ["tensor_parallel_size=2", "context_parallel_size=4"],
            "does not divide the policy's 4 ranks; their product must be one of 1, 2, 4",
            "or change cluster sizes",
        ),
        (["context_parallel_size=2", "policy.batching=padded"], "=2 does not go", "=packed."),
        (
            ["pipeline_parallel_size=2", "policy.batching=shared"],
            "tensors of one shape",
            "=packed.",
        ),
        (
            ["policy.micro_batch_size=2", "policy.batching=shared"],
            "policy.micro_batch_size=2 would have no effect",
            "policy.micro_batch_tokens alone decides",
        ),
        (
            ["tensor_parallel_size=2", "policy.optimizer.moments=int8"],
            "policy.optimizer.moments=int8 has a scale for 256 numbers",
            "moments=bfloat16",
        ),
        (
            ["tensor_parallel_size=4", "cluster.cpu_workers_per_node=2", "cluster.num_nodes=2"],
            "tensor_parallel_size=4 does not divide the 2 policy ranks of a node",
            "use 1 or 2.",
        ),
        (
            [
                "tensor_parallel_size=2",
                "cluster.gpus_per_node=3",
                "cluster.cpu_workers_per_node=1",
                "cluster.num_nodes=2",
            ],
            "the 3 policy ranks of a node (cluster.gpus_per_node=3)",
            "use 1 or 3.",
        ),
        (["replicate_size=0"], "policy.parallel.replicate_size=0 must be at least 1", ""),
    ],
)
def test_a_layout_that_cannot_work_is_refused_with_a_remedy(overrides, problem, remedy):
    short = ("policy.", "cluster.", "grpo.")
    full = [one if one.startswith(short) else f"policy.parallel.{one}" for one in overrides]
    message = refusal(RANKS, *full)
    assert problem in message
    assert remedy in message


def test_ddp_keeps_its_parameters_on_the_gpu():
    message = refusal(DDP, "policy.offload=all", "cluster.gpus_per_node=4")
    assert "policy.offload=all does not go" in message
    assert "policy.offload=none." in message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["policy.optimizer.momentum=1"], "policy.optimizer.momentum=1 must be in [0, 1)"),
        (["policy.scheduler.decay_steps=0"], "policy.scheduler.decay_steps=0 must be at least 1"),
        (
            ["policy.scheduler.kind=wsd", "policy.scheduler.warmup_steps=31"],
            "policy.scheduler.decay_steps=10 and warmup_steps=31 together must be at most "
            "grpo.max_steps=40; lower them",
        ),
        (
            ["policy.scheduler.warmup_steps=160", "grpo.num_mini_batches=4"],
            "must be below 160, the optimizer steps that grpo.max_steps=40 come to, or the peak",
        ),
        (["policy.debug.hang_report_s=0"], "hang_report_s=0 must be above 0"),
        (["policy.debug.profile_steps=[99]"], "the run ends at optimizer step 40, before 99"),
        (["policy.debug.hang_report_s=1800"], "must be below cluster.call_timeout_s=1800"),
    ],
)
def test_precision_schedule_and_debugging_have_their_rules(overrides, message):
    assert message in refusal(*overrides)


def test_a_warm_up_is_of_optimizer_steps_of_which_a_step_may_take_several():
    updates = ["grpo.num_mini_batches=4", "policy.scheduler.warmup_steps=159"]
    compose_config(CONFIGS, "grpo", updates)
    late = ["ppo.num_critic_warmup_steps=30", "policy.scheduler.warmup_steps=10"]
    with pytest.raises(UserError, match="must be below 10, the optimizer steps that ppo"):
        compose_config(CONFIGS, "ppo", late)


GPUS = "cluster.gpus_per_node=8"
INTERLEAVED = "policy.parallel.pipeline_schedule=interleaved"


@pytest.mark.parametrize(
    "overrides",
    [
        [DDP, GPUS, "policy.parallel.ddp.compression=powersgd", "policy.dtype=bfloat16"],
        [DDP, RANKS, "policy.parallel.ddp.compression=fp16", "policy.dtype=bfloat16"],
        [RANKS, "policy.parallel.pipeline_parallel_size=2", "policy.compile=true", INTERLEAVED],
        [GPUS, "policy.parallel.replicate_size=2", "policy.debug.checks=true"],
        [GPUS, "policy.parallel.context_parallel_size=4", "policy.offload=all"],
        ["policy.offload=none", "policy.optimizer.moments=int8"],
        [GPUS, "policy.dtype=bfloat16", "policy.float32_head=true"],
        ["policy.dtype=float16"],
        ["policy.optimizer.kind=muon", "policy.optimizer.momentum=0.9"],
        ["policy.scheduler.kind=wsd", "policy.scheduler.warmup_steps=30"],
        ["policy.scheduler.kind=wsd", "policy.scheduler.min_lr_ratio=0.1"],
    ],
    ids=str,
)
def test_layouts_that_work_are_accepted(overrides):
    compose_config(CONFIGS, "grpo", [*overrides, "grpo.num_prompts_per_step=16"])


def test_keys_without_effect_for_the_hf_backend_and_file_data(tmp_path):
    assert "generation.backend=vllm does" in refusal(
        "generation.backend=hf", "generation.engine_kwargs={enforce_eager: true}"
    )
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    file = [f"data.train={rows}", "environment.reward=math"]
    assert "data.num_train_rows=5 would have no effect" in refusal(*file, "data.num_train_rows=5")
    assert "there are no validation rows; set data" in refusal(*file, "validation.temperature=0")
    off = ["validation.every_steps=0", "validation.temperature=0"]
    assert refusal(*off).endswith("validation.every_steps=0 turns validation off; raise it.")
    own = "environment.pass_variables=[JUDGE_KEY]"
    assert "environment.reward is not a function of your own" in refusal(own)
    assert "scores one completion after the other" in refusal("environment.rows_at_once=8")
    compose_config(CONFIGS, "grpo", file)
    assert "set environment.reward" in refusal(f"data.train={rows}")


def test_a_data_file_is_read_up_to_its_first_text_only(tmp_path):
    """A terabyte without a block on the disk, after one row: reading it all takes hours."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n" * 70_000 + '{"prompt": "1 + 1", "completion": "2"}\n')
    os.truncate(rows, 2**40)
    compose_config(CONFIGS, "sft", [f"data.train={rows}"])
    rows.write_text("\n \r\n" * 70_000)
    with pytest.raises(UserError, match="is empty; give a file with at least one row"):
        compose_config(CONFIGS, "sft", [f"data.train={rows}"])


@pytest.mark.parametrize(
    ("text", "trap"),
    [("run:\n  dir: 007\n", "007"), ("run:\n  dir: 12:30:00\n", "12:30:00"), ("off: 1\n", "off")],
)
def test_yaml_values_that_change_their_meaning_are_refused(tmp_path, text, trap):
    (tmp_path / "mine.yaml").write_text(f"defaults: [grpo_schema, _self_]\n{text}")
    with pytest.raises(UserError, match=f'put it in quotes: "{trap}"'):
        compose_config(tmp_path, "mine")
    (tmp_path / "mine.yaml").write_text("defaults: [grpo_schema, _self_]\nrun:\n  dir: '007'\n")
    assert compose_config(tmp_path, "mine").run.dir == "007"


def test_a_key_with_dots_in_a_yaml_file_is_answered_with_yaml(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [grpo, _self_]\npolicy.optimizer.lr: 1e-4\n")
    with pytest.raises(UserError, match=r", as in policy: \{optimizer: \{lr: \.\.\.\}\}\.$"):
        compose_raw(CONFIGS, "mine", [], tmp_path).load()


def test_a_dict_override_merges():
    config = compose_config(CONFIGS, "grpo", ["policy.optimizer={lr: 0.1}"])
    assert config.policy.optimizer.lr == 0.1
    assert config.policy.optimizer.beta2 == 0.999


def test_free_dicts_take_any_key():
    overrides = ["data.tasks={gcd: {min_numbers: 2}}", "generation.engine_kwargs.max_num_seqs=8"]
    config = compose_config(CONFIGS, "grpo", overrides)
    assert config.data.tasks == {"gcd": {"min_numbers": 2}}
    assert config.generation.engine_kwargs == {"max_num_seqs": 8}


def test_values_of_python_calls_may_be_in_any_script():
    values = {"run.dir": "runs/grüße", "generation.stop": ["答案", "a答"]}
    composed = compose_raw(CONFIGS, "grpo", as_typed(values | {"policy.model": "/home/józef/m"}))
    assert composed.raw.run.dir == "runs/grüße"
    assert composed.raw.generation.stop == ["答案", "a答"]
    assert composed.raw.policy.model == "/home/józef/m"


def test_numbers_of_numpy_and_torch_are_numbers():
    found = {"lr": np.float64(1e-5), "steps": np.int64(3), "on": np.bool_(True), "ks": [np.int8(1)]}
    assert as_typed(found) == ["lr=1e-05", "steps=3", "on=true", "ks=[1]"]
    assert as_typed({"x": torch.tensor(0.5)}) == ["x=0.5"]


def test_documentation_of_every_key_is_current():
    from nemo_like.compose.help import render

    path = Path(__file__).parent.parent / "docs" / "config.md"
    assert path.read_text() == render(), "run: nemo-like keys > docs/config.md"


def test_shipped_yaml_states_differences_only():
    default = GRPOConfig()
    for path in (CONFIGS / "model").glob("*.yaml"):
        if path.stem == "embedded":
            continue
        for key, given in flatten(yaml.safe_load(path.read_text())):
            current = default
            for part in key.split("."):
                is_dict = current is None or isinstance(current, dict)
                current = (current or {}).get(part) if is_dict else getattr(current, part)
            assert str(given) != str(current), f"{path.name}: {key} repeats the default"


def flatten(tree, prefix=""):
    for name, one in tree.items():
        if isinstance(one, dict):
            yield from flatten(one, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", one


def test_the_schema_passes_its_own_checks():
    check(GRPOConfig())


# The plan: arithmetic of nodes and bundles.


def test_colocated_roles_share_bundles_and_separate_ones_do_not():
    colocated = plan_resources(ClusterConfig(num_nodes=2, gpus_per_node=2), 2)
    assert colocated.policy == (0, 1, 2, 3)
    assert colocated.generation == ((0, 1), (2, 3))
    assert colocated.colocated
    split = plan_resources(ClusterConfig(gpus_per_node=4, num_generation_workers=1), 1)
    assert split.policy == (0, 1, 2)
    assert split.generation == ((3,),)
    assert not split.colocated


@pytest.mark.parametrize(("size", "valid"), [(3, "1 or 2 or 4"), (8, "1 or 2 or 4")])
def test_tensor_parallel_sizes_that_do_not_divide_are_refused(size, valid):
    with pytest.raises(UserError, match=f"tensor_parallel_size={size} .* use {valid}"):
        plan_resources(ClusterConfig(gpus_per_node=4), size)


def nodes(*resources):
    return [
        NodeResources(node_id=str(i), address=f"10.0.0.{i}", resources=one)
        for i, one in enumerate(resources)
    ]


def test_a_plan_that_no_idle_cluster_could_hold_is_refused_with_what_each_node_has():
    plan = plan_resources(ClusterConfig(num_nodes=2, gpus_per_node=8), 1)
    with pytest.raises(UserError) as error:
        check_fits(plan, nodes({"CPU": 64.0, "GPU": 8.0}, {"CPU": 64.0, "GPU": 4.0}))
    message = str(error.value)
    assert "wants 2 node(s) with 8 CPUs and 8 GPUs each" in message
    assert "10.0.0.1: 64 CPUs, 4 GPUs" in message


def test_a_head_without_gpus_is_no_obstacle():
    plan = plan_resources(ClusterConfig(num_nodes=1, gpus_per_node=8), 1)
    check_fits(plan, nodes({"CPU": 4.0}, {"CPU": 64.0, "GPU": 8.0}))


def test_two_nodes_are_two_however_large_one_is():
    plan = plan_resources(ClusterConfig(num_nodes=2, gpus_per_node=4), 1)
    large, small = {"CPU": 64.0, "GPU": 8.0}, {"CPU": 8.0, "GPU": 2.0}
    check_fits(plan, nodes(large, small, large))
    told = (
        r"wants 2 node\(s\) with 4 CPUs and 4 GPUs each, and 1 of the Ray cluster's 2 node\(s\) can"
    )
    with pytest.raises(UserError, match=told):
        check_fits(plan, nodes(large, small))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            (
                "cluster.cpu_workers_per_node=2",
                "cluster.num_generation_workers=1",
                "refit.transport=ipc",
            ),
            "refit.transport=ipc needs policy and generation in the same bundles",
        ),
        (("cluster.gpus_per_node=1", "refit.transport=broadcast"), "its sender's own GPU"),
        (
            (
                "cluster.cpu_workers_per_node=2",
                "generation.tensor_parallel_size=2",
                "generation.num_engines_per_bundle=2",
            ),
            "set one of them to 1",
        ),
        (
            ("cluster.gpus_per_node=1", "rollout.max_lag=1"),
            "rollout.max_lag=1 lets engines sample while the policy trains, but here they sleep",
        ),
        (
            ("cluster.gpus_per_node=1", "rollout.overlap=true"),
            "set generation.sleep=false, or give them their own GPUs",
        ),
        (
            ("loss.importance=mask", "loss.importance_floor=3"),
            "loss.importance_floor=3 must be below loss.importance_cap=2",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_placements_and_weights_that_cannot_work_are_refused(overrides, message):
    assert message in refusal(*overrides)


def test_an_evaluation_may_have_more_engines_than_prompts_at_once():
    words = ("cluster.cpu_workers_per_node=65", "generation.num_engines_per_bundle=1")
    assert compose_config(CONFIGS, "eval", words).cluster.cpu_workers_per_node == 65


def test_lines_can_end_completions_and_nothing_cannot():
    words = as_typed({"generation.stop": ["\n\n", " "]})
    assert compose_config(CONFIGS, "grpo", words).generation.stop == ["\n\n", " "]
    assert "empty text has no meaning here" in refusal('generation.stop=["a",""]')
    assert "empty text has no meaning here" in refusal("run.dir=' '")


@pytest.mark.parametrize(("name", "more"), [("grpo", ["environment.reward=math"]), ("sft", [])])
def test_validation_may_be_off_where_there_are_no_rows_for_it(tmp_path, name, more):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "2 + 2", "completion": "4", "answer": "4"}')
    own = [f"data.train={rows}", *more]
    compose_config(CONFIGS, name, [*own, "validation.every_steps=0"])
    with pytest.raises(UserError, match="no validation rows; set data"):
        compose_config(CONFIGS, name, [*own, "validation.every_steps=7"])


@pytest.mark.parametrize(
    ("backend", "kwargs", "message"),
    [
        *(
            ("vllm", f"{{{key}: 1}}", f"engine_kwargs.{key} follows from the rest")
            for key in ("logprobs_mode", "override_generation_config", "quantization")
        ),
        *(
            ("vllm", f"{{{one}}}", "must be a whole number, at least 1")
            for one in (
                "max_num_seqs: 0",
                "max_num_seqs: many",
                "max_num_batched_tokens: null",
                "kv_cache_memory_bytes: 1.5e9",
            )
        ),
        ("vllm", "{gpu_memory_utilization: 90}", "must be a number above 0 and at most 1"),
        ("vllm", "{gpu_memory_utilization: high}", "must be a number above 0 and at most 1"),
        ("vllm", "{trust_remote_code: true}", "trust_remote_code follows from the rest"),
        ("replay", "{folder: /a, b: 1}", "engine_kwargs.b has no effect on"),
        ("replay", "{folder: a}", "engine_kwargs.folder=a must be the absolute path of a run"),
        ("replay", "{}", "engine_kwargs.folder=null must be the absolute path of a run"),
    ],
)
def test_arguments_of_an_engine_are_looked_at_before_it_starts(backend, kwargs, message):
    given = f"generation.backend={backend}", f"generation.engine_kwargs={kwargs}"
    assert message in refusal(*given)


@pytest.mark.parametrize("backend", ["vllm", "graph", "hf"])
def test_engines_may_be_told_to_stay_awake_where_they_never_sleep(backend):
    compose_config(CONFIGS, "grpo", ["generation.sleep=false", f"generation.backend={backend}"])
