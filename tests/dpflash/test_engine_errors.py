"""Bad input is refused with the argument, its value and the way out, and nothing is changed."""

import copy
import errno
import inspect
import io
import json
import math
import os
import resource
import stat
import warnings
from dataclasses import FrozenInstanceError
from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import orthogonal
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import dpflash
from dpflash import PerformanceConfig, PrivacyConfig, PrivacyEngine, PrivateRefusal
from dpflash.accounting import PoissonGaussian, RDPAccountant
from dpflash.checkpoint import state as checkpoint
from dpflash.config import UNSET
from dpflash.grad_rules.convert import check_model
from dpflash.privacy.ledger import Ledger

DATA = TensorDataset(torch.randn(16, 3))
TWICE = ["more than once", "unit_of"]


def loader(**options):
    return DataLoader(DATA, **{"batch_size": 4, **options})


@pytest.fixture
def refused():
    """refused(error, *words, ...) checks a make_private call and that it changed nothing."""

    def check(error, *patterns, model=None, for_epsilon=False, optimizer=None, **arguments):
        model = nn.Linear(3, 2) if model is None else model
        model_types = [type(m) for m in model.modules()]
        state = copy.deepcopy(model.state_dict())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"max_grad_norm": 1.0, "data_loader": loader()}
        if for_epsilon:
            options |= {"target_epsilon": 3.0, "target_delta": 1e-5, "epochs": 2}
        else:
            options |= {"noise_multiplier": 1.0}
        engine = PrivacyEngine(seed=0)
        make = engine.make_private_with_epsilon if for_epsilon else engine.make_private
        with pytest.raises(error) as caught:
            make(module=model, optimizer=optimizer, **{**options, **arguments})
        for pattern in patterns:
            assert pattern in str(caught.value)
        assert [type(m) for m in model.modules()] == model_types
        assert list(model.state_dict()) == list(state)
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
        assert all(bool((p.grad == 1).all()) for p in model.parameters())
        assert engine.accountant.history == [] and engine.get_epsilon(1e-5) == 0
        # The engine is as free as before.
        good = nn.Linear(3, 2)
        engine.make_private(
            module=good,
            optimizer=torch.optim.SGD(good.parameters(), lr=0.1),
            data_loader=loader(),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )

    return check


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("noise_multiplier", -1.0),
        ("noise_multiplier", math.nan),
        ("noise_multiplier", math.inf),
        ("noise_multiplier", "1"),
        ("noise_multiplier", 1e-320),
        ("noise_multiplier", 1e308),
        ("noise_multiplier", np.array([1.0, 2.0])),
        ("max_grad_norm", 0.0),
        ("max_grad_norm", -2),
        ("max_grad_norm", math.inf),
        ("max_grad_norm", math.nan),
        ("max_grad_norm", []),
        ("max_grad_norm", 1e38),
        ("max_grad_norm", 1e-45),
        ("max_grad_norm", None),
        ("poisson_sampling", None),
        ("poisson_sampling", 0),
        ("clipping", np.array(["flat", "flat"])),
        ("clipping", "per_sample"),
        ("grad_sample_mode", "no_op"),
        ("grad_sample_mode", "hook"),
        ("loss_reduction", "none"),
        ("physical_batch_size", 0),
        ("physical_batch_size", 2.5),
        ("sampling", "bernoulli"),
        ("max_batch_size", 0),
        ("max_batch_size", True),
        ("budget", 3.0),
        ("budget", (1.0, 1e-5)),
        ("memory_budget", -1),
    ],
    ids=str,
)
def test_a_value_outside_of_its_range_is_named(name, value, refused):
    refused(ValueError, f"{name}={value!r}", **{name: value})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"clipping": "per_layer", "grad_sample_mode": "instantiate"},
            ["grad_sample_mode='instantiate'", "grad_sample_mode='auto'"],
        ),
        (
            {"grad_sample_mode": "ghost", "loss_reduction": "mean"},
            ["grad_sample_mode='ghost'", "loss_reduction=None"],
        ),
        (
            {"physical_batch_size": 2, "poisson_sampling": False},
            ["physical_batch_size=2", "smaller batch_size"],
        ),
        ({"sampling": "poisson", "poisson_sampling": False}, ["sampling='poisson'", "leave"]),
        ({"sampling": "fixed_size", "poisson_sampling": False}, ["sampling='fixed_size'"]),
        ({"sampling": "shuffled", "physical_batch_size": 2}, ["physical_batch_size=2"]),
        ({"sampling": "shuffled", "max_batch_size": 9}, ["max_batch_size=9", "leave it out"]),
        ({"sampling": "fixed_size", "max_batch_size": 9}, ["max_batch_size=9", "leave it out"]),
        ({"poisson_sampling": False, "max_batch_size": 9}, ["max_batch_size=9"]),
    ],
    ids=str,
)
def test_arguments_that_contradict_each_other_are_refused(arguments, words, refused):
    refused(ValueError, *words, **arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target_epsilon", 0.0),
        ("target_epsilon", -1.0),
        ("target_epsilon", math.inf),
        ("target_delta", 0.0),
        ("target_delta", 1.0),
        ("target_delta", -1e-5),
        ("epochs", 0),
        ("epochs", 1.5),
    ],
    ids=str,
)
def test_a_target_outside_of_its_range_is_named(name, value, refused):
    refused(ValueError, f"{name}={value!r}", for_epsilon=True, **{name: value})


@pytest.mark.parametrize("epsilon", [False, True])
@pytest.mark.parametrize("noise", [1.0, 10.0])
def test_a_bound_whose_noise_leaves_float32_is_refused(noise, epsilon, refused):
    arguments = {"max_grad_norm": 1e38} | ({} if epsilon else {"noise_multiplier": noise})
    refused(
        ValueError, "max_grad_norm=1e+38", "scale the losses", for_epsilon=epsilon, **arguments
    )


def test_a_bound_whose_exact_sums_lose_gradients_warns():
    def private(bound):
        model = nn.Linear(2, 1)
        given = {"optimizer": torch.optim.SGD(model.parameters(), 0.1), "data_loader": loader()}
        given |= {"noise_multiplier": 0.0, "max_grad_norm": bound}
        PrivacyEngine().make_private(module=model, **given)

    with pytest.warns(UserWarning, match="steps of 0.0005, and smaller gradients become zero"):
        private(1e6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        private(1e4)
        private(math.inf)


@pytest.mark.parametrize("name", ["target_epsilon", "target_delta", "epochs", "max_grad_norm"])
def test_a_target_beyond_floats_range_is_named(name, refused):
    refused(ValueError, f"{name}: expected", for_epsilon=True, **{name: 10**400})


@pytest.mark.parametrize("epsilon", [False, True])
@pytest.mark.parametrize("module", [None, 1.0, nn.Linear], ids=["None", "float", "class"])
def test_what_is_no_module_is_refused(module, epsilon):
    arguments = {"target_epsilon": 3.0, "target_delta": 1e-5, "epochs": 2}
    engine = PrivacyEngine(seed=0)
    make = engine.make_private_with_epsilon if epsilon else engine.make_private
    with pytest.raises(ValueError, match=r"module=\w+: expected a torch.nn.Module"):
        make(
            module=module,
            optimizer=torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1),
            data_loader=loader(),
            max_grad_norm=1.0,
            **(arguments if epsilon else {"noise_multiplier": 1.0}),
        )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", math.nan),
        ("seed", 1.5),
        ("seed", "1"),
        ("seed", True),
        ("ledger", 5),
        ("ledger", b"ledger"),
        ("accountant", 1.0),
        ("accountant", None),
        ("accountant", ["contour"]),
        ("accountant", RDPAccountant),
        ("neighboring_relation", "remove"),
    ],
    ids=str,
)
def test_an_argument_of_the_engine_outside_of_its_kind_is_named(name, value):
    with pytest.raises(ValueError, match=f"^{name}="):
        PrivacyEngine(**{name: value})


@pytest.mark.parametrize("value", [0.0, -1.0, 1.0])
def test_noise_beside_a_target_epsilon_is_refused(value, refused):
    refused(
        ValueError,
        f"noise_multiplier={value}",
        "make_private",
        for_epsilon=True,
        noise_multiplier=value,
    )


@pytest.mark.parametrize("delta", [0.0, 1.0, -0.1, 2.0, math.nan])
def test_get_epsilon_refuses_a_delta_outside_of_0_1(delta):
    with pytest.raises(ValueError, match="delta="):
        PrivacyEngine().get_epsilon(delta)


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.BatchNorm1d(3), ["BatchNorm1d", "mixes the samples", "nn.GroupNorm"]),
        (nn.BatchNorm1d(3, affine=False), ["BatchNorm1d", "nn.LayerNorm"]),
        (nn.SyncBatchNorm(3), ["SyncBatchNorm"]),
        (
            nn.BatchNorm1d(3, affine=False, track_running_stats=False).eval(),
            ["nn.LayerNorm", "without running statistics .eval() uses those of the batch too"],
        ),
        (nn.InstanceNorm1d(3, track_running_stats=True), ["track_running_stats"]),
        (nn.EmbeddingBag(3, 3), ["nn.Embedding(padding_idx=...)", "sum or mean"]),
        (nn.Embedding(3, 3, max_norm=1.0), ["max_norm=1.0", "max_norm=None"]),
        (nn.Embedding(3, 3, scale_grad_by_freq=True), ["scale_grad_by_freq=False"]),
        (nn.LazyLinear(3), ["lazy"]),
        (
            nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
            ["_SpectralNorm", "'_u'"],
        ),
        (orthogonal(nn.Linear(3, 3)), ["'weight'", "_Orthogonal", "use_trivialization=False"]),
        (orthogonal(nn.Conv1d(3, 3, 1)), ["_Orthogonal", "remove_parametrizations"]),
        (prune.identity(nn.Linear(3, 3), "weight"), ["prune.remove(module, 'weight')"]),
        (
            prune.random_unstructured(nn.LayerNorm(3), "bias", 0.5),
            ["prune.remove(module, 'bias')"],
        ),
        (
            nn.utils.weight_norm(nn.Conv1d(3, 3, 1)),
            ["remove_weight_norm(module, 'weight') first, and parametrizations.weight_norm"],
        ),
        (torch.compile(nn.Linear(3, 3)), ["torch.compile", "_orig_mod"]),
        (torch.jit.script(nn.Linear(3, 3)), ["torch.jit"]),
        (type("GradSampleModule", (nn.Tanh,), {})(), ["Opacus", "plain module"]),
        (nn.ParameterList([nn.Parameter(torch.ones(3))]), ["ParameterList", "nn.Linear"]),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_a_layer_that_cannot_be_trained_privately_is_refused_by_its_dotted_name(layer, words):
    model = nn.ModuleDict({"first": nn.Linear(3, 3), "inner": nn.Sequential(nn.Tanh(), layer)})
    before = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=r"'inner\.1") as caught:
        check_model(model)
    for word in words:
        assert word in str(caught.value)
    frozen_parameters = [p for p in model.parameters() if not isinstance(layer, nn.LazyLinear)]
    with pytest.raises(ValueError, match=r"'inner\.1"):
        PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(frozen_parameters or [torch.zeros(1)], lr=0.1),
            data_loader=loader(),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
    assert [type(m) for m in model.modules()] == before


@pytest.mark.parametrize(
    "layer", [nn.LSTM(3, 3), prune.identity(nn.Linear(3, 3), "weight"), torch.compile(nn.Tanh())]
)
def test_a_frozen_layer_without_a_rule_is_accepted(layer):
    model = nn.ModuleDict({"first": nn.Linear(3, 3), "layer": layer.requires_grad_(False)})
    check_model(model)


def test_what_torch_compile_made_of_a_model_is_refused_by_that_cause(refused):
    model, part = nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 2))
    refused(ValueError, "torch.compile", "_orig_mod", model=torch.compile(model))
    model.forward = torch.compile(model.forward)
    refused(ValueError, "torch.compile", "optimize=", model=model)
    part[0].compile()
    refused(ValueError, "'0'", "torch.compile", model=part)


@pytest.mark.parametrize("trained_before", [False, True])
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda m: m[1].compile(), "1"),
        (lambda m: setattr(m, "0", torch.compile(m[0])), "0"),
        (lambda m: setattr(m[1][0], "forward", torch.compile(m[1][0].forward)), "1.0"),
    ],
)
def test_a_part_that_is_compiled_after_make_private_is_refused_likewise(
    change, name, trained_before, private
):
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 2), nn.Tanh()))
    engine, model, optimizer, batches = private(model, *DATA.tensors)
    for (x,) in chain.from_iterable([batches] * 2 * trained_before):
        engine.backward(model(x).sum(1))
        optimizer.step()
    change(model)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"'{name}' is compiled by torch.compile.*_orig_mod"):
            model(DATA.tensors[0])


@pytest.mark.parametrize(
    "record",
    [
        torch.jit.script,
        lambda model: torch.jit.script(nn.Sequential(model)),
        lambda model: torch.jit.script(model[0]),
        lambda model: torch.jit.trace(model, torch.ones(4, 3)),
        lambda model: torch.jit.trace_module(model[0], {"forward": torch.ones(4, 3)}),
        torch.fx.symbolic_trace,
        lambda model: torch.fx.symbolic_trace(model[0]),
        lambda model: torch.export.export(model, (torch.ones(4, 3),)),
        lambda model: torch.onnx.export(model, (torch.ones(4, 3),), io.BytesIO(), dynamo=False),
    ],
)
def test_what_records_a_private_model_is_refused_with_the_way_out(record, private):
    engine, model, _, _ = private(nn.Sequential(nn.Linear(3, 2), nn.Tanh()))
    with pytest.raises(RuntimeError, match=r"engine\.detach\(model\)"):
        record(model)
    with torch.no_grad():
        assert torch.jit.trace(model, torch.ones(4, 3))(torch.ones(1, 3)).shape == (1, 2)
    engine.backward(model(torch.randn(4, 3)).sum(1))


@pytest.mark.parametrize("is_declared", [False, True])
@pytest.mark.parametrize("place", ["first", "second"])
def test_a_generators_step_through_a_private_critic_names_the_way_out(is_declared, place, private):
    made = {"loss_reduction": "mean"} if is_declared else {}
    engine, critic, _, _ = private(nn.Linear(3, 1), foreign_batches=False, **made)
    generator = nn.Linear(2, 3)
    noise = torch.randn(4, 2)
    if place == "second":
        noise.requires_grad_()
    with pytest.raises(RuntimeError, match=r"requires_grad_\(False\).*engine\.public_data"):
        critic(generator(noise)).mean().backward()
    generator.zero_grad()
    critic.requires_grad_(False)
    critic(generator(noise)).mean().backward()
    assert generator.weight.grad.norm() > 0
    critic.requires_grad_(True)


def test_a_model_that_is_private_already_is_refused(private):
    engine, model, optimizer, _ = private(nn.Linear(3, 2))
    for other, pattern in (
        (engine, "has a model already.*ModuleList"),
        (PrivacyEngine(), "nothing yet.*detach"),
    ):
        with pytest.raises(ValueError, match=pattern):
            other.make_private(
                module=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                data_loader=loader(),
                noise_multiplier=1.0,
                max_grad_norm=1.0,
            )
    engine.backward(model(torch.randn(4, 3)).sum(1))


def test_an_optimizer_of_foreign_parameters_is_refused(refused):
    foreign = torch.optim.SGD([*nn.Linear(7, 5).parameters()], lr=0.1)
    refused(ValueError, "2 parameter(s)", "(5, 7)", "module.parameters()", optimizer=foreign)


class Lookahead(torch.optim.Optimizer):
    """As scripts have it, and with torch's __init__ called."""

    def __init__(self, base, kept):
        self.base = base
        if kept is None:
            super().__init__(base.param_groups, base.defaults)
        for name in kept or ():
            setattr(self, name, getattr(base, name))

    def step(self, closure=None):
        self.base.step()


@pytest.mark.parametrize(
    "kept", [(), ("param_groups",), ("param_groups", "defaults", "state")], ids=str
)
def test_an_optimizer_without_what_torchs_init_makes_is_refused(kept, refused):
    model = nn.Linear(3, 2)
    given = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1), kept)
    refused(ValueError, "optimizer=Lookahead", "super().__init__(", model=model, optimizer=given)


class SAM(torch.optim.SGD):
    def second_step(self):
        pass


@pytest.mark.parametrize("kind", [SAM, torch.optim.LBFGS])
def test_an_optimizer_that_evaluates_a_batch_twice_is_refused(kind, refused):
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    words = [f"optimizer={kind.__name__}", "several times"]
    refused(ValueError, *words, model=model, optimizer=optimizer)


def test_an_optimizer_around_another_trains_as_that_one(private):
    def around(params, lr):
        return Lookahead(torch.optim.AdamW(params, lr=lr), None)

    def trained(kind):
        torch.manual_seed(0)
        engine, model, optimizer, batches = private(nn.Linear(3, 2), DATA.tensors[0], kind=kind)
        before = model.weight.detach().clone()
        for (x,) in batches:
            engine.backward(model(x).sum(1))
            optimizer.step()
        assert not torch.equal(model.weight, before)
        return model.weight.detach()

    assert torch.equal(trained(around), trained(torch.optim.AdamW))


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (["0.weight", "0.bias", "2.weight"], ["holds '2.bias', which"]),
        (["0.weight"], ["'0.bias', '2.weight', '2.bias', which"]),
        (["2.bias"], ["'0.weight', '0.bias', '2.weight', which"]),
        (["norm.weight"], ["'0.weight', '0.bias', '2.weight' and 2 more, which"]),
    ],
)
def test_a_trained_parameter_in_no_optimizer_is_refused_by_name(held, words, refused):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    if held == ["norm.weight"]:
        model.norm = nn.LayerNorm(2)
    optimizer = torch.optim.SGD([model.get_parameter(n) for n in held], lr=0.1)
    line = f"module.get_parameter({words[0].split()[words[0].startswith('holds')].rstrip(',')})"
    ways = [f"{line}.requires_grad_(False)", "optimizer=[first, second]"]
    refused(ValueError, *words, *ways, model=model, optimizer=optimizer)


def test_frozen_and_tied_parameters_need_no_optimizer_of_their_own():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False))
    model[2].weight = model[0].weight
    model[1].requires_grad_(False)
    PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD([model[2].weight], lr=0.1),
        data_loader=loader(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )


def test_a_list_of_optimizers_is_refused_where_they_share_a_parameter(refused):
    model = nn.Linear(3, 2)
    both = torch.optim.SGD(model.parameters(), lr=0.1)
    one = torch.optim.AdamW([model.bias], lr=0.1)
    for several in ([both, one], (one, both)):
        refused(
            ValueError, "parameter 'bias' is in two optimizers", model=model, optimizer=several
        )
    plain = "expected a plain torch.optim.Optimizer"
    refused(ValueError, plain, model=model, optimizer=[both, "sgd"])
    alone = torch.optim.SGD([model.bias], lr=0.1)
    refused(ValueError, "no optimizer holds 'weight'", model=model, optimizer=[alone])
    with pytest.raises(ValueError, match=r"optimizer=\[\]"):
        PrivacyEngine.validate(module=model, optimizer=[])


def test_an_optimizer_without_a_trainable_parameter_is_refused(refused):
    model = nn.Linear(3, 2).requires_grad_(False)
    refused(ValueError, "no trainable parameter", model=model)


def test_a_private_optimizer_is_refused_as_the_plain_one(private, refused):
    _, _, optimizer, _ = private(nn.Linear(3, 2))
    refused(ValueError, "optimizer=PrivateOptimizer", "original_optimizer", optimizer=optimizer)


def test_add_param_group_is_refused(private):
    _, _, optimizer, _ = private(nn.Linear(3, 2))
    with pytest.raises(RuntimeError, match="detach"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("epsilon", [False, True])
@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("max_grad_nrom", 1.0, "did you mean 'max_grad_norm'"),
        ("poisson", True, "did you mean 'poisson_sampling'"),
        ("cliping", "flat", "did you mean 'clipping'"),
        ("way", "stored", "grad_sample_mode="),
        ("epsilon", 3.0, "target_epsilon="),
        ("zzz", 1, "did you mean "),
        ("batch_first", False, "first dimension"),
        ("noise_generator", torch.Generator(), "PrivacyEngine(seed=...)"),
        ("wrap_model", False, "never wrapped"),
        ("rand_on_empty", True, "padding rows"),
    ],
)
def test_an_unknown_keyword_is_refused_with_what_was_meant(name, value, meant, epsilon, refused):
    refused(TypeError, f"'{name}'", meant, for_epsilon=epsilon, **{name: value})


@pytest.mark.parametrize(
    ("kind", "name", "meant"),
    [
        (dpflash.PrivacyConfig, "epsilon", "'target_epsilon'"),
        (dpflash.PerformanceConfig, "optimise", "'optimize'"),
        (dpflash.PrivacyBudget, "eps", "'epsilon'"),
    ],
)
def test_an_unknown_field_of_a_configuration_is_refused_with_what_was_meant(kind, name, meant):
    with pytest.raises(TypeError) as refused:
        kind(**{name: 1.0})
    message = str(refused.value)
    assert message.startswith(f"{kind.__name__} has no field '{name}'; did you mean {meant}")
    assert message.count(" or ") < 3 and name not in inspect.signature(kind).parameters


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)


class StreamWithLength(Stream):
    def __len__(self):
        return 16


class Entries(torch.utils.data.Dataset):
    """A map-style dataset whose length is what is given, or raises it."""

    def __init__(self, length=None):
        self.length = length

    def __getitem__(self, index):
        return DATA[index]

    def __len__(self):
        if isinstance(self.length, Exception):
            raise self.length
        return self.length


class WithoutLength(torch.utils.data.Dataset):
    def __getitem__(self, index):
        return DATA[index]


class WithoutEntries(torch.utils.data.Dataset):
    def __len__(self):
        return 16


def changed(**attributes):
    """A loader whose attributes were set afterwards, past DataLoader's own checks."""
    made = loader()
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    return made


class EveryOther(torch.utils.data.SequentialSampler):
    def __iter__(self):
        return iter(range(0, 16, 2))


@pytest.mark.parametrize("epsilon", [False, True])
@pytest.mark.parametrize("poisson", [True, False])
@pytest.mark.parametrize(
    ("data_loader", "words"),
    [
        (lambda: DataLoader(StreamWithLength(), batch_size=4), ["IterableDataset", "map-style"]),
        (lambda: DataLoader(WithoutLength(), batch_size=4), ["WithoutLength", "__len__"]),
        (lambda: DataLoader(Entries(OSError("gone")), batch_size=4), ["OSError", "__len__"]),
        (lambda: DataLoader(Entries(NotImplementedError()), batch_size=4), ["Entries"]),
        (lambda: DataLoader(Entries("16"), batch_size=4), ["Entries", "TypeError"]),
        (lambda: DataLoader(Entries(-3), batch_size=4), ["Entries", "ValueError"]),
        (lambda: DataLoader(WithoutEntries(), batch_size=4), ["WithoutEntries", "__getitem__"]),
        (lambda: changed(dataset=None), ["NoneType", "map-style"]),
        (lambda: changed(batch_size=0), ["data_loader.batch_size=0"]),
        (lambda: changed(batch_size="4"), ["data_loader.batch_size='4'"]),
        (lambda: changed(batch_size=2.5), ["data_loader.batch_size=2.5"]),
        (lambda: changed(batch_size=math.nan), ["data_loader.batch_size=nan"]),
        (lambda: changed(batch_size=True), ["data_loader.batch_size=True"]),
        (lambda: DataLoader(DATA, batch_sampler=[[0, 1], [2]]), ["batch_size", "batch_sampler"]),
        (lambda: DataLoader(DATA, batch_size=None), ["batch_size"]),
        (
            lambda: loader(sampler=WeightedRandomSampler(torch.ones(16), 16)),
            ["WeightedRandomSampler", "shuffle=True", "multiply the losses by public weights"],
        ),
        (
            lambda: loader(sampler=SubsetRandomSampler(range(8))),
            ["SubsetRandomSampler", "Subset(dataset, indices)"],
        ),
        (lambda: DataLoader(ConcatDataset([DATA, DATA]), batch_size=2), TWICE),
        (lambda: DataLoader(Subset(DATA, [0, 3, -1, 15]), batch_size=2), TWICE),
        (lambda: DataLoader(Subset(ConcatDataset([DATA, DATA]), [3, 19]), batch_size=2), TWICE),
        (lambda: loader(sampler=EveryOther(DATA)), ["EveryOther", "shuffle=True"]),
        (
            lambda: loader(sampler=torch.utils.data.RandomSampler(DATA, replacement=True)),
            ["RandomSampler"],
        ),
        (lambda: DataLoader(Stream(), batch_size=4), ["IterableDataset", "map-style"]),
        (lambda: DataLoader(TensorDataset(torch.zeros(0, 3)), batch_size=4), ["empty"]),
        (lambda: [torch.zeros(4, 3)], ["data_loader=list", "DataLoader"]),
    ],
)
def test_a_loader_whose_sampling_is_unknown_is_refused(
    data_loader, words, poisson, epsilon, refused
):
    made = data_loader()
    refused(ValueError, *words, data_loader=made, poisson_sampling=poisson, for_epsilon=epsilon)


def test_a_private_loader_is_refused(private, refused):
    *_, private_loader = private(nn.Linear(3, 2), *DATA.tensors)
    refused(ValueError, "private already", data_loader=private_loader)


@pytest.mark.parametrize("is_tried", [True, False])
def test_a_second_engine_whose_model_is_in_the_loss_of_the_first_is_named(is_tried, private):
    options = {"batch_size": 8, "verify_first_batch": is_tried}
    first, encoder, _, loader = private(nn.Linear(3, 4), torch.randn(16, 3), **options)
    _, decoder, optimizer, _ = private(nn.Linear(4, 2), torch.randn(16, 4), **options)
    with pytest.raises(RuntimeError, match="together have one engine"):
        for (x,) in loader:
            first.backward(decoder(encoder(x)).sum(1))
            optimizer.step()


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.expert = nn.Linear(3, 1), nn.Linear(3, 2)

    def forward(self, x):
        out = self.gate(x).expand(-1, 2).clone()
        out[x[:, 0] > 0] += self.expert(x[x[:, 0] > 0])
        return out


def test_an_error_after_one_routed_row_says_how_to_route(private):
    _, model, _, _ = private(Routed())
    with pytest.raises(RuntimeError, match="routed, keep all rows"):
        model(torch.tensor([[1.0, 0, 0], [-1, 0, 0], [-1, 0, 0]]))


@pytest.mark.parametrize("reduction", [None, "mean"])
@pytest.mark.parametrize("shape", [(4, 1), (4, 2), (1, 4)])
def test_losses_that_are_not_one_number_a_sample_are_refused(shape, reduction, private):
    engine, model, _, _ = private(nn.Linear(3, 2), loss_reduction=reduction)
    losses = model(torch.randn(4, 3)).flatten()[: math.prod(shape)].reshape(shape)
    with pytest.raises(PrivateRefusal, match=r"\[B\].*dpflash\.losses") as refused:
        engine.backward(losses)
    assert refused.value.details == {"losses": shape}
    assert all(p.grad is None for p in model.parameters())


def test_a_scalar_loss_is_refused_unless_its_reduction_is_declared(private):
    engine, model, _, _ = private(nn.Linear(3, 2))
    with pytest.raises(PrivateRefusal, match="loss_reduction"):
        engine.backward(model(torch.randn(4, 3)).mean())
    engine, model, _, _ = private(nn.Linear(3, 2), loss_reduction="mean")
    engine.backward(model(torch.randn(4, 3)).mean())


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("before", [0, 9])
def test_gradients_that_autograd_would_return_are_refused(before, clipping, private):
    """In the first batches, whose leaves are all looked for, and in later ones."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    data = torch.randn(16, 3)
    options = {"loss_reduction": "mean", "clipping": clipping, "one_part": True}
    engine, model, optimizer, batches = private(model, data, verify_first_batch=False, **options)
    for number, (x,) in enumerate(chain.from_iterable([batches] * 3)):
        x.requires_grad_()
        if number == before:
            break
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for asked in (list(model.parameters()), model[0].bias, [x, model[1].weight]):
        with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
            torch.autograd.grad(model(x).square().mean(), asked)
    grads = torch.autograd.grad(model(x).square().mean(), [x, model[0].bias], allow_unused=True)
    assert grads[0] is not None and grads[1] is None
    torch.autograd.backward(model(x).square().mean(), inputs=list(model.parameters()))
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(PrivateRefusal, match="Each microbatch of the private loader needs its"):
        optimizer.step()
    assert optimizer.releases == before


@pytest.mark.parametrize("losses", [1.0, None, [1.0, 2.0]], ids=str)
def test_losses_that_are_no_tensor_are_refused(losses, private):
    engine, *_ = private(nn.Linear(3, 2))
    with pytest.raises(PrivateRefusal, match="expected a tensor"):
        engine.backward(losses)


@pytest.mark.parametrize("mode", ["instantiate", "book_keeping", "ghost"])
def test_a_number_of_losses_other_than_the_batch_is_refused(mode, private):
    engine, model, optimizer, _ = private(nn.Linear(3, 2), grad_sample_mode=mode)
    for losses in (model(torch.randn(4, 3))[:3].sum(1), model(torch.randn(4, 3)).flatten()):
        with pytest.raises(PrivateRefusal, match="than the batch that the model saw") as refused:
            engine.backward(losses)
        assert refused.value.details == {"losses": len(losses), "batch_size": 4}
        assert all(p.grad is None for p in model.parameters())


class Constant(nn.Module):
    def __init__(self, **layers):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self._modules.update(layers)

    def forward(self, *x):
        return self.weight + sum(x)


@pytest.mark.parametrize("layers", [{}, {"layer": nn.Tanh()}], ids=["leaf", "owner"])
def test_a_module_that_is_called_without_a_tensor_is_to_take_the_batch(layers, private):
    _, model, _, _ = private(nn.Sequential(nn.Linear(3, 3), Constant(**layers)))
    with pytest.raises(ValueError, match=r"'1' \(Constant\) was called without .* x \+ self"):
        model[1]()
    assert model(torch.ones(4, 3)).shape == (4, 3)


def test_losses_that_reach_no_private_layer_are_refused(private):
    engine, model, _, _ = private(nn.Linear(3, 2))
    x = torch.randn(4, 3)
    with pytest.raises(RuntimeError, match="outside of the private model"):
        engine.backward(nn.Linear(3, 2)(x).sum(1))
    model(x)
    with pytest.raises(RuntimeError, match="did not reach any private layer"):
        engine.backward(x.clone().requires_grad_().sum(1))
    with pytest.raises(RuntimeError, match="do not require grad"):
        engine.backward(model(x).detach().sum(1))
    with torch.no_grad(), pytest.raises(RuntimeError, match="do not require grad"):
        engine.backward(model(x).sum(1))
    engine.backward(model(x).sum(1))


def test_anomaly_mode_is_refused_where_a_bad_sample_would_end_training(private):
    engine, model, optimizer, _ = private(nn.Linear(3, 2))
    x = torch.full((4, 3), torch.nan)
    losses = model(x).sum(1)
    with torch.autograd.set_detect_anomaly(True):
        with pytest.raises(RuntimeError, match="check_nan=False") as refused:
            model(torch.ones(4, 3))
        assert refused.type is RuntimeError
        with pytest.raises(RuntimeError, match="check_nan=False"):
            engine.backward(losses)
        with torch.no_grad():
            model(x)
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        engine.backward(model(x).sum(1))
    optimizer.step()


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_the_gradient_of_a_trained_parameter_is_refused(register, private):
    model = nn.Linear(3, 2)
    hook = getattr(model.weight, register)(lambda grad: None)
    with pytest.raises(ValueError, match="'weight' has a hook on its gradient"):
        private(model)
    hook.remove()
    engine, model, optimizer, _ = private(model)
    getattr(model.weight, register)(lambda grad: None)
    with pytest.raises(RuntimeError, match="'weight' has a hook on its gradient"):
        engine.backward(model(torch.ones(4, 3)).sum(1))


def test_a_call_before_make_private_is_refused(tmp_path):
    engine = PrivacyEngine()
    for call in (
        lambda: engine.backward(torch.zeros(2)),
        lambda: engine.save_checkpoint(tmp_path / "c"),
        lambda: engine.load_checkpoint(tmp_path / "c"),
        lambda: engine.prepare(2),
        engine.diagnostics,
    ):
        with pytest.raises(RuntimeError, match="make_private first"):
            call()


def test_detach_refuses_another_model(private):
    engine, model, *_ = private(nn.Linear(3, 2))
    with pytest.raises(ValueError, match="not the one"):
        engine.detach(nn.Linear(3, 2))
    engine.backward(model(torch.randn(4, 3)).sum(1))


# Checkpoints


def run(private, *, model=None, data=16, batch_size=4, seed=None, **options):
    torch.manual_seed(0)
    engine, model, optimizer, loader = private(
        model or nn.Linear(3, 2),
        torch.randn(data, 3),
        batch_size=batch_size,
        noise_multiplier=1.0,
        seed=seed,
        **options,
    )
    return engine, model, optimizer, loader


def train(engine, model, optimizer, loader):
    for (x,) in loader:
        optimizer.zero_grad()
        engine.backward(model(x).square().mean(1))
        optimizer.step()


@pytest.fixture
def saved(private, tmp_path):
    trained = run(private)
    torch.optim.lr_scheduler.StepLR(trained[2], 1)  # adds an option to the group
    train(*trained)
    path = tmp_path / "checkpoint"
    trained[0].save_checkpoint(path)
    return path


@pytest.fixture
def unchanged():
    """unchanged(run, path, error, pattern): loading is refused and alters nothing."""

    def check(made, path, error, pattern):
        engine, model, optimizer, private_loader = made
        state = copy.deepcopy(model.state_dict())
        before = (engine._keys.state_dict(), private_loader.state_dict())
        with pytest.raises(error, match=pattern) as caught:
            engine.load_checkpoint(path)
        assert str(path) in str(caught.value)
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
        assert before == (
            engine._keys.state_dict(),
            private_loader.state_dict(),
        )
        assert engine.accountant.history == [] and optimizer.releases == 0
        train(*made)
        assert sum(steps for _, _, steps in engine.accountant.history) == optimizer.releases > 0

    return check


@pytest.mark.parametrize("size", [10, 100_000], ids=["flush", "torch.save"])
def test_a_save_that_the_disk_refuses_raises_its_error(size, tmp_path):
    path = tmp_path / "c"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            checkpoint.write(path, {"x": torch.zeros(size)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert not list(tmp_path.iterdir())


def test_a_missing_checkpoint_is_refused(private, tmp_path, unchanged):
    unchanged(run(private), tmp_path / "none", FileNotFoundError, "no checkpoint there")


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_checkpoint_is_refused(keep, private, saved, unchanged):
    content = saved.read_bytes()
    saved.write_bytes(content[: int(keep * len(content))])
    unchanged(run(private), saved, ValueError, "not a readable checkpoint")


def test_a_checkpoint_with_a_flipped_byte_of_contents_is_refused(private, saved, unchanged):
    content = bytearray(saved.read_bytes())
    made = run(private)
    made[0].load_checkpoint(saved)
    position = content.find(made[1].weight.detach().numpy().tobytes())
    assert position > 0
    content[position + 5] ^= 1
    saved.write_bytes(content)
    unchanged(run(private), saved, ValueError, "not a readable checkpoint")


@pytest.mark.parametrize(
    "content", [{"format": "other"}, {"a": 1}, [1, 2], torch.zeros(3)], ids=str
)
def test_a_file_of_another_kind_is_refused(content, private, tmp_path, unchanged):
    torch.save(content, tmp_path / "c")
    unchanged(run(private), tmp_path / "c", ValueError, "not a dpflash checkpoint")


def test_what_another_version_wrote_is_refused_before_anything_changes(private, saved, unchanged):
    whole = torch.load(saved, weights_only=True)
    torch.save({k: v for k, v in whole.items() if k not in ("shares", "loader")}, saved)
    unchanged(
        run(private), saved, ValueError, "another version .* wrote it, without loader, shares"
    )
    engine, state = run(private)[0], run(private)[0].state_dict()
    ((name, text),) = state.items()
    less = {k: v for k, v in json.loads(text).items() if k != "releases"}
    with pytest.raises(ValueError, match="without releases"):
        engine.load_state_dict({name: json.dumps(less)})


def test_a_seed_that_a_checkpoint_brings_is_told(private):
    state, engine = run(private, seed=3)[0].state_dict(), run(private)[0]
    with pytest.warns(UserWarning, match="seed=3, and this engine has it now.*not for release"):
        engine.load_state_dict(state)


def test_a_pickle_that_runs_code_is_refused(private, tmp_path, unchanged):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    torch.save({"format": "dpflash-checkpoint-1", "x": Evil()}, tmp_path / "c")
    unchanged(run(private), tmp_path / "c", ValueError, "not a readable checkpoint")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"data": 20}, "data loader: .*16.*20"),
        ({"batch_size": 5}, "data loader"),
        ({"poisson_sampling": False}, "poisson.*shuffled"),
        ({"kind": torch.optim.AdamW}, "the optimizer"),
        ({"model": nn.Linear(3, 4)}, "model: bias, weight"),
        ({"model": nn.Sequential(nn.Linear(3, 2))}, "model: .*0.weight"),
    ],
    ids=str,
)
def test_a_checkpoint_of_another_run_is_refused(options, pattern, private, saved, unchanged):
    made = run(private, **{k: copy.deepcopy(v) for k, v in options.items()})
    with pytest.raises(ValueError, match=pattern):
        made[0].load_checkpoint(saved)
    assert made[0].accountant.history == [] and made[2].releases == 0


@pytest.mark.parametrize(
    ("bounds", "pattern"),
    [
        ({"0": 4.0, "1": 3.0}, "'0' was 3 and would be 4, '1' was 4 and would be 3"),
        (5.0, "'0' was 3 and would be 3.53"),
        ([6.0, 8.0], None),
    ],
    ids=str,
)
def test_a_checkpoint_is_refused_where_groups_have_other_shares(
    bounds, pattern, private, tmp_path, unchanged
):
    def made(given):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        return run(private, model=model, clipping="per_layer", max_grad_norm=given)

    first = made([3.0, 4.0])
    train(*first)
    first[0].save_checkpoint(tmp_path / "c")
    second = made(bounds)
    if pattern is not None:
        unchanged(second, tmp_path / "c", ValueError, pattern)
        return
    # The bound of all groups together is that of the checkpoint, as ever.
    with pytest.warns(UserWarning, match="max_grad_norm is 5.0 from the checkpoint"):
        second[0].load_checkpoint(tmp_path / "c")
    assert [g.bound for g in second[0].groups()] == pytest.approx([3.0, 4.0])


def test_the_folder_of_a_ledger_is_made_with_its_first_line(private, tmp_path):
    train(*run(private, ledger=tmp_path / "runs" / "first" / "ledger"))
    assert Ledger(tmp_path / "runs" / "first" / "ledger").releases == 4


@pytest.mark.parametrize("left", [2, 0])
def test_a_checkpoint_ahead_of_its_ledger_and_guard_is_refused(left, private, tmp_path):
    path, ledger, guard = tmp_path / "c", tmp_path / "ledger", tmp_path / "ledger.guard"
    first = run(private, ledger=ledger)
    train(*first)
    first[0].save_checkpoint(path)
    lines = ledger.read_text().splitlines(keepends=True)[:left]
    if lines:
        ledger.write_text("".join(lines))
        guard.write_text(lines[-1])
    else:
        ledger.unlink()
        guard.unlink()
    second = run(private, ledger=ledger)
    with pytest.raises(ValueError, match=f"ledger .*has {left} releases, the checkpoint 4"):
        second[0].load_checkpoint(path)
    assert second[0].accountant.history == [(1.0, 0.25, left)][: len(lines)]


def test_a_checkpoint_refuses_a_ledger_that_was_written_anew_with_its_guard(private, tmp_path):
    first = run(private, ledger=tmp_path / "ledger")
    train(*first)
    first[0].save_checkpoint(tmp_path / "c")
    for name in ("ledger", "ledger.guard"):
        (tmp_path / name).unlink()
    anew = Ledger(tmp_path / "ledger")
    cheaper = PoissonGaussian(noise_multiplier=9.0, sample_rate=0.25)
    anew.append(run="a", event=cheaper, accountant="rdp", count=4)
    second = run(private, ledger=tmp_path / "ledger")
    with pytest.raises(ValueError, match="the ledger .*is of another run"):
        second[0].load_checkpoint(tmp_path / "c")


def test_a_checkpoint_is_replaced_in_one_step_and_readable_by_its_owner_only(
    private, saved, monkeypatch
):
    before = saved.read_bytes()
    assert stat.S_IMODE(saved.stat().st_mode) & 0o077 == 0
    made = run(private)

    def fail(*arguments):
        raise OSError("no space left on device")

    for function in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, function, fail)
            with pytest.raises(OSError, match="no space"):
                made[0].save_checkpoint(saved)
        assert saved.read_bytes() == before
        assert [p.name for p in saved.parent.iterdir()] == [saved.name]
    made[0].save_checkpoint(saved)
    assert saved.read_bytes() != before


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_grad_scaler_is_refused_by_its_name_and_its_scale(fused, dtype):
    model = nn.Linear(3, 2).to(dtype)
    engine = PrivacyEngine(seed=0)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    model, optimizer, _ = engine.make_private(
        module=model,
        optimizer=plain,
        data_loader=loader(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        foreign_batches=True,
    )
    before = copy.deepcopy(model.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    engine.backward(scaler.scale(model(torch.randn(4, 3).to(dtype)).sum(1)))
    with pytest.raises(RuntimeError, match=r"GradScaler\.step.*without the scaler"):
        scaler.step(optimizer)
    assert optimizer.releases == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_opacus_names_of_modes_are_taken_for_their_counterparts():
    modes = {"hooks": "instantiate", "functorch": "instantiate", "ew": "instantiate"}
    for theirs, ours in {**modes, "ghost_fsdp": "ghost", "ghost": "ghost"}.items():
        assert PerformanceConfig(grad_sample_mode=theirs).grad_sample_mode == ours


def test_configurations_do_what_their_fields_as_keywords_do(private):
    def made(**options):
        engine, model, optimizer, loader = private(nn.Linear(3, 2), **options)
        return optimizer.max_grad_norm, optimizer.noise_multiplier, loader.slots, engine.sampler

    fields = {"max_grad_norm": 0.5, "noise_multiplier": 1.0, "sampling": "fixed_size"}
    privacy = PrivacyConfig(**fields)
    performance = PerformanceConfig(physical_batch_size=2)
    plain = made(**fields, physical_batch_size=2)
    unset = dict.fromkeys(("max_grad_norm", "noise_multiplier", "foreign_batches"), UNSET)
    assert made(**unset, privacy=privacy, performance=performance) == plain
    with pytest.raises(ValueError, match="max_grad_norm=1.0 with privacy="):
        made(**{**unset, "max_grad_norm": 1.0}, privacy=privacy)
    with pytest.raises(ValueError, match="optimize='none' with performance="):
        made(**fields, performance=performance, optimize="none")
    with pytest.raises(ValueError, match="expected a dpflash.PrivacyConfig"):
        made(**unset, privacy=0.5)
    with pytest.raises(FrozenInstanceError):
        privacy.max_grad_norm = 2.0


def test_a_configuration_with_noise_conflicts_with_a_target_epsilon():
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="conflicts with target_epsilon"):
        dpflash.PrivacyEngine().make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(torch.ones(16, 3)), batch_size=4),
            target_epsilon=3.0,
            target_delta=1e-3,
            epochs=1,
            privacy=PrivacyConfig(max_grad_norm=1.0, noise_multiplier=1.0),
        )


def test_noise_is_required_where_no_target_epsilon_chooses_it(private):
    with pytest.raises(ValueError, match="noise_multiplier is missing.*make_private_with_epsilon"):
        private(nn.Linear(3, 2), noise_multiplier=UNSET)


def test_a_complex_parameter_is_refused_with_the_one_to_use(refused):
    class Filter(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    refused(ValueError, "'w' is torch.complex64", "torch.view_as_complex", model=Filter())


@pytest.mark.parametrize("keeps", ["buffer", "attribute"])
def test_a_layer_that_initializes_itself_by_its_first_batch_is_refused_with_the_cause(keeps):
    class ActNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(3))
            self.register_buffer("is_set", torch.tensor(0))
            self.done = False

        def forward(self, x):
            if not (self.done if keeps == "attribute" else self.is_set):
                with torch.no_grad():
                    if keeps == "attribute":
                        self.shift.data = x.mean(0).clone()
                    else:
                        self.shift.copy_(x.mean(0))
                    self.is_set.fill_(1)
                self.done = True
            return x + self.shift

    model = ActNorm()
    engine = PrivacyEngine(seed=0)
    _, _, private_loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loader(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    with pytest.raises(RuntimeError, match="writes its parameters in its forward.*public data"):
        for (x,) in private_loader:
            model(x)
    assert not model.shift.any() and not model.is_set and not model.done


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.set_(torch.renorm(w, 2, 0, 1.0)),
        lambda w: w.mul_(torch.ones_like(w).tril()),
        lambda w: w.copy_(nn.functional.normalize(w, dim=1)),
    ],
    ids=["renorm", "mask", "normalize"],
)
def test_a_layer_that_limits_its_weights_is_refused_with_the_cause(write, private):
    """Also where the forward before has limited them, and this one changes nothing."""

    class Limited(nn.Linear):
        def forward(self, x):
            self.weight.data = write(self.weight.data.clone())
            return super().forward(x)

    model = Limited(3, 3)
    model(torch.ones(1, 3))
    _, model, _, _ = private(model)
    with pytest.raises(RuntimeError, match=r"writes its parameters.*self\.mask.*torch\.renorm"):
        model(torch.ones(4, 3))


def test_a_tied_autoencoder_is_told_where_its_weight_belongs(private):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Linear(3, 2)

        def forward(self, x):
            return nn.functional.linear(self.encoder(x), self.encoder.weight.t())

    engine, model, _, _ = private(Tied())
    with pytest.raises(PrivateRefusal, match="'encoder.weight'.*module that uses it twice"):
        engine.backward(model(torch.ones(4, 3)).square().sum(1))


def test_losses_of_a_loop_over_rows_are_told_the_call_for_them(private):
    engine, model, _, loader = private(nn.Linear(3, 2), torch.ones(8, 3))
    (x,) = next(iter(loader))

    def loss(model, row):
        return model(row).square().sum()

    with pytest.raises(PrivateRefusal, match=r"x\[None\].*engine\.backward\(loss_fn, batch\)"):
        engine.backward(torch.stack([loss(model, row[None]) for row in x]))
    engine.backward(loss, x)
