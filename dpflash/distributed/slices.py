"""Slices: which elements of each parameter's sum a rank owns, and how ranks exchange them.

Each element has one owner: the rank that sums it over all ranks and adds noise to the sum. The
other ranks send their parts of the element to the owner. An owner adds up the parts in a fixed
order, and draws noise for its own elements only. Ranks then receive the noisy elements they need.

Letters: P ranks of a group, B samples, n elements of a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .collectives import agree, all_gather, all_to_all, bundles, rank_in, ranks_of, world_size
from .fsdp import is_sharded, local_rows, local_shape, sharding_group
from .mesh import Ranks


class Slices:
    """Divides the elements of each parameter over the ranks.

    The ranks of a context (with parts of the same samples) divide a parameter's elements into
    slices. Ranks with other samples divide each slice again. If a parameter is sharded over a
    group of ranks, each rank's slice is the rows that it holds.
    """

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self._scattered: dict[nn.Parameter, bool] = {}

    def is_scattered(self, parameter: nn.Parameter) -> bool:
        """Return whether there is no context, and the data parallel ranks shard the parameter."""
        found = self._scattered.get(parameter)
        if found is None:
            found = self.ranks.context is None and _is_over(parameter, self.ranks.data)
            self._scattered[parameter] = found
        return found

    def of_context(self, parameter: nn.Parameter) -> list[slice]:
        """Return the elements whose per-sample gradients each rank of the context adds up."""
        return shares(parameter.numel(), self.ranks.context, _unit(parameter, self.ranks.context))

    def held(self, parameter: nn.Parameter) -> slice:
        """Return the elements whose sums the clipping gates of this rank compute."""
        if self.is_scattered(parameter):
            return self._rows(parameter)[self.ranks.data_rank]
        return self.of_context(parameter)[rank_in(self.ranks.context)]

    def owned(self, parameter: nn.Parameter) -> slice:
        """Return the elements that this rank owns: it sums them over all ranks and adds noise."""
        if self.ranks.data is None and self.ranks.context is None:
            return slice(0, parameter.numel())
        held = self.held(parameter)
        if self.is_scattered(parameter):
            return held
        own = shares(held.stop - held.start, self.ranks.data)[self.ranks.data_rank]
        return slice(held.start + own.start, held.start + own.stop)

    def scattered(
        self, totals: Mapping[nn.Parameter, Tensor], names: Sequence[object]
    ) -> dict[nn.Parameter, Tensor]:
        """Sum scattered parameters over the ranks; return this rank's rows of each sum."""
        cuts = [self._rows(p) for p in totals]
        values = [total.reshape(1, -1) for total in totals.values()]
        assert self.ranks.data is not None
        rows = reduce_to_owners(values, cuts, self.ranks.data, names, _SUMS)
        return dict(zip(totals, (x.flatten() for x in rows), strict=True))

    def bundled(self, parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Yield lists of parameters whose sums are sent together; all ranks yield equal lists."""
        for bundle in bundles(parameters, [2 * p.numel() for p in parameters]):
            yield [parameters[i] for i in bundle]

    def reduced(
        self, sums: Mapping[nn.Parameter, Tensor], names: Sequence[object] | None
    ) -> dict[nn.Parameter, Tensor]:
        """Add sums `[n]` over the ranks with different samples; return the elements of this owner.

        The result has the sums' common dtype. If nothing is sent, the given sums are returned.
        """
        data = self.ranks.data
        if data is None:
            return dict(sums)
        own = {p: held for p, held in sums.items() if self.is_scattered(p)}
        rest = {p: held.view(1, -1) for p, held in sums.items() if p not in own}
        if rest:
            cuts = [shares(held.numel(), data) for held in rest.values()]
            found = reduce_to_owners(list(rest.values()), cuts, data, names, _SUMS)
            own.update(zip(rest, (x.flatten() for x in found), strict=True))
        return {p: own[p] for p in sums}

    def released(self, own: Mapping[nn.Parameter, Tensor]) -> list[Tensor]:
        """Gather the noisy elements that this rank needs: its rows of a shard, or all elements."""
        data, context, parts = self.ranks.data, self.ranks.context, dict(own)
        if data is not None:
            apart = [p for p in parts if not self.is_scattered(p)]
            lengths = {p: self.held(p).stop - self.held(p).start for p in apart}
            parts |= _gathered({p: parts[p] for p in apart}, lengths, data)
        if context is not None:
            apart = [p for p in parts if not _is_over(p, context)]
            lengths = {p: p.numel() for p in apart}
            parts |= _gathered({p: parts[p] for p in apart}, lengths, context)
        return [_local(part, p) for p, part in parts.items()]

    def _rows(self, parameter: nn.Parameter) -> list[slice]:
        return shares(parameter.numel(), self.ranks.data, _unit(parameter, self.ranks.data))


_SUMS = "sum of the clipped gradients over all samples"


def shares(elements: int, group: ProcessGroup | None, unit: int = 1) -> list[slice]:
    """Return each rank's range of elements, in multiples of `unit`; last ranges may be shorter."""
    count = world_size(group)
    size = -(-elements // (unit * count)) * unit
    return [slice(min(r * size, elements), min((r + 1) * size, elements)) for r in range(count)]


def reduce_to_owners(
    values: Sequence[Tensor],
    cuts: Sequence[Sequence[slice]],
    group: ProcessGroup,
    names: Sequence[object] | None,
    operation: str,
) -> list[Tensor]:
    """Sum tensors over the ranks, and return this rank's columns of each sum.

    The other ranks' tensors are added in the order of the ranks, and this rank's tensor last.

    Args:
        values: tensors `[B, n]`, all of one dtype.
        cuts: for each tensor, the columns of each rank.
        group: the ranks; all of them call this function.
        names: the tensors' names, to compare over the ranks; None if they were compared before.
        operation: the name of the exchange in messages.

    Returns:
        The sums `[B, columns of this rank]`.

    Raises:
        RuntimeError: on all ranks, if ranks would send tensors that do not match.
    """
    if names is not None:
        _require_alike(values, group, names, operation)
    own, others = rank_in(group), [r for r in range(world_size(group)) if r != rank_in(group)]
    pairs = list(zip(values, cuts, strict=True))

    def columns(rank: int) -> list[Tensor]:
        return [x[:, cut[rank]] for x, cut in pairs]

    def views(block: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
        pieces = block.split([part.numel() for part in parts])
        return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]

    theirs = {r: columns(r) for r in others}
    sizes = [sum(x.numel() for x in theirs.get(r, ())) for r in range(1 + len(others))]
    sent = values[0].new_empty(sum(sizes))
    into = views(sent, [x for r in others for x in theirs[r]])
    torch._foreach_copy_(into, [x for r in others for x in theirs[r]])
    size = sum(x.numel() for x in columns(own))
    lengths = [0 if r == own else size for r in range(1 + len(others))]
    received = all_to_all(sent, sizes, lengths, group, operation).view(len(others), size)
    # With one other rank, add in place to the row that it sent: nothing else uses this memory.
    total = received[0] if len(others) == 1 else received[0] + received[1]
    for row in received[2:]:
        total += row
    sums = views(total, columns(own))
    torch._foreach_add_(sums, columns(own))
    return sums


def _require_alike(
    values: Sequence[Tensor], group: ProcessGroup, names: Sequence[object], operation: str
) -> None:
    try:
        shapes = [(tuple(x.shape), x.dtype) for x in values]
        agree(operation, {"what is sent": (list(names), shapes)}, group)
    except ValueError as error:
        if "different calls" in str(error):
            raise
        raise RuntimeError(
            "ranks exchanged gradients of different parameters, so nothing was released: "
            "each rank must run the same layers in the same order, and use their outputs in its "
            "losses (with weight 0 if it has nothing to add)"
        ) from None


def _gathered(
    parts: Mapping[nn.Parameter, Tensor], lengths: Mapping[nn.Parameter, int], group: ProcessGroup
) -> dict[nn.Parameter, Tensor]:
    """Join the parts of all ranks to whole parameters, or to slices of `lengths` elements."""
    found: dict[nn.Parameter, Tensor] = {}
    parameters = list(parts)
    longest = [shares(lengths[p], group)[0].stop for p in parameters]
    for bundle in bundles(list(parts.values()), longest):
        theirs, first = [parameters[i] for i in bundle], [longest[i] for i in bundle]
        sent = parts[theirs[0]].new_zeros(sum(first))
        for part, block in zip((parts[p] for p in theirs), sent.split(first), strict=True):
            block[: part.numel()] = part
        rows = all_gather(sent, group, "release of the slices of all ranks")
        for p, block in zip(theirs, rows.split(first, dim=1), strict=True):
            found[p] = block.reshape(-1)[: lengths[p]]
    return found


def _local(part: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return this rank's rows of a release, in the shape of `.grad`."""
    if is_sharded(parameter) and part.numel() == parameter.numel():
        begin, end = local_rows(parameter)
        part = part.view(parameter.shape)[begin:end]
    shape = local_shape(parameter)
    return part if part.shape == shape else part.view(shape)


def _is_over(parameter: nn.Parameter, group: ProcessGroup | None) -> bool:
    """Return whether the parameter's rows are sharded over these ranks."""
    if group is None or not is_sharded(parameter):
        return False
    return ranks_of(sharding_group(parameter)) == ranks_of(group)


def _unit(parameter: nn.Parameter, group: ProcessGroup | None) -> int:
    return max(1, parameter.shape[1:].numel()) if _is_over(parameter, group) else 1
