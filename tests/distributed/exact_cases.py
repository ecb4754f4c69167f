"""What each rank runs for the tests of bit-equal releases in test_private_training.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from distributed_world import load
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpflash
from dpflash.packing import PackTo

cases: Any = load(str(Path(__file__).with_name("private_cases.py")))

SAMPLES, BATCH, WIDTHS = 60, 24, (48, 80)


class Sum(nn.Module):
    """The sum of the outputs of linear layers side by side.

    Its inputs are integers and its gradients ones, so a sample's gradient is its data: no kernel
    rounds it, whatever the batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, 16) for width in WIDTHS)

    def forward(self, x: Tensor) -> Tensor:
        """`[B]` of `[B, sum(WIDTHS)]`."""
        parts = x.split(WIDTHS, dim=1)
        return sum(b(part).sum(1) for b, part in zip(self.blocks, parts, strict=True))


def released(
    group: object = None,
    *,
    ranks: int = 0,
    wrapper: str = "plain",
    sigma: float = 0.5,
    bound: float = 0.7,
    steps: int = 2,
    physical_batch_size: int | None = None,
    clipping: str = "flat",
    grad_sample_mode: str = "auto",
) -> list[np.ndarray]:
    """The gradients of some releases, whole; ranks=0 is one process without a mesh."""
    torch.manual_seed(0)
    plain = Sum()
    model, mesh = cases.parallel(plain, int(ranks > 0), wrapper)
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-1000, 1001, (SAMPLES, sum(WIDTHS)), generator=generator).float()
    engine = dpflash.PrivacyEngine(seed=3, mesh=mesh)
    model, optimizer, loader = cases.private(
        engine,
        model,
        TensorDataset(x),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        batch_size=BATCH,
        noise_multiplier=sigma,
        max_grad_norm=bound,
        clipping=clipping,
        grad_sample_mode=grad_sample_mode,
        physical_batch_size=physical_batch_size,
        exact=clipping != "flat" or grad_sample_mode == "instantiate",
    )
    found: list[np.ndarray] = []
    for (batch,) in loader:
        engine.backward(model(batch))
        optimizer.step()
        if optimizer.releases > len(found):
            found.append(_whole([p.grad for p in plain.parameters()]))
            if len(found) == steps:
                return found
        optimizer.zero_grad()
    return found


def packed(
    group: object = None,
    *,
    ranks: int = 0,
    wrapper: str = "plain",
    clipping: str = "flat",
    max_documents: int = 3,
    exact: bool = True,
    steps: int = 3,
    documents: int = 17,
) -> tuple[list[np.ndarray], list[int]]:
    """(gradients of releases over packed documents, this rank's microbatches of each)."""
    torch.manual_seed(0)
    plain = dpflash.nn.LongContextLM(40, 32, 1, 2, max_seq_len=256)
    model, mesh = cases.parallel(plain, int(ranks > 0), wrapper)
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 257, (documents,), generator=generator).tolist()
    engine = dpflash.PrivacyEngine(seed=3, mesh=mesh)
    model, optimizer, loader = cases.private(
        engine,
        model,
        [torch.randint(40, (n,), generator=generator) for n in lengths],
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        batch_size=(documents + 1) // 2,
        collate=PackTo(tokens=256, max_documents=max_documents, align=64),
        noise_multiplier=0.5,
        max_grad_norm=0.7,
        clipping=clipping,
        exact=exact,
    )
    found: list[np.ndarray] = []
    microbatches = [0]
    while len(found) < steps:
        for batch in loader:
            microbatches[-1] += not loader.tracker.current.is_trial
            engine.backward(model(batch.input_ids, batch.targets, batch))
            optimizer.step()
            if optimizer.releases > len(found):
                found.append(_whole([p.grad for p in plain.parameters()]))
                microbatches.append(0)
                if len(found) == steps:
                    break
            optimizer.zero_grad()
    return found, microbatches[:-1]


def _whole(grads: list[Any]) -> np.ndarray:
    full = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]
    return torch.cat([grad.flatten() for grad in full]).numpy()
