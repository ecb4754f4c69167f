"""Which entries are of which user, and which of them a draw uses."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpflash import PrivateRefusal
from dpflash.packing import Units
from dpflash.sampling import PoissonBatchSampler
from dpflash.sampling.tracker import BatchTracker
from dpflash.sampling.unit_groups import UnitGroups
from dpflash.sampling.unit_slots import UnitSlots

KEY = bytes(range(32))
OWNERS = ["b", "a", "b", "c", "b", "a", "b"]


def groups_of(owners, limit=2, sampling="unit"):
    return UnitGroups(range(len(owners)), owners, limit=limit, sampling=sampling)


def members(groups):
    return [own.tolist() for own in groups.members]


@pytest.mark.parametrize(
    "unit_of",
    [
        OWNERS,
        tuple(OWNERS),
        np.array([1, 0, 1, 2, 1, 0, 1]),
        torch.tensor([1, 0, 1, 2, 1, 0, 1]),
        lambda entry: OWNERS[entry],
    ],
    ids=["list", "tuple", "array", "tensor", "function"],
)
def test_units_are_those_of_a_list_an_array_or_a_function(unit_of):
    groups = UnitGroups(range(7), unit_of, limit=2, sampling="unit")
    assert members(groups) == [[0, 2, 4, 6], [1, 5], [3]]


def test_random_numbers_after_a_function_do_not_tell_how_many_entries_it_read():
    def owner(entry):
        return entry + 0 * (torch.rand(()) + np.random.rand() + random.random())

    found = []
    for size in (32, 33):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        UnitGroups(range(size), owner, limit=2, sampling="unit")
        found.append((float(torch.rand(())), np.random.rand(), random.random()))
    assert found[0] == found[1]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(1, 4), st.integers(0, 9))
def test_a_draw_uses_at_most_k_entries_of_each_unit_and_all_of_smaller_ones(owners, limit, draw):
    groups = groups_of(owners, limit)
    for unit, chosen in enumerate(groups.selected(range(len(groups)), key=KEY, draw=draw)):
        own = set(members(groups)[unit])
        assert len(chosen) == min(limit, len(own)) and set(chosen.tolist()) <= own


def test_each_entry_of_a_large_unit_is_used_equally_often():
    # A count of Binomial(3000, 2/4) is beyond 5.5 deviations with probability below 4e-8.
    groups, counts, draws = groups_of(OWNERS), np.zeros(7), 3000
    for draw in range(draws):
        (chosen,) = groups.selected([0], key=KEY, draw=draw)
        counts[chosen] += 1
    assert (np.abs(counts[[0, 2, 4, 6]] - draws / 2) < 5.5 * (draws / 4) ** 0.5).all()


def test_entries_of_a_unit_are_chosen_by_key_and_draw_alone():
    small, large = groups_of(OWNERS), groups_of([*OWNERS, "new", "new", "new"])
    for draw in range(20):
        one = small.selected([0, 1, 2], key=KEY, draw=draw)
        two = large.selected([3, 0, 1, 2], key=KEY, draw=draw)[1:]
        assert [a.tolist() for a in one] == [b.tolist() for b in two]
    other = [groups_of(OWNERS).selected([0], key=bytes(32), draw=d)[0].tolist() for d in range(20)]
    assert other != [small.selected([0], key=KEY, draw=d)[0].tolist() for d in range(20)]


@given(
    st.lists(st.sets(st.integers(0, 6), min_size=1, max_size=3), min_size=1, max_size=30),
    st.integers(1, 3),
)
def test_kept_entries_are_at_most_k_of_each_unit_and_no_more_fit(owners, limit):
    groups = groups_of(owners, limit, "example")
    kept = set(groups.kept().tolist())
    counts = [len(kept & set(own)) for own in members(groups)]
    assert max(counts) <= limit
    numbers = list(dict.fromkeys(o for own in owners for o in own))
    for index in set(range(len(owners))) - kept:
        assert any(counts[numbers.index(owner)] == limit for owner in owners[index])


def test_units_that_cannot_be_are_refused():
    with pytest.raises(PrivateRefusal, match="another number of units than"):
        UnitGroups(range(7), [1, 2, 3], limit=1, sampling="unit")
    for owners in ([1, None, None], [(1, 2)]):
        with pytest.raises(PrivateRefusal, match="unit_of gives most entries no unit"):
            groups_of(owners)
    with pytest.raises(ValueError, match="unit_of is a str: pass one unit for each entry"):
        UnitGroups(range(3), "abc", limit=1, sampling="unit")
    with pytest.raises(ValueError, match=r"unit_of has shape \(3, 1\): pass one unit for each"):
        UnitGroups(range(3), np.zeros((3, 1)), limit=1, sampling="unit")


@pytest.mark.parametrize(
    "unit_of",
    [
        [torch.tensor(i % 2) for i in range(6)],
        [np.array(i % 2) for i in range(6)],
        lambda entry: torch.tensor(entry % 2),
        [frozenset({i % 2}) for i in range(6)],
        [(torch.tensor(i % 2),) for i in range(6)],
        [np.float32(i % 2) for i in range(6)],
    ],
)
def test_units_are_compared_by_value(unit_of):
    groups = UnitGroups(range(6), unit_of, limit=3, sampling="unit")
    assert [own.tolist() for own in groups.members] == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize("several", [frozenset({7, 8}), torch.tensor([7, 8])])
def test_an_entry_of_several_units_counts_for_each_of_them(several):
    groups = UnitGroups(range(2), [several, 7], limit=1, sampling="example")
    assert groups.has_shared and groups.kept().tolist() == [0]


def raising():
    raise KeyError("patient 7")


@pytest.mark.parametrize("sampling", ["unit", "example"])
@pytest.mark.parametrize(
    "own",
    [
        raising,
        lambda: None,
        tuple,
        lambda: float("nan"),
        lambda: np.datetime64("NaT"),
        object,
        lambda: {"user": 1},
        lambda: (1, float("nan")),
        lambda: torch.tensor(1, device="meta"),
    ],
    ids=["raises", "none", "empty", "nan", "nat", "object", "dict", "part nan", "no device"],
)
def test_an_entry_without_a_unit_is_left_out(own, sampling):
    """Whether unit_of fails or its unit equals no other object; the entry itself may fail too."""

    class Entries(list):
        def __getitem__(self, index):
            return own() if index == 4 else super().__getitem__(index)

    of_units = {"limit": 3, "sampling": sampling}
    for groups in (
        UnitGroups(range(7), lambda entry: own() if entry == 4 else entry % 2, **of_units),
        UnitGroups(Entries(range(7)), lambda entry: [0, 1][entry % 2], **of_units),
    ):
        assert members(groups) == [[0, 2, 6], [1, 3, 5]] and groups.left_out == 1
        assert groups.kept().tolist() == [0, 1, 2, 3, 5, 6]
        again = UnitGroups(range(7), groups.names, **of_units)
        assert members(again) == members(groups)


@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_of_a_slot_are_entries_of_one_drawn_unit(ranks):
    owners = [index % 9 for index in range(20)]  # three entries of two units, else two
    groups, seen = groups_of(owners, 3), {}
    for rank in range(ranks):
        draws = PoissonBatchSampler(len(groups), 0.5, steps_per_epoch=6, key=KEY)
        draws.follow(BatchTracker(), (rank, ranks))
        slots = UnitSlots(draws, 2, groups)
        for rows in slots:
            mark = slots.marks.popleft()
            assert len(rows) == 6 and mark.size == 2 and mark.units.shape == (6,)
            assert [start != end for start, end in mark.units.spans] == mark.real.tolist()
            for slot, (start, end) in enumerate(mark.units.spans):
                units = {owners[row] for row in rows[start:end]}
                assert len(units) == (start != end) and (start == end or start == 3 * slot)
                assert end - start == sum(map(owners.count, units))
                seen.setdefault(mark.draw, []).extend(units)
    drawn = PoissonBatchSampler(len(groups), 0.5, steps_per_epoch=6, key=KEY)
    expected = [sorted(units) for _, units in drawn.logical_batches()]
    assert [sorted(seen[draw]) for draw in range(6)] == expected


def test_spans_of_units_that_overlap_are_refused():
    with pytest.raises(PrivateRefusal, match="two units overlap"):
        Units((4,), ((0, 3), (2, 4)))
    with pytest.raises(PrivateRefusal, match="overlap, or leave"):
        Units((4,), ((0, 5),))
