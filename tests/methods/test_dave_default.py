"""The default of DAVE: against rivals, relevance, weighted views, a neighbourhood that fits, samples as needed."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import tiny_models
from dave_vit import DAVE, Contrast, effective_transformation
from dave_vit.engine.fast.recorded_model import RecordedModel
from dave_vit.engine.forward import count_passes
from dave_vit.engine.rule_sets import EFFECTIVE, RELEVANCE
from dave_vit.engine.targets import Target
from dave_vit.errors import OptionError, UnknownName
from dave_vit.methods.clean_evidence import CleanEvidence, keep_target
from dave_vit.methods.pass_size import PassSize
from dave_vit.methods.presets import LEVELS, PRESETS
from dave_vit.models import Traits
from dave_vit.neighborhood import Neighborhood, Noise, Spatial
from dave_vit.reduce import Mean, Sharpened, Significant, SoftThreshold
from fast_marker import needs_fast

X = tiny_models.images(3, torch.float64)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_models.vit().double()


@pytest.fixture
def own() -> nn.Module:
    """A model for a test that changes it."""
    return tiny_models.vit().double()


def same(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12 * float(right.abs().max()))


class Fragile(nn.Module):
    """A model that knows clean pictures only: it turns against its class where a picture's energy changes.

    Flips and wrapped shifts keep the energy, a rotation loses much of it, noise little.
    """

    def __init__(self, model: nn.Module, fragile: list[float]) -> None:
        super().__init__()
        self.model, self.fragile = model, torch.tensor(fragile)
        self.energy = MIXED.square().mean((1, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        energy = x.detach().square().mean((1, 2, 3), keepdim=True)[:, 0, 0]  # [B, 1]
        which = (energy / self.energy).log().abs().argmin(1)  # the three differ by far more than a view changes one
        away = (energy[:, 0] / self.energy[which] - 1).abs()
        return self.model(x) * (6 * torch.exp(-self.fragile.to(x)[which] * away) - 3).unsqueeze(1)


MIXED = X * torch.tensor([1.0, 4.0, 16.0], dtype=torch.float64).view(3, 1, 1, 1)


def fragile_model(model: nn.Module, fragile: list[float]) -> Fragile:
    made = Fragile(model, fragile).eval()
    made.traits = Traits(patch=8, compete=True)
    return made


class TestDefinition:
    @pytest.mark.parametrize("preset", ["default", "exact"])
    def test_one_view_after_another(self, model, preset):
        """Weights, contrast and reducer by hand, from the views' own passes."""
        chosen = PRESETS[preset](model)
        logits = model(X).detach()
        classes = torch.tensor([0, 1, 2])
        target = Target.of(Contrast(classes, "rivals"), 3).resolve(logits)
        clean = (
            [CleanEvidence(DAVE(model), chosen.rules).compute(X, target, PassSize(20), keep_target)[0][:, 0]]
            if preset == "default"
            else []
        )
        accumulator = chosen.reducer.accumulator(*clean)
        for index in range(5):
            views = chosen.neighborhood.views(
                (3, 32, 32), samples=5, seed=0, start=index, stop=index + 1, dtype=torch.float64
            )
            seen = views.apply(X)[0]
            weight = effective_transformation(model, seen, target, rules=chosen.rules)
            share = model(seen).softmax(1)[torch.arange(3), classes].detach()
            accumulator.update(views.pull_back(weight[None]) * X, share[None])
        found = DAVE(model, samples=5, preset=preset).explain(X, classes)
        same(found.attribution, accumulator.attribution())
        same(found.standard_error, accumulator.standard_error())
        assert torch.equal(found.significant, accumulator.significant())
        assert found.against == ("rivals",) * 3

    def test_presets(self, model):
        default, exact, before = (PRESETS[name](model) for name in ("default", "exact", "threshold"))
        assert default.rules is RELEVANCE
        assert exact.rules is EFFECTIVE
        assert default.neighborhood == Neighborhood(Spatial(rotation=10.0, translation=0.1), Noise(level=0.05))
        assert [narrow.spatial.rotation for narrow in default.narrower] == [0.0, 0.0]
        assert default.narrower[1].noise.is_silent
        assert (default.samples, exact.samples) == (20, 28)
        assert (default.reducer, exact.reducer) == (Sharpened(2.0, 8), Significant(2.0, 8))
        assert before.reducer == SoftThreshold(2.0)
        assert before.neighborhood == Neighborhood(Spatial(), Noise(level=0.3))
        assert (before.samples, before.narrower, before.weighted, before.against) == (50, (), False, "none")

    def test_samples_are_the_presets_own_unless_said(self, model):
        assert [DAVE(model, preset=name).limit for name in PRESETS] == [20, 28, 50, 50, 50]
        assert DAVE(model, 16).samples == DAVE(model, samples=16, preset="paper").samples == 16
        assert DAVE(model, samples="auto", limit=12).limit == 12

    def test_a_models_own_noise_keeps_its_proportion(self, own):
        own.traits = Traits(noise=Noise("additive", 0.2), fill=0.5)
        noise = [each.noise for each in (PRESETS["default"](own).neighborhood, *PRESETS["default"](own).narrower)]
        assert [each.kind for each in noise] == ["additive"] * 3
        assert [round(each.level, 4) for each in noise] == [0.0333, 0.0333, 0.0]

    def test_patches_are_the_models_own(self):
        conv = nn.Sequential(nn.Conv2d(3, 4, 5, stride=3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        assert PRESETS["default"](conv).reducer.patch == 16.0
        assert PRESETS["default"](tiny_models.vit()).reducer.patch == 8

    def test_switches_and_neighborhoods_are_meant(self, model):
        assert DAVE(model, rotation=5).narrower == ()
        assert DAVE(model, neighborhood=Neighborhood()).narrower == ()
        assert len(DAVE(model).narrower) == len(LEVELS) - 1

    @pytest.mark.parametrize(
        ("options", "message"),
        [({"samples": "many"}, "'auto'"), ({"samples": 2.5}, "2.5"), ({"samples": "auto", "limit": -1}, "limit is -1")],
    )
    def test_refusals(self, model, options, message):
        with pytest.raises(OptionError, match=message):
            DAVE(model, **options)


class TestAgainst:
    def test_a_contrast_of_ones_own_takes_precedence(self, model):
        dave = DAVE(model, samples=3)
        found = dave.explain(X, Contrast([0, 1, 2], [3, 3, 3]))
        assert found.against == (3, 3, 3)
        alone = dave.explain(X, Contrast([0, 1, 2]))
        assert alone.against is None
        same(alone.attribution, DAVE(model, samples=3, against="none").attribute(X, [0, 1, 2]))
        assert not torch.allclose(alone.attribution, found.attribution)
        same(dave.attribute(X, [0, 1, 2]), dave.attribute(X, Contrast([0, 1, 2], "rivals")))

    def test_classes_that_do_not_compete_stand_for_themselves(self, own):
        expected = DAVE(own, samples=3, against="none", weighted=False).attribute(X, [0, 1, 2])
        own.traits = Traits(compete=False)
        found = DAVE(own, samples=3, weighted=False).explain(X, [0, 1, 2])
        assert found.against is None
        same(found.attribution, expected)

    def test_whether_they_compete_shows_in_the_logits(self, own):
        with torch.no_grad():
            own.head.bias -= 8  # as after training with sigmoids: nearly all far below zero
        found = DAVE(own, samples=3).explain(X, [0, 1, 2])
        assert found.against is None
        weights = torch.stack([v.sigmoid() for v in (own(X)[torch.arange(3), [0, 1, 2]],)])
        assert weights.max() < 0.1

    def test_one_output_has_no_rivals(self):
        model = tiny_models.vit(num_classes=1).double()
        found = DAVE(model, samples=3).explain(X)
        assert found.against is None
        assert found.attribution.isfinite().all()

    def test_a_score_function_stands_for_itself(self, model):
        found = DAVE(model, samples=3).explain(X, lambda logits: logits[:, 1])
        assert found.against is None
        same(found.attribution, DAVE(model, samples=3, against="none", weighted=False).attribute(X, 1))


@pytest.fixture(scope="module")
def mixed(model):
    return fragile_model(model, [0.0, 4.0, 1000.0])


class TestNeighborhood:
    """Images of one batch on different neighbourhood levels."""

    def test_views_that_leave_the_distribution_narrow_it(self, mixed):
        found = DAVE(mixed, samples=10).explain(MIXED)
        assert found.neighborhood_level.tolist() == [0, 1, 2]

    def test_it_is_half_of_the_predicted_classes_probability(self, mixed):
        dave = DAVE(mixed, samples=10)
        predicted, clean = mixed(MIXED).softmax(1).max(1).indices, mixed(MIXED).softmax(1).max(1).values
        for image, level in enumerate(dave.explain(MIXED, 0).neighborhood_level.tolist()):
            for step, around in enumerate((dave.neighborhood, *dave.narrower)[: level + 1]):
                views = around.views((3, 32, 32), samples=10, stop=8, dtype=torch.float64)
                seen = mixed(views.apply(MIXED[image : image + 1])[:, 0]).softmax(1)[:, predicted[image]]
                assert (seen.mean() >= 0.5 * clean[image]) == (step == level) or level == 2

    def test_a_rung_is_the_map_of_its_neighborhood(self, mixed):
        dave = DAVE(mixed, samples=10)
        found = dave.explain(MIXED, [0, 1, 2])
        for image, level in enumerate(found.neighborhood_level.tolist()):
            around = (dave.neighborhood, *dave.narrower)[level]
            alone = DAVE(mixed, samples=10, neighborhood=around).attribute(MIXED[image : image + 1], image)
            same(found.attribution[image : image + 1], alone)

    @pytest.mark.parametrize("options", [{"samples": 4}, {"samples": "auto", "limit": 20}])
    def test_batch_chunk_and_target_do_not_matter(self, mixed, options):
        whole = DAVE(mixed, chunk=100, **options).explain(MIXED, [0, 1, 2])
        for chunk in (1, 7):
            found = DAVE(mixed, chunk=chunk, **options).explain(MIXED, [0, 1, 2])
            assert torch.equal(found.neighborhood_level, whole.neighborhood_level)
            assert torch.equal(found.drawn, whole.drawn)
            same(found.attribution, whole.attribution)
            same(found.standard_error, whole.standard_error)
        for image in range(3):
            alone = DAVE(mixed, **options).explain(MIXED[image : image + 1], image)
            assert alone.neighborhood_level[0] == whole.neighborhood_level[image]
            assert alone.drawn[0] == whole.drawn[image]
            same(alone.attribution, whole.attribution[image : image + 1])
        assert torch.equal(DAVE(mixed, **options).explain(MIXED, 4).neighborhood_level, whole.neighborhood_level)
        several = DAVE(mixed, **options | {"samples": 10}).explain(MIXED, [[0, 4], [1, 4], [2, 4]])
        same(several.attribution[:, 0], DAVE(mixed, samples=10).attribute(MIXED, [0, 1, 2]))
        assert several.significant.shape == (3, 2)

    @needs_fast
    def test_only_forms_of_input_that_come_again_are_recorded(self, mixed, monkeypatch):
        rows, record = [], RecordedModel._record
        monkeypatch.setattr(RecordedModel, "_record", lambda self, x: rows.append(len(x)) or record(self, x))
        DAVE(deepcopy(mixed), chunk=200).explain(MIXED, 0)
        assert rows == [3 * 20]  # not the views of one image or two, which left or stayed

    def test_refined_steps_show_all_images_and_end_where_explain_does(self, mixed):
        dave = DAVE(mixed, samples=12, chunk=6)
        steps = list(dave.refine(MIXED, [0, 1, 2]))
        assert all(step.attribution.shape == MIXED.shape for step in steps)
        final = dave.explain(MIXED, [0, 1, 2])
        same(steps[-1].attribution, final.attribution)
        assert torch.equal(steps[-1].neighborhood_level, final.neighborhood_level)
        assert final.samples == 12

    def test_the_first_views_are_used_where_they_fit(self, own):
        rows: list[int] = []
        own.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
        dave = DAVE(own, samples=10)
        dave.attribute(X)  # the own is looked into before its first map
        rows.clear()
        dave.attribute(X)
        assert sum(rows) == 3 * (2 + 10)  # two sets of rules on the clean image, the views


class TestAuto:
    def test_stops_where_the_map_has_settled(self, model):
        found = DAVE(model, samples="auto", limit=24, reducer=Mean(), rotation=0, noise_level=0.0).explain(X, 0)
        for image, drawn in enumerate(found.drawn.tolist()):
            for count in range(8, 25, 4):
                short = DAVE(model, samples=count, reducer=Mean(), rotation=0, noise_level=0.0)
                made = short.explain(X[image : image + 1], 0)
                share = made.standard_error.square().sum() / made.attribution.sum(1).square().sum()
                assert (share <= 0.1 or count == 24) == (count >= drawn) or count > drawn
                if count == drawn:
                    same(found.attribution[image : image + 1], made.attribution)

    def test_still_views_settle_at_once(self, model):
        still = Neighborhood(Spatial(flip=0.0, rotation=0.0, translation=0.0), Noise("none"))
        found = DAVE(model, samples="auto", neighborhood=still).explain(X)
        assert found.drawn.tolist() == [8, 8, 8]
        assert found.samples == 8

    def test_the_limit_is_kept(self, model):
        found = DAVE(model, samples="auto", limit=11, preset="paper").explain(X)
        assert found.drawn.max() <= 11
        assert DAVE(model, samples="auto", limit=3).explain(X).drawn.tolist() == [3, 3, 3]


class TestPresetFiles:
    def test_are_presets(self, model, tmp_path):
        path = tmp_path / "mine.toml"
        path.write_text(
            'base = "default"\nsamples = 12\n[neighborhood]\nrotation = 3.0\nnoise_level = 0.02\nscale = [0.9, 1.1]\n'
        )
        dave = DAVE(model, preset=str(path))
        assert dave.samples == 12
        assert dave.neighborhood.spatial == Spatial(rotation=3.0, translation=0.1, scale=(0.9, 1.1))
        assert dave.neighborhood.noise.level == 0.02
        assert dave.narrower == ()
        assert dave.rules is RELEVANCE

    @pytest.mark.parametrize(
        ("text", "error", "message"),
        [
            ("rotation = 3", OptionError, "rotation"),
            ("samples = 0", OptionError, "at least 1"),
            ("[neighborhood]\nturn = 3", OptionError, "no option 'turn'"),
            ('base = "defalt"', UnknownName, "default"),
            ("samples = ", OptionError, "mine.toml"),
        ],
    )
    def test_wrong_ones_are_one_line(self, model, tmp_path, text, error, message):
        path = tmp_path / "mine.toml"
        path.write_text(text)
        with pytest.raises(error, match=message) as caught:
            DAVE(model, preset=str(path))
        assert "\n" not in str(caught.value)

    def test_a_missing_one_is_one_line(self, model):
        with pytest.raises(OptionError, match=r"nowhere\.toml") as caught:
            DAVE(model, preset="nowhere.toml")
        assert "\n" not in str(caught.value)


def test_two_passes_on_the_clean_image_and_one_for_each_view():
    model = tiny_models.vit().double()
    with torch.no_grad():
        model.head.weight.mul_(1e-3)  # the probabilities survive all views, so that none is drawn anew
    dave = DAVE(model, samples=5)
    dave.explain(X, 0)
    for target in (None, 0):
        with count_passes() as count:
            dave.explain(X, target)
        assert count.passes == len(X) * (2 + 5)
