"""What an audit takes and returns."""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from dave_vit._internal.schema import check_choice
from dave_vit.errors import OptionError
from dave_vit.evaluate import MethodEntry, MetricEntry, ModelEntry, Plan

SIGNIFICANCE = 0.05  # of all findings of an audit together
MIN_IMAGES = 6  # of a cluster
MIN_EFFECT = 0.25  # gain of log odds that is worth a finding: odds times 1.3
_RECORDED = ("class_index", "share", "region", "effect", "confirmed")
SURROUNDINGS = "surroundings"  # the region of a finding that no cluster locates
ClusterBy = Literal["features", "maps"]


@dataclass(frozen=True)
class AuditOptions:
    """What is audited.

    Attributes:
        model: the model.
        data: spec of a data set.
        method: method that computes the maps.
        limit: number of images to use, the first ones.
        smallest: images of a cluster at least; classes with fewer are audited together.
        cluster_by: cluster the model's features at the evidence, or the maps themselves (SpRAy).
        seed: seed of all random draws.
        batch: images per forward pass.
        plugins: Python files to import in each process.
    """

    model: ModelEntry = field(default_factory=lambda: ModelEntry("builtin"))
    data: str = "builtin"
    method: MethodEntry = field(default_factory=lambda: MethodEntry("dave"))
    limit: int | None = None
    smallest: int = MIN_IMAGES
    cluster_by: ClusterBy = "features"
    seed: int = 0
    batch: int = 16
    plugins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_choice("cluster_by", self.cluster_by, get_args(ClusterBy))
        if self.smallest < MIN_IMAGES:
            how = f"expected {MIN_IMAGES} or more, fewer have no interval"
            raise OptionError(f"clusters of {self.smallest} images; {how}")

    def plan(self) -> Plan:
        """Return the plan of the run that collects the evidence; its metric is not computed."""
        entries = (self.model,), (self.method,), (MetricEntry("energypg"),)
        return Plan(*entries, self.data, self.limit, (self.seed,), batch=self.batch, plugins=self.plugins)


@dataclass(frozen=True)
class Finding:
    """A cluster of images of one class, and what the tests of its evidence showed.

    Attributes:
        class_index: the class; -1 for images of classes that have too few.
        class_name: its name.
        members: indices of the images in the data set, those with the largest gain first.
        share: share of the class's evidence that lies in the tested regions of these images.
        object_share: share of their own evidence that lies on the object; None where objects are unknown.
        region: where the tested evidence lies; `SURROUNDINGS` if all but the object was tested.
        effect: gain of the class's log odds in other images that get the region, beyond that of regions that were
            chosen in the same way in images of other classes, with its 95 % interval. Of surroundings: log odds of the
            class with its objects in scenes of these images, beyond those with the same objects in other scenes.
        p_value: of no effect, corrected for the number of classes and of clusters of a class.
        confidence: mean probability of the class before and after the region is removed.
        kept: share of predictions that are still the class after that.
        accuracy: of the cluster's images, and of the other images of the class; None without labels.
        confirmed: whether the effect is significant and large enough.
    """

    class_index: int
    class_name: str
    members: tuple[int, ...]
    share: float
    object_share: float | None
    region: str
    effect: tuple[float, float, float]
    p_value: float
    confidence: tuple[float, float]
    kept: float
    accuracy: tuple[float | None, float | None]
    confirmed: bool = False

    def record(self) -> dict[str, Any]:
        """Return the finding as ``findings`` of audit.json has it; programs rely on exactly these keys."""
        recorded = {name: getattr(self, name) for name in _RECORDED}
        return {"class": self.class_name, "images": len(self.members), **recorded}

    def details(self) -> dict[str, Any]:
        """Return the rest, as ``details`` of audit.json has it, in the order of ``findings``."""
        return {name: value for name, value in vars(self).items() if name not in (*_RECORDED, "class_name")}


@dataclass(frozen=True)
class Audit:
    """Result of an audit.

    Attributes:
        findings: confirmed ones first, then by effect.
        images: number of audited images.
        accuracy: accuracy on them; None without labels.
        classes: number of classes that were audited on their own.
        knows_objects: whether the data has boxes or masks, so that evidence outside of objects is known.
        seconds: time of the audit.
    """

    findings: tuple[Finding, ...]
    images: int
    accuracy: float | None
    classes: int
    knows_objects: bool
    seconds: float
