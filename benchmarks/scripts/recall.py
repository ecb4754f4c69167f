r"""Trains a small LongNet privately on documents of 1,048,576 tokens to recall a value.

A document has random tokens. Three of four tokens in its first half are its value, one of VALUES
tokens. In its last quarter, each KEPT-th token is a question, whose answer is the value. The long
branch of the attention attends to each KEPT-th token. A quarter of the document or more lies
between a question and the nearest value, so only the long branch connects them. A second model
must stay at chance, since its long branch has segments of an eighth of the document.

The embedding is random and not trained; the rest of the model is trained. No held-out document is
used for training. Some microbatches are padding, which hides how many documents a batch has.

    python benchmarks/scripts/recall.py --json benchmarks/results/cpu-xeon/recall.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import dpflash
from dpflash.accounting import get_noise_multiplier
from dpflash.bench.environment import environment
from dpflash.bench.isolated import Place, run_ranks
from dpflash.bench.memory import peak_growth
from dpflash.bench.output import write_text
from dpflash.patterns import Dilated

VALUES, FILLERS = 4, 8
QUESTION = VALUES + FILLERS
WIDTH, HEADS, KEPT = 16, 2, 64  # the long branch keeps each KEPT-th token
DOCUMENTS, BATCH, STEPS, HELD_OUT = 65_536, 6, 8, 32
EPSILON, DELTA, MAX_GRAD_NORM, LEARNING_RATE = 8.0, 1e-5, 1.0, 1.0
SECONDS = 3600.0  # time limit of a run


class Recall(Dataset[tuple[Tensor, Tensor]]):
    """Documents with a value and questions; a document depends only on key and index."""

    def __init__(self, key: int, size: int, tokens: int) -> None:
        self.key, self.size, self.tokens = key, size, tokens

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed((self.key << 21) + index)
        value, half = index % VALUES, self.tokens // 2
        document = VALUES + torch.randint(FILLERS, (self.tokens,), generator=generator)
        document[:half][torch.rand(half, generator=generator) < 0.75] = value
        targets = torch.full((self.tokens,), -100)
        targets[self.tokens * 3 // 4 :: KEPT] = value
        document[targets >= 0] = QUESTION
        return document, targets


def model_of(tokens: int, reach: int) -> dpflash.nn.LongContextLM:
    """Return a model of one layer and two heads: the long branch, and segments of KEPT tokens."""
    model = dpflash.nn.LongContextLM(
        QUESTION + 1,
        WIDTH,
        1,
        HEADS,
        max_seq_len=tokens,
        pattern=Dilated(
            segment_lengths=(reach, KEPT),
            dilation_rates=(KEPT, 1),
            causal=True,
            heads="grouped",
        ),
        tie_embeddings=False,
        mlp_ratio=1,
        norm="rms_norm",
        bias=False,
        chunked_loss=True,
    )
    # Few steps change the weights little, so the initial weights are larger than by default.
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=WIDTH**-0.5)
    block: Any = model.blocks[0]
    nn.init.normal_(block.attention.out_proj.weight)
    nn.init.zeros_(model.lm_head.weight)
    nn.init.normal_(model.token_embedding.weight)
    nn.init.zeros_(model.token_embedding.weight[QUESTION])
    model.token_embedding.requires_grad_(False)
    return model


def accuracy(model: nn.Module, data: Recall) -> float:
    """Return the fraction of the questions that the model answers correctly."""
    right = total = 0
    with torch.no_grad():
        for x, y in DataLoader(data):
            right += int((model(x).argmax(-1) == y).sum())
            total += int((y >= 0).sum())
    return right / total


def trained(place: Place, tokens: int, reach: int, seed: int) -> dict[str, Any]:
    """Train privately, and return the cost, epsilon and the accuracy on held-out documents."""
    torch.manual_seed(seed)
    network, data = model_of(tokens, reach), Recall(seed, DOCUMENTS, tokens)
    noise = get_noise_multiplier(
        target_epsilon=EPSILON,
        target_delta=DELTA,
        sample_rate=BATCH / DOCUMENTS,
        steps=STEPS,
    )
    engine = dpflash.PrivacyEngine(seed=seed)
    model, optimizer, loader = engine.make_private(
        module=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=LEARNING_RATE),
        data_loader=DataLoader(data, batch_size=BATCH),
        noise_multiplier=noise,
        max_grad_norm=MAX_GRAD_NORM,
        physical_batch_size=1,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS, LEARNING_RATE / 10)
    found: dict[str, Any] = {"noise_multiplier": noise, "microbatches": 0}

    def train() -> None:
        begin, processor, steps = time.perf_counter(), time.process_time(), 0
        for x, y in loader:
            engine.backward(model(x, y))
            found["microbatches"] += 1
            if loader.is_last:
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                steps += 1
                if steps == STEPS:
                    break
        found["seconds"] = time.perf_counter() - begin
        found["processor_seconds"] = time.process_time() - processor

    found["peak_memory_mb"] = peak_growth(train, place.device)
    found["epsilon"] = engine.get_epsilon(DELTA)
    held_out = Recall(1000 + seed, HELD_OUT, tokens)
    found["accuracy"] = accuracy(engine.detach(model), held_out)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file of the results")
    parser.add_argument("--tokens", type=int, default=2**20, help="tokens per document")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, data and noise")
    args = parser.parse_args()
    torch.set_num_threads(1)
    config: dict[str, Any] = {"layers": 1, "width": WIDTH, "heads": HEADS, "kept": KEPT}
    config |= {"values": VALUES, "fillers": FILLERS, "documents": DOCUMENTS, "steps": STEPS}
    config |= {"batch_size": BATCH, "delta": DELTA, "held_out": HELD_OUT, "chance": 1 / VALUES}
    found: dict[str, Any] = {"environment": environment("cpu", 1), "config": config, "rows": []}
    for reach in (args.tokens, args.tokens // 8):
        given: dict[str, Any] = {"tokens": args.tokens, "reach": reach, "seed": args.seed}
        (own,) = run_ranks(trained, 1, device="cpu", timeout=SECONDS, **given)
        found["rows"].append({**given, **own})
        print(json.dumps(found["rows"][-1]), flush=True)
        write_text(args.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
