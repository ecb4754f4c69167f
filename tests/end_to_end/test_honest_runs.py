"""Random runs that keep samples apart are not refused; `make soak` makes thousands of them."""

import itertools
import os
import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

import dpflash
from dpflash.packing import PackTo, Pairs
from dpflash.sampling import LogicalBatches, PadTo

WIDTH, CLASSES, VOCAB, LONGEST, ENTRIES = 6, 3, 16, 12, 48
TINY = {"vocab_size": VOCAB, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
TINY |= {"intermediate_size": 12, "max_position_embeddings": LONGEST, "pad_token_id": 0}


def _of_rows(c):
    if c["architecture"] == "cnn":
        body = [nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU()]
        body += [nn.AdaptiveAvgPool2d((1, 3)), nn.Flatten()]
    else:
        body = [nn.Linear(WIDTH, 12), nn.LayerNorm(12), nn.GELU()]
    return nn.Sequential(*body, nn.Dropout(c["dropout"]), nn.Linear(12, CLASSES))


class Text(nn.Module):  # means over a sample's own tokens
    def __init__(self, c):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, CLASSES)
        self.dropout, self.is_encoder = nn.Dropout(c["dropout"]), c["architecture"] == "encoder"
        if self.is_encoder:
            layer = nn.TransformerEncoderLayer(8, 2, 12, c["dropout"], batch_first=True)
            self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        else:
            self.body = getattr(nn, c["architecture"].upper())(8, 8, batch_first=True)

    def forward(self, ids, mask):
        h = self.dropout(self.embedding(ids))
        if self.is_encoder:
            h = self.body(h, src_key_padding_mask=mask == 0)
        else:
            packed = pack_padded_sequence(h, mask.sum(1).cpu(), True, enforce_sorted=False)
            h, _ = pad_packed_sequence(self.body(packed)[0], True, total_length=ids.shape[1])
        return self.head((h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def _of_transformers(c):
    import transformers as t

    t.logging.set_verbosity_error()
    name, p = c["architecture"].removesuffix(" packed"), c["dropout"]
    if name == "bert":
        drops = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), p)
        model = t.BertForSequenceClassification(t.BertConfig(**TINY, **drops, num_labels=CLASSES))
    elif name == "gpt2":
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), p)
        model = t.GPT2LMHeadModel(t.GPT2Config(**TINY, **drops))
    else:
        model = t.LlamaForCausalLM(t.LlamaConfig(**TINY, attention_dropout=p))
    if c["checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _long_context(c):
    options = {name: c[name] for name in ("positions", "norm", "dropout")}
    options |= {"activation_checkpointing": c["checkpointing"], "max_seq_len": LONGEST * 4}
    return dpflash.nn.LongContextLM(VOCAB, 8, 1, 2, **options)


ARCHITECTURES = {  # architecture -> (how its entries are, what builds it)
    "mlp": ("rows", _of_rows),
    "mlp of pairs": ("pairs", _of_rows),
    "cnn": ("images", _of_rows),
    **dict.fromkeys(("lstm", "gru", "encoder"), ("text", Text)),
    "bert": ("text", _of_transformers),
    **dict.fromkeys(("gpt2", "llama"), ("tokens", _of_transformers)),
    "long context": ("tokens", _long_context),
    "llama packed": ("packed", _of_transformers),
    "long context packed": ("packed", _long_context),
}
RARE = (True, False, False, False)
OPTIONS = {  # the first six of make_private
    "loss_reduction": (None, None, "mean", "sum"), "clipping": ("flat", "flat", "per_layer"),
    "physical_batch_size": (None, None, None, 1, 3, 5, 8),
    "sampling": ("poisson", "poisson", "shuffled", "fixed_size"),
    "grad_sample_mode": ("auto", "auto", "instantiate", "ghost", "book_keeping"),
    "optimize": ("none", "conservative", "balanced"),
    "dropout": (0.0, 0.2), "checkpointing": RARE, "autocast": RARE, "users": RARE, "noisy": RARE,
    "dtype": ("float32", "float32", "float64", "bfloat16"), "pads": ("longest", "public"),
    "positions": ("rotary", "learned", "alibi"), "norm": ("layer_norm", "rms_norm"),
    "draws": (2, 3, 4), "batch": range(3, 12), "averages": RARE, "evaluates": RARE, "prints": RARE,
    "optimizer": ("SGD", "AdamW", "Adagrad", "RMSprop"),
    "schedule": (None, "StepLR", "CosineAnnealingLR"),
    "loop": (*["batches"] * 4, "logical", "by sample"),
}  # fmt: skip


def choices(seed):  # what make_private refuses by name is left out
    rng = random.Random(seed)
    c = {"architecture": (architecture := rng.choice(list(ARCHITECTURES)))}
    c |= {name: rng.choice(values) for name, values in OPTIONS.items()}
    entries = ARCHITECTURES[architecture][0]
    c["autocast"] &= c["dtype"] == "float32"
    c["users"] &= entries not in ("pairs", "packed")
    has_units = c["users"] or entries in ("pairs", "packed")
    if entries == "packed":
        c |= {"physical_batch_size": None, "dtype": "float32"}
        c["dropout"] *= architecture == "llama packed"
    if has_units and c["loop"] == "by sample":
        c["loop"] = "batches"
    if c["clipping"] == "per_layer" or c["optimize"] == "none":
        c["grad_sample_mode"] = "auto"
    is_16 = c["autocast"] or c["dtype"] == "bfloat16" or c["optimize"] == "balanced"
    if has_units or is_16 or c["loop"] == "by sample" or c["grad_sample_mode"] == "ghost":
        c["loss_reduction"] = None
    if c["sampling"] == "shuffled" and (has_units or c["physical_batch_size"]):
        c["sampling"] = "fixed_size"
    return c


def _entry(kind, dtype, rng):
    y = torch.randint(0, CLASSES, (), generator=rng)
    if kind in ("rows", "pairs", "images"):
        x = torch.randn((1, 6, 6) if kind == "images" else WIDTH, generator=rng)
        return {"x": (x * (1 + 5 * torch.rand((), generator=rng))).to(dtype), "y": y}
    length = int(torch.randint(2, LONGEST + 1, (), generator=rng))
    ids = torch.randint(1, VOCAB, (length,), generator=rng)
    return {"input_ids": ids} if kind == "packed" else {"ids": ids, "mask": ids > 0, "y": y}


def of_pairs(entries):
    x, y = (torch.stack([e[name] for e in entries]) for name in ("x", "y"))
    return {"x": torch.cat([x, -x]), "y": y}


def padded(entries):
    found = {name: pad_sequence([e[name] for e in entries], True) for name in ("ids", "mask")}
    return {**found, "y": torch.stack([e["y"] for e in entries])}


def _losses(model, batch, c):
    kind, build = ARCHITECTURES[c["architecture"]]
    hugging = build is _of_transformers
    if kind == "packed":
        if not hugging:
            return model(batch.input_ids, batch.targets, packed=batch)
        logits = model(batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        own = {"sample_index": batch.sample_index, "num_samples": batch.max_documents}
        return dpflash.losses.causal_lm(logits, batch.labels, **own)
    if build is _of_rows:
        x = Pairs.rows(batch)["x"] if kind == "pairs" else batch["x"]
        if c["noisy"]:
            x = x + 0.1 * torch.randn_like(x) * float(np.random.rand())
        logits = model(x)
        if kind == "pairs":
            return F.softplus(logits[1::2, 0] - logits[::2, 0]) + logits[::2].square().mean(1)
    else:
        ids, mask = batch["ids"], batch["mask"].long()
        if hugging:
            logits = model(ids, attention_mask=mask).logits
        else:
            logits = model(ids, mask) if build is Text else model(ids)
        if kind == "tokens":
            return dpflash.losses.causal_lm(logits, ids.masked_fill(mask == 0, -100))
    return F.cross_entropy(logits.float(), batch["y"], reduction="none")


def train(group=None, *, seed, on_ranks=False):
    """(what was refused, why make_private makes no such run), each a text or None."""
    c = choices(seed) | ({"loop": "batches", "sampling": "poisson"} if on_ranks else {})
    (kind, build), dtype = ARCHITECTURES[c["architecture"]], getattr(torch, c["dtype"])
    rng = torch.manual_seed(seed)  # torch's own
    data = [_entry(kind, dtype, rng) for _ in range(ENTRIES)]
    collate = {"pairs": Pairs(of_pairs), "text": padded, "tokens": padded}.get(kind)
    if collate is padded and c["pads"] == "public":
        collate = PadTo(LONGEST)
    elif kind == "packed":
        collate = PackTo(tokens=LONGEST * 4, max_documents=8, rows=1 + seed % 2)
    options = {name: c[name] for name in list(OPTIONS)[:6]} | {"noise_multiplier": 1.0}
    if c["users"]:
        options |= {"unit_of": [i // 2 for i in range(ENTRIES)], "examples_per_unit": 2}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",)) if on_ranks else None
    engine = dpflash.PrivacyEngine(accountant="rdp", seed=seed, mesh=mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build(c).to(dtype)
        options["data_loader"] = DataLoader(data, c["batch"], collate_fn=collate)
        options["optimizer"] = getattr(torch.optim, c["optimizer"])(model.parameters(), 1e-2)
        try:
            made = engine.make_private(module=model, max_grad_norm=1.0, **options)
        except ValueError as error:
            return None, str(error)
        try:
            _loop(engine, *made, c)
        except dpflash.PrivateRefusal as refusal:
            return str(refusal), None
    return None, None


def _loop(engine, model, optimizer, loader, c):
    schedule = c["schedule"] and getattr(lr_scheduler, c["schedule"])(optimizer, 2)
    average = [p.detach().clone() for p in model.parameters()]
    odd = torch.ones((7, 1, 6, 6) if c["architecture"] == "cnn" else (7, WIDTH))
    is_logical, is_by_sample = c["loop"] == "logical", c["loop"] == "by sample"
    for batch in itertools.chain.from_iterable(LogicalBatches(loader)) if is_logical else loader:
        with torch.autocast("cpu", torch.bfloat16, enabled=c["autocast"]):
            if is_by_sample:
                engine.backward(lambda model, sample: _losses(model, sample, c), batch)
            else:
                losses = _losses(model, batch, c)
        if c["loss_reduction"] is not None:
            getattr(losses, c["loss_reduction"])().backward()
        elif not is_by_sample:
            engine.backward(losses)
        if loader.is_last and c["prints"]:
            f"{nn.utils.get_total_norm([p.grad for p in model.parameters()])}"
        optimizer.step()
        optimizer.zero_grad()
        if not loader.is_last:
            continue
        if schedule:
            schedule.step()
        if c["averages"]:
            torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 0.1)
        if c["evaluates"] and ARCHITECTURES[c["architecture"]][1] is _of_rows:
            model.eval()
            with torch.no_grad():
                model(odd.to(average[0]))
            model.train()
        if loader.releases >= c["draws"]:
            return


@pytest.mark.skipif(os.environ.get("DPFLASH_FULL") != "1", reason="takes minutes")
@pytest.mark.parametrize("seed", range(60))
def test_a_run_that_keeps_samples_apart_is_not_refused(seed):
    if ARCHITECTURES[choices(seed)["architecture"]][1] is _of_transformers:
        pytest.importorskip("transformers")
    refused, not_made = train(seed=seed)
    assert refused is None and not_made is None
