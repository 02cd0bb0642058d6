"""Attribution methods: one file for each family."""

from dave_vit._internal.registry import import_all
from dave_vit.methods.base import METHODS, Method, MethodInfo, create_method
from dave_vit.methods.dave import DAVE, Effective, Equivariant
from dave_vit.methods.explanation import Explanation

__all__ = ["DAVE", "METHODS", "Effective", "Equivariant", "Explanation", "Method", "MethodInfo", "create_method"]

import_all(__name__)

# The order in which tables and menus show them, whatever files they are in.
METHODS.arrange(
    """dave equivariant effective
    gradcam gradcam_plus_plus layercam hirescam ablationcam
    raw_attention rollout attention_flow
    random center bcos beyond_intuition chefer_generic chefer_lrp eigencam
    input_x_gradient saliency integrated_gradients smoothgrad expected_gradients
    finercam fullgrad greedy iia legrad libragrad attn_lrp cp_lrp mda occlusion omenn
    guided_backprop deconvolution rise scorecam lime kernel_shap tam tis vit_cx"""
)
