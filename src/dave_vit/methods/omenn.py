"""OMENN: the logit as one matrix, weights times input plus biases, which sums to the logit exactly."""

from __future__ import annotations

from torch import Tensor

from dave_vit.engine.rule_sets import EFFECTIVE
from dave_vit.engine.targets import Target
from dave_vit.methods.base import METHODS, Method, MethodInfo
from dave_vit.methods.bias_placement import CONSTANT_ROWS, attributions
from dave_vit.methods.explanation import Explanation
from dave_vit.methods.fullgrad import signed_sum
from dave_vit.methods.pass_size import PassSize


@METHODS.register("omenn")
class OMENN(Method):
    """One matrix to explain a network: C = C_w * x + C_b, with sum(C) = logit.

    With all operators frozen (dynamic linearity) the logit is affine in the input. C_w is the effective transformation.
    C_b holds what each additive constant contributes (biases, position embeddings, class and register tokens),
    at the place where it acts: a value of a feature map or token is shared evenly by the pixels of its place and by
    their channels; what has no place in the image (class token, pooled features, windows) by all pixels. Hence

        sum(C) = <W, x> + sum over constants <ds/db, b> = logit

    for every model that the effective transformation covers.

    Args:
        model: any module that maps inputs to logits.
        options: ``chunk`` (images in one pass; one at a time where the model does not separate its constants by image)
            and ``autocast``.
    """

    info = MethodInfo(
        "Effective transformation times input, plus every bias at the place where it acts; sums to the logit.",
        "Wróbel et al., 2024",
        "1 forward, 1 backward",
        unit="logit",
    )
    _why_no_clips = "puts every constant at its place in the image"
    _rows, _kept = CONSTANT_ROWS, "constants"

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        return attributions(self, images, target, signed_sum, EFFECTIVE)
