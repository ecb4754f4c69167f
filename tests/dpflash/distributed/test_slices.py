"""Which rank owns which elements, and the sums that owners get, for up to 16 ranks in threads."""

import math
import random
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dpflash.distributed import slices
from dpflash.distributed.mesh import Ranks
from dpflash.kernels import NoiseStream, clip_reduce_all, grid_of
from dpflash.step import BatchNoise, ClippedSums

SHAPES = [(5, 3), (), (1,), (0, 4), (17,), (2, 3, 7)]
MESHES = [(1, 1), (2, 1), (1, 3), (2, 2), (5, 3), (16, 1), (1, 16), (4, 4)]


class Threads:
    """Ranks as threads: `run` gives each a `Ranks`, and exchanges work among those of a group."""

    def __init__(self, monkeypatch, data, context):
        self.shape = data, context
        self._own = threading.local()
        replaced = {
            "world_size": lambda group: 1 if group is None else group.size,
            "rank_in": self._rank_in,
            "all_to_all": self._all_to_all,
            "all_gather": self._all_gather,
            "agree": self._agree,
        }
        for name, function in replaced.items():
            monkeypatch.setattr(slices, name, function)
        for name in ("rank_in", "world_size"):
            monkeypatch.setattr(f"dpflash.distributed.collectives.{name}", replaced[name])

    def run(self, function):
        data, context = self.shape
        rows = [self._group("data", data) for _ in range(context)]
        columns = [self._group("context", context) for _ in range(data)]
        found, failed = {}, []

        def work(d, c):
            self._own.rank = {"data": d, "context": c}
            ranks = Ranks(None, rows[c] if data > 1 else None, columns[d] if context > 1 else None)
            try:
                found[d, c] = function(ranks, d * context + c)
            except BaseException as error:  # or the other threads would wait
                failed.append(error)
                for group in rows + columns:
                    group.barrier.abort()

        threads = [
            threading.Thread(target=work, args=(d, c)) for d in range(data) for c in range(context)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
        return [found[key] for key in sorted(found)]

    @staticmethod
    def _group(kind, size):
        return SimpleNamespace(kind=kind, size=size, board={}, barrier=threading.Barrier(size))

    def _rank_in(self, group):
        return 0 if group is None else self._own.rank[group.kind]

    def _exchanged(self, group, value):
        group.board[self._rank_in(group)] = value
        group.barrier.wait()
        board = [group.board[rank] for rank in range(group.size)]
        group.barrier.wait()
        return board

    def _agree(self, operation, values, group):
        if len({repr(theirs) for theirs in self._exchanged(group, values)}) > 1:
            raise ValueError("differs between ranks")

    def _all_to_all(self, x, sizes, received, group, operation):
        own = self._rank_in(group)
        parts = [theirs.split(cuts)[own] for theirs, cuts in self._exchanged(group, (x, sizes))]
        assert [part.numel() for part in parts] == list(received)
        return torch.cat(parts)

    def _all_gather(self, x, group, operation):
        return torch.stack(self._exchanged(group, x))


def parameters():
    return [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]


@pytest.mark.parametrize("mesh", MESHES)
def test_invariant_4_each_element_has_one_owner(monkeypatch, mesh):
    trained = parameters()

    def owned(ranks, rank):
        return [slices.Slices(ranks).owned(p) for p in trained]

    by_rank = Threads(monkeypatch, *mesh).run(owned)
    for parameter, cuts in zip(trained, zip(*by_rank, strict=True), strict=True):
        elements = [i for cut in cuts for i in range(cut.start, cut.stop)]
        assert sorted(elements) == list(range(parameter.numel()))


@pytest.mark.parametrize("samples", [2**16, 2**16 + 1])
@pytest.mark.parametrize("mesh", MESHES[1:])
def test_parts_that_nearly_cancel_add_up_to_the_integers(monkeypatch, mesh, samples):
    # Each rank's part is as large as the bound allows, and the whole is a few steps of the grid.
    trained, bound = parameters(), 1.99
    grid, count = grid_of(bound), mesh[0] * mesh[1]
    most = int(bound / grid) * (samples // max(2, count))
    numbers = random.Random(samples)
    parts = [
        [[numbers.randrange(-most, most + 1) for _ in range(p.numel())] for p in trained]
        for _ in range(count)
    ]
    for i, parameter in enumerate(trained):
        for j in range(parameter.numel()):
            rest = sum(part[i][j] for part in parts[1:])
            parts[0][i][j] = numbers.randrange(-3, 4) - rest

    def released(ranks, rank):
        own = slices.Slices(ranks)
        whole = [torch.tensor(x, dtype=torch.float64) * grid for x in parts[rank]]
        if ranks.context is not None:  # as the gate leaves them
            cuts = [own.of_context(p) for p in trained]
            rows = [x.view(1, -1) for x in whole]
            found = slices.reduce_to_owners(rows, cuts, ranks.context, ["all"], "a test")
            whole = [x.flatten() for x in found]
        totals = own.reduced(dict(zip(trained, whole, strict=True)), [1])
        assert [x.numel() for x in totals.values()] == [
            own.owned(p).stop - own.owned(p).start for p in trained
        ]
        return own.released(totals)

    for one in Threads(monkeypatch, *mesh).run(released):
        for i, (parameter, total) in enumerate(zip(trained, one, strict=True)):
            assert total.shape == parameter.shape
            wanted = [sum(part[i][j] for part in parts) for j in range(parameter.numel())]
            assert [int(x) for x in (total.flatten() / grid).tolist()] == wanted


@pytest.mark.cases(2)
@pytest.mark.parametrize("exact", [True, False])
def test_a_sample_alone_over_a_context_is_clipped_at_the_release(monkeypatch, exact):
    parameter, grid = nn.Parameter(torch.zeros(10)), grid_of(1.0) if exact else None
    rows = torch.randn(2, 10, generator=torch.Generator().manual_seed(0))
    factors = torch.tensor([0.5, 0.25])

    def released(ranks, rank):
        ranks = replace(ranks, everyone=ranks.context)
        sums = ClippedSums([parameter], names={parameter: "weight"}, ranks=ranks, exact=exact)
        sums.begin(1.0)
        own = rows[:, sums.slices.held(parameter)]
        sums.add_clipped([parameter], [own[:1]], factors[:1])
        # A sum would be of eight bytes an element.
        assert sums._sums[parameter].grad.data_ptr() == own.data_ptr()
        (first,) = clip_reduce_all([own[:1].contiguous()], factors[:1], grid=grid)
        assert torch.equal(sums[parameter], first)
        sums.add_clipped([parameter], [own[1:]], factors[1:])
        found = []
        for _ in range(2):
            noise = BatchNoise(1.5, 1.0, key=bytes(32), step=0, parameter_ids={parameter: 0})
            ((_, (mean,)),) = sums.with_noise([parameter], noise, 1.0)
            found.append(mean)
        return found

    monkeypatch.setattr(Ranks, "agree", lambda *args: None)
    (total,) = clip_reduce_all([rows], factors, grid=grid)
    total, std = total.double(), math.nextafter(1.5, math.inf)
    stream = NoiseStream(std=std, grid=grid_of(1.0), key=bytes(32), step=0, parameter_id=0)
    stream.add_to_(total)
    for one, again in Threads(monkeypatch, 1, 2).run(released):
        assert torch.equal(one, again)
        torch.testing.assert_close(one, total.float(), rtol=0, atol=0 if exact else 1e-6)


def test_sums_that_carried_a_charge_are_released_once(monkeypatch):
    trained = parameters()
    monkeypatch.setattr(Ranks, "agree", lambda *args: None)
    may_carry = Ranks.data_may_carry
    monkeypatch.setattr(Ranks, "data_may_carry", lambda *args: True)

    def released(ranks, rank):
        ranks = replace(ranks, everyone=ranks.data)
        sums = ClippedSums(trained, names=dict.fromkeys(trained, ""), ranks=ranks)
        sums.begin(1.0)
        sums.add(trained, [torch.full(p.shape, rank + 1.0).double() for p in trained])
        assert may_carry(ranks, []) is False  # all parameters were frozen
        assert sums.carrier(trained)(rank == 0)
        assert not sums.carrier(trained)(False)
        return [one_release(sums) for _ in range(2)]

    def one_release(sums):
        ids = {p: number for number, p in enumerate(trained)}
        noise = BatchNoise(1.5, 1.0, key=bytes(32), step=0, parameter_ids=ids)
        ((_, means),) = sums.with_noise(trained, noise, 1.0)
        return torch.cat([mean.flatten() for mean in means])

    alone = ClippedSums(trained, names=dict.fromkeys(trained, ""))
    alone.begin(1.0)
    alone.add(trained, [torch.full(p.shape, 1.0 + 2.0 + 3.0).double() for p in trained])
    wanted = one_release(alone)
    for first, again in Threads(monkeypatch, 3, 1).run(released):
        assert torch.equal(first, wanted) and torch.equal(again, wanted)


def test_ranks_that_send_other_gradients_are_refused(monkeypatch):
    def mixed(ranks, rank):
        rows, cuts = torch.ones(2, 6), slices.shares(6, ranks.context)
        names = ["a", "b"] if rank < 2 else ["b", "a"]
        with pytest.raises(RuntimeError, match="gradients of different parameters"):
            slices.reduce_to_owners([rows], [cuts], ranks.context, names, "a test")

    Threads(monkeypatch, 1, 3).run(mixed)


def test_a_bundle_is_cut_at_25_mb_and_by_dtype(monkeypatch):
    monkeypatch.setattr("dpflash.distributed.collectives.BUNDLE_BYTES", 100)
    sizes = {torch.float32: (24, 1, 1), torch.float64: (1, 30)}
    tensors = [torch.empty(n, dtype=dtype) for dtype, counts in sizes.items() for n in counts]
    assert list(slices.bundles(tensors)) == [[0, 1], [2], [3, 4]]
    assert list(slices.bundles(tensors, [25, 25, 1, 12, 1])) == [[0], [1], [2], [3, 4]]
