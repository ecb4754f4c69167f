import pytest

from dpflash import recommend
from dpflash.bench.attention import build_pattern
from dpflash.patterns import Adaptive, Dense, Hierarchical, SlidingWindow, from_text

PATTERNS = (
    Dense(causal=True),
    SlidingWindow(window=7, global_tokens=2, causal=True),
    Hierarchical(levels=((16, 128), (128, -1)), block_size=16, causal=True),
)


def read(text, tokens=1024):
    return from_text(text, causal=True, tokens=tokens)


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: type(p).__name__)
def test_a_pattern_is_read_from_its_key_and_from_how_it_prints(pattern):
    assert read(pattern.key) == read(repr(pattern)) == pattern


def test_what_recommend_prints_can_be_passed_on():
    found = recommend(4096, device="CPU AMD EPYC")
    line = str(found).splitlines()[1]
    assert read(line.removeprefix("pattern=")) == found.pattern


def test_a_name_alone_has_the_sizes_of_the_benchmark():
    for name in ("dense", "sliding_window", "block_sparse", "hierarchical", "adaptive", "dilated"):
        for tokens in (512, 8192):
            assert read(name, tokens) == build_pattern(name, True, tokens)
    assert read("sliding_window", 512) != read("sliding_window", 8192)
    assert read("Adaptive(keep=3)") == Adaptive(keep=3, causal=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "expected one of adaptive, block_sparse, dense"),
        ("sliding_window(windw=3)", "SlidingWindow has no argument 'windw'"),
        ("sliding_window(window=x)", "expected a name with arguments"),
        ("sliding_window(3)", "expected a name with arguments"),
        ("__import__('os').getcwd()", "expected a name with arguments"),
        ("documents", "Documents takes cu_seqlens"),
        ("dense(causal=False)", "expected causal=True"),
        ('{"pattern": "Nothing"}', "expected the key of one of"),
        ("", "expected a name with arguments"),
    ],
)
def test_other_text_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        read(text)
