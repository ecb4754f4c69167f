"""What ranks do wrong, or differently, in test_hostile_ranks.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from meshes import hybrid_mesh_of, mesh_of
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DeviceMesh as TensorMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash.distributed import context_parallel, shard_sequence
from dpflash.nn import LongContextLM, MultiheadAttention
from dpflash.step.gradients import Gradients

# A draw is one microbatch, without a trial.
ONE_MICROBATCH: dict[str, Any] = {"sampling": "fixed_size", "verify_first_batch": False}


def rank() -> int:
    return dist.get_rank()


def make(
    model: nn.Module,
    context: int = 1,
    data: Tensor | TensorDataset | None = None,
    *,
    mesh: TensorMesh | None = None,
    optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer] | None = None,
    batch_size: int = 6,
    **options: Any,
) -> tuple[dpflash.PrivacyEngine, Any, Any]:
    """An engine over all ranks, and what make_private returned besides the model."""
    if data is None:
        data = torch.arange(240.0).view(30, 8) / 240
    data = TensorDataset(data) if isinstance(data, Tensor) else data
    arguments = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "clipping": "flat", **options}
    engine = dpflash.PrivacyEngine(seed=3, mesh=mesh or mesh_of(context))
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer
        or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0),
        data_loader=DataLoader(data, batch_size=batch_size),
        **arguments,
    )
    return engine, optimizer, loader


def said_by(action: Callable[[], Any]) -> str:
    try:
        return f"did it: {action()}"
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def mlp(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 4), *layers, nn.Linear(4, 1))


class TwoHeads(nn.Module):
    """Attention with two layers behind it; each call names the one to run, and which counts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = MultiheadAttention(8, 2)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor, run: str, count: str) -> Tensor:
        x = self.attention(x)[0]
        outputs = {name: getattr(self, name)(x) for name in run.split("+")}
        return sum(outputs[name] for name in count.split("+")).square().mean((1, 2))


def a_batch_of_its_own(group: object, context: int) -> str:
    """A step on a batch that did not come from the private loader."""
    engine, optimizer, _ = make(
        context_parallel(TwoHeads(), mesh_of(2)) if context == 2 else mlp(), context
    )
    x = torch.randn(3, 4, 8) if context == 2 else torch.randn(3, 8)
    before = [p.detach().clone() for p in optimizer.params]

    def step() -> str:
        if context == 2:
            engine.backward(engine._run.model(x, "first", "first"))
        else:
            engine.backward(engine._run.model(x).flatten())
        optimizer.step()
        return ""

    said = said_by(step)
    same = all(torch.equal(a, b) for a, b in zip(before, optimizer.params, strict=True))
    return f"{same} {said}"


def data_of_its_own(group: object, context: int) -> str:
    """Ranks with data sets of one length and other contents."""
    model = context_parallel(TwoHeads(), mesh_of(2)) if context == 2 else mlp()
    return said_by(lambda: make(model, context, data=torch.full((30, 8), float(rank()))))


def data_that_varies(group: object) -> str:
    """Entries drawn anew at each call cannot be compared, and are taken."""

    class Varying(TensorDataset):
        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            return (torch.randn(8),)

    data = Varying(torch.zeros(9, 1))
    return said_by(lambda: make(mlp(), data=data, batch_size=3) and "taken")


def layers_of_its_own(group: object, run: list[str], count: list[str], clipping: str) -> str:
    """Ranks of one context that run, or count, other layers."""
    model = context_parallel(TwoHeads(), mesh_of(2))
    engine, optimizer, loader = make(
        model, 2, data=torch.arange(960.0).view(30, 4, 8) / 960, clipping=clipping
    )
    before = [p.detach().clone() for p in optimizer.params]

    def steps() -> str:
        for (x,) in loader:
            x = shard_sequence(x, 1, mesh_of(2).get_group("context"))
            engine.backward(model(x, run[rank()], count[rank()]))
            optimizer.step()
            optimizer.zero_grad()
        return "a pass"

    said = said_by(steps)
    same = all(torch.equal(a, b) for a, b in zip(before, optimizer.params, strict=True))
    return f"{same} {said}"


def a_bound_of_its_own(group: object) -> dict[str, Any]:
    """One rank changes max_grad_norm before its backward."""
    model = mlp()
    engine, optimizer, loader = make(model, **ONE_MICROBATCH)
    said = []
    for (x,) in loader:
        if rank() == 1:
            optimizer.max_grad_norm = 100.0
        said.append(said_by(lambda x=x: engine.backward(model(x).flatten())))
        # Again, after what the message asked for.
        optimizer.max_grad_norm = 1.0
        said.append(said_by(optimizer.step))
        break
    whole = torch.cat([p.detach().flatten() for p in optimizer.params])
    return {"said": said, "sum": float(whole.double().sum()), "norm": float(whole.norm())}


class Scale(nn.Module):
    """A layer without a rule of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def empty_shares(group: object, kind: str) -> dict[str, Any]:
    """Draws of about one sample through layers of the generic rule, sharded or not."""
    model = mlp(Scale())
    if kind == "fsdp":
        fully_shard(model, mesh=mesh_of(1)["data"])
    options = {"data": torch.ones(10, 8), "batch_size": 1, "noise_multiplier": 0.0}
    engine, optimizer, loader = make(model, **options)
    sizes = []
    for (x,) in loader:
        sizes.append(int(loader.is_real.sum()))
        engine.backward(model(x).flatten())
        optimizer.step()
        optimizer.zero_grad()
    return {"sizes": sizes}


def sinks_of_an_empty_share(group: object) -> dict[str, Any]:
    """A sharded model with sinks over data and context; most draws give one pair nothing."""
    torch.manual_seed(0)
    model = LongContextLM(10, 16, 1, 2, max_seq_len=8, attention_sinks=True, positions="alibi")
    context_parallel(model, mesh_of(2))
    for block in model.blocks:
        fully_shard(block, mesh=mesh_of(2)["data"])
    fully_shard(model, mesh=mesh_of(2)["data"])
    tokens = torch.randint(0, 10, (20, 9), generator=torch.Generator().manual_seed(0))
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    slow = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, optimizer, loader = make(model, 2, data, optimizer=slow, batch_size=1)
    sizes = []
    for x, y in loader:
        sizes.append(int(loader.is_real.sum()))
        x, y = (shard_sequence(t, 1, mesh_of(2).get_group("context")) for t in (x, y))
        engine.backward(model(x, y))
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.releases == 4:
            break
    return {"sizes": sizes, "steps": optimizer.releases}


def heads_of_its_own(group: object, kind: str, clipping: str) -> tuple[str, Any]:
    """Ranks with other samples, whose losses count other layers of those that ran."""
    model = TwoHeads()
    if kind == "fsdp":
        fully_shard(model, mesh=mesh_of(1)["data"])
    engine, optimizer, loader = make(
        model,
        data=torch.arange(960.0).view(30, 4, 8) / 960,
        noise_multiplier=0.0,
        clipping=clipping,
        **ONE_MICROBATCH,
    )
    for (x,) in loader:
        losses = model(x, "first+second", ("first", "second")[rank()])
        said = said_by(lambda losses=losses: engine.backward(losses) or optimizer.step())
        break
    whole = [p.full_tensor() if kind == "fsdp" else p for p in model.parameters()]
    return said, torch.cat([p.detach().flatten() for p in whole]).numpy()


def samples_of_its_own(group: object, kind: str) -> str:
    """Ranks of a context with other numbers of samples, in a layer that exchanges nothing."""
    model = context_parallel(TwoHeads(), mesh_of(2))
    if kind == "fsdp":
        fully_shard(model.first, mesh=mesh_of(2)["data", "context"]._flatten("all"))
    engine, _, _ = make(model, 2)
    x = torch.randn(3 + rank() % 2, 4, 8)
    return said_by(lambda: engine.backward(model.first(x).square().mean((1, 2))))


class Tempered(nn.Module):
    """Attention, and a parameter without dimensions."""

    class Temperature(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = MultiheadAttention(8, 2)
        self.temperature = self.Temperature()

    def forward(self, x: Tensor) -> Tensor:
        return self.temperature(self.attention(x)[0]).square().sum((1, 2))


def scalar_parameter(group: object, context: int) -> Tensor:
    """A pass without noise over a model with a parameter of one number."""
    model = Tempered()
    if context > 1:
        context_parallel(model, mesh_of(context))
    data = torch.arange(960.0).view(30, 4, 8) / 960
    engine, optimizer, loader = make(model, context, data=data, noise_multiplier=0.0)
    for (x,) in loader:
        if context > 1:
            x = shard_sequence(x, 1, mesh_of(context).get_group("context"))
        engine.backward(model(x))
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.releases == 2:
            break
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()


def unequal_lengths(group: object) -> tuple[int, bool]:
    """Sharded parameters, and other T on other ranks, of which one would go in two passes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 1024), nn.Linear(1024, 512))
    for part in (*model, model):
        fully_shard(part, mesh=mesh_of(1)["data"])
    engine, optimizer, loader = make(model, memory_budget=500_000, sampling="fixed_size")
    for (x,) in loader:
        x = x.unsqueeze(1).expand(-1, (64, 2)[rank()], -1)
        engine.backward(model(x).mean((1, 2)))
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.releases, all(use.grad_sample_mode == "ghost" for use in engine.plan())


def one_sided(group: object) -> str:
    """What one rank alone gets wrong."""
    return said_by(lambda: make(mlp(nn.BatchNorm1d(4)) if rank() else mlp()))


def saved_on_one(group: object, path: str) -> tuple[str, str]:
    """What rank 0 alone does behind the first release, and then both."""
    model = mlp()
    engine, optimizer, loader = make(model, **ONE_MICROBATCH)

    def train() -> None:
        for number, (x,) in enumerate(loader):
            engine.backward(model(x).flatten())
            optimizer.step()
            if not number and not rank():
                engine.save_checkpoint(path)

    return said_by(train), said_by(lambda: engine.save_checkpoint(path))


def frozen_on_one(group: object) -> str:
    model = mlp()
    engine, optimizer, loader = make(model, **ONE_MICROBATCH)
    for (x,) in loader:
        engine.backward(model(x).flatten())
        model[rank()].weight.requires_grad_(False)
        model[rank()].weight.grad = None
        return said_by(optimizer.step)
    return "no draw"


def interrupted_in_a_release(group: object, ranks: int) -> dict[str, Any]:
    """So many ranks are interrupted behind the first of two bundles, and release again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    engine, optimizer, loader = make(model, **ONE_MICROBATCH)
    held, released = Gradients.set, list[list[Tensor]]()

    def set_and_stop(self: Gradients, parameters: Any, means: Any) -> None:
        held(self, parameters, means)
        released.append([mean.clone() for mean in means])
        if len(released) == 1 and rank() < ranks:
            raise KeyboardInterrupt

    with (
        patch("dpflash.distributed.collectives.BUNDLE_BYTES", 16),
        patch.object(Gradients, "set", set_and_stop),
    ):
        for (x,) in loader:
            try:
                engine.backward(model(x).square().sum(1))
            except KeyboardInterrupt:
                pass
            except ValueError as error:
                return {"said": str(error), "grad": model[0].weight.grad, "times": len(released)}
            said = said_by(optimizer.step)
            break
    return {"said": said, "grad": model[0].weight.grad, "times": len(released)}


def optimizer_of_its_own(group: object, differs: str) -> str:
    """Four steps, where Adam has other betas on rank 1, or dpflash other code; nothing for ""."""
    model, differing = mlp(), differs if rank() == 1 else ""
    betas = (0.9, 0.99 if differing == "betas" else 0.999)
    adam = torch.optim.AdamW(model.parameters(), betas=betas)

    def train() -> int:
        with patch("dpflash.build.source_digest", lambda: f"dpflash {differing == 'code'}"):
            engine, optimizer, loader = make(model, optimizer=adam, **ONE_MICROBATCH)
        while optimizer.releases < 4:
            for (x,) in loader:
                engine.backward(model(x).flatten())
                optimizer.step()
                optimizer.zero_grad()
        return 4

    return said_by(train)


def cleared_on_one(group: object, turn: int) -> dict[str, Any]:
    """One rank loses the gradients of one of two optimizers behind the last backward."""
    model = mlp()
    kept = [list(layer.parameters()) for layer in model]
    both = [torch.optim.SGD(parameters, lr=1.0) for parameters in kept]
    engine, optimizers, loader = make(model, optimizer=both, **ONE_MICROBATCH)
    for (x,) in loader:
        engine.backward(model(x).flatten())
        for p in kept[turn] if rank() else ():
            p.grad = None
        said = [said_by(optimizer.step) for optimizer in optimizers[: turn + 1]]
        break
    return {
        "said": said,
        "parameters": torch.cat([p.flatten() for p in model.parameters()]).tolist(),
    }


def wrappers(group: object) -> dict[str, str]:
    """Wrappers that bring something of their own, or shards of another kind."""
    said = {}
    hooked = DistributedDataParallel(mlp(), process_group=mesh_of(1).get_group("data"))
    hooked.register_comm_hook(None, allreduce_hook)
    optimizer = torch.optim.SGD(hooked.parameters(), lr=1.0)
    said["hook"] = said_by(lambda: make(hooked, optimizer=optimizer))
    fixed = DistributedDataParallel(
        mlp(), process_group=mesh_of(1).get_group("data"), static_graph=True
    )
    said["static graph"] = said_by(lambda: make(fixed))
    said["plain step"] = said_by(optimizer.step)
    cut = mlp()
    over = TensorMesh("cpu", [0, 1])
    cut[0].weight = nn.Parameter(distribute_tensor(cut[0].weight.detach(), over, [Shard(0)]))
    said["tensor parallel"] = said_by(lambda: make(cut))
    by_itself = DistributedDataParallel(
        context_parallel(TwoHeads(), mesh_of(2)), process_group=mesh_of(2).get_group("data")
    )
    said["one data rank"] = said_by(
        lambda: make(by_itself, 2, data=torch.zeros(30, 4, 8)) and "made"
    )
    return said


def rows_of_a_context(group: object, over: str) -> float:
    """Sharded parameters that ranks with the same rows drew each by itself are made equal."""
    torch.manual_seed(rank())
    model = LongContextLM(10, 16, 1, 2, max_seq_len=8)
    context_parallel(model, mesh_of(2))
    fully_shard(model, mesh=mesh_of(2)[over])
    make(model, 2, data=torch.zeros(30, 8))
    return float(sum(p.full_tensor().double().abs().sum() for p in model.parameters()))


def copies_of_rows(group: object) -> list[float]:
    """This rank's part of a sharded layer that the ranks drew each by itself."""
    torch.manual_seed(rank())
    model, mesh = nn.Linear(8, 4), hybrid_mesh_of(1)
    fully_shard(model, mesh=mesh["dp_replicate", "dp_shard"])
    make(model, mesh=mesh)
    return model.weight.to_local().flatten().tolist()


def sharded_over_some(group: object) -> str:
    """Sharded over half of the ranks with other samples, whose copies nothing would make equal."""
    model, mesh = mlp(), hybrid_mesh_of(1)
    fully_shard(model, mesh=mesh["dp_shard"])
    return said_by(lambda: make(model, mesh=mesh))


def trials_of_each_release(group: object) -> list[int]:
    """How many trials each draw has: labels are rare, and rank 0 does something new in draw 10."""
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(60, 8, generator=generator), torch.arange(60).clamp(max=8))
    model = mlp()
    engine, optimizer, loader = make(model, data=data, batch_size=12, physical_batch_size=4)
    trials = [0]
    while loader.releases < 12:
        for x, y in loader:
            losses = model(x).flatten() * (1 + y)
            if rank() == 0 and loader.releases == 9:
                losses = losses.sin()
            trials[-1] += loader.tracker.current.is_trial
            engine.backward(losses)
            optimizer.step()
            if loader.is_last:
                trials.append(0)
    return trials[:12]


def noised_rows(group: object) -> list[bool]:
    """Which rows of a sharded table with padding_idx=4 have noise in a release."""
    table = nn.Embedding(6, 4, padding_idx=4)
    fully_shard(table, mesh=mesh_of(1)["data"])
    engine, optimizer, loader = make(table, data=torch.zeros(30, 3).long(), **ONE_MICROBATCH)
    (ids,) = next(iter(loader))
    engine.backward(table(ids).square().mean((1, 2)))
    return table.weight.grad.full_tensor().ne(0).all(1).tolist()


class Mean(nn.Module):
    """Means of embeddings, over all positions or those that are not padding."""

    def __init__(self, masks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.masks = nn.Embedding(9, 4), nn.Linear(4, 2), masks

    def forward(self, ids: Tensor) -> Tensor:
        kept = (ids > 0) if self.masks else torch.ones_like(ids)
        x = self.embedding(ids) * kept[..., None]
        return self.head(x.sum(1) / kept.sum(1, keepdim=True).clamp(min=1))


def declared_mean_of_padding(group: object, masks: bool, shards: bool, by_engine: bool) -> str:
    model = Mean(masks)
    if shards:
        fully_shard(model, mesh=mesh_of(1)["data"])
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 12, (48,), generator=draw).tolist()
    data = [(torch.randint(1, 9, (n,), generator=draw), torch.tensor(n % 2)) for n in lengths]

    def collate(entries: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        ids, labels = zip(*entries, strict=True)
        return nn.utils.rnn.pad_sequence(list(ids), batch_first=True), torch.stack(labels)

    engine = dpflash.PrivacyEngine(seed=3, mesh=mesh_of(1))
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=16, collate_fn=collate),  # type: ignore[arg-type]
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        loss_reduction="mean",
    )

    def train() -> str:
        for ids, labels in loader:
            loss = nn.functional.cross_entropy(model(ids), labels)
            engine.backward(loss) if by_engine else loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return f"{loader.releases} {'less padding were compared' in str(engine.trials)}"

    return said_by(train)


def chosen_bands(group: object) -> tuple[int, float, list[float]]:
    model = mlp()
    engine = dpflash.PrivacyEngine(seed=3, mesh=mesh_of(1))
    _, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(
            TensorDataset(torch.arange(960.0).view(120, 8) / 960), batch_size=6
        ),
        target_epsilon=8.0,
        target_delta=1e-5,
        epochs=1,
        max_grad_norm=1.0,
        noise_mechanism="auto",
    )
    for (x,) in loader:
        engine.backward(model(x).square().mean(1))
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.releases == 4:
            break
    bands = engine._run.settings.privacy.noise_mechanism.bands
    return bands, optimizer.noise_multiplier, model[0].weight.flatten().tolist()
