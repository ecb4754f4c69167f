"""Two checkouts in turns: that both are really measured, and in pairs; never how long it took."""

import json
import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch

import dpflash
from dpflash.bench import versus, versus_worker
from dpflash.bench.versus import WorkerError, run_versus

ROOT = Path(__file__).resolve().parent.parent.parent
QUICK_ONES = ("attention/dense/T1024", "accounting/contour")
FEW = {"launches": 2, "rounds": 2, "has_progress": False}


def copy_checkout(folder):
    """The sources, as a user's checkout of some commit has them."""
    for house in ("dpflash", "kernels", "accounting"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / house, folder / house, ignore=ignored)
    return folder


def save_results(folder, old, new):
    for side, values in (("OLD", old), ("NEW", new)):
        torch.save([torch.tensor(values)], folder / f"{side}.pt")


def read(folder):
    names = ("OLD.json", "NEW.json", "comparison.json")
    return [json.loads((folder / name).read_text()) for name in names]


@pytest.mark.cases(0)
def test_a_checkout_against_itself_gives_paired_files_with_all_measurements(tmp_path, capsys):
    names = (*QUICK_ONES, "private step/flat")
    code = run_versus(ROOT, ROOT, out=tmp_path, names=names, **FEW)
    old, new, comparison = read(tmp_path)
    assert old["environment"]["versus"] == new["environment"]["versus"]
    assert comparison["paired"] and comparison["exit_code"] == code in (0, 1)
    for found in (old, new):
        assert found["environment"]["clock"] == "process time"
        assert found["environment"]["commit"] == versus.commit(ROOT)
        assert [row["name"] for row in found["rows"]] == list(names)
        for row in found["rows"]:
            assert row["correct"] is True and row["needs"] is None, row
            assert len(row["samples_ms"]) == 4 and min(row["samples_ms"]) > 0
    verdicts = {line["verdict"] for line in comparison["lines"]}
    allowed = {"unchanged", "undecided", "slower", "faster", "more memory"}
    assert verdicts <= allowed and len(comparison["lines"]) == len(names)
    assert "trials took turns" in capsys.readouterr().out


@pytest.mark.cases(0)
def test_each_checkout_runs_its_own_code_and_an_old_one_needs_no_bench(tmp_path):
    # The old one has no benchmarks and no dilated pattern; the new one has a wrong accountant and
    # no block-sparse pattern.
    old = copy_checkout(tmp_path / "old")
    with (old / "dpflash/patterns/__init__.py").open("a") as source:
        source.write("\ndel Dilated\n")
    for user in (old / "dpflash").rglob("*.py"):
        assert "patterns import Dilated" not in user.read_text()
    new = copy_checkout(tmp_path / "new")
    with (new / "dpflash/patterns/__init__.py").open("a") as source:
        source.write("\ndel BlockSparse\n")
    with (new / "accounting/accountant.py").open("a") as source:
        source.write(
            "\n\n_right = Accountant.get_epsilon\n"
            "Accountant.get_epsilon = lambda self, delta, interval=False: (\n"
            "    _right(self, delta, interval) if self.mechanism() == 'pld' else 1.0\n)\n"
        )
    names = ("attention/dilated/T2048", "attention/block sparse/T2048", *QUICK_ONES)
    code = run_versus(old, new, out=tmp_path / "out", names=names, **FEW)
    found_old, found_new, comparison = read(tmp_path / "out")
    rows_old, rows_new = ({r["name"]: r for r in f["rows"]} for f in (found_old, found_new))
    assert "Dilated" in rows_old["attention/dilated/T2048"]["needs"]
    assert rows_new["attention/dilated/T2048"]["needs"] == "a result of the old checkout"
    assert "BlockSparse" in rows_new["attention/block sparse/T2048"]["needs"]
    assert rows_old["attention/block sparse/T2048"]["median_ms"] > 0
    assert rows_old["accounting/contour"]["median_ms"] > 0
    assert rows_new["accounting/contour"]["correct"] is False
    assert rows_new["accounting/contour"]["median_ms"] is None
    verdicts = {line["name"]: line["verdict"] for line in comparison["lines"]}
    assert verdicts["attention/dilated/T2048"] == "not comparable"
    assert verdicts["attention/block sparse/T2048"] == "fails"
    assert verdicts["accounting/contour"] == "fails" and code == 1


@pytest.mark.cases(0)
def test_a_checkout_that_does_not_import_ends_with_what_it_said(tmp_path):
    broken = copy_checkout(tmp_path / "broken")
    (broken / "dpflash/__init__.py").write_text("raise ImportError('a checkout of no use')\n")
    with pytest.raises(WorkerError, match="(?s)NEW ended: .*a checkout of no use"):
        run_versus(ROOT, broken, out=tmp_path / "out", names=QUICK_ONES[:1], **FEW)


@pytest.mark.cases(0)
def test_a_folder_that_is_no_checkout_is_refused(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path}' has no 'dpflash/__init__.py'; pass a che"):
        run_versus(tmp_path, ROOT, out=tmp_path / "out", **FEW)
    for package in ("dpflash", "kernels"):
        (tmp_path / package).mkdir()
    (tmp_path / "dpflash" / "__init__.py").touch()
    with pytest.raises(ValueError, match=f"{tmp_path}' has no 'kernels/__init__.py'; pass a che"):
        run_versus(ROOT, tmp_path, out=tmp_path / "out", **FEW)


@pytest.mark.cases(0)
def test_packages_that_are_not_dpflash_end_with_their_folder_and_the_way_out(tmp_path):
    stub = tmp_path / "stub"
    for package in ("dpflash", "kernels", "accounting"):
        (stub / package).mkdir(parents=True)
        (stub / package / "__init__.py").touch()
    told = f"(?s)OLD ended: .*__version__.*{stub}' or pass a checkout of dpflash that runs"
    with pytest.raises(WorkerError, match=told):
        run_versus(stub, ROOT, out=tmp_path / "out", **FEW)


@pytest.mark.parametrize(
    ("launches", "rounds", "message"),
    [(0, 2, "launches=0"), (2, 0, "rounds=0"), (1, 1, "launches=1, rounds=1: one trial shows")],
)
def test_too_few_trials_are_refused_before_anything_is_measured(
    launches, rounds, message, tmp_path
):
    with pytest.raises(ValueError, match=message):
        run_versus(ROOT, ROOT, out=tmp_path, launches=launches, rounds=rounds)


def test_checkouts_take_turns_on_one_cpu_and_swap_who_begins(monkeypatch, tmp_path):
    timed, cpus = [], []

    class Recorder:
        def __init__(self, side):
            self.side = side

        def ask(self, do, cpu=None, **command):
            if do == "launch":
                cpus.append(cpu)
            if do == "time":
                timed.append(self.side)
            built = {"tolerance": 1.0, "peak_memory_mb": 1.0}
            return {"build": built, "time": {"seconds": 0.01}}.get(do, {})

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {7, 2}, raising=False)
    workers = {side: Recorder(side) for side in ("OLD", "NEW")}
    save_results(tmp_path, [1.0], [1.0])
    rows = {side: {} for side in workers}
    for launch in range(3):
        versus._launch(workers, QUICK_ONES[:1], 3, launch, rows, tmp_path)
    assert timed[:6] == ["OLD", "NEW", "NEW", "OLD", "OLD", "NEW"]
    assert rows["OLD"][QUICK_ONES[0]]["samples_ms"] == [10.0] * 9
    # The next launch is on the next one.
    assert cpus == [2, 2, 7, 7, 2, 2]


@pytest.mark.cases(0)
def test_a_launch_runs_on_the_cpu_that_it_is_told(tmp_path):
    tree = versus._copy_sources(ROOT, tmp_path / "tree")
    harness = versus._copy_harness(tmp_path / "harness")
    cpu = max(os.sched_getaffinity(0))
    worker = versus._Worker(tree, harness, tmp_path / "log", ROOT)
    try:
        worker.ask(do="launch", cpu=cpu)
        own = worker.process.pid
        children = Path(f"/proc/{own}/task/{own}/children")
        if not children.exists():
            pytest.skip("this system does not tell a process's children")
        (launched,) = children.read_text().split()
        assert os.sched_getaffinity(int(launched)) == {cpu}
        worker.ask(do="end")
    finally:
        worker.process.communicate()


@pytest.mark.parametrize(
    ("old", "new", "is_right"),
    [
        ([1.0, 2.0], [1.0, 2.0 + 1e-4], True),
        ([1.0, 2.0], [1.0, 2.1], False),
        ([1.0, 2.0], [1.0, float("nan")], False),
        ([1.0, 2.0], [1.0], False),
        ([0.0], [0.0], True),
    ],
)
def test_a_result_unlike_that_of_the_old_checkout_is_no_row_of_figures(
    old, new, is_right, tmp_path
):
    save_results(tmp_path, old, new)
    rows = [{"needs": None, "correct": None, "tolerance": 1e-3} for _ in range(2)]
    versus._compare_results(*rows, tmp_path)
    assert [row["correct"] for row in rows] == [True, is_right]
    assert [versus._runs(row) for row in rows] == [True, is_right]


def test_the_private_step_trains_on_the_loaders_batches_and_gives_their_clipped_mean():
    small = {"batch": 4, "tokens": 8, "width": 16, "layers": 1, "heads": 2, "vocabulary": 11}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="a step was made on a batch that")
        job = versus_worker.private_step("flat", **small)
        job.step()
    x, y = torch.randint(0, 11, (2, 4, 8), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = dpflash.nn.LongContextLM(11, 16, 1, 2, max_seq_len=8, tie_embeddings=False)
    clipped = [torch.zeros_like(p) for p in model.parameters()]
    for i in range(4):
        loss = dpflash.losses.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).sum()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.cat([g.flatten() for g in grads]).norm()
        for held, grad in zip(clipped, grads, strict=True):
            held.add_(grad / norm.clamp(min=1) / 4)
    for got, wanted in zip(job.result(), clipped, strict=True):
        torch.testing.assert_close(got / 1024, wanted, rtol=1e-4, atol=1e-6)
