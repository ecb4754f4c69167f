"""Public and private data in one run on several ranks, and in one process to compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from distributed_world import load
from torch import Tensor

import dpflash
from dpflash.distributed.mesh import Ranks

cases: Any = load(str(Path(__file__).with_name("private_cases.py")))

PUBLIC = 12


def public_text() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(0, cases.VOCAB, (PUBLIC, cases.TOKENS + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def make(context: int, wrapper: str) -> tuple[Any, ...]:
    """The engine, what make_private returns, the plain model, and the mesh of all ranks."""
    plain = cases.build()
    made, mesh = cases.parallel(plain, context, wrapper)
    engine = dpflash.PrivacyEngine(seed=3, mesh=mesh)
    options = dict.fromkeys(("noise_multiplier", "max_grad_norm"), 0.5)
    options |= dict.fromkeys(("physical_batch_size", "max_batch_size"), cases.SAMPLES)
    options["verify_first_batch"] = False  # without trials, a draw is one microbatch
    private = cases.private(engine, made, optimizer=cases.adam(made), **options)
    return engine, *private, plain, mesh


def train(
    group: object = None, *, context: int = 0, wrapper: str = "plain", order: str = "before"
) -> np.ndarray:
    """Two private steps with public gradients and one without private data."""
    engine, model, optimizer, loader, plain, mesh = make(context, wrapper)

    def on_public() -> None:
        with engine.public_data():
            x, y = public_text()
            if mesh is not None:
                # Each rank has its own samples, as many as the others.
                ranks = Ranks.of(mesh)
                size = PUBLIC // ranks.data_size
                own = slice(ranks.data_rank * size, (ranks.data_rank + 1) * size)
                x, y = x[own], y[own]
            model(*cases.sharded(mesh, x, y)).mean().backward()

    for x, y in loader:
        if order == "before":
            on_public()
        losses = model(*cases.sharded(mesh, x, y))
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
