"""Names of other projects, hints that are right or silent, ``--help``, and files as arguments."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from nemo_like.cli import COMMANDS, main
from nemo_like.compose import names, registry
from nemo_like.compose.load import compose_config, compose_raw
from nemo_like.compose.names import hint_for, unknown_key
from nemo_like.compose.overrides import check_overrides
from nemo_like.compose.sweep import jobs, part_folders
from nemo_like.config.section import keys_of
from nemo_like.errors import UserError
from tests.small_runs import ROOT

CONFIGS = ROOT / "configs"


def schema(algorithm):
    return registry.find(algorithm).config


@pytest.fixture
def said(capsys):
    """What a command prints, or the sentence with which it ends."""

    def run(*arguments):
        try:
            main(arguments)
        except SystemExit as end:
            return capsys.readouterr().err if end.code == 2 else f"exit code {end.code}"
        return capsys.readouterr().out

    return run


def test_every_name_leads_to_a_key_that_exists_or_says_why_there_is_none():
    ours = [schema(name) for name in registry.names()]
    everywhere = {key for one in ours for key, _ in keys_of(one)} | {"model"}
    assert len({one.name for one in names.read()}) > 300
    for one in names.read():
        assert one.name not in everywhere, one
        assert one.keys or one.note, one
        assert not one.keys or any(one.keys_in(each) for each in ours), one
        for key in re.findall(
            r"\b(?:policy|loss|generation|validation|environment)\.[\w.]+", one.note
        ):
            assert key.rstrip(".") in everywhere, (one, key)


def test_a_name_that_two_projects_share_means_one_thing():
    projects = {}
    for one in names.read():
        projects.setdefault(one.name, set()).add(one.project)
    assert [name for name, found in projects.items() if len(found) > 1] == []


def test_the_page_of_names_is_current():
    assert (ROOT / "docs/migrate.md").read_text() == names.render(), (
        "nemo-like names > docs/migrate.md"
    )


# What users of TRL, verl, OpenRLHF and NeMo RL type: algorithm, name, and the keys of the answer.
TYPED = [
    ("grpo", "learning_rate", "policy.optimizer.lr"),
    ("grpo", "beta", "loss.kl_coef"),
    ("dpo", "beta", "loss.beta"),
    ("grpo", "use_vllm", "generation.backend"),
    ("grpo", "num_generations", "grpo.num_generations_per_prompt"),
    ("ppo", "num_generations", "ppo.num_generations_per_prompt"),
    ("grpo", "max_completion_length", "generation.max_new_tokens"),
    ("grpo", "per_device_train_batch_size", "grpo.num_prompts_per_step policy.micro_batch_size"),
    ("sft", "per_device_train_batch_size", "sft.num_rows_per_step policy.micro_batch_size"),
    ("grpo", "gradient_accumulation_steps", ""),
    ("sft", "num_train_epochs", "sft.num_epochs"),
    ("sft", "max_seq_length", "data.max_length"),
    ("grpo", "vllm_gpu_memory_utilization", "generation.engine_kwargs.gpu_memory_utilization"),
    ("grpo", "epsilon_high", "loss.clip_high"),
    ("grpo", "scale_rewards", "advantage.scale"),
    ("grpo", "model_name_or_path", "policy.model"),
    ("grpo", "output_dir", "run.dir"),
    ("grpo", "lora_r", "policy.lora.rank"),
    ("grpo", "actor_rollout_ref.model.path", "policy.model"),
    ("grpo", "actor_rollout_ref.actor.ppo_mini_batch_size", "grpo.num_mini_batches"),
    ("grpo", "actor_rollout_ref.rollout.n", "grpo.num_generations_per_prompt"),
    ("grpo", "data.train_batch_size", "grpo.num_prompts_per_step"),
    ("grpo", "algorithm.kl_ctrl.kl_coef", "loss.kl_coef"),
    ("ppo", "critic.optim.lr", "critic.lr"),
    ("grpo", "trainer.n_gpus_per_node", "cluster.gpus_per_node"),
    ("grpo", "trainer.total_epochs", "grpo.max_steps"),
    ("grpo", "custom_reward_function.path", "environment.reward"),
    ("grpo", "n_samples_per_prompt", "grpo.num_generations_per_prompt"),
    ("ppo", "critic_learning_rate", "critic.lr"),
    ("grpo", "policy.train_global_batch_size", "grpo.num_mini_batches"),
    ("grpo", "loss_fn.reference_policy_kl_penalty", "loss.kl_coef"),
    ("grpo", "policy.generation.vllm_cfg.tensor_parallel_size", "generation.tensor_parallel_size"),
    ("grpo", "loss_type", "loss.normalization loss.objective"),
    ("dpo", "loss_type", "loss.kind"),
    ("grpo", "num_iterations", "grpo.num_epochs_per_batch"),
    ("grpo", "steps_per_generation", "grpo.num_mini_batches"),
    ("grpo", "generation_batch_size", "grpo.num_prompts_per_step"),
    ("grpo", "importance_sampling_level", "loss.ratio_level"),
    ("grpo", "delta", "loss.dual_clip"),
    ("grpo", "top_p", "validation.top_p"),
    ("grpo", "repetition_penalty", ""),
    ("grpo", "reward_weights", "environment.rewards"),
    ("grpo", "report_to", "logging.sinks"),
    ("grpo", "ref_model_mixup_alpha", ""),
    ("grpo", "dataset_name", "data.train"),
    ("sft", "dataset_text_field", "data.columns"),
    ("sft", "assistant_only_loss", "data.train_on"),
    ("dpo", "rpo_alpha", "loss.sft_coef"),
    ("ppo", "cliprange_value", "value_loss.clip"),
    ("grpo", "data.train_files", "data.train"),
    ("grpo", "data.prompt_key", "data.columns"),
    ("grpo", "actor_rollout_ref.actor.clip_ratio", "loss.clip_low loss.clip_high"),
    ("grpo", "actor_rollout_ref.actor.fsdp_config.param_offload", "policy.offload"),
    ("grpo", "actor_rollout_ref.rollout.enforce_eager", "generation.engine_kwargs.enforce_eager"),
    ("ppo", "algorithm.lam", "ppo.lam"),
    ("grpo", "trainer.project_name", ""),
    ("grpo", "trainer.val_before_train", "validation.every_steps"),
    ("grpo", "init_kl_coef", "loss.kl_coef"),
    ("grpo", "input_key", "data.columns"),
    ("grpo", "ring_attn_size", "policy.parallel.context_parallel_size"),
    ("grpo", "zero_stage", "policy.parallel.data_parallel policy.parallel.reshard_after_forward"),
    ("grpo", "use_wandb", "logging.sinks"),
    ("grpo", "logging.wandb", "logging.sinks"),
    ("sft", "logging.wandb_project", ""),
    ("grpo", "cluster.slurm.partition", "cluster.slurm.extra"),
    ("ppo", "checkpoint.keep_best", "checkpoint.metric"),
    ("grpo", "advantage.overlong_penalty", "advantage.overlong_buffer_tokens"),
    ("dpo", "cluster.save_timeout_s", "cluster.call_timeout_s"),
]


@pytest.mark.parametrize(("algorithm", "name", "keys"), TYPED)
def test_a_name_of_another_project_is_answered_with_its_key_here(algorithm, name, keys):
    hint = hint_for(name, schema(algorithm))
    assert hint is not None
    start = f"'s {name} is {' and '.join(keys.split())} here" if keys else "has no counterpart here"
    assert start in hint


# Far from everything: silence, where the nearest spelling would be wrong.
SILENT = [
    "batch_size",
    "steps",
    "mode",
    "clip",
    "tokens",
    "policy.seed",
    "logging.enabled",
    "policy.expert_parallel_size",
    "policy.batch_size",
    "grpo.temperature",
    "actor_rollout_ref.actor.megatron.seed",
    "trainer.ray_wait_register_center_timeout",
    "generation.top",
    "debug",
    "reward_model.micro_batch_size",
    "foo.bar",
    "normalize_reward",
    "top_entropy_quantile",
    "ds3_gather_for_generation",
    "vf_coef",
    "neftune_noise_alpha",
    "missing_eos_penalty",
]


@pytest.mark.parametrize("name", SILENT)
def test_nothing_is_suggested_where_nothing_is_near(name):
    assert hint_for(name, schema("grpo")) is None
    said = str(unknown_key(name, schema("grpo")))
    assert said.startswith(f"{name} is not a key of the configuration; --help")


@pytest.mark.parametrize(
    ("algorithm", "key", "hint"),
    [
        ("grpo", "critic.lr", "it is a key of ppo."),
        ("sft", "grpo", "it is a key of grpo."),
        ("sft", "loss.kl_coef", "it is a key of grpo, ppo."),
        (
            "grpo",
            "critic.optim.lr",
            "verl's critic.optim.lr is critic.lr in ppo, and nothing here.",
        ),
        ("sft", "num_generations", "num_generations_per_prompt in grpo and ppo and distillation"),
        (
            "grpo",
            "Policy.Optimizer.LR",
            "did you mean policy.optimizer.lr? Keys are in lower case.",
        ),
        ("grpo", "learning_rte", "TRL's learning_rate is policy.optimizer.lr here."),
        ("grpo", "actor_rollout_ref", "it is a section of verl"),
        (
            "grpo",
            "policy.max_new_tokens",
            "generation.max_new_tokens or validation.max_new_tokens?",
        ),
    ],
)
def test_a_key_that_is_not_here_is_placed(algorithm, key, hint):
    assert hint in (hint_for(key, schema(algorithm)) or "")


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        (["model=Qwen/Qwen3-4B"], "or policy.model=Qwen/Qwen3-4B for a folder or a hub name"),
        (["run.seed = 1"], "'run.seed = 1': write run.seed=1, without blanks"),
        (["run.seed", "=", "1"], "'run.seed' is not key=value; write run.seed=VALUE, without"),
        (["run.seed=1", "run.seed=2"], "run.seed is given 2 times (run.seed=1 run.seed=2)"),
        (["run.seed=1", "++run.seed=2"], "run.seed is given 2 times"),
        (["--learning_rate", "1e-6"], "TRL's learning_rate is policy.optimizer.lr here."),
        (["--policy.dtype=bfloat16"], "Write policy.dtype=VALUE."),
        (["no.yaml"], "no.yaml: no such file"),
        (["--config", "no.yaml"], "no.yaml: no such file"),
        (
            ["logging.wandb=true"],
            "Early nemo-like's logging.wandb is logging.sinks here: logging.sinks=[tensorboard,",
        ),
        (["--help", "learning_rate"], "TRL's learning_rate is policy.optimizer.lr here."),
        (["--help", "polcy.optimizer"], "did you mean policy.optimizer?"),
    ],
)
def test_what_people_type_instead_gets_its_sentence(said, typed, sentence):
    assert sentence in said("grpo", *typed)
    if typed[0] in ("run.seed=1", "run.seed = 1"):
        assert sentence in said("slurm", "render", "grpo", *typed)


def test_help_says_of_each_command_what_it_does(said):
    named = re.findall(r"^([a-z_-]+) {2,}\w", said("--help"), re.MULTILINE)
    assert named == [*registry.names(), *COMMANDS]


def test_help_is_a_page_of_this_algorithm_only(said):
    page = said("sft", "--help")
    assert len(page.splitlines()) < 60
    assert "sft.num_rows_per_step=32" in page
    assert "Conversations of one optimizer step." in page
    assert "recipes/sft_smollm2_1gpu" in page
    assert "grpo" not in page
    assert max(map(len, page.splitlines())) <= 100
    assert len(said("grpo", "--help").splitlines()) < 80
    for algorithm in registry.names():
        assert "--help SECTION" in said(algorithm, "-h")


def test_help_of_a_section_and_of_a_key_has_defaults_ranges_and_choices(said):
    section = said("grpo", "--help", "policy.optimizer")
    assert section == said("grpo", "policy.optimizer", "--help")
    assert "policy.optimizer.lr=0.0001\n    Peak learning rate." in section
    assert "One of adamw, sgd, muon" in " ".join(section.split())
    assert "policy.optimizer.*" in said("grpo", "--help", "policy")
    key = " ".join(said("grpo", "--help", "validation.top_p").split())
    assert key.startswith("validation.top_p=1.0 Nucleus sampling. In [1e-06, 1]. Refused where")
    assert " At least 1." in " ".join(said("grpo", "--help=grpo.max_steps").split())
    refused = " ".join(said("grpo", "--help", "loss.kl_estimator").split())
    assert "Refused where it has no effect: loss.kl_coef is 0" in refused
    assert said("grpo", "--help", "model").startswith("model=embedded|smollm2|smollm2_gpu\n")


def test_the_configuration_of_a_run_runs_again_by_its_path(said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["policy.optimizer.lr=3e-5", "data.tasks={gcd: {}}", "generation.stop=[a,b]"]
    before = compose_config(CONFIGS, "grpo", words)
    Path("config.yaml").write_text(yaml.safe_dump(before.model_dump(mode="json"), sort_keys=False))
    assert compose_config(tmp_path, "config") == before
    printed = said("grpo", "config.yaml", "--cfg", "job")
    assert compose_config(CONFIGS, "grpo", words).model_dump(mode="json") == yaml.safe_load(printed)
    for form in (
        ["--config=config.yaml"],
        ["--config", "config.yaml"],
        ["--config-name=config.yaml"],
    ):
        assert said("grpo", "--cfg=job", *form) == printed
    assert said("grpo", "--cfg=job", "--config-dir=.", "--config-name=config") == printed
    assert "seed: 5" in said("grpo", "config.yaml", "--cfg=job", "run.seed=5")
    assert said("plan", "config.yaml") == said("plan", "grpo", *words)
    assert "use that, or another --config-name" in said("sft", "config.yaml")
    assert "more than one configuration" in said("grpo", "config.yaml", "--config-name=grpo")


def test_a_file_of_the_users_own_runs_by_its_path(said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("defaults: [recipes/dapo, _self_]\nrun: {seed: 3}\n")
    printed = yaml.safe_load(said("grpo", "mine.yaml", "--cfg=job"))
    assert (printed["run"]["seed"], printed["loss"]["clip_high"]) == (3, 0.28)
    Path("short.yaml").write_text("grpo: {max_steps: 3}\npolicy: {optimizer: {lr: 1e-5}}\n")
    printed = yaml.safe_load(said("grpo", "short.yaml", "--cfg=job"))
    assert (printed["grpo"]["max_steps"], printed["policy"]["optimizer"]["lr"]) == (3, 1e-5)
    recipe = str(CONFIGS / "recipes" / "dapo.yaml")
    assert yaml.safe_load(said("grpo", recipe, "--cfg=job"))["loss"]["clip_high"] == 0.28
    Path("part.yaml").write_text("policy: {optimizer: {lr: 1e-5}}\n")
    assert "is not the configuration of a run; begin its defaults with" in said("grpo", "part.yaml")
    Path("mine.yml").write_text("grpo: {max_steps: 3}\n")
    assert "ends in .yaml; rename it" in said("grpo", "mine.yml")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("grpo.max_steps", "7", 7),
        ("policy.optimizer.lr", "1e-5", 1e-5),
        ("policy.max_grad_norm", "2", 2.0),
        ("policy.micro_batch_size", "4", 4),
        ("policy.compile", "True", True),
        ("run.dir", "7", "7"),
        ("policy.dtype", "bfloat16", "bfloat16"),
        ("grpo.max_steps", "7.5", "grpo.max_steps=7.5 must be a whole number."),
        ("grpo.max_steps", "many", "grpo.max_steps=many must be a whole number."),
        ("policy.compile", "1", "policy.compile=1 must be true or false."),
    ],
)
def test_text_of_an_interpolation_becomes_what_its_key_holds(monkeypatch, key, text, value):
    monkeypatch.setenv("GIVEN", text)
    overrides = [f"{key}=${{oc.env:GIVEN}}"]
    if isinstance(value, str) and " " in value:
        with pytest.raises(UserError, match=re.escape(value)):
            compose_config(CONFIGS, "grpo", overrides)
        return
    found = compose_config(CONFIGS, "grpo", overrides).model_dump()
    for part in key.split("."):
        found = found[part]
    assert (found, type(found)) == (value, type(value)) or found == value == 2.0


def test_quoted_text_is_still_no_number():
    with pytest.raises(UserError, match="and this is text: leave out the quotes"):
        compose_config(CONFIGS, "grpo", ["grpo.max_steps='7'"])


def folders_of(*overrides, folder="runs/new"):
    typed = jobs(CONFIGS, "grpo", list(overrides), None)
    found = [compose_raw(CONFIGS, "grpo", job) for job in typed]
    parted = part_folders(found, typed, folder)
    return [OmegaConf.select(one.raw, "run.dir") for one in found], parted


def test_the_folders_of_a_sweep_carry_what_its_jobs_differ_in():
    dirs, typed = folders_of("run.seed=0,1", "policy.optimizer.lr=1e-4,1e-3", "grpo.max_steps=3")
    assert dirs[:2] == ["runs/new/seed=0,lr=0.0001", "runs/new/seed=0,lr=0.001"]
    assert typed[0][-1] == 'run.dir="runs/new/seed=0,lr=0.0001"'
    check_overrides(typed[0], schema("grpo"))
    dirs, typed = folders_of("run.dir=runs/mine", "run.seed=0,1")
    assert dirs == ["runs/mine/seed=0", "runs/mine/seed=1"]
    assert typed == [["run.seed=0", f'run.dir="{dirs[0]}"'], ["run.seed=1", f'run.dir="{dirs[1]}"']]


def test_names_of_sweep_folders_are_plain_short_and_distinct():
    dirs, _ = folders_of("policy.model=/a/b,/a/c")
    assert dirs == ["runs/new/model=_a_b", "runs/new/model=_a_c"]
    dirs, _ = folders_of("checkpoint.every_steps=1,2", "validation.every_steps=3")
    assert dirs[0] == "runs/new/every_steps=1"
    dirs, _ = folders_of("checkpoint.every_steps=1,2", "validation.every_steps=3,4")
    assert dirs[0] == "runs/new/checkpoint.every_steps=1,validation.every_steps=3"
    assert folders_of("run.seed=0,0")[0] == ["runs/new/job=0", "runs/new/job=1"]
    long = "x" * 300
    dirs, _ = folders_of(f"policy.model={long}a,{long}b")
    assert len(set(dirs)) == 2
    assert max(map(len, dirs)) < 200


def test_folders_that_the_user_tells_apart_are_left_alone():
    dirs, typed = folders_of("run.dir='s${run.seed}'", "run.seed=0,1")
    assert dirs == ["s0", "s1"]
    assert len(typed[0]) == 2
    assert folders_of("run.seed=0,1", folder=None)[0] == [None, None]
    assert folders_of("run.seed=0,1", "run.resume=true")[0] == [None, None]
    assert folders_of("run.seed=0")[0] == [None]


def test_a_dictionary_is_merged_and_an_entry_may_begin_with_a_digit():
    config = compose_config(CONFIGS, "grpo", ["loss={kl_coef: 0.1}", "data.tasks.gcd={}"])
    assert (config.loss.kl_coef, config.loss.clip_low) == (0.1, 0.2)
    with pytest.raises(UserError, match=r"loss\.kl is not a key of the configuration; "):
        compose_config(CONFIGS, "grpo", ["loss={kl: 0.1}"])
    written = "generation.engine_kwargs={1n8g: 2}"
    with pytest.raises(UserError, match=re.escape(f"write it in a dictionary, '{written}'")):
        compose_config(CONFIGS, "grpo", ["generation.engine_kwargs.1n8g=2"])
    raw = compose_raw(CONFIGS, "grpo", [written]).raw
    assert raw.generation.engine_kwargs == {"1n8g": 2}


NO_NETWORK = """
from nemo_like.models.resolve import resolve_model
try:
    resolve_model("someone/model", "teacher.model")
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "no network reaches the hub"),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
    ],
)
def test_a_hub_name_without_a_network_says_so_and_how_to_use_a_folder(tmp_path, variables, why):
    said = subprocess.run(
        [sys.executable, "-c", NO_NETWORK],
        env={"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"} | variables,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said.startswith(f"teacher.model=someone/model: {why}, and the model is not in the cache")
    assert "`hf download someone/model --local-dir FOLDER`" in said


def test_help_imports_neither_torch_nor_ray():
    code = (
        "import sys; from nemo_like.cli import main; main(['grpo', '--help', 'policy']); "
        "print(sorted({'torch', 'ray', 'transformers', 'vllm'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.endswith("\n[]\n"), done.stderr


def test_the_version_lists_what_a_bug_report_needs(said):
    lines = said("--version").splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["nemo-like", "python"]
    assert any(line.startswith("torch ") for line in lines)
