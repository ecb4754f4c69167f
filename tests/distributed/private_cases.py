"""What each rank runs for test_private_training.py, and what one process runs to compare."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from meshes import mesh_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash.distributed import context_parallel, shard_sequence
from dpflash.nn import LongContextLM
from dpflash.patterns import Adaptive, Dilated
from dpflash.step import PrivateStep

_release = PrivateStep.release


def _release_and_keep_sums(step: PrivateStep, **options: Any) -> None:
    sums = step.sums._sums
    _release(step, **options)
    step.sums._sums = sums  # until its step, to be compared


PrivateStep.release = _release_and_keep_sums  # type: ignore[method-assign]

TOKENS, VOCAB, SAMPLES, BATCH = 23, 40, 30, 6
STEPS = 5


def dataset(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(0, VOCAB, (samples, TOKENS + 1), generator=generator)
    return TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())


PATTERNS = {
    "dilated": Dilated(segment_lengths=(4, 16), dilation_rates=(1, 2), causal=True),
    "adaptive": Adaptive(block_size=16, keep=1, causal=True),
}


def build(**options: Any) -> LongContextLM:
    torch.manual_seed(0)
    if "pattern" in options:
        options["pattern"] = PATTERNS[options["pattern"]]
    return LongContextLM(VOCAB, 32, 2, 2, max_seq_len=TOKENS, **options)


def wrap(model: nn.Module, wrapper: str, mesh: DeviceMesh) -> nn.Module:
    """The model as it is, or in one of torch's wrappers."""
    if wrapper == "ddp":
        return DistributedDataParallel(model, process_group=mesh.get_group("data"))
    if wrapper.startswith("fsdp"):
        over = mesh["data"] if wrapper == "fsdp" else mesh["data", "context"]._flatten("all")
        for block in model.blocks:
            fully_shard(block, mesh=over)
        fully_shard(model, mesh=over)
    return model


def whole(model: nn.Module) -> np.ndarray:
    """All parameters one after another."""
    parts = []
    for parameter in model.parameters():
        x = parameter.detach()
        parts.append((x.full_tensor() if hasattr(x, "full_tensor") else x).flatten())
    return torch.cat(parts).numpy()


def documents() -> list[Tensor]:
    """Of lengths from 0 to TOKENS, one of them of several rows."""
    generator = torch.Generator().manual_seed(1)
    lengths = [40 if i == 7 else (i * 5) % (TOKENS + 1) for i in range(SAMPLES)]
    return [torch.randint(0, VOCAB, (n,), generator=generator) for n in lengths]


def train_packed(
    group: object = None,
    *,
    together: bool = True,
    context: int = 1,
    wrapper: str = "plain",
    clipping: str = "flat",
    grad_sample_mode: str = "auto",
    steps: int = 3,
) -> dict[str, Any]:
    """Some private steps on packed documents; together=False is one process."""
    mesh = mesh_of(context) if together else None
    plain = made = build()
    if mesh is not None:
        if context > 1:
            context_parallel(plain, mesh)
        made = wrap(plain, wrapper, mesh)
    engine = dpflash.PrivacyEngine(seed=3, mesh=mesh)
    pack = dpflash.packing.PackTo(tokens=2 * TOKENS, max_documents=5, rows=2)
    made, optimizer, loader = engine.make_private(
        module=made,
        optimizer=torch.optim.Adam(made.parameters(), lr=1e-2, eps=1e-3),
        data_loader=DataLoader(documents(), batch_size=BATCH, collate_fn=pack),
        noise_multiplier=0.5,
        max_grad_norm=0.5,
        clipping=clipping,
        grad_sample_mode=grad_sample_mode,
    )
    microbatches, own = 0, []
    while optimizer.releases < steps:
        for batch in loader:
            if context > 1:
                batch = plain.context_parallel.shard(batch)
            engine.backward(made(batch.input_ids, batch.targets, packed=batch))
            optimizer.step()
            optimizer.zero_grad()
            microbatches += 1
            own.append(int(loader.is_real.sum()))
            if optimizer.releases == steps:
                break
    return {
        "parameters": whole(made),
        "epsilon": engine.get_epsilon(1e-3),
        "documents": own,
        "microbatches": microbatches,
    }


def train(
    group: object = None,
    *,
    context: int = 0,
    wrapper: str = "plain",
    mode: str = "ring",
    sharding: str = "contiguous",
    clipping: str = "flat",
    grad_sample_mode: str = "auto",
    physical_batch_size: int | None = None,
    max_batch_size: int | None = None,
    sampling: str = "poisson",
    sigma: float = 0.5,
    batch_size: int = BATCH,
    steps: int = STEPS,
    no_sync: bool = False,
    model: dict[str, Any] | None = None,
    ledger: str | None = None,
    clip_function: str = "hard",
    users: int | None = None,
) -> dict[str, Any]:
    """Some private steps, if asked of users; context=0 is one process that has everything."""
    mesh = mesh_of(context) if context else None
    plain = made = build(**dict(model or {}))
    if mesh is not None:
        if context > 1:
            context_parallel(plain, mesh, mode=mode, sharding=sharding)
        made = wrap(plain, wrapper, mesh)
    engine = dpflash.PrivacyEngine(seed=3, mesh=mesh, ledger=ledger)
    made, optimizer, loader = engine.make_private(
        module=made,
        # By its usual eps a gradient of about 0 would make a whole step of its rounding.
        optimizer=torch.optim.Adam(made.parameters(), lr=1e-2, eps=1e-3),
        data_loader=DataLoader(dataset(), batch_size=batch_size),
        noise_multiplier=sigma,
        max_grad_norm=0.5,
        clipping=clipping,
        grad_sample_mode=grad_sample_mode,
        clip_function=clip_function,
        physical_batch_size=physical_batch_size,
        max_batch_size=max_batch_size,
        sampling=sampling,
        unit_of=None if users is None else [i * i % users for i in range(SAMPLES)],
        examples_per_unit=None if users is None else 3,
    )
    sizes: list[int] = []
    while optimizer.releases < steps:
        for x, y in loader:
            if context > 1:
                group_of_context = mesh.get_group("context")
                x, y = (shard_sequence(t, 1, group_of_context, sharding) for t in (x, y))
            if no_sync and not loader.is_last:
                with made.no_sync():
                    engine.backward(made(x, y))
            else:
                engine.backward(made(x, y))
            sizes.append(int(loader.is_real.sum()))
            optimizer.step()
            optimizer.zero_grad()
            if optimizer.releases == steps:
                break
    return {
        "parameters": whole(plain),
        "epsilon": engine.get_epsilon(1e-5),
        "sizes": sizes,
        "modes": sorted({use.grad_sample_mode for use in engine.plan()}),
    }


def clipped_sums(
    group: object = None,
    *,
    context: int,
    clipping: str = "flat",
    grad_sample_mode: str = "auto",
    drop: int | None = None,
    broken: bool = False,
    bound: float = 1.0,
    scale: float = 1.0,
) -> np.ndarray:
    """The clipped sum of a fixed batch without noise, over all ranks.

    Args:
        drop: leaves one sample out.
        broken: adds the squares of the parts' norms, as if they were norms of the sum.
        scale: of the losses, so that gradients are far above the bound.
    """
    mesh = mesh_of(context) if context else None
    model = build()
    if context > 1:
        context_parallel(model, mesh, mode="ring")
    engine = dpflash.PrivacyEngine(seed=3, mesh=mesh)
    model, optimizer, _ = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(dataset(), batch_size=BATCH),
        noise_multiplier=0.0,
        max_grad_norm=bound,
        clipping=clipping,
        grad_sample_mode=grad_sample_mode,
    )
    if broken:
        break_norms()
    x, y = (t[:4] for t in dataset().tensors)
    if drop is not None:
        kept = [i for i in range(4) if i != drop]
        x, y = x[kept], y[kept]
    if context > 1:
        x, y = (shard_sequence(t, 1, mesh.get_group("context")) for t in (x, y))
    try:
        engine.backward(model(x, y) * scale)
    finally:
        if broken:
            mend_norms()
    sums = engine._step.sums
    return torch.cat([sums[p].flatten() for p in model.parameters()]).numpy()


def packed_sums(
    group: object = None,
    *,
    context: int,
    clipping: str = "flat",
    grad_sample_mode: str = "auto",
    rows: int = 1,
    mode: str = "ring",
    drop: int | None = None,
    broken: bool = False,
    bound: float = 1.0,
    model: dict[str, Any] | None = None,
) -> dict[str, np.ndarray]:
    """Clipped sums and losses of one packed batch, some documents of which cross ranks.

    Args:
        drop: this document has no tokens.
        broken: see `clipped_sums`.
    """
    mesh = mesh_of(context) if context else None
    made: nn.Module = build(**dict(model or {})).double()
    if context > 1:
        context_parallel(made, mesh, mode=mode)
    engine = dpflash.PrivacyEngine(seed=3, mesh=mesh)
    pack = dpflash.packing.PackTo(tokens=22 * rows, max_documents=6, rows=rows)
    made, optimizer, _ = engine.make_private(
        module=made,
        optimizer=torch.optim.SGD(made.parameters(), lr=1.0),
        data_loader=DataLoader(documents(), batch_size=BATCH, collate_fn=pack),
        noise_multiplier=0.0,
        max_grad_norm=bound,
        clipping=clipping,
        grad_sample_mode=grad_sample_mode,
        exact=False,
        verify_first_batch=False,
    )
    # A batch that the loader has not drawn; the option is refused with a mesh.
    engine._step.tracker.foreign_batches = True
    generator = torch.Generator().manual_seed(2)
    lengths = [[3, 13, 5, 1], [28, 9, 5, 2, 0]][rows > 1]
    texts = [torch.randint(0, VOCAB, (n,), generator=generator) for n in lengths]
    places = pack(texts)
    if drop is not None:
        start, end = places.units.spans[drop]
        spans = tuple((0, 0) if i == drop else s for i, s in enumerate(places.units.spans))
        places.units = dpflash.packing.Units(places.units.shape, spans)
        places["labels"].view(-1)[start:end] = -100
        places["sample_index"].view(-1)[start:end] = -1
    engine.prepare(places)
    batch = made.context_parallel.shard(places) if context > 1 else places
    if broken:
        break_norms()
    try:
        losses = made(batch.input_ids, batch.targets, packed=batch)
        engine.backward(losses)
    finally:
        if broken:
            mend_norms()
    sums = engine._step.sums
    return {
        "sums": torch.cat([sums[p].flatten() for p in made.parameters()]).numpy(),
        "losses": losses.detach().numpy(),
    }


_held: list[Any] = []


def break_norms() -> None:
    """Norms from each rank's own part: its squares are added, never its gradients."""
    from dpflash.clipping import context_gate
    from dpflash.distributed import collectives

    _held.append(context_gate.ContextGate._slice)
    parts: dict[int, Tensor] = {}

    def share(self: Any, position: int, grad: Tensor) -> Tensor:
        own = _held[0](self, position, grad)
        parts[id(self), position] = grad
        return own

    def norms(self: Any, grads: Any) -> Tensor:
        self._settle(grads)
        squares = torch.zeros(self.batch_size, dtype=torch.float64)
        for (gate, _), grad in parts.items():
            if gate == id(self):
                squares += grad.flatten(1).double().square().sum(1)
        return collectives.all_reduce_(squares, self._group, "norms")

    _held.append(context_gate.ContextGate.finish_norms)
    context_gate.ContextGate._slice = share
    context_gate.ContextGate.finish_norms = norms


def mend_norms() -> None:
    from dpflash.clipping import context_gate

    context_gate.ContextGate._slice, context_gate.ContextGate.finish_norms = _held
    _held.clear()


def noise_of(group: object = None, *, context: int, wrapper: str = "plain") -> dict[str, Any]:
    """What a step adds to zero gradients: the parameters' change, and who drew how much."""
    from dpflash.kernels import noise

    mesh = mesh_of(context) if context else None
    plain = made = build()
    if mesh is not None:
        if context > 1:
            context_parallel(plain, mesh)
        made = wrap(plain, wrapper, mesh)
    before = whole(plain)
    engine = dpflash.PrivacyEngine(seed=3, mesh=mesh)
    made, optimizer, loader = engine.make_private(
        module=made,
        optimizer=torch.optim.SGD(made.parameters(), lr=1.0),
        data_loader=DataLoader(dataset(), batch_size=BATCH),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    drawn = [0]
    original = noise.NoiseStream.add_to_

    def count(self: noise.NoiseStream, out: Tensor) -> Tensor:
        drawn[0] += out.numel()
        return original(self, out)

    noise.NoiseStream.add_to_ = count
    try:
        for x, y in loader:
            if context > 1:
                x, y = (shard_sequence(t, 1, mesh.get_group("context")) for t in (x, y))
            engine.backward(made(x, y) * 0.0)
            optimizer.step()
            optimizer.zero_grad()
            if loader.is_last:
                break
    finally:
        noise.NoiseStream.add_to_ = original
    return {"noise": (before - whole(plain)) * BATCH, "drawn": drawn[0]}


def refusals(group: object = None) -> dict[str, str]:
    """What is refused where two ranks are, and how it is said."""
    said = {}

    def attempt(name: str, action: Any) -> None:
        try:
            action()
            said[name] = "nothing"
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"

    def make(engine: dpflash.PrivacyEngine, module: nn.Module, **options: Any) -> None:
        arguments = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, **options}
        engine.make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
            data_loader=DataLoader(dataset(), batch_size=BATCH, shuffle=True),
            **arguments,
        )

    rank = dist.get_rank()
    data, context = mesh_of(1), mesh_of(2)
    attempt("mesh of one", lambda: dpflash.PrivacyEngine(mesh=DeviceMesh("cpu", [rank])))
    attempt(
        "mesh names",
        lambda: dpflash.PrivacyEngine(mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))),
    )
    attempt("no mesh", lambda: dpflash.PrivacyEngine(mesh="data"))
    attempt("seed", lambda: dpflash.PrivacyEngine(mesh=data, seed=rank))
    attempt(
        "accountant",
        lambda: dpflash.PrivacyEngine(mesh=data, accountant="rdp" if rank else "contour"),
    )
    engine = dpflash.PrivacyEngine(mesh=data)
    attempt("shuffled", lambda: make(engine, build(), sampling="shuffled"))
    attempt("noise", lambda: make(engine, build(), noise_multiplier=1.0 + rank))
    attempt(
        "clipping",
        lambda: make(
            dpflash.PrivacyEngine(mesh=data), build(), clipping=("flat", "per_layer")[rank]
        ),
    )
    attempt(
        "model",
        lambda: make(
            dpflash.PrivacyEngine(mesh=data), build(norm=("layer_norm", "rms_norm")[rank])
        ),
    )
    attempt("not context parallel", lambda: make(dpflash.PrivacyEngine(mesh=context), build()))
    attempt(
        "engine without context",
        lambda: make(dpflash.PrivacyEngine(mesh=data), context_parallel(build(), context)),
    )
    attempt(
        "no engine mesh", lambda: make(dpflash.PrivacyEngine(), context_parallel(build(), context))
    )
    attempt(
        "users",
        lambda: make(
            dpflash.PrivacyEngine(mesh=context),
            context_parallel(build(), context),
            unit_of=[i // 2 for i in range(SAMPLES)],
            examples_per_unit=2,
        ),
    )
    attempt(
        "book_keeping",
        lambda: make(
            dpflash.PrivacyEngine(mesh=context),
            context_parallel(build(), context),
            grad_sample_mode="book_keeping",
        ),
    )
    attempt(
        "packed exact",
        lambda: dpflash.PrivacyEngine(mesh=context).make_private(
            module=(model := context_parallel(build(), context)),
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=DataLoader(
                documents(),
                batch_size=BATCH,
                collate_fn=dpflash.packing.PackTo(tokens=64, max_documents=5, align=64),
            ),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            exact=True,
        ),
    )
    attempt("ddp without mesh", lambda: make(dpflash.PrivacyEngine(), wrap(build(), "ddp", data)))
    attempt(
        "fsdp without mesh", lambda: make(dpflash.PrivacyEngine(), wrap(build(), "fsdp", data))
    )
    folder = os.environ.get("TMPDIR", "/tmp")
    attempt("ledger", lambda: dpflash.PrivacyEngine(mesh=data, ledger=folder))
    return said


def differing_draws(group: object = None) -> str:
    """A rank that is at another draw than the other one."""
    engine = dpflash.PrivacyEngine(mesh=mesh_of(1))
    model = build()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(dataset(), batch_size=BATCH),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for x, y in loader:
        if engine._step.tracker.current.draw == dist.get_rank():
            engine.backward(model(x, y))
            optimizer.step()
        else:
            engine._step.tracker.refused()  # Nothing else may leave a draw without its release.
        optimizer.zero_grad()
        if optimizer.releases:
            break
    return "released"


def shares(group: object = None, *, batch_size: int, physical_batch_size: int) -> Any:
    """The draws of one pass, and the parts of them that this rank gets."""
    engine = dpflash.PrivacyEngine(seed=7, mesh=mesh_of(1))
    model = nn.Linear(1, 1)
    samples = torch.arange(50.0).unsqueeze(1)
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(samples), batch_size=batch_size),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        physical_batch_size=physical_batch_size,
    )
    parts = []
    for (x,) in loader:
        mark = engine._step.tracker.current
        own = x[loader.is_real].flatten()
        parts.append((mark.draw, mark.last, [int(i) for i in own]))
        engine.backward(model(x)[:, 0])
        optimizer.step()
        optimizer.zero_grad()
    return [loader._draws.draw(draw) for draw in range(loader.steps_per_epoch)], parts


def uneven_losses(group: object = None) -> str:
    """NaN in one rank's tokens: the sample is dropped on all of them."""
    model = context_parallel(build(), mesh_of(2))
    engine = dpflash.PrivacyEngine(seed=3, mesh=mesh_of(2))
    model, optimizer, _ = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(dataset(), batch_size=BATCH),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
    )
    x, y = (t[:4] for t in dataset().tensors)
    x, y = (shard_sequence(t, 1, mesh_of(2).get_group("context")) for t in (x, y))
    weights = torch.ones(4)
    if dist.get_rank() == 1:
        weights[2] = float("nan")
    engine.backward(model(x, y) * weights)
    sums = engine._step.sums
    flat = torch.cat([sums[p].flatten() for p in model.parameters()])
    return f"{engine.diagnostics()['nonfinite_samples']} {bool(flat.isfinite().all())}"


def after_detach(group: object = None) -> dict[str, float]:
    """A plain step of a wrapped model that was private before: DDP means its gradients again."""
    model = wrap(build(), "ddp", mesh_of(1))
    engine = dpflash.PrivacyEngine(mesh=mesh_of(1))
    loader = DataLoader(dataset(), batch_size=BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    engine.detach(model)
    x, y = (t[3 * dist.get_rank() :][:3] for t in dataset().tensors)
    model(x, y).mean().backward()
    got = torch.cat([p.grad.flatten() for p in model.parameters()])
    alone = build()
    x, y = (t[:6] for t in dataset().tensors)
    alone(x, y).mean().backward()
    wanted = torch.cat([p.grad.flatten() for p in alone.parameters()])
    before = whole(model)
    second = dpflash.PrivacyEngine(seed=1, mesh=mesh_of(1))
    _, private, draws = second.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=0.0,
        max_grad_norm=1e-3,
    )
    for x, y in draws:
        second.backward(model(x, y))
        private.step()
        private.zero_grad()
        if draws.is_last:
            break
    moved = np.linalg.norm(before - whole(model)) * BATCH
    return {"error": float((got - wanted).abs().max()), "moved": float(moved)}


def signalled(group: object = None) -> str:
    """BatchMemoryManager's call beside other ranks."""
    model = build()
    engine = dpflash.PrivacyEngine(mesh=mesh_of(1))
    _, optimizer, _ = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(dataset(), batch_size=BATCH),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    try:
        optimizer.signal_skip_step(True)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def ledger_of(group: object = None, *, path: str) -> dict[str, Any]:
    """Steps with a ledger that the first rank keeps, and an engine that begins behind them."""
    first = train(context=1, ledger=path, steps=3)
    engine = dpflash.PrivacyEngine(mesh=mesh_of(1), ledger=path)
    return {
        "epsilon": first["epsilon"],
        "again": engine.get_epsilon(1e-5),
        "lines": len(engine._spending.ledger.lines),
    }


def failing_ledger(group: object = None, *, path: str) -> str:
    """A ledger that another process writes to in mid-training: no rank releases."""
    model = build()
    before = whole(model)
    engine = dpflash.PrivacyEngine(mesh=mesh_of(1), ledger=path)
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(dataset(), batch_size=BATCH),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for x, y in loader:
        losses = model(x, y)
        if loader.is_last and dist.get_rank() == 0:
            with open(path, "ab") as file:
                file.write(b"x")
        try:
            engine.backward(losses)
            optimizer.step()
        except RuntimeError as error:
            same = bool((before == whole(model)).all())
            return f"{same} {error}"
        if loader.is_last:
            break
    return "released"


class Odd(nn.Linear):
    """A weight whose rows are not consecutive in memory, and buffers of several dtypes."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.weight = nn.Parameter(torch.randn(4, 3).t())
        self.register_buffer("flags", torch.rand(7) < 0.5)
        self.register_buffer("narrow", torch.randn(2, 3, dtype=torch.bfloat16)[:, ::2])
        self.register_buffer("count", torch.tensor(dist.get_rank()))
        self.register_buffer("nothing", torch.zeros(0, 2))


def odd_start(group: object = None) -> dict[str, Any]:
    """What make_private leaves of tensors that a backend does not send as they are."""
    torch.manual_seed(100 + dist.get_rank())
    model = nn.Sequential(Odd())
    strides = model[0].weight.stride()
    dpflash.PrivacyEngine(mesh=mesh_of(1)).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(torch.zeros(8, 4)), batch_size=2),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    assert model[0].weight.stride() == strides
    return {name: value.float().numpy() for name, value in model.state_dict().items()}


def unequal_start(group: object = None) -> np.ndarray:
    """Ranks that built different models have the first one's after make_private."""
    torch.manual_seed(100 + dist.get_rank())
    model = LongContextLM(VOCAB, 32, 1, 2, max_seq_len=TOKENS)
    dpflash.PrivacyEngine(mesh=mesh_of(1)).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(dataset(), batch_size=BATCH),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    return whole(model)


class _Coupled(torch.autograd.Function):
    """The identity, whose backward takes the mean gradient of the batch off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean(0)


class _Restless(torch.autograd.Function):
    """The identity, whose backward is another one each time."""

    own = torch.Generator().manual_seed(0)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * torch.rand(grad.shape, generator=_Restless.own)


BREAKS = {
    "forward": lambda module, inputs, output: output - output.detach().mean(0),
    "order": lambda module, inputs, output: output.flip(0),
    "backward": lambda module, inputs, output: _Coupled.apply(output),
    "ghost": lambda module, inputs, output: _Restless.apply(output),
    "buffer": lambda module, inputs, output: module.kept.add_(1.0) and None,
}


def proven(
    group: object = None,
    *,
    context: int,
    wrapper: str = "plain",
    breaks: str | None = None,
    verify: bool = True,
    steps: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """Some steps of a model that may be broken on the second rank; what is refused, if so."""
    mesh = mesh_of(context)
    plain = made = build()
    plain.blocks[0].register_buffer("kept", torch.ones(1))
    if context > 1:
        context_parallel(plain, mesh)
    made = wrap(plain, wrapper, mesh)
    engine = dpflash.PrivacyEngine(seed=3, mesh=mesh)
    made, optimizer, loader = engine.make_private(
        module=made,
        optimizer=torch.optim.SGD(made.parameters(), lr=0.1),
        data_loader=DataLoader(dataset(), batch_size=24),
        noise_multiplier=0.5,
        max_grad_norm=0.5,
        verify_first_batch=verify,
        **options,
    )
    if breaks and dist.get_rank() == 1:
        plain.blocks[0].register_forward_hook(BREAKS[breaks])
    refused = None
    for x, y in loader:
        if context > 1:
            x, y = (shard_sequence(t, 1, mesh.get_group("context")) for t in (x, y))
        try:
            engine.backward(made(x, y))
        except RuntimeError as error:
            refused = f"{type(error).__name__}: {error}"
            assert engine._step.sums == {}
            break
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.releases == steps:
            break
    return {"refused": refused, "verified": engine.verified, "parameters": whole(plain)}
