"""What the ranks of test_ring_attention.py do; each function is called on every rank."""

import math
import os
from unittest.mock import patch

import torch
import torch.distributed as dist

import dpflash
from dpflash import patterns
from dpflash.distributed import (
    Layout,
    count_traffic,
    loss_weights,
    ring_attention,
    sent_bytes,
    shard_sequence,
    unshard_sequence,
)
from dpflash.distributed import attention as attention_module
from dpflash.distributed import blockwise as blockwise_module
from dpflash.distributed import ring as ring_module


def all_patterns(tokens, heads=4):
    """Every pattern, with and without causality, by name."""
    cuts = (0, tokens // 5, tokens // 5, tokens // 2, tokens)
    blocks = -(-tokens // 8)
    lists = tuple(() if i == 2 else (i // 2, blocks - 1) for i in range(blocks))
    lists = tuple(tuple(dict.fromkeys(row)) for row in lists)
    of_heads = tuple(
        tuple(((i + h) % blocks, (i * 3 + 1) % blocks) for i in range(blocks))
        for h in range(heads)
    )
    of_heads = tuple(tuple(tuple(dict.fromkeys(row)) for row in head) for head in of_heads)
    return {
        "dense": patterns.Dense(),
        "dense causal": patterns.Dense(causal=True),
        "window": patterns.SlidingWindow(window=5),
        "window causal": patterns.SlidingWindow(window=19, global_tokens=3, causal=True),
        "documents": patterns.Documents(cu_seqlens=cuts),
        "documents causal": patterns.Documents(cu_seqlens=cuts, causal=True),
        "dilated": patterns.Dilated(segment_lengths=(8, 16, 64), dilation_rates=(1, 2, 4)),
        "dilated causal": patterns.Dilated(
            segment_lengths=(6, 32), dilation_rates=(1, 3), causal=True, overlap="set"
        ),
        "dilated blind": patterns.Dilated(
            segment_lengths=(12, 40), dilation_rates=(3, 4), offset="group"
        ),
        "dilated grouped": patterns.Dilated(
            segment_lengths=(8, 32), dilation_rates=(1, 2), heads="grouped"
        ),
        "blocks": patterns.BlockSparse(
            block_size=8, local_blocks=1, stride_blocks=3, random_blocks=1, seed=1
        ),
        "blocks causal": patterns.BlockSparse(
            block_size=7, local_blocks=0, global_blocks=1, random_blocks=2, causal=True
        ),
        "lists": patterns.BlockSparse(block_size=8, block_lists=lists),
        "lists of heads": patterns.BlockSparse(block_size=8, block_lists=of_heads),
        "hierarchical": patterns.Hierarchical(
            levels=((8, 16), (16, -1)), block_size=8, causal=False
        ),
        "hierarchical causal": patterns.Hierarchical(
            levels=((8, 24), (32, 64)), block_size=8, causal=True
        ),
        "adaptive": patterns.Adaptive(block_size=16, keep=2),
        "adaptive causal": patterns.Adaptive(block_size=16, keep=3, causal=True),
    }


def place(group):
    return dist.get_rank(group), dist.get_world_size(group)


def inputs(tokens, heads=4, kv_heads=4, dim=16, batch=2, dtype=torch.float32, seed=0):
    """q, k, v, do and dlse of the whole sequence, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, do = (draw(batch, heads, tokens, dim).to(dtype) for _ in range(2))
    k, v = (draw(batch, kv_heads, tokens, dim).to(dtype) for _ in range(2))
    dlse = draw(batch, heads, tokens).to(torch.promote_types(dtype, torch.float32))
    sinks, slopes = draw(heads).to(dlse.dtype), draw(batch, heads).abs().to(dlse.dtype) / 20
    return q, k, v, do, dlse, sinks, slopes


def leaf(x):
    return x.detach().clone().requires_grad_()


def single(q, k, v, do, dlse, sinks, slopes, pattern, **options):
    """o, lse and the gradients of q, k, v (sinks, slopes) of one process; -inf has no gradient."""
    leaves = [None if x is None else leaf(x) for x in (q, k, v, sinks, slopes)]
    o, lse = dpflash.attention(
        *leaves[:3],
        pattern=pattern,
        return_lse=True,
        sinks=leaves[3],
        alibi_slopes=leaves[4],
        **options,
    )
    backward(o, lse, do, dlse)
    return [o.detach(), lse.detach(), *(None if x is None else x.grad for x in leaves)]


def backward(o, lse, do, dlse):
    dlse = dlse.masked_fill(lse == -math.inf, 0.0)
    torch.autograd.backward((o, lse), (do, dlse))


def sharded(
    group, q, k, v, do, dlse, sinks, slopes, pattern, mode, sharding="contiguous", **options
):
    """The same of this rank's tokens, sinks and slopes summed over the ranks."""
    rank, size = place(group)
    at = Layout(q.shape[2], size, sharding).positions(rank)
    own = [leaf(x[:, :, at]) for x in (q, k, v)]
    heads = [None if x is None else leaf(x) for x in (sinks, slopes)]
    o, lse = ring_attention(
        *own,
        pattern=pattern,
        group=group,
        mode=mode,
        sharding=sharding,
        return_lse=True,
        sinks=heads[0],
        alibi_slopes=heads[1],
        **options,
    )
    backward(o, lse, do[:, :, at], dlse[:, :, at])
    found = [o.detach(), lse.detach(), *(x.grad for x in own)]
    for x in heads:
        if x is not None and size > 1:
            dist.all_reduce(x.grad, group=group)
        found.append(None if x is None else x.grad)
    return found, at


NAMES = ("o", "lse", "dq", "dk", "dv", "dsinks", "dslopes")


def distance(found, expected):
    """Greatest difference, relative to the greatest value; equal infinities do not differ."""
    if found is None and expected is None:
        return 0.0
    assert found.shape == expected.shape and found.dtype == expected.dtype
    found, expected = found.double(), expected.double()
    blind = expected == -math.inf
    assert torch.equal(blind, found == -math.inf)
    difference = (found - expected).masked_fill(blind, 0.0).abs()
    scale = expected.masked_fill(blind, 0.0).abs()
    return float(difference.max() / max(1.0, float(scale.max()))) if found.numel() else 0.0


def compare(group, cases):
    """For each case the distance of this rank's results from those of one process."""
    distances = {}
    for label, case in cases.items():
        case = dict(case)
        options = case.pop("options", {})
        with_sinks, with_slopes = case.pop("sinks", False), case.pop("slopes", False)
        name, mode, sharding = case.pop("pattern"), case.pop("mode"), case.pop("sharding")
        *whole, sinks, slopes = inputs(**case)
        whole += [sinks if with_sinks else None, slopes if with_slopes else None]
        pattern = all_patterns(case["tokens"], case.get("heads", 4))[name]
        expected = single(*whole, pattern, **options)
        found, at = sharded(group, *whole, pattern, mode, sharding, **options)
        rows = [x[:, :, at] for x in expected[:5]] + expected[5:]
        distances[label] = {
            what: distance(*pair) for what, *pair in zip(NAMES, found, rows, strict=True)
        }
    return distances


def errors_in_half(group, mode, tokens=101):
    """Errors of bfloat16 against float64, of one process and of several."""
    # In Ulysses a log-sum-exp begins at an address that is no multiple of 4.
    exact = inputs(tokens, kv_heads=2, dim=5, batch=1, dtype=torch.bfloat16, seed=4)
    *whole, sinks, slopes = exact
    pattern = all_patterns(tokens)["dilated causal"]
    wide = [x.double() for x in (*whole, sinks, slopes)]
    truth = single(*wide, pattern)
    alone = single(*whole, sinks, slopes, pattern)
    found, at = sharded(group, *whole, sinks, slopes, pattern, mode)
    errors = {}
    for name, t, a, f in zip(NAMES, truth, alone, found, strict=True):
        rows = slice(None) if name.startswith(("ds",)) else at
        pick = (lambda x: x) if name.startswith("ds") else (lambda x, rows=rows: x[:, :, rows])
        t, a = pick(t), pick(a)
        blind = t == -math.inf
        errors[name] = tuple(
            float((x.double() - t).masked_fill(blind, 0.0).norm()) for x in (a, f)
        )
    return errors


def repeats(group, mode, name, times):
    """Whether repeats have the same bits, once forward and backward each time."""
    whole = inputs(64, kv_heads=2)
    pattern = all_patterns(64)[name]
    first, _ = sharded(group, *whole, pattern, mode, "zigzag")
    for _ in range(times - 1):
        again, _ = sharded(group, *whole, pattern, mode, "zigzag")
        if not all(torch.equal(x, y) for x, y in zip(first, again, strict=True)):
            return False
    return True


def traffic(group, name, tokens, mode, sharding, kv_heads, dtype=torch.float32):
    """(counted, predicted) bytes, and the names of all exchanges."""
    rank, size = place(group)
    *whole, _, _ = inputs(tokens, kv_heads=kv_heads, dtype=dtype)
    pattern = all_patterns(tokens)[name] if isinstance(name, str) else name
    with count_traffic() as count:
        sharded(group, *whole, None, None, pattern, mode, sharding)
    predicted = sent_bytes(
        pattern,
        tokens,
        4,
        num_kv_heads=kv_heads,
        head_dim=16,
        dtype=dtype,
        batch=2,
        world_size=size,
        sharding=sharding,
        mode=mode,
        rank=rank,
    )
    return (count.forward, count.backward), tuple(predicted), [what for _, what, _ in count.sends]


def computed_steps(group, name, tokens, sharding):
    """How many graphs this rank runs over in one forward pass."""
    calls = []
    import dpflash.distributed.blockwise as partial

    original = partial.attention_forward

    def counting(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    with patch.object(partial, "attention_forward", counting):
        *whole, _, _ = inputs(tokens)
        pattern = all_patterns(tokens)[name] if isinstance(name, str) else name
        sharded(group, *whole, None, None, pattern, "ring", sharding)
    return len(calls)


def saved(group, name, tokens, mode):
    """Elements of every tensor kept for the backward, and those of this rank's q."""
    rank, size = place(group)
    q, k, v, *_ = inputs(tokens)
    at = Layout(tokens, size).positions(rank)
    own = [leaf(x[:, :, at]) for x in (q, k, v)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x.numel()) or x, lambda x: x
    ):
        ring_attention(*own, pattern=all_patterns(tokens)[name], group=group, mode=mode)
    return kept, own[0].numel()


def padded(group, name, mode, sharding, tokens, length):
    """Distances where the last positions are padding, whose inputs and gradients are NaN."""
    rank, size = place(group)
    *whole, _, _ = inputs(tokens)
    real = [x[:, :, :length] for x in whole]
    pattern = all_patterns(length)[name]
    expected = single(*real, None, None, pattern)
    for x in whole[:3]:
        x[:, :, length:] = math.nan
    at = Layout(tokens, size, sharding).positions(rank)
    own = [leaf(x[:, :, at]) for x in whole[:3]]
    o, lse = ring_attention(
        *own,
        pattern=pattern,
        group=group,
        mode=mode,
        sharding=sharding,
        return_lse=True,
        length=length,
    )
    do, dlse = (x[:, :, at] for x in whole[3:])
    torch.autograd.backward((o, lse), (do, dlse.masked_fill(lse == -math.inf, 0.0)))
    inside, outside = at < length, at >= length
    rows = [x[:, :, at[inside]] for x in expected[:5]]
    found = [o.detach(), lse.detach(), *(x.grad for x in own)]
    assert torch.equal(at[inside], at[: int(inside.sum())])
    for name, x in zip(NAMES, found, strict=False):
        fill = -math.inf if name == "lse" else 0.0
        assert bool((x[:, :, outside] == fill).all()), name
    return {n: distance(f[:, :, inside], e) for n, f, e in zip(NAMES, found, rows, strict=False)}


def refused(group, problem):
    """Calls ring_attention with something that cannot be right."""
    rank, size = place(group)
    tokens = 12 * size
    at = Layout(tokens, size).positions(rank)
    q, k, v = (x[:, :, at] for x in inputs(tokens)[:3])
    qkv = {"q": q, "k": k, "v": v}
    last = rank == size - 1
    changes = {
        "batch": lambda: {name: x[:1] for name, x in qkv.items() if last},
        "head_dim": lambda: {name: x[..., :8] for name, x in qkv.items() if last},
        "rank": lambda: {"q": q[0] if last else q},
        "not a tensor": lambda: {"q": None if last else q},
        "pattern": lambda: {"pattern": patterns.Dense(causal=last)},
        "no pattern": lambda: {"pattern": "dense"},
        "mode": lambda: {"mode": "rings"},
        "modes": lambda: {"mode": "all_gather" if last else "ring"},
        "sharding": lambda: {"sharding": "striped"},
        "local length": lambda: {name: x[:, :, :5] for name, x in qkv.items() if last},
        "too few tokens": lambda: {n: x[:, :, : int(not last)] for n, x in qkv.items()},
        "too few heads": lambda: {
            "mode": "ulysses",
            **{name: x[:, : size - 1] for name, x in qkv.items()},
        },
        "length": lambda: {"length": tokens + 1},
        "lengths": lambda: {"length": tokens - int(last)},
        "scale": lambda: {"softmax_scale": 0.5 if last else 0.25},
        "gradients": lambda: {"q": q.requires_grad_(last)},
        "sinks": lambda: {"sinks": torch.zeros(4) if last else None},
        "documents": lambda: {"pattern": patterns.Documents(cu_seqlens=(0, 7))},
        "keys": lambda: {"k": k[:, :, :-1], "v": v[:, :, :-1]},
        "group": lambda: {"group": "context"},
    }
    given = {**qkv, "pattern": patterns.Dense(), "group": group, "mode": "ring"}
    ring_attention(**{**given, **changes[problem]()})


def shard_refused(group, problem):
    """Calls shard_sequence or unshard_sequence with something that cannot be right."""
    rank, size = place(group)
    last = rank == size - 1
    x = torch.zeros(2, 8 * size)
    calls = {
        "shape": lambda: shard_sequence(x[:1] if last else x, 1, group),
        "few": lambda: shard_sequence(x[:, : size - 1], 1, group),
        "dim": lambda: shard_sequence(x, 2, group),
        "sharding": lambda: shard_sequence(x, 1, group, "striped"),
        "dtype": lambda: unshard_sequence(x.long() if last else x, 1, group),
        "shards": lambda: unshard_sequence(x[:, :3] if last else x, 1, group),
        "length": lambda: unshard_sequence(x, 1, group, length=8 * size * size + 1),
    }
    calls[problem]()


def round_trips(group):
    """Cutting and putting together, with gradients, for many shapes; the labels of failures."""
    rank, size = place(group)
    wrong = []
    for sharding in ("contiguous", "zigzag"):
        for tokens in (size, size + 1, 2 * size - 1, 37, 64):
            for dim in (0, 1, -1):
                for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
                    shape = [2, 3, 4]
                    shape[dim] = tokens
                    x = torch.arange(math.prod(shape)).reshape(shape).remainder(97)
                    x = x.to(dtype)
                    own = shard_sequence(x, dim, group, sharding)
                    at = Layout(tokens, size, sharding).positions(rank)
                    whole = unshard_sequence(own, dim, group, sharding)
                    good = torch.equal(own, x.index_select(dim, at)) and own.is_contiguous()
                    good &= torch.equal(whole, x) and own.dtype == whole.dtype == dtype
                    if not good:
                        wrong.append((sharding, tokens, dim, dtype))
    return wrong


def shard_gradients(group, sharding):
    """Whether gradients of shard and unshard are what their docstrings say."""
    rank, size = place(group)
    tokens, length = 5 * size + 1, 5 * size - 1
    at = Layout(tokens, size, sharding).positions(rank)
    x = torch.randn(2, tokens, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    own = shard_sequence(x, 1, group, sharding)
    own.backward(torch.full_like(own, rank + 1.0))
    expected = torch.zeros_like(x)
    expected[:, at] = rank + 1.0
    first = torch.equal(x.grad, expected)
    local = leaf(own)
    whole = unshard_sequence(local, 1, group, sharding, length)
    weights = torch.arange(1.0, length + 1)[None, :, None].expand(2, length, 3)
    (whole * weights * (rank + 1)).sum().backward()
    total = sum(r + 1 for r in range(size))
    expected = torch.zeros(2, tokens, 3)
    expected[:, :length] = weights * total
    return first, whole.shape[1] == length, torch.equal(local.grad, expected[:, at])


def weights_of_losses(group, sharding):
    """Distance of the weighted partial losses' sum from the whole samples' mean losses."""
    rank, size = place(group)
    tokens = 9 * size + 2
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, tokens, 7, generator=generator)
    targets = torch.randint(7, (3, tokens), generator=generator)
    targets[0, 4:] = -100
    targets[1] = -100
    expected = dpflash.losses.cross_entropy(logits, targets)
    at = Layout(tokens, size, sharding).positions(rank)
    own = dpflash.losses.cross_entropy(logits[:, at], targets[:, at])
    weights = loss_weights(targets[:, at], group)
    total = own * weights
    if size > 1:
        dist.all_reduce(total, group=group)
    return distance(total, expected), weights.dtype == torch.float32


def empty_batch(group, mode):
    """Bytes sent, and the shapes of results and gradients, for no samples."""
    rank, size = place(group)
    own = [torch.zeros(0, 4, 6, 16, requires_grad=True) for _ in range(3)]
    with count_traffic() as count:
        o, lse = ring_attention(
            *own, pattern=patterns.Dense(), group=group, mode=mode, return_lse=True
        )
        (o.sum() + lse.sum()).backward()
    shapes = [tuple(x.shape) for x in (o, lse, *(x.grad for x in own))]
    return count.forward + count.backward, shapes


def partial_gradients(group, mode, needed):
    """Distance of the gradients where only some of q, k and v need one."""
    rank, size = place(group)
    q, k, v, do, *_ = inputs(37)
    pattern = all_patterns(37)["window causal"]
    at = Layout(37, size).positions(rank)
    own = [
        x[:, :, at].clone().requires_grad_(name in needed)
        for name, x in zip("qkv", (q, k, v), strict=True)
    ]
    o = ring_attention(*own, pattern=pattern, group=group, mode=mode)
    leaves = [leaf(x) for x in (q, k, v)]
    dpflash.attention(*leaves, pattern=pattern).backward(do)
    expected = [x.grad[:, :, at] for x in leaves]
    o.backward(do[:, :, at])
    return {
        name: distance(x.grad, e) if x.requires_grad else float(x.grad is not None)
        for name, x, e in zip("qkv", own, expected, strict=True)
    }


def twice_differentiated(group, mode):
    """Differentiates the gradient."""
    rank, size = place(group)
    own = [leaf(x[:, :, Layout(8, size).positions(rank)]) for x in inputs(8)[:3]]
    o = ring_attention(*own, pattern=None, group=group, mode=mode)
    (grad,) = torch.autograd.grad(o.sum(), own[0], create_graph=True)
    grad.sum().backward()


def death(group, where):
    """The last rank dies, before the call or between agreeing and computing."""
    rank, size = place(group)
    own = [leaf(x[:, :, Layout(32, size).positions(rank)]) for x in inputs(32)[:3]]
    if rank == size - 1:
        if where == "before":
            os._exit(1)
        if where == "forward":
            ring_module.Ring.receive = lambda *_: os._exit(1)
            ring_module.send_and_receive = lambda *_: os._exit(1)
        if where == "lost":  # never answers
            attention_module.attend = lambda *_, **__: dist.barrier()
    o = ring_attention(*own, pattern=None, group=group)
    if rank == size - 1:
        os._exit(1)
    o.sum().backward()


def in_parts(group, mode, parts, dtype):
    """Whether o, lse, dq, dk and dv in so many parts have the bits of one, and the bytes sent."""
    rank, size = place(group)
    found = []
    for least in (2**40, 1):
        limits = patch.multiple(blockwise_module, _MOST_PARTS=parts, _LEAST_BYTES={"cpu": least})
        for name in ("dense causal", "window causal", "lists of heads", "dilated grouped"):
            # Twice as many tokens for each rank as a vector has lanes: no rank has a tail.
            whole = inputs(64 * size, kv_heads=2, dtype=dtype)
            pattern = all_patterns(64 * size)[name]
            with limits, count_traffic() as count:
                results, _ = sharded(group, *whole, pattern, mode, "zigzag")
            found.append((results, count.forward, count.backward, len(count.sends)))
    halves = zip(found[:4], found[4:], strict=True)
    return [
        (all(map(torch.equal, one[0], two[0])), one[1:3] == two[1:3], (one[3], two[3]))
        for one, two in halves
    ]
