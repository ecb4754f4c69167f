"""The section on privacy in the model card of a trainer."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator

from ..config import PrivacyConfig
from ..engine import PrivacyEngine
from ..optimizer import PrivateOptimizer
from ..privacy.spending import rounded_up
from ..sampling.loader import PrivateDataLoader

_TITLE = "## Differential privacy"


def write_privacy_section(path: str, lines: Iterable[str]) -> None:
    """Add the section to the end of a card, or replace it; without a card begin one."""
    before, after = "# Model card\n", ""
    if os.path.exists(path):
        with open(path, encoding="utf-8") as card:
            before, _, old = card.read().partition(f"\n{_TITLE}\n")
        _, next_title, after = old.partition("\n## ")
        after = next_title + after
    section = "\n".join(lines)
    with open(path, "w", encoding="utf-8") as card:
        card.write(f"{before}\n{_TITLE}\n\n{section}\n{after}")


def privacy_lines(
    engine: PrivacyEngine,
    loader: PrivateDataLoader,
    optimizer: PrivateOptimizer,
    privacy: PrivacyConfig,
) -> Iterator[str]:
    """The lines of the section."""
    assert privacy.target_delta is not None
    epsilon = engine.get_epsilon(privacy.target_delta)
    if math.isinf(epsilon):
        yield "**This model is not private:** it was trained without noise."
        return
    if engine.seed is not None:
        yield (
            "**The run was seeded: whoever knows the seed can recompute its noise. The model is "
            "for research, not for release.**\n"
        )
    size = "declared" if loader.plan.has_public_size else "treated as public"
    yield f"- epsilon {rounded_up(epsilon)} at delta {privacy.target_delta:g}"
    yield f"- neighboring relation: {engine.neighboring_relation}"
    yield f"- privacy unit: {engine.public.unit}"
    yield f"- dataset size: {loader.dataset_size}, {size}"
    yield f"- sampling: {loader.sampler_name}"
    if loader.plan.bands > 1:
        yield f"- noise mechanism: {loader.plan.mechanism!r}"
    yield f"- accountant: {engine.accountant.mechanism()}"
    yield f"- steps of this run: {optimizer.releases}"
    yield f"- noise multiplier: {optimizer.noise_multiplier:.6g}"
    yield f"- L2 bound of each clipped gradient: {optimizer.max_grad_norm:g}"
    yield (
        "- not covered: training losses, the choice among several runs or checkpoints, the data "
        "that the model was evaluated on, what a pretrained model was trained on before"
    )
