"""Each library through the same door: logits, preprocessing, names; and the same map for the same weights."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from converted_weights import save_transformers, to_torchvision, to_transformers
from dave_vit import DAVE, cli, conservation_gap, effective_transformation
from dave_vit.engine import gradient
from dave_vit.engine.observation import find_token_layout
from dave_vit.engine.rule_sets import EFFECTIVE
from dave_vit.errors import ModelError, OptionError, UnknownName
from dave_vit.models import load_model
from dave_vit.models.retrieval import matched_similarity
from dave_vit.neighborhood import Noise

SIZE, PATCH, DIM, HEADS, CLASSES = 32, 8, 24, 3, 5


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setattr("dave_vit.models.state._is_reachable", lambda address: False)


def picture(width: int = 60, height: int = 45) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def original() -> nn.Module:
    """A small ViT of timm, all parameters at random."""
    from timm.models import VisionTransformer

    model = VisionTransformer(
        img_size=SIZE, patch_size=PATCH, embed_dim=DIM, depth=2, num_heads=HEADS, mlp_ratio=2, num_classes=CLASSES
    )
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=draw)
    return model.eval()


@pytest.fixture(scope="module")
def folder(original, tmp_path_factory):
    labels = ["cat", "dog", "zebra", "crane", "tench"]
    target = tmp_path_factory.mktemp("saved") / "vit"
    return save_transformers(target, original.state_dict(), size=SIZE, patch=PATCH, heads=HEADS, labels=labels)


@pytest.fixture(scope="module")
def everywhere(original, folder) -> dict[str, nn.Module]:
    """The same weights through three libraries, the last with both kinds of attention."""
    from torchvision.models import VisionTransformer

    other = VisionTransformer(SIZE, PATCH, 2, HEADS, DIM, 2 * DIM, num_classes=CLASSES).eval()
    other.load_state_dict(to_torchvision(original.state_dict()))
    fused, eager = load_model(f"hf:{folder}"), load_model(f"hf:{folder}")
    eager.model.set_attn_implementation("eager")
    assert fused.model.config._attn_implementation == "sdpa"
    return {"timm": original, "torchvision": other, "transformers": fused, "transformers, eager": eager}


class TestParity:
    def test_the_same_dave_map(self, everywhere):
        images = torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
        maps = {name: DAVE(model, samples=6, seed=3).attribute(images, [1, 4]) for name, model in everywhere.items()}
        expected = maps.pop("timm")
        for name, weight in maps.items():
            torch.testing.assert_close(weight, expected, atol=1e-4 * float(expected.abs().max()), rtol=0, msg=name)

    def test_the_forward_pass_is_the_models_own(self, everywhere):
        images = torch.randn(2, 3, SIZE, SIZE)
        for model in everywhere.values():
            seen = gradient(model, images, rules=EFFECTIVE).logits
            output = model(images)
            torch.testing.assert_close(seen, getattr(output, "logits", output).detach(), atol=1e-6, rtol=1e-6)

    @pytest.mark.realdata
    def test_deit_tiny_through_timm_and_transformers(self, deit_tiny, data_dir, tmp_path):
        save_transformers(tmp_path, deit_tiny.state_dict(), size=224, patch=16, heads=3)
        ours = load_model("timm:deit_tiny_patch16_224", data_dir / "weights" / "deit_tiny_patch16_224.safetensors")
        theirs = load_model(f"hf:{tmp_path}")
        assert theirs.class_names == ours.class_names
        inputs = ours.preprocess(data_dir / "multi-object" / "dogcat2.png")
        assert ours.class_names[int(ours(inputs).argmax())] == "golden retriever"
        torch.testing.assert_close(theirs(inputs), ours(inputs), atol=1e-4, rtol=0)
        maps = [DAVE(model, samples=2).attribute(inputs) for model in (ours, theirs)]
        torch.testing.assert_close(maps[1], maps[0], atol=1e-4 * float(maps[0].abs().max()), rtol=0)


class TestTransformers:
    def test_names_and_preprocessing_of_the_folder(self, folder):
        from transformers import AutoImageProcessor

        model = load_model(f"hf:{folder}")
        assert model.class_names == ["cat", "dog", "zebra", "crane", "tench"]
        expected = AutoImageProcessor.from_pretrained(folder)(picture(), return_tensors="pt")["pixel_values"]
        assert torch.equal(model.preprocess(picture()), expected)
        shown = model.preprocessing.picture(model.preprocess(Image.new("RGB", (9, 9), (255, 51, 0))))
        torch.testing.assert_close(shown[0, :, 0, 0], torch.tensor([1.0, 0.2, 0.0]), atol=1e-5, rtol=0)

    def test_a_file_in_place_of_the_folders_weights(self, folder, original, tmp_path):
        state = original.state_dict()
        state["head.weight"], state["head.bias"] = torch.randn(3, DIM), torch.randn(3)
        save_file(to_transformers(state), tmp_path / "three.safetensors")
        model = load_model(f"hf:{folder}", tmp_path / "three.safetensors", classes=["a", "b", "c"])
        features = original.forward_head(original.forward_features(torch.ones(1, 3, SIZE, SIZE)), pre_logits=True)
        expected = F.linear(features, state["head.weight"], state["head.bias"])
        torch.testing.assert_close(model(torch.ones(1, 3, SIZE, SIZE)), expected, atol=1e-4, rtol=1e-4)

    def test_other_sizes_of_images(self, folder):
        model = load_model(f"hf:{folder}")
        images = torch.randn(1, 3, 48, 32, dtype=torch.float64)
        assert conservation_gap(model.double(), images) < 1e-9
        assert find_token_layout(model, images).grid == (6, 4)

    def test_a_folder_without_a_trained_head(self, folder, original, tmp_path):
        save_transformers(tmp_path, original.state_dict(), size=SIZE, patch=PATCH, heads=HEADS)
        state = {k: v for k, v in to_transformers(original.state_dict()).items() if not k.startswith("classifier")}
        save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelError, match=r"no trained class head .*dave probe"):
            load_model(f"hf:{tmp_path}")

    def test_unfit_folders(self, folder, tmp_path, original):
        with pytest.raises(ModelError, match="no such folder"):
            load_model(f"hf:{tmp_path}/absent")
        empty = save_transformers(tmp_path / "empty", original.state_dict(), size=SIZE, patch=PATCH, heads=HEADS)
        (empty / "model.safetensors").unlink()
        with pytest.raises(ModelError, match=r"cannot be used as an image model: .*safetensors"):
            load_model(f"hf:{empty}")
        with pytest.raises(ModelError, match=r"config\.json is missing"):
            load_model(f"hf:{tmp_path}")
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
        (tmp_path / "preprocessor_config.json").write_text("{}")
        with pytest.raises(ModelError, match="cannot be used as an image model") as caught:
            load_model(f"hf:{tmp_path}")
        assert "\n" not in str(caught.value)
        save_file({"head.weight": torch.zeros(2, 3)}, tmp_path / "other.safetensors")
        with pytest.raises(ModelError, match="another model"):
            load_model(f"hf:{folder}", tmp_path / "other.safetensors")
        with pytest.raises(ModelError, match="without a text half"):
            load_model(f"hf:{folder}", prompts=["a cat", "a dog"])


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    """A tiny CLIP with a tokenizer of letters."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPTokenizer

    target = tmp_path_factory.mktemp("clip")
    letters = [chr(code) for code in range(33, 127)]
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (target / "vocab.json").write_text(json.dumps({word: index for index, word in enumerate(words)}))
    (target / "merges.txt").write_text("#version: 0.2\n")
    CLIPTokenizer.from_pretrained(target).save_pretrained(target)
    half = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    start, end = len(words) - 2, len(words) - 1
    text = {**half, "vocab_size": len(words), "bos_token_id": start, "eos_token_id": end, "pad_token_id": end}
    torch.manual_seed(0)
    config = CLIPConfig(vision_config={**half, "image_size": SIZE, "patch_size": PATCH}, text_config=text)
    CLIPModel(config).save_pretrained(target)
    size = {"size": {"shortest_edge": SIZE}, "crop_size": {"height": SIZE, "width": SIZE}}
    CLIPImageProcessor(**size).save_pretrained(target)
    return target


class TestZeroShot:
    def test_transformers_clip(self, clip_folder):
        from transformers import CLIPModel, CLIPProcessor

        prompts = ["a cat", "two dogs", "x"]
        model = load_model(f"hf:{clip_folder}", prompts=prompts)
        assert model.class_names == prompts
        processor = CLIPProcessor.from_pretrained(clip_folder)
        inputs = processor(text=prompts, images=picture(), return_tensors="pt", padding=True)
        expected = CLIPModel.from_pretrained(clip_folder)(**inputs).logits_per_image
        torch.testing.assert_close(model(model.preprocess(picture())), expected, atol=1e-4, rtol=1e-4)
        assert conservation_gap(model.double(), model.preprocess(picture())) < 1e-9

    def test_words_of_a_sentence_given_the_picture(self, clip_folder, tmp_path, capsys):
        picture().save(tmp_path / "photo.png")
        line = ["explain", str(tmp_path / "photo.png"), "--model", f"hf:{clip_folder}", "--prompt", "a cat", "--json"]
        assert cli.run([*line, "--out", str(tmp_path / "out"), "--method", "effective"]) == 0
        (record,) = json.loads(capsys.readouterr().out)
        assert [word["text"] for word in record["words"]] == ["a", "c", "a", "t"]
        model = load_model(f"hf:{clip_folder}", prompts=["x", "a cat"]).double()
        inputs = model.preprocess(picture())
        words = model.word_model(inputs, 1)
        assert conservation_gap(words, words.embedded, matched_similarity) < 1e-9
        assert matched_similarity(words(words.embedded)).item() == pytest.approx(model(inputs)[0, 1].item())
        shares = [share for _, share in model.word_contributions(inputs, 1)]
        assert shares == pytest.approx([word["share"] for word in record["words"]], rel=1e-3, abs=1e-5)

    def test_without_prompts_it_says_so(self, clip_folder):
        with pytest.raises(ModelError, match="give prompts"):
            load_model(f"hf:{clip_folder}")

    def test_class_names_serve_as_prompts(self, clip_folder, tmp_path):
        (tmp_path / "names.txt").write_text("a cat\na dog\n")
        model = load_model(f"hf:{clip_folder}", classes=tmp_path / "names.txt")
        prompted = load_model(f"hf:{clip_folder}", prompts=["a cat", "a dog"])
        inputs = model.preprocess(picture())
        assert torch.equal(model(inputs), prompted(inputs))

    def test_inputs_that_are_no_images_are_refused(self):
        from transformers import Siglip2ImageProcessor

        from dave_vit.models.families.hf import preprocessing

        with pytest.raises(ModelError, match="patches instead of images"):
            preprocessing(Siglip2ImageProcessor())(picture())

    def test_open_clip(self, tmp_path):
        import open_clip

        half = {"layers": 1, "width": 16, "head_width": 8, "patch_size": 8, "image_size": SIZE}
        text = {"context_length": 77, "vocab_size": 49408, "layers": 1, "width": 16, "heads": 2}
        config = {"embed_dim": 16, "vision_cfg": half, "text_cfg": text}
        (tmp_path / "dave-tiny.json").write_text(json.dumps(config))
        open_clip.add_model_config(tmp_path / "dave-tiny.json")
        theirs, _, transform = open_clip.create_model_and_transforms("dave-tiny")
        save_file(theirs.eval().state_dict(), tmp_path / "own.safetensors")
        prompts = {"prompts": ["a cat", "a dog"], "classes": ["cat", "dog"]}
        model = load_model("openclip:dave-tiny", tmp_path / "own.safetensors", **prompts)
        assert model.class_names == ["cat", "dog"]
        inputs = transform(picture()).unsqueeze(0)
        assert torch.equal(model.preprocess(picture()), inputs)
        tokens = open_clip.get_tokenizer("dave-tiny")(prompts["prompts"])
        torch.testing.assert_close(model(inputs), theirs.get_logits(inputs, tokens)[0], atol=1e-5, rtol=1e-5)
        with pytest.raises(ModelError, match="no published weights"):
            load_model("openclip:dave-tiny", **prompts)

    def test_prompts_from_a_file_and_their_number(self, tmp_path):
        from dave_vit.models.retrieval import resolve_prompts

        (tmp_path / "prompts.txt").write_text("a cat\na dog\n")
        assert resolve_prompts(None, tmp_path / "prompts.txt", "openclip:x") == (["a cat", "a dog"], ["a cat", "a dog"])
        for prompts in (None, ["one"], []):
            with pytest.raises(OptionError, match="two or more"):
                load_model("openclip:ViT-B-16", prompts=prompts)
        with pytest.raises(OptionError, match="a list of sentences"):
            load_model("openclip:ViT-B-16", prompts="a cat")

    def test_refusals(self):
        with pytest.raises(UnknownName, match="ViT-B-16"):
            load_model("openclip:ViT-B-17", prompts=["a", "b"])
        with pytest.raises(UnknownName, match="openai"):
            load_model("openclip:ViT-B-16@nope", prompts=["a", "b"])
        with pytest.raises(ModelError, match="cannot be reached"):
            load_model("openclip:ViT-B-16", prompts=["a", "b"])


class TestTorchvision:
    def test_own_classes(self, tmp_path):
        from torchvision.models import MobileNet_V3_Small_Weights, mobilenet_v3_small

        theirs = mobilenet_v3_small(num_classes=4).eval()
        torch.save(theirs.state_dict(), tmp_path / "own.pth")
        model = load_model("torchvision:mobilenet_v3_small", tmp_path / "own.pth", classes=["a", "b", "c", "d"])
        expected = MobileNet_V3_Small_Weights.DEFAULT.transforms()(picture()).unsqueeze(0)
        assert torch.equal(model.preprocess(picture()), expected)
        assert torch.equal(model(expected), theirs(expected))
        assert model.class_names == ["a", "b", "c", "d"]


class TestBcos:
    @pytest.mark.parametrize("name", ["simple_vit_ti_patch16_224", "vitc_ti_patch1_14"])
    def test_six_channels_additive_noise_and_the_networks_own_explanation(self, name, tmp_path):
        from dave_vit.models.families.bcos import build

        torch.manual_seed(0)
        theirs = build(name, num_classes=7).eval()
        torch.save(theirs.state_dict(), tmp_path / "own.pth")
        model = load_model(f"bcos:{name}", tmp_path / "own.pth")
        assert model.traits.noise == Noise("additive", 0.2)
        assert len(model.class_names) == 7
        inputs = model.preprocess(picture())
        assert inputs.shape == (1, 6, 224, 224)
        torch.testing.assert_close(inputs[:, :3] + inputs[:, 3:], torch.ones(1, 3, 224, 224))
        small = inputs[:, :, :64, :64].clone()
        leaf = small.clone().requires_grad_()
        with theirs.explanation_mode():
            theirs(leaf)[0, 3].backward()
        weight = effective_transformation(model, small, 3)
        torch.testing.assert_close(weight, leaf.grad, atol=1e-5 * float(weight.abs().max()), rtol=1e-3)

    def test_refusals(self):
        with pytest.raises(UnknownName, match="vitc_b_patch1_14"):
            load_model("bcos:vitc_b_patch1_15")
