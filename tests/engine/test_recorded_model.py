"""Lean forms of models: the same logits and derivatives for less work, and the model itself where that fails."""

from __future__ import annotations

import copy
import gc
import io
import sys
import weakref
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dave_vit import DAVE, effective_transformation, load_model
from dave_vit.engine import fingerprint
from dave_vit.engine.fast import cuda_graphs, is_enabled
from dave_vit.engine.fast.compiled import CompiledGradient
from dave_vit.engine.fast.cuda_graphs import CudaGraph
from dave_vit.engine.fast.narrowing import narrow
from dave_vit.engine.fast.recorded_model import RecordedModel
from dave_vit.engine.fast.recording import Recorder
from dave_vit.engine.forward import compute_logits, count_passes
from dave_vit.engine.gradient import gradient
from dave_vit.engine.rule_sets import EFFECTIVE, RELEVANCE
from dave_vit.engine.targets import Contrast, Target
from dave_vit.errors import TrainingModeError
from dave_vit.methods.pass_size import even_chunk_size
from dave_vit.models import Adapter, Preprocessing
from fast_marker import needs_fast
from tiny_models import CLASSES, FAMILIES, SIZE, huggingface_vit, vit

MODELS = {
    **FAMILIES,
    "huggingface": huggingface_vit,
    "registers": lambda: vit(reg_tokens=2, init_values=0.5),
    "pooled": lambda: vit(class_token=False, global_pool="avg"),
    "distinct norms": lambda: vit(qk_norm=True),
}
GENERATOR = torch.Generator()


@pytest.fixture
def images():
    return torch.randn(3, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))


def record_calls(forward, images):
    """The recording of one pass, or None if another pass does not confirm it."""
    first, second = Recorder(forward), Recorder(forward)
    for recorder in (first, second):
        recorder(images.clone().requires_grad_())
    confirmed = first.recording is not None and second.recording is not None
    return second.recording if confirmed and second.recording.repeats(first.recording) else None


def shapes(recording, name):
    """Shapes of what a function gave, call by call, when the recording is played."""
    seen = []

    class Spy(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if getattr(func, "__name__", "") == name:
                seen.append(tuple(result.shape))
            return result

    with Spy(), torch.no_grad():
        recording(torch.zeros(recording.input_shape))
    return seen


def add_in_float64(x):
    torch.set_default_dtype(torch.float64)
    try:
        third = torch.full((4,), 1 / 3)
    finally:
        torch.set_default_dtype(torch.float32)
    return x.flatten(1)[:, :4] + third


class TestRecording:
    @pytest.mark.parametrize("name", MODELS)
    def test_plays_what_the_model_computes(self, name, images):
        model = MODELS[name]()
        recording = record_calls(model, images)
        if recording is None:
            assert name == "cnn"  # its ReLUs write in place in other versions
            return
        other = images.flip(0)
        with torch.no_grad():
            expected = getattr(model(other), "logits", None)
            expected = model(other) if expected is None else expected
            assert torch.equal(recording(other), expected)
            torch.testing.assert_close(narrow(recording)(other), expected)
        assert recording.classes == CLASSES

    @pytest.mark.parametrize(
        "forward",
        [
            lambda x: x.clone().mul_(2).flatten(1)[:, :4],
            lambda x: x.flatten(1)[:, : 4 if x.sum() > 0 else 3],
            lambda x: torch.from_numpy(x.detach().numpy()).flatten(1)[:, :4],
            lambda x: Doubled.apply(x).flatten(1)[:, :4],
            lambda x: x,
            add_in_float64,
            lambda x: (x * torch.rand(x.shape, generator=GENERATOR.manual_seed(1))).flatten(1)[:, :4],
        ],
        ids=[
            "in place",
            "looks at values",
            "leaves torch",
            "its own derivative",
            "no logits",
            "its own type",
            "a generator",
        ],
    )
    def test_refuses_what_it_cannot_hold(self, forward, images):
        assert record_calls(forward, images) is None


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class TestSelections:
    def test_only_the_class_token_passes_the_last_mlp(self, images):
        recording = record_calls(vit(), images)
        tokens = (SIZE // 8) ** 2 + 1
        assert shapes(recording, "gelu") == [(3, tokens, 96)] * 2
        assert shapes(narrow(recording), "gelu") == [(3, tokens, 96), (3, 1, 96)]

    def test_only_its_query_is_made(self, images):
        mixed = shapes(narrow(record_calls(vit(), images)), "scaled_dot_product_attention")
        assert [shape[2] for shape in mixed] == [(SIZE // 8) ** 2 + 1, 1]

    def test_queries_keys_and_values_are_products_of_their_own(self, images):
        recording = record_calls(vit(), images)
        assert 72 in {shape[-1] for shape in shapes(recording, "linear")}
        assert 72 not in {shape[-1] for shape in shapes(narrow(recording), "linear")}

    def test_nothing_changes_where_all_tokens_count(self, images):
        recording = record_calls(vit(class_token=False, global_pool="avg"), images)
        assert shapes(narrow(recording), "gelu") == shapes(recording, "gelu")

    def test_what_is_selected_twice_is_computed_once(self, images):
        def forward(x):
            hidden = nn.functional.gelu(x.flatten(1))
            return hidden[:, :4] + hidden[:, 2:6]

        assert len(shapes(narrow(record_calls(forward, images)), "gelu")) == 1

    def test_indices_of_the_input_are_no_selection(self, images):
        def forward(x):
            hidden = nn.functional.gelu(x.flatten(1))
            return hidden[:, :8][torch.arange(3) * (x.sum((1, 2, 3)) > -1e9).long()]

        recording = record_calls(forward, images)
        torch.testing.assert_close(narrow(recording)(images), forward(images))

    def test_parts_that_do_not_meet_are_computed_apart(self, images):
        def forward(x):
            hidden = nn.functional.gelu(x.flatten(1))
            return hidden[:, :4] + hidden[:, 4:8]

        assert shapes(narrow(record_calls(forward, images)), "gelu") == [(3, 4), (3, 4)]

    @pytest.mark.parametrize("name", ["view", "attention", "norm", "linear", "vector", "sum", "permute"])
    def test_slices_of_what_is_made_of_parameters(self, name, images):
        parameter, vector = nn.Parameter(torch.linspace(-1, 1, 96).view(3, 8, 4)), nn.Parameter(torch.ones(4))
        made = {
            "view": lambda x: parameter.view(6, 4, 4)[:3, 0],
            "attention": lambda x: nn.functional.scaled_dot_product_attention(parameter, x, x)[:, 0],
            "norm": lambda x: nn.functional.layer_norm(parameter, (4,))[:, 1],
            "linear": lambda x: nn.functional.linear(parameter, parameter[0])[:, 2, :4],
            "vector": lambda x: nn.functional.linear(x, vector)[:, :4],
            "sum": lambda x: (parameter + 1)[:, 3],
            "permute": lambda x: parameter.permute(0, 2, 1)[:, :, 4],
        }[name]

        def forward(x):
            return x.flatten(1)[:, :4] + made(x.flatten(1)[:, :32].unflatten(1, (8, 4)))

        recording = record_calls(forward, images)
        torch.testing.assert_close(narrow(recording)(images), forward(images))


class TestRecordedModel:
    @pytest.mark.parametrize("name", MODELS)
    def test_gives_the_models_own_derivative(self, name, images):
        model = MODELS[name]().double()
        images = images.double()
        target = torch.tensor([[0, 1], [2, 3], [4, 0]])
        recorded = RecordedModel(model).gradient(images, target, EFFECTIVE)
        torch.testing.assert_close(recorded.weight, effective_transformation(model, images, target))

    def test_a_model_that_cannot_be_recorded_runs_as_it_is(self, images):
        class InPlace(nn.Module):
            def forward(self, x):
                return x.clone().mul_(2).flatten(1)[:, :4]

        model = InPlace()
        assert RecordedModel(model).find_run(images) is model

    def test_hooks_are_called(self, images):
        model, seen = vit(), []
        recorded = RecordedModel(model)
        recorded.gradient(images, 0, EFFECTIVE)
        model.blocks[0].register_forward_hook(lambda module, given, made: seen.append(len(made)))
        recorded.gradient(images, 0, EFFECTIVE)
        assert seen.count(3) == 1, "in the pass itself; the others check the model, one image at a time"

    def test_follows_its_weights(self, images):
        model = vit()
        recorded = RecordedModel(model)
        same, written = lambda: None, lambda: model.head.weight.data.mul_(2)
        for change in (same, written, lambda: setattr(model, "head", head())):
            change()
            with torch.no_grad():
                torch.testing.assert_close(recorded.gradient(images, 0, EFFECTIVE).logits, model(images))

    @needs_fast
    def test_one_recording_serves_all_methods_of_a_model_and_dies_with_it(self, images):
        model = vit()
        recording = RecordedModel(model).find_run(images)
        assert RecordedModel(model).find_run(images) is recording is not model
        assert RecordedModel(model, torch.bfloat16).find_run(images) is not recording
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None

    def test_follows_its_settings(self, images):
        model = Scaled()
        assert torch.equal(RecordedModel(model).find_run(images)(images), model(images))
        model.factor = 3
        assert torch.equal(RecordedModel(model).find_run(images)(images), model(images))

    @needs_fast
    def test_a_model_that_counts_its_passes_runs_as_it_is(self, images):
        model = Scaled(step=1)
        recorded = RecordedModel(model)
        assert [recorded.find_run(images) for _ in range(2)] == [model, model]
        assert model.factor == 2 + 4, "it is not tried again"

    @pytest.mark.parametrize("context", [torch.no_grad, lambda: torch.set_grad_enabled(False)])
    def test_parts_without_gradients_stay_without(self, context, images):
        class Frozen(nn.Module):
            def forward(self, x):
                x = x.flatten(1)[:, :12]
                with context():
                    gate = nn.functional.gelu(3 * x)
                return (x * gate)[:, :4] + x[:, :4]

        model, images = Frozen().double(), images.double()
        recorded = RecordedModel(model).gradient(images, 0, EFFECTIVE)
        torch.testing.assert_close(recorded.weight[:, 0], effective_transformation(model, images, 0))
        torch.testing.assert_close(recorded.logits, model(images))

    @pytest.mark.parametrize("options", [{"enabled": False}, {"dtype": torch.float16}])
    def test_parts_with_another_autocast_keep_it(self, options, images):
        class Wide(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 4)

            def forward(self, x):
                x = self.first(x.flatten(1)[:, :12])
                with torch.autocast("cpu", **options):
                    return self.second(x.float())

        model = Wide().eval()
        recorded = RecordedModel(model, torch.bfloat16)
        if is_enabled():
            assert recorded.find_run(images) is not model
        actual = recorded.gradient(images, 0, EFFECTIVE)
        expected = gradient(model, images, 0, rules=EFFECTIVE, autocast=torch.bfloat16)
        assert torch.equal(actual.logits, expected.logits)
        torch.testing.assert_close(actual.weight, expected.weight, rtol=0, atol=0)

    def test_an_unsupported_function_is_named_with_its_module(self, images):
        model = vit()
        model.norm = Strange()
        with pytest.raises(Exception, match="norm"):
            RecordedModel(model).gradient(images, 0, EFFECTIVE)

    @needs_fast
    def test_one_walk_through_the_model_for_all_passes_of_a_call(self, images, monkeypatch):
        model, walks = vit(), []
        dave = DAVE(model, samples=4, chunk=3, preset="paper")
        dave.attribute(images, 0)  # records and looks into the model
        walked = fingerprint._walk_modules
        monkeypatch.setattr(fingerprint, "_walk_modules", lambda model: walks.append(1) or walked(model))
        dave.attribute(images, 0)
        assert len(walks) == 1

    def test_a_model_that_changes_in_a_pass_is_walked_through_again(self, images):
        with fingerprint.cache_fingerprints():
            model = Scaled(step=1)
            before = fingerprint.fingerprint_model(model)
            assert fingerprint.fingerprint_model(model) is before
            compute_logits(model, images)
            assert fingerprint.fingerprint_model(model) != before

    def test_a_model_that_was_assumed_unchanged_is_checked(self):
        model = vit()
        fingerprint.fingerprint_model(model)
        with fingerprint.cache_fingerprints(model):
            fingerprint.fingerprint_model(model)
            fingerprint.confirm_fingerprints()
        model.norm.eps = 1e-3
        with fingerprint.cache_fingerprints(model), pytest.raises(fingerprint.ModelChanged):
            fingerprint.confirm_fingerprints()

    @needs_fast
    @pytest.mark.parametrize("change", [lambda model: setattr(model, "global_pool", "avg"), torch.nn.Module.train])
    def test_a_change_that_is_found_after_the_passes_is_seen(self, images, change, monkeypatch):
        model = vit(drop_rate=0.5)
        dave = DAVE(model, samples=2)
        dave.attribute(images, 0)
        monkeypatch.setattr(cuda_graphs.Captures, "are_used", True)
        change(model)
        if model.training:
            with pytest.raises(TrainingModeError):
                dave.attribute(images, 0)
        else:
            expected = DAVE(copy.deepcopy(model), samples=2).attribute(images, 0)
            torch.testing.assert_close(dave.attribute(images, 0), expected)

    def test_a_change_between_two_explanations_of_refine_is_seen(self, images):
        model = vit()
        expected = DAVE(copy.deepcopy(model), samples=2, chunk=3, preset="exact").attribute(images, 0)
        steps = DAVE(model, samples=2, chunk=3, preset="exact").refine(images, 0)
        next(steps)
        with torch.no_grad():
            model.head.weight.mul_(2)
        assert not torch.allclose(next(steps).attribution, expected)

    @needs_fast
    def test_knows_the_number_of_classes(self, images):
        assert RecordedModel(vit()).count_classes(images) == CLASSES


class Scaled(nn.Module):
    def __init__(self, step=0):
        super().__init__()
        self.factor, self.step = 2, step

    def forward(self, x):
        self.factor += self.step
        return (x * self.factor).flatten(1)[:, :4]


def head():
    return nn.Linear(24, CLASSES)


class Strange(nn.Module):
    def forward(self, x):
        return torch.special.bessel_j0(x)


@pytest.mark.filterwarnings("error")
class TestCompiled:
    """The traced graph, run by its interpreter in place of the compiler."""

    @pytest.fixture(autouse=True)
    def uncompiled(self, monkeypatch):
        monkeypatch.setattr("dave_vit.engine.fast.compiled.compile_graph", lambda graph, given: graph)

    @needs_fast
    def test_equals_eager(self, images):
        model = vit()
        target = torch.tensor([[0, 1], [2, 3], [4, 0]])
        compiled = CompiledGradient(model, EFFECTIVE)
        for part in (slice(0, 3), slice(1, 3)):  # a smaller batch is filled up
            expected = effective_transformation(model, images[part], target[part])
            torch.testing.assert_close(compiled(images[part], Target(target[part]))[0], expected, rtol=1e-4, atol=1e-6)
        assert [list(known) for known in compiled._cache.functions.values()] == [[3]]
        compiled(images[:1], Target(target[:1]))  # and one that is much smaller gets its own
        assert [list(known) for known in compiled._cache.functions.values()] == [[3, 1]]

    @pytest.mark.parametrize("options", [{}, {"act_layer": nn.SiLU}, {"act_layer": lambda: nn.GELU("tanh")}])
    def test_gates_in_closed_form(self, options, images):
        model = vit(**options).double()
        expected = effective_transformation(model, images.double(), [[0], [1], [2]])
        compiled = CompiledGradient(model, EFFECTIVE)
        torch.testing.assert_close(compiled(images.double(), Target(torch.tensor([[0], [1], [2]])))[0], expected)

    def test_maps_are_those_of_eager_passes(self, images):
        model = vit()
        expected = DAVE(model, samples=5, chunk=6).attribute(images, [0, 1, 2])
        actual = DAVE(model, samples=5, chunk=6, compiled=True).attribute(images, [0, 1, 2])
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5)

    @needs_fast
    def test_one_graph_for_all_chunks_of_a_call(self, images, monkeypatch):
        made = []
        monkeypatch.setattr("dave_vit.engine.fast.compiled.compile_graph", lambda graph, given: made.append(1) or graph)
        model = vit()
        actual = DAVE(model, samples=20, chunk=30, compiled=True).attribute(images, [0, 1, 2])
        assert len(made) == 1
        expected = DAVE(model, samples=20, chunk=60).attribute(images, [0, 1, 2])
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5)

    def test_contrasts_and_logits(self, images):
        model = vit()
        target = Target.of(Contrast([[0, 1], [2, 3], [4, 0]], "rivals"), 3).resolve(model(images))
        weight, logits = CompiledGradient(model, EFFECTIVE)(images, target)
        torch.testing.assert_close(weight, effective_transformation(model, images, target), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(logits, model(images).detach(), rtol=1e-4, atol=1e-6)

    @needs_fast
    def test_a_known_class_costs_no_pass_of_the_model(self, images, monkeypatch):
        dave = DAVE(vit(), samples=2, preset="paper", compiled=True)
        dave.attribute(images, 0)
        monkeypatch.setattr(dave._passes, "logits", None)
        dave.attribute(images, 1)

    def test_a_class_out_of_range_is_refused(self, images):
        with pytest.raises(Exception, match="out of range"):
            DAVE(vit(), samples=2, compiled=True).attribute(images, CLASSES)

    @needs_fast
    def test_where_compiling_fails_the_passes_run_without(self, images, monkeypatch):
        def broken(graph, given):
            raise RuntimeError("no compiler here\nand more")

        monkeypatch.setattr("dave_vit.engine.fast.compiled.compile_graph", broken)
        model = vit()
        dave = DAVE(model, samples=4, compiled=True)
        with pytest.warns(UserWarning, match="no compiler here"):
            actual = dave.attribute(images, 0)
        torch.testing.assert_close(actual, DAVE(model, samples=4).attribute(images, 0))
        dave.attribute(images, 0)  # and it is not said again: other warnings are errors here


def test_a_captured_pass_counts_the_passes_that_it_holds(images, monkeypatch):
    class Graph:
        held_bytes = 0

        def __init__(self, function, inputs, pool):
            self.outputs = function(*inputs)

        def __call__(self, *inputs):
            return self.outputs

    def three_passes(inputs):
        return tuple(compute_logits(model, inputs) for _ in range(3))

    model = vit()
    monkeypatch.setattr(cuda_graphs, "CudaGraph", Graph)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=2**34))
    captures = cuda_graphs.Captures(SimpleNamespace(model=model, find_run=lambda inputs: None))
    replay = captures._capture(three_passes, [images], None, 1)
    with count_passes() as count:
        replay(images)
    assert count.passes == 3 * len(images)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOneLaunch:
    """Graphs that are recorded on a CUDA device and played again."""

    @pytest.mark.parametrize("rules", [EFFECTIVE, RELEVANCE], ids=lambda rules: rules.name)
    def test_it_gives_what_passes_without_a_graph_give(self, images, rules):
        model, x = vit().cuda(), images.cuda()
        compiled, target = CompiledGradient(model, rules), torch.tensor([[0, 1], [2, 3], [4, 0]], device="cuda")
        for inputs in (x, x.flip(0), x[1:], x):  # other images and fewer of them take the place of those recorded
            wanted = Target(target[: len(inputs)])
            weight, logits = compiled(inputs, wanted)
            expected = effective_transformation(model, inputs, wanted, rules=rules)
            torch.testing.assert_close(weight, expected, rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(logits, model(inputs).detach(), rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(compiled.logits(inputs), model(inputs).detach(), rtol=1e-3, atol=1e-4)

    def test_numbers_written_into_a_model_count(self, images):
        model, x, target = vit().cuda(), images.cuda(), Target(torch.tensor([[0], [1], [2]], device="cuda"))
        compiled = CompiledGradient(model, EFFECTIVE)
        before = compiled(x, target)[0]
        model.head.weight.data.mul_(2)
        torch.testing.assert_close(compiled(x, target)[0], 2 * before, rtol=1e-3, atol=1e-5)

    def test_maps_of_a_batch_and_of_one_image(self, images):
        model, x = vit().cuda(), images.cuda()
        dave = DAVE(model, samples=8, compiled=True)
        for inputs in (x, x[:1], x):
            expected = DAVE(model, samples=8).attribute(inputs, 0)
            torch.testing.assert_close(dave.attribute(inputs, 0), expected, rtol=1e-3, atol=1e-5)

    def test_a_capture_that_fails_leaves_nothing_behind(self, images):
        stream, x = torch.cuda.current_stream(), images.cuda()
        calls = []

        def reads_a_value(inputs):
            calls.append(1)
            return (inputs * (float(inputs.sum()) if len(calls) > 1 else 1.0),)

        with pytest.raises(RuntimeError):
            CudaGraph(reads_a_value, [x])
        assert torch.cuda.current_stream() == stream
        assert torch.rand(4, device="cuda").max() > 0
        torch.testing.assert_close(CudaGraph(lambda inputs: (2 * inputs,), [x])(x)[0], 2 * x)

    @needs_fast
    @pytest.mark.parametrize("target", [None, [[0, 1], [2, 3], [4, 0]]])
    def test_passes_that_come_again_and_wait_for_python_are_captured(self, images, target, monkeypatch):
        monkeypatch.setattr(cuda_graphs.PassTiming, "waits_for_host", lambda self: True)  # whatever else the GPU does
        model, x = vit().cuda(), images.cuda()
        dave, expected = DAVE(model, samples=8), DAVE(model, samples=8).attribute(images.cuda(), target)
        for _ in range(5):
            torch.testing.assert_close(dave.attribute(x, target), expected, rtol=1e-3, atol=1e-5)
            torch.cuda.synchronize()
        for other in (torch.randn_like(x), x[1:] + 1):  # nothing of the images before is left
            expected = DAVE(model, samples=8).attribute(other, None if target is None else target[: len(other)])
            found = dave.attribute(other, None if target is None else target[: len(other)])
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
        names = {key[1] for key, known in dave._passes.captures._cache.functions.items() if known}
        assert names == {"forward", "evidence", "gradient", "reduce"}
        model.head.weight.data.mul_(2)  # numbers are read anew
        changed = DAVE(model, samples=8).attribute(x, target)
        torch.testing.assert_close(dave.attribute(x, target), changed, rtol=1e-3, atol=1e-5)
        model.blocks[0] = model.blocks[0].__class__(model.embed_dim, 3).cuda().eval()  # another model is seen
        changed = DAVE(model, samples=8).attribute(x, target)
        torch.testing.assert_close(dave.attribute(x, target), changed, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("count", "most", "size"), [(50, 8, 5), (50, 16, 10), (50, 100, 50), (53, 8, 6), (1, 8, 1)])
def test_even_chunks(count, most, size):
    assert even_chunk_size(count, most) == size


def test_the_model_is_left_as_it_was(images):
    model = vit()
    before = copy.deepcopy(model.state_dict())
    DAVE(model, samples=2).attribute(images, 0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(parameter.requires_grad is False for parameter in model.parameters())


class LazyMapping(dict):
    """A mapping that imports what it is asked for, as those of transformers do, and fails for what is not installed."""

    def __iter__(self):
        raise ImportError("not installed")

    def values(self):
        raise ImportError("not installed")

    def __len__(self):
        raise ImportError("not installed")


def test_mappings_that_load_their_values_are_not_asked_for_them():
    model = torch.nn.Linear(2, 2)
    model.known = LazyMapping(first=1)
    before = fingerprint.fingerprint_model(model)
    model.known["first"] = 2
    assert fingerprint.fingerprint_model(model) != before


def test_what_a_thread_counts_is_no_change_of_a_model():
    model = torch.nn.Linear(2, 2)
    model.progress = Thread()
    model.progress.woken = 0.0
    before = fingerprint.fingerprint_model(model)
    model.progress.woken = 10.0
    assert fingerprint.fingerprint_model(model) == before


class Stream(io.StringIO):
    """What a notebook prints to: it leads to the notebook's kernel, which is large and changes with every cell."""

    def __init__(self):
        super().__init__()
        self.kernel = {"cells": list(range(400_000))}


class Talkative(torch.nn.Linear):
    def forward(self, x):
        sys.stdout.write("a pass")
        return super().forward(x)


def test_what_a_program_prints_to_is_no_part_of_a_model(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Stream())
    model = Talkative(2, 2)
    before = fingerprint.fingerprint_model(model)
    assert before.is_recordable
    sys.stdout.kernel["cells"].append(1)
    assert fingerprint.fingerprint_model(model) == before


def test_what_prepares_images_is_part_of_a_model_only_if_its_own_forward_pass_may_read_it():
    adapter = Adapter(vit(), Preprocessing(str), ["cat"], spec="timm:vit")
    before = fingerprint.fingerprint_model(adapter)
    adapter.preprocessing, adapter.class_names = Preprocessing(repr), ["dog"]
    assert fingerprint.fingerprint_model(adapter) == before
    adapter.forward = lambda images: adapter.model(images) * len(adapter.class_names)
    before = fingerprint.fingerprint_model(adapter)
    adapter.class_names = ["dog", "cat"]
    assert fingerprint.fingerprint_model(adapter) != before


@pytest.mark.parametrize("spec", ["builtin", "timm:vit_tiny_patch16_224"])
def test_loaded_models_are_recordable(spec):
    """Their preprocessing reads files, which their forward passes do not."""
    assert fingerprint.fingerprint_model(load_model(spec, "random" if ":" in spec else None)).is_recordable
