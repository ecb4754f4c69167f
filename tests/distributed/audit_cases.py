"""What each rank runs for test_audit_ranks.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

from dpflash.audit.ranks import RANKS, Audited, read_rank_noise, read_shards
from dpflash.audit.run import auditable
from dpflash.config import PerformanceConfig, PrivacyConfig
from dpflash.engine import PrivacyEngine

sys.path.append(str(Path(__file__).parent.parent / "dpflash" / "audit"))
import seeded_bugs  # noqa: E402


def probe(group: object, *, bug: str | None, what: str, clipping: str) -> Any:
    """Noise of this rank, or contributions of context shards."""
    privacy = PrivacyConfig(max_grad_norm=1.5, noise_multiplier=1.0, clipping=clipping)
    settings = auditable(privacy, PerformanceConfig(), sample_rate=0.25, steps=4)
    audited = Audited(PrivacyEngine, {"seed": 0}, *settings)
    ranks = list(range(RANKS))
    name, read = {"noise": ("data", read_rank_noise), "shards": ("context", read_shards)}[what]
    mesh = init_device_mesh("cpu", (len(ranks),), mesh_dim_names=(name,))
    with pytest.MonkeyPatch.context() as patch:
        if bug is not None:
            seeded_bugs.RANK_BUGS[bug](patch.setattr)
        return read(audited, mesh)
