"""Cost of the maps of words: a Qwen3-VL of two billion random weights in bfloat16, one JSON object a line.

    python benchmarks/words.py

Nothing is downloaded. The rows are a plain forward pass, then one gradient pass and the default map (20 views) of 1, 3
and 10 words: milliseconds, forward passes of an image in that time, and peak memory, the model included. A pass of n
words is one forward pass and n backward passes: with f and b milliseconds of these, (f + n b) / (f + b) is the least
that n words cost over one where a batch fills the device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dave_vit import __version__, create_method
from dave_vit.engine.gradient import gradient
from dave_vit.engine.rule_sets import EFFECTIVE
from dave_vit.engine.scores import Word
from dave_vit.engine.targets import ScoreSet
from dave_vit.errors import first_line
from dave_vit.models.inputs import WithInputs, with_inputs
from dave_vit.models.pixel_formats import PackedPatches
from large_models import GIB, free_cache, peak, reset_peak, synchronize

WORDS = (1, 3, 10)
VIEWS = 20  # as the default draws
PROMPT = 20  # tokens of a question
IMAGE, VIDEO, START, END = 60, 61, 58, 59
PATCH, MERGE = 16, 2
LARGE: dict[str, dict[str, Any]] = {
    "vision": {
        **{"depth": 24, "num_heads": 16, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2048},
        **{"num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17]},
    },
    "text": {
        **{"num_hidden_layers": 28, "hidden_size": 2048, "intermediate_size": 6144, "vocab_size": 151936},
        **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
        "rope_parameters": {"mrope_section": [24, 20, 20], "rope_theta": 5e6},
    },
}
TINY: dict[str, dict[str, Any]] = {
    "vision": {
        **{"depth": 2, "num_heads": 2, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 32},
        **{"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    },
    "text": {
        **{"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 256},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
        "rope_parameters": {"mrope_section": [1, 1, 2], "rope_theta": 1e4},
    },
}


def build_model(sizes: dict[str, dict[str, Any]], device: torch.device) -> nn.Module:
    """Return a Qwen3-VL with random weights, made on the device."""
    import transformers

    rope = {"rope_type": "default", "mrope_interleaved": True, **sizes["text"]["rope_parameters"]}
    text = {**sizes["text"], "rope_parameters": rope, "max_position_embeddings": 4096, "tie_word_embeddings": True}
    vision = {**sizes["vision"], "patch_size": PATCH, "spatial_merge_size": MERGE}
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}
    config = transformers.Qwen3VLConfig(vision_config=vision, text_config=text, tie_word_embeddings=True, **tokens)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            return transformers.Qwen3VLForConditionalGeneration(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def ask(model: nn.Module, side: int, answer: int) -> WithInputs:
    """Return the model of one image, with a question and an answer of so many words."""
    slots = [IMAGE] * (side // (PATCH * MERGE)) ** 2
    ids = torch.tensor([[1, START, *slots, END, *range(70, 70 + PROMPT), *range(100, 100 + answer)]])
    kinds = {"mm_token_type_ids": (ids == IMAGE).int(), "attention_mask": torch.ones_like(ids)}
    options = {"use_cache": False, "logits_to_keep": answer + 1}
    return with_inputs(model, PackedPatches(PATCH, MERGE), input_ids=ids, **kinds, **options)


class Bench:
    """Rows of one model with a question and an answer.

    Args:
        model: of one image.
        side: of the image.
        answer: words in it.
        deadline: of ``time.perf_counter``, after which rows are skipped.
    """

    def __init__(self, model: WithInputs, side: int, answer: int, deadline: float) -> None:
        self.model, self.answer, self.deadline = model, answer, deadline
        self.device = next(model.parameters()).device
        self.image = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(1)).to(self.device)
        self.unit: float | None = None  # milliseconds of a forward pass of an image, among others

    def words(self, count: int) -> ScoreSet:
        """Return the scores of the last words, against their rivals."""
        with torch.no_grad():
            output = self.model(self.image)
        indices = range(self.answer - count, self.answer)
        words = (Word((100 + index,), (index - self.answer - 1,)) for index in indices)
        return ScoreSet(tuple(word.against_rivals(output) for word in words))

    def run(self) -> None:
        """Print all rows."""
        views = self.image.repeat(VIEWS, 1, 1, 1) + 0.01 * torch.randn(VIEWS, 1, 1, 1, device=self.device)
        self.measure("forward pass", lambda: self._forward(self.image))
        row = self.measure(f"forward pass of {VIEWS} views", lambda: self._forward(views))
        self.unit = row["ms"] / VIEWS if "ms" in row else None
        for inputs in (self.image, views):
            for count in WORDS:
                call = partial(gradient, self.model, inputs, self.words(count), rules=EFFECTIVE)
                self.measure("gradient pass", call, words=count, images=len(inputs))
        for count in WORDS:
            call = partial(create_method("dave", self.model).attribute, self.image, self.words(count))
            self.measure("default map", call, words=count, images=1)

    @torch.no_grad()
    def _forward(self, inputs: Tensor) -> None:
        self.model(inputs)

    def measure(self, what: str, call: Callable[[], object], **facts: int) -> dict[str, Any]:
        """Time a call and print it; the first call, which checks the model, is timed by itself."""
        row: dict[str, Any] = {"what": what, **facts}
        if time.perf_counter() > self.deadline:
            row["skipped"] = "no time left"
        else:
            try:
                row |= self._time(call)
            except Exception as error:  # a row that fails is a result too
                row["error"] = f"{type(error).__name__}: {first_line(error)}"
        print(json.dumps(row), flush=True)
        return row

    def _time(self, call: Callable[[], object]) -> dict[str, Any]:
        free_cache(self.device)
        first = self._clock(call)
        reset_peak(self.device)
        ms = 1e3 * statistics.median(self._clock(call) for _ in range(1 if first > 5 else 3))
        passes = {} if self.unit is None else {"passes": round(ms / self.unit, 1)}
        used = {"allocated_gib": round(torch.cuda.max_memory_allocated() / GIB, 2)} if self.image.is_cuda else {}
        return {"ms": round(ms, 2), **passes, "first_s": round(first, 2), **used, **peak(self.device)}

    def _clock(self, call: Callable[[], object]) -> float:
        synchronize(self.device)
        start = time.perf_counter()
        call()
        synchronize(self.device)
        return time.perf_counter() - start


def main() -> None:
    """Print what runs where, then the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--side", type=int, default=448, help="of the picture, in pixels")
    parser.add_argument("--tiny", action="store_true", help="a model of two layers")
    parser.add_argument("--seconds", type=float, default=200, help="after which rows are skipped")
    options = parser.parse_args()
    deadline, device = time.perf_counter() + options.seconds, torch.device(options.device)
    model = build_model(TINY if options.tiny else LARGE, device)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    facts = {"device": where, "torch": torch.__version__, "dave_vit": __version__, "side": options.side}
    print(json.dumps({**facts, "weights_gib": round(weights / GIB, 2)}), flush=True)
    answer = max(WORDS)
    Bench(ask(model, options.side, answer), options.side, answer, deadline).run()


if __name__ == "__main__":
    main()
