"""The table of models: what is marked exact is exact, what is not is refused."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dave_vit.checks.architectures import checked_architectures
from dave_vit.engine.rule_sets import EFFECTIVE
from model_coverage import LIMIT, Entry, architectures, check, checking, find

DOCS = Path(__file__).resolve().parents[2] / "docs" / "models.md"
QUICK = [
    "timm:vit_base_patch16_224",
    "timm:deit_tiny_distilled_patch16_224",
    "timm:vit_giant_patch14_dinov2",
    "timm:vit_small_patch16_dinov3",
    "timm:eva02_tiny_patch14_224",
    "timm:vit_base_patch16_siglip_224",
    "timm:vit_base_patch16_clip_quickgelu_224",
    "timm:cait_xxs24_224",
    "timm:xcit_nano_12_p16_224",
    "timm:swinv2_tiny_window8_256",
    "timm:convnextv2_atto",
    "timm:vit_tiny_r_s16_p8_224",
    "timm:mobilenetv3_small_050",
    "torchvision:vit_b_16",
    "open_clip:ViT-B-16",
    "transformers:Gemma3ForConditionalGeneration",  # makes its mask by vmap
    "transformers:Qwen3VLForConditionalGeneration",  # indexes by shapes
]


def test_refused():
    row = check(find("coat_lite_tiny"))
    assert row.state == "unsupported"
    assert "serial_blocks1.0" in row.reason


def documented() -> dict[tuple[str, str, str], str]:
    """The verdict of docs/models.md on every architecture."""
    states = {}
    for section in re.split(r"^## ", DOCS.read_text(), flags=re.MULTILINE)[1:]:
        for family, name, state in re.findall(r"^\| (.+?) \| `(.+?)` \| (\w+) \|", section, re.MULTILINE):
            states[section.partition("\n")[0], family, name] = state
    return states


def mark(entry: Entry) -> Any:
    """Return an architecture as a parameter, marked slow if it is not among the quick ones."""
    marks = () if f"{entry.library}:{entry.name}" in QUICK else pytest.mark.slow
    return pytest.param(entry, marks=marks, id=f"{entry.library}:{entry.family}:{entry.name}")


@pytest.mark.parametrize("entry", [mark(entry) for entry in architectures()])
def test_every_architecture_is_what_the_table_says(entry):
    """An architecture that was exact stays exact; one that is no longer refused belongs into the table."""
    row = check(entry, seed=1)
    assert row.state == documented()[entry.library, entry.family, entry.name], row.reason
    assert row.state == "unsupported" or (max(row.gap, row.default_gap) < LIMIT and row.forward < 1e-6)
    assert (row.state == "unsupported") == bool(row.reason)
    assert row.is_left_alone


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(12, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        nn.init.zeros_(self.head.weight)

    def forward(self, images):
        return self.head(F.gelu(self.norm(self.first(images.flatten(1)))))


@pytest.mark.parametrize("name", ["gelu", "layer_norm", "linear"])
def test_a_wrong_derivative_is_found(monkeypatch, name):
    """With the ordinary derivative of one function, or a lost constant, the identity fails."""
    entry = Entry("own", "toy", "toy", Toy, (2, 2))
    assert check(entry).state == "exact"

    def plain(call, *args, **kwargs):
        return call.func(*args, **kwargs)

    monkeypatch.setattr(checking, "EFFECTIVE", EFFECTIVE.extend("wrong", {name: plain}))
    row = check(entry)
    assert row.state == "inexact"
    assert row.gap > 1e-3


def test_batch_statistics_are_calibrated():
    entry = Entry("own", "cnn", "cnn", partial(_deep_cnn, 12), (8, 8))
    row = check(entry)
    assert row.state == "exact"


def _deep_cnn(depth: int) -> nn.Module:
    layers = [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(depth)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(3 * 64, 4))


def test_a_library_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    row = check(find("IJepa"))
    assert row.state == "not installed"
    assert "dave-vit[hf]" in row.reason


class TestTable:
    def test_size_and_families(self):
        entries = architectures()
        assert len(entries) >= 60
        libraries = {"timm", "transformers", "torchvision", "open_clip", "bcos", "monai", "builtin"}
        assert {entry.library for entry in entries} == libraries

    @pytest.mark.parametrize(
        ("pattern", "expected"),
        [("swin_tiny", ["swin_tiny_patch4_window7_224"]), ("timm:deit3*", ["deit3_base_patch16_224"]), ("nope", [])],
    )
    def test_patterns(self, pattern, expected):
        assert [row.architecture for row in checked_architectures(pattern)] == expected

    def test_markdown(self):
        text = DOCS.read_text()
        assert "\n## timm\n" in text
        assert re.search(r"\| DeiT-III \| `deit3_base_patch16_224` \| exact \| \de-\d\d \| \de-\d\d \|", text)
        assert "| CoaT | `coat_lite_tiny` | unsupported |  |  |  |" in text

    def test_the_documented_table_is_the_current_one(self):
        table = documented()
        assert list(table) == [(e.library, e.family, e.name) for e in architectures()]
        rows = {(row.library, row.family, row.architecture): row.state for row in checked_architectures()}
        assert rows == table
        assert set(table.values()) == {"exact", "unsupported"}
        said = re.search(r"(\d+) architectures exact, (\d+) unsupported", DOCS.read_text())
        assert [int(count) for count in said.groups()] == [
            list(table.values()).count(state) for state in ("exact", "unsupported")
        ]


def test_no_gradient_is_left_behind():
    torch.manual_seed(0)
    before = torch.rand(1)
    torch.manual_seed(0)
    check(Entry("own", "toy", "toy", Toy, (2, 2)))
    assert torch.equal(torch.rand(1), before)  # the global generator was not touched
