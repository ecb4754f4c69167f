"""What a private step launches on a GPU and how often it waits, counted on a CPU."""

import collections

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpflash.sampling.seen_batches import SeenBatches
from dpflash.verification.nested import tensors_of

launch = pytest.importorskip("dpflash.kernels.grad_launch")
noise_triton = pytest.importorskip("dpflash.kernels.noise_triton")
tensor_table = pytest.importorskip("dpflash.kernels.tensor_table")

WIDTH, VOCAB = 16, 30
# Operations whose results the host waits for. It reads single numbers (`READ`) of tensors that are
# on the CPU beside a GPU too, such as masks and seeds; one more would be a wait.
WAITS, READ = ("equal", "nonzero"), "_local_scalar_dense"
# Neither views nor what only asks for memory or types is launched.
FREE = {"detach", "lift_fresh", "promote_types", "unbind", READ, *WAITS}


class Counter(TorchDispatchMode):
    """Launches and waits of a block: operations, kernels of ours, and copies to the device."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.is_on = False
        self.launches, self.waits = collections.Counter(), collections.Counter()
        for module in (launch.kernels, noise_triton):
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                monkeypatch.setattr(module, name, Launched(self, name))
        sent, cpu = tensor_table.sent, torch.Tensor.cpu
        for module in (tensor_table, noise_triton):
            monkeypatch.setattr(module, "sent", self._counted(self.launches, "sent", sent))
        monkeypatch.setattr(torch.Tensor, "cpu", self._counted(self.waits, "cpu", cpu))

    def _counted(self, counts, name, function):
        def call(*given):
            counts[name] += self.is_on
            return function(*given)

        return call

    def __enter__(self):
        self.launches.clear()
        self.waits.clear()
        self.is_on = True
        return super().__enter__()

    def __exit__(self, *error):
        self.is_on = False
        return super().__exit__(*error)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        found = operation(*args, **(kwargs or {}))
        name = operation.overloadpacket.__name__
        self.waits[name] += name in (READ, *WAITS)
        results = [x for _, x in tensors_of(found)]
        given = {x.untyped_storage().data_ptr() for _, x in tensors_of((args, kwargs))}
        is_view = operation.is_view or any(
            x.untyped_storage().data_ptr() in given for x in results
        )
        is_written = any(
            a.alias_info and a.alias_info.is_write for a in operation._schema.arguments
        )
        if name not in FREE and "empty" not in name and results and (is_written or not is_view):
            self.launches[name] += 1
        return found


class Launched:
    """A kernel that counts its launches, and runs none."""

    def __init__(self, counter, name):
        self.counter, self.name = counter, name

    def __getitem__(self, programs):
        return self._count

    def _count(self, *given, **options):
        self.counter.launches[self.name] += self.counter.is_on


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def build(layers):
    torch.manual_seed(0)
    table, head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
    head.weight = table.weight
    return nn.Sequential(table, *(Block() for _ in range(layers)), head)


def losses_of(model, x):
    losses = F.cross_entropy(model(x).flatten(0, 1), x.flatten(), reduction="none")
    return losses.view(len(x), -1).mean(1)


@pytest.fixture
def counted(private, kernels_of_a_gpu, monkeypatch):
    """counted(layers, microbatches, ...) -> launches of a plain and of a private step, waits."""
    counter = Counter(monkeypatch)
    # On a GPU the first batches alone are compared with earlier ones.
    monkeypatch.setattr(SeenBatches, "_is_checked", lambda *_: False)

    def count(layers, microbatches=1, **options):
        x, model = torch.randint(0, VOCAB, (16, 4)), build(layers)
        with counter:
            losses_of(model, x[: 16 // microbatches]).sum().backward()
        plain = counter.launches.total()
        engine, model, optimizer, loader = private(
            build(layers),
            x,
            **{"batch_size": 16, "sampling": "fixed_size", "noise_multiplier": 1.0},
            **{"verify_first_batch": False, "physical_batch_size": 16 // microbatches, **options},
        )
        launches, waits = collections.Counter(), collections.Counter()
        for step in range(2):  # the second one is counted
            for (rows,) in loader:
                with counter:
                    engine.backward(losses_of(model, rows))
                if step:
                    launches += counter.launches
                    waits += counter.waits
                if loader.is_last:
                    break
            optimizer.step()
            optimizer.zero_grad()
        return plain, launches, waits

    return count


# Options; launches of a layer beyond a plain one; (waits, reads) of one microbatch, and of four.
KINDS = {
    "instantiate": ({"grad_sample_mode": "instantiate"}, 5, (1, 3), (1, 12)),
    "book_keeping": ({"grad_sample_mode": "book_keeping"}, 15, (1, 3), (1, 12)),
    "per_layer": ({"clipping": "per_layer"}, 23, (1, 3), (1, 12)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_launches_and_waits_of_a_step_stay_few(counted, kind):
    options, most, *expected = KINDS[kind]
    plain, one, waits = counted(1, **options)
    plain_of_two, two, _ = counted(2, **options)
    layer = two - one
    assert layer.total() - (plain_of_two - plain) <= most
    found = [waits, counted(1, 4, **options)[2]]
    assert [(w.total() - w[READ], w[READ]) for w in found] == expected
    if kind == "instantiate":  # a parameter has no launch beyond that of its gradient
        own = {"_clip_reduce_kernel", "_clip_factors_kernel", "_squares_kernel", "sent", "zeros"}
        assert not own & layer.keys() and own <= one.keys()
