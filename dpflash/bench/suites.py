"""The benchmarks by name, as `dpflash bench NAME` runs them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .suite import Suite

# What each measures, in the order in which `all` runs them; module `_MODULES.get(name, name)`.
SUITES = {
    "variants": "the attention variants of the reports, sparse ones, peers; held-out loss beside",
    "attention": "every pattern beside SDPA, FlexAttention and flash-attn",
    "sequence": "time and memory over sequence length, of private training and of attention",
    "batch": "the same over batch size; the batch size to take",
    "heads": "the same over heads",
    "private-step": "private training steps beside Opacus and beside steps without privacy",
    "optimize": "the optimization levels of make_private",
    "max-length": "the longest sequence that fits, forward and forward+backward",
    "accounting": "accountants beside Opacus' and Google's",
    "workers": "data-parallel private training on several worker processes",
}
_MODULES = {
    "max-length": "max_length",
    "private-step": "private_step",
    "workers": "workers_suite",
}


def suite_named(name: str) -> Suite:
    """The suite of a name of SUITES."""
    module = importlib.import_module(f".{_MODULES.get(name, name)}", __package__)
    suite: Suite = module.SUITE
    assert suite.name == name, (suite.name, name)
    return suite
