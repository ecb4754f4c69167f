"""Public and private data in one run on several ranks, and in one process to compare."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

import dpflash
from dpflash.distributed import context_parallel, shard_sequence

_NAME = "distributed_private_cases"
if _NAME not in sys.modules:
    _SPEC = importlib.util.spec_from_file_location(
        _NAME, Path(__file__).with_name("private_cases.py")
    )
    assert _SPEC is not None and _SPEC.loader is not None
    sys.modules[_NAME] = importlib.util.module_from_spec(_SPEC)
    _SPEC.loader.exec_module(sys.modules[_NAME])
cases: Any = sys.modules[_NAME]

PUBLIC = 12


def public_text() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(0, cases.VOCAB, (PUBLIC, cases.TOKENS + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def make(context: int, wrapper: str) -> tuple[Any, ...]:
    """The engine, what make_private returns, the plain model, and the mesh of all ranks."""
    mesh = cases.mesh_of(context) if context else None
    plain = made = cases.build()
    if mesh is not None:
        if context > 1:
            context_parallel(plain, mesh)
        made = cases.wrap(plain, wrapper, mesh)
    engine = dpflash.PrivacyEngine(seed=3, mesh=mesh)
    private = engine.make_private(
        module=made,
        optimizer=torch.optim.Adam(made.parameters(), lr=1e-2, eps=1e-3),
        data_loader=DataLoader(cases.dataset(), batch_size=cases.BATCH),
        noise_multiplier=0.5,
        max_grad_norm=0.5,
        physical_batch_size=cases.SAMPLES,
        max_batch_size=cases.SAMPLES,
    )
    return engine, *private, plain, mesh


def train(
    group: object = None, *, context: int = 0, wrapper: str = "plain", order: str = "before"
) -> np.ndarray:
    """Two private steps with public gradients and one without private data."""
    engine, model, optimizer, loader, plain, mesh = make(context, wrapper)

    def shard(*tensors: Tensor) -> list[Tensor]:
        if context <= 1:
            return list(tensors)
        return [shard_sequence(t, 1, mesh.get_group("context")) for t in tensors]

    def on_public() -> None:
        with engine.public_data():
            x, y = public_text()
            if mesh is not None:
                # Each rank has its own samples, as many as the others.
                size = PUBLIC // mesh.size(0)
                own = slice(mesh.get_local_rank(0) * size, (mesh.get_local_rank(0) + 1) * size)
                x, y = x[own], y[own]
            model(*shard(x, y)).mean().backward()

    for x, y in loader:
        if order == "before":
            on_public()
        losses = model(*shard(x, y))
        if order == "between":
            on_public()
        engine.backward(losses)
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.releases == 2:
            break
    on_public()
    optimizer.step()
    assert optimizer.releases == 2
    return cases.whole(plain)


def refused(group: object = None, *, case: str) -> str:
    """What a rank says where the ranks' public gradients do not fit together."""
    wrapper = "fsdp2d" if case == "context" else "plain"
    engine, model, optimizer, loader, _, mesh = make(2 if case == "context" else 1, wrapper)
    first = dist.get_rank() == 0
    x, y = next(iter(loader)) if case != "context" else public_text()
    try:
        if case == "context":
            with engine.public_data():
                pass
        elif case == "one rank steps on public data alone":
            if not first:
                engine.backward(model(x, y))
            else:
                # As where a rank has lost its batch.
                engine._step.tracker.refused()
            with engine.public_data():
                model(*public_text()).mean().backward()
        elif case == "one rank has no public data":
            engine.backward(model(x, y))
            if first:
                with engine.public_data():
                    model(*public_text()).mean().backward()
        optimizer.step()
    except ValueError as error:
        return str(error)
    return "nothing"
