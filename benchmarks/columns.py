"""Eight columns for the default and its rivals, on models and images of which some took part in choosing it.

    python benchmarks/columns.py builtin --seed 202
    python benchmarks/columns.py builtin-bcos --seed 202
    python benchmarks/columns.py builtin --resolution 32 --seed 202
    python benchmarks/columns.py timm:deit_tiny_patch16_224 --weights FILE --data imagenet:DIR --start 200 --stop 300

Columns, in percent: GridPG (grids of four images recognised with more than 0.8), EnergyPG and pointing (images whose
object covers at most half), deletion (least important first, to zero) and insertion (most important first, from a
blurred image) in 20 steps, symmetric relevance gain at patches with zero and with blur (images recognised with
more than 0.5), and consistency (correlation with the map of the image turned by 5 degrees and moved by 20 and 8
pixels, moved back; all images). Zero is no colour of a model with six channels, so that grey takes its place there. The
last lines have, for each column, the difference to the best rival with its 95 % interval over images.

With ``--resolution`` the embedded model is first trained for 500 steps on pictures that were reduced to so many pixels.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dave_vit import DAVE, create_method, load_model
from dave_vit.data import open_dataset
from dave_vit.data.batches import load_batch
from dave_vit.data.builtin import compose_scene
from dave_vit.data.geometry import GeometryCache
from dave_vit.data.grids import GridOptions, choose_grids, compose_grids, select_candidates
from dave_vit.metrics import energypg, gridpg, pointing
from dave_vit.metrics.perturbation import Perturbation, area, deletion, gaussian_blur, insertion
from dave_vit.metrics.stability import consistency, small_warp, warp_images
from dave_vit.models.adapter import traits_of
from dave_vit.reduce import Sharpened, Significant

COLUMNS = ("GridPG", "EnergyPG", "pointing", "deletion", "insertion", "SRG zero", "SRG blur", "consistency")
RIVALS = ("gradcam", "legrad", "iia", "attn_lrp", "cp_lrp", "chefer_lrp", "chefer_generic", "libragrad")
BLUR = Perturbation(order="most", baseline="blur")
STEPS = 14  # of the patches' order


@dataclass(frozen=True)
class Pictures:
    """Images of a model, and which of them are used for what.

    Attributes:
        model: maps images to logits.
        images: ``[n, C, H, W]``.
        regions: of the labelled objects, ``[n, H, W]``.
        labels: ``[n]``.
        grids: of four images each, ``[g, C, H, W]``.
        grid_labels: ``[g, 4]``.
        located: indices of images whose object covers at most half.
        recognised: indices of images that the model recognises.
    """

    model: nn.Module
    images: Tensor
    regions: Tensor
    labels: Tensor
    grids: Tensor
    grid_labels: Tensor
    located: list[int]
    recognised: list[int]

    @classmethod
    def select(cls, model: nn.Module, images: Tensor, regions: Tensor, labels: Tensor, grids: int) -> Pictures:
        """Choose the images of each column."""
        with torch.no_grad():
            logits = torch.cat([model(part) for part in images.split(64)]).float()
        own = probabilities(logits, images).gather(1, labels[:, None])[:, 0]
        right = (logits.argmax(1) == labels) & (own > 0.5)
        covered = regions.float().mean((1, 2))
        pool = select_candidates(logits.cpu(), labels.tolist(), 0, 0.8)
        chosen = choose_grids(pool, GridOptions(grids=grids, confidence=0.8))
        cells = torch.stack([images[index] for grid in chosen for index in grid.images]).unflatten(0, (-1, 4))
        grid_labels = torch.tensor([grid.labels for grid in chosen], device=labels.device)
        located = ((covered > 0) & (covered <= 0.5)).nonzero()[:, 0].tolist()
        recognised = right.nonzero()[:, 0].tolist()
        return cls(model, images, regions, labels, compose_grids(cells), grid_labels, located, recognised)


def probabilities(logits: Tensor, images: Tensor) -> Tensor:
    """Softmax, or sigmoid for the B-cos model, whose images have six channels."""
    return logits.sigmoid() if images.shape[1] == 6 else logits.softmax(1)


def relevance_gain(model: nn.Module, images: Tensor, maps: Tensor, labels: Tensor, baseline: Tensor) -> Tensor:
    """Symmetric relevance gain with 14 x 14 patches (arXiv 2401.06654), ``[n]``."""
    patch = images.shape[-1] // 14
    score = F.avg_pool2d(maps[:, None].float(), patch)[:, 0].flatten(1)
    lot = torch.rand(score.shape, generator=torch.Generator().manual_seed(0)).to(score)
    rank = (score + 1e-12 * lot * score.abs().amax(1, keepdim=True)).argsort(1).argsort(1)
    gain, count = torch.zeros(len(images), device=images.device), rank.shape[1]
    for removed in range(0, count + 1, count // STEPS):
        for sign, kept in ((1, rank >= removed), (-1, rank < count - removed)):
            mask = F.interpolate(kept.view(-1, 1, 14, 14).float(), scale_factor=patch)
            logits = model(torch.lerp(baseline, images, mask)).float()
            gain += sign * probabilities(logits, images).gather(1, labels[:, None])[:, 0]
    return gain / (STEPS + 1)


@torch.no_grad()
def score(pictures: Pictures, maps: Tensor, grid_maps: Tensor, moved_maps: Tensor) -> list[Tensor]:
    """Compute the columns, one value per image or cell of a grid."""
    model, located, kept = pictures.model, pictures.located, pictures.recognised
    images, labels, shown = pictures.images[kept], pictures.labels[kept], maps[kept]
    zero = 0.5 if images.shape[1] == 6 else 0.0
    columns = [gridpg(grid_maps).flatten()]
    columns += [metric(maps[located], pictures.regions[located]) for metric in (energypg, pointing)]
    removed = deletion(lambda x: model(x + zero), images - zero, shown, labels)
    columns.append(area(removed, Perturbation().fractions))
    columns.append(area(insertion(model, images, shown, labels, BLUR), BLUR.fractions))
    baselines = (torch.full_like(images, zero), gaussian_blur(images))
    columns += [relevance_gain(model, images, shown, labels, baseline) for baseline in baselines]
    return [*columns, consistency(maps, moved_maps, small_warp(tuple(maps.shape[-2:])))]


def explain(method: object, images: Tensor, labels: Tensor) -> Tensor:
    parts = zip(images.split(16), labels.split(16), strict=True)
    return torch.cat([method.explain(*part).map.float() for part in parts])  # type: ignore[attr-defined]


def compose(seed: int, count: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return embedded pictures ``[n, 3, H, W]`` in 0..1, masks and labels."""
    scenes = [compose_scene(index, "single", seed=seed) for index in range(count)]
    objects = [scene.targets[0] for scene in scenes]
    images = torch.from_numpy(np.stack([scene.image for scene in scenes])).permute(0, 3, 1, 2).float() / 255
    masks = torch.from_numpy(np.stack([thing.mask for thing in objects])).bool()
    return images.to(device), masks.to(device), torch.tensor([thing.label for thing in objects], device=device)


def reduce_resolution(images: Tensor, pixels: int) -> Tensor:
    small = F.interpolate(images, size=pixels, mode="area")
    return F.interpolate(small, size=images.shape[-1], mode="bilinear")


def train_on_low_resolution(
    model: nn.Module, encode: Callable[[Tensor], Tensor], device: str, steps: int = 500
) -> None:
    """Train a model further on pictures that ``encode`` reduces."""
    images, _, labels = compose(77_000, 5_000, "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, weight_decay=0.05)
    generator = torch.Generator().manual_seed(0)
    model.train()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-4 * min(1, step / 50) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        batch = torch.randint(len(images), (192,), generator=generator)
        loss = F.cross_entropy(model(encode(images[batch].to(device))), labels[batch].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()


def load_pictures(args: argparse.Namespace) -> Pictures:
    model = load_model(args.model, args.weights, args.device)
    if args.data:
        data, indices = open_dataset(args.data, None), range(args.start, args.stop)
        with ThreadPoolExecutor() as readers:
            batch = load_batch(data, list(indices), GeometryCache(model.preprocess), readers)
        labels = torch.tensor(batch.labels, device=args.device)
        return Pictures.select(
            model, batch.inputs.to(args.device), batch.regions.to(args.device), labels, grids=args.grids
        )

    def encode(images: Tensor) -> Tensor:
        images = reduce_resolution(images, args.resolution) if args.resolution else images
        return torch.cat([images, 1 - images], 1) if args.model == "builtin-bcos" else images * 2 - 1

    if args.resolution:
        train_on_low_resolution(model, encode, args.device)
    images, masks, labels = compose(args.seed, args.stop - args.start, args.device)
    return Pictures.select(model, encode(images), masks, labels, grids=args.grids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--weights")
    parser.add_argument("--data", help="a data set with boxes; embedded pictures by default")
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--stop", type=int, default=144)
    parser.add_argument("--grids", type=int, default=36)
    parser.add_argument("--seed", type=int, default=202)
    parser.add_argument("--resolution", type=int, default=0)
    parser.add_argument("--details", nargs="*", type=float, default=[])
    parser.add_argument("--rivals", nargs="*", default=RIVALS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    pictures = load_pictures(args)
    model, scores = pictures.model, {}
    size = tuple(pictures.images.shape[-2:])
    moved, patch = warp_images(pictures.images, small_warp(size), fill=traits_of(model).fill), size[1] // 14
    methods = {"dave": DAVE(model)}
    for detail in args.details:
        methods[f"dave, detail {detail}"] = DAVE(model, reducer=Sharpened(patch=patch, detail=detail))
    methods["dave, 28 views alone"] = DAVE(model, samples=28, reducer=Significant(patch=patch))
    methods |= {name: create_method(name, model) for name in args.rivals}
    print("| method |", " | ".join(COLUMNS), "|")
    for name, method in methods.items():
        maps = explain(method, pictures.images, pictures.labels)
        others = explain(method, pictures.grids, pictures.grid_labels), explain(method, moved, pictures.labels)
        scores[name] = score(pictures, maps, *others)
        print(f"| {name} |", " | ".join(f"{100 * column.nanmean():.1f}" for column in scores[name]), "|", flush=True)
    for place, column in enumerate(COLUMNS):
        best = max(args.rivals, key=lambda name: float(scores[name][place].nanmean()))
        gain = (scores["dave"][place] - scores[best][place]).double()
        gain = gain[gain.isfinite()]
        half = 1.96 * float(gain.std()) / len(gain) ** 0.5
        print(f"{column}: {100 * float(gain.mean()):+.1f} +- {100 * half:.1f} against {best} (n = {len(gain)})")


if __name__ == "__main__":
    main()
