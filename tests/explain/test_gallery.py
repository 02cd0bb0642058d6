"""The gallery of several explained pictures: its order, its limits, and the names of its files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

import numpy as np
import pytest
import torch
from PIL import Image

from dave_vit import cli
from dave_vit.cli.options import ModelOptions
from dave_vit.explanations import output_files as gallery
from dave_vit.explanations.classes import ClassExplanation
from dave_vit.models import Adapter
from tiny_adapters import adapter

NAMES = ["a.png", "b <i>&#.png", "c.png"]


@pytest.fixture(scope="module")
def model() -> Adapter:
    """Examined and recorded once for all tests."""
    return adapter()


@pytest.fixture(autouse=True)
def desk(tmp_path, monkeypatch, model) -> Path:
    """A folder with three pictures, where `--model` always gives a tiny one."""
    monkeypatch.setattr(ModelOptions, "load", lambda options: model)
    monkeypatch.setattr(
        ClassExplanation, "figure", lambda *asked: SimpleNamespace(to_bytes=str.encode)
    )  # slow, and not looked at
    monkeypatch.chdir(tmp_path)
    draws = np.random.default_rng(0)
    Path("photos").mkdir()
    for number, name in enumerate(NAMES):
        colours = draws.integers(0, 90 * (number + 1) - 20, (24, 40 + 8 * number, 3), dtype=np.uint8)
        Image.fromarray(colours).save(Path("photos", name))
    return tmp_path


def explain(*args: str, method: tuple[str, ...] = ("--method", "effective")) -> int:
    return cli.run(["explain", "photos", *method, "-q", "--out", "out", *args])


def told(name: str = "gallery.effective.dave") -> tuple[str, dict]:
    return Path("out", f"{name}.html").read_text(), json.loads(Path("out", f"{name}.json").read_text())


def test_the_page_shows_every_picture_and_leads_to_its_map():
    assert explain() == 0
    page, record = told()
    shown = [one["name"] for one in record["pictures"]]
    assert sorted(shown) == NAMES
    assert page.count("data:image/jpeg;base64,") == 2 * len(NAMES)
    assert "<i>" not in page
    links = [unquote(link) for link in re.findall(r'href="([^"]+)"', page)]
    assert links == [f"{Path(name).stem}.effective.dave.png" for name in shown]
    assert all(Path("out", link).is_file() for link in links)
    assert 'data-by="certainty"' not in page  # the method draws no samples
    assert all(f"brightest {one['brightest']:.2g}" in page for one in record["pictures"])
    with Image.open("out/gallery.effective.dave.png") as sheet:
        assert sheet.width > 2 * 2 * 180
        assert sheet.height > 2 * 180


@pytest.mark.parametrize("order", ["confidence", "certainty", "name"])
def test_pictures_are_sorted(order):
    assert explain("--sort", order, method=("--samples", "4")) == 0
    page, record = told("gallery.dave")
    values = [one[order] for one in record["pictures"]]
    assert values == sorted(values, reverse=order != "name")
    assert len(set(values)) == len(NAMES)
    assert f'data-by="{order}" aria-pressed="true"' in page
    links = [unquote(link) for link in re.findall(r'href="([^"]+)"', page)]
    assert [one["files"][2] for one in record["pictures"]] == links


def test_a_gallery_takes_the_place_of_nothing_but_itself():
    Path("out").mkdir()
    Path("out/gallery.effective.dave.html").write_text("my own page")
    Path("photos", NAMES[1]).unlink()
    assert explain() == explain("--sort", "name") == 0
    assert Path("out/gallery.effective.dave.html").read_text() == "my own page"
    assert told("gallery-2.effective.dave")[1]["order"] == "name"
    Path("photos/c.png").rename("photos/d.png")
    assert explain() == 0
    shown = [told(f"gallery-{number}.effective.dave")[1]["pictures"] for number in (2, 3)]
    assert [{one["name"] for one in each} for each in shown] == [{"a.png", "c.png"}, {"a.png", "d.png"}]


def test_a_picture_named_gallery_keeps_its_name():
    Path("photos/c.png").rename("photos/gallery.png")
    assert explain() == 0
    assert "targets" in json.loads(Path("out/gallery.effective.dave.json").read_text())
    assert len(told("gallery-2.effective.dave")[1]["pictures"]) == 3


def test_one_picture_has_no_gallery_and_several_need_none():
    assert explain("--no-gallery") == 0
    assert cli.run(["explain", "photos/a.png", "--method", "effective", "-q", "--out", "out"]) == 0
    assert not list(Path("out").glob("gallery*"))


def test_thumbnails_are_kept_of_some_and_numbers_of_all(monkeypatch):
    monkeypatch.setattr(gallery, "ON_PAGE", 2)
    monkeypatch.setattr(gallery, "ON_SHEET", 1)
    assert explain() == 0
    page, record = told()
    assert page.count("data:image/jpeg;base64,") == 2 * 2
    assert "The first 2 of 3 pictures are shown" in page
    assert len(record["pictures"]) == 3
    with Image.open("out/gallery.effective.dave.png") as sheet:
        assert sheet.height < 2 * 180


def test_certainty_is_that_of_the_middle_of_what_a_map_shows():
    shown, sure = torch.tensor([[[1.0, 5.0, 3.0, -9.0]]]), torch.tensor([[[8.0, 4.0, 2.0, 100.0]]])
    assert gallery.median_certainty(SimpleNamespace(map=shown, certainty=sure)) == 4.0
    assert gallery.median_certainty(SimpleNamespace(map=-sure, certainty=sure)) == 0.0
    assert gallery.median_certainty(SimpleNamespace(map=shown, certainty=None)) is None
