"""How busy an evaluation run keeps a GPU: maps per second, and the share of the time in which it computes.

    python benchmarks/busy.py --model vit_base_patch16_224 --limit 96

The model has random weights and says what the embedded one says, so that there are grids. The first task of a run is
left out: it warms up. What computes is seen by nvidia-smi every 100 ms; on the CPU only the rate is printed.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from threading import Thread

import timm
import torch
from torch import Tensor, nn

from dave_vit import load_model
from dave_vit.evaluate import Plan, create_engine, evaluate

ASK = ["nvidia-smi", "--id=0", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "--loop-ms=100"]


class Both(nn.Module):
    """The time of one model, the scores of the embedded one."""

    def __init__(self, name: str, device: str) -> None:
        super().__init__()
        known = load_model("builtin", device=device)
        self.known, self.preprocess, self.class_names = known.model, known.preprocess, known.class_names
        torch.manual_seed(0)
        self.big = timm.create_model(name, num_classes=len(known.class_names)).eval().to(device)

    def forward(self, x: Tensor) -> Tensor:
        return self.known(x) + 1e-4 * self.big(x)


@contextmanager
def looks(device: str) -> Iterator[list[tuple[float, float]]]:
    """When it was looked at the GPU, and the percentage that it had computed; grows until the block ends."""
    seen: list[tuple[float, float]] = []
    if device == "cpu":
        yield seen
        return
    with subprocess.Popen(ASK, stdout=subprocess.PIPE, text=True) as asked:
        Thread(target=lambda: seen.extend((time.perf_counter(), float(line)) for line in asked.stdout or ())).start()
        try:
            yield seen
        finally:
            asked.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_base_patch16_224", help="of timm, for pictures of 224 x 224")
    parser.add_argument("--limit", type=int, default=96, help="pictures")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    steps: list[tuple[float, int]] = []

    def watch(what: str, done: int, total: int, before: int) -> None:
        if what == "evaluating":
            steps.append((time.perf_counter(), done))

    with TemporaryDirectory() as out, looks(given.device) as seen:
        plan, engine = Plan.load({"limit": given.limit}), create_engine("local", device=given.device)
        evaluate(plan, out, engine=engine, loader=lambda entry, device: Both(given.model, device), progress=watch)
    (began, first), (ended, last) = steps[1], steps[-1]
    busy = [share for at, share in seen if began <= at <= ended]
    share = f", the GPU computes {sum(busy) / len(busy):.0f} % of the time" if busy else ""
    print(f"{given.model}, {given.device}: {(last - first) / (ended - began):.1f} maps per second{share}")


if __name__ == "__main__":
    main()
