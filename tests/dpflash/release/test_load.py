"""dpflash.load on folders of byte-level runs and their exports."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash.accounting import PoissonGaussian, create_accountant
from dpflash.cli import main
from dpflash.nn import LongContextLM
from dpflash.patterns import SlidingWindow
from dpflash.privacy.ledger import Ledger, today
from dpflash.privacy.spending import rounded_up
from dpflash.release.export import export
from dpflash.release.text_model import TextModel
from dpflash.train.config import TrainingConfig
from dpflash.train.run import Interrupted, TrainingRun


def config(data, **changes):
    options = {
        **{"data": str(data), "seq_len": 24, "batch_size": 6, "steps": 3, "delta": 1e-3},
        **{"accountant": "rdp", "embed_dim": 8, "layers": 1, "heads": 2, "baseline": False},
        **{"pattern": "sliding_window(window=5)", "eval_windows": 4},
    }
    return TrainingConfig(**{**options, **changes})


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for number in range(50):
        (folder / f"{number}.txt").write_text("abc" * 10 + str(number))
    return folder


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    TrainingRun.start(config(data), out).run()
    return out


@pytest.fixture(scope="module")
def exported(run):
    return export(run, run.with_name("exported"))


@pytest.fixture
def copied(run, exported, tmp_path):
    folders = {"run": run, "export": exported}
    return {name: Path(shutil.copytree(path, tmp_path / name)) for name, path in folders.items()}


def test_the_model_of_a_run_and_of_its_export_is_the_trained_one(run, exported):
    plain = LongContextLM(
        257, 8, 1, 2, max_seq_len=24, pattern=SlidingWindow(window=5, causal=True)
    )
    plain.load_state_dict(torch.load(run / "model.pt", weights_only=True))
    tokens = torch.randint(0, 257, (2, 24))
    expected = plain.eval()(tokens)
    for folder in (run, exported):
        model = dpflash.load(folder)
        assert not model.training and torch.equal(model(tokens), expected)
        assert model.lm_head.weight is model.token_embedding.weight


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_heads", 1), ("num_heads", 4), ("vocab_size", 300), ("pattern", None), ("norm", "x")],
)
@pytest.mark.parametrize("kind", ["run", "export"])
def test_another_architecture_is_refused_by_name(kind, name, value, copied):
    path = copied[kind] / "config.json"
    content = json.loads(path.read_text())
    content["architecture"][name] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"config.json says {name}={value!r}, and the weights"):
        dpflash.load(copied[kind])


@pytest.mark.parametrize("heads", [1, 4])
def test_load_state_dict_refuses_weights_of_other_heads(heads, run):
    model = LongContextLM(257, 8, 1, heads, max_seq_len=24)
    with pytest.raises(RuntimeError, match=f"num_heads={heads}: the weights .* num_heads=2"):
        model.load_state_dict(torch.load(run / "model.pt", weights_only=True))
    # Within another module, and of weights that say nothing about heads.
    outer = torch.nn.Sequential(model)
    with pytest.raises(RuntimeError, match="num_heads=2"):
        outer.load_state_dict(
            torch.nn.Sequential(LongContextLM(257, 8, 1, 2, max_seq_len=24)).state_dict()
        )
    model.load_state_dict(dict(torch.load(run / "model.pt", weights_only=True)))


def test_folders_without_a_model_are_refused_with_the_way_out(copied, tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        dpflash.load(tmp_path / "nowhere")
    for name, message in (("config.json", "has no config.json"), ("model.pt", "--resume")):
        (copied["run"] / name).unlink()
        with pytest.raises(ValueError, match=message):
            dpflash.load(copied["run"])
    weights = copied["export"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="damaged"):
        dpflash.load(copied["export"])


def test_an_export_has_a_card_with_what_the_report_says(run, exported):
    assert {p.name for p in exported.iterdir()} == {
        "README.md",
        "config.json",
        "model.safetensors",
    }
    card = (exported / "README.md").read_text()
    report = json.loads((run / "report.json").read_text())
    rows = dict(line[2:-2].split(" | ") for line in card.splitlines() if line.startswith("| e"))
    assert report["epsilon"] <= float(rows["epsilon"]) < report["epsilon"] + 1e-3
    for word in (
        *("zero_out", "sample (one file)", "poisson", "rdp", "flat, max_grad_norm 1"),
        *(f"| noise multiplier | {report['noise_multiplier']:.6g} |", "| delta | 0.001 |"),
        *(f"dpflash {dpflash.__version__}", "treated as public"),
        *(
            "the choice of this run or checkpoint",
            "Training losses",
            "Data that the model was evaluated on",
        ),
    ):
        assert word in card, word
    # Nothing of the data, the machine or the losses.
    for word in (str(run), report["config"]["data"], f"{report['bits_per_byte_after']:.3f}"):
        assert word not in card


def test_a_card_states_epsilon_of_each_run_and_ledger_and_of_all_together(copied, tmp_path):
    run = copied["run"]
    own, base = Ledger(run / "ledger.jsonl"), Ledger(tmp_path / "base")
    event = PoissonGaussian(noise_multiplier=2.0, sample_rate=0.1)
    for name in ("first", "second"):
        base.append(run=name, event=event, count=20, accountant="rdp")
    users = Ledger(tmp_path / "users")
    users.append(run="third", event=event, count=30, accountant="rdp", unit="user: patient")

    def spent(*ledgers):
        accountant = create_accountant("rdp", neighboring_relation="zero_out")
        for line in (line for ledger in ledgers for line in Ledger(ledger.path).lines):
            accountant.compose(line.event.convert("zero_out"), line.steps)
        return rounded_up(accountant.get_epsilon(1e-3))

    words = ["export", str(run), "--out", str(tmp_path / "together"), "--ledgers"]
    assert main([*words, str(base.path)]) == 0
    card = (tmp_path / "together" / "README.md").read_text()
    rows = re.findall(r"^\| (.+) \| (\d+) \| (\S+) \| (\S+) \| ([\d.]+) \|$", card, re.M)
    both = spent(own, base)
    assert [(name.split()[0], *others) for name, *others in rows] == [
        ("run", "3", "sample", "zero_out", spent(own)),
        ("run", "20", "sample", "add_remove", rows[1][-1]),
        ("run", "20", "sample", "add_remove", rows[1][-1]),
        ("these", "40", "sample", "add_remove", spent(base)),
        ("all", "43", "sample", "zero_out", both),
    ]
    assert (
        f"The weights are ({both}, 0.001)-diff" in card
        and f"| epsilon of all runs together | {both} |" in card
    )
    assert re.fullmatch(rf"run .+, {today()}, this run", rows[0][0])
    place = "/".join(base.path.parts[-2:])
    heads = f"run/ledger.jsonl: {own.head}, {place}: {Ledger(base.path).head}"
    assert f"when this card was written | {heads} |" in card
    assert "| audit | none |" in card
    assert float(rows[1][-1]) < float(spent(base)) < float(both)

    export(run, tmp_path / "apart", ledgers=[users.path])
    card = (tmp_path / "apart" / "README.md").read_text()
    assert "| user: patient |" in card and "There is no epsilon of all together" in card
    assert f"of its own ledger alone, the weights are ({spent(own)}, 0.001)" in card
    bare = Ledger(tmp_path / "bare")
    bare.append(run="c", event=replace(event, noise_multiplier=0.0), accountant="rdp")
    export(run, tmp_path / "beside", ledgers=[bare.path])
    card = (tmp_path / "beside" / "README.md").read_text()
    assert "**This model may not be private:** another run" in card
    assert "tags: [dpflash]" in card
    # A shared ledger has grown since the report was written.
    report = json.loads((run / "report.json").read_text())
    report["ledger_is_shared"] = True
    (run / "report.json").write_text(json.dumps(report))
    grown, before = Ledger(own.path), spent(own)
    grown.append(run="later", event=event, count=50, accountant="rdp")
    export(run, tmp_path / "grown", ledgers=[users.path])
    card = (tmp_path / "grown" / "README.md").read_text()
    assert f"of its own ledger alone, the weights are ({spent(own)}, 0.001)" in card
    assert f"| epsilon | {spent(own)} |" in card and float(spent(own)) > float(before)
    with pytest.raises(ValueError, match="one is given twice"):
        export(run, tmp_path / "twice", ledgers=[run / "ledger.jsonl", base.path, base.path])
    (run / "ledger.jsonl").unlink()
    with pytest.raises(ValueError, match="none is that of the run"):
        export(run, tmp_path / "lost", ledgers=[base.path])


def test_a_card_states_no_less_than_the_ledger_beside_it(copied, tmp_path):
    """Epsilon, head and seed are the ledger's; a private base model, or no ledger, is named."""
    run = copied["run"]
    path = run / "report.json"
    report = json.loads(path.read_text())

    def card(name, **changes):
        path.write_text(json.dumps({**report, **changes}))
        return (export(run, tmp_path / name) / "README.md").read_text()

    for changes in ({"epsilon": report["epsilon"] / 2}, {"ledger_head": "0" * 64}):
        with pytest.raises(ValueError, match="one of them was changed"):
            card("changed", **changes)
    assert "not compared" not in card("whole")
    config = {**report["config"], "model": str(tmp_path / "whole")}
    assert "**The base model was trained privately too" in card("base", config=config)
    for name in ("ledger.jsonl", "ledger.jsonl.guard"):
        (run / name).unlink()
    with pytest.raises(ValueError, match="its ledger .* is missing"):
        card("alone")
    # What DPTrainer.save_model wrote elsewhere has none.
    config = {name: value for name, value in report["config"].items() if name != "data"}
    assert "(the ledger was not compared)" in card("alone", config=config)


def test_what_is_released_follows_the_umask_and_what_is_private_is_for_its_owner(run, tmp_path):
    private = {"report.json", "metrics.jsonl", "checkpoint.pt", "training.png"}
    modes = {path.name: path.stat().st_mode & 0o777 for path in run.iterdir() if path.is_file()}
    umask = os.umask(0o027)
    try:
        export(run, tmp_path / "out")
    finally:
        os.umask(umask)
    assert {name for name, mode in modes.items() if mode == 0o600} == private & modes.keys()
    assert modes["model.pt"] == modes["config.json"] == modes["ledger.jsonl"] == 0o666 & ~umask
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o640}
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750


@pytest.mark.cases(0)
def test_a_card_reports_the_audit_of_the_runs_settings_and_of_no_others(copied, tmp_path):
    run = copied["run"]
    assert main(["audit", "--run", str(run), "--canaries", "40", "--no-ranks"]) == 0
    card = (export(run, tmp_path / "audited") / "README.md").read_text()
    audit = json.loads((run / "audit.json").read_text())
    assert "## Audit" in card and "nothing refuted the claim" in card
    assert f"{len(audit['checks'])} of {len(audit['checks'])} named checks passed" in card
    assert "(those on two ranks were left out)" in card and "through the same library" in card
    audit |= {"code": "0" * 32, "note": "A bound is above the claim."}
    (run / "audit.json").write_text(json.dumps(audit))
    card = (export(run, tmp_path / "later") / "README.md").read_text()
    assert "through another version of the library" in card
    assert "other runs of the ledger. A bound is above the claim.\n" in card
    audit["ok"], audit["checks"][0]["ok"] = False, False
    (run / "audit.json").write_text(json.dumps(audit))
    card = (export(run, tmp_path / "refuted") / "README.md").read_text()
    assert "**the claim was refuted**" in card and "(failed: charges)" in card
    audit["settings"]["steps"] += 1
    (run / "audit.json").write_text(json.dumps(audit))
    with pytest.raises(ValueError, match="is for steps=4, which the run no longer has"):
        export(run, tmp_path / "stale")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_epsilon": None, "noise_multiplier": 0}, "**This model is not private:**"),
        ({"seed": 3}, "**The run was seeded"),
        ({"dataset_size": 90}, "more than the other"),
    ],
)
def test_a_card_says_what_weakens_the_guarantee(changes, words, data, tmp_path):
    TrainingRun.start(config(data, steps=1, **changes), tmp_path / "run").run()
    path = tmp_path / "run" / "report.json"
    report = json.loads(path.read_text())
    for name, seeded in (("out", report["seeded"]), ("edited", False)):
        path.write_text(json.dumps({**report, "seeded": seeded}))
        # The ledger knows of the seed.
        assert words in (export(tmp_path / "run", tmp_path / name) / "README.md").read_text()


def test_a_run_can_be_exported_after_another_run_used_its_ledger(copied, data, tmp_path):
    run, ledger = copied["run"], copied["run"] / "ledger.jsonl"
    alone = json.loads((run / "report.json").read_text())["epsilon"]
    other = config(data, steps=2, ledger=str(ledger))
    total = TrainingRun.start(other, tmp_path / "other").run()["epsilon"]
    card = (export(run, tmp_path / "out") / "README.md").read_text()
    assert total > alone and f"The weights are ({rounded_up(total)}, 0.001)" in card
    # Resumed after its last step, the run writes its report again.
    report = TrainingRun.resume(run).run()
    assert (report["epsilon_of_run"], report["epsilon"]) == (pytest.approx(alone), total)
    again = (export(run, tmp_path / "again") / "README.md").read_text()
    assert f"The weights are ({rounded_up(total)}, 0.001)" in again


def test_the_model_of_an_interrupted_run_is_exported_with_its_own_epsilon(data, tmp_path):
    job = TrainingRun.start(config(data, checkpoint_every=1000), tmp_path / "run")
    with pytest.raises(Interrupted):
        job.run(should_stop=lambda: job.step == 2)
    card = (export(tmp_path / "run", tmp_path / "out") / "README.md").read_text()
    assert "| steps | 2 |" in card
    assert re.search(rf"\| run \| run \([0-9a-f]{{12}}\), {today()} \|\n\| data \| \w", card)
    report = tmp_path / "run" / "report.json"
    report.write_text(json.dumps({**json.loads(report.read_text()), "verified": "pending"}))
    with pytest.warns(dpflash.PrivateWarning, match="too few steps to finish the isolation"):
        export(tmp_path / "run", tmp_path / "pending")

    resumed = TrainingRun.resume(tmp_path / "run")

    def die():
        if resumed.step == 3:
            raise MemoryError
        return False

    # After a step more, that model is no longer all that was released.
    with pytest.raises(MemoryError):
        resumed.run(should_stop=die)
    with pytest.raises(ValueError, match="after 2 releases, and its ledger has 3; .*--resume"):
        export(tmp_path / "run", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_an_export_overwrites_nothing(run, exported, tmp_path):
    with pytest.raises(ValueError, match="exists already"):
        export(run, exported)
    with pytest.raises(ValueError, match="keep_adapters=True"):
        export(run, tmp_path / "out", keep_adapters=True)
    with pytest.raises(ValueError, match="not the folder of a dpflash train run"):
        export(tmp_path, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_evaluate_gives_the_loss_of_every_byte(exported, data, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("abcabc")
    assert main(["evaluate", str(exported), "--data", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    model = dpflash.load(exported)
    logits = model(torch.tensor([[256, *b"abcab"]]))[0]
    nats = torch.nn.functional.cross_entropy(logits, torch.tensor([*b"abcabc"])).item()
    assert found["tokens"] == 6 and found["documents"] == 1
    assert found["nats_per_token"] == pytest.approx(nats, rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(found["bits_per_token"])
    assert main(["evaluate", str(exported), "--data", str(data), "--max-windows", "3"]) == 0
    shown = capsys.readouterr().out
    assert "nats per byte" in shown and "perplexity per byte" in shown
    assert main(["evaluate", str(exported), "--data", str(data), "--seq-len", "99"]) == 2
    assert "--seq-len 99: the model takes 24 tokens" in capsys.readouterr().err


def test_generate_repeats_by_seed_and_takes_the_likeliest_at_temperature_0(exported, capsys):
    def shown(*words):
        assert main(["generate", str(exported), "--prompt", "abc", *words]) == 0
        return capsys.readouterr().out

    few = ["--max-new-tokens", "30"]  # longer than what the model sees at once
    assert shown(*few, "--seed", "1") == shown(*few, "--seed", "1") != shown(*few, "--seed", "2")
    greedy = shown(*few, "--temperature", "0")
    assert greedy == shown(*few, "--top-k", "1") and greedy.startswith("abc")
    model = TextModel(exported)
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        model.generate("", max_new_tokens=0)
    with pytest.raises(ValueError, match="temperature=-1"):
        model.generate("", max_new_tokens=1, temperature=-1)
    state = torch.get_rng_state()
    model.generate("", max_new_tokens=1, seed=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_loop_of_ones_own_writes_the_card_of_its_model(tmp_path):
    engine = dpflash.PrivacyEngine(ledger=tmp_path / "ledger", accountant="rdp")
    saved = tmp_path / "saved"
    saved.mkdir()
    with pytest.raises(ValueError, match="has made no model private"):
        engine.save_model_card(saved, delta=1e-3)

    def trained(noise_multiplier):
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
        model[1].requires_grad_(False)
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model[0].parameters(), 0.1),
            data_loader=DataLoader(TensorDataset(torch.randn(20, 3)), batch_size=5),
            noise_multiplier=noise_multiplier,
            max_grad_norm=1.0,
        )
        for (x,) in loader:
            engine.backward(model(x).square().mean(1))
            optimizer.step()
        return engine.detach(model)

    model = trained(2.0)
    save_file(model.state_dict(), saved / "model.safetensors")
    path = engine.save_model_card(saved, delta=1e-3, description="A tiny model.", base="a/base")
    card, report = path.read_text(), json.loads((saved / "report.json").read_text())
    assert card.startswith(
        "# Model card\n\nA tiny model.\n\n## Differential privacy\n\nThe weights"
    )
    assert f"| epsilon | {rounded_up(engine.get_epsilon(1e-3))} |" in card
    assert (report["steps"], report["lost_steps"]) == (4, 0)
    assert report["ledger_head"] == engine.ledger_head and report["config"]["model"] == "base"
    with pytest.raises(FileNotFoundError, match="save the model there first"):
        engine.save_model_card(tmp_path / "none", delta=1e-3)
    trained(0.0)  # the run before it does not make this one private
    card = engine.save_model_card(saved, delta=1e-3).read_text()
    assert "**This model is not private:** it was trained without noise." in card
    assert re.search(r"^\| run .*, this run \| 4 \| .* \| none \|$", card, re.M)


def test_no_card_is_written_for_a_model_that_is_not_for_release(tmp_path):
    model = torch.nn.BatchNorm1d(3, affine=False).eval()
    model = torch.nn.Sequential(model, torch.nn.Linear(3, 1))
    engine = dpflash.PrivacyEngine()
    model, _, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model[1].parameters(), 0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(20, 3)), batch_size=5),
        noise_multiplier=2.0,
        max_grad_norm=1.0,
    )
    model[0].running_mean.add_(1)
    with pytest.raises(dpflash.PrivateRefusal, match="no model card is written: .*running_mean"):
        engine.save_model_card(tmp_path, delta=1e-3)
    with pytest.warns(dpflash.PrivateWarning, match="not for release"):
        engine.detach(model)
    with pytest.raises(dpflash.PrivateRefusal, match="no model card is written: .*running_mean"):
        engine.save_model_card(tmp_path, delta=1e-3)
    assert not list(tmp_path.iterdir())
