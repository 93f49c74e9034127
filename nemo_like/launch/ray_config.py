"""``nemo-like ray-config``: a Ray cluster of the size that a configuration wants, as YAML.

``raycluster`` and ``rayjob`` are manifests for KubeRay (1.5.1 or newer, which makes the token of
``authOptions``); ``autoscaler`` is for ``ray up`` on machines reached by ssh.
"""

import argparse
import math
import re
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from nemo_like.compose import registry
from nemo_like.config.run import RunConfig
from nemo_like.errors import UserError
from nemo_like.launch.command import ConfigParser
from nemo_like.planning.resources import ResourcePlan, plan_run

_USAGE = (
    "nemo-like ray-config --kind {raycluster,rayjob,autoscaler} --image IMAGE:TAG "
    "--volume SOURCE:/PATH [options] [config name] [key=value ...]"
)
_KUBERNETES = ("raycluster", "rayjob")
# The head has the driver, which holds no tensors, and Ray's own services; workers go elsewhere.
_HEAD = {"cpu": "2", "memory": "8Gi"}
# User and group of docker/Dockerfile, which must be able to write to the volume.
_GROUP = 1000
_KEEP_FAILED_S = 300
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OBJECT = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
"""What Kubernetes takes for the name of a volume claim or a Secret."""
_SYSTEM_FOLDERS = {PurePosixPath(one) for one in ("/", "/dev", "/dev/shm", "/usr", "/etc", "/tmp")}
"""What a volume would hide: the image's own, and where Ray keeps its sessions and objects."""
_QUANTITY = re.compile(r"[1-9][0-9]*[KMGT]i")


def run(arguments: Sequence[str]) -> None:
    parser = _parser()
    options = parser.parse_intermixed_args(arguments)
    _check(options)
    config = parser.load(options, files_are_here=False)
    plan = plan_run(config)
    if options.kind == "autoscaler":
        document = _autoscaler(options, plan)
    else:
        spec = _cluster(options, plan)
        if options.kind == "rayjob":
            _, name, overrides, extra_dir = parser.source(options)
            spec = {
                "entrypoint": _entrypoint(options, config, name, overrides, extra_dir),
                # A retry would find a run in run.dir; run.resume=true is for people to decide.
                "backoffLimit": 0,
                "shutdownAfterJobFinishes": True,
                "ttlSecondsAfterFinished": _KEEP_FAILED_S,
                "rayClusterSpec": spec,
            }
        document = {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob" if options.kind == "rayjob" else "RayCluster",
            "metadata": {"name": options.name},
            "spec": spec,
        }
    sys.stdout.write(yaml.safe_dump(document, sort_keys=False, width=1000))


def _parser() -> ConfigParser:
    parser = ConfigParser("ray-config", _USAGE, __doc__)
    add = parser.add_argument
    add("--kind", required=True, choices=(*_KUBERNETES, "autoscaler"))
    add("--image", required=True, help="container image with nemo-like, pinned by tag or digest")
    add(
        "--volume",
        required=True,
        help="SOURCE:/PATH, for run.dir, models and data on every node; SOURCE is a "
        "PersistentVolumeClaim (ReadWriteMany), or a shared folder of the machines (autoscaler)",
    )
    add("--name", default="nemo-like", help="name of the cluster or job (nemo-like)")
    add("--memory", help="memory of a worker pod, as 512Gi; /dev/shm is part of it")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="variable of every node")
    add(
        "--secret-env",
        action="append",
        default=[],
        metavar="NAME=SECRET",
        help="variable of every pod: the entry NAME of a Kubernetes Secret",
    )
    add("--hosts", help="HEAD,WORKER,...: addresses of the machines (autoscaler)")
    add("--ssh-user", help="who logs in there (autoscaler)")
    return parser


def _check(options: argparse.Namespace) -> None:
    """Refuse what is missing, malformed or without effect for the kind."""
    given = {"--memory": options.memory, "--hosts": options.hosts, "--ssh-user": options.ssh_user}
    kubernetes = options.kind in _KUBERNETES
    for option, value in given.items():
        needed = (option == "--memory") is kubernetes
        if needed and not value:
            raise UserError(f"--kind={options.kind} needs {option}; use {_USAGE}.")
        if value and not needed:
            raise UserError(f"{option}={value} has no effect with --kind={options.kind}; drop it.")
    if options.secret_env and not kubernetes:
        raise UserError("--secret-env names Kubernetes Secrets, and --kind=autoscaler has none.")
    if not _NAME.fullmatch(options.name):
        raise UserError(
            f"--name={options.name} must be at most 40 small letters, digits and dashes, and begin "
            "with a letter."
        )
    tag = options.image.rpartition("/")[2].partition(":")[2]
    if tag in ("", "latest"):
        raise UserError(
            f"--image={options.image} must be pinned by a tag or a digest (not latest); else nodes "
            "may run different versions."
        )
    if kubernetes and not _QUANTITY.fullmatch(options.memory):
        raise UserError(f"--memory={options.memory} must be an amount such as 512Gi.")
    source, _, path = options.volume.partition(":")
    if not source or ":" in path or not _is_plain(path) or PurePosixPath(path) in _SYSTEM_FOLDERS:
        raise UserError(
            f"--volume={options.volume} must be SOURCE:/PATH, a folder of its own, without : and .."
        )
    secrets = [pair.partition("=")[2] for pair in options.secret_env]
    for name in (source, *secrets) if kubernetes else ():
        if name and not _OBJECT.fullmatch(name):
            raise UserError(f"{name} is no name of Kubernetes: small letters, digits, - and dots.")
    names = [pair.partition("=")[0] for pair in (*options.env, *options.secret_env)]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{name} is given twice by --env and --secret-env; leave one.")
    for option, pairs in (("--env", options.env), ("--secret-env", options.secret_env)):
        for name, equals, value in (pair.partition("=") for pair in pairs):
            if not _VARIABLE.fullmatch(name) or not equals or (option != "--env" and not value):
                raise UserError(f"{option}={name}{equals}{value} must be NAME=...")


def _is_plain(path: str) -> bool:
    return PurePosixPath(path).is_absolute() and ".." not in PurePosixPath(path).parts


def _entrypoint(
    options: argparse.Namespace,
    config: RunConfig,
    name: str,
    overrides: Sequence[str],
    extra_dir: Path | None,
) -> str:
    """The command of the run, in the image's working folder, where nemo-like is."""
    path = options.volume.partition(":")[2]
    folder = config.run.dir
    if folder is None or not _is_plain(folder) or not PurePosixPath(folder).is_relative_to(path):
        raise UserError(
            f"run.dir={folder or 'null'} must be a folder below {path}, the volume that all pods "
            f"share; set run.dir={path}/NAME."
        )
    script = registry.name_of(type(config))
    command = ["nemo-like", script, *overrides]
    given = {
        "--config-name": name if name != script else None,
        "--config-dir": extra_dir,
        "--config-path": options.config_path,
    }
    for option, value in given.items():
        if value is not None:
            command += [option, str(value)]
    return shlex.join(command)


def _cluster(options: argparse.Namespace, plan: ResourcePlan) -> dict[str, Any]:
    """A head without CPUs for Ray, and one pod a node of the plan."""
    size = _node_size(plan)
    resources = {
        # No limit of CPUs: engines and reward processes may use more than Ray reserves.
        "requests": {"cpu": str(size["num-cpus"]), "memory": options.memory},
        "limits": {"memory": options.memory},
    }
    worker = _pod(options, "ray-worker", resources)
    if plan.uses_gpus:
        resources["limits"]["nvidia.com/gpu"] = str(size["num-gpus"])
        taint = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
        worker["spec"]["tolerations"] = [taint]
    head = {"requests": _HEAD, "limits": {"memory": _HEAD["memory"]}}
    num_nodes = len(plan.bundles_per_node)
    return {
        "rayVersion": version("ray"),
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0", "num-gpus": "0", "dashboard-host": "0.0.0.0"},
            "template": _pod(options, "ray-head", head),
        },
        "workerGroupSpecs": [
            {
                "groupName": "workers",
                "replicas": num_nodes,
                "minReplicas": num_nodes,
                "maxReplicas": num_nodes,
                "rayStartParams": {name: str(amount) for name, amount in size.items()},
                "template": worker,
            }
        ],
    }


def _pod(options: argparse.Namespace, name: str, resources: dict[str, Any]) -> dict[str, Any]:
    """Pods have variables that were named, and no others; KubeRay adds its probes."""
    claim, _, path = options.volume.partition(":")
    variables: list[dict[str, Any]] = [
        {"name": variable, "value": value}
        for variable, _, value in (pair.partition("=") for pair in options.env)
    ]
    variables += [
        {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": variable}}}
        for variable, _, secret in (pair.partition("=") for pair in options.secret_env)
    ]
    container = {
        "name": name,
        "image": options.image,
        "env": variables,
        "resources": resources,
        "volumeMounts": [
            {"name": "shared", "mountPath": path},
            # The default of 64 MiB is too little for Ray's object store and for NCCL.
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    return {
        "spec": {
            "securityContext": {"fsGroup": _GROUP, "fsGroupChangePolicy": "OnRootMismatch"},
            "containers": [container],
            "volumes": [
                {"name": "shared", "persistentVolumeClaim": {"claimName": claim}},
                {"name": "shm", "emptyDir": {"medium": "Memory"}},
            ],
        }
    }


def _autoscaler(options: argparse.Namespace, plan: ResourcePlan) -> dict[str, Any]:
    """Containers on given machines; Ray sizes their /dev/shm and finds the NVIDIA runtime."""
    head, *workers = [host.strip() for host in options.hosts.split(",")]
    num_nodes = len(plan.bundles_per_node)
    if "" in (head, *workers) or len({head, *workers}) <= len(workers):
        raise UserError(f"--hosts={options.hosts} must be different machines between commas.")
    if len(workers) != num_nodes:
        raise UserError(
            f"--hosts={options.hosts} has {len(workers)} worker(s) beside the head, and "
            f"cluster.num_nodes={num_nodes}; name one head and {num_nodes} worker(s)."
        )
    environment = ["RAY_AUTH_MODE=token", *options.env]
    size = " ".join(f"--{name}={amount}" for name, amount in _node_size(plan).items())
    join = "ray start --disable-usage-stats"
    config = "--autoscaling-config=~/ray_bootstrap_config.yaml"
    return {
        "cluster_name": options.name,
        "provider": {"type": "local", "head_ip": head, "worker_ips": workers},
        "auth": {"ssh_user": options.ssh_user},
        "docker": {
            "image": options.image,
            "container_name": options.name,
            "pull_before_run": True,
            "run_options": [
                "--ulimit nofile=65536:65536",
                f"--volume {shlex.quote(options.volume)}",
                *(f"--env {shlex.quote(variable)}" for variable in environment),
            ],
        },
        # `ray get-auth-token --generate` writes it where `ray up` runs.
        "file_mounts": {"~/.ray/auth_token": "~/.ray/auth_token"},
        "head_start_ray_commands": [
            "ray stop",
            f"{join} --head --port=6379 --num-cpus=0 --num-gpus=0 {config}",
        ],
        "worker_start_ray_commands": ["ray stop", f"{join} --address=$RAY_HEAD_IP:6379 {size}"],
    }


def _node_size(plan: ResourcePlan) -> dict[str, int]:
    bundles = plan.bundles_per_node[0]
    return {
        "num-cpus": math.ceil(plan.bundle_resources["CPU"] * bundles),
        "num-gpus": bundles if plan.uses_gpus else 0,
    }
