"""Folders that only their owner can fill: which paths are taken, and locks between processes."""

import os
import select
import stat
import sys
import time
from pathlib import Path

import pytest

from dpflash.kernels.owned_folder import OwnedFolder, UnsafePathError, temporary_folder

pytestmark = pytest.mark.skipif(os.name != "posix", reason="files have no owners")
root_only = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away"
)


def test_missing_folders_are_made_only_where_asked(tmp_path):
    with pytest.raises(FileNotFoundError):
        OwnedFolder(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())
    OwnedFolder(tmp_path / "a" / "b", make=True)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700


def test_a_path_is_absolute_and_names_a_folder(tmp_path):
    with pytest.raises(UnsafePathError, match="here depends on the working directory"):
        OwnedFolder(Path("here"))
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        OwnedFolder(tmp_path / "file", make=True)


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o1777, 0o2770])
def test_a_folder_that_others_can_write_is_refused(mode, tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a").chmod(mode)
    with pytest.raises(
        UnsafePathError, match=rf"a can be written by its .*mode {mode:04o}; .chmod"
    ):
        OwnedFolder(tmp_path / "a")
    if not mode & stat.S_ISVTX:
        with pytest.raises(UnsafePathError, match="a can be written by its group or others"):
            OwnedFolder(tmp_path / "a" / "b")


@root_only
def test_a_sticky_folder_above_is_taken_but_not_another_users(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a").chmod(0o1777)
    assert OwnedFolder(tmp_path / "a" / "b").path == tmp_path / "a" / "b"
    os.chown(tmp_path / "a", 12345, -1)
    with pytest.raises(UnsafePathError, match="a belongs to user 12345, not to user 0 or root"):
        OwnedFolder(tmp_path / "a" / "b")


@root_only
def test_what_another_user_left_in_a_sticky_folder_is_refused(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a").chmod(0o1777)
    os.chown(tmp_path / "a" / "b", 12345, -1)
    for path in (tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"):
        with pytest.raises(UnsafePathError, match="b belongs to user 12345"):
            OwnedFolder(path, make=True)


def test_another_users_folder_is_refused(tmp_path, monkeypatch):
    owner = os.geteuid() or 12345
    os.chown(tmp_path, owner, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.raises(UnsafePathError, match=f"belongs to user {owner}, not to user 54321"):
        OwnedFolder(tmp_path)


def test_a_link_above_the_folder_is_followed_and_its_target_checked(tmp_path):
    (tmp_path / "target" / "kept").mkdir(parents=True)
    (tmp_path / "absolute").symlink_to(tmp_path / "target")
    (tmp_path / "relative").symlink_to("absolute/../target")
    for link in ("absolute", "relative"):
        OwnedFolder(tmp_path / link / "kept").write("file", b"content")
        assert (tmp_path / "target" / "kept" / "file").read_bytes() == b"content"
    (tmp_path / "target").chmod(0o777)
    for link in ("absolute", "relative"):
        with pytest.raises(UnsafePathError, match="target can be written by its group or others"):
            OwnedFolder(tmp_path / link / "kept")


def test_a_link_in_a_folder_that_others_can_write_is_refused(tmp_path):
    (tmp_path / "target" / "kept").mkdir(parents=True)
    (tmp_path / "public").mkdir()
    (tmp_path / "public" / "link").symlink_to(tmp_path / "target")
    (tmp_path / "public").chmod(0o777)
    with pytest.raises(UnsafePathError, match="public can be written by its group or others"):
        OwnedFolder(tmp_path / "public" / "link" / "kept")


@root_only
def test_another_users_link_is_refused(tmp_path):
    (tmp_path / "target" / "kept").mkdir(parents=True)
    (tmp_path / "public").mkdir()
    (tmp_path / "public").chmod(0o1777)
    (tmp_path / "public" / "link").symlink_to(tmp_path / "target")
    OwnedFolder(tmp_path / "public" / "link" / "kept")
    os.lchown(tmp_path / "public" / "link", 12345, -1)
    with pytest.raises(UnsafePathError, match="link belongs to user 12345"):
        OwnedFolder(tmp_path / "public" / "link" / "kept")


def test_the_folder_itself_is_no_link_and_links_end(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "link", tmp_path / "loop" / "kept"):
        with pytest.raises(UnsafePathError, match="is a symbolic link"):
            OwnedFolder(path)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "writable", "foreign"])
def test_a_file_that_is_not_its_owners_alone_is_not_read(kind, tmp_path, monkeypatch):
    folder, path = OwnedFolder(tmp_path), tmp_path / "file"
    if kind == "link":
        (tmp_path / "target").touch()
        path.symlink_to("target")
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind == "folder":
        path.mkdir(0o700)
    else:
        path.touch(0o600)
        assert folder.read("file") == b""
    if kind == "writable":
        path.chmod(0o660)
    elif kind == "foreign":
        os.chown(path, os.geteuid() or 12345, -1)
        monkeypatch.setattr(os, "geteuid", lambda: 54321)
    reason = {"link": "symbolic link", "writable": "can be written", "foreign": "belongs to user"}
    with pytest.raises(UnsafePathError, match=reason.get(kind, "is not a regular file")):
        folder.read("file")


def test_a_file_is_replaced_in_one_step_and_readable_by_its_owner_alone(tmp_path):
    folder = OwnedFolder(tmp_path)
    (tmp_path / "target").write_bytes(b"untouched")
    (tmp_path / "file").symlink_to("target")
    folder.write("file", b"content")
    assert folder.read("file") == b"content"
    assert (tmp_path / "target").read_bytes() == b"untouched"
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "target"]


def test_a_temporary_folder_in_a_public_one_is_refused_and_removed(tmp_path):
    (tmp_path / "public").mkdir()
    (tmp_path / "public").chmod(0o777)
    with pytest.raises(UnsafePathError), temporary_folder(tmp_path / "public"):
        pytest.fail("it was taken")
    assert not list((tmp_path / "public").iterdir())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_crashed_holder_unlocks_even_if_a_child_of_it_lives_on(tmp_path, capfd):
    folder = OwnedFolder(tmp_path)
    ready, done = os.pipe(), os.pipe()
    holder = os.fork()
    if holder == 0:
        with folder.locked("lock", "nobody"):
            if os.fork() == 0:
                os.close(done[1])
                select.select([done[0]], [], [], 20)  # until the test ends
            else:
                os.write(ready[1], b".")
                time.sleep(0.3)
            os._exit(0)
    os.read(ready[0], 1)
    start = time.monotonic()
    with folder.locked("lock", "the holder"):
        assert os.waitpid(holder, 0)[1] == 0
    assert capfd.readouterr().err == "dpflash: waiting for the holder\n"
    os.close(done[1])
    assert time.monotonic() - start < 15


def test_where_no_lock_can_be_made_nobody_waits(tmp_path):
    folder = OwnedFolder(tmp_path)
    (tmp_path / "lock").symlink_to("elsewhere")
    with folder.locked("lock", "nobody"), folder.locked("lock", "nobody"):
        assert not (tmp_path / "elsewhere").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="this system has no such locks")
def test_a_lock_file_is_its_owners_and_is_released(tmp_path):
    folder = OwnedFolder(tmp_path)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), folder.locked("lock", "nobody"):
            raise KeyboardInterrupt
    assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) == 0o600
