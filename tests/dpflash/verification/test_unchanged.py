"""Nothing but released parameters changes: what a forward leaves in the model is refused."""

import copy
import io
import pickle
from itertools import chain
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import orthogonal, weight_norm
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash.refusal import PrivateRefusal, PrivateWarning
from dpflash.verification import unchanged


class Keeping(nn.Module):
    """Keeps something of each batch in one of several modes."""

    def __init__(self, how=None, width=5):
        super().__init__()
        self.a, self.b = nn.Linear(width, 4), nn.Linear(4, 2)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.table = nn.Embedding(7, width).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("outside", torch.zeros(width), persistent=False)
        self.register_buffer("codes", torch.randn(3, width, generator=_generator()))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("nothing", None)
        self.how = how

    def forward(self, x):
        self.keep(x.detach())
        return self.b(torch.tanh(self.a(self.frozen(x))))

    def keep(self, x):
        if self.how == "mean":
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        elif self.how == "data":
            self.mean.data.add_(x.mean(0))
        elif self.how == "assigned":
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        elif self.how == "codes":
            self.codes[torch.cdist(x, self.codes).argmin(1)] = x
        elif self.how == "outside":
            self.outside.add_(x.mean(0))
        elif self.how == "frozen":
            self.frozen.weight.data.add_(x.mean())
        elif self.how == "frozen, other parameter":
            self.frozen.bias = nn.Parameter(x.mean(0), requires_grad=False)
        elif self.how == "new":
            self.register_buffer("last", x.mean(0))
        elif self.how == "none before":
            self.nothing = x.mean(0)
        elif self.how == "steps":
            self.steps += 1


def _generator():
    return torch.Generator().manual_seed(0)


KEPT = {
    "mean": "mean",
    "data": "mean",
    "assigned": "mean",
    "codes": "codes",
    "outside": "outside",
    "frozen": "frozen.weight",
    "frozen, other parameter": "frozen.bias",
    "new": "last",
    "none before": "nothing",
}


def data(size=20, seed=1):
    return torch.randn(size, 5, generator=torch.Generator().manual_seed(seed))


def step(engine, model, optimizer=None, seed=1, reduction=None):
    losses = model(data(seed=seed)).square().sum(1)
    if reduction is None:
        engine.backward(losses)
    else:
        losses.sum().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("verify", [True, False], ids=["proven", "unproven"])
@pytest.mark.parametrize("reduction", [None, "sum"])
@pytest.mark.parametrize(("how", "name"), KEPT.items(), ids=KEPT)
def test_what_a_forward_keeps_of_the_batch_is_refused_by_name(
    how, name, reduction, verify, private
):
    engine, model, *_ = private(Keeping(how), loss_reduction=reduction, verify_first_batch=verify)
    refused = rf"^'{name}' changed since make_private.*count releases.*allow_buffers=\['{name}'\]"
    with pytest.raises(RuntimeError, match=refused):
        step(engine, model, reduction=reduction)
    assert engine._step.sums == {}
    assert all(p.grad is None for p in model.parameters())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"^'{name}' changed"):
            step(engine, model, seed=2, reduction=reduction)


LEAVING = {
    "state_dict": lambda engine, model, path: model.state_dict(),
    "checkpoint": lambda engine, model, path: engine.save_checkpoint(path / "c"),
    "pickle": lambda engine, model, path: torch.save(model, io.BytesIO()),
    "copy": lambda engine, model, path: copy.deepcopy(model),
}


@pytest.mark.parametrize("leave", LEAVING.values(), ids=LEAVING)
@pytest.mark.parametrize("how", ["data", "frozen", "mean", "new"])
def test_what_changed_does_not_leave_with_the_weights(how, leave, private, tmp_path):
    """Also where no backward came after the forward, and no version counter moved."""
    engine, model, *_ = private(Keeping(how))
    leave(engine, model, tmp_path)
    (tmp_path / "c").unlink(missing_ok=True)
    with torch.no_grad():
        model(data())
    with pytest.raises(RuntimeError, match=f"'{KEPT[how]}' changed since make_private"):
        leave(engine, model, tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.warns(UserWarning, match=f"not for release: '{KEPT[how]}' changed"):
        engine.detach(model)
    leave_plain = LEAVING["state_dict"]
    assert set(leave_plain(engine, model, tmp_path)) >= {"mean", "frozen.weight"}
    assert type(model) is Keeping
    copy.deepcopy(model)


def _retied(model):
    model.b.bias = nn.Parameter(model.b.bias.detach())


ENTERING = {
    "replaced layer": (lambda model: setattr(model, "b", nn.Linear(4, 2)), "b.weight"),
    "appended layer": (lambda model: model.add_module("c", nn.Linear(4, 2)), "c.weight"),
    "frozen layer": (lambda m: m.add_module("c", nn.PReLU().requires_grad_(False)), "c.weight"),
    "parameter": (lambda m: m.a.register_parameter("c", nn.Parameter(torch.ones(1))), "a.c"),
    "other parameter": (_retied, "b.bias"),
    "pruned": (lambda model: prune.identity(model.a, "weight"), "a.weight|a.weight_mask"),
    "tied": (lambda model: setattr(model.a, "bias", model.a.weight), "a.bias"),
    "orthogonal": (lambda model: orthogonal(model.a), "a.weight|a.parametrizations.*"),
    "spectral": (lambda model: nn.utils.spectral_norm(model.a), "a.weight|a.weight_u"),
}


@pytest.mark.parametrize(("enter", "name"), ENTERING.values(), ids=ENTERING)
def test_a_parameter_that_enters_later_is_refused_by_name(enter, name, private):
    engine, model, optimizer, _ = private(Keeping())
    step(engine, model, optimizer)
    model.add_module("loss", nn.MSELoss())  # has no parameters
    model.same = model.a
    step(engine, model, optimizer)
    model.state_dict()
    losses = model(data()).square().sum(1)
    enter(model)
    for leave in (model.state_dict, lambda: engine.backward(losses), lambda: model(data())):
        with pytest.raises(RuntimeError, match=f"'({name})"):
            leave()


def test_a_write_that_moves_no_counter_is_found_within_some_steps(private, monkeypatch):
    monkeypatch.setattr(unchanged, "EVERY", 4)
    engine, model, optimizer, _ = private(Keeping())
    for seed in range(5):
        step(engine, model, optimizer, seed=seed)
    model.how = "data"
    with pytest.raises(RuntimeError, match="'mean' changed"):
        for seed in range(4):
            step(engine, model, optimizer, seed=seed)


def test_contents_are_compared_in_the_first_backward_and_then_only_now_and_then(
    private, monkeypatch
):
    compared = []
    seen = unchanged.digest
    monkeypatch.setattr(unchanged, "digest", lambda t: compared.append(0) or seen(t))
    engine, model, optimizer, _ = private(Keeping())
    at_first = len(compared)
    assert at_first == 7
    for number in range(unchanged.EVERY + 2):
        compared.clear()
        step(engine, model, optimizer, seed=number % 3)
        # The first forward is repeated, and compared before.
        assert len(compared) == {0: 14, unchanged.EVERY: 7}.get(number, 0)


def test_a_change_that_is_allowed_by_name_is_let_be_and_happens_once_a_step(private):
    """A trial's forward does not count."""
    options = {"batch_size": 20, "one_part": True, "allow_buffers": ["steps"]}
    engine, model, optimizer, loader = private(Keeping("steps"), data(), **options)
    for number in range(3):
        for (x,) in loader:
            engine.backward(model(x).square().sum(1)), optimizer.step()
        assert int(model.steps) == number + 1
    assert engine.verified is True
    assert int(model.state_dict()["steps"]) == 3
    model.how = "mean"
    with pytest.raises(RuntimeError, match="'mean' changed"):
        step(engine, model)


def test_a_buffer_that_is_allowed_may_be_what_the_forward_reads(private):
    class Centred(Keeping):
        def forward(self, x):
            y = super().forward(x - self.mean)
            self.steps += 1
            self.mean = self.mean + 1.0
            return y

    options = {"batch_size": 20, "one_part": True, "allow_buffers": ("steps", "mean")}
    engine, model, optimizer, loader = private(Centred(), data(), **options)
    for (x,) in chain(loader, loader):
        engine.backward(model(x).square().sum(1)), optimizer.step()
    assert engine.verified is True
    assert torch.equal(model.mean, torch.full((5,), 2.0)) and int(model.steps) == 2


@pytest.mark.parametrize(
    ("allowed", "said"),
    [
        (["means"], "has 'means', which is no buffer and no parameter.*mean 'mean'"),
        (["a.weights"], "has 'a.weights', which is no buffer and no parameter.*'a.weight'"),
        ("mean", "allow_buffers='mean': expected a list of names"),
        ([3], r"allow_buffers=\[3\]: expected a list of names"),
    ],
)
def test_allowed_names_must_be_of_the_state(allowed, said, private):
    model = Keeping()
    with pytest.raises(ValueError, match=said):
        private(model, allow_buffers=allowed)
    assert type(model) is Keeping and type(model.a) is nn.Linear


def test_frozen_parameters_are_allowed_by_name_and_so_are_those_of_two_names(private):
    plain = Keeping("frozen")
    plain.again = plain.frozen
    # What depends on the batch is no matter of the proof here.
    options = {"verify_first_batch": False, "allow_buffers": ["again.weight"]}
    engine, model, optimizer, _ = private(plain, **options)
    for _ in range(2):
        step(engine, model, optimizer)


def test_fake_quantisation_whose_observers_see_the_data_is_refused(private):
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    model = nn.Sequential(
        nn.Linear(5, 4), FakeQuantize(MovingAverageMinMaxObserver), nn.Linear(4, 2)
    )
    engine, model, *_ = private(model)
    refused = r"^('1.scale', .*) changed since make_private.*allow_buffers=\[\1\]"
    with pytest.raises(RuntimeError, match=refused):
        step(engine, model)


class Growing(nn.Module):
    """A table of angles as long as the longest sequence, kept outside of state_dict."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(1, 2)
        self.register_buffer("angles", torch.zeros(0), persistent=False)

    def forward(self, x):
        if x.shape[1] > len(self.angles):
            self.register_buffer("angles", torch.arange(x.shape[1]) * 0.1, persistent=False)
        return self.last((x * self.angles[: x.shape[1]].cos()).unsqueeze(2))


def test_a_table_that_grows_with_the_longest_sequence_is_no_change(private):
    engine, model, optimizer, _ = private(Growing())
    for length in (3, 5, 2, 9):
        engine.backward(model(torch.randn(20, length)).square().sum((1, 2)))
        optimizer.zero_grad()
    model.angles.add_(1.0)
    with pytest.raises(RuntimeError, match="'angles' changed"):
        engine.backward(model(torch.randn(20, 2)).square().sum((1, 2)))


# What a user does on purpose


def test_weights_that_are_loaded_are_the_ones_to_compare_with(private, tmp_path):
    other = Keeping()
    with torch.no_grad():
        other.mean.add_(3.0)
        other.frozen.weight.mul_(2.0)
    engine, model, optimizer, _ = private(Keeping())
    step(engine, model, optimizer)
    model.load_state_dict(other.state_dict())
    step(engine, model, optimizer)
    assert torch.equal(model.state_dict()["mean"], other.mean)
    engine.save_checkpoint(tmp_path / "c")
    model.load_state_dict({"codes": torch.zeros(3, 5)}, strict=False)
    step(engine, model, optimizer)
    model.how = "mean"
    model(data())
    # What was not loaded is compared with what it was before.
    model.load_state_dict({"codes": torch.ones(3, 5)}, strict=False)
    with pytest.raises(RuntimeError, match="^'mean' changed"):
        model.state_dict()
    model.load_state_dict(other.state_dict())
    model.state_dict()


def test_a_checkpoint_brings_its_buffers(private, tmp_path):
    first = Keeping()
    with torch.no_grad():
        first.mean.add_(3.0)
    engine, model, optimizer, _ = private(first)
    step(engine, model, optimizer)
    engine.save_checkpoint(tmp_path / "c")
    engine, model, optimizer, _ = private(Keeping())
    engine.load_checkpoint(tmp_path / "c")
    step(engine, model, optimizer)
    assert torch.equal(model.state_dict()["mean"], torch.full((5,), 3.0))


def test_another_dtype_is_no_change_and_hides_none(private):
    engine, model, optimizer, _ = private(Keeping(), verify_first_batch=False)
    model.double()
    model.state_dict()
    model.how = "data"
    with torch.no_grad():
        model(data().double())
    model.float()
    with pytest.raises(RuntimeError, match="^'mean' changed"):
        model.state_dict()


class Referring(Keeping):
    """A child refers to its parent."""

    def __init__(self):
        super().__init__()
        self.a.parent = [self]


class Copying(Referring):
    """Has a `__deepcopy__` of its own."""

    def __deepcopy__(self, memo):
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo), is_made=True)
        return made


def _parametrized():
    model = Referring()
    weight_norm(model.a)
    return model


@pytest.mark.parametrize("build", [Keeping, Referring, Copying, _parametrized])
def test_copies_and_pickles_are_of_the_plain_model_and_are_compared_with_nothing(build, private):
    plain = build()
    kinds = [type(m) for m in plain.modules()]
    engine, model, *_ = private(plain)
    twins = [copy.deepcopy(model), AveragedModel(model).module]
    assert all(hasattr(twin, "is_made") == (build is Copying) for twin in twins)
    if build is not _parametrized:  # torch does not pickle these
        twins.append(pickle.loads(pickle.dumps(model)))
    for twin in twins:
        assert [type(m) for m in twin.modules()] == kinds
        assert not any("_dpflash" in vars(m) for m in twin.modules())
        assert getattr(twin.a, "parent", [twin]) == [twin]
        twin.how = "mean"
        twin(data())
        twin.state_dict()
        copy.deepcopy(twin)
    step(engine, model)
    model.how = "mean"
    with torch.no_grad():
        model(data())
    with pytest.raises(PrivateRefusal, match="^'mean' changed"):
        copy.deepcopy(model)


def test_a_copy_of_a_traced_model_is_plain(private):
    engine, model, *_ = private(torch.fx.symbolic_trace(Keeping()))
    twin = copy.deepcopy(model)
    assert isinstance(twin, torch.fx.GraphModule) and type(twin.a) is nn.Linear
    assert torch.equal(twin(data()), model(data()))
    step(engine, model)


class Named(NamedTuple):
    y: torch.Tensor


class KeepingInAttributes(Keeping):
    """Keeps something of each batch outside of `state_dict()`."""

    def __init__(self, kept):
        super().__init__()
        self.kept = None
        self.part = nn.Identity()
        self.part.history, self.part.count = [], 0
        self.keep = getattr(self, kept)

    def output(self, y):
        self.kept, self.is_warm = y.detach(), True

    def named(self, y):
        self.kept = Named(y.detach())

    def text(self, y):
        self.kept = [str(y)]

    def history(self, y):
        self.part.history.append(float(y.detach().mean()))

    def count(self, y):
        self.part.count += 1

    def forward(self, x):
        y = super().forward(x)
        self.keep(y)
        return y


@pytest.mark.parametrize(
    ("what", "name"),
    [
        *(("output", "kept"), ("named", "kept"), ("text", "kept")),
        *(("history", "part.history"), ("count", "part.count")),
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_copy_of_the_whole_model_with_what_attributes_keep_is_warned_about(what, name, private):
    engine, model, *_ = private(KeepingInAttributes(what))
    for leave in (LEAVING["pickle"], LEAVING["copy"]):
        leave(engine, model, None)
    step(engine, model)
    for leave in (LEAVING["pickle"], LEAVING["copy"]):
        with pytest.warns(PrivateWarning, match=f"attribute '{name}' of the model is new or"):
            leave(engine, model, None)
    model.state_dict()


def test_a_model_that_is_one_layer_is_watched_as_well(private):
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(5, 2)
            self.register_buffer("seen", torch.zeros(2))

    engine, model, *_ = private(Scaled())
    copy.deepcopy(model)

    def keep(module, inputs, outputs):
        module.seen.copy_(outputs.detach().mean(0))

    model.register_forward_hook(keep)
    with pytest.raises(RuntimeError, match="'seen' changed"):
        step(engine, model)
    for leave in (model.state_dict, lambda: copy.deepcopy(model)):
        with pytest.raises(RuntimeError, match="'seen' changed"):
            leave()


def test_a_second_engine_begins_with_what_the_model_is_then():
    model = Keeping("mean")
    for _ in range(2):
        engine = dpflash.PrivacyEngine()
        engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(data()), batch_size=4),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        model.state_dict()
        with torch.no_grad():
            model(data())
        with pytest.raises(RuntimeError, match="'mean' changed"):
            model.state_dict()
        with pytest.warns(UserWarning, match="not for release"):
            engine.detach(model)
