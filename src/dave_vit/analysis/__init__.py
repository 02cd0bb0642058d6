"""What the paper's tables and figures show, computed again: one file for each analysis, which registers itself.

`dave analyze NAME` and `dave reproduce` know an analysis by `ANALYSES`; the suite of the paper is in `paper`.
"""

from dave_vit._internal.registry import import_all
from dave_vit.analysis.base import ANALYSES, Analysis, Flag, analysis, flag
from dave_vit.analysis.inputs import AnalysisOptions, MapAnalysisOptions

__all__ = ["ANALYSES", "Analysis", "AnalysisOptions", "Flag", "MapAnalysisOptions", "analysis", "flag"]

import_all(__name__)
