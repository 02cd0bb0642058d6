"""Names of results: whatever lies in the folder, nothing is written over but an earlier answer to the same question."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from PIL import Image

from dave_vit import cli
from dave_vit.cli.options import ModelOptions
from dave_vit.data.images import LoadedImage, find_images
from dave_vit.explanations.output_files import OutputFolder
from hostile_files import good_png
from tiny_adapters import adapter

CAT = LoadedImage("cat", Image.new("RGB", (4, 4), "red"))
FILES = {"json": b"replaced", "npz": b"numbers", "overlay.png": b"map", "panels.png": b"maps"}


@pytest.fixture(autouse=True)
def desk(tmp_path, monkeypatch) -> Path:
    """A folder with a picture, where `--model` always gives a tiny one."""
    monkeypatch.setattr(ModelOptions, "load", lambda options: adapter())
    monkeypatch.chdir(tmp_path)
    Path("cat.png").write_bytes(good_png())
    return tmp_path


def names(record: dict) -> list[str]:
    return [Path(file).name for file in record["files"]]


def write(folder: str = ".", sources=(), picture=CAT, asked=None, labels=(), files=FILES) -> list[str]:
    return names(OutputFolder(Path(folder), sources).write(picture, asked or {}, files, {"seconds": 1.0}, labels))


def explain(*args: str) -> list[str]:
    before = contents()
    assert cli.run(["explain", *args, "--samples", "2", "-q", "--out", "."]) == 0
    assert {name: data for name, data in contents().items() if name in before and data != before[name]}.keys() <= {
        name for name in before if ".dave." in name
    }
    return sorted(set(contents()) - set(before))


def contents() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path().iterdir() if path.is_file()}


def test_names_tell_the_picture_and_the_question():
    usual = ["cat.dave.json", "cat.dave.npz", "cat.dave.png", "cat.dave.panels.png"]
    assert write() == usual
    assert Path("cat.dave.png").read_bytes() == b"map"
    record = json.loads(Path("cat.dave.json").read_text())
    assert (record["files"], record["seconds"]) == (usual, 1.0)
    assert write(labels=["tiger cat", "", "legrad"])[0] == "cat.tiger-cat.legrad.dave.json"
    assert write(labels=["../box:1,2"])[0] == "cat.box-1-2.dave.json"


def test_the_same_question_about_the_same_pixels_takes_the_same_name():
    assert write(asked={"samples": 2}) == write(asked={"samples": 2})
    assert write(asked={"samples": 3})[0] == "cat-2.dave.json"
    assert (
        write(asked={"samples": 2}, picture=LoadedImage("cat", Image.new("RGB", (4, 4), "blue")))[0]
        == "cat-3.dave.json"
    )
    assert write(asked={"samples": 2})[0] == "cat.dave.json"


def test_one_command_never_writes_a_name_twice():
    folder = OutputFolder(Path(), [])
    made = [names(folder.write(CAT, {}, FILES, {}))[0] for _ in range(3)]
    assert made == ["cat.dave.json", "cat-2.dave.json", "cat-3.dave.json"]


@pytest.mark.parametrize("ending", ["json", "npz", "png", "panels.png"])
def test_a_file_of_somebody_else_is_left_alone(ending):
    foreign = Path(f"cat.dave.{ending}")
    foreign.write_text('{"files": ["cat.dave.json"], "question": 3}')
    before = foreign.read_bytes()
    assert write()[0] == "cat-2.dave.json"
    assert foreign.read_bytes() == before


def test_a_file_that_came_beside_a_result_is_left_alone():
    write()
    Path("cat.dave.gif").write_text("a film of the user's")
    assert write(files={**FILES, "gif": b"ours"})[-1] == "cat-2.dave.gif"
    assert Path("cat.dave.gif").read_text() == "a film of the user's"


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_links_are_not_followed_into_other_files():
    Path("precious.txt").write_text("precious")
    Path("cat.dave.npz").symlink_to("precious.txt")
    Path("cat-2.dave.npz").symlink_to("nothing.txt")
    assert write()[0] == "cat-3.dave.json"
    assert Path("precious.txt").read_text() == "precious"


def test_a_result_that_is_read_again_is_a_source():
    write()
    before = Path("cat.dave.png").read_bytes()
    assert write(sources=["cat.png", "cat.dave.png"])[0] == "cat-2.dave.json"
    assert Path("cat.dave.png").read_bytes() == before


def test_long_names_are_cut():
    stem = "ä" * 120
    assert all(len(name.encode()) < 200 for name in write(picture=LoadedImage(stem, CAT.image), labels=["x" * 500]))


def test_folders_are_searched_without_results():
    write("photos")
    Path("photos/cat.png").write_bytes(good_png())
    Path("photos/a.davenport.png").write_bytes(good_png())
    assert [Path(found).name for found in find_images(["photos"])] == ["a.davenport.png", "cat.png"]


@pytest.mark.parametrize(
    ("source", "more"),
    [("cat.webp", ["--animate", "webp"]), ("cat.gif", ["--animate", "gif"]), ("cat.dave.png", ["cat.png"])],
)
def test_no_source_is_written_over(source, more):
    Path(source).write_bytes(good_png())
    explain(source, *more)
    explain(source, *more)  # and not by the second command either
    assert Path(source).read_bytes() == good_png()


def test_a_label_file_of_the_user_survives():
    labels = {"cat.json": "[1]", "cat.npz": "x", "cat.dave.json": '{"label": "cat"}', "cat.compare.dave.png": "y"}
    for name, text in labels.items():
        Path(name).write_text(text)
    made = explain("cat.png")
    assert cli.run(["compare", "cat.png", "--methods", "center", "-q", "--out", "."]) == 0
    assert {name: Path(name).read_text() for name in labels} == labels
    assert made == ["cat-2.dave.json", "cat-2.dave.npz", "cat-2.dave.panels.png", "cat-2.dave.png"]
    assert Path("cat-2.compare.dave.png").is_file()


def test_a_second_question_does_not_replace_the_answer_to_the_first():
    first = explain("cat.png")
    assert explain("cat.png") == []
    second = explain("cat.png", "--target", "hen")
    third = explain("cat.png", "--against", "hen")
    fourth = explain("cat.png", "--set", "rotation=0")
    made = ["cat.dave.json", "cat.hen.dave.json", "cat.against-hen.dave.json", "cat-2.dave.json"]
    assert [files[0] for files in (first, second, third, fourth)] == made
    assert all(path in contents() for path in (*first, *second, *third))


def test_a_mask_is_a_source():
    Path("cat.compare.dave.png").write_bytes(good_png())
    mask = ["--mask", "cat.compare.dave.png"]
    for _ in range(2):
        assert cli.run(["compare", "cat.png", "--methods", "center", "-q", "--out", ".", *mask]) == 0
    assert Path("cat.compare.dave.png").read_bytes() == good_png()
