"""No forward rewrites a trained parameter, and state_dict() has no entries of the data."""

import copy
import io
import threading

import pytest
import torch
from torch import nn

from dpflash.verification import rewritten
from dpflash.verification.contents import Comparisons


class Rewriting(nn.Module):
    """Rewrites its weights in one of several ways, once `forwards` reaches `at`."""

    def __init__(self, how=None, at=0):
        super().__init__()
        self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 2)
        self.how, self.at, self.forwards = how, at, 0

    def forward(self, x):
        if self.forwards >= self.at:
            self.rewrite(x.detach())
        self.forwards += 1
        return self.b(torch.tanh(self.a(x)))

    @torch.no_grad()
    def rewrite(self, x):
        if self.how == "codes":
            self.b.weight[0] = x[0, :4]
        elif self.how == "copied":
            self.a.bias.copy_(x.mean())
        elif self.how == "both":
            self.a.bias.copy_(x.mean()), self.b.bias.copy_(x.mean())
        elif self.how == "assigned":
            self.a.bias.data = x.mean(0)[:4]
        elif self.how == "data":
            self.a.bias.data.add_(x.mean())
        elif self.how == "moved":
            self.a.bias.data = self.a.bias.data.clone()
        elif self.how == "bounded":
            self.a.weight.data = torch.renorm(self.a.weight.data, 2, 0, 1e-3)


REWRITTEN = {"codes": "b.weight", "copied": "a.bias", "assigned": "a.bias", "data": "a.bias"}
REWRITTEN["both"] = "a.bias', 'b.bias"


def data(seed=1):
    return torch.randn(20, 5, generator=torch.Generator().manual_seed(seed))


def steps(engine, model, optimizer, loader):
    for (x,) in loader:
        engine.backward(model(x).square().sum(1))
        optimizer.step()
        optimizer.zero_grad()


def step(engine, model, optimizer, seed=1):
    engine.backward(model(data(seed)).square().sum(1))
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("verify", [True, False], ids=["proven", "unproven"])
@pytest.mark.parametrize("how", REWRITTEN)
def test_a_trained_weight_that_the_first_forward_rewrites_is_refused_by_name(how, verify, private):
    engine, model, *_ = private(Rewriting(how), verify_first_batch=verify)
    name = f"'{REWRITTEN[how]}'"
    said = rf"^{name} changed inside a forward.*number of forwards.*allow_buffers=\[{name}\]"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=said):
            engine.backward(model(data()).square().sum(1))
    with pytest.raises(RuntimeError, match=said):
        model.state_dict()
    with pytest.warns(UserWarning, match=f"not for release: '{REWRITTEN[how]}'"):
        engine.detach(model)


@pytest.mark.parametrize("grad", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("how", ["codes", "copied", "assigned"])
def test_a_late_forward_is_seen_too_and_loaded_weights_are_accepted(how, grad, private):
    engine, model, optimizer, _ = private(Rewriting(how, at=1000), verify_first_batch=False)
    for seed in range(3):
        step(engine, model, optimizer, seed)
    released = copy.deepcopy(model.state_dict())
    model.at = 0
    with torch.set_grad_enabled(grad):
        model(data())
    model.at = 1000
    refused = pytest.raises(RuntimeError, match=f"^'{REWRITTEN[how]}' changed inside a forward")
    with refused:
        torch.save(model, io.BytesIO())
    with refused:
        step(engine, model, optimizer)
    model.load_state_dict(released)
    step(engine, model, optimizer)
    model.state_dict()


def test_a_write_to_data_is_found_within_some_forwards(private, monkeypatch):
    monkeypatch.setattr(rewritten, "EVERY", 4)
    engine, model, optimizer, _ = private(Rewriting("data", at=5), verify_first_batch=False)
    with pytest.raises(RuntimeError, match=r"^'a.bias' changed inside"):
        for _ in range(9):
            step(engine, model, optimizer)


def test_a_device_that_has_not_compared_yet_is_waited_for_only_before_weights_leave(
    private, monkeypatch
):
    read = Comparisons.differing

    def later(self, wait):
        return read(self, wait=True) if wait else []

    monkeypatch.setattr(Comparisons, "differing", later)
    engine, model, optimizer, _ = private(Rewriting("data"), verify_first_batch=False)
    step(engine, model, optimizer)
    with pytest.raises(RuntimeError, match=r"^'a.bias' changed inside"):
        model.state_dict()
    with pytest.raises(RuntimeError, match=r"^'a.bias' changed inside"):
        step(engine, model, optimizer)


def test_what_a_loop_changes_between_forwards_and_what_only_moves_is_let_be(private):
    """cuDNN's flatten_parameters gives weights another address in each forward."""
    made = private(Rewriting("moved"), data(), batch_size=20)
    engine, model, optimizer, _ = made
    for _ in range(3):
        model(data())
        with torch.no_grad():
            model.b.weight.clamp_(-0.5, 0.5)
            model.a.bias.data = model.a.bias.data * 0.9
        steps(*made)
    with engine.public_data():
        model.how = "codes"
        model(data(2))
        model.how = "moved"
    step(engine, model, optimizer)
    assert engine.verified is True
    model.how = "data"
    with pytest.raises(RuntimeError, match=r"^'a.bias' changed inside"):
        step(engine, model, optimizer)


def test_a_rewrite_that_depends_on_no_data_is_allowed_by_name(private):
    options = {"batch_size": 20, "allow_buffers": ["a.weight"]}
    engine, model, optimizer, loader = private(Rewriting("bounded"), data(), **options)
    for _ in range(2):
        steps(engine, model, optimizer, loader)
    model(data())
    assert float(model.state_dict()["a.weight"].norm(dim=1).max()) < 2e-3
    assert engine.verified is True


class Metric(nn.Module):
    """As torchmetrics: states are attributes, which state_dict() writes."""

    def __init__(self):
        super().__init__()
        self.total = torch.zeros(())

    def state_dict(self, *args, destination=None, prefix="", keep_vars=False):
        super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        destination[prefix + "total"] = self.total
        return destination


class Extra(nn.Module):
    def __init__(self):
        super().__init__()
        self.kept = {"scale": torch.ones(2), "names": ["a", None], "step": 0}

    def get_extra_state(self):
        return copy.deepcopy(self.kept)

    def set_extra_state(self, state):
        self.kept = state


class Saving(Rewriting):
    """Has `seen` of the data, which an entry of state_dict() shows once `kind` is set."""

    def __init__(self, kind):
        super().__init__()
        self.metric, self.extra = Metric(), Extra()
        self.register_buffer("table", torch.ones(3), persistent=False)
        self.kind, self.seen = None, torch.zeros(())
        if kind == "pre-hook":
            self.a.register_state_dict_pre_hook(self.before_saving)
        self.register_state_dict_post_hook(self.saving)

    def rewrite(self, x):
        self.seen = x.mean()
        if self.kind == "metric":
            self.metric.total += x.mean()
        elif self.kind == "extra":
            self.extra.kept["step"] = int((x > 0).sum())

    @torch.no_grad()
    def before_saving(self, layer, prefix, keep_vars):
        if self.kind == "pre-hook":
            layer.bias.add_(self.seen)

    @staticmethod
    def saving(self, state, prefix, metadata):
        state[prefix + "half"] = state[prefix + "a.weight"][:2]
        state[prefix + "b.weight"] = state[prefix + "b.weight"].half()
        state[prefix + "table"] = self.table.clone()
        metadata["version of tables"] = 3
        if self.kind == "hook":
            state[prefix + "new"] = self.seen
        elif self.kind == "known name":
            state[prefix + "b.bias"] = self.seen.expand(2)
        elif self.kind == "object":
            state[prefix + "new"] = lambda: self.seen
        elif self.kind == "metadata":
            metadata["seen"] = float(self.seen)


ENTRIES = {
    "metric": "metric.total",
    "extra": "extra._extra_state",
    "hook": "new",
    "known name": "b.bias",
    "object": "new",
    "metadata": "seen",
    "pre-hook": "a.bias",
}


@pytest.mark.parametrize(("kind", "name"), ENTRIES.items(), ids=ENTRIES)
def test_an_entry_of_state_dict_that_holds_the_data_does_not_leave(kind, name, private, tmp_path):
    engine, model, optimizer, _ = private(Saving(kind))
    whole = nn.ModuleDict({"net": model})
    step(engine, model, optimizer)
    assert set(whole.state_dict()) >= {"net.half", "net.table", "net.metric.total"}
    model.kind = kind
    model(data())
    for leave in (
        model.state_dict,
        whole.state_dict,
        lambda: engine.save_checkpoint(tmp_path / "c"),
    ):
        said = rf"^'{name}' (of state_dict.*torch.save|changed inside)"
        with pytest.raises(RuntimeError, match=said):
            leave()
    assert not list(tmp_path.iterdir())
    with pytest.warns(UserWarning, match=f"not for release: '{name}'"):
        engine.detach(model)


@pytest.mark.parametrize("kept", [threading.Lock(), lambda: 1], ids=type)
def test_an_entry_that_cannot_be_compared_is_refused_before_training(kept, private):
    model = Saving(None)
    model.extra.get_extra_state = lambda: kept
    with pytest.raises(ValueError, match="^'extra._extra_state' of state_dict.* cannot be pick"):
        private(model)
    private(model, allow_buffers=["extra._extra_state"])
    assert model.state_dict()["extra._extra_state"] is kept


def test_a_generator_that_is_saved_is_compared_by_its_state(private):
    model, generator = Saving(None), torch.Generator()
    model.extra.get_extra_state = lambda: {"generators": [generator]}
    engine, model, optimizer, _ = private(model)
    step(engine, model, optimizer)
    assert model.state_dict()["extra._extra_state"]["generators"] == [generator]
    torch.rand(1, generator=generator)
    with pytest.raises(RuntimeError, match=r"^'extra._extra_state' of state_dict"):
        model.state_dict()


def test_entries_that_are_loaded_cast_or_allowed_by_name_leave(private):
    engine, model, optimizer, _ = private(Saving(None), allow_buffers=["metric.total"])
    model.kind = "metric"
    step(engine, model, optimizer)
    state = model.state_dict()
    assert state["metric.total"] != 0
    state["extra._extra_state"] = {"scale": torch.zeros(3)}
    model.load_state_dict(state, strict=False)
    step(engine, model, optimizer)
    model.double()
    assert model.state_dict()["extra._extra_state"]["scale"].shape == (3,)
    copy.deepcopy(model)
