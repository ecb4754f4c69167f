"""The model card of an export."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..privacy.card import privacy_section
from ..train.report import noun_in


def model_card(
    report: Mapping[str, Any],
    *,
    kind: str,
    task: str | None,
    library: str,
    base: str | None,
    how: str,
    audit: Mapping[str, Any] | None = None,
) -> str:
    """The card as Markdown.

    Args:
        report: of the run, see `dpflash.train.report.make_report`.
        kind: what the model is, such as "causal language model".
        task: its name on the Hub, such as "text-generation"; None for an unknown one.
        library: "dpflash" or "transformers", which loads the model.
        base: name of the pretrained model; None for a new one.
        how: Python that loads the model.
        audit: what `dpflash audit --run` found with the run's settings; None without one.
    """
    private = "" if report["epsilon"] is None else "differential-privacy, "
    trained = "trained" if base is None else f"fine-tuned from {base}"
    lines = [
        "---",
        f"library_name: {library}",
        *([] if task is None else [f"pipeline_tag: {task}"]),
        f"tags: [{private}dpflash]",
        "---",
        "# Model card",
        "",
        f"A {kind}, {trained} by dpflash {report['versions']['dpflash']}.",
        "",
        *privacy_section(report, noun_in(report), audit),
        "## Load",
        "",
        "```python",
        how,
        "```",
    ]
    return "\n".join(lines) + "\n"
