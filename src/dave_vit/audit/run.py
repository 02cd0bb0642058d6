"""Run an audit: collect evidence, cluster it in each class, test it on the model, write the report."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, interpolate

from dave_vit.audit.clusters import cluster_images
from dave_vit.audit.findings import MIN_EFFECT, SIGNIFICANCE, Audit, AuditOptions, Finding
from dave_vit.audit.regions import name_place
from dave_vit.audit.report import write_report
from dave_vit.audit.verification import (
    Floats,
    Others,
    Removal,
    compare_gains,
    correct_p_values,
    find_regions,
    measure_gains,
    measure_removal,
)
from dave_vit.data import open_dataset
from dave_vit.data.batches import load_batch
from dave_vit.errors import DataError
from dave_vit.evaluate.engines import Engine
from dave_vit.evaluate.engines.local import LocalEngine
from dave_vit.evaluate.evidence import ImageEvidence
from dave_vit.evaluate.job import EvalJob, EvaluatedModel, ModelLoader
from dave_vit.evaluate.plan_entries import ModelEntry
from dave_vit.evaluate.run import EvaluationRun, ProgressCallback
from dave_vit.evaluate.statistics.rows import ScannedImage
from dave_vit.evaluate.store import RunFolder

POOLED = -1
"""The class index of images whose classes have too few images to be audited on their own."""
_MAX_MEMBERS = 64  # images of a class that are tested
_MAX_OTHERS = 64  # images that regions are moved to
Pair = tuple[int, int]
"""An image's index in the data set, and a class."""


def run_audit(
    options: AuditOptions,
    out: str | Path,
    *,
    engine: Engine | None = None,
    loader: ModelLoader = ModelEntry.load,
    progress: ProgressCallback | None = None,
    command: str = "",
) -> Audit:
    """Collect the evidence of all images, or what is left of it, test its clusters, and write the report.

    Args:
        options: what is audited.
        out: folder of the audit; the same folder resumes.
        engine: where maps are computed; this process on the CPU by default.
        loader: returns the model of an entry; for models that no spec names.
        progress: called as the audit advances.
        command: command line, for the report.
    """
    start, report, job = time.perf_counter(), progress or (lambda *state: None), EvalJob(options.plan(), loader)
    engine = engine or LocalEngine()
    with engine:
        run = EvaluationRun(RunFolder(Path(out) / "run"), job, engine, report, allow_mixed=False)
        images = run.scan_images()
        evidence = run.collect_evidence("collecting evidence", [[(one.index, _class_of(one)) for one in images]])
        groups = list(_build_groups(evidence, options))
        controls = run.collect_evidence("collecting controls", [group.controls for group in groups])
    tester = _Tester(options, job, images, evidence, controls, getattr(engine, "devices", ("cpu",))[0])
    findings = _test_groups(tester, groups, report)
    audit = Audit(
        findings=tuple(sorted(findings, key=lambda one: (not one.confirmed, -one.effect[0]))),
        images=len(images),
        accuracy=tester.accuracy(range(len(evidence.index))),
        classes=sum(group.class_index != POOLED for group in groups),
        knows_objects=bool(np.isfinite(evidence.object_share).any()),
        seconds=time.perf_counter() - start,
    )
    write_report(audit, options, tester.draw, Path(out), command)
    return audit


def _class_of(image: ScannedImage) -> int:
    """Return the class to explain: the label, or the prediction of an image without one."""
    return int(image.predicted or 0) if image.label is None else image.label


@dataclass(frozen=True)
class _Group:
    """Images that are tested together.

    Attributes:
        class_index: their class, or `POOLED`.
        positions: of the images in the evidence.
        clusters: cluster of each image.
        controls: images of other classes, each with a class of the group, that show what chance brings.
    """

    class_index: int
    positions: npt.NDArray[np.int64]
    clusters: npt.NDArray[np.int64]
    controls: list[Pair]


def _build_groups(evidence: ImageEvidence, options: AuditOptions) -> Iterator[_Group]:
    """Yield a group for each class with enough images, and one for the images of all others."""
    classes, counts = np.unique(evidence.target, return_counts=True)
    if len(classes) < 3:
        raise DataError(f"{options.data}: images of {len(classes)} classes; an audit compares a class with two others")
    large = classes[counts >= options.smallest].tolist()
    names = np.where(np.isin(evidence.target, large), evidence.target, POOLED)
    maps = evidence.cells.reshape(len(evidence.cells), -1)
    features = evidence.features if options.cluster_by == "features" else maps
    for name in np.unique(names).tolist():
        draw = np.random.default_rng([options.seed, name + 1])
        positions = np.flatnonzero(names == name)
        positions = np.sort(draw.permutation(positions)[:_MAX_MEMBERS])
        if len(positions) >= options.smallest:
            clusters = cluster_images(features[positions], options.smallest, options.seed)
            yield _Group(name, positions, clusters, _choose_controls(evidence, positions, draw))


def _choose_controls(
    evidence: ImageEvidence, positions: npt.NDArray[np.int64], draw: np.random.Generator
) -> list[Pair]:
    """Choose as many other images as there are in a group, each with the class of one that is not its own."""
    order = draw.permutation(len(evidence.index))
    classes = np.resize(draw.permutation(evidence.target[positions]), len(order)).tolist()
    pairs = zip(order.tolist(), classes, strict=True)
    chosen = [(int(evidence.index[at]), target) for at, target in pairs if evidence.target[at] != target]
    return chosen[: len(positions)]


def _test_groups(tester: _Tester, groups: Sequence[_Group], report: ProgressCallback) -> list[Finding]:
    """Return the findings of all groups, tested twice.

    A region of another class that has a shortcut speaks against every class, so that a class without one seems to gain.
    The second time, images of classes that were confirmed are no controls for others.
    """
    confirmed: frozenset[int] = frozenset()
    findings: list[Finding] = []
    for number in range(2):
        tests = []
        for done, group in enumerate(groups):
            report("testing clusters", number * len(groups) + done, 2 * len(groups), 0)
            tests.append(tester.test(group, confirmed - {group.class_index}))
        corrected = correct_p_values([whole.p_value for whole, _ in tests])
        findings = [one for test, p_value in zip(tests, corrected, strict=True) for one in _decide(*test, p_value)]
        confirmed = frozenset(one.class_index for one in findings if one.confirmed)
        if not confirmed:
            break
    return findings


def _decide(whole: Finding, clusters: Sequence[Finding], p_value: float) -> list[Finding]:
    """Return the clusters of a group with corrected p-values; the whole group if it alone is confirmed.

    Clusters are tested only in a group that is confirmed as a whole, which keeps the error rate of all findings.
    """
    corrected = correct_p_values([one.p_value for one in clusters])
    decided = [_confirm(one, max(p_value, own)) for one, own in zip(clusters, corrected, strict=True)]
    group = _confirm(whole, p_value)
    if not group.confirmed:
        return [replace(one, confirmed=False) for one in decided]
    return decided if any(one.confirmed for one in decided) else [group]


def _confirm(finding: Finding, p_value: float) -> Finding:
    confirmed = p_value < SIGNIFICANCE and finding.effect[0] >= MIN_EFFECT
    return replace(finding, p_value=p_value, confirmed=confirmed)


class _Tester:
    """Tests the evidence of groups on the model."""

    def __init__(
        self,
        options: AuditOptions,
        job: EvalJob,
        images: Sequence[ScannedImage],
        evidence: ImageEvidence,
        controls: ImageEvidence,
        device: str,
    ) -> None:
        self.options, self.evidence, self.device = options, evidence, device
        self.scanned = {one.index: one for one in images}
        self.data = open_dataset(options.data, options.limit)
        model: Any = job.loader(job.plan.models[0], device)
        self.model, self.names = EvaluatedModel(model, self.data), model.class_names
        self.controls = {pair: at for at, pair in enumerate(zip(controls.index, controls.target, strict=True))}
        self.control_evidence = controls
        order = np.random.default_rng(options.seed).permutation(len(evidence.index))[:_MAX_OTHERS]
        self.others = Others(self._load(evidence.index[order])[0], evidence.target[order])

    def test(self, group: _Group, excluded: frozenset[int]) -> tuple[Finding, list[Finding]]:
        """Return the finding of a whole group, and those of its clusters; images of some classes are no controls."""
        others = self._exclude(excluded)
        images, regions, inside = self._find_regions(self.evidence, group.positions)
        how = (self.evidence.target[group.positions], others, self.options.seed)
        gains = measure_gains(self.model.model, images, regions, *how)
        removal = measure_removal(self.model.model, images, regions, *how)
        chance = self._measure_controls(group, others, excluded)
        whole = self._describe(group, np.arange(len(gains)), inside, gains, removal, chance)
        own = [np.flatnonzero(group.clusters == label) for label in range(int(group.clusters.max()) + 1)]
        return whole, [self._describe(group, members, inside, gains, removal, chance) for members in own]

    def _exclude(self, excluded: frozenset[int]) -> Others:
        """Return the images that regions are moved to, without those of some classes; all if too few are left."""
        keep = ~np.isin(self.others.targets, list(excluded))
        if len(np.unique(self.others.targets[keep])) < 3:
            return self.others
        return Others(self.others.images[torch.from_numpy(keep)], self.others.targets[keep])

    def _measure_controls(self, group: _Group, others: Others, excluded: frozenset[int]) -> Floats:
        """Return the gains of regions that were chosen in images of other classes."""
        pairs = [pair for pair in group.controls if pair in self.controls]
        kept = [pair for pair in pairs if _class_of(self.scanned[pair[0]]) not in excluded]
        at = np.array([self.controls[pair] for pair in (kept if len(kept) >= self.options.smallest else pairs)])
        images, regions, _ = self._find_regions(self.control_evidence, at)
        targets = self.control_evidence.target[at]
        return measure_gains(self.model.model, images, regions, targets, others, self.options.seed)

    def _find_regions(self, evidence: ImageEvidence, positions: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor, Tensor]:
        """Return images, their evidence regions ``[n, H, W]``, and the evidence inside of these ``[n, h, w]``."""
        images, objects = self._load(evidence.index[positions])
        cells = torch.from_numpy(evidence.cells[positions])
        regions = find_regions(cells, objects)
        return images, regions, adaptive_avg_pool2d(regions.float(), (cells.shape[1], cells.shape[2])) * cells

    def _describe(
        self,
        group: _Group,
        members: npt.NDArray[np.int64],
        regions: Tensor,
        gains: Floats,
        removal: Removal,
        chance: Floats,
    ) -> Finding:
        positions, inside = group.positions[members], regions[members]
        rest = np.setdiff1d(group.positions, positions)
        on_object = self.evidence.object_share[positions]
        comparison = compare_gains(gains[members], chance)
        name = "other classes" if group.class_index == POOLED else self.names[group.class_index].split(",")[0]
        return Finding(
            class_index=group.class_index,
            class_name=name,
            members=tuple(self.evidence.index[positions].tolist()),
            share=float(inside.sum() / len(group.positions)),
            object_share=float(np.nanmean(on_object)) if np.isfinite(on_object).any() else None,
            region=name_place(inside.sum(0).double().numpy()),
            effect=(comparison.mean, comparison.low, comparison.high),
            p_value=comparison.p_value,
            confidence=(float(removal.before[members].mean()), float(removal.after[members].mean())),
            kept=float(removal.kept[members].mean()),
            accuracy=(self.accuracy(positions.tolist()), self.accuracy(rest.tolist())),
        )

    def accuracy(self, positions: Sequence[int]) -> float | None:
        """Return the accuracy on some images; None without labels."""
        scanned = [self.scanned[index] for index in self.evidence.index[list(positions)].tolist()]
        known = [one.predicted == one.label for one in scanned if one.label is not None]
        return float(np.mean(known)) if known else None

    def draw(self, index: int) -> Image.Image:
        """Draw an image as the model sees it, with its evidence over it."""
        from dave_vit.viz import overlay, to_pillow

        position = int(np.flatnonzero(self.evidence.index == index)[0])
        inputs, _ = self._load(self.evidence.index[[position]])
        cells = torch.from_numpy(self.evidence.cells[position])[None, None]
        heat = interpolate(cells, inputs.shape[2:], mode="bilinear", align_corners=False)[0, 0]
        return to_pillow(overlay(self.model.to_pixels(inputs)[0], heat))

    def _load(self, indices: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return inputs ``[n, C, H, W]`` and objects ``[n, H, W]`` of images that could be read before."""
        batch = load_batch(self.data, indices.tolist(), self.model.geometries)
        if batch.failures:
            raise DataError(f"an image can no longer be read: {batch.failures[0][1]}")
        return batch.inputs.to(self.device), batch.regions
