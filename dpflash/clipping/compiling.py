"""Notices when torch.compile first traces a function in this process.

A compiled model reads handles (expanded parameters, see `Gate`), which must exist before the call.
Creating one costs two operators, so only a process that compiles creates handles in advance.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .forward import PrivateForward

_waiting: weakref.WeakSet[PrivateForward] = weakref.WeakSet()
_has_begun = False


def compiles(forward: PrivateForward) -> bool:
    """Return whether to create handles now. If not, the first tracing creates them."""
    dynamo = sys.modules.get("torch._dynamo")  # every optimizer imports it
    if dynamo is not None and not _has_begun:
        handler = dynamo.callback.callback_handler
        if _begin not in handler.start_callbacks:  # torch._dynamo.reset() drops them
            handler.register_start_callback(_begin)
        _waiting.add(forward)
    return _has_begun


def _begin(*_: object) -> None:
    global _has_begun
    _has_begun = True
    for forward in tuple(_waiting):
        if forward.batch_hint is not None:
            forward.prepare(forward.batch_hint)
    _waiting.clear()
