"""Files are whole or absent."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dave_vit._internal import atomic_files as atomic


def test_a_block_that_ends_well_puts_the_file_in_its_place(tmp_path):
    target = tmp_path / "new" / "file.txt"
    with atomic.replace_atomically(target) as temporary:
        temporary.write_text("whole")
        assert not target.exists()
    assert [path.name for path in target.parent.iterdir()] == ["file.txt"]
    assert target.read_text() == "whole"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path, error):
    target = tmp_path / "file.txt"
    target.write_text("old")

    def interrupted() -> None:
        with atomic.replace_atomically(target) as temporary:
            temporary.write_text("ha")
            raise error

    with pytest.raises(error):
        interrupted()
    assert [path.name for path in tmp_path.iterdir()] == ["file.txt"]
    assert target.read_text() == "old"


def test_of_files_that_belong_together_none_appears_if_one_cannot_be_written(tmp_path):
    (tmp_path / "taken").write_text("a file where a folder is needed")
    with pytest.raises(OSError, match="taken"):
        atomic.write_files({tmp_path / "a.json": b"{}", tmp_path / "taken" / "b.npz": b""})
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_the_first_of_several_files_appears_last(tmp_path, monkeypatch):
    moved = []
    monkeypatch.setattr("os.replace", lambda source, target: moved.append(target.name))
    atomic.write_files({tmp_path / "record.json": b"{}", tmp_path / "a.png": b"", tmp_path / "b.png": b""})
    assert moved[-1] == "record.json"


def test_json_and_arrays_come_back(tmp_path):
    atomic.write_bytes(tmp_path / "a.json", atomic.json_bytes({"name": "Wróbel", "value": 0.5}))
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"name": "Wróbel", "value": 0.5}
    atomic.write_bytes(tmp_path / "a.npz", atomic.npz_bytes({"map": np.eye(2)}))
    assert np.load(tmp_path / "a.npz")["map"].tolist() == [[1, 0], [0, 1]]


def test_json_that_no_other_program_could_read_is_refused():
    with pytest.raises(ValueError, match="JSON compliant"):
        atomic.json_bytes({"value": float("nan")})
