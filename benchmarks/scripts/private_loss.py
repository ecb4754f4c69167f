"""Held-out loss of one language model trained by dpflash and by Opacus at the same epsilon.

Both start from the same weights, draw Poisson batches of the same documents at the same rate, and
add the noise that dpflash's accountant asks for; each seed draws other batches and other noise.
The model without privacy takes the same number of steps.

    python benchmarks/scripts/private_loss.py --json benchmarks/results/DEVICE/private-loss.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import warnings
from pathlib import Path
from typing import Any

import opacus
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import dpflash
from dpflash.accounting import get_noise_multiplier
from dpflash.bench.environment import environment
from dpflash.bench.output import write_text
from dpflash.bench.private import NONPRIVATE, endless
from dpflash.bench.quality import batch_of, windows_of
from dpflash.nn import LongContextLM
from dpflash.train.data import VOCAB_SIZE

TOKENS, BATCH, STEPS = 128, 32, 100
EPSILON, DELTA, MAX_GRAD_NORM, LEARNING_RATE = 8.0, 1e-5, 1.0, 1e-2
PROVIDERS = (NONPRIVATE, "dpflash", "opacus")


def documents() -> tuple[TensorDataset, TensorDataset]:
    """One window of each document of Python's own library: those to train on, and held out."""
    train, held_out = windows_of(TOKENS, 0)
    data, test = (TensorDataset(*batch_of(w, range(len(w)), 0)) for w in (train, held_out))
    return data, test


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    # Opacus takes no tied weights.
    return LongContextLM(VOCAB_SIZE, 64, 2, 4, max_seq_len=TOKENS, tie_embeddings=False)


def train(provider: str, data: TensorDataset, noise: float, seed: int) -> tuple[nn.Module, float]:
    """The trained model, and epsilon by the library's own accountant (0 without privacy)."""
    model = model_of(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    options: dict[str, Any] = {
        "module": model,
        "optimizer": optimizer,
        "data_loader": DataLoader(data, batch_size=BATCH, shuffle=True),
        "noise_multiplier": noise,
        "max_grad_norm": MAX_GRAD_NORM,
    }
    if provider == "dpflash":
        engine = dpflash.PrivacyEngine(seed=seed)
        private, optimizer, loader = engine.make_private(**options)
        for x, y in endless(loader):
            engine.backward(dpflash.losses.cross_entropy(private(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if optimizer.releases == STEPS:
                return engine.detach(private), engine.get_epsilon(DELTA)
    accountant = opacus.PrivacyEngine(accountant="prv")
    loader = options["data_loader"]
    if provider == "opacus":
        model, optimizer, loader = accountant.make_private(**options)
    for x, y in itertools.islice(endless(loader), STEPS):
        dpflash.losses.cross_entropy(model(x), y).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, accountant.get_epsilon(DELTA) if provider == "opacus" else 0.0


def held_out_loss(model: nn.Module, data: TensorDataset) -> float:
    """Nats a byte."""
    losses: list[Tensor] = []
    with torch.no_grad():
        for x, y in DataLoader(data, batch_size=32):
            losses.append(dpflash.losses.cross_entropy(model(x), y))
    return float(torch.cat(losses).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file of the results")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each (default 5)")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    data, held_out = documents()
    rate = BATCH / len(data)
    noise = get_noise_multiplier(
        target_epsilon=EPSILON, target_delta=DELTA, sample_rate=rate, steps=STEPS
    )
    runs = []
    for seed, provider in tqdm(list(itertools.product(range(args.seeds), PROVIDERS))):
        model, epsilon = train(provider, data, noise, seed)
        run = {"provider": provider, "seed": seed, "epsilon": epsilon}
        runs.append({**run, "held_out_loss": held_out_loss(model, held_out)})
        tqdm.write(json.dumps(runs[-1]))
    config = {
        "documents": len(data),
        "held_out": len(held_out),
        "tokens": TOKENS,
        "expected_batch_size": BATCH,
        "steps": STEPS,
        "noise_multiplier": noise,
        "max_grad_norm": MAX_GRAD_NORM,
        "target_epsilon": EPSILON,
        "delta": DELTA,
        "learning_rate": LEARNING_RATE,
        "opacus": opacus.__version__,
    }
    found = {"environment": environment("cpu", 1), "config": config, "runs": runs}
    write_text(args.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
