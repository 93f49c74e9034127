"""What a run listens on: loopback alone, if it has one machine."""

import ipaddress
import os
import subprocess
import sys
import time

import psutil
import pytest

from tests.small_runs import ROOT, SMALL, records

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


@pytest.mark.parametrize(
    "engine",
    [
        "vllm",
        *(pytest.param(one, marks=pytest.mark.full) for one in ENGINES if one != "vllm"),
    ],
)
def test_all_processes_of_a_run_on_one_machine_listen_on_loopback_only(engine, tmp_path):
    backend = engine.partition("-")[0]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "examples/run_grpo.py", *SMALL, *OVERRIDES, *ENGINES[engine]]
    process = subprocess.Popen(
        [*command, f"generation.backend={backend}", f"run.dir={tmp_path}/run"],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
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
    assert max(records(tmp_path / "run")) == 2
    elsewhere = {address: names for address, names in found.items() if not is_loopback(address)}
    assert not elsewhere
    everyone = {name for names in found.values() for name in names}
    assert {"gcs_server", "raylet"} < everyone
    assert any("PolicyWorker" in name for name in everyone), everyone
    assert backend == "hf" or "engine" in everyone, everyone
