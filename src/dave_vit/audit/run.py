"""Run an audit: collect evidence, cluster it in each class, test it on the model, write the report."""

import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from dave_vit.audit.findings import MIN_EFFECT, SIGNIFICANCE, Audit, AuditOptions, Finding
from dave_vit.audit.groups import POOLED, Group
from dave_vit.audit.report import write_report
from dave_vit.audit.testing import GroupTester
from dave_vit.audit.verification import correct_p_values
from dave_vit.evaluate.engines import Engine
from dave_vit.evaluate.job import EvalJob, ModelLoader
from dave_vit.evaluate.plan_entries import ModelEntry
from dave_vit.evaluate.run import EvaluationRun, ProgressCallback
from dave_vit.evaluate.scoring import ImageEvidence


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
        evidence = _keep_known(run.collect_evidence("collecting evidence", [pairs]))
        tester = GroupTester(options, run, images, evidence)
        findings = _test_groups(tester, run)
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


def _keep_known(evidence: ImageEvidence) -> ImageEvidence:
    """Return the images whose object is known and visible, or all if no object is known."""
    known = np.isfinite(evidence.object_share)
    chosen = known if known.any() else ~known
    return ImageEvidence(*(getattr(evidence, field.name)[chosen] for field in fields(evidence)))


def _collect_controls(tester: GroupTester, groups: Sequence[Group], run: EvaluationRun) -> None:
    if groups:
        controls = [tester.choose_controls(group) for group in groups]
        tester.add_controls(run.collect_evidence("collecting controls", controls))


def _test_groups(tester: GroupTester, run: EvaluationRun) -> list[Finding]:
    """Return the findings of all groups.

    Clusters are tested only in a group that is confirmed as a whole, which keeps the error rate of all findings. Only
    groups whose evidence is tested need controls.
    """
    groups = tester.groups
    _collect_controls(tester, [group for group in groups if not tester.has_scenes(group)], run)
    wholes = []
    for done, group in enumerate(groups):
        run.progress("testing classes", done, len(groups), 0)
        wholes.append(tester.test_whole(group))
    wholes = _confirm(wholes)
    confirmed = [group for group, whole in zip(groups, wholes, strict=True) if whole.confirmed]
    _collect_controls(tester, [group for group in confirmed if tester.has_scenes(group)], run)
    findings: list[Finding] = []
    for done, (group, whole) in enumerate(zip(groups, wholes, strict=True)):
        run.progress("testing clusters", done, len(groups), 0)
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
    corrected = correct_p_values([one.p_value for one in findings])
    return [
        replace(one, p_value=p_value, confirmed=p_value < SIGNIFICANCE and one.effect[0] >= MIN_EFFECT)
        for one, p_value in zip(findings, corrected, strict=True)
    ]
