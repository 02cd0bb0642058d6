"""ViT-CX, transformer input sampling and the greedy order against slow references in plain torch and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tiny_models
from dave_vit import create_method
from dave_vit.errors import DaveError, OptionError
from dave_vit.methods.block_tokens import kmeans_centres
from dave_vit.metrics import area, deletion
from dave_vit.metrics.perturbation import Perturbation
from dave_vit.neighborhood.draws import sample_generator

X, TARGET = tiny_models.images(2, torch.float64), [1, 3]


@pytest.fixture(scope="module")
def vit() -> nn.Module:
    return tiny_models.vit().double()


@pytest.fixture(scope="module")
def averaging() -> nn.Module:
    """Without a class token: the mean of all tokens is classified."""
    return tiny_models.vit(global_pool="avg", class_token=False).double()


def blocks_of(model: nn.Module, image: Tensor, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The tokens after each block ``[L, N, D]`` and the logits, of a sequence out of which patches are really taken."""
    tokens = model._pos_embed(model.patch_embed(image[None]))
    prefix = tokens.shape[1] - 16
    if kept is not None:
        tokens = torch.cat([tokens[:, :prefix], tokens[:, prefix:][:, kept]], 1)
    states = []
    for block in model.blocks:
        tokens = block(tokens)
        states.append(tokens[0])
    return torch.stack(states), model.forward_head(model.norm(tokens))[0]


class TestTIS:
    @pytest.mark.parametrize("name", ["vit", "averaging"])
    @torch.no_grad()
    def test_tokens_are_taken_out_of_the_sequence(self, name, request):
        model = request.getfixturevalue(name)
        method = create_method("tis", model, samples=6, kept=0.4, seed=3, resolution="patch", chunk=4)
        found = method.attribute(X, TARGET)[:, 0]
        for image, target, grid in zip(X, TARGET, found, strict=True):
            states, _ = blocks_of(model, image)
            channels = states[:, -16:].permute(0, 2, 1).reshape(-1, 16)  # of all blocks
            total, counts = torch.zeros(16, dtype=torch.float64), torch.zeros(16)
            for centre in kmeans_centres(channels, 6, 3):
                kept = sorted(centre.argsort(descending=True)[:6].tolist())
                total[kept] += blocks_of(model, image, torch.tensor(kept))[1].softmax(0)[target]
                counts[kept] += 1
            torch.testing.assert_close(grid.flatten(), total / counts.clamp(min=1))

    def test_centres_are_scikit_learns(self):
        from sklearn.cluster import KMeans

        points = torch.randn(90, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        start = kmeans_centres(points, 90, 0)
        assert torch.equal(start, points)  # no more points than centres
        found = kmeans_centres(points, 7, 2)
        drawn = torch.randperm(90, generator=sample_generator(2, 0, "noise"))
        fitted = KMeans(7, init=points[drawn[:7]].numpy(), n_init=1, algorithm="lloyd", tol=0).fit(points.numpy())
        np.testing.assert_allclose(found.numpy(), fitted.cluster_centers_)

    def test_one_sample_of_everything_is_the_image_itself(self, vit):
        found = create_method("tis", vit, samples=1, kept=1.0, resolution="patch").attribute(X, TARGET)
        expected = vit(X).softmax(1).detach()[range(2), TARGET].view(2, 1, 1, 1).expand(2, 1, 4, 4)
        torch.testing.assert_close(found, expected)

    def test_refusals_are_one_line(self, vit):
        with pytest.raises(OptionError, match="kept is 0"):
            create_method("tis", vit, kept=0)
        greatest = tiny_models.vit(global_pool="max", class_token=False).double()
        with pytest.raises(DaveError, match="neither attention nor a mean") as caught:
            create_method("tis", greatest, samples=2).attribute(X, TARGET)
        assert "\n" not in str(caught.value)


class TestViTCX:
    @torch.no_grad()
    def test_as_the_authors_describe_it(self, vit):
        from sklearn.cluster import AgglomerativeClustering

        method = create_method("vit_cx", vit, seed=4, distance=0.25, noise=0.3, chunk=7)
        found = method.explain(X, TARGET).map
        for image, target, expected in zip(X, TARGET, found, strict=True):
            tokens = vit.blocks[0](vit._pos_embed(vit.patch_embed(image[None])))
            normed = vit.blocks[1].norm1(tokens)[0, 1:].T.reshape(1, 24, 4, 4)
            masks = torch.stack([unit(one) for one in F.interpolate(normed, (32, 32), mode="bilinear")[0]])
            similar = F.cosine_similarity(masks.flatten(1)[:, None], masks.flatten(1)[None], 2)
            grouping = AgglomerativeClustering(None, metric="precomputed", linkage="complete", distance_threshold=0.25)
            labels = grouping.fit(1 - similar.numpy()).labels_
            groups = sorted({tuple(np.flatnonzero(labels == one)) for one in labels})  # by their first member
            assert 1 < len(groups) < 24
            joined = torch.stack([unit(masks[list(group)].sum(0)) for group in groups])
            clean, total = vit(image[None]).softmax(1)[0, target], torch.zeros(32, 32, dtype=torch.float64)
            for mask, noise in zip(joined, method._noise(image[None], 0, len(joined))[:, 0], strict=True):
                hidden = noise * (1 - mask)
                seen, noisy = vit(torch.stack([image * mask + hidden, image + hidden])).softmax(1)[:, target]
                total += (seen - noisy + clean) * mask / joined.sum(0) / len(joined)
            torch.testing.assert_close(expected, total)


def unit(mask: Tensor) -> Tensor:
    return (mask - mask.min()) / (mask.max() - mask.min())


class TestGreedy:
    @pytest.mark.parametrize("goal", ["deletion", "insertion"])
    @torch.no_grad()
    def test_patch_by_patch(self, vit, goal):
        found = create_method("greedy", vit, rounds=16, goal=goal, chunk=5).explain(X, TARGET).map
        for image, target, places in zip(X, TARGET, found, strict=True):
            shown, expected = torch.full((16,), float(goal == "deletion")), torch.zeros(16, dtype=torch.float64)
            for turn in range(16):
                scores = {}
                for patch in (shown == shown[expected == 0][0]).nonzero()[:, 0].tolist():
                    tried = shown.clone()
                    tried[patch] = 1 - tried[patch]
                    mask = F.interpolate(tried.view(1, 1, 4, 4), (32, 32))[0]
                    scores[patch] = float(vit((image * mask)[None]).softmax(1)[0, target])
                best = max(scores, key=scores.get)
                shown[best] = 1 - shown[best]
                expected[best] = (turn + 1) / 16 if goal == "deletion" else 1 - turn / 16
            torch.testing.assert_close(F.avg_pool2d(places[None], 8).flatten(), expected)

    def test_is_above_the_others_in_what_it_aims_at(self, vit):
        how = Perturbation(tuple(step / 16 for step in range(17)))
        areas = {}
        for name in ("greedy", "random", "attn_lrp", "gradcam"):
            patches = F.avg_pool2d(create_method(name, vit).explain(X, TARGET).map, 8)  # all of them at one resolution
            maps = patches.repeat_interleave(8, 1).repeat_interleave(8, 2)
            areas[name] = area(deletion(vit, X, maps, torch.tensor(TARGET), how), how.fractions)
        assert all((areas["greedy"] > areas[name]).all() for name in areas if name != "greedy")

    def test_fewer_rounds_cost_fewer_passes(self, vit):
        places = create_method("greedy", vit, rounds=2).explain(X, TARGET).map
        assert sorted(set(places[0].flatten().tolist())) == [(place + 1) / 16 for place in range(16)]
