"""The process that `versus` starts for each of two checkouts: what is measured, and on call.

This file is copied out of the dpflash that compares, beside `memory`, and runs against the dpflash
of either one. It uses what dpflash exports and what older versions have too, and nothing of
`dpflash.bench`.

A line of JSON on stdin is a command, a line on stdout its answer: ``{"do": "launch", "cpu": C}``
begins a launch (``{}``) on that CPU, or on any for null, in which ``{"do": "build", "name": N,
"check": bool}`` gives error, tolerance and peak_memory_mb, or needs, and ``{"do": "time",
"name": N}`` the seconds of one call, by the process's own clock; ``{"do": "end"}`` ends it
(``{}``). The next command is not written before the answer was read.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpflash
import dpflash.accounting
import dpflash.kernels

from .memory import peak_growth

Step = Callable[[], object]

WARM_UPS = 2


@dataclass(frozen=True)
class Job:
    """What is called and how wrong it may be."""

    step: Step
    error: Callable[[], float]
    tolerance: float


def attention(pattern: str, tokens: int, heads: int, head_dim: int, **rules: Any) -> Job:
    """Forward and backward of one sample in float32, checked against its formula in float64."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = torch.randn(4, 1, heads, tokens, head_dim, generator=generator).unbind()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    made = getattr(dpflash.patterns, pattern)(causal=True, **rules)

    def results() -> list[Tensor]:
        o = dpflash.attention(*inputs, pattern=made)
        return [o.detach(), *torch.autograd.grad(o, inputs, do)]

    def error() -> float:
        return _furthest(results(), _attention_by_formula(inputs, do, made))

    return Job(results, error, 1e-5)


def _attention_by_formula(inputs: list[Tensor], do: Tensor, pattern: Any) -> list[Tensor]:
    """o, dq, dk and dv in float64, head by head."""
    by_head = []
    count = pattern.mask(inputs[0].shape[2], inputs[0].shape[1])
    for head in range(inputs[0].shape[1]):
        q, k, v = (x.detach()[0, head].double().requires_grad_() for x in inputs)
        m = count[head] if count.ndim == 3 else count
        weights = torch.softmax(q @ k.T / math.sqrt(q.shape[1]) + m.double().log(), dim=1)
        o = torch.nan_to_num(weights) @ v
        grads = torch.autograd.grad(o, (q, k, v), do[0, head].double())
        by_head.append((o.detach(), *grads))
    return [torch.stack(parts)[None] for parts in zip(*by_head, strict=True)]


def private_step(
    clipping: str,
    batch: int,
    tokens: int,
    width: int,
    layers: int,
    heads: int,
    vocabulary: int,
    grad_sample_mode: str = "auto",
) -> Job:
    """Forward, backward, noise and AdamW of a language model; checked without its noise."""
    x, y = torch.randint(
        0, vocabulary, (2, batch, tokens), generator=torch.Generator().manual_seed(0)
    )

    def model() -> nn.Module:
        torch.manual_seed(0)
        return dpflash.nn.LongContextLM(
            vocabulary, width, layers, heads, max_seq_len=tokens, tie_embeddings=False
        )

    def private(noise_multiplier: float) -> tuple[Any, nn.Module, Any]:
        module = model()
        engine = dpflash.PrivacyEngine()
        mode: dict[str, Any] = {"grad_sample_mode": grad_sample_mode}
        if "grad_sample_mode" not in inspect.signature(engine.make_private).parameters:
            mode = {"way": {"instantiate": "stored"}.get(grad_sample_mode, grad_sample_mode)}
        made, optimizer, _ = engine.make_private(
            module=module,
            optimizer=torch.optim.AdamW(module.parameters(), lr=1e-3),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=batch),
            noise_multiplier=noise_multiplier,
            max_grad_norm=1.0,
            clipping=clipping,
            **mode,
        )
        return engine, made, optimizer

    engine, module, optimizer = private(1.0)

    def step() -> None:
        engine.backward(dpflash.losses.cross_entropy(module(x), y))
        optimizer.step()
        optimizer.zero_grad()

    # What the first batches prove is no part of a later step; an older checkout proves nothing.
    while getattr(engine, "verified", True) == "pending":
        step()

    def error() -> float:
        engine, module, _ = private(0.0)
        engine.backward(dpflash.losses.cross_entropy(module(x), y))
        clipped = [p.grad for p in module.parameters() if p.grad is not None]
        return _furthest(clipped, _clipped_one_by_one(model(), x, y, clipping))

    return Job(step, error, 1e-4)


def _clipped_one_by_one(model: nn.Module, x: Tensor, y: Tensor, clipping: str) -> list[Tensor]:
    """Sums of gradients clipped at 1: all together, or each module or tile at its share."""
    parameters = list(model.parameters())
    sums = {p: torch.zeros_like(p) for p in parameters}
    for i in range(len(x)):
        loss = dpflash.losses.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).sum()
        grads = dict(zip(parameters, torch.autograd.grad(loss, parameters), strict=True))
        for parts, bound in _groups(model, grads, clipping):
            norm = math.sqrt(sum(part.double().square().sum().item() for part in parts))
            for part in parts:
                part.mul_(min(1.0, bound / norm))
        for p in parameters:
            sums[p] += grads[p]
    return [sums[p] for p in parameters]


def _groups(
    model: nn.Module, grads: Mapping[nn.Parameter, Tensor], clipping: str
) -> Iterator[tuple[list[Tensor], float]]:
    """The parts of a sample's gradients that are clipped together, views of them, and bounds."""
    if clipping == "flat":
        yield list(grads.values()), 1.0
    elif clipping == "per_layer":
        own = [list(module.parameters(recurse=False)) for module in model.modules()]
        groups = [group for group in own if group]
        for group in groups:
            yield [grads[p] for p in group], 1 / math.sqrt(len(groups))
    else:
        elements = sum(grad.numel() for grad in grads.values())
        tiled = {m.weight for m in model.modules() if type(m) is nn.Linear}
        for p, grad in grads.items():
            # Each tile's share of C^2 is that of its elements.
            rows = grad.split(128) if p in tiled else (grad,)
            for row in rows:
                for tile in row.split(128, dim=1) if p in tiled else (row,):
                    yield [tile], math.sqrt(tile.numel() / elements)


def epsilon_query(accountant: str, phases: int, steps: int) -> Job:
    """Epsilon at 1e-5 of phases of other noise each; anew in each call, so that no cache helps."""
    calls = itertools.count()

    def query(shift: float) -> float:
        made = dpflash.accounting.create_accountant(accountant)
        made.history = [(1.0 + k / phases + shift, 0.01, steps) for k in range(phases)]
        return float(made.get_epsilon(1e-5))

    def error() -> float:
        other = dpflash.accounting.create_accountant("pld")
        other.history = [(1.0 + k / phases, 0.01, steps) for k in range(phases)]
        return abs(query(0.0) / float(other.get_epsilon(1e-5)) - 1)

    return Job(lambda: query(1e-7 * next(calls)), error, 2e-3)


def _furthest(found: list[Tensor], right: list[Tensor]) -> float:
    pairs = zip(found, right, strict=True)
    errors = [((a.double() - b).norm() / b.norm()).item() for a, b in pairs]
    # max(1.0, nan) is 1.0.
    return max(error if math.isfinite(error) else math.inf for error in errors)


_HEADS = {"heads": 4, "head_dim": 64}
_MODEL = {
    "batch": 2,
    "tokens": 128,
    "width": 128,
    "layers": 2,
    "heads": 4,
    "vocabulary": 256,
}
_STEP = {"width": 256, "layers": 2, "heads": 8, "vocabulary": 256}
_SHAPES = {"B16-T256": {"batch": 16, "tokens": 256}, "B4-T2048": {"batch": 4, "tokens": 2048}}
_CLIPPINGS = {
    "flat-auto": {"clipping": "flat"},
    "flat-stored": {"clipping": "flat", "grad_sample_mode": "instantiate"},
    "per_layer": {"clipping": "per_layer"},
    "per_block": {"clipping": "per_block"},
}
# Some 10 to 60 ms each on one CPU thread.
SMALL: Mapping[str, tuple[Callable[..., Job], Mapping[str, Any]]] = {
    "attention/dense/T1024": (attention, {"pattern": "Dense", "tokens": 1024, **_HEADS}),
    "attention/dilated/T2048": (
        attention,
        {
            "pattern": "Dilated",
            "tokens": 2048,
            **_HEADS,
            "segment_lengths": [512, 1024],
            "dilation_rates": [1, 2],
        },
    ),
    "attention/block sparse/T2048": (
        attention,
        {
            "pattern": "BlockSparse",
            "tokens": 2048,
            **_HEADS,
            "block_size": 64,
            "local_blocks": 2,
            "global_blocks": 1,
        },
    ),
    "private step/flat": (private_step, {"clipping": "flat", **_MODEL}),
    "private step/per_layer": (private_step, {"clipping": "per_layer", **_MODEL}),
    "accounting/contour": (epsilon_query, {"accountant": "contour", "phases": 4, "steps": 250}),
}
# About a second each.
LARGE: Mapping[str, tuple[Callable[..., Job], Mapping[str, Any]]] = {
    f"private step/{shape}/{name}": (private_step, {**clipping, **sizes, **_STEP})
    for shape, sizes in _SHAPES.items()
    for name, clipping in _CLIPPINGS.items()
}
JOBS = {**SMALL, **LARGE}


def build(name: str, *, check: bool) -> tuple[Step | None, dict[str, Any]]:
    """A warm call, and what its row says of it."""
    function, config = JOBS[name]
    try:
        job = function(**config)
        for _ in range(WARM_UPS - 1):
            job.step()
        peak = peak_growth(job.step, torch.device("cpu"))
        error = job.error() if check else None
    # An older checkout may lack what is measured, or raise whatever it raises.
    except Exception as reason:
        return None, {"needs": f"{type(reason).__name__}: {str(reason).splitlines()[0][:200]}"}
    return job.step, {"peak_memory_mb": peak, "error": error, "tolerance": job.tolerance}


def timed(step: Step) -> float:
    """Seconds of this process that a call takes."""
    gc.collect()
    start = time.process_time()
    step()
    return time.process_time() - start


def serve(commands: IO[str], answers: IO[str]) -> None:
    """Answers commands until the launch ends."""
    steps: dict[str, Step | None] = {}
    for line in commands:
        command = json.loads(line)
        if command["do"] == "end":
            return
        name = command["name"]
        if command["do"] == "build":
            steps[name], answer = build(name, check=command["check"])
            gc.collect()
            gc.freeze()  # what lives on is not looked through before each call
        else:
            step = steps[name]
            assert step is not None, name
            answer = {"seconds": timed(step)}
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    """Imports once; each launch is a copy of this process."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anything else prints is no answer
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    packages = (dpflash, dpflash.kernels, dpflash.accounting)
    hello = {
        "version": dpflash.__version__,
        "files": [str(Path(str(package.__file__)).resolve()) for package in packages],
    }
    print(json.dumps(hello), file=answers, flush=True)
    gc.disable()
    gc.freeze()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            cpu = json.loads(line)["cpu"]
            if cpu is not None:
                os.sched_setaffinity(0, {cpu})
            print("{}", file=answers, flush=True)
            serve(sys.stdin, answers)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(1)
        print("{}", file=answers, flush=True)
    # Without the libraries' own tear-down, which takes long and may print.
    os._exit(0)


if __name__ == "__main__":
    main()
