"""Planner: chooses how the flat-clipped gradient of each matrix parameter is computed.

instantiate    keeps G_i = dy_i^T x_i (no extra product); computes sum_i c_i G_i at the end.
book_keeping   keeps (x, dy); takes norms without keeping G_i, then one weighted product.
ghost          takes norms in one backward, then runs the backward of sum_i c_i loss_i.

Each mode runs a list of kernels. On a device with given peak speeds, a kernel is assumed to take
max(FLOPs / peak FLOP/s, bytes / bandwidth) (a roofline), plus the time of its launch; a mode takes
the sum over its kernels. The choice depends on these times alone, and so on shapes, the device and
public sizes, never on the number of sampled samples. Each mode bounds every sample. Results differ
by rounding. Near fp32's maximum, a gradient may overflow (and be removed) in one mode only.

Letters: B samples, T tokens, I inputs, O outputs of a linear layer; V rows and E width of a table;
G_i per-sample gradient and c_i clipping factor of sample i.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from dpflash.kernels.reference import norm_costs

from .device_speed import CPU_RULE, Ceilings

GRAD_SAMPLE_MODES = ("instantiate", "book_keeping", "ghost")

# The values of `make_private(optimize=)`, see `optimization`.
LEVELS = ("none", "conservative", "balanced", "aggressive")
DEFAULT_LEVEL = "conservative"

_ELEMENT = 4
_DOUBLE = 8
# Number of small kernels per saved pair (x, dy): they find samples to multiply separately.
_LAUNCHES_OF_PAIRS = 36


@dataclass(frozen=True)
class Work:
    """The work of kernels: FLOPs of products in a dtype, and bytes that they read and write."""

    flops: int = 0
    moved: int = 0
    dtype: str = "float32"
    launches: int = 1

    def seconds(self, ceilings: Ceilings) -> float:
        """Return the time by the roofline plus the time of the launches."""
        roof = max(self.flops / ceilings.rate(self.dtype), self.moved / ceilings.bandwidth)
        return roof + self.launches * ceilings.launch


@dataclass(frozen=True)
class LinearShape:
    """The shape of one operation on a matrix parameter: B samples, T tokens, I inputs, O outputs.

    Kernels are assumed to read each operand once and write each result once, without caches. Work
    that all modes share (the product for dx) and work that is done once per batch (such as writing
    the sum [O, I]) are not counted. So all costs except launches are proportional to B.
    """

    batch: int
    tokens: int
    inputs: int
    outputs: int
    dtype: torch.dtype = torch.float32

    @property
    def stored_bytes(self) -> int:
        """Bytes of G [B, O, I] in fp32 or wider."""
        return self.batch * self.inputs * self.outputs * max(_ELEMENT, self.dtype.itemsize)

    @property
    def book_keeping_bytes(self) -> int:
        """Bytes of (x, dy), in their own dtype."""
        return self.batch * self.tokens * (self.inputs + self.outputs) * self.dtype.itemsize

    def norm_form(self, gpu: bool) -> str:
        """Return how `dpflash.kernels.grad_norm` computes ||G_i||: "gram" or "tile"."""
        costs = self._norm_costs(gpu)
        return min(costs, key=costs.__getitem__)

    def norm_flops(self, gpu: bool) -> int:
        """Return the FLOPs of `dpflash.kernels.grad_norm`; fp64 products count twice."""
        return self.batch * self.tokens * min(self._norm_costs(gpu).values())

    def plain(self) -> list[Work]:
        """Return the work of the weight gradient in a non-private backward."""
        return [Work(self._product, self._operands, _name(self.dtype))]

    def gradient(self, gpu: bool) -> list[Work]:
        """Return the work of computing and writing G."""
        return [Work(self._product, self._operands + self.stored_bytes, self._kernel(gpu))]

    def norm(self, gpu: bool) -> list[Work]:
        """Return the work to compute norms, and magnitudes of their terms, from (x, dy)."""
        product = Work(self.norm_flops(gpu), self._operands, self._kernel(gpu))
        return [Work(moved=self._operands), product]

    def weighted(self, gpu: bool) -> list[Work]:
        """Return the work of sum_i c_i G_i, computed from (x, dy)."""
        product = Work(self._product, self._operands, self._kernel(gpu))
        if self._fused(gpu):
            return [product]
        scaled = self.batch * self.tokens * self.outputs * max(_ELEMENT, self.dtype.itemsize)
        return [Work(moved=2 * scaled), product]

    def again(self) -> list[Work]:
        """Return the work of another backward through the layer, which computes dx."""
        return [Work(self._product, self._operands, _name(self.dtype))]

    @property
    def _product(self) -> int:
        return 2 * self.batch * self.tokens * self.inputs * self.outputs

    @property
    def _operands(self) -> int:
        return self.batch * self.tokens * (self.inputs + self.outputs) * self.dtype.itemsize

    def _fused(self, gpu: bool) -> bool:
        """Return whether the Triton kernels run; they do not support fp64."""
        return gpu and self.dtype != torch.float64

    def _kernel(self, gpu: bool) -> str:
        return _kernel_dtype(self.dtype, gpu)

    def _norm_costs(self, gpu: bool) -> dict[str, int]:
        return norm_costs(self.tokens, self.inputs, self.outputs, fused=self._fused(gpu))


@dataclass(frozen=True)
class EmbeddingShape(LinearShape):
    """The shape of a look-up: T tokens per sample in a table of O rows and width I."""

    @property
    def book_keeping_bytes(self) -> int:
        """Bytes of (indices, dy)."""
        return self._operands + self.batch * self.tokens * _DOUBLE

    def norm_form(self, gpu: bool) -> str:
        return "rows"

    def norm_flops(self, gpu: bool) -> int:
        return 0

    def norm(self, gpu: bool) -> list[Work]:
        """Return the work of magnitudes (fp64 copy) and of norms (copy and sum if no Triton)."""
        double = self.batch * self.tokens * self.inputs * _DOUBLE
        summed = 0 if self._fused(gpu) else 5 * double
        return [Work(moved=self._operands + 2 * double), Work(moved=self._operands + summed)]

    def gradient(self, gpu: bool) -> list[Work]:
        """Count writing zeros, and reading, adding to and writing the looked-up rows."""
        return [Work(moved=self.stored_bytes + 3 * self._operands)]

    def again(self) -> list[Work]:
        """Return no work: a look-up has no dx."""
        return []

    @property
    def _product(self) -> int:
        return 0

    @property
    def _operands(self) -> int:
        return self.batch * self.tokens * self.inputs * self.dtype.itemsize


@dataclass(frozen=True)
class HeadShape(LinearShape):
    """A linear head with O classes and chunked cross-entropy; its backward recomputes logits.

    The backward computes dlogits for dx. The weight gradient uses the same dlogits, so `plain` and
    `gradient` do not count them.
    """

    @property
    def book_keeping_bytes(self) -> int:
        """Bytes of x, the only tensor that is kept."""
        return self.batch * self.tokens * self.inputs * self.dtype.itemsize

    def norm_form(self, gpu: bool) -> str:
        return "tile"

    def norm_flops(self, gpu: bool) -> int:
        """Count recomputing the logits, and then G_i tile by tile."""
        return 2 * self._product

    def norm(self, gpu: bool) -> list[Work]:
        """Count computing all tiles of G_i, each of which is read once."""
        return [*self._dlogits(), *self.gradient(gpu), Work(moved=self.stored_bytes)]

    weighted = norm

    def again(self) -> list[Work]:
        return [*self._dlogits(), *super().again()]

    @property
    def _operands(self) -> int:
        return self.book_keeping_bytes + self._logits

    @property
    def _logits(self) -> int:
        return self.batch * self.tokens * self.outputs * max(_ELEMENT, self.dtype.itemsize)

    def _dlogits(self) -> list[Work]:
        """Return the work of dlogits: a product, then three element-wise operations."""
        product = Work(self._product, self._operands, _name(self.dtype))
        return [product, Work(moved=6 * self._logits)]

    def _kernel(self, gpu: bool) -> str:
        """Return the dtype of products with dlogits, which are at least fp32."""
        return _kernel_dtype(torch.promote_types(self.dtype, torch.float32), gpu)


@dataclass(frozen=True)
class ExpertsShape(LinearShape):
    """The shape of a projection by experts: T pairs (token, expert) per sample.

    If G [B, experts, O, I] is not kept, it is computed twice, one sample and expert at a time: for
    the norm and for the sum.
    """

    experts: int = 1

    @property
    def stored_bytes(self) -> int:
        return self.experts * super().stored_bytes

    def norm_form(self, gpu: bool) -> str:
        return "tile"

    def norm_flops(self, gpu: bool) -> int:
        return self._product

    def norm(self, gpu: bool) -> list[Work]:
        """Count writing and reading the G of each (sample, expert)."""
        most = super().stored_bytes * min(self.tokens, self.experts)
        return [Work(self._product, self._operands + 2 * most, self._kernel(gpu))]

    weighted = norm


@dataclass(frozen=True)
class Cost:
    """The cost of a mode for one parameter.

    Attributes:
        flops: FLOPs in addition to a non-private backward; fp64 products count twice.
        moved: bytes read and written in addition to a non-private backward.
        kept: bytes that are kept until the gradients are clipped.
        seconds: predicted time of all kernels of the mode, including the ordinary product.
    """

    flops: int
    moved: int
    kept: int
    seconds: float


@dataclass(frozen=True)
class Plan:
    """The chosen mode of each parameter, in the order in which shapes were passed to the planner.

    `is_limited` is True if the faster modes would exceed the memory budget.
    """

    modes: tuple[str, ...]
    is_limited: bool = False

    @property
    def is_ghost(self) -> bool:
        return "ghost" in self.modes


def clipping_for(level: str, clipping: str | None, mode: str) -> str:
    """Return the requested clipping, or else the clipping of the optimization level.

    Modes exist for flat clipping only, so a requested mode implies flat clipping.
    """
    if clipping is not None:
        return clipping
    return "per_layer" if level == "aggressive" and mode == "auto" else "flat"


_UNKNOWN_MEMORY = 8 * 2**30


def default_memory_budget(device: torch.device) -> int:
    """Return a quarter of the device's memory, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory) // 4
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return _UNKNOWN_MEMORY // 4  # on Windows
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


def cost(shapes: Sequence[LinearShape], mode: str, ceilings: Ceilings) -> Cost:
    """Return the cost of a mode for a parameter with operations of these shapes."""
    gpu = ceilings.device != "cpu"
    works = _stored(shapes, gpu) if mode == "instantiate" else _book_kept(shapes, gpu)
    if mode == "ghost":
        works += [work for shape in shapes for work in shape.again()]
    plain = [work for s in shapes for work in s.plain()]
    return Cost(
        flops=sum(w.flops for w in works) - sum(w.flops for w in plain),
        moved=sum(w.moved for w in works) - sum(w.moved for w in plain),
        kept=_kept(shapes, mode),
        seconds=sum(w.seconds(ceilings) for w in works),
    )


def _least(by_way: dict[str, float]) -> str:
    return min(by_way, key=by_way.__getitem__)


def _kept(shapes: Sequence[LinearShape], mode: str) -> int:
    if mode == "ghost":
        return 0
    if mode == "instantiate":
        return max(shape.stored_bytes for shape in shapes)
    return sum(shape.book_keeping_bytes for shape in shapes)


def _stored(shapes: Sequence[LinearShape], gpu: bool) -> list[Work]:
    """Return the work of `instantiate`: compute G of each operation, add, read the sum twice."""
    size = max(s.stored_bytes for s in shapes)
    works = [work for s in shapes for work in s.gradient(gpu)]
    works += [Work(moved=3 * size)] * (len(shapes) - 1)
    return [*works, Work(moved=size), Work(moved=size)]


def _book_kept(shapes: Sequence[LinearShape], gpu: bool) -> list[Work]:
    """Return the work of `book_keeping`: one product per type of operation, and cross terms."""
    joined: dict[type[LinearShape], LinearShape] = {}
    works = [Work(launches=_LAUNCHES_OF_PAIRS)]
    for shape in shapes:
        before = joined.get(type(shape))
        tokens = shape.tokens + (before.tokens if before else 0)
        joined[type(shape)] = replace(shape, tokens=tokens)
    if len(joined) < len(shapes):
        works.append(Work(moved=2 * sum(s.book_keeping_bytes for s in shapes)))
    for shape in joined.values():
        works += [*shape.norm(gpu), *shape.weighted(gpu)]
    look_up = joined.pop(EmbeddingShape, None)
    if look_up is not None:
        works += [work for other in joined.values() for work in _inner(look_up, other)]
    return works


def _inner(look_up: LinearShape, other: LinearShape) -> list[Work]:
    """Return the work of <G_i, H_i> between a look-up and another operation on its table."""
    if isinstance(other, HeadShape):
        # The look-up's rows are added to each tile, once for the norm and once for the sum.
        return [Work(moved=6 * look_up.stored_bytes)]
    pairs = look_up.tokens * other.tokens
    flops = 2 * 2 * look_up.batch * pairs * look_up.inputs
    moved = look_up.batch * (2 * other.tokens * other.outputs + 3 * pairs) * _DOUBLE
    return [Work(flops, moved)]


def _kernel_dtype(dtype: torch.dtype, gpu: bool) -> str:
    """Return the dtype in which `dpflash.kernels` multiplies: fp32 or wider without Triton."""
    if dtype == torch.float64 or not gpu:
        return "float64" if dtype == torch.float64 else "float32"
    return "tf32x3" if dtype == torch.float32 else _name(dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass
class Planner:
    """Plans the modes of the matrix parameters of one model.

    Each parameter uses the faster of instantiate and book_keeping. If the parameters together keep
    more bytes than the budget, parameters change to the mode that keeps fewer bytes, beginning
    with the largest savings, until the budget suffices. If the budget never suffices and ghost is
    allowed, all parameters use ghost.

    Guarantees:
        The modes do not depend on the number of samples in a forward. Near the end of the
        floating-point range the results of modes differ, so a mode that depended on the number
        would let one sample change the contributions of other samples.

    Attributes:
        mode: "auto", or one of GRAD_SAMPLE_MODES for all parameters.
        memory_budget: bytes that kept gradients or activations may take together.
        batch_size: the public number of samples for which costs are computed and the budget must
            suffice. The number of sampled samples is not used, so that a sample's presence does
            not change how other samples are clipped.
        ghost_allowed: whether per-sample losses are available and clipping is flat.
        book_keeping_allowed: whether norms may be computed without per-sample gradients.
        ceilings: speed of the device that computes.
    """

    mode: str
    memory_budget: int
    batch_size: int
    ghost_allowed: bool
    book_keeping_allowed: bool = True
    ceilings: Ceilings = CPU_RULE
    # A cache, since each gate calls `plan` in every step, and models have few shapes.
    _faster: dict[tuple[LinearShape, ...], str] = field(default_factory=dict, repr=False)

    def plan(self, uses: Mapping[int, Sequence[LinearShape]]) -> Plan:
        """Return a mode for each parameter, given the shapes of its operations in a forward.

        "ghost" is chosen for all parameters or for none. Equal arguments give equal plans.
        """
        if self.mode != "auto":
            return Plan((self.mode,) * len(uses))
        choices = GRAD_SAMPLE_MODES[:2] if self.book_keeping_allowed else ("instantiate",)
        size = self.batch_size
        planned = [tuple(replace(s, batch=size) for s in shapes) for shapes in uses.values()]
        for shapes in planned:
            if shapes not in self._faster:
                seconds = {mode: cost(shapes, mode, self.ceilings).seconds for mode in choices}
                self._faster[shapes] = _least(seconds)
        modes = tuple(self._faster[shapes] for shapes in planned)
        over = sum(map(_kept, planned, modes)) - self.memory_budget
        return Plan(modes) if over <= 0 else self._within_budget(planned, modes, choices, over)

    def _within_budget(
        self,
        planned: Sequence[tuple[LinearShape, ...]],
        modes: Sequence[str],
        choices: Sequence[str],
        over: int,
    ) -> Plan:
        """Return the plan for a budget that the faster modes exceed by `over` bytes."""
        least = [_least({m: _kept(shapes, m) for m in choices}) for shapes in planned]
        saved = [_kept(s, a) - _kept(s, b) for s, a, b in zip(planned, modes, least, strict=True)]
        found = list(modes)
        for number in sorted(range(len(planned)), key=saved.__getitem__, reverse=True):
            if over > 0:
                found[number], over = least[number], over - saved[number]
        if over > 0 and self.ghost_allowed:
            found = ["ghost"] * len(planned)
        return Plan(tuple(found), is_limited=True)

    @property
    def may_be_ghost(self) -> bool:
        """Whether a plan may use ghost, which needs two backwards with equal results."""
        return self.mode == "ghost" or (self.mode == "auto" and self.ghost_allowed)

    def avoid_ghost(self) -> None:
        """Stop choosing "ghost", because two backwards of this model differ."""
        self.ghost_allowed = self.ghost_allowed and self.mode != "auto"


# A planner that stores the per-sample gradients of all parameters.
STORED = Planner("instantiate", memory_budget=1, batch_size=1, ghost_allowed=False)
