"""Whose attention kernels run: the table, what the vendors' kernels must never get, repeatability.

Their operators are replaced on the CPU by ones that have their semantics, refuse what they refuse,
and round anew in each backward.
"""

import math
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import dpflash
from dpflash import attention, attention_backend, losses, patterns
from dpflash.kernels import attention as kernels
from dpflash.kernels import attention_reference as reference
from dpflash.kernels import attention_vendor as vendor
from dpflash.kernels.attention_reference import AttentionInputs
from dpflash.kernels.tile_shard import Chunk, restrict
from dpflash.patterns import Dense

H100 = vendor.Machine((9, 0), 91600, False)
WITH_FA4 = H100._replace(fa4=True)
B200, B200_FA4 = H100._replace(capability=(10, 0)), WITH_FA4._replace(capability=(10, 0))
ADA = H100._replace(capability=(8, 9))
OWN = ("own", "own")
PLAIN = vendor.Call(
    *(H100, "auto", False, "causal", True, True, torch.bfloat16, (2, 4, 2, 64, 64, 128, 128))
)
EXACT = (1e-2, 2.0**-7)  # what rounding to bfloat16 may change


def shape(**other):
    return {"shape": tuple({**dict(zip("BHGTSDE", PLAIN.shape, strict=True)), **other}.values())}


TABLE = {
    "plain": ({}, ("cudnn", "own")),
    "fp16": ({"dtype": torch.float16}, ("cudnn", "own")),
    "dense": ({"kind": "dense"}, ("cudnn", "own")),
    "fast": ({"backend": "fast"}, ("cudnn", "cudnn")),
    "fast-with-dlse": ({"backend": "fast", "has_dlse": True}, ("cudnn", "own")),
    "fa4": ({"machine": WITH_FA4}, ("cudnn", "fa4")),
    "fa4-fast": ({"machine": WITH_FA4, "backend": "fast"}, ("cudnn", "cudnn")),
    "fa4-with-dlse": (
        {"machine": WITH_FA4, "backend": "fast", "has_dlse": True},
        ("cudnn", "fa4"),
    ),
    "own": ({"backend": "own", "machine": WITH_FA4}, OWN),
    "deterministic": ({"deterministic": True, "backend": "fast"}, OWN),
    "no-gpu": ({"machine": vendor.Machine(None), "backend": "fast"}, OWN),
    "old-cudnn": ({"machine": H100._replace(cudnn=91599), "backend": "fast"}, OWN),
    "pattern": ({"kind": None, "backend": "fast"}, OWN),
    "extras": ({"is_plain": False, "backend": "fast"}, OWN),
    "misaligned": ({"is_aligned": False, "backend": "fast"}, OWN),
    "fp32": ({"dtype": torch.float32, "backend": "fast"}, OWN),
    "fp64": ({"dtype": torch.float64}, OWN),
    "more-keys": (shape(S=65), OWN),
    "one-token": (shape(T=1, S=1), OWN),
    "no-sample": (shape(B=0), OWN),
    "many-samples": (shape(B=65536), OWN),
    "wide-values": (shape(E=64), OWN),
    "odd-head-dim": (shape(D=36, E=36), OWN),
    "head-dim-264": ({"machine": WITH_FA4, **shape(D=264, E=264)}, OWN),
    "head-dim-256": (shape(D=256, E=256), OWN),
    "head-dim-256-fa4": ({"machine": WITH_FA4, **shape(D=256, E=256)}, ("fa4", "own")),
    "head-dim-136-fa4-fast": (
        {"machine": WITH_FA4, "backend": "fast", **shape(D=136, E=136)},
        ("fa4", "fa4-fast"),
    ),
    "b200": ({"machine": B200}, ("cudnn", "own")),
    "b200-fast": ({"machine": B200, "backend": "fast"}, ("cudnn", "cudnn")),
    "b200-fa4": ({"machine": B200_FA4}, ("fa4", "fa4")),
    "b200-fa4-fast": ({"machine": B200_FA4, "backend": "fast"}, ("fa4", "cudnn")),
    "b200-fa4-head-dim-256": ({"machine": B200_FA4, **shape(D=256, E=256)}, OWN),
    "ada": ({"machine": ADA}, OWN),
    "ada-fast": ({"machine": ADA, "backend": "fast"}, ("own", "flash")),
    "ada-fast-with-dlse": ({"machine": ADA, "backend": "fast", "has_dlse": True}, OWN),
    "rtx-50-fast": (
        {"machine": H100._replace(capability=(12, 0)), "backend": "fast"},
        ("own", "flash"),
    ),
    "thor": ({"machine": H100._replace(capability=(11, 0)), "backend": "fast"}, OWN),
}


@pytest.mark.cases(len(TABLE))
@pytest.mark.parametrize(("change", "expected"), TABLE.values(), ids=TABLE)
def test_whose_kernels_a_call_gets(change, expected):
    found = vendor.choose(PLAIN._replace(**change))
    assert found[:2] == expected and found.why


def test_each_default_backward_repeats():
    for change, _ in TABLE.values():
        call = PLAIN._replace(**change)
        if call.backend != "fast" or call.deterministic or call.has_dlse:
            assert vendor.choose(call).backward in ("own", "fa4")


@torch.autocast("cpu", enabled=False)
def plain_attention(q, k, v, scale, causal, top_left):
    """(o, lse) in float32, of heads that each have their keys; the mask begins at either end."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = scale * q.float() @ k.float().mT
    if causal:
        offset = 0 if top_left else k.shape[2] - q.shape[2]
        seen = torch.ones(scores.shape[2:], dtype=torch.bool).tril(offset)
        scores = scores.masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(3)
    return (scores - lse.unsqueeze(3)).exp() @ v.float(), lse


@torch.autocast("cpu", enabled=False)
def plain_gradients(do, dlse, o, lse, q, k, v, scale, causal, top_left):
    """dq, dk, dv from the given o and lse, as flash backwards compute them."""
    groups = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(groups, 1).float() for x in (k, v))
    scores = scale * q.float() @ keys.mT
    p = (scores - lse.unsqueeze(3)).exp()
    if causal:
        p = p.tril(0 if top_left else keys.shape[2] - q.shape[2])
    delta = (do.float() * o.float()).sum(3) - (0 if dlse is None else dlse)
    ds = p * (do.float() @ values.mT - delta.unsqueeze(3))
    dk, dv = scale * (ds.mT @ q.float()), p.mT @ do.float()
    return scale * (ds @ keys), *(x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))


class StandIns:
    """The vendors' operators; `log` has the names of those that ran."""

    def __init__(self):
        self.log, self.plans = [], {}
        self.generator = torch.Generator().manual_seed(0)

    def take(self, name, *tensors):
        self.log.append(name)
        for x in tensors:
            assert x.dtype in (torch.bfloat16, torch.float16) and x.shape == tensors[0].shape
            assert x.data_ptr() % 16 == 0 and x.stride(3) == 1
            sizes = zip(x.shape[:3], x.stride()[:3], strict=True)
            assert all(size == 1 or (stride > 0 and stride % 8 == 0) for size, stride in sizes)

    def rounded(self, grads, like):
        """Sums in another order: each time other last bits."""
        noise = (torch.rand(x.shape, generator=self.generator) - 0.5 for x in grads)
        pairs = zip(grads, noise, like, strict=True)
        return tuple(torch.empty_like(x).copy_(g * (1 + 2.0**-7 * n)) for g, n, x in pairs)

    def cudnn(self, q, k, v, bias, with_lse, dropout=0.0, causal=False, debug=False, *, scale):
        self.take("cudnn", q)
        self.take("kv", k, v)
        assert bias is None and with_lse and not dropout and 0 not in q.shape and q.shape[2] > 1
        o, lse = plain_attention(q, k, v, scale, causal, top_left=True)
        empty = torch.empty(0)
        o = torch.empty_like(q).copy_(o)
        return o, lse.unsqueeze(3), empty, empty, q.shape[2], k.shape[2], empty, empty, empty

    def cudnn_backward(
        self, do, q, k, v, o, lse, seed, offset, bias, ends, ends_k, most, most_k, dropout, causal,
        *, scale,
    ):  # fmt: skip
        self.take("cudnn backward", q, o, do)
        assert bias is None and ends is None and lse.shape == (*q.shape[:3], 1)
        assert lse.dtype == torch.float32 and lse.is_contiguous() and most == q.shape[2]
        # Plans are found by the layout of q, k and v alone.
        layouts = self.plans.setdefault(
            (q.shape, q.stride(), k.stride()), (do.stride(), o.stride())
        )
        do, o = (torch.as_strided(x, x.shape, s) for x, s in zip((do, o), layouts, strict=True))
        options = (scale, causal, True)
        return self.rounded(
            plain_gradients(do, None, o, lse[..., 0], q, k, v, *options), (q, k, v)
        )

    def flash_backward(
        self, do, q, k, v, o, lse, ends, ends_k, most, most_k, dropout, causal, seed, offset,
        *, scale,
    ):  # fmt: skip
        self.take("flash backward", q, o, do)
        assert lse.shape == q.shape[:3] and lse.is_contiguous()
        options = (scale, causal, False)
        return self.rounded(plain_gradients(do, None, o, lse, q, k, v, *options), (q, k, v))

    def fa4_forward(self, q, k, v, *, softmax_scale, causal, return_lse):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        self.take("fa4", q)
        o, lse = plain_attention(q, k, v, softmax_scale, causal, top_left=False)
        return o.transpose(1, 2).to(q.dtype).contiguous(), lse

    def fa4_backward(self, q, k, v, o, do, lse, *, softmax_scale, causal, deterministic, dlse):
        q, k, v, o, do = (x.transpose(1, 2) for x in (q, k, v, o, do))
        self.take("fa4 backward" if deterministic else "fa4-fast backward", q, o, do)
        grads = plain_gradients(do, dlse, o, lse, q, k, v, softmax_scale, causal, False)
        given = (q, k, v)
        grads = [g.to(q.dtype) for g in grads] if deterministic else self.rounded(grads, given)
        return tuple(x.transpose(1, 2).contiguous() for x in grads)


@pytest.fixture
def vendors(monkeypatch):
    """vendors(machine) -> the log of a machine that has these operators."""
    stand_ins = StandIns()
    aten = torch.library.Library("aten", "IMPL", "CPU")
    name = "_scaled_dot_product_cudnn_attention"
    aten.impl(name, stand_ins.cudnn)
    aten.impl(f"{name}_backward", stand_ins.cudnn_backward)
    aten.impl("_scaled_dot_product_flash_attention_backward", stand_ins.flash_backward)
    fa4 = vendor._FlashAttention4(stand_ins.fa4_forward, stand_ins.fa4_backward)
    monkeypatch.setattr(vendor, "_fa4", lambda: fa4)

    def refuse(*args, **options):
        raise AssertionError("whose choice is a setting of the process")

    monkeypatch.setattr(F, "scaled_dot_product_attention", refuse)

    def begin(machine=H100):
        monkeypatch.setattr(vendor, "machine", lambda device: machine)
        return stand_ins.log

    yield begin
    aten._destroy()


def qkv(batch=2, heads=4, groups=2, tokens=24, dim=16, seed=0, dtype=torch.bfloat16):
    """Views of one buffer, as a projection leaves them."""
    torch.manual_seed(seed)
    packed = torch.randn(batch, tokens, heads + 2 * groups, dim).to(dtype)
    return packed.transpose(1, 2).split((heads, groups, groups), dim=1)


def ran(log):
    return [name for name in log if name != "kv"]


WAYS = {
    "auto": (H100, "auto", ["cudnn"]),
    "fast": (H100, "fast", ["cudnn", "cudnn backward"]),
    "fa4": (WITH_FA4, "auto", ["cudnn", "fa4 backward"]),
    "b200-fa4": (B200_FA4, "auto", ["fa4", "fa4 backward"]),
    "ada": (ADA, "fast", ["flash backward"]),
    "own": (H100, "own", []),
}


@pytest.mark.cases(len(WAYS))
@pytest.mark.parametrize(("machine", "backend", "expected"), WAYS.values(), ids=WAYS)
def test_every_way_equals_the_reference(vendors, machine, backend, expected):
    log = vendors(machine)
    for causal, scale, with_dlse in ((True, 0.3, False), (False, -0.2, False), (True, 0.3, True)):
        q, k, v = qkv()
        do, dlse = torch.randn(q.shape).bfloat16(), torch.randn(q.shape[:3])
        dlse = dlse if with_dlse else None
        graph = Dense(causal=causal).graph(24, 4)
        inputs = AttentionInputs(q, k, v, graph, scale, backend=backend)
        log.clear()
        o, lse = kernels.attention_forward(inputs)
        found = kernels.attention_backward(do, dlse, o, lse, inputs, squares=True)
        is_left = with_dlse and backend == "fast"
        assert ran(log) == [name for name in expected if not (is_left and "backward" in name)]
        wide = [x.double() for x in (q, k, v)]
        truth = AttentionInputs(*wide, graph, scale)
        expected_o, expected_lse = reference.attention_forward(truth)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5)
        assert lse.shape == q.shape[:3] and lse.is_contiguous()
        torch.testing.assert_close(o.double(), expected_o, atol=EXACT[0], rtol=EXACT[1])
        grads = reference.attention_backward(do.double(), dlse, expected_o, expected_lse, truth)
        for name in ("dq", "dk", "dv"):
            pair = getattr(found, name), getattr(grads, name)
            torch.testing.assert_close(pair[0].double(), pair[1], atol=3e-2, rtol=EXACT[1])
        squares = sum(x.double().square().sum((1, 2, 3)) for x in found[:3])
        torch.testing.assert_close(found.squares, squares)


def of_four(k):
    return k[:, :1].expand(-1, 4, -1, -1)


def shifted(x):
    """The same numbers, two bytes behind a multiple of 16."""
    memory = torch.empty(x.numel() + 1, dtype=x.dtype)
    return memory[1:].view(x.shape).copy_(x)


REFUSED = {
    "window": ({"pattern": patterns.SlidingWindow(window=5, causal=True)}, None),
    "documents": ({"pattern": patterns.Documents(cu_seqlens=(0, 9, 24), causal=True)}, None),
    "longnet": ({"pattern": patterns.Dilated(segment_lengths=(8,), dilation_rates=(2,))}, None),
    "adaptive": ({"pattern": patterns.Adaptive(block_size=16, keep=2, causal=True)}, None),
    "last-queries": ({"causal": True}, lambda q, k, v: (q[:, :, -7:], k, v)),
    "one-query": ({"causal": True}, lambda q, k, v: (q[:, :, :1], k[:, :, :1], v[:, :, :1])),
    "other-keys": ({}, lambda q, k, v: (q[:, :, :7], k, v)),
    "no-sample": ({"causal": True}, lambda q, k, v: (q[:0], k[:0], v[:0])),
    "padding": ({"key_padding_mask": torch.arange(24).expand(2, 24) > 20}, None),
    "sinks": ({"causal": True, "sinks": torch.zeros(4)}, None),
    "slopes": ({"causal": True, "alibi_slopes": torch.ones(4)}, None),
    "softcap": ({"causal": True, "softcap": 2.0}, None),
    "bias": ({"position_bias": torch.zeros(1, 4, 24, 24)}, None),
    "fp32": ({"causal": True}, lambda *given: [x.float() for x in given]),
    "misaligned": ({"causal": True}, lambda q, k, v: (q, shifted(k), v)),
    "copies-of-a-head": ({"causal": True}, lambda q, k, v: (q, of_four(k), of_four(v))),
    "odd-head-dim": ({"causal": True}, lambda *given: [x[..., :12] for x in given]),
}


@pytest.mark.cases(len(REFUSED))
@pytest.mark.parametrize(("options", "change"), REFUSED.values(), ids=REFUSED)
def test_what_no_vendor_takes_never_reaches_one(vendors, options, change):
    log = vendors(WITH_FA4)
    given = change(*qkv()) if change else qkv()
    found = []
    for backend in ("own", "fast"):
        leaves = [x.detach().requires_grad_() for x in given]
        with attention_backend(backend):
            o = attention(*leaves, **options)
        found.append((o, *torch.autograd.grad(o.float().square().sum(), leaves)))
    assert log == []
    torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)


def gradients(backend, attend, do=None):
    leaves = [x.detach().requires_grad_() for x in qkv()]
    with attention_backend(backend):
        o = attend(*leaves)
    if do is None:
        return torch.autograd.grad(o.float().square().sum(), leaves)
    return torch.autograd.grad(o, leaves, do)


def close(found, expected):
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, atol=6e-2, rtol=2.0**-6)


def causal(q, k, v):
    return attention(q, k, v, causal=True)


def test_gradients_of_every_layout_are_read_as_they_lie(vendors):
    """One plan serves all calls: a sum's gradient has strides of 0, a transposed one others."""
    log = vendors()
    dense = torch.randn(2, 4, 24, 16).bfloat16()
    layouts = (
        dense.transpose(1, 2).contiguous().transpose(1, 2),
        dense.contiguous(),
        dense.mT.contiguous().mT,
        torch.ones(1).bfloat16().expand(2, 4, 24, 16),
    )
    for do in layouts:
        close(gradients("fast", causal, do), gradients("own", causal, do))
    assert ran(log) == ["cudnn", "cudnn backward"] * len(layouts)


def through_checkpoint(q, k, v):
    return checkpoint(causal, q, k, v, use_reentrant=False)


THROUGH = {
    "eager": causal,
    "checkpoint": through_checkpoint,
    "compile": torch.compile(causal, fullgraph=True, backend="aot_eager"),
}


@pytest.mark.cases(len(THROUGH))
@pytest.mark.parametrize("attend", THROUGH.values(), ids=THROUGH)
def test_the_choice_of_the_forward_holds_wherever_a_call_goes(vendors, attend):
    log = vendors()
    expected = gradients("own", causal)
    for backend, names in (("auto", {"cudnn"}), ("fast", {"cudnn", "cudnn backward"})):
        log.clear()
        close(gradients(backend, attend), expected)
        assert set(ran(log)) == names
    log.clear()
    close(gradients("own", attend), expected)
    assert "cudnn backward" not in log and (attend is through_checkpoint or log == [])


def test_per_sample_gradients_by_vmap_of_grad(vendors):
    log = vendors()

    def loss(q, k, v):
        return causal(*(x.unsqueeze(0) for x in (q, k, v))).float().square().sum()

    with attention_backend("fast"):
        found = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))(*qkv())
    assert "cudnn backward" in log
    close(found, gradients("own", causal))


def test_a_backward_in_another_thread_takes_the_choice_of_its_forward(vendors):
    log = vendors()
    leaves = [x.detach().requires_grad_() for x in qkv()]
    with attention_backend("fast"):
        o = causal(*leaves)
        with attention_backend("own"):
            other = causal(*leaves)
    log.clear()
    for output, names in ((other, []), (o, ["cudnn backward"])):
        thread = threading.Thread(target=output.float().sum().backward)
        thread.start()
        thread.join()
        assert ran(log) == names


def test_a_name_that_is_none_is_refused():
    expected = "'cudnn': expected one of 'auto', 'own', 'fast'"
    with pytest.raises(ValueError, match=f"backend={expected}"), attention_backend("cudnn"):
        pass
    with pytest.raises(ValueError, match=f"attention_backend={expected}"):
        dpflash.PerformanceConfig(attention_backend="cudnn")


@pytest.mark.parametrize("backend", ["auto", "fast"])
def test_steps_of_a_ring_are_merged(vendors, backend):
    """Two ranks: the second sees the first's keys as a whole, and its own causally."""
    log = vendors()
    q, k, v = qkv()
    graph, do = Dense(causal=True).graph(24, 4), torch.randn(q.shape).bfloat16()
    last, steps = slice(12, 24), []
    o = torch.zeros(2, 4, 12, 16)
    lse = torch.full((2, 4, 12), -math.inf)
    for start, kind in ((0, "dense"), (12, "causal")):
        keys = slice(start, start + 12)
        part = restrict(graph, [Chunk(12, 12, 0)], 12, [Chunk(start, 12, 0)], 12)
        assert vendor.kind_of(part) == kind
        tensors = (q[:, :, last], k[:, :, keys], v[:, :, keys])
        steps.append(AttentionInputs(*tensors, part, 0.25, backend=backend))
        partial = kernels.attention_forward(steps[-1], wide=True)
        assert partial[0].dtype == torch.float32
        kernels.merge_(o, lse, *partial)
    arguments = (do[:, :, last], None, o, lse)
    found = [kernels.attention_backward(*arguments, step, wide=True) for step in steps]
    assert ran(log) == ["cudnn"] * 2 + ["cudnn backward"] * 2 * (backend == "fast")

    truth = AttentionInputs(*(x.double() for x in (q, k, v)), graph, 0.25)
    whole, whole_lse = reference.attention_forward(truth)
    torch.testing.assert_close(o.double(), whole[:, :, last], atol=EXACT[0], rtol=EXACT[1])
    torch.testing.assert_close(lse.double(), whole_lse[:, :, last])
    do = torch.cat([torch.zeros_like(do[:, :, :12]), do[:, :, last]], 2).double()
    grads = reference.attention_backward(do, None, whole, whole_lse, truth)
    close([found[0].dq + found[1].dq], [grads.dq[:, :, last].float()])
    close([torch.cat([x.dk for x in found], 2)], [grads.dk.float()])
    close([torch.cat([x.dv for x in found], 2)], [grads.dv.float()])


def train(recomputes=False, **options):
    """A private step of a language model in bfloat16."""
    torch.manual_seed(0)
    sizes = {"max_seq_len": 16, "activation_checkpointing": recomputes}
    model = dpflash.nn.LongContextLM(11, 32, 1, 2, pattern=Dense(causal=True), **sizes)
    data = torch.utils.data.TensorDataset(torch.randint(0, 11, (16, 17)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    engine = dpflash.PrivacyEngine(seed=0)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=0.0,
        max_grad_norm=1.0, optimize="balanced", verify_first_batch=False, **options,
    )  # fmt: skip
    for (tokens,) in loader:
        engine.backward(losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]))
        if loader.is_last:
            break
    optimizer.step()
    return engine


TRAINED = {
    "default": ({}, "auto", {"cudnn"}),
    "own": ({"attention_backend": "own"}, "auto", set()),
    "fast": ({"attention_backend": "fast"}, "auto", {"cudnn", "cudnn backward"}),
    "the-loops": ({"grad_sample_mode": "instantiate"}, "fast", {"cudnn", "cudnn backward"}),
    "the-loops-perhaps-ghost": ({}, "fast", {"cudnn"}),
    "ghost": ({"grad_sample_mode": "ghost", "attention_backend": "fast"}, "fast", {"cudnn"}),
    "small-budget": (
        {"memory_budget": 1, "attention_backend": "fast"}, "auto", {"cudnn", "cudnn backward"}
    ),
    "exact": ({"exact": True, "attention_backend": "fast"}, "fast", set()),
    "exact-recomputed": ({"exact": True, "recomputes": True}, "auto", set()),
}  # fmt: skip


@pytest.mark.cases(len(TRAINED))
@pytest.mark.parametrize(("options", "loop", "expected"), TRAINED.values(), ids=TRAINED)
def test_a_private_step_runs_these_kernels_and_says_so(vendors, options, loop, expected):
    log = vendors()
    with attention_backend(loop):
        engine = train(**options)
        changes, plan = str(engine.optimization), engine.plan()
    assert set(ran(log)) == expected
    sentence = {0: "by dpflash's kernels: attention_backend is 'own'", 2: "by cuDNN: the fastest"}
    text = sentence.get(len(expected), "forward by cuDNN, backward by dpflash's kernels: only")
    assert text in changes and text in str(plan)
    modes = {use.grad_sample_mode for use in plan}
    assert ("ghost" in modes) == (options.get("grad_sample_mode") == "ghost")


def test_under_deterministic_algorithms_only_own_kernels_run(vendors):
    log = vendors()
    torch.use_deterministic_algorithms(True)
    try:
        gradients("fast", causal)
    finally:
        torch.use_deterministic_algorithms(False)
    assert log == []


def test_a_setting_of_torch_and_a_flash_attention_without_dlse_leave_them_out(monkeypatch):
    cuda = SimpleNamespace(is_available=lambda: True, get_device_capability=lambda device: (9, 0))
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91600)
    gpu = torch.device("cuda", 0)

    def older_backward(q, k, v, deterministic=False): ...

    interface = SimpleNamespace(
        flash_attn_func=StandIns.fa4_forward, _flash_attn_bwd=older_backward
    )
    monkeypatch.setattr(vendor, "import_module", lambda name: interface)
    assert vendor.machine.__wrapped__(gpu)[:2] == ((9, 0), 91600)
    assert vendor._fa4.__wrapped__() is None
    interface._flash_attn_bwd = StandIns.fa4_backward
    assert vendor._fa4.__wrapped__() == (StandIns.fa4_forward, StandIns.fa4_backward)
    monkeypatch.setenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "1")
    assert vendor.machine.__wrapped__(gpu).cudnn == 0


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "fast"])
def test_real_kernels_equal_the_own_and_repeat(backend):
    for options in ({}, {"heads": 8, "groups": 8, "tokens": 200, "dim": 128}):
        given = [x.cuda() for x in qkv(tokens=options.pop("tokens", 65), dim=64, **options)]
        do, found, before = torch.randn_like(given[0]), [], torch.cuda.get_rng_state()
        for name in ("own", *[backend] * 20):
            leaves = [x.detach().requires_grad_() for x in given]
            with attention_backend(name):
                o, lse = attention(*leaves, causal=True, return_lse=True)
            found.append((o, lse, *torch.autograd.grad(o, leaves, do)))
        assert torch.equal(before, torch.cuda.get_rng_state())
        close(found[1], found[0])
        repeats = [all(map(torch.equal, found[1], other)) for other in found[2:]]
        assert all(repeats) or backend == "fast"
