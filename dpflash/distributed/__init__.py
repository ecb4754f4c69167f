"""Context parallelism: attention over sequences whose tokens are sharded over several ranks.

`shard_sequence` splits a sequence, `ring_attention` attends over all its tokens,
`unshard_sequence` gathers the results, and `context_parallel` does this for a model. It supports
all patterns of `dpflash.patterns`. Results equal those of one rank. Keys that no query attends to
are never sent. Ranks compare a call's arguments before each exchange, so a mistake raises an error
on all ranks.
"""

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .attention import ring_attention
    from .collectives import RankError
    from .context import (
        ContextParallel,
        context_parallel,
        loss_weights,
        shard_sequence,
        unshard_sequence,
    )
    from .exchange import count_traffic
    from .layout import Layout
    from .traffic import edges_per_rank, sent_bytes

__all__ = [
    "ContextParallel",
    "Layout",
    "RankError",
    "context_parallel",
    "count_traffic",
    "edges_per_rank",
    "loss_weights",
    "ring_attention",
    "sent_bytes",
    "shard_sequence",
    "unshard_sequence",
]

# Public name -> module that defines it. Modules load on first use: `dpflash.attn` imports the
# collectives of this package, and ring attention imports `dpflash.attn`.
_MODULES = {
    "ContextParallel": "context",
    "Layout": "layout",
    "RankError": "collectives",
    "context_parallel": "context",
    "count_traffic": "exchange",
    "edges_per_rank": "traffic",
    "loss_weights": "context",
    "ring_attention": "attention",
    "sent_bytes": "traffic",
    "shard_sequence": "context",
    "unshard_sequence": "context",
}

__getattr__ = lazy(__name__, _MODULES)
