"""Trains models with planted shortcuts, audits them, and prints which shortcuts were found.

    python training/audit_table.py --out audit-table

A model is trained for each strength (share of a class's images that have its cue) and seed. Five classes have a cue of
their own, five have none; all seeds of training and audited images differ. A shortcut is found if its class has a
confirmed finding, and a confirmed finding in another class is a false alarm. Maps are those of one pass (`effective`),
to save time. The same command resumes.

Beside `dave audit` stand three scores of a class that need only maps: SpRAy (Lapuschkin et al., 2019: the largest
eigengap of the spectral clustering of the class's maps) with Grad-CAM and with DAVE, and the share of the evidence
outside of objects. They have no rule for what is an alarm, so each gets the threshold, chosen on the results
themselves, that raises an alarm in one of ten classes without a cue. With --baseline-images they see more images: an
audit makes other passes than those of its maps.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import shortcut
import torch
from shortcuts import CUES, SHORTCUT_CLASSES, compose_shortcut

from dave_vit.audit import AuditOptions, run_audit
from dave_vit.evaluate import MethodEntry, ModelEntry
from dave_vit.evaluate.job import EvalJob
from dave_vit.evaluate.run import EvaluationRun
from dave_vit.evaluate.scoring import ImageEvidence

STRENGTHS = (0, 20, 40, 60, 80, 100)
TRAINING, EPOCHS = 1500, 12  # images and epochs
NEIGHBOURS = 5  # of a map in the graph of SpRAy
MOST_CLUSTERS = 6
ALARMS = 0.1  # false alarms that baselines may raise


def collect(options: AuditOptions, out: Path) -> ImageEvidence:
    """Returns the evidence of all images for their labels."""
    run = EvaluationRun(EvalJob(options.plan()), out)
    with run.engine:
        return run.collect_evidence("maps", [[(one.index, one.label or 0) for one in run.scan_images()]])


def eigengap(maps: np.ndarray) -> float:
    """Returns the largest gap between small eigenvalues of the normalised Laplacian of a graph of maps [n, d]."""
    points = maps / np.linalg.norm(maps, axis=1, keepdims=True).clip(1e-12)
    apart = np.linalg.norm(points[:, None] - points, axis=2)
    near = apart <= np.sort(apart, axis=1)[:, NEIGHBOURS : NEIGHBOURS + 1]
    graph = (near | near.T) & ~np.eye(len(maps), dtype=bool)
    scale = 1 / np.sqrt(graph.sum(1))
    values = np.linalg.eigvalsh(np.eye(len(maps)) - scale[:, None] * graph * scale)
    return float(np.diff(values[1 : MOST_CLUSTERS + 2]).max())


def score_classes(evidence: ImageEvidence) -> dict[str, list[float]]:
    """Returns the score of each class by SpRAy, and by the share of the evidence outside of objects."""
    own = [evidence.target == label for label in range(len(SHORTCUT_CLASSES))]
    maps = evidence.cells.reshape(len(evidence.cells), -1)
    return {
        "SpRAy": [eigengap(maps[chosen]) for chosen in own],
        "outside": [float(1 - np.nanmean(evidence.object_share[chosen])) for chosen in own],
    }


def measure_reliance(model: torch.nn.Module, seed: int) -> list[float]:
    """Returns what each cue itself adds to the log odds of its class, in the mean over images with and without it."""
    gains = []
    for label in range(len(CUES)):
        scenes = [[compose_shortcut(10 * i + label, percent, seed).image for i in range(20)] for percent in (0, 100)]
        bare, planted = (_log_odds(model, np.stack(images), label) for images in scenes)
        gains.append(float((planted - bare).mean()))
    return gains


@torch.inference_mode()
def _log_odds(model: torch.nn.Module, images: np.ndarray, label: int) -> torch.Tensor:
    pixels = torch.from_numpy(images[:, shortcut.CROP, shortcut.CROP]).permute(0, 3, 1, 2)
    return model(shortcut.encode(pixels)).double().softmax(1)[:, label].clamp(1e-6, 1 - 1e-6).logit()


def score_baselines(
    entry: ModelEntry, data: str, out: Path, count: int, seconds: dict[str, float]
) -> dict[str, list[float]]:
    """Returns the score of each class by the baselines, by name; adds the seconds that their maps take."""
    scores = {}
    for method, name in (("gradcam", "Grad-CAM"), ("effective", "DAVE")):
        began = time.perf_counter()
        of_maps = score_classes(collect(AuditOptions(entry, data, MethodEntry(method), count), out / method))
        seconds[name] = time.perf_counter() - began
        scores |= {f"{score}, {name}": values for score, values in of_maps.items()}
    return scores


def examine(percent: int, seed: int, out: Path, count: int, more: int) -> dict[str, Any]:
    """Trains and audits one model; returns its row. The baselines see ``more`` images."""
    weights, folder = out / f"{percent}-{seed}.safetensors", out / f"{percent}-{seed}"
    if not weights.exists():
        shortcut.save(shortcut.build(percent, TRAINING, EPOCHS, seed, data_seed=2 * seed), weights)
    data, entry = f"shortcut:{percent}:{2 * seed + 1}", ModelEntry("timm:test_vit", str(weights))
    options = AuditOptions(entry, data, MethodEntry("effective"), count)
    began = time.perf_counter()
    audit = run_audit(options, folder)
    seconds = {"audit": time.perf_counter() - began}
    scores = score_baselines(entry, data, out / f"{percent}-{seed}-baselines", more, seconds)
    confirmed = [one for one in audit.findings if one.confirmed]
    names = [SHORTCUT_CLASSES.index(one.class_name) for one in confirmed]
    located = [label for label, one in zip(names, confirmed, strict=True) if one.region != "surroundings"]
    return {
        **{"percent": percent, "seed": seed, "alarms": names, "located": located, "scores": scores},
        **{
            "seconds": seconds,
            "reliance": measure_reliance(entry.load("cpu"), 2 * seed + 1),
            "accuracy": audit.accuracy,
        },
    }


def alarms(rows: list[dict[str, Any]], name: str) -> list[set[int]]:
    """Returns the classes with an alarm in each row, by the audit or by a score with its best threshold."""
    if name == "audit":
        return [set(row["alarms"]) for row in rows]
    clean = [row["scores"][name][label] for row in rows for label in _clean_classes(row)]
    threshold = np.quantile(clean, 1 - ALARMS)
    return [{label for label, score in enumerate(row["scores"][name]) if score > threshold} for row in rows]


def _clean_classes(row: dict[str, Any]) -> Iterable[int]:
    return range(len(CUES) if row["percent"] else 0, len(SHORTCUT_CLASSES))


def describe(rows: list[dict[str, Any]], name: str) -> list[str]:
    """Returns the lines of a table: what was found at each strength, by kind, and false alarms."""
    lines = [f"| {name} | {' | '.join(CUES)} | found | false alarms |", f"|---{'|---' * (len(CUES) + 2)}|"]
    by_row = alarms(rows, name)
    for percent in STRENGTHS:
        own = [(row, found) for row, found in zip(rows, by_row, strict=True) if row["percent"] == percent]
        if not own:
            continue
        kinds = [sum(label in found for _, found in own) if percent else 0 for label in range(len(CUES))]
        false = sum(len(found.intersection(_clean_classes(row))) for row, found in own)
        clean = sum(len(list(_clean_classes(row))) for row, _ in own)
        cells = [f"{kind} of {len(own)}" if percent else "" for kind in kinds]
        found = f"{sum(kinds)} of {len(CUES) * len(own)}" if percent else ""
        lines.append(f"| {percent} % | {' | '.join(cells)} | {found} | {false} of {clean} |")
    return lines


def describe_models(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the lines of a table: what cues themselves add to log odds, and seconds of the audit."""
    lines = [f"| cue adds to log odds | {' | '.join(CUES)} | accuracy | audit |", f"|---{'|---' * (len(CUES) + 2)}|"]
    for row in rows:
        cells = " | ".join(f"{value:.1f}" for value in row["reliance"])
        seconds = f"{row['seconds']['audit']:.0f} s"
        lines.append(f"| {row['percent']} %, seed {row['seed']} | {cells} | {row['accuracy']:.0%} | {seconds} |")
    return lines


def main() -> None:
    """Examines all models, or what is left of them, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strengths", type=int, nargs="+", default=STRENGTHS, metavar="PERCENT")
    parser.add_argument("--seeds", type=int, nargs="+", default=(1, 2))
    parser.add_argument("--images", type=int, default=1000, help="audited images")
    parser.add_argument("--baseline-images", type=int, help="images of the baselines; by default those audited")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows, more = [], options.baseline_images or options.images
    for seed in options.seeds:
        for percent in options.strengths:
            path = options.out / f"{percent}-{seed}.json"
            if not path.exists():
                path.write_text(json.dumps(examine(percent, seed, options.out, options.images, more)))
            rows.append(json.loads(path.read_text()))
    for name in ("audit", *rows[0]["scores"]):
        sys.stdout.write("\n".join(describe(rows, name)) + "\n\n")
    sys.stdout.write("\n".join(describe_models(rows)) + "\n")


if __name__ == "__main__":
    main()
