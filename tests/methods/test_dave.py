"""DAVE: draws, chunks, estimators, presets, and the recorded run of the authors' code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from dave_vit import DAVE, create_method, effective_transformation
from dave_vit.engine.fast.recorded_model import RecordedModel
from dave_vit.engine.gradient import gradient
from dave_vit.engine.rule_sets import EFFECTIVE, OFFICIAL_GATE
from dave_vit.errors import OptionError, TargetError, UnknownName
from dave_vit.maps import collapse
from dave_vit.methods.presets import PRESETS
from dave_vit.models import Traits
from dave_vit.neighborhood import Neighborhood, Noise, Spatial, Views, Warp, warp
from dave_vit.reduce import Mean, Shrinkage, SoftThreshold, TrimmedMean
from tiny_models import images as tiny_images
from tiny_models import vit


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return vit()


@pytest.fixture
def own() -> nn.Module:
    """A model for a test that changes it."""
    return vit()


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def assert_same(left: torch.Tensor, right: torch.Tensor) -> None:
    """Equal up to the rounding of differently batched matrix products."""
    torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-5 * float(right.abs().max()))


class TestSampling:
    @pytest.mark.parametrize("preset", ["default", "paper", "official"])
    @pytest.mark.parametrize("chunk", [1, 2, 5, 100])
    def test_the_chunk_does_not_matter(self, model, images, preset, chunk):
        whole = DAVE(model, samples=6, preset=preset, reducer=Mean()).attribute(images)
        assert_same(DAVE(model, samples=6, preset=preset, reducer=Mean(), chunk=chunk).attribute(images), whole)

    def test_the_other_images_do_not_matter(self, model, images):
        together = DAVE(model, samples=4).attribute(images)
        for index in range(3):
            assert_same(DAVE(model, samples=4).attribute(images[index : index + 1]), together[index : index + 1])
        assert_same(DAVE(model, samples=4).attribute(images.flip(0)), together.flip(0))

    def test_seeds(self, model, images):
        first, again = (DAVE(model, samples=3, seed=1).attribute(images) for _ in range(2))
        assert torch.equal(first, again)
        assert not torch.allclose(first, DAVE(model, samples=3, seed=2).attribute(images))

    def test_global_generator_neither_read_nor_moved(self, model, images):
        torch.manual_seed(1)
        before = torch.get_rng_state()
        first = DAVE(model, samples=3).attribute(images)
        assert torch.equal(before, torch.get_rng_state())
        torch.manual_seed(2)
        assert torch.equal(first, DAVE(model, samples=3).attribute(images))

    def test_definition(self, model, images):
        """Eq. (8) and (9), one view after another."""
        neighborhood = PRESETS["paper"](model).neighborhood
        total = torch.zeros_like(images)
        for index in range(4):
            views = neighborhood.views((3, 32, 32), samples=4, seed=0, start=index, stop=index + 1)
            weight = effective_transformation(model, views.apply(images)[0], 2)
            total += views.pull_back(weight[None])[0]
        assert_same(DAVE(model, samples=4, preset="paper").attribute(images, 2), total / 4 * images)

    def test_no_neighborhood_is_the_effective_transformation(self, model, images):
        still = Neighborhood(Spatial(flip=0.0, rotation=0.0, translation=0.0), Noise("none"))
        attribution = DAVE(model, samples=3, preset="paper", neighborhood=still).attribute(images, 1)
        assert_same(attribution, create_method("effective", model).attribute(images, 1))

    def test_equivariant_is_dave_without_noise(self, model, images):
        silent = DAVE(model, samples=4, preset="paper", noise="none").attribute(images, 1)
        assert torch.equal(create_method("equivariant", model, samples=4).attribute(images, 1), silent)

    def test_flip_equivariance(self, images):
        """A model that knows no position: the map of the mirrored image is the mirrored map."""
        model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
        with torch.no_grad():
            model[0].weight += model[0].weight.flip(3)
        mirrored = Neighborhood(Spatial(flip=1.0, rotation=0.0, translation=0.0), Noise("none"))
        attribution = DAVE(model, samples=1, preset="paper", neighborhood=mirrored).attribute(images, 0)
        assert_same(attribution, create_method("effective", model).attribute(images, 0))


class TestInterface:
    def test_target_is_resolved_on_the_clean_image(self, model, images):
        explanation = DAVE(model, samples=2).explain(images)
        assert torch.equal(explanation.target, model(images).argmax(1))
        assert_same(explanation.attribution, DAVE(model, samples=2).attribute(images, explanation.target))

    def test_several_targets(self, model, images):
        target = torch.tensor([[0, 1], [2, 3], [4, 0]])
        explanation = DAVE(model, samples=3, chunk=4).explain(images, target)
        assert explanation.attribution.shape == (3, 2, 3, 32, 32)
        assert explanation.standard_error.shape == (3, 2, 32, 32)
        for column in range(2):
            assert_same(explanation.attribution[:, column], DAVE(model, samples=3).attribute(images, target[:, column]))

    def test_refine_ends_where_explain_does(self, model, images):
        dave = DAVE(model, samples=5, chunk=6)
        steps = list(dave.refine(images, 0))
        assert [step.samples for step in steps] == [2, 4, 5]
        final = dave.explain(images, 0)
        assert_same(steps[-1].attribution, final.attribution)
        assert_same(steps[-1].standard_error, final.standard_error)

    @pytest.mark.parametrize("channels", [1, 5, 6])
    def test_channels(self, channels):
        model, images = vit(in_chans=channels), torch.randn(2, channels, 32, 32)
        assert DAVE(model, samples=2).attribute(images).shape == images.shape

    def test_sizes_follow_the_model(self):
        model = vit(img_size=(24, 40), dynamic_img_size=True)
        for size in ((24, 40), (32, 16)):
            images = torch.randn(1, 3, *size)
            assert DAVE(model, samples=2).attribute(images).shape == images.shape
        conv = nn.Sequential(nn.Conv2d(3, 4, 5, stride=3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        assert DAVE(conv, samples=2).attribute(torch.randn(1, 3, 37, 29)).shape == (1, 3, 37, 29)

    def test_float64(self, own, images):
        attribution = DAVE(own.double(), samples=2).attribute(images.double())
        assert attribution.dtype == torch.float64

    def test_a_chunk_too_large_for_memory_is_halved(self, model, images, monkeypatch):
        expected = DAVE(model, samples=6, chunk=18).attribute(images, 0)
        sizes = []

        def limited(lean, inputs, target, rules, once):
            sizes.append(len(inputs))
            if len(inputs) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
            return gradient(lean.model, inputs, target, rules=rules)

        monkeypatch.setattr(RecordedModel, "gradient", limited)
        assert_same(DAVE(model, samples=6, chunk=18).attribute(images, 0), expected)
        assert sizes[:3] == [18, 9, 4]

    def test_refined_steps_survive_the_halving(self, model, images, monkeypatch):
        expected = DAVE(model, samples=6, chunk=6).attribute(images, 0)

        def limited(lean, inputs, target, rules, once):
            if len(inputs) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
            return gradient(lean.model, inputs, target, rules=rules)

        monkeypatch.setattr(RecordedModel, "gradient", limited)
        steps = list(DAVE(model, samples=6, chunk=6).refine(images, 0))
        assert [step.samples for step in steps] == [2, 4, 6]
        assert_same(steps[-1].attribution, expected)

    def test_draws_are_kept_for_one_shape(self, model, images):
        model = vit(dynamic_img_size=True)
        dave = DAVE(model, samples=3, chunk=4)
        for inputs in (images, images[:1], images[..., :24, :], images):  # cut into other chunks, and another shape
            assert torch.equal(dave.attribute(inputs, 0), DAVE(model, samples=3, chunk=4).attribute(inputs, 0))

    def test_where_pixels_are_read_is_computed_once(self, model, images, monkeypatch):
        made, compute = [], warp._points
        monkeypatch.setattr(warp, "_points", lambda *args: made.append(1) or compute(*args))
        dave = DAVE(model, samples=7, preset="paper", chunk=4)
        first = dave.attribute(images[:1], 0)
        assert made
        made.clear()
        assert torch.equal(dave.attribute(images[:1], 0), first)
        dave.attribute(images[:2], 0)  # cut into other chunks
        assert not made

    def test_compiled_graphs_know_classes_only(self, model, images):
        with pytest.raises(TargetError, match="leave compiled out"):
            DAVE(model, samples=2, compiled=True).attribute(images, lambda logits: logits[:, 0])

    def test_other_errors_are_not_swallowed(self, model, images, monkeypatch):
        def broken(*args, **options):
            raise RuntimeError("broken kernel")

        monkeypatch.setattr(RecordedModel, "gradient", broken)
        with pytest.raises(RuntimeError, match="broken kernel"):
            DAVE(model, samples=2).attribute(images, 0)

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"samples": 0}, OptionError, "at least 1"),
            ({"chunk": 0}, OptionError, "at least 1"),
            ({"limit": 0}, OptionError, "limit is 0"),
            ({"samples": "auto", "limit": 0}, OptionError, "limit is 0"),
            ({"against": "foo"}, OptionError, "against 'foo'; expected one of rivals, none"),
            ({"rotate": 3}, OptionError, "no option 'rotate'"),
            ({"preset": "papers"}, UnknownName, "paper"),
            ({"reducer": "meen"}, UnknownName, "mean"),
        ],
    )
    def test_options(self, model, options, error, message):
        with pytest.raises(error, match=message):
            DAVE(model, **options)

    @pytest.mark.parametrize("option", [{"noise_level": 0.2}, {"noise": "additive"}, {"schedule": "uniform"}])
    def test_equivariant_takes_no_noise(self, model, option):
        with pytest.raises(OptionError, match=f"takes no {next(iter(option))}"):
            create_method("equivariant", model, **option)

    def test_target_out_of_range(self, model, images):
        with pytest.raises(TargetError, match="0 to 4"):
            DAVE(model, samples=2).attribute(images, 5)

    def test_unknown_method_and_option(self, model):
        with pytest.raises(UnknownName, match="did you mean dave"):
            create_method("dav", model)
        with pytest.raises(OptionError, match="steps"):
            create_method("effective", model, steps=3)


class TestPresets:
    def test_paper(self, model):
        dave = DAVE(model, preset="paper")
        spatial = Spatial(flip=0.5, rotation=20.0, scale=(1.0, 1.0), translation=0.1, wrap=True)
        noise = Noise("variance_preserving", 0.5, "uniform")
        assert dave.neighborhood == Neighborhood(spatial, noise, noise_first=True, pull_back="inverse")
        assert dave.reducer == Mean()
        assert dave.samples == 50
        assert dave.rules is EFFECTIVE
        assert dave.postprocess is None

    @pytest.mark.parametrize(("name", "level"), [("deit3_base_patch16_224", 0.9), ("vit_small_patch16_224", 0.1)])
    def test_official(self, own, name, level):
        own.default_cfg = {"architecture": name}
        dave = DAVE(own, preset="official")
        spatial = Spatial(flip=0.5, rotation=20.0, scale=(0.9, 1.1), translation=0.1, wrap=False)
        noise = Noise("variance_preserving", level, "linspace")
        assert dave.neighborhood == Neighborhood(spatial, noise, noise_first=False, pull_back="adjoint")
        assert dave.reducer == TrimmedMean(2.5)
        assert dave.rules is OFFICIAL_GATE

    def test_official_map_is_post_processed_but_the_attribution_is_not(self, model, images):
        explanation = DAVE(model, samples=3, preset="official").explain(images)
        assert explanation.attribution.min() < 0
        assert explanation.map.min() >= 0
        assert explanation.map.amax((1, 2)).allclose(torch.ones(3))

    def test_switches(self, model):
        dave = DAVE(model, preset="paper", rotation=5.0, noise_level=0.2, pull_back="adjoint", reducer="shrinkage")
        assert dave.neighborhood.spatial.rotation == 5.0
        assert dave.neighborhood.noise.level == 0.2
        assert dave.neighborhood.pull_back == "adjoint"
        assert dave.reducer == Shrinkage()

    def test_a_model_may_recommend_its_noise(self, own):
        own.traits = Traits(noise=Noise("additive", 0.2), fill=0.5)
        assert DAVE(own, preset="paper").neighborhood.noise == Noise("additive", 0.2)
        assert DAVE(own, preset="paper").neighborhood.fill == 0.5

    @pytest.mark.parametrize("preset", ["default", "paper", "official"])
    def test_a_users_own_attributes_are_not_taken_for_traits(self, own, preset):
        usual = DAVE(own, preset=preset).neighborhood
        own.fill, own.noise, own.traits = 0.7, Noise("additive", 0.2), {"fill": 0.7}
        assert DAVE(own, preset=preset).neighborhood == usual

    def test_estimators_only_shrink(self, model, images):
        mean = collapse(DAVE(model, samples=8, reducer=Mean()).attribute(images, 0))
        for reducer in (Shrinkage(), SoftThreshold(1.0), SoftThreshold(2.0)):
            shrunk = collapse(DAVE(model, samples=8, reducer=reducer).attribute(images, 0))
            assert (shrunk.abs() <= mean.abs() + 1e-6).all()
            assert (shrunk * mean >= -1e-9).all()


@pytest.mark.realdata
class TestAgainstTheAuthorsCode:
    def test_effective_transformation(self, deit_tiny, oracle_dir):
        inputs = np.load(oracle_dir / "inputs.npz")
        for pair in ("p0_t991", "pm_t386"):
            key, target = pair.split("_t")
            expected = torch.tensor(np.load(oracle_dir / f"full_{pair}.npz")["dave_W"])
            image = torch.tensor(inputs[f"x/{key}"])[None]
            weight = effective_transformation(deit_tiny, image, int(target))[0]
            assert (weight - expected).norm() / expected.norm() < 1e-4
            assert (weight - expected).abs().max() / expected.abs().max() < 1e-4

    @pytest.mark.parametrize(
        "pair",
        "p1_t852 p2_t861 p3_t781 p4_t551 p5_t753 p6_t19 p7_t264 pm_t340".split(),
    )
    def test_patch_sums_of_all_other_pairs(self, deit_tiny, oracle_dir, pair):
        key, target = pair.split("_t")
        image = torch.tensor(np.load(oracle_dir / "inputs.npz")[f"x/{key}"])[None]
        expected = torch.tensor(np.load(oracle_dir / "patchsums_f32.npz")[f"dave_Wx/{pair}"])
        attribution = create_method("effective", deit_tiny).attribute(image, int(target))[0]
        sums = attribution.unflatten(2, (14, 16)).unflatten(1, (14, 16)).sum((2, 4))
        assert (sums - expected).norm() / expected.norm() < 1e-4

    def test_recorded_run(self, deit_tiny, oracle_dir):
        """Four steps of the authors' pipeline from its recorded draws, stage by stage."""
        record = np.load(oracle_dir / "dave_pipeline_p0_t991.npz")
        image = torch.tensor(np.load(oracle_dir / "inputs.npz")["x/p0"])[None]
        noise = [
            torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(int(seed)))
            for seed in record["seeds"][1::2]
        ]
        matrices = torch.tensor(record["mats"]).double().reshape(4, 3, 3)
        dave = DAVE(deit_tiny, samples=4, preset="official")
        views = Views(
            Warp(matrices, torch.zeros(4, 2, dtype=torch.int64)),
            torch.tensor(record["t"]),
            torch.cat(noise),
            dave.neighborhood,
        )
        seen = views.apply(image)
        assert (seen[:, 0] - torch.tensor(record["x_t"]).reshape(4, 3, 224, 224)).abs().max() < 2e-4
        weight = effective_transformation(deit_tiny, seen[:, 0], 991, rules=dave.rules)
        pulled = views.pull_back(weight[:, None])
        grads = torch.tensor(record["grads"]).reshape(4, 3, 224, 224)
        assert (pulled[:, 0] - grads).norm() / grads.norm() < 1e-3
        accumulator = dave.reducer.accumulator()
        accumulator.update(pulled * image)
        attribution = accumulator.attribution()
        agg, out = torch.tensor(record["agg"]), torch.tensor(record["out"])
        assert torch.cosine_similarity(attribution.flatten(), agg.flatten(), 0) > 0.999
        final = dave.postprocess(collapse(attribution))
        assert torch.cosine_similarity(final.flatten(), out.flatten(), 0) > 0.9999


# Nine values, and the sums of the sizes of attribution, map and standard error, from before the default changed.
RECORDED = {
    "paper": (
        [0, -1.437570603e-7, -2.063734004e-4, 1.090900859e-4, 0, -1.588613185e-5, -4.625370569e-5, -3.836598082e-4, 0],
        [0.5399945703473085, 0.34108972702627155, 0.3935032466226073],
    ),
    "official": (
        [0.0, 0.0, -5.781826066292e-06, 0.0, 0.0, 0.0, -8.735226090953e-07, 0.0, 0.0],
        [0.3123107692664159, 278.5154818363036, 0.25536919012996706],
    ),
    "threshold": (
        [0.0, 0.0, 0.0, 1.047084732914e-06, 0.0, 0.0, 0.0, -7.449561917256e-05, 0.0],
        [0.03444385797162661, 0.03058854304104196, 0.39314796351899406],
    ),
}


@pytest.mark.parametrize("preset", RECORDED)
def test_what_was_published_does_not_change(preset):
    images = tiny_images(2, torch.float64)
    found = DAVE(vit().double(), samples=4, preset=preset, seed=3).explain(images, [1, 4])
    values, sums = RECORDED[preset]
    flat = found.attribution.flatten()
    at = torch.linspace(0, len(flat) - 1, 9).long()
    torch.testing.assert_close(flat[at], torch.tensor(values, dtype=torch.float64), rtol=1e-9, atol=1e-15)
    sizes = [part.abs().sum() for part in (found.attribution, found.map, found.standard_error)]
    torch.testing.assert_close(torch.stack(sizes), torch.tensor(sums, dtype=torch.float64), rtol=1e-12, atol=0)
