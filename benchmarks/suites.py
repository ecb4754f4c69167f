"""The benchmarks by name, as `dpflash bench NAME` runs them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .suite import Suite

# Suite -> the quantities that it measures, in the order in which `all` runs the suites.
SUITES = {
    "variants": "time, memory and held-out loss of attention as published reports name it",
    "attention": "time and memory of all patterns by length, beside SDPA and FlexAttention",
    "sequence": "time and memory of private steps and of dilated attention by length",
    "batch": "tokens/s and memory of private steps and of dilated attention by batch size",
    "heads": "time and memory of dilated attention by number of heads",
    "private-step": "time and memory of private steps beside Opacus and beside no privacy",
    "optimize": "time and memory of private steps at each level of make_private(optimize=...)",
    "packed": "time and memory of private steps over packed documents, compared with padded ones",
    "max-length": "the longest sequence that fits in memory and time for each attention",
    "accounting": "time and tightness of epsilons by dpflash, Opacus and Google's dp_accounting",
    "ranks": "throughput and efficiency of private training over numbers of ranks",
    "scaling": "attention, its memory and private training on several ranks",
}
# Suite -> MODULE:ATTRIBUTE; the default is the suite's name and SUITE.
_MODULES = {
    "sequence": "growth:SEQUENCE",
    "batch": "growth:BATCH",
    "heads": "growth:HEADS",
    "max-length": "max_length",
    "private-step": "private_step",
    "optimize": "private_step:OPTIMIZE",
}


def suite_named(name: str) -> Suite:
    """Return a suite by its name; "scaling-SECTION" is the suite "scaling" with one section."""
    if name.startswith("scaling-"):
        from .scaling import scaling_suite

        return scaling_suite(sections=name.split("-")[1:])
    module, _, attribute = _MODULES.get(name, name).partition(":")
    found = importlib.import_module(f".{module}", __package__)
    suite: Suite = getattr(found, attribute or "SUITE")
    assert suite.name == name, (suite.name, name)
    return suite
