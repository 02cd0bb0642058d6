"""The table of torch functions: one entry says which rule a function has and how the interception treats it.

To support another function, enter its name here, once: in a group whose rule serves it, or with a rule of its own.
"""

import re
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from typing import Any

from dave_vit.engine.calls import Rule
from dave_vit.engine.rules import attention, linear, norms, products
from dave_vit.engine.rules.products import GateRule
from dave_vit.engine.states import is_zero


class OperatorKind(Enum):
    """How the input passes through a function."""

    MOVE = auto()  # numbers of the first argument are moved; the others (indices, sizes) only say how
    REDUCTION = auto()  # weighted sums of the first argument's numbers
    TRANSFORM = auto()  # other linear functions of the first argument
    SUM = auto()  # affine in all tensor arguments together
    PRODUCT = auto()  # linear in each tensor argument
    WEIGHTED = auto()  # f(input, weight, bias): linear in input and in weight, affine in bias
    FUSED_PRODUCT = auto()  # f(addend, a, b): an addend plus a product
    SELECTION = auto()  # piecewise linear and homogeneous: the ordinary derivative is the effective one
    ACTIVATION = auto()  # f(0) = 0: the input times a gate
    NORM = auto()  # the input, centred or not, times a scale
    FROZEN = auto()  # not linear, but of use as part of an operator (a score, a scale, a mask)
    DROPOUT = auto()  # the identity in evaluation mode
    OTHER = auto()


@dataclass(frozen=True, slots=True)
class Operator:
    """What the engine knows about one torch function.

    Attributes:
        rule: its rule in the effective transformation; None where it has none and a carrier is refused.
        kind: how the input passes through it.
        scales: whether a product mixes no numbers of a factor with each other.
        index_argument: position of the argument of a sum that only says where its terms go.
        has_constant_result: whether the result says nothing about the values of the first argument.
        fills_result: whether the other arguments of such a function are what the result is filled with.
        uses_first_values_only: whether only shape, type or device are taken from the other arguments.
        leaves_torch: whether the result is a Python number or array, which cannot be followed.
        changes_gradients: whether others can change a gradient through it.
        takes_gradients: whether it takes gradients inside of the model.
    """

    rule: Rule | None = None
    kind: OperatorKind = OperatorKind.OTHER
    scales: bool = False
    index_argument: int = -1
    has_constant_result: bool = False
    fills_result: bool = False
    uses_first_values_only: bool = False
    leaves_torch: bool = False
    changes_gradients: bool = False
    takes_gradients: bool = False


UNKNOWN = Operator()
OPERATORS: dict[str, Operator] = {}
_ALIASES: dict[str, str] = {}


def _enter(names: str, rule: Rule | None = None, kind: OperatorKind = OperatorKind.OTHER, **properties: Any) -> None:
    """Enter functions of the same rule and properties; ``name|alias|alias`` where one has several spellings."""
    for entry in names.split():
        name, *aliases = entry.split("|")
        if name in OPERATORS:
            raise ValueError(f"operator {name!r} is entered twice")
        OPERATORS[name] = Operator(rule, kind, **properties)
        _ALIASES.update(dict.fromkeys(aliases, name))


def _attributes(names: str, access: str = "get") -> str:
    """Return the names of the functions that read or set attributes of a tensor."""
    return " ".join(f"__{access}__{name}" for name in names.split())


_enter(
    """size dim ndimension numel nelement stride storage_offset data_ptr element_size is_contiguous get_device
    is_floating_point is_complex is_signed is_same_size is_tensor is_inference is_shared is_pinned is_conj is_neg
    has_names storage untyped_storage __len__ __repr__ __format__ __hash__ __str__ retain_grad
    zeros_like ones_like empty_like rand_like randn_like randint_like new_zeros new_ones
    new_empty new_empty_strided result_type can_cast __dir__ _is_view """
    + _attributes(
        """shape dtype device layout ndim is_cuda is_cpu is_mps is_xpu is_meta is_sparse is_sparse_csr is_quantized
        is_nested is_mkldnn is_vulkan is_leaf is_mtia is_ipu is_xla is_ort is_maia requires_grad grad names
        itemsize nbytes name output_nr retains_grad _version _base grad_dtype __dict__ """
    )
    + _attributes(" grad names", "set"),
    has_constant_result=True,
)
_enter("full_like new_full new_tensor", has_constant_result=True, fills_result=True)
_enter("requires_grad __set__requires_grad", has_constant_result=True, takes_gradients=True)
_enter("backward", takes_gradients=True)
_enter("register_hook __get__grad_fn __get___backward_hooks __set___backward_hooks", changes_gradients=True)
_enter("numpy __float__ __array__ __complex__ __dlpack__", leaves_torch=True)
_enter("item tolist __int__ __index__", linear.freeze, OperatorKind.FROZEN, leaves_torch=True)

_enter(
    """view reshape permute transpose t swapaxes swapdims movedim moveaxis flatten unflatten ravel squeeze
    unsqueeze expand broadcast_to repeat tile repeat_interleave contiguous
    clone type float double half bfloat16 cpu cuda chunk split split_with_sizes tensor_split unsafe_chunk
    unsafe_split hsplit vsplit unbind select narrow __getitem__ index_select gather take_along_dim take
    masked_select roll flip fliplr flipud rot90 diagonal diag diag_embed tril triu as_strided alias unfold
    pixel_shuffle pixel_unshuffle channel_shuffle neg|__neg__|negative positive im2col
    view_as_real view_as_complex real imag conj resolve_conj resolve_neg
    atleast_1d atleast_2d atleast_3d adjoint fft_fftshift fft_ifftshift """
    + _attributes("T mT H mH real imag"),
    linear.move,
    OperatorKind.MOVE,
)
_enter("to type_as expand_as view_as reshape_as", linear.move, OperatorKind.MOVE, uses_first_values_only=True)
_enter(
    """sum mean nanmean cumsum trace avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d upsample interpolate grid_sample grid_sampler grid_sampler_2d grid_sampler_3d fold col2im""",
    linear.reduce,
    OperatorKind.REDUCTION,
)
_enter(
    "affine_grid "
    + " ".join(f"fft_{name}{axes}" for name in "fft ifft rfft irfft hfft ihfft".split() for axes in ("", "2", "n")),
    linear.reduce,
    OperatorKind.TRANSFORM,
)
_enter("diff", linear.difference)
_enter("var_mean std_mean", linear.mean_and_spread)
_enter("linalg_solve linalg_solve_triangular", linear.solve)
_enter("lerp", linear.linear_combination)
_enter("__setitem__", linear.set_item)
_enter("copy", linear.copy_into)
_enter("fill zero", linear.fill)
_enter("__iter__", linear.iterate)
_enter(
    """add|__add__|__radd__ sub|__sub__|subtract rsub|__rsub__ cat|concat|concatenate stack hstack vstack dstack
    column_stack row_stack pad constant_pad_nd select_scatter slice_scatter block_diag complex""",
    linear.add,
    OperatorKind.SUM,
)
_enter("where", linear.add, OperatorKind.SUM, index_argument=0)
_enter("masked_fill masked_scatter index_put", linear.add, OperatorKind.SUM, index_argument=1)
_enter("scatter", linear.scatter, OperatorKind.SUM, index_argument=2)
_enter("scatter_reduce", linear.scatter_reduce, OperatorKind.SUM, index_argument=2)
_enter("scatter_add index_add index_copy index_fill", linear.add, OperatorKind.SUM, index_argument=2)
_enter("mul|__mul__|__rmul__|multiply outer kron", products.product, OperatorKind.PRODUCT, scales=True)
_enter(
    "matmul|__matmul__ rmatmul|__rmatmul__ bmm mm mv dot inner einsum tensordot linalg_multi_dot _sparse_mm",
    products.product,
    OperatorKind.PRODUCT,
)
_enter("addcmul addr", products.fused_product, OperatorKind.FUSED_PRODUCT, scales=True)
_enter("addmm addbmm baddbmm addmv", products.fused_product, OperatorKind.FUSED_PRODUCT)
_enter(
    "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution",
    products.weighted_sum,
    OperatorKind.WEIGHTED,
)
_enter("div|__truediv__|__div__|divide|true_divide", products.quotient)
_enter("addcdiv", products.fused_quotient)
_enter("pow|__pow__ square", products.power)
_enter("glu", products.gated_linear_unit)

_enter(
    """relu leaky_relu prelu rrelu abs|__abs__|absolute max_pool1d max_pool2d max_pool3d max_pool1d_with_indices
    max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool1d adaptive_max_pool2d amax amin topk sort
    kthvalue median max min""",
    linear.select,
    OperatorKind.SELECTION,
)
_enter("relu6 tanhshrink hardshrink softshrink", GateRule(0.0), OperatorKind.ACTIVATION)
_enter("gelu silu hardswish", GateRule(0.5), OperatorKind.ACTIVATION)
_enter("mish", GateRule(0.6), OperatorKind.ACTIVATION)  # tanh(log 2)
_enter("tanh hardtanh elu celu softsign asinh atan", GateRule(1.0), OperatorKind.ACTIVATION)
_enter("selu", GateRule(1.0507009873554805), OperatorKind.ACTIVATION)
_enter(
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout", linear.dropout, OperatorKind.DROPOUT
)
for name in "layer_norm rms_norm group_norm instance_norm batch_norm normalize".split():
    _enter(name, getattr(norms, name), OperatorKind.NORM)
_enter("scaled_dot_product_attention", attention.scaled_dot_product_attention)
_enter("multi_head_attention_forward", attention.multi_head_attention)
_enter("softmax|special_softmax _softmax", linear.freeze)
_enter(
    """softmin log_softmax gumbel_softmax sigmoid|special_expit hardsigmoid logsigmoid log_sigmoid softplus
    erf|special_erf erfc exp expm1 exp2 log log1p log2 log10 rpow|__rpow__ float_power sqrt rsqrt reciprocal
    rdiv|__rtruediv__|__rdiv__ norm linalg_norm linalg_vector_norm linalg_matrix_norm var std frobenius_norm
    nuclear_norm cosine_similarity cdist logsumexp
    sin cos tan sinh cosh asin acos atan2 angle sign sgn floor ceil round trunc frac fmod remainder floor_divide
    clamp clamp_min clamp_max clip maximum minimum fmax fmin prod cumprod detach __get__data
    eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__ isnan isinf isfinite isclose allclose equal
    argmax argmin argsort any all logical_not logical_and logical_or nonzero count_nonzero bernoulli multinomial
    bucketize searchsorted histc one_hot int long bool short __bool__ is_nonzero __contains__
    bitwise_not __invert__""",
    linear.freeze,
    OperatorKind.FROZEN,
)


def names_of_kind(*kinds: OperatorKind) -> frozenset[str]:
    """Return the canonical names of all functions of some kinds."""
    return frozenset(name for name, operator in OPERATORS.items() if operator.kind in kinds)


@dataclass(frozen=True, slots=True)
class FunctionName:
    """What a torch function is, whatever its spelling.

    Attributes:
        name: canonical name; ``torch.add``, ``Tensor.add_`` and ``+=`` are all "add".
        inplace: whether this spelling writes its result into its first argument.
    """

    name: str
    inplace: bool = False

    @property
    def operator(self) -> Operator:
        """The function's entry in the table."""
        return OPERATORS.get(self.name, UNKNOWN)

    def makes_zero(self, args: Any) -> bool:
        """Return whether the function of constants and operators returns zero, whatever the operators are."""
        kind = self.operator.kind
        if kind is OperatorKind.PRODUCT or (kind is OperatorKind.WEIGHTED and len(args) == 2):
            return any(map(is_zero, args))
        if self.name in ("div", "sum", "mean") or kind is OperatorKind.MOVE:
            return bool(args) and is_zero(args[0])
        return self.name in ("zeros", "zeros_like", "new_zeros")


@cache
def function_name(func: Any) -> FunctionName:
    """Return the canonical name of a torch function, property or operator."""
    raw = getattr(func, "__name__", None) or str(func)
    if raw in ("__get__", "__set__", "__delete__"):  # a property: torch.Tensor.shape.__get__
        return FunctionName(f"{raw}{func.__self__.__name__}")
    module = getattr(func, "__module__", None)
    if module is not None and not _is_torch_module(module):
        return FunctionName(f"{module}.{raw}")  # a function of another library with that name is not torch's
    plain = f"__{raw[3:]}" if raw.startswith("__i") else raw[:-1]  # __iadd__ is __add__ in place, add_ is add
    if plain in _ALIASES and raw.startswith("__i"):
        return FunctionName(_ALIASES[plain], inplace=True)
    if raw.endswith("_") and not raw.endswith("__"):
        return FunctionName(_ALIASES.get(plain, plain), inplace=True)
    return FunctionName(_ALIASES.get(raw, raw))


def _is_torch_module(module: str) -> bool:
    library = re.match(r"torch\._?ops\.(\w+)", module)  # torch.ops holds the operators of every library
    return library[1] == "aten" if library else module.partition(".")[0] == "torch"
