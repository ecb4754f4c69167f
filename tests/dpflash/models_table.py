"""Trains tiny models of transformers' architectures privately, and writes docs/models.md.

Each cell compares the sum of one private step (noise off) with a loop over single samples, all in
float64: without clipping, and clipped at half the median norm. The greater error counts.

    python tests/dpflash/models_table.py
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import dpflash
from dpflash.bench.environment import environment
from dpflash.integrations import transformers as registered

sys.path.insert(0, str(Path(__file__).parent))
from real_models import MODELS, RealModel, clipped_sum, norm, sample_gradients  # noqa: E402

EQUAL = 5e-7
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "models.json"
PAGE = ROOT / "docs" / "models.md"
COLUMNS: dict[str, dict[str, Any]] = {
    "flat": {"clipping": "flat"},
    "ghost": {"clipping": "flat", "grad_sample_mode": "ghost"},
    "per_layer": {"clipping": "per_layer"},
    "dpflash": {"clipping": "flat"},
    "LoRA": {"clipping": "flat"},
}
ABOUT = """# Models

{count} architectures of transformers {transformers} were tested, as tiny models with random
weights. Each trained for one private step without noise, and its clipped sum was compared with a
loop over single samples (float64, {date}). {trained} can be trained with all parameters. Cells:

- "yes": the model can be trained, and the relative difference of the two clipped sums is at most
  {equal}. It is due to rounding to float32 in clipping factors, in eager attention's softmax and
  in DeepSeek's routers. The JSON has each difference.
- "no (1)": training raises the error with the number 1 in the list below the table.
- Columns `flat`, `ghost` and `per_layer`: methods of clipping, with transformers' own attention
  (`"eager"`). The configs turn off dropout. They also turn off Wav2Vec2's SpecAugment
  (`apply_spec_augment=False`), because it masks a whole batch at once.
- Column `dpflash`: flat clipping with `attn_implementation="dpflash"` ([how](attention.md)). The
  loop over single samples uses eager attention here too. Attention dropout must be 0. Mamba has
  no attention.
- Column `LoRA`: flat clipping of PEFT's adapters alone (rank 2, `target_modules="all-linear"`).
- Column `check`: "yes" if `engine.check` finds no error in the model, with all parameters trained.

DeBERTa-v2 can be trained if you freeze its relative positions (`rel_embeddings`, the encoder's
`LayerNorm`, `pos_key_proj`, `pos_query_proj`). It can also be trained with LoRA on
`target_modules=["query_proj", "key_proj", "value_proj", "dense"]`. If its config has
`share_att_key=True`, use LoRA on `["value_proj", "dense"]` instead.

Made by `python tests/dpflash/models_table.py` ([JSON](../benchmarks/results/models.json)).
`make test-all` trains all models again, and checks that one sample changes the sum by at most
`max_grad_norm`.
"""


def adapted(model: nn.Module, target_modules: str | list[str] = "all-linear") -> nn.Module:
    """The model with trained adapters; what they begin as would hide mistakes."""
    import peft

    torch.manual_seed(1)
    made: nn.Module = peft.get_peft_model(
        model,  # type: ignore[arg-type]
        peft.LoraConfig(r=2, target_modules=target_modules),
    ).double()
    for parameter in made.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    return made.train()


def errors_of(real: RealModel, column: str) -> list[float]:
    """The relative errors of a column: without clipping, and clipped.

    Raises:
        Exception: what a refusal raises.
    """
    data = real.batch()
    size = len(data[0])
    wrap: Callable[[nn.Module], nn.Module] = adapted if column == "LoRA" else lambda model: model
    attention = registered.register() if column == "dpflash" else "eager"
    gradients = sample_gradients(wrap(real.build()), data, real.losses)
    bounds = (1e6, statistics.median(norm(grads, grads) for grads in gradients) / 2)
    errors = []
    for bound in bounds:
        model = wrap(real.build(attention))
        engine = dpflash.PrivacyEngine(accountant="rdp", seed=0)
        made, _, _ = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(*data), batch_size=size),
            noise_multiplier=0.0,
            max_grad_norm=bound,
            foreign_batches=True,
            exact=False,
            physical_batch_size=size,
            max_batch_size=size,
            **COLUMNS[column],
        )
        engine.backward(real.losses(made, *data))
        expected = clipped_sum(gradients, engine.groups())
        sums = engine._step.sums
        apart = {
            n: expected[n] - (sums[p] if p in sums else 0.0)
            for n, p in made.named_parameters()
            if n in expected
        }
        errors.append(norm(apart, expected) / norm(expected, expected))
    return errors


def cell_of(real: RealModel, column: str) -> dict[str, Any]:
    """The error of a column, or what refused it."""
    try:
        return {"error": max(errors_of(real, column))}
    except (ValueError, RuntimeError, TypeError, NotImplementedError) as error:
        return {"refusal": " ".join(str(error).split())}


def check_of(real: RealModel) -> dict[str, Any]:
    """What engine.check says of all parameters: "ok", or its first error."""

    def losses(model: nn.Module, batch: Any) -> torch.Tensor:
        return real.losses(model, *batch)

    report = dpflash.PrivacyEngine().check(real.build(), real.batch(), losses)
    errors = [problem for problem in report.problems if problem.severity == "error"]
    if not errors:
        return {"ok": True}
    first = errors[0]
    return {"refusal": f"{first.where}: {first.message}. {first.remedy}"}


def page(results: dict[str, Any]) -> str:
    """docs/models.md."""
    models = results["models"]
    trained = sum("error" in cells["flat"] for cells in models.values())
    about = ABOUT.format(count=len(models), trained=trained, equal=EQUAL, **results["environment"])
    refusals: list[str] = []
    columns = [*COLUMNS, "check"]
    lines = [about, f"| model | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for name, cells in models.items():
        shown = []
        for column in columns:
            cell = cells[column]
            if "refusal" not in cell:
                error = cell.get("error", 0.0)
                shown.append("yes" if error <= EQUAL else f"differs by {error:.0e}")
                continue
            # The same for all models and layers.
            text = re.sub(r"with \w+For\w+:", "with this model:", cell["refusal"])
            text = re.sub(r"\blayers\.\d+\.mlp\.(gate|experts)\b", "layers.0.mlp", text)
            if text not in refusals:
                refusals.append(text)
            shown.append(f"no ({refusals.index(text) + 1})")
        lines.append(f"| {name} | {' | '.join(shown)} |")
    lines += ["", "## Refusals", "", *(f"{i}. {text}" for i, text in enumerate(refusals, 1)), ""]
    return "\n".join(lines)


def main() -> None:
    import transformers

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    around = {**environment("cpu", 1), "transformers": transformers.__version__}
    results: dict[str, Any] = {"environment": around, "models": {}}
    for name, real in tqdm(MODELS.items(), unit="model"):
        cells = {column: cell_of(real, column) for column in COLUMNS}
        results["models"][name] = {**cells, "check": check_of(real)}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
