"""A function in a user's Python file that returns the model."""

import torch
from PIL import Image
from torch import nn

from dave_vit._internal.registry import import_file, suggest_names
from dave_vit.engine.targets import class_logits
from dave_vit.errors import ModelError, first_line
from dave_vit.models.adapter import Adapter, Classes, class_names
from dave_vit.models.families import FAMILIES, Family
from dave_vit.models.prepare import Prepare
from dave_vit.models.state import RANDOM, read_weights


def load(
    name: str, weights: str | None = None, classes: Classes | None = None, prepare: Prepare | None = None
) -> Adapter:
    """Load the model that a function without arguments returns.

    Args:
        name: FILE.py:FUNCTION.
        weights: a local file that is loaded into it, or None.
        classes: names of the classes, or a file of them.
        prepare: the preprocessing; required unless the function returns an `Adapter`.
    """
    model = _build(name)
    if weights not in (None, RANDOM):
        read_weights(str(weights)).load_into(model.model if isinstance(model, Adapter) else model)
    if isinstance(model, Adapter):
        return model
    if prepare is None or prepare.size is None or prepare.mean is None or prepare.std is None:
        raise ModelError(
            f"{name} makes a bare model; say what is done to photographs, such as --size 224 --mean 0.5,0.5,0.5 "
            "--std 0.5,0.5,0.5, or return a dave_vit.models.Adapter"
        )
    preprocessing = prepare.standard(prepare.size, prepare.mean, prepare.std)
    with torch.no_grad():
        inputs = preprocessing(Image.new("RGB", (prepare.size, prepare.size)))
        count = class_logits(model.eval()(inputs), 1).shape[1]
    return Adapter(model, preprocessing, class_names(count, classes), spec=name)


def _build(name: str) -> nn.Module:
    file, _, function = name.rpartition(":")
    module = import_file(file)
    make = getattr(module, function, None)
    if not callable(make):
        known = [one for one, value in vars(module).items() if callable(value) and not one.startswith("_")]
        raise ModelError(f"{file} has no function {function!r}{suggest_names(function, known)}; write {file}:FUNCTION")
    try:
        model = make()
    except Exception as error:  # whatever a user's own code raises
        raise ModelError(f"{name}() failed: {first_line(error)}; it must make the model without arguments") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name}() returned {type(model).__name__}; it must return a torch.nn.Module")
    return model


FAMILIES.register("module")(Family(load, "FILE.py:FUNCTION", "a function of yours that returns the model"))
