"""Compares `dpflash estimate` with measurements of a step's peak memory and time.

    python benchmarks/scripts/estimates.py --out benchmarks/results/DEVICE/estimates.json

Each row is a private or plain step. No constant of the estimate was fitted to its model. The
step is measured in fresh processes with one thread, in turns with the steps of other rows. The
measurements on an H100 come from results/h100/gpu-time.json.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash.bench.environment import environment
from dpflash.bench.isolated import run_isolated
from dpflash.bench.memory import PeakMemory
from dpflash.bench.output import row, write_json
from dpflash.bench.private import endless
from dpflash.bench.work import measured_ceilings
from dpflash.cli.estimate import Subject, ceilings_of, cost_of
from dpflash.clipping.device_speed import Ceilings

Row = dict[str, Any]
ROUNDS, STEPS, MIB = 2, 3, 2**20
_MMAP_THRESHOLD = -3  # number of the parameter of mallopt(3)
MEMORY, TIME = 0.1, 0.3  # largest relative errors that count as within the target
H100 = Path(__file__).parents[1] / "results" / "h100" / "gpu-time.json"


def lm(width: int, layers: int, heads: int, vocabulary: int, **more: Any) -> Row:
    sizes = {"embed_dim": width, "num_layers": layers, "num_heads": heads}
    return {"vocab_size": vocabulary, **sizes, "max_seq_len": 1 << 20, **more}


def llama(width: int, layers: int, heads: int, vocabulary: int) -> Row:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
    }


# (name, config.json, B, T, other arguments of `cost_of`); each is measured as a private and as a
# plain step. estimates-first.json has rows from before a fix that counts frozen weights only once.
SHAPES: tuple[tuple[str, Row, int, int, Row], ...] = (
    ("wide", lm(576, 2, 9, 700), 2, 512, {}),
    ("deep", lm(160, 5, 5, 400, tie_embeddings=False), 5, 384, {}),
    ("long", lm(192, 2, 3, 256, norm="rms_norm", bias=False), 1, 3072, {}),
    ("microbatches", lm(288, 2, 9, 900), 6, 320, {"microbatch": 3}),
    ("llama", llama(256, 3, 4, 2500), 3, 352, {}),
    ("llama, LoRA", llama(384, 3, 6, 1800), 4, 256, {"lora_rank": 10}),
)


def measure(
    config: Row, batch: int, tokens: int, options: Row, mode: str | None, pages: bool
) -> Row:
    """Return the peak memory of this process, including the model, and the seconds of steps.

    If `pages`, malloc gives large tensors pages of their own and returns freed pages, so that the
    process holds only the memory of its tensors.
    """
    if pages:
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 17)
    # First run a tiny model of the same kind, to load libraries, which take tens of MiB.
    tiny = llama(32, 1, 2, 64) if "model_type" in config else lm(32, 1, 1, 64)
    rank = {"lora_rank": 2} if "lora_rank" in options else {}
    _steps(tiny, 2, 16, rank, mode, 1)
    with PeakMemory() as peak:
        seconds = _steps(config, batch, tokens, options, mode, STEPS)
    return {"peak_mb": peak.cpu_mb, "seconds": seconds[1:]}


def _steps(
    config: Row, batch: int, tokens: int, options: Row, mode: str | None, count: int
) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        subject = Subject(str(path), options.get("lora_rank"))
    model: Any = subject.model
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    inputs = torch.randint(0, config["vocab_size"], (batch, tokens))
    microbatch = options.get("microbatch", batch)
    loader: Any = DataLoader(TensorDataset(inputs), batch_size=batch)
    backward: Callable[[Any], object] = _backward
    if mode is not None:
        engine = dpflash.PrivacyEngine()
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            physical_batch_size=microbatch,
            verify_first_batch=False,
        )
        backward = engine.backward
    parts = batch // microbatch
    batches, seconds = endless(loader), []
    for _ in range(count):
        begin = time.process_time()
        if mode is None:
            ((whole,),) = (next(batches),)
            given: Any = whole.split(microbatch)
        else:
            given = (next(batches)[0] for _ in range(parts))
        for part in given:
            backward(subject.losses(model, part))
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - begin)
    return seconds


def _backward(losses: Any) -> None:
    losses.sum().backward()


def estimated(
    config: Row, batch: int, tokens: int, options: Row, mode: str | None, ceilings: Ceilings
) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        subject = Subject(str(path), options.get("lora_rank"), is_fake=True)
    rest = {k: v for k, v in options.items() if k != "lora_rank"}
    found = cost_of(subject, ceilings, batch=batch, tokens=tokens, mode=mode, **rest)
    return {"memory_mb": found.memory_bytes / MIB, "seconds": found.seconds, "parts": found.parts}


def compared(name: str, config: Row, guess: Row, peak_mb: float, seconds: float) -> Row:
    """Return a row with the errors of the estimate relative to the measurement."""
    memory, time_taken = guess["memory_mb"] / peak_mb - 1, guess["seconds"] / seconds - 1
    errors = {"memory_error": memory, "time_error": time_taken}
    within = {"memory_within": abs(memory) <= MEMORY, "time_within": abs(time_taken) <= TIME}
    figures = {"median_ms": 1e3 * seconds, "peak_memory_mb": peak_mb, "estimated": guess}
    return {**row(name, config), **figures, **errors, **within}


def rows_here(roofs: list[Ceilings], only: str) -> Iterator[Row]:
    """Yield rows measured on this CPU; step times are medians of the rounds without `pages`."""
    shapes = [shape for shape in SHAPES if shape[0].startswith(only)]
    cases = [(*shape, mode) for shape in shapes for mode in (None, "auto")]
    found: list[list[Row]] = [[] for _ in cases]
    for number in range(ROUNDS):
        roofs.append(measured_ceilings())
        for at, (name, config, batch, tokens, options, mode) in enumerate(cases):
            given = {"config": config, "batch": batch, "tokens": tokens, "options": options}
            # Round 0, with pages, measures the tensors' memory; other rounds time ordinary steps.
            one = run_isolated(measure, **given, mode=mode, pages=number == 0)
            found[at].append(one)
            print(number, name, mode, one, flush=True)
    roofs.append(measured_ceilings())
    for (name, config, batch, tokens, options, mode), measured in zip(cases, found, strict=True):
        guess = estimated(config, batch, tokens, options, mode, middle(roofs))
        seconds = statistics.median(x for one in measured[1:] for x in one["seconds"])
        step = {"model": config, "batch": batch, "tokens": tokens, **options}
        kind = "plain" if mode is None else "private"
        peak_mb = measured[0]["peak_mb"]
        shown = compared(f"{name}/{kind}", {**step, "step": kind}, guess, peak_mb, seconds)
        resident = statistics.median(one["peak_mb"] for one in measured[1:])
        shown["resident_mb"], shown["resident_over_estimate"] = (
            resident,
            resident / guess["memory_mb"],
        )
        yield {**shown, "seconds": [one["seconds"] for one in measured]}


def middle(roofs: list[Ceilings]) -> Ceilings:
    flops = {name: statistics.median(one.flops[name] for one in roofs) for name in roofs[0].flops}
    bandwidth = statistics.median(one.bandwidth for one in roofs)
    launch = statistics.median(one.launch for one in roofs)
    return replace(roofs[0], flops=flops, bandwidth=bandwidth, launch=launch)


def rows_of_h100() -> Iterator[Row]:
    """Yield rows of the committed H100 run, which measured an earlier version of dpflash."""
    modes = {
        "plain": (None, "flat"),
        "flat auto": ("auto", "flat"),
        "per_layer": ("auto", "per_layer"),
        "book_keeping": ("book_keeping", "flat"),
    }
    parts = json.loads(H100.read_text())["parts"]
    for part in ("steps", "steps after"):
        for one in parts[part]:
            if one["what"] not in modes:
                continue
            width, layers, batch, tokens = (one[key] for key in "DLBT")
            config = lm(width, layers, max(1, width // 128), 32000)
            mode, clipping = modes[one["what"]]
            options = {"clipping": clipping}
            guess = estimated(config, batch, tokens, options, mode, ceilings_of("h100"))
            name = f"h100/{part}/{one['what']}/D{width}-L{layers}-B{batch}-T{tokens}"
            step = {"batch": batch, "tokens": tokens, "model": config, "step": one["what"]}
            peak_mb = 1024 * one["peak_gib"]
            found = compared(name, step, guess, peak_mb, one["ms"] / 1e3)
            yield {**found, "host_ms": one.get("host_ms"), "commit": "6e15c2c to fe48ecf"}


def with_time_of_rounds(row: Row) -> Row:
    """Return a row of an earlier run with the median step time of its rounds without `pages`."""
    seconds = statistics.median(x for one in row["seconds"][1:] for x in one)
    guess, peak_mb = row["estimated"], row["peak_memory_mb"]
    return {**row, **compared(row["name"], row["config"], guess, peak_mb, seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--only", default="", help="measure rows with this prefix, keep others")
    args = parser.parse_args()
    torch.set_num_threads(1)
    run_isolated(torch.get_num_threads)  # starts the server of new processes
    roofs: list[Ceilings] = []
    rows = list(rows_here(roofs, args.only))
    about = environment("cpu", 1)
    about["rounds"] = [
        {"flops": dict(one.flops), "bandwidth": one.bandwidth, "launch": one.launch}
        for one in roofs
    ]
    if args.only:
        before = json.loads(args.out.read_text())
        own = [one for one in before["rows"] if "seconds" in one]
        kept = [with_time_of_rounds(x) for x in own if not x["name"].startswith(args.only)]
        rows, about["rounds_before"] = kept + rows, before["environment"]["rounds"]
        rows += [one for one in before["rows"] if "seconds" not in one]
    else:
        rows += rows_of_h100()
    write_json(args.out, {"environment": about, "complete": True, "rows": rows})
    for one in rows:
        print(f"{one['name']}: memory {one['memory_error']:+.1%}, time {one['time_error']:+.1%}")


if __name__ == "__main__":
    main()
