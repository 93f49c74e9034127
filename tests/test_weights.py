"""Weights on their way: what arrives is what was sent, and no side waits for one that is gone."""

import multiprocessing
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from nemo_like.distributed.worker import listening_store
from nemo_like.errors import RunError
from nemo_like.refit.broadcast import BroadcastLink, BroadcastSender
from nemo_like.refit.buckets import announced_tensors, plan_buckets
from nemo_like.refit.ipc import IpcAddress, IpcLink, IpcSender
from nemo_like.refit.relay import FirstReceiver, links_of_gpu

CPU = torch.device("cpu")
TIMEOUT_S = 30.0
NAMES = [f"layer.{i}" for i in range(9)]
SPECS = {name: ((i + 1, 40), torch.float32) for i, name in enumerate(NAMES)}
BUCKETS = plan_buckets(SPECS, 1500)
NOBODY = IpcAddress("\0nobody listens here", b"")


def tensors_of(version):
    return {
        name: torch.full(shape, float(version) + 0.01 * i)
        for i, (name, (shape, _)) in enumerate(SPECS.items())
    }


def sender_and_ranks(kind, num_receivers, buckets, timeout_s=TIMEOUT_S):
    """A sender, and the link and rank of each receiver, which are ranks of one engine."""
    if kind == "ipc":
        sender = IpcSender(buckets, CPU, num_receivers, timeout_s)
        return sender, [(IpcLink((NOBODY, sender.address)), 1)] * num_receivers
    store = listening_store("127.0.0.1", None)
    num_members = 1 if kind == "relay" else num_receivers
    sender = BroadcastSender(store, buckets, CPU, num_members, timeout_s)
    link = BroadcastLink("127.0.0.1", sender.port, 1, sender.world_size)
    if kind == "relay":
        return sender, [(one, 0) for one in reversed(links_of_gpu(link, num_receivers))]
    return sender, [(link, rank) for rank in range(num_receivers)]


def connected(kind, num_receivers=2, buckets=BUCKETS, timeout_s=TIMEOUT_S):
    sender, ranks = sender_and_ranks(kind, num_receivers, buckets, timeout_s)

    def connect(link, rank):
        return link.receiver(rank, buckets, CPU, timeout_s)

    accepting = threading.Thread(target=sender.accept, daemon=True)  # for ever, if none connects
    accepting.start()
    with ThreadPoolExecutor() as threads:
        receivers = list(threads.map(connect, *zip(*ranks, strict=True)))
    accepting.join()
    return sender, receivers


def together(*actions):
    """Results or exceptions of all actions, each in a thread of its own."""
    with ThreadPoolExecutor(len(actions)) as threads:
        futures = [threads.submit(action) for action in actions]
        return [future.exception() or future.result() for future in futures]


def copies(receiver, version):
    return {name: tensor.clone() for name, tensor in receiver.tensors(version)}


@pytest.mark.parametrize("kind", ["ipc", "broadcast", "relay"])
def test_what_arrives_is_what_was_sent_refit_after_refit(kind):
    assert len(BUCKETS) >= 4  # Each buffer is used more than once.
    sender, receivers = connected(kind)
    for version in (1, 2, 7):
        sent = tensors_of(version)
        _, *received = together(
            partial(sender.send, iter(sent.items()), version),
            *(partial(copies, receiver, version) for receiver in receivers),
        )
        for arrived in received:
            assert list(arrived) == NAMES
            assert all(torch.equal(arrived[name], sent[name]) for name in NAMES)


ONE_OF_EACH = [
    *plan_buckets({"layer.weight": ((8,), torch.float32)}, 1 << 10),
    *plan_buckets({"layer.lora_A.weight": ((8,), torch.float32)}, 1 << 10),
]
"""A bucket of the model's and one of adapters, of one size."""


@pytest.mark.parametrize("announced", [1, 3])
@pytest.mark.parametrize("kind", ["ipc", "broadcast"])
def test_a_refit_of_another_version_is_refused_whichever_side_is_behind(kind, announced):
    sender, (receiver,) = connected(kind, 1, ONE_OF_EACH[:1])
    tensors = iter([("layer.weight", torch.ones(8))])
    _, received = together(partial(sender.send, tensors, 2), partial(copies, receiver, announced))
    assert isinstance(received, RunError)
    assert f"Refit {announced} was announced" in str(received)
    assert "refit 2." in str(received)


@pytest.mark.parametrize("kind", ["ipc", "broadcast"])
def test_a_bucket_that_is_not_the_next_one_is_refused(kind):
    sender, (receiver,) = connected(kind, 1, ONE_OF_EACH)
    tensors = iter([("layer.lora_A.weight", torch.ones(8))])
    _, received = together(
        partial(sender.send, tensors, 2, adapters_only=True), partial(copies, receiver, 2)
    )
    assert isinstance(received, Exception)
    assert "bucket 0" in str(received)


def test_a_bucket_stays_until_it_was_read():
    """A reader that is slow with one bucket still finds it whole when two others were sent."""
    sender, (receiver,) = connected("ipc", 1)
    reading = threading.Event()

    def read_slowly():
        tensors = receiver.tensors(1)
        name, first = next(tensors)
        reading.set()
        threading.Event().wait(0.5)
        return name, first.clone(), [name for name, _ in tensors]

    def send():
        sender.send(iter(tensors_of(1).items()), 1)

    _, (name, first, others) = together(send, read_slowly)
    assert [name, *others] == NAMES
    assert torch.equal(first, tensors_of(1)[name])


def test_each_side_learns_why_the_other_failed():
    sender, (receiver, other) = connected("ipc")

    def fail_to_load():
        for name, _ in receiver.tensors(1):
            if name == NAMES[4]:
                raise ValueError("no such parameter")

    sent, failed, second = together(
        lambda: sender.send(iter(tensors_of(1).items()), 1),
        fail_to_load,
        lambda: list(other.tensors(1)),
    )
    assert isinstance(failed, ValueError)
    assert "it stopped reading; its own log says why" in str(sent)
    assert isinstance(second, RunError)

    sender, (receiver,) = connected("ipc", 1)

    def broken():
        yield from list(tensors_of(1).items())[:5]
        raise RuntimeError("out of memory")

    sent, received = together(lambda: sender.send(broken(), 1), lambda: list(receiver.tensors(1)))
    assert isinstance(sent, RuntimeError)
    assert "RuntimeError: out of memory" in str(received)


@pytest.mark.parametrize("failing", [0, 1])
def test_engines_of_one_gpu_learn_why_another_failed(failing):
    sender, receivers = connected("relay", 3)
    first = next(i for i, one in enumerate(receivers) if isinstance(one, FirstReceiver))
    receivers.insert(0, receivers.pop(first))

    def fail_to_load():
        for name, _ in receivers[failing].tensors(1):
            if name == NAMES[4]:
                raise ValueError("no such parameter")

    def read(i):
        return fail_to_load if i == failing else partial(copies, receivers[i], 1)

    _, *found = together(
        partial(sender.send, iter(tensors_of(1).items()), 1), *(read(i) for i in range(3))
    )
    assert isinstance(found.pop(failing), ValueError)
    for error in found:
        assert isinstance(error, RunError)
        assert "The other side of the refit failed" in str(error)


def test_an_engine_waits_for_the_first_of_its_gpu_no_longer_than_its_limit():
    _, other = links_of_gpu(BroadcastLink("127.0.0.1", 1, 1, 2), 2)
    with pytest.raises(RunError, match=r"did not listen within 0\.3 s"):
        other.receiver(0, BUCKETS, CPU, 0.3)


def receive_and_die(link, rank):
    tensors = link.receiver(rank, BUCKETS, CPU, TIMEOUT_S).tensors(1)
    next(tensors)
    os._exit(1)


@pytest.mark.parametrize("kind", ["ipc", "broadcast"])
def test_a_sender_does_not_wait_for_a_receiver_that_died(kind):
    sender, (rank,) = sender_and_ranks(kind, 1, BUCKETS)
    process = multiprocessing.get_context("spawn").Process(target=receive_and_die, args=rank)
    process.start()
    sender.accept()
    with pytest.raises(RunError, match="The other side of the refit is gone"):
        for _ in range(3):  # What is in flight may still fit into the system's buffers.
            sender.send(iter(tensors_of(1).items()), 1)
    process.join()


@pytest.mark.parametrize("kind", ["ipc", "broadcast"])
def test_neither_side_waits_for_ever_for_one_that_is_silent(kind):
    pairs = [connected(kind, 1, ONE_OF_EACH[:1], timeout_s=1.5) for _ in range(2)]
    (sender, _), (_, (receiver,)) = pairs
    errors = together(
        lambda: sender.send(iter([("layer.weight", torch.ones(8))]), 1),
        lambda: next(receiver.tensors(1)),
    )
    for error in errors:
        assert isinstance(error, RunError)
        assert re.search("the refit (was silent for 1.5 s|is gone)", str(error))


def test_a_refit_that_holds_a_tensor_twice_is_refused():
    with pytest.raises(RunError, match=r"The refit holds layer\.0 twice"):
        announced_tensors([*BUCKETS, BUCKETS[0]])


def test_no_bucket_is_larger_than_asked_for_with_the_gaps_between_its_tensors():
    # 260 and 240 bytes fit into 500, but the second begins at 512.
    specs = {"a": ((65,), torch.float32), "b": ((60,), torch.float32)}
    assert [one.num_bytes for one in plan_buckets(specs, 500)] == [260, 240]
    assert [one.num_bytes for one in plan_buckets(specs, 751)] == [260, 240]
    assert [one.num_bytes for one in plan_buckets(specs, 752)] == [752]


def test_a_sender_of_other_names_or_shapes_is_refused():
    buffer = torch.empty(BUCKETS[0].num_bytes, dtype=torch.uint8)
    first = BUCKETS[0].slots[0]
    with pytest.raises(RunError, match=r"announced layer.0 .* came with layer.9"):
        BUCKETS[0].fill(buffer, iter([("layer.9", torch.zeros(first.shape))]))
    with pytest.raises(RunError, match=r"announced layer.0 \[1, 40\] .* layer.0 \[40\]"):
        BUCKETS[0].fill(buffer, iter([("layer.0", torch.zeros(40))]))
    with pytest.raises(RunError, match="came with nothing"):
        BUCKETS[0].fill(buffer, iter([]))
