"""What every benchmark rests on: checks before figures, turns, limits, and nothing lost."""

import contextlib
import dataclasses
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dpflash.bench import (
    isolated,
    memory,
    roofline,
    timing,
    trace,
    versus_worker,
    work,
    workers_suite,
)
from dpflash.bench.document import (
    FIGURES,
    SPEEDUP,
    Chart,
    Table,
    column,
    config,
    key_insights,
    milliseconds,
)
from dpflash.bench.legend import LEGEND
from dpflash.bench.output import row
from dpflash.bench.suite import (
    Comparison,
    Measurement,
    Request,
    Suite,
    needs,
    run_suite,
    worst,
    wrong_rows,
)
from dpflash.bench.suites import SUITES, suite_named
from dpflash.cli import main
from dpflash.clipping.device_speed import Ceilings
from dpflash.patterns import Dense

sys.path.insert(0, str(Path(__file__).parent))
from suite_cases import grow, leave, product, stand_still  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent.parent
EFFORT = timing.Effort(1, 6)
ROOFS = Ceilings({"float32": 1e9}, 1e9)


@pytest.fixture(autouse=True)
def roofs(monkeypatch):
    """Measuring them takes seconds; the run of `found` does, which begins before this."""
    monkeypatch.setattr("dpflash.bench.suite.measured_roofs", lambda *_, **__: ROOFS)


def measurement(name, peer=False, **given):
    columns = {"section": "products", **({"peer": True} if peer else {})}
    return Measurement(name, product, {"size": 32, **given}, columns)


def toy(*comparisons, **more):
    charts = [Chart("products", "products", config("size"), column("median_ms"), lambda r: "x")]
    columns = (column("name"), config("size"), *FIGURES, SPEEDUP)
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
def found(tmp_path_factory):
    """What a run of all kinds holds, its folder, and what it said on stderr."""
    folder = tmp_path_factory.mktemp("toy")
    kinds = ("wrong", "broken", "absent", "greedy", "warning")
    measurements = [measurement("right"), measurement("double", size=64)]
    measurements += [measurement(kind, kind=kind) for kind in kinds]

    def derive(rows):
        return [row("derived", {}, section="derived", text=f"{len(rows)} rows")]

    def others(request):
        """Those of others."""
        return [needs("alone", {"size": 1}, "a friend", section="products")]

    suite = toy(Comparison(measurements, baseline="right"), others, derive=derive)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        held = run(suite, folder, traces=True, has_progress=True)
    return held, folder, said.getvalue()


def by_name(found):
    return {entry["name"]: entry for entry in found[0]["rows"]}


def test_a_suite_whose_processes_wait_for_each_other_names_the_clock_of_the_wall(tmp_path):
    held = run(
        toy(lambda request: [needs("alone", {}, "a friend", section="a")], wall=True), tmp_path
    )
    assert held["environment"]["clock"] == "wall" and workers_suite.SUITE.wall


def test_the_three_files_hold_what_was_found(found):
    held, folder, _ = found
    assert json.loads((folder / "toy.json").read_text()) == json.loads(json.dumps(held))
    assert held["complete"] and held["environment"]["clock"] == "process time"
    assert held["environment"]["roofs"]["bandwidth"] > 0
    page = (folder / "toy.md").read_text()
    assert "a quick look" in page.lower() and "needs: a friend" in page and "WRONG" in page
    assert (folder / "toy.png").read_bytes()[:4] == b"\x89PNG"


def test_a_measured_row_has_all_columns(found):
    entry = by_name(found)["right"]
    low, high = entry["ci95_ms"]
    assert 0 < low <= entry["median_ms"] <= high
    assert entry["trials"] == 6 == len(entry["samples_ms"])
    assert entry["correct"] is True and entry["error"] == 0
    assert entry["peak_memory_mb"] >= 0 and "needs" not in entry
    assert entry["tokens_per_s"] == pytest.approx(32e3 / entry["median_ms"])
    assert entry["gflop_per_s"] == pytest.approx(2 * 32**3 / entry["median_ms"] / 1e6)
    assert entry["bound"] in ("compute_bound", "memory_bandwidth", "balanced", "overhead")


def test_a_speed_up_is_over_the_baseline_and_by_rounds(found):
    entries = by_name(found)
    one, other = entries["right"]["samples_ms"], entries["double"]["samples_ms"]
    ratios = timing.within_fences([a / b for a, b in zip(one, other, strict=True)])
    assert "speedup" not in entries["right"]
    assert entries["double"]["baseline"] == "right"
    assert entries["double"]["speedup"] == pytest.approx(sorted_median(ratios))


def sorted_median(values):
    return float(torch.tensor(values, dtype=torch.float64).quantile(0.5))


def test_what_is_wrong_or_cannot_run_has_no_figures_and_says_why(found):
    entries = by_name(found)
    assert wrong_rows(found[0]) == ["wrong", "broken"]
    for name in ("wrong", "broken", "absent", "greedy", "alone"):
        assert entries[name]["median_ms"] is None and entries[name]["trials"] == 0
        assert entries[name]["peak_memory_mb"] is None
    assert entries["broken"]["failure"] == "ArithmeticError: a bug"
    assert entries["absent"]["correct"] is None
    assert "a machine that was never built" in entries["absent"]["needs"]
    assert entries["greedy"]["needs"].startswith("more memory")
    assert entries["derived"]["text"] == "8 rows"


def test_a_warning_is_a_note_of_its_row_and_is_not_printed(found):
    held, folder, said = found
    assert by_name(found)["warning"]["warnings"] == ["UserWarning: all is lost"]
    assert "warnings" not in by_name(found)["right"]
    assert "all is lost" not in said
    assert "- UserWarning: all is lost (warning)" in (folder / "toy.md").read_text()


def test_lines_tell_the_phases_and_count_the_rows(found):
    said = found[2]
    assert "\r" not in said
    told = ["measuring the machine's roofs", "row 1 of 8: right: probing", "row 7 of 8: warning"]
    told += ["timing right and 2 that take turns with it: 1 + 6 calls each"]
    told += ["part 8 of 8: found/0", "alone is done", "deriving"]
    places = [said.index(text.replace("found/0", "Those of others")) for text in told]
    assert places == sorted(places)


def test_the_page_explains_its_columns_and_no_others(found):
    page = (found[1] / "toy.md").read_text()
    told = page.partition("## What the columns say")[2]
    assert "fewer than 6 trials have no such interval" in told
    assert "`peak_memory_mb`" in told and "*speed-up*" in told
    assert "*efficiency*" not in told and "*exponent" not in told
    assert "order of what is compared may be the reverse" in " ".join(page.split())


@pytest.mark.parametrize("header", LEGEND)
def test_a_column_that_is_explained_is_one_of_a_suite(header):
    tables = [table for name in SUITES for table in suite_named(name).tables]
    assert header in {head for table in tables for head, _ in table.columns}


def test_traces_lie_beside_the_results(found):
    traces = found[1] / "traces"
    assert json.loads((traces / "right.json").read_text())["traceEvents"]
    assert "aten::mm" in (traces / "right.txt").read_text()


def test_a_row_that_takes_too_long_is_left_out(tmp_path):
    suite = toy(Comparison([measurement("slow", size=512)]))
    found = run(suite, tmp_path, max_seconds=1e-3)
    assert "faster device" in found["rows"][0]["needs"]
    assert found["rows"][0]["median_ms"] is None


def bug(request):
    yield needs("half", {}, "a friend", section="products")
    raise ArithmeticError("a bug")


def test_a_bug_in_a_part_of_the_plan_is_a_row_and_the_others_are_measured(tmp_path):
    def derive(rows):
        raise LookupError("another")

    first, last = (Comparison([measurement(name)]) for name in ("first", "last"))
    found = run(toy(first, bug, last, derive=derive), tmp_path)
    held = json.loads((tmp_path / "toy.json").read_text())
    names = [entry["name"] for entry in held["rows"]]
    assert names == ["first", "half", "bug/1", "last", "derived"] and held["complete"]
    assert held["rows"][2]["failure"] == "ArithmeticError: a bug"
    assert held["rows"][3]["median_ms"] > 0
    assert wrong_rows(found) == ["bug/1", "derived"]
    page = (tmp_path / "toy.md").read_text()
    assert "ArithmeticError: a bug" in page and "LookupError: another" in page
    assert (tmp_path / "toy.png").exists()


@pytest.mark.parametrize("kind", ["late", "uncounted"])
def test_what_fails_while_it_is_timed_has_no_figures_and_the_others_have(tmp_path, kind):
    measurements = [measurement("base", kind=kind), measurement("right"), measurement("other")]
    found = run(toy(Comparison(measurements, baseline="base")), tmp_path)
    failed, *others = found["rows"]
    assert wrong_rows(found) == ["base"] and failed["failure"].startswith("ArithmeticError: a bug")
    assert failed["median_ms"] is failed["peak_memory_mb"] is None
    assert "samples_ms" not in failed and failed["trials"] == 0
    for entry in others:
        assert entry["correct"] is True and len(entry["samples_ms"]) == 6
        assert math.isfinite(entry["median_ms"]) and "speedup" not in entry
    assert "FAILED: ArithmeticError" in (tmp_path / "toy.md").read_text()


def test_a_trace_that_fails_loses_its_own_row_alone(tmp_path, monkeypatch):
    def broken(step, path):
        if path.stem == "one":
            raise OSError("the disk is full")

    monkeypatch.setattr("dpflash.bench.measuring.trace_call", broken)
    suite = toy(Comparison([measurement("one"), measurement("two")]))
    one, two = run(suite, tmp_path, traces=True)["rows"]
    assert one["failure"] == "OSError: the disk is full" and one["median_ms"] is None
    assert two["median_ms"] > 0


def test_an_interrupt_ends_the_run_at_once_and_what_was_measured_before_is_kept(tmp_path):
    first = Comparison([measurement("first")])
    second = Comparison([measurement("second", kind="interrupted")])
    with pytest.raises(KeyboardInterrupt):
        run(toy(first, second, first), tmp_path)
    held = json.loads((tmp_path / "toy.json").read_text())
    assert [entry["name"] for entry in held["rows"]] == ["first"] and not held["complete"]
    page = (tmp_path / "toy.md").read_text()
    assert "Broken off" in page and "| first |" in page
    assert (tmp_path / "toy.png").exists()


def stop(request):
    yield needs("stopped", {}, "a friend")
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", SUITES)
def test_an_interrupt_leaves_a_page_and_a_picture_of_every_suite(name, tmp_path):
    suite = dataclasses.replace(suite_named(name), plan=lambda request: [stop])
    with pytest.raises(KeyboardInterrupt):
        run(suite, tmp_path)
    held = json.loads((tmp_path / f"{name}.json").read_text())
    assert [entry["name"] for entry in held["rows"]] == ["stopped"] and not held["complete"]
    assert "Broken off" in (tmp_path / f"{name}.md").read_text()
    assert (tmp_path / f"{name}.png").exists()


def test_an_error_that_is_no_number_is_wrong_and_shown_again_from_json(tmp_path):
    found = run(toy(Comparison([measurement("off", kind="nan")])), tmp_path)
    assert wrong_rows(found) == ["off"] and found["rows"][0]["median_ms"] is None
    (held,) = json.loads((tmp_path / "toy.json").read_text())["rows"]
    assert held["error"] is None
    assert milliseconds(held) == milliseconds(found["rows"][0]) == "WRONG (no number)"
    assert milliseconds({**held, "error": 0.25}) == "WRONG (error 2.5e-01)"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_worst_of_errors_is_infinite_where_one_is_no_number(bad, place):
    errors = [1e-7, 1e-8, 1e-9]
    assert worst(errors) == 1e-7
    errors[place] = bad
    assert worst(errors) == math.inf
    tensors = [torch.ones(2) for _ in errors]
    assert versus_worker._furthest(tensors, [torch.full((2,), 2.0)] * 3) == pytest.approx(0.5)
    tensors[place] = torch.tensor([1.0, bad])
    assert versus_worker._furthest(tensors, [torch.full((2,), 2.0)] * 3) == math.inf


def test_what_only_calls_tell_is_read_after_the_last_one(found):
    assert by_name(found)["right"]["calls"] >= 7
    assert "calls" not in by_name(found)["wrong"]


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Runs `dpflash bench all` of some plans: exit status and folder."""

    def run_all(plans):
        def suite_named(name):
            return dataclasses.replace(toy(*plans[name]), name=name)

        monkeypatch.setattr("dpflash.bench.suites.SUITES", dict.fromkeys(plans, "about"))
        monkeypatch.setattr("dpflash.bench.suites.suite_named", suite_named)
        given = ["--quick", "--threads", "1", "--device", "cpu", "--out", str(tmp_path)]
        return main(["bench", "all", *given])

    return run_all


def test_a_suite_that_breaks_off_is_named_and_the_next_one_runs(command, tmp_path, capsys):
    class Broken(Comparison):
        @property
        def measurements(self):
            raise ArithmeticError("a bug")

        @measurements.setter
        def measurements(self, value):
            pass

    right = [Comparison([measurement("right")])]
    broken = [Broken([measurement("never")])]
    assert command({"one": right, "two": broken, "three": right}) == 1
    assert {path.name for path in tmp_path.glob("*.md")} == {"one.md", "three.md"}
    said = capsys.readouterr().err
    assert "bench two broke off: ArithmeticError: a bug" in said
    assert "no figures: all of two" in said


def test_a_suite_that_measured_nothing_says_so(command, capsys):
    right = [Comparison([measurement("right")])]
    absent = [Comparison([measurement("never", kind="absent")])]
    assert command({"one": right, "two": absent}) == 0
    said = capsys.readouterr().err
    assert "bench two measured nothing" in said and "bench one" not in said


def test_an_interrupt_of_the_command_exits_with_130_and_says_where_the_files_are(
    command, tmp_path, capsys
):
    first = Comparison([measurement("first")])
    assert command({"one": [first, stop], "two": [first]}) == 130
    said = capsys.readouterr().err
    assert "bench one was broken off" in said and str(tmp_path / "one.md") in said
    assert {path.name for path in tmp_path.glob("*.md")} == {"one.md"}


def test_the_command_prints_what_the_page_says_at_its_top(command, tmp_path, capsys):
    first = Comparison([measurement("a/first"), measurement("a/second")], baseline="a/first")
    assert command({"one": [first]}) == 0
    said = capsys.readouterr().out
    assert "second is" in said and "times as fast as first." in said
    assert "2 rows were timed." in said and str(tmp_path / "one.json") in said
    top = (tmp_path / "one.md").read_text().partition("## Products")[0]
    for line in said.splitlines():
        assert not line.startswith("- ") or line in top


def test_a_wrong_peer_is_named_and_no_failure_but_a_wrong_row_of_ours_is(
    command, tmp_path, capsys
):
    peers = [measurement(kind, peer=True, kind=kind) for kind in ("wrong", "broken")]
    assert command({"one": [Comparison([measurement("right"), *peers])]}) == 0
    said = capsys.readouterr()
    assert "Peers that were wrong or failed, without figures: wrong, broken" in said.out
    assert "wrong" not in said.err.replace("row 2 of 3: wrong", "")
    assert "the peer is WRONG (error" in (tmp_path / "one.md").read_text()
    ours = [measurement("ours", kind="wrong")]
    assert command({"one": [Comparison([*ours, *peers])]}) == 1
    assert "no figures: ours" in capsys.readouterr().err


def test_a_script_without_a_guard_is_told_what_it_lacks(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from dpflash.bench.isolated import run_isolated\n"
        "def one():\n    return 1\n"
        "print(run_isolated(one))\n"
    )
    done = subprocess.run([sys.executable, script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Failed: its process ended with exit code 1" in done.stderr
    assert 'if __name__ == "__main__":' in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "given", [{"device": "tpu"}, {"threads": 0}, {"max_seconds": -1.0}], ids=str
)
def test_a_request_that_makes_no_sense_is_refused_by_name(given):
    with pytest.raises(ValueError, match=next(iter(given))):
        Request(**given)


def test_exponent_of_a_power_law_is_its_power_and_noise_widens_the_interval():
    sizes = [256, 512, 1024, 2048]
    power, low, high = timing.exponent(sizes, [3 * size**1.5 for size in sizes])
    assert power == pytest.approx(1.5) and high - low < 1e-6
    power, low, high = timing.exponent(sizes, [1.0, 2.2, 3.9, 8.3])
    assert low < 1 < high and high - low > 0.05


def test_insights_are_those_of_the_suite_or_what_its_rows_have():
    one = row("a/b", {}, median_ms=1.0, speedup=0.5, baseline="a/c")
    other = {**one, "name": "d/b", "speedup": 2.0, "baseline": "d/c"}
    fitted = {"exponent": 1.25, "exponent_ci95": [1.0, 1.5]}
    bent = row("e", {}, curve="c", sizes=[1, 2, 4, 8], **fitted)
    few = row("f", {}, curve="few", sizes=[1, 2, 4], **fitted)
    assert key_insights([one, other, bent, few]) == [
        "b is 0.5 to 2 times as fast as c, in 2 rows.",
        "c: the exponent is 1.25 [1.00, 1.50].",
        "few: too few sizes for an exponent (3).",
        "2 rows were timed.",
    ]
    own = row("i", {}, section="insights", text="All is well.")
    lacking = needs("n", {}, "a friend")
    assert key_insights([one, own, lacking]) == [
        "All is well.",
        "1 rows were timed, 1 need time or things that are not here (they say what).",
    ]


def test_speed_up_is_the_median_of_the_rounds_and_not_of_the_medians():
    ratio = timing.speedup([1, 2, 4, 8, 16, 32], [2, 4, 8, 16, 32, 64])
    assert ratio == timing.Ratio(2.0, (2.0, 2.0))


def test_time_call_counts_calls():
    calls = []
    found = timing.time_call(lambda: calls.append(1), trials=7, warm_ups=2)
    assert len(calls) == 9 and found.trials == 7
    with pytest.raises(ValueError, match="trials=0"):
        timing.time_call(list, trials=0)
    with pytest.raises(ValueError, match="warm_ups=-1"):
        timing.time_call(list, warm_ups=-1)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"device": "gpu"}, "device='gpu': expected 'cpu' or 'cuda'; pass 'cuda'"),
        ({"device": "tpu"}, "device='tpu': expected 'cpu' or 'cuda'"),
        ({"device": 3.5}, "device=3.5: expected"),
        ({"call": 3}, "call=3: expected a function without arguments; pass the function"),
        ({"warm_ups": 0.5}, "warm_ups=0.5: expected a whole number"),
        ({"trials": 2.5}, "trials=2.5: expected"),
    ],
    ids=str,
)
def test_what_time_call_refuses_is_named_with_the_way_out(given, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        timing.time_call(**{"call": list, **given})


def test_without_a_gpu_its_device_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for make in (lambda: timing.time_call(list, device="cuda:1"), lambda: Request(device="cuda")):
        with pytest.raises(ValueError, match="device='cuda.*finds no GPU here; pass device='cpu'"):
            make()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="device='cuda:1': torch finds 1 here; pass 'cuda:0'"):
        timing.usable_device("cuda:1")


def test_statistics_and_peaks_read_as_sentences():
    found = timing.Statistics(12.345, (12.1, 12.5), 0.02, 20, 0)
    assert str(found) == "12.35 ms (95% 12.1 to 12.5, 20 trials)"
    found = timing.Statistics(2.0, (1.0, 3.0), 0.5, 5, 1)
    assert str(found) == "2 ms (95% 1 to 3, 5 trials, 1 of them outliers, high variance: CV 50%)"
    peak = memory.PeakMemory()
    assert str(peak).startswith("not measured")
    peak.cpu_mb = 64.125
    assert str(peak) == "64.12 MiB on the CPU"
    peak.gpu_mb = 0.0
    assert str(peak) == "64.12 MiB on the CPU, 0 MiB on the GPU"


def test_peak_memory_sees_what_was_given_back():
    with memory.PeakMemory() as peak:
        held = torch.ones(2**24)
        del held
    assert peak.gpu_mb is None or peak.gpu_mb == 0
    assert peak.cpu_mb is None or 60 < peak.cpu_mb < 80


def test_an_isolated_call_returns_or_says_how_it_failed():
    assert isolated.run_isolated(grow, size=10) == 10
    with pytest.raises(isolated.OutOfMemory):
        isolated.run_isolated(grow, memory_limit=2**30, size=2**29)
    assert isolated.run_isolated(grow, memory_limit=2**31, size=2**27) == 2**27
    with pytest.raises(isolated.OutOfTime):
        isolated.run_isolated(stand_still, timeout=0.2)
    with pytest.raises(isolated.Failed, match="exit code 3"):
        isolated.run_isolated(leave)
    with pytest.raises(TypeError, match="size"):
        isolated.run_isolated(grow)


def test_work_of_attention_counts_the_pairs_that_its_pattern_has():
    import dpflash

    q, k, v = (torch.randn(1, 2, 96, 16, requires_grad=True) for _ in range(3))
    found = work.count_work(
        lambda: dpflash.attention(q, k, v, pattern=Dense(causal=True)).sum().backward()
    )
    assert found.flops == 14 * 16 * 2 * 96 * 97 / 2
    assert found.moved_bytes >= 4 * (8 * q.numel())


def test_work_counts_products_and_bytes_and_no_views():
    x, y = torch.randn(8, 16), torch.randn(4, 16)
    found = work.count_work(lambda: x @ y.T)
    assert found == work.Work(2 * 8 * 16 * 4, 4 * (8 * 16 + 4 * 16 + 8 * 4))


@pytest.mark.parametrize(
    ("flops", "moved", "seconds", "share", "bound"),
    [
        (1e9, 1e6, 1.5, None, "compute_bound"),
        (1e9, 1e6, 2.1, None, "overhead"),
        (1e6, 1e9, 1.5, None, "memory_bandwidth"),
        (1e9, 1.1e9, 1.5, None, "balanced"),
        (1e6, 1e6, 1.5, None, "overhead"),
        (1e9, 1e6, 1.5, 0.9, "memory_capacity"),
    ],
)
def test_the_lower_roof_bounds(flops, moved, seconds, share, bound):
    roofs = Ceilings({"float32": 1e9}, 1e9)
    found = roofline.place_under_roofs(work.Work(flops, moved), seconds, roofs, "float32", share)
    assert found["bound"] == bound
    assert found["roof"] == ("compute" if flops > moved else "memory")
    assert found["gflop_per_s"] == flops / seconds / 1e9
    assert found["intensity"] == flops / moved


def test_a_trace_has_a_table_beside_it(tmp_path):
    table = trace.trace_call(lambda: torch.ones(3) + 1, tmp_path / "a" / "b.json")
    assert table == tmp_path / "a" / "b.txt" and "aten::add" in table.read_text()


def test_milliseconds_mark_high_variance():
    entry = row("x", {}, median_ms=2.0, ci95_ms=[1.0, 3.0], cv=0.5, high_variance=True)
    assert milliseconds(entry) == "2 [1, 3] (high variance, CV 50%)"


def test_nothing_sleeps_where_something_is_measured():
    files = list((ROOT / "benchmarks").rglob("*.py"))
    assert len(files) > 10
    for path in files:
        assert not re.search(r"\bsleep\b|\b_sleep\b", path.read_text()), path


def test_the_interval_of_a_median_covers_it_as_often_as_it_says():
    # 2,000 medians of 20: the rate of covering is 0.95 or more but for 4 standard errors.
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for values in torch.randn(2000, 20, generator=generator).tolist():
        low, high = timing.median_interval(values)
        covered += low <= 0 <= high
    assert covered / 2000 > 0.95 - 4 * math.sqrt(0.95 * 0.05 / 2000)
