"""Options of `dave explain` for scores, boxes, words, sentences and clips: the same as for classes, or refused."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import task_folders
import writer_folders
from dave_vit import cli
from dave_vit.explanations.explainer import Explainer

WIDTH, HEIGHT = 96, 64


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a function from a family to the folder of a small model of it."""
    saved: dict[str, Path] = {}

    def folder(family: str) -> str:
        if family not in saved:
            module = writer_folders if family in writer_folders.PROCESSORS else task_folders
            saved[family] = module.save(family, tmp_path_factory.mktemp("folder"))
        return f"hf:{saved[family]}"

    return folder


@pytest.fixture(autouse=True)
def photos(tmp_path, monkeypatch) -> Path:
    """Work in a folder with two photographs, a clip, and files that cannot be read."""
    monkeypatch.chdir(tmp_path)
    draws = np.random.default_rng(0)
    for name in ("a.png", "b.png"):
        Image.fromarray(draws.integers(0, 255, (HEIGHT, WIDTH, 3), dtype=np.uint8)).save(name)
    frames = [Image.fromarray(draws.integers(0, 255, (HEIGHT, WIDTH, 3), dtype=np.uint8)) for _ in range(4)]
    for name in ("clip.gif", "other.gif"):
        frames[0].save(name, save_all=True, append_images=frames[1:])
    Path("broken.png").write_text("no image")
    Path("broken.gif").write_text("no clip")
    return tmp_path


def explain(capsys, *args: str, code: int = 0) -> list[dict]:
    """Run `dave explain`, and return its records."""
    method = [] if "--method" in args or "--animate" in args else ["--method", "effective"]
    assert cli.run(["explain", *args, *method, "--json", "--out", "out"]) == code
    return json.loads(capsys.readouterr().out)


def refuse(capsys, *args: str) -> str:
    """Run `dave explain`, and return the one line with which it refuses."""
    assert cli.run(["explain", *args, "--out", "out"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: ")]
    assert len(lines) == 1
    return lines[0]


def endings(record: dict) -> set[str]:
    return {path.rsplit(".dave.", 1)[1] for path in record["files"]}


ASKED = ["--prompt", "what ?", "--words", "1"]
CASES = [
    pytest.param("DPT", [], ["a.png", "b.png"], "broken.png", "panels", id="score"),
    pytest.param("YOLOS", ["--threshold", "0"], ["a.png", "b.png"], "broken.png", "panels", id="boxes"),
    pytest.param("LLaVA", ASKED, ["a.png", "b.png"], "broken.png", "words", id="words"),
    pytest.param("VideoMAE", [], ["clip.gif", "other.gif"], "broken.gif", "frames", id="clips"),
]


def model_of(family: str, folders) -> list[str]:
    return ["--model", family if family.startswith("builtin") else folders(family)]


@pytest.mark.parametrize(("family", "options", "good", "bad", "figure"), CASES)
def test_unreadable_files_are_reported_and_the_rest_is_done(family, options, good, bad, figure, folders, capsys):
    args = [good[0], bad, good[1], *model_of(family, folders), *options]
    records = explain(capsys, *args, code=2)
    assert list(dict.fromkeys(record["source"] for record in records)) == good
    assert {"json", "npz", f"{figure}.png"} <= endings(records[0])
    gallery = json.loads(next(Path("out").glob("gallery*.dave.json")).read_text())
    assert {item["name"] for item in gallery["pictures"]} == set(good)
    assert {Path(file).suffix for file in gallery["files"]} == {".json", ".html", ".png"}


@pytest.mark.parametrize(("family", "options", "good", "bad", "figure"), CASES)
def test_view_scales_and_format(family, options, good, bad, figure, folders, capsys):
    args = [good[0], *model_of(family, folders), *options]
    usual, *_ = explain(capsys, *args)
    signed, *_ = explain(capsys, *args, "--view", "signed", "--scales", "own", "--format", "svg", "--no-gallery")
    assert f"{figure}.svg" in endings(signed)
    assert ".signed." in signed["files"][0]
    pictures = [
        [file for file in record["files"] if file.endswith((".dave.png", ".gif"))] for record in (usual, signed)
    ]
    assert Path(pictures[0][0]).read_bytes() != Path(pictures[1][0]).read_bytes()


@pytest.mark.parametrize(("family", "options", "good", "bad", "figure"), CASES[:3])
def test_the_refining_map_is_animated(family, options, good, bad, figure, folders, capsys):
    args = [good[0], *model_of(family, folders), *options, "--samples", "3", "--animate", "gif"]
    record, *_ = explain(capsys, *args)
    (film,) = [file for file in record["files"] if file.endswith(".gif")]
    with Image.open(film) as frames:
        assert frames.n_frames == 3


def test_preprocessing_of_your_own(folders, capsys):
    for family, source in (("DPT", "a.png"), ("VideoMAE", "clip.gif")):
        args = [source, "--model", folders(family)]
        (usual,) = explain(capsys, *args)
        (changed,) = explain(capsys, *args, "--fit", "squash", "--mean", "0.1")
        assert changed["prepare"] == {"mean": [0.1, 0.1, 0.1], "fit": "squash"}
        maps = [np.load(record["files"][1])["attribution"] for record in (usual, changed)]
        assert np.abs(maps[0] - maps[1]).max() > 0
        assert changed["seen"] == 1


@pytest.mark.parametrize(
    ("family", "source", "options"),
    [
        pytest.param("DPT", "smooth.png", [], id="score"),
        pytest.param("YOLOS", "smooth.png", ["--threshold", "0"], id="boxes"),
        pytest.param("SAM with a point", "smooth.png", ["--prompt", "20,30"], id="point"),
        pytest.param("Grounding DINO", "smooth.png", ["--prompt", "a cat.", "--score", "query:2:cat"], id="text"),
        pytest.param("VideoMAE", "smooth.gif", [], id="clip"),
        pytest.param("LLaVA", "smooth.png", ASKED, id="words"),
        pytest.param("builtin-captions", "smooth.png", ["--words", "1"], id="caption"),
    ],
)
def test_the_model_receives_the_prepared_photograph(family, source, options, folders, capsys, monkeypatch):
    received, refine = [], Explainer.refine
    monkeypatch.setattr(
        Explainer, "refine", lambda own, inputs, *rest: (received.append(inputs), refine(own, inputs, *rest))[1]
    )
    ramps = np.mgrid[0:HEIGHT, 0:WIDTH].astype(float)
    pixels = np.stack([255 * ramps[0] / HEIGHT, 255 * ramps[1] / WIDTH, 0 * ramps[0] + 90], -1).astype(np.uint8)
    Image.fromarray(pixels).save("smooth.png")
    Image.fromarray(pixels).save("smooth.gif", save_all=True, append_images=[Image.fromarray(pixels)])
    prepare = ["--fit", "squash", "--mean", "0.1,0.2,0.3", "--std", "0.5,0.6,0.7"]
    record, *_ = explain(capsys, source, *model_of(family, folders), *options, *prepare)
    assert record["prepare"] == {"fit": "squash", "mean": [0.1, 0.2, 0.3], "std": [0.5, 0.6, 0.7]}
    assert record["seen"] == 1
    frame = received[0].reshape(-1, *received[0].shape[-3:])[0]
    squashed = Image.open(source).convert("RGB").resize(frame.shape[:0:-1], Image.Resampling.BICUBIC)
    colours = np.asarray(squashed, dtype=float).transpose(2, 0, 1) / 255
    expected = (colours - np.array([0.1, 0.2, 0.3])[:, None, None]) / np.array([0.5, 0.6, 0.7])[:, None, None]
    assert np.abs(frame.numpy() - expected).mean() < 0.03


@pytest.mark.skipif(
    version("transformers") < "5", reason="its processor takes Qwen2's own tokenizer only, not a tiny one"
)
def test_packed_pictures_are_fitted_but_keep_their_size(folders, capsys):
    args = ["a.png", *model_of("Qwen2-VL", folders), *ASKED]
    (usual,) = explain(capsys, *args)
    (squashed,) = explain(capsys, *args, "--fit", "squash")
    assert usual["shape"][1] < usual["shape"][2]
    assert squashed["shape"][1] == squashed["shape"][2]
    assert "leave out --size" in refuse(capsys, *args, "--size", "64")


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("DPT", ["--target", "3"], "takes no target; leave --target out"),
        ("DPT", ["--against", "rivals"], "does not apply to a score function"),
        ("DPT", ["--fit", "tiles"], "take pad or squash"),
        ("DPT", ["--words", "1"], "takes no words"),
        ("VideoMAE", ["--animate", "gif"], "leave out --animate"),
        ("VideoMAE", ["--score", "value"], "takes no score"),
        ("YOLOS", ["--threshold", "1"], "lower it with --threshold"),
        ("builtin-captions", ["--boxes"], "takes no boxes"),
        ("builtin-captions", ["--size", "64"], "leave out --size"),
        ("builtin", ["--threshold", "0.5"], "takes no threshold"),
    ],
)
def test_what_cannot_apply_is_refused(family, options, reason, folders, capsys):
    source = "clip.gif" if family == "VideoMAE" else "a.png"
    assert reason in refuse(capsys, source, *model_of(family, folders), *options)
