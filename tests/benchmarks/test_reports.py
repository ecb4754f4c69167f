"""The rows of others' reports, and that ours answer them."""

import contextlib
import functools
import io
import json
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest

from dpflash.bench import output
from dpflash.bench.attention import DIRECTIONS
from dpflash.bench.max_length import SEARCHED
from dpflash.bench.published import Answer, read_reports
from dpflash.bench.quality import contestants
from dpflash.bench.ranks import (
    CONTEXT,
    CONTEXT_RANKS,
    NODE,
    NODES,
    RANKS,
    SAMPLES,
    SIZES,
)
from dpflash.bench.suite import Comparison, Request
from dpflash.bench.suites import suite_named
from dpflash.cli import main

ROOT = Path(__file__).resolve().parents[2]
REPORTS = read_reports()
TABLES = [table for report in REPORTS for table in report.tables]
ROWS = [(table.id, row) for table in TABLES for row in table.rows]
ANSWERS = [
    pytest.param(answer, id=f"{table}-{number}.{part}")
    for number, (table, row) in enumerate(ROWS)
    for part, answer in enumerate(row.answers)
]
# What rows will have that are measured by a function of the plan, by (suite, section).
_BY_FUNCTIONS = {
    ("variants", "quality"): [{"what": contestant.name} for contestant in contestants(1024)],
    ("max-length", "max_length"): [
        {"variant": variant, "direction": direction}
        for variant in SEARCHED
        for direction in DIRECTIONS
    ],
    ("ranks", SAMPLES): [
        {"ranks": ranks, "batch": batch, "tokens": tokens}
        for ranks in RANKS
        for batch, tokens in SIZES
    ],
    ("ranks", CONTEXT): [{"ranks": ranks} for ranks in CONTEXT_RANKS],
    ("ranks", NODE): [{"ranks": nodes} for nodes in NODES],
}


def _made_up(name, config, columns):
    return output.row(
        name,
        config,
        **{
            "median_ms": 1.0,
            "ci95_ms": [1.0, 1.0],
            "peak_memory_mb": 1.0,
            "correct": True,
            "tokens_per_s": 1.0,
            "speedup": 1.0,
            "speedup_ci95": [1.0, 1.0],
            **columns,
        },
    )


@functools.cache
def _rows_to_be(suite_name):
    """What a full run measures, and what it derives, with made up figures."""
    suite = suite_named(suite_name)
    # Sizes that this machine is too slow for are part of the plan too.
    plan = suite.plan(Request(device="cpu", max_seconds=1e9))
    rows = [
        _made_up(one.name, one.config, one.columns)
        for item in plan
        if isinstance(item, Comparison)
        for one in item.measurements
    ]
    # JSON has no tuples.
    made: list[dict[str, Any]] = json.loads(json.dumps([*rows, *suite.derive(rows)]))
    return made


def test_every_row_is_answered_in_one_way():
    for table, row in ROWS:
        ways = bool(row.answers) + bool(row.features) + bool(row.needs)
        assert ways == 1, (table, row.named)


@pytest.mark.parametrize(
    "command", sorted({answer.command for _, row in ROWS for answer in row.answers})
)
def test_the_command_that_measures_a_row_has_these_options(command):
    help_text = _help(command.split()[1:3])
    assert all(f"{option} " in help_text for option in re.findall(r"--[a-z-]+", command))


def _help(names):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.raises(SystemExit) as ended:
        main([*names, "--help"])
    assert ended.value.code == 0
    return said.getvalue()


def test_what_is_wrong_is_said_of_every_table_or_of_each_of_its_rows():
    silent = [
        (table.id, row.named)
        for table in TABLES
        for row in table.rows
        if row.figures and not table.wrong and not row.wrong
    ]
    assert not silent


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_full_run_has_the_rows_that_an_answer_names(answer):
    if answer.suite == "scaling":
        found = list((ROOT / "benchmarks" / "results").glob(f"*/{answer.suite}.json"))
        assert found
        for path in found:
            rows = json.loads(path.read_text())["rows"]
            assert answer.needs or any(answer.fits(row) for row in rows), path
    elif (answer.suite, answer.section) in _BY_FUNCTIONS:
        rows = _BY_FUNCTIONS[answer.suite, answer.section]
        assert any(answer.fits({"section": answer.section, "config": row}) for row in rows)
    else:
        rows = _rows_to_be(answer.suite)
        assert any(answer.fits(row) for row in rows), answer


def test_every_feature_can_be_imported_or_is_a_command_or_a_target_of_make():
    targets = (ROOT / "Makefile").read_text()
    for name in sorted(set().union(*(row.features for _, row in ROWS))):
        if name.startswith("dpflash."):
            assert pkgutil.resolve_name(name).__doc__, name
        elif name.startswith("dpflash "):
            assert "usage: " in _help(name.split()[1:])
        else:
            assert re.search(rf"^{name.removeprefix('make ')}:", targets, re.MULTILINE), name


def test_an_answer_fits_by_section_and_values_of_config_and_columns():
    answer = Answer("batch", "some", {"tokens": 8, "curve": "a"})
    row = {"section": "some", "curve": "a", "config": {"tokens": 8}}
    assert answer.fits(row)
    assert not answer.fits({**row, "config": {"tokens": 9}})
    assert not answer.fits({**row, "config": {}})
    assert not answer.fits({**row, "curve": "b"})
    assert not answer.fits({**row, "section": "other"})
