"""Models that generate text about an image: vision-language models and captioners of transformers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from dave_vit.data.images import boxes_beside, to_rgb
from dave_vit.engine.observation import TextDecoder
from dave_vit.engine.scores import Token, Word
from dave_vit.errors import InputError, ModelError, OptionError, first_line
from dave_vit.models.frozen_factors import QuestionReader
from dave_vit.models.inputs import ImageAndText, WithInputs
from dave_vit.models.pixel_formats import ImageTokens, PixelInputs, image_preprocessing, join_images, process_image
from dave_vit.models.prompts import format_prompt, split_prompt
from dave_vit.models.tasks import PromptedModel, TaskKind, TaskModel

Photographs = Image.Image | Sequence[Image.Image]
MAX_TOKENS = 32
"""Default limit on the number of tokens of an answer."""
_SUFFIX = "paligemma"  # type of models that mark the answer by 1; others mark images by it
_PIXELS = ("pixel_values", "pixel_attention_mask", "image_grid_thw", "image_position_ids", "rows", "cols", "labels")
_CONTINUE = ("blip", "git", "pix2struct")  # types of models that go on with the prompt, as a caption


@dataclass(frozen=True)
class AnswerWord:
    """A word of an answer.

    Attributes:
        text: the word without spaces around it.
        pieces: indices of its tokens in the answer.
    """

    text: str
    pieces: tuple[int, ...]


class TextGenerator(PromptedModel):
    """A model that generates text about an image.

    Args:
        model: the model of transformers.
        processor: turns images and prompts into inputs; None for a captioner, which takes no prompt.
        image_processor: turns images into pixel inputs.
        tokenizer: of the generated text.
        spec: the name under which the model was loaded.
        options: as of `Adapter`.
    """

    def __init__(
        self, model: Any, processor: Any, image_processor: Any, tokenizer: Any, *, spec: str, **options: Any
    ) -> None:
        super().__init__(model, processor, image_preprocessing(image_processor, spec), spec=spec, **options)
        self.image_processor, self.tokenizer = image_processor, tokenizer

    def with_prompt(
        self, image: Photographs, prompt: str | None = None, *, answer: str | None = None, max_tokens: int = MAX_TOKENS
    ) -> AnsweredPrompt:
        """Return the model with one prompt about one image, or about several, and the answer to it.

        Args:
            image: the photograph, or a list of them.
            prompt: the question; None for captioners. Of several photographs it may have a slot for each, ``<image>``.
            answer: a text to use instead of the generated answer; "" for an empty one.
            max_tokens: limit on the number of generated tokens.
        """
        images = [to_rgb(one)[0] for one in ([image] if isinstance(image, Image.Image) else image)]
        if not images:
            raise InputError("no pictures for a prompt; give at least one")
        fit = self.preprocessing.fit or (lambda same: same)
        shown = [fit(one) for one in images]
        pixels = join_images([self._process(*pair) for pair in zip(images, shown, strict=True)], self.traits.fill)
        model = AnsweredPrompt(self, pixels, self._text_inputs(shown, prompt, pixels))
        if answer is None:
            return model.with_answer(self._generate(model, max_tokens))
        return model.with_answer(self.tokenizer(answer, add_special_tokens=False)["input_ids"] if answer else [])

    def with_example_prompt(self, image: Image.Image) -> AnsweredPrompt:
        """Return the model with a question and one token of an answer."""
        return self.with_prompt(image, None if self.processor is None else "What is this?", max_tokens=1)

    def _process(self, image: Image.Image, shown: Image.Image) -> PixelInputs:
        """Return the pixels of a photograph, in the size of the processor: the text has a slot for each patch.

        Args:
            image: the photograph.
            shown: it in the proportions of the model.
        """
        inputs, pixels = self.preprocess(image), process_image(self.image_processor, self.spec, shown)
        if pixels.image.shape != inputs.shape:
            height, width = pixels.image.shape[-2:]
            raise OptionError(
                f"{self.spec} takes this photograph as {width} x {height} pixels, with a slot in the text for each "
                "patch; leave out --size, --crop, --mean and --std"
            )
        return replace(pixels, image=inputs, sizes=(image.size,))

    def _text_inputs(self, images: list[Image.Image], prompt: str | None, pixels: PixelInputs) -> dict[str, Any]:
        """Return the model's inputs for the text before the answer."""
        config: Any = self.model.config
        has_slots = hasattr(config, "image_token_id") and not hasattr(config, "qformer_config")
        if len(images) > 1 and (not has_slots or config.is_encoder_decoder):
            raise ModelError(f"{self.spec} takes one photograph; leave out --together")
        is_reader = isinstance(self.model, QuestionReader)
        if self.processor is None or (config.model_type in _CONTINUE and not is_reader):
            return self._caption_inputs(prompt)
        if prompt is None:
            raise OptionError(f'{self.spec} answers a prompt; give one, --prompt "What is on the table?"')
        slot = getattr(self.processor, "image_token", None)
        text = format_prompt(self.processor, split_prompt(prompt, slot, len(images)))
        try:
            inputs = self.processor(images=[images], text=[text], return_tensors="pt")
            if len(images) > 1 and not pixels.is_equal(inputs):
                raise ValueError
        except ValueError as error:  # as of a tokenizer without a vocabulary
            if len(images) > 1:
                raise ModelError(
                    f"{self.spec} takes photographs in another form where a prompt has several; explain them one by "
                    "one, or take photographs of one size"
                ) from error
            if isinstance(slot, str) and slot not in text:
                self._check_slot(torch.zeros(1, 0))
            raise ModelError(
                f"the processor of {self.spec} cannot read the prompt ({first_line(error)}); save it with its "
                "tokenizer there, with save_pretrained"
            ) from error
        self._check_slot(inputs["input_ids"])
        if config.is_encoder_decoder or is_reader:
            inputs["decoder_input_ids"] = torch.tensor([[self._start_token]])
        return {name: value for name, value in inputs.items() if name not in _PIXELS}

    def _caption_inputs(self, prompt: str | None) -> dict[str, Any]:
        """Return the first tokens of a text that continues the prompt; Donut's prompts begin with a token of a task."""
        config: Any = self.model.config
        is_donut = self.processor is None and config.encoder.model_type == "donut-swin"
        if prompt is not None and self.processor is None and not is_donut:
            raise OptionError(f"{self.spec} writes captions and takes no prompt; leave --prompt out")
        tokens = self.tokenizer(prompt, add_special_tokens=False)["input_ids"] if prompt else []
        name = "decoder_input_ids" if self.processor is None or config.is_encoder_decoder else "input_ids"
        return {name: torch.tensor([tokens if tokens and is_donut else [self._start_token, *tokens]])}

    @property
    def _start_token(self) -> int:
        """The token with which a decoder begins."""
        own: Any = self.model
        configs = own.config, own.generation_config, own.config.get_text_config(decoder=True), self.tokenizer
        tokens = (getattr(one, name, None) for name in ("decoder_start_token_id", "bos_token_id") for one in configs)
        return next(int(token) for token in tokens if token is not None)

    def _check_slot(self, token_ids: Tensor) -> None:
        """Raise InputError where the tokens of a prompt have no slot for the photograph."""
        image_token = getattr(self.model.config, "image_token_id", None)
        has_queries = hasattr(self.processor, "num_query_tokens")  # BLIP-2 puts them in by itself
        if image_token is not None and not has_queries and image_token not in token_ids[0].tolist():
            raise InputError(
                f"the chat template of {self.spec} has no image slot, so that the model would not see the photograph; "
                "save the processor with a template for images"
            )

    @torch.no_grad()
    def _generate(self, model: AnsweredPrompt, max_tokens: int) -> list[int]:
        """Generate the most likely tokens, up to one that ends the answer; other special tokens are skipped."""
        tokens: list[int] = []
        configured = getattr(self.model.generation_config, "eos_token_id", None)  # type: ignore[union-attr]
        ends = configured if configured is not None else self.tokenizer.eos_token_id
        own: Any = self.model.config
        ends = own.text_config.sep_token_id if own.model_type == "blip" else ends  # as its own generate does
        end_tokens = list(ends) if isinstance(ends, list | tuple) else [ends]
        special = [token for token in self.tokenizer.all_special_ids if token not in end_tokens]
        while len(tokens) < max_tokens:
            logits = model.with_answer(tokens)(model.inputs).logits[0, -1]
            logits[[token for token in special if token < len(logits)]] = -torch.inf
            token = int(logits.argmax())
            if token in end_tokens:
                break
            tokens.append(token)
        if not tokens:
            raise InputError(f"{self.spec} returned an empty answer; give another prompt")
        return tokens


class AnsweredPrompt(TaskModel):
    """A text generator with one image, prompt and answer: maps the image's pixels to the logits of all tokens.

    Attributes:
        inputs: the image ``[1, C, H, W]``, or the images ``[1, N, C, H, W]``.
        tokens: of the answer.
        words: of the answer.
        token_ids: of the prompt and the answer, ``[1, L]``.
        text_decoder: the language model, with the places of the image in its sequence.
    """

    def __init__(
        self, generator: TextGenerator, pixels: PixelInputs, text_inputs: dict[str, Any], tokens: Sequence[int] = ()
    ) -> None:
        model: Any = generator.model
        name = next(key for key in ("decoder_input_ids", "input_ids") if key in text_inputs)
        ones = ("attention_mask", "token_type_ids" if model.config.model_type == _SUFFIX else "")
        constants = _append_answer(text_inputs, name, list(tokens), ones)
        token_ids = constants[name]
        arrange = pixels.arrange
        if pixels.is_embedded:
            constants.pop(name)
            arrange = ImageTokens(model, token_ids, arrange)  # type: ignore[arg-type]
        accepted = inspect.signature(model.forward).parameters
        constants |= {"use_cache": False} if "use_cache" in accepted or "kwargs" in accepted else {}
        constants |= {"logits_to_keep": len(tokens) + 1} if "logits_to_keep" in accepted else {}
        words = split_words(generator.tokenizer, tokens)
        task = TaskKind("text", "", _word_score(words[0], tokens) if words else Token(0))
        bound = WithInputs(model, arrange, constants)  # several images may have a row each
        preprocessing = generator.preprocessing
        if len(pixels.sizes) > 1:  # as if these were parts of one photograph, beside each other
            preprocessing = replace(preprocessing, parts=lambda size: boxes_beside(pixels.sizes))
        super().__init__(bound, preprocessing, [], task=task, spec=generator.spec, traits=generator.traits)
        self.inputs, self.tokens, self.words = pixels.image, tuple(int(token) for token in tokens), words
        self.token_ids = token_ids
        self.text_decoder = _find_decoder(model, token_ids)
        self.prepare = generator.prepare
        self.tokenizer, self._arguments = generator.tokenizer, (generator, pixels, text_inputs)

    def with_answer(self, tokens: Sequence[int]) -> AnsweredPrompt:
        """Return the same image and prompt with another answer."""
        return AnsweredPrompt(*self._arguments, tokens)

    def score(self, word: int) -> Word:
        """Return the score of a word by its index: the logits of its tokens."""
        return _word_score(self.words[word], self.tokens)

    @torch.no_grad()
    def scores(self, words: Sequence[int], *, against: str | int = "rivals") -> list[Word]:
        """Return the scores of words by their indices.

        Args:
            words: their indices.
            against: "rivals" for logits against the rest of the vocabulary, "none" for logits.
        """
        if against not in ("rivals", "none"):
            raise OptionError(f"--against {against}; a word is explained against its rivals or by itself: rivals, none")
        scores = [self.score(word) for word in words]
        if against == "none":
            return scores
        output = self(self.inputs)
        return [score.against_rivals(output) for score in scores]

    def with_text_embeddings(self) -> ImageAndText:
        """Return the model of the image and of the embeddings of prompt and answer, as one vector."""
        own: Any = self.model.model
        if own.config.is_encoder_decoder:  # whose encoder may have an embedding of its own
            own = getattr(own.get_decoder(), "decoder", own.get_decoder())
        token_ids = self.token_ids.to(self.inputs.device)
        return ImageAndText(self, own.get_input_embeddings(), token_ids, tuple(self.inputs.shape[1:]))

    @torch.no_grad()
    def probabilities(self) -> list[float]:
        """Return the probability of each word, given the image, the prompt and the words before it."""
        chances = self(self.inputs).logits[0].cpu().double().log_softmax(-1)  # [positions, vocabulary]
        scores = [self.score(word) for word in range(len(self.words))]
        return [math.exp(float(chances[list(one.positions), list(one.tokens)].sum())) for one in scores]

    def compute_all_logits(self, images: Tensor) -> Tensor:
        """Return the logits ``[B, L, vocabulary]`` at all tokens, those of the image too; models may skip these."""
        bound: Any = self.model
        constants = {name: 0 if name == "logits_to_keep" else value for name, value in bound.constants.items()}
        return WithInputs(bound.model, bound.explained, constants)(images).logits  # type: ignore[no-any-return]

    @property
    def answer(self) -> str:
        """The text of the answer."""
        return str(self.tokenizer.decode(self.tokens)).strip()


def _find_decoder(model: Any, token_ids: Tensor) -> TextDecoder:
    """Return the language model inside of a model of transformers; all of it where there is no part that writes."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    name = next((name for name, module in model.named_modules() if module is decoder), "")
    image_token = getattr(model.config, "image_token_id", None)
    is_patch = image_token is not None and not hasattr(model.config, "qformer_config")
    places = [place for place, token in enumerate(token_ids[0].tolist()) if is_patch and token == image_token]
    # One token alone stands for an image that is attended from the text, as in Llama 3.2.
    return TextDecoder(f"model.model.{name}".rstrip("."), tuple(places) if len(places) > 1 else ())


def _word_score(word: AnswerWord, tokens: Sequence[int]) -> Word:
    positions = tuple(piece - len(tokens) - 1 for piece in word.pieces)  # a token is predicted one position before
    return Word(tuple(int(tokens[piece]) for piece in word.pieces), positions)


def _append_answer(text_inputs: dict[str, Any], name: str, tokens: list[int], ones: Sequence[str]) -> dict[str, Any]:
    """Return the inputs of a prompt followed by the tokens of an answer, where some are 1 and others 0."""
    shape = text_inputs[name].shape
    constants = {}
    for key, value in text_inputs.items():
        if isinstance(value, Tensor) and value.shape == shape and not value.is_floating_point():
            more = tokens if key == name else [int(key in ones)] * len(tokens)
            value = torch.cat([value, value.new_tensor([more]).reshape(1, -1)], dim=1)
        elif key == "cross_attention_mask":  # of Llama 3.2: [1, L, images, tiles]
            value = torch.cat([value, value[:, -1:].expand(-1, len(tokens), -1, -1)], dim=1)
        constants[key] = value
    return constants


def split_words(tokenizer: Any, tokens: Sequence[int]) -> list[AnswerWord]:
    """Group tokens into words: a word starts with a space, or is punctuation of its own."""
    words: list[AnswerWord] = []
    before = ""
    for index in range(len(tokens)):
        text = str(tokenizer.decode(tokens[: index + 1]))
        piece, before = text[len(before) :], text
        punctuation = bool(piece.strip()) and not any(sign.isalnum() for sign in piece)
        if words and not piece[:1].isspace() and not punctuation:
            words[-1] = AnswerWord(words[-1].text + piece, (*words[-1].pieces, index))
        else:
            words.append(AnswerWord(piece, (index,)))
    return [AnswerWord(word.text.strip(), word.pieces) for word in words]
