"""The Triton kernels against plain forms in float64: in Triton's interpreter, and on a GPU if there is one.

The interpreter must be chosen before Triton is imported, so that these tests run in a process of their own.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
inside = pytest.mark.skipif(not INTERPRETED and DEVICE == "cpu", reason="runs in Triton's interpreter or on a GPU")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_kernels_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-rA", "-x", "-n", "0", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "test_masks" in done.stdout  # that is, they were not all left out
    assert "test_flat_gamma" in done.stdout


def draw(batch=2, heads=2, shared=1, length=37, keys=None, dim=16, wide=None, dtype=torch.float32, targets=None):
    """Query, key, value and the gradient of what attention returns; ``shared`` query heads to one key head."""
    generator = torch.Generator().manual_seed(length + dim)
    keys, wide = keys or length, wide or dim
    leading = () if targets is None else (targets,)
    shapes = (
        (batch, heads * shared, length, dim),
        (batch, heads, keys, dim),
        (batch, heads, keys, wide),
        (*leading, batch, heads * shared, length, wide),
    )
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def oracle(query, key, grad, mask=None, *, is_causal=False, scale=None):
    """Log-sum-exp and A^T grad in float64, with zeros for queries that see nothing."""
    query, key, grad = (tensor.double().cpu() for tensor in (query, key, grad))
    shared = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(shared, 1).transpose(-2, -1) * (scale or query.shape[-1] ** -0.5)
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    if mask is not None:
        mask = mask.cpu()
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    pulled = scores.softmax(-1).nan_to_num(0.0).transpose(-2, -1) @ grad
    return scores.logsumexp(-1), pulled.unflatten(-3, (key.shape[1], shared)).sum(-3)


def check(query, key, grad, mask=None, *, tolerance=1e-5, **options):
    """Both kernels against the oracle."""
    from dave_vit.engine.fast.attention import fused_values_gradient, log_sum_exp

    options = {"is_causal": False, "scale": None, **options}
    lse = log_sum_exp(query, key, mask, **options)
    pulled = fused_values_gradient(grad, query, key, lse, mask, **options)
    expected_lse, expected = oracle(query, key, grad, mask, **options)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double().cpu(), expected_lse, rtol=1e-5, atol=1e-5)
    assert pulled.dtype == query.dtype
    assert pulled.shape == expected.shape
    assert pulled.isfinite().all()
    assert (pulled.double().cpu() - expected).norm() <= tolerance * expected.norm()


@inside
@pytest.mark.parametrize(("length", "keys"), [(1, 1), (16, 16), (37, 37), (130, 130), (5, 150), (70, 3)])
def test_lengths(length, keys):
    query, key, _, grad = draw(length=length, keys=keys)
    check(query, key, grad)


@inside
@pytest.mark.parametrize(("dim", "wide"), [(8, 8), (24, 24), (64, 64), (80, 80), (32, 48), (48, 16)])
def test_head_dimensions(dim, wide):
    query, key, _, grad = draw(dim=dim, wide=wide)
    check(query, key, grad)


@inside
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 1e-2), (torch.float32, 1e-5)])
def test_types(dtype, tolerance):
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies no bfloat16 matrices")
    query, key, _, grad = draw(length=50, dim=32, dtype=dtype)
    check(query, key, grad, tolerance=tolerance)


@inside
@pytest.mark.parametrize("shape", [(2, 4, 37, 41), (2, 1, 1, 41), (1, 4, 37, 41), (37, 41), (41,)])
@pytest.mark.parametrize("boolean", [True, False])
def test_masks(shape, boolean):
    query, key, _, grad = draw(shared=2, length=37, keys=41)
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    check(query, key, grad, mask > -0.5 if boolean else mask)


@inside
@pytest.mark.parametrize("boolean", [True, False])
def test_a_query_that_sees_nothing_gives_nothing(boolean):
    query, key, _, grad = draw(length=20)
    mask = torch.ones(20, 20, dtype=torch.bool, device=DEVICE)
    mask[3] = False
    check(
        query, key, grad, mask if boolean else torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    )


@inside
@pytest.mark.parametrize(("length", "keys"), [(150, 150), (40, 20), (20, 40)])
def test_causal(length, keys):
    query, key, _, grad = draw(length=length, keys=keys)
    check(query, key, grad, is_causal=True)


@inside
@pytest.mark.parametrize("shared", [2, 3])
def test_query_heads_that_share_a_value_head(shared):
    query, key, _, grad = draw(shared=shared)
    check(query, key, grad, is_causal=True)


@inside
@pytest.mark.parametrize("targets", [1, 2, 5])
def test_several_targets(targets):
    query, key, _, grad = draw(targets=targets)
    check(query, key, grad, scale=0.3)


@inside
def test_tensors_as_models_lay_them_out():
    packed = torch.randn(2, 37, 3, 4, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    query, key, _ = packed.permute(2, 0, 3, 1, 4).unbind(0)
    grad = torch.randn(2, 37, 4, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE).transpose(1, 2)
    check(query, key, grad)
    expanded = torch.ones((), device=DEVICE).expand(2, 4, 37, 16)  # what a sum's backward pass hands over
    check(query, key, expanded)


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be traced")
def test_tracers_see_operators_and_their_kernels():
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional
    from torch._subclasses.functional_tensor import dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx

    from dave_vit.engine.fast.attention import fused_values_gradient

    def attended(grad, query, key, lse):
        return fused_values_gradient(grad, query, key, lse, None, is_causal=False, scale=None)

    query, key, _, grad = draw(length=5)
    given = (grad, query, key, torch.zeros(2, 2, 5, device=DEVICE))
    graph = make_fx(attended, tracing_mode="fake")(*given)
    assert torch.ops.dave_vit.values_gradient.default in [node.target for node in graph.graph.nodes]
    # As a compiler takes it apart.
    apart = make_fx(dispatch_functionalize(graph), tracing_mode="fake")(*given)
    assert triton_kernel_wrapper_functional in [node.target for node in apart.graph.nodes]


def compiled(kernel, types, fixed, **options):
    """A kernel for a GPU that is not here; arguments are of these types, or fixed."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in kernel.arg_names},
        {(kernel.arg_names.index(name),): value for name, value in fixed.items()},
        {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name, kind in types.items() if kind[0] == "*"},
    )
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    ("dtype", "precision", "units"),
    [
        (torch.bfloat16, "tf32", "wgmma"),
        (torch.float32, "tf32", "tf32"),
        (torch.float32, "tf32x3", "tf32"),
    ],
)
def test_kernels_compile_for_a_gpu_that_is_not_here(dtype, precision, units):
    from dave_vit.engine.fast.kernels.launchers import _tile
    from dave_vit.engine.fast.kernels.triton_kernels import values_gradient_kernel as kernel

    tile = _tile(torch.empty(1, 1, 1, 64, dtype=dtype), 64, targets=1)
    options = {name: tile.pop(name) for name in ("num_warps", "num_stages")}
    tensors = ("grad", "query", "key", "lse", "mask", "out")
    fixed = {"scale": 0.125, "CAUSAL": False, "MASK": "none", "PRECISION": precision, **tile}
    fixed |= {"L": 197, "S": 197, "E": 64, "EV": 64, "HEADS": 12, "GROUP": 1, "TARGETS": 1}
    fixed |= {name: 1 if name.endswith("_e") else 64 for name in kernel.arg_names if name not in {*fixed, *tensors}}
    own = "*bf16" if dtype == torch.bfloat16 else "*fp32"
    types = {name: "*fp32" if name == "lse" else own for name in tensors}
    assert units in compiled(kernel, types, fixed, **options)  # on the matrix units


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("row_sizes_kernel", 3072),
        ("share_gradient_kernel", 3072),
        ("add_favoured_kernel", 3072),
        ("center_gradient_kernel", 768),
    ],
)
def test_kernels_over_rows_move_sixteen_bytes_at_a_time(name, width):
    from dave_vit.engine.fast.kernels import triton_kernels as kernels
    from dave_vit.engine.fast.kernels.launchers import _row_tile

    kernel, tile = getattr(kernels, name), _row_tile(width)
    wide = {"x", "grad", "value", "plain", "like"} | (
        {"out"} if name in ("share_gradient_kernel", "center_gradient_kernel") else set()
    )
    types = {one: "*bf16" if one in wide else "*fp32" for one in kernel.arg_names if one.islower()}
    types |= {"favour": "fp32"} if "favour" in types else {}
    fixed = {"WIDTH": width, "BLOCK": tile["BLOCK"]}
    fixed |= {one: True for one in ("BIAS", "WEIGHT") if one in kernel.arg_names}
    ptx = compiled(kernel, types, fixed, num_warps=tile["num_warps"])
    assert set(re.findall(r"ld\.global\.(\S+)", ptx)) <= {"v4.b32", "b32"}  # the latter of one number a row
    assert "bar.sync" not in ptx[: ptx.rindex("ld.global.v4")]  # threads wait in the sums at the end alone


@inside
@pytest.mark.parametrize(("kind", "at_zero"), [("gelu", 0.5), ("gelu", 1.0), ("tanh", 0.5), ("silu", 0.5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gates_on_the_way_back(kind, at_zero, dtype):
    from dave_vit.engine.fast.gates import gelu_gate
    from dave_vit.engine.fast.kernels.launchers import gate_gradient

    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(3, 700, generator=generator).mul(3).to(DEVICE, dtype) for _ in range(2))
    x[0, :5], x[1, 0], x[1, 1] = 0, -50, 50
    wide = x.double().cpu()
    gate = torch.sigmoid(wide) if kind == "silu" else gelu_gate(wide, "tanh" if kind == "tanh" else "none")
    expected = grad.double().cpu() * torch.where(wide == 0, at_zero, gate)
    pulled = gate_gradient(grad, x, kind=kind, at_zero=at_zero)
    assert pulled.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(pulled.double().cpu(), expected, rtol=tolerance, atol=tolerance / 10)


@inside
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(6,), (4, 6), (1300,)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
def test_layer_norms_on_the_way_back(affine, shape, dtype, tolerance):
    from dave_vit.engine.fast.norms import center_gradient as fused
    from dave_vit.engine.rules.norms import center_gradient

    generator = torch.Generator().manual_seed(0)
    grad = (torch.randn(3, 5, *shape, generator=generator) + 1).to(DEVICE, dtype).transpose(0, 1)
    inverse = torch.rand(5, 3, *[1] * len(shape), generator=generator).to(DEVICE)
    weight = torch.randn(shape, generator=generator).to(DEVICE) if affine else None
    actual = fused(grad, inverse, weight, dtype=dtype)
    given = (None if one is None else one.double().cpu() for one in (grad, inverse, weight))
    expected = center_gradient(*given, dims=tuple(range(-len(shape), 0)))
    assert actual.dtype == dtype
    assert (actual.double().cpu() - expected).norm() <= tolerance * expected.norm()


def layer(inputs, outputs, rows=(2, 5), dtype=torch.float32, bias=True):
    """Input, weight, bias, and the gradient of what a linear layer returns."""
    generator = torch.Generator().manual_seed(inputs + outputs)
    shapes = ((*rows, inputs), (outputs, inputs), (outputs,), (*rows, outputs))
    x, weight, shift, grad = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes)
    return x, weight, shift if bias else None, grad


def check_flat_gamma(x, weight, bias, grad, *, tolerance=1e-5):
    """The kernels against the rule in plain torch functions and float64."""
    from dave_vit.engine.fast.linear import FlatForm, KernelForm

    def pulled(form, *tensors):
        x, weight, bias, grad = tensors
        made = form(torch.nn.functional.linear, 0.3)
        kept = made.keep(x, weight, bias, torch.nn.functional.linear(x.to(grad.dtype), weight, bias))
        return made.pull_back(grad, x, weight, *kept)

    actual = pulled(KernelForm, x, weight, bias, grad)
    expected = pulled(FlatForm, *(None if one is None else one.double().cpu() for one in (x, weight, bias, grad)))
    assert actual.dtype == grad.dtype
    assert actual.shape == x.shape
    assert actual.isfinite().all()
    assert (actual.double().cpu() - expected).norm() <= tolerance * expected.norm()


class TestFlatGamma:
    @inside
    @pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (7, 5), (16, 32), (33, 1030), (2100, 9)])
    @pytest.mark.parametrize("bias", [True, False])
    def test_flat_gamma_of_any_width(self, inputs, outputs, bias):
        check_flat_gamma(*layer(inputs, outputs, bias=bias))

    @inside
    @pytest.mark.parametrize("rows", [(), (1,), (4,), (2, 3, 3)])
    def test_rows(self, rows):
        check_flat_gamma(*layer(20, 12, rows))

    @inside
    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 1.5e-2)])
    def test_half_types(self, dtype, tolerance):
        x, weight, bias, grad = layer(40, 24, dtype=dtype)
        check_flat_gamma(x, weight, bias, grad, tolerance=tolerance)
        check_flat_gamma(x.float(), weight, bias, grad, tolerance=tolerance)  # as autocast leaves what norms return

    @inside
    def test_tensors_as_models_lay_them_out(self):
        x, weight, bias, grad = layer(20, 12, rows=(3, 4))
        check_flat_gamma(x.transpose(0, 1), weight, bias, grad.transpose(0, 1))
        check_flat_gamma(x[:, :1].expand(-1, 4, -1), weight, bias, torch.ones((), device=DEVICE).expand(3, 4, 12))

    @inside
    def test_nothing_to_share_gives_nothing(self):
        x, weight, bias, grad = layer(20, 12)
        x[0], x[1, :, ::2] = 0, 0
        check_flat_gamma(x, weight, bias, grad)
        check_flat_gamma(x, torch.zeros_like(weight), torch.zeros_like(bias), grad)

    @inside
    def test_of_a_model(self, monkeypatch):
        import tiny_models
        from dave_vit.engine import gradient
        from dave_vit.engine.fast import linear, norms
        from dave_vit.engine.fast.recorded_model import RecordedModel
        from dave_vit.engine.rule_sets import RELEVANCE

        seen, launchers = [], linear.kernels.load()
        kernel = launchers.share_gradient
        monkeypatch.setattr(launchers, "share_gradient", lambda *args: seen.append(1) or kernel(*args))
        monkeypatch.setattr(linear, "choose_kernel_form", lambda *tensors: linear.KernelForm)
        monkeypatch.setattr(linear, "prefers_product", lambda input: True)  # as on a GPU
        model, x = tiny_models.vit(), tiny_models.images(2)
        expected = gradient(model.double(), x.double(), [0, 1], rules=RELEVANCE).weight
        assert not seen  # the model itself may write over what they keep
        monkeypatch.setattr(norms, "kernel_takes", lambda *given: True)
        actual = RecordedModel(model.to(DEVICE, torch.float32)).gradient(x.to(DEVICE), [0, 1], RELEVANCE).weight
        assert len(seen) == 6  # two layers in each of two blocks, patches and classes
        torch.testing.assert_close(actual.double().cpu(), expected, rtol=1e-3, atol=1e-5 * expected.abs().max().item())


@inside
@pytest.mark.parametrize("channels", [1, 3, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_weighted_sums_of_samples(channels, dtype):
    from dave_vit.engine.fast.kernels import launchers
    from dave_vit.reduce.base import weighted_sums

    generator = torch.Generator().manual_seed(channels)
    samples = torch.randn(5, 2, channels, 19, 23, generator=generator, dtype=torch.float64).to(dtype)
    weights = torch.rand(5, 2, generator=generator, dtype=torch.float64)
    spread = samples.to(DEVICE).transpose(-2, -1).contiguous().transpose(-2, -1)  # not as memory has it
    for actual, expected in zip(
        launchers.weighted_sums(spread, weights.to(DEVICE)), weighted_sums(samples, weights), strict=True
    ):
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-13, atol=1e-13)
