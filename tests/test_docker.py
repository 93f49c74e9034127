"""What can be known of images without building them: sources, pins, users, commands."""

import re
import shlex
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from ray._private.ray_constants import DEFAULT_DASHBOARD_AGENT_LISTEN_PORT
from ray.scripts.scripts import start

from nemo_like import __version__
from nemo_like.compose.load import compose_config
from nemo_like.planning.resources import plan_run
from tests.small_runs import ROOT

DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
COMPOSE_TEXT = (ROOT / "docker" / "compose.yaml").read_text()
COMPOSE = yaml.safe_load(COMPOSE_TEXT)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {"cpu": ("cpu", "dev"), "gpu": ("vllm",)}


def instructions() -> list[tuple[str, str]]:
    """Instructions and their arguments, in order, without comments."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", "")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line]


def targets() -> dict[str, list[tuple[str, str]]]:
    """Instructions of each stage, by its name."""
    found: dict[str, list[tuple[str, str]]] = {}
    for instruction, arguments in instructions():
        if instruction == "FROM":
            found[arguments.split()[-1]] = stage = []
        stage.append((instruction, arguments))
    return found


def pins(name: str) -> dict[str, Version]:
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(package): Version(version) for package, version in pairs}


def test_every_copied_path_exists_and_is_sent_to_the_builder():
    sent = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"
    }
    assert all((ROOT / name).exists() for name in sent)
    copied = [words.split()[0] for name, words in instructions() if name == "COPY"]
    assert copied
    for source in copied:
        assert source == "." or ((ROOT / source).exists() and source.split("/")[0] in sent)
    needed = {"configs", "examples", "nemo_like", "pyproject.toml", "requirements"}
    assert needed | {PROJECT["readme"], *PROJECT["license-files"]} == sent


def test_bases_are_pinned_and_users_are_not_root():
    stages = targets()
    for name, stage in stages.items():
        base = stage[0][1].split()[0]
        assert base in stages or re.fullmatch(r"python:3\.11\.\d+-slim-[a-z]+", base)
        if name != "base":
            assert dict(stage)["USER"] == "1000:1000"
    assert "latest" not in DOCKERFILE + COMPOSE_TEXT
    tags = re.findall(r"nemo-like:(\S+)", DOCKERFILE + COMPOSE_TEXT)
    assert set(tags) == {f"{__version__}-cpu", f"{__version__}-gpu"}


@pytest.mark.parametrize("target", EXTRAS)
def test_each_list_has_what_the_project_wants(target):
    assert f"--requirement requirements/{target}.txt" in str(targets()[target])
    found = pins(target)
    extras = PROJECT["optional-dependencies"]
    common = (extras[name] for name in ("lora", "smollm2", "wandb", *EXTRAS[target]))
    for text in [*PROJECT["dependencies"], *(one for extra in common for one in extra)]:
        wanted = Requirement(text)
        assert found[canonicalize_name(wanted.name)] in wanted.specifier, text
    assert found["setuptools"] >= Version("77"), "builds the project without isolation"


def test_both_images_have_the_same_ray_and_hydra():
    cpu, gpu = pins("cpu"), pins("gpu")
    for name in ("ray", "hydra-core", "omegaconf", "math-verify", "reasoning-gym", "peft"):
        assert cpu[name] == gpu[name]


def test_health_is_asked_where_rays_agent_answers():
    command = dict(targets()["base"])["HEALTHCHECK"]
    assert f"127.0.0.1:{DEFAULT_DASHBOARD_AGENT_LISTEN_PORT}/api/local_raylet_healthz" in command


def test_compose_starts_two_nodes_that_share_runs_and_a_token():
    services = COMPOSE["services"]
    assert set(services) == {"head", "worker"}
    for service in services.values():
        program, subcommand, *options = shlex.split(service["command"])
        assert (program, subcommand) == ("ray", "start")
        assert start.make_context("start", options).params["num_cpus"] == 1
        assert service["build"]["target"] in targets()
        assert service["secrets"] == ["ray_token"]
        path = service["environment"]["RAY_AUTH_TOKEN_PATH"]
        assert (service["environment"]["RAY_AUTH_MODE"], path) == (
            "token",
            "/run/secrets/ray_token",
        )
        assert service["volumes"] == ["shared:/shared"]
        assert service["shm_size"]
    assert services["worker"]["depends_on"] == {"head": {"condition": "service_healthy"}}
    assert all(port.startswith("127.0.0.1:") for port in services["head"]["ports"])
    assert f"/docker/{COMPOSE['secrets']['ray_token']['file']}" in (ROOT / ".gitignore").read_text()


def test_the_documented_command_takes_both_nodes():
    words = re.search(r"examples/run_(\w+)\.py (.*)", COMPOSE_TEXT)
    assert words is not None
    overrides = [one for one in words[2].split() if not one.startswith("run.dir=/shared/")]
    assert len(overrides) < len(words[2].split())
    plan = plan_run(compose_config(ROOT / "configs", words[1], overrides))
    assert plan.bundles_per_node == (1, 1)
    assert plan.bundle_resources == {"CPU": 1.0}
