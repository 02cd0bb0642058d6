"""Run an audit: collect evidence, cluster it in each class, test it on the model, write the report."""

import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, interpolate, max_pool2d

from dave_vit.audit import verification
from dave_vit.audit.findings import MIN_EFFECT, SIGNIFICANCE, SURROUNDINGS, Audit, AuditOptions, Finding
from dave_vit.audit.groups import POOLED, Group, Pair, Positions, build_groups, name_place
from dave_vit.audit.report import write_report
from dave_vit.audit.verification import REFERENCE, Floats, Others, correct_p_values
from dave_vit.data.batches import load_batch
from dave_vit.errors import DataError
from dave_vit.evaluate import ModelEntry
from dave_vit.evaluate.engines import Engine
from dave_vit.evaluate.job import EvalJob, EvaluatedModel, ModelLoader
from dave_vit.evaluate.run import EvaluationRun, ProgressCallback
from dave_vit.evaluate.scoring import ImageEvidence
from dave_vit.evaluate.statistics.rows import ScannedImage
from dave_vit.viz.rendering import overlay, to_pillow

_MAX_POOL = 192  # images that regions and objects are moved to
_LEAST_SCENES = 4  # of a class among them
_OBJECTS = 4  # objects that are put into scenes
_OUTLINE = (1.0, 0.2, 0.8)


class GroupTester:
    """Tests what groups of images rely on.

    Args:
        options: what is audited.
        run: has the model and the data.
        images: all images, with their predictions.
        evidence: of the images to test.
    """

    def __init__(
        self, options: AuditOptions, run: EvaluationRun, images: Sequence[ScannedImage], evidence: ImageEvidence
    ) -> None:
        self.seed, self.evidence, self.groups = options.seed, evidence, list(build_groups(evidence, options))
        self.device = getattr(run.engine, "devices", ("cpu",))[0]
        self.knows_objects = bool(np.isfinite(evidence.object_share).any())
        self.scanned = {one.index: one for one in images}
        model: Any = run.job.loader(run.plan.models[0], self.device)
        self.run, self.model, self.names = run, EvaluatedModel(model, run.data), model.class_names
        # images of some groups that others are compared with: their positions by the group's class
        draw = np.random.default_rng(self.seed)
        chosen = [self.groups[at] for at in draw.permutation(len(self.groups))[: _MAX_POOL // _LEAST_SCENES]]
        share = _MAX_POOL // len(chosen)
        self.pool = {group.class_index: draw.permutation(group.positions)[:share] for group in chosen}
        positions = np.concatenate(list(self.pool.values()))
        pictures, objects = self._load(evidence.index[positions])
        self.others = Others(pictures, evidence.target[positions])
        self._spans = verification.find_spans(objects) if self.knows_objects else []
        self._controls: dict[Pair, tuple[ImageEvidence, int]] = {}
        self._references: dict[int, list[int]] = {}
        self._gains: dict[int, tuple[Floats, Floats]] = {}

    def has_scenes(self, group: Group) -> bool:
        """Whether a group has objects that can be put into other scenes."""
        return self.knows_objects and group.class_index != POOLED

    def test_whole(self, group: Group) -> Finding:
        """Test a whole group by its scenes, or by its evidence where objects are unknown or of several classes."""
        if not self.has_scenes(group):
            return self.test_regions(group)[0]
        return self._describe(group, np.arange(len(group.positions)), *self._compare_scenes(group), SURROUNDINGS)

    def test_regions(self, group: Group) -> list[Finding]:
        """Test the evidence regions of a group, and those of each cluster; its controls must have been collected."""
        if group.class_index not in self._gains:  # a whole group may have been tested by its regions before
            self._gains[group.class_index] = self._compare_regions(group)
        gains, chance = self._gains[group.class_index]
        clusters = [np.flatnonzero(group.clusters == label) for label in range(int(group.clusters.max()) + 1)]
        every = np.arange(len(group.positions))
        parts = [every, *clusters] if len(clusters) > 1 else [every]
        return [self._describe(group, members, gains, chance) for members in parts]

    def _choose_controls(self, group: Group) -> list[Pair]:
        """Choose as many images of the reference as a group has, each with a class of the group that is not its own."""
        draw, targets = np.random.default_rng([self.seed, group.class_index + 1, 1]), self.evidence.target
        reference = self._references.get(group.class_index, [one.class_index for one in self.groups])
        order = draw.permutation(np.concatenate([one.positions for one in self.groups if one.class_index in reference]))
        classes = np.resize(draw.permutation(targets[group.positions]), len(order))
        other = targets[order] != classes
        pairs = zip(self.evidence.index[order[other]].tolist(), classes[other].tolist(), strict=True)
        return list(pairs)[: len(group.positions)]

    def collect_controls(self, groups: Sequence[Group]) -> None:
        """Compute the evidence of the controls of some groups."""
        if groups:
            controls = self.run.collect_evidence("collecting controls", [self._choose_controls(one) for one in groups])
            for at, pair in enumerate(zip(controls.index.tolist(), controls.target.tolist(), strict=True)):
                self._controls[pair] = controls, at

    def _compare_scenes(self, group: Group) -> tuple[Floats, Floats]:
        """Return log odds of a class with its objects in its own scenes, and in the scenes of its reference."""
        images, masks = self._load(self.evidence.index[group.positions])
        spans, target = verification.find_spans(masks), group.class_index
        sources = np.random.default_rng([self.seed, target]).permutation(len(images))[:_OBJECTS].tolist()
        objects = [images[at][:, spans[at][0], spans[at][1]] for at in sources]
        own = verification.measure_scenes(self.model.model, objects, images, spans, target)
        own[range(len(sources)), sources] = np.nan  # an image as it is shows no seam
        others = self.others.images
        in_pool = verification.measure_scenes(self.model.model, objects, others, self._spans, target).mean(0)
        ends = np.cumsum([len(positions) for positions in self.pool.values()])[:-1]
        values = dict(zip(self.pool, np.split(in_pool, ends), strict=True))
        values.pop(target, None)
        ranked = sorted(values, key=lambda name: -values[name].mean())
        self._references[target] = ranked[: -(-len(ranked) // REFERENCE)]
        return np.nanmean(own, 0), verification.choose_reference(list(values.values()))

    def _compare_regions(self, group: Group) -> tuple[Floats, Floats]:
        """Return gains by the evidence regions of the group's images, and by those of its controls."""
        chosen = [self._controls[pair] for pair in self._choose_controls(group) if pair in self._controls]
        controls, at = chosen[0][0], np.array([position for _, position in chosen])
        others = self._choose_others(group)
        return self._measure_gains(self.evidence, group.positions, others), self._measure_gains(controls, at, others)

    def _measure_gains(self, evidence: ImageEvidence, positions: Positions, others: Others) -> Floats:
        images, regions, _ = self._find_regions(evidence, positions)
        targets = evidence.target[positions]
        return verification.measure_gains(self.model.model, images, regions, targets, others, self.seed)

    def _choose_others(self, group: Group) -> Others:
        """Return the images of the group's reference that regions are moved to."""
        names = np.repeat(list(self.pool), [len(positions) for positions in self.pool.values()])
        keep = np.isin(names, self._references.get(group.class_index, list(self.pool)))
        return Others(self.others.images[torch.from_numpy(keep)], self.others.targets[keep])

    def _find_regions(self, evidence: ImageEvidence, positions: Positions) -> tuple[Tensor, Tensor, Tensor]:
        """Return images, their evidence regions ``[n, H, W]``, and the evidence inside of these ``[n, h, w]``."""
        images, objects = self._load(evidence.index[positions])
        cells = torch.from_numpy(evidence.cells[positions])
        regions = verification.find_regions(cells, objects)
        return images, regions, adaptive_avg_pool2d(regions.float(), (cells.shape[1], cells.shape[2])) * cells

    def _describe(
        self, group: Group, members: Positions, own: Floats, chance: Floats, region: str | None = None
    ) -> Finding:
        """Return the finding of some of a group's images, those with the largest gain first."""
        effect, p_value = verification.compare_gains(own[members], chance)
        positions = group.positions[members[np.argsort(-own[members], kind="stable")]]
        images, regions, inside = self._find_regions(self.evidence, positions)
        targets, on_object = self.evidence.target[positions], self.evidence.object_share[positions]
        others, is_pooled = self._choose_others(group), group.class_index == POOLED
        removal = verification.measure_removal(self.model.model, images, regions, targets, others, self.seed)
        before, after, kept = (float(values.mean()) for values in removal)
        return Finding(
            class_index=group.class_index,
            class_name="classes with few images" if is_pooled else self.names[group.class_index].split(",")[0],
            members=tuple(self.evidence.index[positions].tolist()),
            share=float(inside.sum() / len(group.positions)),
            object_share=float(np.nanmean(on_object)) if self.knows_objects else None,
            region=region or name_place(inside.sum(0).double().numpy()),
            effect=effect,
            p_value=p_value,
            confidence=(before, after),
            kept=kept,
            accuracy=(self.accuracy(positions), self.accuracy(np.setdiff1d(group.positions, positions))),
        )

    def accuracy(self, positions: Positions) -> float | None:
        """Return the accuracy on some images; None without labels."""
        scanned = [self.scanned[index] for index in self.evidence.index[positions].tolist()]
        known = [one.predicted == one.label for one in scanned if one.label is not None]
        return float(np.mean(known)) if known else None

    def draw(self, index: int) -> Image.Image:
        """Draw an image as the model sees it with the tested region outlined, and below it with its evidence."""
        at = np.flatnonzero(self.evidence.index == index)
        inputs, regions, _ = self._find_regions(self.evidence, at)
        heat = interpolate(torch.from_numpy(self.evidence.cells[at])[None], inputs.shape[2:], mode="bilinear")[0, 0]
        pixels, inner = self.model.to_pixels(inputs)[0] / 255, -max_pool2d(-regions.float(), 5, 1, 2) > 0
        outlined = np.where((regions & ~inner)[0, ..., None].numpy(), _OUTLINE, pixels)
        return to_pillow(np.concatenate([outlined, overlay(pixels, heat)]))

    def _load(self, indices: Positions) -> tuple[Tensor, Tensor]:
        """Return inputs ``[n, C, H, W]`` and objects ``[n, H, W]`` of images that could be read before."""
        batch = load_batch(self.run.data, indices.tolist(), self.model.geometries)
        if batch.failures:
            raise DataError(f"an image can no longer be read: {batch.failures[0][1]}")
        return batch.inputs.to(self.device), batch.regions


def run_audit(
    options: AuditOptions,
    out: str | Path,
    *,
    engine: Engine | None = None,
    loader: ModelLoader = ModelEntry.load,
    threads: int | None = None,
    progress: ProgressCallback | None = None,
    command: str = "",
) -> Audit:
    """Collect the evidence of all images, or what is left of it, test its clusters, and write the report.

    Args:
        options: what is audited.
        out: folder of the audit; the same folder resumes.
        engine: where maps are computed; this process on the CPU by default.
        loader: returns the model of an entry; for models that no spec names.
        threads: torch threads of each worker on the CPU.
        progress: called as the audit advances.
        command: command line, for the report.
    """
    start, job = time.perf_counter(), EvalJob(options.plan(), loader, threads)
    run = EvaluationRun(job, Path(out) / "run", engine, progress)
    with run.engine:
        images = run.scan_images()
        pairs = [(one.index, int(one.predicted or 0) if one.label is None else one.label) for one in images]
        collected = run.collect_evidence("collecting evidence", [pairs])
        known = np.isfinite(collected.object_share)
        chosen = known if known.any() else ~known  # where an object is known, images on which it is visible
        evidence = ImageEvidence(*(getattr(collected, field.name)[chosen] for field in fields(collected)))
        tester = GroupTester(options, run, images, evidence)
        findings = _test_groups(tester)
    audit = Audit(
        findings=tuple(sorted(findings, key=lambda one: (not one.confirmed, -one.effect[0]))),
        images=len(images),
        accuracy=tester.accuracy(np.arange(len(evidence.index))),
        classes=sum(group.class_index != POOLED for group in tester.groups),
        knows_objects=tester.knows_objects,
        seconds=time.perf_counter() - start,
    )
    write_report(audit, options, tester.draw, Path(out), command)
    return audit


def _test_groups(tester: GroupTester) -> list[Finding]:
    """Return the findings of all groups.

    Clusters are tested only in a group that is confirmed as a whole, which keeps the error rate of all findings. Only
    groups whose evidence is tested need controls.
    """
    groups = tester.groups
    tester.collect_controls([group for group in groups if not tester.has_scenes(group)])
    wholes = []
    for done, group in enumerate(groups):
        tester.run.progress("testing classes", done, len(groups), 0)
        wholes.append(tester.test_whole(group))
    wholes = _confirm(wholes)
    confirmed = [group for group, whole in zip(groups, wholes, strict=True) if whole.confirmed]
    tester.collect_controls([group for group in confirmed if tester.has_scenes(group)])
    findings: list[Finding] = []
    for done, (group, whole) in enumerate(zip(groups, wholes, strict=True)):
        tester.run.progress("testing clusters", done, len(groups), 0)
        findings += _locate(tester, group, whole) if whole.confirmed else [whole]
    return findings


def _locate(tester: GroupTester, group: Group, whole: Finding) -> list[Finding]:
    """Return the clusters of a confirmed group, or all its regions, or the group itself if neither is confirmed."""
    regions, *clusters = _confirm(tester.test_regions(group))
    if any(one.confirmed for one in clusters):
        return clusters
    return [regions if regions.confirmed else whole]


def _confirm(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings with p-values corrected for their number, confirmed if significant and large enough."""
    return [
        replace(one, p_value=p_value, confirmed=p_value < SIGNIFICANCE and one.effect[0] >= MIN_EFFECT)
        for one, p_value in zip(findings, correct_p_values([one.p_value for one in findings]), strict=True)
    ]
