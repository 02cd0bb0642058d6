"""FullGrad: input times gradient plus bias times gradient, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from torch import Tensor, nn

from dave_vit._internal.schema import check_choice
from dave_vit.engine.calls import RuleSet
from dave_vit.engine.operators import OperatorKind, names_of_kind
from dave_vit.engine.rule_sets import PLAIN
from dave_vit.engine.rules.attention import multi_head_attention
from dave_vit.engine.rules.linear import affine
from dave_vit.engine.targets import Target
from dave_vit.methods.base import METHODS, Method, MethodInfo
from dave_vit.methods.bias_placement import CONSTANT_ROWS, Contribution, attributions, scale_to_unit, sum_maps, upsample
from dave_vit.methods.explanation import Explanation
from dave_vit.methods.pass_size import PassSize

Biases = Literal["all", "conv"]

_WEIGHTED = names_of_kind(OperatorKind.WEIGHTED)
# Ordinary derivatives that also record the additive constants of layers. Layer and group norms of zero are their bias.
_ADDING = [*_WEIGHTED, "layer_norm", "group_norm", "add", "sub", "rsub", "cat", "stack"]
_RULES: dict[str, RuleSet] = {
    "all": PLAIN.extend(
        "full gradient", {**dict.fromkeys(_ADDING, affine), "multi_head_attention_forward": multi_head_attention}
    ),
    "conv": PLAIN.extend("full gradient of convolutions", dict.fromkeys(_WEIGHTED - {"linear"}, affine)),
}


@METHODS.register("fullgrad")
class FullGrad(Method):
    """Input times gradient, and bias times gradient of every layer, brought to the size of the image and added up.

    As published, each channel of each layer is taken by its absolute value and rescaled to [0, 1] before it is brought
    to the image's size and added, so the map is never negative. What has no place in the image (class tokens, pooled
    features, the head) stays out. With ``rescale=False`` everything keeps its sign and size and what has no place is
    spread evenly: the attribution of a piecewise linear model (ReLU, max-pool, batch norm) then sums to its logit.

    Args:
        model: any module that maps inputs to logits.
        biases: "all" takes every additive constant (convolutions, linear layers, norms, position embeddings); "conv"
            takes convolutions and batch norms only, as the grad-cam package does. In a ViT that is one layer.
        rescale: as published; False gives signed sums.
        options: ``chunk`` (images in one pass; one at a time where the model does not separate its constants by image)
            and ``autocast``.
    """

    info = MethodInfo(
        "Input times gradient plus bias times gradient of every layer.",
        "Srinivas and Fleuret, NeurIPS 2019",
        "1 forward, 1 backward",
    )
    _why_no_clips = "puts every constant at its place in the image"
    _rows, _kept = CONSTANT_ROWS, "constants"

    def __init__(self, model: nn.Module, *, biases: Biases = "all", rescale: bool = True, **options: Any) -> None:
        super().__init__(model, **options)
        self.biases, self.rescale = check_choice("biases", biases, _RULES), rescale

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        return attributions(self, images, target, scaled_sum if self.rescale else signed_sum, _RULES[self.biases])


def signed_sum(direct: Tensor, parts: Iterable[Contribution]) -> Tensor:
    """Return input and biases times their derivatives, ``[C, H, W]``; what has no place is spread evenly."""
    size = (direct.shape[-2], direct.shape[-1])
    return direct + sum_maps((part.spread(size) for part in parts), direct)


def scaled_sum(direct: Tensor, parts: Iterable[Contribution]) -> Tensor:
    """Return the published sum ``[C, H, W]``: absolute values, channels rescaled; what has no place is left out."""
    size = (direct.shape[-2], direct.shape[-1])
    # Channels are added up before the upsampling, which is linear.
    grids = (scale_to_unit(part.grid.abs()).sum(0) for part in parts if part.grid is not None)
    maps = (upsample(grid[None, None], size)[0, 0] for grid in grids)
    return scale_to_unit(direct.abs()) + sum_maps(maps, direct)
