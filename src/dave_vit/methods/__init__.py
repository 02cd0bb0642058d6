"""Attribution methods: one file for each family."""

from dave_vit._internal.registry import import_all
from dave_vit.methods.base import METHODS, Method, MethodInfo, create_method
from dave_vit.methods.dave import DAVE, Effective, Equivariant
from dave_vit.methods.explanation import Explanation

__all__ = ["DAVE", "METHODS", "Effective", "Equivariant", "Explanation", "Method", "MethodInfo", "create_method"]

import_all(__name__)
