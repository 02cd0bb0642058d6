"""The report of an audit (JSON, Markdown, and HTML pages with pictures), and the comparison of two of them."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL.Image import Image

from dave_vit._internal.atomic_files import json_bytes, write_files
from dave_vit._internal.environment import format_facts, versions
from dave_vit.audit.findings import MIN_EFFECT, SIGNIFICANCE, SURROUNDINGS, Audit, AuditOptions, Finding
from dave_vit.errors import DataError
from dave_vit.viz.pages import render

Draw = Callable[[int], Image]
"""Returns the picture of an image, by its index in the data set, with its evidence over it."""
_FEW, _MANY = 6, 48  # pictures of a finding on the first page, and on the page of its class
_EMPTY: dict[str, Any] = {"title": "dave audit", "facts": [], "notes": [], "summary": "", "limits": [], "settings": []}


def write_report(audit: Audit, options: AuditOptions, draw: Draw, out: Path, command: str = "") -> list[Path]:
    """Write audit.json, audit.md, index.html and a page for each class; return the first three."""
    facts, limits = _list_facts(audit, options, command), list(describe_limits(audit))
    record = {
        "findings": [one.record() for one in audit.findings],
        "details": [{**one.details(), "text": describe_finding(one)} for one in audit.findings],
        **{name: value for name, value in vars(audit).items() if name != "findings"},
        **{name.replace(" ", "_"): value for name, value in facts},
        "summary": summarise(audit),
        "notes": limits,
    }
    entries = _list_entries(audit.findings, draw, _FEW, linked=True)
    first = {"heading": f"What {options.model.spec} relies on", "summary": summarise(audit), "entries": entries}
    files = {out / "audit.json": json_bytes(record)}
    for name in ("index.html", "audit.md"):
        page = render(f"audit{Path(name).suffix}", **_EMPTY | first | {"limits": limits, "settings": facts})
        files[out / name] = page.encode()
    pages: dict[Path, bytes] = {}
    for index in dict.fromkeys(one.class_index for one in audit.findings):
        own = [one for one in audit.findings if one.class_index == index]
        content = {"heading": own[0].class_name, "entries": _list_entries(own, draw, _MANY, linked=False)}
        pages[out / _page(index)] = render("audit.html", **_EMPTY | content).encode()
    write_files({**files, **pages})  # the record, named first, appears last
    return list(files)


def summarise(audit: Audit) -> str:
    """Return the result of an audit in a sentence."""
    confirmed = list(dict.fromkeys(one.class_name for one in audit.findings if one.confirmed))
    tested = f"clusters tested: {len(audit.findings)}, in {audit.images} images"
    what = "what surrounds the object" if audit.knows_objects else "the regions below"
    if not confirmed:
        return f"No reliance on {what.replace('the regions below', 'a region')} is confirmed; {tested}."
    return f"The model relies on {what} in {', '.join(confirmed)}; {tested}."


def describe_finding(finding: Finding) -> str:
    """Return what was measured of a finding, in sentences."""
    name, count, (before, after) = finding.class_name, len(finding.members), finding.confidence
    ratio, least, most = (f"{math.exp(value):.1f}" for value in finding.effect)
    whose = "each image's class" if finding.class_index < 0 else name
    if finding.region == SURROUNDINGS:
        tested = (
            f"Objects of {name} that are put into the scenes of {count} images of {name} have odds that are {ratio} "
            f"[{least}, {most}] times those of the same objects in scenes of other classes. "
            f"{finding.share:.0%} of the evidence is outside of the object, in the outlined regions."
        )
    else:
        tested = (
            f"In {count} images of {name}, {finding.share:.0%} of the evidence is {_describe_place(finding)}. Moved "
            f"into images of other classes, this region multiplies the odds of {whose} by {ratio} [{least}, {most}], "
            "compared with regions of other images that were chosen in the same way."
        )
    return (
        f"{tested} Without the region, the probability changes from {before:.2f} to {after:.2f}, and "
        f"{finding.kept:.0%} of the predictions are still {whose}.{_compare_accuracy(finding)}"
    )


def _describe_place(finding: Finding) -> str:
    outside = "" if finding.object_share is None else "outside of the object, "
    place = {"spread out": "spread over the image", "border": "at the border", "nowhere": "nowhere in particular"}
    return outside + place.get(finding.region, f"in the {finding.region}")


def describe_limits(audit: Audit) -> Iterator[str]:
    """Yield how findings were tested, and what the audit cannot know."""
    yield (
        f"A finding is confirmed if it multiplies the odds by at least {math.exp(MIN_EFFECT):.1f} and is significant "
        f"at {SIGNIFICANCE:.0%} after Holm's correction for the number of classes; clusters of a class are tested only "
        "if the class is confirmed. What is not confirmed may still be an effect too small for this number of images."
    )
    if audit.knows_objects:
        yield "An object that has no box or mask counts as surroundings of the others: look at the pictures."
    else:
        yield (
            "The data has no boxes or masks, so it is not known which evidence is the object itself: a confirmed "
            "finding is what the class relies on, and may be the object."
        )
    if any(one.class_index < 0 for one in audit.findings):
        yield 'Images of classes with too few images were audited together, as "classes with few images".'


def _compare_accuracy(finding: Finding) -> str:
    own, rest = finding.accuracy
    if own is None:
        return ""
    other = "" if rest is None else f", of the other images of this class {rest:.0%}"
    return f" The prediction is right in {own:.0%} of them{other}."


def _list_entries(findings: Sequence[Finding], draw: Draw, most: int, *, linked: bool) -> list[dict[str, Any]]:
    """Return what the templates show of findings; a page of all classes links those of single ones."""
    return [
        {
            "finding": one,
            "title": f"{one.class_name}: {one.region}",
            "text": describe_finding(one),
            "pictures": [draw(index) for index in one.members[: most if one.confirmed or not linked else 0]],
            "page": _page(one.class_index) if linked else "",
        }
        for one in findings
    ]


def _page(class_index: int) -> str:
    return f"classes/{class_index}.html"


def _list_facts(audit: Audit, options: AuditOptions, command: str) -> list[tuple[str, Any]]:
    facts = {
        "command": command,
        "model": options.model.spec,
        "data": f"{options.data}: {audit.images} images, {audit.classes} classes audited",
        "result": f"{sum(one.confirmed for one in audit.findings)} of {len(audit.findings)} clusters confirmed",
        "model accuracy": "" if audit.accuracy is None else f"{audit.accuracy:.1%}",
        "maps": f"{options.method.method} {dict(options.method.options) or ''}".strip(),
        "clustered by": options.cluster_by,
        "seed": str(options.seed),
        "time": f"{audit.seconds:.0f} s",
        "versions": format_facts(versions()),
    }
    return [(name, value) for name, value in facts.items() if value]


_SETTINGS = ("model", "data", "maps", "clustered_by", "seed", "versions")


def read_audit(folder: str | Path) -> dict[str, Any]:
    """Return the content of a folder's audit.json."""
    path = Path(folder) / "audit.json"
    try:
        record = json.loads(path.read_bytes())
        [(one["class_index"], one["effect"], one["confirmed"]) for one in record["findings"]]
    except FileNotFoundError as error:
        raise DataError(f"{path.parent}: no report of dave audit; looked for audit.json") from error
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(f"{path}: not written by dave audit, or damaged") from error
    return dict(record)


def compare_audits(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each class with a finding in either audit, those that changed most first.

    A class stands for its first finding, a confirmed one if there is any. ``change`` is the second effect minus the
    first, with its 95 % interval as of independent estimates: images that both audits share make it narrower in fact.
    """
    first, second = _first_findings(before), _first_findings(after)
    rows = [_compare(first.get(index), second.get(index)) for index in first.keys() | second.keys()]
    return sorted(rows, key=lambda row: (row["verdict"] == "", -abs(row["change"][0]) if row["change"] else 0.0))


def _first_findings(record: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the first finding of each class; reports list confirmed ones first."""
    return {one["class_index"]: one for one in reversed(record["findings"])}


def _compare(before: dict[str, Any] | None, after: dict[str, Any] | None) -> dict[str, Any]:
    known: dict[str, Any] = after or before or {}
    change = _subtract(after["effect"], before["effect"]) if before and after else None
    names = {"class": known["class"], "class_index": known["class_index"]}
    return {**names, "before": before, "after": after, "change": change, "verdict": _judge(before, after, change)}


def _subtract(after: list[float], before: list[float]) -> list[float]:
    """Subtract an estimate with its interval from another: widths of independent estimates add in squares."""
    mean = after[0] - before[0]
    half = math.hypot(*((high - low) / 2 for _, low, high in (after, before)))
    return [mean, mean - half, mean + half]


def _judge(before: dict[str, Any] | None, after: dict[str, Any] | None, change: list[float] | None) -> str:
    """Return what changed in a word; empty if nothing is confirmed in either audit."""
    was, is_ = (bool(one and one["confirmed"]) for one in (before, after))
    if not (was or is_):
        return ""
    if change is None:
        return "only in the second" if is_ else "only in the first"
    if change[1] <= 0 <= change[2]:
        return "no clear change"
    if was and is_:
        return "stronger" if change[0] > 0 else "weaker"
    return "appeared" if is_ else "disappeared"


def describe_settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Yield how two audits were made differently, and how the accuracy changed."""
    for name in _SETTINGS:
        if before.get(name) != after.get(name):
            yield f"{name.replace('_', ' ')}: {before.get(name)} -> {after.get(name)}"
    if None not in (accuracies := (before.get("accuracy"), after.get("accuracy"))):
        yield "accuracy: {:.1%} -> {:.1%}".format(*accuracies)
