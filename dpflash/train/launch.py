"""Starts and ends a distributed training job, from the environment that torchrun sets.

Nothing waits for other ranks before `Launch.connect`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..distributed.collectives import RankError
from ..distributed.mesh import CONTEXT, DATA
from .config import Parallelism, TrainingConfig
from .heartbeat import Heartbeat
from .ranks import Team

_REQUIRED = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Launcher other than torchrun -> the variable with its number of processes. Not SLURM_NTASKS,
# which Slurm also sets for a batch script, although a batch script is one process.
_OTHERS = {
    "srun": "SLURM_STEP_NUM_TASKS",
    "mpirun (Open MPI)": "OMPI_COMM_WORLD_SIZE",
    "mpirun (MPICH, Intel MPI)": "PMI_SIZE",
}


@dataclass(frozen=True)
class Launch:
    """This process's rank in the job; as a context manager, ends the process group on exit."""

    parallel: Parallelism = Parallelism()  # how the ranks divide the job
    rank: int = 0  # global rank, from 0
    local_rank: int = 0  # rank on this machine, from 0
    world_size: int = 1  # number of ranks
    # called if another rank's heartbeat is missing; None for no heartbeats
    on_loss: Callable[[str], None] | None = None
    _heartbeats: list[Heartbeat] = field(default_factory=list, init=False, repr=False)

    @classmethod
    def from_environment(
        cls,
        parallel: Parallelism,
        environment: Mapping[str, str] = os.environ,
        on_loss: Callable[[str], None] | None = None,
    ) -> Launch:
        """Read the variables that torchrun sets; without them the job is a single process.

        Raises:
            ValueError: variables are missing or invalid, or another launcher started several
                processes, each of which would train on its own.
        """
        if "WORLD_SIZE" not in environment:
            _refuse_other_launchers(environment)
        world_size = _number({"WORLD_SIZE": "1", **environment}, "WORLD_SIZE", least=1)
        if world_size == 1:
            launch = cls(parallel)
        else:
            missing = [name for name in _REQUIRED if name not in environment]
            if missing:
                raise ValueError(
                    f"WORLD_SIZE={world_size} in the environment without {', '.join(missing)}: "
                    f"start the ranks by torchrun --nproc-per-node {world_size} -m dpflash "
                    "train, or unset WORLD_SIZE to train in one process"
                )
            rank = _number(environment, "RANK", below=world_size)
            launch = cls(parallel, rank, _number(environment, "LOCAL_RANK"), world_size, on_loss)
        context, data = parallel.context_parallel, world_size // parallel.context_parallel
        if world_size % context:
            choices = [str(n) for n in range(1, world_size + 1) if world_size % n == 0]
            raise ValueError(
                f"context_parallel={context} with {world_size} rank(s): expected a divisor of the "
                f"number of ranks; pass {' or '.join(choices)}, or start the job by torchrun "
                f"--nproc-per-node {max(data, 1) * context}"
            )
        if parallel.shard_parameters and data == 1:
            raise ValueError(
                f"shard_parameters=True with {world_size} rank(s) and context_parallel="
                f"{context}: there are no other ranks to shard the parameters over; start more "
                "ranks by torchrun, lower context_parallel, or drop shard_parameters"
            )
        return launch

    def connect(self, config: TrainingConfig) -> Team:
        """Initialize the process group; all ranks call this together.

        Raises RankError if another rank did not connect within the timeout.
        """
        self.parallel.check(config)
        if config.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device='cuda': torch finds no CUDA device; pass device='cpu'")
        if self.world_size == 1:
            return Team(self.parallel)
        if config.device == "cuda":
            if self.local_rank >= torch.cuda.device_count():
                raise ValueError(
                    f"device='cuda': rank {self.local_rank} of this machine finds "
                    f"{torch.cuda.device_count()} device(s); start at most one rank per device"
                )
            torch.cuda.set_device(self.local_rank)
        # gloo in addition to NCCL, so that ranks can exchange CPU tensors.
        backend = "cpu:gloo,cuda:nccl" if config.device == "cuda" else "gloo"
        timeout = timedelta(seconds=self.parallel.rank_timeout)
        try:
            dist.init_process_group(
                backend, rank=self.rank, world_size=self.world_size, timeout=timeout
            )
            if self.on_loss is not None:
                store = dist.distributed_c10d._get_default_store()
                limit = self.parallel.heartbeat_timeout
                own = Heartbeat(store, self.rank, self.world_size, limit, self.on_loss)
                self._heartbeats.append(own)
            return Team(self.parallel, _mesh(self, config.device, timeout))
        except RuntimeError as error:
            raise RankError(
                f"the start of {self.world_size} ranks: rank {self.rank} could not connect to the "
                f"others ({describe_loss(error) or error}); {_remedy(config.device)}"
            ) from error

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for heartbeat in self._heartbeats:
            heartbeat.stop()
        # After an error other ranks may be gone, and the barrier could wait forever.
        if error is None and self.world_size > 1 and dist.is_initialized():
            # A rank that exits early can make gloo abort the other ranks when they exit.
            with suppress(RuntimeError):
                dist.barrier()
            dist.destroy_process_group()


def describe_loss(error: BaseException) -> str | None:
    """Return a message if a lost rank caused the error, else None."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, RankError):
        return str(error)
    if not dist.is_initialized():
        return None
    # gloo raises a plain RuntimeError that contains a path of its own sources.
    if isinstance(error, dist.DistError) or "gloo/" in str(error):
        return f"another rank died, or did not answer in time ({lines[0]})"
    return None


def _mesh(launch: Launch, device: str, timeout: timedelta) -> DeviceMesh:
    """Return the mesh `[data, context]` of all ranks; ranks that share a window are adjacent."""
    context = launch.parallel.context_parallel
    ranks = torch.arange(launch.world_size).view(-1, context)
    # init_device_mesh would create groups with torch's default timeout instead of the job's.
    groups = []
    for rows in (ranks.T, ranks):
        created = [dist.new_group(row.tolist(), timeout=timeout) for row in rows]
        groups += [group for group in created if group is not dist.GroupMember.NON_GROUP_MEMBER]
    return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=(DATA, CONTEXT))


def _refuse_other_launchers(environment: Mapping[str, str]) -> None:
    for launcher, variable in _OTHERS.items():
        tasks = environment.get(variable, "1")
        if tasks.isdigit() and int(tasks) > 1:
            first = "srun --ntasks-per-node 1 " if launcher == "srun" else "mpirun --map-by node "
            raise ValueError(
                f"{variable}={tasks} in the environment, but no WORLD_SIZE: {launcher} started "
                f"{tasks} processes, each of which would train alone and spend its own epsilon; "
                f"have it start one torchrun on each machine, {first}torchrun --nnodes NODES "
                "--nproc-per-node RANKS --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m dpflash "
                f"train, or unset {variable} to train in one process"
            )


def _remedy(device: str, environment: Mapping[str, str] = os.environ) -> str:
    if environment.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return "torchrun restarted while a rank that died was still registered: restart again"
    if environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE"):
        return "start all ranks by torchrun"
    # With several machines, the cause is often a host name that resolves to 127.0.0.1.
    names = ["GLOO_SOCKET_IFNAME"] + ["NCCL_SOCKET_IFNAME"] * (device == "cuda")
    missing = " and ".join(name for name in names if name not in environment)
    interface = f"set {missing} on each machine to the" if missing else "check the"
    address = environment.get("MASTER_ADDR")
    return (
        f"the ranks are on several machines: {interface} network interface that reaches "
        f"MASTER_ADDR={address} (ip route get {address} names it), and open its ports"
    )


def _number(
    environment: Mapping[str, str], name: str, *, least: int = 0, below: int | None = None
) -> int:
    text = environment[name]
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise ValueError(
            f"{name}={text!r} in the environment: expected a whole number >= {least}, as torchrun "
            "sets it; start the ranks by torchrun, or unset the variable"
        )
    if below is not None and int(text) >= below:
        raise ValueError(
            f"{name}={text} in the environment: expected a number below WORLD_SIZE={below}; start "
            "the ranks by torchrun"
        )
    return int(text)
