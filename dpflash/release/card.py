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
    """Return the model card as Markdown.

    Args:
        report: report of the run, see `dpflash.train.report.make_report`.
        kind: noun for the model, such as "causal language model".
        task: name of the task on the Hub, such as "text-generation"; None if unknown.
        library: the library that loads the model, "dpflash" or "transformers".
        base: name of the pretrained model; None for a new model.
        how: Python code that loads the model.
        audit: content of audit.json from `dpflash audit --run`; None if there was no audit.
    """
    of_all = (report.get("by_run") or {}).get("total") or report
    private = "" if of_all["epsilon"] is None else "differential-privacy, "
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
