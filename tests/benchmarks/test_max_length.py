"""The search for the longest sequence; limits are of bytes, or so that any machine meets them."""

import math

import pytest

import dpflash
from dpflash.bench import max_length, output
from dpflash.bench.isolated import Failed, OutOfMemory, OutOfTime
from dpflash.bench.max_length import CEILING, SEARCHED, SUITE, Measured, make_call, search
from dpflash.bench.suite import Request, Unsupported
from dpflash.patterns import Dense

# A call may take minutes.
PATIENT = Request(device="cpu", max_seconds=4000.0, threads=1, has_progress=False)


def searched(monkeypatch, answer, request=PATIENT, limits=(1024, 4096)):
    """The row of a search whose calls are answered so."""
    monkeypatch.setattr(max_length, "run_isolated", lambda _, *, tokens, **__: answer(tokens))
    monkeypatch.setattr(max_length, "_range", lambda request: limits)
    return max_length._search_row("Dense", "forward", request)


def called(variant, direction, tokens=512):
    """A call in this process."""
    given = {"variant": variant, "direction": direction, "tokens": tokens}
    return make_call(**given, dtype="float32", device="cpu", seed=0)


@pytest.mark.parametrize("first", [256, 1024, 4096])
def test_a_search_ends_within_an_eighth_of_the_limit(first):
    for limit in (777 * times for times in (*range(1, 40), 100, 1000, 5000)):
        tried = []

        def why_not(tokens, tried=tried, limit=limit):
            tried.append(tokens)
            return "memory" if tokens > limit else None

        longest, shortest, stopped_by = search(why_not, first, 2**30)
        assert longest <= limit < shortest
        assert shortest - longest <= longest / 8
        assert stopped_by == "memory" and len(set(tried)) == len(tried)


def test_a_search_that_ends_at_the_ceiling_found_no_limit():
    tried = []
    assert search(tried.append, 1000, 5000) == (5000, None, CEILING)
    assert tried == [1000, 2000, 4000, 5000]


def test_the_reason_is_that_of_the_shortest_sequence_that_failed():
    def why_not(tokens):
        return None if tokens <= 1000 else "time" if tokens < 1900 else "memory"

    assert search(why_not, 1000, 2**20)[2] == "time"
    assert search(lambda tokens: "memory" * (tokens > 2000) or None, 1000, 2**20)[0] == 2000


@pytest.mark.parametrize(
    ("variant", "direction"),
    [("LongNet", "forward"), *((variant, "forward+backward") for variant in SEARCHED)],
)
def test_every_variant_agrees_with_its_definition(variant, direction):
    taken = called(variant, direction)
    assert taken.error < 1e-4 and taken.seconds > 0


@pytest.mark.parametrize("variant", ["LongNet", "SlidingWindow", "BlockSparse"])
def test_attention_that_leaves_nothing_out_does_not_pass_the_check(variant, monkeypatch):
    right = dpflash.attention

    def wrong(q, k, v, *, pattern):
        return right(q, k, v, pattern=Dense(causal=pattern.causal))

    monkeypatch.setattr(dpflash, "attention", wrong)
    assert called(variant, "forward").error > 1e-2


def test_a_backward_pass_and_the_inputs_count_into_memory():
    if called("Dense", "forward", 256).peak_mb is None:
        pytest.skip("this system does not report the growth of memory")
    forward = called("SlidingWindow", "forward", 4096)
    both = called("SlidingWindow", "forward+backward", 4096)
    of_a_tensor = 4096 * 8 * 64 * 4 / 2**20
    assert forward.peak_mb > 3.9 * of_a_tensor and both.peak_mb > 7.9 * of_a_tensor


@pytest.mark.cases(0)
def test_a_search_stops_where_memory_ends(monkeypatch):
    # The libraries take some 345 MiB of it.
    limit = 475 * 2**20
    monkeypatch.setattr(max_length, "_CPU_MEMORY", limit)
    monkeypatch.setattr(max_length, "_range", lambda request: (2**12, 2**16))
    monkeypatch.setattr(max_length, "_WITHIN", 1)
    row = max_length._search_row("BlockSparseOptimized", "forward", PATIENT)
    assert row["stopped_by"] == "memory" and row["limit_bytes"] == limit
    assert 256 <= row["max_tokens"] < row["failed_tokens"] < limit / (4 * 8 * 64 * 4)
    assert row["correct"]


def test_a_call_beyond_its_time_is_no_length(monkeypatch):
    def answer(tokens):
        if tokens > 2000:
            raise OutOfTime("it took longer")
        return Measured(1e-6, PATIENT.limit * (tokens > 1500), 1.0)

    row = searched(monkeypatch, answer)
    assert row["stopped_by"] == "time" and row["max_tokens"] == 1408
    assert row["failed_tokens"] == 1536


def test_memory_and_failures_are_distinguished(monkeypatch):
    def fail(error):
        def answer(tokens):
            raise error

        return answer

    row = searched(monkeypatch, fail(OutOfMemory("no")))
    assert row["stopped_by"] == "memory" and row["max_tokens"] is None
    assert row["correct"] is None and "call_seconds" not in row
    row = searched(monkeypatch, fail(Failed("its process ended with exit code -6")))
    assert row["stopped_by"] == "failure: its process ended with exit code -6"
    row = searched(monkeypatch, fail(Unsupported("a GPU")))
    assert row["needs"] == "a GPU" and "max_tokens" not in row


def test_a_figure_is_of_the_longest_call_that_went_well(monkeypatch):
    def answer(tokens):
        return Measured(1e-6, tokens / 1e6, tokens / 1024)

    row = searched(monkeypatch, answer)
    assert row["max_tokens"] == 4096 and row["stopped_by"] == CEILING
    assert row["call_seconds"] == 4096 / 1e6 and row["peak_memory_mb"] == 4.0
    for _, cell in SUITE.tables[0].columns:
        assert output.shown(cell(row))


@pytest.mark.parametrize("error", [2e-4, math.inf, math.nan])
def test_a_wrong_variant_has_no_length(monkeypatch, error):
    row = searched(monkeypatch, lambda tokens: Measured(error, 0.1, 1.0))
    assert row["correct"] is False and "max_tokens" not in row
    shown = "error 2.0e-04" if math.isfinite(error) else "no number"
    cell = dict(SUITE.tables[0].columns)["longest T"]
    assert cell(row) == f"WRONG ({shown})"
    if not math.isfinite(error):
        assert cell({**row, "error": None}) == cell(row)


def test_a_call_that_raises_is_a_row_that_failed(monkeypatch):
    def answer(tokens):
        if tokens > 2000:
            raise ArithmeticError("a bug")
        return Measured(1e-6, 0.1, 1.0)

    row = searched(monkeypatch, answer)
    assert row["correct"] is False and row["failure"] == "ArithmeticError: a bug"
    assert "max_tokens" not in row
    assert "FAILED: ArithmeticError" in dict(SUITE.tables[0].columns)["longest T"](row)


def test_the_time_limit_of_a_call_follows_that_of_the_row(monkeypatch):
    limits = []

    def spy(function, *, timeout, memory_limit, **_):
        limits.append((timeout, memory_limit))
        return Measured(0.0, 0.0, None)

    monkeypatch.setattr(max_length, "run_isolated", spy)
    for seconds in (24.0, 48.0):
        max_length._search_row("Dense", "forward", Request(device="cpu", max_seconds=seconds))
    (first, memory), (last, _) = limits[0], limits[-1]
    assert last - first == pytest.approx(1.0) and memory == 4 * 2**30


def test_a_quick_look_searches_less():
    quick, full = (len(list(SUITE.plan(Request(quick=q, device="cpu")))) for q in (True, False))
    assert quick < full == len(SEARCHED)
    assert max_length._range(Request(quick=True, device="cpu"))[1] < 2**14
