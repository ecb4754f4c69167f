"""Packed and padded private steps as the benchmark measures them."""

import pytest

from dpflash.bench import packed
from dpflash.bench.private import NONPRIVATE
from dpflash.bench.suite import Request, Unsupported

TINY = {"documents": 5, "longest": 100, "embed_dim": 32, "layers": 1, "device": "cpu", "seed": 0}


@pytest.mark.parametrize("provider", [packed.PACKED, packed.PADDED, NONPRIVATE])
def test_a_loop_over_documents_confirms_the_gradient_of_a_step(provider, monkeypatch):
    subject = packed.packed_subject(provider=provider, **TINY)
    subject.step()
    assert subject.error() <= subject.tolerance
    documents = packed.corpus(5, 100, 0)
    assert subject.tokens == sum(map(len, documents)) < 500
    whole = packed._sums
    monkeypatch.setattr(packed, "_sums", lambda model, docs, bound: whole(model, docs[1:], bound))
    assert subject.error() > 0.1


def test_documents_are_of_the_lengths_asked_for():
    lengths = [len(document) for document in packed.corpus(20, 2048, 1)]
    assert all(20 <= length <= 2048 for length in lengths) and len(set(lengths)) > 10
    with pytest.raises(Unsupported, match="100000 files"):
        packed.corpus(100_000, 2048, 0)


def test_providers_take_turns_and_packed_is_compared_with_padded():
    (comparison,) = packed.SUITE.plan(Request(quick=True))
    assert [m.config["provider"] for m in comparison.measurements] == [
        NONPRIVATE,
        packed.PACKED,
        packed.PADDED,
    ]
    rows = [
        {"config": {"provider": p}, "speedup": s} for p, s in (("packed", 0.9), ("padded", 0.3))
    ]
    (gain,) = packed.SUITE.derive(rows)
    assert gain["gain"] == pytest.approx(3.0)
    assert not list(packed.SUITE.derive(rows[:1]))
