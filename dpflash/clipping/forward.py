"""PrivateForward: infers the batch size of a forward, and creates its clipping gates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..isolation.forward_rows import ForwardRows
from ..packing.units import Units
from ..refusal import PrivateRefusal
from .compiling import compiles
from .groups import Group
from .planner import LinearShape
from .row_origin import is_flattened

if TYPE_CHECKING:
    from .gate import Gate

SHARED = (
    "An input [1, ...] counts as shared by all samples only in a call of the model itself, after "
    "a layer whose input was the batch; elsewhere expand it to [B, ...]. If all samples share "
    "several such inputs, call the layer once for each"
)
ALL_ROWS = (
    "If rows are filtered (h[y >= 0]) or routed, keep all rows and give the others weight 0. If "
    "pairs or K views are stacked into the batch (torch.cat([a, b])), stack them in dimension 1, "
    "create them inside the model, or call it twice; if the model is called on a part of the "
    "batch or on one sample at a time, call it once on all rows"
)


def is_recomputing() -> bool:
    """Return whether this forward runs inside a backward, as in activation checkpointing."""
    return torch._C._current_graph_task_id() != -1


@dataclass
class _Call:
    """A call of the model itself.

    Attributes:
        sizes: first dimensions of the tensors that were passed to the model.
        batch_size: batch size found from the input of the first private operation.
        first: name of the module with that operation.
        begins_with_indices: whether the first private operation's input was indices.
        flattened: modules whose input has one row per token, in the order of the samples.
        shared: modules whose input has a single row for all samples, in the order of their calls.
    """

    sizes: frozenset[int]
    batch_size: int | None = None
    first: str = ""
    begins_with_indices: bool = False
    flattened: set[str] = field(default_factory=set)
    shared: dict[str, None] = field(default_factory=dict)


@dataclass
class ForwardState:
    """The state of one forward, which its first private operation creates.

    Attributes:
        batch_size: number of rows.
        gates: the gates, by number of the clipping group.
        handles: the handles of each gate, see `Gate`.
        used: how often each module ran.
        shared: modules whose input has a single row for all samples.
        flattened: see `_Call`; set at the end of the call.
        shapes: shapes of the calls that use each matrix parameter, by group and position.
        is_over: whether the next private operation begins a new forward.
        is_past_calls: whether a private operation ran outside a call of the model.
    """

    batch_size: int | None = None
    gates: dict[int, Gate] = field(default_factory=dict)
    handles: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)
    flattened: set[str] = field(default_factory=set)
    shapes: dict[int, dict[int, list[LinearShape]]] = field(default_factory=dict)
    is_over: bool = True
    is_past_calls: bool = False


def _explain_expanded(error: RuntimeError, call: _Call) -> None:
    """Append a possible cause to an error that the model's own code raised.

    The error stays a RuntimeError, since it may depend on private data.
    """
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    where = "" if traceback is None else str(traceback.tb_frame.f_globals.get("__name__"))
    # Only plain RuntimeErrors: errors such as running out of memory have other classes.
    if not call.shared or type(error) is not RuntimeError or where.startswith("dpflash."):
        return
    names = ", ".join(f"'{name}'" for name in list(call.shared)[-3:])
    error.args = (
        f"{error}\nThe input [1, ...] of {names} is shared by all samples of a batch, and the "
        "output has a copy [B, ...] for each of them, since gradients are per sample. If code "
        "that expects [1, ...] fails on it, freeze the module with requires_grad_(False), or "
        "leave it out of LoRA's target_modules. Indices [n] of an embedding count as positions "
        "that samples share: pass each sample's own indices as [B, T], not flattened. "
        f"{ALL_ROWS}",
    )


def refuse_anomaly_mode() -> None:
    """Refuse autograd's anomaly mode, which raises on a NaN gradient.

    Raises:
        RuntimeError: anomaly mode is on and checks for NaN.
    """
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        raise RuntimeError(
            "torch.autograd.set_detect_anomaly(True): one sample with a NaN gradient would end "
            "training; here it contributes zero. Leave it out (Lightning: detect_anomaly=False), "
            "or pass set_detect_anomaly(True, check_nan=False)"
        )


def refuse_for_memory(error: RuntimeError, rows: int | None) -> None:
    """If memory ran out, raise an error with the microbatch's rows and how to limit them.

    Args:
        error: the error of a forward or a backward.
        rows: number of rows of the loader's microbatch; None if there is none.

    Raises:
        torch.OutOfMemoryError: memory ran out.
    """
    text = str(error)
    ran_out = isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in text
    if rows is None or not ran_out or "physical_batch_size" in text:
        return
    # The frames of the error reference the tensors that filled the memory.
    error.__traceback__ = None
    raise torch.OutOfMemoryError(
        f"{text}\nA microbatch has {rows} rows. Pass make_private(physical_batch_size=), such as "
        f"{max(1, rows // 4)}: logical batches, noise and epsilon stay the same"
    ) from None


class PrivateForward:
    """Infers the batch size of each forward of a private model, and creates its gates.

    Args:
        groups: the clipping groups.
        open_gate: creates the gate of a group, see `Gate`.

    Attributes:
        batch_hint: rows of the loader's last microbatch; None if there is none.
        units: the units of that microbatch, if its rows are not the samples.
        rows: records the inputs of the layers; None if nothing is recorded.
        is_compiled: whether the library's own torch.compile compiled the model.
        misfit: message on the first layer input without B rows in the last call, or "".
        state: the state of the current forward, or of the last forward if it is over.
        number: number of the current forward.
        prepared_handles: handles for a compiled model, by group; empty if none were prepared.
    """

    def __init__(self, groups: Sequence[Group], open_gate: Callable[..., Gate]):
        self.batch_hint: int | None = None
        self.units: Units | None = None
        self.rows: ForwardRows | None = None
        self.is_compiled = False
        self.misfit = ""
        self._groups = groups
        self._open_gate = open_gate
        self.state = ForwardState()
        self._call: _Call | None = None
        self.prepared_handles: list[tuple[Tensor, ...]] = []
        self.number = 0

    def finish(self) -> None:
        """End the forward: the next private operation begins a new one."""
        self.state.is_over = True

    # Calls of the model

    @contextmanager
    def call(self, sizes: frozenset[int]) -> Iterator[bool]:
        """Enclose a call of the model itself; `sizes` are the first dimensions of its tensors.

        The batch size is inferred anew in each call. Yield True for the outermost call of a
        forward, and False for a call inside the model's forward or in a recomputation.
        """
        if self._call is not None or is_recomputing():
            yield False
            return
        self._call, self.misfit = _Call(sizes), ""
        try:
            yield True
        except RuntimeError as error:
            refuse_for_memory(error, self.batch_hint)
            _explain_expanded(error, self._call)
            raise
        finally:
            # A call under no_grad does not end the previous forward.
            if torch.is_grad_enabled():
                self.state.flattened = self._call.flattened
            self._call = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run another forward in the body; the state of the current forward does not change."""
        held = self.state, self._call
        self.state, self._call = ForwardState(), None
        try:
            yield
        finally:
            self._close_gates()
            self.state, self._call = held

    def record(self, rows: ForwardRows | None) -> None:
        """From now on, record the inputs of the layers in `rows`; None stops recording."""
        self.rows = rows

    def set_compiled(self) -> None:
        """Note that the library's own torch.compile compiles the model."""
        self.is_compiled = True

    def batch_size_for(self, x: Tensor, name: str) -> int:
        """Return the batch size B of the forward in which x is the input of module `name`.

        B is the first dimension of x, with two exceptions: x may have a single row for all
        samples, or one row per token, in the order of the samples (see `is_flattened`).

        Raises:
            PrivateRefusal: x has a single row, which may be one sample.
        """
        leading, call, state = x.shape[0], self._call, self.state
        are_indices = not (x.is_floating_point() or x.is_complex())
        if is_recomputing():
            known = state.batch_size
            shared = leading == 1 and name in state.shared and known is not None
            flattened = name in state.flattened and known and leading % known == 0
            return known if shared or flattened else leading  # type: ignore[return-value]
        # If a layer is called by itself, its input may be a single sample.
        if call is None:
            return leading
        if call.batch_size is None:
            call.batch_size, call.first = self._first_batch_size(x, call), name
            call.begins_with_indices = are_indices
        size = call.batch_size
        if leading != size and is_flattened(x, size):
            call.flattened.add(name)
            return size
        if leading != size and (leading != 1 or size == 1):
            is_first_odd = call.begins_with_indices and size not in call.sizes
            if size == 1:
                why = (
                    f"the first, '{call.first}', got [1, ...]: pass an input that all samples "
                    "share, such as positions, as x.expand(B, ...), or freeze the module with "
                    "requires_grad_(False)"
                )
            elif is_first_odd or are_indices:
                owner = call.first if is_first_odd else name
                why = (
                    f"if all samples share the indices of '{owner}', such as relative positions "
                    "[T, T], pass indices.expand(B, *indices.shape)"
                )
            else:
                why = (
                    "an input with one row per token is accepted only if autograd's graph shows "
                    "that it is [B, ...] flattened, samples first"
                )
            self.misfit = self.misfit or (
                f"module '{name}' got another first dimension than layers before it; {why}. "
            )
        if leading != 1 or size == 1:
            return leading
        if not x.requires_grad and size in call.sizes:
            state.shared.add(name)
            call.shared[name] = None
            return size
        raise PrivateRefusal(
            f"input of module '{name}' is [1, ...] after others with more entries in the first "
            "dimension, and may be one sample or a sum over samples: it depends on layers that "
            "are trained, or no tensor that the model got has as many entries. Give each layer "
            f"inputs whose first dimension is the batch. {ALL_ROWS}. Pass an input that does not "
            "depend on the data as x.expand(B, ...)",
            shape=tuple(x.shape),
            batch_size=size,
        ) from None

    def _first_batch_size(self, x: Tensor, call: _Call) -> int:
        """Return B for the input x of a call's first layer."""
        leading = x.shape[0]
        if leading in call.sizes:
            return leading
        given = [n for n in call.sizes if is_flattened(x, n)]
        return given[0] if len(given) == 1 else leading

    def known_batch_size(self) -> int | None:
        """Return B of the call, or None if no operation has determined B yet."""
        if torch.compiler.is_compiling():
            return self.batch_hint
        if is_recomputing():
            return self.state.batch_size
        return None if self._call is None else self._call.batch_size

    def has_samples_in(self, x: Tensor) -> bool:
        """Return whether x has one entry per sample, unlike positions [T] that samples share."""
        units, leading = self.units, x.shape[0] if x.ndim else 0
        if leading > 1 and x.stride(0) == 0:  # arange(T).expand(B, T)
            return False
        if leading == (self.batch_hint if units is None else units.positions):
            return True
        if units is not None and not units.are_rows:
            return tuple(x.shape[:2]) == units.shape
        return x.ndim > 1 and leading > 1

    @property
    def call_sizes(self) -> frozenset[int] | None:
        """First dimensions of the tensors that were passed to the model; None outside its call."""
        return None if self._call is None else self._call.sizes

    # Gates

    def gate(self, group: int, batch_size: int, name: str) -> Gate:
        """Return the group's gate for an operation of module `name`; begin a forward if needed."""
        recomputing = is_recomputing()
        samples = batch_size
        if self.units is not None:
            batch_size, samples = self.units.shape[0], self.units.size
        if recomputing:
            if name not in self.state.used:
                raise RuntimeError(
                    f"module '{name}' ran its first differentiable forward inside a backward, as "
                    "reentrant activation checkpointing does; clipping would then see a part of "
                    "the gradient. Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
                )
        elif self.state.is_over or batch_size != self.state.batch_size:
            self._close_gates()
            self.number += 1
            self.state = ForwardState(batch_size, is_over=False)
        state = self.state
        if not recomputing:
            state.used[name] = state.used.get(name, 0) + 1
            state.is_past_calls |= self._call is None
        gate = state.gates.get(group)
        if gate is None:
            gate = self._new_gate(group, samples)
            state.gates[group], state.handles[group] = gate, gate.open()
            state.shapes[group] = gate.shapes
        return gate

    def _new_gate(self, group: int, samples: int) -> Gate:
        of_group = self._groups[group], group, samples
        return self._open_gate(*of_group, generation=self.number, units=self.units)

    # Captured calls, see `dpflash.optimize.captured`

    @contextmanager
    def gates_with(self, open_gate: Callable[..., Gate]) -> Iterator[None]:
        """In the body, create gates with another function."""
        held, self._open_gate = self._open_gate, open_gate
        try:
            yield
        finally:
            self._open_gate = held

    def replay(self, gate: Gate, handles: tuple[Tensor, ...], captured: ForwardState) -> None:
        """Begin a forward that a CUDA graph replays; `gate` replaces the gates of all layers."""
        self._close_gates()
        self.number += 1
        self.state = replace(captured, gates={gate.index: gate}, handles={gate.index: handles})
        self.finish()
        if self._call is not None:
            self._call.batch_size = captured.batch_size

    # Handles for torch.compile

    def begin_microbatch(self, samples: int, units: Units | None = None) -> None:
        """Note that the loader yields a microbatch of this number of samples (rows or units)."""
        self.batch_hint = samples
        self.units = units
        self.finish()
        if compiles(self):
            self.prepare(samples)

    def prepare(self, batch_size: int) -> None:
        """Create the handles that a compiled model reads. An eager model creates its own."""
        self.number += 1
        # The loop may fetch a batch under no_grad and then train on it.
        with torch.inference_mode(False):
            self.prepared_handles = [
                self._new_gate(group, batch_size).open() for group in range(len(self._groups))
            ]

    def prepared(self, group: int) -> tuple[Tensor, ...]:
        """Return one group's handles for a compiled model."""
        if not self.prepared_handles:
            raise RuntimeError(
                "a compiled private model needs its gradient handles before the call: iterate "
                "over the loader that make_private returned, or call engine.prepare(batch_size)"
            )
        return self.prepared_handles[group]

    def end_batch(self, *, parameters_change: bool) -> None:
        """Note that the logical batch was dropped, or that the parameters are about to change."""
        self._close_gates()
        self.finish()
        if parameters_change:
            self.batch_hint = None
            self.units = None
            # Handles are views of the old parameters.
            self.prepared_handles = []

    def _close_gates(self) -> None:
        for gate in self.state.gates.values():
            gate.reset()
        self.state.gates, self.state.handles = {}, {}
