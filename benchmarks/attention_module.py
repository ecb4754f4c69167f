"""A module with attention and its projections as a benchmark's subject.

Letters: B samples, H heads, T tokens, D head dim, E model dim, R checked query rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dpflash.nn import MultiheadAttention

from .attention_cases import TOLERANCES, Case, attend_rows, band_error, score_bias, whole_error
from .suite import Subject, worst
from .timing import Step
from .work import count_work


def module_subject(
    case: Case, module: MultiheadAttention, *, backward: bool, seed: int
) -> Subject:
    """A module with its projections; gradients are those of its input and its parameters.

    Args:
        case: the problem; E = H D.
        module: of the case's pattern, dtype and device; its parameters are drawn here.
        backward: whether a call goes backward too.
        seed: of parameters and inputs.
    """
    width, dtype = case.heads * case.head_dim, getattr(torch, case.dtype)
    generator = torch.Generator(case.device).manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=width**-0.5, generator=generator)
    shape = (case.batch, case.tokens, width)
    x, do = (
        torch.randn(shape, dtype=dtype, device=case.device, generator=generator) for _ in range(2)
    )
    leaves = {"x": x.requires_grad_(), **dict(module.named_parameters())}

    def forward() -> Tensor:
        with torch.no_grad():
            output: Tensor = module(x, x, x)[0]
            return output

    def both() -> None:
        for leaf in leaves.values():
            leaf.grad = None
        module(x, x, x)[0].backward(do)

    def error() -> float:
        return _module_error(case, module, leaves, do, seed, with_grads=backward)

    step: Step = both if backward else forward
    return Subject(
        step,
        error,
        TOLERANCES[case.dtype],
        case.batch * case.tokens,
        lambda: count_work(step),
        case.dtype,
        {**case.figures(case.batch * case.heads), "operator": "multihead"},
    )


def _module_error(
    case: Case,
    module: MultiheadAttention,
    leaves: dict[str, Tensor],
    do: Tensor,
    seed: int,
    *,
    with_grads: bool,
) -> float:
    """Against float64 at the checked rows of all samples; do is 0 elsewhere."""
    rows = case.checked_rows(seed).to(case.device)
    masked = torch.zeros_like(do)
    masked[:, rows] = do[:, rows]
    exact = {name: x.detach().double().requires_grad_(with_grads) for name, x in leaves.items()}
    with torch.set_grad_enabled(with_grads):
        output = module(leaves["x"], leaves["x"], leaves["x"])[0]
    errors = [whole_error(output.detach())]
    exact_grads = {name: torch.zeros_like(x) for name, x in exact.items()}
    for sample in range(case.batch):
        expected = _module_rows(case, exact, sample, rows)
        errors.append(band_error(output.detach()[sample, rows], expected.detach()))
        if with_grads:
            loss = (expected * masked[sample, rows].double()).sum()
            grads = torch.autograd.grad(loss, list(exact.values()))
            for total, grad in zip(exact_grads.values(), grads, strict=True):
                total += grad
    if with_grads:
        found = torch.autograd.grad(output, list(leaves.values()), masked)
        for ours, theirs in zip(found, exact_grads.values(), strict=True):
            own = zip(ours, theirs, strict=True) if ours.ndim == 3 else [(ours, theirs)]
            errors += [band_error(one, other) for one, other in own]
    return worst(errors)


def _module_rows(case: Case, exact: dict[str, Tensor], sample: int, rows: Tensor) -> Tensor:
    """`[R, E]`: the rows of a sample of a module's output, in float64."""
    projected = F.linear(exact["x"][sample], exact["qkv_proj.weight"], exact["qkv_proj.bias"])
    q, k, v = projected.unflatten(1, (3, case.heads, case.head_dim)).permute(1, 2, 0, 3)
    # The batch of one that this sample is.
    bias = score_bias(case, q.unsqueeze(0), k.unsqueeze(0))
    seen = [attend_rows(case, bias, 0, h, rows, q[h], k[h], v[h]) for h in range(case.heads)]
    return F.linear(torch.cat(seen, 1), exact["out_proj.weight"], exact["out_proj.bias"])
