"""What each rank runs for the tests of bit-equal releases in test_private_training.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash.packing import PackTo

_NAME = "distributed_private_cases"
if _NAME not in sys.modules:
    _SPEC = importlib.util.spec_from_file_location(
        _NAME, Path(__file__).with_name("private_cases.py")
    )
    assert _SPEC is not None and _SPEC.loader is not None
    sys.modules[_NAME] = importlib.util.module_from_spec(_SPEC)
    _SPEC.loader.exec_module(sys.modules[_NAME])
cases: Any = sys.modules[_NAME]

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
    mesh = cases.mesh_of(1) if ranks else None
    torch.manual_seed(0)
    plain = Sum()
    model = plain if mesh is None else cases.wrap(plain, wrapper, mesh)
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-1000, 1001, (SAMPLES, sum(WIDTHS)), generator=generator).float()
    engine = dpflash.PrivacyEngine(seed=3, mesh=mesh)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(x), batch_size=BATCH),
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
    mesh = cases.mesh_of(1) if ranks else None
    torch.manual_seed(0)
    plain = dpflash.nn.LongContextLM(40, 32, 1, 2, max_seq_len=256)
    model = plain if mesh is None else cases.wrap(plain, wrapper, mesh)
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 257, (documents,), generator=generator).tolist()
    engine = dpflash.PrivacyEngine(seed=3, mesh=mesh)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(
            [torch.randint(40, (n,), generator=generator) for n in lengths],
            batch_size=(documents + 1) // 2,
            collate_fn=PackTo(tokens=256, max_documents=max_documents, align=64),
        ),
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
