"""The linear probe, and the commands about models."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

from converted_weights import save_transformers
from dave_vit.checks.doctor import diagnose
from dave_vit.cli import run
from dave_vit.data.sets.folder import Folder
from dave_vit.errors import DataError, ModelError, OptionError
from dave_vit.models import Adapter, Preprocessing, load_model
from dave_vit.models.probe import Training, train_probe

COLOURS = ("red", "green", "blue")
QUICK = Training(epochs=30, rate=0.1, views=2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Noise with a tint, in one folder for each colour."""
    draw = np.random.default_rng(0)
    root = tmp_path_factory.mktemp("colours")
    for part, count in (("train", 8), ("val", 3)):
        for channel, name in enumerate(COLOURS):
            target = root / part / name
            target.mkdir(parents=True)
            for index in range(count):
                pixels = draw.integers(0, 120, (40, 50, 3))
                pixels[..., channel] += 110
                Image.fromarray(pixels.astype(np.uint8)).save(target / f"{index}.png")
    return root


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    """Weights of a backbone without a head."""
    import timm

    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("weights") / "backbone.safetensors"
    save_file(timm.create_model("test_vit", num_classes=0).state_dict(), file)
    return file


class TestProbe:
    def test_it_learns_saves_and_loads(self, folders, backbone, tmp_path):
        parts = []
        probe = train_probe(
            "timm:test_vit",
            Folder(folders / "train"),
            Folder(folders / "val"),
            weights=str(backbone),
            settings=QUICK,
            report=parts.append,
        )
        assert (probe.accuracy, probe.images, probe.validation_images) == (1.0, 24, 9)
        assert parts == sorted(parts)
        assert parts[-1] == 1.0
        probe.save(tmp_path / "probe.safetensors")
        model = load_model("test_vit", tmp_path / "probe.safetensors")
        assert sorted(model.class_names) == sorted(COLOURS)
        for name in COLOURS:
            inputs = model.preprocess(folders / "val" / name / "0.png")
            assert torch.equal(model(inputs), probe.model(inputs))
            assert model.class_names[int(model(inputs).argmax())] == name

    def test_the_backbone_stays_frozen(self, folders, backbone, tmp_path):
        probe = train_probe("test_vit", Folder(folders / "val"), weights=str(backbone), settings=QUICK, split=0.4)
        probe.save(tmp_path / "probe.safetensors")
        before, after = load_file(backbone), load_file(tmp_path / "probe.safetensors")
        assert all(torch.equal(value, after[key]) for key, value in before.items())
        assert after.keys() - before.keys() == {"head.weight", "head.bias"}

    def test_the_seed_decides(self, folders, backbone):
        heads = [
            train_probe(
                "test_vit",
                Folder(folders / "val"),
                weights=str(backbone),
                split=0.4,
                settings=Training(epochs=2, views=1, seed=seed),
            ).model.model.head.weight
            for seed in (0, 0, 1)
        ]
        assert torch.equal(heads[0], heads[1])
        assert not torch.equal(heads[0], heads[2])

    def test_transformers(self, folders, tmp_path):
        from timm.models import VisionTransformer

        torch.manual_seed(0)
        tiny = VisionTransformer(img_size=32, patch_size=8, embed_dim=24, depth=1, num_heads=3, num_classes=7)
        save_transformers(tmp_path / "vit", tiny.state_dict(), size=32, patch=8, heads=3)
        spec = f"hf:{tmp_path / 'vit'}"
        probe = train_probe(spec, Folder(folders / "train"), settings=QUICK)
        assert probe.accuracy > 0.9
        probe.save(tmp_path / "probe.safetensors")
        model = load_model(spec, tmp_path / "probe.safetensors")
        inputs = model.preprocess(folders / "val" / "red" / "0.png")
        assert sorted(model.class_names) == sorted(COLOURS)
        torch.testing.assert_close(model(inputs), probe.model(inputs))

    def test_refusals(self, folders, backbone, tmp_path):
        train = Folder(folders / "train")
        with pytest.raises(OptionError, match="timm: and hf:"):
            train_probe("torchvision:resnet18", train)
        with pytest.raises(ModelError, match="single linear head"):
            train_probe("deit_tiny_distilled_patch16_224", train, weights="random")
        with pytest.raises(DataError, match="1 classes"):
            train_probe("test_vit", _single(folders, tmp_path), weights="random")
        with pytest.raises(OptionError, match="split"):
            train_probe("test_vit", train, weights="random", split=1.5)
        with pytest.raises(OptionError, match="views 0"):
            Training(views=0)
        with pytest.raises(ModelError, match="another model"):
            train_probe("test_vit2", train, weights=str(backbone))


def _single(folders, target) -> Folder:
    (target / "one" / "red").mkdir(parents=True)
    Image.open(folders / "train" / "red" / "0.png").save(target / "one" / "red" / "0.png")
    return Folder(target / "one")


class TestCommands:
    def test_probe(self, folders, backbone, tmp_path, capsys):
        file = tmp_path / "probe.safetensors"
        options = ["--weights", str(backbone), "--views", "2", "--epochs", "30", "--rate", "0.1", "--out", str(file)]
        assert run(["probe", str(folders / "train"), "-m", "test_vit", *options, "--device", "cpu", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["accuracy"] == 1.0
        assert found["file"] == str(file)
        assert run(["doctor", "-m", "test_vit", "--weights", str(file), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["classes"] == 3

    def test_doctor_good(self, capsys):
        assert run(["doctor", "--model", "timm:test_vit", "--weights", "random", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["supported"]
        assert found["gap"] < 1e-9
        assert found["forward_difference"] < 1e-6
        assert (found["token_grid"], found["prefix_tokens"]) == ([10, 10], 1)
        assert found["functions"]["scaled_dot_product_attention"] == 6
        assert run(["doctor", "--model", "timm:test_vit", "--weights", "random"]) == 0
        assert "good: the linear map of this model (preset exact) is exact" in capsys.readouterr().out

    def test_doctor_without_tokens(self, capsys):
        assert run(["doctor", "--model", "timm:test_resnet", "--weights", "random", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["token_grid"] is None
        assert "no self-attention" in found["token_note"]

    def test_doctor_unsupported(self, capsys):
        assert run(["doctor", "--model", "timm:iformer_t", "--weights", "random", "--json"]) == 2
        printed = capsys.readouterr()
        assert not json.loads(printed.out)["supported"]
        assert printed.err.startswith("error: ")
        assert printed.err.count("\n") == 1

    def test_doctor_of_a_model_that_only_works_in_single_precision(self):
        class Stubborn(nn.Module):
            """Holds a tensor that .double() does not reach."""

            def __init__(self) -> None:
                super().__init__()
                self.bias = nn.Parameter(torch.ones(3))
                self.table = [torch.randn(3, 12, generator=torch.Generator().manual_seed(0))]

            def forward(self, images):
                return F.linear(images.flatten(1), self.table[0], self.bias)

        model = Adapter(Stubborn(), Preprocessing(lambda picture: torch.empty(0)), ["a", "b", "c"], spec="own")
        found = diagnose(model, torch.randn(1, 3, 2, 2))
        assert found.dtype == torch.float32
        assert found.exact
        assert found.constants == 1
        assert found.image_part == pytest.approx(found.logit - 1, abs=1e-5)

    def test_unknown_model(self, capsys):
        assert run(["doctor", "--model", "timm:test_vitt"]) == 2
        assert "did you mean test_vit" in capsys.readouterr().err

    def test_models(self, capsys, tmp_path):
        assert run(["models", "iformer"]) == 0
        assert "unsupported" in capsys.readouterr().out
        assert run(["models", "timm:deit*", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [row["state"] for row in found] == ["exact"] * 3
        assert max(row["gap"] for row in found) < 1e-9
        assert run(["models", "nothing-like-this"]) == 2
        assert run(["models", "deit", "--write", str(tmp_path / "x.md")]) == 2
        assert not (tmp_path / "x.md").exists()
