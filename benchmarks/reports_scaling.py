"""What others report of scaling over workers, for the page of that benchmark and `reports`."""

from __future__ import annotations

from typing import Any, NamedTuple


class Source(NamedTuple):
    """A document with figures.

    Attributes:
        source: who says so, and about what.
        wrong: what was found when its code was read and run.
    """

    source: str
    wrong: tuple[str, ...]


RING_DILATED = Source(
    "dilated-attention-pytorch (DarcStar), report on `RingDilatedAttentionHybrid`: 2 x GTX 1080, "
    "float32, H 8, D 64, segments [512, 1024], dilation rates [1, 2]",
    (
        "the batch is 2 in the first two rows and 1 in the others, which the report does not say",
        "forward passes without gradients only, of 3 to 10 runs",
        "q, k, v and the output of the whole sequence lie on every worker, so memory is O(N) and "
        'not the O(N / P) that its "memory scaling ratio 1.15" is said to confirm; only 2 workers '
        "were tried",
        "one buffer is sent and received into at once: 6 of 8 runs on 2 workers had wrong results",
        "no gradient passes through the ring, and causal attention over several segments raises",
        '"75% below standard attention, 4 GB at 16K": the full matrix takes 8 GiB there, and no '
        "attention of today holds it",
    ),
)

# N, B, MB of each GPU, KB of each token, tokens/s.
RING_DILATED_TABLE: tuple[tuple[int, int, float, float, float], ...] = (
    (1024, 2, 113, 56.48, 7858),
    (2048, 2, 340, 85.0, 14415),
    (4096, 1, 518, 129.43, 6948),
    (8192, 1, 816, 101.95, 6261),
    (16384, 1, 1038, 64.86, 3523),
)
RING_DILATED_WORKERS = 2

CONTEXT_PARALLEL = Source(
    "torchbridge (CloudlyIO), tables of context parallelism and of nodes",
    (
        "no code in the repository produces the figures",
        "its context parallelism gathers everything and takes the mean of the workers' outputs; "
        "its ring averages softmaxes and does not mask later chunks",
    ),
)

# What, workers, efficiency.
CONTEXT_PARALLEL_TABLE: tuple[tuple[str, int, float], ...] = (
    *(("context parallel, 32K tokens a GPU", p, e) for p, e in ((1, 1.0), (2, 0.95))),
    *(("context parallel, 32K tokens a GPU", p, e) for p, e in ((4, 0.92), (8, 0.89))),
    *(("nodes, 7B model", p, e) for p, e in ((1, 1.0), (2, 0.96), (4, 0.93), (8, 0.89))),
)


def claimed_rows() -> list[dict[str, Any]]:
    """Their figures as plain values, "kind" is "reported"."""
    rows: list[dict[str, Any]] = []
    for tokens, batch, megabytes, kilobytes, rate in RING_DILATED_TABLE:
        rows.append(
            {
                "kind": "reported",
                "source": RING_DILATED.source,
                "tokens": tokens,
                "batch": batch,
                "workers": RING_DILATED_WORKERS,
                "memory_mb": megabytes,
                "kb_per_token": kilobytes,
                "tokens_per_s": rate,
            }
        )
    for what, workers, efficiency in CONTEXT_PARALLEL_TABLE:
        rows.append(
            {
                "kind": "reported",
                "source": CONTEXT_PARALLEL.source,
                "what": what,
                "workers": workers,
                "efficiency": efficiency,
            }
        )
    return rows
