"""The registry of named scores, and what their texts refer to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dave_vit._internal.registry import Registry
from dave_vit.engine.boxes import Box, parse_box
from dave_vit.errors import OptionError

SCORES: Registry[Any] = Registry("score")
"""Named scores: frozen dataclasses that are called with the model's output, such as ``Detection``.

A class attribute ``form`` shows how the score is written, the first line of the docstring is its summary, and the class
method ``parse(text, context)`` makes one from what follows the first colon; ValueError means that the form is wrong.
"""


@dataclass(frozen=True)
class ScoreContext:
    """What the text of a score refers to.

    Attributes:
        model: a loaded model, with class names, spec and preprocessing.
        geometry: where the model's input lies in the photograph; boxes are written in pixels of the photograph.
    """

    model: Any
    geometry: Any

    def class_index(self, text: str) -> int:
        """Return the index of a class that is given by its index or its name."""
        if text.isdigit():
            return int(text)
        names = [name.lower() for name in self.model.class_names]
        if text.lower() not in names:
            raise OptionError(f"class {text!r} is not one of {self.model.spec}; give its name, or its index")
        return names.index(text.lower())

    def box(self, text: str) -> Box:
        """Return a box that is given in pixels of the photograph, as fractions of the input."""
        box: Box = self.geometry.box_to_input(parse_box(text))
        return box
