"""Physical batches have a public number of rows, and padding rows count for nothing."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dpflash
from dpflash.check.private import PrivateCopy
from dpflash.check.report import Findings
from dpflash.check.rows import check_rows
from dpflash.check.subject import Subject
from dpflash.privacy.keys import uniform_words
from dpflash.sampling import BatchMark, PoissonBatchSampler, PrivateDataLoader, SamplingPlan
from dpflash.sampling.slots import MOST_PADDING, SlotSampler, slots_of_draws, slots_of_size
from dpflash.sampling.tracker import BatchTracker

KEY = bytes(range(32))
KINDS = [{"grad_sample_mode": mode} for mode in ("instantiate", "book_keeping", "ghost")]
KINDS.append({"clipping": "per_layer"})
KINDS += [{"loss_reduction": r} for r in ("sum", "mean")]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind.values()))


def rows_of(num_samples, rate, draws=50, rank_part=(0, 1), key=KEY, **options):
    """The slot sampler of Poisson draws, and the draws."""
    source = PoissonBatchSampler(num_samples, rate, steps_per_epoch=draws, key=key)
    source.follow(BatchTracker(), rank_part)
    slots = slots_of_draws(num_samples, rate, ranks=rank_part[1], **options)
    return SlotSampler(source, slots), source


class Mixed(nn.Module):
    """Embedding, norm, linear layers over tokens, of which one is called twice."""

    def __init__(self, width=8, rows=11):
        super().__init__()
        self.embedding = nn.Embedding(rows, width)
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, rows)

    def forward(self, tokens):
        hidden = self.norm(self.embedding(tokens))
        hidden = hidden + F.gelu(self.mix(hidden), approximate="tanh")
        return self.head(self.mix(hidden))


def losses_of(model, tokens):
    return dpflash.losses.cross_entropy(model(tokens), tokens.flip(1))


def backward(engine, kind, losses):
    reduction = kind.get("loss_reduction")
    if reduction is None:
        engine.backward(losses)
    else:
        getattr(losses, reduction)().backward()


def begin(engine, real, draw=0, last=True):
    """The loop gets a batch with these real rows."""
    mask = torch.as_tensor(real)
    engine._step.tracker.begin_microbatch(
        BatchMark(draw, len(mask), last, 0, mask), engine._step.tracker.epochs
    )


# How many rows


@pytest.mark.parametrize("batch_size", [16, 64, 256])
def test_at_most_a_tenth_of_all_rows_is_padding_over_50_poisson_draws(batch_size):
    rows, source = rows_of(batch_size * 40, 1 / 40)
    emitted = sum(len(part) for part in rows)
    drawn = sum(len(source.draw(index)) for index in range(50))
    assert drawn > 45 * batch_size and rows.slots >= batch_size // 6
    assert 0 < 1 - drawn / emitted <= 0.1


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("expected", "total"), [(1, 99), (2, 99), (5, 60), (31, 32), (40, 10**5)])
def test_the_number_of_slots_keeps_its_promise_or_is_the_least_that_holds_company(
    expected, total, ranks
):
    rate = expected / total
    slots = slots_of_draws(total, rate, ranks=ranks)
    sizes = np.random.default_rng(0).binomial(total, rate, 4000)
    rounds = np.maximum(1, -(-sizes // (slots * ranks)))
    padding = 1 - sizes.mean() / (slots * ranks * rounds.mean())
    assert padding <= MOST_PADDING + 0.01 or slots == (2 if expected >= 3 * ranks else 1)


def test_the_number_of_slots_is_bounded_by_the_physical_batch_size_and_is_even():
    assert slots_of_draws(10**4, 0.0256, at_most=7) == 6
    assert slots_of_draws(10**4, 0.0256, at_most=1) == 1
    assert slots_of_draws(10**4, 0.0256) == 48
    # All draws have one size: equal parts.
    assert slots_of_draws(10, 1.0, at_most=4) == slots_of_size(10, at_most=4) == 4
    assert [slots_of_size(n, at_most=16, ranks=2) for n in (64, 66, 1)] == [16, 11, 1]
    # The user asked for all of a draw at once.
    assert slots_of_draws(10**4, 0.0256, at_most=400, cap=400) == 400


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "options", [{}, {"sampling": "fixed_size"}, {"max_batch_size": 9}], ids=str
)
def test_every_batch_has_the_public_number_of_rows_and_each_sample_sits_in_one(options, workers):
    class Numbered(Dataset):
        def __len__(self):
            return 60

        def __getitem__(self, index):
            raise AssertionError("__getitems__ is there")

        def __getitems__(self, indices):
            return [{"x": torch.tensor([i])} for i in indices]

    options = {"sampling": "poisson", "max_batch_size": None, **options}
    plain = DataLoader(
        Numbered(), batch_size=7, num_workers=workers, persistent_workers=workers > 0,
        collate_fn=lambda samples: {"own": torch.stack([s["x"] for s in samples])},
    )  # fmt: skip
    loader = PrivateDataLoader(plain, SamplingPlan.of(plain, **options), key=KEY)
    tracker = loader.tracker
    for epoch in range(2):
        found = {}
        for batch in loader:
            assert batch["own"].shape == (loader.slots, 1) and loader.slots > 1
            real = loader.is_real
            found.setdefault(tracker.current.draw, []).extend(batch["own"][real, 0].tolist())
            if real.any():
                assert set(batch["own"][~real, 0].tolist()) <= set(batch["own"][real, 0].tolist())
            if loader.is_last:
                tracker.released()
        draws = range(9 * epoch, 9 * epoch + 9)
        assert list(found) == list(draws)
        for draw in draws:
            assert sorted(found[draw]) == loader._draws.draw(draw)


# Where a sample sits


def test_each_sample_is_as_likely_in_every_slot_whoever_else_is_drawn():
    """Chi-square of three samples over the slots; nine tests at 1e-4 each, fixed key."""
    from scipy.stats import chisquare

    rows, _ = rows_of(100, 0.16)
    for drawn in ([3, 20, 21], [3, 20, 21, 98], [3, 9, 20, 21, 98]):
        places, pairs = np.zeros((3, 8), int), set()
        for draw in range(2000):
            table = rows.placed(draw, drawn).ravel()
            where = {int(index): place for place, index in enumerate(table) if index >= 0}
            assert sorted(where) == drawn and len(table) == (4 if len(drawn) <= 4 else 8)
            pairs.add((where[3], where[20]))
            for sample, index in enumerate((3, 20, 21)):
                places[sample, where[index]] += 1
        used = places[:, : len(table)]
        assert all(chisquare(counts).pvalue > 1e-4 for counts in used)
        assert len(pairs) == len(table) * (len(table) - 1)


def test_slots_are_drawn_under_a_key_of_their_own_and_are_repeated_by_a_resumed_run():
    rows, _ = rows_of(100, 0.12, draws=10)
    parts = list(rows)
    again, resumed = rows_of(100, 0.12, draws=10)
    resumed.resume(6)
    first = next(i for i, mark in enumerate(rows.marks) if mark.draw == 6)
    assert list(again)[: len(parts) - first] == parts[first:]
    marks = list(rows.marks)[first:]
    assert all(torch.equal(a.real, b.real) for a, b in zip(marks, again.marks, strict=True))
    other, _ = rows_of(100, 0.12, draws=10, key=bytes(32))
    placed = [(rows.placed(d, [1]).tolist(), other.placed(d, [1]).tolist()) for d in range(40)]
    assert sum(a == b for a, b in placed) < 35
    # Of the words of the draw itself, the least would name the slots too.
    drawn_alike = [
        int(uniform_words(KEY, index=d, count=rows.slots).argmin())
        == int((rows.placed(d, [7])[0] >= 0).argmax())
        for d in range(40)
    ]
    assert sum(drawn_alike) < 35


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_take_as_many_batches_and_together_the_draw(ranks):
    samplers = [rows_of(90, 0.2, rank_part=(rank, ranks))[0] for rank in range(ranks)]
    lists = [list(sampler) for sampler in samplers]
    assert len({len(parts) for parts in lists}) == 1
    found = {}
    for sampler, parts in zip(samplers, lists, strict=True):
        for mark, part in zip(sampler.marks, parts, strict=True):
            own = [i for i, real in zip(part, mark.real.tolist(), strict=True) if real]
            found.setdefault(mark.draw, []).extend(own)
    source = rows_of(90, 0.2)[1]
    assert all(sorted(found[draw]) == source.draw(draw) for draw in range(50))
    marks = [[(m.draw, m.last) for m in sampler.marks] for sampler in samplers]
    assert all(m == marks[0] for m in marks)


def test_another_loader_over_the_batch_sampler_never_gets_padding_rows():
    data = TensorDataset(torch.arange(60)[:, None])
    plain = DataLoader(data, batch_size=7)
    loader = PrivateDataLoader(plain, SamplingPlan.of(plain, sampling="poisson"), key=KEY)
    foreign = DataLoader(data, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn)
    for draw, (x,) in enumerate(foreign):
        assert x.flatten().tolist() == loader._draws.draw(draw)


# Padding rows count for nothing


@every_kind
def test_clipped_sums_are_those_of_the_real_rows_alone(kind, private, sums, distance):
    torch.manual_seed(0)
    model, tokens = Mixed(), torch.randint(11, (7, 5))
    real = torch.tensor([False, True, False, True, True, False, True])
    tokens[~real] = tokens[4].clone()
    found = []
    for batch, mask in ((tokens, real), (tokens[real], torch.ones(4, dtype=torch.bool))):
        engine, own, *_ = private(
            copy.deepcopy(model), tokens, max_grad_norm=0.3, memory_budget=10**9, **kind
        )
        begin(engine, mask)
        backward(engine, kind, losses_of(own, batch))
        found.append(sums(engine, own))
        report = engine.diagnostics()
        assert engine._run.backward.statistics.seen_samples % 4 == 0
        assert report["nonfinite_samples"] == 0 and 0 < report["clip_fraction"] <= 1
        assert report["per_sample_norms"] is None or len(report["per_sample_norms"]) == 4
    assert distance(found[0], found[1]) <= 2e-6


@every_kind
@pytest.mark.parametrize("where", ["loss", "loss of tokens", "input"])
def test_nothing_changes_whatever_stands_in_a_padding_row(where, kind, private, sums):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2))
    x, real = torch.randn(4, 6, 3), torch.tensor([True, False, True, False])
    if "tokens" in where:
        model, x = Mixed(), torch.randint(11, (4, 6))
    found = []
    for bad in (None, math.nan, math.inf, 1e30):
        engine, own, *_ = private(copy.deepcopy(model), x, max_grad_norm=0.1, **kind)
        begin(engine, real)
        inputs, scale = x.clone(), torch.ones(4)
        if bad is not None and where == "input":
            inputs[1], inputs[3, 2, 1] = bad, bad
        elif bad is not None:
            scale[~real] = bad
        backward(engine, kind, own(inputs).square().mean((1, 2)) * scale)
        assert engine.diagnostics()["nonfinite_samples"] == 0
        found.append(sums(engine, own))
    for other in found[1:]:
        assert all(torch.equal(other[name], found[0][name]) for name in other)
    assert all(bool(total.any()) for total in found[0].values())


class Reshaping(nn.Module):
    """Cannot take a batch of no samples, as many models of Hugging Face."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.second(self.first(x).reshape(len(x), -1)) if len(x) else 1 / 0


def test_an_empty_draw_is_a_batch_that_every_model_takes_and_is_noise_alone(private):
    options = {"noise_multiplier": 1.0, "lr": 0.0, "verify_first_batch": False}
    made = private(Reshaping(), torch.randn(40, 3), batch_size=1, **options)
    (engine, model, optimizer, loader), empty = made, 0
    for (x,) in loader:
        engine.backward(100 * model(x).square().mean(1))
        mark = engine._step.tracker.current
        if not loader.is_real.any():
            empty += 1
            for number, parameter in enumerate(model.parameters()):
                noise = torch.zeros_like(parameter)
                address = {"step": optimizer.releases - 1, "parameter_id": number}
                dpflash.kernels.gaussian_noise_(
                    noise, std=1.0, grid=2.0**-30, key=engine._keys.noise, **address
                )
                assert mark.last and torch.equal(parameter.grad, noise)
        optimizer.step()
        optimizer.zero_grad()
    assert empty > 8 and optimizer.releases == 40


def test_a_batch_that_comes_back_after_its_release_counts_no_sample_twice(private):
    """Each sample is clipped to exactly C = 1, so the sum counts samples."""
    engine, model, optimizer, loader = private(
        nn.Linear(1, 1, bias=False), torch.full((60, 1), 7.0), batch_size=7, lr=0.0
    )
    for (x,) in loader:
        if not (loader.is_last and 0 < loader.is_real.sum() < len(x)):
            optimizer.zero_grad()
            engine.backward(model(x).squeeze(1))
            optimizer.step()
            continue
        engine.backward(model(x).squeeze(1))
        optimizer.step()
        optimizer.zero_grad()
        with pytest.warns(dpflash.PrivateWarning, match="as many rows as the loader's last one"):
            engine.backward(model(x).squeeze(1))
        total = float(engine._step.sums[model.weight])
        assert total == pytest.approx(int(loader.is_real.sum()), abs=1e-4)
        break
    else:
        pytest.fail("no draw had padding rows")


def test_losses_must_be_of_all_rows_in_the_loaders_order(private):
    made = private(nn.Linear(3, 2), torch.randn(60, 3), batch_size=7)
    engine, model, optimizer, loader = made
    for (x,) in loader:
        real = loader.is_real
        if 0 < real.sum() < len(real):
            with pytest.raises(dpflash.PrivateRefusal, match="padding rows included"):
                engine.backward(model(x[real]).square().mean(1))
            break
        engine.backward(model(x).square().mean(1))
        optimizer.step()
        optimizer.zero_grad()


def by_first(x):
    return x[x.flatten(1)[:, 0].argsort()]


MOVED = {
    "sorted": by_first,
    "flipped": lambda x: x.flip(0),
    "shuffled": lambda x: x[torch.randperm(len(x))],
    "sorted and changed": lambda x: 2 * by_first(x)[:, :12] + 1,
    "shuffled, and noise": lambda x: x[torch.randperm(len(x))] + torch.randn(x.shape),
    "views": lambda x: x[torch.arange(len(x)) % (len(x) // 2)],
    "one for all": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("moved", MOVED)
@pytest.mark.parametrize("tokens", [False, True])
def test_rows_in_another_order_than_the_loaders_are_refused(moved, tokens, private):
    torch.manual_seed(0)
    data = torch.randint(1, 11, (60, 16)) if tokens else torch.randn(60, 16)
    width = 12 if "changed" in moved else 16
    made = private(nn.Linear(width, 2), data, batch_size=30)
    engine, model, optimizer, loader = made
    with pytest.raises(
        dpflash.PrivateRefusal, match=r"rows (in another order|that the loop sorts)"
    ):
        for (x,) in loader:
            engine.backward(model(MOVED[moved](x).float()).square().mean(1))
            optimizer.step()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", ["floats", "tokens"])
def test_batches_that_are_not_the_one_at_hand_are_refused(kind, late, private):
    torch.manual_seed(0)
    floats = kind == "floats"
    data = torch.randn(60, 1, 9) if floats else torch.randint(11, (60, 9))
    engine, model, optimizer, loader = private(
        nn.Linear(9, 2) if floats else Mixed(), data, batch_size=12
    )
    for (x,) in loader if late else ():
        engine.backward(model(x).flatten(1).square().mean(1))
        optimizer.step()
        optimizer.zero_grad()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        batches = list(loader)
    for (x,) in batches:
        with pytest.raises(RuntimeError, match="gave before the current one"):
            model(x)
        break
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("copies", [False, True])
def test_a_batch_that_is_kept_from_the_first_trial_is_refused(copies, private):
    torch.manual_seed(0)
    slots = {"physical_batch_size": 30, "max_batch_size": 30}
    engine, model, optimizer, loader = private(
        nn.Linear(9, 2), torch.randn(60, 9), batch_size=12, **slots
    )
    (kept,) = next(iter(loader))
    kept = kept.clone() if copies else kept
    with pytest.raises(dpflash.PrivateRefusal, match="gave before the current one"):
        for _ in loader:
            engine.backward(model(kept).square().mean(1))
            optimizer.step()
    assert not loader.releases


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(9, 2)

    def forward(self, x, mask):
        return self.linear(x * mask)


def test_masks_of_other_batches_are_not_refused(private):
    torch.manual_seed(0)
    mask = (torch.arange(9) < torch.arange(60).remainder(3)[:, None] + 7).float()
    engine, model, optimizer, loader = private(
        *(Gated(), torch.randn(60, 9), mask),
        **{"batch_size": 12, "physical_batch_size": 2, "verify_first_batch": False},
    )
    for number, (x, mask) in enumerate(loader):
        # One of both is the loader's, the other one may be as in another batch.
        shorter = mask * (torch.arange(9) < 8)
        inputs = (2 * x, mask) if number % 2 else (x, shorter)
        engine.backward(model(*inputs).square().mean(1))
        optimizer.step()
        optimizer.zero_grad()


class Entries(Dataset):
    """60 rows of which the first are equal, changed by `change` as they are read."""

    def __init__(self, equal, change=None):
        self.x = torch.randn(60, 9, generator=torch.Generator().manual_seed(1))
        self.x[:equal] = torch.tensor([1.0] + [0.0] * 8)
        self.change = change

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return self.x[index] if self.change is None else self.change(self.x[index])


class Sorted(Entries):
    def __getitems__(self, indices):
        return [self.x[index] for index in sorted(indices)]


def train(dataset, collate, **options):
    model, engine = nn.Linear(9, 2), dpflash.PrivacyEngine(seed=0)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(dataset, batch_size=30, collate_fn=collate),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **options,
    )
    for _ in range(3):
        for x in loader:
            engine.backward(model(x).square().mean(1))
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("equal", [0, 20])
@pytest.mark.parametrize("where", ["collate_fn", "own generator", "sorted", "getitems"])
def test_a_sample_counts_once_whatever_is_made_of_the_order(where, equal):
    """Where it draws random numbers its order cannot be tried beforehand."""
    own = torch.Generator().manual_seed(0)
    order = {
        "collate_fn": lambda x: torch.randperm(len(x)),
        "own generator": lambda x: torch.randperm(len(x), generator=own),
        # and draws
        "sorted": lambda x: x[:, 1].argsort() + 0 * torch.randint(9, (1,)),
    }.get(where, lambda x: torch.arange(len(x)))
    dataset = (Sorted if where == "getitems" else Entries)(equal)

    def collate(batch):
        x = torch.stack(batch)
        return x[order(x)]

    torch.manual_seed(0)
    with pytest.raises(dpflash.PrivateRefusal, match="puts? the rows"):
        train(dataset, collate, verify_first_batch=False)


def emptied(x):
    empty = torch.tensor([1.0] + [0.0] * 8)
    return torch.where(torch.rand(*x.shape[:-1], 1) < 0.1, empty, x)


@pytest.mark.parametrize("equal", [4, 20])
@pytest.mark.parametrize(
    "change",
    [lambda x: x * torch.rand(*x.shape[:-1], 1), lambda x: F.dropout(x, 0.2), emptied],
    ids=["gain", "dropout", "emptied"],
)
@pytest.mark.parametrize("where", ["getitem", "collate_fn"])
def test_equal_entries_that_are_changed_at_random_are_in_order(where, change, equal):
    """Whether training goes on would depend on how many are equal."""
    torch.manual_seed(0)
    dataset = Entries(equal, change if where == "getitem" else None)

    def collate(batch):
        return change(torch.stack(batch)) if where == "collate_fn" else torch.stack(batch)

    train(dataset, collate)


# A sample's bits


def lower_precision(dtype):
    return torch.autocast("cpu", dtype=dtype, enabled=dtype is not None)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
def test_a_samples_gradient_has_the_same_bits_in_every_draw(dtype, private):
    """Without public rows a batch of 1, 2, 3, ... rows takes another kernel each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU("tanh"), nn.LayerNorm(64), nn.Linear(64, 16))
    data = torch.randn(20, 64)
    options = {"grad_sample_mode": "instantiate", "verify_first_batch": False}
    engine, model, optimizer, loader = private(model, data, batch_size=5, lr=0.0, **options)
    norms, sizes = {}, set()
    for _ in range(6):
        for (x,) in loader:
            with lower_precision(dtype):
                losses = model(x).float().square().mean(1)
            engine.backward(losses)
            found = engine.diagnostics()["per_sample_norms"]
            for row, norm in zip(x[loader.is_real], found.tolist(), strict=True):
                norms.setdefault(float(row[0]), set()).add(norm)
            sizes.add(len(found))
            optimizer.step()
            optimizer.zero_grad()
    assert len(norms) == 20 and len(sizes) > 1
    assert all(len(of_sample) == 1 for of_sample in norms.values())


class OneLayer(nn.Module):
    """A linear layer, and a layer of another kind behind it."""

    def __init__(self, kind, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.table = nn.Embedding(9, width)
        self.attention = dpflash.nn.MultiheadAttention(width, 1)
        self.norm = nn.LayerNorm(width)
        self.kind = kind

    def forward(self, x):
        if self.kind in ("embedding", "attention"):
            x = x if x.ndim == 3 else x[:, None]
        hidden = self.linear(x)
        if self.kind == "embedding":
            return self.table((x[..., 0] > 0).long()) * hidden
        if self.kind == "attention":
            return self.attention(hidden, hidden, hidden, need_weights=False)[0]
        if self.kind == "norm":
            return self.norm(hidden)
        return {
            "linear": lambda h: h,
            "gelu": lambda h: F.gelu(h, approximate="tanh"),
            "silu": F.silu,
            "sigmoid": torch.sigmoid,
        }[self.kind](hidden)


LAYERS = ["linear", "gelu", "silu", "sigmoid", "norm", "embedding", "attention"]


def row_report(kind, width, tokens, dtype, size=4):
    """What `engine.check` says of a sample's row in the batch."""
    torch.manual_seed(0)
    model = OneLayer(kind, width)
    x = torch.randn(size, tokens, width) if tokens > 1 else torch.randn(size, width)

    def losses(model, batch):
        with lower_precision(dtype):
            return model(batch[0]).float().square().flatten(1).mean(1)

    findings = Findings()
    check_rows(PrivateCopy(Subject(model, losses, (x,), size, is_exact=True)), findings)
    (found,) = findings.checked
    return found


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_one_sample_has_the_same_bits_in_every_row_or_the_operator_is_named(kind, dtype):
    """With whole vectors in every row there is no scalar end; else its layer is told."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for tokens in (1, 5):
            assert "the same bits in all" in row_report(kind, 64, tokens, dtype)
            odd = row_report(kind, 7, tokens, dtype)
            assert "the same bits in all" in odd or "first in '" in odd
    finally:
        torch.set_num_threads(threads)


def test_the_check_of_rows_finds_a_layer_that_rounds_by_the_row(private):
    class ByRow(nn.Module):
        def forward(self, x):
            return x * (1 + 1e-7 * torch.arange(len(x))[:, None])

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), ByRow(), nn.Linear(16, 2))
    report = dpflash.PrivacyEngine().check(
        model, (torch.randn(4, 16),), lambda model, batch: model(batch[0]).square().mean(1)
    )
    assert any("other bits in 3 of 4, first in '1' (ByRow)" in c for c in report.checked)


@pytest.mark.parametrize("kind", KINDS[:4], ids=lambda kind: "-".join(kind.values()))
def test_a_batch_with_one_sample_more_is_the_same_batch_with_one_row_filled(kind, private, sums):
    """It moves the sum by at most C, in bfloat16 autocast too, with dropout under any seed."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 32), nn.GELU("tanh"), nn.Dropout(0.5), nn.Linear(32, 16), nn.Linear(16, 3)
    )
    data, rows = torch.randn(24, 16), torch.arange(24) % 3 > 0
    found = []
    for mask in (rows, rows.clone().index_fill_(0, torch.tensor([4]), False)):
        engine, own, *_ = private(copy.deepcopy(model), data, max_grad_norm=0.1, **kind)
        x = data.clone()
        x[~mask] = data[5]  # padding repeats a sample
        begin(engine, mask)
        torch.manual_seed(int(mask.sum()))
        with lower_precision(torch.bfloat16):
            losses = own(x).float().square().mean(1)
        engine.backward(100 * losses)
        found.append(torch.cat([s.double().flatten() for s in sums(engine, own).values()]))
    assert 0.01 < float((found[0] - found[1]).norm()) <= 0.1 * (1 + 1e-5)
