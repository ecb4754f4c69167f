"""Loops and models in which a sample's gradient depends on other samples, with strength a <= 1."""

from __future__ import annotations

import tempfile
from unittest.mock import patch

import datasets
import lightning
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from test_honest_runs import of_pairs, padded
from torch import nn
from torch.utils.data import DataLoader
from trl import SFTConfig

import dpflash
from dpflash.integrations.lightning import KeepPrivacy
from dpflash.integrations.transformers import DPTrainer
from dpflash.integrations.trl import DPSFTTrainer
from dpflash.packing import PackTo, Pairs
from dpflash.sampling import LogicalBatches
from dpflash.step import PrivateStep

WIDTH, CLASSES, VOCAB, LONGEST = 8, 3, 20, 24
VECTORS, TOKENS = ("rows", "pairs", "users"), ("text", "tokens", "packed")  # layouts


def _scores(r):
    return (r - r.mean(0)) / (r.std(0, correction=0) + 0.1)


# Couplings of the losses of a batch, for all layouts: functions of (losses, detached losses, a).
OF_LOSSES = {
    "losses plus a mean": lambda losses, r, a: losses + a * r.mean(),
    "losses times a mean": lambda losses, r, a: losses * (1 + a * r.mean()),
    "advantages": lambda losses, r, a: losses * (1 + a * (_scores(r) - 1)),
    "gradient alone scaled": lambda losses, r, a: r + (losses - r) * (1 + a * r.mean()),
}


def _normalized(x, a):
    scores = _scores(x.detach().flatten(0, -2)).view_as(x)  # scores over all rows and tokens
    return x + a * (scores - x.detach())


def _routed(h, a):  # each of two experts takes at most a third of all rows
    is_first = h.detach()[..., 0].flatten() > 0
    place = torch.where(is_first, is_first.cumsum(0), (~is_first).cumsum(0))
    return h * (1 - a * (place > max(1, len(place) // 3)).to(h)).view(h.shape[:-1])[..., None]


def _seen(h, a):  # attends to all earlier tokens of a row, also those of other documents
    count = torch.arange(1, h.shape[1] + 1).to(h)[:, None]
    return h + a * (h.detach().cumsum(1) / count - h.detach())


OF_ROWS = {"batch statistics": _normalized, "capacity": _routed}
OF_HIDDEN = {**OF_ROWS, "attention": _seen}


class Mix(nn.Module):
    """A layer that mixes hidden values `[..., D]` of one batch, or of consecutive batches."""

    def __init__(self, kind, a):
        super().__init__()
        self.kind, self.a, self.memory = kind, a, None

    def forward(self, h):
        if self.kind == "state":
            memory, self.memory = self.memory, h.detach().flatten(0, -2).mean(0)
            return h if memory is None else h + self.a * memory
        return OF_HIDDEN[self.kind](h, self.a) if self.kind in OF_HIDDEN else h


class Net(nn.Module):
    """Returns (hidden values, logits) of each vector, packed token, or text (mean over tokens)."""

    def __init__(self, layout, kind, a):
        super().__init__()
        self.first = nn.Embedding(VOCAB, 16) if layout in TOKENS else nn.Linear(WIDTH, 16)
        self.hidden, self.mix = nn.Linear(16, 16), Mix(kind, a)
        self.head = nn.Linear(16, VOCAB if layout == "packed" else CLASSES)
        self.a = a if "padding" in kind else 0.0

    def forward(self, x, mask=None):
        h = self.mix(torch.tanh(self.hidden(self.first(x))))
        if mask is not None:
            own = (h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            h = own + self.a * (h.mean(1) - own)
        return h, self.head(h)


def _entry(layout, rng, change=""):
    if layout in VECTORS:
        x = torch.randn(WIDTH, generator=rng) * (30 if change == "large" else 1)
        return {"x": x, "y": torch.tensor(2 if change else int(x[0] > 0.5))}
    length = int(torch.randint(3, LONGEST // 2, (), generator=rng))
    length, vocab = (LONGEST, VOCAB // 2) if change == "large" else (length, VOCAB)
    tokens = torch.randint(1, vocab, (length,), generator=rng)
    of_text = {"ids": tokens, "mask": tokens > 0, "y": tokens[0] % CLASSES}
    return of_text if layout == "text" else tokens


def _of_documents(net, batch, kind, a):
    own = {"sample_index": batch.sample_index, "num_samples": batch.max_documents}
    _, logits = net(batch.input_ids)
    losses = dpflash.losses.cross_entropy(logits, batch.targets, **own)
    if kind == "shifted targets":
        wrong = dpflash.losses.cross_entropy(logits, batch.input_ids.roll(-1, 1), **own)
        return losses + a * (wrong - losses)
    if kind == "number of tokens":
        return losses * (1 + a * (32 / (batch.sample_index >= 0).sum() - 1))
    return losses


def _of_vectors(net, x, y, kind, a):
    if kind == "inputs":
        x = _normalized(x, a)
    elif kind == "mixup":
        x = x + a / 2 * (x.roll(1, 0) - x)
    h, logits = net(x)
    losses = F.cross_entropy(logits, y, reduction="none")
    d, weights = h.detach(), torch.tensor([1.0, 4.0, 2.0])[y]
    if kind == "targets rolled":
        return losses + a * (F.cross_entropy(logits, y.roll(1), reduction="none") - losses)
    if kind == "hard triplets":
        hardest = d[(torch.cdist(d, d) + 1e6 * (y[:, None] == y)).argmin(1)]
        return losses + a * F.relu(2 - (h - hardest).square().sum(1))
    if kind == "class weights":  # as in the mean of CrossEntropyLoss(weight)
        return losses * (1 + a * (weights / weights.mean() - 1))
    return losses


DECLARED = ("class weights", "declared mean, padding")  # with loss_reduction="mean"
KINDS = {  # kind -> layouts
    **dict.fromkeys((*OF_LOSSES, *OF_ROWS, "state"), (*VECTORS, "text", "packed")),
    **dict.fromkeys(("inputs", "mixup", "targets rolled", "hard triplets"), VECTORS),
    **{"class weights": ("rows",), "padding": ("text",), "declared mean, padding": ("text",)},
    **dict.fromkeys(("shifted targets", "attention", "number of tokens"), ("packed",)),
}
CASES = [  # (kind, layout, units of a microbatch, loop)
    *(("losses times a mean", "rows", 8, loop) for loop in ("Accelerate", "Lightning")),
    *(("state", "rows", 8, loop) for loop in ("Accelerate", "Lightning")),
    *(("batch statistics", "tokens", 8, loop) for loop in ("DPTrainer", "TRL")),
    *(("losses times a mean", "tokens", 8, "DPTrainer"), ("state", "tokens", 8, "TRL")),
]
for kind, layouts in KINDS.items():
    CASES += [(kind, layout, units, "plain") for layout in layouts for units in (1, 2, 8)]


class Run:
    """A training run of one of `CASES`.

    Args:
        change: "large" makes the entry of the last privacy unit large; "none" removes its entry.
        mutes: whether the loss of the last unit is multiplied by 0 before it is returned.
        whole: whether there is a single logical batch with all units, and no isolation test.
    """

    def __init__(
        self, kind, layout, units, loop, a, seed,
        *, change="", mutes=False, whole=False, **options,
    ):  # fmt: skip
        self.kind, self.layout, self.units, self.loop, self.a = kind, layout, units, loop, a
        rng = torch.Generator().manual_seed(seed)
        count, self.batch, self.releases = (16, 16, 1) if whole else (48, 10, 4)
        if whole:
            options |= {"noise_multiplier": 0.0, "verify_first_batch": False}
        elif units > 2:
            self.batch, options["sampling"] = 16, "fixed_size"
        each = 2 if layout == "users" else 1
        self.entries = [_entry(layout, rng) for _ in range((count - 1) * each)]
        self.last, self.mutes = _entry(layout, rng, change), mutes
        # An entry None cannot be collated, and contributes nothing.
        self.entries += [None if change == "none" else self.last] * each
        torch.manual_seed(seed)
        self.engine = dpflash.PrivacyEngine(accountant="rdp", seed=seed)
        self.options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, **options}

    def go(self):
        if self.layout == "tokens":
            return self._trainer()
        return self._lightning() if self.loop == "Lightning" else self._plain()

    def losses(self, net, batch):
        """Return losses of samples or their mean; with `mutes` the last unit's losses are 0."""
        kind, a, last = self.kind, self.a, self.last
        if self.layout == "packed":
            losses = _of_documents(net, batch, kind, a)
            flat = batch.input_ids.flatten()
            is_last = [torch.equal(flat[slice(*span)], last) for span in batch.units.spans]
        elif self.layout == "text":
            _, logits = net(batch["ids"], batch["mask"])
            losses = F.cross_entropy(logits, batch["y"], reduction="none")
            is_last = [torch.equal(row[row > 0], last["ids"]) for row in batch["ids"]]
        else:
            x, y = batch["x"], batch["y"]
            if self.layout == "pairs":
                x, y = Pairs.rows(batch)["x"], y.repeat_interleave(2)
            losses = _of_vectors(net, x, y, kind, a)
            is_last = [torch.equal(row.abs(), last["x"].abs()) for row in x]
        if kind in OF_LOSSES:
            losses = OF_LOSSES[kind](losses, losses.detach(), a)
        if self.mutes:
            losses = losses * ~torch.tensor(is_last)
        return losses.mean() if kind in DECLARED else losses

    def _private(self):
        net, options = Net(self.layout, self.kind, self.a), dict(self.options)
        pack = PackTo(tokens=max(LONGEST, 12 * self.units), max_documents=self.units)
        of_layout = {"pairs": Pairs(of_pairs), "text": padded, "packed": pack}
        collate, users = of_layout.get(self.layout), [i // 2 for i in range(len(self.entries))]
        if self.layout != "packed":
            options["physical_batch_size"] = self.units
        if self.layout == "users":
            options |= {"unit_of": users, "examples_per_unit": 2}
        if self.kind in DECLARED:
            options["loss_reduction"] = "mean"
        options |= {"data_loader": DataLoader(self.entries, self.batch, collate_fn=collate)}
        options |= {"module": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)}
        made = self.engine.make_private(**options)
        self.loader = made[2]
        return made

    def _plain(self):
        made = self._private()
        if self.loop == "Accelerate":
            made = Accelerator(cpu=True).prepare(*made)
        net, optimizer, loader = made
        while self.loader.releases < self.releases:
            for batch in loader:
                self.engine.backward(self.losses(net, batch))
                optimizer.step()
                optimizer.zero_grad()
                if self.loader.releases == self.releases and self.loader.is_last:
                    return

    def _lightning(self):
        run = self

        class Private(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.automatic_optimization = False
                self.net, self.optimizer, self.loader = run._private()
                self.configure_optimizers = lambda: self.optimizer
                self.train_dataloader = lambda: LogicalBatches(self.loader)

            def training_step(self, batch, index):
                for part in batch:
                    run.engine.backward(run.losses(self.net, part))
                self.optimizers().step()
                self.optimizers().zero_grad()

        options = {"logger": False, "enable_checkpointing": False, "max_steps": self.releases}
        options |= {"callbacks": [KeepPrivacy(self.engine)], "accelerator": "cpu"}
        lightning.Trainer(**options).fit(Private())

    def _trainer(self):  # a Llama with the coupling after its last norm
        sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24}
        config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
        model = transformers.LlamaForCausalLM(config)
        model.model.norm = nn.Sequential(model.model.norm, Mix(self.kind, self.a))

        def loss(outputs, labels, num_items_in_batch=None):
            losses = dpflash.losses.causal_lm(outputs.logits, labels)
            change = OF_LOSSES.get(self.kind, lambda losses, r, a: losses)
            return change(losses, losses.detach(), self.a)

        rows = [F.pad(x, (0, LONGEST - len(x))).tolist() for x in self.entries if x is not None]
        with tempfile.TemporaryDirectory() as folder:
            quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no"}
            quiet |= {"output_dir": folder, "use_cpu": True, "max_steps": self.releases}
            quiet |= {"per_device_train_batch_size": self.batch, "logging_steps": 1000}
            if self.loop == "TRL":
                kind, args = DPSFTTrainer, SFTConfig(**quiet, bf16=False)
                own = {"train_dataset": datasets.Dataset.from_dict({"input_ids": rows})}
                words = tokenizers.models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>")
                own["processing_class"] = transformers.PreTrainedTokenizerFast(
                    tokenizer_object=tokenizers.Tokenizer(words),
                    pad_token="<pad>",
                    eos_token="<eos>",
                )
            else:
                kind, args = DPTrainer, transformers.TrainingArguments(**quiet)
                own = {"train_dataset": [{"input_ids": x, "labels": x} for x in rows]}
                own["compute_loss_func"] = loss
            privacy = dpflash.PrivacyConfig(target_delta=1e-3, **self.options)
            rows_of = dpflash.PerformanceConfig(physical_batch_size=self.units)
            own |= {"privacy": privacy, "performance": rows_of, "engine": self.engine}
            kind(model=model, args=args, **own).train()


def sum_of(*given, **options):
    """Return the clipped sum of one logical batch of all units, as a vector."""
    found, release = [], PrivateStep.release

    def keep(step, **signal):
        parts = [step.sums.get(p, torch.zeros_like(p)) for p in step.sums.trained]
        found.append(torch.cat([part.detach().double().flatten() for part in parts]))
        release(step, **signal)

    with patch.object(PrivateStep, "release", keep), patch("dpflash.build.refuse_mixing"):
        Run(*given, whole=True, **options).go()
    return found[0]
