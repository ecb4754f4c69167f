"""Calls of torch.distributed and their bytes, against counts by hand."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

# Importing it registers the backend "fake", which sends nothing.
from torch.testing._internal.distributed.fake_pg import FakeStore

from dpflash.bench.communication import SentBytes
from dpflash.bench.isolated import Place

RANK, RANKS = 1, 4
WEIGHTS = 16 * 8  # of the model, float32


@pytest.fixture(autouse=True)
def one_of_four():
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
    yield
    dist.destroy_process_group()


def sent(call):
    with SentBytes(Place(RANK, RANKS, torch.device("cpu"))) as found:
        call()
    return found.calls, found.bytes


def test_fsdp2_gathers_parameters_twice_and_scatters_gradients():
    trained = torch.nn.Sequential(torch.nn.Linear(16, 8, bias=False))
    mesh = init_device_mesh("cpu", (RANKS,))
    fully_shard(trained[0], mesh=mesh, reshard_after_forward=True)
    fully_shard(trained, mesh=mesh)

    def step():
        trained(torch.ones(2, 16)).sum().backward()

    step()
    # Each rank holds a quarter, and sends three of them.
    assert sent(step) == (3, 3 * 3 * WEIGHTS)


def test_a_rank_sends_nothing_to_itself_and_receiving_is_no_call():
    x, y = torch.ones(10), torch.empty(10)
    parts = [1, 2, 3, 4]  # to each rank

    def exchange():
        operations = [
            dist.P2POp(dist.isend, x[:8], group=dist.group.WORLD, group_peer=2),
            dist.P2POp(dist.irecv, y[:8], group=dist.group.WORLD, group_peer=0),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    uneven = (1 + 3 + 4) * 4
    for call, expected in (
        (exchange, 8 * 4),
        (lambda: dist.all_to_all_single(y, x, parts, parts), uneven),
        (lambda: dist.all_to_all(list(y.split(parts)), list(x.split(parts))), uneven),
        (lambda: dist.all_to_all_single(y[:4], x[:4]), 3 * 4),
        (lambda: dist.all_reduce(x), 2 * 3 / 4 * 40),
    ):
        assert sent(call) == (1, expected)


def test_an_unknown_collective_is_named_and_not_left_out():
    with pytest.raises(KeyError, match="gather_"):
        sent(lambda: dist.gather(torch.ones(2), dst=0))
