"""The ranks of a training job as torchrun starts them: who they are, and how they meet and part.

Nothing here needs other ranks before `Launch.meet`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..distributed.collectives import RankError
from ..distributed.mesh import CONTEXT, DATA
from .config import Parallelism, TrainingConfig
from .ranks import Team

__all__ = ["Launch", "describe_loss"]

_PLACE = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """This process among the ranks of its job. A context manager: behind it they have parted.

    Attributes:
        parallel: how they share the job.
        rank: this rank's number, from 0.
        local_rank: its number on this machine.
        num_workers: of the job.
    """

    parallel: Parallelism = Parallelism()
    rank: int = 0
    local_rank: int = 0
    num_workers: int = 1

    @classmethod
    def from_environment(
        cls, parallel: Parallelism, environment: Mapping[str, str] = os.environ
    ) -> Launch:
        """What torchrun has told this process; without torchrun a process by itself.

        Raises:
            ValueError: where variables are missing or wrong, or the ranks cannot share the job
                as asked.
        """
        num_workers = _number(environment, "WORLD_SIZE", least=1, missing=1)
        if num_workers == 1:
            launch = cls(parallel)
        else:
            missing = [name for name in _PLACE if name not in environment]
            if missing:
                raise ValueError(
                    f"WORLD_SIZE={num_workers} in the environment without {', '.join(missing)}: "
                    f"start the ranks by torchrun --nproc-per-node {num_workers} -m dpflash "
                    "train, or unset WORLD_SIZE to train in one process"
                )
            rank = _number(environment, "RANK", below=num_workers)
            launch = cls(parallel, rank, _number(environment, "LOCAL_RANK"), num_workers)
        context, data = parallel.context_parallel, num_workers // parallel.context_parallel
        if num_workers % context:
            choices = [str(n) for n in range(1, num_workers + 1) if num_workers % n == 0]
            raise ValueError(
                f"context_parallel={context} with {num_workers} rank(s): it must divide their "
                f"number; pass {' or '.join(choices)}, or start the job by torchrun "
                f"--nproc-per-node {max(data, 1) * context}"
            )
        if parallel.shard_parameters and data == 1:
            raise ValueError(
                f"shard_parameters=True with {num_workers} rank(s) and context_parallel="
                f"{context}: nobody is left to share the parameters with; start more ranks by "
                "torchrun, lower context_parallel, or drop shard_parameters"
            )
        return launch

    def meet(self, config: TrainingConfig) -> Team:
        """Join the other ranks of a job; all of them call this.

        Raises:
            ValueError: where the job cannot be shared so, or this machine lacks the device.
            RankError: where another rank does not come.
        """
        self.parallel.check(config)
        if config.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device='cuda': torch sees no such device here; use 'cpu'")
        if self.num_workers == 1:
            return Team(self.parallel)
        if config.device == "cuda":
            if self.local_rank >= torch.cuda.device_count():
                raise ValueError(
                    f"device='cuda': rank {self.local_rank} of this machine finds "
                    f"{torch.cuda.device_count()} device(s); start as many ranks as there are"
                )
            torch.cuda.set_device(self.local_rank)
        # Beside NCCL also gloo: what ranks tell each other then needs no device.
        backend = "cpu:gloo,cuda:nccl" if config.device == "cuda" else "gloo"
        timeout = timedelta(seconds=self.parallel.rank_timeout)
        try:
            dist.init_process_group(
                backend, rank=self.rank, world_size=self.num_workers, timeout=timeout
            )
            return Team(self.parallel, _mesh(self, config.device, timeout))
        except RuntimeError as error:
            raise RankError(
                f"the start of {self.num_workers} ranks: rank {self.rank} did not find the "
                f"others ({describe_loss(error) or error}); start all of them by torchrun"
            ) from error

    def __enter__(self) -> Launch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After a failure the others may be gone, and parting from them could wait for ever.
        if error is None and self.num_workers > 1 and dist.is_initialized():
            # One that leaves early can make gloo abort the others at their end.
            with suppress(RuntimeError):
                dist.barrier()
            dist.destroy_process_group()


def describe_loss(error: BaseException) -> str | None:
    """What an error says of ranks that are lost; None where it is about something else."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, RankError):
        return str(error)
    if not dist.is_initialized():
        return None
    # gloo raises a plain RuntimeError with the place in its own sources.
    if isinstance(error, dist.DistError) or "gloo/" in str(error):
        return f"another rank died, or did not come in time ({lines[0]})"
    return None


def _mesh(launch: Launch, device: str, timeout: timedelta) -> DeviceMesh:
    """The mesh of all ranks; those of one window are neighbours."""
    context = launch.parallel.context_parallel
    ranks = torch.arange(launch.num_workers).view(-1, context)
    # init_device_mesh would give its groups torch's timeout instead of the job's.
    groups = []
    for lines in (ranks.T, ranks):
        made = [dist.new_group(line.tolist(), timeout=timeout) for line in lines]
        own = [group for group in made if group is not dist.GroupMember.NON_GROUP_MEMBER]
        groups += own
    return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=(DATA, CONTEXT))


def _number(
    environment: Mapping[str, str],
    name: str,
    *,
    least: int = 0,
    below: int | None = None,
    missing: int | None = None,
) -> int:
    """A whole number of the environment."""
    if name not in environment and missing is not None:
        return missing
    text = environment[name]
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise ValueError(
            f"{name}={text!r} in the environment: expected a whole number >= {least}, as torchrun "
            "sets it; start the ranks by torchrun, or unset it"
        )
    if below is not None and int(text) >= below:
        raise ValueError(
            f"{name}={text} in the environment: expected a number below WORLD_SIZE={below}; start "
            "the ranks by torchrun"
        )
    return int(text)
