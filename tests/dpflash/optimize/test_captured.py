"""Captured calls: a stand-in for CUDA graphs records what is launched, and launches it again."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from dpflash import PrivateRefusal, build
from dpflash.kernels import grads
from dpflash.optimize import captured

WIDTH, VOCAB = 16, 20


class Recording(TorchDispatchMode):
    """The operations and kernels of a block; as in a capture, their results are not to be read."""

    under_way = None

    def __init__(self):
        super().__init__()
        self.calls = []
        self.replays = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if operation.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "equal"):
            raise RuntimeError(f"{operation} waits for the device in a capture")
        found = operation(*args, **kwargs)
        given = {storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        results = [x for x in tree_leaves(found) if isinstance(x, Tensor)]
        is_written = any(
            a.alias_info and a.alias_info.is_write for a in operation._schema.arguments
        )
        is_view = any(storage(x) in given for x in results)
        if is_written or (not is_view and "empty" not in operation.overloadpacket.__name__):
            self.note(operation, args, kwargs, [] if is_written else results)
        return found

    def note(self, function, args, kwargs, results):
        self.calls.append((function, args, kwargs, results))
        for result in results:
            if result.is_floating_point():
                result.fill_(float("nan"))

    def __enter__(self):
        Recording.under_way = self
        return super().__enter__()

    def __exit__(self, *error):
        Recording.under_way = None
        return super().__exit__(*error)

    def replay(self):
        self.replays += 1
        with torch.no_grad():
            for operation, args, kwargs, results in self.calls:
                found = operation(*args, **kwargs)
                for result, new in zip(results, tree_leaves(found), strict=False):
                    result.copy_(new)


def storage(x):
    return x.untyped_storage().data_ptr()


class StandIn:
    """In place of `CudaGraphs`."""

    made = ()

    def __init__(self, device):
        self.recordings = []
        StandIn.made = (*StandIn.made, self)

    def aside(self):
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def recording(self):
        self.recordings.append(Recording())
        with self.recordings[-1]:
            yield self.recordings[-1].replay


class Kernels:
    """The kernels for some tensors, which a recording notes whole."""

    def __init__(self, kernels):
        self.kernels = kernels

    def __getattr__(self, name):
        function = getattr(self.kernels, name)

        def call(*args, **kwargs):
            recording = Recording.under_way
            if recording is None:
                return function(*args, **kwargs)
            with _disable_current_modes():
                found = function(*args, **kwargs)
                given = {storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
                results = [x for x in tree_leaves(found) if isinstance(x, Tensor)]
                own = [x for x in results if storage(x) not in given]
                assert len(own) in (0, len(results))
                recording.note(function, args, kwargs, own)
            return found

        return call


@pytest.fixture
def graphs(monkeypatch):
    """CUDA graphs of a model on the CPU; gives the stand-ins of all captures."""
    kernels_for = grads._backend
    monkeypatch.setattr(
        grads, "_backend", lambda *x, **options: Kernels(kernels_for(*x, **options))
    )
    monkeypatch.setattr(captured, "CudaGraphs", StandIn)
    monkeypatch.setattr(build, "obstacle", lambda *_: None)
    monkeypatch.setattr(StandIn, "made", ())
    return lambda: StandIn.made


class Model(nn.Module):
    calls = [0]  # not of an object: numbers of a model are compared before each replay

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        self.calls[0] += 1
        h = self.embedding(x)
        return self.head(self.dropout(h + F.gelu(self.up(self.norm(h)))))


def losses_of(model, x):
    losses = F.cross_entropy(model(x).flatten(0, 1), x.flatten(), reduction="none")
    return losses.view(len(x), -1).mean(1)


DATA = torch.randint(0, VOCAB, (24, 5), generator=torch.Generator().manual_seed(1))


def run(private, loop, *, model=None, **options):
    """The engine and the model after a loop."""
    torch.manual_seed(0)
    Model.calls[0] = 0
    model = Model() if model is None else model
    options = {
        **{"batch_size": 8, "physical_batch_size": 4, "noise_multiplier": 0.5},
        **{"max_grad_norm": 0.4, "grad_sample_mode": "instantiate", "cuda_graph": True},
        **{"verify_first_batch": False, **options},
    }
    engine, model, optimizer, loader = private(model, DATA, **options)
    loop(engine, model, optimizer, loader)
    return engine, model


def steps_of(losses=losses_of, steps=6, before=lambda model, microbatch: None):
    """A loop of so many releases."""

    def loop(engine, model, optimizer, loader):
        left, microbatch = steps, 0
        while left > 0:
            for (rows,) in loader:
                before(model, microbatch)
                engine.backward(losses(model, rows))
                optimizer.step()
                optimizer.zero_grad()
                microbatch += 1
                left -= loader.is_last
                if not left:
                    break

    return loop


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


KINDS = {
    "flat": {},
    "per_layer": {"clipping": "per_layer", "grad_sample_mode": "auto"},
    "mean": {"loss_reduction": "mean"},
    "proven": {"verify_first_batch": True},
    "fixed": {"sampling": "fixed_size"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_captured_steps_have_the_bits_of_eager_ones(kind, private, graphs):
    # Draws of several microbatches; those of Poisson's have padding rows.
    def losses(model, x):
        return losses_of(model, x).mean() if kind == "mean" else losses_of(model, x)

    steps = steps_of(losses, 12 if kind == "proven" else 6)
    plain, eager = run(private, steps, cuda_graph=False, **KINDS[kind])
    calls = Model.calls[0]
    engine, model = run(private, steps, **KINDS[kind])
    assert "CUDA graphs: forward and backward of batches" in str(engine.optimization)
    forward, backward = graphs()[-1].recordings
    assert forward.replays == backward.replays > 6
    # Layers run in four calls of a capture, which its own replay follows, and no longer.
    assert Model.calls[0] == calls - forward.replays + 1 + 4
    assert torch.equal(weights(model), weights(eager))
    numbers = [e.diagnostics() for e in (engine, plain)]
    assert torch.equal(*(own.pop("per_sample_norms") for own in numbers))
    assert numbers[0] == numbers[1] and numbers[0]["clip_fraction"] > 0


def test_captured_and_eager_microbatches_add_to_one_sum(private, graphs):
    def losses(model, x):  # every third one has another shape
        losses.count += 1
        return losses_of(model, x[:, : 4 if losses.count % 3 == 0 else 5])

    found = []
    for cuda_graph in (False, True):
        losses.count = 0
        found.append(run(private, steps_of(losses, 5), cuda_graph=cuda_graph)[1])
    assert graphs()
    assert torch.equal(*map(weights, found))


def test_a_new_bound_is_captured_anew(private, graphs):
    def loop(engine, model, optimizer, loader):
        for bound in (0.4, 0.1):
            optimizer.max_grad_norm = bound
            steps_of(steps=4)(engine, model, optimizer, loader)

    models = [run(private, loop, cuda_graph=on)[1] for on in (False, True)]
    assert len(graphs()) == 2
    assert torch.equal(*map(weights, models))


def test_a_bound_that_changed_since_the_call_is_refused(private, graphs):
    def loop(engine, model, optimizer, loader):
        steps_of()(engine, model, optimizer, loader)
        losses = losses_of(model, next(iter(loader))[0])
        optimizer.max_grad_norm = 0.1
        with pytest.raises(PrivateRefusal, match="max_grad_norm changed between a call"):
            engine.backward(losses)

    run(private, loop)
    assert graphs()


def test_weights_that_never_stay_are_not_captured_for_ever(private, graphs):
    def before(model, microbatch):
        if microbatch % 5 == 4:
            model.up.weight.data = model.up.weight.data * 0.5

    engine, _ = run(private, steps_of(steps=12, before=before))
    assert len(graphs()) == 4
    assert "are replaced again and again" in str(engine.optimization)


def test_other_weights_are_not_read_where_the_old_ones_were(private, graphs):
    def before(model, microbatch):
        if microbatch == 8:
            model.up.weight.data = model.up.weight.data * 0.5

    models = [run(private, steps_of(before=before), cuda_graph=on)[1] for on in (False, True)]
    assert len(graphs()) == 2
    assert torch.equal(*map(weights, models))


def test_losses_of_an_earlier_call_are_refused(private, graphs):
    def loop(engine, model, optimizer, loader):
        steps_of()(engine, model, optimizer, loader)
        for (rows,) in loader:
            earlier = losses_of(model, rows)
            break
        for (rows,) in loader:
            losses_of(model, rows)
            with pytest.raises(PrivateRefusal, match="earlier call of the model"):
                engine.backward(earlier)
            break

    run(private, loop)
    assert graphs()


def test_two_calls_for_a_backward_run_layer_by_layer(private, graphs):
    def losses(model, x):
        return losses_of(model, x) + losses_of(model, x.flip(1))

    engine, model = run(private, steps_of(losses))
    assert not graphs()
    assert "since the loop calls the model more than once" in str(engine.optimization)
    _, eager = run(private, steps_of(losses), cuda_graph=False)
    assert torch.equal(weights(model), weights(eager))


def test_a_second_call_after_a_captured_one_is_refused(private, graphs):
    def loop(engine, model, optimizer, loader):
        steps_of()(engine, model, optimizer, loader)
        rows = next(iter(loader))[0]
        with pytest.raises(PrivateRefusal, match="more than one forward"):
            engine.backward(losses_of(model, rows) + losses_of(model, rows.flip(1)))

    run(private, loop)
    assert graphs()


@pytest.mark.parametrize("number", [0, 1])
def test_outputs_changed_in_place_are_refused(number, private, graphs):
    class Two(Model):
        def forward(self, x):
            logits = super().forward(x)
            return logits, logits.detach()

    def losses(model, x):
        outputs = model(x)
        outputs[number].div_(2.0)
        return F.cross_entropy(outputs[0].mT, x, reduction="none").mean(1)

    with pytest.raises(PrivateRefusal, match="changed in place"):
        run(private, steps_of(losses), model=Two())
    assert graphs()


class Waiting(Model):
    def forward(self, x):
        return super().forward(x) if bool((x >= 0).all()) else None


class Reading(Model):
    """What the loop sets beside the arguments."""

    def forward(self, x):
        return super().forward(x) + Reading.labels[: len(x), :, None]


class Keeping(Model):
    """What the loop may take beside the outputs."""

    kept = []

    def forward(self, x):
        self.kept[:] = [super().forward(x).detach()]
        return super().forward(x)


class Writing(Model):
    def forward(self, x):
        return super().forward(x.remainder_(VOCAB))


class Stacking(Model):
    """Rows of which a sample has two, beside others."""

    def forward(self, x):
        both = self.up(self.embedding(torch.cat([x, x])))
        return self.head(both[: len(x)] + both[len(x) :] + self.up(self.embedding(x)))


def hooked(model, microbatch):
    if not microbatch:
        model.up.register_forward_hook(lambda *_: None)


Reading.labels = torch.randn(24, 5)
LEFT_OUT = {
    "dropout": ({"dropout": 0.5}, {}, "the model's forward draws random numbers"),
    "hook": ({"before": hooked}, {}, "module 'up' has hooks"),
    "reads": ({"kind": Reading}, {}, "its forward reads a tensor that is no argument"),
    "keeps": ({"kind": Keeping}, {}, "its forward keeps tensors that it does not return"),
    "writes": ({"kind": Writing}, {}, "its forward changes its arguments"),
    "wait": ({"kind": Waiting}, {}, "capturing failed with RuntimeError, which the log has"),
    "kept": ({}, {"grad_sample_mode": "book_keeping"}, "the planner keeps activations of"),
    "rounded": ({}, {"exact": False}, "sums are not exact"),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_a_graph_cannot_hold_runs_layer_by_layer(name, private, graphs):
    of_model, options, why = LEFT_OUT[name]
    of_model = dict(of_model)
    steps = steps_of(before=of_model.pop("before", lambda *_: None))
    kind, found = of_model.pop("kind", Model), []
    for cuda_graph in (True, False):
        torch.manual_seed(0)
        model = kind(**of_model)
        found.append(run(private, steps, model=model, cuda_graph=cuda_graph, **options))
    (engine, one), (_, other) = found
    assert f"left out: CUDA graphs, since {why}" in str(engine.optimization)
    assert torch.equal(weights(one), weights(other))


def test_layers_that_see_batches_of_several_sizes_are_not_captured(private, graphs):
    def loop(engine, model, optimizer, loader):
        for _ in range(8):
            for (rows,) in loader:
                with contextlib.suppress(PrivateRefusal):
                    engine.backward(losses_of(model, rows))
                break

    engine, _ = run(private, loop, model=Stacking())
    assert not any(x.replays for made in graphs() for x in made.recordings)


def test_a_captured_forward_has_one_backward(private, graphs):
    def loop(engine, model, optimizer, loader):
        steps_of()(engine, model, optimizer, loader)
        for (rows,) in loader:
            losses = model(rows).square().mean((1, 2))
            engine.backward(losses)
            gate = engine._run.wrapper._captured._open[0]
            with pytest.raises(PrivateRefusal, match="for a second time"):
                gate.finish([None])
            break

    run(private, loop)
    assert graphs()


def test_new_operations_of_the_loop_behind_a_captured_call_are_tried(private, graphs):
    class Losses(Model):
        def forward(self, x):
            return losses_of(super().forward, x)

    def losses(model, x):
        losses.count += 1
        return model(x) if losses.count < 60 else model(x).cumsum(0)

    losses.count = 0
    with pytest.raises(PrivateRefusal):
        run(private, steps_of(losses, 60), model=Losses(), verify_first_batch=True)
    assert losses.count < 64  # with the next trials, not with one that was due anyway
    assert sum(x.replays for made in graphs() for x in made.recordings)


def test_a_sample_without_a_finite_loss_leaves_no_trace_in_what_is_captured(private, graphs):
    class Infinite(Model):
        def forward(self, x):
            return super().forward(x) / (x != 3).all(1)[:, None, None]

    models = []
    for cuda_graph in (False, True):
        torch.manual_seed(0)
        engine, model = run(private, steps_of(), model=Infinite(), cuda_graph=cuda_graph)
        models.append(model)
    assert "CUDA graphs: forward and backward" in str(engine.optimization)
    assert torch.equal(*map(weights, models))


def test_numbers_of_the_model_are_read_anew(private, graphs):
    class Scaled(Model):
        scale = 1.0

        def forward(self, x):
            return super().forward(x) * self.scale

    def before(model, microbatch):
        model.scale = 1.0 if microbatch < 8 else 0.5

    models = []
    for cuda_graph in (False, True):
        torch.manual_seed(0)
        models.append(
            run(private, steps_of(before=before), model=Scaled(), cuda_graph=cuda_graph)[1]
        )
    assert graphs() and torch.equal(*map(weights, models))


def test_a_replay_that_differs_is_not_used(private, graphs, monkeypatch):
    monkeypatch.setattr(Recording, "replay", lambda self: None)
    engine, _ = run(private, steps_of())
    assert "a replay gave other results" in str(engine.optimization)


def test_a_model_on_the_cpu_is_not_captured(private):
    engine, _ = run(private, steps_of(steps=1))
    assert "left out: CUDA graphs, since the model is on cpu" in str(engine.optimization)
