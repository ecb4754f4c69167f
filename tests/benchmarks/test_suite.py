"""What every benchmark relies on: checks before figures, turns, limits, and nothing lost."""

import contextlib
import dataclasses
import io
import json
import math
import sys
from pathlib import Path

import pytest
import torch

from dpflash.bench import suite as suite_module
from dpflash.bench import timing
from dpflash.bench.compare import compare
from dpflash.bench.document import (
    FIGURES,
    SPEEDUP,
    Chart,
    Table,
    column,
    key_insights,
    milliseconds,
)
from dpflash.bench.output import row, write_json
from dpflash.bench.suite import (
    Comparison,
    Measurement,
    Request,
    Suite,
    run_suite,
    worst,
    wrong_rows,
)
from dpflash.bench.suites import SUITES, suite_named
from dpflash.cli import main
from dpflash.clipping.device_speed import Ceilings

sys.path.insert(0, str(Path(__file__).parent))
from suite_cases import product  # noqa: E402

EFFORT = timing.Effort(1, 6)
ROOFS = Ceilings({"float32": 1e9}, 1e9)


@pytest.fixture(autouse=True, scope="module")
def roofs():
    """Measuring them takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpflash.bench.suite.measured_roofs", lambda *_, **__: ROOFS)
        yield


def measurement(name, peer=False, **given):
    columns = {"section": "products", **({"peer": True} if peer else {})}
    return Measurement(name, product, {"size": 32, **given}, columns)


def toy(*comparisons, **more):
    charts = [Chart("products", "products", column("size"), column("median_ms"), lambda r: "x")]
    columns = (column("name"), column("size"), *FIGURES, SPEEDUP)
    return Suite(
        name="toy",
        title="A toy",
        about="Nothing.",
        plan=lambda request: comparisons,
        tables=[Table("products", "Products", columns, "A note.")],
        charts=charts,
        **more,
    )


def run(suite, folder, **request):
    given = {"device": "cpu", "threads": 1, "has_progress": False, "effort": EFFORT, "quick": True}
    return run_suite(suite, Request(**{**given, **request}), folder)


@pytest.fixture(scope="module")
def found(tmp_path_factory, roofs):
    """The document of a run of all kinds, its folder, and its lines on stderr."""
    folder = tmp_path_factory.mktemp("toy")
    kinds = ("wrong", "broken", "absent", "greedy", "warning", "nan")
    measurements = [measurement("right"), measurement("double", size=64)]
    measurements += [measurement(kind, kind=kind) for kind in kinds]

    def derive(rows):
        return [row("derived", {}, section="derived", text=f"{len(rows)} rows")]

    def others(request):
        """Those of others."""
        return [row("alone", {"size": 1}, needs="a friend", section="products")]

    suite = toy(Comparison(measurements, baseline="right"), others, derive=derive)
    with contextlib.redirect_stderr(io.StringIO()) as lines:
        held = run(suite, folder, traces=True, has_progress=True)
    return held, folder, lines.getvalue()


def by_name(found):
    return {entry["name"]: entry for entry in found[0]["rows"]}


@pytest.mark.cases(0)
def test_the_three_files_hold_the_rows(found):
    held, folder, _ = found
    written = json.loads((folder / "toy.json").read_text())
    assert written["schema"] == 3
    off = next(entry for entry in written["rows"] if entry["name"] == "nan")
    assert off["error"] is None and milliseconds(off) == "WRONG (no number)"
    assert milliseconds(by_name(found)["nan"]) == "WRONG (no number)"
    assert milliseconds({**off, "error": 0.25}) == "WRONG (error 2.5e-01)"
    off["error"] = by_name(found)["nan"]["error"]
    assert str(written["rows"]) == str(json.loads(json.dumps(held))["rows"])
    assert held["complete"] and held["environment"]["clock"] == "process time"
    assert held["environment"]["roofs"]["bandwidth"] > 0
    page = (folder / "toy.md").read_text()
    assert "a quick look" in page.lower() and "needs: a friend" in page and "WRONG" in page
    assert (folder / "toy.png").read_bytes()[:4] == b"\x89PNG"
    assert not list(folder.glob("*.part"))


def test_a_measured_row_has_all_columns_and_a_trace(found):
    entry = by_name(found)["right"]
    low, high = entry["ci95_ms"]
    assert 0 < low <= entry["median_ms"] <= high
    assert entry["trials"] == 6 == len(entry["samples_ms"])
    assert entry["correct"] is True and entry["error"] == 0
    assert entry["peak_memory_mb"] >= 0 and "needs" not in entry
    assert entry["tokens_per_s"] == pytest.approx(32e3 / entry["median_ms"])
    assert entry["gflop_per_s"] == pytest.approx(2 * 32**3 / entry["median_ms"] / 1e6)
    # Read after the last call.
    assert entry["calls"] >= 7 and "calls" not in by_name(found)["wrong"]
    traces = found[1] / "traces"
    assert json.loads((traces / "right.json").read_text())["traceEvents"]
    assert "aten::mm" in (traces / "right.json").read_text()


def test_a_speed_up_is_over_the_baseline_and_by_rounds(found):
    entries = by_name(found)
    one, other = entries["right"]["samples_ms"], entries["double"]["samples_ms"]
    ratios = timing.within_fences([a / b for a, b in zip(one, other, strict=True)])
    assert "speedup" not in entries["right"]
    assert entries["double"]["baseline"] == "right"
    median = float(torch.tensor(ratios, dtype=torch.float64).quantile(0.5))
    assert entries["double"]["speedup"] == pytest.approx(median)


def test_a_row_that_is_wrong_or_cannot_run_has_no_figures_and_says_why(found):
    entries = by_name(found)
    assert wrong_rows(found[0]) == ["wrong", "broken", "nan"]
    for name in ("wrong", "broken", "absent", "greedy", "nan", "alone"):
        assert entries[name]["median_ms"] is None and entries[name]["trials"] == 0
        assert entries[name]["peak_memory_mb"] is None
    assert entries["broken"]["failure"] == "ArithmeticError: a bug"
    assert entries["absent"]["correct"] is None
    assert "a machine that was never built" in entries["absent"]["needs"]
    assert entries["greedy"]["needs"].startswith("more memory")
    assert entries["derived"]["text"] == "9 rows"


def test_a_slow_row_is_timed_with_fewer_calls_and_is_not_compared(tmp_path, monkeypatch):
    seconds = {32: 0.1, 33: 2.0, 34: 3.0}
    probed = []

    def probe(function, *, config, **given):
        probed.append(config["size"])
        return suite_module._Probed(1.0, seconds[config["size"]])

    monkeypatch.setattr(suite_module, "run_isolated", probe)
    names = ("fast", "slow", "slower")
    plan = [measurement(name, size=size) for name, size in zip(names, seconds, strict=True)]
    larger = Comparison([measurement("larger", size=35)], curve="a")
    held = run(toy(Comparison(plan, baseline="fast", curve="a"), larger), tmp_path)
    fast, slow, slower, untried = held["rows"]
    assert untried["needs"] == "a faster device: slower is too slow already" and 35 not in probed
    assert fast["trials"] == 6 and fast["ci95_ms"]
    assert slow["trials"] == 4 and slow["ci95_ms"] is None and "speedup" not in slow
    low, high = slow["range_ms"]
    assert 0 < low <= slow["median_ms"] <= high and "samples_ms" not in slow
    assert "one call takes 3 s" in slower["needs"] and slower["median_ms"] is None
    assert " (4 calls: " in (tmp_path / "toy.md").read_text()
    assert key_insights(held["rows"])[-1].startswith("Rows: 2 timed (1 with few calls")
    written = json.loads((tmp_path / "toy.json").read_text())
    verdicts = {line.name: line.verdict for line in compare(written, written).lines}
    assert verdicts["slow"] == "not comparable" and verdicts["fast"] == "undecided"


def bug(request):
    yield row("half", {}, needs="a friend", section="products")
    raise ArithmeticError("a bug")


def test_a_bug_in_a_part_or_in_a_trace_is_a_row_and_the_others_are_measured(tmp_path, monkeypatch):
    def derive(rows):
        raise LookupError("another")

    def broken(step, path):
        if path.stem == "first":
            raise OSError("the disk is full")

    monkeypatch.setattr("dpflash.bench.suite.trace_call", broken)
    first, last = (Comparison([measurement(name)]) for name in ("first", "last"))
    found = run(toy(first, bug, last, derive=derive), tmp_path, traces=True)
    held = json.loads((tmp_path / "toy.json").read_text())
    names = [entry["name"] for entry in held["rows"]]
    assert names == ["first", "half", "bug/1", "last", "derived"] and held["complete"]
    assert held["rows"][0]["failure"] == "OSError: the disk is full"
    assert held["rows"][2]["failure"] == "ArithmeticError: a bug"
    assert held["rows"][0]["median_ms"] is None and held["rows"][3]["median_ms"] > 0
    assert wrong_rows(found) == ["first", "bug/1", "derived"]
    page = (tmp_path / "toy.md").read_text()
    assert "ArithmeticError: a bug" in page and "LookupError: another" in page


def test_a_row_that_fails_while_it_is_timed_has_no_figures_and_those_beside_it_have(tmp_path):
    kinds = ("late", "uncounted")
    pairs = [[measurement(kind, kind=kind), measurement(f"beside {kind}")] for kind in kinds]
    found = run(toy(*(Comparison(pair, baseline=pair[1].name) for pair in pairs)), tmp_path)
    assert wrong_rows(found) == list(kinds)
    rows = {entry["name"]: entry for entry in found["rows"]}
    for kind in kinds:
        failed, other = rows[kind], rows[f"beside {kind}"]
        assert failed["failure"].startswith("ArithmeticError: a bug")
        assert failed["median_ms"] is failed["peak_memory_mb"] is None
        assert "samples_ms" not in failed and failed["trials"] == 0
        assert other["correct"] is True and len(other["samples_ms"]) == 6
    assert math.isfinite(rows["beside uncounted"]["median_ms"])
    assert (tmp_path / "toy.md").read_text().count("FAILED: ArithmeticError") >= 2


def stop(request):
    yield row("stopped", {}, needs="a friend")
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", SUITES)
def test_an_interrupt_leaves_a_page_and_a_picture_of_every_suite(name, tmp_path):
    suite = dataclasses.replace(suite_named(name), plan=lambda request: [stop])
    with pytest.raises(KeyboardInterrupt):
        run(suite, tmp_path)
    held = json.loads((tmp_path / f"{name}.json").read_text())
    assert [entry["name"] for entry in held["rows"]] == ["stopped"] and not held["complete"]
    assert held["environment"]["clock"] == ("wall" if suite.on_ranks else "process time")
    assert "Broken off" in (tmp_path / f"{name}.md").read_text()
    assert (tmp_path / f"{name}.png").exists()


@pytest.mark.parametrize(("bad", "place"), [(math.nan, 0), (math.inf, 1), (-math.inf, 2)])
def test_the_worst_of_errors_is_infinite_where_one_is_no_number(bad, place):
    errors = [1e-7, 1e-8, 1e-9]
    assert worst(errors) == 1e-7
    errors[place] = bad
    assert worst(errors) == math.inf


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Runs `dpflash bench all` of some plans: exit status."""

    def run_all(plans):
        def suite_named(name):
            return dataclasses.replace(toy(*plans[name]), name=name)

        monkeypatch.setattr("dpflash.bench.suites.SUITES", dict.fromkeys(plans, "about"))
        monkeypatch.setattr("dpflash.bench.suites.suite_named", suite_named)
        given = ["--quick", "--threads", "1", "--device", "cpu", "--out", str(tmp_path)]
        return main(["bench", "all", *given])

    return run_all


def test_the_command_runs_all_suites_and_names_what_broke_off(command, tmp_path, capsys):
    class Broken(Comparison):
        @property
        def measurements(self):
            raise ArithmeticError("a bug")

        @measurements.setter
        def measurements(self, value):
            pass

    pair = [measurement("a/first"), measurement("a/second")]
    plans = {
        "one": [Comparison(pair, baseline="a/first")],
        "two": [Broken([measurement("never")])],
        "three": [Comparison([measurement("never", kind="absent")])],
    }
    assert command(plans) == 1
    assert {path.name for path in tmp_path.glob("*.md")} == {"one.md", "three.md"}
    printed = capsys.readouterr()
    assert "bench two broke off: ArithmeticError: a bug" in printed.err
    assert "no figures: all of two" in printed.err
    assert "bench three measured nothing" in printed.err and "bench one" not in printed.err
    assert "Rows: 2 timed" in printed.out and str(tmp_path / "one.json") in printed.out
    top = (tmp_path / "one.md").read_text().partition("## Products")[0]
    for line in printed.out.partition("three")[0].splitlines():
        assert not line.startswith("- ") or line in top


def test_an_interrupt_ends_the_command_at_once_and_keeps_what_was_measured(
    command, tmp_path, capsys
):
    first = Comparison([measurement("first")])
    interrupted = Comparison([measurement("second", kind="interrupted")])
    assert command({"one": [first, interrupted, first], "two": [first]}) == 130
    printed = capsys.readouterr().err
    assert "bench one was broken off" in printed and str(tmp_path / "one.md") in printed
    assert {path.name for path in tmp_path.glob("*.md")} == {"one.md"}
    held = json.loads((tmp_path / "one.json").read_text())
    assert [entry["name"] for entry in held["rows"]] == ["first"] and not held["complete"]
    assert "| first |" in (tmp_path / "one.md").read_text() and (tmp_path / "one.png").exists()


@pytest.mark.cases(0)
def test_a_wrong_peer_is_named_and_no_failure_but_a_wrong_row_of_ours_is(
    command, tmp_path, capsys
):
    peers = [measurement(kind, peer=True, kind=kind) for kind in ("wrong", "broken")]
    assert command({"one": [Comparison([measurement("right"), *peers])]}) == 0
    printed = capsys.readouterr()
    assert "Peers that were wrong or failed, without figures: wrong, broken" in printed.out
    assert "dpflash: wrong" not in printed.err
    assert "the peer is WRONG (error" in (tmp_path / "one.md").read_text()
    assert command({"one": [Comparison([measurement("ours", kind="wrong"), *peers])]}) == 1
    assert "no figures: ours" in capsys.readouterr().err


def test_an_output_that_is_a_file_is_refused_before_anything_runs(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["bench", "variants", "--out", str(tmp_path / "file")]) == 2
    assert "it cannot be a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given", [{"device": "tpu"}, {"threads": 0}, {"max_seconds": -1.0}], ids=str
)
def test_a_request_that_makes_no_sense_is_refused_by_name(given):
    with pytest.raises(ValueError, match=next(iter(given))):
        Request(**given)


def test_a_row_that_lacks_a_column_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="lacks"):
        write_json(tmp_path / "x.json", {"environment": {}, "rows": [{"name": "a"}]})
    assert not list(tmp_path.iterdir())
