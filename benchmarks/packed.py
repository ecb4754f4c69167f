"""The suite "packed": private steps over documents of different lengths, packed and padded.

The documents are files of Python's own library, whose lengths vary 100-fold. Each document is a
privacy unit. A step trains on all documents; packed and padded steps add the same noise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dpflash import losses
from dpflash.engine import PrivacyEngine
from dpflash.nn import LongContextLM
from dpflash.packing import PackedBatch, PackTo
from dpflash.sampling import PadTo
from dpflash.train.data import ByteDocuments, default_data_dir

from .document import FIGURES, OVER_NONPRIVATE, Row, columns, page
from .output import row
from .private import MAX_GRAD_NORM, NONPRIVATE, TOLERANCES, GradientKeeper, Optimize, adamw
from .private_tasks import VOCABULARY
from .suite import Comparison, Request, Subject, Suite, Unsupported, compared, worst
from .timing import Step
from .work import count_work

PACKED, PADDED = "packed", "padded"
_IGNORED = -100
_SPREAD = 100  # length of the longest document / length of the shortest document
# Number of documents, tokens of the longest document, model dim and layers.
_SHAPE = ("documents", "longest", "embed_dim", "layers")
_SIZES = {"quick": (12, 128, 64, 1), "cpu": (24, 2048, 128, 2), "cuda": (128, 4096, 1024, 4)}


def corpus(documents: int, longest: int, seed: int) -> list[Tensor]:
    """Return random files of Python's library, of `longest` / 100 to `longest` bytes each."""
    files = ByteDocuments.read(default_data_dir(), suffixes={".py"})
    fitting = [content for content in files if longest // _SPREAD <= len(content) <= longest]
    if len(fitting) < documents:
        raise Unsupported(f"{documents} files of {longest // _SPREAD} to {longest} bytes")
    order = torch.randperm(len(fitting), generator=torch.Generator().manual_seed(seed))
    return [torch.tensor(list(fitting[i])) for i in order[:documents].tolist()]


def packed_subject(
    *,
    provider: str,
    documents: int,
    longest: int,
    embed_dim: int,
    layers: int,
    device: str,
    seed: int,
) -> Subject:
    """Return a training step over all documents; batches of NONPRIVATE and PACKED are packed.

    `Subject.error` checks the sum of gradients without noise; private steps clip the gradients.
    """
    given = corpus(documents, longest, seed)

    def build() -> nn.Module:
        torch.manual_seed(seed)
        model = LongContextLM(
            VOCABULARY, embed_dim, layers, embed_dim // 32, max_seq_len=2 * longest
        )
        return model.to(device)

    make = functools.partial(_step, provider, given, longest, build)
    step = make(noise_multiplier=1.0, optimize=adamw)

    def error() -> float:
        found: list[Tensor] = []
        make(noise_multiplier=0.0, optimize=functools.partial(GradientKeeper, given=found))()
        expected = _sums(build(), given, None if provider == NONPRIVATE else MAX_GRAD_NORM)
        pairs = zip(found, expected, strict=True)
        return worst(float((documents * g - e).norm() / e.norm()) for g, e in pairs)

    tokens = sum(map(len, given))
    figures = {"document_tokens": tokens, "padded_tokens": documents * longest}
    work = functools.partial(count_work, step)
    return Subject(step, error, TOLERANCES["float32"], tokens, work, "float32", figures)


def _step(
    provider: str,
    documents: list[Tensor],
    longest: int,
    build: Callable[[], nn.Module],
    *,
    noise_multiplier: float,
    optimize: Optimize,
) -> Step:
    """Return a step over all documents; a microbatch has twice the longest document's tokens."""
    model = build()
    device = next(model.parameters()).device
    optimizer = optimize(list(model.parameters()))
    packing = PackTo(tokens=2 * longest, max_documents=max(4, len(documents) // 3))

    def nonprivate_step() -> None:
        for own in packing.microbatches([len(d) for d in documents]):
            batch = packing([documents[i] for i in own])
            (_losses(model, batch.to(device)).sum() / len(documents)).backward()
        optimizer.step()
        optimizer.zero_grad()

    if provider == NONPRIVATE:
        return nonprivate_step
    is_packed = provider == PACKED
    dataset = documents if is_packed else [{"x": d, "y": _targets(d)} for d in documents]
    loader: DataLoader[Any] = DataLoader(
        dataset,  # type: ignore[arg-type]
        batch_size=len(documents),
        collate_fn=packing if is_packed else PadTo(longest, {"y": _IGNORED}),
    )
    engine = PrivacyEngine()
    # Steps are timed without the isolation test of the first batches.
    model, private_optimizer, private_loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=noise_multiplier,
        max_grad_norm=MAX_GRAD_NORM,
        physical_batch_size=None if is_packed else 2,
        verify_first_batch=False,
    )

    def step() -> None:
        for batch in private_loader:
            if is_packed:
                engine.backward(_losses(model, batch.to(device)))
            else:
                engine.backward(model(batch["x"].to(device), batch["y"].to(device)))
            if private_loader.is_last:
                private_optimizer.step()
                private_optimizer.zero_grad()

    return step


def _losses(model: nn.Module, batch: PackedBatch) -> Tensor:
    found: Tensor = model(batch.input_ids, batch.targets, batch)
    return found


def _targets(document: Tensor) -> Tensor:
    return F.pad(document[1:], (0, 1), value=_IGNORED)


def _sums(model: nn.Module, documents: Sequence[Tensor], bound: float | None) -> list[Tensor]:
    """Return the sum of the documents' gradients, clipped to `bound` unless it is None."""
    parameters = list(model.parameters())
    sums = [torch.zeros_like(p) for p in parameters]
    for document in documents:
        x = document.unsqueeze(0).to(parameters[0].device)
        y = _targets(document).unsqueeze(0).to(x.device)
        loss = losses.cross_entropy(model(x), y).sum()
        grads = torch.autograd.grad(loss, parameters)
        norm = float(torch.stack([g.double().square().sum() for g in grads]).sum().sqrt())
        factor = 1.0 if bound is None else min(1.0, bound / norm)
        for total, grad in zip(sums, grads, strict=True):
            total.add_(grad, alpha=factor)
    return sums


def _plan(request: Request) -> Iterator[Comparison]:
    sizes = _SIZES["quick" if request.quick else request.where.type]
    shape = dict(zip(_SHAPE, sizes, strict=True))
    providers = (NONPRIVATE, PACKED, PADDED)
    yield compared("packed", packed_subject, "provider", providers, shape, "step", NONPRIVATE)


def _gains(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    speeds = {r["config"].get("provider"): r.get("speedup") for r in rows}
    packed, padded = speeds.get(PACKED), speeds.get(PADDED)
    if packed is not None and padded is not None:
        yield row("packed/gain", {}, section="gain", gain=packed / padded)


_STEP = columns(
    "documents | longest | embed_dim: E | layers | provider | document_tokens: tokens",
    FIGURES,
    [OVER_NONPRIVATE],
    "correct",
)
SUITE = Suite(
    name="packed",
    **page("packed", {"step": _STEP, "gain": columns("gain: packed over padded")}),
    plan=_plan,
    derive=_gains,
)
