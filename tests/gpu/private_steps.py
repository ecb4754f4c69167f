"""Private steps on a GPU and on the CPU, which must reach the same parameters.

Every clipping and way trains the same small language model with the same seed: the draws and the
noise are then the same bits on both devices, and parameters may differ by float32's rounding of
the gradients alone.

    python tests/gpu/private_steps.py --json runs/private_steps.json

The exit status is 0 if all cases agree.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash import patterns

TOKENS = 96
# Of the distance that training goes; noise is the same, gradients round differently.
TOLERANCE = 2e-4
CASES: dict[str, dict[str, Any]] = {
    "flat auto": {"clipping": "flat"},
    "flat stored": {"clipping": "flat", "grad_sample_mode": "instantiate"},
    "flat book_keeping": {"clipping": "flat", "grad_sample_mode": "book_keeping"},
    "flat ghost": {"clipping": "flat", "grad_sample_mode": "ghost"},
    "flat automatic": {"clipping": "flat", "clip_function": "automatic"},
    "per_layer": {"clipping": "per_layer"},
    "flat exact": {"clipping": "flat", "exact": True},
    "aggressive": {"optimize": "aggressive"},
    "balanced": {"optimize": "balanced"},
    "flat captured": {"grad_sample_mode": "instantiate", "cuda_graph": True},
    "per_layer captured": {"clipping": "per_layer", "cuda_graph": True},
}


def train(device: str, options: dict[str, Any], num_steps: int) -> dict[str, Any]:
    """Parameters before and after the steps, the epsilon spent, and what was captured."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    tokens = torch.randint(0, 61, (64, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    model = dpflash.nn.LongContextLM(
        61,
        embed_dim=64,
        num_layers=2,
        num_heads=4,
        max_seq_len=TOKENS,
        pattern=patterns.Dense(causal=True),
    ).to(device)
    before = torch.cat([p.detach().cpu().flatten() for p in model.parameters()])
    engine = dpflash.PrivacyEngine(seed=5)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=16),
        noise_multiplier=0.01,  # so that gradients, not noise, go most of the way
        max_grad_norm=0.5,
        **options,
    )
    steps = 0
    while steps < num_steps:
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            engine.backward(dpflash.losses.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            steps += loader.is_last
            if steps == num_steps:
                break
    after = torch.cat([p.detach().float().cpu().flatten() for p in model.parameters()])
    return {
        "before": before,
        "after": after,
        "epsilon": engine.get_epsilon(delta=1e-5),
        "captured": "CUDA graphs: forward" in str(engine.optimization),
    }


def compare(device: str, options: dict[str, Any], num_steps: int) -> dict[str, Any]:
    on_cpu, on_gpu = (train(where, options, num_steps) for where in ("cpu", device))
    way = float((on_cpu["after"] - on_cpu["before"]).norm())
    apart = float((on_gpu["after"] - on_cpu["after"]).norm())
    # 16-bit forwards (levels of `optimize`) round gradients themselves.
    tolerance = 2e-2 if "optimize" in options else TOLERANCE
    found = {
        "distance_over_way": apart / way,
        "tolerance": tolerance,
        "same_epsilon": on_cpu["epsilon"] == on_gpu["epsilon"],
        "captured": on_gpu["captured"],
    }
    is_captured = device == "cpu" or on_gpu["captured"] == options.get("cuda_graph", False)
    return {**found, "holds": apart <= tolerance * way and found["same_epsilon"] and is_captured}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("runs/private_steps.json"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=4, help="cases at a time")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    args = parser.parse_args()
    args.json.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, mp_context=spawn) as pool:
        running = {
            pool.submit(compare, args.device, CASES[name], args.steps): name for name in args.only
        }
        for done in as_completed(running):
            name = running[done]
            try:
                results[name] = done.result()
            except Exception:  # each case is reported, whatever became of the others
                results[name] = {"holds": False, "error": traceback.format_exc()}
                print(results[name]["error"])
            print(f"{name}: {results[name].get('distance_over_way')}", flush=True)
            args.json.write_text(json.dumps(results, indent=1) + "\n")
    wrong = [name for name, result in results.items() if not result["holds"]]
    print("wrong: " + ", ".join(wrong) if wrong else f"all {len(results)} cases agree")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
