"""One sample moves the clipped sums by at most max_grad_norm, in integers and with no tolerance.

Sums before noise are float64 multiples of the public grid, so both sides of the inequality are
integers. A batch without a sample has the same slots, one of them empty. What has its sums in
floating point ("book_keeping", "ghost") gets the tolerance of its rounding, and nothing else.

`DPFLASH_FULL=1` runs 1,000 cases instead of 25. A case is a model, dtype, clipping, bound, batch
with huge, zero and non-finite losses, and a cut into 1 to 3 microbatches; each sample is left out
in turn.
"""

import math
import os
from dataclasses import dataclass
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from torch import nn

import dpflash

FULL = os.environ.get("DPFLASH_FULL") == "1"
# Shrinking a case of ten private runs takes minutes, and cases are small as they are.
settings = hypothesis.settings(
    max_examples=1000 if FULL else 25,
    derandomize=True,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=list(hypothesis.HealthCheck),
)

ROUNDED_MODES = ("book_keeping", "ghost")
KINDS = (
    {"grad_sample_mode": "instantiate"},
    {"clipping": "per_layer"},
    *({"grad_sample_mode": mode} for mode in ROUNDED_MODES),
)
# A float32 sum of up to 6 samples, whose parts round by 2^-24 each.
ROUNDED_SLACK = 2.0**-18
SCALES = (0.0, 1.0, 1.0, -3.0, 1e-30, 1e-6, 1e6, 1e30, math.nan, math.inf)
WIDTH, ROWS = 6, 11


class Attention(nn.Module):
    """An embedding, self-attention, and a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(ROWS, 8)
        self.attention = dpflash.nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, ROWS)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x + self.attention(x, is_causal=True)[0])


class Convolution(nn.Module):
    """A layer of the generic rule."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, 4, 3, padding=1)

    def forward(self, x):
        return torch.tanh(self.conv(x.transpose(1, 2)))


def bias_only():
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 4))
    for layer in (model[0], model[2]):
        layer.weight.requires_grad_(False)
    return model


def mlp():
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Dropout(0.4), nn.Linear(8, 4))


# Of tokens [B, length], and of float inputs [B, length, WIDTH].
LANGUAGE_MODELS = ("tied", "untied", "attention")
OTHER_MODELS = {"conv": Convolution, "bias": bias_only, "mlp": mlp}
DTYPES = ("fp32", "bf16", "autocast bf16", "autocast fp16")


@dataclass(frozen=True)
class Case:
    """A private run without noise, and its batch.

    Attributes:
        model, dtype: of `LANGUAGE_MODELS` or `OTHER_MODELS`, and of `DTYPES`.
        kind: clipping, and mode.
        bound: max_grad_norm.
        scales: what each sample's loss is multiplied by.
        cuts: where the batch is cut into microbatches.
        length: of each sample.
        seed: of weights, data and dropout.
    """

    model: str
    dtype: str
    kind: dict
    bound: float
    scales: list
    cuts: list
    length: int
    seed: int

    @property
    def slack(self) -> float:
        return ROUNDED_SLACK if self.kind.get("grad_sample_mode") in ROUNDED_MODES else 0.0

    @property
    def microbatches(self) -> list:
        ends = [0, *self.cuts, len(self.scales)]
        return [list(range(a, b)) for a, b in zip(ends, ends[1:], strict=False) if a < b]


@st.composite
def cases(draw):
    size = draw(st.integers(2, 6))
    return Case(
        model=draw(st.sampled_from((*LANGUAGE_MODELS, *OTHER_MODELS))),
        dtype=draw(st.sampled_from(DTYPES)),
        kind=draw(st.sampled_from(KINDS)),
        bound=draw(st.sampled_from([0.01, 0.7, 1.0, 300.0])),
        scales=draw(st.lists(st.sampled_from(SCALES), min_size=size, max_size=size)),
        cuts=sorted(draw(st.lists(st.integers(1, size), max_size=2))),
        length=draw(st.sampled_from([1, 5])),
        seed=draw(st.integers(0, 99)),
    )


class Run:
    """A private model of a case, whose batch goes backward as often as wanted."""

    def __init__(self, private, case, model, x):
        self.case, self.x = case, x
        if case.dtype == "bf16":
            model = model.bfloat16()
            self.x = x.bfloat16() if x.is_floating_point() else x
        self.scales = torch.tensor(case.scales)
        self.engine, self.model, *_ = exact_private(private, model, case)

    def losses(self, rows):
        case, x = self.case, self.x[rows]
        dtype = {"autocast bf16": torch.bfloat16, "autocast fp16": torch.float16}.get(case.dtype)
        # The same masks of dropout each time.
        torch.manual_seed(case.seed)
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            out = self.model(x)
        if not x.is_floating_point():
            losses = dpflash.losses.cross_entropy(out.float(), x.flip(1))
        else:
            losses = out.float().square().flatten(1).sum(1)
        return losses * self.scales[rows]


@pytest.fixture
def run_of(private, tiny_lm):
    """run_of(case): the case's model, private, and its batch."""

    def make(case):
        torch.manual_seed(case.seed)
        shape = (len(case.scales), case.length)
        if case.model in OTHER_MODELS:
            return Run(private, case, OTHER_MODELS[case.model](), torch.randn(*shape, WIDTH))
        tokens = torch.randint(ROWS, shape)
        if case.model == "attention":
            return Run(private, case, Attention(), tokens)
        model = tiny_lm(rows=ROWS, width=WIDTH, tied=case.model == "tied")
        return Run(private, case, model, tokens)

    return make


def exact_private(private, model, case):
    """A private run whose release is exact wherever the mode of clipping can be."""
    exact = "auto" if case.slack else True
    options = {"max_grad_norm": case.bound, "exact": exact, "verify_first_batch": False}
    return private(model, **options, **case.kind)


def clipped_sums(run, sums, absent=None):
    """The sums before noise of the batch, or of the batch without a sample.

    Says what "without" means: the sample's slot is empty, as its gradient is no number.
    """
    for rows in run.case.microbatches:
        present = torch.tensor([row != absent for row in rows])
        run.engine.backward(run.losses(rows) * torch.where(present, 1.0, math.nan))
        run.engine._step.tracker.dropped()  # the next microbatch is no second backward
    found = sums(run.engine, run.model)
    run.engine._step.discard()
    return torch.cat([found[name].double().flatten() for name in sorted(found)]).numpy()


def squared_distance(a, b):
    """||a - b||^2 of float64 numbers, exactly."""
    fractions, exponents = np.frexp(np.stack([a, b]))
    lowest = int(exponents.min()) - 53
    whole = (fractions * 2.0**53).astype(np.int64).tolist()
    shifts = (exponents - 53 - lowest).tolist()
    first, second = (
        [number << shift for number, shift in zip(*row, strict=True)]
        for row in zip(whole, shifts, strict=True)
    )
    square = sum((p - q) ** 2 for p, q in zip(first, second, strict=True))
    return Fraction(square) * Fraction(4) ** lowest


def on_the_grid(values, bound):
    """Whether all are multiples of 2^(floor(log2 bound) - 30)."""
    scaled = values * 2.0 ** (30 - math.floor(math.log2(bound)))
    return bool((scaled == np.rint(scaled)).all())


def test_one_sample_moves_the_sums_by_at_most_the_bound_in_exact_arithmetic(run_of, sums):
    @settings
    @hypothesis.given(cases())
    def check(case):
        run = run_of(case)
        whole = clipped_sums(run, sums)
        assert np.isfinite(whole).all()
        most = (Fraction(case.bound) * (1 + Fraction(case.slack))) ** 2
        for absent in range(len(case.scales)):
            rest = clipped_sums(run, sums, absent)
            assert squared_distance(whole, rest) <= most, (case, absent)
        assert case.slack or on_the_grid(whole, case.bound), case

    check()


def of_kinds(kinds):
    return pytest.mark.parametrize("kind", kinds, ids=lambda kind: next(iter(kind.values())))


@of_kinds(KINDS[:2])
def test_one_of_many_equal_samples_moves_the_sums_by_at_most_the_bound(kind, private, sums):
    """A float32 sum of them rounds the last one too, up or down."""
    torch.manual_seed(0)
    x = torch.randn(1, 12)
    for size in (1000, 2000, 3000, 5000):
        case = Case("linear", "fp32", kind, 1.0, [100.0] * size, [], 1, seed=0)
        run = Run(private, case, nn.Linear(12, 1), x.expand(size, 12))
        moved = squared_distance(clipped_sums(run, sums), clipped_sums(run, sums, absent=0))
        assert moved <= 1, (size, float(moved))


@of_kinds(KINDS)
def test_a_sample_of_huge_loss_moves_the_sums_by_nearly_the_bound(kind, run_of, sums):
    """So a bound that is kept by clipping too much would be seen."""
    case = Case("untied", "fp32", kind, 0.7, [1.0, 1e6, -3.0], [2], 5, seed=1)
    run = run_of(case)
    square = squared_distance(clipped_sums(run, sums), clipped_sums(run, sums, absent=1))
    assert square >= (Fraction(case.bound) * (1 - Fraction(1, 2**16))) ** 2


def test_the_distance_of_sums_is_exact():
    a = np.array([3.0, 2.0**-60, 0.0, -(2.0**40)])
    b = np.array([0.0, 0.0, -4.0, -(2.0**40)])
    assert squared_distance(a, b) == 25 + Fraction(1, 2**120)
    assert squared_distance(a, b) > 25
    assert squared_distance(b, b) == 0


def test_the_grid_is_told_from_its_halves():
    grid = 2.0**-31  # of 0.7
    values = np.array([0.0, grid, -3.0, 5 * grid, 2.0**20])
    assert on_the_grid(values, 0.7) and on_the_grid(2 * values, 1.0)
    assert not on_the_grid(values + grid / 2, 0.7) and not on_the_grid(values, 1.0)
