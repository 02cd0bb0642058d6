"""Large models, one image alone and small GPUs, beside captum and grad-cam: one JSON object a line, in a few minutes.

    python benchmarks/speed.py --large

A GPU of 4, 8 or 24 GiB is simulated by ``set_per_process_memory_fraction``; on a CPU the same numbers limit the passes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dave_vit import DAVE, __version__
from dave_vit.errors import first_line

MODELS = ("vit_base_patch16_224", "vit_large_patch14_dinov2", "vit_so400m_patch14_siglip_384")
BUDGETS = (4.0, 8.0, 24.0)  # GiB
BATCH = 8
GIB = 2**30


@dataclass
class Bench:
    """One model with random weights on a device.

    Attributes:
        name: of timm.
        device: where it runs.
        deadline: of ``time.perf_counter``, after which rows are skipped.
        unit: seconds of a forward pass of one image in a batch, once it is measured.
        expected: the map without a limit, once it is computed.
    """

    name: str
    device: torch.device
    deadline: float
    unit: float | None = None
    expected: Tensor | None = None
    model: nn.Module = field(init=False)
    images: Tensor = field(init=False)

    def __post_init__(self) -> None:
        import timm

        torch.manual_seed(0)
        with self.device:
            self.model = timm.create_model(self.name, num_classes=1000).eval()
        # Even probabilities survive all views, as a trained model's mostly do; else every image is drawn anew.
        with torch.no_grad():
            self.model.get_classifier().weight.mul_(1e-3)
        size = self.model.patch_embed.img_size
        self.images = torch.randn(BATCH, 3, *size, generator=torch.Generator().manual_seed(1)).to(self.device)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield all measurements of the model."""
        one, all_ = self.images[:1], self.images
        forward = self.measure("forward pass", self._forward(all_), BATCH)
        self.unit = forward.get("ms", 0) / 1e3 or None
        yield forward
        yield self.measure("forward pass, one image", self._forward(one), 1)
        yield self.measure("default, one image", self._explain(one, keep=True), 1)
        if self.name == MODELS[0]:  # a compiler takes a minute for each
            yield self.measure("default, one image, compiled", self._explain(one, compiled=True), 1)
        yield self.measure(f"default, {BATCH} images", self._explain(all_), BATCH)
        yield self.measure("captum SmoothGrad, 50 samples, one image", self._captum(one), 1)
        yield self.measure("grad-cam, one image", self._grad_cam(one), 1)
        for budget in BUDGETS:
            yield self._limited(budget, one)

    def measure(self, what: str, make: Callable[[], Callable[[], object]], count: int) -> dict[str, Any]:
        """Time a call: milliseconds an image until the result is there, and until Python returns."""
        row: dict[str, Any] = {"model": self.name, "what": what}
        if time.perf_counter() > self.deadline:
            return {**row, "skipped": "no time left"}
        free_cache(self.device)
        try:
            call = make()
            first = self._clock(call)[0]
            last = self._clock(call)[0] if self.device.type == "cuda" else first  # the first may compile
            for _ in range(2 if self.device.type == "cuda" and last < 10 else 0):  # the third captures passes
                self._clock(call)
            reset_peak(self.device)
            times = [self._clock(call) for _ in range(1 if last > 10 else 3)]
        except Exception as error:  # a row that fails is a result too
            return {**row, "error": f"{type(error).__name__}: {first_line(error)}"}
        whole, host = (statistics.median(part) for part in zip(*times, strict=True))
        passes = None if self.unit is None else round(whole / count / self.unit, 1)
        facts = {"ms": 1e3 * whole / count, "host_ms": 1e3 * host / count, "first_s": first}
        rounded = {name: round(value, 2) for name, value in facts.items()}
        return {**row, **rounded, "passes": passes, **peak(self.device)}

    def _clock(self, call: Callable[[], object]) -> tuple[float, float]:
        synchronize(self.device)
        start = time.perf_counter()
        call()
        host = time.perf_counter() - start
        synchronize(self.device)
        return time.perf_counter() - start, host

    def _limited(self, budget: float, images: Tensor) -> dict[str, Any]:
        """Explain one image on a simulated GPU of so many GiB, with half of what is free there, as by default."""
        with limited_memory(self.device, budget):
            options = {"memory": int(budget * GIB)} if self.device.type == "cpu" else {}
            made: list[Tensor] = []
            row = self.measure("default, one image", self._explain(images, keep=False, made=made, **options), 1)
        if made and self.expected is not None:
            row["difference"] = float((made[-1] - self.expected).norm() / self.expected.norm())
        return {**row, "budget_gib": budget}

    def _explain(
        self, images: Tensor, *, keep: bool = False, made: list[Tensor] | None = None, **options: Any
    ) -> Callable[[], Callable[[], object]]:
        def make() -> Callable[[], object]:
            dave = DAVE(self.model, autocast=torch.bfloat16, **options)
            target = list(range(len(images)))

            def call() -> None:
                attribution = dave.attribute(images, target)
                if keep:
                    self.expected = attribution
                if made is not None:
                    made[:] = [attribution]

            return call

        return make

    def _forward(self, images: Tensor) -> Callable[[], Callable[[], object]]:
        def forward() -> None:
            with torch.no_grad(), torch.autocast(self.device.type, dtype=torch.bfloat16):
                self.model(images)

        return lambda: forward

    def _captum(self, images: Tensor) -> Callable[[], Callable[[], object]]:
        def make() -> Callable[[], object]:
            from captum.attr import NoiseTunnel, Saliency

            tunnel = NoiseTunnel(Saliency(self.model))
            options = {"nt_samples": 50, "nt_samples_batch_size": 10, "stdevs": 0.15, "abs": False}

            def smoothgrad() -> None:
                with torch.autocast(self.device.type, dtype=torch.bfloat16):
                    tunnel.attribute(images, target=0, **options)

            return smoothgrad

        return make

    def _grad_cam(self, images: Tensor) -> Callable[[], Callable[[], object]]:
        def make() -> Callable[[], object]:
            from pytorch_grad_cam import GradCAM
            from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

            rows, columns = self.model.patch_embed.grid_size

            def to_grid(tokens: Tensor) -> Tensor:  # [b, N, D] -> [b, D, h, w], without class tokens
                return tokens[:, -rows * columns :].unflatten(1, (rows, columns)).movedim(-1, 1)

            cam = GradCAM(self.model, [self.model.blocks[-1].norm1], reshape_transform=to_grid)
            return lambda: cam(input_tensor=images, targets=[ClassifierOutputTarget(0)])

        return make


class limited_memory:
    """Context in which this process may take so many GiB of a GPU."""

    def __init__(self, device: torch.device, budget: float) -> None:
        self.is_cuda, self.budget = device.type == "cuda", budget

    def __enter__(self) -> None:
        if self.is_cuda:
            torch.cuda.empty_cache()
            total = torch.cuda.mem_get_info()[1]
            torch.cuda.set_per_process_memory_fraction(min(1.0, self.budget * GIB / total))

    def __exit__(self, *error: object) -> None:
        if self.is_cuda:
            torch.cuda.set_per_process_memory_fraction(1.0)


def free_cache(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak(device: torch.device) -> dict[str, float]:
    """Return what torch had reserved at most, the model included."""
    return {"peak_gib": round(torch.cuda.max_memory_reserved() / GIB, 2)} if device.type == "cuda" else {}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main(options: argparse.Namespace) -> None:
    """Print one row a line."""
    device = torch.device(options.device)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(json.dumps({"device": where, "torch": torch.__version__, "dave_vit": __version__}), flush=True)
    deadline = time.perf_counter() + options.seconds
    for name in options.models.split(",") if options.models else MODELS:
        for row in Bench(name, device, deadline).rows():
            print(json.dumps(row), flush=True)
