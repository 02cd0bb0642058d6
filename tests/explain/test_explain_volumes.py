"""Explain volumes: NIfTI files in, slices, a montage and NIfTI files out."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

from dave_vit import DAVE, cli, conservation_gap, create_method
from dave_vit.errors import ImageError, OptionError
from dave_vit.models.recordings import VolumeModel, read_volume

nibabel = pytest.importorskip("nibabel")

MODEL = """
import torch
from torch import nn
from dave_vit.models.recordings import VolumeModel

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.head = nn.Conv3d(1, 6, 4, 4), nn.Linear(6, 2)

    def forward(self, volumes):
        return self.head(nn.functional.gelu(self.patches(volumes)).flatten(2).mean(-1))

def load():
    torch.manual_seed(0)
    return VolumeModel(Small(), (8, 16, 16), ["healthy", "tumour"], spec="small", normalize=lambda volume: volume)
"""


@pytest.fixture
def model(tmp_path):
    (tmp_path / "scans.py").write_text(MODEL)
    names: dict = {}
    exec(MODEL, names)
    return names["load"]()


def write_scan(path, values: np.ndarray, affine: np.ndarray | None = None):
    nibabel.save(nibabel.Nifti1Image(values, np.diag([2.0, 2, 3, 1]) if affine is None else affine), path)
    return path


def marked() -> np.ndarray:
    """Nothing but a mark: at large x, middle y and small z."""
    values = np.zeros((32, 32, 16), dtype=np.float32)
    values[24:, 12:20, :4] = 1.0
    return values


def test_slices_are_read_from_the_bottom_up(model, tmp_path):
    volume = read_volume(write_scan(tmp_path / "scan.nii.gz", marked()))
    assert volume.shape == (16, 32, 32)
    assert bool(volume[:4, 12:20, 24:].all())
    assert volume.sum() == marked().sum()
    flipped = read_volume(write_scan(tmp_path / "left.nii", marked()[::-1], np.diag([-2.0, 2, 3, 1])))
    torch.testing.assert_close(flipped, volume)
    assert model.preprocess(tmp_path / "scan.nii.gz").shape == (1, 8, 1, 16, 16)


def test_a_mark_is_found_in_its_slices_and_at_its_place(model, tmp_path):
    inputs = model.preprocess(write_scan(tmp_path / "scan.nii.gz", marked()))
    found = create_method("effective", model).attribute(inputs, 1)[0].sum(1).abs()  # [D, H, W]
    assert found[:2, 6:10, 12:].sum() > 0.99 * found.sum() > 0
    assert conservation_gap(model.double(), inputs.double(), 1) < 1e-12
    assert DAVE(model.float(), samples=2).explain(inputs, 1).map.shape == (1, 8, 16, 16)


def test_files_of_a_volume(model, tmp_path, capsys):
    path = write_scan(tmp_path / "scan.nii.gz", marked())
    line = ["explain", str(path), "--model", f"{tmp_path / 'scans.py'}:load", "--method", "effective", "--target", "1"]
    assert cli.run([*line, "--out", str(tmp_path / "out"), "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert sum(record["shares"]) == pytest.approx(1.0)
    assert record["slices"][0] == 0
    (montage,) = (tmp_path / "out").glob("*.slices.png")
    assert montage.name.startswith("scan.")
    (maps,) = (tmp_path / "out").glob("*.nii")
    saved = nibabel.load(maps)
    assert saved.shape == (32, 32, 16)
    np.testing.assert_allclose(saved.affine, np.diag([2.0, 2, 3, 1]))
    values = np.abs(saved.get_fdata())
    assert values[22:, 10:22, :6].sum() > 0.9 * values.sum() > 0


def test_a_segmentation_is_the_mean_of_its_logits():
    model = VolumeModel(nn.Conv3d(1, 3, 1), (4, 4, 4), ["a", "b", "c"])
    volume = torch.randn(2, 4, 1, 4, 4)
    torch.testing.assert_close(model(volume), model.model(volume.transpose(1, 2)).mean((2, 3, 4)))


def test_axes_of_a_model_that_was_trained_with_monai():
    taken = []
    model = VolumeModel(nn.Conv3d(1, 1, 1), (2, 3, 4), ["a"], axes="xyz")
    model.model.register_forward_pre_hook(lambda module, inputs: taken.append(inputs[0]))
    volume = torch.randn(1, 2, 1, 3, 4)
    model(volume)
    assert taken[0].shape == (1, 1, 4, 3, 2)
    assert taken[0][0, 0, 3, 1, 0] == volume[0, 0, 0, 1, 3]


def test_what_is_no_volume_is_one_line(model, tmp_path):
    (tmp_path / "text.nii").write_text("no scan")
    for name in ("text.nii", "absent.nii"):
        with pytest.raises(ImageError, match="not a NIfTI file"):
            read_volume(tmp_path / name)
    with pytest.raises(ImageError, match="4 axes"):
        read_volume(write_scan(tmp_path / "series.nii", np.zeros((4, 4, 4, 2), dtype=np.float32)))
    with pytest.raises(OptionError, match="depth, height and width"):
        VolumeModel(nn.Identity(), (4, 4), [])
