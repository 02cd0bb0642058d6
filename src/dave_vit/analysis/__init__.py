"""The paper's tables and figures, computed again. Analyses register themselves in `ANALYSES`.

`dave analyze NAME` runs one analysis, `dave reproduce` all of them; `paper` holds the suites of `dave reproduce`.
"""

from dave_vit._internal.registry import import_all
from dave_vit.analysis.inputs import ANALYSES, Analysis, AnalysisOptions, Flag, MapAnalysisOptions, analysis, flag

__all__ = ["ANALYSES", "Analysis", "AnalysisOptions", "Flag", "MapAnalysisOptions", "analysis", "flag"]

import_all(__name__)
