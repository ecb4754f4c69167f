"""What the arguments of `make_private` mean together, and which are refused."""

from __future__ import annotations

import difflib
import inspect
import math
from typing import Any, NoReturn

import torch
from torch import nn

from dpflash.kernels import exact_slots, grid_of

from ._validate import one_of, positive, positive_int
from .clipping.groups import Group, flat_groups, per_block_groups, per_layer_groups
from .grad_rules.convert import owners, tileable
from .optimizer import PrivateOptimizer
from .sampling.loader import SAMPLINGS, PublicSize

# Times a bound of less than 2^31 grid steps: `dpflash.kernels.noise.MAX_SCALE`.
_MOST_NOISE = 2.0**14

# Arguments of peers that have no counterpart here.
_REFUSED = {
    "secure_mode": "noise always comes from ChaCha20, keyed by the operating system",
    "criterion": "losses are computed by the caller, one per sample (dpflash.losses)",
    "batch_first": "the batch is always the first dimension",
    "noise_generator": "noise comes from a keyed stream; PrivacyEngine(seed=...) reproduces it",
    "grad_sample_mode": "clipping happens inside backward(); choose clipping= and way= instead",
    "wrap_model": "the model is never wrapped; it comes back as the same object",
    "rand_on_empty": "an empty draw is a batch of padding rows, which count for nothing",
    "clip": "the bound of a sample's gradient is max_grad_norm=",
    "target_epsilon": "make_private_with_epsilon takes it, with target_delta= and epochs=",
    "accountant": "PrivacyEngine(accountant=...) takes it",
    "steps": "training ends with your loop; make_private_with_epsilon takes epochs=",
    "total_steps": "training ends with your loop; make_private_with_epsilon takes epochs=",
}


def sampling_of(
    sampling: str | None,
    poisson_sampling: bool,
    physical_batch_size: int | None,
    max_batch_size: int | None,
) -> str:
    """The sampler that the arguments ask for together."""
    one_of(sampling=(sampling, (None, *SAMPLINGS)))
    one_of(poisson_sampling=(poisson_sampling, (True, False)))
    if sampling not in (None, "shuffled") and not poisson_sampling:
        raise ValueError(
            f"sampling={sampling!r} with poisson_sampling=False, which asks for the loader's own "
            "passes; leave poisson_sampling out"
        )
    chosen = sampling or ("poisson" if poisson_sampling else "shuffled")
    if physical_batch_size is not None and chosen == "shuffled":
        raise ValueError(
            f"physical_batch_size={physical_batch_size} with sampling='shuffled' "
            f"(poisson_sampling={poisson_sampling}): the loader's own batches are kept whole; "
            "give the loader a smaller batch_size"
        )
    if max_batch_size is not None:
        positive_int(max_batch_size=max_batch_size)
        if chosen != "poisson":
            raise ValueError(
                f"max_batch_size={max_batch_size} with sampling={chosen!r}, whose batches are "
                "never larger than batch_size; leave it out"
            )
    return chosen


def check_exact(
    exact: bool | str, way: str, noise_multiplier: float, max_grad_norm: float
) -> None:
    """Refuse what cannot be summed or noised on the grid.

    Raises:
        ValueError: naming the argument.
    """
    if exact not in ("auto", True, False) or not isinstance(exact, bool | str):
        raise ValueError(f"exact={exact!r}: expected 'auto', True or False")
    if exact is True and way not in ("auto", "stored"):
        raise ValueError(
            f"exact=True with way={way!r}, which never holds a sample's gradient and rounds the "
            "sum; leave way='auto', or exact='auto'"
        )
    if exact is True and math.isinf(max_grad_norm):
        raise ValueError("exact=True with max_grad_norm=inf, which has no grid; give a bound")
    if noise_multiplier >= _MOST_NOISE:
        raise ValueError(
            f"noise_multiplier={noise_multiplier!r}: expected less than {_MOST_NOISE:g}, up to "
            "which noise is exact in float64"
        )


def check_slots(expected_batch_size: float, max_grad_norm: float) -> None:
    """Refuse batches whose sums could leave what float64 holds exactly.

    Raises:
        ValueError: naming batch_size.
    """
    if math.isinf(max_grad_norm):
        return
    most = exact_slots(grid_of(max_grad_norm), max_grad_norm)
    # No draw is twice as large as a large batch.
    if 2 * expected_batch_size + 4096 > most:
        raise ValueError(
            f"data_loader.batch_size={expected_batch_size:g}: expected at most "
            f"{(most - 4096) // 2}, whose sums are exact in float64; use smaller batches"
        )


def public_size_of(
    sampling: str,
    dataset_size: int | None,
    sample_rate: float | None,
    steps_per_epoch: int | None,
) -> PublicSize | None:
    """The public numbers that are declared instead of the dataset's own size; None for none."""
    given = {
        "dataset_size": dataset_size,
        "sample_rate": sample_rate,
        "steps_per_epoch": steps_per_epoch,
    }
    named = [f"{name}={value!r}" for name, value in given.items() if value is not None]
    if not named:
        return None
    if sampling != "poisson":
        raise ValueError(
            f"{named[0]} with sampling={sampling!r}, whose neighboring relation takes the size of "
            "the dataset for public; leave it out, or use sampling='poisson'"
        )
    if (sample_rate is None) != (steps_per_epoch is None):
        raise ValueError(f"{named[0]}: sample_rate and steps_per_epoch come together; pass both")
    if dataset_size is not None:
        positive_int(dataset_size=dataset_size)
        if sample_rate is not None:
            raise ValueError(
                f"{', '.join(named)}: the size gives the rate; pass dataset_size, or sample_rate "
                "with steps_per_epoch"
            )
    if sample_rate is not None:
        positive(sample_rate=sample_rate)
        if sample_rate > 1:
            raise ValueError(f"sample_rate={sample_rate!r}: expected a number in (0, 1]")
        positive_int(steps_per_epoch=steps_per_epoch)
    return PublicSize(dataset_size, sample_rate, steps_per_epoch)


def trained_parameters(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The model's trainable parameters that the optimizer holds, in the model's order."""
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, PrivateOptimizer):
        raise ValueError(
            f"optimizer={type(optimizer).__name__}: expected a plain torch.optim.Optimizer "
            "(PrivateOptimizer.original_optimizer is one)"
        )
    held = {id(p): p for g in optimizer.param_groups for p in g["params"]}
    own = {id(p): n for n, p in module.named_parameters()}
    foreign = [p for i, p in held.items() if i not in own]
    if foreign:
        raise ValueError(
            f"optimizer holds {len(foreign)} parameter(s) that are not the module's (the first "
            f"has shape {tuple(foreign[0].shape)}); build it from module.parameters(), behind "
            "fully_shard if that is used"
        )
    trained = [p for p in module.parameters() if p.requires_grad and id(p) in held]
    if not trained:
        raise ValueError(
            "optimizer holds no trainable parameter of the module; check requires_grad and build "
            "it from module.parameters()"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "optimizer=LBFGS: it evaluates a batch several times in a step, each a release of its "
            "own; use a first-order optimizer such as AdamW"
        )
    for parameter in trained:
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"parameter '{own[id(parameter)]}' has a post-accumulate-grad hook, which would "
                "see its gradient before the noise; remove the hook"
            )
        if not parameter.is_floating_point():
            raise ValueError(f"parameter '{own[id(parameter)]}' is {parameter.dtype}; use a float")
    return trained


def make_groups(module: nn.Module, trained: list[nn.Parameter], clipping: str) -> list[Group]:
    """The clipping groups of a kind of clipping."""
    if clipping == "flat":
        return flat_groups(trained)
    if clipping == "per_layer":
        return per_layer_groups(owners(module, trained))
    names = {p: n for n, p in module.named_parameters()}
    return per_block_groups(trained, names, tileable(module))


def refuse_keywords(unknown: dict[str, Any], method: Any) -> NoReturn:
    """Say of the first unknown keyword what was meant, or what takes its place."""
    name = next(iter(unknown))
    if name in _REFUSED:
        raise TypeError(f"{method.__name__} has no argument {name!r}: {_REFUSED[name]}")
    known = [p for p in inspect.signature(method).parameters if p != "unknown"]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(known)}"
    raise TypeError(f"{method.__name__} got an unknown argument {name!r}; {hint}")
