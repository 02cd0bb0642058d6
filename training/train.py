"""Trains an embedded model: one command, resumable.

    PYTHONPATH=src python training/train.py --model builtin --art ART_FOLDER

ART_FOLDER is what fetch_art.py made. Run the same command again to go on from the last checkpoint. The schedule runs
on time, not on steps, so that it ends when it should on any machine.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import multiprocessing
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from art import FAMILIES, load_bank
from augment import augment
from optimizer import Optimizer
from pools import DIFFICULTIES, Pool
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dave_vit.data.builtin import CLASS_NAMES, compose_scene
from dave_vit.models.families.builtin import BUILTIN

START = time.monotonic()
ROOT = Path(__file__).resolve().parent.parent
TEST_SEED = 20_000


def cross_entropy(logits: Tensor, shares: Tensor) -> Tensor:
    """Against the share of each class in the picture. No smoothing: GridPG wants confident predictions."""
    return F.cross_entropy(logits, shares)


def binary_cross_entropy(logits: Tensor, shares: Tensor) -> Tensor:
    """As B-cos models are trained: every class that is present counts fully, the others 1 / C; summed over classes."""
    wanted = (shares > 0).to(logits.dtype).clamp(min=1 / shares.shape[1])
    return F.binary_cross_entropy_with_logits(logits, wanted, reduction="none").sum(1).mean()


LOSSES = {"builtin": cross_entropy, "builtin-bcos": binary_cross_entropy}


@dataclass(frozen=True)
class Options:
    """The command line."""

    model: str
    art: Path
    minutes: float
    wall: float
    optimizer: str
    rate: float
    decay: float
    batch: int
    pool: int
    chunk: int
    every: float
    tests: int
    work: Path
    export: Path
    init: Path | None
    compile: bool


def parse() -> Options:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(LOSSES), required=True)
    parser.add_argument("--art", type=Path, required=True, help="folder of sprites and textures")
    parser.add_argument("--minutes", type=float, default=9.0, help="length of the schedule")
    parser.add_argument("--wall", type=float, default=math.inf, help="shorten the schedule: end after so many seconds")
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="muon")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--decay", type=float, default=0.05)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--pool", type=int, default=400_000, help="pictures kept on the device")
    parser.add_argument("--chunk", type=int, default=1024, help="pictures composed at once, a multiple of 8")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between reports")
    parser.add_argument("--tests", type=int, default=2000, help="test pictures of seen designs; half as many of unseen")
    parser.add_argument("--work", type=Path, default=ROOT / "runs", help="folder of checkpoints")
    parser.add_argument("--export", type=Path, default=ROOT / "src" / "dave_vit" / "models" / "weights")
    parser.add_argument("--init", type=Path, help="start from exported weights, without easy pictures")
    parser.add_argument("--compile", action="store_true", help="compile the model (needs a C++ compiler)")
    return Options(**vars(parser.parse_args()))


def log(text: str) -> None:
    """Prints a line at once, with the seconds since the start."""
    sys.stdout.write(f"[{time.monotonic() - START:6.1f}] {text}\n")
    sys.stdout.flush()


# --- Test pictures ----------------------------------------------------------------------------------------------------


def _test_picture(job: tuple[str, int]) -> tuple[np.ndarray, int, str]:
    family, index = job
    scene = compose_scene(index, seed=TEST_SEED, family=family)
    return scene.image, scene.objects[0].label, FAMILIES[scene.objects[0].style]


def test_pictures(count: int) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Images, labels and families of the benchmark's ``single`` set, made on all cores; call before the GPU's use."""
    jobs = [("seen", i) for i in range(count)] + [("unseen", i) for i in range(count // 2)]
    with multiprocessing.get_context("fork").Pool() as workers:
        images, labels, families = zip(*workers.map(_test_picture, jobs, chunksize=25), strict=True)
    return np.stack(images).transpose(0, 3, 1, 2), np.array(labels), list(families)


class Tests:
    """Accuracy per family."""

    def __init__(self, pictures: tuple[np.ndarray, np.ndarray, list[str]], device: torch.device) -> None:
        images, labels, self.families = pictures
        self.images, self.labels = torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(labels)
        self.device = device

    @torch.no_grad()
    def __call__(self, model: nn.Module, name: str) -> dict[str, float]:
        """Top-1 accuracy in percent by family, and over the seen ones."""
        encode = BUILTIN[name].encode
        right = torch.cat(
            [
                model(encode(images.to(self.device).float() / 255)).argmax(1).cpu() == labels
                for images, labels in zip(self.images.split(500), self.labels.split(500), strict=True)
            ]
        )
        groups = {family: [f == family for f in self.families] for family in dict.fromkeys(self.families)}
        groups["seen"] = [f != "emojione" for f in self.families]
        return {name: round(100 * right[torch.tensor(rows)].float().mean().item(), 2) for name, rows in groups.items()}


# --- Training ---------------------------------------------------------------------------------------------------------


def mixture(progress: float, batch: int) -> list[int]:
    """How many pictures of each difficulty a batch has: easy ones first, clutter from early on, then nearly alone."""
    easy = min(max(1 - progress / 0.15, 0.04), 1.0)
    hard = min(max((progress - 0.05) / 0.25, 0.0), 0.9)
    counts = [round(easy * batch), 0, round(hard * batch)]
    counts[1] = batch - sum(counts)
    return counts


def rate_at(progress: float, peak: float) -> float:
    """Warm-up over 3 %, then a cosine to nothing."""
    if progress < 0.03:
        return peak * (progress + 1e-4) / 0.03
    return peak * 0.5 * (1 + math.cos(math.pi * min((progress - 0.03) / 0.97, 1.0)))


class Trainer:
    """The model, its average and its optimizer, and how far they are."""

    def __init__(self, options: Options, device: torch.device) -> None:
        self.options, self.device = options, device
        self.model = BUILTIN[options.model].create().to(device).train()
        if options.init:
            self.model.load_state_dict({key: value.float() for key, value in load_file(options.init).items()})
        self.average = copy.deepcopy(self.model).eval().requires_grad_(False)
        self.optimizer = Optimizer(self.model, muon=options.optimizer == "muon", decay=options.decay)
        self.forward = self.model
        if options.compile:
            torch._dynamo.config.suppress_errors = True  # what cannot be compiled runs as it is
            self.forward = torch.compile(self.model)
        self.steps, self.elapsed, self.budget = 0, 0.0, options.minutes * 60
        self.file = options.work / f"{options.model}.pt"
        if self.file.exists():
            self._resume()

    def _resume(self) -> None:
        state = torch.load(self.file, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps, self.elapsed, self.budget = state["steps"], state["elapsed"], state["budget"]
        log(f"resumed at step {self.steps}, {self.elapsed:.0f} of {self.budget:.0f} s")

    def save(self) -> None:
        """Writes the checkpoint, and the average as float16 weights."""
        state = {"model": self.model.state_dict(), "average": self.average.state_dict()}
        state |= {"optimizer": self.optimizer.state_dict(), "steps": self.steps, "elapsed": self.elapsed}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        torch.save({**state, "budget": self.budget}, self.file.with_suffix(".new"))
        self.file.with_suffix(".new").replace(self.file)
        self.options.export.mkdir(parents=True, exist_ok=True)
        weights = {key: value.half().contiguous() for key, value in self.average.state_dict().items()}
        save_file(weights, self.options.export / f"{self.options.model}.safetensors")

    @property
    def progress(self) -> float:
        """0 at the start of the schedule, 1 at its end."""
        return min(self.elapsed / self.budget, 1.0)

    def step(self, pools: list[Pool]) -> Tensor:
        """One batch; returns the loss, still on the device."""
        counts = mixture(1.0 if self.options.init else self.progress, self.options.batch)
        parts = [pool.sample(count) for pool, count in zip(pools, counts, strict=True) if count > 0]
        images, labels = (torch.cat(part) for part in zip(*parts, strict=True))
        dtype = torch.float16 if self.device.type == "cuda" else torch.float32
        inputs, shares = augment(images, labels, len(CLASS_NAMES), dtype)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.forward(BUILTIN[self.options.model].encode(inputs).float())
        loss = LOSSES[self.options.model](logits.float(), shares)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step(rate_at(self.progress, self.options.rate))
        self.model.zero_grad(set_to_none=True)
        self.steps += 1
        decay = min(0.9985, self.steps / (self.steps + 20))
        torch._foreach_lerp_(list(self.average.parameters()), list(self.model.parameters()), 1 - decay)
        return loss.detach()


def make_pools(options: Options, device: torch.device) -> list[Pool]:
    """Composes the three pools."""
    bank = load_bank(options.art, device, torch.float16 if device.type == "cuda" else torch.float32)
    log(f"{bank.art.shape[1]} sprites")
    began = time.monotonic()
    shares = (0.15, 0.2, 0.65)
    pools = [Pool(int(options.pool * s), d, bank, options.chunk) for s, d in zip(shares, DIFFICULTIES, strict=True)]
    if device.type == "cuda":
        torch.cuda.synchronize()
    log(f"{options.pool} pictures composed, {options.pool / (time.monotonic() - began):.0f} per second")
    return pools


def train(trainer: Trainer, pools: list[Pool], tests: Tests) -> None:
    """Runs the schedule to its end, with a report, a checkpoint and weights every so often."""
    options, since, done = trainer.options, time.monotonic(), trainer.steps
    report = since + options.every
    while trainer.progress < 1:
        loss = trainer.step(pools)
        if trainer.steps % 16 == 0:
            pools[2].refresh()  # 1 new picture per 16 seen; composing keeps the mixture's hardest part fresh
            loss.item()  # wait for the device: the schedule runs on real time
        now = time.monotonic()
        trainer.elapsed, since = trainer.elapsed + now - since, now
        if now >= report or trainer.progress >= 1:
            speed = (trainer.steps - done) * options.batch / (now - report + options.every)
            accuracy = tests(trainer.average, options.model)
            trainer.save()
            log(f"{100 * trainer.progress:5.1f} % step {trainer.steps} loss {loss.item():.3f} {speed:.0f}/s {accuracy}")
            report, done = time.monotonic() + options.every, trainer.steps


def main() -> None:
    """Trains, then tests what was exported."""
    options = parse()
    pictures = test_pictures(options.tests)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    log(f"{len(pictures[0])} test pictures; training on {device}")
    tests = Tests(pictures, device)
    pools = make_pools(options, device)
    trainer = Trainer(options, device)
    trainer.step(pools)  # the first step compiles; it is not on the clock
    log(f"first step done; {sum(p.numel() for p in trainer.model.parameters())} parameters")
    left = options.wall - (time.monotonic() - START) - 8  # seconds for the last test and the files
    trainer.budget = min(trainer.budget, trainer.elapsed + max(left, 1.0))
    train(trainer, pools, tests)
    exported = options.export / f"{options.model}.safetensors"
    final = BUILTIN[options.model].create().to(device).eval()
    final.load_state_dict({key: value.float() for key, value in load_file(exported).items()})
    result = {"model": options.model, "accuracy": tests(final, options.model), "bytes": exported.stat().st_size}
    result |= {"steps": trainer.steps, "seconds": round(trainer.elapsed), "optimizer": options.optimizer}
    (options.export / f"{options.model}.json").write_text(json.dumps(result, indent=1) + "\n")
    log(f"exported {result}")


if __name__ == "__main__":
    main()
