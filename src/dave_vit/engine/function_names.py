"""Names of torch functions by how the input passes through them."""

from __future__ import annotations


def _properties(names: str) -> frozenset[str]:
    return frozenset(f"__get__{name}" for name in names.split())


CONSTANT_RESULT = (
    frozenset(
        """size dim ndimension numel nelement stride storage_offset data_ptr element_size is_contiguous get_device
        is_floating_point is_complex is_signed is_same_size is_tensor is_inference is_shared is_pinned is_conj is_neg
        has_names storage untyped_storage __len__ __repr__ __format__ __hash__ __str__ retain_grad
        zeros_like ones_like full_like empty_like rand_like randn_like randint_like new_zeros new_ones new_full
        new_empty new_tensor new_empty_strided result_type can_cast __dir__
        requires_grad _is_view""".split()
    )
    | _properties(
        """shape dtype device layout ndim is_cuda is_cpu is_mps is_xpu is_meta is_sparse is_sparse_csr is_quantized
        is_nested is_mkldnn is_vulkan is_leaf is_mtia is_ipu is_xla is_ort is_maia requires_grad grad names
        itemsize nbytes name output_nr retains_grad _version _base grad_dtype __dict__"""
    )
    | frozenset(f"__set__{name}" for name in "requires_grad grad names".split())
)
"""Functions whose result says nothing about the values of their arguments."""

FIRST_ARGUMENT_ONLY = frozenset("to type_as expand_as view_as reshape_as".split())
"""Functions that take only shape, type or device from their other arguments."""

ESCAPES = frozenset("item tolist numpy __float__ __int__ __index__ __array__ __complex__ __dlpack__".split())
"""Functions that turn a tensor into something that can no longer be followed."""

HOOKS = frozenset("register_hook __get__grad_fn __get___backward_hooks __set___backward_hooks".split())
"""Ways for others to change a gradient."""

GRADIENTS = frozenset("requires_grad __set__requires_grad backward".split())
"""Ways to take gradients inside of a model."""

FACTORIES = frozenset("full_like new_full new_tensor".split())
"""Functions of a tensor's shape and type whose other arguments are what the result is filled with."""

MIXING = frozenset("add sub cat mul".split())
"""Functions through which models' residual streams pass, and which give the widest type of their arguments."""

PLACES = {
    "where": 0,
    **dict.fromkeys(["masked_fill", "masked_scatter", "index_put"], 1),
    **dict.fromkeys(["scatter", "scatter_add", "index_add", "index_copy", "index_fill"], 2),
}
"""Which argument of a sum only says where its terms go."""

MOVES = frozenset(
    """view reshape permute transpose t swapaxes swapdims movedim moveaxis flatten unflatten ravel squeeze
        unsqueeze expand expand_as view_as reshape_as type_as broadcast_to repeat tile repeat_interleave contiguous
        clone to type float double half bfloat16 cpu cuda chunk split split_with_sizes tensor_split unsafe_chunk
        unsafe_split hsplit vsplit unbind select narrow __getitem__ index_select gather take_along_dim take
        masked_select roll flip fliplr flipud rot90 diagonal diag diag_embed tril triu as_strided alias unfold
        pixel_shuffle pixel_unshuffle channel_shuffle neg positive im2col
        view_as_real view_as_complex real imag conj resolve_conj resolve_neg
        atleast_1d atleast_2d atleast_3d adjoint fft_fftshift fft_ifftshift""".split()
) | _properties("T mT H mH real imag")
"""Numbers of the first argument are moved; the others (indices, sizes) only say how."""

REDUCTIONS = frozenset(
    """sum mean nanmean cumsum trace avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d upsample interpolate grid_sample fold col2im""".split()
)
"""Sums of the first argument's numbers, with weights."""

TRANSFORMS = frozenset(
    """affine_grid fft_fft fft_fft2 fft_ifft fft_ifft2 fft_rfft fft_rfft2 fft_irfft fft_irfft2 fft_fftn
    fft_ifftn""".split()
)
"""Other linear functions of the first argument."""

SUMS = frozenset(
    """add sub rsub cat stack hstack vstack dstack column_stack row_stack where masked_fill masked_scatter pad
    constant_pad_nd scatter scatter_add index_add index_copy index_fill index_put select_scatter slice_scatter
    block_diag""".split()
)
"""Affine in all of their tensor arguments together."""

PRODUCTS = frozenset("mul matmul rmatmul bmm mm mv dot inner outer einsum tensordot kron linalg_multi_dot".split())
"""Linear in each of their tensor arguments."""

SCALINGS = frozenset("mul outer kron addcmul addr".split())
"""Products that mix no numbers of a factor with each other."""

WEIGHTED = frozenset(
    """linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution""".split()
)
"""``f(input, weight, bias)``: linear in input and in weight, affine in bias."""

FUSED_PRODUCTS = frozenset("addmm addbmm baddbmm addcmul addmv addr".split())
"""``f(addend, a, b)``: an addend plus a product."""

DROPOUTS = frozenset("dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout".split())
"""The identity in evaluation mode, ``f(input, p, training)``."""

SELECTIONS = frozenset(
    """relu leaky_relu prelu rrelu abs max_pool1d max_pool2d max_pool3d max_pool1d_with_indices
    max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool1d adaptive_max_pool2d amax amin topk sort
    kthvalue median max min""".split()
)
"""Piecewise linear and homogeneous: their ordinary derivative is the effective one."""

OPERATORS = frozenset(
    """softmin log_softmax gumbel_softmax sigmoid hardsigmoid logsigmoid log_sigmoid softplus erf erfc exp
    expm1 exp2 log log1p log2 log10 pow rpow float_power square sqrt rsqrt reciprocal rdiv norm linalg_norm
    linalg_vector_norm linalg_matrix_norm var std frobenius_norm nuclear_norm cosine_similarity cdist logsumexp
    sin cos tan sinh cosh asin acos atan2 angle sign sgn floor ceil round trunc frac fmod remainder floor_divide
    clamp clamp_min clamp_max clip maximum minimum fmax fmin prod cumprod detach __get__data
    eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__ isnan isinf isfinite isclose allclose equal
    argmax argmin argsort any all logical_not logical_and logical_or nonzero count_nonzero bernoulli multinomial
    bucketize searchsorted histc one_hot int long bool short __bool__ is_nonzero __int__ __index__ __contains__
    item tolist bitwise_not __invert__""".split()
)
"""Not linear, but of use as part of an operator (a score, a scale, a mask): their result is frozen."""
