"""The table of refusals: every line is brought about by a program, and no refusal is missing from it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import dave_vit
from dave_vit import load_model
from dave_vit.data import open_dataset
from dave_vit.data.images import decode_image
from dave_vit.errors import DaveError
from dave_vit.evaluate.plan import Plan
from dave_vit.methods.options import check_options
from exactness import Tokens, drawn, refusal
from hostile_files import BOX_TABLES, PICTURES, WEIGHTS, good_png

PAGE = Path(__file__).resolve().parents[2] / "docs" / "refusals.md"
SOURCE = Path(dave_vit.__file__).parent
X = drawn(1, 5, 6, seed=1)


def lines() -> list[str]:
    """What messages say, by the page."""
    return rows_under("the message says")


def rows_under(head: str) -> list[str]:
    """The first column of the tables whose first column has this head."""
    rows, here = [], ""
    for row in re.findall(r"^\| (.+?) \| .+ \| .+ \|$", PAGE.read_text(), re.MULTILINE):
        here = row if row in ("the message says", "given") else here
        rows += [row] if here == head and row != head else []
    return rows


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).double()
        self.linear.register_full_backward_hook(lambda module, given, out: None)

    def forward(self, x):
        return self.linear(x).flatten(1)


def in_thread(x: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return x + pool.submit(F.gelu, x).result()


def held_in_thread(x: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return x + pool.submit(x.detach().exp).result()


def with_static_keys(x: Tensor) -> Tensor:
    keys, weight = torch.ones(2, 5, 3, dtype=x.dtype), torch.ones(18, 6, dtype=x.dtype)
    rows = (x.transpose(0, 1),) * 3
    shape, rest = (6, 2, weight, None, None, None, False, 0.0, torch.eye(6, dtype=x.dtype), None), {"static_k": keys}
    return F.multi_head_attention_forward(*rows, *shape, training=False, **rest, static_v=keys)[0].transpose(0, 1)


def with_hook(x: Tensor) -> Tensor:
    y = x * 2
    if y.requires_grad:
        y.register_hook(lambda grad: grad * 2)
    return y


def wrote(make, write):
    def forward(x):
        y = make(x)
        write(y, x)
        return y + x

    return forward


def saved_elsewhere(x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        return F.gelu(x)


def early_view(x: Tensor) -> Tensor:
    y = x * 2
    early = y[:, :3]
    y.copy_(x.exp())
    return x[:, :3] + early


def switched_off(x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        scale = x.detach().exp()
    return x * scale


PROGRAMS = {
    "has no rule and is not known to be linear": torch.i0,
    "no linear path leads from the input to the logits": lambda x: x + x.exp(),
    "into a Python number or array": lambda x: x + x.mean().item(),
    "it asks for gradients inside of the model": lambda x: x + x.detach().requires_grad_(),
    "it writes into a tensor that is given": lambda x: x + torch.exp(x.detach(), out=torch.empty_like(x)),
    "a hook on gradients may change the map": Hooked(),
    "a hook of the model changes a gradient": with_hook,
    "it writes a frozen operator into a view of a constant": wrote(
        torch.zeros_like, lambda y, x: y[:, :2].copy_(x[:, :2].exp())
    ),
    "an in-place write of a frozen operator into a view": wrote(
        lambda x: x * 2, lambda y, x: y[:, :2].copy_(x[:, :2].exp())
    ),
    "to a slice of a view": wrote(lambda x: x * 2, lambda y, x: y[:, :2].__setitem__((slice(None), 0), x[:, 0].exp())),
    "one of several views": lambda x: torch.cat([part.mul_(2) for part in (x * 2).split(3, -1)], -1),
    "torch has no derivative of it": lambda x: flex_attention(*[x[:, None]] * 3)[:, 0],
    "it failed in a torch.jit module": lambda x: x * _scripted(x),
    "writes in place into a tensor that a derivative needs again": lambda x: _needed_again(x),
    "static_k and static_v have no rule": with_static_keys,
    "was made outside the interception": in_thread,
    "the custom autograd function": Square.apply,
    "changes the tensors that autograd saves": saved_elsewhere,
    "the model uses gradient checkpointing": lambda x: checkpoint(F.gelu, x, use_reentrant=False),
    "the model is in training mode": nn.Sequential(nn.Flatten(), nn.Dropout()).train(),
    "the logits do not depend on the input": lambda x: torch.ones_like(x),
    "it must return logits": nn.Identity(),
    "treats a tensor that depends on the image as a constant": lambda x: x + nn.Parameter(x.exp()),
    "into a number; keep it a tensor": lambda x: F.hardtanh(x, -9.0, x.detach().max()),
    "the shape of its result depends on the image": lambda x: x + len((x > 0).nonzero()),
    "it writes into the memory of a tensor that carries the image": wrote(
        lambda x: x * 2, lambda y, x: y.detach().zero_()
    ),
    "it takes a view of a tensor into which a frozen operator was written since": early_view,
    "it ran outside the interception": switched_off,
    "it is called inside of a torch.func transform": lambda x: x + torch.func.vmap(torch.exp)(x.detach()),
    "it uses random numbers": lambda x: x + torch.rand_like(x),
    "changes with the image or from call to call": held_in_thread,
    "the logits change under the interception": lambda x: x * (1 + torch._C._len_torch_function_stack()),
    "change with the other images of its batch": lambda x: x - x.mean(0),
    "output holds NaN": lambda x: x * torch.nan,
}


SCRIPT = torch.jit.script(nn.Linear(6, 6).double())


def _scripted(x: Tensor) -> Tensor:
    with torch.no_grad():
        return SCRIPT(x).sigmoid()


def _needed_again(x: Tensor) -> Tensor:
    y, z = x.exp(), x * 2
    z = z * y
    y.zero_()
    return z


def test_the_page_and_the_programs_are_the_same():
    assert lines() == list(PROGRAMS)


@pytest.mark.parametrize("line", PROGRAMS)
def test_each_is_brought_about(line):
    program = PROGRAMS[line]
    model = program if isinstance(program, nn.Module) else Tokens(program)
    batch = drawn(4, 5, 6) if "batch" in line else X
    message = refusal(model, batch)
    assert message is not None
    assert line in message


def phrases() -> list[str]:
    """Return the reasons that the engine gives: last arguments of ``refusal``, and the constants of the tracker."""
    reasons = []
    for path in [*(SOURCE / "engine").glob("*.py"), *(SOURCE / "engine" / "rules").glob("*.py")]:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "refusal":
                reasons += node.args[-1:]
            elif isinstance(node, ast.FunctionDef) and node.name == "refusal":
                reasons += node.args.defaults
        if path.stem == "dataflow":
            reasons += [node.value for node in tree.body if isinstance(node, ast.Assign)]
    values = [reason.value for reason in reasons if isinstance(reason, ast.Constant) and isinstance(reason.value, str)]
    return [value for value in values if isinstance(value, str)]


def test_no_refusal_is_missing():
    assert len(phrases()) > 12
    for phrase in phrases():
        assert any(line in phrase or phrase in line for line in lines()), phrase


def _table(content: bytes, folder: Path) -> None:
    (folder / "red").mkdir()
    (folder / "red" / "0.png").write_bytes(good_png())
    (folder / "boxes.csv").write_bytes(content)
    open_dataset(f"folder:{folder}")


BEFORE: dict[str, Callable[[Path], object]] = {
    "no side may be more than 100 times the other": lambda folder: decode_image(PICTURES["1x20000"], "a"),
    "not an image that can be read": lambda folder: decode_image(PICTURES["text"], "a"),
    "damaged or cut off": lambda folder: decode_image(PICTURES["cut off"], "a"),
    "holds NaN or infinity": lambda folder: load_model("builtin", WEIGHTS["nan"](folder)),
    "expected four numbers": lambda folder: _table(BOX_TABLES["inf"], folder),
    "not UTF-8 text": lambda folder: _table(BOX_TABLES["latin-1"], folder),
    "expected 0 to 2147483647": lambda folder: Plan.load({"seeds": [-1]}),
    "is not available on this machine": lambda folder: load_model("builtin", device="cuda:99"),
    "has no option": lambda folder: check_options("dave", {"rotatoin": 3}),
    "of method 'dave' is": lambda folder: check_options("dave", {"rotation": "wide"}),
    "of the plan is": lambda folder: Plan.load({"batch": "x"}),
}


def test_the_page_knows_what_is_refused_before():
    assert rows_under("given") == list(BEFORE)


@pytest.mark.parametrize("line", BEFORE)
def test_each_is_brought_about_before(line, tmp_path):
    with pytest.raises(DaveError) as message:
        BEFORE[line](tmp_path)
    assert line in str(message.value)
    assert "\n" not in str(message.value)
