"""The workers of a job: who has which samples, and who has which tokens of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from . import collectives as workers

DATA, CONTEXT = "data", "context"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Workers:
    """A process and its peers.

    Attributes:
        everyone: all workers; None for a process by itself.
        data: those with the same tokens of other samples; None where there are none.
        context: those with other tokens of the same samples; None where there are none.
    """

    everyone: ProcessGroup | None = None
    data: ProcessGroup | None = None
    context: ProcessGroup | None = None

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> Workers:
        """The workers of a mesh with dimensions named "data" and "context", or one of them.

        Raises:
            ValueError: the mesh has other dimensions, or does not hold all workers.
        """
        if mesh is None:
            return cls()
        if not isinstance(mesh, DeviceMesh):
            raise ValueError(
                f"mesh={type(mesh).__name__}: expected a DeviceMesh; make one with "
                "torch.distributed.device_mesh.init_device_mesh"
            )
        names = mesh.mesh_dim_names or ()
        if not names or set(names) - {DATA, CONTEXT}:
            found = f"dimensions {names}" if names else "no dimension names"
            raise ValueError(
                f"mesh has {found}: expected 'data' (other samples) and 'context' (other tokens "
                "of the same samples), or one of them; pass mesh_dim_names=('data', "
                "'context') to init_device_mesh"
            )
        if mesh.size() != dist.get_world_size():
            raise ValueError(
                f"mesh holds {mesh.size()} of {dist.get_world_size()} workers: one outside of it "
                "would have no part in the release; make the mesh of all of them"
            )

        def group(name: str) -> ProcessGroup | None:
            if name not in names or mesh.size(names.index(name)) == 1:
                return None
            return mesh.get_group(name)

        everyone = dist.group.WORLD if mesh.size() > 1 else None
        return cls(everyone, group(DATA), group(CONTEXT))

    @property
    def data_rank(self) -> int:
        """Which share of a draw this worker has."""
        return workers.rank_in(self.data)

    @property
    def data_size(self) -> int:
        """In how many shares a draw is dealt out."""
        return workers.world_size(self.data)

    @property
    def is_first(self) -> bool:
        """Whether this worker keeps the books."""
        return workers.rank_in(self.everyone) == 0

    def agree(self, what: str, values: Mapping[str, object]) -> None:
        """See `workers.agree`, for all workers."""
        workers.agree(what, values, self.everyone)

    def from_first(self, value: bytes, what: str) -> bytes:
        """The first worker's value, on all of them."""
        return workers.from_first(value, self.everyone, what)

    def first_does(self, what: str, action: Callable[[], bytes]) -> bytes:
        """What the first worker's action returns, on all workers, or its error on all of them.

        Args:
            what: names the action in messages.
            action: run on the first worker only.

        Raises:
            WorkerError: on the others, where it failed there; the first has its own error.
        """
        if self.everyone is None:
            return action()
        done, failure = b"", None
        if self.is_first:
            try:
                done = b"+" + action()
            except Exception as error:
                failure = error
                done = b"-" + f"{type(error).__name__}: {error}".encode()
        done = self.from_first(done, what)
        if failure is not None:
            raise failure
        if done[:1] == b"-":
            raise workers.WorkerError(f"{what} failed on the first worker: {done[1:].decode()}")
        return done[1:]

    def on_all(self, what: str, action: Callable[[], _T]) -> _T:
        """What the action returns here; where it fails on one worker, an error on all of them.

        Args:
            what: names the action in messages.
            action: run on each worker, without exchanges.

        Raises:
            WorkerError: on the workers where it did not fail; elsewhere its own error.
        """
        failure: Exception | None = None
        try:
            done = action()
        except workers.WorkerError:
            raise
        except Exception as error:
            failure = error
        told = None if failure is None else f"{type(failure).__name__}: {failure}"
        said = self.gather(told, what)
        if failure is not None:
            raise failure
        for rank, text in enumerate(said):
            if text is not None:
                raise workers.WorkerError(f"{what} failed on worker {rank}: {text}")
        return done

    def gather(self, value: _T, what: str) -> list[_T]:
        """Every worker's value, which can be pickled."""
        if self.everyone is None:
            return [value]
        held: list[Any] = [None] * workers.world_size(self.everyone)
        with workers.exchanging(what, self.everyone):
            dist.all_gather_object(held, value, group=self.everyone)
        return held

    def broadcast_(self, tensors: list[torch.Tensor], what: str) -> None:
        """The first worker's tensors, written into those of all others."""
        if self.everyone is None:
            return
        for tensor in tensors:
            workers.broadcast_(tensor, self.everyone, what)
