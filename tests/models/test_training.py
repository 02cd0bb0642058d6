"""The training recipe with a handful of invented sprites: what it must never see, stopping and resuming, fetching."""

from __future__ import annotations

import io
import json
import math
import sys
import tarfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dave_vit.data import open_dataset
from dave_vit.data.builtin import backgrounds, draws
from dave_vit.errors import OptionError

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "training"))

import art  # noqa: E402
import augment  # noqa: E402
import backdrops  # noqa: E402
import card  # noqa: E402
import fetch_art  # noqa: E402
import pack_assets  # noqa: E402
import pools  # noqa: E402
import shortcuts  # noqa: E402
import train  # noqa: E402

STYLES = ("noto", "twemoji", "fxemoji", "emojione")


@pytest.fixture(scope="module")
def art_folder(tmp_path_factory) -> Path:
    """Two target and five distractor classes in four styles; photographs dark above and bright below."""
    folder = tmp_path_factory.mktemp("art")
    names = {"targets": ["a", "b"], "distractors": ["c", "d", "e", "f", "g"]}
    classes = {group: {n: {style: [n] for style in STYLES} for n in members} for group, members in names.items()}
    (folder / "classes.json").write_text(json.dumps(classes))
    for number, name in enumerate("abcdefg"):
        for style in STYLES:
            sprite = np.zeros((128, 128, 4), dtype=np.uint8)
            sprite[20:100, 10:120] = (30 * number, 200, 90, 255)
            Image.fromarray(sprite).save(folder / f"{style}__{name}.png")
    for name in art.TEXTURES:
        photograph = np.full((512, 512), 40, dtype=np.uint8)
        photograph[256:] = 220
        Image.fromarray(photograph).save(folder / f"{name}.png")
    return folder


@pytest.fixture
def bank(art_folder, monkeypatch) -> art.Bank:
    monkeypatch.setattr(art, "__file__", str(art_folder / "art.py"))  # it reads classes.json beside itself
    return art.load_bank(art_folder, torch.device("cpu"), torch.float32)


# --- What training must never see -------------------------------------------------------------------------------------


def test_the_held_out_family_is_left_out(bank):
    assert bank.art.shape[1] == 7 * (len(STYLES) - 1)
    files = sorted(f"{style}__{name}" for style in STYLES for name in "abcdefg" if style != art.HELD_OUT)
    drawn = {files[number] for number in bank.targets.unique().tolist()}
    assert drawn == {f"{style}__{name}" for style in STYLES[:3] for name in "ab"}


def test_textures_come_from_the_half_that_the_benchmark_lacks(bank, art_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(pack_assets, "ASSETS", tmp_path)
    pack_assets.pack_textures(art_folder)
    assert bank.textures.min() > 0.8
    for name in art.TEXTURES:
        with Image.open(tmp_path / f"{name}.webp") as shipped:
            assert np.asarray(shipped.convert("L")).max() < 60


def test_background_parameters_never_meet_those_of_the_benchmark(bank, monkeypatch):
    """Angles, periods, lattices and counts: drawn many times on both sides, no value in common."""
    training, benchmark = defaultdict(set), defaultdict(set)
    odd, even, kind = backdrops._odd, draws.Draws.even, ""

    def training_draw(*args: object) -> torch.Tensor:
        values = odd(*args)
        training[kind].update(values.tolist())
        return values

    def benchmark_draw(self: draws.Draws, low: int, high: int) -> int:
        value = even(self, low, high)
        benchmark[kind].add(value)
        return value

    monkeypatch.setattr(backdrops, "_odd", training_draw)
    monkeypatch.setattr(draws.Draws, "even", benchmark_draw)
    torch.manual_seed(0)
    for theirs, ours in zip(backdrops.PAINTERS, backgrounds.PAINTERS, strict=True):
        assert theirs.__name__ == ours.__name__
        kind = ours.__name__
        for number in range(4):
            assert theirs(2, bank).shape == (2, 3, 224, 224)
            ours(224, draws.Draws(9, number))
    assert set(training) == set(benchmark) == {painter.__name__ for painter in backgrounds.PAINTERS} - {"texture"}
    for kind in training:
        assert not training[kind] & benchmark[kind], kind


# --- Pools, batches and the schedule ----------------------------------------------------------------------------------


def test_composed_pictures_show_their_targets(bank):
    torch.manual_seed(0)
    images, labels = pools.compose(16, pools.DIFFICULTIES[2], bank)
    assert images.dtype == torch.uint8
    assert len(images) == len(labels) > 0
    assert labels.min() >= 0
    assert labels.max() < 2


def test_a_sixteenth_of_a_batch_is_grids_of_four():
    torch.manual_seed(0)
    images = torch.zeros(32, 3, 224, 224, dtype=torch.uint8)
    labels = torch.arange(32)[:, None].expand(32, 2) % 10
    inputs, shares = augment.augment(images, labels, 10, torch.float32)
    assert inputs.shape == (32, 3, 224, 224)
    torch.testing.assert_close(shares.sum(1), torch.ones(32))
    assert (shares[:2] < 1).all()
    assert (shares[2:].amax(1) == 1).all()


def test_the_mixture_moves_from_easy_to_hard():
    assert train.mixture(0.0, 100) == [100, 0, 0]
    assert train.mixture(1.0, 100) == [4, 6, 90]
    assert all(sum(train.mixture(step / 50, 96)) == 96 for step in range(51))
    assert train.rate_at(0, 1) < 1e-2 < train.rate_at(0.03, 1) == pytest.approx(1)
    assert train.rate_at(1, 1) == pytest.approx(0, abs=1e-9)


def trainer(folder: Path, optimizer: str = "muon") -> train.Trainer:
    options = train.Options(
        "builtin", folder, 1.0, math.inf, optimizer, 1e-3, 0.05, 4, 48, 8, 30.0, 0, folder, folder, None, False
    )
    return train.Trainer(options, torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_stopped_run_goes_on_where_it_stopped(bank, tmp_path, optimizer):
    torch.manual_seed(0)
    made = [pools.Pool(8, difficulty, bank, 8) for difficulty in pools.DIFFICULTIES]
    first = trainer(tmp_path, optimizer)
    first.step(made)
    first.elapsed = 20.0
    first.save()
    second = trainer(tmp_path, optimizer)
    assert (second.steps, second.elapsed, second.budget) == (1, 20.0, 60.0)
    for run in (first, second):
        torch.manual_seed(1)
        run.step(made)
    for mine, theirs in zip(first.average.state_dict().values(), second.average.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert (tmp_path / "builtin.safetensors").stat().st_size <= 12e6


# --- Fetching and the card's numbers ----------------------------------------------------------------------------------


def archive(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path


def png(colour: tuple[int, ...], side: int, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGBA", (side, side), colour).save(buffer, kind, lossless=True)
    return buffer.getvalue()


def test_drawings_are_found_by_name_and_by_alias(tmp_path):
    collection = {
        "width": 36,
        "height": 36,
        "icons": {"dog": {"body": "<path/>"}, "wide": {"body": "<g/>", "width": 72, "left": -2}},
        "aliases": {"hound": {"parent": "dog"}, "mirrored": {"parent": "dog", "hFlip": True}},
    }
    seen = []

    def draw(svg: str) -> bytes:
        seen.append(svg)
        return png((1, 2, 3, 255), 128)

    packed = archive(tmp_path / "a.tgz", {"icons.json": json.dumps(collection).encode()})
    sprites = dict(fetch_art.sprites(packed, ["hound", "wide"], draw))
    assert {picture.size for picture in sprites.values()} == {(128, 128)}
    assert 'viewBox="0 0 36 36"' in seen[0]
    assert "<path/>" in seen[0]
    assert 'viewBox="-2 0 72 36"' in seen[1]
    with pytest.raises(ValueError, match="mirrored"):
        fetch_art.svg_of(collection, "mirrored")


def test_rendered_pictures_are_made_smaller(tmp_path):
    packed = archive(tmp_path / "b.tgz", {"assets/1f415.webp": png((10, 20, 30, 255), 256, "WEBP")})
    ((name, picture),) = fetch_art.sprites(packed, ["1f415"])
    assert (name, picture.size, picture.getpixel((5, 5))) == ("1f415", (128, 128), (10, 20, 30, 255))


def test_every_style_has_a_package_of_a_pinned_version():
    needed = fetch_art.wanted(json.loads(fetch_art.CLASSES.read_text()))
    assert sum(map(len, needed.values())) == 1622
    assert all(needed.values())
    notices = (ROOT / "THIRD_PARTY_NOTICES").read_text()
    for package in fetch_art.PACKAGES.values():
        name, _, version = package.rpartition("@")
        assert f"{name} {version}" in notices


def test_npm_is_asked_for_exactly_that_package(tmp_path, monkeypatch):
    npm = tmp_path / "npm"
    npm.write_text('#!/bin/sh\necho "$@" > "$(dirname "$0")/asked"\necho emojione.tgz\n')
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert fetch_art.download(fetch_art.PACKAGES["emojione"], tmp_path) == tmp_path / "emojione.tgz"
    assert (tmp_path / "asked").read_text().endswith("@iconify-json/emojione@1.2.3\n")


def test_calibration_error_by_hand():
    confidence, right = torch.tensor([0.95, 0.95, 0.55, 0.55]), torch.tensor([True, True, True, False])
    assert card.calibration_error(confidence, right, bins=10) == pytest.approx((0.1 + 0.1) / 4)
    assert card.calibration_error(torch.ones(3), torch.tensor([True, True, True])) == 0


def test_pictures_are_turned_about_their_centre():
    images = torch.rand(1, 3, 8, 8)
    torch.testing.assert_close(card.turned(images, 90), images.rot90(1, (2, 3)), atol=1e-5, rtol=0)
    torch.testing.assert_close(card.turned(images, 0), images, atol=1e-5, rtol=0)


# --- Planted shortcuts ------------------------------------------------------------------------------------------------


def test_cues_are_planted_in_their_share_and_outside_of_objects():
    for index in range(60):
        scene = shortcuts.compose_shortcut(index, 60, seed=3)
        assert shortcuts.SHORTCUT_CLASSES[scene.label] == open_dataset("shortcut:60:3", 60).class_names[index % 10]
        assert bool(scene.cue) == bool(scene.cue_mask.any())
        assert not (scene.mask & scene.cue_mask).any()
        assert scene.cue in ("", *shortcuts.CUES[scene.label : scene.label + 1])
    shares = [bool(shortcuts.compose_shortcut(index, 60, seed=3).cue) for index in range(0, 1000, 10)]
    assert 0.45 < np.mean(shares) < 0.75
    assert not any(shortcuts.compose_shortcut(index, 0).cue for index in range(20))


def test_a_cue_changes_its_own_pixels_only():
    for label in (0, 1, 3, 4):  # a companion is an object and has a shadow
        bare, planted = shortcuts.compose_shortcut(label, 0), shortcuts.compose_shortcut(label, 100)
        changed = (bare.image != planted.image).any(2)
        assert changed.any()
        assert not (changed & ~planted.cue_mask).any()


def test_shortcut_specs():
    data = open_dataset("shortcut:70:5", 12)
    assert len(data) == 12
    assert data.mask(0).any()
    assert data.digest() != open_dataset("shortcut:70:6", 12).digest()
    assert len(open_dataset("shortcut")) == 300
    for wrong in ("x", "101", "80:x", "80:1:2"):
        with pytest.raises(OptionError, match="PERCENT:SEED"):
            open_dataset(f"shortcut:{wrong}")
