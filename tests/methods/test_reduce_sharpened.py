"""Significant evidence sharpened by the clean image, against a slow numpy version of its definition."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from test_reduce_significant import gaussian, moments

import tiny_models
from dave_vit import DAVE, create_method
from dave_vit.engine.fast.compiled import CompiledGradient, RecordedGradient
from dave_vit.engine.forward import count_passes
from dave_vit.engine.gradient import gradient
from dave_vit.engine.rule_sets import ATTENTION_RELEVANCE, EFFECTIVE, RELEVANCE
from dave_vit.engine.targets import Target
from dave_vit.errors import InputError, UnsupportedOperator
from dave_vit.methods import clean_evidence
from dave_vit.methods.clean_evidence import CleanEvidence, keep_target
from dave_vit.methods.constants import sum_channels
from dave_vit.methods.pass_size import PassSize
from dave_vit.reduce import Sharpened, Significant, significant
from dave_vit.reduce.significant import average_patches, smooth_patches

SIZE, PATCH = (12, 10), 4


def compute_clean_evidence(method, images, target, rules, rows):
    return CleanEvidence(method, rules).compute(images, target, rows, keep_target)[0]


def samples(n=12, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    signal = torch.zeros(SIZE, dtype=torch.float64)
    signal[:, :4], signal[8:, 6:] = 1.5, -3.0
    return signal + torch.randn(n, batch, 3, *SIZE, generator=generator, dtype=torch.float64)


def clean(batch=2, seed=1):
    return torch.randn(batch, 2, 2, *SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def patch_means(picture, patch=PATCH):
    """The mean of each patch, at each of its pixels."""
    out = np.zeros_like(picture)
    for y in range(0, picture.shape[0], patch):
        for x in range(0, picture.shape[1], patch):
            out[y : y + patch, x : x + patch] = picture[y : y + patch, x : x + patch].mean()
    return out


def balanced(picture):
    return picture / np.abs(picture).sum()


def squash(picture):
    return picture / (np.abs(picture) + picture.std(ddof=1))


def slow(a, evidence, *, k, smooth, detail=1.0):
    """The definition for one image: samples [n, C, H, W], evidence [2, 2, H, W] -> map [H, W]."""
    sums, w = a.sum(1), np.ones(len(a))
    scales = [sums, *(np.stack([gaussian(s, PATCH * f) for s in sums]) for f in (3 / 16, 1 / 2))]
    means, errors = zip(*(moments(s, w) for s in scales), strict=True)
    over = [np.maximum(0, m - k * e) for m, e in zip(means, errors, strict=True)]
    gate = [p / np.abs(m) for p, m in zip(over, means, strict=True)]
    coarse = means[2] - errors[2]
    terms = [over[0] * gate[1] * gate[2], over[1] * gate[2] / 2, coarse / 2]
    sums_ = [np.maximum(0, t).sum() for t in (terms[0], over[1] * gate[2], coarse)]
    d = sum(t / s for t, s in zip(terms, sums_, strict=True))
    q = sum(balanced(pixels + constants) for pixels, constants in evidence)
    gain = 1 + squash(smooth(q))
    for pixels, _ in evidence:
        gain = gain * (1 + squash(gaussian(pixels, 3 * PATCH / 16)))
    sharp = np.maximum(0, d) * gain**detail
    (pixels, constants), _ = evidence
    agreement = np.corrcoef(patch_means(pixels + constants).ravel(), patch_means(means[0]).ravel())[0, 1]
    amount = 1.3 * (2 - max(0, agreement) + min(3, (constants.sum() / pixels.sum()) ** 2))
    against = np.maximum(0, -means[2] - k * errors[2]) / sums_[2] / 2
    drawn = sharp + detail * amount * gaussian(balanced(patch_means(q)), PATCH / 8) - against
    return drawn * np.maximum(0, means[2]).sum() / np.maximum(0, drawn).sum()


def run(a, evidence, k=1.0, **options):
    accumulator = Sharpened(k=k, patch=PATCH, **options).accumulator(evidence)
    accumulator.update(a)
    return accumulator


@pytest.mark.parametrize("detail", [1.0, 0.3])
def test_the_map_is_the_definition(detail):
    a, evidence = samples(), clean()
    found = run(a, evidence, detail=detail).attribution().sum(1)
    for image in range(2):
        expected = slow(
            a[:, image].numpy(),
            evidence[image].numpy(),
            k=1.0,
            detail=detail,
            smooth=lambda q: smooth_patches(torch.from_numpy(q), PATCH).numpy(),
        )
        np.testing.assert_allclose(found[image].numpy(), expected, atol=1e-12)
        assert expected.min() < 0  # what speaks against the class is in it


@pytest.mark.parametrize("size", [(12, 10), (8, 8), (3, 17)])
def test_smooth_maps_keep_the_means_of_patches(size):
    maps = torch.randn(2, *size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    smooth = smooth_patches(maps, PATCH)
    np.testing.assert_allclose(average_patches(smooth, PATCH), average_patches(maps, PATCH), atol=1e-12)
    np.testing.assert_allclose(average_patches(maps, PATCH)[0], patch_means(maps[0].numpy()), atol=1e-12)


def test_chunks_and_selections_do_not_show():
    a, evidence = samples(), clean()
    whole = run(a, evidence).attribution()
    parts = run(a[:5], evidence)
    parts.update(a[5:])
    np.testing.assert_allclose(parts.attribution(), whole, atol=1e-12)
    part = run(a[:5], evidence).select(torch.tensor([1]))
    part.update(a[5:, 1:])
    np.testing.assert_allclose(part.attribution(), whole[1:], atol=1e-12)


def test_without_significance_it_is_the_mean():
    noise = torch.randn(4, 1, 3, *SIZE, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    accumulator = run(noise, clean(1), k=50.0)
    assert not accumulator.significant().any()
    np.testing.assert_allclose(accumulator.attribution(), noise.mean(0), atol=1e-12)


def test_maps_of_one_patch_do_not_correlate_by_rounding():
    maps = torch.full((1, 5, 4), 0.1, dtype=torch.float64) * (1 + 1e-15 * torch.arange(20).view(1, 5, 4))
    assert significant._correlate(maps, maps.flip(-1)) == 0


def test_clean_evidence_is_needed():
    with pytest.raises(InputError, match="needs the evidence of the clean image"):
        Sharpened().accumulator()


class TestCleanEvidence:
    @pytest.fixture
    def images(self):
        return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def test_pixels_are_input_times_gradient_by_both_rule_sets(self, images):
        model = tiny_models.vit().double().eval()
        target = Target.of(torch.tensor([[0, 2]] * 3), 3)
        found = compute_clean_evidence(DAVE(model), images, target, RELEVANCE, PassSize(20))
        assert found.shape == (3, 2, 2, 2, 32, 32)
        for index, rules in enumerate((RELEVANCE, ATTENTION_RELEVANCE)):
            passed = gradient(model, images, target, rules=rules)
            pixels = (passed.weight * images.unsqueeze(1)).sum(2)
            np.testing.assert_allclose(found[:, :, index, 0], pixels, atol=1e-9)
        assert found[:, :, :, 1].abs().amax() > 0

    def test_an_image_alone_is_the_same(self, images):
        model, target = tiny_models.vit().double().eval(), Target.of(torch.tensor([0, 1, 2]), 3)
        together = compute_clean_evidence(DAVE(model), images, target, RELEVANCE, PassSize(20))
        for i in range(3):
            alone = compute_clean_evidence(
                DAVE(model), images[i : i + 1], target.part(i, i + 1), RELEVANCE, PassSize(20)
            )
            np.testing.assert_allclose(alone[0], together[i], atol=1e-10)

    def test_the_form_that_is_captured_reads_no_values_and_is_the_same(self, images, monkeypatch):
        model, target = tiny_models.vit().double().eval(), Target.of(torch.tensor([[0, 2]] * 3), 3)
        target = target.resolve(model(images))
        expected = compute_clean_evidence(DAVE(model), images, target, RELEVANCE, PassSize(20))

        class Captured(RecordedGradient):
            def run(self, name, prepare, inputs, compute, *, beside=False):
                function = prepare(inputs[0])
                function(*inputs)  # the first call may read values
                for name in ("tolist", "item", "__bool__", "__float__"):
                    monkeypatch.setattr(torch.Tensor, name, None)
                results = function(*inputs)
                monkeypatch.undo()
                return results

        passes = Captured(model, RELEVANCE)
        found = CleanEvidence(DAVE(model), RELEVANCE, passes).run_captured(images, target, passes)
        np.testing.assert_allclose(found, expected, atol=1e-12)

    def test_numbers_written_into_a_captured_model_count(self, images):
        model, target = tiny_models.vit().double().eval(), Target.of(torch.tensor([0, 1, 2]), 3)
        target, bias, functions = target.resolve(model(images)), model.blocks[0].mlp.fc1.bias, []

        class Captured(RecordedGradient):
            def run(self, name, prepare, inputs, compute, *, beside=False):
                functions[:] = functions or [prepare(inputs[0])]
                return functions[0](*inputs)

        evidence = CleanEvidence(DAVE(model), RELEVANCE, Captured(model, RELEVANCE))
        for value in (0.0, 0.3):  # a constant that was zero is one all the same
            bias.data.fill_(value)
            found = evidence.run_captured(images, target, evidence.passes)
            expected = compute_clean_evidence(DAVE(model), images, target, RELEVANCE, PassSize(20))
            np.testing.assert_allclose(found, expected, atol=1e-12)

    def test_evidence_that_may_still_be_computed_is_not_read(self):
        evidence, logits = torch.zeros(2, 1, 2, 2, 4, 4), torch.zeros(2, 3)
        assert clean_evidence._join([(evidence, logits)])[0] is evidence
        assert len(clean_evidence._join([(evidence, logits)] * 2)[0]) == 4

    @pytest.mark.slow  # compiles two passes
    def test_the_compiled_form_is_the_same(self, images, monkeypatch):
        model, target = tiny_models.vit().double().eval(), Target.of(torch.tensor([[0, 2]] * 3), 3)
        target = target.resolve(model(images))
        expected = compute_clean_evidence(DAVE(model), images, target, RELEVANCE, PassSize(20))
        passes = CompiledGradient(model, RELEVANCE)
        evidence = CleanEvidence(DAVE(model), RELEVANCE, passes)
        with count_passes() as count:
            np.testing.assert_allclose(evidence.run_captured(images, target, passes), expected, atol=1e-12)
        assert count.passes == 6  # compiling it is no pass of a map
        monkeypatch.setattr(clean_evidence, "gradient", None)  # other images pass through the graph
        with count_passes() as count:
            few = evidence.run_captured(images[1:], target.part(1, 3), passes)
        np.testing.assert_allclose(few, expected[1:], atol=1e-12)
        assert count.passes == 4  # by two rule sets

    def test_a_model_without_attention_rules_has_its_own_twice(self, images, monkeypatch):
        model, target = tiny_models.vit().double().eval(), Target.of(0, 3)
        expected = compute_clean_evidence(DAVE(model), images, target, RELEVANCE, PassSize(20))
        compute = clean_evidence.gradient

        def refuse(model, images, target, *, rules, **options):
            if rules is ATTENTION_RELEVANCE:
                raise UnsupportedOperator("no rule")
            return compute(model, images, target, rules=rules, **options)

        monkeypatch.setattr(clean_evidence, "gradient", refuse)
        found = compute_clean_evidence(DAVE(model), images, target, RELEVANCE, PassSize(20))
        np.testing.assert_array_equal(found[:, :, 0], found[:, :, 1])
        np.testing.assert_allclose(found[:, :, 0], expected[:, :, 0], atol=1e-12)

    def test_what_is_kept_of_derivatives_is_what_whole_ones_give(self, images):
        model, target = tiny_models.vit().double().eval(), Target.of(torch.tensor([[0, 2]] * 3), 3)
        record = partial(gradient, model, images, target, rules=ATTENTION_RELEVANCE, record_constants=True)
        whole, kept = record().constants, record(shorten=sum_channels).constants
        assert len(whole) == len(kept) > 10
        for one, short in zip(whole, kept, strict=True):
            products = one.value * one.derivative
            expected = products.sum(-1, keepdim=True) if one.value.ndim == 3 else products
            assert short.derivative.shape == expected.shape
            np.testing.assert_allclose(short.derivative, expected, atol=1e-12)

    def test_constants_with_a_place_are_those_of_omenn(self, images):
        """OMENN spreads what has no place evenly; the rest is the same."""
        model, target = tiny_models.vit().double().eval(), Target.of(torch.tensor([0, 1, 2]), 3)
        found = compute_clean_evidence(DAVE(model), images, target, EFFECTIVE, PassSize(20))[:, 0, 0].sum(1)
        everything = create_method("omenn", model).explain(images, [0, 1, 2]).map
        rest = everything - found
        np.testing.assert_allclose(rest, rest.mean((1, 2), keepdim=True).expand_as(rest), atol=1e-12)

    def test_constants_are_placed_at_their_patch(self, images):
        """A bias that acts on one patch only lies in its pixels."""

        class Patches(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.embed = torch.nn.Conv2d(3, 4, 8, stride=8, bias=False)
                self.place = torch.nn.Parameter(torch.zeros(1, 16, 4))
                self.place.data[0, 5] = 1.0
                self.head = torch.nn.Linear(4, 3, bias=False)

            def forward(self, x):
                return self.head((self.embed(x).flatten(2).transpose(1, 2) + self.place).mean(1))

        model = Patches().double().eval()
        constants = compute_clean_evidence(DAVE(model), images, Target.of(1, 3), EFFECTIVE, PassSize(20))[:, 0, 0, 1]
        expected = model.head.weight[1].sum().item() / 16 / 64
        inside = constants[:, 8:16, 8:16]
        np.testing.assert_allclose(inside.detach(), torch.full_like(inside, expected), atol=1e-12)
        assert int((constants != 0).sum()) == inside.numel()


def test_the_default_shows_evidence_against():
    model = tiny_models.vit().double().eval()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = DAVE(model, samples=8).explain(images, 0)
    assert found.is_signed
    np.testing.assert_array_equal(found.signed, found.map)
    plain = DAVE(model, samples=8, reducer=Significant(patch=8)).explain(images, 0)
    np.testing.assert_array_equal(plain.signed, plain.mean)
