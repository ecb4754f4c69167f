"""Contents of whole tensors: version counters, digests, comparisons without device syncs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ..distributed.fsdp import is_sharded
from .digests import row_digests

# Contents are compared in the first forward or backward, and then in each one whose number is a
# multiple of EVERY. EVERY is prime, so that changes at regular intervals are found.
EVERY = 61


def version(tensor: Tensor) -> int | None:
    """Return the version counter of a tensor, or None if it has none."""
    return None if tensor.is_inference() else here(tensor)._version


def here(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def digest(tensor: Tensor) -> Tensor:
    """Return a digest of the contents, int64, on the tensor's device; see `row_digests`."""
    held = here(tensor).detach()
    if held.is_meta:
        return torch.zeros((), dtype=torch.int64)
    if held.is_quantized:
        held = held.int_repr()
    if held.layout != torch.strided:
        held = held.to_dense()
    return row_digests(held.reshape(1, held.numel()))[0]


def checksums(tensors: Iterable[Tensor]) -> list[int]:
    """Return each tensor's checksum: the sum of its words as integers, equal in all processes."""
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    plain = [x.detach().resolve_conj().resolve_neg().reshape(-1) for x in tensors]
    sums = [x.view(words.get(x.itemsize, torch.int64)).sum(dtype=torch.int64) for x in plain]
    found: list[int] = torch.stack([total.cpu() for total in sums]).tolist() if sums else []
    return found


class Comparisons:
    """Compares digests on their devices; the results are read later."""

    def __init__(self) -> None:
        self._begun: list[tuple[list[str], Tensor, torch.cuda.Event | None]] = []

    def begin(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        """Begin to compare each digest in `after` with the digest of the same name in `before`."""
        for device in {digest.device for digest in after.values()}:
            names = [name for name, digest in after.items() if digest.device == device]
            one = torch.stack([before[name].to(device, non_blocking=True) for name in names])
            two = torch.stack([after[name] for name in names])
            flags, event = (one != two).to("cpu", non_blocking=True), None
            if device.type == "cuda":
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
            self._begun.append((names, flags, event))

    def differing(self, *, wait: bool) -> list[str]:
        """Return the names of the tensors whose digests differ.

        Args:
            wait: whether to wait for unfinished comparisons. If False, a later call returns them.
        """
        found: list[str] = []
        begun, self._begun = self._begun, []
        for names, flags, event in begun:
            if event is not None and not wait and not event.query():
                self._begun.append((names, flags, event))
                continue
            if event is not None:
                event.synchronize()
            found += [name for name, differs in zip(names, flags.tolist(), strict=True) if differs]
        return found
