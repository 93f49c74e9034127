"""Runs over several nodes: the numbers of one node, and cut links that are survived or named."""

import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.network_nodes import QUICK_HEALTH_CHECKS, Network, listening, why_impossible
from tests.not_here import cannot_test
from tests.small_runs import SMALL, last_of, numbers, records, run

START_S = 240.0
WORKERS = ("ray::PolicyWorker", "ray::GenerationWorker", "nemo_like.rewards.process")


@pytest.fixture(scope="module")
def network():
    """A head without CPUs, and four nodes with one each."""
    if missing := why_impossible():
        cannot_test(f"a test of several nodes {missing}", "NEMO_LIKE_REQUIRE_NETNS")
    with (
        TemporaryDirectory() as folder,  # short, for the names of Ray's sockets
        Network(Path(folder), (0, 1, 1, 1, 1), **QUICK_HEALTH_CHECKS) as network,
    ):
        yield network


def command(folder, *overrides):
    always = ("generation.backend=hf", "cluster.call_timeout_s=120", f"run.dir={folder}")
    return [sys.executable, "examples/run_grpo.py", *last_of([*SMALL, *always, *overrides])]


def read(folder):
    """Records so far."""
    return records(folder) if (folder / "metrics.jsonl").exists() else {}


def wait_until(is_so, limit_s, driver):
    """Poll; fails with the driver's output if it ends, or the time."""
    end = time.monotonic() + limit_s
    while not is_so():
        assert driver.poll() is None, driver.communicate()[0]
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.1)


APART = "cluster.num_generation_workers=1"
LAYOUTS = [
    pytest.param(3, (), id="three-nodes"),
    pytest.param(2, (), id="two-nodes"),
    pytest.param(2, (APART,), id="two-separate"),
]


@pytest.mark.full  # of three with refits over the wire it is below
@pytest.mark.parametrize(("num_nodes", "overrides"), LAYOUTS)
def test_several_nodes_give_the_numbers_of_one(network, local_ray, tmp_path, num_nodes, overrides):
    overrides = ("grpo.max_steps=3", *overrides)
    code, output = network.nodes[0].run(
        command(tmp_path / "several", f"cluster.num_nodes={num_nodes}", *overrides), 2 * START_S
    )
    assert code == 0, output
    assert_numbers_of_one(records(tmp_path / "several"), tmp_path, num_nodes, *overrides)


def assert_numbers_of_one(several, tmp_path, num_workers, *overrides):
    """Those of the same run on one node; of its last step, which has a validation, too."""
    one = run(tmp_path / "one", f"cluster.cpu_workers_per_node={num_workers}", *overrides)
    for step, record in one.items():
        assert numbers(several[step]) == pytest.approx(numbers(record), rel=1e-6, abs=1e-6), step
    assert one[3]["train/grad_norm"] > 0


PLACEMENT = """
import sys
from nemo_like.planning.resources import plan_resources
from nemo_like.config.run import ClusterConfig
from nemo_like.distributed.connection import connect
from nemo_like.distributed.virtual_cluster import VirtualCluster
from nemo_like.distributed.worker_group import WorkerGroup
from nemo_like.errors import UserError
from tests.probe import Probe

leave = connect()
plan = plan_resources(ClusterConfig(num_nodes=4, cpu_workers_per_node=1), 1)
with VirtualCluster(plan, 200.0) as cluster:
    bundles = [[bundle] for bundle in cluster.bundles]
    group = WorkerGroup(lambda: Probe, "probe", bundles, timeout_s=300, log_dir=sys.argv[1])
    assert group.call(Probe.place) == [(i, b.node_id) for i, b in enumerate(cluster.bundles)]
    print("ranks on", *(context.address for context in group.contexts))
    print("interface", *group.call(Probe.variable, "GLOO_SOCKET_IFNAME"))
    print("listen on", *(context.listens_on for context in group.contexts))
    group.shutdown()
with VirtualCluster(plan, 200.0, "lan0") as cluster:
    print("chosen", *(one.environment["NCCL_SOCKET_IFNAME"] for one in cluster.bundles))
    print("there", *(one.listens_on for one in cluster.bundles))
try:
    VirtualCluster(plan, 200.0, "eth9")
except UserError as error:
    print(error)
plan = plan_resources(ClusterConfig(num_nodes=1, cpu_workers_per_node=1), 1)
with VirtualCluster(plan, 200.0) as cluster:
    alone = cluster.bundles[0]
    print("alone", alone.environment["GLOO_SOCKET_IFNAME"], alone.listens_on)
leave()
"""


def test_ranks_follow_nodes_and_talk_over_the_network_of_ray(network, tmp_path):
    """From a driver that is on none of the first node's; the head has no CPU for a rank."""
    driver = network.nodes[2]
    code, output = driver.run([sys.executable, "-c", PLACEMENT, str(tmp_path)], START_S)
    assert code == 0, output
    assert "ranks on 10.77.0.2 10.77.0.3 10.77.0.4 10.77.0.5\n" in output
    assert "interface eth0 eth0 eth0 eth0\n" in output
    assert "listen on 10.77.0.2 10.77.0.3 10.77.0.4 10.77.0.5\n" in output
    assert "there 192.168.77.2 192.168.77.3 192.168.77.4 192.168.77.5\n" in output
    assert "chosen =lan0 =lan0 =lan0 =lan0\n" in output
    assert "cluster.network_interface=eth9 is not an interface of node 10.77.0." in output
    assert "which has eth0, lan0, lo; use one that every node has" in output
    assert "alone lo 127.0.0.1\n" in output


@pytest.mark.full
def test_an_interface_that_leads_nowhere_ends_the_run_with_one_sentence(network, tmp_path):
    wrong = ("cluster.num_nodes=2", "cluster.network_interface=lan0", "cluster.call_timeout_s=20")
    code, output = network.nodes[0].run(command(tmp_path, *wrong), START_S)
    assert code == 1, output
    assert "has no connection to other ranks in start" in output
    assert "cluster.network_interface" in output
    assert "Traceback" not in output


@pytest.mark.full
def test_a_driver_that_is_cut_from_the_head_ends_with_one_sentence(network, tmp_path):
    node = network.nodes[1]
    driver = node.popen(
        [*command(tmp_path, "cluster.num_nodes=3", "grpo.max_steps=10000")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    wait_until(lambda: len(read(tmp_path)) > 2, START_S, driver)
    node.cut()
    try:
        output, _ = driver.communicate(timeout=240)
    finally:
        node.restore()
        driver.kill()
    assert driver.returncode == 1, output
    assert f"The driver on {node.address} lost Ray's head at {network.nodes[0].address}" in output
    assert "Traceback" not in output
    end = time.monotonic() + 60
    while node.processes("raylet/raylet"):
        assert time.monotonic() < end
        time.sleep(0.2)
    node.start_ray(1)


@pytest.mark.full
def test_vllm_over_two_nodes_samples_what_it_does_on_one(network, local_ray, tmp_path):
    overrides = ("grpo.max_steps=2", "generation.backend=vllm")
    code, output = network.nodes[0].run(
        command(tmp_path / "two", "cluster.num_nodes=2", *overrides), 2 * START_S
    )
    assert code == 0, output
    one = run(tmp_path / "one", "cluster.cpu_workers_per_node=2", *overrides)
    two = records(tmp_path / "two")
    texts = [(tmp_path / name / "trajectories.jsonl").read_text() for name in ("one", "two")]
    assert texts[0] == texts[1]
    for step in (1, 2):
        assert two[step]["mismatch/max_abs"] < 1e-4
        assert two[step]["rollout/reward"] == one[step]["rollout/reward"]
        assert two[step]["train/loss"] == pytest.approx(one[step]["train/loss"], abs=1e-5)


# The last test, since it leaves the network with a node less.
def test_a_run_has_the_numbers_of_one_node_survives_a_short_cut_and_goes_on_after_a_long_one(
    network, local_ray, tmp_path
):
    """Two nodes train and one samples. Gloo would take the interface of the hosts' names, which
    leads nowhere."""
    head = network.nodes[0]
    steps = ("checkpoint.every_steps=5", "validation.every_steps=3")
    going_on = command(tmp_path, "cluster.num_nodes=3", APART, *steps)
    driver = head.popen(
        [*going_on, "grpo.max_steps=10000"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    wait_until(lambda: len(read(tmp_path)) > 3, START_S, driver)
    on = [node for node in network.nodes if node.processes("ray::PolicyWorker")]
    assert len(on) == 2
    for node in on:  # apart from Ray's own, of version 6
        for process in node.processes("ray::PolicyWorker"):
            assert listening(process) == {node.address}
    _, lost = on  # The driver's connection to rank 1 breaks, and that of rank 0 to rank 1.

    lost.cut()
    time.sleep(2.0)
    lost.restore()
    before = max(read(tmp_path))
    wait_until(lambda: max(read(tmp_path)) > before + 5, START_S, driver)

    wait_until(lambda: max(read(tmp_path)) % 5 in (2, 3), START_S, driver)
    lost.cut()
    cut_at = time.monotonic()
    output, _ = driver.communicate(timeout=START_S)
    assert time.monotonic() - cut_at < 60
    assert driver.returncode == 1, output
    error = output[output.index("Error: ") :]
    assert f"rank 1 on {lost.address} died " in error
    assert "its node was lost (health check failed" in error
    assert "Traceback" not in output
    others = [node for node in network.nodes if node is not lost]
    left = [text for node in others for text in WORKERS if node.processes(text)]
    assert not left

    interrupted = records(tmp_path)  # The fourth node is there to go on with.
    assert_numbers_of_one(interrupted, tmp_path, 3, APART, "grpo.max_steps=3", steps[1])
    saved = 5 * (max(interrupted) // 5)
    last = max(interrupted)
    assert last > saved
    code, output = head.run([*going_on, f"grpo.max_steps={last + 1}", "run.resume=true"], START_S)
    assert code == 0, output
    assert f"Continuing after step {saved}" in output
    resumed = records(tmp_path)
    assert list(resumed) == list(range(last + 2))
    for step in range(saved + 1, last + 1):
        expected = {k: v for k, v in numbers(interrupted[step]).items() if "validation" not in k}
        found = {k: v for k, v in numbers(resumed[step]).items() if "validation" not in k}
        assert found == expected, step
