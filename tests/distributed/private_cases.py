"""What each rank runs for test_private_training.py, and what one process runs to compare."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from meshes import hybrid_mesh_of, mesh_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash.bench.communication import SentBytes
from dpflash.bench.isolated import Place
from dpflash.distributed import RankError, context_parallel, shard_sequence
from dpflash.kernels import NoiseStream, gaussian_noise_, grid_of
from dpflash.nn import LongContextLM
from dpflash.noise import Banded
from dpflash.noise.reference import correlated
from dpflash.patterns import Adaptive, Dilated
from dpflash.step import PrivateStep, noise, sums

_release = PrivateStep.release


def _release_and_keep_sums(step: PrivateStep, **options: Any) -> None:
    sums = step.sums._sums
    _release(step, **options)
    step.sums._sums = sums  # until its step, to be compared


PrivateStep.release = _release_and_keep_sums  # type: ignore[method-assign]

TOKENS, VOCAB, SAMPLES, BATCH = 23, 40, 30, 6
STEPS = 3


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


class DifferentiallyPrivateDistributedDataParallel(nn.Sequential):
    """Has the name of Opacus' wrapper."""


def wrap(model: nn.Module, wrapper: str, mesh: DeviceMesh) -> nn.Module:
    """The model as it is, or in one of torch's wrappers."""
    if wrapper == "ddp":
        return DistributedDataParallel(model, process_group=mesh.get_group("data"))
    if wrapper.startswith(("fsdp", "hsdp")):
        over = {
            "fsdp": lambda: mesh["data"],
            "fsdp2d": lambda: mesh["data", "context"]._flatten("all"),
            "hsdp": lambda: mesh["dp_replicate", "dp_shard"],
            "hsdp2d": lambda: mesh["dp_replicate", "cp"],
        }[wrapper]()
        for block in model.blocks:
            fully_shard(block, mesh=over)
        fully_shard(model, mesh=over)
    return model


def parallel(
    model: nn.Module, context: int, wrapper: str = "plain", **options: Any
) -> tuple[nn.Module, DeviceMesh | None]:
    """The model as ranks share it, and their mesh; as it is for context=0, of one process."""
    if not context:
        return model, None
    mesh = (hybrid_mesh_of if wrapper.startswith("hsdp") else mesh_of)(context)
    if context > 1:
        context_parallel(model, mesh, **options)
    return wrap(model, wrapper, mesh), mesh


def sharded(mesh: DeviceMesh | None, *batch: Tensor, sharding: str = "contiguous") -> list[Tensor]:
    """This rank's tokens of a batch."""
    if mesh is None or mesh.shape[-1] == 1:
        return list(batch)
    group = mesh.get_group(mesh.ndim - 1)
    return [shard_sequence(t, 1, group, sharding) for t in batch]


def private(
    engine: dpflash.PrivacyEngine,
    model: nn.Module,
    data: Any = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    batch_size: int = BATCH,
    collate: Any = None,
    shuffle: bool = False,
    **options: Any,
) -> Any:
    """What `make_private` returns, for SGD where no optimizer is given."""
    data = dataset() if data is None else data
    return engine.make_private(
        module=model,
        optimizer=optimizer or torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(data, batch_size, shuffle, collate_fn=collate),
        **{"noise_multiplier": 1.0, "max_grad_norm": 1.0, **options},
    )


def adam(model: nn.Module | Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """By its usual eps a gradient of about 0 would make a whole step of its rounding."""
    parameters = model.parameters() if isinstance(model, nn.Module) else model
    return torch.optim.Adam(parameters, lr=1e-2, eps=1e-3)


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
    plain = build()
    made, mesh = parallel(plain, context if together else 0, wrapper)
    engine = dpflash.PrivacyEngine(seed=3, mesh=mesh)
    pack = dpflash.packing.PackTo(tokens=2 * TOKENS, max_documents=5, rows=2)
    options = {"noise_multiplier": 0.5, "max_grad_norm": 0.5, "clipping": clipping}
    options |= {"grad_sample_mode": grad_sample_mode, "optimizer": adam(made)}
    made, optimizer, loader = private(engine, made, documents(), collate=pack, **options)
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
    several: bool = False,
) -> dict[str, Any]:
    """Some private steps, of users or several optimizers; context=0 is one process with all."""
    plain = build(**dict(model or {}))
    made, mesh = parallel(plain, context, wrapper, mode=mode, sharding=sharding)
    engine = dpflash.PrivacyEngine(seed=3, mesh=mesh, ledger=ledger)
    held = list(made.parameters())
    made, optimizers, loader = private(
        engine,
        made,
        optimizer=[adam(held[:3]), adam(held[3:])] if several else [adam(made)],
        batch_size=batch_size,
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
        run_name=None if ledger is None else f"named by rank {dist.get_rank()}",
    )
    sizes: list[int] = []
    while loader.releases < steps:
        for x, y in loader:
            x, y = sharded(mesh, x, y, sharding=sharding)
            if no_sync and not loader.is_last:
                with made.no_sync():
                    engine.backward(made(x, y))
            else:
                engine.backward(made(x, y))
            if not loader._mark.is_trial:
                sizes.append(int(loader.is_real.sum()))
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            if loader.releases == steps:
                break
    return {
        "parameters": whole(plain),
        "epsilon": engine.get_epsilon(1e-5),
        "head": engine.ledger_head,
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
    bound: float = 1.0,
    scale: float = 1.0,
) -> np.ndarray:
    """The clipped sum of a fixed batch without noise, over all ranks.

    Args:
        drop: leaves one sample out.
        scale: of the losses, so that gradients are far above the bound.
    """
    model, mesh = parallel(build(), context, mode="ring")
    engine = dpflash.PrivacyEngine(seed=3, mesh=mesh)
    options = {"clipping": clipping, "grad_sample_mode": grad_sample_mode}
    private(engine, model, noise_multiplier=0.0, max_grad_norm=bound, **options)
    x, y = (t[:4] for t in dataset().tensors)
    if drop is not None:
        kept = [i for i in range(4) if i != drop]
        x, y = x[kept], y[kept]
    x, y = sharded(mesh, x, y)
    engine.backward(model(x, y) * scale)
    return flat_sums(engine, model).numpy()


def flat_sums(engine: dpflash.PrivacyEngine, model: nn.Module) -> Tensor:
    """The clipped sums of all parameters one after another; ranks are those of a context."""
    sums = engine._step.sums
    wholes = sums.slices.released({p: sums[p].flatten() for p in model.parameters()})
    return torch.cat([whole.flatten() for whole in wholes])


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
        broken: adds the squares of the parts' norms, as if they were norms of the sum.
    """
    made, mesh = parallel(build(**dict(model or {})).double(), context, mode=mode)
    engine = dpflash.PrivacyEngine(seed=3, mesh=mesh)
    pack = dpflash.packing.PackTo(tokens=22 * rows, max_documents=6, rows=rows)
    private(
        engine,
        made,
        documents(),
        collate=pack,
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
    with broken_norms() if broken else nullcontext():
        losses = made(batch.input_ids, batch.targets, packed=batch)
        engine.backward(losses)
    return {"sums": flat_sums(engine, made).numpy(), "losses": losses.detach().numpy()}


@contextmanager
def broken_norms() -> Iterator[None]:
    """Norms from each rank's own part: its squares are added, never its gradients."""
    from dpflash.clipping.context_gate import ContextGate
    from dpflash.distributed import collectives

    wait = ContextGate._wait
    parts: dict[tuple[int, int], Tensor] = {}

    def share(self: Any, position: int, grad: Tensor) -> None:
        wait(self, position, grad)
        parts[id(self), position] = grad

    def norms(self: Any, grads: Any) -> Tensor:
        self._settle(grads)
        squares = torch.zeros(self.batch_size, dtype=torch.float64)
        for (gate, _), grad in parts.items():
            if gate == id(self):
                squares += grad.flatten(1).double().square().sum(1)
        return collectives.all_reduce_(squares, self._group, "norms")

    with patch.multiple(ContextGate, _wait=share, finish_norms=norms):
        yield


def communicated(
    group: object = None, *, context: int, wrapper: str, clipping: str
) -> dict[str, Any]:
    """Calls of a private step, and the bytes that this rank sends in it."""
    plain = build()
    made, mesh = parallel(plain, context, wrapper, mode="ring")
    engine = dpflash.PrivacyEngine(seed=3, mesh=mesh)
    options = {"verify_first_batch": False, "sampling": "fixed_size", "clipping": clipping}
    made, optimizer, loader = private(engine, made, **options)
    place = Place(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    for number, (x, y) in enumerate(loader):
        with SentBytes(place) as sent:  # the second step is like all that follow
            engine.backward(made(*sharded(mesh, x, y)))
            optimizer.step()
            optimizer.zero_grad()
        if number:
            break
    return {"calls": sent.calls, "bytes": sent.bytes, "groups": len(engine._step._clipper.groups)}


def noise_of(
    group: object = None, *, context: int, wrapper: str = "plain", bands: int = 1, steps: int = 1
) -> dict[str, Any]:
    """What steps add to zero gradients: the parameters' change, and who drew how much."""
    plain = build()
    made, mesh = parallel(plain, context, wrapper)
    before = whole(plain)
    engine = dpflash.PrivacyEngine(seed=3, mesh=mesh)
    options = {"noise_mechanism": Banded(bands=bands), "sampling": "cyclic_poisson"}
    made, optimizer, loader = private(engine, made, **options if bands > 1 else {})
    drawn, integers = [0], []
    original, add_ = sums.add_noise_, noise.BandedNoise.add_

    def keep(self: Any, totals: Any, begins: Any) -> None:
        add_(self, totals, begins)
        ids = self._parameter_ids
        integers.append({ids[p]: (begins[p], y.flatten()) for p, y in self._made.items()})

    def count(outs: list[Tensor], streams: list[NoiseStream]) -> Sequence[Tensor]:
        drawn[0] += sum(out.numel() for out in outs)
        return original(outs, streams)

    with (
        patch.object(sums, "add_noise_", count),
        patch.object(noise, "add_noise_", count),
        patch.object(noise.BandedNoise, "add_", keep),
    ):
        for x, y in loader:
            engine.backward(made(*sharded(mesh, x, y)) * 0.0)
            optimizer.step()
            optimizer.zero_grad()
            if loader.is_last and loader.releases == steps:
                break
    return {
        "noise": (before - whole(plain)) * BATCH,
        "drawn": drawn[0],
        "integers": integers,
        "key": engine._keys.noise,
    }


def integers_of(key: bytes, shape: Sequence[int], number: int, *, bands: int, steps: int) -> Any:
    """`[steps, n]`: what the reference adds to a parameter, for the noise of `noise_of`."""
    mechanism, unit = Banded(bands=bands), grid_of(1.0) / 2**8
    std = math.nextafter(math.nextafter(1.0, math.inf) * mechanism.noise_scale(), math.inf)
    z = []
    for step in range(steps):
        out = torch.zeros(tuple(shape), dtype=torch.float64)
        gaussian_noise_(out, std=std, grid=unit, key=key, step=step, parameter_id=number)
        z.append((out.flatten() / unit).long().tolist())
    of_elements = [correlated(element, mechanism.integers) for element in zip(*z, strict=True)]
    return torch.tensor(of_elements).T


def refusals(group: object = None) -> dict[str, str]:
    """What is refused where two ranks are, and how it is said."""
    said = {}
    rank = dist.get_rank()
    data, context = mesh_of(1), mesh_of(2)
    engine, new = dpflash.PrivacyEngine(mesh=data), dpflash.PrivacyEngine
    pack = dpflash.packing.PackTo(tokens=64, max_documents=5, align=64)
    users = {"unit_of": [i // 2 for i in range(SAMPLES)], "examples_per_unit": 2}
    swapped = [(i // 2, i % (SAMPLES // 2))[rank] for i in range(SAMPLES)]
    kept = users | {"unit_of": [i // (2 + rank) for i in range(SAMPLES)]}
    kept["unit_sampling"] = "example"

    def in_context() -> nn.Module:
        return context_parallel(build(), context)

    attempts = {
        "mesh of one": lambda: new(mesh=DeviceMesh("cpu", [rank])),
        "mesh names": lambda: new(mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))),
        "no mesh": lambda: new(mesh="data"),
        "seed": lambda: new(mesh=data, seed=rank),
        "accountant": lambda: new(mesh=data, accountant="rdp" if rank else "contour"),
        "one rank's accountant": lambda: new(mesh=data, accountant="rdp" if rank else "abacus"),
        "shuffled": lambda: private(engine, build(), sampling="shuffled", shuffle=True),
        "noise": lambda: private(engine, build(), noise_multiplier=1.0 + rank),
        "clipping": lambda: private(new(mesh=data), build(), clipping=("flat", "per_layer")[rank]),
        "model": lambda: private(new(mesh=data), build(norm=("layer_norm", "rms_norm")[rank])),
        "not context parallel": lambda: private(new(mesh=context), build()),
        "engine without context": lambda: private(new(mesh=data), in_context()),
        "no engine mesh": lambda: private(new(), in_context()),
        "users": lambda: private(new(mesh=context), in_context(), **users),
        "book_keeping": lambda: private(
            new(mesh=context), in_context(), grad_sample_mode="book_keeping"
        ),
        "packed exact": lambda: private(
            new(mesh=context), in_context(), documents(), collate=pack, exact=True
        ),
        "ddp without mesh": lambda: private(new(), wrap(build(), "ddp", data)),
        "opacus' wrapper without mesh": lambda: private(
            new(), DifferentiallyPrivateDistributedDataParallel(build())
        ),
        "fsdp without mesh": lambda: private(new(), wrap(build(), "fsdp", data)),
        "units": lambda: private(new(mesh=data), build(), **users | {"unit_of": swapped}),
        "entries of units": lambda: private(new(mesh=data), build(), **kept, dataset_size=SAMPLES),
        "entries": lambda: private(
            new(mesh=data), build(), dataset(SAMPLES + rank), dataset_size=SAMPLES
        ),
        "ledger": lambda: new(mesh=data, ledger=os.environ.get("TMPDIR", "/tmp")),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
            said[name] = "nothing"
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def differing_draws(group: object = None) -> str:
    """A rank that is at another draw than the other one."""
    engine = dpflash.PrivacyEngine(mesh=mesh_of(1))
    model, optimizer, loader = private(engine, build())
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
    samples = TensorDataset(torch.arange(50.0).unsqueeze(1))
    sizes = {"batch_size": batch_size, "physical_batch_size": physical_batch_size}
    model, optimizer, loader = private(engine, nn.Linear(1, 1), samples, **sizes)
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
    model, mesh = parallel(build(), 2)
    engine = dpflash.PrivacyEngine(seed=3, mesh=mesh)
    private(engine, model, noise_multiplier=0.0)
    x, y = sharded(mesh, *(t[:4] for t in dataset().tensors))
    weights = torch.ones(4)
    if dist.get_rank() == 1:
        weights[2] = float("nan")
    engine.backward(model(x, y) * weights)
    are_finite = bool(flat_sums(engine, model).isfinite().all())
    return f"{engine.diagnostics()['nonfinite_samples']} {are_finite}"


def after_detach(group: object = None) -> dict[str, float]:
    """A plain step of a wrapped model that was private before: DDP means its gradients again."""
    model = wrap(build(), "ddp", mesh_of(1))
    engine = dpflash.PrivacyEngine(mesh=mesh_of(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    private(engine, model, optimizer=optimizer)
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
    options = {"noise_multiplier": 0.0, "max_grad_norm": 1e-3}
    _, optimizer, draws = private(second, model, optimizer=optimizer, **options)
    for x, y in draws:
        second.backward(model(x, y))
        optimizer.step()
        optimizer.zero_grad()
        if draws.is_last:
            break
    moved = np.linalg.norm(before - whole(model)) * BATCH
    return {"error": float((got - wanted).abs().max()), "moved": float(moved)}


def detached_by_the_first(group: object = None) -> dict[str, Any]:
    """One rank alone detaches; the next models need the other one too."""
    engine = dpflash.PrivacyEngine(seed=3, mesh=mesh_of(1))
    noise: list[list[float]] = []
    said: list[str] = []

    def release() -> nn.Module:
        model = nn.Linear(2, 3)
        samples = TensorDataset(torch.ones(8, 2))
        _, optimizer, loader = private(engine, model, samples, batch_size=4)
        for (x,) in loader:
            engine.backward(model(x).sum(1) * 0)
            if loader.is_last:
                noise.append(model.weight.grad.flatten().tolist())
            optimizer.step()
            optimizer.zero_grad()
        return model

    def refused() -> None:
        try:
            private(engine, nn.Linear(2, 3), TensorDataset(torch.ones(8, 2)))
            said.append("taken")
        except (ValueError, RuntimeError) as error:
            said.append(str(error))

    model = release()
    if dist.get_rank() == 0:
        engine.detach(model).state_dict()
    refused()
    if dist.get_rank() == 1:
        engine.detach(model)
    engine.detach(release())
    if dist.get_rank() == 0:
        engine._keys.begin_model()
    refused()
    return {"noise": noise, "said": said}


def signalled(group: object = None) -> str:
    """BatchMemoryManager's call beside other ranks."""
    _, optimizer, _ = private(dpflash.PrivacyEngine(mesh=mesh_of(1)), build())
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
        "head": first["head"],
        "again": engine.get_epsilon(1e-5),
        "lines": len(engine._spending.ledger.lines),
    }


def failing_ledger(group: object = None, *, path: str) -> str:
    """A ledger that another process writes to in mid-training: no rank releases."""
    model = build()
    before = whole(model)
    engine = dpflash.PrivacyEngine(mesh=mesh_of(1), ledger=path)
    _, optimizer, loader = private(engine, model)
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


def refused_alone(group: object = None, *, by: int, wrapper: str, path: str) -> tuple[bool, ...]:
    """What the other rank hears of a rank that a private refusal ends; empty for that one."""
    model, mesh = parallel(build(), 1, wrapper)
    engine = dpflash.PrivacyEngine(mesh=mesh, ledger=path)
    model, optimizer, loader = private(engine, model)
    try:
        for x, y in loader:
            losses = model(x, y)
            if optimizer.releases == 1 and dist.get_rank() == by:
                losses = losses[1:]
            engine.backward(losses)
            optimizer.step()
            optimizer.zero_grad()
    except dpflash.PrivateRefusal as error:
        if dist.get_rank() == by:
            os._exit(1)
        return isinstance(error, RankError), "lost the others" in str(error)
    return ()


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
    data = TensorDataset(torch.zeros(8, 4))
    private(dpflash.PrivacyEngine(mesh=mesh_of(1)), model, data, batch_size=2)
    assert model[0].weight.stride() == strides
    return {name: value.float().numpy() for name, value in model.state_dict().items()}


def unequal_start(group: object = None) -> np.ndarray:
    """Ranks that built different models have the first one's after make_private."""
    torch.manual_seed(100 + dist.get_rank())
    model = LongContextLM(VOCAB, 32, 1, 2, max_seq_len=TOKENS)
    private(dpflash.PrivacyEngine(mesh=mesh_of(1)), model)
    return whole(model)


def backward_by(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The identity, whose backward changes the gradient."""

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return change(grad)

    return Identity.apply


OWN = torch.Generator().manual_seed(0)
coupled = backward_by(lambda grad: grad - grad.mean(0))
restless = backward_by(lambda grad: grad * torch.rand(grad.shape, generator=OWN))
BREAKS = {
    "forward": lambda module, inputs, output: output - output.detach().mean(0),
    "order": lambda module, inputs, output: output.flip(0),
    "backward": lambda module, inputs, output: coupled(output),
    "ghost": lambda module, inputs, output: restless(output),
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
    plain = build()
    plain.blocks[0].register_buffer("kept", torch.ones(1))
    made, mesh = parallel(plain, context, wrapper)
    engine = dpflash.PrivacyEngine(seed=3, mesh=mesh)
    options |= {"noise_multiplier": 0.5, "max_grad_norm": 0.5, "verify_first_batch": verify}
    options["optimizer"] = torch.optim.SGD(made.parameters(), lr=0.1)
    made, optimizer, loader = private(engine, made, batch_size=24, **options)
    if breaks and dist.get_rank() == 1:
        plain.blocks[0].register_forward_hook(BREAKS[breaks])
    refused = None
    for x, y in loader:
        try:
            engine.backward(made(*sharded(mesh, x, y)))
        except RuntimeError as error:
            refused = f"{type(error).__name__}: {error}"
            assert engine._step.sums == {}
            break
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.releases == steps:
            break
    return {"refused": refused, "verified": engine.verified, "parameters": whole(plain)}
