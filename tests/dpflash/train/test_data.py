import os
import pickle
from collections import Counter

import numpy as np
import pytest
import torch

from dpflash import PrivateRefusal, PrivateWarning
from dpflash.train import data as corpus
from dpflash.train.config import Corpus, TrainingConfig
from dpflash.train.data import (
    DOCUMENT_START,
    IGNORE_INDEX,
    VOCAB_SIZE,
    ByteDocuments,
    TrainWindows,
    default_data_dir,
    held_out_batches,
)

KEY = b"0123456789abcdef"


@pytest.fixture
def write(tmp_path):
    def write_files(**files):
        for name, content in files.items():
            path = tmp_path / name.replace("__", "/").replace("_DOT_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return tmp_path

    return write_files


def test_files_are_found_below_the_folder_in_the_order_of_their_paths(write):
    documents = ByteDocuments.read(write(b=b"2", c__x__y=b"3", a__z=b"1", a_DOT_md=b"0"))
    assert documents.paths == ("a.md", "a/z", "b", "c/x/y")
    assert list(documents) == [b"0", b"1", b"2", b"3"]
    assert documents[2] == b"2" and documents[:1] == (b"0",)


def test_hidden_cached_and_installed_files_are_passed_over(tmp_path):
    for name in (".git/a", "__pycache__/b", "x/site-packages/c", "dist-packages/d", ".env"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "kept.txt").write_text("kept")
    assert ByteDocuments.read(tmp_path).paths == ("kept.txt",)


def test_suffixes_choose_the_files(write):
    root = write(a_DOT_py=b"1", b_DOT_txt=b"2", c_DOT_md=b"3")
    assert ByteDocuments.read(root, suffixes=(".py", ".md")).paths == ("a.py", "c.md")
    with pytest.raises(ValueError, match=r"pass \('\.py',\)"):
        ByteDocuments.read(root, suffixes=".py")
    with pytest.raises(PrivateRefusal, match=r"no usable file in files of suffixes \['\.rs'\]"):
        ByteDocuments.read(root, suffixes=(".rs",))


def test_binary_empty_and_repeated_files_are_left_out_and_counted(write):
    late_nul = b"x" * 70_000 + b"\0"
    root = write(a=b"text", b=b"text", c=b"", d=b"\0", e=late_nul, f=b"\xff\xfe", g=b"text")
    documents = ByteDocuments.read(root)
    assert documents.paths == ("a", "f")
    assert documents.left_out == "2 binary, 1 empty, 2 duplicate"


def test_a_long_file_is_read_to_its_end(write):
    content = bytes(range(1, 256)) * 1000
    assert ByteDocuments.read(write(a=content))[0] == content


def test_unreadable_files_are_left_out_with_a_warning(write, monkeypatch):
    root = write(a=b"1", b=b"2")
    (root / "gone").symlink_to(root / "nowhere")
    os.mkfifo(root / "pipe")
    opened = corpus.Path.open

    def refuse_b(path, *arguments):
        if path.name == "b":
            raise PermissionError(path)
        return opened(path, *arguments)

    monkeypatch.setattr(corpus.Path, "open", refuse_b)
    with pytest.warns(PrivateWarning, match="some files or folders could not be read"):
        documents = ByteDocuments.read(root)
    assert documents.paths == ("a",) and documents.left_out == "3 unreadable"


@pytest.mark.parametrize("closed", ["inner", ""], ids=["subfolder", "root"])
def test_a_subfolder_that_cannot_be_listed_is_counted_and_such_a_root_refused(
    write, monkeypatch, closed
):
    root = write(a=b"1", inner__b=b"2")
    scandir = os.scandir

    def refuse(path):
        if os.fspath(path) == os.path.join(root, closed).rstrip("/"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    if closed:
        with pytest.warns(PrivateWarning, match="some files or folders"):
            assert ByteDocuments.read(root).paths == ("a",)
    else:
        with pytest.raises(ValueError, match="cannot be listed"):
            ByteDocuments.read(root)


def test_folders_without_documents_are_refused_by_path(write):
    root = write(file=b"1")
    with pytest.raises(FileNotFoundError, match="nowhere: no such file or folder"):
        ByteDocuments.read(root / "nowhere")
    os.mkfifo(root / "pipe")
    with pytest.raises(ValueError, match="pipe: neither a file nor a folder"):
        ByteDocuments.read(root / "pipe")
    (root / "pipe").unlink()
    (root / "file").write_bytes(b"")
    with pytest.raises(PrivateRefusal, match="no usable file in files of any suffix"):
        ByteDocuments.read(root)


@pytest.mark.parametrize("size", [5, 200_000])
def test_the_total_of_distinct_documents_may_reach_the_cap_but_not_exceed_it(write, size):
    root = write(a=b"x" * size, b=b"x" * size, c=b"y" * size)
    assert len(ByteDocuments.read(root, max_total_bytes=2 * size)) == 2
    with pytest.raises(PrivateRefusal, match=f"max_total_bytes={2 * size - 1}: "):
        ByteDocuments.read(root, max_total_bytes=2 * size - 1)
    with pytest.raises(ValueError, match="max_total_bytes=0"):
        ByteDocuments.read(root, max_total_bytes=0)


def numbered_documents(count):
    names = tuple(f"{i}.txt" for i in range(count))
    return ByteDocuments(names, tuple(name.encode() for name in names))


def test_split_is_a_partition_of_about_the_wanted_share():
    documents = numbered_documents(2000)
    train, held_out = documents.split()
    assert sorted(train.paths + held_out.paths) == sorted(documents.paths)
    assert held_out.contents == tuple(path.encode() for path in held_out.paths)
    assert 150 < len(held_out) < 250


def test_a_new_document_moves_no_other_one_between_the_parts():
    train, held_out = numbered_documents(300).split()
    more_train, more_held_out = numbered_documents(301).split()
    assert set(train.paths) <= set(more_train.paths)
    assert set(held_out.paths) <= set(more_held_out.paths)


def test_split_refuses_an_empty_part():
    with pytest.raises(
        PrivateRefusal, match="^eval_fraction=0.1: it held out no .* eval_fraction=0 "
    ):
        numbered_documents(1).split()


def test_the_standard_library_is_a_usable_default():
    folder = default_data_dir() / "json"
    documents = ByteDocuments.read(folder, suffixes=(".py",))
    assert "decoder.py" in documents.paths
    assert (default_data_dir() / "os.py").is_file()


def test_a_window_predicts_each_byte_from_those_before_it():
    document = b"hello world"
    windows = TrainWindows([document], 4, key=KEY)
    stream = [DOCUMENT_START, *document]
    starts = set()
    for step in range(200):
        inputs, targets = windows.window(0, step)
        assert inputs.shape == targets.shape == (4,)
        assert inputs.dtype == targets.dtype == torch.int64
        start = next(
            s for s in range(len(document)) if stream[s : s + 5] == [*inputs, int(targets[-1])]
        )
        assert targets.tolist() == stream[start + 1 : start + 5]
        starts.add(start)
    assert starts == set(range(8))


@pytest.mark.parametrize("seq_len", [1, 3, 5, 6, 9])
def test_a_short_document_is_padded_behind_its_end(seq_len):
    inputs, targets = TrainWindows([b"abcde"], seq_len, key=KEY)[0]
    if seq_len >= 5:
        padding = seq_len - 5
        assert inputs.tolist() == [256, *b"abcd"] + [256] * padding
        assert targets.tolist() == [*b"abcde"] + [IGNORE_INDEX] * padding
    assert inputs.max() < VOCAB_SIZE and len(inputs) == len(targets) == seq_len


def test_starts_are_spread_evenly():
    windows = TrainWindows([bytes(range(1, 9))], 5, key=KEY)
    counts = Counter(int(windows.window(0, step)[1][0]) for step in range(4000))
    assert sorted(counts) == [1, 2, 3, 4]
    assert all(880 < count < 1120 for count in counts.values())


def test_windows_repeat_for_the_same_key_step_and_index_and_change_with_each():
    documents = [bytes(i % 255 + 1 for i in range(5000))] * 2
    first, same, other = (TrainWindows(documents, 9, key=k) for k in (KEY, KEY, KEY[::-1]))
    for windows in (first, same, other):
        windows.set_step(3)
    resumed = pickle.loads(pickle.dumps(first))
    assert torch.equal(first[0][0], same[0][0]) and torch.equal(first[0][0], resumed[0][0])
    assert torch.equal(first[0][0], first.window(0, 3)[0])
    assert not torch.equal(first[0][0], other[0][0])
    assert not torch.equal(first[0][0], first[1][0])
    assert not torch.equal(first[0][0], first.window(0, 4)[0])


def test_a_dataset_item_is_a_document():
    windows = TrainWindows([b"a", b"bb", b"ccc"], 4, key=KEY)
    assert len(windows) == 3
    assert [targets[0].item() for _, targets in windows] == [*b"abc"]
    for index in (-1, 3):
        with pytest.raises(IndexError, match=rf"index={index}: expected 0\.\.2"):
            windows[index]


def test_train_windows_refuse_bad_arguments():
    with pytest.raises(ValueError, match="documents are empty"):
        TrainWindows([], 4, key=KEY)
    with pytest.raises(ValueError, match="seq_len=0"):
        TrainWindows([b"a"], 0, key=KEY)
    for key in (b"", b"short", b"x" * 65):
        with pytest.raises(ValueError, match=f"key has {len(key)} bytes"):
            TrainWindows([b"a"], 4, key=key)
    for step in (-1, 1.0, True, 2**64):
        with pytest.raises(ValueError, match="step="):
            TrainWindows([b"a"], 4, key=KEY).set_step(step)


def test_held_out_windows_cover_every_byte_once():
    documents = [b"abcdefgh", b"xyz", b"0123456"]
    batches = list(held_out_batches(documents, 3, 100, batch_size=4))
    assert [inputs.shape for inputs, _ in batches] == [(4, 3), (3, 3)]
    targets = torch.cat([t for _, t in batches]).flatten()
    assert Counter(targets[targets != IGNORE_INDEX].tolist()) == Counter(b"".join(documents))
    inputs = torch.cat([i for i, _ in batches])
    assert inputs[:4].tolist() == [[256, *b"ab"], [256, *b"xy"], [256, *b"01"], [*b"cde"]]


def test_held_out_windows_are_fixed_capped_and_from_many_documents():
    documents = [bytes([65 + i]) * 50 for i in range(10)]
    first, second = (list(held_out_batches(documents, 7, 13, batch_size=5)) for _ in range(2))
    assert sum(len(inputs) for inputs, _ in first) == 13
    assert len({int(row[0]) for _, targets in first for row in targets}) == 10
    for batch, again in zip(first, second, strict=True):
        assert torch.equal(batch[0], again[0]) and torch.equal(batch[1], again[1])
    assert list(held_out_batches([], 7, 13)) == []
    with pytest.raises(ValueError, match="max_windows=0"):
        list(held_out_batches(documents, 7, 0))


def test_each_record_of_a_jsonl_file_is_a_document(write):
    lines = b'{"text": "one"}\n\n{"text": "two", "id": 3}\n{"text": ""}\n{"text": "one"}\n'
    root = write(a_DOT_jsonl=lines, b_DOT_txt=b"no record")
    for path in (root, root / "a.jsonl"):
        documents = ByteDocuments.read(path, unit="record")
        assert list(documents) == [b"one", b"two"] and documents.paths == (
            "a.jsonl:1",
            "a.jsonl:3",
        )
        assert documents.left_out == "1 empty, 1 duplicate"
    # With files as units the texts of a JSONL file are one document.
    assert list(ByteDocuments.read(root)) == [b"one\ntwo\n\none", b"no record"]


NO_TEXT, NO_USER = "without a string in 'text'", "without a string or a number in 'user'"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"plain text", "malformed"),
        (b'{"body": "x", "user": 1}', NO_TEXT),
        (b'{"text": 3, "user": 1}', NO_TEXT),
        (b'["text"]', "malformed"),
        (b"[" * 100_000, "malformed"),
        (b'{"text": "\xff\xfe", "user": 1}', "malformed"),
        (b"\0" * 9, "malformed"),
        (b'{"text": "x", "user": 1}' * 100_000, "malformed"),
        (b'{"text": "x"}', NO_USER),
        (b'{"text": "x", "user": ""}', NO_USER),
        (b'{"text": "x", "user": null}', NO_USER),
        (b'{"text": "x", "user": true}', NO_USER),
        (b'{"text": "x", "user": 1.5}', NO_USER),
        (b'{"text": "x", "user": [1]}', NO_USER),
    ],
    ids=lambda value: value[:20],
)
def test_a_line_that_is_no_record_is_left_out_and_counted(write, line, why):
    good = b'{"text": "one", "user": "a"}\n'
    for lines in (good + line, line + b"\n" + good):
        documents = ByteDocuments.read(write(a_DOT_jsonl=lines), unit="field:user")
        assert list(documents) == [b"one"] and documents.left_out == f"1 {why}"
    with pytest.raises(
        PrivateRefusal, match=r"no usable record in .*'text' \(--field\), and"
    ) as raised:
        ByteDocuments.read(write(a_DOT_jsonl=line), unit="field:user")
    assert "plain" not in str(raised.value) and raised.value.details["left_out"] == f"1 {why}"


def test_the_split_of_a_record_depends_on_its_text_alone(write):
    texts = [f'{{"text": "note {i}"}}\n'.encode() for i in range(200)]
    whole = ByteDocuments.read(write(a_DOT_jsonl=b"".join(texts)), unit="record").split(0.3)
    fewer = ByteDocuments.read(write(a_DOT_jsonl=b"".join(texts[3:])), unit="record").split(0.3)
    for part, smaller in zip(whole, fewer, strict=True):
        assert set(smaller.contents) <= set(part.contents)
    assert 40 < len(whole[1]) < 80
    everything, nothing = ByteDocuments.read(write(), unit="record").split(0)
    assert len(everything) == 197 and len(nothing) == 0


def test_windows_of_token_ids_are_those_of_the_same_bytes():
    document = b"some words"
    ids = np.array([DOCUMENT_START, *document], dtype=np.int32)
    for length in (3, 10, 16):
        by_bytes, by_ids = (TrainWindows([one], length, key=KEY) for one in (document, ids))
        for step in range(8):
            for a, b in zip(by_bytes.window(0, step), by_ids.window(0, step), strict=True):
                assert torch.equal(a, b)


def test_all_files_below_a_folder_are_one_unit_and_a_file_outside_is_one_itself(write):
    path = write(b__one=b"1", b__deep__two=b"2", a__one=b"3", alone=b"4", a__two=b"5")
    documents = ByteDocuments.read(path, unit="folder")
    assert documents.paths == ("a/one", "a/two", "alone", "b/deep/two", "b/one")
    assert documents.owners == ("a", "a", "alone", "b", "b") and documents.num_units == 3
    assert [documents.documents_at_once(most) for most in (1, 2, 3)] == [3, 5, 5]


def test_records_with_one_value_of_a_field_are_one_unit(write):
    lines = b"".join(
        b'{"text": "%s", "patient": %s}\n' % (text, patient)
        for text, patient in ((b"x", b"7"), (b"y", b'"p"'), (b"z", b"7"), (b"x", b'"p"'))
    )
    documents = ByteDocuments.read(write(notes_DOT_jsonl=lines), unit="field:patient")
    assert documents.owners == ("7", "p", "7", "p")
    assert list(documents) == [b"x", b"y", b"z", b"x"]


def test_units_whose_names_are_no_valid_text_are_read_and_told_apart(write):
    digests = set()
    # By JSON's escapes; as bytes of a file name the second is the first.
    for name in (r"\u00e9", r"\udcc3\udca9", r"ann\ud83d"):
        lines = "".join(f'{{"text": "x{i}", "user": "{name}{i}"}}\n' for i in range(9)).encode()
        data = str(write(a_DOT_jsonl=lines))
        config = TrainingConfig(data=data, unit="field:user", batch_size=1, eval_fraction=0.5)
        digests.add(Corpus.read(config).digest)
    assert len(digests) == 3


def test_documents_of_a_unit_do_not_depend_on_other_units(write):
    # Equal files in two folders: without the first folder the second keeps its own.
    files = {"a__one": b"same", "a__two": b"same", "b__one": b"same", "b__two": b"other"}
    both = ByteDocuments.read(write(**files), unit="folder")
    assert both.paths == ("a/one", "b/one", "b/two") and both.left_out == "1 duplicate"


def test_a_unit_is_held_out_as_a_whole_whatever_other_units_there_are(write):
    files = {
        f"p{number}__{note}": b"%d %d" % (number, note) for number in range(30) for note in (0, 1)
    }
    documents = ByteDocuments.read(write(**files), unit="folder")
    train, held_out = documents.split(0.4)
    assert not set(train.owners) & set(held_out.owners)
    assert len(train) + len(held_out) == 60 and train.num_units + held_out.num_units == 30
    fewer = ByteDocuments(
        documents.paths[2:], documents.contents[2:], unit="folder", owners=documents.owners[2:]
    )
    assert set(fewer.split(0.4)[0].owners) == set(train.owners) - {documents.owners[0]}


def test_training_leaves_out_units_that_are_evaluated_on(write):
    train = ByteDocuments(("a/1", "b/1"), (b"1", b"2"), unit="folder", owners=("a", "b"))
    held_out = ByteDocuments(("a/9",), (b"9",), unit="folder", owners=("a",))
    assert train.without(held_out).owners == ("b",)


@pytest.mark.parametrize("unit", ["folders", "field:", "patient"])
def test_an_unknown_unit_is_refused(write, unit):
    with pytest.raises(ValueError, match="unit="):
        ByteDocuments.read(write(a=b"1"), unit=unit)
