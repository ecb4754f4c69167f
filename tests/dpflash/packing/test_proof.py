"""What mixes the documents of a packed batch is refused, by the proof or where it is called."""

import pytest
import torch
from torch import nn

import dpflash
from dpflash.distributed import ContextParallel
from dpflash.nn import MultiheadAttention
from dpflash.packing import pack
from dpflash.patterns import Adaptive

LENGTHS = [5, 3, 12, 17, 9, 20, 4, 6, 11, 7, 2, 8]


class Model(nn.Module):
    """Attention within documents and a head; `change` is what a test does wrong."""

    def __init__(self, change=None, **options):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(23, 16)
        self.norm = nn.LayerNorm(16)
        self.attention = MultiheadAttention(16, 2, **options)
        self.middle = nn.Linear(16, 16)
        self.head = nn.Linear(16, 23)
        self.change = change or (lambda x, batch: x)

    def attended(self, x, batch):
        return self.attention(x, is_causal=True, cu_seqlens=batch.cu_seqlens)[0]

    def forward(self, batch):
        x = self.embedding(batch.input_ids)
        x = x + self.attended(self.norm(x), batch)
        x = self.middle(self.change(x, batch))
        return self.losses(self.head(x), batch)

    def losses(self, logits, batch):
        return dpflash.losses.cross_entropy(
            logits,
            batch.targets,
            sample_index=batch.sample_index,
            num_samples=batch.max_documents,
        )


class Unmasked(Model):
    """Its attention is not the library's and sees the whole row."""

    def attended(self, x, batch):
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


class NoBorders(Model):
    """Calls the library's attention without the batch's borders."""

    def attended(self, x, batch):
        return self.attention(x, is_causal=True)[0]


class Swapped(Model):
    """The losses are in another order than the documents."""

    def losses(self, logits, batch):
        return super().losses(logits, batch).flip(0)


class TokenMean(Model):
    """Losses that are divided by the tokens of the whole batch."""

    def losses(self, logits, batch):
        tokens = nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.targets.flatten(), reduction="none"
        )
        index = batch.sample_index.flatten()
        sums = tokens.new_zeros(batch.max_documents + 1)
        sums = sums.index_add(0, index % len(sums), tokens)
        return sums[:-1] / sums.detach().sum()


class RowPositions(Model):
    """Its positions are those of the row, which depend on the documents before."""

    def attended(self, x, batch):
        at = torch.arange(x.shape[1])[:, None] * torch.arange(1, 17) / 16
        return super().attended(x + at.sin(), batch)


def row_mean(x, batch):
    return x - x.mean(1, keepdim=True)


def detached_scale(x, batch):
    return x / x.detach().abs().amax()


def neighbor(x, batch):
    return x + x.roll(1, 1)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("mode", ["auto", "instantiate", "book_keeping", "ghost"])
@pytest.mark.parametrize("kind", ["own", "lm", "chunked", "checkpointed"])
def test_a_model_that_keeps_documents_apart_is_proven(
    kind, mode, rows, run, documents, language_model
):
    options = {
        "chunked": {"chunked_loss": True},
        "checkpointed": {"activation_checkpointing": True},
    }
    model = Model() if kind == "own" else language_model(**options.get(kind, {}))
    own = run(model, documents(LENGTHS), max_documents=8, rows=rows, grad_sample_mode=mode)
    # A microbatch in which no document happens to be replaced proves nothing.
    for _ in range(8):
        if own.engine.verified is not True:
            own.sums()
    assert own.engine.verified is True


@pytest.mark.parametrize(
    ("make", "layer"),
    [
        (lambda: Model(row_mean), "middle"),
        (lambda: Model(detached_scale), "middle"),
    ],
    ids=["row-mean", "detached-scale"],
)
def test_a_layer_that_mixes_documents_is_named(make, layer, run, documents):
    own = run(make(), documents(LENGTHS), max_documents=8)
    with pytest.raises(RuntimeError, match=f"'({layer})'.*nothing was released"):
        own.sums()


@pytest.mark.parametrize("make", [Swapped, TokenMean])
def test_losses_of_other_documents_are_refused(make, run, documents):
    own = run(make(), documents(LENGTHS), max_documents=8)
    with pytest.raises(RuntimeError, match="nothing was released"):
        own.sums()


MIXED, MOVED = "mixes documents", "documents stood elsewhere in their row"


@pytest.mark.parametrize(
    "make, found",
    [(Unmasked, MIXED), (lambda: Model(neighbor), MIXED), (RowPositions, MOVED)],
    ids=["Unmasked", "neighbor", "RowPositions"],
)
def test_losses_that_depend_on_the_place_in_the_row_are_refused(make, found, run, documents):
    own = run(make(), documents(LENGTHS), max_documents=8)
    with pytest.raises(dpflash.PrivateRefusal, match=found):
        own.sums()


@pytest.mark.parametrize("verifies", [True, False])
def test_attention_without_the_borders_is_refused_where_it_is_called(verifies, run, documents):
    own = run(NoBorders(), documents(LENGTHS), max_documents=8, verify_first_batch=verifies)
    with pytest.raises(ValueError, match="without cu_seqlens"):
        own.sums()


class Recurrent(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.steps = nn.GRU(width, width, batch_first=True)

    def forward(self, x):
        return self.steps(x)[0]


def test_a_recurrent_layer_is_refused(run, documents):
    model = Model()
    model.middle = Recurrent(model.middle.in_features)
    own = run(model, documents(LENGTHS), max_documents=8, verify_first_batch=False)
    with pytest.raises(ValueError, match=r"'middle.steps' \(GRU\) in a batch of packed documents"):
        own.sums()


def test_a_convolution_is_refused(run, documents):
    model = Model()
    model.middle = nn.Sequential(nn.Conv1d(1, 1, 3, padding=1))
    model.change = lambda x, batch: x.flatten(0, 1).unsqueeze(1)
    own = run(model, documents(LENGTHS), max_documents=8, verify_first_batch=False)
    with pytest.raises(ValueError, match=r"'middle.0' \(Conv1d\) in a batch of packed documents"):
        own.sums()


def test_a_layer_that_gets_a_part_of_the_tokens_is_refused(run, documents):
    model = Model(lambda x, batch: x[:, ::2])
    own = run(model, documents(LENGTHS), max_documents=8, verify_first_batch=False)
    with pytest.raises(dpflash.PrivateRefusal, match="input of layer 'middle'.*packed documents"):
        own.sums()


def test_losses_of_rows_are_refused(run, documents):
    class OfRows(Model):
        def losses(self, logits, batch):
            return dpflash.losses.cross_entropy(logits, batch.targets)

    own = run(OfRows(), documents(LENGTHS), max_documents=8, verify_first_batch=False)
    with pytest.raises(
        dpflash.PrivateRefusal,
        match="losses has another number of entries.*each document of the batch",
    ):
        own.sums()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"poisson_sampling": False}, "sampling='shuffled'.*PackTo"),
        ({"loss_reduction": "mean"}, "loss_reduction='mean' with collate_fn=PackTo"),
        ({"physical_batch_size": 2}, "physical_batch_size=2 with collate_fn=PackTo"),
    ],
)
def test_options_that_do_not_go_with_packing_are_refused(options, message, run, documents):
    with pytest.raises(ValueError, match=message):
        run(Model(), documents(LENGTHS), **options)


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({"context_parallel": ContextParallel(None), "alibi": True}, {}, "attention_sinks or"),
        ({"context_parallel": ContextParallel(None), "pattern": Adaptive()}, {}, "Adaptive"),
        ({"self_attention": False}, {}, "self_attention=True"),
        ({"dropout": 0.5}, {}, "dropout=0.5"),
        ({}, {"attn_mask": torch.zeros(8, 8)}, "a mask beside it"),
        ({}, {"key_padding_mask": torch.zeros(1, 8)}, "a mask beside it"),
    ],
)
def test_attention_refuses_what_does_not_go_with_borders(options, arguments, message):
    attention = MultiheadAttention(16, 2, **options)
    batch = pack([[1, 2, 3]], tokens=8, max_documents=2)
    with pytest.raises(ValueError, match=f"cu_seqlens with .*{message}"):
        attention(torch.zeros(1, 8, 16), cu_seqlens=batch.cu_seqlens, **arguments)


def test_a_sharding_that_tears_documents_apart_is_refused():
    """The units of a rank's tokens would be other documents'."""
    zigzag = ContextParallel(None, sharding="zigzag")
    batch = pack([[1, 2, 3]], tokens=8, max_documents=2)
    with pytest.raises(ValueError, match="sharding='zigzag' with packed documents"):
        zigzag.shard(batch)
    attention = MultiheadAttention(16, 2, context_parallel=zigzag)
    with pytest.raises(ValueError, match="sharding='zigzag' with packed documents"):
        attention(torch.zeros(1, 8, 16), cu_seqlens=batch.cu_seqlens)
