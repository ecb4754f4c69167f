"""When does private training on long contexts pay? Compares quality at equal epsilon.

- "recall": at the end of a document of 32,768 tokens, a model recalls one earlier token, at a
  log-uniform distance. The model was trained on public documents of up to 8,192 tokens. Its
  attention and a new head are then trained privately, on the last T tokens of each document, to
  answer by a different code (`private_code`).
- "source": `dpflash train` trains a byte-level model from scratch on Python files of this machine.
  It trains on one window of each file, on whole packed files, or with folders as units.
- "public": accuracy of the recall models before private training.
- "speed": time of private steps of the recall models, which take turns.
- "draw": a picture of all rows, in the file's folder.

A row is appended after each run; runs whose rows are in the file are skipped.

    python benchmarks/scripts/long_context.py recall --rows ROWS.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

import dpflash
from dpflash.accounting import get_noise_multiplier
from dpflash.bench.environment import environment
from dpflash.nn import LongContextLM
from dpflash.patterns import BlockSparse, Dense, Dilated, Pattern, SlidingWindow

Row = dict[str, Any]
EPSILONS, DELTA, MAX_GRAD_NORM = (3.0, 8.0), 1e-5, 1.0

# Recall: tokens of a document, and the smallest distance of the value token from the end.
LENGTH, NEAREST = 32_768, 8
TOKENS = (2048, 8192, 32_768)
FILLERS, VALUES, VOCABULARY = 48, 8, 64
QUESTION = VOCABULARY - 1
DOCUMENTS, HELD_OUT, BATCH, STEPS, LEARNING_RATE = 2048, 256, 32, 16, 3.0
TIMED = 3
# Phases of public training: (tokens, batch size, steps, highest learning rate).
PUBLIC = ((256, 64, 400, 1e-2), (1024, 16, 100, 1e-2), (2048, 16, 60, 5e-3), (8192, 4, 40, 5e-3))

# Source: sizes of files in bytes, and numbers of files.
SHORTEST, LONGEST, FILES, HELD_OUT_FILES = 200, 4096, 4096, 256
CHOICES = {
    "a window of each file": [],
    "whole files, packed": ["--pack"],
    "folders, packed": ["--pack", "--unit", "folder"],
}
SOURCE = "--seq-len 1024 --physical-batch-size 8 --batch-size 32 --steps 30 --layers 1 --heads 2"

REPORTED = (
    "epsilon",
    "privacy_unit",
    "num_units",
    "noise_multiplier",
    "bits_per_byte_before",
    "bits_per_byte_after",
    "tokens_per_second",
)


def patterns(tokens: int) -> dict[str, Pattern]:
    """Return the attention of each model; LongNet's lengths are the paper's, scaled to T."""
    lengths = (tokens // 16, tokens // 4, tokens)
    return {
        "dense": Dense(causal=True),
        "sliding window": SlidingWindow(window=512, causal=True),
        "LongNet": Dilated(segment_lengths=lengths, dilation_rates=(1, 4, 16), causal=True),
    }


def dense_at_the_end(tokens: int, block: int = 64) -> Pattern:
    """Return a pattern in which the last block attends to all tokens, other blocks to themselves.

    In a model of one layer whose loss is at the last position only, losses and gradients are the
    same as with dense attention.
    """
    count = -(-tokens // block)
    lists = [*((i,) for i in range(count - 1)), tuple(range(count))]
    return BlockSparse(block_size=block, causal=True, block_lists=lists)


def attention_of(pattern: str, tokens: int) -> Pattern:
    """Return the attention of a model with a loss at the last position."""
    if pattern == "dense" and tokens == TOKENS[-1]:
        return dense_at_the_end(tokens)
    return patterns(tokens)[pattern]


class Recall(Dataset[tuple[Tensor, Tensor]]):
    """Documents of random tokens with one value token; the target is the value's code.

    An item is the last `tokens` of the `length` tokens of a document. The document depends only on
    key (below 2^11) and index (below 2^21).
    """

    def __init__(self, key: int, size: int, length: int, tokens: int, code: Tensor) -> None:
        self.key, self.size = key, size
        self.length, self.tokens, self.code = length, tokens, code

    def __len__(self) -> int:
        return self.size

    def distance(self, index: int) -> int:
        """Return the number of tokens from the value to the end of a document."""
        generator = self._generator(index)
        low, high = math.log(NEAREST), math.log(self.length - 1)
        return int(math.exp(low + (high - low) * float(torch.rand((), generator=generator))))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = self._generator(index)
        torch.rand((), generator=generator)
        value = int(torch.randint(VALUES, (), generator=generator))
        document = torch.randint(FILLERS, (self.length,), generator=generator)
        document[-1 - self.distance(index)] = FILLERS + value
        document[-1] = QUESTION
        targets = torch.full((self.tokens,), -100)
        targets[-1] = FILLERS + self.code[value]
        return document[-self.tokens :], targets

    def _generator(self, index: int) -> torch.Generator:
        # torch's generator uses only 32 bits of a seed.
        return torch.Generator().manual_seed((self.key << 21) + index)


def recall_model(pattern: Pattern) -> LongContextLM:
    return LongContextLM(
        VOCABULARY,
        32,
        1,
        2,
        max_seq_len=LENGTH,
        pattern=pattern,
        tie_embeddings=False,
        mlp_ratio=1,
        bias=False,
        norm="rms_norm",
        chunked_loss=True,
    )


def public_weights(seed: int, folder: Path) -> dict[str, Tensor]:
    """Return weights of a dense model trained to recall, on public documents of growing length."""
    path = folder / f"public-{seed}.pt"
    if not path.exists():
        torch.manual_seed(seed)
        model = recall_model(Dense(causal=True))
        for number, (tokens, batch, steps, rate) in enumerate(PUBLIC):
            data = Recall(1000 + 10 * number + seed, 1 << 20, tokens, tokens, torch.arange(VALUES))
            optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.95))
            schedule = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, rate, total_steps=steps, pct_start=0.1
            )
            for x, y in itertools.islice(DataLoader(data, batch), steps):
                model(x, y).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), path)
    weights: dict[str, Tensor] = torch.load(path)
    return weights


def private_code(seed: int) -> Tensor:
    """Return a code in which each value's answer differs from its public answer."""
    shift = 1 + seed % (VALUES - 1)
    return (torch.arange(VALUES) + shift) % VALUES


def private_steps(
    tokens: int, pattern: Pattern, noise: float, seed: int, weights: dict[str, Tensor]
) -> tuple[LongContextLM, Iterator[int], dpflash.PrivacyEngine]:
    """Return (model, iterator, engine). Each iteration makes a step and yields its rows."""
    data = Recall(seed, DOCUMENTS, LENGTH, tokens, private_code(seed))
    model = recall_model(pattern)
    model.load_state_dict(weights)
    nn.init.zeros_(model.lm_head.weight)
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    model.blocks[0].attention.requires_grad_(True)
    engine = dpflash.PrivacyEngine(seed=seed)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        data_loader=DataLoader(data, batch_size=BATCH),
        noise_multiplier=noise,
        max_grad_norm=MAX_GRAD_NORM,
        physical_batch_size=max(1, 2 * 8192 // tokens),
    )

    def steps() -> Iterator[int]:
        drawn = 0
        while True:
            for x, y in loader:
                engine.backward(model(x, y))
                drawn += len(x)
                if loader.is_last:
                    optimizer.step()
                    optimizer.zero_grad()
                    yield drawn
                    drawn = 0

    return model, steps(), engine


def hits(model: nn.Module, data: Recall) -> Tensor:
    """Return whether the model's answer is right, for each document."""
    found = []
    with torch.no_grad():
        for x, y in DataLoader(data, batch_size=max(1, 16 * 2048 // data.tokens)):
            found.append(model(x)[:, -1].argmax(-1) == y[:, -1])
    return torch.cat(found)


def recall_run(tokens: int, pattern: str, epsilon: float, seed: int, folder: Path) -> Row:
    """Return the accuracy on held-out documents after private training."""
    noise = get_noise_multiplier(
        target_epsilon=epsilon,
        target_delta=DELTA,
        sample_rate=BATCH / DOCUMENTS,
        steps=STEPS,
    )
    weights = public_weights(seed, folder)
    begin = time.perf_counter()
    attention = attention_of(pattern, tokens)
    model, steps, engine = private_steps(tokens, attention, noise, seed, weights)
    for _ in range(STEPS):
        next(steps)
    trained = time.perf_counter() - begin
    held_out = Recall(500 + seed, HELD_OUT, LENGTH, tokens, private_code(seed))
    right = hits(engine.detach(model), held_out)
    distances = torch.tensor([held_out.distance(i) for i in range(HELD_OUT)])
    within = {}
    for low, high in itertools.pairwise((0, *TOKENS)):
        own = right[(distances >= low) & (distances < high)]
        within[f"{low}-{high}"] = [int(own.sum()), len(own)]
    return {
        "epsilon": engine.get_epsilon(DELTA),
        "noise_multiplier": noise,
        "accuracy": float(right.float().mean()),
        "right_by_distance": within,
        "seconds": trained,
    }


def public_run(tokens: int, seed: int, folder: Path) -> Row:
    """Return the accuracy of the dense public model on public documents of T tokens."""
    model = recall_model(attention_of("dense", tokens))
    model.load_state_dict(public_weights(seed, folder))
    data = Recall(900 + seed, HELD_OUT // 2, tokens, tokens, torch.arange(VALUES))
    return {"accuracy": float(hits(model, data).float().mean())}


def speeds(seed: int, folder: Path) -> list[Row]:
    """Return tokens per second of private steps; the first step of each model is not timed."""
    weights = public_weights(seed, folder)
    configs = list(itertools.product(TOKENS, patterns(TOKENS[0])))
    models = [
        private_steps(tokens, patterns(tokens)[name], 1.0, seed, weights)
        for tokens, name in configs
    ]
    found: list[list[float]] = [[] for _ in models]
    for _ in tqdm(range(1 + TIMED)):
        for (tokens, _), (_, steps, _), own in zip(configs, models, found, strict=True):
            begin = time.perf_counter()
            drawn = next(steps)
            own.append(drawn * tokens / (time.perf_counter() - begin))
    return [
        {
            "tokens": tokens,
            "pattern": pattern,
            "tokens_per_second": statistics.median(own[1:]),
            "each": own[1:],
        }
        for (tokens, pattern), own in zip(configs, found, strict=True)
    ]


def write_files(out: Path) -> None:
    """Copy files of this Python's packages into `out`, as `data/FOLDER/` and `held-out/FOLDER/`.

    Each folder of a package becomes one FOLDER, which is entirely in `data` or in `held-out`.
    """
    root = Path(sysconfig.get_path("purelib"))
    folders: dict[Path, list[Path]] = {}
    for path in sorted(root.rglob("*.py")):
        if SHORTEST <= path.stat().st_size <= LONGEST:
            folders.setdefault(path.parent.relative_to(root), []).append(path)
    names = list(folders)
    files = [
        (number, path)
        for number in torch.randperm(len(names), generator=torch.Generator().manual_seed(0))
        for path in folders[names[number]]
    ][: HELD_OUT_FILES + FILES]
    last_held_out = files[HELD_OUT_FILES - 1][0]
    part = "held-out"
    for index, (number, path) in enumerate(files):
        if index >= HELD_OUT_FILES and number != last_held_out:
            part = "data"
        place = out / part / str(int(number)) / path.name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)


def digest(folder: Path) -> str:
    """Return the SHA-256 of the names and contents of all files."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        total.update(f"{path.relative_to(folder)}\n".encode())
        total.update(path.read_bytes())
    return total.hexdigest()


def source_run(choice: str, epsilon: float, seed: int, folder: Path) -> Row:
    """Return the report of `dpflash train`."""
    if not (folder / "data").exists():
        write_files(folder)
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "dpflash", "train", *SOURCE.split(), *CHOICES[choice]]
        command += ["--data", str(folder / "data"), "--eval-data", str(folder / "held-out")]
        command += ["--target-epsilon", str(epsilon), "--delta", str(DELTA), "--seed", str(seed)]
        command += ["--no-baseline", "--out", f"{out}/run"]
        one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        subprocess.run(command, check=True, capture_output=True, text=True, env=one_thread)
        report = json.loads(Path(out, "run", "report.json").read_text())
    return {**{name: report[name] for name in REPORTED}, "files_sha256": digest(folder)}


def draw(rows: list[Row], path: Path) -> None:
    """Draw means over seeds, with the smallest and the largest value."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    recall, source = figure.subplots(1, 2)
    for index, pattern in enumerate(patterns(TOKENS[0])):
        for epsilon, line in zip(EPSILONS, ("--", "-"), strict=True):
            points = []
            for tokens in TOKENS:
                config = {"pattern": pattern, "tokens": tokens, "target_epsilon": epsilon}
                own = [row["accuracy"] for row in rows if config.items() <= row.items()]
                if own:
                    points.append((tokens, sum(own) / len(own), min(own), max(own)))
            x, mean, low, high = zip(*points, strict=True)
            recall.plot(
                x,
                mean,
                line,
                color=f"C{index}",
                marker="o",
                label=f"{pattern}, epsilon {epsilon:g}",
            )
            recall.fill_between(x, low, high, color=f"C{index}", alpha=0.08)
    recall.set_xscale("log")
    recall.set_xticks(TOKENS, [f"{tokens:,}" for tokens in TOKENS])
    recall.minorticks_off()
    recall.set(xlabel="T, tokens of a document that are used", ylabel="accuracy", ylim=(0, 1))
    recall.set_title("recall, mean and range of the seeds", fontsize=10)
    recall.legend(fontsize=8)
    for index, epsilon in enumerate(EPSILONS):
        for place, choice in enumerate(CHOICES):
            config = {"choice": choice, "target_epsilon": epsilon}
            own = [r["bits_per_byte_after"] for r in rows if config.items() <= r.items()]
            where = [place + 0.2 * index - 0.1] * len(own)
            label = f"epsilon {epsilon:g}" if place == 0 else None
            source.plot(where, own, "o", color=f"C{index}", label=label)
    source.set_xticks(range(len(CHOICES)), list(CHOICES))
    source.set_ylabel("held-out bits per byte")
    source.set_title("source, a point for each seed", fontsize=10)
    source.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=("public", "recall", "source", "speed", "draw"))
    parser.add_argument("--rows", type=Path, required=True, help="JSONL file of the results")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--patterns", nargs="+", default=list(patterns(TOKENS[0])))
    parser.add_argument("--cache", type=Path, default=Path("runs/long-context"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    where = environment("cpu", 1)

    def save(row: Row) -> None:
        line = json.dumps({"part": args.part, **row, "environment": where})
        with args.rows.open("a") as file:
            file.write(line + "\n")
        tqdm.write(json.dumps(row))

    lines = args.rows.read_text().splitlines() if args.rows.exists() else []
    made = [json.loads(line) for line in lines]

    if args.part == "draw":
        draw(made, args.rows.with_suffix(".png"))
        return

    if args.part == "speed":
        for row in speeds(args.seeds[0], args.cache):
            save(row)
        return

    def missing(config: Row) -> bool:
        return not any(config.items() <= row.items() for row in made)

    run: Callable[..., Row]
    names: tuple[str, ...]
    grid: Iterator[tuple[Any, ...]]
    if args.part == "public":
        run, names = public_run, ("seed", "tokens")
        grid = itertools.product(args.seeds, args.tokens)
    elif args.part == "recall":
        run, names = recall_run, ("seed", "tokens", "pattern", "target_epsilon")
        grid = itertools.product(args.seeds, args.tokens, args.patterns, EPSILONS)
    else:
        run, names = source_run, ("seed", "choice", "target_epsilon")
        grid = itertools.product(args.seeds, CHOICES, EPSILONS)
    configs = [dict(zip(names, values, strict=True)) for values in grid]
    for config in tqdm([c for c in configs if missing({"part": args.part, **c})]):
        seed, *others = config.values()
        save({**config, **run(*others, seed, args.cache)})


if __name__ == "__main__":
    main()
