"""Models by their spec: what loads, and what is refused in one line."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from dave_vit.errors import DaveError, ImageError, ModelError, OptionError, UnknownName
from dave_vit.models import Adapter, load_model
from dave_vit.models.adapter import class_names, imagenet_names
from dave_vit.models.loading import parse_spec
from dave_vit.models.state import hub_access


def picture(width: int = 90, height: int = 70) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def refusal(error: type[DaveError], *args, **kwargs) -> str:
    """The message of a refused load: one line, and soon."""
    start = time.monotonic()
    with pytest.raises(error) as caught:
        load_model(*args, **kwargs)
    assert time.monotonic() - start < 10
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    """Nobody is asked, whatever network there is."""

    def no_route(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr("dave_vit.models.state._is_reachable", lambda address: False)
    monkeypatch.setattr("torch.hub.download_url_to_file", no_route)


@pytest.fixture(scope="module")
def tiny() -> Adapter:
    return load_model("timm:test_vit", "random")


@pytest.fixture
def tiny_weights(tmp_path):
    """Weights of a tiny ViT with three classes."""
    import timm

    model = timm.create_model("test_vit", num_classes=3)
    torch.nn.init.normal_(model.head.weight)
    return model.eval()


class TestSpec:
    @pytest.mark.parametrize(
        ("spec", "expected"),
        [
            ("builtin", ("builtin", "builtin")),
            ("builtin-bcos", ("builtin", "builtin-bcos")),
            ("timm:vit_base_patch16_224", ("timm", "vit_base_patch16_224")),
            ("vit_base_patch16_224.dino", ("timm", "vit_base_patch16_224.dino")),
            ("hf-hub:timm/vit", ("timm", "hf-hub:timm/vit")),
            ("hf:google/vit-base-patch16-224", ("hf", "google/vit-base-patch16-224")),
            ("openclip:ViT-B-16", ("openclip", "ViT-B-16")),
        ],
    )
    def test_family_and_name(self, spec, expected):
        assert parse_spec(spec) == expected

    def test_nearest_names(self):
        assert "did you mean timm?" in refusal(UnknownName, "tim:vit_base_patch16_224")
        assert "vit_tiny_patch16_224" in refusal(UnknownName, "vit_tinny_patch16_224")
        assert "vit_b_16" in refusal(UnknownName, "torchvision:vit_b_17")
        assert "augreg_in21k" in refusal(UnknownName, "vit_tiny_patch16_224.nope")
        assert "builtin-bcos" in refusal(UnknownName, "builtin-bcoss")

    def test_options_that_do_not_apply(self):
        assert "timm:NAME" in refusal(OptionError, "timm:")
        assert "prompts" in refusal(OptionError, "test_vit", "random", prompts=["a", "b"])
        assert "cpu" in refusal(OptionError, "test_vit", "random", "cuda:99")


class TestTimm:
    def test_preprocessing_is_timms_own(self, tiny):
        from timm.data import create_transform, resolve_model_data_config

        expected = create_transform(**resolve_model_data_config(tiny.model))(picture())
        torch.testing.assert_close(tiny.preprocess(picture()), expected.unsqueeze(0), rtol=0, atol=0)

    def test_a_path_is_as_good_as_a_picture(self, tiny, tmp_path):
        picture().save(tmp_path / "a.png")
        assert torch.equal(tiny.preprocess(tmp_path / "a.png"), tiny.preprocess(picture()))
        assert torch.equal(tiny.preprocess(str(tmp_path / "a.png")), tiny.preprocess(picture()))
        with pytest.raises(ImageError):
            tiny.preprocess(tmp_path / "absent.png")

    def test_the_model_is_wrapped_and_unchanged(self, tiny):
        inputs = tiny.preprocess(picture())
        assert not tiny.training
        assert torch.equal(tiny(inputs), tiny.model(inputs))
        assert tiny.default_cfg["architecture"] == "test_vit"
        assert tiny.spec == "timm:test_vit"
        assert tiny.traits.noise is None

    def test_the_picture_that_the_model_sees(self, tiny):
        whole = tiny.preprocessing.picture(tiny.preprocess(Image.new("RGB", (200, 200), (255, 51, 0))))
        expected = torch.tensor([1.0, 0.2, 0.0]).view(1, 3, 1, 1).expand_as(whole)
        torch.testing.assert_close(whole, expected, atol=1e-5, rtol=0)

    def test_inputs_follow_the_models_type(self):
        assert load_model("test_vit", "random").double().preprocess(picture()).dtype == torch.float64

    def test_plain_vits_take_images_of_any_size(self, tiny):
        assert tiny(torch.randn(1, 3, 96, 64)).shape == (1, 1000)

    def test_thousand_classes_are_imagenets(self, tiny):
        assert tiny.class_names == imagenet_names()

    def test_a_model_without_a_head_is_refused(self):
        assert "dave probe" in refusal(ModelError, "vit_tiny_patch16_dinov3_qkvb", "random")
        assert "dave probe" in refusal(ModelError, "vit_small_patch14_dinov2")  # before a download

    def test_names_of_other_parts_of_imagenet(self):
        import timm

        from dave_vit.models.families.timm import wrap

        model = wrap(timm.create_model("test_vit", num_classes=21843), None, None, spec="x")
        assert model.class_names[5] == "animal"

    @pytest.mark.parametrize("spec", ["timm:vit_tiny_patch16_224", "torchvision:mobilenet_v3_small", "hf:some/model"])
    def test_no_network(self, spec):
        if spec.startswith("hf:"):
            from transformers import AutoConfig, AutoImageProcessor  # noqa: F401 - takes seconds that are not waited
        message = refusal(ModelError, spec)
        assert message.startswith(spec)
        assert "--weights FILE" in message


class TestClassNames:
    def test_imagenet(self):
        names = imagenet_names()
        assert len(set(names)) == 1000
        assert (names[0], names[207], names[281]) == ("tench", "golden retriever", "tabby")
        assert (names[134], names[517]) == ("crane (bird)", "crane (machine)")

    @pytest.mark.parametrize(
        ("file", "text"),
        [
            ("names.txt", "cat\ndog\n\nzebra \n"),
            ("names.json", '["cat", "dog", "zebra"]'),
            ("names.json", '{"1": "dog", "0": "cat", "2": "zebra"}'),
            ("names.json", '{"0": ["n1", "cat"], "1": ["n2", "dog"], "2": ["n3", "zebra"]}'),
        ],
    )
    def test_files(self, tmp_path, file, text):
        (tmp_path / file).write_text(text)
        assert class_names(3, tmp_path / file) == ["cat", "dog", "zebra"]

    @pytest.mark.parametrize("text", ['{"0": "cat", "2": "dog"}', '"cat"', "[", '{"a": "cat"}'])
    def test_malformed_json(self, tmp_path, text):
        (tmp_path / "names.json").write_text(text)
        with pytest.raises(ModelError, match="JSON"):
            class_names(2, tmp_path / "names.json")

    def test_wrong_number_and_missing_file(self, tmp_path):
        with pytest.raises(ModelError, match="2 class names for a model of 3"):
            class_names(3, ["cat", "dog"])
        with pytest.raises(ModelError, match="cannot be read"):
            class_names(3, tmp_path / "absent.txt")

    def test_nameless(self):
        assert class_names(2) == ["class 0", "class 1"]


class TestWeights:
    @pytest.mark.parametrize("wrap", [lambda s: s, lambda s: {"state_dict": s, "epoch": 3}, lambda s: {"model": s}])
    @pytest.mark.parametrize("prefix", ["", "module.", "module.model."])
    def test_own_state_dict_with_another_number_of_classes(self, tmp_path, tiny_weights, wrap, prefix):
        state = {f"{prefix}{key}": value for key, value in tiny_weights.state_dict().items()}
        torch.save(wrap(state), tmp_path / "own.pth")
        model = load_model("test_vit", tmp_path / "own.pth", classes=["cat", "dog", "zebra"])
        assert model.class_names == ["cat", "dog", "zebra"]
        inputs = torch.randn(2, 3, 160, 160)
        torch.testing.assert_close(model(inputs), tiny_weights(inputs))

    def test_weights_for_another_image_size(self, tmp_path):
        import timm

        save_file(timm.create_model("test_vit", img_size=96).state_dict(), tmp_path / "small.safetensors")
        assert load_model("test_vit", tmp_path / "small.safetensors").model.pos_embed.shape[1] == 101

    def test_names_beside_the_weights(self, tmp_path, tiny_weights):
        metadata = {"architecture": "test_vit", "class_names": json.dumps(["cat", "dog", "zebra"])}
        save_file(tiny_weights.state_dict(), tmp_path / "own.safetensors", metadata)
        assert load_model("test_vit", tmp_path / "own.safetensors").class_names == ["cat", "dog", "zebra"]
        assert "timm:test_vit" in refusal(ModelError, "test_vit2", tmp_path / "own.safetensors")

    def test_a_pickle_that_needs_more_is_refused(self, tmp_path, tiny_weights):
        torch.save(tiny_weights, tmp_path / "whole.pth")
        assert "refused" in refusal(ModelError, "test_vit", tmp_path / "whole.pth")
        bomb = tmp_path / "bomb.pth"
        bomb.write_bytes(pickle.dumps(_Bomb(tmp_path / "exploded"), protocol=2))
        assert "refused" in refusal(ModelError, "test_vit", bomb)
        assert not (tmp_path / "exploded").exists()

    def test_files_that_are_no_weights(self, tmp_path):
        (tmp_path / "text.pth").write_text("hello")
        (tmp_path / "text.safetensors").write_text("hello")
        torch.save({"epoch": 3}, tmp_path / "empty.pth")
        assert "not a file of weights" in refusal(ModelError, "test_vit", tmp_path / "text.pth")
        (tmp_path / "el1.png").write_bytes(b"\x89PNG\r\n\x1a\n")
        assert "el1.png: a picture, not a file of weights" in refusal(ModelError, "test_vit", tmp_path / "el1.png")
        assert "not a safetensors file" in refusal(ModelError, "test_vit", tmp_path / "text.safetensors")
        assert "holds no state dict" in refusal(ModelError, "test_vit", tmp_path / "empty.pth")
        assert "no such file" in refusal(ModelError, "test_vit", tmp_path / "absent.pth")

    def test_weights_of_another_model(self, tmp_path, tiny_weights):
        state = tiny_weights.state_dict()
        headless = {key: value for key, value in state.items() if not key.startswith("head.")}
        save_file(headless, tmp_path / "headless.safetensors")
        assert "dave probe" in refusal(ModelError, "test_vit", tmp_path / "headless.safetensors")
        save_file({"head.weight": state["head.weight"]}, tmp_path / "part.safetensors")
        assert "missing such as" in refusal(ModelError, "test_vit", tmp_path / "part.safetensors")
        save_file(state, tmp_path / "own.safetensors")
        assert "another model" in refusal(ModelError, "vit_tiny_patch16_224", tmp_path / "own.safetensors")


class _Bomb:
    """Unpickling it creates a file."""

    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return (type(self.path).touch, (self.path,))


class TestBuiltin:
    @pytest.mark.parametrize(("name", "channels"), [("builtin", 3), ("builtin-bcos", 6)])
    def test_architectures(self, name, channels):
        model = load_model(name, "random")
        inputs = model.preprocess(picture())
        assert inputs.shape == (1, channels, 224, 224)
        assert model(inputs).shape == (1, len(model.class_names))
        torch.testing.assert_close(model.preprocessing.picture(inputs).amax(), torch.tensor(1.0), atol=0.01, rtol=0)
        assert (model.traits.noise is not None) == (channels == 6)

    def test_own_weights_for_it(self, tmp_path):
        first = load_model("builtin", "random")
        save_file(first.model.state_dict(), tmp_path / "own.safetensors")
        second = load_model("builtin", tmp_path / "own.safetensors")
        inputs = first.preprocess(picture())
        assert torch.equal(first(inputs), second(inputs))


_ASK = """
from dave_vit.errors import ModelError
from dave_vit.models import load_model
for spec in ("hf:someone/gated", "hf:someone/absent", "timm:vit_tiny_patch16_224"):
    try:
        load_model(spec)
    except ModelError as error:
        print(error)
"""


class _Hub(BaseHTTPRequestHandler):
    """A hub on which every model is gated or absent."""

    def do_GET(self):
        gated = "absent" not in self.path
        self.send_response(401 if gated else 404)
        self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


@pytest.mark.slow
def test_a_hub_that_answers(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "0",
    }
    try:
        command = [sys.executable, "-c", _ASK]
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=120)
    finally:
        server.shutdown()
    gated, absent, weights = done.stdout.splitlines()
    assert gated.startswith("hf:someone/gated is gated")
    assert absent.startswith("hf:someone/absent does not exist")
    assert weights.startswith("timm:vit_tiny_patch16_224 is gated")


class TestHub:
    """What the hub's client raises, in one line each."""

    def test_gated_missing_and_offline(self):
        from huggingface_hub import errors

        def raised(kind):
            return kind.__new__(kind)  # their constructors need a whole HTTP answer

        for kind, words in (
            (errors.GatedRepoError, "is gated"),
            (errors.RepositoryNotFoundError, "does not exist"),
            (errors.LocalEntryNotFoundError, "cannot be reached"),
        ):
            with pytest.raises(ModelError, match=words), hub_access("hf:someone/model"):
                raise raised(kind)
        with pytest.raises(ModelError, match="is gated"), hub_access("hf:someone/model"):
            raise OSError("You are trying to access a gated repo.\nMake sure to have access")

    def test_settings_are_given_back(self):
        import socket

        from huggingface_hub import constants

        before = constants.HF_HUB_OFFLINE, socket.getdefaulttimeout()
        with pytest.raises(ModelError), hub_access("x"):
            raise OSError("no route to host")
        assert (constants.HF_HUB_OFFLINE, socket.getdefaulttimeout()) == before
