"""Base of methods on tokens: attention matrices, tokens after every block, and maps of token scores."""

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from torch import Tensor, nn

from dave_vit._internal.precision import working_dtype
from dave_vit.engine.forward import Read
from dave_vit.engine.gradient import derivatives
from dave_vit.engine.observation import AttentionMatrix, Observation, TokenLayout, guess_token_layout, observe
from dave_vit.engine.targets import Target
from dave_vit.errors import UnsupportedOperator
from dave_vit.methods.base import Method
from dave_vit.methods.constants import to_explanation, upsample
from dave_vit.methods.explanation import Explanation
from dave_vit.methods.pass_size import PassSize

Tap = Callable[[list[str], list[Tensor]], Tensor | None]
"""Function of the paths of a list of blocks and the tokens after its blocks so far; its result replaces the last."""


@contextmanager
def hook_outputs(modules: Iterable[nn.Module], hook: Callable[[nn.Module, Any], Any]) -> Iterator[None]:
    """Call ``hook(module, output)`` after each of some modules, for passes in this thread; none is left afterwards.

    What it returns replaces the output, unless that is None.
    """
    thread = threading.get_ident()

    def call_hook(module: nn.Module, args: Any, output: Any) -> Any:
        return hook(module, output) if threading.get_ident() == thread else None

    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(module.register_forward_hook(call_hook))
        yield


@contextmanager
def tap_blocks(model: nn.Module, batch: int, tap: Tap) -> Iterator[None]:
    """Call ``tap`` after each block that returns tokens; see `hook_outputs`.

    Args:
        model: has its blocks in lists of modules.
        batch: number of images in a pass.
        tap: may return tokens that replace those of the block.
    """
    with ExitStack() as stack:
        for paths, blocks in list_blocks(model):
            stack.enter_context(hook_outputs(blocks, _block_hook(paths, batch, tap)))
        yield


def _block_hook(paths: list[str], batch: int, tap: Tap) -> Callable[[nn.Module, Any], Any]:
    states: list[Tensor] = []

    def hook(module: nn.Module, output: Any) -> Any:
        tokens = output[0] if isinstance(output, tuple) else output
        fits = isinstance(tokens, Tensor) and tokens.ndim == 3 and len(tokens) == batch  # [batch, N, D]
        if not (fits and all(tokens.shape == state.shape for state in states)):
            return output
        states.append(tokens)
        replaced = tap(paths, states)
        following = tokens if replaced is None else replaced
        return (following, *output[1:]) if isinstance(output, tuple) else following

    return hook


def list_blocks(model: nn.Module) -> Iterator[tuple[list[str], list[nn.Module]]]:
    """Yield lists of at least two modules of one class, with their paths; none inside of another."""
    inside: tuple[str, ...] = ()
    for path, module in model.named_modules():
        children = list(module.named_children())
        alike = len({type(child) for _, child in children}) == 1 and len(children) > 1
        if isinstance(module, nn.ModuleList | nn.Sequential) and alike and not path.startswith(inside or ("\0",)):
            inside = (*inside, f"{path}.")
            yield [f"{path}.{name}" for name, _ in children], [child for _, child in children]


class Recorded(nn.Module):
    """A model each of whose passes is recorded.

    Args:
        model: what is run.
        record: returns the context of a pass from the model and the number of images; its value is kept as `record`.
    """

    def __init__(self, model: nn.Module, record: Callable[[nn.Module, int], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.model, self._record = getattr(model, "_orig_mod", model), record
        self.record: Any = None

    def forward(self, inputs: Tensor) -> Any:
        """Return the model's own output."""
        with self._record(self.model, len(inputs)) as self.record:
            return self.model(inputs)


@contextmanager
def record_blocks(model: nn.Module, batch: int) -> Iterator[dict[str, list[Tensor]]]:
    """Record the tokens after the blocks of each list, by the path of its first block; see `tap_blocks`."""
    states: dict[str, list[Tensor]] = {}

    def tap(paths: list[str], tokens: list[Tensor]) -> None:
        states.setdefault(paths[0], []).append(tokens[-1].detach())

    with tap_blocks(model, batch, tap):
        yield states


@contextmanager
def record_outputs(model: nn.Module, batch: int = 0) -> Iterator[list[tuple[nn.Module, Tensor]]]:
    """Record the tensor that each module returns; see `hook_outputs`."""
    outputs: list[tuple[nn.Module, Tensor]] = []

    def record(module: nn.Module, output: Any) -> None:
        if isinstance(output, Tensor):
            outputs.append((module, output))

    with hook_outputs(model.modules(), record):
        yield outputs


Resolution = Literal["input", "patch"]


@dataclass(frozen=True)
class TokenGraph:
    """Attention among the tokens of a model, from the first block to the read-out.

    Attributes:
        layout: the place of tokens in the image.
        layers: self-attention ``[b, heads, N, N]`` of each block.
        pooling: attention ``[b, heads, L, N]`` by which learned queries gather the tokens at the end, if any.
        logits: ``[b, classes]``.
    """

    layout: TokenLayout
    layers: tuple[AttentionMatrix, ...]
    pooling: AttentionMatrix | None
    logits: Tensor

    @property
    def all(self) -> tuple[AttentionMatrix, ...]:
        """All matrices in order."""
        return self.layers if self.pooling is None else (*self.layers, self.pooling)

    def readout(self) -> Tensor:
        """Return the weight ``[b, 1, N]`` of each token in the input of the head, as far as attention shows it.

        With attention pooling it is that attention. Otherwise all tokens count alike that the logits depend on after
        the last attention: the class token, or all tokens of a model that averages them. The logits' derivative with
        respect to the last attention shows which.
        """
        if self.pooling is not None:
            return wide(self.pooling).mean((1, 2)).unsqueeze(1)
        last = self.layers[-1].matrix
        grad: Tensor = next(derivatives(self.logits.square().sum(1, keepdim=True), [last], retain_graph=True))[0]
        read = (grad != 0).any(-1).any(1)  # [b, N]
        weight = (read | ~read.any(1, keepdim=True)).to(working_dtype(last.dtype))
        return (weight / weight.sum(1, keepdim=True)).unsqueeze(1)


def wide(attention: AttentionMatrix) -> Tensor:
    """Return the matrix without its graph, in float32 at least: ``[b, heads, L, S]``."""
    matrix = attention.matrix.detach()
    return matrix.to(working_dtype(matrix.dtype))


def token_graph(observed: Observation, images: Tensor) -> TokenGraph:
    """Return the attention of a plain Vision Transformer; raise UnsupportedOperator with a reason for other models."""
    refuse_words(observed.decoder)
    if not observed.attention:
        raise _refusal("it has no softmax attention")
    sizes = [tuple(each.matrix.shape[-2:]) for each in observed.attention]
    square = {keys for queries, keys in sizes if queries == keys}
    if len(square) != 1 or any(len(each.matrix) != len(images) for each in observed.attention):
        raise _refusal(f"it attends within windows or stages (matrices of {_format_sizes(sizes)})")
    tokens = square.pop()
    depth = sizes.count((tokens, tokens))
    rest = sizes[depth:]
    if sizes[:depth] != [(tokens, tokens)] * depth or len(rest) > 1 or any(keys != tokens for _, keys in rest):
        raise _refusal(
            f"beside its {tokens} tokens' attention it has other attention (matrices of {_format_sizes(sizes)})"
        )
    layers = tuple(observed.attention[:depth])
    if any(layer.tokens is not None and tokens not in layer.tokens.shape[:2] for layer in layers):
        raise _refusal(f"its attention mixes {tokens} channels instead of tokens")
    pooling = observed.attention[depth] if rest else None
    return TokenGraph(guess_token_layout(observed, tokens, images), layers, pooling, observed.logits)


def _format_sizes(sizes: list[tuple[int, ...]]) -> str:
    return ", ".join(f"{queries}x{keys}" for queries, keys in sorted(set(sizes)))


def refuse_words(decoder: object) -> None:
    """Raise UnsupportedOperator for models that write text, in methods that explain no words."""
    if decoder is not None:
        raise UnsupportedOperator(
            "this method reads out the tokens of one image, and here a language model reads them; use dave, attn_lrp, "
            "gradcam, rollout or tam, which explain words"
        )


def _refusal(why: str) -> UnsupportedOperator:
    return UnsupportedOperator(
        f"this method needs a model whose blocks attend among all tokens, and {why}; use dave or input_x_gradient, "
        "which work on any model"
    )


class TokenMethod(Method):
    """Base of methods that score tokens; their maps are upsampled bilinearly to the size of the image.

    Args:
        model: any module that maps inputs to logits.
        resolution: "input" for attributions in the shape of the inputs, the map spread evenly over the channels, so
            that the channel sum is the map; "patch" for the bare token grid ``[B, 1, h, w]``.
        options: ``chunk`` and ``autocast``, as for every method.
    """

    _why_no_clips = "scores the patches of one image"
    _rows = {"cuda": 32, "cpu": 8}  # noqa: RUF012 - their attention matrices are held with the graph
    _kept, _resolution = "attention", "patch"
    _: KW_ONLY
    resolution: Resolution = "input"

    def _explain(self, images: Tensor, target: Target, pass_size: PassSize) -> Explanation:
        with observe(self._subject(target), images, autocast=self.autocast, read=self._read(target)) as observed:
            target = target.resolve(observed.logits)
            return explain_grids(self._grids(observed, images, target, pass_size), images, target, self.resolution)

    def _subject(self, target: Target) -> nn.Module:
        """Return the module that is run."""
        return self.model

    def _read(self, target: Target) -> Read:
        """Return the function that reads the logits from the output of that module."""
        return target.read

    @abstractmethod
    def _grids(self, observed: Observation, images: Tensor, target: Target, pass_size: PassSize) -> Tensor:
        """Compute token grids ``[b, K, h, w]`` from an observed forward pass, for a resolved target."""


def explain_grids(grids: Tensor, images: Tensor, target: Target, resolution: Resolution = "input") -> Explanation:
    """Return token grids ``[b, K, h, w]`` as an explanation, upsampled to the images unless patches are asked for."""
    grids = grids.detach().to(images.dtype)
    if resolution == "patch":
        return Explanation(grids.unsqueeze(2), target.indices)
    return to_explanation(upsample(grids.to(working_dtype(grids.dtype)), images.shape[-2:]), images, target)


def gradients(logits: Tensor, target: Target, sources: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Differentiate what is explained with respect to ``sources``: one tuple for each of the K classes."""
    return list(derivatives(target.scores(logits), sources, retain_graph=True))
