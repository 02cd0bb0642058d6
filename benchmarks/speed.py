"""What a map costs: time and peak memory over one forward pass, beside captum's SmoothGrad in the same run.

    python benchmarks/speed.py --model timm:vit_base_patch16_224 --images 16 --out benchmarks/results

Weights are random: they do not change the cost. The file written is named after the environment.
"""

from __future__ import annotations

import argparse
import gc
import platform
import re
import resource
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from dave_vit import DAVE, __version__

SAMPLES = (1, 8, 50)


@dataclass(frozen=True)
class Row:
    """One line of the table; seconds are for one map."""

    device: str
    precision: str
    mode: str
    method: str
    seconds: float
    forward_seconds: float
    extra_bytes: int | None

    def cells(self) -> list[str]:
        memory = "-" if self.extra_bytes is None else f"{self.extra_bytes / 2**20:.0f}"
        ratio = self.seconds / self.forward_seconds
        return [
            self.device,
            self.precision,
            self.mode,
            self.method,
            f"{1e3 * self.seconds:.2f}",
            f"{ratio:.1f}",
            memory,
        ]


HEADER = ["device", "precision", "mode", "method", "ms per map", "over one forward pass", "extra peak MiB"]


def build(spec: str) -> nn.Module:
    """A model with random weights."""
    family, _, name = spec.partition(":")
    if family == "timm":
        import timm

        return timm.create_model(name).eval()
    import torchvision

    return torchvision.models.get_model(name).eval()


def timed(function: Callable[[], object], device: torch.device, repeats: int) -> tuple[float, int | None]:
    """Median seconds and extra peak memory of a call, after one to warm up."""
    function()
    synchronize(device)
    seconds = []
    with Peak(device) as peak:
        for _ in range(repeats):
            start = time.perf_counter()
            function()
            synchronize(device)
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), peak.extra


class Peak:
    """Memory in use at its highest, beyond what was in use before: of the device, or of the process on Linux."""

    def __init__(self, device: torch.device) -> None:
        self.cuda, self.extra = device.type == "cuda", None

    def __enter__(self) -> Peak:
        gc.collect()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self.base = torch.cuda.memory_allocated()
        elif STATM.exists():
            self.base, self.highest, self.running = resident(), 0, True
            self.thread = threading.Thread(target=self.watch, daemon=True)
            self.thread.start()
        return self

    def watch(self) -> None:
        while self.running:
            self.highest = max(self.highest, resident())
            time.sleep(0.002)

    def __exit__(self, *error: object) -> None:
        if self.cuda:
            self.extra = torch.cuda.max_memory_allocated() - self.base
        elif STATM.exists():
            self.running = False
            self.thread.join()
            self.extra = max(0, self.highest - self.base)


STATM = Path("/proc/self/statm")


def resident() -> int:
    return int(STATM.read_text().split()[1]) * resource.getpagesize()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(
    model: nn.Module, images: Tensor, autocast: torch.dtype | None, repeats: int, *, compiled: bool
) -> list[Row]:
    """All methods on one batch: forward pass, DAVE at each T, captum's SmoothGrad."""
    device, count = images.device, len(images)
    precision = str(autocast or images.dtype).removeprefix("torch.")
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"

    def forward() -> None:
        with torch.no_grad(), torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            model(images)

    once, forward_peak = timed(forward, device, max(repeats, 5))
    once /= count
    rows = [Row(name, precision, "eager", "forward pass", once, once, forward_peak)]
    target = torch.zeros(count, dtype=torch.long, device=device)
    for mode in ("eager", "compiled") if compiled else ("eager",):
        for samples in SAMPLES:
            dave = DAVE(model, samples=samples, autocast=autocast, compiled=mode == "compiled")
            seconds, peak = timed(lambda dave=dave: dave.attribute(images, target), device, repeats)
            rows.append(Row(name, precision, mode, f"DAVE, T = {samples}", seconds / count, once, peak))
            print(rows[-1].cells(), flush=True)
    rows.append(captum_row(model, images, target, autocast, once, name, precision))
    print(rows[-1].cells(), flush=True)
    return rows


def captum_row(
    model: nn.Module,
    images: Tensor,
    target: Tensor,
    autocast: torch.dtype | None,
    once: float,
    name: str,
    precision: str,
) -> Row:
    """captum's SmoothGrad with 50 samples, in the largest inner batch that DAVE uses too."""
    from captum.attr import NoiseTunnel, Saliency

    tunnel = NoiseTunnel(Saliency(model))
    inner = max(1, (256 if images.is_cuda else 16) // len(images))

    def smoothgrad() -> None:
        with torch.autocast(images.device.type, dtype=autocast, enabled=autocast is not None):
            tunnel.attribute(images, nt_samples=50, nt_samples_batch_size=inner, stdevs=0.15, target=target, abs=False)

    seconds, peak = timed(smoothgrad, images.device, 1)
    return Row(name, precision, "eager", "captum SmoothGrad, 50", seconds / len(images), once, peak)


def table(rows: list[Row]) -> str:
    lines = [HEADER, ["---"] * len(HEADER), *(row.cells() for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="timm:vit_base_patch16_224")
    parser.add_argument("--images", type=int, default=None, help="batch size (default: 64 on CUDA, 2 on the CPU)")
    parser.add_argument("--devices", default="cpu,cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None, help="folder for the Markdown file")
    options = parser.parse_args()
    torch.manual_seed(0)
    model, rows = build(options.model), []
    for kind in options.devices.split(","):
        device = torch.device(kind)
        count = options.images or (64 if kind == "cuda" else 2)
        images = torch.randn(count, 3, 224, 224, device=device)
        for autocast in (None, torch.bfloat16) if kind == "cuda" else (None,):
            rows += measure(model.to(device), images, autocast, options.repeats, compiled=not options.no_compile)
    text = report(options.model, rows)
    print(text)
    if options.out:
        where = torch.cuda.get_device_name() if "cuda" in options.devices else f"cpu{torch.get_num_threads()}"
        name = re.sub(r"[^a-z0-9.]+", "-", f"speed-{options.model}-{where}-torch{torch.__version__}".lower())
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"{name}.md").write_text(text)


def report(model: str, rows: list[Row]) -> str:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return (
        f"# Cost of a map: {model}\n\n"
        f"dave-vit {__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}; process peak {peak:.0f} MiB.\n\n"
        "`python benchmarks/speed.py --model " + model + "`\n\n"
        "Times are medians for one map out of a batch. Extra memory is what a call needs at its peak beyond model and "
        "input: allocated on CUDA, resident in the process on the CPU (memory that the allocator kept from an earlier "
        "row is not counted again).\n\n" + table(rows) + "\n"
    )


if __name__ == "__main__":
    main()
