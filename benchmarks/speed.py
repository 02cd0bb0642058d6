"""What a map costs beside a forward pass, the arithmetic floor and captum's SmoothGrad, all in one run.

    python benchmarks/speed.py --model timm:vit_base_patch16_224 --out benchmarks/results

Weights are random, but for a small last layer. The file written is named after the environment. With --large, other
rows are printed instead, one JSON object a line: large models, one image alone and small GPUs (see large_models.py).
"""

from __future__ import annotations

import argparse
import copy
import gc
import platform
import re
import resource
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import large_models
from dave_vit import DAVE, __version__, effective_transformation

VIEWS = 50  # of a map with the exact linear map, and of captum's SmoothGrad
CLASSES = 10  # of one image, beside one of them
UNITS = 8  # forward passes before a call that is timed, and after it
WARM_UP = 3  # calls before the first that is timed: passes that come again are captured by the third
STATM = Path("/proc/self/statm")


@dataclass(frozen=True)
class Row:
    """One line of the table; seconds are for one map, and so are the forward passes of an image in that time."""

    precision: str
    mode: str
    what: str
    seconds: float
    passes: float
    extra_bytes: int | None = None

    def cells(self) -> list[str]:
        """As text."""
        memory = "" if self.extra_bytes is None else f"{self.extra_bytes / 2**30:.2f}"
        times = f"{1e3 * self.seconds:.2f}", f"{self.passes:.1f}"
        return [self.precision, self.mode, self.what, *times, memory]


HEADER = ["precision", "mode", "what", "ms per map", "over one forward pass", "extra peak GiB"]


@dataclass(frozen=True)
class Bench:
    """A model on a device, and how its maps are timed.

    Attributes:
        model: with random weights.
        images: a batch of them.
        repeats: of each measurement, after those to warm up.
    """

    model: nn.Module
    images: Tensor
    repeats: int

    @property
    def target(self) -> Tensor:
        """A class of each image, so that none has to be predicted."""
        return torch.arange(len(self.images), device=self.images.device)

    def rows(self, autocast: torch.dtype | None, modes: tuple[str, ...]) -> Iterator[Row]:
        """All measurements of one precision."""
        count = len(self.images)
        one = self._row(autocast, "eager", "forward pass", self._forward(autocast, self.images), count)
        yield one
        views = self.images.repeat(-(-max(VIEWS, count) // count), 1, 1, 1)
        all_ = self._row(
            autocast, "eager", f"forward pass of {VIEWS} views", self._forward(autocast, views), len(views)
        )
        yield replace(all_, seconds=all_.seconds * VIEWS, passes=all_.passes * VIEWS)
        floor = self._floor(autocast) * VIEWS
        yield Row(one.precision, "", f"arithmetic of {VIEWS} views, forward and back", floor, floor / one.seconds)
        for mode in modes:
            make = partial(DAVE, self.model, autocast=autocast, compiled=mode == "compiled")
            yield from self._maps(autocast, mode, make)
        yield self._row(autocast, "eager", f"captum SmoothGrad, {VIEWS}", self._captum(autocast), count)

    def _maps(self, autocast: torch.dtype | None, mode: str, make: Callable[..., DAVE]) -> Iterator[Row]:
        count, alone = len(self.images), self.images[:1]
        plain, default = make(samples=VIEWS, preset="threshold"), make()
        views = f"T = {default.limit}"
        yield self._row(autocast, mode, f"exact, T = {VIEWS}", lambda: plain.attribute(self.images, self.target), count)
        yield self._row(autocast, mode, f"default, {views}", lambda: default.attribute(self.images, self.target), count)
        yield self._row(autocast, mode, f"default, {views}, one image alone", lambda: default.attribute(alone, 0), 1)
        one, several = torch.zeros(1, 1, dtype=torch.int64), torch.arange(CLASSES)[None]
        for classes in (one, several) if mode == "eager" else ():  # each would be a graph of its own
            what = f"exact, T = {VIEWS}, one image alone, {classes.shape[1]} classes"
            yield self._row(autocast, mode, what, partial(plain.attribute, alone, classes.to(alone.device)), 1)

    def _row(self, autocast: torch.dtype | None, mode: str, what: str, call: Callable[[], object], count: int) -> Row:
        precision = str(autocast or self.images.dtype).removeprefix("torch.")
        forward = self._forward(autocast, self.images)
        seconds, times, peak = timed(call, self.images.device, self.repeats, forward)
        row = Row(precision, mode, what, seconds / count, times * len(self.images) / count, peak)
        print(precision, mode, what, f"{1e3 * row.seconds:.2f} ms, {row.passes:.1f} forward passes", flush=True)
        return row

    def _forward(self, autocast: torch.dtype | None, images: Tensor) -> Callable[[], None]:
        def forward() -> None:
            with torch.no_grad(), torch.autocast(images.device.type, dtype=autocast, enabled=autocast is not None):
                self.model(images)

        return forward

    def _captum(self, autocast: torch.dtype | None) -> Callable[[], None]:
        """With the largest inner batch that DAVE takes too."""
        from captum.attr import NoiseTunnel, Saliency

        tunnel, images = NoiseTunnel(Saliency(self.model)), self.images
        inner = max(1, DAVE._rows[images.device.type] // len(images))
        options = {"nt_samples": VIEWS, "nt_samples_batch_size": inner, "stdevs": 0.15, "abs": False}

        def smoothgrad() -> None:
            with torch.autocast(images.device.type, dtype=autocast, enabled=autocast is not None):
                tunnel.attribute(images, target=self.target, **options)

        return smoothgrad

    def _floor(self, autocast: torch.dtype | None) -> float:
        """Seconds of a view's products, forward and as many back, at the rate of one large product."""
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            self.model(self.images[:1])
        side = 8192 if self.images.is_cuda else 1024
        left = torch.randn(side, side, device=self.images.device, dtype=autocast or self.images.dtype)
        seconds, *_ = timed(lambda: left @ left, self.images.device, max(self.repeats, 5), lambda: None)
        return 2 * counter.get_total_flops() * seconds / (2 * side**3)


def timed(
    call: Callable[[], object], device: torch.device, repeats: int, unit: Callable[[], object]
) -> tuple[float, float, int | None]:
    """Of a call after some to warm up: median seconds, how many times those of ``unit``, and the memory beyond before.

    The unit is timed before and after each call: a processor that is shared with others changes its pace by the minute.
    """

    def clock(run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        synchronize(device)
        return time.perf_counter() - start

    seconds, times = [], []
    with Peak(device) as peak:
        for _ in range(WARM_UP if device.type == "cuda" else 1):
            call()
            synchronize(device)
        peak.warm()
        for _ in range(repeats):
            units = [clock(unit) for _ in range(UNITS)]
            seconds.append(clock(call))
            units += [clock(unit) for _ in range(UNITS)]
            times.append(seconds[-1] / statistics.median(units))
    return statistics.median(seconds), statistics.median(times), peak.extra


class Peak:
    """Memory at its highest, beyond what was in use before: of a device or, on Linux, of the process.

    Of a device it is what torch has reserved, since a recorded graph keeps its memory between calls.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda, self.extra = device.type == "cuda", None

    def __enter__(self) -> Peak:
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            self.base = torch.cuda.memory_reserved()
        elif STATM.exists():
            self.base, self.highest, self.running = resident(), 0, True
            self.thread = threading.Thread(target=self.watch, daemon=True)
            self.thread.start()
        return self

    def warm(self) -> None:
        """What only the first calls needed, such as a trace of the model, does not count."""
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        else:
            self.highest = 0

    def watch(self) -> None:
        while self.running:
            self.highest = max(self.highest, resident())
            time.sleep(0.002)

    def __exit__(self, *error: object) -> None:
        if self.cuda:
            self.extra = torch.cuda.max_memory_reserved() - self.base
        elif STATM.exists():
            self.running = False
            self.thread.join()
            self.extra = max(0, self.highest - self.base)


def resident() -> int:
    return int(STATM.read_text().split()[1]) * resource.getpagesize()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def errors(model: nn.Module, images: Tensor) -> str:
    """How far W in lower precision is from W in float64, relative to its norm."""
    few, found = images[:4], []
    exact = effective_transformation(copy.deepcopy(model).double(), few.double(), 0)
    for autocast in (None, torch.bfloat16):
        made = effective_transformation(model, few, 0, autocast=autocast).double()
        name = str(autocast or few.dtype).removeprefix("torch.")
        found.append(f"{name} {float((made - exact).norm() / exact.norm()):.1e}")
    return "Relative error of W against float64: " + ", ".join(found) + "."


def build(spec: str) -> nn.Module:
    """A model with random weights."""
    family, _, name = spec.partition(":")
    if family == "timm":
        import timm

        model = timm.create_model(name).eval()
    else:
        import torchvision

        model = torchvision.models.get_model(name).eval()
    # Random logits change from view to view, so that every image would be drawn around anew in narrower
    # neighbourhoods, up to three times. Even probabilities survive all views, as a trained model's mostly do.
    head = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    with torch.no_grad():
        head.weight.mul_(1e-3)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--model", default="timm:vit_base_patch16_224")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--images", type=int, default=32 if cuda else 2, help="of a batch")
    parser.add_argument("--modes", default="eager,compiled")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None, help="folder for the Markdown file")
    parser.add_argument("--large", action="store_true", help="large models and small GPUs instead")
    parser.add_argument("--models", default="", help="with --large: other models of timm, with commas between")
    parser.add_argument("--seconds", type=float, default=330, help="with --large: after which rows are skipped")
    options = parser.parse_args()
    if options.large:
        large_models.main(options)
        return
    torch.manual_seed(0)
    device = torch.device(options.device)
    images = torch.randn(options.images, 3, 224, 224, device=device)
    bench = Bench(build(options.model).to(device), images, options.repeats)
    modes, cells = tuple(options.modes.split(",")), []
    for autocast in (torch.bfloat16, None) if device.type == "cuda" else (None,):
        rows = list(bench.rows(autocast, modes if autocast or device.type != "cuda" else ("eager",)))
        cells += [row.cells() for row in rows]
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    text = report(options, where, cells, errors(bench.model, bench.images))
    print(text)
    if options.out:
        name = re.sub(r"[^a-z0-9.]+", "-", f"speed-{options.model}-{where}-torch{torch.__version__}".lower())
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"{name}.md").write_text(text)


def report(options: argparse.Namespace, where: str, cells: list[list[str]], errors: str) -> str:
    lines = "\n".join("| " + " | ".join(line) + " |" for line in [HEADER, ["---"] * len(HEADER), *cells])
    return (
        f"# Cost of a map: {options.model}\n\n"
        f"{where}, a batch of {options.images}; dave-vit {__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}.\n\n"
        f"`python benchmarks/speed.py --model {options.model} --images {options.images}`\n\n"
        "Times are medians for one map out of the batch, unless an image is alone; bfloat16 is autocast. Extra memory "
        "is what a call needs at its peak beyond model and input: reserved on CUDA, resident in the process on CPU "
        "(memory that the allocator kept from an earlier row is not counted again). The arithmetic is twice that of "
        f"the forward pass, at the rate of one large product. {errors}\n\n{lines}\n"
    )


if __name__ == "__main__":
    main()
