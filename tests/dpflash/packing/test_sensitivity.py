"""One document in or out moves the clipped sums by at most max_grad_norm, and moves nothing else.

With `exact=True` sums are multiples of a grid, and the difference is the document's own clipped
gradient as it is in another packing, bit for bit. The document that is left out is one that
changes where the others are packed.
"""

import math

import pytest
import torch
from torch.utils.data import DataLoader

import dpflash
from dpflash.packing import PackTo, pack
from dpflash.patterns import Dilated, SlidingWindow

BOUND = 0.3
# Of 1 token to 2 rows. The sums of 2,100 and 2,050 tokens are made in parts.
LENGTHS = [64, 70, 1, 130, 17, 200, 33]
LONG = [64, 2100, 5, 2049, 90]
KINDS = (
    {"clipping": "flat"},
    {"clipping": "per_layer"},
    {"clip_function": "automatic"},
)
MODELS = {
    "layer-norm": {},
    "rms-learned": {"norm": "rms_norm", "positions": "learned"},
    "chunked-untied": {"chunked_loss": True, "tie_embeddings": False},
    "checkpointed": {"activation_checkpointing": True},
    "window": {"pattern": SlidingWindow(window=20, causal=True)},
    "dilated": {"pattern": Dilated(segment_lengths=(16, 64), dilation_rates=(1, 2), causal=True)},
}


class Packings:
    """An exact private model, and the sums of its documents in any order and packing."""

    def __init__(self, model, docs, *, rows, tokens, align=64, exact=True, dtype="fp32", **kind):
        if dtype == "bf16":
            model = model.bfloat16()
        self.docs, self.autocast = docs, dtype == "autocast"
        self.packing = PackTo(tokens=tokens, rows=rows, max_documents=len(docs) + 1, align=align)
        self.engine = dpflash.PrivacyEngine(seed=0)
        self.model, *_ = self.engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            data_loader=DataLoader(docs, batch_size=4, collate_fn=self.packing),
            noise_multiplier=0.0,
            max_grad_norm=BOUND,
            foreign_batches=True,
            exact=exact,
            verify_first_batch=False,
            **kind,
        )

    def sums(self, order):
        """Sums before noise; -1 stands for a document without tokens."""
        batch = self.packing([self.docs[i] if i >= 0 else [] for i in order])
        self.engine.prepare(batch)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            losses = self.model(batch.input_ids, batch.targets, batch)
        self.engine.backward(losses)
        step = self.engine._step
        step.tracker.dropped()  # the next batch is no second backward
        sums = [step.sums[p].double() for p in step.sums.trained]
        step.discard()
        return sums

    def differences(self, absent, *, seed=0):
        """(what a document changes in a batch that is packed anew, its sums elsewhere)."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self.docs), generator=generator).tolist()
        others = [i for i in order[::-1] if i != absent]
        with_it, without, alone = map(self.sums, (order, others, [others[0], absent]))
        other = self.sums([others[0]])
        moved = [a - b for a, b in zip(with_it, without, strict=True)]
        return moved, [a - b for a, b in zip(alone, other, strict=True)]


def norm(tensors):
    return math.sqrt(sum(float(t.square().sum()) for t in tensors))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: next(iter(k.values())))
@pytest.mark.parametrize("model", MODELS)
def test_a_document_adds_its_own_bits_whatever_the_packing(
    model, kind, dtype, rows, language_model, documents
):
    given = language_model(max_seq_len=1024, **MODELS[model])
    packings = Packings(given, documents(LENGTHS), rows=rows, tokens=1024, dtype=dtype, **kind)
    for absent in (1, 5):
        moved, own = packings.differences(absent, seed=absent)
        assert all(torch.equal(a, b) for a, b in zip(moved, own, strict=True))
        assert 0 < norm(moved) <= BOUND


@pytest.mark.parametrize("absent", [1, 0, 3])
@pytest.mark.parametrize("heads", [2, 1])
def test_a_long_document_adds_its_own_bits_whatever_the_packing(
    heads, absent, language_model, documents
):
    given = language_model(max_seq_len=4608, num_kv_heads=heads)
    packings = Packings(given, documents(LONG), rows=1, tokens=4608)
    moved, own = packings.differences(absent)
    assert all(torch.equal(a, b) for a, b in zip(moved, own, strict=True))


@pytest.mark.parametrize("align", [1, 8])
@pytest.mark.parametrize("mode", ["book_keeping", "instantiate", "ghost"])
def test_a_document_moves_rounded_sums_by_its_bound_and_their_rounding(
    mode, align, language_model, documents
):
    packings = Packings(
        language_model(max_seq_len=1024),
        documents(LENGTHS),
        rows=2,
        tokens=1024,
        align=align,
        exact="auto",
        grad_sample_mode=mode,
    )
    for absent in (1, 5):
        moved, own = packings.differences(absent)
        assert 0 < norm(moved) <= BOUND * (1 + 2.0**-18)
        assert norm([a - b for a, b in zip(moved, own, strict=True)]) < 2.0**-18 * BOUND


def test_a_document_of_several_rows_is_clipped_as_one(language_model, documents):
    """Its windows' gradients are added before they are clipped, whatever they are alike."""
    docs = documents([1, 3])
    docs.append(docs[1].repeat(64)[:128])  # two windows alike
    packings = Packings(language_model(max_seq_len=1024), docs, rows=4, tokens=256)
    whole, window = packings.sums([2]), None
    assert norm(whole) <= BOUND
    packings.docs = [docs[2][:64]]
    window = packings.sums([0])
    # The mean of two equal windows: clipped as one, not twice the clipped window.
    assert abs(norm(whole) - norm(window)) < 1e-6


@pytest.mark.parametrize(
    ("packing", "threads", "message"),
    [
        ({"tokens": 128, "align": 1}, 2, "align=1.*pass align=64"),
        ({"tokens": 128, "align": 32}, 1, "align=32.*pass align=64"),
        ({"tokens": 256, "align": 64}, 3, "tokens=256.*3 CPU threads.*multiple of 384"),
    ],
)
def test_exact_packing_is_refused_where_bits_depend_on_the_place(
    packing, threads, message, language_model, documents, monkeypatch
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with pytest.raises(ValueError, match=message):
        Packings(language_model(), documents([5]), rows=1, **packing)
    Packings(language_model(), documents([5]), rows=1, exact="auto", **packing)


def test_the_public_facts_say_what_the_bound_of_packed_documents_holds_for(
    language_model, documents
):
    facts = []
    for exact in (True, "auto"):
        packings = Packings(
            language_model(), documents([5]), rows=2, tokens=256, align=64, exact=exact
        )
        facts.append(str(packings.engine.public))
        assert packings.engine.public.as_dict()["slots"] == 2
    assert all("2 documents in each microbatch at most, packed by length" in f for f in facts)
    assert "do not depend on the packing" in facts[0] and "given that" not in facts[0]
    assert "given that a document's gradients do not depend on the packing" in facts[1]


def test_units_of_another_batch_are_refused(language_model, documents):
    docs = documents([5, 9])
    packings = Packings(language_model(chunked_loss=True), docs, rows=1, tokens=128)
    first, second = (pack([docs[i]], tokens=128, max_documents=3, align=64) for i in (0, 1))
    packings.engine.prepare(first)
    with pytest.raises(ValueError, match="units of another batch"):
        packings.model(second.input_ids, second.targets, second)
