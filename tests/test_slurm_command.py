"""``nemo-like slurm``: what it writes is what the run says, and nothing else gets into it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_like.algorithms.grpo.config import GRPOConfig
from nemo_like.cli import main
from nemo_like.compose.load import check, compose_config
from nemo_like.config.run import CheckpointConfig, ClusterConfig, RunSection
from nemo_like.config.slurm import SlurmConfig
from nemo_like.errors import UserError
from nemo_like.launch.slurm import BatchJob, render_script
from tests.small_runs import accept

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "configs"
SCRIPT = str(ROOT / "examples" / "run_grpo.py")
HOSTILE = [
    'it\'s "$(touch broken)"; touch broken',
    "two\nlines `touch broken`",
    "\\ * ~ {a,b} #no !x $HOME & | > broken",
    "",
    "-n",
    "naïve → ünïcode",
]
RESUMED = ["run.resume=true", "run.dir=runs/mine", "checkpoint.every_steps=5"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rendered(capsys, *words, script=SCRIPT):
    main(["slurm", "render", script, *words])
    return capsys.readouterr().out


def job(commands=(("python", "x.py"),), folder=Path("/work"), num_nodes=1, gpus=0, **slurm):
    cluster = ClusterConfig(num_nodes=num_nodes, gpus_per_node=gpus, slurm=SlurmConfig(**slurm))
    config = GRPOConfig(cluster=cluster)
    return BatchJob(name="grpo", config=config, commands=commands, folder=folder)


def test_a_whole_script(capsys, folder):
    text = rendered(
        capsys,
        "cluster.num_nodes=2",
        "cluster.gpus_per_node=8",
        "cluster.cpus_per_worker=4",
        "cluster.start_timeout_s=90.5",
        "cluster.slurm.time=1-12:30:00",
        "cluster.slurm.container=image.sqsh",
        "cluster.slurm.mounts=['/data:/data:ro','/home:/home']",
        "cluster.slurm.setup='source .venv/bin/activate'",
        "cluster.slurm.requeue=true",
        "cluster.slurm.extra=['--partition=gpu','--constraint=h100|h200']",
        *RESUMED,
    )
    head, _, command = text.partition("command=(")
    assert (
        head
        == f"""#!/bin/bash
#SBATCH --job-name=grpo
#SBATCH --chdir={folder}
#SBATCH --output={folder}/slurm-logs/%j.out
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=8
#SBATCH --time=1-12:30:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --open-mode=append
#SBATCH --partition=gpu
#SBATCH --constraint=h100|h200

"""
    )
    assert command.startswith(f"python {SCRIPT} cluster.num_nodes=2 cluster.gpus_per_node=8 ")
    assert (
        command.partition("\n")[2]
        == f"""\
printf -v NEMO_LIKE_COMMAND '%q ' "${{command[@]}}"
export NEMO_LIKE_COMMAND
export NEMO_LIKE_SETUP='source .venv/bin/activate'
export NEMO_LIKE_CONTAINER=image.sqsh
export NEMO_LIKE_CONTAINER_RUNTIME=pyxis
export NEMO_LIKE_MOUNTS=/data:/data:ro,/home:/home
export NEMO_LIKE_LOG_DIR={folder}/slurm-logs/"$SLURM_JOB_ID"
export NEMO_LIKE_GPUS_PER_NODE=8
export NEMO_LIKE_CPUS_PER_NODE=''
export NEMO_LIKE_MPS=''
export NEMO_LIKE_START_TIMEOUT_S=91
export NEMO_LIKE_REQUEUE=1
export NEMO_LIKE_STOP_TIMEOUT_S=60
exec bash {ROOT}/slurm/ray.sbatch
"""
    )


def test_what_a_job_takes_is_stated_even_where_an_outer_job_says_otherwise(capsys):
    """An outer allocation's SLURM_* and the user's NEMO_LIKE_* are in the job's environment."""
    text = rendered(capsys)
    for line in ("nodes=1", "ntasks-per-node=1", "cpus-per-task=1", "no-requeue"):
        assert f"#SBATCH --{line}\n" in text
    for line in (
        "GPUS_PER_NODE=0",
        "CONTAINER=''",
        "SETUP=''",
        "MOUNTS=''",
        "REQUEUE=''",
        "MPS=''",
    ):
        assert f"export NEMO_LIKE_{line}\n" in text
    ahead = ("cluster.gpus_per_node=1", "rollout.max_lag=1", "generation.sleep=false")
    assert "export NEMO_LIKE_MPS=1\n" in rendered(capsys, *ahead, "cluster.mps=true")


def dump(folder):
    """A script in place of ray.sbatch, which writes what it is told."""
    (folder / "ray script").write_text('env -0 > told; eval "$NEMO_LIKE_COMMAND"\n')
    (folder / "words.py").write_text(
        "import json, sys; json.dump(sys.argv[1:], open('words', 'w'))"
    )
    return folder / "ray script"


def carried_out(batch, **env):
    """Words of the command and the environment that a rendered script ends in."""
    text = render_script(batch, dump(batch.folder))
    done = subprocess.run(
        ["bash", "-eu"],
        input=text,
        cwd=batch.folder,
        env={"PATH": os.environ["PATH"], "HOME": "/", **env},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    told = (batch.folder / "told").read_text().split("\0")
    return json.loads((batch.folder / "words").read_text()), dict(
        line.split("=", 1) for line in told if "=" in line
    )


def test_no_value_breaks_out_of_the_script(tmp_path):
    folder = tmp_path / 'a "quoted" $(touch broken) folder; #1'
    folder.mkdir()
    command = [sys.executable, "words.py", *HOSTILE]
    for value in HOSTILE:
        batch = job([command], folder, container="x" + value, mounts=[f"/{value}:/x"], setup=value)
        words, told = carried_out(batch, SLURM_JOB_ID="12")
        assert words == HOSTILE
        assert told["NEMO_LIKE_SETUP"] == value
        assert told["NEMO_LIKE_CONTAINER"] == "x" + value
        assert told["NEMO_LIKE_MOUNTS"] == f"/{value}:/x"
        assert told["NEMO_LIKE_LOG_DIR"] == f"{folder}/slurm-logs/12"
    assert not list(tmp_path.rglob("broken"))


def test_each_task_of_an_array_has_its_own_command_and_logs(tmp_path):
    commands = [[sys.executable, "words.py", f"seed={i}", "a b"] for i in range(12)]
    for task in ("0", "11"):
        words, told = carried_out(
            job(commands, tmp_path), SLURM_ARRAY_TASK_ID=task, SLURM_ARRAY_JOB_ID="7"
        )
        assert words == [f"seed={task}", "a b"]
        assert told["NEMO_LIKE_LOG_DIR"] == f"{tmp_path}/slurm-logs/7_{task}"


def test_multirun_makes_a_task_of_each_combination(capsys, folder):
    text = rendered(
        capsys,
        "--multirun",
        "run.seed=0,1",
        "grpo.max_steps=3,4",
        "run.dir='runs/${run.seed}-${grpo.max_steps}'",
    )
    assert "#SBATCH --array=0-3\n" in text
    assert f"#SBATCH --output={folder}/slurm-logs/%A_%a.out\n" in text
    assert f"2) command=(python {SCRIPT} run.seed=1 grpo.max_steps=3 " in text


def test_tasks_that_share_a_folder_get_one_each_below_it(capsys, folder):
    text = rendered(capsys, "--multirun", "run.dir=runs/mine", "run.seed=0,1")
    assert f"""1) command=(python {SCRIPT} run.seed=1 'run.dir="runs/mine/seed=1"') """ in text


def test_scripts_are_good_bash(capsys, tmp_path):
    texts = [
        rendered(capsys, "cluster.gpus_per_node=8", "cluster.slurm.setup='. x'"),
        rendered(capsys, "-m", "run.seed=0,1"),
        render_script(job([HOSTILE], Path("/a b")), tmp_path / "it's"),
    ]
    for text in texts:
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        if shutil.which("shellcheck"):
            subprocess.run(
                ["shellcheck", "--severity=warning", "-"], input=text, text=True, check=True
            )


def test_a_config_of_the_users_own_is_named_in_the_command(capsys, folder):
    (folder / "mine.yaml").write_text("defaults: [grpo, _self_]\ncluster: {slurm: {time: 9}}\n")
    text = rendered(capsys, "--config-name=mine", "--config-dir=.", "grpo.max_steps=3")
    assert "#SBATCH --time=9\n" in text
    found = f"python {SCRIPT} --config-name=mine --config-dir={folder} grpo.max_steps=3"
    assert f"command=({found})\n" in text


# What is set in cluster.slurm -> what must be in the one sentence that comes back.
REFUSED = [
    ({"time": "12:30"}, "would be 12 minutes and 30 seconds; write 12:30:00, or 0:12:30"),
    ({"time": "soon"}, "time='soon' must be minutes, hours:minutes:seconds or days-hours"),
    ({"time": "1:60:00:00"}, "must be minutes"),
    ({"mounts": ["/a:/a"]}, "container names no image"),
    ({"container": "x", "mounts": ["a:/a"]}, "mounts='a:/a' must be /outside:/inside"),
    ({"container": "x", "mounts": ["/a"]}, "must be /outside:/inside"),
    ({"container": "x", "mounts": ["/a:/b,/c:/d"]}, "must be /outside:/inside"),
    ({"container": ""}, "container='': empty text has no meaning here"),
    ({"requeue": True}, "needs run.resume=true and run.dir"),
    ({"extra": ["hello"]}, "extra='hello' must be an option of sbatch"),
    ({"extra": ["--comment=it's"]}, 'extra="--comment=it\'s": No closing quotation'),
    ({"extra": ["--nodes=3"]}, "cluster.num_nodes decides that"),
    ({"extra": ["-t 5"]}, "cluster.slurm.time decides that"),
    ({"extra": ["-N2"]}, "cluster.num_nodes decides that"),
    ({"extra": ["--requ"]}, "cluster.slurm.requeue decides that"),
    ({"extra": ["--gpus=4"]}, "cluster.gpus_per_node decides that"),
    ({"extra": ["-D/"]}, "the folder that you submit from decides that"),
    ({"extra": ["--wait"]}, "ends with the job's id; leave it out"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=str)
def test_a_job_that_cannot_be_is_refused(settings, message):
    with pytest.raises(UserError) as error:
        accept(GRPOConfig, cluster={"gpus_per_node": 4, "slurm": settings})
    assert message in str(error.value)


@pytest.mark.parametrize("key", ["time", "extra"])
def test_a_line_break_cannot_end_the_header(key):
    value = "--x=1\nrm -rf /"
    with pytest.raises(UserError, match=rf"cluster\.slurm\.{key}='--x=1\\nrm -rf /' must be"):
        accept(GRPOConfig, cluster={"slurm": {key: [value] if key == "extra" else value}})


def test_a_line_break_in_the_name_of_a_folder_is_refused_too():
    with pytest.raises(UserError, match=r"'/a\\nrm' cannot stand in a batch script"):
        render_script(job(folder=Path("/a\nrm")), Path("/ray.sbatch"))


def test_a_time_that_yaml_reads_as_a_number_is_refused_in_a_base_file_too(tmp_path):
    base = "defaults: [grpo_schema, _self_]\ncluster: {slurm: {time: TIME}}\n"
    (tmp_path / "site.yaml").write_text(base.replace("TIME", "12:30:00"))
    (tmp_path / "mine.yaml").write_text("defaults: [site, _self_]\nrun: {seed: 1}\n")
    with pytest.raises(UserError, match=r'site\.yaml, line 2: .*put it in quotes: "12:30:00"'):
        compose_config(tmp_path, "mine")
    (tmp_path / "site.yaml").write_text(base.replace("TIME", '"12:30:00"'))
    assert compose_config(tmp_path, "mine").cluster.slurm.time == "12:30:00"
    typed = compose_config(CONFIGS, "grpo", ["cluster.slurm={time: 12:30:00}"])
    assert typed.cluster.slurm.time == "12:30:00"


def test_a_requeued_job_must_find_its_own_checkpoints():
    def refusal(**slurm):
        with pytest.raises(UserError) as error:
            check(job(requeue=True, **slurm).config.replace(run=run, checkpoint=checkpoint))
        return str(error.value)

    run, checkpoint = RunSection(dir="runs/mine", resume=True), CheckpointConfig(every_minutes=0)
    assert "needs checkpoint.every_steps or every_minutes" in refusal()
    checkpoint = CheckpointConfig(every_minutes=0, every_steps=5)
    assert "cluster.slurm.time=0:02:00 leaves nothing for the run, which is stopped 120 s" in (
        refusal(time="0:02:00")
    )
    fits = job(requeue=True, time="0:02:01").config
    check(fits.replace(run=run, checkpoint=checkpoint))


# What is typed after "nemo-like slurm" -> exit code, and what the one sentence says.
WRONG_WORDS = [
    ([], 2, "'' is not a command of nemo-like slurm; use render, submit, status, logs, cancel"),
    (["sumbit"], 2, "'sumbit' is not a command"),
    (["render"], 2, "SCRIPT='' is no Python file; use nemo-like slurm render SCRIPT"),
    (["render", "run.seed=1"], 2, "SCRIPT='run.seed=1' is no Python file"),
    (["render", "missing.py"], 2, "SCRIPT='missing.py' is no Python file"),
    (["render", SCRIPT, "grpo"], 2, "grpo is one config name too many"),
    (["render", SCRIPT, "polcy.lr=1"], 2, "did you mean policy.optimizer.lr?"),
    (["render", SCRIPT, "run.seed=0,1"], 2, "needs --multirun"),
    (["render", SCRIPT, "--gpus=8"], 2, "unrecognized arguments: --gpus=8"),
    (["render", SCRIPT, "--config-name=dpo"], 2, "one of nemo-like dpo; use that"),
    (["render", SCRIPT, "-m", "run.seed=0,1", "run.dir=a,b"], 2, "run.dir=a would be written"),
    (["render", SCRIPT, "-m", "cluster.num_nodes=1,2"], 2, "have the same machines"),
    (
        ["render", SCRIPT, "cluster.slurm.requeue=true", RESUMED[0], "run.dir=runs/${now:%H}"],
        2,
        "run.dir=runs/${now:%H} is another folder each time",
    ),
    (["status"], 2, "the following arguments are required: job"),
    (["status", "mine"], 2, "'mine' is no job id; give a number such as 12, or 12_3"),
    (["submit", SCRIPT], 1, "sbatch is not on PATH; run this on a login node"),
    (["cancel", "12"], 1, "scontrol is not on PATH"),
]


@pytest.mark.parametrize(("words", "code", "message"), WRONG_WORDS, ids=str)
def test_wrong_words_end_with_one_sentence(words, code, message, capsys, monkeypatch, folder):
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(SystemExit) as exit_:
        main(["slurm", *words])
    out, err = capsys.readouterr()
    assert (exit_.value.code, out) == (code, "")
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    assert message in err


def test_a_greeting_of_sbatch_is_no_job_id(capsys, monkeypatch, folder):
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    sbatch = folder / "sbatch"
    sbatch.write_text("#!/bin/sh\ncat >/dev/null; echo Welcome to 3 clusters; echo $ANSWER\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("ANSWER", "12;alps")
    main(["slurm", "submit", SCRIPT])
    assert capsys.readouterr().out.startswith("job     12\n")
    monkeypatch.setenv("ANSWER", "queued")
    with pytest.raises(SystemExit):
        main(["slurm", "submit", SCRIPT])
    assert "sbatch gave no job id, but 'Welcome to 3 clusters\\nqueued" in capsys.readouterr().err


def test_it_imports_neither_torch_nor_ray():
    code = (
        "import sys; from nemo_like.cli import main;"
        f"main(['slurm', 'render', {SCRIPT!r}]);"
        "heavy = {'torch', 'ray', 'transformers', 'numpy'} & sys.modules.keys();"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
