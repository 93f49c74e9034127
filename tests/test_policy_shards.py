"""Which rows a policy sends to its ranks, and by what they divide; no process is started."""

from types import SimpleNamespace

import pytest
import torch

from nemo_like.batch import keys
from nemo_like.config.policy import PolicyConfig
from nemo_like.config.run import ClusterConfig
from nemo_like.distributed.remote_batch import RemoteBatch
from nemo_like.distributed.worker import RankLayout
from nemo_like.losses.cross_entropy import CrossEntropyLoss
from nemo_like.losses.protocol import Denominators
from nemo_like.models.resolve import resolve_model
from nemo_like.policy.remote_model import RemoteModel

LENGTHS = [9, 5, 4, 7, 6, 8]


class Ranks:
    """A group of workers that remembers what it is sent."""

    role = "policy"
    contexts = (SimpleNamespace(log_dir="."),)

    def __init__(self, count):
        self.layout, self.world_size, self.shards = RankLayout({"dp": count}), count, []
        self.denominators = None

    def scatter(self, _, shards, loss, denominators, *args, **how):
        self.shards, self.denominators = shards, denominators
        return [{} for _ in shards]


def model_of(ranks, **options):
    return RemoteModel(
        PolicyConfig(micro_batch_tokens=14),
        ClusterConfig(),
        ranks,  # pyright: ignore
        model_path=str(resolve_model("embedded")),
        max_steps=1,
        **options,
    )


def trained(num_ranks, num_tokens, sample_mask=(True,) * 6, **how):
    """The policy after a step, the shard that each rank was sent, and what all were."""
    ranks = Ranks(num_ranks)
    policy = model_of(ranks)
    rows = {
        keys.NUM_LOSS_TOKENS: torch.tensor(num_tokens),
        keys.SAMPLE_MASK: torch.tensor(sample_mask),
        keys.SEEDS: torch.arange(6),  # by which a row is known
    }
    policy.train(RemoteBatch(lengths=torch.tensor(LENGTHS), rows=rows), CrossEntropyLoss(), **how)
    return policy, ranks.shards, ranks.denominators


def rows_of(shards):
    return sorted(row for one in shards for row in one.batch.rows[keys.SEEDS].tolist())


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_step_divides_by_what_trains_on_all_ranks_and_sends_nothing_else(num_ranks):
    mask = [True, True, False, True, True, True]
    policy, shards, denominators = trained(num_ranks, [3, 0, 2, 4, 1, 2], mask)
    assert len(shards) == num_ranks
    assert rows_of(shards) == [0, 3, 4, 5]  # 1 has no token, 2 is masked
    assert denominators == Denominators(tokens=3 + 4 + 1 + 2, sequences=4)
    for one in shards:
        assert sum(one.bin_sizes) == len(one.batch)
        parts = one.batch.lengths.split([size for size in one.bin_sizes if size])
        assert all(part.sum() <= 14 for part in parts)
        assert one.batch.lengths.tolist() == [
            LENGTHS[row] for row in one.batch.rows[keys.SEEDS].tolist()
        ]
    assert policy.weight_version == 1


def test_of_a_pair_both_rows_train_or_neither():
    mask = [True, True, True, True, True, False]
    _, shards, denominators = trained(2, [3, 0, 2, 4, 1, 2], mask, rows_per_unit=2)
    assert rows_of(shards) == [2, 3]
    assert denominators == Denominators(tokens=6, sequences=2)


def test_rows_of_a_pair_are_neighbours_in_one_micro_batch():
    _, shards, _ = trained(2, [1] * 6, rows_per_unit=2)
    for one in shards:
        rows = one.batch.rows[keys.SEEDS].tolist()
        assert rows[0::2] == [row - 1 for row in rows[1::2]]
        assert all(size % 2 == 0 for size in one.bin_sizes)


def test_a_step_measures_its_mismatch_on_what_its_own_weights_sampled():
    rows = {keys.WEIGHT_VERSIONS: torch.tensor([0, 0])}
    batch = RemoteBatch(lengths=torch.tensor([3, 4]), rows=rows)
    policy = model_of(Ranks(1))
    assert policy._is_on_policy(batch)
    assert not model_of(Ranks(1), output="values_before")._is_on_policy(batch)
    policy.weight_version = 1
    with pytest.raises(AssertionError, match="need policy logprobs"):
        policy._is_on_policy(batch)


def test_a_step_on_nothing_is_no_step(caplog):
    policy, shards, _ = trained(2, [0] * 6)
    assert not shards
    assert policy.weight_version == 0
    assert "No row of this step trains" in caplog.text
