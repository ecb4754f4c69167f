"""What must always hold for a training run to be private; tests are numbered as the invariants.

1 bounded sensitivity, 2 no influence of batch-mates, 3 a public divisor, empty batches, 4 noise,
5 physical batches, 6 non-finite samples, 8 the sampling accounted for, 9 odd modules and loops,
10 the ledger before the release. (7, equality with a per-sample loop: test_equality.py.)
"""

import contextlib
import copy
import functools
import io
import math
import os
import pickle
import warnings

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash import PrivacyEngine
from dpflash.accounting import Gaussian, ShuffledGaussian
from dpflash.kernels import clip_factors
from dpflash.step import noise as noise_module

try:
    import opacus
    from opacus.utils.batch_memory_manager import BatchMemoryManager
except ImportError:
    opacus = None

GRAD_SAMPLE_MODES = ("instantiate", "book_keeping", "ghost")
KINDS = [{"grad_sample_mode": mode} for mode in GRAD_SAMPLE_MODES] + [{"clipping": "per_layer"}]
every_kind = pytest.mark.parametrize(
    "kind", KINDS, ids=[k.get("grad_sample_mode", k.get("clipping")) for k in KINDS]
)
pytestmark = [
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]
needs_opacus = pytest.mark.skipif(opacus is None, reason="needs Opacus")
FULL = os.environ.get("DPFLASH_FULL") == "1"
few = hypothesis.settings(
    max_examples=40 if FULL else 20,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
# `make test-all`: in three dtypes 200 random and adversarial cases for each clipping.
many = hypothesis.settings(few, max_examples=67 if FULL else 10)

# What rounding a product, a factor and a norm may add to one sample's contribution.
RELATIVE = 1 + 2.0**-20
# What rounding the fp32 sum of up to 6 samples may add to a difference of two sums, in units of C.
# Measured in the cases below: nothing, the largest change is C (1 - 1.5e-7).
SUM_SLACK = 12 * 2.0**-24

SCALES = [0.0, 1.0, 1.0, -3.0, 1e-30, 1e6, 1e30, math.nan, math.inf]


@st.composite
def datasets(draw):
    """(tokens, targets, scales): ragged, with duplicates, huge, zero and non-finite samples."""
    batch = draw(st.integers(2, 6))
    length = draw(st.integers(1, 7))
    row = st.lists(st.integers(0, 10), min_size=length, max_size=length)
    rows = [draw(row) for _ in range(batch)]
    if draw(st.booleans()):
        rows[-1] = rows[0]
    tokens = torch.tensor(rows)
    targets = tokens.flip(1).clone()
    for i in range(batch):
        targets[i, draw(st.integers(0, length)) :] = -100
    scales = torch.tensor([draw(st.sampled_from(SCALES)) for _ in range(batch)])
    return tokens, targets, scales


def flat(parts):
    return torch.cat([p.double().flatten() for p in parts.values()])


@pytest.fixture
def untried(private):
    """`private`, whose loader yields no trials."""
    return functools.partial(private, verify_first_batch=False)


@pytest.fixture
def clipped(private, sums):
    """clipped(model, batch, bound, ...) -> the clipped sum as one float64 vector."""

    def of(model, batch, bound, autocast=False, **kind):
        tokens, targets, scales = batch
        # The proof of the first batch changes no sum (test_proof.py).
        engine, model, _, _ = private(
            copy.deepcopy(model), max_grad_norm=bound, verify_first_batch=False, **kind
        )
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            logits = model(tokens)
        losses = dpflash.losses.cross_entropy(logits, targets) * scales
        engine.backward(losses)
        return flat(sums(engine, model))

    return of


def without(batch, i):
    return tuple(torch.cat([t[:i], t[i + 1 :]]) for t in batch)


def only(batch, i):
    return tuple(t[i : i + 1] for t in batch)


# 1


@every_kind
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "autocast"])
def test_invariant_1_removing_a_sample_changes_the_sum_by_at_most_c(dtype, kind, clipped, tiny_lm):
    autocast = dtype == "autocast"

    @many
    @hypothesis.given(datasets(), st.sampled_from([0.01, 1.0, 300.0]), st.integers(0, 5))
    def check(batch, bound, seed):
        torch.manual_seed(seed)
        model = tiny_lm(tied=seed % 2 == 0)
        model = model.bfloat16() if dtype == "bf16" else model
        whole = clipped(model, batch, bound, autocast=autocast, **kind)
        assert bool(torch.isfinite(whole).all())
        for i in range(batch[0].shape[0]):
            alone = clipped(model, only(batch, i), bound, autocast=autocast, **kind)
            assert float(alone.norm()) <= bound * RELATIVE
            change = float(
                (
                    whole - clipped(model, without(batch, i), bound, autocast=autocast, **kind)
                ).norm()
            )
            assert change <= bound * (RELATIVE + SUM_SLACK)

    check()


class AttentionLM(nn.Module):
    """An embedding, self-attention as one node, and a head."""

    def __init__(self, **options):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = dpflash.nn.MultiheadAttention(8, 2, **options)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x + self.attention(x, is_causal=True)[0])


@every_kind
@pytest.mark.parametrize("dtype", ["fp32", "autocast"])
def test_invariant_1_removing_a_sample_of_attention_changes_the_sum_by_at_most_c(
    dtype, kind, clipped
):
    autocast = dtype == "autocast"

    @few
    @hypothesis.given(datasets(), st.sampled_from([0.01, 1.0, 300.0]), st.integers(0, 5))
    def check(batch, bound, seed):
        torch.manual_seed(seed)
        rotary = seed % 2 == 0
        model = AttentionLM(num_kv_heads=1 + seed % 2, rotary=rotary, attention_sinks=seed > 2)
        whole = clipped(model, batch, bound, autocast=autocast, **kind)
        assert bool(torch.isfinite(whole).all())
        for i in range(batch[0].shape[0]):
            rest = clipped(model, without(batch, i), bound, autocast=autocast, **kind)
            assert float((whole - rest).norm()) <= bound * (RELATIVE + SUM_SLACK)

    check()


@few
@hypothesis.given(
    st.lists(st.floats(0, 1e300, allow_subnormal=False), min_size=1, max_size=5),
    st.floats(1e-8, 1e8),
)
def test_invariant_1_a_factor_times_its_norm_is_at_most_the_bound(norms, bound):
    squares = torch.tensor(norms, dtype=torch.float64).square()
    factors = clip_factors(squares, bound)
    assert factors.dtype == torch.float32
    product = factors.double() * squares.sqrt()
    product[factors == 0] = 0  # a factor of 0 removes the sample, also one of infinite norm
    assert bool((product <= bound).all())


@pytest.mark.parametrize("bound", [1e-3, 1.0, 1e3])
def test_invariant_1_a_factor_of_a_norm_near_the_end_of_fp32_is_at_most_its_part(bound):
    norms = torch.logspace(30, 46, 10_000, dtype=torch.float64)
    factors = clip_factors(norms.square(), bound)
    assert bool((factors.double() * norms <= bound).all())
    assert bool((factors[norms < 8e37 * bound] > 0).all())


@pytest.mark.parametrize("bound", [1e-6, 1.0])
@every_kind
def test_invariant_1_operands_near_the_end_of_fp32_are_clipped_to_the_bound(
    kind, bound, private, sums
):
    plain = nn.Linear(3, 2)
    plain.bias.requires_grad_(False)
    engine, model, _, _ = private(plain, batch_size=1, max_grad_norm=bound, **kind)
    engine.backward(model(torch.tensor([[[1.98e38, 0.0, 0.0]]]))[:, 0, 0] * 1e-7)
    assert float(flat(sums(engine, model)).norm()) <= bound * RELATIVE


@every_kind
def test_invariant_1_an_outlier_among_many_saturates_the_bound_and_no_more(kind, clipped, tiny_lm):
    torch.manual_seed(0)
    model = tiny_lm()
    tokens = torch.randint(11, (1, 9))
    batch = (tokens, tokens.flip(1), torch.tensor([1e6]))
    norm = float(clipped(model, batch, 1.0, **kind).norm())
    assert 1 - 1e-5 <= norm <= RELATIVE


@pytest.mark.parametrize("mode", GRAD_SAMPLE_MODES)
def test_invariant_1_losses_in_another_order_than_the_samples_are_still_clipped(
    mode, private, sums
):
    """Without biases no materialised gradient could show the disorder."""
    torch.manual_seed(0)
    x = torch.randn(4, 3) * torch.tensor([[1e4], [1.0], [1.0], [1e-4]])
    # The proof of the first batch would refuse it.
    options = {"grad_sample_mode": mode, "verify_first_batch": False}
    engine, model, _, _ = private(nn.Linear(3, 2, bias=False), **options)
    engine.backward(model(x).square().mean(1)[[3, 0, 2, 1]])
    assert float(flat(sums(engine, model)).norm()) <= 4 * RELATIVE
    factors = 1 / engine.diagnostics()["per_sample_norms"].clamp(min=1)
    assert bool((factors[[0]] < 1e-6).all())


@pytest.mark.parametrize("mode", GRAD_SAMPLE_MODES)
def test_invariant_1_losses_of_an_earlier_forward_pass_are_clipped_or_refused(mode, private, sums):
    torch.manual_seed(0)
    engine, model, _, _ = private(nn.Linear(3, 2), grad_sample_mode=mode)
    losses = 1e4 * model(torch.randn(4, 3)).square().mean(1)
    model(torch.randn(8, 3))
    model(torch.randn(4, 3))
    try:
        engine.backward(losses)
    except RuntimeError as error:
        assert "forward" in str(error)
    assert float(flat(sums(engine, model)).norm()) <= 4 * RELATIVE


@pytest.mark.parametrize("mode", GRAD_SAMPLE_MODES)
def test_invariant_1_a_sample_whose_huge_tokens_cancel_moves_the_sum_by_at_most_c(
    mode, private, sums
):
    torch.manual_seed(0)
    x = torch.randn(1, 3, 20).repeat(3, 2, 1)
    y = torch.randn(3, 3, 20) * 1e8
    targets = torch.cat([y, -y], 1)
    plain = nn.Linear(20, 20, bias=False)
    nn.init.zeros_(plain.weight)

    def total(keep):
        engine, model, _, _ = private(copy.deepcopy(plain), grad_sample_mode=mode)
        engine.backward(dpflash.losses.mse(model(x[keep]), targets[keep]))
        return flat(sums(engine, model))

    change = float((total([0, 1, 2]) - total([0, 1])).norm())
    assert change <= RELATIVE + SUM_SLACK


def test_invariant_1_a_batch_cut_down_to_one_sample_counts_as_one_sample(untried):
    """Its one row must not be taken for something that the drawn samples share."""
    torch.manual_seed(0)
    engine, model, _, loader = untried(
        nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)), torch.randn(16, 3), batch_size=8
    )
    for (x,) in loader:
        assert len(x) > 1
        with pytest.raises(dpflash.PrivateRefusal, match="another number of entries.*losses.view"):
            engine.backward((model(x[:1]) - x[:1]).square().mean(1))
        break


# 2


@every_kind
def test_invariant_2_a_sample_contributes_the_same_alone_and_in_company(kind, clipped, tiny_lm):
    """Bitwise but for the order of the fp32 sum and the width of matrix products."""

    @few
    @hypothesis.given(datasets(), st.sampled_from([0.01, 1.0, 300.0]))
    def check(batch, bound):
        torch.manual_seed(0)
        model = tiny_lm()
        whole = clipped(model, batch, bound, **kind)
        parts = sum(clipped(model, only(batch, i), bound, **kind) for i in range(len(batch[0])))
        assert float((whole - parts).norm()) <= SUM_SLACK * bound * len(batch[0])

    check()


@every_kind
def test_invariant_2_a_norm_does_not_depend_on_the_batch_mates(kind, private, tiny_lm):
    torch.manual_seed(0)
    plain = tiny_lm()
    tokens = torch.randint(11, (5, 6))

    def norms(rows):
        engine, model, _, _ = private(copy.deepcopy(plain), **kind)
        engine.backward(dpflash.losses.cross_entropy(model(tokens[rows]), tokens[rows].flip(1)))
        return engine.diagnostics()["per_sample_norms"]

    together = norms([0, 1, 2, 3, 4])
    for i in range(5):
        torch.testing.assert_close(norms([i])[0], together[i], rtol=1e-6, atol=0)
        torch.testing.assert_close(norms([4, 3, i])[2], together[i], rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", [1.0, 1e20, 1e30])
def test_invariant_2_a_way_of_clipping_keeps_what_the_others_keep(scale, clipped, tiny_lm):
    """No way takes for infinite what fp32 still holds."""
    torch.manual_seed(0)
    model = tiny_lm()
    tokens = torch.randint(11, (3, 9))
    batch = (tokens, tokens.flip(1), torch.tensor([scale, -scale, 1.0]))
    found = [clipped(model, batch, 1.0, grad_sample_mode=mode) for mode in GRAD_SAMPLE_MODES]
    for other in found[1:]:
        assert float((found[0] - other).norm()) <= 1e-5
    assert float(found[0].norm()) > 0.5


@pytest.mark.parametrize("mode", ["auto", *GRAD_SAMPLE_MODES])
@pytest.mark.parametrize("mate", ["longer", "of gradient zero"])
def test_invariant_2_a_mate_changes_nothing_where_tokens_cancel(mate, mode, private, sums):
    """Whole numbers, so that on any processor the order of a sum does not matter."""
    torch.manual_seed(0)
    if mate == "longer":  # so that another way may be chosen
        x, dy = torch.zeros(2, 512, 256), torch.zeros(2, 512, 256)
        x[0, 0], dy[0, :2] = torch.randn(256).round() * 2**12, torch.randn(256).round() * 2**12
        x[0, 1] = -x[0, 0]
        x[:, 2, 0], dy[:, 2, 0], own = 1, 2, (slice(1), slice(3))
    else:
        x, dy = torch.randint(-(2**12), 2**12, (513, 64, 8)), torch.randint(-9, 10, (513, 64, 8))
        x[:, 32:], dy[:, 32:] = -x[:, :32], dy[:, :32]
        x[0], dy[0, 0, 0], own = 0, 1, (slice(1, None), slice(None))
        x, dy = x.float(), dy.float()

    def total(x, dy):
        engine, model, _, _ = private(
            nn.Linear(x.shape[2], dy.shape[2], bias=False), batch_size=2, grad_sample_mode=mode
        )
        engine.backward((model(x) * dy).sum((1, 2)))
        return flat(sums(engine, model))

    most = 1 + 2.0**-20 if mate == "longer" else 1e-3
    assert float((total(x, dy) - total(x[own], dy[own])).norm()) <= most


@pytest.mark.parametrize("loader_size", [1, 4])
def test_invariant_2_the_number_of_samples_drawn_does_not_choose_the_way(
    private, tiny_lm, loader_size
):
    torch.manual_seed(0)
    chosen = set()
    for drawn in (1, 2, 8):
        tokens = torch.randint(11, (drawn, 9))
        engine, model, _, _ = private(tiny_lm(), batch_size=loader_size, memory_budget=4000)
        engine.backward(dpflash.losses.cross_entropy(model(tokens), tokens))
        chosen.add(tuple(use.grad_sample_mode for use in engine.plan()))
    assert len(chosen) == 1


# 3


@every_kind
def test_invariant_3_the_divisor_is_the_expected_batch_size_not_the_drawn_one(kind, untried):
    torch.manual_seed(0)
    x = torch.randn(40, 3)
    engine, model, optimizer, loader = untried(
        nn.Linear(3, 2), x, batch_size=5, one_part=True, **kind
    )
    sizes = []
    for (batch,) in loader:
        optimizer.zero_grad()
        engine.backward(model(batch).square().mean(1))
        sums = dict(engine._step.sums)
        optimizer.step()
        sizes.append(int(loader.is_real.sum()))
        for parameter in model.parameters():
            torch.testing.assert_close(parameter.grad, sums[parameter].float() / 5)
    assert len(set(sizes)) > 2


@every_kind
def test_invariant_3_empty_batches_get_noise_on_every_parameter_and_count(kind, untried, tiny_lm):
    tokens = torch.randint(11, (200, 5))
    engine, model, optimizer, loader = untried(
        tiny_lm(), tokens, batch_size=1, noise_multiplier=1.0, **kind
    )
    empty = 0
    for (batch,) in loader:
        optimizer.zero_grad()
        engine.backward(dpflash.losses.cross_entropy(model(batch), batch.flip(1)))
        optimizer.step()
        if not loader.is_real.any():
            empty += 1
            assert all(bool((p.grad != 0).all()) for p in model.parameters())
        if optimizer.releases == 31:
            break
    assert empty > 3
    assert engine.accountant.history == [(1.0, 1 / 200, 31)]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_invariant_3_an_empty_batch_of_a_plain_loss_backward_gives_noise_and_no_nan(
    reduction, private
):
    engine, model, optimizer, loader = private(
        nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1)),
        torch.randn(60, 3),
        batch_size=1,
        noise_multiplier=1.0,
        loss_reduction=reduction,
    )
    for (batch,) in loader:
        optimizer.zero_grad()
        getattr(model(batch).square(), reduction)().backward()
        ends = loader.is_last
        optimizer.step()
        assert not ends or all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())
    assert engine.accountant.history == [(1.0, 1 / 60, 60)]


# 4


def noise_of(private, *, steps=20, parts=1, sigma=0.7, bound=3.0, **options):
    """The noise of each step on two matrices, in units of sum; data and gradients are zero."""
    model = nn.Sequential(nn.Linear(32, 40, bias=False), nn.Linear(40, 16, bias=False))
    engine, model, optimizer, loader = private(
        model,
        torch.zeros(16, 32),
        batch_size=16,
        noise_multiplier=sigma,
        max_grad_norm=bound,
        physical_batch_size=16 // parts,
        verify_first_batch=False,
        **options,
    )
    found = []
    while len(found) < steps:
        count = 0
        for (x,) in loader:
            count += 1
            optimizer.zero_grad()
            engine.backward(model(x).square().mean(1))
            optimizer.step()
            if optimizer.releases > len(found):
                found.append([p.grad * 16 for p in model.parameters()])
        assert count == parts
    return engine, found


@pytest.mark.parametrize("parts", [1, 8])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_invariant_4_noise_has_std_sigma_c_whatever_the_number_of_physical_batches(
    clipping, parts, private
):
    engine, found = noise_of(private, parts=parts, clipping=clipping)
    normals = torch.cat([g.flatten() for step in found for g in step]).double() / (0.7 * 3.0)
    count = normals.numel()
    assert abs(float(normals.square().sum()) - count) <= 5 * math.sqrt(2 * count)
    assert abs(float(normals.mean())) <= 5 / math.sqrt(count)
    assert engine.accountant.history == [(0.7, 1.0, 20)]


def test_invariant_4_no_noise_is_shared_between_steps_and_parameters(private):
    _, found = noise_of(private, steps=8)
    # Cut into pieces of one length; any two must be uncorrelated and different.
    pieces = torch.stack([g.flatten()[:640] for step in found for g in step]).double()
    pieces = pieces / pieces.norm(dim=1, keepdim=True)
    correlations = (pieces @ pieces.t()).fill_diagonal_(0).abs()
    assert float(correlations.max()) <= 6 / math.sqrt(640)
    values = torch.cat([g.flatten() for step in found for g in step])
    assert values.unique().numel() > 0.999 * values.numel()


def all_noise(engine, model, optimizer, loader, releases):
    """The bytes of each release's noise, of a model whose gradients are zero."""
    seen = []
    while len(seen) < releases:
        for (x,) in loader:
            optimizer.zero_grad()
            engine.backward(model(x).square().mean(1))
            optimizer.step()
            if loader.is_last:
                seen.append(model.weight.grad.numpy().tobytes())
            if len(seen) == releases:
                break
    return seen


def zero_run(private, **options):
    model = nn.Linear(3, 8, bias=False)
    nn.init.zeros_(model.weight)
    return private(
        model, torch.zeros(16, 3), lr=0.0, noise_multiplier=1.0, seed=options.pop("seed", None),
        **options,
    )  # fmt: skip


def zero_run_of(engine, model):
    """What `make_private` returns for one more model."""
    return engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(torch.zeros(16, 3)), batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        foreign_batches=True,
    )


def test_invariant_4_a_resumed_run_repeats_no_noise_and_equals_the_uninterrupted_one(
    private, tmp_path
):
    def run(releases, path=None, load=False):
        torch.manual_seed(0)
        data = torch.randn(24, 3), torch.randn(24, 2)
        engine, model, optimizer, loader = private(
            nn.Linear(3, 2), *data, noise_multiplier=1.0, physical_batch_size=2
        )
        if load:
            assert engine.load_checkpoint(path) == {"note": 1}
        grads = []
        while optimizer.releases < releases:
            for x, y in loader:
                optimizer.zero_grad()
                before = optimizer.releases
                engine.backward(dpflash.losses.mse(model(x), y))
                optimizer.step()
                if optimizer.releases > before:
                    grads.append(model.weight.grad.clone())
                if optimizer.releases == releases:
                    break
        if path and not load:
            engine.save_checkpoint(path, extra={"note": 1})
        return torch.cat([p.detach().flatten() for p in model.parameters()]), grads, engine

    path = tmp_path / "checkpoint"
    straight, grads, engine = run(11)
    run(4, path)
    resumed, later, second = run(11, path, load=True)
    assert torch.equal(straight, resumed)
    assert len(grads) == 11 and len(later) == 7
    assert all(torch.equal(a, b) for a, b in zip(grads[4:], later, strict=True))
    assert second.accountant.history == engine.accountant.history


def test_invariant_4_two_models_of_one_engine_share_no_noise(private):
    engine, model, optimizer, loader = zero_run(private, seed=0)
    seen = all_noise(engine, model, optimizer, loader, 4)
    seen += all_noise(engine, *zero_run_of(engine, engine.detach(model)), 4)
    assert len(set(seen)) == 8
    assert engine.accountant.history == [(1.0, 0.25, 8)]


def test_invariant_4_an_optimizer_left_over_from_a_detached_model_releases_nothing(private):
    engine, model, left_over, _ = zero_run(private, seed=0)
    engine.detach(model)
    before = [p.detach().clone() for p in model.parameters()]
    other = nn.Linear(3, 8, bias=False)
    zero_run_of(engine, other)
    spent = engine.get_epsilon(1e-5)
    with pytest.raises(RuntimeError, match="was detached, so it releases nothing more"):
        left_over.step()
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert engine.get_epsilon(1e-5) == spent


def test_invariant_4_the_optimizer_that_was_passed_in_cannot_step_past_the_noise(private):
    engine, model, optimizer, _ = private(nn.Linear(3, 2), noise_multiplier=1.0)
    before = model.weight.detach().clone()
    engine.backward(model(torch.randn(4, 3)).square().mean(1))
    with pytest.raises(RuntimeError, match="make_private returned"):
        optimizer.original_optimizer.step()
    assert torch.equal(model.weight, before)
    engine.detach(model)
    optimizer.original_optimizer.step()


@pytest.mark.parametrize("seed", [None, 0])
def test_invariant_4_no_two_branches_from_checkpoints_share_noise_where_a_ledger_is_kept(
    seed, private, tmp_path
):
    """A process that dies after releases which its checkpoint does not know; several times."""
    early, late, ledger = tmp_path / "early", tmp_path / "late", tmp_path / "ledger"
    seen = []

    def process(load, before, save, after):
        run = zero_run(private, ledger=ledger, seed=seed)
        if load:
            run[0].load_checkpoint(load)
        seen.extend(all_noise(*run, before) if before else [])
        if save:
            run[0].save_checkpoint(save)
        seen.extend(all_noise(*run, after) if after else [])
        return run[0]

    process(None, 3, early, 2)
    process(early, 1, late, 1)
    process(late, 0, None, 5)
    engine = process(early, 0, None, 6)
    engine = process(late, 0, None, 6)
    assert len(set(seen)) == len(seen) == 24
    assert engine.accountant.history == [(1.0, 0.25, 24)]


@pytest.mark.parametrize("detached", [False, True])
def test_invariant_4_going_back_within_a_run_without_a_ledger_is_refused(
    detached, private, tmp_path
):
    """What was released since the checkpoint would be forgotten."""
    run = zero_run(private)
    run[0].save_checkpoint(tmp_path / "c")
    run[0].load_checkpoint(tmp_path / "c")
    all_noise(*run, 3)
    epsilon = run[0].get_epsilon(1e-5)
    if detached:
        zero_run_of(run[0], run[0].detach(run[1]))
    with pytest.raises(RuntimeError, match="spent privacy already.*ledger"):
        run[0].load_checkpoint(tmp_path / "c")
    assert run[0].get_epsilon(1e-5) == epsilon


def test_invariant_4_two_engines_without_a_seed_share_no_noise(private):
    seen = [all_noise(*zero_run(private), 2) for _ in range(3)]
    assert len({n for s in seen for n in s}) == 6


def test_invariant_4_parameters_without_a_gradient_get_noise(private):
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x):
            return self.used(x)

    engine, model, optimizer, loader = private(
        Partly(), torch.randn(16, 3), noise_multiplier=1.0, clipping="per_layer"
    )
    for (x,) in loader:
        optimizer.zero_grad()
        engine.backward(model(x).square().mean(1))
        optimizer.step()
        if loader.is_last:
            assert all(bool((p.grad != 0).all()) for p in model.parameters())


# 5


def test_invariant_5_skipped_physical_batches_add_no_noise_and_are_not_accounted(private):
    engine, model, optimizer, loader = private(
        nn.Linear(3, 2),
        torch.randn(32, 3),
        batch_size=16,
        noise_multiplier=1.0,
        physical_batch_size=2,
    )
    skipped = 0
    for (x,) in loader:
        before = [p.detach().clone() for p in model.parameters()]
        history = list(engine.accountant.history)
        releases = optimizer.releases
        optimizer.zero_grad()
        engine.backward(model(x).square().mean(1))
        optimizer.step()
        if optimizer.releases == releases:
            skipped += 1
            assert engine.accountant.history == history
            assert all(map(torch.equal, before, model.parameters()))
    assert skipped > 10
    assert engine.accountant.history == [(1.0, 0.5, 2)]


# 6


@every_kind
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30, "of the loss alone"])
def test_invariant_6_a_non_finite_sample_contributes_zero_and_is_reported(
    value, kind, private, sums, distance
):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    bad = x.clone()
    if value != "of the loss alone":
        bad[2, 1] = value
    found = []
    for batch, scale in ((bad, 1.0), (torch.cat([x[:2], x[3:]]), 1.0)):
        engine, model, _, _ = private(copy.deepcopy(plain), **kind)
        losses = scale * model(batch).square().mean(1)
        if value == 1e30 and len(batch) == 5:
            losses = losses * torch.tensor([1, 1, 1e38, 1, 1]) * torch.tensor([1, 1, 1e38, 1, 1])
        if value == "of the loss alone" and len(batch) == 5:
            losses = losses + torch.tensor([0, 0, math.nan, 0, 0])
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # It would depend on one sample.
            engine.backward(losses)
        found.append(sums(engine, model))
        assert (len(batch) == 5) == (engine.diagnostics()["nonfinite_samples"] > 0)
    assert all(bool(torch.isfinite(g).all()) for g in found[0].values())
    assert distance(found[0], found[1]) <= 1e-6


# 8


def test_invariant_8_without_poisson_sampling_a_pass_costs_one_unamplified_release(private):
    engine, model, optimizer, loader = private(
        nn.Linear(3, 2), torch.randn(32, 3), noise_multiplier=1.3, poisson_sampling=False
    )
    for _ in range(2):
        for (x,) in loader:
            assert len(x) == 4
            optimizer.zero_grad()
            engine.backward(model(x).square().mean(1))
            optimizer.step()
    assert engine.accountant.history == []
    assert engine.accountant.events == [(ShuffledGaussian(noise_multiplier=1.3), 2)]
    assert engine.sampler == "shuffled" and engine.neighboring_relation == "zero_out"
    poisson = dpflash.accounting.create_accountant("rdp")
    for _ in range(16):
        poisson.step(noise_multiplier=1.3, sample_rate=1 / 8)
    assert engine.get_epsilon(1e-5) > poisson.get_epsilon(1e-5)


def test_invariant_8_noise_lowered_within_a_plain_pass_is_paid_for(untried):
    engine, model, optimizer, loader = untried(
        nn.Linear(3, 2), torch.randn(16, 3), noise_multiplier=8.0, poisson_sampling=False
    )
    for (x,) in loader:
        optimizer.zero_grad()
        engine.backward(model(x).square().mean(1))
        optimizer.step()
        optimizer.noise_multiplier /= 2
    least = dpflash.accounting.create_accountant("rdp")
    least.step(noise_multiplier=1.0, sample_rate=1.0)
    assert engine.get_epsilon(1e-5) >= least.get_epsilon(1e-5)


# What a loop may train on behind the release of the loader's batch x.
FOREIGN = {
    "views of each sample": lambda x, data: x.repeat(2, 1),
    "the batch again": lambda x, data: x,
    "a part of it": lambda x, data: x[:3],
    "the next entries of the data": lambda x, data: data[:8],
    "one entry": lambda x, data: data[:1],
    "noise alone": None,
}


@pytest.mark.parametrize("reduction", [None, "mean"])
@pytest.mark.parametrize("kind", [*FOREIGN, "the batch of another model's loader"])
def test_invariant_8_a_batch_that_is_not_of_the_loader_is_refused_before_a_charge(
    kind, reduction, untried
):
    data = torch.randn(32, 3)
    options = {"noise_multiplier": 1.0, "foreign_batches": False, "loss_reduction": reduction}
    first, second = (untried(nn.Linear(3, 2), data, **options) for _ in range(2))

    def step(run, x):
        engine, model, optimizer, _ = run
        optimizer.zero_grad()
        if x is not None:
            losses = model(x).square().mean(1)
            engine.backward(losses) if reduction is None else losses.mean().backward()
        optimizer.step()

    for (x,) in first[3]:
        if kind in FOREIGN:
            step(first, x)
        run = first if kind in FOREIGN else second
        before = (run[0].accountant.history, run[1].weight.detach().clone())
        make = FOREIGN.get(kind, lambda x, data: x)
        refusal = "is not of the private loader.*foreign_b|of another private loader"
        if kind == "noise alone":
            refusal = "with no engine.backward"
        with pytest.raises(RuntimeError, match=refusal):
            step(run, make and make(x, data))
        assert not run[0]._step.sums and not run[0].accountant.events
        assert run[0].accountant.history == before[0] and torch.equal(run[1].weight, before[1])
        if first[3].is_last:
            break


@pytest.mark.parametrize("reduction", [None, "mean"])
@pytest.mark.parametrize("part", [slice(None), slice(0, 3)])
@pytest.mark.parametrize("own_loop", [False, True])
def test_invariant_8_a_batch_of_another_models_loader_is_no_batch_of_ones_own(
    own_loop, part, reduction, untried
):
    """Its padding rows are unknown to the second model, with foreign_batches=True too."""
    torch.manual_seed(0)
    options = {"noise_multiplier": 1.0, "loss_reduction": reduction, "batch_size": 8}
    # A refusal drops the draw, whose other microbatches could not be released alone.
    first, second = (
        untried(nn.Linear(2, 2), torch.randn(32, 2), one_part=own_loop, **options)
        for _ in range(2)
    )
    engine, model, _, loader = second

    @torch.no_grad()
    def read(loader):
        yield from loader

    for (x,), own in zip(read(first[3]), loader if own_loop else range(8), strict=True):
        with pytest.raises(
            (RuntimeError, ValueError), match="another private loader|number of entries"
        ):
            losses = model(x[part]).square().mean(1)
            engine.backward(losses) if reduction is None else losses.mean().backward()
        assert not engine._step.sums
        # Its own, and the first model's outputs on the other's batch without gradients.
        x = own[0] if own_loop else torch.randn(5, 2)
        with torch.no_grad():
            first[1](x)
        losses = model(x).square().mean(1)
        engine.backward(losses) if reduction is None else losses.mean().backward()
        second[2].step(), second[2].zero_grad()
        if second[2].releases == 2:
            break


def test_invariant_8_a_batch_from_elsewhere_is_accounted_without_amplification(private):
    engine, model, optimizer, loader = private(
        nn.Linear(3, 2), torch.randn(32, 3), noise_multiplier=1.0, dataset_size=32
    )
    for (x,) in loader:
        optimizer.zero_grad()
        engine.backward(model(x).square().mean(1))
        optimizer.step()
    assert engine.accountant.history == [(1.0, 0.125, 8)]
    assert engine.neighboring_relation == "add_remove"
    optimizer.zero_grad()
    engine.backward(model(torch.randn(4, 3)).square().mean(1))
    optimizer.step()
    foreign = Gaussian(relation="zero_out", noise_multiplier=1.0)
    assert engine.accountant.history == [(1.0, 0.125, 8)]
    assert engine.accountant.events == [(foreign, 1)]
    assert engine.neighboring_relation == "zero_out"
    # The same batch a second time is no draw either.
    for (x,) in loader:
        optimizer.zero_grad()
        engine.backward(model(x).square().mean(1))
        optimizer.step()
        if loader.is_last:
            optimizer.zero_grad()
            engine.backward(model(x).square().mean(1))
            optimizer.step()
            break
    assert engine.accountant.history == [(1.0, 0.125, 9)]
    assert engine.accountant.events == [(foreign, 2)]


def test_invariant_8_epsilon_is_that_of_the_releases_made_and_infinite_without_noise(private):
    engine, model, optimizer, loader = private(
        nn.Linear(3, 2), torch.randn(32, 3), noise_multiplier=1.1
    )
    assert engine.get_epsilon(1e-5) == 0
    for (x,) in loader:
        optimizer.zero_grad()
        engine.backward(model(x).square().mean(1))
        optimizer.step()
    expected = dpflash.accounting.create_accountant("rdp")
    for _ in range(8):
        expected.step(noise_multiplier=1.1, sample_rate=0.125)
    assert engine.get_epsilon(1e-5) == expected.get_epsilon(1e-5)
    optimizer.noise_multiplier = 0.0
    for (x,) in loader:
        optimizer.zero_grad()
        engine.backward(model(x).square().mean(1))
        optimizer.step()
        if loader.is_last:
            break
    assert engine.get_epsilon(1e-5) == math.inf


# 9


@every_kind
def test_invariant_9_frozen_parameters_neither_move_nor_count(kind, private, sums, oracle):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    x = torch.randn(16, 3)

    def loss(m, x):
        return 50 * m(x).square().mean(1)

    reference = oracle(model, loss, x)
    before = copy.deepcopy(model.state_dict())
    engine, model, optimizer, _ = private(model, noise_multiplier=1e-3, **kind)
    engine.backward(loss(model, x))
    if "grad_sample_mode" in kind:
        norms = engine.diagnostics()["per_sample_norms"]
        torch.testing.assert_close(
            norms, torch.tensor(reference.norms()).double(), rtol=1e-5, atol=0
        )
    optimizer.step()
    for name, value in model.state_dict().items():
        moved = not torch.equal(value, before[name])
        assert moved == (name in ("0.bias", "2.weight"))


def test_invariant_9_a_parameter_frozen_after_backward_is_not_released_without_noise(private):
    engine, model, optimizer, _ = private(nn.Linear(3, 2), noise_multiplier=1e-3)
    before = model.weight.detach().clone()
    engine.backward(model(torch.randn(4, 3)).square().mean(1))
    model.weight.requires_grad_(False)
    optimizer.step()
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("whole_layer", [True, False])
def test_invariant_9_unfreezing_after_make_private_is_refused(whole_layer, private):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].requires_grad_(not whole_layer)
    model[0].weight.requires_grad_(False)
    engine, model, optimizer, _ = private(model, noise_multiplier=1.0)
    model[0].requires_grad_(True)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"'0\.(weight|bias)'.*engine\.detach"):
        engine.backward(model(torch.randn(4, 3)).square().mean(1))
        optimizer.step()
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert engine.accountant.history == []


class Outside(nn.Module):
    """Uses a layer's weight without the layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x) @ self.layer.weight


@pytest.mark.parametrize("reduction", [None, "mean"])
def test_invariant_9_a_parameter_used_outside_of_its_module_is_refused(reduction, private):
    engine, model, optimizer, _ = private(
        Outside(), noise_multiplier=1.0, loss_reduction=reduction
    )
    losses = model(torch.randn(4, 3)).square().mean(1)
    with pytest.raises(RuntimeError, match=r"'layer\.weight'.*outside of its own module"):
        losses.mean().backward() if reduction else engine.backward(losses)
    assert not engine._step.sums and all(p.grad is None for p in model.parameters())
    assert engine.accountant.history == []


@pytest.mark.parametrize("name", ["used", "unused"])
def test_invariant_9_a_gradient_that_others_wrote_before_the_release_is_refused(name, private):
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)})
    engine, model, optimizer, _ = private(model)
    engine.backward(model["used"](torch.randn(4, 3)).square().mean(1))
    model[name].weight.grad = torch.full((2, 3), 0.5)
    with pytest.raises(RuntimeError, match=rf"grad of parameter '{name}\.weight' was written"):
        optimizer.step()
    assert not engine._step.sums and model[name].weight.grad is None


def test_diagnostics_count_clipped_samples_and_removed_ones_apart(private):
    engine, model, *_ = private(nn.Linear(1, 1, bias=False))
    x = torch.tensor([[0.5], [2.0], [math.nan], [3.0], [0.1]])
    losses = model(x).sum(1)
    root = (losses[4:] - losses[4:].detach()).sqrt()  # 0, with an infinite gradient
    engine.backward(torch.cat([losses[:4], root]))
    found = engine.diagnostics()
    assert (found["clip_fraction"], found["nonfinite_samples"]) == (2 / 5, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_invariant_9_what_is_released_is_the_gates_sum_and_never_the_grad_beside_it(
    dtype, private, sums
):
    torch.manual_seed(0)
    engine, model, optimizer, _ = private(nn.Linear(3, 2).to(dtype))
    engine.backward(model(torch.randn(4, 3).to(dtype)).float().square().mean(1))
    expected = sums(engine, model)
    assert {g.dtype for g in expected.values()} <= {torch.float32, torch.float64}
    model.weight.grad = None
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, (expected[name] / 4).to(dtype))


def test_invariant_9_a_loop_left_in_mid_batch_starts_afresh(untried):
    torch.manual_seed(0)
    x = torch.randn(32, 3)
    options = {"batch_size": 16, "noise_multiplier": 0.5, "physical_batch_size": 4}
    engine, model, optimizer, loader = untried(nn.Linear(3, 2), x, **options)

    def train(limit=None):
        pattern = []
        for number, (batch,) in enumerate(loader):
            if number == limit:
                break
            optimizer.zero_grad()
            before = optimizer.releases
            engine.backward(model(batch).square().mean(1))
            optimizer.step()
            pattern.append((loader.is_real, optimizer.releases > before))
        return pattern

    left = train(limit=2)
    assert [done for _, done in left] == [False, False]
    with pytest.warns(UserWarning, match="dropped"):
        again = train()
    assert engine.accountant.history == [(0.5, 0.5, 2)]
    # Each release took exactly the parts since the one before.
    sizes, size = [], 0
    for real, done in again:
        size += int(real.sum())
        if done:
            sizes.append(size)
            size = 0
    draws = [engine._run.loader._draws.draw(i) for i in (1, 2)]
    assert sizes == [len(d) for d in draws] and size == 0


@needs_opacus
@pytest.mark.parametrize("sampling", ["poisson", "shuffled"])
def test_invariant_9_a_batch_memory_manager_left_in_mid_batch_starts_afresh(sampling, private):
    torch.manual_seed(0)
    x = torch.randn(32, 3)
    engine, model, optimizer, loader = private(
        nn.Linear(3, 2), x, batch_size=16, noise_multiplier=0.5, sampling=sampling
    )

    def train(limit=None):
        sizes, size = [], 0
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=4, optimizer=optimizer
        ) as small:
            for number, (batch,) in enumerate(small):
                if number == limit:
                    break
                optimizer.zero_grad()
                before = optimizer.releases
                engine.backward(model(batch).square().mean(1))
                optimizer.step()
                size += len(batch)
                if optimizer.releases > before:
                    sizes.append(size)
                    size = 0
        return sizes

    assert train(limit=2) == []
    with pytest.warns(UserWarning, match="dropped"):
        sizes = train()
    if sampling == "shuffled":
        assert engine.accountant.events == [(ShuffledGaussian(noise_multiplier=0.5), 1)]
        assert sizes == [16, 16]
        return
    assert engine.accountant.history == [(0.5, 0.5, 2)]
    assert sizes == [len(engine._run.loader._draws.draw(i)) for i in (1, 2)]


@pytest.mark.parametrize("managed", [False, pytest.param(True, marks=needs_opacus)])
@pytest.mark.filterwarnings("ignore:.*gradients are dropped:UserWarning")
def test_invariant_9_nothing_of_a_batch_that_was_left_gets_into_the_next_release(managed, untried):
    """Each sample is clipped to exactly C = 1, so the sum counts samples; no zero_grad helps."""
    engine, model, optimizer, loader = untried(
        nn.Linear(1, 1, bias=False),
        torch.full((32, 1), 7.0),
        batch_size=16,
        lr=0.0,
        physical_batch_size=None if managed else 4,
    )

    def train(limit):
        with contextlib.ExitStack() as stack:
            batches = loader
            if managed:
                batches = stack.enter_context(
                    BatchMemoryManager(
                        data_loader=loader, max_physical_batch_size=4, optimizer=optimizer
                    )
                )
            for number, (batch,) in enumerate(batches):
                if number == limit or optimizer.releases:
                    return
                engine.backward(model(batch).squeeze(1))
                optimizer.step()

    train(2)
    assert optimizer.releases == 0
    train(100)
    count = len(engine._run.loader._draws.draw(1))
    assert float(model.weight.grad) * 16 == pytest.approx(count, abs=1e-3)


@pytest.mark.parametrize("kind", ["loader", pytest.param("managed", marks=needs_opacus), "own"])
def test_invariant_9_a_second_backward_on_one_batch_is_refused(kind, untried):
    engine, model, optimizer, loader = untried(nn.Linear(3, 2), torch.randn(64, 3), batch_size=16)
    with contextlib.ExitStack() as stack:
        batches = [[torch.randn(4, 3)]] if kind == "own" else loader
        if kind == "managed":
            manager = BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=4, optimizer=optimizer
            )
            batches = stack.enter_context(manager)
        for (x,) in batches:
            engine.backward(model(x).square().mean(1))
            with pytest.raises(RuntimeError, match="second backward on the same batch"):
                engine.backward(model(x).square().mean(1))
            break


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_invariant_9_a_second_plain_backward_on_one_batch_is_refused(reduction, untried):
    engine, model, optimizer, loader = untried(
        nn.Linear(3, 2), torch.randn(16, 3), loss_reduction=reduction
    )
    for (x,) in loader:
        loss = getattr(model(x).square().mean(1), reduction)()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="second backward on the same batch"):
            loss.backward()
        break


def test_invariant_9_two_logical_batches_in_one_step_are_refused(private):
    engine, model, optimizer, loader = private(nn.Linear(3, 2), torch.randn(64, 3))
    with pytest.raises(RuntimeError, match="was not released.* on the returned model releases"):
        for (x,) in loader:
            if len(x):
                engine.backward(model(x).square().mean(1))


def test_invariant_9_a_plain_loss_backward_is_refused_without_a_declared_reduction(private):
    engine, model, optimizer, _ = private(nn.Linear(3, 2))
    with pytest.raises(RuntimeError, match=r"engine\.backward.*loss_reduction"):
        model(torch.randn(4, 3)).square().mean().backward()
    assert all(p.grad is None for p in model.parameters())


def test_invariant_9_copies_and_pickles_of_a_private_model_are_plain(private):
    plain = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Embedding(5, 4), nn.Conv1d(4, 4, 1))
    types = [type(m) for m in plain.modules()]
    keys = list(plain.state_dict())
    engine, model, optimizer, _ = private(plain)
    assert model is plain
    assert list(model.state_dict()) == keys
    assert [type(m) for m in model.modules()] != types
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert [type(m) for m in other.modules()] == types
        assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
        assert not any(a is b for a, b in zip(model.parameters(), other.parameters(), strict=True))
        other[0](torch.randn(2, 3)).sum().backward()
        assert other[0].weight.grad is not None and model[0].weight.grad is None
    assert engine.detach(model) is model
    assert [type(m) for m in model.modules()] == types
    assert not any("_dpflash" in m.__dict__ for m in model.modules())
    model[0](torch.randn(2, 3)).sum().backward()
    assert list(model.state_dict()) == keys


# 10


@pytest.mark.usefixtures("one_batch_a_draw")
def test_invariant_10_a_release_is_charged_before_the_wrapped_optimizer_steps(
    untried, tmp_path, monkeypatch
):
    ledger = tmp_path / "ledger"
    engine, model, optimizer, loader = untried(
        nn.Linear(3, 2), torch.randn(16, 3), noise_multiplier=1.0, ledger=ledger
    )

    def fail():
        raise OSError("the machine died")

    monkeypatch.setattr(optimizer.original_optimizer, "step", fail)
    for (x,) in loader:
        engine.backward(model(x).square().mean(1))
        with pytest.raises(OSError, match="died"):
            optimizer.step()
        break
    assert engine.accountant.history == [(1.0, 0.25, 1)]
    assert PrivacyEngine(ledger=ledger).accountant.history == [(1.0, 0.25, 1)]


@pytest.mark.usefixtures("one_batch_a_draw")
def test_invariant_10_the_ledger_is_on_disk_before_the_noise_is_drawn(
    untried, tmp_path, monkeypatch
):
    ledger = tmp_path / "ledger"
    engine, model, optimizer, loader = untried(
        nn.Linear(3, 2), torch.randn(16, 3), noise_multiplier=1.0, ledger=ledger
    )
    lines = []

    def fail(*arguments, **options):
        lines.extend(ledger.read_text().splitlines())
        raise MemoryError

    monkeypatch.setattr(noise_module, "NoiseStream", fail)
    before = model.weight.detach().clone()
    for (x,) in loader:
        with pytest.raises(MemoryError):
            engine.backward(model(x).square().mean(1))
        break
    assert len(lines) == 1
    assert torch.equal(model.weight, before)
    assert PrivacyEngine(ledger=ledger).get_epsilon(1e-5) > 0


@pytest.mark.usefixtures("one_batch_a_draw")
def test_invariant_10_nothing_is_released_where_the_ledger_cannot_be_written(
    untried, tmp_path, monkeypatch
):
    engine, model, optimizer, loader = untried(
        nn.Linear(3, 2), torch.randn(16, 3), noise_multiplier=1.0, ledger=tmp_path / "ledger"
    )

    def fail(**entry):
        raise OSError("no space left on device")

    monkeypatch.setattr(engine._spending.ledger, "append", fail)
    before = model.weight.detach().clone()
    for (x,) in loader:
        with pytest.raises(OSError):
            engine.backward(model(x).square().mean(1))
        with pytest.raises(dpflash.PrivateRefusal):
            optimizer.step()
        break
    assert torch.equal(model.weight, before) and optimizer.releases == 0
    assert model.weight.grad is None and not engine._step.sums


@pytest.mark.usefixtures("one_batch_a_draw")
def test_invariant_10_a_ledger_with_a_noiseless_release_means_infinite_epsilon_after_a_restart(
    untried, tmp_path
):
    def run():
        return untried(
            nn.Linear(3, 2), torch.randn(16, 3), noise_multiplier=1.0, ledger=tmp_path / "ledger"
        )

    engine, model, optimizer, loader = run()
    engine.save_checkpoint(tmp_path / "checkpoint")
    optimizer.noise_multiplier = 0.0
    for (x,) in loader:
        engine.backward(model(x).square().mean(1))
        optimizer.step()
        break
    assert engine.get_epsilon(1e-5) == math.inf
    engine, *_ = run()
    assert engine.get_epsilon(1e-5) == math.inf
    engine.load_checkpoint(tmp_path / "checkpoint")
    assert engine.get_epsilon(1e-5) == math.inf


def test_invariant_10_releases_since_the_checkpoint_stay_counted(private, tmp_path):
    def run():
        return private(
            nn.Linear(3, 2), torch.randn(16, 3), noise_multiplier=1.0, ledger=tmp_path / "ledger"
        )

    def train(engine, model, optimizer, loader):
        for (x,) in loader:
            optimizer.zero_grad()
            engine.backward(model(x).square().mean(1))
            optimizer.step()

    first = run()
    train(*first)
    first[0].save_checkpoint(tmp_path / "checkpoint")
    train(*first)
    second = run()
    second[0].load_checkpoint(tmp_path / "checkpoint")
    assert second[0].accountant.history == [(1.0, 0.25, 8)]
    train(*second)
    assert second[0].accountant.history == [(1.0, 0.25, 12)]


@pytest.mark.parametrize("text", ['{"release": 1', '{"release": 7}\n', "x\n", '{"a": 1}\n'])
def test_invariant_10_a_damaged_ledger_is_refused_and_left_as_it_is(text, tmp_path):
    ledger = tmp_path / "ledger"
    ledger.write_text(text)
    with pytest.raises(ValueError, match="ledger .* (damaged|missing)"):
        PrivacyEngine(ledger=ledger)
    assert ledger.read_text() == text


def test_invariant_10_a_step_hook_does_not_displace_the_accounting(private):
    engine, model, optimizer, loader = private(
        nn.Linear(3, 2), torch.randn(16, 3), noise_multiplier=1.0
    )
    calls = []
    optimizer.attach_step_hook(lambda o: calls.append("a"))
    optimizer.attach_step_hook(lambda o: calls.append("b"))
    for (x,) in loader:
        optimizer.zero_grad()
        engine.backward(model(x).square().mean(1))
        optimizer.step()
    assert calls == ["a", "b"] * 4
    assert engine.accountant.history == [(1.0, 0.25, 4)]
