import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpflash import losses

SHAPES = [(5,), (5, 1), (3, 7), (2, 3, 5), (1, 1), (4, 0)]


def loop_cross_entropy(logits, targets, ignore_index=-100):
    """Position by position in float64, from the definition."""
    rows = []
    for sample_logits, sample_targets in zip(logits.double(), targets, strict=True):
        terms = []
        pairs = zip(
            sample_logits.reshape(-1, logits.shape[-1]), sample_targets.reshape(-1), strict=True
        )
        for scores, target in pairs:
            if target != ignore_index:
                terms.append(scores.exp().sum().log() - scores[target])
        rows.append(sum(terms) / len(terms) if terms else scores.sum() * 0)
    return torch.stack(rows)


def make_batch(shape, num_classes=11, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*shape, num_classes, generator=generator)
    targets = torch.randint(num_classes, shape, generator=generator)
    targets[torch.rand(shape, generator=generator) < 0.3] = -100
    return logits, targets


@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 5)], ids=str)
def test_cross_entropy_and_its_gradient_match_a_float64_loop(shape):
    logits, targets = make_batch(shape)
    targets[0] = 3
    weights = torch.linspace(1, 2, shape[0])
    logits.requires_grad_()
    result = losses.cross_entropy(logits, targets)
    (gradient,) = torch.autograd.grad(result @ weights, logits)

    exact_logits = logits.detach().double().requires_grad_()
    expected = loop_cross_entropy(exact_logits, targets)
    (expected_gradient,) = torch.autograd.grad(expected @ weights.double(), exact_logits)
    assert result.shape == (shape[0],) and result.dtype == torch.float32
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-4, atol=1e-7)


def test_a_sample_without_valid_tokens_has_loss_zero_and_no_gradient():
    logits, targets = make_batch((3, 7))
    targets[1] = -100
    logits.requires_grad_()
    result = losses.cross_entropy(logits, targets)
    result.sum().backward()
    assert result[1].item() == 0.0
    assert torch.equal(logits.grad[1], torch.zeros_like(logits[1]))
    assert logits.grad.isfinite().all() and (logits.grad[0] != 0).any()


def test_causal_lm_shifts_as_hugging_face_does_and_divides_by_the_samples_own_tokens():
    logits, labels = make_batch((4, 7))
    labels[0, 1:] = -100  # only the first label is valid, which nothing predicts
    logits.requires_grad_()
    result = losses.causal_lm(logits, labels)
    for i in range(1, 4):
        expected = F.cross_entropy(logits[i, :-1], labels[i, 1:])
        assert result[i].item() == pytest.approx(expected.item(), rel=1e-5)
    (gradient,) = torch.autograd.grad(result.sum(), logits)
    assert result.shape == (4,) and result[0] == 0 and not gradient[0].any()
    assert not gradient[:, -1].any() and gradient[1].any()


def test_causal_lm_of_a_single_position_is_zero_and_other_shapes_are_refused():
    logits, labels = make_batch((2, 1))
    assert losses.causal_lm(logits, labels).tolist() == [0, 0]
    assert losses.causal_lm(logits[:0], labels[:0]).shape == (0,)
    for wrong, right in [((2, 5), (2, 4)), ((2,), (2,)), ((2, 3, 4), (2, 3, 4))]:
        with pytest.raises(ValueError, match=r"expected logits \[B, T, V\] and labels \[B, T\]"):
            losses.causal_lm(torch.zeros(*wrong, 11), torch.zeros(right, dtype=torch.int64))
    with pytest.raises(ValueError, match="int64"):
        losses.causal_lm(logits, labels.float())


def test_another_ignore_index_of_causal_lm_is_honoured():
    logits, targets = make_batch((2, 5))
    ignored = targets.masked_fill(targets == -100, 3)
    torch.testing.assert_close(
        losses.causal_lm(logits, ignored, ignore_index=3),
        losses.causal_lm(logits, ignored.masked_fill(ignored == 3, -100)),
    )


def test_another_ignore_index_is_honoured():
    logits, targets = make_batch((3, 7))
    targets[targets == -100] = 0
    expected = loop_cross_entropy(logits, targets, ignore_index=0)
    result = losses.cross_entropy(logits, targets, ignore_index=0)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_reduced_in_float32(dtype):
    logits, targets = make_batch((2, 501))
    result = losses.cross_entropy(logits.to(dtype), targets)
    expected = losses.cross_entropy(logits.to(dtype).double(), targets)
    assert result.dtype == torch.float32 and expected.dtype == torch.float64
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)
    values = torch.rand(2, 501).to(dtype)
    for loss in (losses.mse, losses.binary_cross_entropy_with_logits):
        low = loss(logits[..., 0].to(dtype), values)
        assert low.dtype == torch.float32
        exact = loss(logits[..., 0].to(dtype).double(), values.double())
        torch.testing.assert_close(low.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_elementwise_losses_match_a_float64_loop(shape):
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(shape, generator=generator)
    targets = torch.rand(shape, generator=generator)
    squared, binary = [], []
    for sample, target in zip(values.double(), targets.double(), strict=True):
        pairs = list(zip(sample.reshape(-1).tolist(), target.reshape(-1).tolist(), strict=True))
        count = max(len(pairs), 1)
        squared.append(sum((x - t) ** 2 for x, t in pairs) / count)
        binary.append(sum(math.log1p(math.exp(x)) - t * x for x, t in pairs) / count)
    mse = losses.mse(values, targets)
    bce = losses.binary_cross_entropy_with_logits(values, targets)
    assert mse.shape == bce.shape == shape[:1]
    torch.testing.assert_close(mse, torch.tensor(squared), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(bce, torch.tensor(binary), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("loss", ["cross_entropy", "mse", "binary_cross_entropy_with_logits"])
def test_a_samples_loss_and_gradient_ignore_its_batch_mates(loss):
    logits, targets = make_batch((4, 7))
    if loss != "cross_entropy":
        logits, targets = logits[..., 0], torch.rand(4, 7)

    def loss_and_gradient(values, labels):
        values = values.clone().requires_grad_()
        result = getattr(losses, loss)(values, labels)
        result.sum().backward()
        return result.detach(), values.grad

    together = loss_and_gradient(logits, targets)
    for i in range(4):
        alone = loss_and_gradient(logits[i : i + 1], targets[i : i + 1])
        torch.testing.assert_close(alone[0], together[0][i : i + 1])
        torch.testing.assert_close(alone[1], together[1][i : i + 1])


@pytest.mark.parametrize("shape", [(0,), (0, 7), (0, 1)], ids=str)
def test_an_empty_batch_gives_an_empty_loss_with_a_gradient(shape):
    logits = torch.randn(*shape, 11, requires_grad=True)
    result = losses.cross_entropy(logits, torch.zeros(shape, dtype=torch.int64))
    result.sum().backward()
    assert result.shape == (0,) and logits.grad.shape == logits.shape
    values = torch.randn(shape, requires_grad=True)
    for loss in (losses.mse, losses.binary_cross_entropy_with_logits):
        assert loss(values, torch.zeros(shape)).shape == (0,)


@pytest.mark.parametrize("loss", [losses.mse, losses.binary_cross_entropy_with_logits])
def test_shapes_that_would_broadcast_over_the_batch_are_refused(loss):
    with pytest.raises(ValueError, match=r"\(5, 1\) and targets of shape \(5,\)"):
        loss(torch.rand(5, 1), torch.rand(5))
    with pytest.raises(ValueError, match="batch first"):
        loss(torch.tensor(1.0), torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"targets\.float\(\)"):
        loss(torch.rand(5), torch.ones(5, dtype=torch.int64))


def test_cross_entropy_refuses_what_it_would_misread():
    logits, targets = make_batch((3, 7))
    with pytest.raises(ValueError, match=r"movedim"):
        losses.cross_entropy(logits.movedim(-1, 1), targets)
    with pytest.raises(ValueError, match=r"targets\.long\(\)"):
        losses.cross_entropy(logits, targets.int())
    with pytest.raises(ValueError, match=r"logits\.float\(\)"):
        losses.cross_entropy(targets.unsqueeze(-1), targets)
    with pytest.raises(ValueError, match=r"expected logits \[B"):
        losses.cross_entropy(torch.rand(11), torch.tensor(3))


def packed_cross_entropy(logits, targets):
    return losses.cross_entropy(
        logits.flatten(0, 1)[None],
        targets.flatten()[None],
        sample_index=torch.arange(3).repeat_interleave(7)[None],
        num_samples=3,
    )


@pytest.mark.parametrize("wrong", [11, -1, 2**40, -(2**63)])
@pytest.mark.parametrize(
    "loss",
    [losses.cross_entropy, losses.causal_lm, packed_cross_entropy],
    ids=["rows", "shifted", "packed"],
)
def test_a_sample_with_a_class_out_of_range_has_a_gradient_of_zeros_and_changes_no_other(
    loss, wrong
):
    logits, targets = make_batch((3, 7))
    logits.requires_grad_()
    found = []
    for value in (wrong, -100):
        targets[1] = torch.tensor([2, value, 3, -100, value, 0, 1])
        own = loss(logits, targets)
        (grad,) = torch.autograd.grad(own.nansum(), logits)
        found.append((own, grad))
    (own, grad), (without, expected) = found
    assert own.isnan().tolist() == [False, True, False] and not grad[1].any()
    for other in (0, 2):
        assert torch.equal(own[other], without[other])
        assert torch.equal(grad[other], expected[other])


def test_a_position_with_an_unknown_sample_index_is_of_no_sample():
    logits, targets = make_batch((1, 6))
    targets[:] = torch.tensor([1, 2, 3, 4, 5, 6])
    index = torch.tensor([[0, 0, -1, 1, 1, 1]])
    expected = losses.cross_entropy(logits, targets, sample_index=index, num_samples=2)
    index[0, 2] = 7
    found = losses.cross_entropy(logits, targets, sample_index=index, num_samples=2)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("wrong", [-1.0, 1.5, math.inf, math.nan])
def test_a_sample_with_a_binary_target_out_of_range_has_a_gradient_of_zeros(wrong):
    logits = torch.ones(3, 2, requires_grad=True)
    targets = torch.tensor([[0.0, 1.0], [wrong, 1.0], [0.5, 0.0]])
    own = losses.binary_cross_entropy_with_logits(logits, targets)
    own.nansum().backward()
    assert own.isnan().tolist() == [False, True, False]
    assert logits.grad.isfinite().all() and logits.grad.any(1).tolist() == [True, False, True]


def test_losses_compile_into_one_graph():
    logits, targets = make_batch((3, 7))
    ones = torch.rand(3, 7)

    def all_losses(logits, targets, ones):
        return (
            losses.cross_entropy(logits, targets)
            + losses.mse(logits[..., 0], ones)
            + losses.binary_cross_entropy_with_logits(logits[..., 1], ones)
        )

    compiled = torch.compile(all_losses, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(logits, targets, ones), all_losses(logits, targets, ones))


CRITERIA = [
    nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]), label_smoothing=0.1),
    nn.CrossEntropyLoss(ignore_index=1, reduction="sum"),
    nn.NLLLoss(),
    nn.MSELoss(),
    nn.HuberLoss(),
    nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0)),
    nn.SoftMarginLoss(),
    nn.BCELoss(),
]


@pytest.mark.parametrize("criterion", CRITERIA, ids=repr)
@pytest.mark.parametrize("shape", [(), (4,)])
def test_a_criterion_has_the_loss_of_each_sample_alone(criterion, shape):
    """Class weights multiply losses: for one sample torch divides by its own weight again."""
    outputs, targets = torch.randn(5, 3, *shape, requires_grad=True), torch.rand(5, 3, *shape)
    if isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss):
        targets = torch.randint(3, (5, *shape))
    if isinstance(criterion, nn.BCELoss):
        outputs = outputs.sigmoid()
    found = losses.of_criterion(criterion, outputs, targets)
    each = copy.copy(criterion)
    each.reduction = "none"
    for i in range(5):
        own = each(outputs[i : i + 1], targets[i : i + 1])
        counted = targets[i] != getattr(criterion, "ignore_index", math.inf)
        expected = own.sum() / counted.sum().clamp(min=1) if own.numel() else own.sum()
        torch.testing.assert_close(found[i], expected)
    assert losses.of_criterion(criterion, outputs[:0], targets[:0]).shape == (0,)


def test_a_criterion_with_a_class_out_of_range_has_no_loss_of_that_sample_alone():
    outputs = torch.randn(3, 2, requires_grad=True)
    found = losses.of_criterion(nn.CrossEntropyLoss(), outputs, torch.tensor([0, 2, -5]))
    assert found.isnan().tolist() == [False, True, True]


def test_a_probability_out_of_range_is_no_error_and_trains_nothing():
    outputs = torch.tensor([0.3, 2.0, math.nan, 0.5], requires_grad=True)
    found = losses.of_criterion(nn.BCELoss(), outputs, torch.tensor([1.0, 1.0, 1.0, 3.0]))
    assert found.isnan().tolist() == [False, True, True, True]
    (grad,) = torch.autograd.grad(found.sum(), outputs)
    torch.testing.assert_close(grad, torch.tensor([-1 / 0.3, 0.0, 0.0, 0.0]))


@pytest.mark.parametrize(
    "criterion, shapes, match",
    [
        (
            nn.TripletMarginLoss(),
            ((4, 3), (4, 3)),
            "=TripletMarginLoss.*CrossEntropyLoss, .*BCELoss only.*with reduction='none'",
        ),
        (nn.MSELoss(), ((4, 1), (4,)), "expected equal shapes"),
        (nn.CrossEntropyLoss(), ((4, 3), (4, 1)), r"expected \[B, classes"),
    ],
)
def test_a_criterion_that_may_couple_samples_is_refused(criterion, shapes, match):
    outputs, targets = torch.randn(shapes[0]), torch.zeros(shapes[1])
    targets = targets.long() if isinstance(criterion, nn.CrossEntropyLoss) else targets
    with pytest.raises(ValueError, match=match):
        losses.of_criterion(criterion, outputs, targets)
