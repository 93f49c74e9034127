"""Flat batches and the plan that deals their rows: every row once, whatever the sizes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.batch.micro_batches import plan_micro_batches
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.errors import UserError


def make(lengths):
    n = sum(lengths)
    return TensorBatch(
        lengths=torch.tensor(lengths),
        tokens={"x": torch.arange(n)},
        rows={"id": torch.arange(len(lengths))},
    )


def test_select_and_concatenate_keep_rows_whole():
    batch = make([2, 0, 3])
    picked = batch.select([2, 1, 2])
    assert picked.lengths.tolist() == [3, 0, 3]
    assert picked.tokens["x"].tolist() == [2, 3, 4, 2, 3, 4]
    both = TensorBatch.concatenate([batch, picked])
    assert both.row_of_token.tolist() == [0, 0, 2, 2, 2, 3, 3, 3, 5, 5, 5]
    assert both.rows["id"].tolist() == [0, 1, 2, 2, 1, 2]


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.integers(1, 50), max_size=40),
    st.integers(1, 5),
    st.integers(50, 120),
    st.one_of(st.none(), st.integers(1, 4)),
    st.booleans(),
)
def test_every_row_is_planned_once_within_the_budget(lengths, num_ranks, budget, max_rows, padded):
    plan = plan_micro_batches(
        lengths, num_ranks=num_ranks, max_tokens=budget, max_rows=max_rows, padded=padded
    )
    rows = [row for rank in range(num_ranks) for row in plan.rows(rank)]
    assert sorted(rows) == list(range(len(lengths)))
    assert len({len(bins) for bins in plan.bins}) == 1
    for bins in plan.bins:
        for one in bins:
            sizes = [lengths[row] for row in one]
            used = max(sizes, default=0) * len(one) if padded else sum(sizes)
            assert used <= budget
            assert max_rows is None or len(one) <= max_rows


def test_ranks_get_nearly_equal_work():
    lengths = [((i * 7919) % 97) + 1 for i in range(256)]
    plan = plan_micro_batches(lengths, num_ranks=4, max_tokens=4096)
    loads = [sum(lengths[row] for row in plan.rows(rank)) for rank in range(4)]
    assert max(loads) - min(loads) <= max(lengths)


def test_more_ranks_than_rows_leaves_empty_micro_batches_not_a_hang():
    plan = plan_micro_batches([5], num_ranks=3, max_tokens=10)
    assert plan.bins == (((0,),), ((),), ((),))


def test_a_row_longer_than_the_budget_is_refused_with_a_valid_value():
    with pytest.raises(UserError, match=r"micro_batch_tokens=4 .* use at least 9"):
        plan_micro_batches([3, 9], num_ranks=1, max_tokens=4)
