"""Every leaf that private losses train is behind a clipping gate, or is refused by name."""

import functools
import gc
import types

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpflash


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.public = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x):
        return self.last(self.public(torch.tanh(self.first(x))))


class Prompted(Body):
    def forward(self, x, prompt=None):
        return super().forward(x if prompt is None else x + prompt.mean(0))


class Recomputed(torch.autograd.Function):
    """A reentrant checkpoint of another library."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.run(x), dy)
        return None, x.grad


class Held(torch.autograd.Function):
    """It trains what it keeps in its own way, as reversible layers do."""

    @staticmethod
    def forward(ctx, held, run, x):
        ctx.held, ctx.run = held, run
        ctx.save_for_backward(x)
        return run(x).detach()

    @staticmethod
    def backward(ctx, dy):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.set_grad_enabled(True):
            y = ctx.run(x)
        y.backward(dy)
        return None, None, x.grad


class Runner:
    def __init__(self, layer):
        self.layer = layer

    def __call__(self, x):
        return self.layer(x)

    run = __call__


class Wrapped(nn.Module):
    """Its layer is no module of it."""

    def __init__(self, layer):
        super().__init__()
        self.held = [layer]

    def forward(self, x):
        return self.held[0](x)


class OwnParameter(nn.Parameter):
    pass


def _subclass(model, x, outside):
    if outside.weight.requires_grad:
        outside.weight = OwnParameter(outside.weight.data)
        outside.bias.requires_grad_(False)
    return outside(model(x))


def _compiled(model, x, outside):
    return torch.compile(outside, backend="aot_eager")(model(x))


LOSSES = {
    "head": lambda model, x, outside: outside(model(x)),
    "encoder": lambda model, x, outside: model(outside(x[:, :2]).repeat(1, 2)),
    "prompt": lambda model, x, outside: model(x + outside.bias.repeat(2)),
    "checkpointed": lambda model, x, outside: checkpoint(outside, model(x), use_reentrant=False),
    "subclass": _subclass,
    "compiled": _compiled,
    "temperature": lambda model, x, outside: model(x) / torch.ones((), requires_grad=True),
    "weights": lambda model, x, outside: model(x) * torch.ones(2, requires_grad=True),
}


@pytest.mark.parametrize("scalar", [False, True], ids=["losses", "scalar"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_leaf_outside_of_the_private_model_gets_no_gradient(name, scalar, private):
    engine, model, *_ = private(Body(), loss_reduction="sum" if scalar else None)
    outside = nn.Linear(2, 2)

    def train():
        losses = LOSSES[name](model, torch.randn(20, 4), outside).square().sum(1)
        losses.sum().backward() if scalar else engine.backward(losses)

    what = "tensor" if name in ("temperature", "weights") else r"parameter of shape \(2,.* outside"
    with pytest.raises(RuntimeError, match=f"^a {what}.*no private layer clips its gradient"):
        train()
    assert not engine._step.sums
    assert scalar or outside.bias.grad is None
    outside.requires_grad_(False)
    if what != "tensor":
        train()


REENTRANT = {
    "module": lambda outside, h: checkpoint(outside, h, use_reentrant=True),
    "method": lambda outside, h: checkpoint(
        functools.partial(outside.forward), h, use_reentrant=True
    ),
    "function": lambda outside, h: checkpoint(lambda h: outside(h), h, use_reentrant=True),
    "wrapped": lambda outside, h: checkpoint(Wrapped(outside), h, use_reentrant=True),
    "root": lambda outside, h: checkpoint(
        lambda h: outside(h).square().sum(1), h, use_reentrant=True
    ),
    "own": Recomputed.apply,
}


@pytest.mark.parametrize("scalar", [False, True], ids=["losses", "scalar"])
@pytest.mark.parametrize("name", REENTRANT)
def test_a_reentrant_checkpoint_outside_of_the_model_is_refused_by_name(name, scalar, private):
    engine, model, *_ = private(Body(), loss_reduction="sum" if scalar else None)
    losses = REENTRANT[name](nn.Linear(2, 2), model(torch.randn(20, 4)))
    losses = losses if losses.ndim == 1 else losses.sum(1)
    with pytest.raises(dpflash.PrivateRefusal, match="makes its graph.*use_reentrant=False"):
        losses.sum().backward() if scalar else engine.backward(losses)
    assert not engine._step.sums


HELD = {
    "module": lambda layer: (None, layer),
    "list": lambda layer: ([layer], lambda x: layer.forward(x)),
    "closure": lambda layer: (None, lambda x: layer(x)),
    "default": lambda layer: (None, lambda x, layer=layer: layer(x)),
    "partial": lambda layer: (None, functools.partial(layer.forward)),
    "weights": lambda layer: (dict(layer.named_parameters()), Wrapped(layer)),
    "object": lambda layer: (None, Runner(layer)),
    "method": lambda layer: (None, Runner(layer).run),
}


@pytest.mark.parametrize("scalar", [False, True], ids=["losses", "scalar"])
@pytest.mark.parametrize("name", HELD)
def test_what_a_function_holds_may_be_trained_in_its_backward(name, scalar, private):
    engine, model, optimizer, _ = private(Body(), loss_reduction="sum" if scalar else None)
    outside = nn.Linear(2, 2)

    def train():
        h = model(torch.randn(20, 4))
        losses = Held.apply(*HELD[name](outside), h).square().sum(1)
        losses.sum().backward() if scalar else engine.backward(losses)

    with pytest.raises(dpflash.PrivateRefusal, match="^a parameter of shape .* outside"):
        train()
    assert not engine._step.sums
    assert outside.weight.grad is None and outside.bias.grad is None
    optimizer.zero_grad()
    outside.requires_grad_(False)
    train()
    assert engine._step.sums


def test_the_root_of_a_scalar_may_be_a_reentrant_checkpoint(private):
    _, model, *_ = private(Body(), loss_reduction="sum")
    outside = nn.Linear(2, 2)
    loss = checkpoint(lambda h: outside(h).sum(), model(torch.randn(20, 4)), use_reentrant=True)
    with pytest.raises(dpflash.PrivateRefusal, match="use_reentrant=False"):
        loss.backward()


def test_a_frozen_layer_of_the_model_may_be_in_a_reentrant_checkpoint(private):
    class Checkpointed(Body):
        def forward(self, x):
            h = torch.tanh(self.first(x))
            return self.last(checkpoint(self.public, h, use_reentrant=True))

    # The proof differentiates by handles, which torch refuses for reentrant checkpoints.
    engine, model, *_ = private(Checkpointed(), verify_first_batch=False)
    engine.backward(model(torch.randn(20, 4)).square().sum(1))
    assert engine._step.sums


def test_no_backward_of_a_scalar_goes_unseen(private):
    """Whenever the head is unfrozen, and whatever the garbage collector knows."""
    _, model, optimizer, _ = private(Body(), loss_reduction="sum")
    outside = nn.Linear(2, 2).requires_grad_(False)
    for _ in range(12):
        outside(model(torch.randn(20, 4))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    outside.requires_grad_(True)
    gc.collect()
    gc.freeze()
    try:
        loss = outside(model(torch.randn(20, 4))).square().sum()
        with pytest.raises(dpflash.PrivateRefusal, match="^a parameter of shape"):
            torch.autograd.backward([torch.autograd.graph.get_gradient_edge(loss)])
    finally:
        gc.unfreeze()


def test_a_frozen_layer_that_is_trained_later_is_refused_with_the_way_out(private):
    body = Body()
    body.first.requires_grad_(False)
    engine, model, *_ = private(body)
    model.first.requires_grad_(True)
    with pytest.raises(
        RuntimeError, match="^'first.(weight|bias)', which was frozen.*unfreeze it"
    ):
        engine.backward(model(torch.randn(20, 4)).square().sum(1))

    engine, model, optimizer, _ = private(Body())
    for is_trained in (False, True):
        model.first.requires_grad_(is_trained)
        engine.backward(model(torch.randn(20, 4)).square().sum(1))
        assert (model.first.weight in engine._step.sums) == is_trained
        optimizer.step()
        optimizer.zero_grad()


def test_inputs_may_ask_for_gradients_and_kept_tensors_may_not(private):
    """Adversarial training has a new perturbation for each batch; a kept one is trained."""
    engine, model, optimizer, _ = private(Body())
    for _ in range(3):
        x = torch.randn(20, 4, requires_grad=True)
        (direction,) = torch.autograd.grad(model(x).square().sum(), x)
        moved = (x + direction.sign()).detach().requires_grad_()
        engine.backward(model(moved).square().sum(1))
        assert moved.grad.shape == (20, 4)
        optimizer.step()
        optimizer.zero_grad()
    kept = torch.zeros(20, 4, requires_grad=True)
    engine.backward(model(torch.randn(20, 4) + kept).square().sum(1))
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="^a tensor outside"):
        engine.backward(model(torch.randn(20, 4) + kept).square().sum(1))


class Frozen(Body):
    """Its first layer is frozen, as LoRA has it."""

    def forward(self, x, prompt=None):
        h = self.public(x)
        if prompt is not None:
            h = h + prompt.reshape(-1, 4).mean(0)
        return self.last(torch.tanh(self.first(h)))


def _hooked(hook):
    def run(model, x):
        with model.public.register_forward_hook(hook):
            return model(x)

    return run


def _leaf(*shape):
    return torch.zeros(*shape).requires_grad_()


ONE_ROW = {
    "argument": lambda model, x: model(x.requires_grad_()),
    "view of it": lambda model, x: model(x.requires_grad_().view(2, 2).flatten()[None]),
    "computed from it": lambda model, x: model((x + 1).requires_grad_()),
    "output of a layer": _hooked(lambda _, args, h: h.requires_grad_()),
}
KEPT_IN_ONE_ROW = {
    "prompt": lambda model, x: model(x, _leaf(1, 4)),
    "prompt beside the leaf": lambda model, x: model(x.requires_grad_(), _leaf(1, 4)),
    "prompt beside a copy": lambda model, x: model(x.double().float(), _leaf(1, 4)),
    "prompt of its own length": lambda model, x: model(x, _leaf(1, 3, 4)),
    "perturbation": lambda model, x: model(x + _leaf(1, 4)),
    "layers": lambda model, x: model.last(model.first(x + _leaf(1, 4))),
    "output of a hook": _hooked(lambda _, args, h: h + _leaf(1, 4)),
    "hook's own leaf": _hooked(lambda _, args, h: _leaf(1, 4)),
}


@pytest.mark.parametrize("scalar", [False, True], ids=["losses", "scalar"])
@pytest.mark.parametrize("name", [*ONE_ROW, *KEPT_IN_ONE_ROW])
def test_in_one_row_a_leaf_is_of_the_batch_or_made_by_the_model(name, scalar, private):
    """There the shape does not tell whether it is kept for later batches, though it is new."""
    options = {"loss_reduction": "sum" if scalar else None, "foreign_batches": False}
    engine, model, _, loader = private(
        Frozen(), torch.randn(8, 4), physical_batch_size=1, **options
    )
    run = {**ONE_ROW, **KEPT_IN_ONE_ROW}[name]
    losses = run(model, next(iter(loader))[0]).square().sum(1)
    if name in ONE_ROW:
        losses.sum().backward() if scalar else engine.backward(losses)
        assert engine._step.sums
        return
    with pytest.raises(dpflash.PrivateRefusal, match="with one row in a batch, the"):
        losses.sum().backward() if scalar else engine.backward(losses)


@pytest.mark.parametrize("put", [nn.Module.register_buffer, setattr])
def test_a_trained_buffer_or_attribute_is_named(put, private):
    class Shifted(Body):
        def forward(self, x):
            return super().forward(x + self.first.shift)

    model = Shifted()
    put(model.first, "shift", torch.zeros(4, requires_grad=True))
    engine, model, *_ = private(model)
    with pytest.raises(RuntimeError, match="^'first.shift', a buffer or .* make it an nn.Param"):
        engine.backward(model(torch.randn(20, 4)).square().sum(1))


TENSORS = {
    # Of as many classes, or tokens, as the batch has rows, or twice as many.
    "class weights": lambda model, x: model(x) * torch.ones(20, requires_grad=True)[:2],
    "more class weights": lambda model, x: model(x) * torch.ones(40, requires_grad=True)[:2],
    "soft prompt": lambda model, x: model(x + torch.zeros(20, 3, requires_grad=True).sum()),
    "prompt of the model": lambda model, x: model(x, torch.zeros(40, 4, requires_grad=True)),
    "column": lambda model, x: model(x) * torch.ones(20, 1, requires_grad=True).sum(),
}


@pytest.mark.parametrize("scalar", [False, True], ids=["losses", "scalar"])
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_that_is_no_input_is_refused_though_it_is_new(name, scalar, private):
    engine, model, *_ = private(Prompted(), loss_reduction="sum" if scalar else None)
    losses = TENSORS[name](model, torch.randn(20, 4)).square().sum(1)
    with pytest.raises(dpflash.PrivateRefusal, match="^a tensor outside"):
        losses.sum().backward() if scalar else engine.backward(losses)


INPUTS = {
    "argument": ((20, 4), lambda model, x: model(x)),
    "argument of one row": ((1, 4), lambda model, x: model(x)),
    "view": ((20, 2, 2), lambda model, x: model(x.flatten(1))),
    "perturbation": ((20, 4), lambda model, x: model(torch.randn(20, 4) + x)),
    "layers": ((20, 2, 2), lambda model, x: model.last(model.first(x.flatten(1)))),
}


@pytest.mark.parametrize("scalar", [False, True], ids=["losses", "scalar"])
@pytest.mark.parametrize("name", INPUTS)
def test_an_input_gets_its_gradient(name, scalar, private):
    engine, model, *_ = private(Body(), loss_reduction="sum" if scalar else None)
    shape, run = INPUTS[name]
    x = torch.randn(shape, requires_grad=True)
    losses = run(model, x).square().sum(1)
    losses.sum().backward() if scalar else engine.backward(losses)
    assert engine._step.sums
    assert x.grad is not None


def _parts(model, x):
    return model.last(torch.tanh(model.first(x)))


@pytest.mark.parametrize("scalar", [False, True], ids=["losses", "scalar"])
def test_a_forward_that_hides_the_private_one_is_refused(scalar, private):
    """One around it, such as that of Accelerator.prepare, is not."""
    engine, model, optimizer, _ = private(Body(), loss_reduction="sum" if scalar else None)
    own = model.forward

    def train(run, forward):
        model.forward = forward
        losses = run(torch.randn(20, 4)).square().sum(1)
        losses.sum().backward() if scalar else engine.backward(losses)
        optimizer.step()
        optimizer.zero_grad()

    around = functools.wraps(own)(lambda x: own(x))
    for forward in (own, lambda x: own(2 * x), around):
        train(model, forward)
    train(functools.partial(_parts, model), around)
    for hiding in (functools.partial(_parts, model), types.MethodType(_parts, model)):
        with pytest.raises(dpflash.PrivateRefusal, match="^model.forward was assigned"):
            train(model, hiding)
    assert not engine._step.sums


def test_public_data_may_train_what_is_outside(private):
    engine, model, *_ = private(Body())
    outside = nn.Linear(2, 2)
    with engine.public_data():
        outside(model(torch.randn(5, 4))).square().sum().backward()
    assert outside.weight.grad is not None
    with torch.no_grad():
        weights = outside(torch.ones(20, 2)).sum(1)
    engine.backward(model(torch.randn(20, 4)).sum(1) * weights)
