"""The run's folder: whole files, claims, and one plan."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import pytest

from dave_vit.errors import OptionError
from dave_vit.evaluate.store import RunFolder

HOLD = """
import sys
from dave_vit.evaluate.store import RunFolder
with RunFolder(sys.argv[1]).claim("shard") as mine:
    print(mine, flush=True)
    sys.stdin.read()
"""


def test_a_claim_is_of_one_holder(tmp_path):
    folder = RunFolder(tmp_path)
    with folder.claim("shard") as first, folder.claim("shard") as second, folder.claim("other") as third:
        assert (first, second, third) == (True, False, True)
    with folder.claim("shard") as again:
        assert again


def test_a_claim_ends_with_its_process(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdin=-1, stdout=-1, text=True)
    assert holder.stdout.readline() == "True\n"
    folder = RunFolder(tmp_path)
    with folder.claim("shard") as mine:
        assert not mine
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with folder.claim("shard") as mine:
        assert mine


def test_a_claim_is_free_again_after_an_error(tmp_path):
    folder = RunFolder(tmp_path)
    with pytest.raises(RuntimeError), folder.claim("shard"):
        raise RuntimeError
    with folder.claim("shard") as mine:
        assert mine


def test_without_locks_every_claim_is_granted_and_files_are_still_whole(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    folder = RunFolder(tmp_path)
    with folder.claim("shard") as first, folder.claim("shard") as second, folder.claim("plan", wait=True) as third:
        assert (first, second, third) == (True, True, True)
        folder.write({"rows/x.parquet": b"first"})
        folder.write({"rows/x.parquet": b"second"})
    assert (tmp_path / "rows" / "x.parquet").read_bytes() == b"second"
    monkeypatch.setattr("fcntl.flock", lambda *arguments: os.stat(tmp_path / "absent"))
    with pytest.raises(FileNotFoundError), folder.claim("shard"):
        pass  # another trouble of the disk is no matter of locks


def test_looking_for_thousands_of_files_is_one_look_at_their_folder(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.write({f"rows/{number}.parquet": b"" for number in range(3)})
    looks = []
    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: looks.append(path) or listed(path))
    monkeypatch.setattr(os, "stat", None)
    existing = folder.find_existing([f"rows/{number}.parquet" for number in range(5000)] + ["scan/0.parquet"])
    monkeypatch.undo()
    assert existing == {f"rows/{number}.parquet" for number in range(3)}
    assert len(looks) == 2


def test_files_are_synced_before_they_get_their_name(tmp_path, monkeypatch):
    events = []
    sync, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: events.append("sync") or sync(file))
    monkeypatch.setattr(os, "replace", lambda a, b: events.append("rename") or rename(a, b))
    RunFolder(tmp_path).write({"rows/x.parquet": b"1", "y": b"2"})
    # the file; its name; the folder that holds the name, and the one that holds a folder that is new
    assert events == ["sync", "rename", "sync", "sync", "sync", "rename", "sync"]
    assert (tmp_path / "rows" / "x.parquet").read_bytes() == b"1"


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        RunFolder(tmp_path).write({"x": b"1"})
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_cleared_for_its_own_file_only(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write({"rows/a.parquet": b"1"})
    for name in (".b.parquet.1234.part", ".c.parquet.1234.part"):
        (tmp_path / "rows" / name).touch()
    folder.remove_partial_files("rows/b.parquet")
    assert sorted(path.name for path in (tmp_path / "rows").iterdir()) == [".c.parquet.1234.part", "a.parquet"]


def test_rows_without_a_plan_and_damaged_plans_are_refused(tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "x.parquet").touch()
    with pytest.raises(OptionError, match=r"rows without a plan\.json"):
        RunFolder(tmp_path).write_plan({"a": 1})
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(OptionError, match="damaged"):
        RunFolder(tmp_path).write_plan({"a": 1})
