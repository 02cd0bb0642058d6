"""Ways round the interception: what runs out of its sight is refused, or comes out as the model's own map."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dave_vit.engine.soundness as sound
from dave_vit import DAVE, effective_transformation
from dave_vit.engine.fast.compiled import CompiledGradient
from dave_vit.engine.rule_sets import ATTN_LRP, EFFECTIVE, RELEVANCE
from dave_vit.engine.targets import Target
from dave_vit.errors import DaveError, UnsupportedOperator
from exactness import Tokens, assert_exact, assert_exact_or_refused, drawn, refusal
from tiny_models import images, vit

X = drawn(1, 5, 6, seed=1)
WEIGHT = drawn(6, 6)


class Branch(nn.Module):
    """Norm, linear layer and activation: everything that a bypass would get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(6), nn.Linear(6, 6)
        self.double()
        with torch.no_grad():
            self.linear.weight.copy_(WEIGHT)
            self.linear.bias.copy_(WEIGHT[0])

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.linear(self.norm(x)))


BRANCH = Branch().eval()


def held(x: Tensor, at: Tensor) -> Tensor:
    """``x + BRANCH(x)`` with its scale and its gate held at ``at``."""
    inverse = (at.var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
    inner = BRANCH.linear((x - x.mean(-1, keepdim=True)) * inverse)
    outer = BRANCH.linear(BRANCH.norm(at))
    return x + inner * (F.gelu(outer) / outer)


def test_the_oracle_is_the_engine_where_nothing_is_hidden():
    assert_exact(lambda x: x + BRANCH(x), X, held)


def in_thread(x: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return x + pool.submit(BRANCH, x).result()


def in_threads_by_hand(x: Tensor) -> Tensor:
    results: list[Tensor] = []
    worker = threading.Thread(target=lambda: results.append(BRANCH(x)))
    worker.start()
    worker.join()
    return x + results[0]


def disabled(x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return x + BRANCH(x)


def disabled_in_place(x: Tensor) -> Tensor:
    y = x * 1.0
    with torch._C.DisableTorchFunction():
        y.mul_(x)
    return y


def disabled_without_gradient(x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        scale = x.detach().exp()
    return x + scale


class Silent(Tensor):
    """A subclass that takes its functions past every mode."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():
            return func(*args, **(kwargs or {}))


class Loud(Tensor):
    """A subclass that adds nothing."""


FUNCTIONAL_GRADIENT = torch.func.grad(lambda x: (x**3).sum())

BYPASSES = {
    "traced": lambda x: x + torch.jit.trace(BRANCH, X)(x),
    "scripted": lambda x: x + torch.jit.script(BRANCH)(x),
    "scripted function": lambda x: x + SCRIPTED(x),
    "vmap": lambda x: x + torch.func.vmap(BRANCH)(x),
    "vmap of one function": lambda x: x + torch.func.vmap(F.gelu)(x),
    "vmap without gradient": lambda x: x + torch.func.vmap(torch.exp)(x.detach()),
    "thread": in_thread,
    "thread by hand": in_threads_by_hand,
    "disabled": disabled,
    "disabled, in place": disabled_in_place,
    "disabled, without gradient": disabled_without_gradient,
    "silent subclass": lambda x: x + BRANCH(x.as_subclass(Silent)).as_subclass(Tensor),
    "func.grad": lambda x: x + FUNCTIONAL_GRADIENT(x),
    "func.vjp": lambda x: x + torch.func.vjp(F.gelu, x)[1](x)[0],
    "func.jvp": lambda x: x + torch.func.jvp(F.gelu, (x,), (x,))[1],
    "func.jacrev": lambda x: x + torch.func.jacrev(lambda v: v.square().sum())(x),
    "func.linearize": lambda x: x + torch.func.vjp(torch.exp, x.detach())[0],
    "functional_call, exponential": lambda x: x + torch.func.functional_call(nn.Softplus(), {}, (x,)),
    "autograd.grad": lambda x: x + _gradient_of(F.silu, x),
    "backward": lambda x: x + _backward_of(F.silu, x),
}


@torch.jit.script
def SCRIPTED(x: Tensor) -> Tensor:
    return F.gelu(x) * x


def _gradient_of(function, x: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(function(leaf).sum(), leaf)[0]


def _backward_of(function, x: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    function(leaf).sum().backward()
    return leaf.grad


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", BYPASSES.values(), ids=BYPASSES.keys())
def test_no_way_round(function):
    is_branch = bool(torch.allclose(function(X), X + BRANCH(X)))
    assert_exact_or_refused(function, X, held if is_branch else None)


def test_a_subclass_that_adds_nothing():
    assert_exact_or_refused(lambda x: x + BRANCH(x.as_subclass(Loud)).as_subclass(Tensor), X, held)


@pytest.mark.filterwarnings("ignore")
def test_what_is_refused_says_the_way_out():
    assert "jit" in refusal(Tokens(BYPASSES["traced"]), X)
    assert "torch.func" in refusal(Tokens(BYPASSES["vmap"]), X)
    assert "thread" in refusal(Tokens(in_thread), X)


@pytest.mark.filterwarnings("ignore")
def test_a_whole_model_that_was_traced():
    with pytest.raises(UnsupportedOperator, match="jit"):
        effective_transformation(torch.jit.trace(vit(), images(1)), images(1), 0)
    with pytest.raises(UnsupportedOperator, match="jit"):
        DAVE(torch.jit.trace(vit(), images(1)), samples=2).attribute(images(1), 0)


class Threaded(nn.Module):
    """As ``nn.DataParallel``: each part of the batch in a thread of its own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(2) as pool:
            return torch.cat(list(pool.map(self.module, x.chunk(2))))


def test_parts_of_the_batch_in_threads():
    with pytest.raises(DaveError, match="thread"):
        effective_transformation(Threaded(vit()), images(2), 0)


class TestCompiled:
    def test_a_module_that_compiled_itself_is_looked_through_or_refused(self):
        model, plain = vit(), vit()
        model.compile(backend="eager")
        assert "compile" in (refusal(model, images(1), 0) or "compile")
        if refusal(model, images(1), 0) is None:
            torch.testing.assert_close(
                effective_transformation(model, images(1), 0), effective_transformation(plain, images(1), 0)
            )

    def test_a_compiled_part(self):
        model, plain = vit(), vit()
        model.blocks[0].compile(backend="eager")
        model.blocks[1].mlp = torch.compile(model.blocks[1].mlp, backend="eager")
        assert "compile" in (refusal(model, images(1), 0) or "compile")
        if refusal(model, images(1), 0) is None:
            torch.testing.assert_close(
                effective_transformation(model, images(1), 0), effective_transformation(plain, images(1), 0)
            )

    def test_it_is_compiled_again_when_the_model_changed(self, monkeypatch):
        monkeypatch.setattr("dave_vit.engine.fast.compiled.compile_graph", lambda graph, given: graph)
        model, x = vit(depth=1), images(1)
        compiled, target = CompiledGradient(model, EFFECTIVE), Target(torch.tensor([[0]]))
        changes = [
            lambda: setattr(model, "head", nn.Linear(24, 5)),
            lambda: setattr(model.blocks[0].mlp, "act", nn.ReLU()),
            lambda: setattr(model.blocks[0].attn, "scale", 3.0),
            lambda: setattr(model.blocks[0].attn, "fused_attn", False),
            lambda: model.load_state_dict({k: v * 1.5 for k, v in model.state_dict().items()}),
            lambda: setattr(model.cls_token, "data", model.cls_token.data + 1),
        ]
        for change in (lambda: None, *changes):
            change()
            torch.testing.assert_close(
                compiled(x, target)[0][:, 0], effective_transformation(model, x, 0), rtol=1e-4, atol=1e-6
            )


@pytest.fixture(scope="module")
def library():
    with torch.library._scoped_library("dave_test", "FRAGMENT") as fragment:
        fragment.define("add(Tensor x, Tensor y) -> Tensor")
        fragment.define("gelu(Tensor x) -> Tensor")
        fragment.impl("add", lambda x, y: x + y * y, "CompositeImplicitAutograd")
        fragment.impl("gelu", lambda x: x.exp(), "CompositeImplicitAutograd")
        yield


class TestNamesOfOthers:
    @pytest.mark.parametrize(
        "function", [lambda o, x: o.add(x, x), lambda o, x: o.add.default(x, x), lambda o, x: o.gelu(x)]
    )
    def test_an_operator_of_a_library_is_not_torchs(self, library, function):
        assert_exact_or_refused(lambda x: function(torch.ops.dave_test, x), X)

    def test_torchs_own_operators_by_their_address(self):
        assert_exact_or_refused(lambda x: torch.ops.aten.add(x, x), X, lambda x, at: x + x)
        assert_exact_or_refused(lambda x: x + torch.ops.aten.exp(x), X)
        assert_exact_or_refused(lambda x: x + torch.ops.aten.exp.default(x), X)
        assert_exact_or_refused(lambda x: torch._C._VariableFunctions.add(x, x), X, lambda x, at: x + x)
        assert_exact_or_refused(lambda x: x + torch._C._VariableFunctions.exp(x), X)


class TestHooks:
    """A user's hooks on gradients would change W."""

    def test_on_tensors(self):
        def hooked(x):
            y = x * 2
            if y.requires_grad:
                y.register_hook(lambda grad: grad * 3)
            return y

        assert_exact_or_refused(hooked, X, lambda x, at: 2 * x)

    def test_that_only_look(self):
        seen = []

        def hooked(x):
            y = x * 2
            if y.requires_grad:
                y.register_hook(lambda grad: seen.append(grad.clone()))
            return y

        assert_exact(hooked, X, lambda x, at: 2 * x)
        assert seen

    def test_that_write_in_place(self):
        def hooked(x):
            y = x * 2
            if y.requires_grad:
                y.register_hook(lambda grad: (grad.zero_(), None)[1])
            return y

        assert_exact_or_refused(hooked, X, lambda x, at: 2 * x)

    def test_on_nodes(self):
        def hooked(x):
            y = x * 2
            y.grad_fn.register_hook(lambda inputs, outputs: tuple(None if g is None else g * 3 for g in inputs))
            y.grad_fn.register_prehook(lambda outputs: tuple(g * 3 for g in outputs))
            return y

        assert_exact_or_refused(hooked, X, lambda x, at: 2 * x)

    @pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
    def test_on_modules(self, register):
        model = nn.Sequential(Branch(), nn.Flatten())
        change = {
            "register_full_backward_hook": lambda m, given, out: (given[0] * 3,),
            "register_full_backward_pre_hook": lambda m, out: (out[0] * 3,),
        }[register]
        getattr(model[0], register)(change)
        assert_exact_or_refused(model, X, lambda x, at: held(x, at) - x)

    def test_on_parameters_they_do_no_harm(self):
        model = nn.Sequential(Branch(), nn.Flatten())
        model[0].linear.weight.register_hook(lambda grad: grad * 3)
        assert refusal(model, X) is None
        assert_exact_or_refused(model, X, lambda x, at: held(x, at) - x)


class TestBatch:
    """The map of an image must not depend on the images beside it."""

    @pytest.mark.parametrize(
        "function",
        [
            lambda x: x - x.mean(0),
            lambda x: x + x.flip(0),
            lambda x: x / x.detach().std(0, keepdim=True).add(1),
            lambda x: x * x.mean(0, keepdim=True).sigmoid(),
            lambda x: x + x[:1],
            lambda x: (0.1 * x.flatten(1) @ x.flatten(1).T).softmax(-1) @ x.flatten(1),
        ],
    )
    def test_models_that_mix_it_are_refused(self, function):
        message = refusal(Tokens(function), drawn(4, 5, 6))
        assert message is not None
        assert "batch" in message

    @pytest.mark.parametrize("size", [2, 3])
    @pytest.mark.parametrize(
        "function",
        [
            lambda x: x + x.flip(0),  # the middle one of three meets itself
            lambda x: torch.cat([x[:1] + x[-1:], x[1:]]),
            lambda x: torch.cat([x[:-1], x[-1:] + x[:1]]),
            lambda x: x + x.roll(1, 0),
        ],
    )
    def test_small_batches_are_looked_at_whole(self, function, size):
        assert "batch" in (refusal(Tokens(function), drawn(size, 5, 6)) or "")

    def test_small_batches_are_looked_at_by_themselves(self):
        model = Tokens(lambda x: x - x.mean(0) if len(x) == 3 else x)
        assert refusal(model, drawn(4, 5, 6)) is None
        assert "batch" in (refusal(model, drawn(3, 5, 6)) or "")

    def test_a_single_image_is_tracked_once_for_all_sizes_and_strengths_of_gamma(self, monkeypatch):
        tracked, run = [], sound._SoundnessCheck._run_tracked
        monkeypatch.setattr(sound._SoundnessCheck, "_run_tracked", lambda *args: tracked.append(1) or run(*args))
        model = Tokens(F.gelu)
        for size, rules in [(4, EFFECTIVE), (1, EFFECTIVE), (3, EFFECTIVE), (2, RELEVANCE)]:
            effective_transformation(model, drawn(size, 5, 6), 0, rules=rules)
        assert len(tracked) == 2  # an image, and another one
        effective_transformation(model, drawn(1, 5, 6), 0, rules=ATTN_LRP)
        assert len(tracked) == 4

    def test_code_that_is_another_one_for_a_single_image(self):
        """A stack of several activations is no gate, a stack of one is."""

        def stacked(x):
            gates = F.gelu(x)
            return torch.stack([row * 1 for row in gates]) * gates

        assert refusal(Tokens(stacked), drawn(1, 5, 6)) is not None
        assert refusal(Tokens(stacked), drawn(2, 5, 6)) is None
        assert refusal(Tokens(stacked), drawn(5, 5, 6)) is None

    def test_copies_of_one_image_say_nothing_of_others(self):
        model = Tokens(lambda x: x - x.mean(0) * 0.5)
        assert refusal(model, drawn(1, 5, 6).repeat(4, 1, 1)) is None
        assert "batch" in (refusal(model, drawn(4, 5, 6)) or "")

    def test_also_after_an_image_alone_was_explained(self):
        model = Tokens(lambda x: x - x.mean(0) * 0.5)
        effective_transformation(model, drawn(1, 5, 6), 0)
        assert refusal(model, drawn(3, 5, 6)) is not None


def test_logits_that_change_under_the_interception_are_refused():
    def watched(x):
        return x * (2.0 if torch._C._len_torch_function_stack() else 3.0)

    message = refusal(Tokens(watched), X)
    assert message is not None
    assert "logits" in message


def test_a_model_that_asks_whether_gradients_are_wanted():
    """Common and harmless: the same function either way."""
    assert_exact(lambda x: x * 2 if x.requires_grad else x + x, X, lambda x, at: 2 * x)


def test_saving_tensors_elsewhere_is_no_checkpointing():
    def saved(x):
        with torch.autograd.graph.save_on_cpu():
            return BRANCH(x)

    assert_exact(lambda x: x + saved(x), X, held)
