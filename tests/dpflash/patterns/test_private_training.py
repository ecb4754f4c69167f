"""Private training through every attention pattern, against a loop over single samples."""

import pytest
import torch
from torch import nn

import dpflash
from dpflash.patterns import Adaptive, BlockSparse, Dilated, SlidingWindow

PATTERNS = {
    "dense": None,
    "window": SlidingWindow(window=4, global_tokens=1, causal=True),
    "dilated": Dilated(segment_lengths=(8, 16), dilation_rates=(1, 2), causal=True),
    "block-sparse": BlockSparse(block_size=4, random_blocks=1, causal=True),
    "adaptive": Adaptive(block_size=16, keep=2, causal=True),
}
KINDS = [{"grad_sample_mode": w} for w in ("instantiate", "book_keeping", "ghost")] + [
    {"clipping": "per_layer"}
]


class Model(nn.Module):
    """Embedding, grouped-query attention with everything that attention can learn, a head."""

    def __init__(self, pattern):
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.attention = dpflash.nn.MultiheadAttention(
            16, 4, num_kv_heads=2, pattern=pattern, attention_sinks=True, alibi=True
        )
        self.head = nn.Linear(16, 11)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x + self.attention(x, is_causal=True)[0])


def loss(model, tokens):
    return dpflash.losses.cross_entropy(model(tokens), tokens.roll(1, 1))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: next(iter(kind.values())))
@pytest.mark.parametrize("name", PATTERNS)
def test_clipped_sums_through_patterns_sinks_and_slopes_equal_the_loop(
    name, kind, oracle, private, sums, distance
):
    torch.manual_seed(0)
    model = Model(PATTERNS[name])
    tokens = torch.randint(11, (5, 37))
    exact = oracle(model, loss, tokens)
    bound = 0.7 * sorted(exact.norms())[2]
    engine, model, *_ = private(model, max_grad_norm=bound, **kind)
    engine.backward(loss(model, tokens))
    expected = exact.clipped_sum(bound, kind.get("clipping", "flat"))
    # Norms of these two have what a product of 37 tokens rounds added to them: 39 * 2^-24 times
    # the sizes of its terms, a few times the norm.
    rounded = kind.get("grad_sample_mode") in ("book_keeping", "ghost")
    assert distance(sums(engine, model), expected) <= (2e-5 if rounded else 2e-6)
    assert {"attention.sinks.weight", "attention.alibi_slopes.weight"} <= expected.keys()
