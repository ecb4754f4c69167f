"""Whether a model and its loss keep the samples of a batch apart, tried on one batch.

Every comparison is made on a plain copy of the model, in float64 where it takes that, from the
same buffers and the same seed, without dropout. Letters: B samples, T tokens.
"""

from __future__ import annotations

import copy
import math
import random
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from .attach import attach, check_module, owners
from .clipping import flat_groups
from .gate import PrivateBackward
from .grad_rules import rule_for
from .grad_rules.generic import PrivateLeaf

LossFunction = Callable[[nn.Module, Any], Tensor]

_IGNORED = -100  # torch's and transformers' mark of a target that does not count
_SCALE = 8.0
_SHOWN = 3
_ITSELF = "(the model itself)"
_LOSS_FN = "loss_fn"
_MEND = "mend it first"
_TARGET_NAMES = ("labels", "label", "targets", "target", "y")
_DROPOUTS = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
    torch.alpha_dropout,
    torch.feature_dropout,
    torch.feature_alpha_dropout,
}
_LOSS_REMEDY = (
    "return one loss per sample made from that sample alone: dpflash.losses.cross_entropy (mse, "
    "binary_cross_entropy_with_logits), or reduction='none' and a mean over each sample's own "
    "elements, in the order of the batch"
)
_EMPTY_REMEDY = (
    "skip the forward and backward with `if len(x):`, never optimizer.step(): an empty Poisson "
    "batch is released with noise like any other"
)


@dataclass(frozen=True)
class Problem:
    """One finding of a check.

    Attributes:
        kind: "unsupported", "run", "loss", "coupling", "state", "first_dimension",
            "outside_use", "no_gradient", "random", "batch_size" or "empty_batch".
        where: dotted name of the module or parameter, or "loss_fn".
        message: what was found.
        remedy: what to do.
        severity: "error" (private training would be refused, or its bound would not hold) or
            "warning".
    """

    kind: str
    where: str
    message: str
    remedy: str
    severity: str = "error"


@dataclass(frozen=True)
class CheckReport:
    """What a check found, and what it looked at: a test on one batch, not a proof.

    Attributes:
        problems: the findings, errors first.
        checked: what was compared.
        not_checked: what was left out, and why.
    """

    problems: list[Problem]
    checked: list[str]
    not_checked: list[str]

    @property
    def ok(self) -> bool:
        """Whether there is no error; warnings may remain."""
        return all(problem.severity != "error" for problem in self.problems)

    def __str__(self) -> str:
        lines = []
        for problem in self.problems:
            lines.append(f"{problem.severity:<8} {problem.kind:<16} {problem.where}")
            lines += (
                _wrapped(problem.message, "  ") + _wrapped(f"-> {problem.remedy}", "  ") + [""]
            )
        errors = sum(problem.severity == "error" for problem in self.problems)
        count = f"{errors} error(s), {len(self.problems) - errors} warning(s)"
        lines += [count if self.problems else "no problem found", ""]
        for title, entries in (("checked", self.checked), ("not checked", self.not_checked)):
            if entries:
                lines.append(title)
                lines += [line for entry in entries for line in _wrapped(f"- {entry}", "  ")]
        return "\n".join([*lines, "", "A test on this one batch, not a proof."])


def run_check(model: nn.Module, batch: Any, loss_fn: LossFunction) -> CheckReport:
    """`PrivacyEngine.check`, see there."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model={type(model).__name__}: expected a torch.nn.Module")
    if not callable(loss_fn):
        raise ValueError(
            f"loss_fn={type(loss_fn).__name__}: expected a function loss_fn(model, batch) -> "
            "losses [B]"
        )
    if isinstance(batch, Mapping) and not isinstance(batch, dict):
        batch = dict(batch)
    size = _batch_size(batch)
    check = _Check(getattr(model, "_orig_mod", model), batch, loss_fn, size)
    with _randomness_restored(batch), torch.enable_grad():
        check.run()
    order = {"error": 0, "warning": 1}
    problems = sorted(check.problems, key=lambda problem: order[problem.severity])
    return CheckReport(problems, check.checked, check.not_checked)


@dataclass
class _Sample:
    """What one sample got in one company: its loss and the gradient of that loss."""

    loss: float
    grads: dict[str, Tensor | None]

    def norm(self) -> float:
        return math.sqrt(
            sum(float(g.double().square().sum()) for g in self.grads.values() if g is not None)
        )

    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm())


@dataclass
class _Call:
    """One module call: the parts of its inputs and outputs that belong to one sample."""

    name: str
    inputs: list[Tensor]
    outputs: list[Tensor]


@dataclass
class _Finding:
    """Sample `index` is not what it was in the batch when `how`."""

    index: int
    how: str
    other: Any
    place: int
    size: int
    loss: float
    grads: dict[str, float]


class _Subject:
    """The copy under test: each run starts from the same buffers and the same seed."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction):
        self.model = model
        self.loss_fn = loss_fn
        self.trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.dropout = any(
            isinstance(m, _DropoutNd) and m.training and m.p > 0 for m in model.modules()
        )
        self._buffers = [
            (module, f"{prefix}.{name}".lstrip("."), name, buffer.detach().clone())
            for prefix, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._versions = {n: p._version for n, p in model.named_parameters()}
        for module in model.modules():
            if isinstance(module, _DropoutNd):
                module.eval()

    def losses(self, batch: Any, seed: int = 0) -> Tensor:
        for module, _, name, value in self._buffers:
            module._buffers[name] = value.clone()
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        with _WithoutDropout() as mode:
            # loss_fn may change what it gets.
            losses = self.loss_fn(self.model, _map(batch, torch.clone))
        self.dropout |= mode.seen
        return losses

    def sample(self, batch: Any, index: int) -> _Sample:
        losses = self.losses(batch)
        if losses.ndim != 1:
            raise ValueError(f"losses of shape {tuple(losses.shape)}")
        one = losses[index]
        found = torch.autograd.grad(one, list(self.trained.values()), allow_unused=True)
        return _Sample(float(one.detach()), dict(zip(self.trained, found, strict=True)))

    def buffers(self) -> dict[str, Tensor]:
        """The buffers as the last run left them."""
        return {
            dotted: held.detach().clone()
            for module, dotted, name, _ in self._buffers
            if (held := module._buffers.get(name)) is not None
        }

    def changed_parameters(self) -> list[str]:
        return [n for n, p in self.model.named_parameters() if p._version != self._versions[n]]


class _Check:
    """One check, filling in its findings."""

    def __init__(self, model: nn.Module, batch: Any, loss_fn: LossFunction, size: int):
        self.problems: list[Problem] = []
        self.checked: list[str] = []
        self.not_checked: list[str] = []
        self._original = model
        self._loss_fn = loss_fn
        self._batch = batch
        self._size = size
        self._indices = sorted({0, size // 2, size - 1})
        self._tolerance = 0.0
        self._random = False
        self._reference: dict[int, _Sample] = {}
        self._subject: _Subject

    def run(self) -> None:
        # A copy of a private model is plain.
        try:
            self._plain = copy.deepcopy(self._original)
        except Exception as error:
            self._add("run", _ITSELF, f"it cannot be copied: {_said(error)}", "mend copy.deepcopy")
            return
        self._modules()
        if not self._first_run() or not self._repeats():
            self.not_checked.append("what comes after a failed run: mend it and check again")
            return
        self._first_dimensions()
        self._state()
        self._coupling()
        self._reach()
        self._empty_batch()
        self._private_run()
        if self._subject.dropout:
            self.not_checked.append("dropout: switched off for the comparisons")
        if not self._original.training:
            self.not_checked.append("training mode: the model is in eval mode; call model.train()")

    def _add(
        self, kind: str, where: str, message: str, remedy: str, severity: str = "error"
    ) -> None:
        self.problems.append(Problem(kind, where, message, remedy, severity))

    def _errors(self) -> bool:
        return any(problem.severity == "error" for problem in self.problems)

    def _modules(self) -> None:
        """What make_private would refuse, all of it."""
        self.checked.append("every module against the rules of make_private")
        for name, module in self._plain.named_modules():
            try:
                check_module(name or _ITSELF, module)
            except ValueError as error:
                self._add("unsupported", name or _ITSELF, *_parted(error))

    def _first_run(self) -> bool:
        """Run as the user would, then choose the precision of the comparisons."""
        self._subject = _Subject(self._plain, self._loss_fn)
        if not self._subject.trained:
            self._add("run", _ITSELF, "no parameter is trainable", "call requires_grad_(True)")
            return False
        called: list[str] = []
        hooks = [
            m.register_forward_hook(lambda *_: called.append(""))
            for m in self._subject.model.modules()
        ]
        try:
            losses = self._subject.losses(self._batch)
        except Exception as error:
            self._add("run", _LOSS_FN, f"loss_fn(model, batch) raised {_said(error)}", _MEND)
            return False
        finally:
            for hook in hooks:
                hook.remove()
        if not called:
            self._add(
                "run",
                _LOSS_FN,
                "it calls no module of the model that it is given",
                "call the argument of loss_fn, not a model of the outside",
            )
            return False
        if not self._losses_fit(losses):
            return False
        del losses
        wide = _map(self._batch, lambda t: t.double() if t.is_floating_point() else t)
        try:
            subject = _Subject(copy.deepcopy(self._original).double(), self._loss_fn)
            subject.sample(wide, 0)
        except Exception as error:
            self.not_checked.append(f"float64: the model does not take it ({_said(error)})")
        else:
            self._subject, self._batch = subject, wide
        try:
            self._subject.sample(self._batch, 0)
        except Exception as error:
            self._add("run", _LOSS_FN, f"the backward of losses[0] raised {_said(error)}", _MEND)
            return False
        narrowest = _Narrowest()
        with narrowest:
            self._subject.losses(self._batch)
        # Between rounding, which grows with depth, and what coupling does.
        self._tolerance = narrowest.eps ** (2 / 3)
        return True

    def _losses_fit(self, losses: Any) -> bool:
        expected = f"expected one loss per sample, [{self._size}]"
        if not isinstance(losses, Tensor):
            found = f"it returned {type(losses).__name__}; {expected}"
        elif losses.ndim == 0:
            found = f"it returned a scalar, in which samples cannot be told apart; {expected}"
        elif tuple(losses.shape) != (self._size,):
            found = f"it returned shape {tuple(losses.shape)}; {expected}"
        elif not losses.is_floating_point():
            found = f"it returned {losses.dtype}; expected a floating-point tensor"
        elif not losses.requires_grad:
            found = "its losses do not require grad: they were detached or made under no_grad"
        elif not bool(losses.isfinite().all()):
            found = "its losses are not finite, so they cannot be compared"
        else:
            self.checked.append(f"losses: [{self._size}], finite, differentiable")
            return True
        self._add("loss", _LOSS_FN, found, _LOSS_REMEDY)
        return False

    def _repeats(self) -> bool:
        """Whether the same batch gives the same losses again, and with another seed."""
        subject = self._subject
        first = subject.losses(self._batch).detach()
        for index in self._indices:
            subject.losses(self._pick([index] * self._size))
        again = subject.losses(self._batch).detach()
        if changed := subject.changed_parameters():
            self._add(
                "state",
                changed[0],
                "the forward changes this parameter, so without noise",
                "leave parameters alone in forward",
            )
            return False
        if not self._close(first, again):
            self._add(
                "state",
                _ITSELF,
                "a batch gives other losses after another one was seen: "
                "something outside of the buffers is kept between calls",
                "keep nothing of a batch between calls",
            )
            return False
        self._random = not self._close(first, subject.losses(self._batch, seed=1).detach())
        if self._random:
            self._add(
                "random",
                _ITSELF,
                "the losses depend on the seed, dropout apart; samples are "
                "compared at their own place in batches of the same size only",
                "to have the rest checked, switch the randomness off",
                "warning",
            )
            self.not_checked.append("samples alone or at another place: the model is random")
        return True

    def _first_dimensions(self) -> None:
        """The first dimension of what goes into a trained layer must follow B."""
        sizes = sorted({self._size, self._size - 1, 1}, reverse=True)
        seen: dict[int, dict[str, list[tuple[int, ...]]]] = {}
        for size in sizes:
            try:
                seen[size] = self._shapes(self._pick(range(size)))
            except Exception as error:
                self._add(
                    "batch_size",
                    _LOSS_FN,
                    f"{size} sample(s) alone raise {_said(error)}",
                    "Poisson batches have any size: make the model independent of it",
                )
        self.checked.append(
            f"first dimension of the inputs of trained layers, B = {', '.join(map(str, seen))}"
        )
        for name in {n: None for shapes in seen.values() for n in shapes}:
            found = {size: set(shapes.get(name, ())) for size, shapes in seen.items()}
            # A first dimension of 1 stands for all samples, as in positions [1, T].
            if all(f <= {(size,), (1,)} for size, f in found.items()):
                continue
            shown = ", ".join(
                f"{'/'.join(str(d[0]) if d else 'scalar' for d in sorted(f)) or 'not called'} "
                f"for B={size}"
                for size, f in found.items()
            )
            self._add(
                "first_dimension",
                name,
                f"the first dimension of its input is not the batch: {shown}. Where it happens to "
                "be equal to B, gradients would be clipped by something that is no sample",
                "put the batch first (batch_first=True, x.transpose(0, 1), no flattening of "
                "[B, T]), or freeze the layer with requires_grad_(False)",
            )

    def _shapes(self, batch: Any) -> dict[str, list[tuple[int, ...]]]:
        """For each trained module the first dimensions of its inputs, () for a scalar."""
        shapes: dict[str, list[tuple[int, ...]]] = {}
        modules = dict(self._subject.model.named_modules())
        hooks = []
        for name, _ in owners(self._subject.model, self._subject.trained.values()):

            def note(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
                if rule_for(module) is not PrivateLeaf:
                    tensors = tensors[:1]
                shapes.setdefault(name or _ITSELF, []).extend(t.shape[:1] for t in tensors)

            hooks.append(modules[name].register_forward_pre_hook(note, with_kwargs=True))
        try:
            losses = self._subject.losses(batch)
        finally:
            for hook in hooks:
                hook.remove()
        size = next(t.shape[0] for t in _tensors(batch) if t.ndim)
        if tuple(losses.shape) != (size,):
            raise ValueError(f"losses has shape {tuple(losses.shape)}, expected [{size}]")
        return {name: [tuple(s) for s in found] for name, found in shapes.items()}

    def _state(self) -> None:
        """Buffers that a batch leaves behind are released without noise."""
        subject = self._subject
        subject.losses(self._batch)
        left = subject.buffers()
        found: dict[str, None] = {}
        for index in self._indices:
            subject.losses(self._pick([index] * self._size))
            for name, value in subject.buffers().items():
                before = left.get(name)
                if before is None or not self._agree([before], [value]):
                    found[name] = None
        for name in found:
            self._add(
                "state",
                name,
                "this buffer is computed from the samples of the batch: it "
                "carries them into later batches and into the state_dict, without noise",
                "freeze it, or compute it from public data before training",
            )
        self.checked.append("buffers after two different batches")

    def _coupling(self) -> None:
        """Sample i in the batch, against sample i alone and in other companies."""
        findings: list[_Finding] = []
        hows: dict[str, None] = {}
        for index in self._indices:
            reference = self._subject.sample(self._batch, index)
            self._reference[index] = reference
            for how, other, place, size in self._companies(index):
                try:
                    sample = self._subject.sample(other, place)
                except Exception as error:
                    note = f"samples when {how}: {_said(error)}"
                    if note not in self.not_checked:
                        self.not_checked.append(note)
                    continue
                hows[how] = None
                if not sample.finite() and how.startswith("the others are scaled"):
                    continue
                loss, grads = self._difference(reference, sample)
                if loss or grads:
                    findings.append(_Finding(index, how, other, place, size, loss, grads))
            self._inputs_of_others(index)
        self.checked.append(
            f"loss and gradient of samples {', '.join(map(str, self._indices))}, up to "
            f"{self._tolerance:.0e} of their size, when " + "; ".join(hows)
        )
        if not any(how.startswith("targets") for how in hows):
            self.not_checked.append("other targets to ignore: found no integer targets to vary")
        self._report_coupling(findings)

    def _companies(self, index: int) -> Iterator[tuple[str, Any, int, int]]:
        """(how, batch, place of the sample in it, size of it)."""
        size = self._size
        others = torch.tensor([j for j in range(size) if j != index])
        copies = [index] * size
        yield "all are copies of it", self._pick(copies), index, size
        neighbours = [(index + 1) % size] * size
        neighbours[index] = index
        yield "the others are copies of one other", self._pick(neighbours), index, size

        def scaled(t: Tensor) -> Tensor:
            return _changed(t, others, t[others.to(t.device)] * _SCALE)

        def cut(t: Tensor) -> Tensor:
            rows = t[others.to(t.device)]
            rows[:, rows.shape[1] // 2 :] = 0
            return _changed(t, others, rows)

        def ignored(t: Tensor) -> Tensor:
            rows = t[others.to(t.device)]
            mark = int(t.min()) if int(t.min()) < 0 else _IGNORED
            rows.view(rows.shape[0], -1)[:, rows[0].numel() // 2 :] = mark
            return _changed(t, others, rows)

        changes: tuple[tuple[str, Callable[[Tensor], Tensor], Callable[..., bool]], ...] = (
            (f"the others are scaled by {_SCALE:g}", scaled, _is_value),
            ("masks of the others are cut short", cut, _is_mask),
            ("targets of the others are ignored from the middle on", ignored, _is_target),
        )
        for how, change, wanted in changes:
            other, count = _map_leaves(self._batch, change, wanted)
            if count:
                yield how, other, index, size
        if not self._random:
            backwards = list(range(size))[::-1]
            yield "the batch is reversed", self._pick(backwards), size - 1 - index, size
            yield "it is alone", self._pick([index]), 0, 1

    def _inputs_of_others(self, index: int) -> None:
        """Derivatives of losses[i] by inputs[j], and by what embeddings give for sample j."""
        batch = _map(
            self._batch,
            lambda t: t.detach().clone().requires_grad_() if t.is_floating_point() else t,
        )
        leaves = [("the batch's tensors", t) for t in _tensors(batch) if t.requires_grad]
        flagged = {p.where for p in self.problems}
        hooks = []
        for name, module in self._subject.model.named_modules():
            if isinstance(module, nn.Embedding) and name not in flagged:

                def note(_: Any, __: Any, out: Tensor, name: str = name) -> None:
                    if out.requires_grad and out.ndim and out.shape[0] == self._size:
                        leaves.append((f"the output of '{name}'", out))

                hooks.append(module.register_forward_hook(note))
        try:
            losses = self._subject.losses(batch)
        finally:
            for hook in hooks:
                hook.remove()
        if not leaves or not losses.requires_grad:
            return
        found = torch.autograd.grad(losses[index], [t for _, t in leaves], allow_unused=True)
        for (name, _), grad in zip(leaves, found, strict=True):
            if grad is None:
                continue
            squares = (
                grad.double().flatten(1).square().sum(1)
                if grad.ndim > 1
                else grad.double().square()
            )
            total = float(squares.sum())
            foreign = total - float(squares[index])
            if foreign > self._tolerance**2 * total and foreign > 0:
                entry = (
                    f"losses[{index}] has a derivative by other samples in {name}, "
                    f"{math.sqrt(foreign / total):.1e} of the whole"
                )
                if not any(p.kind == "coupling" for p in self.problems):
                    self._add("coupling", _LOSS_FN, entry, _LOSS_REMEDY)

    def _difference(self, a: _Sample, b: _Sample) -> tuple[float, dict[str, float]]:
        """Relative differences beyond the tolerance: of the loss, and of each parameter's grad."""
        usual = max(abs(s.loss) for s in self._reference.values())
        scale = max(abs(a.loss), abs(b.loss), usual)
        loss = abs(a.loss - b.loss) / scale if scale else 0.0
        # One small gradient may be all rounding; what counts is its part in the sample's own.
        largest = max(s.norm() for s in self._reference.values())
        scale = max(a.norm(), b.norm(), 1e-3 * largest)
        grads = {}
        for name, one in a.grads.items():
            two = b.grads[name]
            if one is None and two is None:
                continue
            one = torch.zeros_like(self._subject.trained[name]) if one is None else one
            two = torch.zeros_like(one) if two is None else two
            part = float((one - two).double().norm()) / scale if scale else 0.0
            if not part <= self._tolerance:
                grads[name] = part
        return (0.0 if loss <= self._tolerance else loss), grads

    def _report_coupling(self, findings: list[_Finding]) -> None:
        derivative = [p for p in self.problems if p.kind == "coupling"]
        if not findings:
            return
        self.problems = [p for p in self.problems if p.kind != "coupling"]
        by_place: dict[str, list[_Finding]] = {}
        located: dict[str, str] = {}
        for finding in findings:
            if finding.how not in located:
                located[finding.how] = self._locate(finding)
            by_place.setdefault(located[finding.how], []).append(finding)
        order = self._another_order()
        modules = dict(self._subject.model.named_modules())
        for where, group in by_place.items():
            worst = max(group, key=lambda f: max([f.loss, *f.grads.values()]))
            hows = list(dict.fromkeys(f.how for f in group))
            message = (
                f"losses[{worst.index}] moves by {worst.loss:.1e} and its gradient by "
                f"{max(worst.grads.values(), default=0.0):.1e} of its size when {worst.how}"
            )
            if len(hows) > 1:
                message += f" (likewise when {'; '.join(h for h in hows if h != worst.how)})"
            if worst.grads:
                message += f". Parameters: {_listed(list(worst.grads))}"
            if derivative:
                message += f". {derivative[0].message}"
            if order:
                message += f". {order}"
            if where == _LOSS_FN:
                remedy = _LOSS_REMEDY
            else:
                module = modules["" if where == _ITSELF else where]
                message = (
                    f"the first module whose output for a sample depends on the others "
                    f"({type(module).__name__}): {message}"
                )
                remedy = _remedy(module)
            self._add("coupling", where, message, remedy)

    def _another_order(self) -> str:
        """Whether the losses are those of the single samples, at other places."""
        if self._random:
            return ""
        losses = self._subject.losses(self._batch).detach().double()
        moved = []
        for index in range(self._size):
            try:
                alone = self._subject.losses(self._pick([index])).detach().double()
            except Exception:  # reported by its batch size already
                return ""
            distance = (losses - alone).abs() / losses.abs().max().clamp(min=1e-300)
            if float(distance[index]) > self._tolerance:
                if float(distance.min()) > self._tolerance:
                    return ""
                moved.append(f"that of sample {index} is losses[{int(distance.argmin())}]")
        return f"The losses are in another order than the batch: {_listed(moved)}" if moved else ""

    def _locate(self, finding: _Finding) -> str:
        """The first module whose inputs agree for the sample and whose outputs differ."""
        try:
            here = self._trace(self._batch, finding.index, self._size)
            there = self._trace(finding.other, finding.place, finding.size)
        except Exception:
            return _LOSS_FN
        for one, two in zip(here, there, strict=False):
            if one.name != two.name:
                break
            if self._agree(one.inputs, two.inputs) and not self._agree(one.outputs, two.outputs):
                return one.name or _ITSELF
        return _LOSS_FN

    def _trace(self, batch: Any, index: int, size: int) -> list[_Call]:
        calls: list[_Call] = []
        pending: list[list[Tensor]] = []

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            pending.append(_rows((args, kwargs), index, size))

        hooks = []
        for name, module in self._subject.model.named_modules():

            def after(_: Any, __: Any, ___: Any, out: Any, name: str = name) -> None:
                calls.append(_Call(name, pending.pop(), _rows(out, index, size)))

            hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.append(module.register_forward_hook(after, with_kwargs=True))
        try:
            self._subject.losses(batch)
        finally:
            for hook in hooks:
                hook.remove()
        return calls

    def _agree(self, one: list[Tensor], two: list[Tensor]) -> bool:
        return len(one) == len(two) and all(
            a.shape == b.shape and self._close(a, b) for a, b in zip(one, two, strict=True)
        )

    def _close(self, a: Tensor, b: Tensor) -> bool:
        if not a.is_floating_point() or not b.is_floating_point():
            return torch.equal(a, b)
        a, b = a.double(), b.double()
        # Masks hold infinities; where they agree they do not count.
        difference = torch.where(a == b, 0.0, a - b).nan_to_num(nan=math.inf).norm()
        finite = torch.where(a.isfinite(), a, 0.0).norm()
        return float(difference) <= self._tolerance * float(finite)

    def _reach(self) -> None:
        """Trainable parameters that no loss reaches."""
        self.checked.append("which trainable parameters get a gradient")
        for name in self._subject.trained:
            if all(sample.grads[name] is None for sample in self._reference.values()):
                self._add(
                    "no_gradient",
                    name,
                    "it is trainable but no loss reaches it: it would get noise alone",
                    "freeze it with requires_grad_(False), or use it",
                    "warning",
                )

    def _empty_batch(self) -> None:
        self.checked.append("an empty batch")
        try:
            losses = self._subject.losses(self._pick([]))
            if tuple(losses.shape) == (0,):
                return
            found = f"gives losses of shape {tuple(losses.shape)}, not [0]"
        except Exception as error:
            found = f"raises {_said(error)}"
        self._add("empty_batch", _LOSS_FN, f"an empty batch {found}", _EMPTY_REMEDY, "warning")

    def _private_run(self) -> None:
        """The copy made private, without clipping: its per-sample norms and its sums."""
        what = "a private backward: per-sample norms and sums against ordinary gradients"
        if self._errors():
            self.not_checked.append(f"{what}: mend the errors first")
            return
        subject = self._subject
        backward = PrivateBackward(
            flat_groups(list(subject.trained.values())),
            names={p: n for n, p in subject.trained.items()},
            way="stored",
            memory_budget=1,
            loss_reduction=None,
            flat=True,
            clip_function="hard",
        )
        for parameter in subject.trained.values():
            parameter.grad = None
        attach(subject.model, backward)
        try:
            backward.begin_batch(self._size)
            losses = subject.losses(self._batch)
            backward.backward(losses)
        except Exception as error:
            named = re.search(r"'([^']+)'", str(error))
            where = named.group(1) if named else _ITSELF
            self._add("unsupported", where, *_parted(error))
            return
        self.checked.append(what)
        tolerance = max(self._tolerance, 1e-4)  # sums are fp32
        for name, parameter in subject.trained.items():
            ordinary, held = parameter.grad, backward.sums.get(parameter)
            if ordinary is None:
                continue
            held = torch.zeros_like(ordinary) if held is None else held
            distance = float((ordinary.double() - held.double()).norm())
            if not distance <= tolerance * float(ordinary.double().norm()):
                self._add(
                    "outside_use",
                    name,
                    "it is used outside of its own module, where its gradient is not clipped",
                    "call the module itself, not F.linear(x, m.weight)",
                )
        if self._errors() or self._random or backward.squared_norms is None:
            return
        for index, sample in self._reference.items():
            private, plain = math.sqrt(float(backward.squared_norms[index])), sample.norm()
            if not abs(private - plain) <= tolerance * max(private, plain):
                self._add(
                    "first_dimension",
                    _ITSELF,
                    f"the gradient of losses[{index}] has the norm "
                    f"{plain:.4g}, the private backward takes {private:.4g} for it",
                    "give every trained layer inputs whose first dimension is the batch",
                )
                return

    def _pick(self, rows: Any) -> Any:
        index = torch.tensor(list(rows), dtype=torch.long)
        return _map(self._batch, lambda t: t[index.to(t.device)])


class _WithoutDropout(TorchFunctionMode):
    """Takes dropout out of every function that has it."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            on = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
            self.seen |= bool(on) and kwargs.get("p", args[1] if len(args) > 1 else 0.5) > 0
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            given = args[4] if len(args) > 4 else kwargs.pop("dropout_p", 0.0)
            self.seen |= given > 0
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        return func(*args, **kwargs)


class _Narrowest(TorchDispatchMode):
    """Notes the coarsest precision among the results of all operations."""

    eps = torch.finfo(torch.float64).eps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            if tensor.is_floating_point():
                self.eps = max(self.eps, torch.finfo(tensor.dtype).eps)
        return out


@contextmanager
def _randomness_restored(batch: Any) -> Iterator[None]:
    devices = sorted({t.device.index or 0 for t in _tensors(batch) if t.device.type == "cuda"})
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _batch_size(batch: Any) -> int:
    shapes = [tuple(t.shape) for t in _tensors(batch) if t.ndim]
    if not shapes:
        raise ValueError(
            f"batch={type(batch).__name__} holds no tensor: expected a tensor, a tuple or a dict "
            "of tensors whose first dimension is the batch"
        )
    sizes = {shape[0] for shape in shapes}
    if len(sizes) > 1:
        raise ValueError(
            f"batch holds tensors of shapes {shapes}: expected the batch first in each; put what "
            "is not per sample into loss_fn"
        )
    size = sizes.pop()
    if size < 2:
        raise ValueError(
            f"batch holds {size} sample(s): expected two or more, since a sample is compared with "
            "itself in company; 4 to 8 are enough"
        )
    return size


def _map(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The batch with each of its tensors changed; scalars stay."""
    return tree_map_only(Tensor, lambda t: change(t) if t.ndim else t, batch)


def _map_leaves(
    batch: Any, change: Callable[[Tensor], Tensor], wanted: Callable[[Tensor, str, int, int], bool]
) -> tuple[Any, int]:
    """The batch with its wanted tensors changed, and how many there were."""
    count = 0

    def visit(part: Any, key: str, position: int, parts: int) -> Any:
        nonlocal count
        if isinstance(part, Tensor):
            if part.ndim == 0 or not wanted(part, key, position, parts):
                return part
            count += 1
            return change(part)
        if isinstance(part, dict):
            return type(part)({k: visit(v, str(k), 0, 1) for k, v in part.items()})
        if isinstance(part, list | tuple):
            entries = [visit(p, "", n, len(part)) for n, p in enumerate(part)]
            return type(part)(*entries) if hasattr(part, "_fields") else type(part)(entries)
        return part

    return visit(batch, "", 0, 1), count


def _is_binary(t: Tensor) -> bool:
    return t.dtype == torch.bool or bool(((t == 0) | (t == 1)).all())


def _is_mask(t: Tensor, key: str, position: int, parts: int) -> bool:
    return t.ndim > 1 and not t.is_complex() and _is_binary(t)


def _is_value(t: Tensor, key: str, position: int, parts: int) -> bool:
    return t.is_floating_point() and not _is_binary(t)


def _is_target(t: Tensor, key: str, position: int, parts: int) -> bool:
    """Integers that may hold marks of what is ignored."""
    if t.dtype not in (torch.int64, torch.int32) or t.numel() == 0:
        return False
    if bool((t < 0).any()):
        return True
    # Elsewhere a mark that is not known as one would be an assertion of the device.
    return t.device.type == "cpu" and (key in _TARGET_NAMES or position > 0)


def _changed(t: Tensor, others: Tensor, rows: Tensor) -> Tensor:
    return t.detach().clone().index_copy(0, others.to(t.device), rows.detach().to(t.dtype))


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists, mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _rows(value: Any, index: int, size: int) -> list[Tensor]:
    """What of the tensors belongs to one sample; all of it where that cannot be told."""
    rows = []
    for t in _tensors(value):
        if t.ndim == 0:
            continue
        if t.shape[0] == size:
            row = t[index]
        elif t.shape[0] and t.shape[0] % size == 0:  # [B * T, ...]
            row = t.unflatten(0, (size, -1))[index]
        else:
            row = t[0] if t.shape[0] == 1 else t
        rows.append(row.detach().clone())
    return rows


def _remedy(module: nn.Module) -> str:
    kind = type(module).__name__.lower()
    if isinstance(module, _BatchNorm) or "norm" in kind:
        return "replace it by nn.GroupNorm or nn.LayerNorm, whose statistics are per sample"
    if "quant" in kind or "fp8" in kind or "float8" in kind:
        return "make its scale per sample: amax over all dimensions but the first"
    if "moe" in kind or "rout" in kind or "expert" in kind:
        return "route each sample by itself, without a capacity that the batch shares"
    if "attention" in kind:
        return (
            "choose what is attended to for each sample, as dpflash.patterns.Adaptive does: no "
            "mean over the batch"
        )
    return "make it per sample: reduce over dimensions 1 and up, never over the first"


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _parted(error: Exception) -> tuple[str, str]:
    """What this library's error says, and its way out, which comes last."""
    text = str(error)
    message, _, remedy = text.rpartition(". " if ". " in text else "; ")
    return (message, remedy) if message else (_said(error), "see the message")


def _said(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:200]}"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, 96, initial_indent=indent, subsequent_indent=indent + "  ", break_long_words=False
    )
