"""Times, memory and work of calls: statistics, turns, limits, and refused arguments."""

import math
import re

import pytest
import scipy.stats
import torch

import dpflash
from dpflash.bench import memory, timing, work
from dpflash.bench.suite import Request
from dpflash.bench.timing import Effort
from dpflash.clipping.device_speed import Ceilings
from dpflash.patterns import Dense


def test_statistics_are_those_of_scipy_without_the_outlier():
    milliseconds = [float(value) for value in range(100, 120)]
    found = timing.summarize([value / 1e3 for value in (*milliseconds, 1e4)])
    assert (found.trials, found.outliers) == (21, 1)
    assert found.median_ms == pytest.approx(109.5)
    # The interval of the median by order statistics, from the binomial law.
    k = int(scipy.stats.binom.ppf(0.025, 20, 0.5))
    assert found.ci95_ms == pytest.approx((milliseconds[k - 1], milliseconds[20 - k]))
    assert found.cv == pytest.approx(scipy.stats.variation(milliseconds, ddof=1))
    assert not found.high_variance
    assert timing.summarize([1e-3, 2e-3, 3e-3]).high_variance


def test_few_trials_have_their_range():
    found = timing.summarize([0.001, 0.003, 0.002])
    assert found.ci95_ms == pytest.approx((1.0, 3.0)) and found.median_ms == pytest.approx(2.0)
    assert timing.summarize([0.001]).cv is None
    with pytest.raises(ValueError, match="at least one trial"):
        timing.summarize([])
    slow = timing.columns([1.0, 2.0, 60.0], is_short=True)
    assert slow == {"median_ms": 2000, "range_ms": [1000, 60000], "trials": 3}


def test_fewer_calls_are_made_where_all_do_not_fit():
    full = Effort(5, 20)
    assert full.within(2.4, 60) == full
    assert full.within(2.401, 60) == Effort(1, 23)
    assert full.within(5, 60) == Effort(1, 11)
    assert full.within(15, 60) == Effort(1, 3) and full.within(15.01, 60) is None
    assert Effort(2, 5).within(1.5, 10) == Effort(1, 5)


def test_the_interval_of_a_median_covers_it_as_often_as_it_says():
    # 500 medians of 20: the rate of covering is 0.95 or more but for 4 standard errors.
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for values in torch.randn(500, 20, generator=generator).tolist():
        low, high = timing.median_interval(values)
        covered += low <= 0 <= high
    assert covered / 500 > 0.95 - 4 * math.sqrt(0.95 * 0.05 / 500)


def test_calls_take_turns_and_warm_ups_do_not_count():
    called = []
    steps = {name: lambda name=name: called.append(name) for name in "ab"}
    seconds = timing.time_steps(
        steps,
        effort=Effort(1, 2),
        stopwatch=timing.Stopwatch(torch.device("cpu"), wall=True),
        before=lambda: called.append("-"),
    )
    assert "".join(called) == "-a-b" + "-b-a" + "-a-b"
    assert [len(seconds[name]) for name in "ab"] == [2, 2]
    called.clear()
    found = timing.time_call(steps["a"], trials=7, warm_ups=2)
    assert len(called) == 9 and found.trials == 7


def test_speed_up_is_the_median_of_the_rounds_and_not_of_the_medians():
    ratio = timing.speedup([1, 2, 4, 8, 16, 32], [2, 4, 8, 16, 32, 64])
    assert ratio == timing.Ratio(2.0, (2.0, 2.0))


def test_exponent_of_a_power_law_is_its_power_and_noise_widens_the_interval():
    sizes = [256, 512, 1024, 2048]
    power, low, high = timing.exponent(sizes, [3 * size**1.5 for size in sizes])
    assert power == pytest.approx(1.5) and high - low < 1e-6
    power, low, high = timing.exponent(sizes, [1.0, 2.2, 3.9, 8.3])
    assert low < 1 < high and high - low > 0.05


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device": "gpu"}, "device='gpu': expected 'cpu' or 'cuda'; pass one"),
        ({"device": 3.5}, "device=3.5: expected"),
        ({"call": 3}, "call=3: expected a function without arguments; pass a lambda"),
        ({"warm_ups": 0.5}, "warm_ups=0.5: expected a whole number"),
        ({"warm_ups": -1}, "warm_ups=-1"),
        ({"trials": 0}, "trials=0: expected"),
    ],
    ids=str,
)
def test_time_call_refuses_with_the_way_out(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        timing.time_call(**{"call": list, **given})


def test_a_gpu_that_is_not_there_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for make in (lambda: timing.time_call(list, device="cuda:1"), lambda: Request(device="cuda")):
        with pytest.raises(ValueError, match="device='cuda.*finds 0 GPUs here; pass device='cpu'"):
            make()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="device='cuda:1': torch finds 1 GPUs here"):
        timing.usable_device("cuda:1")


def test_memory_of_a_call():
    with memory.PeakMemory() as peak:
        held = torch.ones(2**24)
        del held
    assert peak.gpu_mb is None or peak.gpu_mb == 0
    assert peak.cpu_mb is None or 60 < peak.cpu_mb < 80
    grown = memory.peak_growth(lambda: torch.ones(2**24), torch.device("cpu"))
    assert grown is None or 60 < grown < 100


def test_work_counts_pairs_of_the_pattern_products_and_bytes_and_no_views():
    q, k, v = (torch.randn(1, 2, 96, 16, requires_grad=True) for _ in range(3))
    found = work.count_work(
        lambda: dpflash.attention(q, k, v, pattern=Dense(causal=True)).sum().backward()
    )
    assert found.flops == 14 * 16 * 2 * 96 * 97 / 2
    assert found.moved_bytes >= 4 * (8 * q.numel())
    x, y = torch.randn(8, 16), torch.randn(4, 16)
    found = work.count_work(lambda: x @ y.T)
    assert found == work.Work(2 * 8 * 16 * 4, 4 * (8 * 16 + 4 * 16 + 8 * 4))


@pytest.mark.parametrize(
    ("flops", "moved", "seconds", "taken", "bound"),
    [
        (1e9, 1e6, 1.5, None, "compute_bound"),
        (1e9, 1e6, 2.1, None, "overhead"),
        (1e6, 1e9, 1.5, None, "memory_bandwidth"),
        (1e9, 1.1e9, 1.5, None, "balanced"),
        (1e9, 1e6, 1.5, 0.9, "memory_capacity"),
    ],
)
def test_the_lower_roof_bounds(flops, moved, seconds, taken, bound):
    roofs = Ceilings({"float32": 1e9}, 1e9)
    found = work.place_under_roofs(work.Work(flops, moved), seconds, roofs, "float32", taken)
    assert found["bound"] == bound
    assert found["roof"] == ("compute" if flops > moved else "memory")
    assert found["roof_fraction"] == pytest.approx(max(flops, moved) / 1e9 / seconds)
    assert found["gflop_per_s"] == flops / seconds / 1e9
    assert found["intensity"] == flops / moved


def test_roofs_are_the_rates_of_the_median_copy_and_product(monkeypatch):
    efforts = []

    def time_steps(calls, *, effort, stopwatch):
        efforts.append(effort.trials)
        for call in calls.values():
            call()
        return {name: [9.0, 0.5, 0.25] for name in calls}

    multiply = torch.mm

    def no_half(left, right):
        if left.dtype == torch.float16:
            raise RuntimeError("not implemented for 'Half'")
        return multiply(left, right)

    monkeypatch.setattr(torch, "mm", no_half)
    monkeypatch.setattr(work, "time_steps", time_steps)
    before = torch.get_float32_matmul_precision()
    for quick in (True, False):
        roofs = work.measured_roofs(torch.device("cpu"), quick=quick)
        assert (roofs.flops.keys(), roofs.bandwidth) == ({"float32", "bfloat16"}, 2**29 / 0.5)
        assert roofs.flops["float32"] == 2 * 256**3 / 0.5
    assert sorted(set(efforts)) == [1, 3, 20]
    assert torch.get_float32_matmul_precision() == before
