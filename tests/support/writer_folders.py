"""Save small text generators in folders, as save_pretrained does, with a vocabulary of 64 words."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from dave_vit.models.checkpoint import quiet
from model_coverage import architectures
from model_coverage.hf_documents import gemma4, mllama
from model_coverage.hf_tasks import built
from model_coverage.hf_vision_language import kosmos2

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


def tokenizer(image: str = "<image>", marks: dict[int, str] | None = None, space: str = "", **named: str) -> Any:
    """Words with spaces between; the numbers are those of the table of models.

    Args:
        image: the token that stands for a part of the image.
        marks: other special tokens, by number.
        space: the sign before each word.
        named: special tokens that are attributes of the tokenizer.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {**_SPECIAL, 60: image, **(marks or {})}
    known = ["<pad>", "<s>", "</s>", "<unk>", *(space + word for word in WORDS)]
    names = known + [special.get(number, f"{space}w{number}") for number in range(len(known), 64)]
    made = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    own = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    more: dict[str, Any] = {"additional_special_tokens": list(special.values())}
    if named:
        more = {"extra_special_tokens": {**{f"token{number}": word for number, word in special.items()}, **named}}
    return PreTrainedTokenizerFast(tokenizer_object=made, **own, **more)


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


def _template(slot: str) -> str:
    template = "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %}" + slot
    return template + " {% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %}"


def _qwen(name: str, clips: str = "Qwen2VL", space: str = "") -> Any:
    import transformers

    sizes = {"size": {"shortest_edge": 56 * 56, "longest_edge": 16 * 28 * 28}, "patch_size": 14}
    made = transformers.Qwen2VLImageProcessor(**sizes, **_HALF)
    template = _template("<|vision_start|> <|image_pad|> <|vision_end|>")
    clips = getattr(transformers, f"{clips}VideoProcessor")()
    words = tokenizer("<|image_pad|>", space=space)
    return getattr(transformers, f"{name}Processor")(made, words, clips, chat_template=template)


def _glm() -> Any:
    import transformers

    sizes = {"size": {"shortest_edge": 56 * 56, "longest_edge": 16 * 28 * 28}}
    pixels, clips = transformers.Glm4vImageProcessor(**sizes, **_HALF), transformers.Glm4vVideoProcessor()
    words = tokenizer("<|image|>", {58: "<|begin_of_image|>", 59: "<|end_of_image|>", 61: "<|video|>"})
    template = _template("<|begin_of_image|> <|image|> <|end_of_image|>")
    return transformers.Glm4vProcessor(pixels, words, clips, chat_template=template)


_GRID = [[64, 64], [64, 128], [128, 64], [128, 128]]


def _llava_next() -> Any:
    import transformers

    sizes = {"size": {"shortest_edge": 64}, "crop_size": 64, "image_grid_pinpoints": _GRID}
    pixels = transformers.LlavaNextImageProcessor(**sizes, **_HALF)
    options = {"patch_size": 16, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return transformers.LlavaNextProcessor(pixels, tokenizer(), **options)


def _onevision() -> Any:
    import transformers

    sizes = {"size": {"height": 64, "width": 64}, "image_grid_pinpoints": _GRID}
    pixels, clips = (
        transformers.LlavaOnevisionImageProcessor(**sizes, **_HALF),
        transformers.LlavaOnevisionVideoProcessor(),
    )
    options = {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "video_token": "<|video_pad|>"}
    return transformers.LlavaOnevisionProcessor(pixels, tokenizer(), clips, **options)


def _internvl() -> Any:
    import transformers

    tiles = {"size": {"height": 64, "width": 64}, "max_patches": 6}  # cut by default of the whole processor
    pixels, clips = transformers.GotOcr2ImageProcessor(**tiles, **_HALF), transformers.InternVLVideoProcessor()
    named = {"start_image_token": "<img>", "end_image_token": "</img>", "video_token": "<video>"}
    words = tokenizer(
        "<IMG_CONTEXT>", {58: "<img>", 59: "</img>", 61: "<video>"}, context_image_token="<IMG_CONTEXT>", **named
    )
    template = _template("<IMG_CONTEXT>")
    return transformers.InternVLProcessor(pixels, words, clips, image_seq_length=4, chat_template=template)


def _aya() -> Any:
    import transformers

    tiles = {"size": {"height": 64, "width": 64}, "max_patches": 6}
    words = tokenizer("<|IMG_PATCH|>", {58: "<|START_OF_IMG|>", 59: "<|END_OF_IMG|>", 57: "<image>"})
    options = {"patch_size": 16, "img_size": 64, "downsample_factor": 2, "chat_template": _template("<image>")}
    return transformers.AyaVisionProcessor(transformers.GotOcr2ImageProcessor(**tiles, **_HALF), words, **options)


def _gemma3() -> Any:
    import transformers

    pixels = transformers.Gemma3ImageProcessor(size={"height": 64, "width": 64}, **_HALF)
    named = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image>"}
    words = tokenizer("<image>", {58: "<boi>", 59: "<eoi>"}, **named)
    return transformers.Gemma3Processor(pixels, words, image_seq_length=4, chat_template=_template("<boi>"))


def _gemma4() -> Any:
    import transformers

    pixels = transformers.Gemma4ImageProcessor(max_soft_tokens=70, pooling_kernel_size=2, patch_size=16)
    named = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image>"}
    named |= {"audio_token": "<audio>", "boa_token": "<boa>", "eoa_token": "<eoa>"}
    words = tokenizer(
        "<image>", {58: "<boi>", 59: "<eoi>", 61: "<|video|>", 62: "<audio>", 56: "<boa>", 57: "<eoa>"}, **named
    )
    sound, clips = transformers.Gemma4AudioFeatureExtractor(), transformers.Gemma4VideoProcessor()
    return transformers.Gemma4Processor(sound, pixels, words, clips, chat_template=_template("<image>"))


def _mistral(merge: int) -> Any:
    import transformers

    pixels = transformers.PixtralImageProcessor(
        size={"longest_edge": 64}, patch_size={"height": 16, "width": 16}, **_HALF
    )
    words = tokenizer("[IMG]", {58: "[IMG_BREAK]", 59: "[IMG_END]"})
    options = {"patch_size": 16, "spatial_merge_size": merge, "chat_template": _template("[IMG]")}
    return transformers.PixtralProcessor(pixels, words, **options)


def _llama4() -> Any:
    import transformers

    pixels = transformers.Llama4ImageProcessor(size={"height": 64, "width": 64}, max_patches=4, **_HALF)
    marks = {
        54: "<|image_start|>",
        55: "<|image_end|>",
        56: "<|image|>",
        58: "<|tile_x_separator|>",
        59: "<|tile_y_separator|>",
    }
    words = tokenizer("<|patch|>", marks)
    return transformers.Llama4Processor(pixels, words, patch_size=16, chat_template=_template("<|image|>"))


def _mllama() -> Any:
    import transformers

    pixels = transformers.MllamaImageProcessor(size={"height": 64, "width": 64}, max_image_tiles=4, **_HALF)
    words = tokenizer("<|image|>", {58: "<|python_tag|>"})
    return transformers.MllamaProcessor(pixels, words, chat_template=_template("<|image|>"))


def _perception() -> Any:
    import transformers

    pixels = transformers.PerceptionLMImageProcessor(tile_size=64, max_num_tiles=4, **_HALF)
    words = tokenizer("<image>", {61: "<video>"}, image_token="<image>", video_token="<video>")
    clips = transformers.PerceptionLMVideoProcessor()
    options = {"patch_size": 16, "pooling_ratio": 1, "chat_template": _template("<image>")}
    return transformers.PerceptionLMProcessor(clips, pixels, words, **options)


def _florence2() -> Any:
    import transformers

    pixels = transformers.CLIPImageProcessor(
        size={"height": 64, "width": 64}, crop_size=64, do_center_crop=False, **_HALF
    )
    pixels.image_seq_length = 65
    words = tokenizer("<image>", image_token="<image>")
    return transformers.Florence2Processor(pixels, words, num_additional_image_tokens=1)


def _instruct() -> Any:
    import transformers

    pixels = transformers.BlipImageProcessor(size={"height": 64, "width": 64}, **_HALF)
    return transformers.InstructBlipProcessor(pixels, tokenizer(), tokenizer(), num_query_tokens=4)


def _kosmos2() -> Any:
    import transformers

    pixels = transformers.CLIPImageProcessor(size={"shortest_edge": 64}, crop_size=64, **_HALF)
    return transformers.Kosmos2Processor(pixels, tokenizer(), num_patch_index_tokens=0)


def _plain(name: str, pixels: str, **size: Any) -> Any:
    import transformers

    made = getattr(transformers, f"{pixels}ImageProcessor")(**(size or {"size": {"height": 64, "width": 64}}), **_HALF)
    return getattr(transformers, f"{name}Processor")(made, tokenizer())


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
    "Qwen3-VL": lambda: _qwen("Qwen3VL", clips="Qwen3VL"),
    "Qwen3.5": lambda: _qwen("Qwen3VL", clips="Qwen3VL", space="Ġ"),  # its tokenizer decodes bytes
    "GLM-4V": _glm,
    "LLaVA-NeXT": _llava_next,
    "LLaVA-OneVision": _onevision,
    "InternVL 3": _internvl,
    "Aya Vision": _aya,
    "Gemma 3": _gemma3,
    "Gemma 4": _gemma4,
    "Mistral 3": lambda: _mistral(2),
    "Pixtral": lambda: _mistral(1),
    "Llama 3.2 Vision": _mllama,
    "Llama 4": _llama4,
    "PaliGemma 2": _paligemma,
    "Perception LM": _perception,
    "Florence-2": _florence2,
    "InstructBLIP": _instruct,
    "Kosmos-2": _kosmos2,
}
CAPTIONERS = {
    "GIT": lambda: _plain("Git", "CLIP", size={"shortest_edge": 64}, crop_size=64),
    "BLIP, captions": lambda: _plain("Blip", "Blip"),
    "Donut": lambda: _plain("Donut", "Donut"),
    "TrOCR": lambda: _plain("TrOCR", "ViT"),
}
READERS = {
    "BLIP, questions": lambda: _plain("Blip", "Blip"),
    "ViLT": lambda: _plain("Vilt", "Vilt", size={"shortest_edge": 64}),
    "Pix2Struct": lambda: _plain("Pix2Struct", "Pix2Struct", max_patches=16),
}
QUESTION = "what is on the table ?"
# what stands for the image in the text that a processor takes
_PADS = {"Qwen2-VL", "Qwen2.5-VL", "Qwen3-VL", "Qwen3.5"}
SLOTS = {
    **dict.fromkeys(_PADS, "<|vision_start|> <|image_pad|> <|vision_end|> "),
    **dict.fromkeys(("BLIP-2", "InstructBLIP", "Kosmos-2", "Florence-2"), ""),
    **dict.fromkeys(("Mistral 3", "Pixtral"), "[IMG] "),
    **dict.fromkeys(("Llama 3.2 Vision", "Llama 4"), "<|image|> "),
    "GLM-4V": "<|begin_of_image|> <|image|> <|end_of_image|> ",
    "InternVL 3": "<IMG_CONTEXT> ",
    "Gemma 3": "<boi> ",
}


_CONFIGURATIONS = {  # where processors make more of a picture than the table of models needs
    "Llama 3.2 Vision": partial(mllama, tiles=4),
    "Gemma 4": partial(gemma4, places=32),
    "Kosmos-2": partial(kosmos2, image_tokens=64, vocabulary=96),
}


def save(family: str, folder: Path) -> Path:
    """A folder with model and processor of a family."""
    (entry,) = [entry for entry in architectures("transformers") if entry.family == family]
    build = partial(built, entry.name, _CONFIGURATIONS[family], "sdpa") if family in _CONFIGURATIONS else entry.build
    model = tiny_models.drawn(build())
    while not hasattr(model, "save_pretrained"):
        model = model.model
    if hasattr(model.config, "image_grid_pinpoints"):
        model.config.image_grid_pinpoints = _GRID
    if model.can_generate():
        model.generation_config.eos_token_id = 99  # of no word: answers are as long as they may be
    with quiet():
        model.save_pretrained(folder)
    {**PROCESSORS, **CAPTIONERS, **READERS, **RETRIEVERS}[family]().save_pretrained(folder)
    return folder


@pytest.fixture(name="folders", scope="module")
def saved_folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a family to a folder with its model and processor, which is saved once."""
    return functools.cache(lambda family: save(family, tmp_path_factory.mktemp(family)))
