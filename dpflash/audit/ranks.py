"""Probes two ranks, each in a new process: noise across ranks, and context parallelism."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from ..config import PerformanceConfig, PrivacyConfig
from ..distributed import ContextParallel
from .probes import Contributions, Prober
from .releases import Run, as_it_is, mechanism_of, whitened

if TYPE_CHECKING:
    from ..engine import PrivacyEngine

RANKS = 2
_CANARIES, _RATE, _SHARD_RELEASES = 16, 1 / 4, 16
_NOISE_RELEASES, _NOISE_WIDTH = 4, 4096
_SECONDS = 180.0


@dataclass(frozen=True)
class Audited:
    """The class, arguments and settings of the audited engine; picklable for other processes."""

    engine_type: Callable[..., Any]  # class of the engines
    arguments: dict[str, Any]  # arguments of its constructor
    privacy: PrivacyConfig  # argument of `make_private`
    performance: PerformanceConfig  # argument of `make_private`

    def new_engine(self, **more: Any) -> PrivacyEngine:
        """Create a new engine with these arguments and more."""
        engine: PrivacyEngine = self.engine_type(**self.arguments, **more)
        return engine


def read_rank_noise(
    audited: Audited, mesh: DeviceMesh
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Measure noise, divided by its claimed standard deviation, in sharded and in whole tables.

    Returns this rank's rows of sharded tables, `[T x tables, n / ranks]`, then whole tables.
    """
    mechanism = mechanism_of(audited.privacy)
    rate, steps = 1 / mechanism.bands, _NOISE_RELEASES * mechanism.bands
    asked = replace(audited.privacy, sample_rate=rate, steps_per_epoch=steps)
    assert asked.noise_multiplier is not None
    found = []
    for is_sharded in (True, False):
        run = Run(
            audited.new_engine(mesh=mesh), asked, audited.performance,
            canaries=_NOISE_WIDTH, numbers=np.arange(RANKS),
            prepare=(lambda model: fully_shard(model, mesh=mesh)) if is_sharded else as_it_is,
        )  # fmt: skip
        run.dataset.include(np.zeros(_NOISE_WIDTH, dtype=np.bool_))
        sums = np.stack([release.sums for release in run.releases()])
        std = asked.noise_multiplier * asked.bound
        found.append((whitened(sums, mechanism) / std).reshape(-1, sums.shape[-1]))
    return found[0], found[1]


def read_shards(audited: Audited, mesh: DeviceMesh) -> Contributions:
    """Measure contributions of canaries whose gradient has equal parts on every context rank.

    If ranks added the squares of their parts, the norm would be too small by sqrt(ranks), and the
    canary would be released with sqrt(ranks) times its bound.
    """

    def mark(model: Any) -> None:
        # All ranks compute the same loss; the engine takes it for that of the rank's tokens.
        model.context_parallel = ContextParallel.of(mesh, "ring", "contiguous")

    prober = Prober(lambda: audited.new_engine(mesh=mesh), audited.privacy, audited.performance)
    return prober.contributions(_CANARIES, _RATE, _SHARD_RELEASES, prepare=mark)


@dataclass(frozen=True)
class RankFindings:
    """The measurements of all ranks."""

    # `[M, n]`, noise in rows of sharded tables, one rank after the other
    own: NDArray[np.float64]
    whole: tuple[NDArray[np.float64], ...]  # noise in whole tables, by rank
    shards: Contributions  # read by the first rank


class RankFailure(RuntimeError):
    """A process of an audit's ranks failed."""


class RankProbes:
    """Runs two processes that probe while the audit continues; leaving the context stops them."""

    def __init__(self, audited: Audited):
        self._folder = tempfile.TemporaryDirectory(prefix="dpflash-audit-")
        folder = Path(self._folder.name)
        (folder / "audited").write_bytes(pickle.dumps(audited))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, str(folder), str(rank)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(RANKS)
        ]

    def __enter__(self) -> RankProbes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        self._folder.cleanup()

    def read(self) -> RankFindings:
        """Wait for both processes; if one failed, raise RankFailure with its last output."""
        for process in self._processes:
            try:
                printed, _ = process.communicate(timeout=_SECONDS)
            except subprocess.TimeoutExpired:
                printed = f"no end after {_SECONDS:g} seconds"
            if process.returncode != 0:
                raise RankFailure(
                    f"ranks=True: the audit of two ranks failed ({printed[-2000:].strip()}); pass "
                    "ranks=False (--no-ranks) if processes cannot communicate here"
                )
        found = [
            pickle.loads((Path(self._folder.name) / f"found{rank}").read_bytes())
            for rank in range(RANKS)
        ]
        return RankFindings(
            own=np.concatenate([own for own, _, _ in found]),
            whole=tuple(whole for _, whole, _ in found),
            shards=found[0][2],
        )


def _main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=_SECONDS),
    )
    audited: Audited = pickle.loads((folder / "audited").read_bytes())
    data, context = (
        init_device_mesh("cpu", (RANKS,), mesh_dim_names=(name,)) for name in ("data", "context")
    )
    found = (*read_rank_noise(audited, data), read_shards(audited, context))
    (folder / f"found{rank}").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
