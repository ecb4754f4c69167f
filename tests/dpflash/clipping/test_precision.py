"""What torch rounds more than float32 does never moves a released sum beyond the bound."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpflash.clipping import precision
from dpflash.grad_rules import PrivateModule

BOUND = 0.7
# 64 samples are added in float32.
SLACK = 1e-4
KINDS = [{"grad_sample_mode": mode} for mode in ("instantiate", "book_keeping", "ghost")]
KINDS.append({"clipping": "per_layer"})
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind.values()))


@pytest.fixture
def products():
    """Sets how float32 is multiplied, until the end of the test."""
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


def rounded_up(*shape):
    """Numbers that bfloat16 rounds up by as much as it ever does."""
    return torch.full(shape, 1 + 2**-8 + 2**-9 * 0.51)


def moved(private, sums, model, batch, **options):
    """By how much the first sample moves the sum of a batch; losses are linear in the outputs."""

    def of(x):
        engine, made, *_ = private(copy.deepcopy(model), max_grad_norm=BOUND, **options)
        outputs = made(x)
        engine.backward(37 * (outputs * rounded_up(outputs.shape[-1])).sum((1, 2)))
        return torch.cat([t.double().flatten() for t in sums(engine, made).values()])

    return float((of(batch) - of(batch[1:])).norm())


@every_kind
@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
def test_one_sample_moves_the_sum_by_at_most_the_bound_or_its_rounded_products_are_refused(
    setting, kind, private, sums, products
):
    products(setting)
    model, batch = nn.Linear(128, 256, bias=False), rounded_up(64, 3, 128)
    try:
        found = moved(private, sums, model, batch, **kind)
    except ValueError as error:
        assert setting != "highest" and "set_float32_matmul_precision('highest')" in str(error)
        assert f"fp32_precision='{'bf16' if setting == 'medium' else 'tf32'}'" in str(error)
    else:
        assert 0.69 <= found <= BOUND * (1 + SLACK)


@pytest.mark.parametrize("setting", ["high", "medium"])
def test_a_sample_more_does_not_change_whether_the_products_of_all_others_are_rounded(
    setting, private, sums, products
):
    products(setting)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    one = torch.randn(1, 1, 32)
    worst = 0.0
    try:
        for seed in range(4):
            odd = torch.randn(1, 1, 32, generator=torch.Generator().manual_seed(seed))
            # The eighth row is the last that a CPU multiplies in float32 here.
            batch = torch.cat([odd, one.expand(8, -1, -1)])
            worst = max(worst, abs(moved(private, sums, model, batch) / BOUND - 1))
    except ValueError as error:
        assert "from some batch size on" in str(error)
    else:
        assert worst <= SLACK


def test_tf32_on_a_cpu_that_has_it_is_refused(private, products, monkeypatch):
    products("high")
    monkeypatch.setattr(torch.cpu, "_is_amx_fp16_supported", lambda: True)
    engine, model, *_ = private(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="mkldnn.matmul.fp32_precision='tf32' on a CPU"):
        engine.backward(model(torch.randn(3, 4)).sum(1))


def test_products_that_are_rounded_in_the_forward_alone_are_refused(private, products):
    _, model, *_ = private(nn.Linear(4, 4))
    products("medium")
    with pytest.raises(ValueError, match="mkldnn.matmul.fp32_precision='bf16' on a CPU"):
        model(torch.randn(3, 4))


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_products_that_are_rounded_from_the_backward_on_are_refused(clipping, private, products):
    engine, model, *_ = private(nn.Linear(4, 4), clipping=clipping)
    losses = model(torch.randn(3, 4)).sum(1)
    products("medium")
    with pytest.raises(ValueError, match="mkldnn.matmul.fp32_precision='bf16' on a CPU"):
        engine.backward(losses)
    assert not engine._step.sums


class ConvolvesByFunction(nn.Module):
    """No module of it tells that it convolves."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kernels", torch.randn(64, 16, 9))
        self.head = nn.Linear(64, 8, bias=False)

    def forward(self, x):
        return self.head(F.conv1d(x, self.kernels, padding=4).mean(2))


@pytest.fixture
def convolutions():
    """Sets how a CPU convolves float32, until the end of the test."""
    before = torch.backends.mkldnn.conv.fp32_precision

    def put(precision):
        torch.backends.mkldnn.conv.fp32_precision = precision

    yield put
    put(before)


@pytest.mark.parametrize("reduction", [None, "sum", "mean"])
def test_convolutions_that_are_called_as_functions_are_refused_where_a_cpu_rounds_them(
    reduction, private, convolutions
):
    engine, model, *_ = private(ConvolvesByFunction(), loss_reduction=reduction)
    x = torch.randn(3, 16, 64)
    convolutions("bf16")
    with pytest.raises(ValueError, match="mkldnn.conv.fp32_precision='bf16' on a CPU.*'ieee'"):
        model(x)
    convolutions("none")
    losses = model(x).square().sum(1)
    convolutions("bf16")
    with pytest.raises(ValueError, match="mkldnn.conv.fp32_precision='bf16' on a CPU.*'ieee'"):
        engine.backward(losses if reduction is None else getattr(losses, reduction)())
    assert not engine._step.sums
    convolutions("ieee")
    losses = model(x).square().sum(1)
    engine.backward(losses if reduction is None else getattr(losses, reduction)())


# A mean over samples


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_a_mean_whose_backward_alone_is_in_autocast_is_refused(clipping, private):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    engine, model, *_ = private(model, clipping=clipping, loss_reduction="mean")
    loss = model(torch.randn(3, 4)).sum(1).mean()
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ValueError, match="'mean' with autocast to torch.bfloat16: .*'sum'"),
    ):
        loss.backward()
    assert not engine._step.sums


def test_a_mean_under_autocast_that_is_on_everywhere_is_refused(private):
    _, model, *_ = private(nn.Linear(4, 4), loss_reduction="mean")
    torch.set_autocast_enabled("cpu", True)
    try:
        with pytest.raises(ValueError, match="='mean' with autocast to.*and sum the losses"):
            model(torch.randn(3, 4))
    finally:
        torch.set_autocast_enabled("cpu", False)


def test_a_mean_through_a_frozen_layer_in_16_bit_is_refused(private):
    frozen = nn.Linear(4, 4).to(torch.bfloat16).requires_grad_(False)
    model = nn.Sequential(nn.Linear(4, 4), frozen)
    with pytest.raises(ValueError, match=r"'mean' with parameter '1\.weight' in 16 bit: .*'sum'"):
        private(model, loss_reduction="mean")
    assert not any(isinstance(m, PrivateModule) for m in model.modules())
    private(model, loss_reduction="sum")


def test_a_mean_of_losses_in_16_bit_is_refused(private):
    engine, model, *_ = private(nn.Linear(4, 4), loss_reduction="mean")
    for reduce in (torch.Tensor.clone, torch.Tensor.mean):
        losses = reduce(model(torch.randn(3, 4)).sum(1).bfloat16())
        with pytest.raises(ValueError, match="'mean' with a tensor of torch.bfloat16: "):
            engine.backward(losses)


@pytest.mark.parametrize("level", ["balanced", "aggressive"])
def test_a_mean_is_refused_for_a_level_only_where_that_uses_autocast(level, private):
    with pytest.raises(ValueError, match=f"'mean' with optimize='{level}': .*'sum'"):
        private(nn.Linear(4, 4), loss_reduction="mean", optimize=level)
    wide = nn.Linear(4, 4).double()
    engine, model, *_ = private(wide, loss_reduction="mean", optimize="balanced")
    model(torch.randn(3, 4).double()).sum(1).mean().backward()
    assert not engine.optimization.autocast and engine._step.sums


def test_a_gpu_with_tf32_is_too_coarse_for_a_mean():
    """Settings can be made without a GPU."""
    assert precision.coarse_products("cuda", convolves=False) is None
    before = torch.backends.cudnn.conv.fp32_precision
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        found = precision.coarse_products("cuda", convolves=False)
        assert found == "torch.backends.cuda.matmul.fp32_precision='tf32'"
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.conv.fp32_precision = "tf32"
        assert precision.coarse_products("cuda", convolves=False) is None
        found = precision.coarse_products("cuda")
        assert found == "torch.backends.cudnn.conv.fp32_precision='tf32'"
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        assert precision.coarse_products("cuda") is None
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.conv.fp32_precision = before
