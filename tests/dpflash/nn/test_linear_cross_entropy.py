import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import dpflash
from dpflash.grad_rules import linear_cross_entropy as rule
from dpflash.nn import LinearCrossEntropy, LongContextLM
from dpflash.verification import digests

GRAD_SAMPLE_MODES = ("instantiate", "book_keeping", "ghost")
KINDS = [{"grad_sample_mode": mode} for mode in GRAD_SAMPLE_MODES] + [{"clipping": "per_layer"}]
every_kind = pytest.mark.parametrize(
    "kind", KINDS, ids=[k.get("grad_sample_mode", k.get("clipping")) for k in KINDS]
)
# Factors are rounded down by 2^-22 and kept in fp32.
EXACT, FP32 = 1e-6, 3e-6


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of few tokens, so that small inputs have several along every axis."""
    monkeypatch.setattr(rule, "_TILE_TOKENS", 5)


def batch(samples=3, tokens=7, classes=13, width=5, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, tokens, width, generator=generator).to(dtype)
    return x, torch.randint(classes, (samples, tokens), generator=generator)


def make_head(classes=13, width=5, dtype=torch.float64, **arguments):
    torch.manual_seed(0)
    return LinearCrossEntropy(width, classes, dtype=dtype, **arguments)


def by_definition(head, x, targets):
    losses = dpflash.losses.cross_entropy(
        F.linear(x, head.weight, head.bias), targets, head.ignore_index
    )
    counts = (targets != head.ignore_index).unsqueeze(1).flatten(1).sum(1)
    return losses * counts if head.reduction == "sum" else losses


def gradients(losses, x, head):
    weights = torch.linspace(-1, 2, len(losses), dtype=losses.dtype)
    return torch.autograd.grad((losses * weights).sum(), [x, *head.parameters()])


def assert_as_defined(head, x, targets, **tolerance):
    x = x.clone().requires_grad_()
    found, expected = head(x, targets), by_definition(head, x, targets)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, **tolerance)
    pairs = zip(gradients(found, x, head), gradients(expected, x, head), strict=True)
    for own, reference in pairs:
        torch.testing.assert_close(own, reference, **tolerance)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 15, None])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("shape", [(3, 7, 13), (1, 1, 2), (4, 3, 1)], ids=str)
def test_losses_and_gradients_are_those_of_the_definition(shape, reduction, bias, chunk_tokens):
    samples, tokens, classes = shape
    head = make_head(classes, bias=bias, reduction=reduction, chunk_tokens=chunk_tokens)
    assert_as_defined(head, *batch(samples, tokens, classes))
    assert_as_defined(
        head.float(), *batch(samples, tokens, classes, dtype=torch.float32), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("ignore_index", [-100, 4], ids=["outside", "a class"])
@pytest.mark.parametrize("chunk_tokens", [2, 16])
def test_ignored_targets_do_not_count_and_each_sample_has_its_own_divisor(
    chunk_tokens, ignore_index
):
    head = make_head(bias=True, ignore_index=ignore_index, chunk_tokens=chunk_tokens)
    x, targets = batch(4)
    targets[0] = ignore_index
    targets[1, 1:] = ignore_index
    targets[2, ::2] = ignore_index
    assert_as_defined(head, x, targets)
    x.requires_grad_()
    losses = head(x, targets)
    assert losses[0] == 0
    dx, dweight, dbias = torch.autograd.grad(losses[0], [x, *head.parameters()])
    assert not dx.any() and not dweight.any() and not dbias.any()
    alone = head(x[1:2, :1], targets[1:2, :1])
    torch.testing.assert_close(losses[1:2], alone)


@pytest.mark.parametrize("shape", [(0, 7), (3, 0), (0, 0)], ids=str)
def test_an_empty_batch_and_samples_without_tokens_have_zero_losses_and_gradients(shape):
    head = make_head(bias=True)
    x = torch.zeros(*shape, 5, dtype=torch.float64, requires_grad=True)
    losses = head(x, torch.zeros(shape, dtype=torch.int64))
    assert losses.shape == shape[:1] and not losses.any()
    losses.sum().backward()
    assert x.grad.shape == x.shape
    assert not head.weight.grad.any() and not head.bias.grad.any()


@pytest.mark.parametrize("middle", [(), (2, 3)], ids=["B-E", "B-2-3-E"])
def test_inputs_may_have_no_or_several_dimensions_between_batch_and_features(middle):
    x, targets = batch(4, math.prod(middle))
    assert_as_defined(make_head(), x.reshape(4, *middle, 5), targets.reshape(4, *middle))


def test_without_targets_it_returns_the_logits():
    head, (x, _) = make_head(bias=True), batch()
    torch.testing.assert_close(head(x), F.linear(x, head.weight, head.bias))


def test_large_logits_neither_overflow_nor_lose_the_loss():
    head, (x, targets) = make_head(dtype=torch.float32), batch(dtype=torch.float32)
    assert_as_defined(head, 1e4 * x, targets, rtol=1e-4, atol=1e-2)
    assert head(1e4 * x, targets).isfinite().all()


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "bf16"])
def test_in_bf16_only_the_products_are_of_low_precision(autocast):
    dtype = torch.float32 if autocast else torch.bfloat16
    head, (x, targets) = make_head(bias=True, chunk_tokens=4, dtype=dtype), batch(dtype=dtype)
    x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found, expected = head(x, targets), by_definition(head, x, targets)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected)
        pairs = zip(gradients(found, x, head), gradients(expected, x, head), strict=True)
    for own, reference in pairs:
        assert own.dtype == dtype
        torch.testing.assert_close(own, reference, rtol=2e-2, atol=2e-3)


def test_a_loss_and_its_gradients_ignore_the_rest_of_the_batch():
    head, (x, targets) = make_head(chunk_tokens=4), batch()
    changed, others = x.clone(), targets.clone()
    changed[1:], others[1:] = math.inf, 0
    for inputs, labels in ((x, targets), (changed, others)):
        inputs.requires_grad_()
        loss = head(inputs, labels)[0]
        torch.testing.assert_close(loss, head(x[:1], targets[:1])[0])
    own = torch.autograd.grad(head(changed, others)[0], changed)[0][0]
    torch.testing.assert_close(own, torch.autograd.grad(head(x, targets)[0], x)[0][0])


# Private training


class TiedLM(nn.Module):
    def __init__(self, rows=11, width=6, bias=False, tied=True):
        super().__init__()
        self.embedding = nn.Embedding(rows, width)
        self.mix = nn.Linear(width, width)
        self.head = LinearCrossEntropy(width, rows, bias=bias, chunk_tokens=3)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens, targets=None):
        hidden = self.embedding(tokens)
        return self.head(hidden + torch.tanh(self.mix(hidden)), targets)


class HeadTwice(nn.Module):
    """The head is called twice with targets and, the weight, once more for logits."""

    def __init__(self, extra=True):
        super().__init__()
        self.head = LinearCrossEntropy(5, 13, bias=True, chunk_tokens=2)
        self.extra = extra

    def forward(self, x, targets):
        losses = self.head(x, targets) + self.head(x.flip(1)[:, :4], targets[:, :4])
        return losses + self.head(x.tanh()).square().mean((1, 2)) if self.extra else losses


def defined(model, x, targets):
    """The same losses with all logits, by autograd alone."""
    if isinstance(model, HeadTwice):
        losses = by_definition(model.head, x, targets)
        losses = losses + by_definition(model.head, x.flip(1)[:, :4], targets[:, :4])
        extra = model.head(x.tanh()).square().mean((1, 2))
        return losses + extra if model.extra else losses
    return dpflash.losses.cross_entropy(model(x), targets)


def middle(norms):
    ordered = sorted(norms)
    return 0.5 * (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2])


@pytest.fixture
def agree(oracle, private, sums, distance):
    """agree(model, x, targets, **kind): the clipped sum against a loop over the definition."""

    def check(model, x, targets, called=None, dtype=torch.float64, tolerance=EXACT, **kind):
        reference = oracle(model, lambda *a: 10 * defined(*a), x, targets)
        bound = middle(reference.norms())
        model = copy.deepcopy(model).to(dtype)
        x = x.to(dtype) if x.is_floating_point() else x
        engine, model, _, _ = private(model, max_grad_norm=bound, **kind)
        engine.backward(10 * (called or (lambda m, *a: m(*a)))(model, x, targets))
        found = sums(engine, model)
        expected = reference.clipped_sum(bound, kind.get("clipping", "flat"))
        assert distance(found, expected) <= tolerance
        return found

    return check


def token_batch(samples=5, tokens=9, classes=11):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(classes, (samples, tokens + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[0, 3:] = -100
    targets[1] = -100
    return tokens[:, :-1], targets


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("tokens", [1, 7, 12])
@every_kind
def test_the_clipped_sum_is_that_of_a_float64_loop(kind, tokens, bias, small_tiles, agree):
    x, targets = batch(6, tokens)
    head = make_head(bias=bias, chunk_tokens=3)
    agree(head, x, targets, **kind)
    agree(head, x, targets, dtype=torch.float32, tolerance=FP32, **kind)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@every_kind
def test_a_head_tied_to_the_embedding_agrees(kind, tied, small_tiles, agree):
    torch.manual_seed(0)
    agree(TiedLM(tied=tied), *token_batch(), **kind)


@pytest.mark.parametrize("embed", [100, 1, 0.05], ids=["embedding", "equal", "head"])
@every_kind
def test_tied_weights_are_clipped_by_the_norm_of_their_sum_whichever_use_dominates(
    embed, kind, small_tiles, private, sums
):
    """The two gradients are parallel, so that without the cross term the norm is too small."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(3, 4)
            self.head = LinearCrossEntropy(4, 3, chunk_tokens=1)
            self.head.weight = self.embedding.weight

        def forward(self, tokens, x):
            losses = self.head(x, torch.zeros_like(tokens))
            return losses - embed * (self.embedding(tokens) * x).sum((1, 2))

    torch.manual_seed(0)
    engine, model, _, _ = private(Tied().double(), max_grad_norm=1e-3, **kind)
    engine.backward(model(torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2, 4).double()))
    (found,) = sums(engine, model).values()
    assert float(found.norm()) == pytest.approx(1e-3, rel=1e-6)


@pytest.mark.parametrize("extra", [True, False], ids=["with logits", "losses alone"])
@every_kind
def test_a_head_called_several_times_agrees(kind, extra, small_tiles, agree):
    torch.manual_seed(0)
    agree(HeadTwice(extra), *batch(5), **kind)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@every_kind
def test_a_half_frozen_head_agrees(kind, frozen, agree):
    head = make_head(bias=True)
    head.get_parameter(frozen).requires_grad_(False)
    found = agree(head, *batch(5), **kind)
    assert frozen not in found


@every_kind
def test_checkpointing_agrees(kind, agree):
    def called(model, tokens, targets):
        hidden = model.embedding(tokens)
        hidden = hidden + torch.tanh(model.mix(hidden))
        return checkpoint(model.head, hidden, targets, use_reentrant=False)

    torch.manual_seed(0)
    agree(TiedLM(), *token_batch(), called=called, **kind)


@every_kind
def test_a_sample_with_a_nan_contributes_zero(kind, small_tiles, oracle, private, sums, distance):
    x, targets = batch(5)
    head = make_head(chunk_tokens=3)
    reference = oracle(head, defined, x[1:], targets[1:])
    bound = middle(reference.norms())
    x[0, 2, 1] = math.nan
    engine, model, _, _ = private(head, max_grad_norm=bound, **kind)
    engine.backward(model(x, targets))
    clipping = kind.get("clipping", "flat")
    assert distance(sums(engine, model), reference.clipped_sum(bound, clipping)) <= EXACT


@every_kind
def test_a_lone_sample_never_exceeds_the_bound_in_fp32(kind, small_tiles, private, sums):
    """Also where its tokens cancel: x and -x under the same targets, but for a little."""
    torch.manual_seed(0)
    for bound in (1e-6, 1e-3, 0.1):
        x = torch.randn(1, 6, 5)
        x = torch.cat([x, -x + 1e-4 * torch.randn(1, 6, 5)], 1)
        targets = torch.randint(13, (1, 6)).repeat(1, 2)
        head = make_head(chunk_tokens=3, dtype=torch.float32)
        with torch.no_grad():
            head.weight.mul_(1e-3)
        engine, model, _, _ = private(head, max_grad_norm=bound, **kind)
        engine.backward(1e3 * model(x, targets))
        (found,) = sums(engine, model).values()
        assert 0.99 * bound < float(found.double().norm()) <= bound


def some_head(dtype, samples=3, tokens=12):
    """What the gate gets, for a head with nothing ignored and weights of both signs."""
    (x, targets), layer = batch(samples, tokens, dtype=dtype), make_head(dtype=dtype)
    lse, _ = rule._statistics(x, layer.weight.detach(), None, targets, 4)
    scale = torch.linspace(-2, 3, samples, dtype=dtype).unsqueeze(1).expand(samples, tokens)
    return rule.Head(x, layer.weight.detach(), None, targets, lse, scale, 3)


@pytest.mark.parametrize("tokens", [2, 12])
def test_tiles_cover_the_gradient_and_have_the_same_bits_at_every_call(tokens, small_tiles):
    head = some_head(torch.float32, tokens=tokens)
    _, expected, _ = head.gradients(x=False, weight=True, bias=False, per_sample=True)
    seen = torch.zeros(3, 13)
    tiles = list(head.tiles())
    assert len({rows.start for _, rows in tiles}) > 1
    for samples, rows in tiles:
        seen[samples, rows] += 1
        tile = head.grad(samples, rows)
        assert torch.equal(tile, head.grad(samples, rows))
        torch.testing.assert_close(tile, expected[samples, rows])
    assert (seen == 1).all()


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(result):
            # A handle is expanded, without memory.
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // 4)
        return result


def test_no_tensor_is_larger_than_a_chunk_or_the_weight():
    x, targets = batch(2, 64, 320, dtype=torch.float32)
    head = make_head(320, chunk_tokens=8, dtype=torch.float32, bias=True)
    with Largest() as largest:
        head(x.requires_grad_(), targets).sum().backward()
    assert largest.elements == 8 * 320
    with Largest() as largest:
        by_definition(head, x, targets).sum().backward()
    assert largest.elements == 2 * 64 * 320


@pytest.fixture
def small_digests(monkeypatch):
    """Digests of rows, which ghost compares, take memory of a fixed size: here little."""
    monkeypatch.setattr(digests, "_WORDS", 64)
    monkeypatch.setattr(digests, "_AT_ONCE", {"cpu": 512})
    monkeypatch.setattr(digests, "_tables", {})


@pytest.mark.usefixtures("small_digests")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@every_kind
def test_private_training_never_holds_the_logits_of_a_batch(kind, tied, private):
    torch.manual_seed(0)
    model = TiedLM(320, 4, tied=tied)
    model.head.chunk_tokens = 8
    inputs, targets = token_batch(3, 64, 320)
    engine, model, _, _ = private(model, verify_first_batch=False, **kind)
    with Largest() as largest:
        engine.backward(model(inputs, targets))
    dense = kind.get("grad_sample_mode") == "instantiate" or "clipping" in kind
    # [B, V, E] gradients, a chunk, or all sums in float64; the logits would be 3 * 64 * 320.
    sums = 2 * sum(p.numel() for p in model.parameters())
    assert largest.elements <= (max(3 * 320 * 4, sums) if dense else 8 * 320)


@pytest.mark.usefixtures("small_digests")
@pytest.mark.parametrize("loss_reduction", [None, "sum"], ids=["ghost", "book_keeping"])
def test_the_planner_keeps_no_per_sample_gradient_where_memory_is_short(loss_reduction, private):
    inputs, targets = batch(4, 16, 320, 4, torch.float32)
    largest = {}
    for budget in (10**9, 1):
        engine, model, _, _ = private(
            make_head(320, 4, chunk_tokens=8, dtype=torch.float32),
            memory_budget=budget,
            loss_reduction=loss_reduction,
            verify_first_batch=False,
        )
        with Largest() as seen:
            engine.backward(model(inputs, targets))
        largest[budget] = seen.elements
    assert largest == {10**9: 4 * 320 * 4, 1: 8 * 320}


@pytest.mark.parametrize("clipping", ["flat", None], ids=["private", "plain"])
def test_a_compiled_head_agrees_with_an_eager_one(clipping, private, sums, distance):
    torch.compiler.reset()
    inputs, targets = token_batch()
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = TiedLM(bias=True)
        called = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        if clipping is None:
            called(inputs, targets).sum().backward()
            found.append({n: p.grad for n, p in model.named_parameters()})
            continue
        engine, model, _, _ = private(model, max_grad_norm=0.2, clipping=clipping)
        if compiled:
            engine.prepare(len(inputs))
        engine.backward(called(inputs, targets))
        found.append(sums(engine, model))
    assert distance(found[1], found[0]) <= 2e-6


def test_a_private_head_under_autocast_agrees_with_an_eager_one_in_bf16(private, sums, distance):
    x, targets = batch(4, dtype=torch.float32)
    found = []
    for mode in GRAD_SAMPLE_MODES:
        engine, model, _, _ = private(
            make_head(dtype=torch.float32), max_grad_norm=0.2, grad_sample_mode=mode
        )
        with torch.autocast("cpu", torch.bfloat16):
            losses = model(x, targets)
        engine.backward(losses)
        found.append(sums(engine, model))
    plain = make_head(dtype=torch.float32)
    reference = torch.stack(
        [
            torch.autograd.grad(plain(x[i : i + 1], targets[i : i + 1]).sum(), plain.weight)[0]
            for i in range(4)
        ]
    )
    factors = (0.2 / reference.flatten(1).norm(dim=1)).clamp(max=1)
    expected = {"weight": torch.einsum("b,bve->ve", factors, reference)}
    for each in found:
        assert distance(each, expected) <= 1e-2
        assert distance(each, found[0]) <= 1e-6


# The language model


@pytest.mark.parametrize("chunked_loss", [True, False])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@every_kind
def test_the_language_model_returns_losses_for_targets_and_trains_privately(
    kind, tied, chunked_loss, agree
):
    torch.manual_seed(0)
    model = LongContextLM(
        11, 8, 1, 2, max_seq_len=9, tie_embeddings=tied, chunked_loss=chunked_loss
    )
    agree(model, *token_batch(), **kind)


def test_the_language_model_has_the_same_state_and_logits_with_either_head():
    models = []
    for chunked_loss in (False, True):
        torch.manual_seed(0)
        models.append(LongContextLM(11, 8, 1, 2, max_seq_len=9, chunked_loss=chunked_loss))
    plain, chunked = models
    assert list(plain.state_dict()) == list(chunked.state_dict())
    inputs, targets = token_batch()
    assert torch.equal(plain(inputs), chunked(inputs))
    torch.testing.assert_close(plain(inputs, targets), chunked(inputs, targets))


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"in_features": 0}, "in_features=0: expected an integer >= 1"),
        ({"num_classes": 2.5}, "num_classes=2.5: expected an integer >= 1"),
        ({"reduction": "none"}, "reduction='none': expected one of 'mean', 'sum'"),
        ({"chunk_tokens": 0}, "chunk_tokens=0: expected an integer >= 1"),
        ({"ignore_index": None}, "ignore_index=None: expected an integer"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        LinearCrossEntropy(**{"in_features": 5, "num_classes": 13, **arguments})


@pytest.mark.parametrize("is_private", [False, True], ids=["plain", "private"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x.float(), y), r"x has dtype torch.float32, the weight torch.float64"),
        (lambda x, y: (x, y.int()), r"targets have dtype torch.int32.*targets.long\(\)"),
        (lambda x, y: (x[..., :4], y), r"x of shape \(3, 7, 4\).*\[B, ..., 5\]"),
        (lambda x, y: (x, y[:, 1:]), r"targets of shape \(3, 6\)"),
        (lambda x, y: (x[0, 0], y[0, 0]), r"x of shape \(5,\).*unsqueeze\(0\)"),
    ],
    ids=["dtype", "int32", "width", "tokens", "no-batch"],
)
def test_wrong_inputs_are_refused_with_what_would_do(change, message, is_private, private):
    head = make_head()
    if is_private:
        _, head, _, _ = private(head)
    with pytest.raises(ValueError, match=message):
        head(*change(*batch()))


@every_kind
@pytest.mark.parametrize("wrong", [13, -1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_sample_with_a_target_out_of_range_adds_nothing(
    reduction, wrong, kind, small_tiles, private, sums
):
    x, targets = batch()
    found = []
    for rows in ([0, 1, 2], [0, 2]):
        engine, head, *_ = private(make_head(reduction=reduction), **kind)
        targets[1, 2] = wrong
        losses = head(x[rows], targets[rows])
        assert losses.isnan().tolist() == [row == 1 for row in rows]
        engine.backward(losses)
        assert engine.diagnostics()["nonfinite_samples"] == len(rows) - 2
        found.append(sums(engine, head)["weight"])
    assert torch.equal(*found)
