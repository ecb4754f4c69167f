"""The benchmarks by name, as `dpflash bench NAME` runs them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .suite import Suite

# What each measures, in the order in which `all` runs them; `_MODULES.get(name, name)`.
SUITES = {
    "variants": "time and memory of dilated (LongNet), ring and block-sparse attention as "
    "published reports name them, of other sparse patterns and of dense attention; what each "
    "costs in the held-out loss of a small model",
    "attention": "time and memory of every attention pattern of dpflash over sequence lengths, "
    "beside torch's SDPA and FlexAttention",
    "sequence": "time and memory of private training steps and of dilated attention over sequence "
    "lengths, and the exponents of their growth",
    "batch": "tokens/s and memory of private training steps and of dilated attention over batch "
    "sizes, and the batch size to take",
    "heads": "time and memory of dilated attention over numbers of heads, and the exponent of the "
    "growth",
    "private-step": "time and memory of whole private training steps of dpflash, of Opacus and of "
    "the same step without privacy",
    "optimize": "time and memory of private training steps at each level of "
    "make_private(optimize=...), and the gain over none",
    "max-length": "the longest sequence that fits in memory and time for each attention, forward "
    "and forward+backward",
    "accounting": "time and tightness of epsilons by dpflash's accountants, Opacus' and Google's "
    "dp_accounting",
    "ranks": "throughput and efficiency of private training over numbers of ranks",
    "scaling": "attention, its memory and private training on several ranks, and the bytes that "
    "they send",
}
# MODULE:ATTRIBUTE of a suite; else its name and SUITE.
_MODULES = {
    "sequence": "growth:SEQUENCE",
    "batch": "growth:BATCH",
    "heads": "growth:HEADS",
    "max-length": "max_length",
    "private-step": "private_step",
    "optimize": "private_step:OPTIMIZE",
}


def suite_named(name: str) -> Suite:
    """The suite of a name of SUITES."""
    module, _, attribute = _MODULES.get(name, name).partition(":")
    found = importlib.import_module(f".{module}", __package__)
    suite: Suite = getattr(found, attribute or "SUITE")
    assert suite.name == name, (suite.name, name)
    return suite
