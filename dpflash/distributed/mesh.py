"""The ranks of a job: which samples, and which of their tokens, each rank holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..refusal import PrivateRefusal
from . import collectives

DATA, CONTEXT = "data", "context"
# Names of mesh dimensions, and torchtitan's. Ranks along data dimensions hold other samples.
OF_DATA, OF_CONTEXT = (DATA, "dp_replicate", "dp_shard"), (CONTEXT, "cp")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Ranks:
    """The process groups of this rank."""

    everyone: ProcessGroup | None = None  # all ranks; None for a single process
    data: ProcessGroup | None = None  # the ranks with other samples (same tokens); None for one
    context: ProcessGroup | None = None  # the ranks with other tokens of the same samples, or None

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> Ranks:
        """Return the groups of a mesh of all ranks; its dimensions are in OF_DATA, OF_CONTEXT."""
        if mesh is None:
            return cls()
        if not isinstance(mesh, DeviceMesh):
            raise ValueError(
                f"mesh={type(mesh).__name__}: expected a DeviceMesh; make one with "
                "torch.distributed.device_mesh.init_device_mesh"
            )
        names = mesh.mesh_dim_names or ()
        if not names or set(names) - {*OF_DATA, *OF_CONTEXT} or set(OF_CONTEXT) <= set(names):
            found = f"dimensions {names}" if names else "no dimension names"
            raise ValueError(
                f"mesh has {found}: expected 'data' (ranks with different samples), 'context' "
                "(ranks with different tokens of the same samples) or both (torchtitan's names: "
                "'dp_replicate' and 'dp_shard' for data, 'cp' for context); pass "
                "mesh_dim_names=('data', 'context') to init_device_mesh"
            )
        if mesh.size() != dist.get_world_size():
            raise ValueError(
                f"mesh holds {mesh.size()} of {dist.get_world_size()} ranks: the gradients of the "
                "other ranks would be missing from the release; make a mesh of all ranks"
            )

        def group(known: Sequence[str]) -> ProcessGroup | None:
            found = [
                n for n, size in zip(names, mesh.shape, strict=True) if n in known and size > 1
            ]
            if len(found) > 1:
                return mesh[tuple(found)]._flatten().get_group()
            return mesh.get_group(found[0]) if found else None

        everyone = dist.group.WORLD if mesh.size() > 1 else None
        return cls(everyone, group(OF_DATA), group(OF_CONTEXT))

    @property
    def data_rank(self) -> int:
        """The index of this rank's part of each logical batch."""
        return collectives.rank_in(self.data)

    @property
    def data_size(self) -> int:
        """The number of parts into which each logical batch is divided."""
        return collectives.world_size(self.data)

    @property
    def is_first(self) -> bool:
        """Whether this is global rank 0, which writes the ledger."""
        return collectives.rank_in(self.everyone) == 0

    def data_may_carry(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether an exchange of these tensors in `data` can also send values of `agree`.

        This needs a group `data` of all ranks, and tensors on the device from which `agree` sends.
        """
        if self.everyone is None or self.data is None or not tensors:
            return False
        is_whole = collectives.ranks_of(self.data) == collectives.ranks_of(self.everyone)
        return is_whole and tensors[0].device == collectives.control_device(self.everyone)

    def agree(
        self, operation: str, values: Mapping[str, object], extra: Sequence[int] = ()
    ) -> list[list[int]]:
        """Call `collectives.agree` over all ranks."""
        return collectives.agree(operation, values, self.everyone, extra)

    def broadcast_from_first(self, value: bytes, operation: str) -> bytes:
        """Return rank 0's value on all ranks."""
        return collectives.broadcast_from_first(value, self.everyone, operation)

    def run_on_first(
        self,
        operation: str,
        action: Callable[[], bytes],
        carry: Callable[[bool], bool] | None = None,
    ) -> bytes:
        """Run an action on rank 0 and return its result, or raise its error, on all ranks.

        The other ranks raise RankError, or PrivateRefusal if the action raised one.

        Args:
            operation: the name of the exchange in messages.
            action: a function without collectives; its result is sent to all ranks.
            carry: function that sends, in an exchange that is due anyway, whether rank 0 failed.
                Its argument is whether this rank failed, and its result whether rank 0 failed. If
                rank 0 did not fail, nothing else is sent, so the action must return b"".
        """
        if self.everyone is None:
            return action()
        outcome, failure = b"", None
        if self.is_first:
            try:
                outcome = b"+" + action()
            except Exception as error:
                failure = error
                outcome = _described(error).encode()
        if carry is not None and not carry(failure is not None):
            return b""
        outcome = self.broadcast_from_first(outcome, operation)
        if failure is not None:
            raise failure
        if outcome[:1] != b"+":
            _raise_of_other(operation, 0, outcome.decode())
        return outcome[1:]

    def run_on_all(self, operation: str, action: Callable[[], _T]) -> _T:
        """Run an action without collectives on every rank; if one rank raises, all ranks raise.

        The other ranks raise PrivateRefusal if a rank's action raised one, else RankError.
        """
        self.agree(operation, {})
        failure: Exception | None = None
        try:
            result = action()
        except collectives.RankError:
            raise
        except Exception as error:
            failure = error
        found = self.gather(None if failure is None else _described(failure), operation)
        if failure is not None:
            raise failure
        for rank, described in enumerate(found):
            if described is not None:
                _raise_of_other(operation, rank, described)
        return result

    def gather(self, value: _T, operation: str) -> list[_T]:
        """Return the values of all ranks, ordered by rank. Values must be picklable."""
        if self.everyone is None:
            return [value]
        gathered: list[Any] = [None] * collectives.world_size(self.everyone)
        with collectives.exchanging(operation, self.everyone):
            dist.all_gather_object(gathered, value, group=self.everyone)
        return gathered

    def broadcast_(self, tensors: list[torch.Tensor], operation: str) -> None:
        """Overwrite the tensors of all ranks with those of rank 0."""
        if self.everyone is None:
            return
        for tensor in tensors:
            collectives.broadcast_(tensor, self.everyone, operation)


def _described(error: Exception) -> str:
    """Return an error's text for other ranks, after "!" for a `PrivateRefusal`, else after "-"."""
    return (
        f"!{error}" if isinstance(error, PrivateRefusal) else f"-{type(error).__name__}: {error}"
    )


def _raise_of_other(operation: str, rank: int, described: str) -> NoReturn:
    if described[0] == "!":
        raise PrivateRefusal(described[1:]) from None
    raise collectives.RankError(f"{operation} failed on rank {rank}: {described[1:]}")
