"""Models that write text about a picture: vision-language models and captioners of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from dave_vit.data.images import to_rgb
from dave_vit.engine.scores import Token, Word
from dave_vit.engine.targets import Score
from dave_vit.errors import InputError, OptionError
from dave_vit.models.inputs import with_inputs
from dave_vit.models.pixels import canvas, form_of
from dave_vit.models.prompted import Prompted
from dave_vit.models.tasks import Task, TaskModel
from dave_vit.models.traits import Traits

LONGEST = 32
"""Tokens of an answer at most, unless told otherwise."""
_AFTER = {"attention_mask": 1, "token_type_ids": 1}  # what written words get, and 0 in other inputs
_OF_PIXELS = ("pixel_values", "pixel_attention_mask", "image_grid_thw", "rows", "cols", "labels")


@dataclass(frozen=True)
class WrittenWord:
    """A word of an answer.

    Attributes:
        text: as it stands there, without spaces.
        pieces: numbers of its tokens among those of the answer.
    """

    text: str
    pieces: tuple[int, ...]


class Writer(Prompted):
    """A model that writes text about a picture; `ask` makes of it a model of one picture's pixels.

    Args:
        model: of transformers.
        processor: of pictures and prompts; None for a captioner, which takes no prompt.
        image_processor: of pictures.
        tokenizer: of the text that it writes.
        spec: the name under which the model was loaded.
        traits: what else is known of it.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        image_processor: Any,
        tokenizer: Any,
        *,
        spec: str,
        traits: Traits | None = None,
    ) -> None:
        super().__init__(model, canvas(image_processor, spec), [], spec=spec, traits=traits)
        self.processor, self.image_processor, self.tokenizer = processor, image_processor, tokenizer

    def ask(
        self, picture: Image.Image, prompt: str | None = None, *, answer: str | None = None, longest: int = LONGEST
    ) -> Asked:
        """The model with one picture and one prompt, and the answer to them.

        Args:
            picture: the photograph.
            prompt: the question; None for captioners.
            answer: what is taken as its answer, in place of the one that it gives; "" for none at all.
            longest: the largest number of tokens.
        """
        image = to_rgb(picture)[0]
        said = self._prompted(image, prompt)
        asked = Asked(self, self.preprocess(image), self.preprocessing.transform.made(image), said)  # type: ignore[attr-defined]
        if answer is None:
            return asked.answered(self._greedy(asked, longest))
        return asked.answered(self.tokenizer(answer, add_special_tokens=False)["input_ids"] if answer else [])

    def tried(self, picture: Image.Image) -> Asked:
        """With a question and one token of an answer."""
        return self.ask(picture, None if self.processor is None else "What is this?", longest=1)

    def _prompted(self, image: Image.Image, prompt: str | None) -> dict[str, Any]:
        """What stands before the answer, as inputs of the model."""
        if self.processor is None:
            if prompt is not None:
                raise OptionError(f"{self.spec} writes captions and takes no prompt; leave --prompt out")
            start = self.model.config.decoder_start_token_id  # type: ignore[union-attr]
            return {"decoder_input_ids": torch.tensor([[start]])}
        if prompt is None:
            raise OptionError(f'{self.spec} answers a prompt; give one, --prompt "What is on the table?"')
        made = self.processor(images=[image], text=[_dressed(self.processor, prompt)], return_tensors="pt")
        return {name: value for name, value in made.items() if name not in _OF_PIXELS}

    @torch.no_grad()
    def _greedy(self, asked: Asked, longest: int) -> list[int]:
        """The likeliest token after each other, up to one that ends; marks, such as of pictures, are no words."""
        tokens: list[int] = []
        ends = self._ends()
        marks = [mark for mark in self.tokenizer.all_special_ids if mark not in ends]
        while len(tokens) < longest:
            logits = asked.answered(tokens)(asked.inputs).logits[0, -1]
            logits[[mark for mark in marks if mark < len(logits)]] = -torch.inf
            token = int(logits.argmax())
            if token in ends:
                break
            tokens.append(token)
        if not tokens:
            raise InputError(f"{self.spec} answers with nothing; give another prompt")
        return tokens

    def _ends(self) -> list[int]:
        configured = getattr(self.model.generation_config, "eos_token_id", None)  # type: ignore[union-attr]
        ends = configured if configured is not None else self.tokenizer.eos_token_id
        return list(ends) if isinstance(ends, list | tuple) else [ends]


def _dressed(processor: Any, prompt: str) -> str:
    """A prompt in the form that a model was trained with."""
    if getattr(processor, "chat_template", None):
        content = [{"type": "image"}, {"type": "text", "text": prompt}]
        said: str = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        return said
    if hasattr(processor, "num_query_tokens"):  # BLIP-2 puts the picture first by itself
        return prompt
    return f"{processor.image_token}{prompt}"


class Asked(TaskModel):
    """A writer with one picture, one prompt and an answer: takes the picture's pixels, returns logits of all words.

    Attributes:
        inputs: the picture ``[1, C, H, W]``.
        tokens: of the answer.
        words: of the answer.
    """

    def __init__(
        self, writer: Writer, inputs: Tensor, made: dict[str, Any], said: dict[str, Any], tokens: Sequence[int] = ()
    ) -> None:
        form, model = form_of(made, writer.spec), writer.model
        name = next(key for key in ("input_ids", "decoder_input_ids") if key in said)
        constants = _continued(said, name, list(tokens))
        arranged = form.arrange(model, writer.image_processor, made, constants[name])
        if form.words:
            constants.pop(name)
        taken = inspect.signature(model.forward).parameters
        constants |= {"use_cache": False} if "use_cache" in taken or "kwargs" in taken else {}
        constants |= {"logits_to_keep": len(tokens) + 1} if "logits_to_keep" in taken else {}
        pixels = with_inputs(model, arranged, **constants)
        super().__init__(pixels, writer.preprocessing, [], spec=writer.spec, traits=writer.traits)
        self.inputs, self.tokens = inputs, tuple(int(token) for token in tokens)
        self.tokenizer, self._parts = writer.tokenizer, (writer, inputs, made, said)
        self.words = _words(self.tokenizer, self.tokens)
        self.task = Task("text", "", self.score(0) if self.words else Token(0))

    def answered(self, tokens: Sequence[int]) -> Asked:
        """The same question with another answer."""
        return Asked(*self._parts, tokens)

    def score(self, word: int) -> Score:
        """Of a word by its number, counted from 0."""
        pieces = self.words[word].pieces
        places = tuple(piece - len(self.tokens) - 1 for piece in pieces)  # a token is predicted one place before
        return Word(tuple(self.tokens[piece] for piece in pieces), places)

    @property
    def answer(self) -> str:
        """The text."""
        return str(self.tokenizer.decode(self.tokens)).strip()


def _continued(said: dict[str, Any], name: str, tokens: list[int]) -> dict[str, Any]:
    """The inputs of a prompt with written words behind it."""
    shape = said[name].shape
    constants = {}
    for key, value in said.items():
        if isinstance(value, Tensor) and value.shape == shape and not value.is_floating_point():
            more = tokens if key == name else [_AFTER.get(key, 0)] * len(tokens)
            value = torch.cat([value, value.new_tensor([more]).reshape(1, -1)], dim=1)
        constants[key] = value
    return constants


def _words(tokenizer: Any, tokens: Sequence[int]) -> list[WrittenWord]:
    """Tokens gathered into words: a word begins with a space, or with what is neither letter nor digit after such."""
    words: list[WrittenWord] = []
    before = ""
    for number in range(len(tokens)):
        text = str(tokenizer.decode(tokens[: number + 1]))
        piece, before = text[len(before) :], text
        mark = not any(sign.isalnum() for sign in piece)
        if words and not piece[:1].isspace() and not (mark and piece.strip()):
            words[-1] = WrittenWord(words[-1].text + piece, (*words[-1].pieces, number))
        else:
            words.append(WrittenWord(piece, (number,)))
    return [WrittenWord(word.text.strip(), word.pieces) for word in words]
