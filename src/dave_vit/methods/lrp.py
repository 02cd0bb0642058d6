"""Relevance propagation: AttnLRP and CP-LRP, and the inherent explanation of B-cos networks."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any, ClassVar

from torch import Tensor, nn

from dave_vit.engine.calls import RuleSet
from dave_vit.engine.rule_sets import ATTN_LRP, CP_LRP, with_gamma
from dave_vit.engine.rules.gamma import Gamma
from dave_vit.engine.targets import Target
from dave_vit.errors import UnsupportedOperator
from dave_vit.methods.base import METHODS, Method, MethodInfo, multiply_by_input
from dave_vit.methods.dave import Effective
from dave_vit.methods.explanation import Explanation
from dave_vit.methods.pass_size import PassSize


class _LRP(Method):
    base: ClassVar[RuleSet]
    _: KW_ONLY
    conv_gamma: float = Gamma.conv
    linear_gamma: float = Gamma.linear
    attention_gamma: float = Gamma.attention

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rules = with_gamma(self.base, Gamma(self.conv_gamma, self.linear_gamma, self.attention_gamma))

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        return multiply_by_input(self._gradient(images, target, self.rules), images, target)


@METHODS.register("attn_lrp")
class AttnLRP(_LRP):
    """Relevance propagated back through values, keys and queries, with the gamma rule for linear layers.

    Relevance propagated through values, keys and queries. The defaults of gamma are the recipe of the authors' example
    for vision transformers; 0 everywhere is the method without gamma.

    Args:
        model: any module that maps inputs to logits.
        conv_gamma: gamma of convolutions; 0 is the plain rule.
        linear_gamma: gamma of linear layers outside of attention.
        attention_gamma: gamma of the projections of attention, known by "attn" or "attention" in a module's name.
        options: ``chunk`` and ``autocast``, as for every method.
    """

    info = MethodInfo(
        paper="Achtibat et al., ICML 2024", passes="1 forward, 1 backward (with gamma twice the work)", unit="logit"
    )
    base = ATTN_LRP


@METHODS.register("cp_lrp")
class CPLRP(_LRP):
    """Relevance propagated back through values with attention held, with the gamma rule for linear layers.

    Relevance propagated through values only, attention matrices held; arguments as for ``attn_lrp``. With gamma 0
    everywhere it equals the method ``effective``.
    """

    info = MethodInfo(
        paper="Ali et al., ICML 2022", passes="1 forward, 1 backward (with gamma twice the work)", unit="logit"
    )
    base = CP_LRP


@METHODS.register("bcos")
class Bcos(Effective):
    """Dynamic linear weights of a B-cos network, times the input.

    A B-cos network is linear once its dynamic weights are held, and holding them is what the effective transformation
    does; so the map equals that of the method ``effective``, and of the network's own explanation mode.

    Args:
        model: a B-cos network.
        options: ``chunk`` and ``autocast``, as for every method.
    """

    info = MethodInfo(paper="Böhle et al., TPAMI 2024", passes="1 forward, 1 backward", unit="logit")

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        if not any(hasattr(module, "set_explanation_mode") for module in model.modules()):
            raise UnsupportedOperator(
                "bcos explains B-cos networks, and this model has no B-cos module; use effective, its generalisation"
            )
