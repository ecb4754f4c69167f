import sys

import numpy as np
import pytest

from dpflash.patterns import BlockSparse, Dense, Dilated, Documents, SlidingWindow
from dpflash.patterns.report import coverage

PNG = b"\x89PNG\r\n\x1a\n"
LONGNET = Dilated(segment_lengths=(8, 16, 32), dilation_rates=(1, 2, 4), causal=True)


@pytest.mark.parametrize("num_tokens", [1, 9, 50])
def test_coverage_of_a_short_sequence_is_its_mask(num_tokens):
    graph = LONGNET.graph(num_tokens, 4)
    for head, mask in enumerate(LONGNET.mask(num_tokens, 4).numpy()):
        variant = int(graph.row_variants[head])
        np.testing.assert_allclose(coverage(graph, variant, 64), mask, atol=1e-12)
        seen = coverage(graph, variant, 64, multiplicity=False)
        np.testing.assert_allclose(seen, mask > 0, atol=1e-12)


def test_coverage_of_coarse_cells_is_the_mean_of_the_mask():
    pattern = SlidingWindow(window=5, global_tokens=2, causal=True)
    found = coverage(pattern.graph(48), 0, 8)
    np.testing.assert_allclose(found, pattern.mask(48)[0].numpy().reshape(8, 6, 8, 6).mean((1, 3)))


def test_sampled_coverage_of_a_long_sequence_is_near_its_density():
    found = coverage(Dense(causal=True).graph(2**20), 0, 32)
    assert found.mean() == pytest.approx(0.5, abs=0.01)
    assert not np.triu(found, 1).any()
    assert (np.tril(found, -1) == np.tri(32, k=-1)).all()


def test_describe_states_density_and_sizes_and_draws_a_picture():
    lines = SlidingWindow(window=0).describe(4, 2).splitlines()
    assert lines[0] == "SlidingWindow(window=0, global_tokens=0, causal=False)"
    assert "density 25.000%, edges 8" in lines
    graph = SlidingWindow(window=0).graph(4, 2)
    assert f"graph memory {graph.nbytes:,} bytes" in lines
    assert "queries: 1 groups of rows, 1 runs of columns, 1 kinds of heads" in lines
    assert lines[-4:] == ["|#   |", "| #  |", "|  # |", "|   #|"]


@pytest.mark.parametrize("num_tokens", [0, 1, 100, 131072])
def test_describe_is_small_at_any_length(num_tokens):
    text = Dilated(segment_lengths=(256, 1024), dilation_rates=(1, 4)).describe(num_tokens, 4)
    assert "density" in text
    assert max(len(line) for line in text.splitlines()) < 200
    assert len(text.splitlines()) <= 40


def test_describe_cuts_long_lists():
    pattern = Documents(cu_seqlens=tuple(range(2000)))
    assert max(len(line) for line in pattern.describe(1999).splitlines()) < 400


@pytest.mark.parametrize(
    ("pattern", "num_tokens", "num_heads"),
    [
        (LONGNET, 60, 5),
        (BlockSparse(block_size=4, random_blocks=1), 1, 1),
        (Dilated(segment_lengths=(2048, 8192), dilation_rates=(1, 2), causal=True), 131072, 1),
    ],
    ids=["longnet-T60-H5", "block_sparse-T1", "longnet-T131072"],
)
def test_plot_writes_a_png(tmp_path, pattern, num_tokens, num_heads):
    pytest.importorskip("matplotlib")
    path = tmp_path / "pattern.png"
    assert pattern.plot(num_tokens, path, num_heads=num_heads) == path
    assert path.read_bytes().startswith(PNG)


def test_plot_without_a_path_goes_to_the_current_folder(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert Dense().plot(8).name == "Dense_T8.png"
    assert (tmp_path / "Dense_T8.png").read_bytes().startswith(PNG)


def test_plot_of_nothing_is_refused():
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="^num_tokens="):
        Dense().plot(0)


def test_plot_without_matplotlib_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.colors", None)
    with pytest.raises(ImportError, match=r"pip install dpflash\[plot\]"):
        Dense().plot(8)
