"""Placement on real Ray: physical order, errors that say what is missing, nothing left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import ray
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.util import placement_group_table

from nemo_like.config.run import ClusterConfig
from nemo_like.distributed import waiting
from nemo_like.distributed.connection import why_not_started
from nemo_like.distributed.virtual_cluster import Bundle, VirtualCluster, physical_order
from nemo_like.distributed.waiting import DriverMeter, Pending, progress, wait_together
from nemo_like.distributed.worker import RankLayout
from nemo_like.distributed.worker_group import WorkerGroup
from nemo_like.errors import RunError, UserError, WaitTimeoutError, WorkerDiedError
from nemo_like.generation.worker import Generation
from nemo_like.observe.metrics import values
from nemo_like.planning.resources import plan_resources
from nemo_like.policy.state.files import written
from tests.probe import Ending, Probe, Sampling


def live_groups():
    return [g for g in placement_group_table().values() if g["state"] != "REMOVED"]


@pytest.fixture
def group(local_ray, tmp_path):
    with VirtualCluster(plan_resources(ClusterConfig(cpu_workers_per_node=4), 1), 30.0) as cluster:
        bundles = [[bundle] for bundle in cluster.bundles]
        workers = WorkerGroup(
            lambda: Probe,
            "probe",
            bundles,
            timeout_s=300,
            layout=RankLayout({"dp": 2, "tp": 2}),
            log_dir=str(tmp_path / "logs"),
        )
        yield workers
        workers.shutdown()


@pytest.fixture
def sampling(local_ray, tmp_path):
    """A group of one worker with coroutines."""
    with VirtualCluster(plan_resources(ClusterConfig(cpu_workers_per_node=1), 1), 30.0) as cluster:
        workers = WorkerGroup(
            lambda: Sampling, "sampling", [[bundle] for bundle in cluster.bundles], timeout_s=300,
            log_dir=str(tmp_path), asynchronous=True,
        )  # fmt: skip
        yield workers
        workers.shutdown()


def kill(group, rank, pid):
    """End a worker, and wait until the driver's Ray knows."""
    os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + 120
    while group.actors[rank]._get_local_state() != waiting._DEAD:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_calls_reach_every_rank_and_shards_follow_the_axis(group):
    ranks = [rank for rank, _ in group.call(Probe.place)]
    assert ranks == [0, 1, 2, 3]
    assert group.scatter(Probe.echo, ["a", "b"]) == ["a", "b"]
    assert group.scatter(Probe.echo, ["x", "y"], axis="tp") == ["x", "y"]
    assert group.call_rank(2, Probe.echo, 7) == 7


def test_tokens_come_apart_from_the_result_and_few_of_them_outlive_their_worker(sampling):
    few, many = [sampling.call(Sampling.sample, size)[0] for size in (1_000, 1_000_000)]
    assert (few.num_bytes, many.num_bytes) == (1_000, 1_000_000)
    assert [len(ray.get(found.tokens)) for found in (few, many)] == [1_000, 1_000_000]
    with pytest.raises(RunError, match="no tokens"):
        sampling.call(Sampling.sample, -1)
    kill(sampling, 0, sampling.call(Sampling.pid)[0])
    assert len(ray.get(few.tokens)) == 1_000


def test_a_worker_with_more_calls_than_rays_default_answers_another_at_once(sampling):
    sampling.timeout_s = 30  # calls that hang do so for a minute
    calls = [sampling.submit(Sampling.hang) for _ in range(1_100)]
    assert sampling.call(Sampling.pid)
    assert len(calls) == 1_100


def test_the_first_failure_ends_the_wait_with_its_own_message(group):
    start = time.monotonic()
    with pytest.raises(RunError, match="loss is nan"):
        group.call(Probe.fail, "loss is nan")
    assert time.monotonic() - start < 50  # the others answer after a minute


def test_what_a_worker_refuses_is_still_the_users_error(group):
    with pytest.raises(UserError, match=r"^generation\.engine_kwargs\.enforce_eagr is not"):
        group.call(Probe.refuse)


def test_a_bug_keeps_its_traceback(group):
    with pytest.raises(KeyError, match=r"in bug[\s\S]*a bug"):
        group.call(Probe.bug)


def test_a_dead_worker_is_named_with_rank_node_phase_and_log(group):
    group.call(Probe.ready)
    lost = r"probe rank 2 on \S+ died in lose_its_engine: the process of its engine died\..*log"
    with pytest.raises(WorkerDiedError, match=lost):
        group.call_rank(2, Probe.lose_its_engine)
    with pytest.raises(WorkerDiedError) as error:
        group.call(Probe.die)
    message = str(error.value)
    assert "probe rank 1 on " in message
    assert "died in die" in message
    assert "about to break" in message
    assert "GiB free" in message


def test_an_idle_worker_that_dies_is_missed_whoever_is_waited_for(group):
    """Within seconds, in the phase that the driver waits for."""
    pids = group.call(Probe.ready)
    start = time.monotonic()
    threading.Timer(1.0, os.kill, (pids[3], signal.SIGKILL)).start()
    with pytest.raises(WorkerDiedError, match=r"rank 3 on \S+ died in hang, while it was idle"):
        group.call_rank(0, Probe.hang)
    assert time.monotonic() - start < 60


def test_a_worker_that_died_while_the_driver_computed_is_missed_before_the_next_call(group):
    pids = group.call(Probe.ready)
    kill(group, 1, pids[1])
    with pytest.raises(WorkerDiedError, match=r"rank 1 .* died before echo, while it was idle"):
        group.call_rank(0, Probe.echo, 1)


def test_a_worker_that_died_in_a_call_which_nobody_waits_for_yet_was_not_idle(group):
    pids = group.call(Probe.ready)
    under_way = group.submit(Probe.hang)
    kill(group, 1, pids[1])
    with pytest.raises(WorkerDiedError, match=r"probe rank 1 on \S+ died in hang: "):
        group.call_rank(0, Probe.echo, 1)
    del under_way


def test_a_death_is_told_even_if_its_echo_is_known_at_the_same_time(group):
    """Such as the other side of a refit, which lost its connection."""
    pids = group.call(Probe.ready)
    echo = group.submit_rank(1, Probe.fail, "The other side is gone.")
    cause = group.submit_rank(0, Probe.hang)
    kill(group, 0, pids[0])
    refs = [*echo.refs, *cause.refs]
    assert len(ray.wait(refs, num_returns=2, timeout=60)[0]) == 2
    with pytest.raises(WorkerDiedError, match=r"probe rank 0 on \S+ died in hang: "):
        wait_together(echo, cause)


def test_engines_end_in_order_whatever_another_worker_died_of(group, tmp_path):
    """Such as a policy rank, which ends the run: what engines have started would stay."""
    engines = WorkerGroup(
        lambda: Ending, "engine", group.bundles[:1], timeout_s=300, log_dir=str(tmp_path)
    )
    engines.call(Ending.ready)
    kill(group, 1, group.call(Probe.ready)[1])
    Generation(engines).shutdown()
    assert (tmp_path / "ended").exists()


def test_groups_of_other_runs_and_those_that_are_shut_down_are_not_missed(group, tmp_path):
    plan = plan_resources(ClusterConfig(cpu_workers_per_node=1), 1)
    with VirtualCluster(plan, 30.0) as cluster:
        other = WorkerGroup(
            lambda: Probe, "other", [[cluster.bundles[0]]], timeout_s=300, log_dir=str(tmp_path)
        )
        (pid,) = other.call(Probe.ready)
        beside = WorkerGroup(
            lambda: Probe, "beside", group.bundles, timeout_s=300, log_dir=str(tmp_path)
        )
        beside.call(Probe.ready)
        beside.shutdown()
        kill(other, 0, pid)
        assert group.call(Probe.echo, 1) == [1] * 4
        other.shutdown()


def test_what_a_rank_watches_ends_any_wait(group):
    """Such as an engine that dies while nobody calls it."""
    group.watch(Probe.lose_its_engine)
    with pytest.raises(
        WorkerDiedError, match=r"probe rank \d .* died (in|before) \w+, while it was idle: the proc"
    ):
        for _ in range(100):
            group.call(Probe.echo, 1)
            time.sleep(0.05)


def test_a_wait_says_what_is_going_on(group):
    view = group.waiting(60, "start_timeout_s", "it loads a model")
    call = view.submit(Probe.echo, 1)
    rank_0 = [ref for ref, rank in call.refs.items() if rank == 0]
    assert progress(call, rank_0, 31.4) == (
        "Waiting for probe rank 0 in echo, 31 s: it loads a model"
    )
    assert wait_together(call) == [[1] * 4]


def test_a_save_says_how_far_it_is(tmp_path):
    say = written(tmp_path, 3_000_000)
    (tmp_path / "part").write_bytes(bytes(1_200_000))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "part").write_bytes(bytes(800_000))
    assert say() == f"0.002 GB of about 0.003 GB are written to {tmp_path}"


def test_a_wait_that_is_too_long_names_who_and_where(group):
    with pytest.raises(
        WaitTimeoutError, match=r"waited 1 s for 4 of 4 probe workers in hang: probe rank 0 on"
    ):
        group.waiting(1).call(Probe.hang)


def test_who_hangs_is_named_beside_those_that_wait_for_it(group):
    """Such as both sides of a refit."""
    short = group.waiting(1)
    stuck = short.submit(Probe.hang)
    with pytest.raises(
        WaitTimeoutError, match=r"workers in hang: [^;]*, and for 4 of 4 probe workers in place: "
    ):
        wait_together(stuck, short.submit(Probe.place))


def test_answers_of_thousands_of_ranks_are_taken_at_once(group):
    """One at a time, eight thousand take two minutes."""
    refs = dict.fromkeys((ray.put(i) for i in range(4000)), 0)
    start = time.monotonic()
    (values,) = wait_together(Pending(group=group, refs=refs, phase="echo"))
    assert sorted(values) == list(range(4000))
    assert time.monotonic() - start < 40


def test_more_than_the_cluster_has_is_refused_at_once_and_leaves_nothing(local_ray):
    before = len(live_groups())
    start = time.monotonic()
    with pytest.raises(UserError, match=r"wants 2 node\(s\) with 8 CPUs and 8 GPUs each.*0 GPUs"):
        VirtualCluster(plan_resources(ClusterConfig(num_nodes=2, gpus_per_node=8), 1), 300.0)
    assert time.monotonic() - start < 60  # of the 300 s that it may wait
    assert len(live_groups()) == before


BUSY = r"waited 1 s for 1 node\(s\) with 6 CPUs free each; free now: [\d.]+: 2 CPUs, 0 GPUs\. Anoth"


def test_a_busy_cluster_is_waited_for_until_the_limit(local_ray):
    plan = plan_resources(ClusterConfig(cpu_workers_per_node=6), 1)
    with VirtualCluster(plan, 30.0):
        before = len(live_groups())
        with pytest.raises(WaitTimeoutError, match=BUSY):
            VirtualCluster(plan, 1.0)
        assert len(live_groups()) == before


@settings(deadline=None, max_examples=100)
@given(st.permutations([(node, gpu) for node in "abcd" for gpu in range(8)]))
def test_rank_order_is_physical_order_however_ray_numbers_bundles(places):
    bundles = [
        Bundle(group=None, index=i, node_id=node, address=f"10.0.0.{node}", gpu_id=str(gpu))
        for i, (node, gpu) in enumerate(places)
    ]
    ordered = sorted(bundles, key=physical_order)
    for block in range(4):
        of_node = ordered[8 * block : 8 * block + 8]
        assert len({bundle.node_id for bundle in of_node}) == 1
        assert [bundle.gpu_id for bundle in of_node] == [str(i) for i in range(8)]


def test_rank_layout_names_neighbours():
    layout = RankLayout({"dp": 2, "cp": 1, "tp": 4})
    assert [layout.coordinate(rank, "tp") for rank in range(8)] == [0, 1, 2, 3] * 2
    assert layout.output_ranks("dp") == (0, 4)
    assert layout.output_ranks("tp") == (0, 1, 2, 3)


def test_the_meter_counts_values_and_not_what_references_point_to(local_ray):
    meter = DriverMeter()
    reference = ray.put(bytes(10_000_000))
    meter.count([reference], 1)
    assert 0 < meter.pop()["driver/bytes"].value < 200
    meter.count(bytes(1000))
    meter.waited(1.5)
    assert values(meter.pop()) == {
        "driver/bytes": pytest.approx(1050, abs=50),
        "time/waiting_s": 1.5,
    }
    assert values(meter.pop()) == {"driver/bytes": 0, "time/waiting_s": 0}


SEVERAL_NODES = """
    import os
    import ray
    from ray.cluster_utils import Cluster
    from nemo_like.planning.resources import plan_resources
    from nemo_like.config.run import ClusterConfig
    from nemo_like.distributed.connection import connect
    from nemo_like.distributed.virtual_cluster import VirtualCluster
    from nemo_like.distributed.worker_group import WorkerGroup
    from tests.probe import Probe

    head = {"num_cpus": 1, "num_gpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for num_cpus in (2, 2, 4):
        cluster.add_node(num_cpus=num_cpus, num_gpus=num_cpus)
    os.environ["RAY_ADDRESS"] = cluster.address
    leave = connect()
    assert len(ray.nodes()) == 4, "joined the cluster that RAY_ADDRESS names, and started none"
    has = {node["NodeID"]: node["Resources"].get("CPU", 0) for node in ray.nodes()}

    def nodes_of_workers(bundles):
        group = WorkerGroup(lambda: Probe, "probe", bundles, timeout_s=300, log_dir="LOGS")
        group.submit(Probe.bug)  # Nobody waits for it.
        nodes = [node for _, node in group.call(Probe.place)]
        group.shutdown()
        return nodes

    plan = plan_resources(ClusterConfig(num_nodes=3, cpu_workers_per_node=2), 1)
    with VirtualCluster(plan, 300.0) as virtual:
        nodes = nodes_of_workers([[b] for b in virtual.bundles])
        assert sorted(has[node] for node in nodes) == [2, 2, 2, 2, 4, 4], "none on the smaller one"
        assert nodes[::2] == nodes[1::2] and len(set(nodes)) == 3, nodes
        assert nodes == [b.node_id for b in virtual.bundles]
    plan = plan_resources(ClusterConfig(num_nodes=3, gpus_per_node=2), 2)
    with VirtualCluster(plan, 300.0) as virtual:
        replicas = [[virtual.bundles[i] for i in replica] for replica in plan.generation]
        for bundles, node in zip(replicas, nodes_of_workers(replicas), strict=True):
            assert [b.node_id for b in bundles] == [node, node]
            first, second = (int(b.gpu_id) for b in bundles)
            assert 0 <= first < second < has[node]
        assert len({b.node_id for b in virtual.bundles}) == 3
    try:
        VirtualCluster(plan_resources(ClusterConfig(num_nodes=4, cpu_workers_per_node=2), 1), 300.0)
    except ValueError as error:
        assert "wants 4 node(s) with 2 CPUs each, and 3 of the Ray cluster's 4 node" in str(error)
        leave()
        print("placed on", len(set(nodes)), "nodes")
"""


def run_script(text, tmp_path, **env):
    root = str(Path(__file__).parent.parent)
    script = textwrap.dedent(text).replace("LOGS", str(tmp_path / "logs"))
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=root,
        env=os.environ | {"PYTHONPATH": root} | env,
        check=False,
    )


def test_ranks_follow_nodes_which_are_different_however_much_one_could_hold(tmp_path):
    result = run_script(SEVERAL_NODES, tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "placed on 3 nodes" in result.stdout
    assert "There are 9 GPUs, and the run uses none; set cluster.gpus_per_node." in result.stderr
    assert "Unhandled error" not in result.stderr


WRONG_ADDRESSES = """
    import os
    import socket
    import threading
    from nemo_like.run.ending import end_on_error
    from nemo_like.distributed.connection import connect
    from nemo_like.errors import RunError, UserError

    def greet(listener):
        connection, _ = listener.accept()
        connection.sendall(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))  # what a head begins with
        connections.append(connection)

    connections = []
    listener = socket.create_server(("127.0.0.1", 0))
    greeting = f"127.0.0.1:{listener.getsockname()[1]}"
    threading.Thread(target=greet, args=(listener,)).start()

    def answer(address):
        os.environ["RAY_ADDRESS"] = address
        try:
            connect()
        except UserError as error:
            return str(error).replace(address, "IT")
"""


def test_a_wrong_ray_address_is_named_within_seconds(tmp_path):
    """And a folder that Ray cannot write, where it is to be started."""
    start = time.monotonic()
    program = """
    for address in (
        "127.0.0.1:1", "ray://head:10001", "http://head:8265", "head:\u00b2", "a..b:1", greeting
    ):
        print(answer(address))
    os.environ |= {"RAY_ADDRESS": "", "RAY_TMPDIR": "/proc/nowhere"}
    try:
        connect()
    except RunError as error:
        print(error)
"""
    no_token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "", "HOME": str(tmp_path)}
    result = run_script(WRONG_ADDRESSES + program, tmp_path, **no_token)
    assert time.monotonic() - start < 150
    assert result.returncode == 0, result.stderr[-3000:]
    dead, client, server, digit, no_name, tokenless, unwritable = result.stdout.splitlines()
    assert "RAY_ADDRESS=IT: no Ray answers there ([Errno 111] Connection refused)" in dead
    assert "RAY_ADDRESS=IT is a Ray Client address" in client
    for other in (server, digit):
        assert "RAY_ADDRESS='IT' is not an address of a cluster, which is host:port" in other
    assert "RAY_ADDRESS=IT: no Ray answers there (encoding with 'idna' codec failed" in no_name
    assert "RAY_ADDRESS=IT wants a token, and none was found" in tokenless
    assert "Ray could not be started on this machine: [Errno 2]" in unwritable


def test_a_ray_that_does_not_come_up_is_blamed_on_what_is_likely():
    late = RuntimeError("The node timed out.")

    def told(error=late, waited_s=5.0, load=0.5, free_gib=50.0):
        return why_not_started(error, waited_s=waited_s, load=load, free_gib=free_gib)

    known = "(after 62 s, with 9.5 processes that want to run for each processor and 50.0 GiB"
    busy = told(waited_s=62.0, load=9.5)
    assert busy.startswith(f"The node timed out {known}")
    assert busy.index("the machine is busy") < busy.index("see that its folders")
    both = told(load=9.5, free_gib=0.3)
    order = ["memory is short", "the machine is busy", "see that its folders"]
    assert [both.index(one) for one in order] == sorted(both.index(one) for one in order)
    assert "busy" not in told()
    assert "busy" not in told(PermissionError(13, "Permission denied"), waited_s=62.0, load=9.5)


@pytest.mark.full
def test_a_head_that_dies_while_it_is_joined_ends_the_run_within_half_a_minute(tmp_path):
    start = time.monotonic()
    program = """
    os.environ["RAY_ADDRESS"] = greeting
    end_on_error(connect)
"""
    result = run_script(WRONG_ADDRESSES + program, tmp_path, RAY_AUTH_MODE="disabled")
    assert time.monotonic() - start < 50
    assert result.returncode == 1, result.stderr[-3000:]
    assert "Error: RAY_ADDRESS=127.0.0.1:" in result.stderr
    assert "ray.init could not join that cluster within 30 s; see that its head" in result.stderr
    assert "Traceback" not in result.stderr


RAY_DIES = """
    import psutil
    from nemo_like.run.ending import end_on_error
    from nemo_like.planning.resources import plan_resources
    from nemo_like.config.run import ClusterConfig
    from nemo_like.distributed.connection import connect
    from nemo_like.distributed.virtual_cluster import VirtualCluster
    from nemo_like.distributed.worker import Worker
    from nemo_like.distributed.worker_group import WorkerGroup

    def run():
        leave = connect()
        started = [" ".join(p.cmdline()[:4]) for p in psutil.Process().children(recursive=True)]
        for unused in ("dashboard.py", "log_monitor.py", "monitor.py", "_worker.py", "ray::IDLE"):
            assert not any(unused in one for one in started), started
        try:
            with VirtualCluster(plan_resources(ClusterConfig(), 1), 300.0) as cluster:
                bundles = [[bundle] for bundle in cluster.bundles]
                group = WorkerGroup(lambda: Worker, "probe", bundles, timeout_s=300, log_dir="LOGS")
                group.call(Worker.ready)
                (doomed,) = [p for p in psutil.Process().children() if p.name() == NAME]
                doomed.kill()
                doomed.wait()
                while True:
                    group.call(Worker.ready)
        finally:
            leave()

    end_on_error(run)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("gcs_server", "lost Ray's head at "),
        ("raylet", ": the raylet, Ray's own process on that node, was ended"),
    ],
)
def test_a_process_of_rays_that_is_killed_ends_the_run_at_once_and_by_name(
    tmp_path, name, sentence
):
    start = time.monotonic()
    result = run_script(RAY_DIES.replace("NAME", repr(name)), tmp_path)
    assert time.monotonic() - start < 50
    assert result.returncode == 1, result.stderr[-3000:]
    assert sentence in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
