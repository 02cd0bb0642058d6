"""Audits: clusters, tests of evidence, and whole audits of models whose reliance is known by construction."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from dave_vit import cli
from dave_vit.audit import AuditOptions, run_audit
from dave_vit.audit.groups import cluster_images, name_place, partition, silhouette
from dave_vit.audit.report import compare_audits, read_audit
from dave_vit.audit.verification import (
    Others,
    choose_reference,
    compare_gains,
    correct_p_values,
    find_regions,
    measure_gains,
    measure_removal,
    measure_scenes,
)
from dave_vit.errors import DataError
from dave_vit.evaluate import MethodEntry, ModelEntry

SIDE = 32
CONTRACT = {
    **{"class": str, "class_index": int, "images": int, "share": float, "region": str},
    **{"effect": list, "confirmed": bool},
}
"""The keys of a finding in audit.json, which programs outside of the project read, and their types."""
COLOURS = {"blue": (40, 60, 220), "green": (40, 200, 60), "red": (220, 40, 40)}


class Oracle(nn.Module):
    """Knows colours, and gives red a bonus for a white corner below on the right: [B,3,32,32] -> [B,3]."""

    def __init__(self, bonus: float) -> None:
        super().__init__()
        self.colours = nn.Conv2d(3, 3, 1)
        self.register_buffer("bonus", torch.tensor([0.0, 0.0, bonus]))
        with torch.no_grad():
            self.colours.weight.copy_(torch.eye(3).flip(0)[..., None, None] * 3 - 1)  # of blue, green, red
            self.colours.bias.fill_(-1.2)
        self.class_names = sorted(COLOURS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        corner = torch.relu(x[:, :, 24:, 24:].mean((1, 2, 3)) - 0.4)
        return 8 * torch.relu(self.colours(x)).mean((2, 3)) + corner[:, None] * self.bonus

    def preprocess(self, image: Image.Image) -> torch.Tensor:
        pixels = np.array(image.convert("RGB").resize((SIDE, SIDE)))
        return torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 127.5 - 1


def load_relying(entry, device):
    return Oracle(12.0).eval().to(device)


def load_clean(entry, device):
    return Oracle(0.0).eval().to(device)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Squares of three colours with boxes; eight of twelve red ones have a white corner."""
    root, draw = tmp_path_factory.mktemp("audit") / "photos", np.random.default_rng(0)
    lines = ["image,left,top,right,bottom"]
    for name, colour in COLOURS.items():
        (root / name).mkdir(parents=True)
        for number in range(12):
            pixels = draw.integers(70, 110, (SIDE, SIDE, 3)).astype(np.uint8)
            top, left = draw.integers(0, 12, 2)
            pixels[top : top + 10, left : left + 10] = colour
            if name == "red" and number < 8:
                pixels[24:, 24:] = 250
            Image.fromarray(pixels).save(root / name / f"{number:02d}.png")
            lines.append(f"{name}/{number:02d}.png,{left},{top},{left + 10},{top + 10}")
    (root / "boxes.csv").write_text("\n".join(lines))
    return root


def options(photos, **changes) -> AuditOptions:
    return AuditOptions(ModelEntry("oracle"), f"folder:{photos}", MethodEntry("input_x_gradient"), **changes)


# Clusters


def test_clusters_are_those_that_points_were_drawn_from():
    draw = np.random.default_rng(1)
    points = np.concatenate([draw.normal(centre, 0.3, (20, 5)) for centre in (0, 3, 6)])
    labels = cluster_images(points.astype(np.float32), 6)
    assert len(set(labels.tolist())) == 3
    assert all(len(set(labels[start : start + 20].tolist())) == 1 for start in (0, 20, 40))
    assert silhouette(points, partition(points, 3, np.random.default_rng(0))) > 0.7


def test_one_cloud_is_one_cluster_and_few_images_are_not_split():
    cloud = np.random.default_rng(2).normal(size=(60, 16)).astype(np.float32)
    assert set(cluster_images(cloud, 6).tolist()) == {0}
    assert set(cluster_images(np.eye(4, dtype=np.float32), 3).tolist()) == {0}


def test_silhouette_by_hand():
    points = np.array([[0.0], [1.0], [5.0]])
    expected = ((5 - 1) / 5 + (4 - 1) / 4 + 0) / 3  # a cluster of one counts as zero
    assert silhouette(points, np.array([0, 0, 1])) == pytest.approx(expected)


# Tests of evidence


def test_regions_hold_the_share_outside_of_boxes():
    cells = torch.zeros(1, 5, 5)
    cells[0, 0, 0], cells[0, 4, 4], cells[0, 0, 4] = 0.6, 0.38, 0.02
    objects = torch.zeros(1, 40, 40, dtype=torch.bool)
    region = find_regions(cells, objects)[0]
    assert region[:8, :8].all()
    assert region[32:, 32:].all()
    assert not region[:8, 36:].any()  # a fiftieth of the evidence
    objects[0, :8, 0] = objects[0, 7, :8] = True
    outside = find_regions(cells, objects)[0]
    assert not outside[:9, :9].any()  # the box around the object, not its outline
    assert outside[32:, 32:].all()


def test_a_gain_is_what_the_region_brings_to_others():
    model = Oracle(12.0).eval()
    plain = torch.full((3, 3, SIDE, SIDE), -0.3)
    image = plain[:1].clone()
    image[:, :, 24:, 24:] = 1.0
    region = torch.zeros(1, SIDE, SIDE, dtype=torch.bool)
    region[:, 24:, 24:] = True
    how = (model, image, region, np.array([2]), Others(plain, np.array([0, 1, 0])), 0)
    gains, (before, after, _) = measure_gains(*how), measure_removal(*how)
    with_corner, without = (model(part).detach().double().softmax(1)[0, 2] for part in (image, plain[:1]))
    assert gains[0] == pytest.approx(float(with_corner.logit() - without.logit()), rel=1e-5)
    assert before[0] == pytest.approx(float(with_corner), rel=1e-5)
    assert after[0] == pytest.approx(float(without), rel=1e-5)


def test_regions_are_moved_between_other_classes_only():
    """An image of the class among the others would bring what is tested."""
    model = Oracle(12.0).eval()
    plain = torch.full((3, 3, SIDE, SIDE), -0.3)
    plain[2, :, 24:, 24:] = 1.0  # of the class itself
    region = torch.ones(1, SIDE, SIDE, dtype=torch.bool)
    others = Others(plain, np.array([0, 1, 2]))
    assert measure_gains(model, plain[:1], region, np.array([2]), others, seed=0)[0] == pytest.approx(0, abs=1e-6)


def test_objects_take_the_place_of_the_scenes_own():
    model = Oracle(12.0).eval()
    scenes, spans = torch.full((2, 3, SIDE, SIDE), -0.3), [(slice(2, 10), slice(2, 10)), (slice(0, 6), slice(4, 16))]
    scenes[1, :, 24:, 24:] = 1.0  # where the model looks
    crop = torch.tensor([0.7, -0.7, -0.7])[:, None, None].expand(3, 5, 5)
    measured = measure_scenes(model, [crop, crop], scenes, spans, 2)
    by_hand = scenes.clone()
    for image, (rows, columns) in zip(by_hand, spans, strict=True):
        image[:, rows, columns] = crop[:, :1, :1]
    expected = model(by_hand).detach().double().softmax(1)[:, 2].logit()
    assert measured.shape == (2, 2)
    np.testing.assert_allclose(measured[0], expected, rtol=1e-4)
    assert measured[0, 1] > measured[0, 0] + 1


def test_the_reference_is_the_third_that_speaks_least_against_a_class_without_bias():
    draw = np.random.default_rng(0)
    means = []
    for _ in range(200):
        alike = [draw.normal(0, 1, 10) for _ in range(5)]
        means.append(choose_reference([*alike, *(draw.normal(-6, 1, 10) for _ in range(4))]).mean())
    assert abs(np.mean(means)) < 0.06  # taking the largest means themselves would give 0.25


def test_p_values():
    assert correct_p_values([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert correct_p_values([0.5, 0.9]) == [1.0, 1.0]


def test_gains_are_compared_with_those_of_controls():
    draw = np.random.default_rng(0)
    controls = draw.normal(1.0, 0.5, 20)
    (_, low, high), p_value = compare_gains(draw.normal(1.0, 0.5, 20), controls)
    assert low < 0 < high
    assert p_value > 0.05
    (_, low, _), p_value = compare_gains(draw.normal(3.0, 0.5, 20), controls)
    assert low > 1
    assert p_value < 1e-6
    assert compare_gains(np.zeros(5), np.zeros(4))[1] == 1.0


@pytest.mark.parametrize(
    ("rows", "columns", "name"),
    [
        (slice(16, 20), slice(16, 20), "lower right corner"),
        (slice(0, 1), slice(0, 20), "border"),
        (slice(8, 12), slice(8, 12), "centre"),
        (slice(0, 20), slice(0, 20), "spread out"),
    ],
)
def test_places_have_names(rows, columns, name):
    evidence = np.zeros((20, 20))
    evidence[rows, columns] = 1
    assert name_place(evidence) == name


# Whole audits


@pytest.fixture(scope="module")
def audited(photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("audits") / "relying"
    return run_audit(options(photos), out, loader=load_relying, command="dave audit"), out


def test_a_model_that_uses_the_corner_is_caught(audited):
    audit, _ = audited
    confirmed = [one for one in audit.findings if one.confirmed]
    assert {(one.class_name, one.region) for one in confirmed} == {("red", "lower right corner")}
    (finding,) = confirmed
    assert set(range(24, 32)) <= set(finding.members) | {30, 31}
    assert finding.effect[1] > 0.5
    assert finding.confidence[0] > finding.confidence[1] + 0.1
    assert audit.findings[0] is finding
    assert audit.knows_objects
    assert audit.images == 36


def test_a_model_that_uses_objects_has_no_confirmed_finding(photos, tmp_path):
    audit = run_audit(options(photos), tmp_path, loader=load_clean)
    assert audit.findings
    assert not any(one.confirmed for one in audit.findings)


def test_the_report_says_what_was_found_first(audited):
    audit, out = audited
    record = json.loads((out / "audit.json").read_text())
    first, details = record["findings"][0], record["details"][0]
    assert {key for one in record["findings"] for key in one} == CONTRACT.keys()
    assert {name: type(value) for name, value in first.items()} == CONTRACT
    assert first["images"] == len(details["members"])
    assert (first["class"], first["class_index"], first["confirmed"]) == ("red", 2, True)
    assert first["images"] == len(audit.findings[0].members)
    assert len(first["effect"]) == 3
    assert record["command"] == "dave audit"
    page = (out / "index.html").read_text()
    places = [page.index(part) for part in ("relies on what surrounds the object in red;", "red: lower right corner")]
    places += [page.index(part) for part in (">Not confirmed<", ">What is not known<", "<code>dave audit</code>")]
    assert places == sorted(places)
    assert not re.search(r"https?://|<script|<link|url\(", page)
    assert 'href="classes/2.html"' in page
    assert (out / "classes" / "2.html").exists()
    assert "multiplies the odds of red by" in (out / "audit.md").read_text()


def test_the_same_folder_resumes(audited, photos, monkeypatch):
    audit, out = audited
    monkeypatch.setattr("dave_vit.evaluate.worker.Worker.compute", None)  # nothing is computed again
    again = run_audit(options(photos), out, loader=load_relying)
    assert again.findings == audit.findings


def test_without_boxes_the_report_says_what_is_unknown(photos, tmp_path):
    for path in photos.rglob("*.png"):
        target = tmp_path / "bare" / path.relative_to(photos)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    audit = run_audit(options(tmp_path / "bare"), tmp_path / "out", loader=load_clean)
    assert not audit.knows_objects
    assert "may be the object" in (tmp_path / "out" / "audit.md").read_text()


def test_classes_with_few_images_are_audited_together(photos, tmp_path):
    audit = run_audit(options(photos, smallest=13), tmp_path, loader=load_relying)
    assert {(one.class_index, one.class_name) for one in audit.findings} == {(-1, "classes with few images")}
    assert audit.classes == 0


def test_two_classes_are_refused(photos, tmp_path):
    with pytest.raises(DataError, match="an audit compares a class with two others"):
        run_audit(options(photos, limit=24), tmp_path, loader=load_clean)


def test_the_command(photos, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("dave_vit.models.loading.load_model", lambda *words, **more: load_relying(None, "cpu"))
    out = tmp_path / "report"
    words = ["audit", "--data", f"folder:{photos}", "--method", "input_x_gradient", "--out", str(out), "--json"]
    assert cli.run(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["findings"][0]["region"] == "lower right corner"
    assert (out / "index.html").exists()


# Comparison of audits


def test_the_command_says_what_changed_against_another_model(photos, tmp_path, monkeypatch, capsys):
    loaders = {"with": load_relying, "without": load_clean}
    monkeypatch.setattr("dave_vit.models.loading.load_model", lambda spec, *_, **__: loaders[spec](None, "cpu"))
    out, how = tmp_path / "report", ["--data", f"folder:{photos}", "--method", "input_x_gradient", "--json"]
    assert cli.run(["audit", "--model", "with", "--against", "without", *how, "--out", str(out)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["findings"][0]["confirmed"]
    assert next((row["class"], row["verdict"]) for row in told["classes"]) == ("red", "appeared")
    assert cli.run(["diff", str(out), str(out / "against"), "--json"]) == 0  # the other way round
    back = json.loads(capsys.readouterr().out)
    assert back["classes"][0]["verdict"] == "disappeared"
    assert back["classes"][0]["change"][0] == pytest.approx(-told["classes"][0]["change"][0])
    assert any(line.startswith("model: with -> without") for line in back["changes"])


def finding(effect, *, confirmed, index=0) -> dict:
    return {"class": f"c{index}", "class_index": index, "region": "border", "effect": effect, "confirmed": confirmed}


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (([1, 0.8, 1.2], True), ([3, 2.8, 3.2], True), "stronger"),
        (([3, 2.8, 3.2], True), ([1, 0.8, 1.2], True), "weaker"),
        (([0.2, 0, 0.4], False), ([1, 0.8, 1.2], True), "appeared"),
        (([0.8, 0.3, 1.3], False), ([1, 0.5, 1.5], True), "no clear change"),  # only one of them passed the test
        (([0.2, 0, 0.4], False), ([0.9, 0.8, 1.0], False), ""),
    ],
)
def test_verdicts_of_changes(before, after, verdict):
    records = [{"findings": [finding(effect, confirmed=confirmed)]} for effect, confirmed in (before, after)]
    (row,) = compare_audits(*records)
    assert row["verdict"] == verdict


def test_the_interval_of_a_change_is_that_of_independent_estimates():
    records = [{"findings": [finding(effect, confirmed=True)]} for effect in ([1, -2, 4], [6, 2, 10])]
    assert compare_audits(*records)[0]["change"] == pytest.approx([5, 0, 10])  # 3 and 4 make 5


def test_folders_that_are_no_audits(tmp_path):
    with pytest.raises(DataError, match="no report of dave audit"):
        read_audit(tmp_path)
    (tmp_path / "audit.json").write_text("{}")
    with pytest.raises(DataError, match="damaged"):
        read_audit(tmp_path)
