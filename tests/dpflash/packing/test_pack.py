"""Where documents are placed, and what a packed batch says of its tokens."""

import copy
import pickle

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch.utils.data import DataLoader

import dpflash
from dpflash import PrivateRefusal
from dpflash.packing import PackedBatch, PackTo, Units, pack

IGNORED = -100


@st.composite
def packings(draw):
    """Arguments of PackTo, and the lengths of documents of 0 to 3 rows."""
    align = draw(st.sampled_from([1, 1, 2, 4]))
    width, rows = align * draw(st.integers(1, 8)), draw(st.integers(1, 4))
    documents = draw(st.integers(1, 7))
    longest = width * min(rows, 3)
    lengths = draw(st.lists(st.integers(0, longest), max_size=12))
    options = {"tokens": width * rows, "max_documents": documents, "rows": rows, "align": align}
    return options, lengths


def filled(options, lengths):
    """(the documents that fit in their order, their batch)."""
    places = PackTo(**options).places()
    taken = [torch.arange(100, 100 + n) + 1000 * i for i, n in enumerate(lengths) if places.add(n)]
    return taken, pack(taken, **options)


@hypothesis.settings(max_examples=60, derandomize=True)
@hypothesis.given(packings())
def test_each_document_lies_whole_in_its_own_tokens(packing):
    options, lengths = packing
    documents, batch = filled(options, lengths)
    width = options["tokens"] // options["rows"]
    assert batch.max_documents == options["max_documents"]
    assert batch.input_ids.shape == (options["rows"], width)
    tokens, index = batch.input_ids.flatten(), batch.sample_index.flatten()
    for number, document in enumerate(documents):
        start, end = batch.units.spans[number]
        torch.testing.assert_close(tokens[start:end], document, rtol=0, atol=0)
        assert index[start:end].eq(number).all()
        assert int((index == number).sum()) == len(document)
        if len(document):
            assert start % width % options["align"] == 0
            # A row, or the first of rows that it has alone.
            assert start // width == (end - 1) // width or start % width == 0
    assert int((index >= 0).sum()) == sum(map(len, documents))
    assert tokens[index < 0].eq(0).all()
    assert all(span == (0, 0) for span in batch.units.spans[len(documents) :])


@hypothesis.settings(max_examples=60, derandomize=True)
@hypothesis.given(packings())
def test_a_label_is_the_next_token_of_the_same_window(packing):
    options, lengths = packing
    documents, batch = filled(options, lengths)
    width = options["tokens"] // options["rows"]
    targets, positions = batch.targets.flatten(), batch.position_ids.flatten()
    found = []
    for start, end in batch.units.spans:
        for t in range(start, end):
            begin = max(start, t // width * width)
            assert positions[t] == t - begin
            is_last = t + 1 == end or (t + 1) % width == 0
            expected = IGNORED if is_last else int(batch.input_ids.flatten()[t + 1])
            assert targets[t] == expected
            found.append(t)
    # Not shifted, so that a shift by one within a row gives the targets.
    firsts = [*range(0, options["tokens"], width), *(a for a, b in batch.units.spans if a < b)]
    assert batch.labels.flatten()[firsts].eq(IGNORED).all()
    others = torch.ones(options["tokens"], dtype=torch.bool)
    others[found] = False
    assert targets[others].eq(IGNORED).all() and batch.labels.flatten()[others].eq(IGNORED).all()
    # The borders: public in number, and no window or padding reaches over one.
    borders = batch.cu_seqlens.tolist()
    public = 2 * (options["max_documents"] + options["rows"]) + options["tokens"] // 64 + 1
    assert len(borders) == public
    assert borders == sorted(borders) and borders[0] == 0 and borders[-1] == options["tokens"]
    inner = {end for span in batch.units.spans for end in span if span[0] != span[1]}
    assert {*range(0, options["tokens"], width), options["tokens"]} | inner <= set(borders)
    index = batch.sample_index.flatten().tolist()
    for a, b in zip(borders, borders[1:], strict=False):
        assert len(set(index[a:b])) <= 1


def test_labels_of_a_document_are_kept_where_they_can_be_predicted():
    document = {"input_ids": [5, 6, 7, 8, 9], "labels": [5, IGNORED, 7, 3, 9]}
    batch = pack([[1, 2], document], tokens=12, max_documents=2, align=4)
    assert batch.labels.tolist() == [
        [IGNORED, 2, IGNORED, IGNORED, IGNORED, IGNORED, 7, 3, 9, IGNORED, IGNORED, IGNORED]
    ]
    assert batch.targets.tolist()[0][4:9] == [IGNORED, 7, 3, 9, IGNORED]


def test_padding_is_cut_into_pieces_that_attention_is_cheap_for():
    batch = pack([[1] * 70, [2] * 300], tokens=1024, max_documents=4)
    lengths = batch.cu_seqlens.diff().tolist()
    assert lengths[:2] == [70, 300] and max(lengths[2:]) <= 64


def test_a_batch_without_documents_has_the_public_shapes():
    full, empty = (pack(d, tokens=8, max_documents=3) for d in ([[1, 2]], []))
    assert {k: t.shape for k, t in full.items()} == {k: t.shape for k, t in empty.items()}
    assert {k: t.dtype for k, t in full.items()} == {k: t.dtype for k, t in empty.items()}


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b)), lambda b: b.to("cpu")],
)
def test_copies_of_a_batch_keep_its_units(copied):
    batch = pack([[1, 2, 3], [4]], tokens=8, max_documents=3)
    other = copied(batch)
    assert type(other) is PackedBatch and other.units == batch.units
    assert all(torch.equal(other[k], batch[k]) for k in batch)
    assert torch.equal(other.input_ids, batch["input_ids"])
    with pytest.raises(AttributeError, match="tokens"):
        _ = other.tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": 10, "rows": 4}, "tokens=10 in rows=4: expected a multiple.*tokens=8"),
        ({"tokens": 8, "rows": 2, "align": 3}, "align=3 in rows of 4 tokens"),
        ({"tokens": 0}, "tokens=0"),
        ({"tokens": 8, "max_documents": 0}, "max_documents=0"),
        ({"tokens": 8, "rows": 0}, "rows=0"),
        ({"tokens": 8, "align": 0}, "align=0"),
    ],
)
def test_what_does_not_divide_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        PackTo(**{"max_documents": 2, **arguments})


@pytest.mark.parametrize("documents", [[[1] * 5, [1] * 5], [[1], [1], [1]]], ids=len)
def test_documents_that_do_not_fit_together_are_refused_without_their_lengths(documents):
    message = r"max_documents=2 and tokens=8 in rows=1\. Pass"
    with pytest.raises(PrivateRefusal, match=message) as refusal:
        pack(documents, tokens=8, max_documents=2)
    assert refusal.value.details == {"number": len(documents) - 1}


@pytest.mark.parametrize(
    "bad",
    [
        *(torch.ones(2, 2, dtype=torch.int64), torch.ones(2), torch.ones(2, dtype=torch.bool)),
        *("text", b"text", None, 7, ["a", "b"], [1, "b"], [None], {"text": "no tokens"}),
        *({"input_ids": [1, 2], "labels": [1]}, {"input_ids": [1, 2], "labels": "ab"}, object()),
    ],
    ids=lambda bad: type(bad).__name__,
)
def test_what_is_no_document_has_no_tokens(bad):
    found = pack([[1, 2, 3], bad, [4]], tokens=8, max_documents=3)
    expected = pack([[1, 2, 3], [], [4]], tokens=8, max_documents=3)
    assert found.units == expected.units
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_long_document_is_cut_to_its_first_tokens():
    labels = [-100, *range(12)]
    found = pack([{"input_ids": [*range(13)], "labels": labels}], tokens=8, max_documents=1)
    assert found.input_ids.tolist() == [[*range(8)]] and found.labels.tolist() == [labels[:8]]
    several = pack([[[1] * 5, [2] * 5]], tokens=8, max_documents=1)
    assert several.input_ids.tolist() == [[1] * 5 + [2] * 3]


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        (((0, 3), (2, 4)), "overlap"),
        (((0, 9),), "leave"),
        (((3, 2),), "overlap|ends before"),
        (((-1, 2),), "overlap|leave"),
    ],
)
def test_units_that_overlap_are_refused(spans, message):
    with pytest.raises(PrivateRefusal, match=message):
        Units((2, 4), spans)


@hypothesis.settings(max_examples=40, derandomize=True)
@hypothesis.given(packings(), st.integers(1, 3))
def test_units_sum_and_spread_over_their_own_entries(packing, each):
    options, lengths = packing
    _, batch = filled(options, lengths)
    units, size = batch.units, options["max_documents"]
    index = batch.sample_index.flatten().repeat_interleave(each)
    x = torch.randn(len(index), 2, generator=torch.Generator().manual_seed(0)).double()
    x[index < 0] = torch.nan
    expected = torch.stack([x[index == u].sum(0) for u in range(size)])
    torch.testing.assert_close(units.summed(x), expected)
    values = torch.arange(1.0, size + 1)
    spread = units.of_entries(values, len(index))
    assert torch.equal(spread, torch.cat([values, torch.zeros(1)])[index])
    padded = units.padded(x)
    assert all(
        torch.equal(padded[u, : int((index == u).sum())], x[index == u]) for u in range(size)
    )
    assert not padded.isnan().any()


@torch.no_grad()
def drawn(documents, batch_size, draws, **options):
    """The tokens of each draw, as lists, and the number of its microbatches."""
    model = torch.nn.Embedding(10_000, 1)
    engine = dpflash.PrivacyEngine(seed=0)
    _, _, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(documents, batch_size=batch_size, collate_fn=PackTo(**options)),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        verify_first_batch=False,
    )
    found, microbatches = [[]], [0]
    while True:
        for batch in loader:
            real = loader.is_real
            microbatches[-1] += 1
            for (a, b), is_real in zip(batch.units.spans, real.tolist(), strict=True):
                assert is_real or a == b
                if is_real:
                    found[-1].append(batch.input_ids.flatten()[a:b].tolist())
            loader.tracker.dropped()
            if loader.is_last:
                if len(found) == draws:
                    return found, microbatches
                found.append([])
                microbatches.append(0)


def test_a_draw_that_overflows_loses_and_repeats_no_document():
    lengths = [1, 30, 7, 64, 2, 2, 40, 9, 33, 0, 5, 17, 64, 1]
    documents = [[100 * i + t for t in range(n)] for i, n in enumerate(lengths)]
    ((found,), (microbatches,)) = drawn(documents, len(documents), 1, tokens=64, max_documents=4)
    assert sorted(found) == sorted(documents)
    assert microbatches > 3


class Cropped(list):
    """Documents of another length at each read."""

    def __getitem__(self, index):
        tokens = super().__getitem__(index)
        return tokens[: int(torch.randint(1, len(tokens) + 1, ()))]


def test_documents_of_random_lengths_keep_the_room_of_their_first_read():
    documents, runs = [[i] * (3 * i + 1) for i in range(20)], []
    for seed in range(2):  # Ranks may have other random states.
        torch.manual_seed(seed)
        packing = {"tokens": 64, "max_documents": 4, "rows": 2}
        runs.append(drawn(Cropped(documents), len(documents), 30, **packing))
    assert runs[0] == runs[1]
    found, microbatches = runs[0]
    assert all(sorted(d[0] for d in draw) == list(range(20)) for draw in found)
    assert len({len(d) for draw in found for d in draw if d[0] == 19}) > 2
    assert len(set(microbatches)) == 1


def test_documents_are_drawn_independently_whatever_their_length():
    documents = [[i] * (1 + i) for i in range(40)]
    found, _ = drawn(documents, 10, 200, tokens=64, max_documents=4)
    counts = torch.zeros(40)
    for draw in found:
        assert all(document in documents for document in draw)
        assert len({document[0] for document in draw}) == len(draw)
        for document in draw:
            counts[document[0]] += 1
    # Binomial(200, 1/4), five standard deviations: one of 40 is off in 1 of 40,000 runs.
    assert (counts - 50).abs().max() < 5 * (200 * 3 / 16) ** 0.5
