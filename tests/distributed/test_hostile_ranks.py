"""What ranks do wrong or differently is refused, on all of them, or harmless; never released."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import distributed_world
import numpy as np
import pytest

CASES = str(Path(__file__).with_name("hostile_cases.py"))


@pytest.fixture(scope="module")
def pair() -> Iterator[Any]:
    with distributed_world.World(2) as world:
        yield world


@pytest.mark.parametrize("context", [1, 2])
def test_a_batch_that_is_not_the_loaders_is_not_released(pair: Any, context: int) -> None:
    for said in pair.run(CASES, "a_batch_of_its_own", 2, context=context):
        assert said.startswith("True RuntimeError")
        assert "the batch is not of the private loader" in said


@pytest.mark.parametrize("context", [1, 2])
def test_ranks_must_have_one_data_set(pair: Any, context: int) -> None:
    for said in pair.run(CASES, "data_of_its_own", 2, context=context):
        assert said.startswith("ValueError: data_loader.dataset differs between ranks")


def test_entries_that_vary_are_taken(pair: Any) -> None:
    assert pair.run(CASES, "data_that_varies", 2) == ["did it: taken"] * 2


def test_the_row_of_padding_in_a_sharded_table_gets_no_noise(pair: Any) -> None:
    assert pair.run(CASES, "noised_rows", 2) == [[row != 4 for row in range(6)]] * 2


def test_ranks_have_as_many_trials_of_each_draw(pair: Any) -> None:
    """A loop may exchange numbers in each iteration; what is new on one rank is tried on both."""
    first, second = pair.run(CASES, "trials_of_each_release", 2)
    assert first == second
    assert not any(first[8:10]) and first[10]


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize(
    ("run", "count", "released"),
    [
        pytest.param(["first", "second"], ["first", "second"], False, id="other-layers"),
        pytest.param(["first+second", "second+first"], ["first", "first"], False, id="order"),
        pytest.param(["first", "first+second"], ["first", "first"], False, id="one-more"),
        pytest.param(["first+second"] * 2, ["first", "second"], None, id="uncounted"),
        pytest.param(["first+second"] * 2, ["first", "first"], True, id="unused-by-both"),
        pytest.param(["first+second"] * 2, ["first+second"] * 2, True, id="alike"),
    ],
)
def test_gradients_of_other_layers_never_meet(
    pair: Any, run: list[str], count: list[str], released: bool | None, clipping: str
) -> None:
    if released is None:  # one gate has both layers, and 0 where a rank has no gradient of one
        released = clipping == "flat"
    said = pair.run(CASES, "layers_of_its_own", 2, run=run, count=count, clipping=clipping)
    for one in said:
        if released:
            assert one == "False did it: a pass"
        else:
            assert one.startswith(("True ValueError", "True RuntimeError")), one


def test_a_release_has_one_bound_and_what_was_clipped_to_another_is_dropped(pair: Any) -> None:
    first, second = pair.run(CASES, "a_bound_of_its_own", 2)
    for one in (first, second):
        assert "max_grad_norm differs between ranks" in one["said"][0]
        assert one["said"][1] == "did it: None"
        assert one["norm"] < 10  # of noise and parameters; the bound of 100 would show
    assert first["sum"] == second["sum"]


@pytest.mark.parametrize("kind", ["plain", "fsdp"])
def test_empty_shares_through_layers_of_the_generic_rule(pair: Any, kind: str) -> None:
    first, second = pair.run(CASES, "empty_shares", 2, kind=kind)
    assert len(first["sizes"]) == len(second["sizes"]) >= 10
    assert any(a != b for a, b in zip(first["sizes"], second["sizes"], strict=True))


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_a_layer_that_counts_on_one_rank_only_trains_on_it_or_is_refused(
    pair: Any, clipping: str
) -> None:
    plain = pair.run(CASES, "heads_of_its_own", 2, kind="plain", clipping=clipping)
    for said, parameters in pair.run(CASES, "heads_of_its_own", 2, kind="fsdp", clipping=clipping):
        if clipping == "flat":
            assert said == "did it: None"
            np.testing.assert_allclose(parameters, plain[0][1], rtol=0, atol=1e-6)
        else:  # gates of other layers ran at a time
            assert "exchanged gradients of different parameters" in said


@pytest.mark.parametrize("kind", ["plain", "fsdp"])
def test_ranks_of_a_context_have_as_many_samples(world: Any, kind: str) -> None:
    for said in world.run(CASES, "samples_of_its_own", 4, kind=kind):
        assert "number of samples differs between ranks (rank 0 has 3, rank 1 has 4)" in said


def test_a_parameter_without_dimensions_over_a_context(pair: Any) -> None:
    wanted = pair.run(CASES, "scalar_parameter", 2, context=1)[0]
    for parameters in pair.run(CASES, "scalar_parameter", 2, context=2):
        np.testing.assert_allclose(parameters, wanted, rtol=0, atol=2e-6)


def test_ranks_with_sharded_parameters_go_in_as_many_passes(pair: Any) -> None:
    assert pair.run(CASES, "unequal_lengths", 2) == [(5, True), (5, False)]


def test_what_one_rank_gets_wrong_is_told_to_all(pair: Any) -> None:
    first, second = pair.run(CASES, "one_sided", 2)
    assert first.startswith("RankError: make_private failed on rank 1: ValueError: module '1'")
    assert second.startswith("ValueError: module '1' is BatchNorm1d")


def test_a_checkpoint_of_one_rank_is_refused_on_all(pair: Any, tmp_path: Path) -> None:
    for first, then in pair.run(CASES, "saved_on_one", 2, path=str(tmp_path / "run.pt")):
        assert "rank 0 in save_checkpoint, rank 1 in optimizer.step)" in first
        assert "if rank == 0" in first and then == "did it: None"


def test_parameters_frozen_on_one_rank_are_refused(pair: Any) -> None:
    for said in pair.run(CASES, "frozen_on_one", 2):
        assert "trained parameters differs between ranks" in said


@pytest.mark.parametrize("interrupted", [1, 2])
@pytest.mark.cases(2)
def test_a_rank_that_releases_again_alone_meets_no_other_bundle(
    pair: Any, interrupted: int
) -> None:
    """Its noise would be that of a bundle before, for another sum."""
    found = pair.run(CASES, "interrupted_in_a_release", 2, ranks=interrupted)
    for one in found:
        if interrupted == 2:
            assert one["said"] == "did it: None" and one["times"] == 3
        else:
            assert "ranks are in different calls" in one["said"]
            assert one["grad"] is None and one["times"] == 1


@pytest.mark.parametrize(
    ("differs", "message"),
    [
        ("", "did it: 4"),
        ("betas", "options of the optimizers differs"),
        ("code", "the code dif"),
    ],
)
@pytest.mark.cases(3)
def test_replicas_that_other_code_or_options_would_make_unlike_are_found(
    pair: Any, differs: str, message: str
) -> None:
    for said in pair.run(CASES, "optimizer_of_its_own", 2, differs=differs):
        assert message in said


@pytest.mark.parametrize("turn", [0, 1])
def test_no_rank_steps_where_another_lost_its_gradients(pair: Any, turn: int) -> None:
    first, second = pair.run(CASES, "cleared_on_one", 2, turn=turn)
    for one in (first, second):
        assert one["said"][:turn] == ["did it: None"] * turn
        assert "parameters with a gradient differs between ranks" in one["said"][turn]
    assert first["parameters"] == second["parameters"]


def test_wrappers_with_something_of_their_own(pair: Any) -> None:
    for said in pair.run(CASES, "wrappers", 2):
        assert "its own communication hook" in said["hook"]
        assert "leave static_graph out" in said["static graph"]
        assert said["plain step"] == "did it: None"
        assert "does not support tensor parallelism" in said["tensor parallel"]
        assert said["one data rank"] == "did it: made"


def test_sharded_models_over_a_context(new_world: Any) -> None:
    world = new_world(4)
    shares = world.run(CASES, "sinks_of_an_empty_share", 4)
    assert all(one["steps"] == 4 for one in shares)
    assert any(0 in one["sizes"] for one in shares) and any(any(o["sizes"]) for o in shares)
    for over in ("data", "context"):
        assert len(set(world.run(CASES, "rows_of_a_context", 4, over=over))) == 1


def test_copies_of_shards_start_equal_and_cover_all_ranks(world: Any) -> None:
    one, two, *copies = world.run(CASES, "copies_of_rows", 4)
    assert copies == [one, two] and one != two
    for said in world.run(CASES, "sharded_over_some", 4):
        assert "'0.weight' is sharded over the ranks [" in said
        assert "mesh['dp_replicate', 'dp_shard']" in said


@pytest.mark.parametrize("by_engine", [True, False], ids=["of the engine", "of the loop"])
@pytest.mark.parametrize("shards", [True, False], ids=["sharded", "whole"])
def test_a_declared_mean_over_padding_is_refused_on_all_ranks(
    pair: Any, shards: bool, by_engine: bool
) -> None:
    how = {"shards": shards, "by_engine": by_engine}
    for said in pair.run(CASES, "declared_mean_of_padding", 2, masks=False, **how):
        assert said.startswith("PrivateRefusal") and "padded less" in said
    honest = pair.run(CASES, "declared_mean_of_padding", 2, masks=True, **how)
    assert honest == ["did it: 3 True"] * 2


@pytest.mark.cases(0)
def test_ranks_choose_the_same_bands(pair: Any) -> None:
    one, other = pair.run(CASES, "chosen_bands", 2)
    assert one == other and one[0] > 1
