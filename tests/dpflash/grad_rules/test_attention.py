"""Self-attention as one node of autograd gives what its parts give, for every mode of clipping."""

import copy
import pickle

import pytest
import torch
from kinds import KINDS, every_kind
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpflash.nn import MultiheadAttention
from dpflash.patterns import Adaptive, Dilated, SlidingWindow

WINDOW = SlidingWindow(window=3, causal=True)
CASES = {
    "plain": {},
    "no_bias": {"bias": False},
    "grouped": {"num_kv_heads": 2},
    "rotary": {"rotary": True, "num_kv_heads": 1},
    "window_sinks_alibi": {"pattern": WINDOW, "attention_sinks": True, "alibi": True},
    "rotary_sinks": {"rotary": True, "attention_sinks": True},
    "dilated": {"pattern": Dilated(segment_lengths=[4, 8], dilation_rates=[1, 2], causal=False)},
    "autocast": {"num_kv_heads": 2, "attention_sinks": True},
}


class Block(nn.Module):
    def __init__(self, causal=True, **options):
        super().__init__()
        self.attention = MultiheadAttention(16, 4, **options)
        self.causal = causal and options.get("pattern") is None

    def forward(self, x, padding=None):
        return x + self.attention(x, key_padding_mask=padding, is_causal=self.causal)[0]


def loss_of(model, x, *padding):
    return model(x, *padding).square().mean((1, 2))


def build(**options):
    torch.manual_seed(0)
    model = Block(**options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return model


def samples(tokens=11):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, tokens, 16, generator=generator)
    return x * torch.tensor([1.0, 2.0, 0.2, 0.5]).view(-1, 1, 1)


def nodes_of(tensor):
    found, waiting = [], [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.append(node)
            waiting += [parent for parent, _ in node.next_functions]
    return [type(node).__name__ for node in found]


def taken_apart(model):
    """A hook between the parts makes the block run as the modules it consists of."""
    model.attention.out_proj.register_forward_hook(lambda *_: None)


@every_kind
@pytest.mark.parametrize("case", CASES)
def test_one_node_gives_what_its_parts_give(private, sums, distance, kind, case):
    found = []
    x = samples()
    for apart in (False, True):
        model = build(**CASES[case])
        if apart:
            taken_apart(model)
        engine, model, optimizer, _ = private(model, batch_size=4, max_grad_norm=0.2, **kind)
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
            output = model(leaf)
            names = nodes_of(output)
            losses = output.float().square().mean((1, 2))
        assert names.count("_SelfAttentionBackward") == (not apart)
        assert ("_LinearBackward" in names) == apart
        engine.backward(losses)
        found.append((sums(engine, model), output.detach(), leaf.grad, engine.diagnostics()))
    one, parts = found
    close = 2e-2 if case == "autocast" else 1e-5
    assert distance(one[0], parts[0]) < close
    torch.testing.assert_close(one[1], parts[1])
    assert (one[2] - parts[2]).norm() <= close * parts[2].norm()
    assert one[3]["clip_fraction"] == parts[3]["clip_fraction"] > 0


@every_kind
@pytest.mark.parametrize("case", [c for c in CASES if c != "autocast"])
def test_one_node_equals_the_per_sample_loop(from_loop, kind, case):
    model, x = build(**CASES[case]), samples(tokens=7)
    assert from_loop(model, loss_of, x, max_grad_norm=0.2, **kind) < 1e-5


def test_padded_keys_get_no_gradient_in_the_node(private, sums, distance, oracle):
    x = samples()
    padding = torch.zeros(4, 11, dtype=torch.bool)
    padding[1, 6:], padding[2, :3] = True, True
    model = build(pattern=WINDOW, attention_sinks=True)
    expected = oracle(model, loss_of, x, padding).clipped_sum(0.2)
    engine, model, _, _ = private(model, batch_size=4, max_grad_norm=0.2)
    losses = loss_of(model, x, padding)
    assert "_SelfAttentionBackward" in nodes_of(losses)
    engine.backward(losses)
    assert distance(sums(engine, model), expected) < 1e-5


@pytest.mark.parametrize("frozen", ["qkv_proj.bias", "out_proj.weight", "sinks.weight"])
def test_a_frozen_part_gets_nothing_and_the_rest_what_it_should(
    private, sums, distance, oracle, frozen
):
    model, x = build(attention_sinks=True), samples()
    model.attention.get_parameter(frozen).requires_grad_(False)
    expected = oracle(model, loss_of, x).clipped_sum(0.2)
    engine, model, _, _ = private(model, batch_size=4, max_grad_norm=0.2)
    engine.backward(loss_of(model, x))
    assert distance(sums(engine, model), expected) < 1e-5
    assert model.attention.get_parameter(frozen).grad is None


OTHER_WAYS = {
    "frozen_projection": lambda m: m.attention.qkv_proj.requires_grad_(False),
    "dropout": lambda m: setattr(m.attention, "dropout", 0.5),
    "adaptive": lambda m: setattr(m.attention, "pattern", Adaptive(keep=1, block_size=16)),
    "hook": taken_apart,
}


@pytest.mark.parametrize("change", OTHER_WAYS)
def test_what_the_node_does_not_cover_runs_in_parts(private, change):
    model = build()
    model.causal = False
    OTHER_WAYS[change](model)
    engine, model, _, _ = private(model, batch_size=4)
    losses = loss_of(model, samples(tokens=12))
    assert "_SelfAttentionBackward" not in nodes_of(losses)
    engine.backward(losses)


def test_a_forward_put_on_a_projection_later_is_called(private):
    engine, model, *_ = private(build(), batch_size=4)
    projection, called = model.attention.out_proj, []
    plain = projection.forward
    projection.forward = lambda x: called.append(1) or plain(x)
    engine.backward(loss_of(model, samples()))
    assert called


def test_a_recomputed_block_gives_the_same_sums(private, sums):
    found = []
    for again in (False, True):
        engine, model, _, _ = private(build(rotary=True), batch_size=4, max_grad_norm=0.2)
        x = samples()
        output = checkpoint(model, x, use_reentrant=False) if again else model(x)
        engine.backward(output.square().mean((1, 2)))
        found.append(sums(engine, model))
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])


def test_a_block_called_twice_adds_its_uses_before_clipping(from_loop):
    def twice(model, x):
        return model(model(x)).square().mean((1, 2))

    model, x = build(attention_sinks=True), samples()
    for kind in KINDS[:3]:
        assert from_loop(model, twice, x, max_grad_norm=0.2, **kind) < 1e-5


def test_an_empty_batch_and_a_single_sample(private, sums, distance, oracle):
    model = build(num_kv_heads=2)
    expected = oracle(model, loss_of, samples()[:1]).clipped_sum(0.2)
    engine, model, _, _ = private(model, batch_size=4, max_grad_norm=0.2)
    losses = loss_of(model, samples()[:0])
    assert losses.shape == (0,)
    engine.backward(losses)
    engine.detach(model)
    engine, model, _, _ = private(model, batch_size=4, max_grad_norm=0.2)
    engine.backward(loss_of(model, samples()[:1]))
    assert distance(sums(engine, model), expected) < 1e-5


def test_a_nonfinite_sample_contributes_nothing(private, sums):
    found = []
    for value in (torch.nan, torch.inf):
        x = samples()
        x[2, 3] = value
        engine, model, _, _ = private(build(), batch_size=4, max_grad_norm=0.2)
        engine.backward(loss_of(model, x))
        found.append(sums(engine, model))
    engine, model, _, _ = private(build(), batch_size=3, max_grad_norm=0.2)
    engine.backward(loss_of(model, samples()[[0, 1, 3]]))
    for one in found:
        for name, total in sums(engine, model).items():
            torch.testing.assert_close(one[name], total)


def test_copies_pickles_and_the_detached_model_are_plain(private):
    engine, model, _, _ = private(build(), batch_size=4)
    keys = list(build().state_dict())
    for plain in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(plain.attention) is MultiheadAttention
    assert isinstance(model.attention, MultiheadAttention) and list(model.state_dict()) == keys
    assert type(engine.detach(model).attention) is MultiheadAttention
    loss_of(model, samples()).sum().backward()
    assert model.attention.qkv_proj.weight.grad is not None


@pytest.mark.cases(0)
@pytest.mark.parametrize("case", ["grouped", "rotary", "window_sinks_alibi"])
def test_the_kernels_write_into_one_buffer(private, sums, distance, monkeypatch, case):
    """The path of a GPU, run by Triton's interpreter."""
    attention_launch = pytest.importorskip("dpflash.kernels.attention_launch")
    from dpflash.kernels import attention as dispatch

    x, found = samples(tokens=19), []
    for kernels in (False, True):
        if kernels:
            monkeypatch.setattr(dispatch, "_backend", lambda q: attention_launch)
        engine, model, _, _ = private(build(**CASES[case]), batch_size=4, max_grad_norm=0.2)
        leaf = x.clone().requires_grad_()
        losses = loss_of(model, leaf)
        assert "_SelfAttentionBackward" in nodes_of(losses)
        engine.backward(losses)
        found.append((sums(engine, model), leaf.grad))
    assert distance(found[1][0], found[0][0]) < 1e-5
    torch.testing.assert_close(found[1][1], found[0][1], atol=1e-6, rtol=1e-4)
