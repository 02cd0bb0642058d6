"""`dave explain` with a tiny model: what it writes, what it prints, and how it meets broken images."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dave_vit import cli
from dave_vit.cli.options import ModelOptions
from tiny_adapters import adapter
from tiny_models import CLASSES, SIZE

GALLERY = ["gallery.dave.html", "gallery.dave.json", "gallery.dave.png"]
ENDINGS = ["dave.json", "dave.npz", "dave.panels.png", "dave.png"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch, tmp_path) -> Path:
    """A folder to work in, where `--model` always gives a tiny one."""
    monkeypatch.setattr(ModelOptions, "load", lambda options: adapter())
    monkeypatch.chdir(tmp_path)
    colours = np.random.default_rng(0).integers(0, 255, (24, 40, 3), dtype=np.uint8)
    Image.fromarray(colours).save(tmp_path / "a.png")
    Image.fromarray(colours[::-1]).save(tmp_path / "b.jpg")
    return tmp_path


def written(folder: str = "dave-out") -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir()) if Path(folder).exists() else []


def explain(*args: str) -> int:
    return cli.run(["explain", *args, *([] if "--samples" in args or "--method" in args else ["--samples", "4"])])


def test_each_image_gets_its_files(tiny, capsys):
    assert explain("a.png", "b.jpg", "--out", "out", "-v") == 0
    assert written("out") == [*(f"{name}.{ending}" for name in "ab" for ending in ENDINGS), *GALLERY]
    with np.load("out/a.dave.npz") as arrays:
        shapes = {name: arrays[name].shape for name in arrays}
        attribution, values, error = arrays["attribution"], arrays["map"], arrays["standard_error"]
    square = (SIZE, SIZE)
    maps = {"map": square, "mean": square, "standard_error": square}
    assert shapes == {"attribution": (3, *square), **maps, "target": (1,)}
    np.testing.assert_allclose(values, attribution.sum(0), atol=1e-6)
    assert (error > 0).any()
    out = capsys.readouterr().out
    assert out.count("<- explained") == 2
    assert all(f"out/a.{ending}" in out for ending in ENDINGS)


def test_the_record_tells_how_to_make_it_again():
    assert explain("a.png", "--seed", "7", "--preset", "paper", "--set", "rotation=0", "--target", "hen") == 0
    record = json.loads(Path("dave-out/a.hen.dave.json").read_text())
    assert record["targets"][0]["name"] == "hen"
    assert (record["model"], record["method"], record["seed"], record["samples"]) == ("tiny", "dave", 7, 4)
    assert record["options"] == {"samples": 4, "preset": "paper", "seed": 7, "rotation": 0}
    assert record["settings"]["neighborhood"]["spatial"]["rotation"] == 0
    assert record["settings"]["reducer"]["type"] == "Mean"
    assert {"dave-vit", "torch", "timm", "python"} <= record["versions"].keys()
    assert record["image"]["size"] == [40, 24]
    assert sum(prediction["probability"] for prediction in record["top5"]) == pytest.approx(1)
    assert record["seconds"] > 0


def test_what_a_map_took_is_recorded_by_its_name():
    methods = {
        "integrated_gradients": ("steps=3", {"steps": 3}),
        "lime": ("samples=8", {"masks": 8}),
        "saliency": ("", {}),
    }
    for method, (setting, counts) in methods.items():
        assert explain("a.png", "--method", method, *(["--set", setting] if setting else [])) == 0
        record = json.loads(Path(f"dave-out/a.{method}.dave.json").read_text())
        assert {name: record[name] for name in ("samples", "steps", "masks") if name in record} == counts


def test_a_tiny_photograph_is_noted(tiny, capsys):
    Image.new("RGB", (12, 9), "red").save(tiny / "tiny.png")
    assert explain("tiny.png", "--against", "hen") == 0
    shown = capsys.readouterr()
    assert "the map is finer than the photograph, which has 12 x 9 pixels" in shown.err
    assert "<- explained, against hen" in shown.out


def test_the_overlay_of_several_classes_has_a_legend(tiny):
    sizes = {}
    for view in ("map", "signed"):
        assert (
            explain("a.png", "--target", "dog,hen", "--view", view, "--out", view, "--method", "input_x_gradient") == 0
        )
        (overlay,) = Path(view).glob("*.dave.png")
        with Image.open(overlay) as picture:
            sizes[view] = picture.size
            legend = np.asarray(picture)[-28 * (2 if view == "map" else 1) :]
        assert (legend < 60).any(), "names"
        assert legend.mean() > 200
    assert sizes["map"][1] - sizes["signed"][1] == 28


def test_the_same_seed_gives_the_same_numbers():
    for folder, seed in (("one", "3"), ("two", "3"), ("three", "4")):
        assert explain("a.png", "--seed", seed, "--out", folder, "--quiet") == 0
    one, two, three = (np.load(f"{folder}/a.dave.npz")["attribution"] for folder in ("one", "two", "three"))
    np.testing.assert_array_equal(one, two)
    assert np.abs(one - three).max() > 0


def test_all_of_the_top_five_at_once():
    assert explain("a.png", "--target", "all-top5") == 0
    with np.load("dave-out/a.all-top5.dave.npz") as arrays:
        assert arrays["attribution"].shape == (5, 3, SIZE, SIZE)
        assert sorted(arrays["target"]) == list(range(CLASSES))
        np.testing.assert_allclose(arrays["map"], arrays["attribution"].sum(1), atol=1e-6)
    with Image.open("dave-out/a.all-top5.dave.panels.png") as figure:
        assert figure.width > 1500  # five maps beside each other


def test_a_method_without_samples_has_no_uncertainty():
    assert explain("a.png", "--method", "effective") == 0
    with np.load("dave-out/a.effective.dave.npz") as arrays:
        assert set(arrays) == {"attribution", "map", "target"}


def test_broken_images_are_reported_and_the_others_done(capsys):
    Path("empty.png").touch()
    Path("text.png").write_text("no image")
    Path("cut.jpg").write_bytes(Path("b.jpg").read_bytes()[:300])
    assert explain("empty.png", "text.png", "cut.jpg", "missing.png", "a.png") == 2
    assert written() == [f"a.{ending}" for ending in ENDINGS]
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert [line.split(": ")[1] for line in errors] == ["empty.png", "text.png", "cut.jpg", "missing.png"]


def test_folders_standard_input_and_equal_names(monkeypatch):
    Path("photos").mkdir()
    Image.open("a.png").save("photos/a.webp")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(Path("a.png").read_bytes())))
    assert explain("a.png", "photos", "-", "--quiet") == 0
    each = [f"{name}.{ending}" for name in ("a", "a-2", "stdin") for ending in ENDINGS]
    assert written() == sorted([*each, *GALLERY])


def test_json_goes_to_standard_output_alone(capsys):
    Image.new("RGBA", (8, 8), (255, 0, 0, 9)).save("clear.png")
    assert explain("clear.png", "--json") == 0
    shown = capsys.readouterr()
    (record,) = json.loads(shown.out)
    assert record["source"] == "clear.png"
    assert record["files"][0] == str(Path("dave-out", "clear.dave.json"))
    assert record["image"]["notes"] == ["transparent areas drawn on white"]
    assert "note: clear.png: transparent areas drawn on white" in shown.err


def test_quiet_prints_nothing(capsys):
    assert explain("a.png", "--quiet") == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("target", "words"),
    [("catt", "did you mean 0 cat"), ("9", "classes 0 to 4"), ("top7", "top1 to top5"), ("c", "fits 3 classes")],
)
def test_a_wrong_target_is_one_line_and_writes_nothing(target, words, capsys):
    assert explain("a.png", "--target", target) == 2
    err = capsys.readouterr().err
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert written() == []


@pytest.mark.parametrize("kind", ["svg", "pdf"])
def test_the_figure_comes_in_other_formats(kind):
    assert explain("a.png", "--format", kind) == 0
    assert f"a.dave.panels.{kind}" in written()


@pytest.mark.parametrize("kind", ["gif", "webp"])
def test_the_refining_map_is_animated(kind):
    assert explain("a.png", "--animate", kind, "--samples", "6") == 0
    with Image.open(f"dave-out/a.dave.{kind}") as moving:
        assert moving.n_frames == 6


def test_an_animation_changes_no_number():
    assert explain("a.png", "--out", "still", "--samples", "6") == 0
    assert explain("a.png", "--out", "moving", "--samples", "6", "--animate", "gif") == 0
    still, moving = (np.load(f"{folder}/a.dave.npz")["attribution"] for folder in ("still", "moving"))
    np.testing.assert_allclose(still, moving, rtol=1e-4, atol=1e-8)


def test_ctrl_c_keeps_what_is_finished_and_nothing_half(monkeypatch, capsys):
    from dave_vit.explanations.classes import ClassExplanation

    files, calls = ClassExplanation.files, []

    def interrupted(self: ClassExplanation, figure: str, **look: str) -> dict[str, bytes]:
        calls.append(self)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return files(self, figure, **look)

    monkeypatch.setattr(ClassExplanation, "files", interrupted)
    assert explain("a.png", "b.jpg") == 130
    assert written() == [f"a.{ending}" for ending in ENDINGS]
    assert "stopped" in capsys.readouterr().err


def test_several_images_are_one_line_each(capsys):
    assert explain("a.png", "b.jpg", "--no-gallery") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("a.png  ")
    assert second.startswith("b.jpg  ")
    assert first.count("%") == 1
    assert first.endswith(" s, notes with -v)")


def test_an_image_that_is_given_twice_is_explained_once():
    Path("folder").mkdir()
    Path("a.png").rename("folder/a.png")
    assert explain("folder", "folder/a.png", "./folder/a.png") == 0
    assert written() == [f"a.{ending}" for ending in ENDINGS]


def test_maps_without_a_sign_have_no_signed_view(capsys):
    assert explain("a.png", "--method", "saliency", "--view", "signed") == 2
    error = capsys.readouterr().err
    assert "error: the maps of saliency have no negative values; leave out --view signed" in error
    assert written() == []
    assert explain("a.png", "--method", "input_x_gradient", "--view", "signed") == 0


def test_an_output_folder_is_checked_before_the_model_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(ModelOptions, "load", lambda options: pytest.fail("loaded a model in vain"))
    assert explain("a.png", "--out", "b.jpg/results") == 2
    assert cli.run(["compare", "a.png", "--out", "b.jpg"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[2].endswith("b.jpg is a file; give a folder for the results") for line in told] == [
        True
    ] * 2


def test_slow_work_is_estimated_before(monkeypatch, capsys):
    monkeypatch.setattr("dave_vit.explanations.explainer._SLOW", 0.0)
    assert explain("a.png", "b.jpg", "--method", "rise", "--set", "samples=60") == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "passes" in line]
    assert line.startswith("note: rise takes 60 passes per map: about ")
    assert line.endswith(" s for 2 maps")
    assert cli.run(["compare", "a.png", "--methods", "saliency,integrated_gradients"]) == 0
    assert "note: integrated_gradients takes 50 passes per map: about " in capsys.readouterr().err


def test_an_output_folder_that_cannot_be_made_is_one_line(capsys):
    assert explain("a.png", "--out", "a.png") == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.realdata
def test_real_images_with_real_weights(monkeypatch, data_dir, tmp_path, capsys):
    monkeypatch.undo()
    weights = data_dir / "weights" / "deit_tiny_patch16_224.safetensors"
    images = sorted(str(path) for path in (data_dir / "multi-object").glob("*.png"))
    args = [*images, "--model", "deit_tiny_patch16_224", "--weights", str(weights), "--samples", "2", "--json"]
    assert cli.run(["explain", *args, "--out", str(tmp_path)]) == 0
    top = [record["top5"][0]["name"] for record in json.loads(capsys.readouterr().out)]
    assert top == ["golden retriever", "African elephant", "zebra"]


@pytest.mark.parametrize(
    ("against", "told"), [("rivals", "rivals"), ("hen", {"index": 3, "name": "hen"}), ("none", None)]
)
def test_against_what_is_recorded(tiny, capsys, against, told):
    for method in ("dave", "input_x_gradient"):
        args = ["--method", method, "--target", "dog", "--against", against, "--json"]
        assert explain("a.png", *args, *(["--samples", "3"] if method == "dave" else [])) == 0
        assert json.loads(capsys.readouterr().out)[0]["against"] == told
        assert f"a.dog.against-{against}" in "".join(written())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--against", "dogg", "--target", "cat"], "did you mean 2 dog"),
        (["--against", "dog", "--target", "dog"], "both class"),
        (["--samples", "few"], "auto"),
        (["--samples", "auto", "--method", "smoothgrad"], "expected int"),
        (["--preset", "nowhere.toml"], "nowhere.toml"),
    ],
)
def test_wrong_opponents_samples_and_presets_are_one_line(tiny, capsys, args, words):
    assert cli.run(["explain", "a.png", *args]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert "Traceback" not in told


def test_what_the_method_found_out_is_recorded(tiny, capsys):
    assert explain("a.png", "--samples", "auto", "--json") == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert 8 <= record["samples"] <= 28
    assert record["against"] == "rivals"
    assert record["significant"] in (True, False)
    assert record["neighborhood_level"] in (0, 1, 2)
    assert record["neighborhood"]["spatial"]["rotation"] in (0.0, 10.0)
