"""Save small text generators in folders, as save_pretrained does, with a vocabulary of 64 words."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from model_coverage import architectures

WORDS = ("what", "is", "on", "the", "table", "?", "a", "cat", "dog", "red", "blue", "and", "left", "right", "of")
_HALF = {"image_mean": [128 / 255] * 3, "image_std": [127 / 255] * 3}  # grey of 128 is exactly nothing
_SPECIAL = {
    40: "<end_of_utterance>",
    41: "<fake_token_around_image>",
    42: "<global-img>",
    43: "<row_1_col_1>",
    44: "<row_1_col_2>",
    45: "<row_2_col_1>",
    46: "<row_2_col_2>",
    58: "<|vision_start|>",
    59: "<|vision_end|>",
    60: "<image>",
    61: "<|video_pad|>",
}


def tokenizer(image: str = "<image>") -> Any:
    """Words with spaces between; the numbers are those of the table of models."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {**_SPECIAL, 60: image}
    known = ["<pad>", "<s>", "</s>", "<unk>", *WORDS]
    names = known + [special.get(number, f"w{number}") for number in range(len(known), 64)]
    made = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    marks = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **marks, additional_special_tokens=list(special.values()))


def _llava() -> Any:
    from transformers import CLIPImageProcessor, LlavaProcessor

    pixels = CLIPImageProcessor(size={"shortest_edge": 64}, crop_size=64, **_HALF)
    options = {"patch_size": 16, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaProcessor(pixels, tokenizer(), **options)


def _paligemma() -> Any:
    from transformers import PaliGemmaProcessor, SiglipImageProcessor

    pixels = SiglipImageProcessor(size={"height": 64, "width": 64}, **_HALF)
    pixels.image_seq_length = 16
    return PaliGemmaProcessor(pixels, tokenizer())


def _blip2() -> Any:
    from transformers import Blip2Processor, BlipImageProcessor

    return Blip2Processor(
        BlipImageProcessor(size={"height": 64, "width": 64}, **_HALF), tokenizer(), num_query_tokens=4
    )


def _idefics() -> Any:
    """Of SmolVLM too: its own processor differs in what it does to clips, and needs a package more."""
    from transformers import Idefics3ImageProcessor, Idefics3Processor

    sizes = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}}
    return Idefics3Processor(Idefics3ImageProcessor(**sizes, **_HALF), tokenizer(), image_seq_len=4)


def _qwen(name: str) -> Any:
    import transformers

    pixels = transformers.Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=16 * 28 * 28, **_HALF)
    words = tokenizer("<|image_pad|>")
    template = "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<|vision_start|> "
    template += "<|image_pad|> <|vision_end|> {% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %}"
    clips = transformers.Qwen2VLVideoProcessor()
    return getattr(transformers, f"{name}Processor")(pixels, words, clips, chat_template=template)


def _colpali() -> Any:
    from transformers import ColPaliProcessor, SiglipImageProcessor

    pixels = SiglipImageProcessor(size={"height": 64, "width": 64}, **_HALF)
    pixels.image_seq_length = 16
    return ColPaliProcessor(pixels, tokenizer(), visual_prompt_prefix=" what", query_prefix=" what ")


def _colqwen() -> Any:
    import transformers

    pixels = transformers.Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=16 * 28 * 28, **_HALF)
    prefix = "<|vision_start|> <|image_pad|> <|vision_end|> what"
    words = tokenizer("<|image_pad|>")
    return transformers.ColQwen2Processor(pixels, words, visual_prompt_prefix=prefix, query_prefix="what ")


RETRIEVERS = {"ColPali": _colpali, "ColQwen2": _colqwen}
PROCESSORS = {
    "LLaVA": _llava,
    "PaliGemma": _paligemma,
    "BLIP-2": _blip2,
    "Idefics 3": _idefics,
    "SmolVLM": _idefics,
    "Qwen2-VL": lambda: _qwen("Qwen2VL"),
    "Qwen2.5-VL": lambda: _qwen("Qwen2_5_VL"),
}


def save(family: str, folder: Path) -> Path:
    """A folder with model and processor of a family."""
    (entry,) = [entry for entry in architectures("transformers") if entry.family == family]
    model = tiny_models.drawn(entry.build())
    while not hasattr(model, "save_pretrained"):
        model = model.model
    model.save_pretrained(folder)
    {**PROCESSORS, **RETRIEVERS}[family]().save_pretrained(folder)
    return folder


@pytest.fixture(name="folders", scope="module")
def saved_folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a family to a folder with its model and processor, which is saved once."""
    return functools.cache(lambda family: save(family, tmp_path_factory.mktemp(family)))
