"""Packed gradients are those of a loop over the documents, each by itself and not packed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpflash
from dpflash.packing import pack
from dpflash.patterns import Adaptive, BlockSparse, Dilated, Hierarchical, SlidingWindow

# Of 1 token to 3 rows of 32; the overflow makes several microbatches.
LENGTHS = [5, 1, 32, 17, 0, 90, 2, 40, 9, 96, 31, 3]
MODELS = {
    "layer-norm": {},
    "rms-untied-learned": {
        "norm": "rms_norm",
        "bias": False,
        "positions": "learned",
        "tie_embeddings": False,
    },
    "checkpointed": {"activation_checkpointing": True},
    "chunked": {"chunked_loss": True},
    "chunked-untied": {"chunked_loss": True, "tie_embeddings": False},
}
MODES = ("instantiate", "book_keeping", "ghost", "auto")
CLIPPINGS = (
    *({"grad_sample_mode": mode} for mode in MODES),
    {"clipping": "per_layer"},
    {"clip_function": "automatic"},
)
PATTERNS = {
    "window": SlidingWindow(window=6, global_tokens=1, causal=True),
    "dilated": Dilated(segment_lengths=(8, 16), dilation_rates=(1, 2), causal=True),
    "blocks": BlockSparse(block_size=4, random_blocks=1, causal=True),
    "hierarchical": Hierarchical(levels=((1, 8), (8, 16)), block_size=4, causal=True),
    "adaptive": Adaptive(block_size=16, keep=1, causal=True),
}


class Layers(nn.Module):
    """Token by token: padded embedding, Conv1D, a layer that runs twice, frozen and tied parts."""

    def __init__(self):
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        torch.manual_seed(2)
        self.embedding = nn.Embedding(23, 12, padding_idx=3)
        self.conv = Conv1D(12, 12)
        self.twice = nn.Linear(12, 12)
        self.norm = nn.LayerNorm(12)
        self.frozen = nn.Linear(12, 12)
        self.frozen.requires_grad_(False)
        self.frozen_norm = nn.RMSNorm(12)
        self.frozen_norm.weight.requires_grad_(False)
        self.head = nn.Linear(12, 23, bias=True)
        self.head.weight = self.embedding.weight

    def alone(self, tokens):
        x = self.embedding(tokens)
        x = x + torch.tanh(self.twice(self.conv(x)))
        x = x + torch.tanh(self.twice(self.frozen(self.norm(x))))
        return self.head(self.frozen_norm(x))

    def forward(self, batch):
        return dpflash.losses.causal_lm(
            self.alone(batch.input_ids),
            batch.labels,
            sample_index=batch.sample_index,
            num_samples=batch.max_documents,
        )


class Attention(nn.Module):
    """`MultiheadAttention` in one node, or as separate nodes where a hook watches a projection."""

    def __init__(self, hooked):
        super().__init__()
        torch.manual_seed(2)
        self.embedding = nn.Embedding(23, 16)
        self.attention = dpflash.nn.MultiheadAttention(16, 4, num_kv_heads=2, rotary=True)
        self.head = dpflash.nn.LinearCrossEntropy(16, 23, bias=True, reduction="sum")
        if hooked:
            self.attention.qkv_proj.register_forward_hook(lambda *_: None)

    def alone(self, tokens):
        x = self.embedding(tokens)
        return F.linear(x + self.attention(x, is_causal=True)[0], self.head.weight, self.head.bias)

    def forward(self, batch):
        x = self.embedding(batch.input_ids)
        x = x + self.attention(x, is_causal=True, cu_seqlens=batch.cu_seqlens)[0]
        return self.head(x, batch.targets, batch.units)


def packing(rows):
    return {"tokens": 96, "rows": rows, "max_documents": 5, "verify_first_batch": False}


def compared(run, gradients, clipped, error, model, plain, docs, *, reduction="mean", **options):
    """(the error of the sums, the run), with every document's factor 1 unless a bound is given."""
    own = run(model, docs, **options)
    found = own.sums()
    grads = gradients(plain, docs, 96 // options["rows"], reduction)
    bound = options.get("max_grad_norm", 1e6)
    function = options.get("clip_function", "hard")
    return error(found, clipped(own.engine, grads, bound, function)), own


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("align", [1, 8])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", MODELS)
def test_sums_are_those_of_a_loop_over_documents(
    model, mode, align, rows, run, gradients, clipped, error, documents, language_model
):
    options = {**packing(rows), "align": align, "grad_sample_mode": mode}
    models = (language_model(**MODELS[model]).double() for _ in range(2))
    found, own = compared(run, gradients, clipped, error, *models, documents(LENGTHS), **options)
    assert own.microbatches > 3
    assert found < 1e-10


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("bound", [0.05, 0.4])
@pytest.mark.parametrize("options", CLIPPINGS, ids=lambda o: next(iter(o.values())))
def test_clipped_sums_are_those_of_a_loop_over_documents(
    options, bound, rows, run, gradients, clipped, error, documents, language_model
):
    """Factors are fp32, rounded down; some norms are upper bounds, a little above the norm."""
    docs, options = documents(LENGTHS), {**packing(rows), **options, "max_grad_norm": bound}
    models = (language_model().double() for _ in range(2))
    found, _ = compared(run, gradients, clipped, error, *models, docs, **options)
    assert found < 1e-6


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", ["layers", "attention", "hooked"])
def test_each_rule_has_the_gradients_of_a_loop_over_documents(
    kind, rows, mode, run, gradients, clipped, error, documents
):
    make = {
        "layers": Layers,
        "attention": lambda: Attention(hooked=False),
        "hooked": lambda: Attention(hooked=True),
    }[kind]
    options = {**packing(rows), "grad_sample_mode": mode}
    options["reduction"] = "mean" if kind == "layers" else "sum"
    models = (make().double() for _ in range(2))
    found, _ = compared(run, gradients, clipped, error, *models, documents(LENGTHS), **options)
    assert found < 1e-10


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("align", [1, 8])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_starts_anew_in_each_document(
    pattern, align, rows, run, gradients, clipped, error, documents, language_model
):
    options = {**packing(rows), "align": align}
    models = (language_model(pattern=PATTERNS[pattern]).double() for _ in range(2))
    found, _ = compared(run, gradients, clipped, error, *models, documents(LENGTHS), **options)
    assert found < 1e-10


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "bound", "tolerance"),
    [(torch.float64, 1e6, 1e-10), (torch.float32, 1e6, 1e-6), (torch.float64, 0.05, 1e-6)],
    ids=["fp64", "fp32", "clipped"],
)
@pytest.mark.parametrize("way", ["one-node", "hooked", "frozen"])
@pytest.mark.parametrize("pattern", ["causal", "window", "dilated", "adaptive"])
def test_sinks_and_slopes_have_a_gradient_of_each_document(
    pattern, way, dtype, bound, tolerance, rows, run, gradients, clipped, error, documents,
    language_model,
):  # fmt: skip
    def model():
        options = {"positions": "alibi", "attention_sinks": True}
        made = language_model(pattern=PATTERNS.get(pattern), **options)
        for number, block in enumerate(made.blocks):
            nn.init.normal_(block.attention.sinks.weight)
            if way == "hooked":
                block.attention.qkv_proj.register_forward_hook(lambda *_: None)
            elif way == "frozen":
                block.attention.alibi_slopes.requires_grad_(number == 0)
        return made

    docs, options = documents(LENGTHS), {**packing(rows), "max_grad_norm": bound}
    models = model().to(dtype), model().double()
    found, _ = compared(run, gradients, clipped, error, *models, docs, **options)
    assert found < tolerance


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
def test_narrower_models_keep_their_digits(
    precision, mode, run, gradients, clipped, error, documents, language_model
):
    model, plain = language_model(), language_model().double()
    options = {**packing(1), "grad_sample_mode": mode}
    if precision == "bf16":
        model, plain = model.bfloat16(), language_model().bfloat16().double()
    elif precision == "autocast":
        options["autocast"] = lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    found, _ = compared(
        run, gradients, clipped, error, model, plain, documents(LENGTHS), **options
    )
    assert found < {"fp32": 1e-6, "bf16": 0.02, "autocast": 0.02}[precision]


def test_a_checkpointed_part_of_a_model_gets_the_units_in_its_second_forward(
    run, gradients, clipped, error, documents
):
    class Checkpointed(Layers):
        def forward(self, batch):
            logits = checkpoint(self.alone, batch.input_ids, use_reentrant=False)
            return dpflash.losses.cross_entropy(
                logits,
                batch.targets,
                sample_index=batch.sample_index,
                num_samples=batch.max_documents,
            )

    found, _ = compared(
        run,
        gradients,
        clipped,
        error,
        Checkpointed().double(),
        Layers().double(),
        documents(LENGTHS),
        **packing(3),
    )
    assert found < 1e-10


@pytest.mark.parametrize("mode", MODES)
def test_nan_in_padding_reaches_no_document(mode, run, error, documents):
    """Padding has no loss; what the model computes there may be anything."""

    class Padded(Layers):
        blows_up = False

        def forward(self, batch):
            x = self.embedding(batch.input_ids)
            if self.blows_up:
                x = torch.where(batch.sample_index.unsqueeze(-1) < 0, torch.nan, x)
            x = self.head(self.norm(self.twice(self.conv(x))))
            return dpflash.losses.cross_entropy(
                x,
                batch.targets,
                sample_index=batch.sample_index,
                num_samples=batch.max_documents,
            )

    sums = []
    for Padded.blows_up in (False, True):
        own = run(Padded(), documents(LENGTHS), grad_sample_mode=mode, **packing(3))
        sums.append(own.sums())
    assert all(torch.equal(a, b) for a, b in zip(*sums, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_a_document_without_a_finite_gradient_is_removed_alone(
    mode, run, gradients, clipped, error, documents
):
    docs = documents(LENGTHS)
    bad = int(docs[3][0])

    class Blown(Layers):
        def forward(self, batch):
            losses = super().forward(batch)
            firsts = [
                int(batch.input_ids.flatten()[a]) == bad and b - a == len(docs[3])
                for a, b in batch.units.spans
            ]
            return losses * torch.where(torch.tensor(firsts), torch.inf, 1.0)

    own = run(Blown(), docs, grad_sample_mode=mode, **packing(3))
    found = own.sums()
    assert own.engine.diagnostics()["nonfinite_samples"] == 1
    others = [d for i, d in enumerate(docs) if i != 3]
    grads = gradients(Layers(), others, 32)
    assert error(found, clipped(own.engine, grads, 1e6)) < 1e-6


class Scaled(nn.Embedding):
    """With a forward of its own, as that of Gemma."""

    def forward(self, input):
        return super().forward(input) * 2


@pytest.mark.parametrize("kind", [Scaled, nn.Embedding])
def test_a_document_with_an_unknown_token_is_removed_alone(
    kind, run, gradients, clipped, error, documents
):
    def build():
        model = Layers()
        table = kind(23, 12, padding_idx=3)
        table.weight, model.embedding = model.embedding.weight, table
        return model

    docs = documents(LENGTHS)
    docs[3][4] = 23
    own = run(build(), docs, **packing(3))
    found = own.sums()
    assert own.engine.diagnostics()["nonfinite_samples"] == 1
    grads = gradients(build(), [d for i, d in enumerate(docs) if i != 3], 32)
    assert error(found, clipped(own.engine, grads, 1e6)) < 1e-6


def test_a_batch_of_ones_own_has_the_losses_of_each_document(language_model, documents):
    """Without an engine: packed losses are those of single documents."""
    docs = documents([5, 1, 20, 0])
    for chunked in (False, True):
        model = language_model(chunked_loss=chunked).double()
        batch = pack(docs, tokens=32, max_documents=6, align=4)
        losses = model(batch.input_ids, batch.targets, batch)
        expected = [
            F.cross_entropy(model(d[None])[0, :-1], d[1:]) if len(d) > 1 else torch.zeros(())
            for d in docs
        ]
        expected += [torch.zeros(())] * 2
        torch.testing.assert_close(losses, torch.stack([e.double() for e in expected]))
