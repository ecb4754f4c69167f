"""`dpflash train` by several ranks: one job, whoever shares it, whoever dies in it."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fresh_process import FORKED, run_command

import dpflash
from dpflash.accounting import RDPAccountant
from dpflash.cli import main
from dpflash.cli import train as command
from dpflash.privacy.ledger import Ledger
from dpflash.train.config import Corpus, TrainingConfig
from dpflash.train.run import Interrupted, TrainingRun, checkpoint_of

pytestmark = pytest.mark.usefixtures("one_thread", "empty_picture")
CASES = str(Path(__file__).with_name("train_cases.py"))
STEPS = 4
TINY: dict[str, Any] = {
    "seq_len": 32,
    "batch_size": 6,
    "physical_batch_size": 2,
    "steps": STEPS,
    "delta": 1e-3,
    "accountant": "rdp",
    "embed_dim": 16,
    "layers": 2,
    "heads": 2,
    "eval_windows": 5,
    "checkpoint_every": 3,
    "seed": 7,
}
# Of four ranks.
WAYS: dict[str, dict[str, Any]] = {
    "data": {},
    "sharded": {"shard_parameters": True},
    "context": {"context_parallel": 4, "sharding": "zigzag", "context_mode": "ring"},
    "2x2 ring": {"context_parallel": 2, "context_mode": "ring"},
    "2x2 zigzag, all_gather": {
        "context_parallel": 2,
        "context_mode": "all_gather",
        "sharding": "zigzag",
    },
    "2x2 ulysses": {"context_parallel": 2, "context_mode": "ulysses"},
    "2x2 sharded": {"context_parallel": 2, "shard_parameters": True, "sharding": "zigzag"},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rng = random.Random(0)
    for number in range(50):
        text = "ab" * rng.randrange(10, 60) + f" {number}"
        (folder / f"poem-{number}.txt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory, empty_picture):
    """The run of one process."""
    out = tmp_path_factory.mktemp("whole") / "out"
    TrainingRun.start(TrainingConfig(**config(data)), out).run()
    return out


def config(data, **changes):
    return {"data": str(data), **TINY, **changes}


def weights(folder):
    return torch.load(folder / "model.pt", weights_only=True)


def report_of(folder):
    return json.loads((folder / "report.json").read_text())


def assert_same_run(out, whole, *, baseline=True):
    """Two folders hold one run, but for rounding."""
    ours, theirs = weights(out), weights(whole)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert type(value) is torch.Tensor and value.dtype == theirs[name].dtype
        torch.testing.assert_close(value, theirs[name], atol=5e-7, rtol=0)
    report, expected = report_of(out), report_of(whole)
    same = ("epsilon", "steps", "lost_steps", "noise_multiplier", "clip_fraction")
    assert [report[k] for k in same] == [expected[k] for k in same]
    assert report["num_parameters"] == expected["num_parameters"]
    for key in ("bits_per_byte_before", "bits_per_byte_after"):
        assert report[key] == pytest.approx(expected[key], abs=5e-6)
    for ours, theirs in zip(report["history"], expected["history"], strict=True):
        assert (ours["step"], ours["epsilon"]) == (theirs["step"], theirs["epsilon"])
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=5e-6)
    if baseline:
        assert report["bits_per_byte_nonprivate"] == pytest.approx(
            expected["bits_per_byte_nonprivate"], abs=1e-5
        )


# Beside the checkpoint.
WRITTEN = ("config.json", "ledger.jsonl", "ledger.jsonl.guard", "metrics.jsonl", "model.pt")
WRITTEN += ("report.json", "training.png")


@pytest.mark.cases(0)
@pytest.mark.parametrize("sharing", WAYS)
def test_ranks_train_what_one_process_trains(sharing, world, data, whole, tmp_path):
    out, parallel = tmp_path / "out", WAYS[sharing]
    done = world.run(CASES, "train", 4, out=str(out), parallel=parallel, config=config(data))
    sharded = parallel.get("shard_parameters", False)
    assert_same_run(out, whole, baseline=not sharded)
    assert {path.name for path in out.iterdir()} == {*WRITTEN, "checkpoint"}
    assert len((out / "metrics.jsonl").read_text().splitlines()) == len(report_of(out)["history"])
    loaded = dpflash.load(out).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in weights(out).items())
    report = report_of(out)
    assert report["ranks"]["data"] * report["ranks"]["context"] == 4
    assert (report["bits_per_byte_nonprivate"] is None) == sharded
    assert any("run was skipped" in note for note in report["notes"]) == sharded
    # All of them know all of it, but what only one can measure.
    for other in done[1:]:
        assert other["state"] == done[0]["state"]
        assert other["epsilon"] == done[0]["epsilon"]
        for name, value in done[0]["parameters"].items():
            assert np.array_equal(value, other["parameters"][name])


@pytest.mark.cases(0)
def test_ranks_train_what_one_process_trains_on_packed_documents(world, data, tmp_path):
    packed = config(data, pack=True, steps=2, checkpoint_every=2)
    TrainingRun.start(TrainingConfig(**packed), tmp_path / "whole").run()
    out, parallel = tmp_path / "out", {"context_parallel": 2}
    world.run(CASES, "train", 4, out=str(out), parallel=parallel, config=packed)
    assert_same_run(out, tmp_path / "whole")


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (None, "2x2 zigzag, all_gather"),
        (None, "sharded"),
        ("data", None),
        ("2x2 sharded", None),
        ("sharded", "2x2 ring"),
    ],
)
def test_a_run_goes_on_with_other_ranks(first, then, world, data, whole, tmp_path):
    out = tmp_path / "out"
    if first is None:
        job = TrainingRun.start(TrainingConfig(**config(data)), out)
        with pytest.raises(Interrupted):
            job.run(should_stop=lambda: job.step == 2)
    else:
        done = world.run(
            CASES,
            "train",
            4,
            out=str(out),
            parallel=WAYS[first],
            config=config(data),
            stop_at=2,
            stopped_rank=2,
        )
        assert [(one["step"], one["report"]) for one in done] == [(2, None)] * 4
    checkpoint = "checkpoint.pt" if first is None else "checkpoint"
    assert {p.name for p in out.iterdir()} == {*WRITTEN, checkpoint}
    if then is None:
        TrainingRun.resume(out).run()
    else:
        world.run(CASES, "train", 4, out=str(out), parallel=WAYS[then])
    assert_same_run(out, whole, baseline=then is None or "sharded" not in then)
    assert len((out / "ledger.jsonl").read_text().splitlines()) == STEPS
    found = checkpoint_of(out)
    assert found is not None
    assert found.name == ("checkpoint.pt" if then is None else "checkpoint")
    assert len(list(out.glob("checkpoint*"))) == 1


@pytest.mark.cases(0)
def test_the_non_private_run_goes_on_with_other_ranks(world, data, whole, tmp_path):
    out = tmp_path / "out"
    job = TrainingRun.start(TrainingConfig(**config(data)), out)
    with pytest.raises(Interrupted):
        job.run(should_stop=lambda: len(job.state.baseline_losses) == 2)
    world.run(CASES, "train", 4, out=str(out), parallel=WAYS["2x2 ring"])
    assert_same_run(out, whole)
    assert report_of(out)["history_nonprivate"] == pytest.approx(
        report_of(whole)["history_nonprivate"], abs=1e-3
    )


@pytest.mark.cases(0)
def test_a_checkpoint_that_was_to_be_removed_does_not_come_back(world, data, whole, tmp_path):
    """As where a process dies between writing one checkpoint and removing the other."""
    out = tmp_path / "out"
    job = TrainingRun.start(TrainingConfig(**config(data)), out)
    with pytest.raises(Interrupted):
        job.run(should_stop=lambda: job.step == 1)
    shutil.copy(out / "checkpoint.pt", tmp_path / "older")
    world.run(CASES, "train", 4, out=str(out), parallel={}, stop_at=3)
    shutil.copy(tmp_path / "older", out / "checkpoint.pt")
    (out / "checkpoint.pt.replaced").write_bytes(b"half")
    resumed = TrainingRun.resume(out)
    assert resumed.step == 3 and resumed.lost_steps == 0
    resumed.run()
    assert_same_run(out, whole)
    assert [path.name for path in out.glob("checkpoint*")] == ["checkpoint.pt"]


def test_max_epsilon_ends_all_ranks_at_one_step(world, data, tmp_path):
    plain = TrainingConfig(**config(data))
    accountant = RDPAccountant()
    accountant.history = [(2.0, 6 / len(Corpus.read(plain).train), 2)]
    limit = accountant.get_epsilon(1e-3)
    changes = {"target_epsilon": None, "noise_multiplier": 2.0, "baseline": False}
    done = world.run(
        CASES,
        "train",
        4,
        out=str(tmp_path / "out"),
        parallel=WAYS["2x2 ring"],
        config=config(data, **changes, max_epsilon=limit),
    )
    assert [one["step"] for one in done] == [2] * 4
    assert all("stopped after step 2" in one["report"]["stopped"] for one in done)
    assert done[0]["epsilon"] == pytest.approx(limit, rel=1e-12)


@pytest.mark.cases(0)
def test_without_a_seed_ranks_share_keys_that_no_other_run_has(world, data, tmp_path):
    runs = []
    for name in ("a", "b"):
        runs.append(
            world.run(
                CASES,
                "train",
                4,
                out=str(tmp_path / name),
                parallel=WAYS["2x2 ring"],
                config=config(data, seed=None, steps=1, layers=1, eval_fraction=0, baseline=False),
            )
        )
        for other in runs[-1][1:]:
            assert other["state"] == runs[-1][0]["state"]
            for key, value in runs[-1][0]["parameters"].items():
                assert np.array_equal(value, other["parameters"][key])
    a, b = (run[0] for run in runs)
    assert a["state"]["window_key"] != b["state"]["window_key"]
    name = "token_embedding.weight"
    assert not np.array_equal(a["parameters"][name], b["parameters"][name])


def test_ranks_with_other_documents_or_numbers_are_told_so(world, data, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(data, other)
    (other / "poem-3.txt").write_text("another one")
    for change, named in (
        ({"data": str(other)}, "the documents differs"),
        ({"learning_rate": 0.5}, "the configuration differs"),
    ):
        each = [config(data), config(data), {**config(data), **change}, config(data)]
        said = world.run(CASES, "refused", 4, out=str(tmp_path / "out"), parallel={}, config=each)
        assert len(set(said)) == 1 and named in said[0]
    assert not (tmp_path / "out").exists()


ENVIRONMENT = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


@pytest.mark.parametrize(
    ("ranks", "words", "named"),
    [
        (4, ["--context-parallel", "3"], "--context-parallel 3 with 4 rank(s)"),
        (1, ["--context-parallel", "2"], "--nproc-per-node 2"),
        (None, ["--context-parallel", "2"], "--context-parallel 2 with 1 rank(s)"),
        (4, ["--context-parallel", "4", "--seq-len", "3"], "parallel 4 with --seq-len 3"),
        (2, ["--context-parallel", "0"], "--context-parallel 0"),
        (2, ["--context-mode", "pigeon"], "--context-mode 'pigeon'"),
        (2, ["--sharding", "sideways"], "--sharding 'sideways'"),
        (2, ["--rank-timeout", "0"], "--rank-timeout 0"),
        (2, ["--context-parallel", "2", "--shard-parameters"], "--shard-parameters"),
        (None, ["--shard-parameters"], "--shard-parameters with 1 rank(s)"),
        (
            2,
            ["--context-parallel", "2", "--context-mode", "ulysses", "--heads", "1"],
            "--heads 1",
        ),
        (2, ["--data", "nowhere"], "nowhere: no such file or folder"),
        ("x", [], "WORLD_SIZE='x'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_shared_is_refused_by_name(
    ranks, words, named, data, tmp_path, monkeypatch, capsys
):
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    if ranks is not None:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        for name, value in ENVIRONMENT.items():
            monkeypatch.setenv(name, value)
    out = tmp_path / "out"
    start = ["train", "--data", str(data), "--batch-size", "6", "--delta", "1e-3"]
    assert main([*start, *words, "--out", str(out)]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and error[0].startswith("dpflash: error: ") and named in error[0]
    assert not out.exists()


def test_an_environment_that_lacks_something_is_refused(monkeypatch, capsys):
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert main(["train"]) == 2
    error = capsys.readouterr().err
    assert "without LOCAL_RANK, MASTER_ADDR, MASTER_PORT" in error and "torchrun" in error


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_processes_of_another_launcher_do_not_train_alone(name, monkeypatch, capsys):
    for each in ("WORLD_SIZE", *ENVIRONMENT):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "2")
    assert main(["train", "--data", "nowhere"]) == 2
    error = capsys.readouterr().err
    assert f"{name}=2" in error and "torchrun --nnodes" in error
    # One process is none of several, and neither is a batch script of several tasks.
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    assert main(["train", "--data", "nowhere"]) == 2
    assert "no such file" in capsys.readouterr().err


def test_ranks_of_two_machines_that_do_not_connect_hear_of_the_interface(
    data, monkeypatch, capsys
):
    def lose(*_, **__):
        raise RuntimeError("connect timeout")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.distributed, "init_process_group", lose)
    assert main(["train", "--data", str(data), "--batch-size", "6", "--delta", "1e-3"]) != 0
    error = capsys.readouterr().err
    assert "set GLOO_SOCKET_IFNAME on each machine" in error and "MASTER_ADDR=" in error


@pytest.fixture
def two_hosts():
    """Network namespaces with an interface each, as hosts whose own name is 127.0.0.1."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("needs root and the command `ip`")
    names = [f"dpflash-{os.getpid()}-{host}" for host in "ab"]

    def ip(*words):
        return subprocess.run(["ip", *words], capture_output=True).returncode == 0

    try:
        if not all(ip("netns", "add", name) for name in names):
            pytest.skip("needs `ip netns add`")
        ends = "type", "veth", "peer", "name", "link0", "netns", names[1]
        made = ip("-n", names[0], "link", "add", "link0", *ends)
        for number, name in enumerate(names, 1):
            made &= ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "link0")
            made &= all(ip("-n", name, "link", "set", link, "up") for link in ("lo", "link0"))
        if not made:
            pytest.skip("needs `ip link add type veth`")
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            ip("netns", "del", name)


@pytest.mark.cases(0)
@pytest.mark.parametrize("interface", [None, "link0"])
def test_two_hosts_train_with_the_interface_that_the_message_asks_for(
    interface, two_hosts, data, whole, tmp_path
):
    """`whole` has compiled what they run."""
    named = {} if interface is None else {"GLOO_SOCKET_IFNAME": interface}
    out = tmp_path / "out"
    words = [*options(data, out, steps=2), "--no-baseline", "--rank-timeout", "10"]
    hosts = []
    for number, host in enumerate(two_hosts):
        log = open(tmp_path / f"log-{number}", "w+")  # noqa: SIM115
        each = ["--nnodes", "2", "--node-rank", str(number), "--master-addr", "10.77.0.1"]
        hosts.append((torchrun(1, words, each=each, host=host, log=log, **named), log))
    deadline = time.monotonic() + 90
    try:
        done, shown = False, ["", ""]
        while not done and time.monotonic() < deadline:
            time.sleep(0.1)
            shown = [Path(log.name).read_text() for _, log in hosts]
            ended = all(process.poll() is not None for process, _ in hosts)
            done = any("set GLOO_SOCKET_IFNAME" in text for text in shown) or ended
        codes = [process.poll() for process, _ in hosts]
    finally:
        for process, log in hosts:
            if process.poll() is None:
                for pid in (*children(process.pid), process.pid):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
            log.close()
    if interface is None:
        assert "reaches MASTER_ADDR=10.77.0.1" in "".join(shown), shown
        assert not out.exists()
    else:
        assert codes == [0, 0], shown
        assert report_of(out)["steps"] == 2


def test_what_only_another_rank_finds_wrong_is_told_by_it(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name, value in {**ENVIRONMENT, "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    waited: list[float] = []
    monkeypatch.setattr(command.time, "sleep", waited.append)
    assert main(["train", "--data", "nowhere"]) == 2
    assert "dpflash: error: rank 1: " in capsys.readouterr().err
    # The first rank had time to say the same, and torchrun to end this one.
    assert waited and waited[0] >= 5


def torchrun(ranks, words, each=(), host=(), log=subprocess.PIPE, **environment):
    """Start ranks; `each` are arguments of torchrun, `host` a command that runs it elsewhere."""
    # Not by `torchrun`: its process would not be the one whose children are the ranks.
    return subprocess.Popen(
        [
            *(*host, sys.executable, "-m", "torch.distributed.run", *each),
            *("--nproc-per-node", str(ranks), "-m", "dpflash", *words),
        ],
        stdout=log,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        start_new_session=True,
    )


def options(data, out, **changes):
    words = ["train", "--data", str(data), "--out", str(out)]
    for name, value in {**TINY, **changes}.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def children(pid):
    """Processes that a process has started, the earliest first."""
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in listed.read_text().split()]


def after_releases(process, ledger, lines):
    """Returns once that many releases are in a ledger."""
    deadline = time.monotonic() + 120
    while not ledger.exists() or ledger.read_bytes().count(b"\n") < lines:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)


linux_only = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")


@pytest.mark.cases(0)
@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, ["--context-parallel", "2"]),
        (
            4,
            [
                *("--context-parallel", "2", "--sharding", "zigzag"),
                *("--context-mode", "all_gather", "--shard-parameters"),
            ],
        ),
    ],
    ids=["2", "2x2"],
)
def test_torchrun_trains_what_one_process_trains_and_one_rank_prints(
    ranks, words, data, whole, tmp_path
):
    out = tmp_path / "out"
    process = torchrun(ranks, [*options(data, out), *words])
    shown, _ = process.communicate(timeout=120)
    assert process.returncode == 0, shown
    assert_same_run(out, whole, baseline="--shard-parameters" not in words)
    words = ("bits per byte after private training", "noise multiplier")
    assert [shown.count(word) for word in words] == [1, 1]
    assert str(out / "checkpoint") in shown and str(out / "model.pt") in shown


@pytest.mark.cases(0)
def test_torchrun_shows_one_message_for_what_all_ranks_refuse(data, tmp_path):
    out = tmp_path / "out"
    process = torchrun(2, options(data, out, clipping="sideways"))
    shown, _ = process.communicate(timeout=120)
    assert process.returncode == 1 and shown.count("dpflash: error:") == 1, shown
    assert "--clipping 'sideways'" in shown and not out.exists()


@pytest.mark.cases(0)
@linux_only
@pytest.mark.parametrize(
    ("victim", "every", "number"),
    [(0, 1000, signal.SIGKILL), (1, 3, signal.SIGSTOP)],
    ids=["dies", "hangs"],
)
def test_a_rank_that_dies_or_hangs_ends_the_others_and_its_step_counts_once(
    victim, every, number, data, tmp_path
):
    out = tmp_path / "out"
    words = options(data, out, steps=200, checkpoint_every=every)
    words += ["--context-parallel", "2", "--no-baseline", "--rank-timeout", "60"]
    words += ["--heartbeat-timeout", "4"]
    process = torchrun(2, words)
    after_releases(process, out / "ledger.jsonl", 5)
    begun, lost = time.monotonic(), children(process.pid)[victim]
    os.kill(lost, number)
    shown = ""
    while "dpflash: error:" not in shown and (line := process.stdout.readline()):
        shown += line
    assert time.monotonic() - begun < 30
    if number != signal.SIGKILL:  # for which torchrun would wait half a minute
        os.kill(lost, signal.SIGKILL)
    shown += process.communicate(timeout=60)[0]
    assert process.returncode == 1
    errors = [line for line in shown.splitlines() if "dpflash: error:" in line]
    assert len(errors) == 1 and f"dpflash: error: rank {1 - victim}: " in errors[0], shown
    assert "/dpflash/" not in shown  # No traceback of ours.
    released = len((out / "ledger.jsonl").read_text().splitlines())
    assert 5 <= released < 200
    # What an unfinished save left may be there; what counts is whole.
    found = checkpoint_of(out)
    assert found is not None and found.name == "checkpoint"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        job = TrainingRun.resume(out)
    assert job.step % every == 0 and released - every <= job.step <= released
    assert job.step + job.lost_steps == released
    with pytest.raises(Interrupted):
        job.run(should_stop=lambda: job.step == 20)
    accountant = RDPAccountant()
    rate = TINY["batch_size"] / job.num_documents
    accountant.history = [(job.state.noise_multiplier, rate, 20 + job.lost_steps)]
    assert job.epsilon == pytest.approx(accountant.get_epsilon(1e-3), rel=1e-12)


KILLS = int(os.environ.get("DPFLASH_KILLS", "5"))


def ranks_of_a_run(number, words, log):
    """Processes of a run, as torchrun starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = []
    for rank in map(str, range(number)):
        own = {"WORLD_SIZE": str(number), "RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": str(number)}
        started.append(FORKED.Process(target=run_command, args=(words, own, log)))
        started[-1].start()
    return started


@linux_only
def test_a_run_whose_ranks_are_killed_at_any_moment_loses_nothing(
    data, tmp_path, new_world, world
):
    """`make soak` kills ten times as many."""
    rng, out, lines = random.Random(0), tmp_path / "out", 0
    ledger = out / "ledger.jsonl"
    words = options(data, out, steps=100 + 10 * KILLS, checkpoint_every=2)
    words += ["--no-baseline", "--resume-if-present"]
    for number in range(KILLS):
        log, victim = tmp_path / f"log-{number}", rng.randrange(2)
        ways = [[], ["--shard-parameters"], ["--context-parallel", "2"]]
        way = rng.choice(ways if KILLS > 5 else ways[:1])
        ranks = ranks_of_a_run(2, [*words, *way], log)
        try:
            wanted, deadline = lines + rng.randrange(1, 3), time.monotonic() + 60
            while not ledger.exists() or ledger.read_bytes().count(b"\n") < wanted:
                assert time.monotonic() < deadline and all(r.is_alive() for r in ranks), log
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.05))
            ranks[victim].kill()
            ranks[1 - victim].join(10)
            assert ranks[1 - victim].exitcode == 1, log.read_text()
        finally:
            for rank in ranks:
                rank.kill()
        assert f"dpflash: error: rank {1 - victim}: " in log.read_text()
        lines = ledger.read_bytes().count(b"\n")
    # Besides what a surviving rank notes of the loss.
    released = sum(line.note is None for line in Ledger(ledger).lines)
    for size in ("1", "2", "4"):
        shutil.copytree(out, tmp_path / size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the copies are of one run
        job = TrainingRun.resume(tmp_path / "1")
    assert job.step + job.lost_steps == released and job.lost_steps <= 2 * KILLS
    end = job.step + 2
    with pytest.raises(Interrupted):
        job.run(should_stop=lambda: job.step == end)
    alone = {name: value.detach().numpy() for name, value in job.model.state_dict().items()}
    for size, ranks in ((2, new_world(2)), (4, world)):
        copy = str(tmp_path / str(size))
        for one in ranks.run(CASES, "train", size, out=copy, parallel={}, stop_at=end):
            assert one["epsilon"] == job.epsilon and one["parameters"].keys() == alone.keys()
            for name, value in one["parameters"].items():
                np.testing.assert_allclose(value, alone[name], rtol=0, atol=5e-7)


@pytest.mark.cases(0)
@linux_only
def test_a_signal_to_one_rank_stops_all_after_the_step(data, tmp_path):
    out = tmp_path / "out"
    words = [*options(data, out, steps=200, checkpoint_every=1000), "--no-baseline"]
    process = torchrun(2, words)
    after_releases(process, out / "ledger.jsonl", 3)
    os.kill(children(process.pid)[1], signal.SIGTERM)
    shown, _ = process.communicate(timeout=60)
    assert "Stopped after step" in shown and f"dpflash train --resume {out}" in shown
    assert "dpflash: error:" not in shown
    job = TrainingRun.resume(out)
    assert 3 <= job.step < 200 and job.lost_steps == 0
