"""``nemo-like ray-config``: clusters of the configured size, in the terms of those who start them.

KubeRay's schema is not on PyPI: its fields are checked against a table of those that we may use.
"""

import shlex

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from nemo_like.cli import main
from nemo_like.compose import registry
from nemo_like.compose.files import SHIPPED as CONFIGS
from nemo_like.compose.load import compose_raw

IMAGE = ("--image", "registry:5000/team/nemo-like:1.0-gpu")
KUBERNETES = (*IMAGE, "--volume", "claim:/shared", "--memory", "512Gi")
MACHINES = (*IMAGE, "--volume", "/nfs:/shared", "--hosts", "h,a,b", "--ssh-user", "me")
TWO_NODES = ("cluster.num_nodes=2", "cluster.gpus_per_node=8", "cluster.cpus_per_worker=1.5")
RUN_DIR = "run.dir=/shared/runs/mine"  # not on this machine

# apis/ray/v1 of KubeRay 1.5.1: what each object may have, and its type.
CLUSTER = {
    "rayVersion": str,
    "authOptions": {"mode": str},
    "headGroupSpec": {"rayStartParams": {str: str}, "template": {"spec": dict}},
    "workerGroupSpecs": [
        {
            "groupName": str,
            "replicas": int,
            "minReplicas": int,
            "maxReplicas": int,
            "rayStartParams": {str: str},
            "template": {"spec": dict},
        }
    ],
}
JOB = {
    "entrypoint": str,
    "backoffLimit": int,
    "shutdownAfterJobFinishes": bool,
    "ttlSecondsAfterFinished": int,
    "rayClusterSpec": CLUSTER,
}


def conforms(value, shape) -> bool:
    """Whether ``value`` has exactly the fields of ``shape``, of its types."""
    if isinstance(shape, list):
        return isinstance(value, list) and all(conforms(one, shape[0]) for one in value)
    if isinstance(shape, dict) and str in shape:
        return all(isinstance(k, str) and isinstance(v, shape[str]) for k, v in value.items())
    if isinstance(shape, dict):
        return value.keys() == shape.keys() and all(conforms(value[k], shape[k]) for k in shape)
    return type(value) is shape


@pytest.fixture
def ray_config(capsys):
    def printed(kind, *arguments):
        main(["ray-config", "--kind", kind, *arguments])
        return yaml.safe_load(capsys.readouterr().out)

    return printed


def test_a_ray_cluster_has_a_pod_a_node_and_a_head_that_takes_no_work(ray_config):
    manifest = ray_config("raycluster", *KUBERNETES, *TWO_NODES)
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayCluster")
    spec = manifest["spec"]
    assert conforms(spec, CLUSTER)
    assert spec["authOptions"] == {"mode": "token"}
    head, (workers,) = spec["headGroupSpec"], spec["workerGroupSpecs"]
    assert head["rayStartParams"] | {"num-cpus": "0", "num-gpus": "0"} == head["rayStartParams"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 2
    assert workers["rayStartParams"] == {"num-cpus": "12", "num-gpus": "8"}
    (container,) = workers["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"memory": "512Gi", "nvidia.com/gpu": "8"}
    for group in (head, workers):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts == {"shared": "/shared", "shm": "/dev/shm"}
        assert {volume["name"]: volume for volume in pod["volumes"]} == {
            "shared": {"name": "shared", "persistentVolumeClaim": {"claimName": "claim"}},
            "shm": {"name": "shm", "emptyDir": {"medium": "Memory"}},
        }


def test_a_cluster_of_cpus_asks_for_no_gpu(ray_config):
    spec = ray_config("raycluster", *KUBERNETES, "cluster.cpu_workers_per_node=3")["spec"]
    (workers,) = spec["workerGroupSpecs"]
    assert workers["rayStartParams"] == {"num-cpus": "3", "num-gpus": "0"}
    assert "nvidia.com/gpu" not in str(workers)


def test_pods_get_named_variables_and_no_others(ray_config, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "hush")
    named = ("--env", "HF_HOME=/shared/hf", "--secret-env", "WANDB_API_KEY=wandb")
    spec = ray_config("raycluster", *KUBERNETES, *named)["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        secret = {"name": "wandb", "key": "WANDB_API_KEY"}
        assert group["template"]["spec"]["containers"][0]["env"] == [
            {"name": "HF_HOME", "value": "/shared/hf"},
            {"name": "WANDB_API_KEY", "valueFrom": {"secretKeyRef": secret}},
        ]


@pytest.mark.parametrize("name", registry.names())
def test_the_job_of_every_algorithm_runs_its_command(ray_config, name):
    spec = ray_config("rayjob", *KUBERNETES, *required(name), name, RUN_DIR)["spec"]
    assert conforms(spec, JOB)
    assert shlex.split(spec["entrypoint"])[:2] == ["nemo-like", name]


def required(name: str) -> tuple[str, ...]:
    return ("teacher.model=smollm2",) if "distillation" in name else ()


def test_the_command_of_a_job_says_what_was_said(ray_config):
    tasks = "data.tasks={chain_sum: {min_terms: 2, max_terms: 2}}"
    words = ("--config-name", "recipes/dapo", RUN_DIR, tasks)
    command = shlex.split(ray_config("rayjob", *KUBERNETES, *words)["spec"]["entrypoint"])
    assert command[:2] == ["nemo-like", "grpo"]
    assert command[-2:] == ["--config-name", "recipes/dapo"]
    assert compose_raw(CONFIGS, "recipes/dapo", command[2:-2]) == (
        compose_raw(CONFIGS, "recipes/dapo", [RUN_DIR, tasks])
    )


def test_the_command_of_a_job_finds_a_file_of_ones_own(ray_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "confs").mkdir()
    (tmp_path / "confs/mine.yaml").write_text("defaults: [grpo, _self_]\ngrpo: {max_steps: 3}\n")
    spec = ray_config("rayjob", *KUBERNETES, "confs/mine.yaml", RUN_DIR)["spec"]
    command = shlex.split(spec["entrypoint"])
    assert command[-4:] == ["--config-name", "mine", "--config-dir", "confs"]
    found = compose_raw(CONFIGS, "mine", command[2:-4], tmp_path / command[-1])
    assert found.raw.grpo.max_steps == 3


def test_ray_up_accepts_the_cluster_of_given_machines(ray_config):
    config = ray_config("autoscaler", *MACHINES, *TWO_NODES, "--env", "NAME=two words")
    validate_config(config | {"cluster_synced_files": []})
    prepared = prepare_config(config)
    validate_config(prepared)
    (node_type,) = prepared["available_node_types"].values()
    assert node_type["min_workers"] == node_type["max_workers"] == 2
    assert config["provider"] == {"type": "local", "head_ip": "h", "worker_ips": ["a", "b"]}
    assert "--num-cpus=0 --num-gpus=0" in config["head_start_ray_commands"][-1]
    assert "--num-cpus=12 --num-gpus=8" in config["worker_start_ray_commands"][-1]
    options = " ".join(config["docker"]["run_options"])
    assert options.endswith(
        "--volume /nfs:/shared --env RAY_AUTH_MODE=token --env 'NAME=two words'"
    )


WRONG = [
    ("pod", KUBERNETES, "invalid choice: 'pod'"),
    ("raycluster", (), "arguments are required: --image, --volume"),
    ("raycluster", KUBERNETES[:4], "--kind=raycluster needs --memory"),
    ("raycluster", (*KUBERNETES, "--hosts", "a"), "--hosts=a has no effect with --kind=raycluster"),
    ("raycluster", (*KUBERNETES, "--memory", "lots"), "--memory=lots must be an amount such as"),
    ("raycluster", (*KUBERNETES, "--name", "My_Cluster"), "--name=My_Cluster must be at most 40"),
    ("raycluster", (*KUBERNETES, "--volume", "/shared"), "--volume=/shared must be SOURCE:/PATH"),
    ("raycluster", (*KUBERNETES, "--volume", "a:/b:ro"), "--volume=a:/b:ro must be SOURCE:/PATH"),
    ("raycluster", (*KUBERNETES, "--volume", "a:/dev/shm"), "--volume=a:/dev/shm must be SOURCE:"),
    ("raycluster", (*KUBERNETES, "--env", "A=1", "--secret-env", "A=b"), "A is given twice by"),
    (
        "rayjob",
        (*KUBERNETES, "run.dir=/shared/../x"),
        "run.dir=/shared/../x must be a folder below",
    ),
    ("raycluster", (*KUBERNETES, "--volume", "My_claim:/shared"), "My_claim is no name of"),
    ("raycluster", (*KUBERNETES, "--secret-env", "A=b=c"), "b=c is no name of Kubernetes"),
    ("raycluster", (*KUBERNETES, "--env", "WANDB_API_KEY"), "--env=WANDB_API_KEY must be NAME="),
    ("raycluster", (*KUBERNETES, "--image", "a/b:latest"), "--image=a/b:latest must be pinned"),
    ("raycluster", (*KUBERNETES, "--image", "host:50/b"), "--image=host:50/b must be pinned"),
    ("raycluster", (*KUBERNETES, "cluster.num_nodes=0"), "cluster.num_nodes=0 must be at least 1"),
    ("rayjob", KUBERNETES, "run.dir=null must be a folder below /shared"),
    (
        "rayjob",
        (*KUBERNETES, "run.dir=/other/x"),
        "run.dir=/other/x must be a folder below /shared",
    ),
    ("autoscaler", MACHINES, "has 2 worker(s) beside the head, and cluster.num_nodes=1"),
    ("autoscaler", (*MACHINES, "--hosts", "h,a,"), "must be different machines"),
    ("autoscaler", (*MACHINES, "--hosts", "h,a,a"), "must be different machines"),
    ("autoscaler", MACHINES[:6], "--kind=autoscaler needs --ssh-user"),
    ("autoscaler", (*MACHINES, "--secret-env", "A=b"), "--kind=autoscaler has none"),
]


@pytest.mark.parametrize(("kind", "arguments", "message"), WRONG)
def test_what_cannot_be_a_cluster_is_one_sentence(capsys, kind, arguments, message):
    with pytest.raises(SystemExit) as end:
        main(["ray-config", "--kind", kind, *arguments])
    output = capsys.readouterr()
    assert (end.value.code, output.out) == (2, "")
    assert output.err.startswith("Error: ")
    assert message in output.err
