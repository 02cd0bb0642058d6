"""From attribution samples to one attribution: averages and estimators that use the spread of the samples.

A reducer is a frozen set of options; its accumulator takes samples [n,B,C,H,W] in chunks of any size and gives, at any
time, the attribution [B,C,H,W] and the standard error [B,H,W] of the channel-summed samples' mean. All but the trimmed
mean need memory that does not depend on the number of samples.
"""

from dave_vit.reduce.base import REDUCERS, Accumulator, Reducer, uses_clean
from dave_vit.reduce.running import Mean, Shrinkage, SoftThreshold, TrimmedMean
from dave_vit.reduce.significant import Sharpened, Significant

__all__ = [
    "REDUCERS",
    "Accumulator",
    "Mean",
    "Reducer",
    "Sharpened",
    "Shrinkage",
    "Significant",
    "SoftThreshold",
    "TrimmedMean",
    "uses_clean",
]
