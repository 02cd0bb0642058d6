"""Memory by budget: rows of a pass follow from bytes, and maps do not depend on them."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from dave_vit import DAVE, create_method
from dave_vit.engine.autograd_graph import SavedMemory, offload_saved
from dave_vit.engine.fast.recorded_model import RecordedModel
from dave_vit.engine.rule_sets import PLAIN
from dave_vit.engine.targets import class_logits
from dave_vit.errors import OptionError
from dave_vit.methods import base, pass_size
from dave_vit.methods.pass_size import PassForm, free_memory, memory_budget, parse_memory
from dave_vit.methods.sampling import SampleEstimate
from tiny_models import FAMILIES, HIDING, images, swin, torchvision_vit, vit

X = images(2)
GIB = 2**30


class Sigmoids(nn.Module):
    """Each of the layers saves 3 * 32 * 32 values of float32, and nothing else of a row is kept."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sigmoid() for _ in range(depth)])

    def forward(self, x):
        return self.layers(x).flatten(2).sum(-1)


@pytest.fixture
def rows_of_passes(monkeypatch) -> list[int]:
    """The number of rows of each pass over views."""
    rows, compute = [], RecordedModel.gradient

    def spy(self, inputs, *args, **kwargs):
        rows.append(len(inputs))
        return compute(self, inputs, *args, **kwargs)

    monkeypatch.setattr(RecordedModel, "gradient", spy)
    return rows


def form_of(method, kept="graph") -> PassForm:
    return PassForm(method.model, kept, getattr(method, "rules", PLAIN), None, class_logits)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("given", "expected"),
    [("8GiB", 8 * GIB), ("512 MiB", 2**29), ("2GB", 2 * 10**9), (10**6, 10**6), (0.5, 0.5), ("0.25", 0.25), ("1", 1.0)],
)
def test_sizes_and_shares(given, expected):
    assert parse_memory(given) == expected


@pytest.mark.parametrize("given", ["", "much", "-1GiB", 0, -0.5, "8XiB", "1.2.3", True])
def test_other_values_are_refused_in_one_line(given):
    with pytest.raises(OptionError, match="give a size such as '8GiB'"):
        DAVE(vit(), memory=given)


class TestMeasuredBytes:
    def test_what_autograd_saves(self):
        model, x = Sigmoids(5), X[:1]
        with (saved := SavedMemory(model)):
            model(x.clone().requires_grad_()).sum()
        assert saved.peak == 5 * x.nbytes
        assert saved.largest == x.nbytes

    def test_copies_of_weights_do_not_grow_with_the_batch(self):
        model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 64, bias=False), nn.Sigmoid())
        with (saved := SavedMemory(model)), torch.autocast("cpu", dtype=torch.bfloat16):
            model(X[:1].clone().requires_grad_())
        assert saved.fixed == 3 * 32 * 32 * 64 * 2
        assert saved.peak == 3 * 32 * 32 * 2 + 64 * 2  # the input in bfloat16, and the result

    def test_a_row_within_a_factor_of_what_is_saved(self):
        for depth in (10, 40):
            measured = form_of(create_method("input_x_gradient", Sigmoids(depth))).measure(X[:1])
            assert measured.fixed == 0
            assert depth * X[:1].nbytes <= measured.row <= 2.5 * depth * X[:1].nbytes

    def test_once_for_a_model_and_a_shape(self, monkeypatch):
        runs, run, model = [], PassForm._run, vit()
        monkeypatch.setattr(PassForm, "_run", lambda self, image: runs.append(image.shape) or run(self, image))
        for _ in range(2):
            create_method("saliency", model, memory="1GiB").attribute(X, 0)
        assert len(runs) == 1
        model.head = nn.Linear(24, 7)
        create_method("saliency", model, memory="1GiB").attribute(X, 0)
        assert len(runs) == 2


class TestRows:
    def test_follow_from_the_budget(self, rows_of_passes):
        model = vit()
        row = form_of(DAVE(model)).measure(X[:1]).row
        for rows in (1, 2, 4):  # which divide the samples up to the first decision
            rows_of_passes.clear()
            DAVE(model, samples=10, memory=int((rows + 0.5) * row)).attribute(X[:1], 0)
            assert max(rows_of_passes) == rows

    def test_saved_bytes_stay_within_the_budget(self):
        model = vit(depth=6)
        row = form_of(DAVE(model)).measure(X[:1]).row
        for rows in (2, 6):
            with (saved := SavedMemory(model)):
                DAVE(model, samples=12, memory=(rows + 1) * row).attribute(X[:1], 0)
            assert 0.25 * rows * row < saved.peak < (rows + 1) * row

    def test_of_the_cpu_stay_as_they_are_without_a_budget(self, rows_of_passes, monkeypatch):
        monkeypatch.setattr(PassForm, "_run", lambda *_: pytest.fail("nothing is to be measured"))
        DAVE(vit(), samples=30).attribute(X[:1], 0)
        assert max(rows_of_passes) <= 20

    def test_a_model_that_is_refused_says_so_itself(self):
        class Refused(nn.Module):
            def forward(self, x):
                return torch.erfinv(x.flatten(2).sum(-1))

        with pytest.raises(Exception, match="erfinv"):
            DAVE(Refused(), memory="1GiB").attribute(X)


METHODS = ["dave", "effective", "attn_lrp", "libragrad", "legrad", "gradcam", "rise", "smoothgrad"]


@pytest.mark.parametrize("name", METHODS)
def test_three_budgets_give_the_same_map(name):
    model, options = vit(), {"dave": {"samples": 10}, "smoothgrad": {"samples": 5}, **HIDING}.get(name, {})
    expected = create_method(name, model, **options).attribute(X, [0, 1])
    for budget in (2, "300KiB", "1GiB"):
        assert_same(create_method(name, model, memory=budget, **options).attribute(X, [0, 1]), expected)


@pytest.mark.parametrize("family", [swin, torchvision_vit])
def test_one_row_suffices_for_constants_in_windows_and_tokens_first(family):
    model = family()
    assert_same(DAVE(model, samples=4, memory=2).attribute(X, 0), DAVE(model, samples=4).attribute(X, 0))


def test_images_that_converge_stop_at_the_same_sample_whatever_the_chunk(monkeypatch):
    def has_converged(self, enough):
        return torch.full((len(X),), self.accumulator.count > 8)

    monkeypatch.setattr(SampleEstimate, "has_converged", has_converged)
    model = vit()
    few, many = (DAVE(model, samples="auto", limit=20, chunk=chunk).explain(X, 0) for chunk in (6, 40))
    assert few.samples == many.samples == 12


class TestOffloading:
    def test_tensors_are_freed_until_the_derivatives_are_taken(self):
        model, freed = Sigmoids(4), []

        def watch(module, args, out):
            weakref.finalize(out.untyped_storage(), freed.append, module)

        for layer in model.layers:
            layer.register_forward_hook(watch)
        x = X.clone().requires_grad_()
        with offload_saved(model):
            out = model(x).sum()
        assert len(freed) == 4
        expected = torch.autograd.grad(Sigmoids(4)(x).sum(), x)
        assert torch.equal(torch.autograd.grad(out, x)[0], expected[0])

    @pytest.mark.parametrize("name", ["dave", "attn_lrp", "libragrad", "legrad"])
    def test_maps_are_the_same_where_one_row_does_not_fit(self, name, monkeypatch):
        model, options = vit(), {"samples": 9} if name == "dave" else {}
        expected = create_method(name, model, **options).attribute(X, [0, 1])
        used, offload = [], pass_size.offload_saved
        monkeypatch.setattr(pass_size, "offload_saved", lambda model: used.append(model) or offload(model))
        monkeypatch.setattr(base, "PassSize", lambda rows, budget, _: pass_size.PassSize(rows, budget, model))
        with pytest.warns(UserWarning, match="main memory is used too") as told:
            assert_same(create_method(name, model, memory=2, **options).attribute(X, [0, 1]), expected)
        assert used
        assert len(told) == 1

    def test_the_last_resort_before_out_of_memory(self):
        size, tries = pass_size.PassSize(2, model=vit()), []

        def compute(start, stop):
            tries.append((stop - start, size.is_offloaded))
            if not size.is_offloaded:
                raise torch.OutOfMemoryError("out of memory")
            return stop

        with pytest.warns(UserWarning, match="main memory"):
            assert size.run_chunks(compute, 2) == [1, 2]
        assert tries == [(2, False), (1, False), (1, True), (1, True)]


class TestFreeMemory:
    """On a pretended GPU of 80 GiB, of which others hold 20 and this process 10, 4 of them unused."""

    @pytest.fixture(autouse=True)
    def gpu(self, monkeypatch):
        numbers = {"mem_get_info": (50 * GIB, 80 * GIB), "memory_allocated": 6 * GIB, "memory_reserved": 10 * GIB}
        for name, value in {**numbers, "get_per_process_memory_fraction": 1.0}.items():
            monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value, raising=False)

    def test_half_of_what_is_free_with_what_torch_holds_unused(self):
        assert free_memory(torch.device("cuda")) == 54 * GIB
        assert memory_budget(0.5, torch.device("cuda")) == 27 * GIB

    def test_half_of_what_is_free_by_default_up_to_what_is_fast(self, monkeypatch):
        assert memory_budget(None, torch.device("cuda")) == 16 * GIB
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 0.2)
        assert memory_budget(None, torch.device("cuda")) == 5 * GIB

    def test_no_more_than_the_share_of_this_process(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 0.1)
        assert free_memory(torch.device("cuda")) == 2 * GIB

    def test_a_limit_of_the_method_before_that_of_the_environment(self, monkeypatch):
        monkeypatch.setenv(pass_size.MEMORY_VARIABLE, "0.25")
        assert memory_budget(None, torch.device("cuda")) == int(13.5 * GIB)
        assert memory_budget(3 * GIB, torch.device("cuda")) == 3 * GIB

    def test_of_the_cpu(self):
        assert memory_budget(None, torch.device("cpu")) is None
        assert 0 < memory_budget(0.5, torch.device("cpu")) < 2**46


def test_every_family_is_measured():
    assert all(form_of(DAVE(make()), "constants").measure(X[:1]) for make in FAMILIES.values())


def test_one_row_where_the_measurement_itself_runs_out_of_memory(monkeypatch):
    def run(self, image):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(PassForm, "_run", run)
    assert pass_size.PassSize(20, GIB).limit_rows(20, form_of(DAVE(vit())), X) == 1
