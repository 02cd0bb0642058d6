"""Attribution methods: one file for each family."""

from dave_vit.methods import (  # noqa: F401 - registers
    attention,
    baselines,
    bcos,
    chefer,
    fullgrad,
    gradcam,
    gradients,
    greedy,
    iia,
    legrad,
    libragrad,
    lrp,
    occlusion,
    omenn,
    rectified,
    rise,
    scorecam,
    surrogates,
    tis,
    vit_cx,
)
from dave_vit.methods.base import METHODS, Explanation, Method, MethodInfo, create_method
from dave_vit.methods.dave import DAVE, Effective, Equivariant

__all__ = ["DAVE", "METHODS", "Effective", "Equivariant", "Explanation", "Method", "MethodInfo", "create_method"]
