"""Trains the decoder of `builtin-captions`: names of the objects of a picture, from left to right.

    PYTHONPATH=src python training/captions.py --minutes 25 --work runs

The embedded model is its encoder and stays as it is, so its tokens are computed once for each picture and kept in
`--work`; the decoder then learns from the kept ones. Nothing about captions is measured on pictures of these seeds.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dave_vit.data.builtin import Scene, compose_scene
from dave_vit.models.architectures.captioner import (
    END,
    MAX_LENGTH,
    START,
    build_decoder,
    build_encoder,
    caption,
    vocabulary,
)

START_TIME = time.monotonic()
WEIGHTS = Path(__file__).resolve().parent.parent / "src" / "dave_vit" / "models" / "weights"
SEED, TEST_SEED = 40_000, 41_000
SINGLES = 5  # every fifth picture has one object to name, the others two
TOKENS, DIM = 197, 192
KEPT = 110  # of the encoder's tokens in each step of training: none becomes the only one that is read


def log(text: str) -> None:
    """Prints a line at once, with the seconds since the start."""
    sys.stdout.write(f"[{time.monotonic() - START_TIME:6.1f}] {text}\n")
    sys.stdout.flush()


def scenes(seed: int, start: int, stop: int) -> list[Scene]:
    """Pictures by their numbers, every fifth with one object."""
    splits = ["pair" if index % SINGLES else "single" for index in range(start, stop)]
    return [compose_scene(index, split, seed=seed) for index, split in enumerate(splits, start)]


def words_of(scene: Scene) -> list[int]:
    """What is to be written: numbers of words from start to end, filled up with ends."""
    things = sorted(scene.targets, key=lambda thing: thing.box[0] + thing.box[2])
    text = f"{START} {caption([thing.name for thing in things])} {END}".split()
    numbers = [vocabulary().index(word) for word in text]
    return numbers + [vocabulary().index(END)] * (MAX_LENGTH - len(numbers))


@torch.no_grad()
def encoded(model: nn.Module, found: list[Scene]) -> Tensor:
    """Tokens ``[n, 197, 192]`` of pictures, as float16."""
    images = torch.from_numpy(np.stack([scene.image for scene in found])).permute(0, 3, 1, 2)
    return model(images.float() / 255 * 2 - 1).last_hidden_state.half()


def kept(folder: Path, seed: int, count: int, seconds: float) -> tuple[Tensor, Tensor]:
    """Tokens and words of as many pictures as there is time for; goes on from what is in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = (count, TOKENS, DIM)
    file, done = folder / f"tokens-{seed}.npy", folder / f"words-{seed}.npy"
    mode = "r+" if file.exists() else "w+"
    tokens = np.lib.format.open_memmap(file, mode=mode, dtype=np.float16, shape=shape)
    words = np.load(done).tolist() if done.exists() else []
    model = build_encoder(transformers, load_file(WEIGHTS / "builtin.safetensors")).float().eval()
    end = time.monotonic() + seconds
    while len(words) < count and time.monotonic() < end:
        found = scenes(seed, len(words), min(len(words) + 32, count))
        tokens[len(words) : len(words) + len(found)] = encoded(model, found).numpy()
        words += [words_of(scene) for scene in found]
        np.save(done, np.array(words))
    log(f"{len(words)} pictures of seed {seed}")
    return torch.from_numpy(tokens[: len(words)]), torch.tensor(words)


def loss_of(model: nn.Module, tokens: Tensor, words: Tensor) -> Tensor:
    """Cross entropy of every word up to the first end."""
    logits = model(input_ids=words[:, :-1], encoder_hidden_states=tokens).logits
    wanted = words[:, 1:]
    after_end = (wanted == 0).long().cumsum(1) > 1
    return F.cross_entropy(logits.flatten(0, 1), wanted.masked_fill(after_end, -100).flatten())


@torch.no_grad()
def named(model: nn.Module, tokens: Tensor, words: Tensor) -> tuple[float, float]:
    """Shares of objects that are named anywhere in the caption, and of captions that are right to the letter."""
    model.eval()
    hits = total = exact = 0
    for part, wanted in zip(tokens.split(64), words.split(64), strict=True):
        written = torch.full((len(part), 1), 1)
        for _ in range(MAX_LENGTH - 1):
            logits = model(input_ids=written, encoder_hidden_states=part.float()).logits[:, -1]
            written = torch.cat([written, logits.argmax(1, keepdim=True)], dim=1)
        for own, truth in zip(written.tolist(), wanted.tolist(), strict=True):
            said, meant = objects(own), objects(truth)
            hits, total, exact = hits + len(set(said) & set(meant)), total + len(meant), exact + (said == meant)
    model.train()
    return hits / total, exact / len(words)


def objects(numbers: list[int]) -> list[str]:
    """Names in a caption."""
    words = [vocabulary()[number] for number in numbers[1:]]
    text = " ".join(words[: words.index(END)] if END in words else words)
    return text.split(" and ")


def train(tokens: Tensor, words: Tensor, tests: tuple[Tensor, Tensor], seconds: float, batch: int) -> nn.Module:
    """The decoder after as many steps as there is time for; warm-up, then a cosine to nothing."""
    torch.manual_seed(0)
    model = build_decoder(transformers).train()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98))
    begin, step, next_report = time.monotonic(), 0, 60.0
    while (progress := (time.monotonic() - begin) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = 1.5e-3 * min(1.0, step / 100) * 0.5 * (1 + math.cos(math.pi * progress))
        rows, places = torch.randint(len(words), (batch,)), torch.randperm(TOKENS)[:KEPT]
        loss = loss_of(model, tokens[rows][:, places].float(), words[rows])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if progress * seconds > next_report:
            hits, exact = named(model, tests[0][:200], tests[1][:200])
            log(f"step {step}, loss {loss.item():.3f}, objects named {hits:.1%}, captions right {exact:.1%}")
            next_report += 60
    return model


def save(model: nn.Module, path: Path) -> None:
    """As float16; the head is the embedding of words."""
    state = {key: value.half().contiguous() for key, value in model.state_dict().items() if key != "lm_head.weight"}
    save_file(state, path)


def main() -> None:
    """Encodes, trains, tests, exports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=25.0, help="three fifths for tokens, the rest for training")
    parser.add_argument("--pictures", type=int, default=12_000)
    parser.add_argument("--tests", type=int, default=400)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--work", type=Path, default=Path("runs"))
    parser.add_argument("--export", type=Path, default=WEIGHTS)
    options = parser.parse_args()
    seconds = options.minutes * 60
    tests = kept(options.work, TEST_SEED, options.tests, math.inf)
    tokens, words = kept(options.work, SEED, options.pictures, 0.6 * seconds - (time.monotonic() - START_TIME))
    model = train(tokens, words, tests, 0.4 * seconds, options.batch)
    hits, exact = named(model, *tests)
    log(f"{len(words)} pictures; of {options.tests} others: objects named {hits:.1%}, captions right {exact:.1%}")
    save(model, options.export / "builtin-captions.safetensors")


if __name__ == "__main__":
    main()
