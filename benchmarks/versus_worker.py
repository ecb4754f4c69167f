"""The process that `versus` starts for each of two checkouts, which measures on command.

`versus` copies this file and `memory` from its own dpflash and runs them with the dpflash of a
checkout. So this file uses only exported names, which older versions have too.

Each line of JSON on stdin is a command; its answer is a line on stdout:

- ``{"do": "launch", "cpu": C}`` begins a launch on CPU C (null: any CPU). The answer is ``{}``.
- ``{"do": "build", "name": N, "result": FILE}`` builds a job and saves its result, unless FILE is
  null. The answer is tolerance and peak_memory_mb or, if the job fails, needs.
- ``{"do": "time", "name": N}`` makes one call. The answer is the call's process time in seconds.
- ``{"do": "end"}`` ends the launch. The answer is ``{}``.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
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
PROVING = 64  # number of samples after which the isolation tests of first batches have ended


@dataclass(frozen=True)
class Job:
    """A call, its result, and the tolerance for the other checkout's result."""

    step: Step
    result: Callable[[], list[Tensor]]
    tolerance: float  # allowed relative error of each tensor


def attention(pattern: str, tokens: int, heads: int, head_dim: int, **rules: Any) -> Job:
    """Return a job of attention: forward and backward of one sample in float32."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = torch.randn(4, 1, heads, tokens, head_dim, generator=generator).unbind()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    made = getattr(dpflash.patterns, pattern)(causal=True, **rules)

    def results() -> list[Tensor]:
        o = dpflash.attention(*inputs, pattern=made)
        return [o.detach(), *torch.autograd.grad(o, inputs, do)]

    return Job(results, results, 1e-5)


def private_step(
    clipping: str,
    batch: int,
    tokens: int,
    width: int,
    layers: int,
    heads: int,
    vocabulary: int,
) -> Job:
    """Return a job of a private step with noise and AdamW; its compared result has no noise."""
    x, y = torch.randint(
        0, vocabulary, (2, batch, tokens), generator=torch.Generator().manual_seed(0)
    )

    def model() -> nn.Module:
        torch.manual_seed(0)
        return dpflash.nn.LongContextLM(
            vocabulary, width, layers, heads, max_seq_len=tokens, tie_embeddings=False
        )

    def epoch(kind: Callable[..., Any], lr: float, noise_multiplier: float) -> Any:
        """Return the model, and a function that trains on one logical batch of all samples."""
        module = model()
        engine = dpflash.PrivacyEngine()
        made, optimizer, loader = engine.make_private(
            module=module,
            optimizer=kind(module.parameters(), lr=lr),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=batch),
            noise_multiplier=noise_multiplier,
            max_grad_norm=1.0,
            clipping=clipping,
        )

        def train() -> None:
            for inputs, targets in loader:
                engine.backward(dpflash.losses.cross_entropy(made(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()

        return made, train

    _, step = epoch(torch.optim.AdamW, 1e-3, 1.0)
    # Run the isolation test of the first batches before any step is timed.
    for _ in range(PROVING // batch):
        step()

    def clipped() -> list[Tensor]:
        # The change of the parameters is available in all versions. At this learning rate it is
        # large compared with the rounding of the parameters.
        module, train = epoch(torch.optim.SGD, 1024.0, 0.0)
        before = [p.detach().clone() for p in module.parameters()]
        train()
        return [b - p.detach() for b, p in zip(before, module.parameters(), strict=True)]

    return Job(step, clipped, 1e-4)


def epsilon_query(accountant: str, phases: int, steps: int) -> Job:
    """Return a job that computes epsilon at delta 1e-5 over phases with different noise."""
    calls = itertools.count()

    def query(shift: float) -> float:
        made = dpflash.accounting.create_accountant(accountant)
        made.history = [(1.0 + k / phases + shift, 0.01, steps) for k in range(phases)]
        return float(made.get_epsilon(1e-5))

    def epsilon() -> list[Tensor]:
        return [torch.tensor(query(0.0), dtype=torch.float64)]

    return Job(lambda: query(1e-7 * next(calls)), epsilon, 2e-3)


_HEADS = {"heads": 4, "head_dim": 64}
_MODEL = {
    "batch": 2,
    "tokens": 128,
    "width": 128,
    "layers": 2,
    "heads": 4,
    "vocabulary": 256,
}
# Each job takes some 10 to 60 ms on one CPU thread.
JOBS: Mapping[str, tuple[Callable[..., Job], Mapping[str, Any]]] = {
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


def build(name: str, result: str | None) -> tuple[Step | None, dict[str, Any]]:
    """Warm up a job; return its call (None if the job fails), and columns of its row."""
    function, config = JOBS[name]
    try:
        job = function(**config)
        for _ in range(WARM_UPS - 1):
            job.step()
        peak = peak_growth(job.step, torch.device("cpu"))
        if result is not None:
            torch.save(job.result(), result)
    # An older checkout may lack the function that is measured, and raise any exception.
    except Exception as reason:
        return None, {"needs": f"{type(reason).__name__}: {str(reason).splitlines()[0][:200]}"}
    return job.step, {"peak_memory_mb": peak, "tolerance": job.tolerance}


def timed(step: Step) -> float:
    """Return the process time of a call in seconds."""
    gc.collect()
    start = time.process_time()
    step()
    return time.process_time() - start


def serve(commands: IO[str], answers: IO[str]) -> None:
    """Answer commands until the launch ends."""
    steps: dict[str, Step | None] = {}
    for line in commands:
        command = json.loads(line)
        if command["do"] == "end":
            return
        name = command["name"]
        if command["do"] == "build":
            steps[name], answer = build(name, command["result"])
            gc.collect()
            gc.freeze()  # the collection before each call skips objects that exist already
        else:
            step = steps[name]
            assert step is not None, name
            answer = {"seconds": timed(step)}
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    """Serve launches until stdin ends; each launch is a forked copy of this process."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other code's prints must not look like answers
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
    # Skip the tear-down of libraries, which takes long and may print.
    os._exit(0)


if __name__ == "__main__":
    main()
