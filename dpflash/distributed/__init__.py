"""Sequences whose tokens lie on several workers.

`shard_sequence` cuts a sequence, `ring_attention` attends over all of it, `unshard_sequence` puts
results together; `context_parallel` does this for a whole model. All of it works for every pattern
of `dpflash.patterns`, gives what one worker alone would give, and never moves what no query sees.
Workers agree on every call before they exchange tensors, so that a mistake is an error on all of
them and not a hang.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention import ring_attention
    from .context import ContextParallel, context_parallel, loss_weights
    from .layout import Layout
    from .shards import shard_sequence, unshard_sequence
    from .traffic import count_traffic, edges_per_rank, sent_bytes

__all__ = [
    "ContextParallel",
    "Layout",
    "context_parallel",
    "count_traffic",
    "edges_per_rank",
    "loss_weights",
    "ring_attention",
    "sent_bytes",
    "shard_sequence",
    "unshard_sequence",
]

# The module that has a name, imported when the name is first used: the collectives of this
# package are below attention, and ring attention is above it.
_MODULES = {
    "ContextParallel": "context",
    "Layout": "layout",
    "context_parallel": "context",
    "count_traffic": "traffic",
    "edges_per_rank": "traffic",
    "loss_weights": "context",
    "ring_attention": "attention",
    "sent_bytes": "traffic",
    "shard_sequence": "shards",
    "unshard_sequence": "shards",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found
