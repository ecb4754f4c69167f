"""`dpflash train`, from the command line to the files that it leaves."""

import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

import dpflash
from dpflash.accounting import RDPAccountant
from dpflash.cli import main
from dpflash.patterns import SlidingWindow
from dpflash.privacy.ledger import Ledger
from dpflash.privacy.spending import rounded_up
from dpflash.train.config import Corpus, Parallelism, TrainingConfig
from dpflash.train.language_models import ByteModel
from dpflash.train.run import Interrupted, TrainingRun

pytestmark = pytest.mark.usefixtures("one_thread", "empty_picture")
FULL = os.environ.get("DPFLASH_FULL") == "1"
STEPS = 6
TINY: dict[str, Any] = {
    "seq_len": 24,
    "batch_size": 6,
    "physical_batch_size": 4,
    "steps": STEPS,
    "delta": 1e-3,
    "accountant": "rdp",
    "embed_dim": 8,
    "layers": 1,
    "heads": 1,
    "eval_windows": 4,
    "checkpoint_every": 4,
}


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    rng = random.Random(0)
    for number in range(50):
        text = "ab" * rng.randrange(10, 60) + f" {number}"
        (folder / f"poem-{number}.txt").write_text(text)
    return folder


def options(data, /, **changes):
    """The words of a command that trains a tiny model."""
    words = ["train", "--data", str(data)]
    for name, value in {**TINY, **changes}.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def config(data, **changes):
    return TrainingConfig(**{"data": str(data), "seed": 7, "accountant": "rdp", **TINY, **changes})


def stop_after(calls):
    """A should_stop that says so when it is asked for that many times."""
    asked = iter(range(1, 10_000))
    return lambda: next(asked) == calls


def weights(folder):
    return torch.load(folder / "model.pt", weights_only=True)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def report_of(folder):
    return json.loads((folder / "report.json").read_text())


def test_a_run_leaves_what_its_summary_names(data, tmp_path, capsys, monkeypatch, empty_picture):
    monkeypatch.setattr("dpflash.train.report._draw", empty_picture)
    out = tmp_path / "out"
    (data / "twin.txt").write_bytes((data / "poem-7.txt").read_bytes())
    assert main([*options(data, clipping="per_layer", learning_rate=0.02), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "; left out: 1 duplicate" in shown
    names = {"checkpoint.pt", "ledger.jsonl", "metrics.jsonl", "model.pt", "report.json"}
    names.add("training.png")
    own = {"config.json", "ledger.jsonl.guard"}  # read by dpflash.load and by the ledger
    assert {path.name for path in out.iterdir()} == names | own
    assert all(str(out / name) in shown for name in names)
    report = report_of(out)
    assert report["privacy_unit"].startswith(f"{Ledger(out / 'ledger.jsonl').unit} (one file)")
    words = ("held-out bits per byte after private training", "after non-private training")
    for word in (report["neighboring_relation"], report["sampler"], *words):
        assert word in shown
    assert report.keys() >= {
        *(
            "epsilon",
            "epsilon_lower",
            "delta",
            "target_epsilon",
            "stopped",
            "neighboring_relation",
            "privacy_unit",
        ),
        *("sampler", "accountant", "noise_multiplier", "max_grad_norm", "clipping"),
        *("sample_rate", "expected_batch_size", "num_documents", "steps", "seeded", "history"),
        *("bits_per_byte_before", "bits_per_byte_after", "bits_per_byte_nonprivate"),
        *("tokens_per_second", "peak_memory_mb", "versions", "not_covered_by_epsilon"),
    }
    assert report["neighboring_relation"] == "zero_out" and report["sampler"] == "poisson"
    public = report["public"]
    assert not public["dataset_size_declared"] and not public["batches_without_slots"]
    assert public["dataset_size"] == report["num_documents"] and public["slots"] > 1
    assert public["lengths"].startswith("public, ")
    assert f"{report['num_documents']} documents, treated as public" in shown
    assert report["clipping"] == "per_layer" and report["seeded"] is False
    assert report["ranks"]["data"] == report["ranks"]["context"] == 1
    assert [entry["step"] for entry in report["history"]] == list(range(1, STEPS + 1))
    assert len(report["history_nonprivate"]) == STEPS
    assert report["bits_per_byte_nonprivate"] < report["bits_per_byte_before"]
    assert report["tokens_per_second"] > 0 and report["peak_memory_mb"] > 0
    private = report["not_covered_by_epsilon"]
    assert {"history.loss", "bits_per_byte_nonprivate", "clip_fraction"} <= private.keys()
    # Both tell how many documents were drawn.
    assert {"tokens_per_second", "peak_memory_mb"} <= private.keys()
    assert len((out / "ledger.jsonl").read_text().splitlines()) == STEPS


def test_epsilon_is_that_of_dpflash_epsilon_and_meets_the_target(data, tmp_path, capsys):
    # Nine steps of 6 out of some 45 documents: the run goes into a second pass over the data.
    report = TrainingRun.start(
        config(data, steps=9, target_epsilon=3.0, baseline=False), tmp_path / "out"
    ).run()
    assert 0.99 * 3 < report["epsilon"] <= 3 and report["steps"] == 9
    assert report["sample_rate"] == 6 / report["num_documents"]
    words = ["epsilon", "--json", "--steps", "9", "--delta", "1e-3", "--accountant", "rdp"]
    for name in ("noise_multiplier", "sample_rate"):
        words += [f"--{name.replace('_', '-')}", repr(report[name])]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] == report["epsilon"]


@pytest.mark.parametrize("bands", ["auto", "3"])
def test_bands_are_trained_accounted_for_and_reported(bands, data, tmp_path, capsys):
    out = tmp_path / "out"
    changes = {"bands": bands, "steps": 7, "target_epsilon": 6, "no_baseline": ""}
    words = [word for word in options(data, **changes) if word]
    assert main([*words, "--out", str(out)]) == 0
    report = report_of(out)
    trained = report["bands"]
    assert trained > 1 and bands in ("auto", str(trained))
    assert f" of {trained} bands, " in capsys.readouterr().out
    assert (report["sampler"], report["noise_mechanism"]) == ("cyclic_poisson", "banded")
    assert report["noise_state_bytes"] == (trained - 1) * 8 * report["num_parameters"]
    assert 0.97 * 6 < report["epsilon"] <= 6
    words = ["epsilon", "--json", "--sampler", "cyclic_poisson", "--bands", str(trained)]
    words += ["--steps", "7", "--delta", "1e-3", "--accountant", "rdp"]
    words += ["--neighboring-relation", "zero_out"]
    for name in ("noise_multiplier", "sample_rate"):
        words += [f"--{name.replace('_', '-')}", repr(report[name])]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] == report["epsilon"]
    assert len(report["noise_coefficients"]) == trained


@pytest.mark.cases(0)
def test_a_run_with_bands_is_audited(data, tmp_path, capsys):
    made = config(data, bands=3, steps=7, baseline=False)
    report = TrainingRun.start(made, tmp_path / "out").run()
    words = ["audit", "--run", str(tmp_path / "out"), "--canaries", "60", "--no-ranks", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["claimed_epsilon"] == report["epsilon"]


def test_a_resumed_run_with_bands_has_the_noise_of_one_that_was_not_stopped(data, tmp_path):
    made = config(data, bands=3, steps=5, baseline=False)
    whole = TrainingRun.start(made, tmp_path / "whole").run()
    with pytest.raises(Interrupted):
        TrainingRun.start(made, tmp_path / "out").run(should_stop=stop_after(4))
    resumed = TrainingRun.resume(tmp_path / "out").run()
    assert resumed["epsilon"] == whole["epsilon"] and resumed["bands"] == 3
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "out"))


def test_a_declared_size_gives_the_rate_and_is_for_add_remove(data, tmp_path):
    changes = {"dataset_size": 400, "steps": 2, "baseline": False}
    report = TrainingRun.start(config(data, **changes), tmp_path / "out").run()
    assert report["sample_rate"] == 6 / 400 != 6 / report["num_documents"]
    assert report["neighboring_relation"] == "add_remove"
    assert report["public"]["dataset_size"] == 400 and report["public"]["dataset_size_declared"]
    # Losses are of the drawn documents alone: about log2(257) bits for each byte at the start.
    assert all(entry["loss"] is None or 4 < entry["loss"] < 12 for entry in report["history"])


def test_each_step_sees_windows_of_its_own_draw(data, tmp_path):
    job = TrainingRun.start(config(data, physical_batch_size=2, steps=3), tmp_path / "out")
    seen: list[int] = []
    windows = job._windows
    plain = type(windows).window

    def recording(index, step):
        seen.append(step)
        return plain(windows, index, step)

    windows.window = recording  # type: ignore[method-assign]
    with pytest.raises(Interrupted):
        job.run(should_stop=lambda: job.step == 3)
    # Padding rows repeat a window of their own draw.
    assert seen == sorted(seen) and set(range(3)) <= set(seen)


def test_a_stopped_and_resumed_run_equals_one_that_was_not_stopped(data, tmp_path):
    whole = TrainingRun.start(config(data), tmp_path / "whole").run()
    # Asked after the first evaluation, after each private step, then in the baseline.
    for calls in (1, 3, STEPS + 1, STEPS + 4) if FULL else (3, STEPS + 4):
        out = tmp_path / f"stopped-{calls}"
        with pytest.raises(Interrupted):
            TrainingRun.start(config(data), out).run(should_stop=stop_after(calls))
        report = TrainingRun.resume(out).run()
        assert same(weights(out), weights(tmp_path / "whole")), calls
        for key in ("epsilon", "history", "history_nonprivate", "lost_steps", "clip_fraction"):
            assert report[key] == whole[key], (calls, key)
        assert report["bits_per_byte_nonprivate"] == whole["bits_per_byte_nonprivate"]


@pytest.mark.cases(0)
def test_a_stopped_and_resumed_packed_run_equals_one_that_was_not_stopped(data, tmp_path):
    # Longer than a microbatch of 96 bytes, and, as most documents, than a row.
    (data / "long.txt").write_text("long " * 40)
    whole = TrainingRun.start(config(data, pack=True), tmp_path / "whole").run()
    for calls in (3, STEPS + 4):
        out = tmp_path / f"stopped-{calls}"
        with pytest.raises(Interrupted):
            TrainingRun.start(config(data, pack=True), out).run(should_stop=stop_after(calls))
        report = TrainingRun.resume(out).run()
        assert same(weights(out), weights(tmp_path / "whole")), calls
        for key in ("epsilon", "history", "history_nonprivate", "clip_fraction"):
            assert report[key] == whole[key], (calls, key)
    assert "each step trains on all of it, packed" in whole["privacy_unit"]
    assert any("more than 96 tokens" in note for note in whole["notes"])
    assert whole["window_len"] == TINY["seq_len"]


def test_a_packed_step_trains_on_all_windows_of_a_document_as_one_unit(data, tmp_path):
    job = TrainingRun.start(config(data, pack=True), tmp_path / "out")
    assert job.pack is not None
    documents = [job._windows.tokens(index, 0) for index in range(8)]
    documents = [tokens for tokens in documents if len(tokens) < job.pack.tokens]
    assert len(documents) > 2
    # Whole, from the start token.
    assert all(int(tokens[0]) == 256 for tokens in documents)
    assert max(map(len, documents)) > TINY["seq_len"]
    for tokens in documents:
        nats, count = 0.0, 0
        with torch.no_grad():
            for part in tokens.split(TINY["seq_len"]):
                logits = job.model(part[None])[0, :-1]
                loss = torch.nn.functional.cross_entropy(logits, part[1:], reduction="sum")
                nats, count = nats + float(loss), count + len(part) - 1
            found, targets = job._losses(job.model, job.pack([tokens]))
        assert int((targets >= 0).sum()) == count
        assert float(found[0]) == pytest.approx(nats / count, rel=1e-5)


def test_packing_that_cannot_be_is_refused_by_name(data, tmp_path):
    with pytest.raises(ValueError, match="seq_len=1 with pack"):
        config(data, pack=True, seq_len=1)
    with pytest.raises(ValueError, match="sharding='zigzag' with pack"):
        Parallelism(context_parallel=2, sharding="zigzag").check(config(data, pack=True))


def test_the_seed_repeats_a_run_and_only_the_seed_does(data, tmp_path):
    runs = {}
    for name, seed in (("a", 7), ("b", 7), ("c", 8), ("d", None), ("e", None)):
        job = TrainingRun.start(config(data, seed=seed, steps=1, baseline=False), tmp_path / name)
        assert job.run()["seeded"] is (seed is not None)
        runs[name] = weights(tmp_path / name)
    assert same(runs["a"], runs["b"])
    assert not same(runs["a"], runs["c"])
    assert not same(runs["d"], runs["e"])


@pytest.mark.parametrize("changes", [{}, {"pack": True}], ids=["windows", "packed"])
def test_a_model_that_mixes_documents_is_refused_before_the_first_step(
    changes, data, tmp_path, monkeypatch
):
    name = "packed_losses" if changes else "losses"
    own = getattr(ByteModel, name)

    def divided(self, *inputs):
        found = own(self, *inputs)
        return found / found.detach().mean()

    monkeypatch.setattr(ByteModel, name, divided)
    run = TrainingRun.start(config(data, **changes), tmp_path / "out")
    with pytest.raises(ValueError, match=r"make_private\(example=...\): the .* of sample . is"):
        run.run()
    assert run.step == run.epsilon == 0


def test_the_loss_falls_and_without_noise_there_is_no_epsilon(data, tmp_path):
    job = TrainingRun.start(
        config(
            data,
            target_epsilon=None,
            noise_multiplier=0,
            steps=12,
            learning_rate=0.1,
            baseline=False,
        ),
        tmp_path / "out",
    )
    report = job.run()
    assert report["bits_per_byte_before"] > 7.5
    assert report["bits_per_byte_after"] < 5
    assert report["epsilon"] is None
    assert any("no privacy" in note for note in report["notes"])
    assert json.loads((tmp_path / "out" / "report.json").read_text())["epsilon"] is None


def limited(data, steps, **changes):
    """A job of 12 steps of which max_epsilon allows only so many."""
    plain = config(data, steps=12, target_epsilon=None, noise_multiplier=2.0)
    accountant = RDPAccountant()
    accountant.history = [(2.0, 6 / len(Corpus.read(plain).train), steps)]
    changes = {"baseline": False, **changes, "max_epsilon": accountant.get_epsilon(1e-3)}
    return TrainingConfig(**{**plain.as_dict(), **changes})


@pytest.mark.parametrize("steps", [3, 9])
def test_training_ends_cleanly_where_max_epsilon_is_spent(steps, data, tmp_path, capsys):
    out = tmp_path / "out"
    job = TrainingRun.start(limited(data, steps, baseline=True), out)
    report = job.run()
    assert job.step == report["steps"] == len(report["history"]) == steps
    assert report["epsilon"] == pytest.approx(report["max_epsilon"], rel=1e-12)
    assert report["history"][-1]["epsilon"] == report["epsilon"]
    assert f"stopped after step {steps} of 12" in report["stopped"]
    assert report["stopped"] in report["notes"]
    assert len(report["history_nonprivate"]) == steps
    assert len((out / "ledger.jsonl").read_text().splitlines()) == steps
    # Nothing is left to do, and nothing is done.
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert main(["train", "--resume", str(out)]) == 0
    shown = capsys.readouterr().out
    assert f"stopped after step {steps} of 12" in shown and "nothing is left to do" in shown
    assert "left out" not in shown
    after = {path.name: path.read_bytes() for path in out.iterdir()}
    assert {k: v for k, v in after.items() if k != "report.json"} == {
        k: v for k, v in before.items() if k != "report.json"
    }


def test_a_run_that_was_stopped_after_its_budget_was_spent_is_finished_without_a_step(
    data, tmp_path
):
    out = tmp_path / "out"
    job = TrainingRun.start(limited(data, 4), out)
    with pytest.raises(Interrupted):
        job.run(should_stop=lambda: job.step == 4)
    report = TrainingRun.resume(out).run()
    assert report["steps"] == 4 and "stopped after step 4" in report["stopped"]
    assert report["bits_per_byte_after"] is not None and (out / "model.pt").exists()
    assert len((out / "ledger.jsonl").read_text().splitlines()) == 4


def test_lost_steps_count_against_max_epsilon(data, tmp_path):
    out = tmp_path / "out"
    limit = limited(data, 6, checkpoint_every=1000)
    job = TrainingRun.start(limit, out)

    def die():
        if job.step == 3:
            raise MemoryError
        return False

    with pytest.raises(MemoryError):
        job.run(should_stop=die)
    with pytest.warns(UserWarning, match="3 step"):
        resumed = TrainingRun.resume(out)
    report = resumed.run()
    assert report["lost_steps"] == 3 and report["steps"] == 3
    assert report["epsilon"] <= report["max_epsilon"] * (1 + 1e-12)
    assert len((out / "ledger.jsonl").read_text().splitlines()) == 6


def test_a_max_epsilon_that_allows_no_step_is_refused_and_nothing_is_written(
    data, tmp_path, capsys
):
    out = tmp_path / "out"
    words = options(data, noise_multiplier=2, max_epsilon=1e-3)
    assert main([*words, "--out", str(out)]) == 2
    assert "budget=PrivacyBudget(epsilon=0.001" in capsys.readouterr().err
    assert not out.exists()


def test_a_finished_run_is_not_run_again(data, tmp_path, capsys):
    out = tmp_path / "out"
    words = [*options(data, steps=2), "--no-baseline", "--resume-if-present"]
    assert main(words) == 2
    assert "pass --out" in capsys.readouterr().err
    words += ["--out", str(out)]
    assert main(words) == 0
    names = ("checkpoint.pt", "ledger.jsonl", "model.pt", "report.json")
    before = [(out / name).read_bytes() for name in names]
    written = (out / "checkpoint.pt").stat().st_mtime_ns
    capsys.readouterr()
    assert main(words) == 0
    assert "finished" in capsys.readouterr().out
    assert [(out / name).read_bytes() for name in names] == before
    assert (out / "checkpoint.pt").stat().st_mtime_ns == written


def test_runs_share_a_ledger_and_state_their_own_epsilon_and_that_of_all(data, tmp_path, capsys):
    first, second, third = (tmp_path / name for name in "abc")
    shared = tmp_path / "shared.jsonl"
    words = [*options(data, target_epsilon=3), "--no-baseline", "--ledger", str(shared)]
    options_of_first = {"seed": None, "baseline": False, "target_epsilon": 3.0}
    job = TrainingRun.start(config(data, ledger=str(shared), **options_of_first), first)
    with pytest.raises(Interrupted):
        job.run(should_stop=lambda: job.step == 2)
    assert main([*words, "--out", str(second)]) == 0
    assert "epsilon 3 of this run after the last step" in capsys.readouterr().out
    assert main(["export", str(first), "--out", str(tmp_path / "export-0")]) == 0
    assert main(["train", "--resume", str(first)]) == 0
    shown = capsys.readouterr().out
    assert not (first / "ledger.jsonl").exists() and str(shared) in shown
    last, other = report_of(first), report_of(second)
    assert last["lost_steps"] == other["lost_steps"] == 0
    assert last["epsilon_of_run"] == pytest.approx(other["epsilon_of_run"], rel=1e-9)
    assert last["epsilon_of_run"] <= 3 < other["epsilon"] < last["epsilon"]
    total = rounded_up(last["epsilon"])
    assert re.search(rf"\nepsilon of all runs of the ledger +{total}\n", shown)
    delta = ["--delta", "1e-3", "--accountant", "rdp"]
    assert main(["budget", str(shared), *delta, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] == last["epsilon"]
    for folder in (first, second):
        assert main(["export", str(folder), "--out", str(tmp_path / f"of-{folder.name}")]) == 0
        card = (tmp_path / f"of-{folder.name}" / "README.md").read_text()
        assert f"The weights are ({total}, 0.001)" in card
    capsys.readouterr()
    assert main([*words, "--max-epsilon", "4", "--out", str(third)]) == 2
    shown = capsys.readouterr().err
    assert "--max-epsilon 4.0: of the run's 6 steps it allows " in shown and not third.exists()
    Ledger(shared).append(
        run=last["ledger_run"], event=Ledger(shared).lines[0].event, accountant="rdp"
    )
    assert main(["export", str(first), "--out", str(tmp_path / "late")]) == 2
    assert "after 6 releases, and its ledger has 7" in capsys.readouterr().err


def running(words, ledger, lines):
    """A process of the command, once it has made that many releases."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dpflash", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 120
    while not ledger.exists() or ledger.read_bytes().count(b"\n") < lines:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    return process


@pytest.mark.cases(0)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_after_the_step_and_says_how_to_go_on(number, data, tmp_path):
    out = tmp_path / "out"
    words = options(data, steps=20, checkpoint_every=1000, seed=7)
    process = running([*words, "--no-baseline", "--out", str(out)], out / "ledger.jsonl", 3)
    process.send_signal(number)
    shown, _ = process.communicate(timeout=120)
    assert process.returncode == 130, shown
    assert f"dpflash train --resume {out}" in shown
    job = TrainingRun.resume(out)
    assert 3 <= job.step < 20 and job.lost_steps == 0
    job.run()
    whole = TrainingRun.start(
        config(data, steps=20, checkpoint_every=1000, baseline=False), tmp_path / "whole"
    )
    assert whole.run()["epsilon"] == job.epsilon
    assert same(weights(out), weights(tmp_path / "whole"))


def test_a_killed_run_counts_its_lost_steps_and_never_repeats_noise(
    data, tmp_path, capsys, killed_after
):
    out = tmp_path / "out"
    words = options(data, steps=12, checkpoint_every=1000, seed=7)
    killed_after(2, [*words, "--no-baseline", "--out", str(out)], out / "ledger.jsonl")
    lost = len((out / "ledger.jsonl").read_text().splitlines())
    assert 2 <= lost < 12
    assert main(["train", "--resume", str(out)]) == 0
    shown = capsys.readouterr()
    assert f"{lost} step(s)" in shown.err and f"note: {lost} step(s)" in shown.out
    report = report_of(out)
    assert report["lost_steps"] == lost and report["steps"] == 12
    accountant = RDPAccountant()
    accountant.history = [(report["noise_multiplier"], report["sample_rate"], 12 + lost)]
    assert report["epsilon"] == pytest.approx(accountant.get_epsilon(1e-3), rel=1e-12)
    assert report["epsilon"] > report["target_epsilon"]
    TrainingRun.start(
        config(data, steps=12, checkpoint_every=1000, baseline=False), tmp_path / "whole"
    ).run()
    assert not same(weights(out), weights(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_multiplier": 0, "target_epsilon": 8}, "--noise-multiplier 0"),
        ({"delta": 0}, "--delta 0"),
        ({"batch_size": 51}, "--batch-size 51"),
        ({"clipping": "sideways"}, "--clipping 'sideways'"),
        ({"accountant": "none"}, "--accountant 'none'"),
        ({"heads": 3}, "num_heads=3"),
        ({"bands": "some"}, "--bands 'some'"),
        ({"bands": "auto", "noise_multiplier": 1}, "--bands 'auto' with --noise-multiplier 1"),
        ({"bands": 7}, "--bands 7"),
        ({"seed": -1}, "--seed -1"),
        ({"max_epsilon": 3, "noise_multiplier": 0}, "--max-epsilon 3"),
        ({"data": "nowhere"}, "nowhere: no such file or folder"),
        ({"suffixes": ".nothing"}, "no usable file"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_bad_value_is_named_and_nothing_is_written(changes, message, data, tmp_path, capsys):
    out = tmp_path / "out"
    assert main([*options(data, **changes), "--out", str(out)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert any(e.startswith("dpflash: error: ") and message in e for e in errors)
    assert not out.exists()


def test_a_run_is_never_overwritten_nor_resumed_with_other_numbers(data, tmp_path, capsys):
    out = tmp_path / "out"
    with pytest.raises(Interrupted):
        TrainingRun.start(config(data), out).run(should_stop=stop_after(3))
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def refused(words):
        assert main(words) == 2
        return capsys.readouterr().err

    assert f"--resume {out}" in refused([*options(data), "--out", str(out)])
    resume = ["train", "--resume", str(out)]
    assert "--steps 7" in refused([*resume, "--steps", "7"])
    assert "--noise-multiplier 2" in refused([*resume, "--noise-multiplier", "2"])
    assert "--no-baseline" in refused([*resume, "--no-baseline"])
    assert "drop --out" in refused([*resume, "--out", str(tmp_path / "other")])
    missing = ["train", "--resume", str(tmp_path / "none")]
    assert "the folder has no checkpoint.pt" in refused(missing)
    document = data / "poem-3.txt"
    text = document.read_text()
    document.write_text(text + "x")
    assert "restore them" in refused(resume)
    document.write_text(text)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    (out / "checkpoint.pt").write_bytes(before["checkpoint.pt"][:-1000])
    assert "not a readable checkpoint" in refused(resume)
    (out / "checkpoint.pt").write_bytes(before["checkpoint.pt"])
    assert main([*resume, "--steps", str(STEPS), "--data", str(data)]) == 0
    assert report_of(out)["steps"] == STEPS


def test_without_out_a_free_folder_is_taken(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert main([*options(data, steps=1), "--no-baseline"]) == 0
    assert (tmp_path / "runs/train/report.json").is_file()
    assert (tmp_path / "runs/train-2/report.json").is_file()


def test_a_large_delta_is_refused_with_one_to_use_unless_allowed(data, tmp_path, capsys):
    # 46 documents train.
    words = [*options(data, steps=1, delta=0.5), "--no-baseline", "--out", str(tmp_path / "out")]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "--delta 0.5: not below 1 / 46 files" in error and "such as 0.001," in error
    assert not (tmp_path / "out").exists()
    assert main([*words, "--allow-large-delta"]) == 0
    # A declared size counts instead.
    other = options(data, steps=1, delta=0.0025, dataset_size=400)
    assert main([*other, "--no-baseline", "--out", str(tmp_path / "other")]) == 2
    assert "--delta 0.0025: not below 1 / 400 files" in capsys.readouterr().err


def test_windows_are_no_longer_than_the_longest_document(data, tmp_path, capsys):
    longest = max(map(len, Corpus.read(config(data)).train.contents))
    job = TrainingRun.start(config(data, seq_len=32768), tmp_path / "a")
    assert job.window_len == longest and job._windows[0][0].shape == (longest,)
    # Of a declared size nothing about the documents is published.
    with pytest.warns(dpflash.PrivateWarning, match="seq_len=32768: each file is shorter"):
        job = TrainingRun.start(config(data, seq_len=32768, dataset_size=400), tmp_path / "b")
    assert job.window_len == 32768
    words = options(data, seq_len=32768, steps=1)
    assert main([*words, "--no-baseline", "--out", str(tmp_path / "c")]) == 0
    text = f"windows of {longest} bytes (not 32768: no file has more)"
    assert text in capsys.readouterr().out
    report = report_of(tmp_path / "c")
    assert report["window_len"] == longest and "window_len" in report["not_covered_by_epsilon"]
    # The model does not tell the length.
    architecture = json.loads((tmp_path / "c" / "config.json").read_text())["architecture"]
    assert architecture["max_seq_len"] == 32768


def test_metrics_have_a_line_for_each_step_and_mark_what_is_private(data, tmp_path):
    out = tmp_path / "out"
    job = TrainingRun.start(config(data, baseline=False), out)
    with pytest.raises(Interrupted):
        job.run(should_stop=lambda: job.step == 3)
    # An interrupted run keeps its history, its model and a report.
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 3
    report = report_of(out)
    assert report["steps"] == 3 and (out / "model.pt").is_file()
    assert any("interrupted after step 3 of 6" in note for note in report["notes"])
    report = TrainingRun.resume(out).run()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line, entry in zip(lines, report["history"], strict=True):
        assert line.keys() == {"step", "epsilon", "delta", "private"}
        assert line["private"].keys() == {"loss", "tokens_per_second"}
        assert line["private"]["loss"] == entry["loss"]
        assert line["epsilon"] == entry["epsilon"]
    assert not any("interrupted" in note for note in report["notes"])


def test_epochs_give_the_number_of_steps(data, tmp_path):
    # 46 documents, 6 a step: 7.7 steps an epoch.
    changes = {"steps": None, "epochs": 2, "baseline": False}
    job = TrainingRun.start(config(data, **changes), tmp_path / "a")
    assert job.total_steps == 16
    with pytest.raises(Interrupted):
        job.run(should_stop=lambda: job.step == 2)
    resumed = TrainingRun.resume(tmp_path / "a", {"epochs": 2})
    assert resumed.total_steps == 16
    declared = TrainingRun.start(config(data, dataset_size=60, **changes), tmp_path / "b")
    assert declared.total_steps == 20
    with pytest.raises(ValueError, match="epochs=2 conflicts with steps=6"):
        config(data, epochs=2)


def test_evaluation_data_do_not_train_and_may_be_left_out(data, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("abababab")
    job = TrainingRun.start(
        config(data, eval_data=str(other), baseline=False, steps=1), tmp_path / "a"
    )
    assert job.num_documents == 50 and job.num_held_out == 1
    assert job.run()["bits_per_byte_after"] is not None
    job = TrainingRun.start(config(data, eval_fraction=0, baseline=False, steps=1), tmp_path / "b")
    assert job.num_documents == 50 and job.num_held_out == 0
    assert job.run()["bits_per_byte_after"] is None and (tmp_path / "b" / "model.pt").is_file()
    assert TrainingRun.start(config(data, eval_fraction=0.5), tmp_path / "c").num_held_out > 15
    for changes, message in (
        ({"eval_data": str(other), "eval_fraction": 0.1}, "eval_fraction=0.1 conflicts"),
        ({"eval_data": str(data)}, "is the training data"),
        ({"eval_fraction": 1.0}, "eval_fraction=1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            config(data, **changes)


def test_a_pattern_is_that_of_the_model_and_of_its_file(data, tmp_path):
    job = TrainingRun.start(
        config(data, pattern="sliding_window(window=3)", steps=1, baseline=False), tmp_path / "out"
    )
    expected = SlidingWindow(window=3, causal=True)
    assert job.model.blocks[0].attention.pattern == expected
    job.run()
    assert dpflash.load(tmp_path / "out").blocks[0].attention.pattern == expected
    with pytest.raises(ValueError, match="pattern='sliding_window"):
        TrainingRun.resume(tmp_path / "out", {"pattern": "sliding_window(window=4)"})


def test_the_attention_backend_reaches_the_engine(data, tmp_path, monkeypatch):
    asked, make = {}, dpflash.PrivacyEngine.make_private
    noting = functools.wraps(make)(
        lambda self, **given: asked.update(given) or make(self, **given)
    )
    monkeypatch.setattr(dpflash.PrivacyEngine, "make_private", noting)
    words = [*options(data, steps=1, attention_backend="own"), "--no-baseline"]
    assert main([*words, "--eval-fraction", "0", "--out", str(tmp_path / "out")]) == 0
    assert asked["attention_backend"] == "own"


def test_a_single_file_needs_records_as_units(data, tmp_path, capsys):
    notes = tmp_path / "notes.jsonl"
    notes.write_text("".join(json.dumps({"text": f"note {i}"}) + "\n" for i in range(30)))
    words = [*options(notes, steps=1), "--no-baseline", "--out", str(tmp_path / "out")]
    assert main(words) == 2
    assert "--unit 'file' with --data " in capsys.readouterr().err
    assert main([*words, "--unit", "record"]) == 0
    shown = capsys.readouterr().out
    assert (
        "one record is one unit" in shown
        and "sample (one record, a line of a JSONL file)" in shown
    )


def test_a_folder_has_one_name_in_ledger_report_and_output(data, tmp_path, capsys):
    for number, poem in enumerate(sorted(data.iterdir())):
        folder = data / f"author-{number % 20}"
        folder.mkdir(exist_ok=True)
        poem.rename(folder / poem.name)
    out = tmp_path / "out"
    words = [*options(data, steps=1), "--no-baseline", "--eval-fraction", "0", "--out", str(out)]
    assert main([*words, "--unit-name", "author"]) == 2
    assert "--unit-name 'author' with --unit 'file'" in capsys.readouterr().err
    assert main([*words, "--unit", "folder", "--unit-name", "author"]) == 0
    shown = capsys.readouterr().out
    assert "one author (at most 4 files of it in a step) is one unit" in shown
    assert "20 authors with 50 files" in shown
    assert Ledger(out / "ledger.jsonl").lines[0].unit == "user: author"
    report = json.loads((out / "report.json").read_text())
    assert report["privacy_unit"].startswith("user: author (one folder with all its files)")
    assert Ledger(out / "ledger.jsonl").head == report["ledger_head"]
    assert report["ledger_head"] in shown
    assert main(["evaluate", str(out), "--data", str(data), "--unit", "folder", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == 50


def test_records_of_one_value_have_the_name_that_was_given_and_then_the_corrected_one(
    tmp_path, capsys
):
    notes, out = tmp_path / "notes.jsonl", tmp_path / "out"
    notes.write_text(
        "".join(json.dumps({"text": f"note {i}", "patient_id": i % 20}) + "\n" for i in range(60))
    )
    words = [*options(notes, steps=1), "--no-baseline", "--eval-fraction", "0", "--out", str(out)]
    assert main([*words, "--unit", "field:patient_id", "--unit-name", "pat"]) == 0
    of_field = "(all records with one value of the field 'patient_id')"
    assert report_of(out)["privacy_unit"].startswith(f"user: pat {of_field}")
    ledger = out / "ledger.jsonl"
    about = Ledger(ledger).lines[0].about
    assert (about["name"], about["data"]) == ("out", "notes.jsonl")
    assert main(["ledger", "rename", str(ledger), "--unit-name", "patient"]) == 0
    assert TrainingRun.resume(out)._engine.privacy_unit == "user: patient"
    assert main(["export", str(out), "--out", str(tmp_path / "release")]) == 0
    card = (tmp_path / "release" / "README.md").read_text()
    assert f"| privacy unit | user: patient {of_field}" in card
    assert "in place of a patient of the other" in card


def test_without_matplotlib_the_summary_says_how_to_get_it(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "out"
    assert main([*options(data, steps=1), "--no-baseline", "--out", str(out)]) == 0
    assert "pip install 'dpflash[plot]'" in capsys.readouterr().out
    assert not (out / "training.png").exists()
