"""Tile sizes of the attention kernels, one table by architecture, head dim and dtype.

The table is `attention_configs.json`; `benchmarks/scripts/tune_attention.py` writes it on a GPU.
Nothing is tuned at run time.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Literal, NamedTuple

import torch

Kernel = Literal["forward", "dq", "dkdv"]

# Head dims of the table; other head dims use the next larger entry.
HEAD_DIMS = (64, 128, 256)


class Config(NamedTuple):
    """Tile sizes and launch options of a kernel."""

    block_m: int  # rows of a tile (queries; keys for dkdv)
    block_n: int  # columns of a chunk
    num_warps: int  # warps of a program
    num_stages: int  # depth of the software pipeline


# Triton's interpreter uses small sizes, so that tests with small T have several tiles and chunks.
INTERPRETED = Config(block_m=16, block_n=16, num_warps=4, num_stages=1)


@functools.cache
def table() -> dict[str, dict[str, Config]]:
    """Return the configs by architecture, then by "kernel/head_dim/bits"."""
    text = Path(__file__).with_name("attention_configs.json").read_text(encoding="utf-8")
    return {
        arch: {name: Config(*sizes) for name, sizes in rows.items()}
        for arch, rows in json.loads(text).items()
    }


def entry(kernel: Kernel, head_dim: int, dtype: torch.dtype) -> str:
    """Return the table's key for a kernel, head dim and dtype."""
    bucket = next(size for size in HEAD_DIMS if size >= head_dim)
    bits = 32 if dtype == torch.float32 else 16
    return f"{kernel}/{bucket}/{bits}"


def config(
    kernel: Kernel, head_dim: int, dtype: torch.dtype, arch: str, *, has_bias: bool = False
) -> Config:
    """Return the config of a kernel; `arch` is a column of the table.

    With a position bias, tiles have half as many rows and columns (at least 16 each, as products
    need), since a tile of the bias takes as many registers as the scores.
    """
    sizes = table()[arch][entry(kernel, head_dim, dtype)]
    if not has_bias:
        return sizes
    return sizes._replace(block_m=max(16, sizes.block_m // 2), block_n=max(16, sizes.block_n // 2))


@functools.cache
def architecture(device: torch.device) -> str:
    """Return the column of the table for a GPU."""
    if torch.version.hip is not None:
        return column("gfx")
    major, minor = torch.cuda.get_device_capability(device)
    return column(f"sm_{major}{minor}")


def column(arch: str) -> str:
    """Return the column for an architecture. Some, such as "sm_89", share another's column.

    A block has 163 KiB of shared memory on sm_80, 227 on sm_90 and sm_100, and 99 on sm_86, sm_89
    and sm_120. Source: CUDA Programming Guide, "Compute Capabilities".
    """
    if arch.startswith("gfx"):
        return "gfx942"
    capability = int(arch.removeprefix("sm_"))
    if capability >= 120 or 86 <= capability < 90:
        return "sm_86"
    return "sm_100" if capability >= 100 else "sm_90" if capability >= 90 else "sm_80"


def precision(hip: bool) -> str:
    """Return Triton's input_precision for float32 products; "tf32x3" is as accurate as "ieee"."""
    return "ieee" if hip else "tf32x3"
