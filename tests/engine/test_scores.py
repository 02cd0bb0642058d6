"""Any score of any output: what the model returns reaches the score as it is, and every method explains it."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import dave_vit
import tiny_models
from dave_vit import METHODS, conservation_gap, create_method, effective_transformation
from dave_vit.engine import scores
from dave_vit.engine import soundness as sound
from dave_vit.errors import OptionError, OutputError, TargetError, UnsupportedOperator
from dave_vit.neighborhood import Neighborhood, Spatial

X = tiny_models.images(2, torch.float64)
FEW = {"samples": 2}, {"steps": 2}
OPTIONS = dict.fromkeys(["dave", "equivariant", "smoothgrad"], FEW[0]) | dict.fromkeys(
    ["integrated_gradients", "iia"], FEW[1]
)
OPTIONS |= {name: few | tiny_models.OF_THE_LOGIT.get(name, {}) for name, few in tiny_models.HIDING.items()}
OPTIONS["dave"] = {"samples": 2, "preset": "threshold"}  # the default sets classes against their rivals


@pytest.fixture(scope="module")
def classifier() -> nn.Module:
    return tiny_models.huggingface_vit().double()


class Returning(nn.Module):
    """A model whose output is put into another form."""

    def __init__(self, model: nn.Module, form) -> None:
        super().__init__()
        self.model, self.form = model, form

    def forward(self, x: torch.Tensor):
        return self.form(self.model(x))


# Finer-CAM compares a class with similar ones, which a score does not have.
@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("bcos", "finercam", "tam")])
def test_every_method_explains_a_score_of_the_output_object(name, classifier):
    method = create_method(name, classifier, **OPTIONS.get(name, {}))
    scored = method.explain(X, lambda out: out.logits[:, 1])
    assert scored.target is None
    torch.testing.assert_close(scored.attribution, method.attribute(X, 1))


@pytest.mark.parametrize(
    ("form", "score"),
    [
        (lambda out: out.logits, lambda out: out[:, 1]),
        (lambda out: {"a": {"b": out.logits}}, lambda out: out["a"]["b"][:, 1]),
        (lambda out: (out.logits, None), lambda out: out[0][:, 1]),
        (
            lambda out: [{"scores": row} for row in out.logits.unbind()],
            lambda out: torch.stack([each["scores"][1] for each in out]),
        ),
    ],
    ids=["tensor", "dict", "tuple", "list of dicts"],
)
def test_outputs_of_any_form(form, score, classifier):
    model = Returning(classifier, form)
    expected = effective_transformation(classifier, X, 1)
    torch.testing.assert_close(effective_transformation(model, X, score), expected)
    assert conservation_gap(model, X, score) < 1e-9


def test_a_norm_in_the_score_is_held_and_probabilities_are_refused(classifier):
    def cosine(out):
        return out.logits[:, 0] / out.logits.norm(dim=1)

    assert conservation_gap(classifier, X, cosine) < 1e-9
    with pytest.raises(UnsupportedOperator, match="softmax"):
        effective_transformation(classifier, X, lambda out: out.logits.softmax(1)[:, 0])
    # Ordinary gradients hold nothing.
    leaf = X.clone().requires_grad_()
    (plain,) = torch.autograd.grad(cosine(classifier(leaf)).sum(), leaf)
    torch.testing.assert_close(create_method("input_x_gradient", classifier).attribute(X, cosine), plain * X)


def test_what_is_no_score_is_one_clear_line(classifier):
    for wrong, message in [(lambda out: out.logits, "one number per image"), (lambda out: 3.0, "returned float")]:
        with pytest.raises(TargetError, match=message):
            effective_transformation(classifier, X, wrong)
    with pytest.raises(OutputError, match="function of its output"):
        effective_transformation(Returning(classifier, lambda out: (out.logits,)), X, 1)


def test_public_name():
    assert dave_vit.scores is scores


class Heads(nn.Module):
    """Outputs of all kinds, linear in the image."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.Conv2d(3, 4, 4, stride=4)
        self.tokens = nn.Linear(64, 5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        maps = self.maps(x)  # [B, 4, 8, 8]
        return {"maps": maps, "logits": self.tokens(maps.flatten(2)), "embeddings": maps.mean((2, 3))}


HEADS = tiny_models.drawn(Heads()).double()


def test_helpers_read_what_they_say():
    out = HEADS(X)
    logits = out["logits"]  # [B, 4, 5]
    assert torch.equal(scores.Token(3)(out), logits[:, -1, 3])
    assert torch.equal(scores.Token(3, position=1)(out), logits[:, 1, 3])
    assert torch.equal(scores.Query(2, 1)(out), logits[:, 2, 1])
    assert torch.equal(scores.ClassLogit(2)(out["embeddings"]), out["embeddings"][:, 2])
    assert torch.equal(scores.Value(1)(out["embeddings"]), out["embeddings"][:, 1])
    torch.testing.assert_close(scores.Value()(out["maps"]), out["maps"].mean((1, 2, 3)))
    with pytest.raises(TargetError, match="token 5 is out of range; the model has 5, 0 to 4"):
        scores.Token(5)(out)
    with pytest.raises(OutputError, match=r"\[B, classes\]"):
        scores.ClassLogit(0)(out)
    with pytest.raises(OutputError, match="without logits"):
        scores.ClassLogit(0)(SimpleNamespace(hidden=logits))


def test_similarity_is_the_cosine_and_conserved():
    other = torch.randn(4, dtype=torch.float64)
    score = scores.Similarity(other)
    expected = torch.cosine_similarity(HEADS(X)["embeddings"], other[None])
    torch.testing.assert_close(score(HEADS(X)), expected)
    assert conservation_gap(HEADS, X, score) < 1e-9
    same = scores.Similarity.to_image(HEADS, X[:1])
    assert same(HEADS(X))[0].item() == pytest.approx(1.0)
    with pytest.raises(TargetError, match="an embedding of 3 numbers; the model returns 4"):
        scores.Similarity(other[:3])(HEADS(X))


def test_a_region_is_a_weighted_mean_of_its_class():
    maps = HEADS(X)["maps"]
    torch.testing.assert_close(scores.Region(2, box=(0, 0, 0.5, 0.25))(maps), maps[:, 2, :2, :4].mean((1, 2)))
    mask = torch.zeros(32, 32)
    mask[8:16, 24:] = 1
    torch.testing.assert_close(scores.Region(1, mask=mask)(maps), maps[:, 1, 2:4, 6:].mean((1, 2)))
    half = scores.Region(0, box=(0, 0, 1 / 16, 1))(maps)  # half of the first column's width
    torch.testing.assert_close(half, maps[:, 0, :, 0].mean(1))
    for wrong in ({}, {"box": (0, 0, 1, 1), "mask": mask}, {"box": (0.5, 0, 0.2, 1)}, {"box": (0, 0, 20, 20)}):
        with pytest.raises(OptionError):
            scores.Region(0, **wrong)


def test_a_region_moves_with_the_views():
    """A convolution sees what it looks at in every shifted view, so that nothing outside of the region gets a share."""
    shifts = Neighborhood(spatial=Spatial(flip=0, rotation=0, translation=0.3), pull_back="inverse")
    model = nn.Conv2d(3, 2, 1).double()
    region = scores.Region(1, box=(0.25, 0.5, 0.5, 0.75))
    method = create_method("dave", model, samples=4, preset="paper", neighborhood=shifts, reducer="mean", chunk=3)
    attribution = method.attribute(X, region)
    torch.testing.assert_close(attribution, effective_transformation(model, X, region) * X)
    assert (attribution[..., 16:24, 8:16] != 0).all()


def test_a_detection_follows_its_box():
    class Detector(nn.Module):
        """Each quarter of the image is a query of its own."""

        def forward(self, x):
            logits = nn.functional.adaptive_avg_pool2d(x, 2).flatten(2).mT  # [B, 4, 3]
            at = torch.tensor([[0.25, 0.25], [0.75, 0.25], [0.25, 0.75], [0.75, 0.75]], dtype=x.dtype)
            boxes = torch.cat([at, torch.full_like(at, 0.5)], 1).expand(len(x), 4, 4)
            return SimpleNamespace(logits=logits, pred_boxes=boxes)

    flips = Neighborhood(spatial=Spatial(flip=1, rotation=0, translation=0))
    detection = scores.Detection(2, box=(0.5, 0.05, 0.95, 0.5))
    assert torch.equal(detection(Detector()(X)), scores.Query(1, 2)(Detector()(X)))
    for score, right in [(detection, True), (scores.Query(1, 2), False)]:  # a query does not follow
        actual = create_method("dave", Detector(), samples=1, neighborhood=flips, reducer="mean").attribute(X, score)
        assert (actual[:, 2, :16, 16:] != 0).all() == right
        assert (actual[:, 2, :16, :16] != 0).any() != right


class TestMemory:
    """A score may hold a model, and nobody else may keep both."""

    def held(self, make) -> list:
        model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).eval()
        score = make(model)
        effective_transformation(model, torch.rand(2, 3, 2, 2), score)
        gone = [weakref.ref(model), weakref.ref(getattr(score, "__self__", score))]
        del model, score
        gc.collect()
        return [each() for each in gone if each() is not None]

    def test_a_function_is_let_go(self):
        assert self.held(lambda model: lambda out: out[:, 0] * model[1].bias[0].detach()) == []

    def test_a_method_is_let_go(self):
        class Holder:
            def __init__(self, model):
                self.model = model

            def score(self, out):
                return out[:, 0]

        assert self.held(lambda model: Holder(model).score) == []

    def test_what_nobody_looks_at_again_is_forgotten(self):
        model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).eval()
        for column in range(3):
            effective_transformation(model, torch.rand(2, 3, 2, 2), lambda out, column=column: out[:, column])
            gc.collect()
        assert len({key[0] for key in sound._CHECKED[model]}) <= 1

    def test_a_method_of_an_object_is_known_again(self, monkeypatch):
        class Holder:
            def score(self, out):
                return out[:, 0]

        model, holder, looks = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).eval(), Holder(), []
        check = sound._SoundnessCheck.check
        monkeypatch.setattr(
            sound._SoundnessCheck, "check", lambda *args, **options: looks.append(1) or check(*args, **options)
        )
        for _ in range(3):
            effective_transformation(model, torch.rand(2, 3, 2, 2), holder.score)
        assert len(looks) == 1

    def test_a_score_without_a_hash_is_looked_at_each_time(self):
        @dataclass
        class Column:
            index: int

            def __call__(self, out):
                return out[:, self.index]

        model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).eval()
        weight = effective_transformation(model, torch.rand(2, 3, 2, 2), Column(1))
        torch.testing.assert_close(weight[0].flatten(), model[1].weight[1].detach())
