"""What a call spends its time on, by torch.profiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

_ROWS = 30


def trace_call(call: Callable[[], object], path: Path) -> Path:
    """Profiles one call.

    Args:
        call: what is profiled, without arguments; it was called before.
        path: of the trace (Chrome's format), whose name ends in ".json". A table of the
            operations that took longest lies beside it, with ".txt" for ".json".

    Returns:
        The path of the table.
    """
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        call()
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    order = f"self_{'cuda' if torch.cuda.is_available() else 'cpu'}_time_total"
    table = path.with_suffix(".txt")
    text = profiler.key_averages().table(sort_by=order, row_limit=_ROWS, max_name_column_width=80)
    table.write_text(text + "\n", encoding="utf-8")
    return table
