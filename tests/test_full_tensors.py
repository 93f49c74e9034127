"""Sharded tensors gathered, several to a collective."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from nemo_like.policy.parallel import full_tensors as full

CASES = __name__
ROWS = (7, 1, 4, 5, 2, 8, 3)
PLACEMENTS = {
    "by rows": (Replicate(), Shard(0)),
    "by rows twice": (Shard(0), Shard(0)),
    "by both": (Shard(1), Shard(0)),
    "nowhere": (Replicate(), Replicate()),
}


def gather(placed: str, batch_bytes: int) -> tuple[float, int]:
    """Largest difference to what was divided, and the collectives that it took."""
    full._BATCH_BYTES, in_general = batch_bytes, full._BATCH_BYTES
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2))
    originals = [torch.randn(rows, *rest) for rows in ROWS for rest in ((), (3,), (2, 3))]
    if placed == "by both":
        originals = [each for each in originals if each.ndim > 1]
    tensors = [distribute_tensor(each, mesh, PLACEMENTS[placed]) for each in originals]
    plain = torch.tensor(1.5)
    wanted = [(each, torch.float64) for each in [*tensors, plain]]
    with _Count() as count:
        results = list(full.full_tensors(wanted, torch.device("cpu")))
    full._BATCH_BYTES = in_general
    expected = [*originals, plain]
    assert [each.shape for each in results] == [each.shape for each in expected]
    assert all(each.dtype == torch.float64 for each in results)
    differences = [(a - b).abs().max().item() for a, b in zip(results, expected, strict=True)]
    return max(differences), count.calls


class _Count:
    """Counts calls of ``dist.all_gather``."""

    def __enter__(self) -> "_Count":
        self.calls, self._all_gather = 0, dist.all_gather
        dist.all_gather = self._call
        return self

    def _call(self, *args, **kwargs):
        self.calls += 1
        return self._all_gather(*args, **kwargs)

    def __exit__(self, *_):
        dist.all_gather = self._all_gather


@pytest.mark.parametrize("placed", PLACEMENTS)
@pytest.mark.parametrize("batch_bytes", [1, 400, 2**20])
def test_gathered_tensors_are_what_was_divided(pool, placed, batch_bytes):
    for difference, num_collectives in pool.run(4, f"{CASES}:gather", placed, batch_bytes):
        assert difference == 0
        if placed != "by rows" or batch_bytes == 1:
            assert num_collectives == 0  # left to DTensor, as what is large enough by itself
        elif batch_bytes == 2**20:
            assert num_collectives == 1
        else:
            assert num_collectives > 1
