"""Run many programs; print each that is not as it should be, with its seed, and how many were which.

Processes with different ranges of seeds can run beside each other.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from module_pairs.programs import Program, judge

FAULTS = ("wrong", "crashed", "unfit")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the others follow")
    parser.add_argument("--every", type=int, default=100, help="programs between two lines of counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's, of sparse tensors and of complex ones
    start, counts = time.perf_counter(), Counter()
    for done, seed in enumerate(range(options.seed, options.seed + options.count), 1):
        program = Program.draw(seed)
        verdict = judge(program)
        counts[verdict.kind] += 1
        counts["needlessly refused"] += verdict.needless
        if verdict.needless or verdict.kind in FAULTS:
            kind = "needlessly refused" if verdict.needless else verdict.kind
            print(f"{kind}: seed {seed}: {program.name}: {verdict.detail}", flush=True)
        if done % options.every == 0 or done == options.count:
            print(f"seeds {options.seed} to {seed}: {dict(counts)}, {time.perf_counter() - start:.0f} s", flush=True)
    return int(any(counts[kind] for kind in FAULTS))


if __name__ == "__main__":
    sys.exit(main())
