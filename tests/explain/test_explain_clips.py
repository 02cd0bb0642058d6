"""Clips from files to maps: video models from folders of transformers, frames, strip and animation."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

import task_folders
from dave_vit import cli, create_method, load_model
from dave_vit.data import images as clips
from dave_vit.data.geometry import Geometry
from dave_vit.data.images import read_clip
from dave_vit.errors import ImageError, MissingExtra

WIDTH, HEIGHT, MARK = 120, 80, 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return task_folders.save("VideoMAE", tmp_path_factory.mktemp("folder"))


def frames(count: int) -> list[Image.Image]:
    """Grey, with a mark in a corner that shows in the second half alone; each frame has its number in its colour."""
    made = np.full((count, HEIGHT, WIDTH, 3), 128, dtype=np.uint8)
    made[count // 2 :, -MARK:, -MARK:] = 255
    return [Image.fromarray(frame) for frame in made]


@pytest.fixture
def animation(tmp_path):
    first, *others = frames(8)
    first.putpixel((0, 0), (0, 0, 0))  # or the encoder drops frames that are the same
    for number, frame in enumerate(others, 1):
        frame.putpixel((number, 0), (0, 0, 0))
    first.save(tmp_path / "clip.gif", save_all=True, append_images=others, duration=50)
    return tmp_path / "clip.gif"


@pytest.mark.parametrize("family", ["VideoMAE", "TimeSformer", "ViViT", "V-JEPA 2"])
def test_a_mark_is_found_in_its_frames_and_in_its_corner(family, tmp_path):
    model = load_model(f"hf:{task_folders.save(family, tmp_path)}")
    inputs = model.clip(frames(model.frames))
    attribution = create_method("effective", model).attribute(inputs)
    found = Geometry.measure(model.preprocessing, (WIDTH, HEIGHT)).to_photo(attribution[0].sum(1)).abs()  # [T, H, W]
    assert found[model.frames // 2 :, -MARK:, -MARK:].sum() > 0.9 * found.sum() > 0


def test_frames_are_evenly_spaced(animation, tmp_path):
    clip = read_clip(animation, 3)
    assert clip.name == "clip"
    assert clip.numbers == (0, 4, 7)
    assert [frame.getpixel((WIDTH - 1, HEIGHT - 1))[0] > 200 for frame in clip.frames] == [False, True, True]
    assert read_clip(animation, 16).numbers[-1] == 7


def test_video_files(tmp_path, monkeypatch):
    av = pytest.importorskip("av")
    with av.open(str(tmp_path / "clip.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for frame in frames(8):
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())
    clip = read_clip(tmp_path / "clip.mp4", 4)
    assert clip.numbers == (0, 2, 5, 7)
    assert [frame.getpixel((WIDTH - 9, HEIGHT - 9))[0] > 200 for frame in clip.frames] == [False, False, True, True]
    monkeypatch.setattr(clips, "MAX_FRAMES", 5)
    with pytest.raises(ImageError, match="more than 5 frames"):
        read_clip(tmp_path / "clip.mp4", 4)


def test_what_is_no_video(tmp_path, monkeypatch):
    (tmp_path / "broken.mp4").write_bytes(b"no video at all")
    (tmp_path / "broken.gif").write_bytes(b"no animation at all")
    with pytest.raises(ImageError, match="no such file"):
        read_clip(tmp_path / "absent.mp4", 4)
    with pytest.raises(ImageError, match="not a video that can be read"):
        read_clip(tmp_path / "broken.gif", 4)
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(MissingExtra, match=r"dave-vit\[video\]"):
        read_clip(tmp_path / "broken.mp4", 4)


def test_broken_video(tmp_path):
    pytest.importorskip("av")
    (tmp_path / "broken.mp4").write_bytes(b"no video at all")
    with pytest.raises(ImageError, match="not a video that can be read"):
        read_clip(tmp_path / "broken.mp4", 4)


def test_command(folder, animation, tmp_path, capsys):
    line = ["explain", str(animation), "--model", f"hf:{folder}", "--method", "effective", "--json", "--out"]
    assert cli.run([*line, str(tmp_path / "out"), "--target", "2"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert record["targets"][0]["index"] == 2
    assert record["frames"] == [0, 2, 5, 7]
    assert sum(record["shares"]) == pytest.approx(1)
    endings = {path.rsplit(".dave.", 1)[1]: path for path in record["files"]}
    assert set(endings) == {"json", "npz", "frames.png", "gif"}
    with np.load(endings["npz"]) as arrays:
        assert arrays["map"].shape == (4, HEIGHT, WIDTH)
    with Image.open(endings["gif"]) as film:
        assert film.n_frames == 4
    assert cli.run([*line, str(tmp_path / "out"), "--target", "all-top5"]) == 2
    assert "one at a time" in capsys.readouterr().err


def test_the_doctor_knows_video_models(folder, capsys):
    assert cli.run(["doctor", "--model", f"hf:{folder}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gap"] < 1e-9
