"""Whether a model can be explained exactly, looked into before its first map and remembered.

Once for each model, size of input and rule set, one image is run under the interception with a ``Watch`` beneath, and
once more as it is. What depends on the image out of the interception's sight, logits that the interception changes, and
images that are mixed with the others of their batch are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dave_vit.errors import OutputError, UnsupportedOperator
from dave_vit.intercept.calls import RuleSet
from dave_vit.intercept.mode import Interception
from dave_vit.intercept.states import tensors
from dave_vit.run.passes import precision, undisturbed
from dave_vit.targets import Score, Target

_Said = Callable[[Any, int], list[Tensor]]

_SOUND: WeakKeyDictionary[nn.Module, dict[Any, Any]] = WeakKeyDictionary()
_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-3}  # relative to the largest logit
_COARSE = 0.1  # in half precision


def check_sound(
    model: nn.Module,
    inputs: Tensor,
    rules: RuleSet,
    autocast: torch.dtype | None = None,
    *,
    logits: Tensor | None = None,
    score: Score | None = None,
) -> None:
    """Refuse a model that a strict rule set would explain wrongly; costs next to nothing the second time.

    Args:
        model: as it will be run.
        inputs: the batch that is explained.
        rules: looked into only where they are strict.
        autocast: run the model under autocast with this type.
        logits: of the batch, or values of the score, if they are known already.
        score: what is explained, where it is no class: nothing else of the output is looked at then.
    """
    if not rules.strict:
        return
    key = (rules.name, inputs.shape[1:], len(inputs) > 1, inputs.dtype, inputs.device, autocast, score)
    known, state = _SOUND.setdefault(model, {}), structure(model)
    if known.get(key) != state:
        said = _outputs if score is None else partial(_scored, score)
        _look_into(model, inputs, rules, autocast, logits, said)
        known[key] = state


def structure(model: nn.Module) -> int:
    """Changes when a module, a parameter, a buffer or a setting of the model is replaced."""
    return hash(tuple(part for module in model.modules() for part in _structure(module)))


def _structure(module: nn.Module) -> Iterator[Any]:
    yield id(module)
    for value in vars(module).values():
        if type(value) in (bool, float, str):  # no whole numbers: models count with them
            yield value
    yield from map(id, module._parameters.values())
    yield from map(id, module._buffers.values())


def fingerprint(model: nn.Module) -> int:
    """Changes with the structure, and when the numbers of a parameter or a buffer change."""
    tensors = (
        tensor for module in model.modules() for tensor in (*module._parameters.values(), *module._buffers.values())
    )
    numbers = ((t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors if t is not None)
    return hash((structure(model), *numbers))


def _look_into(
    model: nn.Module, inputs: Tensor, rules: RuleSet, autocast: torch.dtype | None, logits: Tensor | None, said: _Said
) -> None:
    place = min(1, len(inputs) - 1)  # the second image: the first one's place may be a special one
    image = inputs[place : place + 1].clone()
    alone = (_by_itself if len(inputs) > 1 else _plain)(model, image, autocast, said)
    fixed = alone is None  # the model takes batches of this size only, so that no image can be looked at alone
    image = inputs if fixed else image
    watched, random = _watched(model, image, rules, autocast, said)
    if any(bool(torch.isnan(output).any()) for output in (watched if logits is None else [logits])):
        raise OutputError("the model's output holds NaN; check the weights, the masks and the range of the input")
    limit = _COARSE if autocast is not None else _ROUNDING.get(inputs.dtype, _COARSE)
    alone = _plain(model, image, autocast, said) if alone is None else alone
    if _differ(watched, alone, limit):
        raise UnsupportedOperator(
            "the logits change under the interception, so that the map would be another model's; remove what asks for "
            "modes, or for gradients inside of the model (torch.func, torch.autograd.grad)"
        )
    scored = said is not _outputs  # a score may hold numbers of its own for each image of the batch
    if len(inputs) == 1 or random or fixed or scored:
        return
    known = [] if logits is None else [output for output in alone if output.shape[1:] == logits.shape[1:]]
    if known and logits is not None:
        alone, beside = known[:1], [logits]
    else:
        beside = _plain(model, inputs[:3], autocast, said)
    if _differ([output[place : place + 1] for output in beside], alone, limit):
        raise UnsupportedOperator(
            "the logits of an image change with the other images of its batch, so that a map would mix them; explain "
            "images one by one, or normalise within each image"
        )


def _watched(
    model: nn.Module, images: Tensor, rules: RuleSet, autocast: torch.dtype | None, said: _Said
) -> tuple[list[Tensor], bool]:
    """The output under the interception, if nothing escapes it; and whether the model draws at random."""
    mode = Interception(rules, model)
    with undisturbed(images), precision(images, autocast):
        before = _random_state(images)
        entered = images.detach().requires_grad_().clone()
        with mode, mode.watched(entered) as watch:
            output = said(model(mode.enter(entered)), len(images))
        watch.check()
        return [tensor.detach() for tensor in output], not torch.equal(before, _random_state(images))


def _outputs(output: Any, batch: int) -> list[Tensor]:
    """All that a model says of its images."""
    found = list(tensors(output)) or list(tensors(dict(vars(output)) if hasattr(output, "__dict__") else ()))
    return [tensor.detach() for tensor in found if tensor.is_floating_point() and tensor.shape[:1] == (batch,)]


def _scored(score: Score, output: Any, batch: int) -> list[Tensor]:
    """What a score says of them."""
    return [Target(score=score).read(output, batch)]


def _random_state(images: Tensor) -> Tensor:
    state = torch.get_rng_state()
    return torch.cat([state, torch.cuda.get_rng_state(images.device)]) if images.is_cuda else state


def _by_itself(model: nn.Module, image: Tensor, autocast: torch.dtype | None, said: _Said) -> list[Tensor] | None:
    """The output for one image of a batch; None where the model does not take one alone."""
    try:
        return _plain(model, image, autocast, said)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError, AssertionError):
        return None


def _plain(model: nn.Module, images: Tensor, autocast: torch.dtype | None, said: _Said) -> list[Tensor]:
    with undisturbed(images), torch.no_grad(), precision(images, autocast):
        return said(model(images.clone()), len(images))


def _differ(left: list[Tensor], right: list[Tensor], limit: float) -> bool:
    return len(left) != len(right) or not all(map(partial(_close, limit=limit), left, right))


def _close(left: Tensor, right: Tensor, limit: float) -> bool:
    left, right = left.cpu().double(), right.cpu().double()
    finite = right[right.isfinite()]  # a class may be ruled out by -inf
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return left.shape == right.shape and torch.allclose(left, right, rtol=0.0, atol=limit * scale, equal_nan=True)
