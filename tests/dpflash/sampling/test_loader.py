"""Sampling: who is drawn, when a logical batch ends, what an empty draw looks like and costs."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from scipy.stats import chi2, chisquare, hypergeom
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from dpflash import PrivacyEngine, PrivateRefusal
from dpflash.accounting import (
    FixedSizeGaussian,
    PoissonGaussian,
    ShuffledGaussian,
    TruncatedPoissonGaussian,
)
from dpflash.privacy.keys import master_key
from dpflash.sampling import (
    BatchMark,
    FixedSizeBatchSampler,
    PoissonBatchSampler,
    PrivateDataLoader,
    SamplingPlan,
)

KEY = master_key(0)


def sampler(num_samples=50, sample_rate=0.1, steps=10, physical=None, key=KEY):
    return PoissonBatchSampler(
        num_samples, sample_rate, steps_per_epoch=steps, key=key, physical_batch_size=physical
    )


def private_loader(data, batch_size=4, physical=None, sampling="poisson", cap=None, **options):
    loader = DataLoader(data, batch_size=batch_size, **options)
    plan = SamplingPlan.of(loader, sampling=sampling, max_batch_size=cap)
    return PrivateDataLoader(loader, plan, key=KEY, physical_batch_size=physical)


def inclusions(rate, draws=4000, num_samples=20):
    found = np.zeros((draws, num_samples))
    source = sampler(num_samples, rate)
    for index in range(draws):
        found[index, source.draw(index)] = 1
    return found


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.97])
def test_each_sample_is_drawn_with_the_sampling_rate(rate):
    found = inclusions(rate)
    spread = math.sqrt(rate * (1 - rate) / len(found))
    assert np.abs(found.mean(0) - rate).max() <= 4.5 * spread
    assert abs(found.mean() - rate) <= 4.5 * spread / math.sqrt(found.shape[1])


def test_batch_sizes_have_the_variance_of_independent_inclusions():
    sizes = inclusions(0.3).sum(1)
    variance = 20 * 0.3 * 0.7
    assert abs(sizes.var() / variance - 1) <= 5 * math.sqrt(2 / len(sizes))


def test_inclusions_of_two_samples_and_of_two_draws_are_uncorrelated():
    found = inclusions(0.3) - 0.3
    bound = 5 * 0.3 * 0.7 / math.sqrt(len(found))
    products = found.T @ found / len(found)
    np.fill_diagonal(products, 0)
    assert np.abs(products).max() <= bound
    for lag in (1, 2, 7):
        assert np.abs((found[:-lag] * found[lag:]).mean(0)).max() <= bound


def test_a_rate_of_one_draws_everything_and_draws_are_functions_of_key_and_index():
    assert sampler(7, 1.0).draw(3) == list(range(7))
    first, second = sampler(), sampler()
    assert [first.draw(i) for i in range(5)] == [second.draw(i) for i in (0, 1, 2, 3, 4)]
    assert [first.draw(i) for i in range(9)] != [
        sampler(key=master_key(1)).draw(i) for i in range(9)
    ]
    assert len({tuple(first.draw(i)) for i in range(20)}) > 15


@pytest.mark.parametrize("physical", [None, 1, 3, 1000])
def test_parts_make_up_the_draw_for_a_loader_of_somebody_else(physical):
    source = sampler(num_samples=60, sample_rate=0.12, steps=40, physical=physical)
    parts = iter(list(source))
    for draw in range(40):
        left = source.draw(draw)
        for part in parts:
            assert part == left[: len(part)] and len(part) <= (physical or 1000)
            left = left[len(part) :]
            if not left:
                break
            assert part
    assert next(parts, None) is None


def test_empty_draws_are_yielded_and_every_declared_draw_is_made():
    source = sampler(num_samples=5, sample_rate=0.01, steps=100, physical=2)
    batches = list(source)
    assert len(batches) == len(source) == 100 and batches.count([]) > 80


def test_the_next_pass_goes_on_with_new_draws():
    source = sampler(steps=10)
    first, second = list(source), list(source)
    assert first == [source.draw(i) for i in range(10)]
    assert second == [source.draw(i) for i in range(10, 20)]


def test_a_resumed_sampler_ends_the_pass_that_was_begun_and_repeats_nothing():
    straight, resumed = sampler(steps=10), sampler(steps=10)
    expected = [list(straight), list(straight)]
    resumed.resume(13)
    assert list(resumed) == expected[1][3:]
    assert list(resumed) == list(straight)
    resumed.resume(20)
    assert len(list(resumed)) == 10


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.5, math.nan])
def test_an_impossible_rate_is_refused(rate):
    with pytest.raises(ValueError, match="sample_rate="):
        sampler(sample_rate=rate)


class Numbered(Dataset):
    """Sample i is the number i, so that a batch shows its draw."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.tensor([index])


def as_others_do(loader, **options):
    """The loader that Opacus' BatchMemoryManager makes of a private one."""
    return DataLoader(
        loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn, **options
    )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_marks_come_with_their_batches_also_from_workers(workers, persistent):
    if persistent and not workers:
        pytest.skip("only workers persist")
    loader = private_loader(Numbered(), 8, 3, num_workers=workers, persistent_workers=persistent)
    draws = {}
    for stop in (4, None, None):
        for number, batch in enumerate(loader):
            if number == stop:
                break
            mark = loader.tracker.current
            assert mark.size == len(batch) == len(loader.is_real) == loader.slots == 2
            assert mark.last == loader.is_last
            draws.setdefault(mark.draw, []).extend(batch[loader.is_real].flatten().tolist())
            if mark.last:
                assert sorted(draws[mark.draw]) == loader._draws.draw(mark.draw)
                loader.tracker.released()
        if stop:
            draws = {k: v for k, v in draws.items() if sorted(v) == loader._draws.draw(k)}
    assert len(draws) >= 10


def test_a_released_draw_is_not_drawn_again_after_a_resume_and_an_unreleased_one_is():
    loader = private_loader(Numbered(), 8)
    batches = iter(loader)

    def draw():
        while next(batches) is not None and not loader.is_last:
            pass

    draw()
    loader.tracker.released()
    assert loader.state_dict() == {"next_draw": 1, "returns": 0}
    draw()
    assert loader.state_dict() == {"next_draw": 1, "returns": 0}
    loader.tracker.released()
    assert loader.state_dict() == {"next_draw": 2, "returns": 0}


def test_a_plain_pass_gives_every_sample_once_with_marks_of_the_right_sizes():
    loader = private_loader(Numbered(), 7, sampling="shuffled", shuffle=True)
    for _ in range(2):
        seen = []
        for batch in loader:
            assert loader.tracker.current == BatchMark(len(seen) // 7, len(batch), True)
            seen += batch.flatten().tolist()
            loader.tracker.released()
        assert sorted(seen) == list(range(40))
    assert loader.sample_rate is None and loader.sampler_name == "shuffled"
    assert loader.expected_batch_size == 7


@pytest.mark.parametrize("workers", [0, 1])
def test_another_loader_gets_a_padding_row_of_an_empty_draw_as_the_function_makes_it(workers):
    loader = private_loader(
        Numbered(),
        1,
        collate_fn=lambda entries: {
            "x": torch.stack(entries) + 5,
            "array": np.array([int(entry) for entry in entries]) + 5,
            "names": [str(int(entry)) for entry in entries],
            "none": None,
            "count": len(entries),
        },
        num_workers=workers,
    )
    drawn = [len(loader._draws.draw(index)) for index in range(40)]
    sizes, empty = [], 0
    for batch in as_others_do(loader, num_workers=workers):
        sizes.append(loader.tracker.emitted.popleft())
        if sizes[-1] == 0:
            empty += 1
            # A worker's row holds nothing of entry 0.
            x, text, count = (0, "", 0) if workers else (5, "0", 1)
            assert batch["x"].tolist() == [[x]] and batch["array"].tolist() == [x]
            assert (batch["names"], batch["none"], batch["count"]) == ([text], None, count)
    assert empty > 3 and max(sizes) > 0 and sizes == drawn


def test_the_expected_batch_size_and_the_rate_are_the_loaders():
    loader = private_loader(TensorDataset(torch.zeros(93, 1)), 10)
    assert loader.sample_rate == 10 / 93 and loader.expected_batch_size == 10
    assert len(loader) == loader.steps_per_epoch == 10
    big = private_loader(TensorDataset(torch.zeros(5, 1)), 10)
    assert big.sample_rate == 1 and big.expected_batch_size == 5 and len(big) == 1


# Fixed-size and truncated draws


def fixed(num_samples=20, batch_size=6, steps=10, physical=None, key=KEY):
    return FixedSizeBatchSampler(
        num_samples, batch_size, steps_per_epoch=steps, key=key, physical_batch_size=physical
    )


def truncated(num_samples=30, rate=0.3, cap=8, steps=10, physical=None):
    return PoissonBatchSampler(
        num_samples,
        rate,
        steps_per_epoch=steps,
        key=KEY,
        physical_batch_size=physical,
        max_batch_size=cap,
    )


def chi_square(counts):
    """The chance of counts at least as uneven, were all cells equally likely."""
    return chisquare(counts).pvalue


@pytest.mark.parametrize("batch_size", [1, 2, 7, 19, 20])
def test_a_fixed_size_draw_has_exactly_so_many_different_samples(batch_size):
    source = fixed(batch_size=batch_size)
    for index in range(200):
        drawn = source.draw(index)
        assert len(drawn) == len(set(drawn)) == batch_size
        assert drawn == sorted(drawn) and 0 <= drawn[0] and drawn[-1] < 20


def test_every_set_of_a_fixed_size_is_equally_likely():
    """All 15 pairs of 6 samples, fixed key; false alarm 1e-4 were the key fresh."""
    source = fixed(6, 2)
    counts = Counter(tuple(source.draw(i)) for i in range(6000))
    assert len(counts) == 15 and chi_square(list(counts.values())) > 1e-4


def test_every_sample_and_every_pair_is_drawn_as_often_in_fixed_size_draws():
    """False alarm 2e-4 (two tests), fixed key; the counts of one draw hang together weakly."""
    source, draws = fixed(), 8000
    found = np.zeros((draws, 20))
    for index in range(draws):
        found[index, source.draw(index)] = 1
    # Samples without replacement are more even than independent ones by (n - k) / (n - 1).
    statistic = ((found.sum(0) - draws * 0.3) ** 2).sum() / (draws * 0.3 * 0.7) * 19 / 20
    assert chi2.sf(statistic, 19) > 1e-4
    pairs = (found.T @ found)[np.triu_indices(20, 1)]
    expected = draws * 6 * 5 / (20 * 19)
    assert np.abs(pairs - expected).max() <= 5.2 * math.sqrt(expected)


def test_fixed_size_draws_are_independent_of_each_other():
    """The overlap of two neighbours is hypergeometric; false alarm 1e-4, fixed key."""
    source = fixed()
    draws = [set(source.draw(i)) for i in range(8001)]
    for lag in (1, 2):
        overlaps = Counter(len(draws[i] & draws[i + lag]) for i in range(0, 8000, 2 * lag))
        total = sum(overlaps.values())
        expected = hypergeom(20, 6, 6).pmf(range(7)) * total
        observed = np.array([overlaps[k] for k in range(7)])
        observed, expected = (np.append(x[:5], x[5:].sum()) for x in (observed, expected))
        assert chisquare(observed, expected).pvalue > 1e-4


def test_fixed_size_draws_are_functions_of_key_and_index_and_resume_like_poisson_ones():
    straight, resumed = fixed(steps=10), fixed(steps=10)
    expected = [list(straight), list(straight)]
    assert expected[0] == [fixed().draw(i) for i in range(10)]
    assert len({tuple(batch) for batch in expected[0] + expected[1]}) == 20
    resumed.resume(13)
    assert list(resumed) == expected[1][3:]
    assert fixed(key=master_key(1)).draw(0) != fixed().draw(0)


@pytest.mark.parametrize("make", [fixed, truncated])
@pytest.mark.parametrize("physical", [1, 3, 100])
def test_parts_make_up_fixed_size_and_truncated_draws_too(make, physical):
    source = make(physical=physical)
    parts = list(source)
    assert all(len(part) <= physical for part in parts)
    assert sum(parts, []) == sum((source.draw(index) for index in range(10)), [])


@pytest.mark.parametrize("cap", [1, 5, 8, 30])
@pytest.mark.parametrize("rate", [0.02, 0.3, 1.0])
def test_a_truncated_draw_is_the_poisson_draw_or_a_subset_of_it_of_the_size_of_the_cap(cap, rate):
    whole, cut = sampler(30, rate), truncated(rate=rate, cap=cap)
    for index in range(200):
        full, kept = whole.draw(index), cut.draw(index)
        assert set(kept) <= set(full) and kept == sorted(set(kept))
        assert len(kept) == min(len(full), cap)


@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_truncation_prefers_no_sample(rate):
    """Every sample is kept as often; false alarm 1e-4 for each rate, fixed key."""
    source, draws = truncated(12, rate, cap=4), 6000
    found = np.zeros((draws, 12))
    for index in range(draws):
        found[index, source.draw(index)] = 1
    mean = found.sum() / 12
    # Draws are independent, and samples of one draw repel each other by 1 / (n - 1) or less.
    spread = mean * (1 - mean / draws)
    assert chi2.sf(((found.sum(0) - mean) ** 2).sum() / spread * 11 / 12, 11) > 1e-4


def test_loaders_tell_the_event_of_their_own_sampler():
    data = TensorDataset(torch.zeros(40, 1))
    poisson = PoissonGaussian(relation="zero_out", noise_multiplier=1.5, sample_rate=0.2)
    expected = {
        "poisson": poisson,
        "shuffled": ShuffledGaussian(noise_multiplier=1.5),
        "fixed_size": FixedSizeGaussian(noise_multiplier=1.5, batch_size=8, num_samples=40),
    }
    for sampling, event in expected.items():
        loader = private_loader(data, 8, sampling=sampling)
        assert loader.plan.event(1.5) == event and loader.sampler_name == sampling == event.sampler
        assert loader.expected_batch_size == 8 and loader.steps_per_epoch == 5
    loader = private_loader(data, 8, cap=19)
    assert loader.sampler_name == "truncated_poisson" and loader.expected_batch_size == 8
    assert loader.plan.event(1.5) == TruncatedPoissonGaussian(
        relation="zero_out",
        noise_multiplier=1.5,
        sample_rate=0.2,
        max_batch_size=19,
        num_samples=40,
    )
    plan = SamplingPlan.of(DataLoader(data, batch_size=8), sampling="poisson", dataset_size=40)
    assert plan.event(1.5) == poisson.convert("add_remove")


def test_a_batch_larger_than_the_data_is_the_data():
    data = TensorDataset(torch.zeros(5, 1))
    loader = private_loader(data, 10, sampling="fixed_size")
    assert loader.expected_batch_size == 5 and len(loader) == 1
    assert loader.plan.event(1.0) == FixedSizeGaussian(
        noise_multiplier=1.0, batch_size=5, num_samples=5
    )
    assert [len(x) for (x,) in loader] == [5]


@pytest.mark.parametrize("batch_size", [0, 21, 2.5, True])
def test_an_impossible_fixed_size_is_refused(batch_size):
    with pytest.raises(ValueError, match="batch_size="):
        fixed(batch_size=batch_size)


@pytest.mark.parametrize("cap", [0, -1, 2.5, True])
def test_an_impossible_cap_is_refused(cap):
    with pytest.raises(ValueError, match="max_batch_size="):
        truncated(cap=cap)


@pytest.mark.parametrize("workers", [0, 2])
def test_marks_come_with_fixed_size_batches_also_from_workers(workers):
    loader = private_loader(Numbered(), 8, 3, sampling="fixed_size", num_workers=workers)
    draws = {}
    for batch in loader:
        draws.setdefault(loader.tracker.current.draw, []).extend(
            batch[loader.is_real].flatten().tolist()
        )
        if loader.tracker.current.last:
            loader.tracker.released()
    assert [sorted(draws[i]) for i in range(5)] == [loader._draws.draw(i) for i in range(5)]


def test_a_shuffled_loader_that_drops_its_last_batch_has_fewer_steps_and_each_batch_is_whole():
    loader = private_loader(Numbered(), 7, sampling="shuffled", drop_last=True)
    assert loader.steps_per_epoch == len(loader) == 5
    sizes = []
    for batch in loader:
        sizes.append(len(batch))
        loader.tracker.released()
    assert sizes == [7] * 5


def test_a_loop_that_was_left_ends_quietly_at_the_exit_of_the_interpreter(monkeypatch):
    """The names of modules are gone when its iterator is closed there."""
    batches = iter(private_loader(torch.randn(20, 2)))
    next(batches)
    monkeypatch.setattr("dpflash.sampling.seen_batches._iterated", None)
    batches.close()


CHANGED = {
    "indices replaced": lambda subset: setattr(subset, "indices", [3, 4] * 4),
    "as many other indices": lambda subset: setattr(subset, "indices", list(range(2, 10))),
    "indices changed in place": lambda subset: subset.indices.append(8),
    "entries deleted": lambda subset: subset.dataset.pop(),
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
@pytest.mark.parametrize("sampling", ["poisson", "shuffled"])
@pytest.mark.parametrize("joined", [False, True], ids=["", "joined"])
def test_an_epoch_does_not_begin_on_a_dataset_with_other_entries(change, sampling, joined):
    subset = Subset([torch.tensor(float(i)) for i in range(10)], [9, *range(7)])
    data = ConcatDataset([subset, [torch.zeros(())] * 4]) if joined else subset
    loader = private_loader(data, sampling=sampling)
    others = as_others_do(loader)
    list(loader)
    subset.dataset[1] = torch.tensor(7.0)  # entries may hold something else
    subset.indices = list(subset.indices)
    list(loader)
    change(subset)
    for epoch in (loader, others):
        with pytest.raises(PrivateRefusal, match="has other entries than in make_private"):
            list(epoch)


def test_an_epoch_does_not_begin_on_a_dataset_that_grew_also_with_units():
    data = [torch.tensor(float(i)) for i in range(10)]
    model = nn.Linear(1, 1)
    _, _, loader = PrivacyEngine(seed=0).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        unit_of=[0, 0, 1, 1, 2, 2, 3, 3, 4, 4],
        unit_sampling="example",
        examples_per_unit=2,
    )
    with torch.no_grad():
        list(loader)
        data.append(torch.tensor(10.0))
        with pytest.raises(PrivateRefusal, match="has other entries"):
            list(loader)
