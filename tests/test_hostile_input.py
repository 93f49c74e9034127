"""Configurations and folders as people get them wrong: one sentence each, before a run starts."""

import argparse
import errno
import fcntl
import os
from pathlib import Path

import pytest

from nemo_like.algorithms.distillation.config import DistillationConfig
from nemo_like.algorithms.grpo.config import GRPOConfig
from nemo_like.algorithms.ppo.config import PPOConfig
from nemo_like.algorithms.sft.config import SFTConfig
from nemo_like.cli import main
from nemo_like.compose import registry
from nemo_like.compose.files import check_config_files, schema_of
from nemo_like.compose.load import check_algorithm, compose_config
from nemo_like.compose.main import _parse
from nemo_like.compose.overrides import accept_free_keys, check_overrides
from nemo_like.compose.sweep import check_run_dirs, jobs
from nemo_like.config.run import ClusterConfig, RunSection
from nemo_like.errors import RunError, UserError
from nemo_like.run.ending import end_on_error
from nemo_like.run.folder import claim

CONFIGS = Path(__file__).parent.parent / "configs"


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("run.dir=1e3", "run.dir=1e3 would be read as 1000.0; put text in quotes"),
        ("run.dir=1.10", "run.dir=1.10 would be read as 1.1; put text in quotes"),
        ("run.dir=true", "run.dir=true would be read as True; put text in quotes"),
        ("cluster.slurm.time=1_000", "cluster.slurm.time=1_000 would be read as 1000"),
        ("run.dir=läufe/路", "'run.dir=\"läufe/路\"'"),
        ("run.dir=lr=1e-4", "'run.dir=\"lr=1e-4\"'"),
        ("cluster.slurm.extra=[--constraint=h100]", "put each piece of text that has more than"),
        ("run.seed:1", "'run.seed:1' is not key=value"),
        ("=1", "'=1' is not key=value"),
        ("policy[model]=x", "policy[model] is not a key of the configuration; did you mean policy"),
        ("POLICY.MODEL=x", "did you mean policy.model?"),
        ("cluster.msp=true", "did you mean cluster.mps?"),
        ("rollout.maxlag=1", "did you mean rollout.max_lag?"),
        ("grpo.maxsteps=3", "did you mean grpo.max_steps?"),
        ("run_dir=x", "did you mean run.dir?"),
        ("run.dri=x", "did you mean run.dir?"),
        ("+run.seed=1", "+run.seed=1: the key exists; write run.seed=1, without +"),
        ("+model=smollm2", "write model=smollm2, without +"),
        ("~policy", "~policy: keys cannot be removed"),
        ("~generation.backend", "~generation.backend: keys cannot be removed"),
        ("~model", "~model: keys cannot be removed"),
        ("model=null", "model=null must be one name"),
        ("model=[embedded,smollm2]", "must be one name"),
        ("data.tasksx.chain_sum={}", "data.tasksx.chain_sum is not a key"),
        ("generation.engine_kwargsx=3", "did you mean generation.engine_kwargs?"),
        ("hydraa.foo=1", "hydraa.foo is not a key"),
        ("hydra.job.chdir=true", "hydra.job.chdir is not a key of the configuration"),
        ("hydra/launcher=joblib", "hydra/launcher is not a key of the configuration"),
    ],
)
def test_what_hydra_would_take_for_something_else_is_refused(typed, sentence):
    for each in ([typed], accept_free_keys([typed], GRPOConfig)):
        with pytest.raises(UserError) as refused:
            check_overrides(each, GRPOConfig)
        assert sentence in str(refused.value)


@pytest.mark.parametrize("key", ["generation.engine_kwargs.x"])
def test_an_entry_of_a_dictionary_that_the_schema_lacks_is_refused(key):
    """SFT samples and scores nothing."""
    check_overrides([f"{key}=1"], GRPOConfig)
    for each in ([f"{key}=1"], accept_free_keys([f"{key}=1"], SFTConfig)):
        with pytest.raises(UserError, match=rf"^{key} is not a key of the configuration"):
            check_overrides(each, SFTConfig)


def test_what_is_written_as_it_is_read_is_accepted():
    typed = ["run.dir=2026", "run.dir='1.10'", 'run.dir="läufe"', "policy.compile=yes", "run.dir="]
    typed += [
        "run.dir=1.5",
        "++run.seed=1",
        "policy.activation_checkpointing=none",
    ]
    typed += ["generation.engine_kwargs.flag=1", "~data.tasks.gcd", "policy.compile=TRUE"]
    check_overrides(typed, GRPOConfig)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("recipes/grpo_smolm2_1gpu", "did you mean recipes/grpo_smollm2_1gpu? There are recipes/c"),
        ("dapo", "did you mean recipes/dapo?"),
        ("recipe/grpo", "did you mean recipes/grpo? There are recipes/c"),
        ("grop", "did you mean grpo? There are distillation, dpo, eval, grpo,"),
        ("elsewhere/recipes/dapo.yaml", "there is no elsewhere/recipes/dapo.yaml; did you mean r"),
        ("configs/recipes/dapo.yaml", "give that file by --config-name=recipes/dapo"),
        (str(CONFIGS / "sft.yaml"), "give that file by --config-name=sft"),
        ("model/smollm2", "model/smollm2 is not the configuration of a run; begin its defaults"),
        ("", "--config-name=: there is no .yaml"),
    ],
)
def test_a_wrong_config_name_is_answered_with_those_that_there_are(name, sentence, monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)
    with pytest.raises(UserError) as refused:
        check_config_files([CONFIGS], name)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("defaults: [grpo]\nrun: {seed: 1, seed: 2}", "line 2: run.seed is given twice"),
        ("defaults: [grpo]\nrun:\n\tseed: 1", "is not valid YAML: "),
        ("defaults: [grpo]\nrun: {seed: 1", "is not valid YAML: "),
        ("\udcff\udcfe", "is not a text file in UTF-8"),
        ("", "mine is not the configuration of a run"),
        ("- a", "mine is not the configuration of a run"),
        ("defaults: grpo", "mine is not the configuration of a run"),
        ("defaults: [grpoo]", "its defaults name grpoo: there is no grpoo.yaml; did you mean grpo"),
        ("defaults: [mine]", "its defaults lead back to itself"),
        ("defaults: [_self_, grpo]\nrun: {seed: 1}", "grpo comes after _self_ in its defaults"),
        ("defaults: [grpo]\nrun: {dir: 1.10}", 'run.dir: .* in quotes: "1.10"'),
        ("defaults: [grpo]\nrun: {dir: 1e3}", 'run.dir: .* in quotes: "1e3"'),
        ("defaults: [grpo]\nrun: {dir: on}", 'run.dir: .* in quotes: "on"'),
    ],
)
def test_a_users_file_that_would_be_misread_is_named_with_its_fault(tmp_path, text, sentence):
    (tmp_path / "mine.yaml").write_text(text, errors="surrogateescape")
    with pytest.raises(UserError, match=sentence):
        check_config_files([CONFIGS, tmp_path], "mine")


def test_a_users_file_finds_its_schema_through_what_it_is_based_on(tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "mine.yaml").write_text("defaults: [recipes/ppo_smollm2_1gpu, _self_]\n")
    (tmp_path / "recipes" / "near.yaml").write_text("defaults: [sft_smollm2_1gpu, _self_]\n")
    assert schema_of([CONFIGS, tmp_path], "mine") is PPOConfig
    assert schema_of([CONFIGS, tmp_path], "recipes/near") is SFTConfig
    with pytest.raises(UserError, match=r"--config-dir=.*gone is not a folder"):
        check_config_files([CONFIGS, tmp_path / "gone"], "grpo")


def test_a_script_runs_its_own_algorithm_only():
    check_algorithm("nemo-like sft", SFTConfig, SFTConfig)
    with pytest.raises(
        UserError, match=r"nemo-like sft cannot run .* one of nemo-like grpo; use that"
    ):
        check_algorithm("nemo-like sft", GRPOConfig, SFTConfig)


@pytest.mark.parametrize(
    ("name", "kind", "more"),
    [
        ("grpo", GRPOConfig, ()),
        pytest.param("sft", SFTConfig, (), marks=pytest.mark.full),
        ("distillation", DistillationConfig, ("teacher.model=smollm2",)),
    ],
)
def test_the_model_group_applies_to_scripts_that_train(name, kind, more):
    config = compose_config(CONFIGS, name, ["model=smollm2", *more])
    assert isinstance(config, kind)
    assert (config.policy.model, config.policy.optimizer.lr) == ("smollm2", 1e-5)
    if name != "sft":
        assert config.environment.reward == "math"
    assert config.rows_per_step == {"grpo": 16, "sft": 32, "distillation": 64}[name]


def test_jobs_of_a_sweep_write_folders_of_their_own():
    config = GRPOConfig(run=RunSection(dir="x"))
    check_run_dirs([config, GRPOConfig(), GRPOConfig()])
    with pytest.raises(UserError, match=r"run\.dir=x would be written by several jobs"):
        check_run_dirs([config, config])
    with pytest.raises(UserError, match=r"cannot expand glob"):
        jobs(CONFIGS, "grpo", ["model=glob(*)"], None)


def test_an_empty_section_of_a_sweep_is_refused_like_that_of_a_run(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("defaults: [grpo, _self_]\nrun:\n")
    for more in ([], ["--multirun", "grpo.max_steps=1,2"]):
        with pytest.raises(SystemExit) as ended:
            main(["grpo", str(tmp_path / "mine.yaml"), *more])
        assert ended.value.code == 2
        assert "run=null: this key needs a value" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--seed", "--run.seed=1", "--config-name", "--cfg=foo"])
def test_a_flag_that_does_not_exist_gets_one_sentence(flag):
    with pytest.raises(UserError, match="--hydra-help lists the options"):
        _parse([flag], registry.find("grpo"), CONFIGS)
    parsed = _parse(["run.seed=1"], registry.find("grpo"), CONFIGS)
    assert isinstance(parsed, argparse.Namespace)


def test_more_workers_than_any_cluster_has_are_refused_before_they_are_listed():
    from nemo_like.planning.resources import plan_resources

    with pytest.raises(UserError, match=r"cluster\.num_nodes=2000000000 with 8 worker"):
        plan_resources(ClusterConfig(num_nodes=2_000_000_000, gpus_per_node=8), 1)
    with pytest.raises(UserError, match="2000000000 engine"):
        plan_resources(ClusterConfig(), 1, 2_000_000_000)


def test_a_folder_has_one_run_at_a_time(tmp_path):
    refused = pytest.raises(UserError, match=r"run\.dir=.* is being written by another run")
    with claim(tmp_path), refused:
        claim(tmp_path)
    with claim(tmp_path) as held:  # Whoever ended, in whatever way, holds it no more.
        fcntl.flock(held, fcntl.LOCK_UN)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_refuses_is_no_traceback(number, capsys):
    def write():
        raise OSError(number, os.strerror(number), "runs/x/config.yaml")

    for in_run, then in ((False, " or choose another folder."), (True, ", then continue with run")):
        with pytest.raises(SystemExit) as ended:
            end_on_error(write, in_run=in_run)
        assert ended.value.code == 1
        found = capsys.readouterr().err
        told = f"Error: runs/x/config.yaml cannot be written: {os.strerror(number)}; make room"
        assert found.startswith(told)
        assert then in found
    with pytest.raises(FileNotFoundError):  # which no disk is at fault for
        end_on_error(lambda: Path("no/such").unlink())


def test_a_full_disk_under_a_checkpoint_is_one_sentence(tmp_path):
    import torch
    from torch.distributed.checkpoint.state_dict_saver import save

    from nemo_like.policy.state.files import told_as

    (tmp_path / "__0_0.distcp").symlink_to("/dev/full")
    told = "could not be written: .*No space left"
    with pytest.raises(RunError, match=told), told_as(RunError, f"{tmp_path} could not be written"):
        save({"weight": torch.zeros(4)}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(RunError, match=told), told_as(RunError, f"{tmp_path} could not be written"):
        (tmp_path / "__0_0.distcp").write_text("x")
    with pytest.raises(KeyError), told_as(RunError, "never said"):
        raise KeyError("a bug of ours")
