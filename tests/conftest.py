"""Settings of all tests: GPU tests, the number of cases that run, deadlines, the user's cache."""

import dataclasses
import gc
import inspect
import itertools
import json
import multiprocessing
import os
import random
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import hypothesis
import pluggy
import pytest
import torch

if not torch.cuda.is_available():
    # Triton decides when it is imported whether kernels are compiled or interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shared or busy machine makes any deadline fail now and then.
hypothesis.settings.register_profile("dpflash", deadline=None)
hypothesis.settings.load_profile("dpflash")


FULL = os.environ.get("DPFLASH_FULL") == "1"
# Of a test's cases otherwise, if its marker `cases` does not say another number.
CASES = 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a GPU")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
    if not FULL and not torch.cuda.is_available():
        _leave_out_cases(config, items)
    # A long file first: at the end one worker would run it alone.
    long_file = "test_rounded_normal.py" if FULL else "test_docs.py"
    items.sort(key=lambda item: item.path.name != long_file)


def pytest_collection_finish() -> None:
    """Leave what collection made, which stays, out of each search for garbage: some 0.4 s."""
    gc.freeze()


def _leave_out_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect cases beyond the number that is to run; those that kill a mutant stay."""
    mutants = json.loads(Path(__file__).with_name("mutants.json").read_text())
    killers = {killer for mutant in mutants for killer in mutant["killers"]}
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = set()
    for cases in tests.values():
        marker = cases[0].get_closest_marker("cases")
        values = [_parameters(case) for case in cases]
        first = [i for i, case in enumerate(cases) if case.nodeid in killers]
        chosen = choose_cases(values, marker.args[0] if marker else CASES, first)
        left_out |= {case for i, case in enumerate(cases) if i not in chosen}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def _parameters(case: pytest.Item) -> list[tuple[str, int]]:
    """The case's arguments with the positions of their values."""
    callspec = getattr(case, "callspec", None)  # None: the test has no parameters
    return sorted(callspec.indices.items()) if callspec else []


def choose_cases(
    cases: Sequence[Sequence[Hashable]], count: int, first: Sequence[int] = ()
) -> set[int]:
    """Indices of `count` cases that cover most values, and then most pairs of values.

    Args:
        cases: the values of each case, all of the same length; equal values are of one parameter.
        count: how many cases to choose.
        first: indices that are chosen in any case, and count.

    Returns:
        As many indices as `count`, `first` or `cases` allow, the same for the same arguments.
    """
    left = [case for case in range(len(cases)) if case not in first]
    random.Random(0).shuffle(left)
    chosen = set(first)
    covered: set[Hashable] = set()
    for case in first:
        covered |= {*cases[case], *itertools.combinations(cases[case], 2)}

    def gain(case: int) -> tuple[int, int]:
        values = set(cases[case])
        pairs = set(itertools.combinations(cases[case], 2))
        return len(values - covered), len(pairs - covered)

    while left and len(chosen) < count:
        best = max(left, key=gain)
        left.remove(best)
        chosen.add(best)
        covered |= {*cases[best], *itertools.combinations(cases[best], 2)}
    return chosen


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """Triton's interpreter without what changes nothing, in half the time.

    It looks for overflow and then reports none, and patches `tl` anew in each call of a function.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        yield
        return
    tl, patch_lang = interpreter.tl, interpreter._patch_lang

    def patch_once(function: Callable[..., None]) -> Any:
        own = [x for x in function.__globals__.values() if x is tl or x is tl.core]
        if own and not any(tl.core.is_builtin(lang.load) for lang in own):
            return interpreter._LangPatchScope()
        return patch_lang(function)

    builder = interpreter.interpreter_builder
    options = dataclasses.replace(builder.options, sanitize_overflow=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(builder, "options", options)
        yield


@pytest.fixture(scope="session", autouse=True)
def loops_without_pytest() -> Iterator[None]:
    """A trial searches the variables of its callers for generators; pytest's have none."""
    from dpflash.isolation import loop_state

    shows_variables = loop_state._shows_variables
    own = tuple(str(Path(inspect.getfile(x)).parent) for x in (pytest, pluggy, pytest.Item))

    def has_none(code: CodeType) -> bool:
        return code.co_filename.startswith(own) or shows_variables(code)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_state, "_shows_variables", has_none)
        patch.setattr(loop_state, "_LIBRARIES", loop_state._LIBRARIES + own)
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def empty_picture() -> Iterator[Callable[..., None]]:
    """Training jobs write a small empty picture, 0.3 s sooner; what would draw the real one."""
    from dpflash.train import report

    draw = report._draw
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "_draw", lambda figure, report: figure.set_size_inches(1, 1))
        yield draw


def _execute(code: str, words: Sequence[str], output: Path) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = ["-c", *words]
    # Behind pytest's capture.
    sys.stdout, sys.stderr = (open(number, "w", buffering=1) for number in (1, 2))
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})


@pytest.fixture
def forked(tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """forked(code, *words): exit status and output of code in a fork of this process.

    `python -c` would take seconds to import torch.
    """

    def run(code: str, *words: str) -> tuple[int, str]:
        output = tmp_path / "output.txt"
        process = multiprocessing.get_context("fork").Process(
            target=_execute, args=(code, words, output)
        )
        process.start()
        process.join(120)
        return process.exitcode, output.read_text()

    return run


@pytest.fixture(scope="session", autouse=True)
def user_cache(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[None]:
    """No test reads or writes the user's cache of compiled kernels."""
    own = tmp_path_factory.getbasetemp()
    # The workers of pytest-xdist share what one of them compiled.
    cache = (own.parent if hasattr(pytestconfig, "workerinput") else own) / "user-cache"
    cache.mkdir(mode=0o700, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield
