"""Times whole epochs with Poisson sampling: dpflash and Opacus over a non-private loop.

`dpflash bench private-step` times steps on equal batches. Here each library draws its own batches,
so that padding rows, microbatches of random number and the loaders count. Epochs take turns; a
figure is the processor time of an epoch over the samples that it trained on, and a ratio is the
median over the rounds.

    python benchmarks/scripts/poisson_epochs.py --json runs/poisson-epochs.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import opacus
import torch
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import dpflash
from dpflash.bench.environment import environment

# Documents, expected batch, tokens, width: the shapes of private-step, and README's example.
SHAPES = {
    "B16-T256": (256, 16, 256, 256),
    "B4-T2048": (32, 4, 2048, 256),
    "B32-T128-D64": (512, 32, 128, 64),
}
WARM_UPS = 1
PRIVACY = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}

Epoch = Callable[[], float]


def make_epoch(provider: str, documents: int, batch: int, tokens: int, width: int) -> Epoch:
    """A function that trains for an epoch and returns its seconds per sample."""
    torch.manual_seed(0)
    text = torch.randint(0, 256, (documents, tokens + 1))
    data = TensorDataset(text[:, :-1], text[:, 1:])
    model = dpflash.nn.LongContextLM(
        256, embed_dim=width, num_layers=2, num_heads=8, max_seq_len=tokens
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=batch, shuffle=True)
    engine = None
    if provider == "dpflash":
        engine = dpflash.PrivacyEngine()
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, **PRIVACY
        )
    elif provider == "opacus-hooks":
        model, optimizer, loader = opacus.PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=loader, **PRIVACY
        )

    def epoch() -> float:
        start, samples = time.process_time(), 0
        for x, y in loader:
            samples += len(x) if engine is None else int(loader.is_real.sum())
            losses = dpflash.losses.cross_entropy(model(x), y)
            if engine is None:
                losses.mean().backward()
            else:
                engine.backward(losses)
            optimizer.step()
            optimizer.zero_grad()
        return (time.process_time() - start) / max(samples, 1)

    return epoch


def measure(shape: tuple[int, int, int, int], rounds: int) -> dict[str, object]:
    epochs = {p: make_epoch(p, *shape) for p in ("nonprivate", "dpflash", "opacus-hooks")}
    times: dict[str, list[float]] = {provider: [] for provider in epochs}
    for number in tqdm(range(WARM_UPS + rounds), desc=str(shape)):
        for provider, epoch in epochs.items():
            seconds = epoch()
            if number >= WARM_UPS:
                times[provider].append(seconds)
    over = {
        provider: [a / b for a, b in zip(found, times["nonprivate"], strict=True)]
        for provider, found in times.items()
    }
    return {
        "documents, batch, tokens, width": shape,
        "seconds_per_sample": times,
        "over_nonprivate": {
            provider: {"median": statistics.median(r), "range": [min(r), max(r)]}
            for provider, r in over.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("runs/poisson-epochs.json"))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = {"environment": environment("cpu", 1), "shapes": {}}
    for name, shape in SHAPES.items():
        found["shapes"][name] = measure(shape, args.rounds)
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=1) + "\n")
        print(name, json.dumps(found["shapes"][name]["over_nonprivate"]))


if __name__ == "__main__":
    main()
