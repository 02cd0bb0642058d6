"""Methods that explain words of a language model: which there are, and the maps of some against slow oracles."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from PIL import Image

import tiny_models
import writer_folders
from dave_vit import METHODS, create_method, load_model
from dave_vit.engine.targets import ScoreSet
from dave_vit.errors import DaveError
from dave_vit.methods.options import filter_options
from dave_vit.methods.words import filter_by_rank

pytest.importorskip("transformers", reason="needs the extra hf")
QUESTION = "what is on the table ?"
REFUSED = {"attention_flow", "bcos", "beyond_intuition", "chefer_generic", "chefer_lrp", "iia", "legrad", "mda", "tis"}
REFUSED |= {"raw_attention"}
NO_PATCHES = {"BLIP-2", "Idefics 3"}  # queries, and tiles with the whole image once more


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """By family, a model in float64 with an answer of three words."""
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (80, 120, 3), dtype=np.uint8))
    made = {}

    def make(family: str):
        if family not in made:
            folder = writer_folders.save(family, tmp_path_factory.mktemp("writer"))
            model = load_model(f"hf:{folder}", device="cpu").double()
            made[family] = model.with_prompt(picture, QUESTION, max_tokens=3)
        return made[family]

    return make


@pytest.mark.parametrize("name", [name for name in METHODS if name != "dave"])  # whose words have tests of their own
def test_a_method_explains_words_or_is_refused_in_one_line(answered, name):
    model = answered("LLaVA")
    options = filter_options(name, samples=2, steps=2) | tiny_models.HIDING.get(name, {})
    words = ScoreSet(tuple(model.scores(range(2))))
    if name not in REFUSED:
        assert create_method(name, model, **options).attribute(model.inputs, words).shape == (1, 2, 3, 64, 64)
        return
    with pytest.raises(DaveError) as error:
        create_method(name, model, **options).attribute(model.inputs, words)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["rollout", "tam"])
@pytest.mark.parametrize("family", sorted(NO_PATCHES))
def test_image_tokens_that_are_no_patches_are_refused(answered, family, name):
    model = answered(family)
    with pytest.raises(DaveError, match=r"image tokens, which are not a grid|has the patches of the image"):
        create_method(name, model).attribute(model.inputs, model.score(0))


def eager_attention(model) -> tuple[list, list]:
    """Attention of the vision encoder and of the language model, averaged over heads, by transformers itself."""
    inner = model.model.model
    inner.set_attn_implementation("eager")
    with torch.no_grad():
        constants = model.model.constants | {"output_attentions": True}
        text = inner(pixel_values=model.inputs, **constants).attentions
        vision = inner.model.vision_tower(model.inputs, output_attentions=True).attentions
    inner.set_attn_implementation("sdpa")
    return [each[0].mean(0) for each in vision], [each[0].mean(0) for each in text]


def multiply(layers) -> torch.Tensor:
    product = torch.eye(len(layers[0]), dtype=torch.float64)
    for layer in layers:
        product = (layer + torch.eye(len(layer))) / 2 @ product
    return product


def test_rollout_is_the_product_of_both_models(answered):
    model = answered("LLaVA")
    vision, text = eager_attention(model)
    skipped = -1 - model.model.model.config.vision_feature_layer  # layers after the one that LLaVA reads
    places = list(model.text_decoder.image_tokens)
    for number in range(3):
        row = multiply(text)[model.score(number).positions[0], places]
        expected = (row @ multiply(vision[: len(vision) - skipped])[1:])[1:].reshape(4, 4)  # without the class token
        found = create_method("rollout", model, resolution="patch").attribute(model.inputs, model.score(number))
        torch.testing.assert_close(found[0, 0], expected)


def test_rollout_follows_cross_attention():
    """One matrix of words and patches per layer; words read the patches, patches do not read words."""
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (224, 224, 3), dtype=np.uint8))
    model = load_model("builtin-captions").double().with_prompt(picture, answer="red apple")
    inner, length = model.model.model, model.token_ids.shape[1]
    for module in inner.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "eager"
    with torch.no_grad():
        out = inner(model.inputs, **model.model.constants, output_attentions=True)
    state = torch.eye(length + 197, dtype=torch.float64)
    for layer in out.encoder_attentions:
        state[length:] = (state[length:] + layer[0].mean(0) @ state[length:]) / 2
    for own, cross in zip(out.decoder_attentions, out.cross_attentions, strict=True):
        state[:length] = (state[:length] + own[0].mean(0) @ state[:length]) / 2
        state[:length] = (state[:length] + cross[0].mean(0) @ state[length:]) / 2
    expected = state[model.score(1).positions[0] + length, length + 1 :].reshape(14, 14)
    found = create_method("rollout", model, resolution="patch").attribute(model.inputs, model.score(1))
    torch.testing.assert_close(found[0, 0], expected)


def test_gradcam_weighs_the_last_vision_layer_that_is_read(answered):
    model, seen = answered("LLaVA"), []
    config = model.model.model.config
    layer = model.model.model.model.vision_tower.encoder.layers[config.vision_feature_layer]
    handle = layer.layer_norm1.register_forward_hook(lambda module, args, output: seen.append(output))
    (word,) = model.scores([1])
    score = word(model(model.inputs.requires_grad_()))
    handle.remove()
    model.inputs.requires_grad_(requires_grad=False)
    (slope,) = torch.autograd.grad(score, seen[-1])
    expected = (slope[0, 1:].mean(0) * seen[-1][0, 1:]).sum(1).reshape(4, 4)
    found = create_method("gradcam", model, resolution="patch", positive=False).attribute(model.inputs, word)
    torch.testing.assert_close(found[0, 0], expected.detach())


@pytest.mark.parametrize(("family", "grid"), [("LLaVA", (4, 4)), ("Qwen2-VL", (3, 4))])
def test_token_activation_map_against_the_formulas_of_its_paper(answered, family, grid):
    model = answered(family)
    with torch.no_grad():
        logits = np.maximum(model.compute_all_logits(model.inputs)[0].float().numpy(), 0)
    ids, places = model.token_ids[0].tolist(), list(model.text_decoder.image_tokens)
    special, start = {*model.tokenizer.all_special_ids, ids[places[0]]}, len(ids) - 3
    for number in range(3):
        own, where = ids[start + number], start + number - 1
        total, weights = np.zeros(len(places)), 0.0
        for index in range(start + number):
            if ids[index] in special or ids[index] == own:
                continue
            weight = logits[index - 1 if index >= start else index, own]
            total += weight * logits[places, ids[index]]
            weights += weight
        own_map, other = logits[places, own], total / max(weights, 1e-12)
        scale = own_map @ other / (other @ other) if other.any() else 0.0
        expected = slow_filter(np.maximum(own_map - scale * other, 0).reshape(grid))
        found = create_method("tam", model).attribute(model.inputs, model.score(number))[0].sum(0)
        coarse = torch.nn.functional.interpolate(torch.from_numpy(expected)[None, None], found.shape, mode="bilinear")
        np.testing.assert_allclose(found, coarse[0, 0], atol=1e-4 * max(expected.max(), 1e-3))
        assert model.score(number).positions == (where - len(ids),)


def slow_filter(values: np.ndarray) -> np.ndarray:
    padded, result = np.pad(values, 1, mode="reflect"), np.zeros_like(values)
    for row, column in np.ndindex(values.shape):
        window = np.sort(padded[row : row + 3, column : column + 3].ravel())
        spread = window.std() / window.mean() if window.mean() > 0 else 0.0
        weights = np.exp(-((np.arange(9) - 4) ** 2) / (2 * spread**2)) if spread > 1e-3 else np.eye(9)[4]
        result[row, column] = (window * weights).sum() / weights.sum()
    return result


def test_the_rank_filter_removes_a_single_spike():
    grids = torch.ones(1, 1, 5, 5)
    grids[..., 2, 2] = 3
    filtered = filter_by_rank(grids)
    assert float(filtered[0, 0, 2, 2]) == pytest.approx(1, abs=0.1)
    np.testing.assert_allclose(filtered[0, 0], slow_filter(grids[0, 0].numpy()), atol=1e-5)


def test_a_further_word_is_explained_without_further_checks(answered):
    picture = answered("LLaVA").inputs
    models = [copy.deepcopy(answered("LLaVA")) for _ in range(2)]
    calls = []
    for model in models:
        model.model.register_forward_pre_hook(lambda *_: calls.append(1))
    fresh = create_method("dave", models[1], samples=2).attribute(picture, ScoreSet(tuple(models[1].scores([1]))))
    create_method("dave", models[0], samples=2).attribute(picture, ScoreSet(tuple(models[0].scores([0]))))
    word = ScoreSet(tuple(models[0].scores([1])))
    calls.clear()
    assert torch.equal(create_method("dave", models[0], samples=2).attribute(picture, word), fresh)
    assert len(calls) == 3  # two on the clean image and one of both views


def test_scores_of_other_computations_are_checked_by_themselves(answered):
    model = answered("LLaVA")
    first, second = model.scores([0])[0], model.score(1)
    assert first.computation != second.computation  # against rivals, and the logit
    assert ScoreSet((first, lambda output: output.logits[:, -1, 0])).computation is None
