"""The CPU kernels against the reference implementation and loops in float64; their memory."""

import concurrent.futures
import itertools
import math
import multiprocessing
import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dpflash.attn.functional import attention
from dpflash.kernels import attention_cpu, attention_reference
from dpflash.kernels.attention_reference import AttentionInputs
from dpflash.kernels.tile_graph import UNBOUNDED, Side, TileGraph

ALL = (-UNBOUNDED, UNBOUNDED)
CAUSAL = (0, UNBOUNDED)
FIELDS = attention_reference.AttentionGrads._fields


def make_side(variants, runtime=False):
    """Variants are lists of groups (start, stride, length, runs), a run is
    (start, stride, length, (lo, hi), multiplicity)."""
    groups, runs, logs, borders = [], [], [], [0]
    for variant in variants:
        for start, stride, length, of_group in variant:
            groups.append((start, stride, length, len(runs), len(runs) + len(of_group)))
            runs += [(*run[:3], *run[3]) for run in of_group]
            logs += [math.log(run[4]) for run in of_group]
        borders.append(len(groups))
    return Side(
        torch.tensor(groups, dtype=torch.int32).reshape(-1, 5),
        torch.tensor(runs, dtype=torch.int32).reshape(-1, 5),
        torch.tensor(logs, dtype=torch.float32 if runtime else torch.float64),
        torch.tensor(borders, dtype=torch.int32),
        max(map(len, variants)),
        max((group[2] for variant in variants for group in variant), default=0),
        runtime,
    )


def make_graph(queries, keys, variants, head_variants, runtime=False):
    heads = torch.tensor(head_variants, dtype=torch.int32)
    nothing = make_side([[]])  # the CPU kernels do not look at that side
    rows = make_side(variants, runtime)
    return TileGraph(queries, keys, rows, nothing, heads, torch.zeros_like(heads), False)


def one_run(queries, keys, band, start=0):
    return make_graph(
        queries, keys, [[(0, 1, queries, [(start, 1, keys - start, band, 1)])]], [0] * 4
    )


def window_with_globals(tokens, left, right, num_globals):
    everything = [(0, 1, tokens, ALL, 1)]
    local = [(0, 1, num_globals, ALL, 1)]
    local.append((num_globals, 1, tokens - num_globals, (-right, left), 1))
    groups = [(0, 1, num_globals, everything), (num_globals, 1, tokens - num_globals, local)]
    return make_graph(tokens, tokens, [groups], [0] * 4)


def documents(borders, keys=None):
    groups = [(a, 1, b - a, [(a, 1, b - a, CAUSAL, 1)]) for a, b in itertools.pairwise(borders)]
    return make_graph(borders[-1], borders[-1], [groups], [0] * 4)


def dilated(tokens):
    """Rows by residue modulo 4 and 6; columns of other strides, phases and multiplicities."""
    variants = []
    for modulus in (4, 6):
        groups = []
        for residue in range(modulus):
            runs = []
            for phase, stride, multiplicity in ((0, 2, 2), (1, 4, 1), (3, 4, 3)):
                middle = tokens // (2 * stride)
                rest = len(range(phase, tokens, stride)) - middle
                band = (3, UNBOUNDED) if phase == 3 else CAUSAL
                runs.append((phase, stride, middle, ALL if residue == 1 else band, multiplicity))
                runs.append((phase + stride * middle, stride, rest, band, multiplicity))
            groups.append((residue, modulus, len(range(residue, tokens, modulus)), runs))
        variants.append(groups)
    return make_graph(tokens, tokens, variants, [0, 1, 1, 0])


def blocks(tokens, size, heads_alike=False):
    generator = random.Random(0)
    variants = []
    for _ in range(1 if heads_alike else 3):
        groups = []
        for start in range(0, tokens, size):
            picked = generator.sample(range(0, tokens, size), generator.randint(0, 5))
            runs = [(c, 1, min(size, tokens - c), ALL, generator.randint(1, 3)) for c in picked]
            groups.append((start, 1, min(size, tokens - start), runs))
        variants.append(groups)
    return make_graph(tokens, tokens, variants, [0] * 4 if heads_alike else [2, 0, 1, 2])


def with_blind_rows():
    runs = [(20, 1, 30, CAUSAL, 1), (60, 1, 0, ALL, 1), (70, 3, 5, (8, 12), 2)]
    groups = [(5, 1, 30, runs), (40, 1, 0, runs[:1]), (50, 2, 25, []), (51, 2, 20, runs[2:])]
    return make_graph(100, 90, [groups, []], [0, 1, 0, 0])


def at_run_time(samples, tokens, size):
    """Other blocks for each sample and head, with real multiplicities and unused table rows."""
    generator = random.Random(1)
    variants = []
    for _ in range(samples * 4):
        groups = []
        for start in range(0, tokens, size):
            picked = sorted(generator.sample(range(0, tokens, size), 3))
            runs = [(c, 1, size, CAUSAL, generator.uniform(0.1, 3)) for c in picked]
            runs.append((0, 1, 0, ALL, 1))
            groups.append((start, 1, size if start else 0, runs))
        variants.append(groups)
    numbers = list(range(samples * 4))
    random.Random(2).shuffle(numbers)
    heads = [numbers[i : i + 4] for i in range(0, len(numbers), 4)]
    return make_graph(tokens, tokens, variants, heads, runtime=True)


GRAPHS = {
    "dense": lambda: one_run(67, 83, ALL),
    "causal": lambda: one_run(130, 130, CAUSAL),
    "causal-more-keys": lambda: one_run(40, 97, CAUSAL),
    "causal-shifted": lambda: one_run(90, 70, (-25, UNBOUNDED)),
    "causal-late-run": lambda: one_run(90, 70, (4, UNBOUNDED), start=13),
    "anticausal": lambda: one_run(90, 90, (-UNBOUNDED, 0)),
    "window": lambda: window_with_globals(300, 24, 24, 5),
    "wide-window": lambda: window_with_globals(1000, 800, 0, 3),
    "documents": lambda: documents([0, 17, 17, 80, 81, 200]),
    "dilated": lambda: dilated(210),
    "blocks": lambda: blocks(150, 16),
    "blocks-heads-alike": lambda: blocks(130, 32, heads_alike=True),
    "blind-rows": with_blind_rows,
    "run-time": lambda: at_run_time(2, 96, 16),
    "nothing": lambda: make_graph(9, 9, [[]], [0] * 4),
}
# Of so many queries of a key head that its gradients are summed in parts.
LONG_GRAPHS = {
    "causal": lambda: one_run(2500, 2500, CAUSAL),
    "wide-window": lambda: window_with_globals(2500, 400, 0, 3),
    "dilated": lambda: dilated(2700),
    "blocks": lambda: blocks(2400, 160),
    "run-time": lambda: at_run_time(2, 2400, 160),
    "far-keys": lambda: one_run(2500, 4000, (-4000, -1900)),
}
OPTIONS = {
    "plain": (),
    "all-flash": ("dlse", "sinks", "key_range"),
    "all": ("dlse", "sinks", "slopes", "key_range", "run_grads"),
}


def make_inputs(graph, *, groups=2, dim=17, samples=2, options=(), seed=0):
    torch.manual_seed(seed)
    heads = graph.row_variants.shape[-1]
    queries = (samples, heads, graph.num_queries, dim)
    keys = (samples, groups, graph.num_keys, dim)
    q, do = (torch.randn(queries, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(keys, dtype=torch.float64) for _ in range(2))
    dlse = torch.randn(queries[:3], dtype=torch.float64) if "dlse" in options else None
    extra = {}
    if "sinks" in options:
        extra["sinks"] = torch.randn(samples, heads, dtype=torch.float64)
    if "slopes" in options:
        slopes = torch.rand(samples, heads, dtype=torch.float64) / 4 - 0.05
        extra["slopes"] = slopes * (torch.arange(heads) != 1)
    if "key_range" in options:
        begin = torch.arange(samples) * graph.num_keys // 7
        end = begin + torch.arange(samples) + graph.num_keys // 2
        extra["key_range"] = torch.stack((begin, end.clamp(max=graph.num_keys)), 1).int()
    return (q, k, v, do), dlse, extra


def run(module, graph, tensors, dlse, extra, run_grads=False):
    """All outputs by name."""
    q, k, v, do = tensors
    scale = q.shape[3] ** -0.5
    inputs = AttentionInputs(q, k, v, graph, scale, **extra)
    o, lse = module.attention_forward(inputs)
    grads = module.attention_backward(
        do, dlse, o, lse, inputs, token_sums=True, run_grads=run_grads
    )
    named = {"o": o, "lse": lse, **grads._asdict()}
    return {name: x for name, x in named.items() if x is not None}


def slope_terms(graph, tensors, dlse, extra, expected):
    """sum_j |ds_ij| |i - j|: what cancels in each query's term of a slope's gradient."""
    q, k, v, do = tensors
    reference = attention_reference
    inputs = AttentionInputs(q, k, v, graph, q.shape[3] ** -0.5, **extra)
    scores = reference._scores(inputs, q.dtype)[0]
    p = (scores - reference._finite(expected["lse"]).unsqueeze(3)).exp()
    values = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    delta = (do * expected["o"]).sum(3) - (0 if dlse is None else dlse)
    ds = p * (do @ values.transpose(2, 3) - delta.unsqueeze(3))
    return (ds.abs() * reference._distances(graph, q.dtype, q.device)).sum(3)


def assert_close(outputs, expected, tolerance, dslopes_terms=None):
    assert outputs.keys() == expected.keys()
    for name, x in outputs.items():
        reference = expected[name].double()
        assert x.shape == reference.shape, name
        x = x.double()
        blind = reference == -math.inf
        assert torch.equal(x == -math.inf, blind), name
        if blind.all():
            continue
        error = (x - reference)[~blind].abs().max()
        limit = max(tolerance, 2e-6) if name == "dlog_multiplicity" else tolerance
        # Sums over tokens may cancel.
        terms = expected[f"d{name[0]}"].abs().sum(2) if name.endswith("_sum") else reference
        if name == "dslopes" and dslopes_terms is not None:
            terms = dslopes_terms
        size = terms[~blind].abs().max()
        if name == "dlog_multiplicity":
            size = size.clamp(min=10)  # a sum over pairs, too
        assert error <= limit * size, f"{name}: error {error:.2e} of {size:.2e}"


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", GRAPHS)
def test_matches_the_reference(name, options):
    graph = GRAPHS[name]()
    inputs = make_inputs(graph, options=OPTIONS[options])
    grads = {"run_grads": "run_grads" in OPTIONS[options]}
    expected = run(attention_reference, graph, *inputs, **grads)
    assert_close(run(attention_cpu, graph, *inputs, **grads), expected, 1e-11)
    tensors, dlse, extra = inputs
    single = {n: x.float() if x.is_floating_point() else x for n, x in extra.items()}
    narrow = [x.float() for x in tensors], None if dlse is None else dlse.float(), single
    terms = slope_terms(graph, *inputs, expected) if "slopes" in extra else None
    assert_close(run(attention_cpu, graph, *narrow, **grads), expected, 2e-6, terms)


@pytest.mark.parametrize("dim", [1, 8, 64, 256])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("name", ["causal", "dilated"])
def test_matches_the_reference_at_any_head_dim_and_grouping(name, groups, dim):
    graph = GRAPHS[name]()
    inputs = make_inputs(graph, groups=groups, dim=dim, options=("dlse",))
    expected = run(attention_reference, graph, *inputs)
    assert_close(run(attention_cpu, graph, *inputs), expected, 1e-11)


def test_matches_loops_over_pairs():
    """The graph's meaning by hand, gradients by autograd, nothing shared with the reference."""
    tokens, left, num_globals = 33, 6, 2
    graph = window_with_globals(tokens, left, 0, num_globals)
    (q, k, v, do), dlse, extra = make_inputs(graph, dim=3, samples=1, options=("dlse", "slopes"))
    outputs = run(attention_cpu, graph, (q, k, v, do), dlse, extra)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, extra["slopes"])]
    q, k, v, slopes = leaves
    loss = 0.0
    for h, i in itertools.product(range(4), range(tokens)):
        seen = [
            j for j in range(tokens) if i < num_globals or j < num_globals or 0 <= i - j <= left
        ]
        scores = [q[0, h, i] @ k[0, h // 2, j] / 3**0.5 - slopes[0, h] * abs(i - j) for j in seen]
        weights = torch.stack(scores).exp()
        o = sum(w * v[0, h // 2, j] for w, j in zip(weights, seen, strict=True)) / weights.sum()
        torch.testing.assert_close(outputs["o"][0, h, i], o)
        torch.testing.assert_close(outputs["lse"][0, h, i], weights.sum().log())
        loss = loss + (o * do[0, h, i]).sum() + weights.sum().log() * dlse[0, h, i]
    grads = torch.autograd.grad(loss, leaves)
    outputs["dslopes"] = outputs["dslopes"].sum(2)
    for name, grad in zip(("dq", "dk", "dv", "dslopes"), grads, strict=True):
        torch.testing.assert_close(outputs[name], grad)


class Attention(torch.autograd.Function):
    """The executor under autograd, for finite differences."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, slopes, log_multiplicity, graph):
        side = Side(**{**fields_of(graph.rows), "log_multiplicity": log_multiplicity})
        graph = TileGraph(**{**fields_of(graph), "rows": side, "plans": {}})
        inputs = AttentionInputs(q, k, v, graph, 0.5, sinks, slopes)
        o, lse = attention_cpu.attention_forward(inputs)
        ctx.saved = o, lse, inputs
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        grads = attention_cpu.attention_backward(do, dlse, *ctx.saved, run_grads=True)
        sums = grads.dsinks.sum(2), grads.dslopes.sum(2), grads.dlog_multiplicity.double()
        return grads.dq, grads.dk, grads.dv, *sums, None


def fields_of(x):
    return {name: getattr(x, name) for name in type(x).__dataclass_fields__}


@pytest.mark.filterwarnings("ignore:Input #5")
def test_gradients_are_finite_differences():
    runs = [(0, 2, 3, CAUSAL, 2), (1, 2, 2, ALL, 1)]
    groups = [(0, 2, 3, runs), (1, 2, 2, [(0, 3, 2, CAUSAL, 1)])]
    graph = make_graph(5, 5, [groups, groups[:1]], [0, 1])
    (q, k, v, _), _, extra = make_inputs(
        graph, groups=1, dim=2, samples=1, options=("sinks", "slopes")
    )
    inputs = [q, k, v, *extra.values(), graph.rows.log_multiplicity.clone()]
    leaves = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(Attention.apply, (*leaves, graph), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["causal", "window", "dilated"])
def test_half_precision_is_at_least_as_exact_as_plain_torch(name, dtype):
    graph = GRAPHS[name]()
    (q, k, v, do), _, _ = make_inputs(graph, dim=32)
    narrow = [x.to(dtype) for x in (q, k, v, do)]
    outputs = run(attention_cpu, graph, narrow, None, {})
    expected = run(attention_reference, graph, [x.double() for x in narrow], None, {})
    leaves = [x.clone().requires_grad_() for x in narrow[:3]]
    wide = [leaves[0], *(x.repeat_interleave(2, 1) for x in leaves[1:])]
    scores = (wide[0] * 32**-0.5) @ wide[1].transpose(2, 3)
    scores = scores + graph.multiplicity().log().to(dtype)
    o = scores.softmax(3) @ wide[2]
    plain = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, leaves, narrow[3]), strict=True))
    for key, theirs in {"o": o.detach(), **plain}.items():
        assert outputs[key].dtype == dtype
        error = (outputs[key].double() - expected[key]).abs().max()
        assert error <= 2 * (theirs.double() - expected[key]).abs().max() + 1e-5, key
    assert outputs["lse"].dtype == outputs["q_sum"].dtype == torch.float32
    # The sums are of the gradients before rounding.
    q, k, v, do = narrow
    reference = attention_reference.attention_backward(
        do,
        None,
        outputs["o"],
        outputs["lse"],
        AttentionInputs(q, k, v, graph, 32**-0.5),
        token_sums=True,
    )
    for key in ("q_sum", "k_sum", "v_sum"):
        error = (outputs[key] - getattr(reference, key)).abs().max()
        assert error <= 2e-6 * outputs[f"d{key[0]}"].float().abs().sum(2).max(), key


@pytest.mark.parametrize("name", ["causal", "documents", "blocks"])
def test_strides_do_not_matter(name):
    graph = GRAPHS[name]()
    (q, k, v, do), dlse, extra = make_inputs(graph, options=("dlse", "sinks"))
    do = do[:, :, :, :1].expand(-1, -1, -1, 17)
    plain = [x.contiguous() for x in (q, k, v, do)]
    expected = run(attention_cpu, graph, plain, dlse, extra)
    by_token = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    by_dim = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    for tensors in ((*by_token, do), (*by_dim, do)):
        assert_close(run(attention_cpu, graph, tensors, dlse, extra), expected, 1e-13)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)], ids=str)
def test_empty_inputs_give_empty_outputs(shape, options):
    samples, queries, keys = shape
    graph = one_run(queries, keys, ALL)
    inputs = make_inputs(graph, samples=samples, options=OPTIONS[options])
    grads = {"run_grads": "run_grads" in OPTIONS[options]}
    outputs = run(attention_cpu, graph, *inputs, **grads)
    sinks = inputs[2].get("sinks")
    lse = torch.full((samples, 4, queries), -math.inf, dtype=torch.float64)
    if sinks is not None:
        lse = sinks.unsqueeze(2).expand_as(lse)
    assert torch.equal(outputs["lse"], lse) or keys > 0
    assert all((outputs[name] == 0).all() for name in ("o", "dq", "dk", "dv") if keys == 0)
    assert outputs["dk"].shape == inputs[0][1].shape


def test_a_query_without_keys_has_no_output_and_no_gradient():
    graph = with_blind_rows()
    tensors, dlse, extra = make_inputs(graph, options=("dlse",))
    outputs = run(attention_cpu, graph, tensors, dlse, extra)
    blind = (graph.multiplicity() == 0).all(2).expand(2, 4, -1)
    assert blind.any(2).all() and not blind.all()
    assert torch.equal(outputs["lse"] == -math.inf, blind)
    assert (outputs["o"][blind] == 0).all() and (outputs["dq"][blind] == 0).all()
    assert all(x.isfinite().all() for name, x in outputs.items() if name != "lse")


def test_samples_with_the_same_key_range_and_without_keys():
    graph = GRAPHS["window"]()
    tensors, dlse, _ = make_inputs(graph, samples=4)
    extra = {"key_range": torch.tensor([[7, 180], [0, 300], [7, 180], [40, 40]]).int()}
    expected = run(attention_reference, graph, tensors, dlse, extra)
    assert_close(run(attention_cpu, graph, tensors, dlse, extra), expected, 1e-11)
    extra = {"key_range": torch.tensor([[7, 180]] * 4).int()}
    expected = run(attention_reference, graph, tensors, dlse, extra)
    assert_close(run(attention_cpu, graph, tensors, dlse, extra), expected, 1e-11)


@pytest.mark.parametrize("options", OPTIONS)
def test_repeated_calls_give_the_same_bits(options):
    graph = GRAPHS["dilated"]()
    tensors, dlse, extra = make_inputs(graph, options=OPTIONS[options])
    tensors = [x.float() for x in tensors]
    grads = {"run_grads": "run_grads" in OPTIONS[options]}
    first = run(attention_cpu, graph, tensors, dlse, extra, **grads)
    for _ in range(3):
        again = run(attention_cpu, graph, tensors, dlse, extra, **grads)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.cases(0)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", LONG_GRAPHS)
def test_threads_that_share_a_key_head_add_up(name, options, monkeypatch):
    monkeypatch.setattr(attention_cpu, "_WORK_OF_A_THREAD", 1)
    graph = LONG_GRAPHS[name]()
    samples = 2 if name == "run-time" else 1
    inputs = make_inputs(graph, groups=1, dim=3, samples=samples, options=OPTIONS[options])
    grads = {"run_grads": "run_grads" in OPTIONS[options]}
    expected = run(attention_reference, graph, *inputs, **grads)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        outputs = run(attention_cpu, graph, *inputs, **grads)
    finally:
        torch.set_num_threads(before)
    assert_close(outputs, expected, 1e-11)


def random_side(generator, queries, keys):
    """Groups by residue, runs of any stride, phase, band and multiplicity."""
    modulus = generator.choice([1, 2, 3, 5])
    groups = []
    for residue in range(min(modulus, queries)):
        length = len(range(residue, queries, modulus))
        cut = generator.randint(0, length)
        for begin, end in ((0, cut), (cut, length)):
            runs, step = [], generator.choice([1, 2, 3, modulus])
            for phase in range(min(step, keys)):
                count = len(range(phase, keys, step))
                middle = generator.randint(0, count)
                for first, last in ((0, middle), (middle, count)):
                    lo = generator.choice([-UNBOUNDED, 0, 0, generator.randint(-100, 100)])
                    width = generator.choice([2 * UNBOUNDED, generator.randint(0, 90)])
                    hi = min(lo + width, UNBOUNDED)
                    start = phase + step * first
                    multiplicity = generator.randint(1, 3)
                    runs.append((start, step, last - first, (lo, hi), multiplicity))
            groups.append((residue + modulus * begin, modulus, end - begin, runs))
    return make_side([groups])


@pytest.mark.parametrize("seed", range(60))
def test_random_graphs_match_the_reference(seed):
    generator = random.Random(seed)
    queries, keys = generator.randint(1, 700), generator.randint(1, 700)
    heads = torch.zeros(2, dtype=torch.int32)
    side = random_side(generator, queries, keys)
    graph = TileGraph(queries, keys, side, make_side([[]]), heads, heads, False)
    options = [x for x in ("dlse", "slopes", "key_range") if generator.random() < 0.5]
    tensors, dlse, extra = make_inputs(
        graph, groups=1, dim=generator.randint(1, 40), options=options
    )
    grads = {"run_grads": seed % 3 == 0}
    expected = run(attention_reference, graph, tensors, dlse, extra, **grads)
    assert_close(run(attention_cpu, graph, tensors, dlse, extra, **grads), expected, 1e-11)


class Largest(TorchDispatchMode):
    """Notes the most elements of any tensor that an operation gave."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = out if isinstance(out, (tuple, list)) else [out]
        for x in tensors:
            if isinstance(x, torch.Tensor):
                # What is expanded takes no memory.
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["causal", "window", "strided", "blocks"])
def test_no_tensor_grows_with_the_square_of_tokens(name, options):
    def largest(tokens):
        graph = {
            "causal": lambda: one_run(tokens, tokens, CAUSAL),
            "window": lambda: window_with_globals(tokens, 1000, 0, 4),
            "strided": lambda: dilated(tokens),
            "blocks": lambda: blocks(tokens, 32),
        }[name]()
        used = [x for x in OPTIONS[options] if x != "key_range"]
        inputs = make_inputs(graph, dim=4, samples=1, options=used)
        with Largest() as mode:
            run(attention_cpu, graph, *inputs, run_grads="run_grads" in used)
        return mode.numel

    at_2048 = largest(2048)
    assert at_2048 <= 2048**2 // 4
    assert largest(4096) <= 2.5 * at_2048


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", range(4), ids=["q", "k", "v", "do"])
@pytest.mark.parametrize("name", ["causal", "dilated", "window"])
def test_what_is_not_finite_is_seen_in_its_own_sample_only(name, where, bad):
    graph = GRAPHS[name]()
    tensors, dlse, _ = make_inputs(graph, samples=3)
    tensors = [x.float() for x in tensors]
    clean = run(attention_cpu, graph, tensors, dlse, {})
    tensors[where][1, 0, graph.num_keys // 2, 3] = bad
    outputs = run(attention_cpu, graph, tensors, dlse, {})
    for key, x in outputs.items():
        assert torch.equal(x[::2], clean[key][::2]), key
    assert not all(outputs[key][1].isfinite().all() for key in ("dq", "dk", "dv"))


def test_an_lse_that_is_far_too_low_overflows_and_is_seen():
    """Of other keys, or wrong: e^(s - lse) must not wrap around to a number like any other."""
    graph = GRAPHS["causal"]()
    (q, k, v, do), _, _ = make_inputs(graph)
    for dtype, low in ((torch.float32, -200.0), (torch.float64, -2000.0)):
        q, k, v, do = (x.to(dtype) for x in (q, k, v, do))
        o, lse = attention_cpu.attention_forward(AttentionInputs(q, k, v, graph, 0.3))
        grads = attention_cpu.attention_backward(
            do, None, o, torch.full_like(lse, low), AttentionInputs(q, k, v, graph, 0.3)
        )
        assert not grads.dv.isfinite().any()


@pytest.mark.parametrize("size", [1e-6, 30.0, 1e4])
def test_scores_of_any_size(size):
    graph = GRAPHS["dilated"]()
    (q, k, v, do), dlse, _ = make_inputs(graph)
    tensors = (size * q, k, v, do)
    expected = run(attention_reference, graph, tensors, dlse, {})
    outputs = run(attention_cpu, graph, tensors, dlse, {})
    # Rounding of a score s is one of e^s by |s|; in dq and dk it cancels further.
    tolerance = 1e-15 * max(10.0, 2 * size)
    for name in ("o", "lse", "dv"):
        assert_close({name: outputs[name]}, {name: expected[name]}, tolerance)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_calls_at_the_same_time_and_in_a_forked_process():
    graph = GRAPHS["window"]()
    tensors, dlse, _ = make_inputs(graph, dim=64, samples=3)
    expected = run(attention_cpu, graph, tensors, dlse, {})

    def same():
        outputs = run(attention_cpu, graph, tensors, dlse, {})
        return all(torch.equal(outputs[key], expected[key]) for key in expected)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda _: same(), range(12)))
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sender.send(forked()))

    def forked():
        # torch's own pool of threads does not survive a fork.
        torch.set_num_threads(1)
        o, _ = attention_cpu.attention_forward(AttentionInputs(*tensors[:3], graph, 64**-0.5))
        return torch.equal(o, expected["o"])

    child.start()
    assert receiver.poll(60) and receiver.recv()
    child.join()


def test_numbers_below_the_least_normal_one_count_as_0_and_only_within():
    graph = GRAPHS["causal"]()
    (q, k, v, do), _, _ = make_inputs(graph)
    q, k, v = q.float(), k.float(), v.float()
    tiny = torch.full(do.shape, 1e-39)
    inputs = AttentionInputs(q, k, v, graph, 0.3)
    o, lse = attention_cpu.attention_forward(inputs)
    grads = attention_cpu.attention_backward(tiny, None, o, lse, inputs)
    assert all((x == 0).all() for x in (grads.dq, grads.dk, grads.dv))
    assert float(tiny[0, 0, 0, 0] * 0.5) > 0


def test_views_that_negate_and_another_default_device():
    graph = GRAPHS["dilated"]()
    (q, k, v, do), dlse, _ = make_inputs(graph, options=("dlse",))
    expected = run(attention_cpu, graph, (-q, -k, v, -do), -dlse, {}, run_grads=True)
    negated = [torch._neg_view(x) for x in (q, k, do, dlse)]
    with torch.device("meta"):
        outputs = run(
            attention_cpu, graph, (*negated[:2], v, negated[2]), negated[3], {}, run_grads=True
        )
    assert all(torch.equal(x, expected[name]) for name, x in outputs.items())


def test_the_kernels_hold_nothing_that_grows_with_the_square_of_tokens(forked):
    """What C++ allocates no mode of torch sees: one score each would be 256 MiB here."""
    code = """
import torch
from dpflash.bench.memory import PeakMemory
from dpflash.kernels import attention_cpu
from dpflash.kernels.attention_reference import AttentionInputs
from dpflash.patterns import Dense
graph = Dense(causal=True).graph(8192, 1)
q = torch.randn(1, 1, 8192, 8)
def run(q, graph):
    inputs = AttentionInputs(q, q, q, graph, 0.3)
    o, lse = attention_cpu.attention_forward(inputs)
    attention_cpu.attention_backward(q, None, o, lse, inputs)
run(q[:, :, :64], Dense().graph(64, 1))
with PeakMemory() as peak:
    run(q, graph)
print(peak.cpu_mb)
"""
    if not os.path.exists("/proc/self/status"):
        pytest.skip("only Linux tells the peak of a process")
    status, output = forked(code)
    assert status == 0, output
    # Outputs and gradients take 3 to 5.
    assert float(output) <= 16


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system limits no process")
def test_too_little_memory_is_an_error_of_python():
    code = """
import resource, torch
from dpflash.kernels import attention_cpu
from dpflash.kernels.attention_reference import AttentionInputs
from dpflash.patterns import Dense
graph = Dense().graph(1, 16)
q = torch.randn(60_000, 16, 1, 1)
attention_cpu.attention_forward(AttentionInputs(q[:1], q[:1], q[:1], graph, 0.1))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2 * q.nbytes + (8 << 20),) * 2)
try:
    attention_cpu.attention_forward(AttentionInputs(q, q, q, graph, 0.1))
except (MemoryError, RuntimeError) as error:
    print(type(error).__name__, error)
"""
    if not os.path.exists("/proc/self/statm"):
        pytest.skip("this system does not tell how much a process uses")
    # A fork has free memory of its parent's, which no limit takes away.
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("MemoryError attention on the CPU, forward: no memory")


def slopes_grad(module, dtype, seed, options=(), all_keys=False):
    """`[B, H]` of 113 queries behind 90 further keys."""
    graph = replace(one_run(113, 203, (-90, UNBOUNDED)), distance_shift=90)
    tensors, dlse, extra = make_inputs(graph, groups=4, dim=32, options=options, seed=seed)
    slopes = torch.tensor([[0.25, 0.06, 0.015, 0.004]] * 2, dtype=torch.float64)
    extra = {n: x.to(dtype) if x.is_floating_point() else x for n, x in extra.items()}
    q, k, v, do = (x.to(dtype) for x in tensors)
    inputs = AttentionInputs(q, k, v, graph, 0.2, **{**extra, "slopes": slopes.to(dtype)})
    dlse = None if dlse is None else dlse.to(dtype)
    o, lse = module.attention_forward(inputs)
    arguments = do, dlse, o, lse, inputs
    return module.attention_backward(*arguments, all_keys=all_keys).dslopes.double().sum(2)


@pytest.mark.parametrize("options", [(), ("dlse",), ("sinks", "key_range"), ("dlse", "sinks")])
def test_the_error_of_delta_leaves_the_slopes_gradient_and_nothing_else_does(options):
    left, kept = 0.0, 0.0
    for seed in range(12):
        exact = slopes_grad(attention_reference, torch.float64, seed, options)
        if seed == 0:
            found = slopes_grad(attention_cpu, torch.float64, seed, options, all_keys=True)
            torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-10)
        for all_keys in (False, True):
            found = slopes_grad(attention_cpu, torch.float32, seed, options, all_keys)
            error = float((found - exact).abs().max())
            kept, left = (kept, left + error) if all_keys else (kept + error, left)
    assert left < 0.8 * kept, f"{left:.2e} of {kept:.2e}"


def test_attention_takes_the_error_of_delta_from_its_slopes_gradient(monkeypatch):
    backward = attention_cpu.attention_backward
    asked = []
    monkeypatch.setattr(
        attention_cpu,
        "attention_backward",
        lambda *args, **named: asked.append(named["all_keys"]) or backward(*args, **named),
    )
    q, slopes = torch.randn(1, 4, 5, 8), torch.ones(4, requires_grad=True)
    attention(q, q, q, alibi_slopes=slopes).sum().backward()
    assert asked == [True]
