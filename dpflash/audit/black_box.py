"""A black-box run: trains a small language model on canary documents, and scores the documents.

The canaries are documents of random tokens. For each document, a fair coin decides whether it is
in the data. A document's score is its loss before training minus its loss after training.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from dpflash.accounting import Accountant

from ..nn import LongContextLM
from .bounds import LEAST_CANARIES
from .ranks import Audited
from .releases import quietly
from .scores import numbers_of

_VOCAB, _TOKENS, _WIDTH, _LEARNING_RATE = 256, 8, 32, 0.03


def train_on_documents(
    audited: Audited,
    *,
    canaries: int,
    seed: int | None = None,
    device: str = "cpu",
    progress: bool = False,
) -> tuple[NDArray[np.float64], NDArray[np.bool_], Accountant]:
    """Train with a new engine and the audited settings, on about half of the canary documents.

    Returns scores `[canaries]`, whether each canary was in the data `[canaries]`, the accountant.
    """
    if canaries < LEAST_CANARIES:
        raise ValueError(
            f"canaries={canaries}: too few for guesses in black-box mode; pass at least "
            f"{LEAST_CANARIES}"
        )
    rng = np.random.default_rng(seed)
    included = rng.random(canaries) < 0.5
    documents = torch.from_numpy(rng.integers(0, _VOCAB, (canaries, _TOKENS + 1))).to(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng.integers(2**31)))
        model: Any = LongContextLM(_VOCAB, _WIDTH, 1, 2, max_seq_len=_TOKENS).to(device)
    before = _losses(model, documents)
    inside = documents[torch.from_numpy(included).to(device)]
    # A dataset must not be empty: if no canary is in the data, add a document that is no canary.
    dataset = TensorDataset(inside if len(inside) else torch.zeros_like(documents[:1]))
    privacy = audited.privacy
    rate, _, steps = numbers_of(privacy)
    engine = audited.new_engine()
    with quietly():
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.Adam(model.parameters(), lr=_LEARNING_RATE),
            data_loader=DataLoader(dataset, batch_size=max(1, round(rate * len(dataset)))),
            privacy=privacy,
            performance=audited.performance,
        )
        with tqdm(total=steps, desc="audit", unit="release", disable=not progress) as bar:
            for (batch,) in loader:
                engine.backward(model(batch[:, :-1], batch[:, 1:]))
                bar.update(int(loader.is_last))
                optimizer.step()
                optimizer.zero_grad()
        plain = engine.detach(model)
    return before - _losses(plain, documents), included, engine.accountant


def _losses(model: torch.nn.Module, documents: Tensor) -> NDArray[np.float64]:
    with torch.no_grad():
        losses = [model(part[:, :-1], part[:, 1:]) for part in documents.split(1024)]
    return torch.cat(losses).double().cpu().numpy()
