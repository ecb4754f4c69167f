"""Ring attention: each rank receives the keys and values of every other rank in turn.

In step t, rank r computes with the keys of rank r - t, and returns their gradients to rank r - t.
Only key rows that a query of rank r attends to are sent; all ranks derive them from the pattern.
Steps without such rows are skipped. The rows of the next step are exchanged while the current step
is computed, in separate buffers. Source: Liu et al., arXiv:2310.01889.

Shapes: B samples, H query heads, G key/value heads, T, S tokens of a rank, P ranks, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpflash.kernels.tile_graph import TileGraph

from .blockwise import BlockwiseBackward, BlockwiseForward, ShardedCall
from .exchange import PendingExchange, connect, send_and_receive
from .exchange_plan import (
    NeededRows,
    Piece,
    add_packed_,
    needed_rows,
    pack,
    packed_like,
    pieces,
    shares,
    unpack,
)


class Ring(ShardedCall):
    """One attention call on this rank, which receives keys and values step by step."""

    def forward(
        self, forward: BlockwiseForward, k: Tensor, v: Tensor, runtime: TileGraph | None
    ) -> None:
        connect(self.group, k.device)
        pending: PendingExchange | None = None
        for step in range(self.size):
            upcoming = self.fetch(step + 1, k, v, "forward")
            kv = (k, v) if step == 0 else self.receive(step, pending)
            if kv is not None:
                forward.add(self.pieces(step, k.device, runtime), *kv)
            pending, kv = upcoming, None

    def backward(
        self,
        backward: BlockwiseBackward,
        k: Tensor,
        v: Tensor,
        runtime: TileGraph | None,
        needs_dkv: bool,
    ) -> Sequence[Tensor]:
        pending = self.fetch(1, k, v, "backward")
        own = backward.add(self.pieces(0, k.device, runtime), k, v)
        returned: PendingExchange | None = None
        for step in range(1, self.size):
            upcoming = self.fetch(step + 1, k, v, "backward")
            kv = self.receive(step, pending)
            dkv = None
            if kv is not None:
                dkv = backward.add(self.pieces(step, k.device, runtime), *kv)
            pending, kv = upcoming, None
            if needs_dkv:
                # Add returned gradients in the order of the steps, so that runs are repeatable.
                sent, dkv = self.return_gradients(step, dkv, own), None
                self.add_returned(step - 1, returned, own)
                returned = sent
        self.add_returned(self.size - 1, returned, own)
        return own

    @property
    def most_rows(self) -> int:
        """See `ShardedCall.most_rows`; neighbouring ranks exchange the most rows."""
        size, of_all = self.size, shares(self.sharded)
        return max(of_all[r].rows[(r + step) % size] for r in range(size) for step in (1, -1))

    @property
    def size(self) -> int:
        """Number of ranks P, which is also the number of steps."""
        return self.sharded.layout.world_size

    def before(self, step: int) -> int:
        """Return the rank `step` ranks before this rank."""
        return (self.rank - step) % self.size

    def after(self, step: int) -> int:
        """Return the rank `step` ranks after this rank."""
        return (self.rank + step) % self.size

    def needed(self, step: int, device: torch.device) -> NeededRows:
        """Return the key rows that this rank receives in a step."""
        return needed_rows(self.sharded, self.rank, self.before(step), device)

    def given(self, step: int, device: torch.device) -> NeededRows:
        """Return the key rows that this rank sends in a step."""
        return needed_rows(self.sharded, self.after(step), self.rank, device)

    def pieces(
        self, step: int, device: torch.device, runtime: TileGraph | None
    ) -> tuple[Piece, ...]:
        """Return the (queries, keys) pieces to compute in a step."""
        owner = self.before(step)
        return pieces(self.sharded, self.rank, owner, device, self.by_chunk, runtime)

    def fetch(self, step: int, k: Tensor, v: Tensor, phase: str) -> PendingExchange | None:
        """Start to exchange the keys and values of a step; return None after the last step."""
        if step >= self.size:
            return None
        given, needed = self.given(step, k.device), self.needed(step, k.device)
        return send_and_receive(
            [pack(x, given) for x in (k, v)] if given.count else None,
            self.after(step),
            [packed_like(x, needed) for x in (k, v)] if needed.count else None,
            self.before(step),
            self.group,
            f"keys and values of ring attention, step {step} of {self.size - 1}",
            phase,
        )

    def receive(self, step: int, pending: PendingExchange | None) -> list[Tensor] | None:
        """Wait for keys and values `[B, G, S, D]` of another rank; return None if not needed."""
        received = None if pending is None else pending.wait()
        if received is None:
            return None
        tokens, heads = self.sharded.tokens(self.before(step)), self.sharded.num_kv_heads
        needed = self.needed(step, received[0].device)
        return [unpack(x, heads, tokens, needed) for x in received]

    def return_gradients(
        self, step: int, dkv: Sequence[Tensor] | None, own: Sequence[Tensor]
    ) -> PendingExchange:
        """Start to send gradients `[B, G, S, D]` to the rank that owns the keys of a step."""
        device = own[0].device
        needed, given = self.needed(step, device), self.given(step, device)
        return send_and_receive(
            None if dkv is None else [pack(x, needed) for x in dkv],
            self.before(step),
            [packed_like(x, given) for x in own] if given.count else None,
            self.after(step),
            self.group,
            f"gradients of ring attention, step {step} of {self.size - 1}",
            "backward",
        )

    def add_returned(
        self, step: int, pending: PendingExchange | None, own: Sequence[Tensor]
    ) -> None:
        """Wait for the gradients that another rank sends back, and add them to `own`."""
        received = None if pending is None else pending.wait()
        if received is not None:
            given = self.given(step, own[0].device)
            for whole, packed in zip(own, received, strict=True):
                add_packed_(whole, packed, given)
