"""The page of results, on files made up here and on those committed."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from dpflash.bench import output as bench_results
from dpflash.bench.published import Answer, Figure, Report, Reported, ReportTable
from dpflash.bench.result_files import device_names
from dpflash.bench.results_page import render

ROOT = Path(__file__).resolve().parents[2]


def _make_results():
    path = ROOT / "benchmarks" / "scripts" / "make_results.py"
    spec = importlib.util.spec_from_file_location("make_results", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _row(name, heads, section="heads", **columns):
    config = {"tokens": 2048, "batch": 2, "heads": heads, "head_dim": 64, "dtype": "float32"}
    figures: dict[str, Any] = {
        "median_ms": 8.25,
        "ci95_ms": [8.125, 8.5],
        "cv": 0.01,
        "trials": 20,
        "peak_memory_mb": 12.5,
        "tokens_per_s": 123456.0,
        "correct": True,
        "direction": "forward",
    }
    return bench_results.row(name, config, **{**figures, "section": section, **columns})


def _write(results, name, rows, **environment):
    folder = results / "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    told = {
        "device": "CPU of a test",
        "threads": 1,
        "date": "2026-11-22",
        "torch": "2.13.0",
        "dpflash": "0.1.0",
        "commit": "abcdef0",
        "quick": False,
        **environment,
    }
    held = {"environment": told, "complete": True, "rows": rows, "reported": []}
    bench_results.write_json(folder / f"{name}.json", held)


def _reports(*rows):
    tables = (ReportTable("S9.1", "A table", rows, ("all of it",)),)
    return [Report("A report", tables, "S9", "owner/name", "docs/a.md", "abc1234")]


TWO_HEADS = Reported(
    "H 2",
    (Figure(8.0, "ms", 0.5), Figure(1.5e12, "ops/s"), Figure("100%", "efficiency")),
    wrong="this row",
    answers=[Answer("heads", "heads", {"heads": 2})],
)


def _page(results, *rows):
    return render(results, _reports(*rows), results.parent / "RESULTS.md")


def _line(page, start):
    (line,) = (line for line in page.splitlines() if line.startswith(f"| {start} |"))
    return line


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results"
    _write(folder, "heads", [_row("heads/H2", 2), _row("heads/H4", 4)])
    return folder


def test_their_figures_and_ours_stand_in_one_line(results):
    assert _line(_page(results, TWO_HEADS), "H 2") == (
        "| H 2 | 8.0 ± 0.5 ms, 1.5e+12 ops/s, 100% (efficiency) | cpu: heads/H2 "
        "(B 2, T 2048, H 2, D 64, float32) | 8.25 [8.125, 8.5] | 12.5 | 123,456 | yes | "
        "this row |"
    )


def test_a_wrong_row_is_marked_and_counted(results):
    wrong = _row("heads/H2", 2, correct=False, error=0.5, median_ms=None, peak_memory_mb=None)
    _write(results, "heads", [wrong])
    page = _page(results, TWO_HEADS)
    assert "WRONG (error 5.0e-01)" in _line(page, "H 2")
    assert "1, 1 wrong or failed" in page and "| NO |" in _line(page, "H 2")


def test_a_quick_look_answers_nothing(results):
    _write(results, "heads", [_row("heads/H2", 2)], quick=True)
    page = _page(results, TWO_HEADS)
    assert "heads/H2" not in page
    assert "a quick look: no figures to quote" in page


def test_a_full_run_without_the_row_is_an_error(results):
    row = Reported("H 8", answers=[Answer("heads", "heads", {"heads": 8})])
    with pytest.raises(ValueError, match=r"heads.json: no row of section 'heads' with .*8"):
        _page(results, row)
    may = Reported("H 8", answers=[Answer("heads", "heads", {"heads": 8}, "eight heads")])
    told = "not measured yet: with eight heads `dpflash bench heads --threads 1 --out DIR`"
    assert told in _line(_page(results, TWO_HEADS, may), "H 8")


def test_check_fails_until_the_files_are_what_the_json_gives(tmp_path, capsys):
    make_results = _make_results()
    _write(tmp_path / "benchmarks" / "results", "compare_check", [])
    (tmp_path / "dpflash").mkdir()
    assert make_results.main(["--check"], tmp_path) == 1
    assert not (tmp_path / "benchmarks" / "RESULTS.md").exists()
    assert make_results.main([], tmp_path) == 0
    assert make_results.main(["--check"], tmp_path) == 0
    page = tmp_path / "benchmarks" / "RESULTS.md"
    page.write_text(page.read_text().replace("8.3 ms", "8.2 ms"))
    assert make_results.main(["--check"], tmp_path) == 1
    assert f"differs from what the JSON gives: {page}" in capsys.readouterr().out


def test_the_committed_page_and_recommendations_are_what_the_committed_json_gives():
    if not device_names(ROOT / "benchmarks" / "results"):
        pytest.skip("no results are committed")
    assert _make_results().main(["--check"]) == 0
