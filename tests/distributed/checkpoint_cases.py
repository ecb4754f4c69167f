"""What each rank runs for test_checkpoints.py, and what one process runs to compare."""

from __future__ import annotations

import os
import pickle
import stat
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from meshes import hybrid_mesh_of, mesh_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash.checkpoint import sharded as sharded_checkpoint
from dpflash.checkpoint import state as checkpoint
from dpflash.distributed import context_parallel, shard_sequence
from dpflash.nn import LongContextLM
from dpflash.privacy import keys as streams

SAMPLES, BATCH, TOKENS, VOCAB = 24, 6, 8, 11


class Net(nn.Module):
    """Has parameters with fewer rows than there are ranks, a frozen one and a buffer."""

    def __init__(self, hidden: int = 7) -> None:
        super().__init__()
        self.first = nn.Linear(5, hidden)
        self.frozen = nn.Linear(hidden, hidden)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(hidden, 3)
        self.register_buffer("scale", torch.tensor([2.0, 1.0, 0.5]))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.frozen(self.first(x).tanh()).tanh()) * self.scale


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    if x.dtype == torch.int64:
        return model(x, y)
    return (model(x) - y).square().mean(1)


class Run:
    """An engine and what it made private.

    Args:
        wrapper: "alone" for a process without a mesh, "plain", "ddp", "fsdp", "hsdp".
        kind: of the model, "net" or "lm".
        context: how many ranks share a sample.
    """

    def __init__(
        self,
        wrapper: str,
        *,
        kind: str = "net",
        optimizer: str = "adamw",
        context: int = 1,
        seed: int | None = 3,
        ledger: str | None = None,
        sigma: float = 1.0,
        samples: int = SAMPLES,
        hidden: int = 7,
    ) -> None:
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(1)
        if kind == "lm":
            text = torch.randint(0, VOCAB, (samples, TOKENS + 1), generator=generator)
            data = TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())
            self.plain: nn.Module = LongContextLM(VOCAB, 16, 1, 2, max_seq_len=TOKENS)
        else:
            x = torch.randn(samples, 5, generator=generator)
            data = TensorDataset(x, torch.randn(samples, 3, generator=generator))
            self.plain = Net(hidden)
        self.mesh = None
        if wrapper != "alone":
            self.mesh = (hybrid_mesh_of if wrapper == "hsdp" else mesh_of)(context)
        self.context = context
        model = self.plain
        if context > 1:
            context_parallel(model, self.mesh)
        if wrapper == "ddp":
            model = DistributedDataParallel(model, process_group=self.mesh.get_group("data"))
        if wrapper in ("fsdp", "hsdp"):
            over = self.mesh[("dp_replicate", "dp_shard") if wrapper == "hsdp" else "data"]
            for child in list(model.children())[:-1] if kind == "net" else model.blocks:
                fully_shard(child, mesh=over)
            fully_shard(model, mesh=over)
        parameters = list(model.parameters())
        groups = [{"params": parameters[:2], "lr": 0.02}, {"params": parameters[2:]}]
        inner = (
            torch.optim.AdamW(groups, lr=0.01)
            if optimizer == "adamw"
            else torch.optim.SGD(groups, lr=0.01, momentum=0.9 if "momentum" in optimizer else 0)
        )
        self.engine = dpflash.PrivacyEngine(seed=seed, mesh=self.mesh, ledger=ledger)
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=model,
            optimizer=inner,
            data_loader=DataLoader(data, batch_size=BATCH),
            noise_multiplier=sigma,
            max_grad_norm=0.5,
        )
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.8)
        self.grads: list[Tensor] = []

    def train(self, steps: int) -> Run:
        """Up to so many releases."""
        while self.optimizer.releases < steps:
            for x, y in self.loader:
                if self.context > 1:
                    group = self.mesh.get_group("context")
                    x, y = (shard_sequence(t, 1, group) for t in (x, y))
                self.optimizer.zero_grad()
                self.engine.backward(loss_of(self.model, x, y))
                self.optimizer.step()
                if self.loader.is_last:
                    self.grads.append(flat(p.grad for p in self.trained()))
                    self.scheduler.step()
                if self.optimizer.releases == steps:
                    break
        return self

    def trained(self) -> list[Tensor]:
        return [p for p in self.plain.parameters() if p.requires_grad]

    def save(self, path: Path) -> Run:
        extra = {"scheduler": self.scheduler.state_dict(), "step": self.optimizer.releases}
        self.engine.save_checkpoint(path, extra=extra)
        return self

    def load(self, path: Path) -> Run:
        # Ranks live on for many cases, and each is to be as one that was just started.
        streams._claims.clear()
        extra = self.engine.load_checkpoint(path)
        assert extra["step"] == self.optimizer.releases
        self.scheduler.load_state_dict(extra["scheduler"])
        return self

    def outcome(self) -> dict[str, Any]:
        return {
            "parameters": flat(self.plain.parameters()).numpy(),
            "epsilon": self.engine.get_epsilon(1e-5),
            "lrs": [group["lr"] for group in self.optimizer.param_groups],
            "grads": [grad.numpy() for grad in self.grads],
            "branch": self.engine._keys.branch,
        }


def flat(tensors: Any) -> Tensor:
    """Whole tensors, one after another."""
    parts = [t.detach() for t in tensors]
    return torch.cat([getattr(t, "full_tensor", lambda t=t: t)().flatten() for t in parts])


def write(group: object, *, folder: str, names: list[str], after: int, **options: Any) -> list:
    """One checkpoint for each "wrapper-optimizer"."""
    found = []
    for name in names:
        wrapper, optimizer = name.split("-")
        run = Run(wrapper, optimizer=optimizer, **options).train(after)
        # An evaluation, which leaves the parameters of FSDP2's root whole.
        if isinstance(run.plain, Net):
            with torch.no_grad():
                run.model(torch.zeros(2, 5))
        found.append(run.save(Path(folder) / name).outcome())
    return found


def resume(
    group: object,
    *,
    folder: str,
    names: list[str],
    wrappers: list[str],
    steps: int,
    **options: Any,
) -> dict[str, dict[str, Any]]:
    """Each checkpoint under each wrapper."""
    return {
        f"{name} on {wrapper}": Run(wrapper, optimizer=name.split("-")[1], **options)
        .load(Path(folder) / name)
        .train(steps)
        .outcome()
        for name in names
        for wrapper in wrappers
    }


def lose_steps(group: object, *, folder: str, wrapper: str) -> dict[str, Any]:
    """Saved at 3, gone on to 5, and resumed from 3 with the ledger of both."""
    ledger = str(Path(folder) / "ledger")
    path = Path(folder) / "lost"
    options = {"sigma": 100.0, "seed": None}
    first = Run(wrapper, ledger=ledger, **options).train(3).save(path).train(5)
    dist.barrier()
    second = Run(wrapper, ledger=ledger, **options).load(path).train(6)
    dist.barrier()
    lines = len(Path(ledger).read_text().splitlines())
    return {"lost": first.outcome(), "resumed": second.outcome(), "lines": lines}


def leave_noise(group: object, *, folder: str, wrapper: str) -> dict[str, Any]:
    """Neither seed nor ledger."""
    path = Path(folder) / f"left-{wrapper}"
    options = {"sigma": 100.0, "seed": None}
    first = Run(wrapper, **options).train(3).save(path).train(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the writer and the reader live in one process here
        second = Run(wrapper, **options).load(path).train(5)
    return {"lost": first.outcome(), "resumed": second.outcome()}


def seen(path: Path) -> dict[str, Any]:
    """What lies in a checkpoint's folder."""
    (state,) = path.glob("state-*")
    return {
        "names": sorted(child.name for child in path.iterdir()),
        "pointer": (path / "current").read_text().strip(),
        "modes": [stat.S_IMODE(p.stat().st_mode) for p in (path, state, state / "engine.pt")],
    }


def survive_failures(group: object, *, folder: str) -> dict[str, Any]:
    """A save that fails on one rank leaves the older checkpoint, and the next one succeeds."""
    path = Path(folder) / "failing"
    run = Run("fsdp").train(2).save(path)
    before = seen(path)
    run.train(3)
    messages = []

    def attempt(victim: int, target: Any, name: str, error: Exception) -> None:
        fail = mock.patch.object(target, name, side_effect=error)
        with fail if dist.get_rank() == victim else mock.MagicMock():
            try:
                run.save(path)
            except (RuntimeError, OSError, ValueError) as caught:
                messages.append(f"{type(caught).__name__}: {caught}")
        dist.barrier()

    full = OSError(28, "No space left on device")
    attempt(1, dcp.FileSystemWriter, "write_data", full)
    attempt(0, dcp.FileSystemWriter, "finish", full)
    attempt(1, sharded_checkpoint, "_split", ValueError("cannot be split"))
    attempt(0, checkpoint, "write", full)
    attempt(0, sharded_checkpoint.os, "replace", full)
    attempt(1, checkpoint, "check_extra", ValueError("extra is odd"))
    unchanged = seen(path) == before
    dist.barrier()
    if dist.get_rank() == 0:
        (path / "state-9-0123456789abcdef").mkdir()
    run.save(path)
    dist.barrier()
    return {"messages": messages, "unchanged": unchanged, "before": before, "after": seen(path)}


def refusals(group: object, *, folder: str) -> dict[str, str]:
    """The message of each checkpoint that is refused, or "accepted"."""
    base = Path(folder) / "refused"
    first = dist.get_rank() == 0
    if first:
        base.mkdir()
        Run("alone").train(1).save(base / "file")
    dist.barrier()
    Run("fsdp").train(2).save(base / "good")
    dist.barrier()

    def copy(name: str, damage: Any) -> Path:
        if first:
            import shutil

            shutil.copytree(base / "good", base / name)
            damage(base / name, next((base / name).glob("state-*")))
        dist.barrier()
        return base / name

    def flip(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 255
        file.write_bytes(content)

    def poison(path: Path, state: Path) -> None:
        """Metadata that run code when they are read as pickle, with the digest that fits."""
        (state / ".metadata").write_bytes(pickle.dumps(os.getcwd))
        engine = checkpoint.read(state / "engine.pt", format=sharded_checkpoint.FORMAT)
        engine["files"].update(
            sharded_checkpoint._digests(state, [".metadata"], sharded_checkpoint.Ranks())
        )
        checkpoint.write(state / "engine.pt", engine, format=sharded_checkpoint.FORMAT)

    damaged = {
        "no pointer": lambda path, state: (path / "current").unlink(),
        "odd pointer": lambda path, state: (path / "current").write_text("../elsewhere\n"),
        "pointer to nothing": lambda path, state: (path / "current").write_text(
            "state-7-0123456789abcdef\n"
        ),
        "part missing": lambda path, state: (state / "__1_0.distcp").unlink(),
        "part damaged": lambda path, state: flip(state / "__1_0.distcp"),
        "engine damaged": lambda path, state: flip(state / "engine.pt"),
        "poisoned": poison,
    }
    said = {}

    def attempt(name: str, action: Any, run: Run) -> None:
        before = run.outcome()
        try:
            action()
            said[name] = "accepted"
        except (ValueError, RuntimeError, FileNotFoundError, OSError) as error:
            said[name] = f"{type(error).__name__}: {error}"
        after = run.outcome()
        changed = [k for k in before if repr(before[k]) != repr(after[k])]
        said[name] += f" (changed {changed})" if changed else ""
        dist.barrier()

    run = Run("fsdp")
    for name, damage in damaged.items():
        path = copy(name, damage)
        attempt(name, lambda path=path: run.engine.load_checkpoint(path), run)
    good = base / "good"
    attempt("nothing", lambda: run.engine.load_checkpoint(base / "nothing"), run)
    attempt("save over a file", lambda: run.engine.save_checkpoint(base / "file"), run)
    for name, options in {
        "other model": {"hidden": 6},
        "other data": {"samples": SAMPLES + 1},
        "with ledger": {"ledger": str(base / "ledger")},
    }.items():
        other = Run("plain", **options)
        attempt(name, lambda other=other: other.engine.load_checkpoint(good), other)
        attempt(f"file, {name}", lambda o=other: o.engine.load_checkpoint(base / "file"), other)
    spent = Run("ddp").train(1)
    attempt("spent", lambda: spent.engine.load_checkpoint(good), spent)
    broken = OSError(5, "Input/output error")
    with (
        mock.patch.object(checkpoint, "read", side_effect=broken)
        if not first
        else mock.MagicMock()
    ):
        attempt("unreadable on one", lambda: run.engine.load_checkpoint(good), run)
    paths = run.engine.save_checkpoint, base / f"of-{dist.get_rank()}"
    attempt("paths differ", lambda: paths[0](paths[1]), run)
    attempt("good", lambda: run.engine.load_checkpoint(good), run)
    return said


def die_saving(group: object, *, folder: str, wrapper: str, at: str, victim: int) -> str:
    """One rank ends without a word while a second checkpoint is written; the others' error."""
    path = Path(folder)
    run = Run(wrapper).train(3).save(path).train(5)
    target, name = {
        "data": (dcp.FileSystemWriter, "write_data"),
        "engine": (checkpoint, "write"),
        "pointer": (sharded_checkpoint.os, "replace"),
    }[at]
    if dist.get_rank() == victim:
        setattr(target, name, lambda *args, **kwargs: os._exit(1))
    if at == "pointer":
        # checkpoint.write replaces too; only the pointer's replacement ends it.
        own = sharded_checkpoint._point_to
        replace = os.replace
        setattr(target, name, replace)

        def last(path: Path, name: str) -> bytes:
            os.replace = lambda *args: os._exit(1)
            return own(path, name)

        sharded_checkpoint._point_to = last
    try:
        run.save(path)
    except RuntimeError as error:
        return type(error).__name__
    return "saved"
