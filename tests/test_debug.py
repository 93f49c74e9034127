"""What ``policy.debug`` switches on, on gloo ranks: replicas, data, memory, collectives, hangs."""

import json
import logging
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.debug import DebugConfig
from nemo_like.config.policy import PolicyConfig
from nemo_like.errors import RunError
from nemo_like.observe.metrics import Reduce, values
from nemo_like.policy.debug.checks import (
    CollectiveTimer,
    _bit_hash,
    check_data,
    check_equal_over,
    fingerprint_rows,
    memory_metrics,
)
from nemo_like.policy.debug.diagnostics import DebugDiagnostics, HangReport
from nemo_like.policy.debug.profile import StepProfiles
from nemo_like.policy.trainer_setup import TrainerSetup

CPU = torch.device("cpu")
ULP_AT_1 = 2.0**-23


def one_ulp_up(tensor):
    return torch.nextafter(tensor, torch.full_like(tensor, torch.inf))


# Hashes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_a_hash_notices_a_flipped_bit_and_swapped_elements(dtype):
    torch.manual_seed(0)
    tensor = torch.randint(0, 256, (4096,), dtype=torch.uint8).view(dtype)
    assert _bit_hash(tensor) == _bit_hash(tensor.clone())
    seen = {_bit_hash(tensor)}
    for bit in range(8):
        flipped = tensor.clone()
        flipped.view(torch.uint8)[1001] ^= 1 << bit
        seen.add(_bit_hash(flipped))
    distinct = torch.arange(64).to(dtype)
    seen.add(_bit_hash(distinct))
    for other in range(1, 64):
        order = torch.arange(64)
        order[0], order[other] = other, 0
        seen.add(_bit_hash(distinct[order]))
    assert len(seen) == 1 + 8 + 1 + 63


def test_a_hash_notices_the_sign_of_zero_and_exchanged_chunks():
    assert _bit_hash(torch.tensor([0.0])) != _bit_hash(torch.tensor([-0.0]))
    assert _bit_hash(torch.tensor([True, False])) != _bit_hash(torch.tensor([False, True]))
    chunk = 1 << 20
    long = torch.cat([torch.ones(chunk), torch.full((chunk,), 2.0), torch.ones(5)])
    exchanged = torch.cat([long[chunk : 2 * chunk], long[:chunk], long[2 * chunk :]])
    assert _bit_hash(long) != _bit_hash(exchanged)


def test_a_hash_is_of_values_in_order_whatever_the_strides():
    square = torch.arange(9.0).reshape(3, 3)
    assert _bit_hash(square.t()) == _bit_hash(square.t().contiguous())
    assert _bit_hash(square.t()) != _bit_hash(square)
    assert _bit_hash(torch.zeros(0)) == 0
    assert _bit_hash(torch.tensor(3.0)) == _bit_hash(torch.tensor([3.0]))


# Two ranks: each test starts processes once and checks several things in them.


def test_two_ranks_find_what_differs(pool):
    pool.run(2, f"{__name__}:plain_replicas")


def plain_replicas():
    rank = dist.get_rank()
    group = dist.group.WORLD
    weights = {"first": torch.ones(3), "second": torch.ones(4), "third": torch.ones(5).bfloat16()}
    check_equal_over(weights, [("tp", group)], rank, "parameters")
    check_equal_over({}, [("tp", group)], rank, "parameters")

    off = dict(weights)
    if rank == 1:
        off["second"] = torch.tensor([1.0, 1.0, 1.0 + ULP_AT_1, 1.0])
    expected = (
        rf"Rank {rank}: 1 of 3 parameters differ between ranks 0 and 1 along axis tp: 'second' "
        r"\(largest absolute difference of the first: 1\.19e-07\)"
    )
    with pytest.raises(RunError, match=expected):
        check_equal_over(off, [("tp", group)], rank, "parameters")

    zeros = {"zero": torch.tensor([0.0, -0.0 if rank else 0.0])}
    with pytest.raises(RunError, match=r"'zero' \(largest absolute difference of the first: 0\)"):
        check_equal_over(zeros, [("tp", group)], rank, "gradients")

    many = {f"p{i}": torch.full((2,), float(i + 2 * rank)) for i in range(5)}
    with pytest.raises(RunError, match=r"5 of 5 .* 'p0', 'p1', 'p2', \.\.\. .*first: 2\)"):
        check_equal_over(many, [("tp", group)], rank, "parameters")

    none_on_one = weights if rank else {}
    for other in ({"first": torch.ones(3 + rank)}, {"ab"[rank]: torch.ones(3)}, none_on_one):
        with pytest.raises(RunError, match="other names, dtypes or shapes"):
            check_equal_over(other, [("tp", group)], rank, "parameters")
    dist.barrier()  # nobody is left behind in a collective


def test_two_ranks_find_rows_that_are_double_or_missing(pool):
    pool.run(2, f"{__name__}:data_of_ranks")


def data_of_ranks():
    rank = dist.get_rank()
    group = dist.group.WORLD
    alone = [dist.new_group([r]) for r in range(2)][rank]
    check_data([[10, 11], [12]][rank], group, [("tp", alone)], rank)
    check_data([10, 11], None, [("tp", group), ("cp", alone)], rank)
    with pytest.raises(RunError, match=f"Rank {rank}: data-parallel ranks .* both hold 1 rows"):
        check_data([[10, 11], [12, 10]][rank], group, [], rank)
    with pytest.raises(RunError, match=r"axis cp hold different rows \(2 and 2, 1 in common"):
        check_data([[10, 11], [10, 12]][rank], alone, [("cp", group)], rank)
    with pytest.raises(RunError, match="along axis cp hold different rows"):
        check_data([[10, 11], [11, 10]][rank], alone, [("cp", group)], rank)


def test_collectives_are_counted_and_timed_as_what_was_called(pool):
    pool.run(2, f"{__name__}:timed_collectives")


def timed_collectives():
    rank = dist.get_rank()
    timer = CollectiveTimer(CPU)
    tensor = torch.ones(8)
    model = fully_shard(torch.nn.Linear(8, 8))
    with timer:
        for _ in range(3):
            dist.all_reduce(tensor)
    first = timer.pop()
    assert first["collective/all_reduce_count"].value == 3
    assert first["collective/all_reduce_s"].value > 0
    assert {metric.reduce for metric in first.values()} == {Reduce.max}
    assert len(first) == 2
    assert timer.pop() == {}

    dist.all_reduce(tensor)  # outside: not counted
    with timer:
        # FSDP2 keeps its root whole between forward and backward: one gathering.
        model(torch.ones(1, 8)).sum().backward()
    with timer:
        if rank == 0:
            time.sleep(0.5)
        dist.broadcast(tensor, 0)
        dist.barrier()
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        if rank == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
    both = values(timer.pop())
    counts = {name: value for name, value in both.items() if name.endswith("_count")}
    assert counts == {
        "collective/all_gather_count": 1,
        "collective/reduce_scatter_count": 1,
        "collective/broadcast_count": 1,
        "collective/barrier_count": 1,
        "collective/all_reduce_count": 1,
        f"collective/{'recv' if rank else 'send'}_count": 1,
    }
    assert all(both[name.replace("_count", "_s")] > 0 for name in counts)
    if rank == 1:  # it waited for rank 0 to broadcast
        assert 0.3 < both["collective/broadcast_s"] < 5

    error = ValueError("from inside")
    with pytest.raises(ValueError, match="from inside"), timer:
        dist.barrier()
        raise error
    assert timer.pop()["collective/barrier_count"].value == 1


def test_a_rank_that_waits_in_a_collective_reports_where_it_stands(pool, tmp_path):
    pool.run(2, f"{__name__}:hang_in_all_reduce", tmp_path)


def test_each_model_has_hang_reports_of_its_own(tmp_path):
    config = PolicyConfig(debug=DebugConfig(hang_report_s=9))
    for role in ("policy", "critic"):
        setup = TrainerSetup(
            config=config, model_path="", max_steps=1, role=role, log_dir=str(tmp_path)
        )
        mesh: Any = SimpleNamespace(rank=1)
        hangs = DebugDiagnostics(setup, mesh, CPU)._hangs
        assert hangs is not None
        assert hangs._path == tmp_path / f"hang-{role}-1.txt"


def hang_in_all_reduce(folder):
    rank = dist.get_rank()
    warnings = []
    handler = logging.Handler()
    handler.emit = warnings.append
    logging.getLogger("nemo_like.policy.debug.diagnostics").addHandler(handler)
    path = folder / "logs" / f"hang-{rank}.txt"
    report = HangReport(path, 0.5, lambda: f"policy rank {rank} on node n{rank}")
    dist.barrier()
    with report.watch("quick"):
        pass
    if rank == 0:
        time.sleep(2.0)
        dist.all_reduce(torch.ones(7))
        assert not path.exists()
        assert warnings == []
        return
    with report.watch("train"):
        dist.all_reduce(torch.ones(7))
    text = path.read_text()
    assert text.startswith("policy rank 1 on node n1\nphase 'train' began 20")
    assert re.search(r'File ".*distributed_c10d.py", line \d+ in all_reduce', text)
    assert re.search(r'File ".*test_debug.py", line \d+ in hang_in_all_reduce', text)
    assert "Host memory\nthis process 0." in text
    assert re.search(r"gloo:all_reduce of group .* sizes \[\[7\]\] -> \[\[7\]\]", text)
    assert "barrier" not in text.partition("Pending")[2]  # it was over
    assert text.count("phase '") == 1  # once, though the phase lasted three limits
    assert len(warnings) == 1
    assert str(path) in warnings[0].getMessage()


# Four ranks


def test_shards_pass_and_a_changed_copy_is_found_by_all_four_ranks(pool):
    pool.run(4, f"{__name__}:sharded_replicas")


def sharded_replicas():
    rank = dist.get_rank()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    hybrid = fully_shard(model, mesh=mesh)
    parameters = dict(hybrid.named_parameters())
    assert all(isinstance(p, DTensor) for p in parameters.values())
    check_equal_over(parameters, [], rank, "parameters")
    with torch.no_grad():
        local = parameters["1.weight"].to_local()
        if rank == 3:  # shard 1 of copy 1: ranks 1 and 3 hold the same
            local[0, 0] = one_ulp_up(local[0, 0])
    reporter = rank if rank in (1, 3) else 1
    expected = f"Rank {reporter}: 1 of 4 parameters differ between ranks 1 and 3 along axis "
    with pytest.raises(RunError, match=expected + "replicate: '1.weight'"):
        check_equal_over(parameters, [], rank, "parameters")

    # A mesh of tensor parallelism: a norm is replicated over it, a matrix is not.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    norm = distribute_tensor(torch.ones(4), mesh, [Shard(0), Replicate()])
    matrix = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0), Shard(1)])
    tensors = {"norm": norm, "matrix": matrix}
    check_equal_over(tensors, [], rank, "parameters")
    if rank == 2:
        norm.to_local()[1] = -1.0
    with pytest.raises(RunError, match=r"1 of 1 .* ranks 2 and 3 along axis tp: 'norm' .*first: 2"):
        check_equal_over(tensors, [], rank, "parameters")
    with pytest.raises(RunError, match=r"along axis tp: 'matrix'"):
        check_equal_over({"matrix": matrix}, [("tp", mesh.get_group("tp"))], rank, "parameters")
    dist.barrier()


# One process


def test_a_fingerprint_is_of_the_row_and_not_only_of_its_text():
    def batch(lengths, ids, **rows):
        return TensorBatch(
            lengths=torch.tensor(lengths),
            tokens={keys.INPUT_IDS: torch.tensor(ids)},
            rows={name: torch.tensor(column) for name, column in rows.items()},
        )

    whole = batch([2, 2, 1], [5, 6, 5, 6, 5], group_ids=[0, 0, 1], seeds=[2**62, 2**62 + 1, 8])
    rows = fingerprint_rows(whole)
    assert len(set(rows)) == 3
    assert all(0 <= row < 2**63 for row in rows)
    assert fingerprint_rows(whole.select([2, 0])) == [rows[2], rows[0]]
    without = fingerprint_rows(batch([2, 2, 1], [5, 6, 5, 6, 5]))
    assert without[0] == without[1] != without[2]


def test_memory_of_a_cpu_process_grows_by_what_it_holds():
    before = memory_metrics("train", CPU)["memory/train_resident_gib"]
    held = torch.ones(1 << 26)  # 0.25 GiB
    after = memory_metrics("train", CPU)["memory/train_resident_gib"]
    assert after.reduce is Reduce.max
    assert after.value - before.value == pytest.approx(0.25, abs=0.05)
    assert len(held) == 1 << 26


def test_phases_that_end_in_time_leave_no_report(tmp_path):
    report = HangReport(tmp_path / "hang.txt", 0.8, lambda: "me")
    for _ in range(3):
        with report.watch("step"):
            time.sleep(0.3)
    time.sleep(0.8)
    assert list(tmp_path.iterdir()) == []


def test_each_late_phase_is_reported_and_an_error_ends_its_watch(tmp_path):
    report = HangReport(tmp_path / "hang.txt", 0.2, lambda: "me")
    with pytest.raises(ValueError, match="oops"), report.watch("outer"), report.watch("inner"):
        time.sleep(0.6)
        raise ValueError("oops")
    with report.watch("next"):
        time.sleep(0.6)
    text = (tmp_path / "hang.txt").read_text()
    assert re.findall(r"phase '(\w+)'", text) == ["outer", "inner", "next"]


def test_only_chosen_steps_are_profiled_and_on_the_first_rank(tmp_path):
    config = DebugConfig(profile_steps=[2, 4])
    for rank in (0, 1):
        profiles = StepProfiles(config, rank, CPU, tmp_path / f"profile-{rank}")
        for step in (1, 2, 3, 4):
            for _ in range(2):  # a step may come in parts
                profiles.begin(step)
                torch.ones(4, 4) @ torch.ones(4, 4)
            profiles.end()
            profiles.end()
    assert {one.name for one in tmp_path.iterdir()} == {
        "profile-0-step2.json",
        "profile-0-step4.json",
    }
    for path in tmp_path.iterdir():
        events = json.loads(path.read_text())["traceEvents"]
        assert sum(one.get("name") == "aten::mm" for one in events) == 2
