"""What a run listens on: loopback alone, if it has one machine."""

import ipaddress
import json
import os
import subprocess
import sys
import time

import psutil
import pytest

from tests.small_runs import ROOT, SMALL, last_of, records

LIMIT_S = 600.0
OVERRIDES = (
    "grpo.max_steps=2",
    "cluster.cpu_workers_per_node=3",
    "cluster.cpus_per_worker=0.5",
    "checkpoint.export=false",
)
# Generation is apart, so that refits have a group of processes of their own.
ENGINES = {
    "hf": ("cluster.num_generation_workers=1",),
    "vllm": ("cluster.num_generation_workers=1",),
    "vllm-two-ranks": ("cluster.num_generation_workers=2", "generation.tensor_parallel_size=2"),
}


def listeners(driver):
    """Address -> names of the processes that listen there, of a driver and all below it."""
    found = {}
    for process in (driver, *driver.children(recursive=True)):
        try:
            above = [one.name() for one in process.parents()]
            name = "engine" if any("GenerationWorker" in one for one in above) else process.name()
            connections = process.net_connections("inet")
        except psutil.Error:  # ended meanwhile
            continue
        for one in connections:
            if one.status == psutil.CONN_LISTEN or (
                one.type.name == "SOCK_DGRAM" and not one.raddr
            ):
                found.setdefault(one.laddr.ip, set()).add(name)
    return found


def is_loopback(text):
    address = ipaddress.ip_address(text)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def run(engine, folder, *overrides, **env):
    """Records by step of a run to its end, in which every process listens on loopback only."""
    backend = engine.partition("-")[0]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    options = last_of([*SMALL, *OVERRIDES, *ENGINES[engine], *overrides])
    process = subprocess.Popen(
        [sys.executable, "examples/run_grpo.py", *options, f"run.dir={folder}"],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    driver, found = psutil.Process(process.pid), {}
    end = time.monotonic() + LIMIT_S
    try:
        while process.poll() is None and time.monotonic() < end:
            for address, names in listeners(driver).items():
                found.setdefault(address, set()).update(names)
            time.sleep(0.5)
    finally:
        process.kill()
    output, _ = process.communicate()
    assert process.returncode == 0, output
    elsewhere = {address: names for address, names in found.items() if not is_loopback(address)}
    assert not elsewhere
    everyone = {name for names in found.values() for name in names}
    assert {"gcs_server", "raylet"} < everyone
    assert any("PolicyWorker" in name for name in everyone), everyone
    assert backend == "hf" or "engine" in everyone, everyone
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["generation_backend"] == backend
    return records(folder)


@pytest.mark.full
@pytest.mark.parametrize("engine", ["hf", "vllm-two-ranks"])
def test_all_processes_of_a_run_on_one_machine_listen_on_loopback_only(engine, tmp_path):
    backend = engine.partition("-")[0]
    assert max(run(engine, tmp_path / "run", f"generation.backend={backend}")) == 2


def test_real_vllm_samples_what_the_policy_trains_through_five_refits(tmp_path):
    steps = run(
        "vllm", tmp_path / "run", "grpo.max_steps=6", "logging.sinks=[wandb]", WANDB_MODE="offline"
    )
    assert list(steps) == list(range(7))
    for step in range(1, 7):
        assert steps[step]["mismatch/max_abs"] < 1e-5
        assert steps[step]["refit/bytes"] > 0 or step == 1
    assert list((tmp_path / "run" / "wandb").iterdir())
