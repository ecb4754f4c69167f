"""`dpflash ledger`: what was changed is found, kept heads prove it, and names are corrected."""

import hashlib
import json
import re
import shlex
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dpflash.accounting import PoissonGaussian, RDPAccountant, ShuffledGaussian
from dpflash.cli import main
from dpflash.privacy.ledger import Ledger
from dpflash.privacy.ledger_proof import Signature, private_key, signatures_path
from dpflash.privacy.spending import Spending

EVENT = PoissonGaussian(noise_multiplier=1.25, sample_rate=0.01)
ABOUT = {
    "name": "notes",
    "day": "2026-11-28",
    "version": "0.1.0",
    "source": "torch 2, dpflash abc",
    "data": "notes of 2026",
    "dataset_size": 3600,
    "max_epsilon": 4.0,
    "at_delta": 1e-6,
    "max_grad_norm": 0.5,
}
UNIT = "user: patient_id"


def guard_of(path):
    return path.with_name(f"{path.name}.guard")


@pytest.fixture
def path(tmp_path):
    """A ledger of two runs of three lines each, of units whose name is not the best."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for run, about in (
        ("a" * 64, ABOUT),
        ("b" * 64, {**ABOUT, "name": "<i>&two", "seeded": "yes"}),
    ):
        for _ in range(3):
            ledger.append(run=run, event=EVENT, accountant="rdp", count=10, unit=UNIT, about=about)
    return ledger.path


@pytest.fixture
def key(tmp_path):
    assert main(["ledger", "key", str(tmp_path / "officer.pem")]) == 0
    return tmp_path / "officer.pem"


def verify(path, *words):
    return main(["ledger", "verify", str(path), *map(str, words)])


def rewritten(path, change):
    """As someone who may write the folder can: with digests and a guard that fit."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records, done, step = change(records), b"", 0
    for record in records:
        length = record["steps"][1] - record["steps"][0]
        record = {**record, "steps": [step + 1, step + 1 + length]}
        del record["digest"]
        text = json.dumps(record).encode()
        digest = hashlib.blake2b(done + text, digest_size=16).hexdigest()
        line = text[:-1] + f', "digest": "{digest}"}}\n'.encode()
        done, step = done + line, step + 1 + length
        guard_of(path).write_bytes(line)
    if not records:
        guard_of(path).write_bytes(b"")
    path.write_bytes(done)


def edited(number, **changes):
    return lambda records: [
        {**record, **(changes if n == number else {})} for n, record in enumerate(records)
    ]


REWRITTEN = {
    "cut_at_the_end": lambda records: records[:-1],
    "emptied": lambda records: [],
    "a_line_removed": lambda records: records[:1] + records[2:],
    "a_line_added": lambda records: [*records[:2], records[1], *records[2:]],
    "lines_exchanged": lambda records: [*records[3:], *records[:3]],
    "less_noise_recorded": edited(1, event={**EVENT.as_dict(), "noise_multiplier": 9.0}),
    "another_unit": lambda records: [{**record, "unit": "user: x"} for record in records],
    "another_data_set": edited(3, about={**ABOUT, "data": "public notes"}),
}


@pytest.mark.parametrize("kind", REWRITTEN)
def test_a_ledger_that_was_written_anew_is_found_by_a_kept_head_or_a_signature(
    kind, path, key, capsys
):
    head = hashlib.sha256(path.read_bytes()).hexdigest()
    assert main(["ledger", "sign", str(path), "--key", str(key)]) == 0
    public = key.with_suffix(".public.pem")
    assert verify(path, "--head", head) == 0
    assert "whoever can write the file" not in capsys.readouterr().out
    assert verify(path, "--public-key", public) == 0
    assert "whoever can write the file" in capsys.readouterr().out
    rewritten(path, REWRITTEN[kind])
    capsys.readouterr()
    assert verify(path) == 1
    assert "signature 1 is for 6 lines" in capsys.readouterr().out
    assert main(["budget", str(path), "--delta", "1e-5"]) == 2
    assert "signature 1 is for 6 lines" in capsys.readouterr().err
    path.with_name(f"{path.name}.signatures").unlink()
    assert verify(path) == 0, "nothing that was kept is left to compare with"
    assert "whoever can write the file" in capsys.readouterr().out
    assert verify(path, "--head", head) == verify(path, "--public-key", public) == 1
    shown = capsys.readouterr().out
    assert f"it never had the head {head}" in shown and "has no signature of the key" in shown


def test_a_sound_ledger_has_the_head_that_sha256sum_prints_and_may_grow(path, capsys):
    done = subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True)
    assert verify(path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    head = done.stdout.split()[0]
    assert found == {
        "sound": True,
        "problem": None,
        "lines": 6,
        "steps": 60,
        "runs": 2,
        "privacy_unit": UNIT,
        "corrections": [],
        "head": head,
        "lines_of_kept_head": None,
        "signatures": [],
        "lines_without_record": [],
        "without_guard": False,
        "private_refusals": 0,
    }
    ledger = Ledger(path)
    assert ledger.head == head
    ledger.append(run="c", event=EVENT, accountant="rdp", unit=UNIT)
    assert ledger.head != head
    assert verify(path, "--head", head) == 0
    shown = capsys.readouterr().out
    assert "sound: 7 lines, 61 steps, 3 runs" in shown and "the first 6 lines" in shown
    assert "not recorded  the day, code, data or bound of the run in lines 7" in shown


def test_a_copy_without_its_guard_is_proven_by_a_kept_head_alone(path, capsys):
    head = Ledger(path).head
    guard_of(path).unlink()
    assert verify(path) == 1 and "guard is missing" in capsys.readouterr().out
    assert verify(path, "--head", head.upper()) == 0
    path.write_bytes(path.read_bytes().replace(b'"notes"', b'"other"', 1))
    assert verify(path, "--head", head) == 1
    assert "damaged at line 1" in capsys.readouterr().out


def test_what_is_no_ledger_no_head_and_no_key_is_an_error_and_not_broken(path, key, capsys):
    for words, message in (
        ([f"{path}.none"], "no such file"),
        ([path.parent], "cannot be read"),
        ([path, "--head", "abc"], "expected 64 hexadecimal digits"),
        ([path, "--public-key", key], "no public key in PEM"),
        ([path, "--public-key", path], "no public key in PEM"),
    ):
        assert verify(*words) == 2
        assert message in capsys.readouterr().err


# Signatures


def signed(path, key):
    assert main(["ledger", "sign", str(path), "--key", str(key)]) == 0
    return path.with_name(f"{path.name}.signatures")


def test_a_signature_proves_the_lines_it_is_of_and_openssl_can_check_it(
    path, key, tmp_path, capsys
):
    where, public = signed(path, key), key.with_suffix(".public.pem")
    assert key.stat().st_mode & 0o777 == 0o600
    one = json.loads(where.read_text())
    day, head = one["day"], Ledger(path).head
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", day) and (one["lines"], one["head"]) == (6, head)
    (tmp_path / "statement").write_text(f"dpflash ledger, lines 6, head {head}, {day}\n")
    (tmp_path / "signature").write_bytes(bytes.fromhex(one["signature"]))
    command = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", public, "-rawin"]
    command += ["-in", tmp_path / "statement", "-sigfile", tmp_path / "signature"]
    subprocess.run(command, check=True, capture_output=True)
    Ledger(path).append(run="c", event=EVENT, accountant="rdp", unit=UNIT)
    assert verify(path, "--public-key", public) == 0
    assert re.search("not signed +the last 1 line\n", capsys.readouterr().out)


@pytest.mark.parametrize("name", ["lines", "head", "day", "key", "signature", "moved", "garbage"])
def test_a_signature_that_was_changed_or_is_of_another_ledger_is_found(
    name, path, key, tmp_path, capsys
):
    where = signed(path, key)
    one = json.loads(where.read_text())
    other = Ledger(tmp_path / "other")
    other.append(run="c", event=EVENT, accountant="rdp", unit=UNIT)
    changed = {
        "lines": {**one, "lines": 5},
        "head": {**one, "head": other.head},
        "day": {**one, "day": "2020-01-01"},
        "key": {**one, "key": "00" * 32},
        "signature": {**one, "signature": one["signature"][::-1]},
        "moved": json.loads(signed(other.path, key).read_text()),
        "garbage": {"lines": 6},
    }
    where.write_text(json.dumps(changed[name]) + "\n")
    capsys.readouterr()
    assert verify(path) == 1
    assert "signature" in capsys.readouterr().out


def test_a_signature_of_another_key_does_not_stand_for_the_one_asked_for(path, key, tmp_path):
    assert main(["ledger", "key", str(tmp_path / "thief.pem")]) == 0
    signed(path, tmp_path / "thief.pem")
    assert verify(path, "--public-key", tmp_path / "thief.public.pem") == 0
    assert verify(path, "--public-key", key.with_suffix(".public.pem")) == 1


def test_a_broken_ledger_is_not_signed_and_no_key_is_overwritten(path, key, capsys):
    before, public = key.read_bytes(), key.with_suffix(".public.pem")
    public.unlink()
    assert main(["ledger", "key", str(key)]) == 2
    assert key.read_bytes() == before and not public.exists()
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["ledger", "sign", str(path), "--key", str(key)]) == 2
    assert "truncated" in capsys.readouterr().err
    assert not path.with_name(f"{path.name}.signatures").exists()


# The unit's name


def rename(path, name="patient"):
    return main(["ledger", "rename", str(path), "--unit-name", name])


def test_a_corrected_name_adds_up_and_both_names_can_be_read(path, tmp_path, capsys):
    other = Ledger(tmp_path / "other")
    other.append(run="c", event=EVENT, accountant="rdp", count=40, unit="user: patient")
    budget = ["budget", str(path), str(other.path), "--delta", "1e-5", "--accountant", "rdp"]
    assert main(budget) == 2
    rename_this = f"dpflash ledger rename {path} --unit-name patient or dpflash ledger rename "
    assert f"{rename_this}{other.path} --unit-name patient_id\n" in capsys.readouterr().err
    digest = Ledger(path).digest()
    assert rename(path) == 0
    assert f"{UNIT} -> user: patient" in capsys.readouterr().out
    assert Ledger(path).digest() == digest, "checkpoints no longer fit"
    assert main([*budget, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    accountant = RDPAccountant()
    accountant.compose(EVENT, 100)
    assert report["epsilon"] == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-12)
    assert (report["privacy_unit"], report["earlier_names"]) == ("user: patient", [UNIT])
    assert verify(path) == 0
    assert re.search(rf"line 7, [\d-]{{10}}: {UNIT} -> user: patient", capsys.readouterr().out)
    assert rename(path) == 2 and "is 'user: patient' already" in capsys.readouterr().err
    # Back and forth: each name that there was means the last one.
    assert rename(path, "person") == rename(path, "patient_id") == rename(path) == 0
    names = (UNIT, "user: patient", "user: person")
    assert Ledger(path).names == dict.fromkeys(names, "user: patient")
    assert [line.unit for line in Ledger(path).lines[:6]] == [UNIT] * 6


@pytest.mark.parametrize("unit", ["sample", "document", "preference pair"])
def test_no_name_makes_users_of_other_units(unit, tmp_path, capsys):
    ledger = Ledger(tmp_path / "l")
    assert main(["ledger", "rename", str(ledger.path), "--unit-name", "patient"]) == 2
    ledger.append(run="a", event=EVENT, accountant="rdp", unit=unit)
    capsys.readouterr()
    assert rename(ledger.path) == 2
    assert "only users" in capsys.readouterr().err
    # Nor does a line that someone else wrote.
    forged = {"steps": [2, 1], "unit": "user: patient", "was": unit, "note": "x", "event": None}
    rewritten(ledger.path, lambda records: [*records, {**records[0], **forged}])
    assert verify(ledger.path) == 1
    assert "a note can correct the name of users" in capsys.readouterr().out


def test_users_without_a_name_get_one(tmp_path):
    ledger = Ledger(tmp_path / "l")
    ledger.append(run="a", event=EVENT, accountant="rdp", unit="user")
    assert rename(ledger.path) == 0
    assert Spending("rdp", ledger=Ledger(ledger.path)).unit == "user: patient"


# The page of the documentation


def test_the_commands_of_the_documentation_work_one_after_another(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    for suffix in ("", ".guard"):
        shutil.copy(f"{path}{suffix}", f"old.jsonl{suffix}")
    text = (Path(__file__).parents[3] / "docs" / "ledger.md").read_text()
    lines = "".join(re.findall(r"```sh\n(.*?)```", text, re.S)).splitlines()
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("dpflash ledger")]
    assert len(commands) > 5
    assert [main(command) for command in commands] == [0] * len(commands)


# The page for auditors


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.links = set(), "", []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.text += data


def test_the_page_has_what_an_auditor_asks_for_and_nothing_from_elsewhere(
    path, key, tmp_path, capsys
):
    Ledger(path).note("ended by a private refusal", run="b" * 64, accountant="rdp", unit=UNIT)
    assert verify(path) == 0 and "1 run; do not publish" in capsys.readouterr().out
    assert rename(path) == 0
    patient = "user: patient"
    Ledger(path).append(run="b" * 64, event=EVENT, accountant="rdp", unit=patient, branch="2")
    other = Ledger(tmp_path / "other.jsonl")
    other.append(run="d", event=EVENT, accountant="rdp", unit=patient, count=50)
    shuffled = ShuffledGaussian(noise_multiplier=4.0)
    Ledger(path).append(run="c" * 64, event=shuffled, accountant="rdp", unit=patient)
    signed(path, key)
    out = tmp_path / "report.html"
    words = ["ledger", "report", str(path), "--delta", "1e-5", "--out"]
    public = ["--public-key", str(key.with_suffix(".public.pem"))]
    assert main([*words, str(out), "--head", Ledger(path).head, *public]) == 0
    several = [*words[:3], str(other.path), *words[3:], str(tmp_path / "b.html")]
    assert main(several) == 0 and main([*several, "--head", Ledger(path).head]) == 2
    capsys.readouterr()
    page = Tags(out.read_text())
    assert not page.links and not page.tags & {"script", "img", "link", "i"}
    text = " ".join(page.text.split())
    assert main(["budget", str(path), "--delta", "1e-5", "--json"]) == 0
    total = json.loads(capsys.readouterr().out)["epsilon"]
    pattern = r"delta 1e-05 ?at most ([\d.]+)"
    assert total <= float(re.search(pattern, text)[1]) < total + 1e-4
    assert main(["budget", str(path), str(other.path), "--delta", "1e-5", "--json"]) == 0
    more = json.loads(capsys.readouterr().out)["epsilon"]
    both = (tmp_path / "b.html").read_text()
    assert total < more <= float(re.search(pattern.replace(" ?", "<br>\n?<b>"), both)[1])
    for expected in (
        "notes (aaaaaaaaaaaa)",
        "<i>&two (bbbbbbbbbbbb), seeded31",
        "Whoever knows the seed of a seeded run",
        "all entries of one patient",
        "notes of 2026",
        "2026-11-28",
        "torch 2, dpflash abc",
        "clipping bound0.5",
        "number of privacy units3600",
        "limit of epsilon, at delta4, 1e-06",
        "noise multiplier1.25",
        "the privacy unit user: patient_id was renamed user: patient",
        "run bbbbbbbbbbbb ended by a private refusal. Do not publish",
        "Lines 9 to 10: written by other code or by an earlier version",
        "the ledger had these lines and no others",
        "(the public key that was passed)",
        Ledger(path).head,
    ):
        assert expected in text, expected
    assert main([*words, str(path)]) == 2
    assert "expected a name such as report.html" in capsys.readouterr().err
    assert verify(path) == 0


def test_a_signature_and_a_head_of_no_line_prove_nothing(path, key, tmp_path, capsys):
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert main(["ledger", "sign", str(empty), "--key", str(key)]) == 2
    assert "has no line yet" in capsys.readouterr().err
    assert verify(path, "--head", hashlib.sha256(b"").hexdigest()) == 1
    one = Signature(0, hashlib.sha256(b"").hexdigest(), "2026-11-30", "", "")
    signer = private_key(key)
    signed = {**vars(one), "key": signer.public_key().public_bytes_raw().hex()}
    signed["signature"] = signer.sign(Signature(**signed).statement).hex()
    signatures_path(path).write_text(json.dumps(signed) + "\n")
    assert verify(path) == 1 and "is for 0 lines" in capsys.readouterr().out


def test_an_unchanged_ledger_is_signed_once_by_a_key(path, key, tmp_path, capsys):
    signed(path, key)
    signed(path, key)
    assert len(signatures_path(path).read_text().splitlines()) == 1
    Ledger(path).append(run="b" * 64, event=EVENT, accountant="rdp", unit=UNIT)
    signed(path, key)
    another = tmp_path / "another.pem"
    assert main(["ledger", "key", str(another)]) == 0
    signed(path, another)
    assert len(signatures_path(path).read_text().splitlines()) == 3
    assert verify(path, "--public-key", str(another.with_suffix(".public.pem"))) == 0


def test_a_name_can_be_corrected_again_by_the_same_object(path):
    ledger = Ledger(path)
    old, first = ledger.rename("first")
    assert ledger.unit == first
    assert ledger.rename("second") == (first, ledger.unit)
    assert Ledger(path).names[old] == Ledger(path).names[first] == ledger.unit


def test_a_ledger_without_its_guard_says_what_is_not_shown(path, capsys):
    head = hashlib.sha256(path.read_bytes()).hexdigest()
    path.with_name(f"{path.name}.guard").unlink()
    assert verify(path) == 1 and verify(path, "--head", head) == 0
    assert f"since {path}.guard is missing" in capsys.readouterr().out
