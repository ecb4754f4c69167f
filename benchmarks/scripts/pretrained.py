"""Fine-tunes a pretrained text model privately, with banded or independent noise at equal epsilon.

The model averages the token embeddings of the package wordllama over a text and applies a new
linear classifier. The task is to predict the section of a Debian package from its one-line
description; a user is a maintainer. These commands give the files `--wheel` and `--packages`:

    pip download --no-deps wordllama==0.4.0.post1
    /usr/lib/apt/apt-helper cat-file /var/lib/apt/lists/*_main_binary-amd64_Packages* > Packages

opake must be installed (pip install 'opake[dpftrl]==0.16.1').

    python benchmarks/scripts/pretrained.py --wheel FILE.whl --packages Packages --runs RUNS.jsonl

A line is appended to RUNS after each run; runs whose lines are in RUNS are skipped. The results
are written to `--out` (benchmarks/results/pretrained.json), and their picture beside it.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import multiprocessing
import re
import statistics
import time
import warnings
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import scipy.stats
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dpflash
from dpflash.bench.environment import environment
from dpflash.bench.output import markdown_table, write_picture, write_text
from dpflash.noise import Banded, compare_bands

TUNINGS, UNITS, EPSILONS = ("frozen", "LoRA", "full"), ("entry", "user"), (1.0, 3.0, 8.0)
METHODS = ("independent", "banded", "Opacus", "opake", "opake banded")
# Optimizers tried with dpflash's independent noise at epsilon 3; all other runs use plain SGD.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    "AdamW": functools.partial(torch.optim.AdamW, betas=(0.9, 0.99), weight_decay=0.0),
    "AdamBC": functools.partial(dpflash.optim.AdamBC, betas=(0.9, 0.99)),
}
NONPRIVATE = "no privacy"
DELTA, MAX_GRAD_NORM = 1e-5, 1.0
SECTIONS, TOKENS, WIDTH, RANK = 30, 16, 128, 8
# Privacy unit -> (units per step, epochs, entries of a unit in one step).
RUN = {"entry": (250, 3, 1), "user": (100, 5, 8)}
SEEDS, TUNING_SEED = range(5), 100
# While the best learning rate is the smallest or largest, a rate half or twice as large is tried.
LEARNING_RATES, OTHER_RATES = (4.0, 8.0), {"momentum": (0.4, 0.8), "AdamW": (0.01, 0.02)}
OTHER_RATES["AdamBC"] = OTHER_RATES["AdamW"]
PAD, UNKNOWN = 0, 1


class Texts(NamedTuple):
    """N texts: tokens `[N, TOKENS]`, section numbers `[N]`, and the maintainer of each text."""

    tokens: Tensor
    labels: Tensor
    maintainers: list[str]


class Task(NamedTuple):
    """Private texts for each unit, held-out texts, public texts, and the table of embeddings."""

    private: dict[str, Texts]
    test: Texts
    public: Texts
    table: Tensor
    about: dict[str, Any]


def make_task(wheel: Path, packages: Path) -> Task:
    """Read the model and the texts; packages of one source are all private, test or public texts.

    Sections, vocabulary and learning rates depend only on the public texts, a tenth of all texts.
    """
    from safetensors.torch import load
    from tokenizers import Tokenizer

    with zipfile.ZipFile(wheel) as files:
        read = {Path(name).name: name for name in files.namelist()}
        table = load(files.read(read["l2_supercat_256.safetensors"]))["embedding.weight"]
        tokenizer = Tokenizer.from_str(
            files.read(read["l2_supercat_tokenizer_config.json"]).decode()
        )
    text = packages.read_text(encoding="utf-8")
    wanted = re.compile(r"^(Package|Source|Section|Maintainer|Description): (.*)$", re.M)
    found = [dict(wanted.findall(block)) for block in text.split("\n\n")]
    splits: dict[str, list[dict[str, str]]] = defaultdict(list)
    for entry in found:
        if {"Section", "Maintainer", "Description"} <= entry.keys():
            source = entry.get("Source", entry["Package"]).split(" ")[0]
            tenth = hashlib.sha256(source.encode()).digest()[0] * 10 >> 8
            split = "public" if tenth == 0 else "private" if tenth < 5 else "test"
            splits[split].append(entry)
    counts = Counter(entry["Section"] for entry in splits["public"])
    sections = {name: i for i, (name, _) in enumerate(counts.most_common(SECTIONS))}

    def encode(entries: list[dict[str, str]]) -> list[list[int]]:
        texts = [entry["Description"] for entry in entries]
        encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
        return [x.ids[:TOKENS] for x in encoded]

    vocabulary = sorted({i for ids in encode(splits["public"]) for i in ids})
    own = {token: i + 2 for i, token in enumerate(vocabulary)}

    def texts(entries: list[dict[str, str]]) -> Texts:
        entries = [entry for entry in entries if entry["Section"] in sections]
        tokens = torch.full((len(entries), TOKENS), PAD)
        for row, ids in zip(tokens, encode(entries), strict=True):
            # A text without known tokens becomes one unknown token.
            known = [own[i] for i in ids if i in own] or [UNKNOWN]
            row[: len(known)] = torch.tensor(known)
        labels = torch.tensor([sections[entry["Section"]] for entry in entries])
        return Texts(tokens, labels, [entry["Maintainer"] for entry in entries])

    rows = torch.zeros(len(vocabulary) + 2, WIDTH)
    rows[2:] = table[torch.tensor(vocabulary), :WIDTH].float()
    private, test, public = (texts(splits[name]) for name in ("private", "test", "public"))
    # If each text is a unit, half of the texts are used: nine times as many units as users.
    half = Texts(private.tokens[::2], private.labels[::2], private.maintainers[::2])
    about = {
        "wheel": wheel.name,
        "packages_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "entries": len(half.labels),
        "users": len(set(private.maintainers)),
        "entries_of_users": len(private.labels),
        "test": len(test.labels),
        "public": len(public.labels),
        "vocabulary": len(rows),
    }
    return Task({"entry": half, "user": private}, test, public, rows, about)


class Classifier(nn.Module):
    """Predicts sections from a text's mean token embedding; `tuning` chooses what is trained."""

    def __init__(self, table: Tensor, tuning: str) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(table.clone(), freeze=tuning != "full")
        self.down = self.up = None
        if tuning == "LoRA":
            self.down = nn.Embedding(len(table), RANK)
            nn.init.zeros_(self.down.weight)
            self.up = nn.Linear(RANK, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, SECTIONS)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores `[..., SECTIONS]` of tokens `[..., TOKENS]`."""
        flat = tokens.flatten(1)
        embedded = self.table(flat)
        if self.down is not None and self.up is not None:
            embedded = embedded + self.up(self.down(flat))
        real = (tokens != PAD).to(embedded.dtype)
        weights = real / real.sum(-1, keepdim=True).clamp(min=1)
        embedded = embedded.unflatten(1, tokens.shape[1:])
        return self.head(self.norm(torch.einsum("...td,...t->...d", embedded, weights)))


class Users(Dataset):
    """Dataset of users: each call draws up to k texts of a user, padded by rows without tokens."""

    def __init__(self, texts: Texts, k: int) -> None:
        owned = defaultdict(list)
        for i, name in enumerate(texts.maintainers):
            owned[name].append(i)
        self.texts, self.k, self.owned = texts, k, [torch.tensor(x) for x in owned.values()]

    def __len__(self) -> int:
        return len(self.owned)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        own = self.owned[index]
        own = own[torch.randperm(len(own))[: self.k]]
        tokens = torch.full((self.k, TOKENS), PAD)
        labels = torch.full((self.k,), -100)
        tokens[: len(own)] = self.texts.tokens[own]
        labels[: len(own)] = self.texts.labels[own]
        return tokens, labels


def losses_of(scores: Tensor, labels: Tensor) -> Tensor:
    """Return cross-entropies `[B]` of single texts, or their means over the texts of a user."""
    if labels.ndim == 1:
        return nn.functional.cross_entropy(scores, labels, reduction="none")
    each = nn.functional.cross_entropy(scores.transpose(1, 2), labels, reduction="none")
    return each.sum(1) / (labels >= 0).sum(1).clamp(min=1)


class Setting(NamedTuple):
    """A run without its learning rate and seed."""

    method: str
    unit: str
    tuning: str
    epsilon: float | None


class Run(NamedTuple):
    """The inputs of one training run; each step samples `batch` of `units` units on average."""

    setting: Setting
    private: Texts
    model: Classifier
    learning_rate: float
    seed: int
    dataset: Dataset
    units: int
    bands: int

    @property
    def batch(self) -> int:
        return RUN[self.setting.unit][0]

    @property
    def steps(self) -> int:
        return -(-RUN[self.setting.unit][1] * self.units // self.batch)

    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer of the trained parameters."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        optimizer_class = OPTIMIZERS.get(self.setting.method, torch.optim.SGD)
        return optimizer_class(trained, lr=self.learning_rate)

    def decay(self, optimizer: torch.optim.Optimizer, done: int) -> bool:
        """Lower the learning rate linearly to 0; return True after the last step."""
        for group in optimizer.param_groups:
            group["lr"] = self.learning_rate * (1 - done / self.steps)
        return done >= self.steps

    def noise(self) -> Banded:
        """Return the noise with the smallest expected error."""
        return Banded.optimized(bands=self.bands, steps=self.steps)


@functools.cache
def noise_of(unit: str, epsilon: float, units: int) -> dict[int, float]:
    """Return {number of bands: noise multiplier}, the smallest expected error first."""
    batch, epochs, _ = RUN[unit]
    found = compare_bands(
        num_samples=units,
        batch_size=batch,
        epochs=epochs,
        target_epsilon=epsilon,
        target_delta=DELTA,
    )
    return {x.noise.bands: x.noise_multiplier for x in found}


def train_dpflash(run: Run) -> float:
    """Train with dpflash, where users are units of several texts; return the noise multiplier."""
    given: dict[str, Any] = {}
    if run.setting.method == "banded":
        given.update(noise_mechanism=run.noise(), sampling="cyclic_poisson")
    if run.setting.unit == "user":
        given.update(unit_of=run.private.maintainers, examples_per_unit=RUN["user"][2])
    engine = dpflash.PrivacyEngine(seed=run.seed)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=run.model,
        optimizer=run.optimizer(),
        data_loader=DataLoader(
            TensorDataset(run.private.tokens, run.private.labels), batch_size=run.batch
        ),
        target_epsilon=run.setting.epsilon,
        target_delta=DELTA,
        steps=run.steps,
        max_grad_norm=MAX_GRAD_NORM,
        dataset_size=run.units,
        physical_batch_size=2 * run.batch,
        verify_first_batch=False,  # the isolation test would not change the releases
        **given,
    )
    while loader.releases < run.steps:
        for tokens, labels in loader:
            engine.backward(losses_of(model(tokens), labels))
            optimizer.step()
            optimizer.zero_grad()
            if run.decay(optimizer, loader.releases):
                break
    engine.detach(model)
    return float(optimizer.noise_multiplier)


class MeanLoss(nn.Module):
    """`losses_of` with the attribute `reduction`, which Opacus sets."""

    reduction = "mean"

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        losses = losses_of(scores, labels)
        return losses if self.reduction == "none" else losses.mean()


def train_opacus(run: Run) -> float:
    """Train with Opacus' ghost clipping, where a user is one entry of several texts."""
    from opacus import PrivacyEngine

    made = PrivacyEngine().make_private_with_epsilon(
        module=run.model,
        optimizer=run.optimizer(),
        criterion=MeanLoss(),
        data_loader=DataLoader(run.dataset, batch_size=run.batch),
        target_epsilon=run.setting.epsilon,
        target_delta=DELTA,
        epochs=RUN[run.setting.unit][1],
        max_grad_norm=MAX_GRAD_NORM,
        grad_sample_mode="ghost",
    )
    model, optimizer, criterion, loader = made
    done = 0
    while done < run.steps:
        for tokens, labels in loader:
            optimizer.zero_grad()
            criterion(model(tokens), labels).backward()
            optimizer.step()
            done += 1
            if run.decay(optimizer, done):
                break
    return float(optimizer.noise_multiplier)


def train_opake(run: Run) -> float:
    """Train with opake, with independent or banded noise and dpflash's noise multiplier."""
    from opake.dpftrl.noise import band_mf_strategy, mf_gaussian_noise
    from opake.dpftrl.sampling import CyclicPoissonSampler
    from opake.dpsgd.clipping import clipped_grad
    from opake.dpsgd.noise import gaussian_noise
    from opake.dpsgd.sampling import PoissonSampler
    from opake.random import key

    method, epsilon = run.setting.method, run.setting.epsilon
    bands = run.bands if method == "opake banded" else 1
    rate = bands * run.batch / run.units
    noise_multiplier = noise_of(run.setting.unit, epsilon or 0.0, run.units)[bands]
    named = {name: p for name, p in run.model.named_parameters() if p.requires_grad}

    def loss(parameters: dict[str, Tensor], tokens: Tensor, labels: Tensor) -> Tensor:
        scores = torch.func.functional_call(run.model, parameters, (tokens[None],))
        return losses_of(scores, labels[None])[0]

    clipped, clipping = clipped_grad(
        loss, clipping_norm=MAX_GRAD_NORM, batch_argnums=(1, 2), normalize_by=run.batch
    )
    values = {name: p.detach() for name, p in named.items()}
    if method == "opake":
        noised, noise = gaussian_noise(noise_multiplier=noise_multiplier, key=key(run.seed))
        sampler: Any = PoissonSampler(run.dataset, rate, run.steps, key=key(run.seed))
    else:
        noised, noise = mf_gaussian_noise(
            values,
            band_mf_strategy(bands=bands),
            n_steps=run.steps,
            min_sep=bands,
            noise_multiplier=noise_multiplier,
            key=key(run.seed),
        )
        sampler = CyclicPoissonSampler(run.dataset, rate, bands, run.steps, key=key(run.seed))
    optimizer, done = run.optimizer(), 0
    for tokens, labels in DataLoader(run.dataset, batch_sampler=sampler):
        values = {name: p.detach() for name, p in named.items()}
        gradients, clipping = clipped(values, tokens, labels, state=clipping)
        gradients, noise = noised(gradients, noise)
        for name, parameter in named.items():
            parameter.grad = gradients.pytree[name]
        optimizer.step()
        done += 1
        run.decay(optimizer, done)
    return noise_multiplier


def train_plainly(run: Run) -> float:
    """Train without clipping and noise, on shuffled batches."""
    optimizer, done = run.optimizer(), 0
    while done < run.steps:
        for tokens, labels in DataLoader(run.dataset, batch_size=run.batch, shuffle=True):
            losses_of(run.model(tokens), labels).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if run.decay(optimizer, done):
                break
    return 0.0


TRAINERS: dict[str, Callable[[Run], float]] = {
    "independent": train_dpflash,
    "banded": train_dpflash,
    "Opacus": train_opacus,
    "opake": train_opake,
    "opake banded": train_opake,
    NONPRIVATE: train_plainly,
    **dict.fromkeys(OPTIMIZERS, train_dpflash),
}


def accuracy_and_loss(model: nn.Module, texts: Texts) -> tuple[float, float]:
    """Return accuracy and mean loss over all texts."""
    with torch.no_grad():
        scores = torch.cat([model(tokens) for tokens in texts.tokens.split(1000)])
    right = (scores.argmax(1) == texts.labels).float().mean()
    return float(right), float(nn.functional.cross_entropy(scores, texts.labels))


def trained(task: Task, setting: Setting, learning_rate: float, seed: int) -> dict[str, Any]:
    """Make one run and return its line."""
    torch.manual_seed(seed)
    model = Classifier(task.table, setting.tuning)
    private = task.private[setting.unit]
    dataset: Any = TensorDataset(private.tokens, private.labels)
    if setting.unit == "user":
        dataset = Users(private, RUN["user"][2])
    units = len(dataset)
    bands = next(iter(noise_of(setting.unit, setting.epsilon, units))) if setting.epsilon else 1
    run = Run(setting, private, model, learning_rate, seed, dataset, units, bands)
    begin = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        noise_multiplier = TRAINERS[setting.method](run)
    figures = {
        "seconds": round(time.perf_counter() - begin, 1),
        "noise_multiplier": noise_multiplier,
        "bands": bands if "banded" in setting.method else 1,
        "validation": accuracy_and_loss(model, task.public)[0],
    }
    figures["accuracy"], figures["loss"] = accuracy_and_loss(model, task.test)
    return {**setting._asdict(), "learning_rate": learning_rate, "seed": seed, **figures}


def read_lines(runs: Path) -> list[dict[str, Any]]:
    """Return the lines of earlier runs."""
    if not runs.exists():
        return []
    return [json.loads(line) for line in runs.read_text().splitlines()]


def make_runs(setting: Setting, *, task: Task, runs: Path) -> Setting:
    """Choose the learning rate at one seed on the public texts, then train with all seeds."""
    torch.set_num_threads(1)
    made = {
        (x["learning_rate"], x["seed"]): x
        for x in read_lines(runs)
        if Setting(*(x[name] for name in Setting._fields)) == setting
    }

    def line(learning_rate: float, seed: int) -> dict[str, Any]:
        if (learning_rate, seed) not in made:
            made[learning_rate, seed] = trained(task, setting, learning_rate, seed)
            with runs.open("a") as file:
                file.write(json.dumps(made[learning_rate, seed]) + "\n")
        return made[learning_rate, seed]

    rates = list(OTHER_RATES.get(setting.method, LEARNING_RATES))
    while True:
        best = max(rates, key=lambda rate: line(rate, TUNING_SEED)["validation"])
        if best == rates[0]:
            rates.insert(0, best / 2)
        elif best == rates[-1]:
            rates.append(best * 2)
        else:
            break
    for seed in SEEDS:
        line(best, seed)
    return setting


def settings() -> Iterator[Setting]:
    """Yield all settings; opake's table is frozen, as its per-sample gradients would not fit."""
    for unit in UNITS:
        for tuning in TUNINGS:
            yield Setting(NONPRIVATE, unit, tuning, None)
            for epsilon in EPSILONS:
                for method in METHODS:
                    if tuning == "frozen" or not method.startswith("opake"):
                        yield Setting(method, unit, tuning, epsilon)
    for method, tuning in itertools.product(OPTIMIZERS, ("frozen", "LoRA")):
        yield Setting(method, "entry", tuning, 3.0)


def urgency(setting: Setting) -> tuple[bool, bool, int, int]:
    """Return a sort key that puts dpflash's settings, and epsilons above 1, first."""
    method, epsilon = setting.method, setting.epsilon
    peer = method in ("Opacus", "opake", "opake banded")
    return (peer, epsilon == 1.0, UNITS.index(setting.unit), TUNINGS.index(setting.tuning))


def gathered(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each setting that ran all seeds: its options, and each seed's figures."""
    rows = []
    for setting in settings():
        own = [x for x in lines if Setting(*(x[name] for name in Setting._fields)) == setting]
        final = sorted((x for x in own if x["seed"] in SEEDS), key=lambda x: x["seed"])
        if len(final) < len(SEEDS):
            continue
        tried = {x["learning_rate"]: x["validation"] for x in own if x["seed"] == TUNING_SEED}
        chosen = ("bands", "noise_multiplier", "learning_rate")
        rows.append(
            {
                **setting._asdict(),
                **{name: final[0][name] for name in chosen},
                "validation": {rate: round(tried[rate], 4) for rate in sorted(tried)},
                "accuracy": [round(x["accuracy"], 4) for x in final],
                "loss": [round(x["loss"], 4) for x in final],
            }
        )
    independent = {
        (row["unit"], row["tuning"], row["epsilon"]): row["accuracy"]
        for row in rows
        if row["method"] == "independent"
    }
    for row in rows:
        base = independent.get((row["unit"], row["tuning"], row["epsilon"]))
        if base is not None and row["method"] != "independent":
            found = scipy.stats.ttest_ind(row["accuracy"], base, equal_var=False)
            interval = found.confidence_interval()
            row["gain"] = round(statistics.mean(row["accuracy"]) - statistics.mean(base), 4)
            row["gain_ci95"] = [round(float(x), 4) for x in interval]
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the tables of the page, with mean accuracies and standard deviations."""
    found = {Setting(*(row[name] for name in Setting._fields)): row for row in rows}

    def cell(method: str, *key: Any) -> str | None:
        row = found.get(Setting(method, *key))
        if row is None:
            return None
        mean, deviation = statistics.mean(row["accuracy"]), statistics.stdev(row["accuracy"])
        bands = f", {row['bands']} band{'s' * (row['bands'] > 1)}" if method == "banded" else ""
        return f"{100 * mean:.1f} ± {100 * deviation:.1f}{bands}"

    lines = []
    for unit, tuning, epsilon in itertools.product(UNITS, TUNINGS, EPSILONS):
        banded = found.get(Setting("banded", unit, tuning, epsilon), {})
        gain = None
        if "gain" in banded:
            low, high = (100 * x for x in banded["gain_ci95"])
            gain = f"{100 * banded['gain']:+.1f} ({low:+.1f} to {high:+.1f})"
        cells = [cell(method, unit, tuning, epsilon) for method in METHODS]
        if any(cells):
            plain = cell(NONPRIVATE, unit, tuning, None)
            lines.append(
                [f"{unit}, {tuning}", f"{epsilon:g}", cells[0], cells[1], gain, *cells[2:], plain]
            )
    head = ["", "epsilon", *METHODS[:2], "gain", *METHODS[2:], NONPRIVATE]
    names = ("independent", *OPTIMIZERS)
    own = [[t, *(cell(name, "entry", t, 3.0) for name in names)] for t in ("frozen", "LoRA")]
    return markdown_table(head, lines) + "\n" + markdown_table(["", *names], own)


def draw(rows: list[dict[str, Any]], title: str) -> Any:
    """Draw the gain in accuracy (points) over dpflash's independent noise, with 95% intervals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    panels = figure.subplots(1, len(UNITS), sharey=True)
    marks = dict(
        zip(METHODS[1:], (("C0", "o"), ("C1", "s"), ("C2", "^"), ("C4", "D")), strict=True)
    )
    places = {key: i + i // 3 * 0.6 for i, key in enumerate(itertools.product(TUNINGS, EPSILONS))}
    for panel, unit in zip(panels, UNITS, strict=True):
        panel.axhline(0, color="#888888", linewidth=1)
        for nth, (method, (color, marker)) in enumerate(marks.items()):
            own = [x for x in rows if "gain" in x and (x["unit"], x["method"]) == (unit, method)]
            panel.errorbar(
                [places[x["tuning"], x["epsilon"]] + 0.16 * (nth - 1.5) for x in own],
                [100 * x["gain"] for x in own],
                yerr=[[100 * abs(x["gain_ci95"][i] - x["gain"]) for x in own] for i in (0, 1)],
                color=color,
                marker=marker,
                markersize=5,
                capsize=2,
                linestyle="",
                label={"banded": "dpflash, banded noise"}.get(method, method),
            )
        labels = [f"{e:g}\n{t}" if e == EPSILONS[1] else f"{e:g}" for t, e in places]
        panel.set_xticks(list(places.values()), labels)
        panel.set(title=f"the unit is {'an entry' if unit == 'entry' else 'a user'}")
        panel.set_xlabel("epsilon, what is trained")
        panel.set_xlim(-0.6, max(places.values()) + 0.6)
        panel.grid(axis="y", color="#dddddd", linewidth=0.5)
    panels[0].set_ylabel("test accuracy over dpflash's\nindependent noise (points)")
    panels[0].legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--wheel", type=Path, required=True, help="of wordllama")
    parser.add_argument("--packages", type=Path, required=True, help="Debian's list")
    parser.add_argument("--runs", type=Path, required=True, help="a JSONL file, continued")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/pretrained.json"))
    parser.add_argument("--processes", type=int, default=2, help="0 to make no more runs")
    given = parser.parse_args()
    task = make_task(given.wheel, given.packages)
    print(task.about, flush=True)
    work = functools.partial(make_runs, task=task, runs=given.runs)
    if given.processes:
        with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
            for setting in pool.imap_unordered(work, sorted(settings(), key=urgency)):
                print(setting, flush=True)
    rows = gathered(read_lines(given.runs))
    found = environment("cpu", threads=1)
    numbers = {
        unit: dict(zip(("batch", "epochs", "entries_of_a_unit"), RUN[unit], strict=True))
        for unit in UNITS
    }
    head = {"environment": found, "task": {**task.about, **numbers}, "delta": DELTA}
    lines = ",\n".join(json.dumps(row) for row in rows)
    write_text(given.out, f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n')
    title = f"Sections of Debian packages, {len(SEEDS)} seeds, {found['device']}, {found['date']}"
    print(table(rows))
    write_picture(given.out.with_suffix(".png"), draw(rows, title))


if __name__ == "__main__":
    main()
