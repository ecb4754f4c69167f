"""Tile sizes of the per-sample gradient kernels, one table by architecture, kernel and dtype.

The table is `grad_configs.json`. Its values come from ahead-of-time compilation. Nothing is tuned
at run time.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Literal, NamedTuple

import torch

Kernel = Literal["per_sample_grad", "gram", "clipped_grad"]
KERNELS: tuple[Kernel, ...] = ("per_sample_grad", "gram", "clipped_grad")


class GradConfig(NamedTuple):
    """Tile sizes and launch options of a kernel."""

    block_m: int  # rows of a tile (outputs; tokens for gram)
    block_n: int  # columns of a tile (inputs; tokens for gram, then equal to block_m)
    block_k: int  # length of the reduction per step (tokens; inputs or outputs for gram)
    num_warps: int  # warps of a program
    num_stages: int  # depth of the software pipeline


# Triton's interpreter uses small sizes, so that small tests have several tiles and steps.
INTERPRETED = GradConfig(block_m=32, block_n=32, block_k=16, num_warps=4, num_stages=1)


@functools.cache
def table() -> dict[str, dict[str, GradConfig]]:
    """Return the configs by architecture, then by "kernel/bits"."""
    text = Path(__file__).with_name("grad_configs.json").read_text(encoding="utf-8")
    return {
        arch: {name: GradConfig(*sizes) for name, sizes in rows.items()}
        for arch, rows in json.loads(text).items()
    }


def entry(kernel: Kernel, dtype: torch.dtype) -> str:
    """Return the table's key for a kernel and dtype."""
    return f"{kernel}/{32 if dtype == torch.float32 else 16}"
