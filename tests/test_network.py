"""The interface that workers talk over, and what they are told at start, at any size; no Ray."""

import gc
import pickle
import time

import psutil
import pytest
from torch.distributed import TCPStore

from nemo_like.config.run import ClusterConfig
from nemo_like.distributed.virtual_cluster import (
    Bundle,
    NodeNetwork,
    listening_address,
    read_network,
    worker_environment,
)
from nemo_like.distributed.worker import RankLayout, listening_store
from nemo_like.distributed.worker_group import worker_contexts
from nemo_like.errors import UserError
from nemo_like.planning.resources import NodeResources, check_fits, plan_resources
from nemo_like.policy.worker import SenderAddress
from nemo_like.refit.ipc import IpcAddress
from nemo_like.rollout.weight_sync import links_to, receivers


def node(**inherited):
    """Two networks, the second with the address that Ray knows."""
    interfaces = {"lo": ["127.0.0.1"], "eth0": ["192.168.1.5"], "ib0": ["fe80::5%ib0", "10.1.0.5"]}
    return NodeNetwork(address="10.1.0.5", interfaces=interfaces, inherited=inherited)


def test_workers_of_several_nodes_use_the_interface_with_rays_address():
    assert worker_environment(node(), None, several_nodes=True, uses_gpus=True) == {
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_SOCKET_IFNAME": "=ib0",  # without the sign it would also mean ib01
        "VLLM_HOST_IP": "10.1.0.5",
    }


def test_workers_of_one_node_use_loopback():
    assert worker_environment(node(), None, several_nodes=False, uses_gpus=True) == {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",
        "VLLM_HOST_IP": "127.0.0.1",
    }


@pytest.mark.parametrize(
    ("wanted", "several_nodes", "expected"),
    [
        (None, False, "127.0.0.1"),
        (None, True, "10.1.0.5"),
        ("eth0", True, "192.168.1.5"),
        ("eth0", False, "192.168.1.5"),
        ("ib0", True, "10.1.0.5"),  # not the one that leads no further than the wire
    ],
)
def test_rendezvous_listen_on_one_address(wanted, several_nodes, expected):
    assert listening_address(node(), wanted, several_nodes=several_nodes) == expected


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (["00:11:22:33:44:55", "fe80::1%x0", "fd00::7"], "fd00::7"),
        (["fd00::7", "10.9.0.1"], "10.9.0.1"),  # as Ray's address
        (["00:11:22:33:44:55"], ""),
    ],
)
def test_of_an_interface_the_address_that_others_reach_is_taken(found, expected):
    of_node = NodeNetwork(address="10.1.0.5", interfaces={"x0": found}, inherited={})
    assert listening_address(of_node, "x0", several_nodes=True) == expected


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_rendezvous_listens_where_it_is_told_and_closes_with_its_store(address):
    def listeners():
        found = psutil.Process().net_connections("inet")
        return {one.laddr for one in found if one.status == psutil.CONN_LISTEN}

    before = listeners()
    store = listening_store(address, 2)
    place = (address, store.port)
    assert listeners() - before == {place}
    other = TCPStore(address, store.port, 2, False)
    other.set("key", "value")
    assert store.get("key") == b"value"
    del store, other
    gc.collect()
    end = time.monotonic() + 10
    while place in listeners():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_what_the_node_had_set_before_ray_started_wins_over_the_default():
    found = worker_environment(
        node(NCCL_SOCKET_IFNAME="^lo"), None, several_nodes=True, uses_gpus=True
    )
    assert found["NCCL_SOCKET_IFNAME"] == "^lo"
    assert found["GLOO_SOCKET_IFNAME"] == "ib0"


@pytest.mark.parametrize("several_nodes", [False, True])
def test_the_configured_interface_wins_over_all(several_nodes):
    inherited = node(NCCL_SOCKET_IFNAME="^lo")
    found = worker_environment(inherited, "eth0", several_nodes=several_nodes, uses_gpus=True)
    assert found["GLOO_SOCKET_IFNAME"] == "eth0"
    assert found["NCCL_SOCKET_IFNAME"] == "=eth0"


def test_an_interface_that_a_node_lacks_is_refused_with_those_that_it_has():
    expected = (
        r"network_interface=eth7 is not an interface of node 10\.1\.0\.5, which has eth0, ib0, lo"
    )
    with pytest.raises(UserError, match=expected):
        worker_environment(node(), "eth7", several_nodes=True, uses_gpus=True)


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_a_variable_that_names_no_interface_is_refused_where_it_matters(variable):
    def environment(value, *, wanted=None, uses_gpus=True):
        inherited = node(**{variable: value})
        return worker_environment(inherited, wanted, several_nodes=False, uses_gpus=uses_gpus)

    is_nccl = variable.startswith("NCCL")
    for value in ("eth0", "eth0,ib0", *(("=ib0", "^lo", "ib,x") if is_nccl else ())):
        assert environment(value)[variable] == value
    for value in ("eth7", "=ib" if is_nccl else "eth0,eth7"):
        with pytest.raises(UserError, match=f"{variable}={value} of .* which has eth0, ib0, lo;"):
            environment(value)
    assert environment("eth7", wanted="eth0")[variable].endswith("eth0")
    if is_nccl:
        assert environment("eth7", uses_gpus=False)["GLOO_SOCKET_IFNAME"] == "lo"


def test_an_address_that_no_interface_has_leaves_the_choice_to_the_libraries():
    translated = NodeNetwork(address="203.0.113.9", interfaces={"lo": ["127.0.0.1"]}, inherited={})
    found = worker_environment(translated, None, several_nodes=True, uses_gpus=True)
    assert found == {"VLLM_HOST_IP": "203.0.113.9"}


def test_this_node_has_a_loopback_and_says_what_its_processes_inherit():
    environment = {"GLOO_SOCKET_IFNAME": "x", "HOME": "/"}
    network = read_network("127.0.0.1", environment)
    assert any("127.0.0.1" in found for found in network.interfaces.values())
    assert network.inherited == {"GLOO_SOCKET_IFNAME": "x"}


# Thousands of ranks.


def bundles(num_nodes):
    """Of nodes with eight GPUs each."""
    environment = worker_environment(node(), None, several_nodes=True, uses_gpus=True)
    return [
        Bundle(
            group=None,  # pyright: ignore
            index=i % 8,
            node_id=f"{i // 8:056x}",
            address="10.100.100.100",
            gpu_id=str(i % 8),
            environment=environment,
        )
        for i in range(8 * num_nodes)
    ]


def largest(values):
    return max(len(pickle.dumps(value)) for value in values)


def test_what_a_worker_is_told_at_start_does_not_grow_with_the_group():
    sizes = {}
    for num_nodes in (1, 1000):
        of_ranks = [[bundle] for bundle in bundles(num_nodes)]
        contexts = worker_contexts("policy", of_ranks, "/shared/run/logs")
        assert len(contexts) == 8 * num_nodes
        sizes[num_nodes] = largest(contexts)
    assert sizes[1] < 1000
    assert sizes[1000] <= sizes[1] + 16  # digits of numbers


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_what_a_refit_tells_each_side_does_not_grow_with_the_group(transport):
    sizes = {}
    for num_nodes in (1, 1000):
        separate = None if transport == "ipc" else 4 * num_nodes
        config = ClusterConfig(
            num_nodes=num_nodes, gpus_per_node=8, num_generation_workers=separate
        )
        plan = plan_resources(config, 1)
        counts = receivers(transport, plan)
        assert sum(counts) == len(plan.generation)
        ipc = IpcAddress(socket="x" * 40, key=bytes(32))
        senders = [SenderAddress(ipc=ipc, port=40000)] * len(plan.policy)
        links = links_to(transport, plan, senders, "10.100.100.100")
        sizes[num_nodes] = largest(counts), largest(links)
    assert sizes[1000][0] <= sizes[1][0] + 16
    assert sizes[1000][1] <= sizes[1][1] + 16


@pytest.mark.parametrize(
    ("num_gpus", "num_apart", "tensor_parallel", "engines"),
    [(4, None, 2, 1), (6, 4, 2, 1), (4, None, 1, 2), (3, 1, 1, 1), (8, None, 4, 1), (3, 2, 1, 3)],
)
def test_every_gpu_of_an_engine_has_one_place_in_the_group_of_a_broadcast(
    num_gpus, num_apart, tensor_parallel, engines
):
    config = ClusterConfig(gpus_per_node=num_gpus, num_generation_workers=num_apart)
    plan = plan_resources(config, tensor_parallel, engines)
    senders = [SenderAddress(ipc=None, port=40000)] * len(plan.policy)
    links = links_to("broadcast", plan, senders, "10.0.0.1")
    first = {}  # of each GPU
    for bundles, link in zip(plan.generation, links, strict=True):
        if bundles in first:
            assert link.first == first[bundles].address
        else:
            first[bundles] = link
    if engines > 1:
        assert {link.num_others for link in first.values()} == {engines - 1}
        assert len({link.address for link in first.values()}) == len(first)
    members = [link.source if engines > 1 else link for link in first.values()]
    places = [
        member.first_rank + rank
        for member, bundles in zip(members, first, strict=True)
        for rank in range(len(bundles))
    ]
    size = 1 + sum(map(len, first))
    assert places == list(range(1, size))  # 0 sends
    assert {member.world_size for member in members} == {size}
    assert receivers("broadcast", plan) == (size - 1, *[0] * (len(plan.policy) - 1))
    if num_apart is None:  # each GPU has as many engine ranks as engines
        assert receivers("ipc", plan) == (engines,) * num_gpus


def test_output_ranks_of_thousands_of_ranks_are_found_at_once():
    layout = RankLayout({"pp": 4, "dp": 500, "tp": 4})
    start = time.thread_time()
    assert len(layout.output_ranks("dp", last="pp")) == 500
    assert time.thread_time() - start < 2


# Whether a cluster is large enough.


def nodes(*cpus_and_gpus):
    return [
        NodeResources(node_id=str(i), address=f"10.0.0.{i}", resources={"CPU": cpus, "GPU": gpus})
        for i, (cpus, gpus) in enumerate(cpus_and_gpus)
    ]


def test_a_cluster_of_thousands_of_nodes_is_checked_at_once():
    plan = plan_resources(ClusterConfig(num_nodes=10_000, gpus_per_node=8), 1)
    have = nodes(*[(64, 8)] * 10_000)
    start = time.thread_time()
    check_fits(plan, have)
    with pytest.raises(UserError, match=r"wants 10000 node\(s\) with 8 CPUs and 8 GPUs each"):
        check_fits(plan, have[1:])
    assert time.thread_time() - start < 2


def test_nodes_that_are_too_small_do_not_count_and_their_neighbours_do():
    plan = plan_resources(ClusterConfig(num_nodes=2, gpus_per_node=4), 1)
    check_fits(plan, nodes((0, 0), (4, 4), (64, 2), (4, 8)))
    for short in (nodes((4, 4), (64, 3)), nodes((4, 4), (3, 8)), nodes((64, 8)), []):
        with pytest.raises(UserError, match=r"wants 2 node\(s\)"):
            check_fits(plan, short)


def test_fractions_of_a_cpu_add_up():
    config = ClusterConfig(num_nodes=1, cpu_workers_per_node=3, cpus_per_worker=0.1)
    plan = plan_resources(config, 1)
    check_fits(plan, nodes((0.3, 0)))
