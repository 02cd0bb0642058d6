"""Run many programs and print what became of them, with their seeds."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from module_pairs.programs import Program, judge


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the others follow")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start, counts, needless = time.perf_counter(), Counter(), 0
    reasons: dict[str, list[str]] = defaultdict(list)
    for seed in range(options.seed, options.seed + options.count):
        program = Program.draw(seed)
        verdict = judge(program)
        counts[verdict.kind] += 1
        needless += verdict.needless
        if verdict.needless or verdict.kind not in ("exact", "refused"):
            kind = "needless" if verdict.needless else verdict.kind
            reasons[kind].append(f"seed {seed}: {program.name}: {verdict.detail}")
    for kind, lines in reasons.items():
        print(f"{kind}:", *lines[:60], sep="\n  ")
    seeds = f"seeds {options.seed} to {options.seed + options.count - 1}"
    share = 100 * needless / options.count
    print(f"{seeds}: {dict(counts)}, needlessly refused {needless} ({share:.2f} %)")
    print(f"{time.perf_counter() - start:.0f} s")
    return int(bool(counts["wrong"] + counts["crashed"] + counts["unfit"]))


if __name__ == "__main__":
    sys.exit(main())
