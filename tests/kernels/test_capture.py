"""Captures of CUDA graphs: noise is refused, and what replays read is kept.

There may be no GPU: what PyTorch answers about the stream is replaced.
"""

import functools
import gc
import inspect
import weakref

import pytest
import torch

from dpflash import kernels
from dpflash.kernels import Kept, NoiseStream, clip_reduce, gaussian_noise_
from dpflash.kernels.capture import kept_in_captures, sent

STREAM = NoiseStream(std=1.0, grid=2.0**-30, key=bytes(32), step=0, parameter_id=0)
OPERANDS = {
    "grads": torch.ones(2, 5, 4),
    "factors": torch.ones(2),
}


def with_noise():
    """Every public operation that adds noise to its result, with operands."""
    found = {}
    for name in kernels.__all__:
        operation = getattr(kernels, name)
        if callable(operation) and not inspect.isclass(operation):
            parameters = inspect.signature(operation).parameters
            if "noise" in parameters:
                found[name] = {k: v for k, v in OPERANDS.items() if k in parameters}
    return found


@pytest.fixture
def capturing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def add_noise(out):
    return gaussian_noise_(out, std=1.0, grid=2.0**-30, key=bytes(32), step=0, parameter_id=0)


@pytest.mark.parametrize("add", [add_noise, STREAM.add_to_], ids=["function", "stream"])
def test_noise_in_place_is_refused_while_a_stream_captures(add, capturing):
    out = torch.zeros(8)
    with pytest.raises(RuntimeError, match="capturing"):
        add(out)
    assert not out.any()


def test_the_operation_with_noise_is_the_one_that_is_known():
    assert sorted(with_noise()) == ["clip_reduce", "clip_reduce_all"]


@pytest.mark.parametrize("name", with_noise())
def test_fused_noise_is_refused_while_a_stream_captures(name, capturing):
    operation, operands, noise = getattr(kernels, name), with_noise()[name], STREAM
    if name.endswith("_all"):
        operands, noise = {**operands, "grads": [operands["grads"]]}, [STREAM]
    with pytest.raises(RuntimeError, match="capturing"):
        operation(**operands, noise=noise)
    assert len(operation(**operands))


@pytest.mark.parametrize("initialized", [False, True])
def test_noise_is_added_where_nothing_captures(initialized, monkeypatch):
    def answer():
        assert initialized, "asked though CUDA was never used: a build without it raises then"
        return False

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", answer)
    assert add_noise(torch.zeros(8)).all()


@pytest.mark.gpu
def test_a_real_capture_is_seen():
    out = torch.zeros(8, device="cuda")
    add_noise(out)
    before = out.clone()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="capturing a graph"), torch.cuda.graph(graph):
        add_noise(out)
    torch.cuda.synchronize()
    assert torch.equal(out, before)


def test_tables_are_copied_once_after_the_capture_to_memory_of_the_rehearsal():
    kept, table, cpu = Kept(), torch.arange(4), torch.device("cpu")
    with kept.rehearsing():
        first = sent(torch.ones(4, dtype=torch.int64), cpu)
    with kept.capturing():
        there = sent(table, cpu)
    assert there is first and first.sum() == 4
    kept.write()
    assert torch.equal(there, table) and there.data_ptr() != table.data_ptr()
    assert sent(table, cpu) is table


def test_a_capture_that_sends_other_tables_than_its_rehearsal_is_refused():
    kept, cpu = Kept(), torch.device("cpu")
    with kept.rehearsing():
        sent(torch.arange(4), cpu)
    with kept.capturing(), pytest.raises(RuntimeError, match="other kernels than its rehearsal"):
        sent(torch.arange(5), cpu)


def test_what_a_cache_gave_in_a_capture_outlives_the_cache():
    @kept_in_captures
    @functools.lru_cache(maxsize=1)
    def made(number):
        return torch.full((3,), number)

    kept = Kept()
    with kept.capturing():
        inside = weakref.ref(made(1))
    outside = weakref.ref(made(2))
    made(3)
    gc.collect()
    assert inside() is not None and outside() is None


def test_a_table_is_refused_in_a_capture_of_others(capturing):
    with pytest.raises(RuntimeError, match="capturing"):
        sent(torch.arange(4), torch.device("cuda"))


def test_a_launch_reads_its_tables_at_the_replay(monkeypatch):
    launch = pytest.importorskip("dpflash.kernels.grad_launch")
    calls, kernels = [], launch.kernels
    grads, factors = torch.randn(2, 3, 40), torch.tensor([0.5, 0.25])
    into = torch.zeros(3, 40, dtype=torch.float64)
    expected = clip_reduce(grads, factors, grid=2.0**-20)

    class Recorded:
        def __getitem__(self, programs):
            return lambda *args, **options: calls.append((programs, args, options))

    kernel, kept = kernels._clip_reduce_kernel, Kept()
    monkeypatch.setattr(kernels, "_clip_reduce_kernel", Recorded())
    with kept.rehearsing():
        launch.clip_reduce_all([grads.clone()], factors, grid=2.0**-20, into=[into])
    calls.clear()
    with kept.capturing():
        launch.clip_reduce_all([grads], factors, grid=2.0**-20, into=[into])
    kept.write()
    for replays in (1, 2):
        for programs, args, options in calls:
            kernel[programs](*args, **options)
        assert torch.equal(into, replays * expected)
