"""What each rank runs for test_context_models.py."""

from __future__ import annotations

import warnings
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash.distributed import ContextParallel, context_parallel, loss_weights
from dpflash.nn import LongContextLM, MultiheadAttention
from dpflash.patterns import SlidingWindow

VOCAB = 30


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("context",))


def model_matches(
    group: object, *, tokens: int, model: dict[str, Any], mode: str, sharding: str
) -> list[float]:
    """Greatest differences of logits, losses and summed gradients from those of one process."""
    window = SlidingWindow(window=5, causal=True)
    options = {"pattern": window if model.pop("window", False) else None, **model}
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(LongContextLM(VOCAB, 16, 2, 4, max_seq_len=tokens, **options))
    alone, together = made
    context_parallel(together, _mesh(), mode=mode, sharding=sharding)
    parallel = together.context_parallel
    assert parallel is not None
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, VOCAB, (3, tokens), generator=generator)
    y = torch.randint(0, VOCAB, (3, tokens), generator=generator)
    y[0, ::3] = -100
    y[2] = -100  # a sample without any valid target
    own_x, own_y = parallel.shard(x), parallel.shard(y)

    logits = alone(x)
    errors = [float((parallel.unshard(together(own_x)) - logits).abs().max())]
    whole = alone(x, y)
    part = together(own_x, own_y)
    total = part.detach().clone()
    dist.all_reduce(total)
    errors.append(float((total - whole).abs().max()))
    by_hand = dpflash.losses.cross_entropy(together(own_x), own_y) * loss_weights(own_y, _mesh())
    errors.append(float((by_hand - part).abs().max()))
    whole.sum().backward()
    part.sum().backward()
    for p, q in zip(alone.parameters(), together.parameters(), strict=True):
        dist.all_reduce(q.grad)
        errors.append(float((p.grad - q.grad).abs().max()))
    return errors


def module_matches(group: object, *, mesh_as: str) -> float:
    """MultiheadAttention(context_parallel=) against the plain one."""
    mesh = _mesh()
    given = mesh if mesh_as == "mesh" else ContextParallel.of(mesh, "ring", "zigzag")
    torch.manual_seed(0)
    alone = MultiheadAttention(16, 4, rotary=True)
    torch.manual_seed(0)
    together = MultiheadAttention(16, 4, rotary=True, context_parallel=given)
    x = torch.randn(2, 13, 16)
    parallel = together.context_parallel
    o, _ = together(parallel.shard(x), is_causal=True)
    return float((parallel.unshard(o) - alone(x, is_causal=True)[0]).abs().max())


class _Holder(nn.Module):
    def __init__(self, *children: nn.Module) -> None:
        super().__init__()
        self.attention = MultiheadAttention(16, 4)
        self.parts = nn.ModuleList(children)


def refusals(group: object) -> dict[str, str]:
    """What is refused, and how it is said."""
    said = {}
    mesh = _mesh()

    def attempt(name: str, action: Any) -> None:
        try:
            action()
            said[name] = "nothing"
        except (ValueError, dpflash.PrivateRefusal) as error:
            said[name] = str(error)

    mixers = {
        "torch attention": nn.MultiheadAttention(16, 4),
        "recurrent": nn.LSTM(16, 16),
        "convolution": nn.Conv1d(16, 16, 3),
        "batch norm": nn.BatchNorm1d(16),
        "group norm": nn.GroupNorm(2, 16),
        "pooling": nn.AvgPool1d(2),
        "cross attention": MultiheadAttention(16, 4, self_attention=False),
        "dropout": MultiheadAttention(16, 4, dropout=0.1),
    }
    for name, mixer in mixers.items():
        attempt(name, lambda mixer=mixer: context_parallel(_Holder(mixer), mesh))
    attempt("no attention", lambda: context_parallel(nn.Linear(2, 2), mesh))
    attempt("mode", lambda: context_parallel(_Holder(), mesh, mode="star"))
    attempt("sharding", lambda: context_parallel(_Holder(), mesh, sharding="stripes"))
    attempt("no mesh", lambda: context_parallel(_Holder(), "context"))
    data = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    attempt("no context", lambda: context_parallel(_Holder(), data))
    twice = context_parallel(_Holder(), mesh)
    attempt("twice", lambda: context_parallel(twice, mesh))
    attempt(
        "dropout in module", lambda: MultiheadAttention(16, 4, dropout=0.1, context_parallel=mesh)
    )
    dropping = {"max_seq_len": 7, "dropout": 0.1}
    attempt(
        "dropout in model",
        lambda: context_parallel(LongContextLM(VOCAB, 16, 1, 4, **dropping), mesh),
    )
    attempt(
        "dropout in a model's own",
        lambda: LongContextLM(VOCAB, 16, 1, 4, context_parallel=mesh, **dropping),
    )
    x = torch.randn(2, 5, 16)
    attend = twice.attention
    attempt("padding", lambda: attend(x, key_padding_mask=torch.zeros(2, 5, dtype=torch.bool)))
    attempt("mask", lambda: attend(x, attn_mask=torch.zeros(5, 5)))
    # Only one rank is wrong, and all ranks raise.
    mask = torch.zeros(5, 5) if dist.get_rank() == 1 else None
    attempt("mask of one", lambda: attend(x, attn_mask=mask))
    attempt("samples", lambda: attend(x[: 1 + dist.get_rank()]))
    attempt("shards", lambda: attend(x[:, : 1 + 3 * dist.get_rank()]))
    stale = attend.context_parallel.agree(4)
    attempt("context of another call", lambda: attend(x, context=stale))
    short = LongContextLM(VOCAB, 16, 1, 4, max_seq_len=7, context_parallel=mesh)
    attempt("too long", lambda: short(torch.zeros(1, 4, dtype=torch.int64)))
    return said


def sample_numbers(group: object) -> Tensor:
    """loss_weights of targets of which some ranks have no valid one."""
    targets = torch.full((3, 4), -100)
    targets[0, : 1 + dist.get_rank()] = 1
    if dist.get_rank() == 0:
        targets[1] = 2
    return loss_weights(targets, _mesh()).numpy()


def looks(group: object) -> dict[str, Any]:
    """What is said where inputs were not cut, where they were, and where no mesh is given."""
    mesh = _mesh()
    said: dict[str, Any] = {}
    for name in ("copies", "shards"):
        model = context_parallel(LongContextLM(VOCAB, 16, 1, 4, max_seq_len=128), mesh)
        x = torch.randint(0, VOCAB, (2, 64), generator=torch.Generator().manual_seed(0))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(x if name == "copies" else model.context_parallel.shard(x))
            model(x if name == "copies" else model.context_parallel.shard(x))
        said[name] = [str(w.message) for w in caught if "same" in str(w.message)]
    said["no mesh"] = {}
    for when in ("before", "after"):  # the engine is made before the ranks know of each other
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with patch.object(dist, "is_initialized", lambda when=when: when == "after"):
                engine = dpflash.PrivacyEngine()
            for _ in range(2):
                model = nn.Linear(2, 2)
                engine.make_private(
                    module=model,
                    optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
                    data_loader=DataLoader(TensorDataset(torch.zeros(8, 2)), batch_size=4),
                    noise_multiplier=1.0,
                    max_grad_norm=1.0,
                )
                engine.detach(model)
        places = [w.filename for w in caught if "without mesh" in str(w.message)]
        said["no mesh"][when] = places == [__file__]
    own = context_parallel(_Holder(), mesh, sharding="zigzag")
    said["own model"] = own.context_parallel.sharding
    return said


def plan(group: object) -> tuple[str, list[str]]:
    """The table of `PrivacyEngine.plan` for two layers over a context, and the engine's whole."""
    torch.manual_seed(0)
    model = LongContextLM(VOCAB, 16, 2, 4, max_seq_len=64)
    context_parallel(model, _mesh(), sharding="zigzag")
    tokens = torch.randint(0, VOCAB, (4, 65), generator=torch.Generator().manual_seed(0))
    engine = dpflash.PrivacyEngine(mesh=_mesh())
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=4),
        sampling="fixed_size",
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for x, y in loader:
        engine.backward(private(*map(model.context_parallel.shard, (x, y))))
        optimizer.step()
    return engine.plan().context, str(engine.plan()).splitlines()
