"""A model family and a data set added by a plugin file work on the command line without any other change."""

from __future__ import annotations

import json
import sys

import pytest
from PIL import Image

from dave_vit import cli
from dave_vit._internal import registry
from dave_vit.data.sets import DATASETS
from dave_vit.models.families import FAMILIES

PLUGIN = '''
import torch
from PIL import Image
from dave_vit.data import DATASETS, Dataset, Item
from dave_vit.models import Adapter, Preprocessing
from dave_vit.models.families import FAMILIES, Family
from torchvision import transforms


def load(name, weights=None, classes=None):
    """Return a model of one linear layer whose name is its side."""
    size = int(name)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * size * size, 2))
    transform = transforms.Compose([transforms.Resize((size, size)), transforms.ToTensor()])
    return Adapter(model, Preprocessing(transform), ["dark", "bright"], spec=f"linear:{name}")


FAMILIES.register("linear")(Family(load, "linear:SIDE", "one linear layer"))


@DATASETS.register("greys")
class Greys(Dataset):
    """Grey images, dark or bright, with a box around the left half."""

    form = "greys:COUNT"

    def __init__(self, spec, limit=None):
        self.count, self.class_names = min(int(spec), limit or int(spec)), ["dark", "bright"]

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return Item(f"grey-{index}", index % 2, ((0, 0, 8, 16),))

    def digest(self):
        return f"greys {self.count}"

    def image(self, index):
        return Image.new("RGB", (16, 16), (40 + 30 * (index % 7),) * 3)
'''


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    for table in (FAMILIES, DATASETS):
        monkeypatch.setattr(table, "_entries", dict(table._entries))
    monkeypatch.setattr(registry, "_PLUGINS", set())
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    yield path
    sys.modules.pop("mine", None)


def test_a_family_from_a_plugin_is_explained(plugin, tmp_path, capsys):
    photo = tmp_path / "photo.png"
    Image.new("RGB", (20, 20), "red").save(photo)
    line = ["explain", str(photo), "--plugin", str(plugin), "--model", "linear:8", "--method", "effective"]
    assert cli.run([*line, "--out", str(tmp_path / "out"), "--json"]) == 0, capsys.readouterr().err
    assert list((tmp_path / "out").glob("photo*.png"))
    assert cli.run([*line[:-4], "--model", "linear:", "--out", str(tmp_path / "out")]) == 2
    assert "write linear:SIDE" in capsys.readouterr().err


def test_a_data_set_from_a_plugin_is_evaluated(plugin, tmp_path, capsys):
    run = tmp_path / "run"
    line = ["evaluate", "--plugin", str(plugin), "--model", "linear:8", "--data", "greys:6", "--metric", "energypg"]
    assert cli.run([*line, "--methods", "effective", "--out", str(run), "--json"]) == 0, capsys.readouterr().err
    (result,) = json.loads((run / "summary.json").read_text())["results"]
    assert (result["method"], result["metric"], result["n"]) == ("effective", "energypg", 6)


def test_help_lists_families_and_data_sets(capsys):
    assert cli.run(["evaluate", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "builtin, bcos:NAME, hf:NAME_OR_FOLDER" in text
    assert "builtin[:single|pair|plain], coco:DIR, folder:DIR, imagenet:DIR or voc:DIR" in text
    assert "{" not in text


def test_families_describe_themselves():
    assert all(FAMILIES[name].summary and FAMILIES[name].form for name in FAMILIES)
