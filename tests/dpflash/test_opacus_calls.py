"""Calls as Opacus has them: defaults pass, other values are refused with the reason."""

import copy
import inspect
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpflash

DATA = TensorDataset(torch.randn(16, 3))
METHODS = ["make_private", "make_private_with_epsilon", "save_checkpoint", "load_checkpoint"]
METHODS += ["get_epsilon", "validate", "is_compatible", "get_compatible_module"]


def parts(model=None):
    model = model or nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(DATA, batch_size=4)
    return {"module": model, "optimizer": optimizer, "data_loader": loader, "max_grad_norm": 1.0}


def defaults(method):
    """Opacus' own defaults of a method's arguments."""
    parameters = inspect.signature(method).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def test_every_argument_of_opacus_passes_at_its_default_with_one_warning(tmp_path):
    opacus = pytest.importorskip("opacus")
    theirs = opacus.PrivacyEngine
    with pytest.warns(UserWarning, match="mean nothing here: secure_mode") as caught:
        engine = dpflash.PrivacyEngine(**defaults(theirs.__init__))
    assert len(caught) == 1 and caught[0].filename == __file__
    given = {**defaults(theirs.make_private), **parts(), "noise_multiplier": 1.0}
    with pytest.warns(UserWarning, match="mean nothing here: .*wrap_model") as caught:
        made = engine.make_private(**given)
    assert len(caught) == 1 and caught[0].filename == __file__
    for name in ("criterion", "batch_first", "noise_generator", "rand_on_empty"):
        assert name in str(caught[0].message)
    targets = {"target_epsilon": 3.0, "target_delta": 1e-3, "epochs": 1}
    given = {**defaults(theirs.make_private_with_epsilon), **parts(), **targets}
    with pytest.warns(UserWarning, match="mean nothing here") as caught:
        dpflash.PrivacyEngine().make_private_with_epsilon(**given)
    assert len(caught) == 1 and caught[0].filename == __file__
    own = {"path": tmp_path / "state", "module": made[0], "optimizer": made[1]}
    with pytest.warns(UserWarning, match="torch_save_kwargs"):
        engine.save_checkpoint(**{**defaults(theirs.save_checkpoint), **own})
    with pytest.warns(UserWarning, match="torch_load_kwargs"):
        engine.load_checkpoint(**{**defaults(theirs.load_checkpoint), **own})


@pytest.mark.parametrize("name", METHODS)
def test_no_argument_of_opacus_is_unknown(name):
    opacus = pytest.importorskip("opacus")
    theirs = set(inspect.signature(getattr(opacus.PrivacyEngine, name)).parameters)
    ours = set(inspect.signature(getattr(dpflash.PrivacyEngine, name)).parameters)
    from dpflash.opacus_calls import _REFUSED

    assert theirs - ours - {"self", "kwargs"} <= set(_REFUSED)


@pytest.mark.parametrize("epsilon", [False, True])
@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("criterion", nn.CrossEntropyLoss(), "in every mode"),
        ("batch_first", False, "transpose inside"),
        ("wrap_model", False, "never wrapped"),
        ("noise_generator", torch.Generator(), "seed="),
    ],
)
def test_other_values_are_refused_with_the_reason(name, value, why, epsilon):
    given = {**parts(), name: value, "grad_sample_mode": "ghost"}
    engine = dpflash.PrivacyEngine()
    with pytest.raises(TypeError, match=f"'{name}'.*{why}"):
        if epsilon:
            engine.make_private_with_epsilon(
                **given, target_epsilon=1.0, target_delta=1e-3, epochs=1
            )
        else:
            engine.make_private(**given, noise_multiplier=1.0)


def test_secure_mode_true_is_refused_with_what_holds_anyway():
    with pytest.raises(TypeError, match=r"'secure_mode' \(=True\): .*ChaCha20"):
        dpflash.PrivacyEngine(secure_mode=True)


def test_a_criterion_of_a_configuration_in_ghost_mode_is_refused():
    performance = dpflash.PerformanceConfig(grad_sample_mode="ghost")
    privacy = dpflash.PrivacyConfig(max_grad_norm=1.0, noise_multiplier=1.0)
    given = {n: v for n, v in parts().items() if n != "max_grad_norm"}
    with pytest.raises(TypeError, match="criterion"):
        dpflash.PrivacyEngine().make_private(
            **given, privacy=privacy, performance=performance, criterion=nn.CrossEntropyLoss()
        )


@pytest.mark.parametrize("name", ["make_private", "make_private_with_epsilon"])
def test_positional_arguments_are_refused_with_the_keywords(name):
    given = parts()
    with pytest.raises(TypeError, match=f"{name} takes keywords alone.*module=.*data_loader="):
        getattr(dpflash.PrivacyEngine(), name)(
            given["module"], given["optimizer"], given["data_loader"]
        )


# Checkpoints


def private(**options):
    engine = dpflash.PrivacyEngine(seed=0)
    return engine, *engine.make_private(**parts(), noise_multiplier=1.0, **options)


def test_schedulers_of_opacus_are_saved_and_restored(tmp_path):
    schedulers = pytest.importorskip("opacus.schedulers")
    engine, model, optimizer, _ = private()
    noise = schedulers.ExponentialNoise(optimizer, gamma=0.5)
    bound = schedulers.StepGradClip(optimizer, step_size=2, gamma=0.1)
    noise.step(), bound.step(), bound.step()
    engine.save_checkpoint(
        path=tmp_path / "state",
        module=model,
        optimizer=optimizer,
        noise_scheduler=noise,
        grad_clip_scheduler=bound,
        checkpoint_dict={"epoch": 3},
    )
    engine, model, optimizer, _ = private()
    noise = schedulers.ExponentialNoise(optimizer, gamma=0.5)
    with pytest.warns(UserWarning, match="from the checkpoint"):
        extra = engine.load_checkpoint(
            path=tmp_path / "state", module=model, optimizer=optimizer, noise_scheduler=noise
        )
    assert extra.keys() == {"epoch", "grad_clip_scheduler_state_dict"} and extra["epoch"] == 3
    assert noise.last_epoch == 1
    assert (optimizer.noise_multiplier, optimizer.max_grad_norm) == (0.5, pytest.approx(0.1))


def test_a_scheduler_without_a_state_in_the_checkpoint_is_refused_and_nothing_changes(tmp_path):
    schedulers = pytest.importorskip("opacus.schedulers")
    engine, *_ = private()
    engine.save_checkpoint(tmp_path / "state")
    engine, model, optimizer, _ = private()
    before = model.weight.detach().clone()
    noise = schedulers.ExponentialNoise(optimizer, gamma=0.5)
    with pytest.raises(ValueError, match="noise_scheduler=ExponentialNoise: .*no state"):
        engine.load_checkpoint(tmp_path / "state", noise_scheduler=noise)
    assert torch.equal(before, model.weight)


def test_a_checkpoint_of_another_model_or_with_other_options_is_refused(tmp_path):
    engine, model, optimizer, _ = private()
    path = tmp_path / "state"
    with pytest.raises(ValueError, match="module=Linear: expected the object"):
        engine.save_checkpoint(path=path, module=copy.deepcopy(model))
    with pytest.raises(ValueError, match="optimizer=SGD: expected the object"):
        engine.save_checkpoint(path=path, optimizer=optimizer.original_optimizer)
    with pytest.raises(ValueError, match="checkpoint_dict"):
        engine.save_checkpoint(path, extra={}, checkpoint_dict={})
    with pytest.raises(TypeError, match="torch_save_kwargs"):
        engine.save_checkpoint(path, torch_save_kwargs={"pickle_protocol": 4})
    with pytest.raises(TypeError, match="did you mean 'extra'"):
        engine.save_checkpoint(path, extras={})
    assert not path.exists()


# Static methods


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
        self.shared = nn.BatchNorm1d(32)
        self.again = self.shared
        self.frozen = nn.BatchNorm1d(32).requires_grad_(False).eval()
        self.instance = nn.InstanceNorm2d(6, affine=True, track_running_stats=True)
        self.table = nn.Embedding(5, 4, max_norm=1.0)

    def forward(self, x):
        return self.instance(self.norm(self.conv(x))).flatten(1)


def test_a_model_is_made_compatible_in_a_copy_and_what_was_replaced_is_named():
    model = Mixed()
    nn.init.uniform_(model.norm.weight)
    assert not dpflash.PrivacyEngine.is_compatible(module=model)
    with pytest.warns(UserWarning, match="norm: BatchNorm2d by GroupNorm of 2 groups") as caught:
        made = dpflash.PrivacyEngine.get_compatible_module(model)
    text = str(caught[0].message)
    assert "shared: BatchNorm1d by GroupNorm of 8 groups" in text and "frozen" not in text
    assert "instance: InstanceNorm2d without running statistics" in text
    assert "table: max_norm of Embedding by None" in text
    assert isinstance(model.norm, nn.BatchNorm2d) and model.table.max_norm == 1.0
    assert made.shared is made.again and isinstance(made.frozen, nn.BatchNorm1d)
    assert torch.equal(made.norm.weight, model.norm.weight)
    assert made.norm.weight is not model.norm.weight
    assert set(made.state_dict()) < set(model.state_dict())
    dpflash.PrivacyEngine.validate(module=made)
    x = torch.randn(4, 3, 8, 8)
    assert made(x).shape == (4, 216)
    alone = torch.cat([made(x[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(made(x), alone)  # no sample depends on the others


def test_a_compatible_model_comes_back_without_a_warning_and_a_norm_itself_is_replaced(recwarn):
    model = nn.Sequential(nn.Linear(3, 2))
    made = dpflash.PrivacyEngine.get_compatible_module(model)
    assert not recwarn and made is not model
    with pytest.warns(UserWarning, match="the model itself"):
        norm = dpflash.PrivacyEngine.get_compatible_module(nn.BatchNorm2d(8))
    assert type(norm) is nn.GroupNorm


def test_a_norm_of_one_channel_stays_and_is_refused_by_its_name():
    with pytest.raises(ValueError, match="'0' is BatchNorm1d"):
        dpflash.PrivacyEngine.get_compatible_module(nn.Sequential(nn.BatchNorm1d(1)))


def test_every_problem_of_model_optimizer_and_loader_is_named_at_once():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Embedding(3, 4, max_norm=1.0))
    foreign = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    unsized = DataLoader(DATA, batch_size=None)
    given = {"module": model, "optimizer": foreign, "data_loader": unsized}
    with pytest.raises(ValueError) as caught:
        dpflash.PrivacyEngine.validate(**given)
    for words in ("'0' is BatchNorm1d", "max_norm=1.0", "optimizer holds 2", "no batch_size"):
        assert words in str(caught.value)
    assert not dpflash.PrivacyEngine().is_compatible(**given)
    good = {n: v for n, v in parts().items() if n != "max_grad_norm"}
    assert dpflash.PrivacyEngine.validate(**good) is None
    assert dpflash.PrivacyEngine.is_compatible(module=good["module"], optimizer=None)


def test_the_migration_page_names_every_public_name_of_opacus_engine_optimizer_and_tools():
    opacus = pytest.importorskip("opacus")
    from opacus import accountants, layers, optimizers, schedulers

    page = (Path(__file__).parents[2] / "docs" / "opacus.md").read_text(encoding="utf-8")
    names = {n for n in vars(opacus.PrivacyEngine) if not n.startswith("_")}
    names |= {n for n in vars(optimizers.DPOptimizer) if not n.startswith("_")}
    for method in ("__init__", "make_private", "save_checkpoint", "load_checkpoint"):
        names |= set(inspect.signature(getattr(opacus.PrivacyEngine, method)).parameters)
    for module in (layers, schedulers):
        names |= {n.removeprefix("DP") for n in module.__all__ if not n.startswith("_")}
    names -= {"self", "kwargs", "RenameParamsMixin", "SequenceBias", "module_load_dict_kwargs"}
    names -= {"torch_load_kwargs"}
    assert accountants.__name__.removeprefix("opacus.") in page
    assert not {name for name in names if name not in page}


def test_a_lazy_module_is_refused_by_its_name():
    with pytest.raises(ValueError, match="module '0' is a lazy LazyLinear; run the model once"):
        dpflash.PrivacyEngine.get_compatible_module(nn.Sequential(nn.LazyLinear(2)))


def test_a_loader_or_a_checkpoint_of_opacus_is_refused_with_what_to_pass(tmp_path):
    loaders = pytest.importorskip("opacus.data_loader")
    given = parts()
    given["data_loader"] = loaders.DPDataLoader.from_data_loader(given["data_loader"])
    with pytest.raises(ValueError, match="of Opacus.*pass the plain DataLoader"):
        dpflash.PrivacyEngine().make_private(**given, noise_multiplier=1.0)
    engine, *_ = private()
    torch.save({"module_state_dict": {}, "privacy_accountant_state_dict": {}}, tmp_path / "theirs")
    with pytest.raises(ValueError, match="a checkpoint of Opacus.*before make_private"):
        engine.load_checkpoint(tmp_path / "theirs")
