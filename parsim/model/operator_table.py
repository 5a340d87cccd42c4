"""The table of operators: what each call of torch computes and moves. The one place that names a formula.

A row gives one of
    pieces   the kernels behind a call, each with the sizes its time depends on: products, convolutions, attention, lookups;
    flop     arithmetic of an operator that otherwise passes over its arrays: transforms, decompositions;
    nothing  it passes over its arrays and its arithmetic is not counted (torch's counter gives these 0 too).
torch's own flop counter decides the flop wherever it has the operator; `torch.utils.flop_counter.register_flop_formula` adds to
it. Element-wise functions and reductions need no row: torch tags them. Every other operator is unlisted: it is priced by the
bytes that it reads and writes, and every answer names it with its share of time.

An operator of your own is one more row, added where your model is defined:

    from parsim.model.operator_table import TABLE, OperatorRow
    TABLE["mylib.window_attention"] = OperatorRow(flop=lambda call: 4 * call.tensor("q").numel() * 49)

Flop count a multiplication and an addition as two. Those of decompositions are the leading terms of the textbook algorithms;
those of a fast Fourier transform are 5 n log2 n. Leaves out: comparisons of sorts, transcendental functions, index arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from parsim.errors import ModelError

Dims = tuple[tuple[str, int], ...]
UNLISTED = "unlisted:"
"""Begins `Operator.function` of one that the table lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCall:
    """One call below a forward.

    Attributes:
        name: of its packet, e.g. "aten.mm". arguments: by the names of its schema, defaults included. outputs: its tensors.
        size_bytes: (tensor) -> its bytes; an expanded tensor is no larger than its storage. is_state: (tensor) -> whether it
            is a parameter or buffer.
    """

    name: str
    arguments: Mapping[str, Any]
    outputs: tuple[Any, ...]
    size_bytes: Callable[[Any], int]
    is_state: Callable[[Any], bool]

    def tensor(self, name: str) -> Any:
        """An argument of this name. Raises ModelError if there is none."""
        if self.arguments.get(name) is None:
            raise ModelError(f"{self.name} has no argument {name!r}; it has {', '.join(self.arguments)}")
        return self.arguments[name]

    def first(self, number: int = 0) -> Any:
        """The tensor argument of this number in the schema's order."""
        tensors = [value for value in self.arguments.values() if hasattr(value, "numel")]
        return tensors[number]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPiece:
    """One kernel, or `count` equal ones, of a call over the whole batch.

    Attributes:
        kind, shape: as in `parsim.model.component.Operator`, with a size "batch" that the samples multiply.
        flop: of one kernel; None: torch's counter has it. activation_bytes, parameter_bytes: read and written by one; None:
            the call's tensors, once each. function: its name if it is not the call's.
    """

    kind: str
    shape: Dims
    flop: int | None = None
    activation_bytes: int | None = None
    parameter_bytes: int | None = None
    count: int = 1
    function: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow:
    """What is known of one operator; see the top of this file.

    Attributes:
        backward_flop: arithmetic of the backward over that of the forward (two operands: 2), for a row with `flop`.
        reads_part: of its first tensor it reads as many bytes as it writes, whatever the size of that tensor.
    """

    pieces: Callable[[TracedCall], tuple[KernelPiece, ...]] | None = None
    flop: Callable[[TracedCall], float] | None = None
    backward_flop: float = 2.0
    reads_part: bool = False


def _mm(call: TracedCall) -> Dims:
    """Sizes of the last two tensor arguments that are matrices: addmm has a sum before them."""
    skip = 1 if call.name == "aten.addmm" else 0
    left, right = call.first(skip), call.first(skip + 1)
    return (("m", left.shape[0]), ("n", right.shape[1]), ("k", left.shape[1]))


def _bmm(call: TracedCall) -> Dims:
    skip = 1 if call.name in ("aten.baddbmm", "aten.addbmm") else 0
    left, right = call.first(skip), call.first(skip + 1)
    return (("m", left.shape[1]), ("n", right.shape[2]), ("k", left.shape[2]), ("problems", left.shape[0]))


def _linear(call: TracedCall) -> Dims:
    rows, weight = call.first(0), call.first(1)
    return (("m", rows.numel() // rows.shape[-1]), ("n", weight.shape[0]), ("k", weight.shape[1]))


def _matrix_vector(call: TracedCall) -> Dims:
    matrix = call.first(1 if call.name == "aten.addmv" else 0)
    return (("m", matrix.shape[0]), ("n", 1), ("k", matrix.shape[1]))


def _grouped(call: TracedCall) -> Dims:
    """Rows go to one group each: a [rows, depth] by [groups, depth, columns]; or depth or columns are split among groups."""
    left, right = call.first(0), call.first(1)
    if left.dim() == right.dim() == 3:
        return (("m", left.shape[1]), ("n", right.shape[2]), ("k", left.shape[2]), ("problems", left.shape[0]))
    return (("m", left.shape[-2]), ("n", right.shape[-1]), ("k", left.shape[-1]))


def _distances(call: TracedCall) -> Dims:
    """Pairwise distances as a product: [.., rows, depth] by [.., columns, depth]."""
    left = call.first(0)
    right = left if call.name == "aten._pdist_forward" else call.first(1)
    problems = math.prod(left.shape[:-2])
    return (("m", left.shape[-2]), ("n", right.shape[-2]), ("k", left.shape[-1]), ("problems", problems))


def _trilinear(call: TracedCall) -> tuple[KernelPiece, ...]:
    """out[b, o] = sum over i, j of x[b, i] W[o, i, j] y[b, j], as nn.Bilinear calls it: one product of depth i j."""
    left, weight, right = call.first(0), call.first(1), call.first(2)
    if (left.dim(), weight.dim(), right.dim()) == (2, 3, 2):
        shape = (("m", left.shape[0]), ("n", weight.shape[0]), ("k", weight.shape[1] * weight.shape[2]))
        return (KernelPiece(kind="matmul", shape=shape, flop=_flop_of(shape)),)
    sizes = max(left.numel(), weight.numel(), right.numel())
    return (KernelPiece(kind="memory_bound", shape=(("elements", call.outputs[0].numel()),), flop=2 * sizes),)


def _flop_of(shape: Dims) -> int:
    return 2 * math.prod(size for _, size in shape)


def _by_shape(shape: Callable[[TracedCall], Dims]) -> OperatorRow:
    """A product that torch's counter may lack: 2 m n k."""

    def pieces(call: TracedCall) -> tuple[KernelPiece, ...]:
        sizes = shape(call)
        return (KernelPiece(kind="matmul", shape=sizes, flop=_flop_of(sizes)),)

    return OperatorRow(pieces=pieces)


def _convolution(call: TracedCall) -> tuple[KernelPiece, ...]:
    """One and three spatial dims are folded into two (height 1; depth times height)."""
    x, weight, stride, groups = call.first(0), call.first(1), call.arguments["stride"], call.arguments["groups"]
    out = call.outputs[0]

    def two(sizes: Any) -> tuple[int, int]:
        sizes = list(sizes)
        return (1, sizes[0]) if len(sizes) == 1 else (math.prod(sizes[:-1]), sizes[-1])

    (h, w), (r, s), (out_h, out_w) = two(x.shape[2:]), two(weight.shape[2:]), two(out.shape[2:])
    strides = [*stride] * (x.dim() - 2) if len(stride) == 1 else [*stride]
    stride_h, stride_w = two(strides)
    sizes = {"c": x.shape[1], "h": h, "w": w, "k": out.shape[1], "r": r, "s": s, "stride_h": stride_h}
    sizes |= {"stride_w": stride_w, "groups": groups, "out_h": out_h, "out_w": out_w, "batch": x.shape[0]}
    return (KernelPiece(kind="convolution", shape=tuple(sizes.items())),)


def _attention(call: TracedCall) -> tuple[KernelPiece, ...]:
    """[batch, heads, length, depth]."""
    query, key, value = call.first(0), call.first(1), call.first(2)
    sizes = {"heads": query.shape[1], "q": query.shape[2], "kv": key.shape[2], "d": query.shape[3], "batch": query.shape[0]}
    shape = (*sizes.items(), ("causal", int(bool(call.arguments.get("is_causal")))))
    flop = 2 * query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] * (query.shape[3] + value.shape[3])
    return (KernelPiece(kind="attention", shape=shape, flop=flop),)


def _embedding(call: TracedCall) -> tuple[KernelPiece, ...]:
    """Reads the rows it gathers, not the table."""
    table, rows = call.first(0), call.first(1)
    moved = call.size_bytes(rows) + rows.numel() * table.shape[1] * table.element_size() + call.size_bytes(call.outputs[0])
    shape = (("rows", rows.numel()), ("width", table.shape[1]))
    return (KernelPiece(kind="embedding", shape=shape, activation_bytes=moved, parameter_bytes=0),)


def _rnn(call: TracedCall) -> tuple[KernelPiece, ...]:
    """All layers and directions of a fused kernel; `weight` lists, per layer and direction, `weight_stride0` arrays."""
    x = call.first(0).transpose(0, 1) if call.arguments["batch_first"] else call.first(0)
    weights, step = call.arguments["weight"], call.arguments["weight_stride0"]
    starts = range(0, len(weights), step)
    return tuple(piece for start in starts for piece in _recurrence(call, x, weights[start], weights[start + 1]))


def _recurrence(call: TracedCall, x: Any, towards_gates: Any, recurrent: Any) -> tuple[KernelPiece, ...]:
    """One direction of one layer, x [length, batch, features].
    The product of all inputs at once, then one product and one pass over the gates per step. A step waits for the one before:
    `count` kernels of one step each."""
    length, batch = x.shape[0], x.shape[1]
    gates, features = towards_gates.shape
    hidden, width = recurrent.shape[1], x.element_size()
    biases = 2 * gates * width if call.arguments.get("has_biases", True) else 0
    inputs = KernelPiece(
        kind="matmul",
        shape=(("m", length * batch), ("n", gates), ("k", features)),
        flop=2 * length * batch * gates * features,
        activation_bytes=width * length * batch * (features + gates),
        parameter_bytes=call.size_bytes(towards_gates) + biases,
    )
    steps = KernelPiece(
        kind="matmul",
        shape=(("m", batch), ("n", gates), ("k", hidden)),
        flop=2 * batch * gates * hidden,
        activation_bytes=width * batch * (hidden + gates),
        parameter_bytes=call.size_bytes(recurrent),
        count=length,
    )
    cells = KernelPiece(
        kind="memory_bound",
        shape=(("elements", batch * gates),),
        flop=0,
        activation_bytes=width * batch * (2 * gates + 3 * hidden),
        parameter_bytes=0,
        count=length,
        function="aten._thnn_fused_lstm_cell",
    )
    return inputs, steps, cells


def _fft(call: TracedCall) -> float:
    """5 n log2 n per transform of n points, half of it where input or output is real."""
    longer = call.outputs[0] if call.name == "aten._fft_c2r" else call.first(0)
    points = math.prod(longer.shape[dim] for dim in call.arguments["dim"])
    half = 1.0 if call.name == "aten._fft_c2c" else 0.5
    return half * 5.0 * longer.numel() * math.log2(points) if points > 1 else 0.0


def _decomposition(cubes: float, squares: float = 0.0) -> Callable[[TracedCall], float]:
    """`cubes` r s^2 + `squares` r s times right-hand sides, per matrix of r rows and s columns (s the smaller)."""

    def flop(call: TracedCall) -> float:
        matrix, out = call.first(1 if call.name in ("aten.cholesky_solve", "aten.triangular_solve") else 0), call.outputs[0]
        if matrix.numel() == 0:
            return 0.0
        long, short = max(matrix.shape[-2:]), min(matrix.shape[-2:])
        problems = matrix.numel() // (long * short)
        columns = out.shape[-1] if squares and out.dim() == matrix.dim() else 1
        return float(problems * (cubes * long * short * short + squares * long * short * columns))

    return flop


def _neighbours(number: int) -> OperatorRow:
    """Two operations for each of so many neighbours of an output."""
    return OperatorRow(flop=lambda call: 2.0 * number * float(call.outputs[0].numel()))


def _decompositions() -> dict[str, OperatorRow]:
    rows = {
        ("cholesky", "linalg_cholesky_ex", "cholesky_inverse"): (1 / 3, 0.0),
        ("linalg_lu_factor_ex", "linalg_lu", "_linalg_det", "_linalg_slogdet"): (2 / 3, 0.0),
        ("linalg_ldl_factor_ex",): (1 / 3, 0.0),
        ("_linalg_solve_ex",): (2 / 3, 2.0),
        ("cholesky_solve", "linalg_lu_solve", "linalg_ldl_solve"): (0.0, 2.0),
        ("linalg_solve_triangular", "triangular_solve"): (0.0, 1.0),
        ("linalg_inv_ex",): (2.0, 0.0),
        ("linalg_qr", "geqrf", "linalg_householder_product", "ormqr", "linalg_lstsq"): (4 / 3, 0.0),
        ("_linalg_eigh",): (4 / 3, 0.0),
        ("linalg_eig", "_linalg_eigvals"): (10.0, 0.0),
        ("_linalg_svd", "linalg_pinv"): (4.0, 0.0),
        ("linalg_matrix_exp",): (2.0, 0.0),
    }
    return {f"aten.{name}": OperatorRow(flop=_decomposition(*terms)) for names, terms in rows.items() for name in names}


PASSES = """
_fused_moving_avg_obs_fq_helper bartlett_window blackman_window embedding_renorm fake_quantize_per_channel_affine_cachemask
fake_quantize_per_tensor_affine_cachemask hamming_window hann_window kaiser_window leaky_relu
_adaptive_avg_pool2d _adaptive_avg_pool3d _batch_norm_no_update _batch_norm_with_update _chunk_cat _conj _ctc_loss
_fused_dropout _fused_rms_norm _histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors
_linalg_check_errors _local_scalar_dense _log_softmax _log_softmax_backward_data _native_batch_norm_legit
_native_batch_norm_legit_functional _neg_view _pack_padded_sequence _pad_packed_sequence _prelu_kernel _reshape_alias
_reshape_copy _safe_softmax _sample_dirichlet _softmax _softmax_backward_data _standard_gamma _thnn_fused_gru_cell
_thnn_fused_lstm_cell _to_copy _unique2 _unsafe_index_put _unsafe_masked_index _unsafe_masked_index_put_accumulate _unsafe_view
_upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
_weight_norm_interface adaptive_max_pool2d adaptive_max_pool3d affine_grid_generator alias_copy allclose arange argsort
as_strided as_strided_copy as_strided_scatter avg_pool2d avg_pool3d bernoulli binary_cross_entropy
binary_cross_entropy_with_logits bincount block_diag bucketize cat cauchy channel_shuffle clone col2im complex constant_pad_nd
copy count_nonzero cudnn_batch_norm cummax cummin cumprod cumsum diag_embed diagonal_copy diagonal_scatter dist equal
expand_copy exponential eye fill flip floor_divide fractional_max_pool2d fractional_max_pool3d full full_like geometric glu
hardswish hash_tensor histc histogram huber_loss im2col index_add index_copy index_fill index_put index_reduce isin kthvalue
linalg_cross linalg_vector_norm linspace log_normal log_sigmoid_forward logcumsumexp logspace logsumexp lu_unpack masked_fill
masked_scatter masked_select max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices max_unpool2d
max_unpool3d median mish mode mse_loss multi_margin_loss multilabel_margin_loss_forward multinomial nanmedian nansum
narrow_copy native_batch_norm native_dropout native_group_norm native_layer_norm new_full new_ones new_zeros nll_loss2d_forward
nll_loss_forward nonzero nonzero_static norm normal ones ones_like permute_copy pixel_shuffle pixel_unshuffle polar prod put
rand rand_like randint randint_like randn randn_like randperm reflection_pad1d reflection_pad2d reflection_pad3d renorm repeat
repeat_interleave replication_pad1d replication_pad2d replication_pad3d resize resize_as roll rot90 rrelu_with_noise
rrelu_with_noise_functional rsub scalar_tensor scatter scatter_add scatter_reduce searchsorted segment_reduce select_backward
select_scatter slice_backward slice_scatter smooth_l1_loss soft_margin_loss sort split_with_sizes_copy squeeze squeeze_copy
stack t_copy topk trace transpose transpose_copy tril tril_indices triu triu_indices unbind_copy unfold unfold_copy uniform
unique_consecutive unsqueeze unsqueeze_copy upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d
upsample_nearest2d upsample_nearest3d upsample_trilinear3d var_mean view_as_complex view_as_real view_copy zero zeros
zeros_like
"""
"""Names in aten of operators that pass over their arrays: normalisations, pooling, gathers, scatters, sorts, copies. Those that
torch tags as point-wise or reductions are not listed; the trailing underscore of an in-place form is left out."""

ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_attention_math_for_mps",
)

LINEAR_LOSSES = ("_linear_cross_entropy_batch_chunked", "_linear_cross_entropy_batch_chunked_no_reduction")
CONVOLUTIONS = ("convolution", "_convolution", "convolution_overrideable")
EMBEDDINGS = ("embedding", "_embedding_bag", "_embedding_bag_forward_only")

SCAN_FLOP = 9
"""Of a selective scan per state of a token: dt a, b (dt x) and c h, and twice the three of (p, q) o (r, s) = (p r, p s + q),
since a parallel scan combines 2 length pairs.

The backward does three times as many: the scan anew (9), one from the end (6) of c dy (1), and six products that are summed, of
h, of its gradient g or of g h exp(dt a), for x, dt, a, b and c (12).

Source: A. Gu in state-spaces/mamba issue 110 (9 L N per feature); csrc/selective_scan/selective_scan_fwd_kernel.cuh there.
"""

TABLE: dict[str, OperatorRow] = {
    **{f"aten.{name}": OperatorRow() for name in PASSES.split()},
    **{f"aten.{name}": OperatorRow(reads_part=True) for name in ("index", "_unsafe_index", "index_select", "gather", "take")},
    **{f"aten.{name}": _by_shape(_mm) for name in ("mm", "addmm", "_scaled_mm", "_int_mm")},
    **{f"aten.{name}": _by_shape(_bmm) for name in ("bmm", "baddbmm", "addbmm")},
    **{f"aten.{name}": _by_shape(_grouped) for name in ("_grouped_mm", "_scaled_grouped_mm")},
    "transformers.grouped_mm_fallback": _by_shape(_grouped),
    "parsim.selective_scan": OperatorRow(
        flop=lambda call: SCAN_FLOP * call.first(0).numel() * call.first(2).shape[1], backward_flop=3.0
    ),
    **{f"aten.{name}": _by_shape(_matrix_vector) for name in ("mv", "addmv")},
    **{f"aten.{name}": _by_shape(lambda call: (("m", 1), ("n", 1), ("k", call.first(0).numel()))) for name in ("dot", "vdot")},
    **{f"aten.{name}": _by_shape(_distances) for name in ("_cdist_forward", "_euclidean_dist", "_pdist_forward")},
    "aten.linear": _by_shape(_linear),
    **{f"torch_nn.{name}": _by_shape(_linear) for name in LINEAR_LOSSES},
    "aten.addr": _by_shape(lambda call: (("m", call.first(1).numel()), ("n", call.first(2).numel()), ("k", 1))),
    "aten._trilinear": OperatorRow(pieces=_trilinear),
    **{f"aten.{name}": OperatorRow(pieces=_convolution) for name in CONVOLUTIONS},
    **{f"aten.{name}": OperatorRow(pieces=_attention) for name in ATTENTION},
    **{f"aten.{name}": OperatorRow(pieces=_embedding) for name in EMBEDDINGS},
    "aten.mkldnn_rnn_layer": OperatorRow(pieces=lambda call: _recurrence(call, *(call.first(place) for place in range(3)))),
    **{f"aten.{name}": OperatorRow(pieces=_rnn) for name in ("_cudnn_rnn", "miopen_rnn")},
    **{f"aten.{name}": OperatorRow(flop=_fft, backward_flop=1.0) for name in ("_fft_c2c", "_fft_r2c", "_fft_c2r")},
    "aten.grid_sampler_2d": _neighbours(4),
    "aten.grid_sampler_3d": _neighbours(8),
    **_decompositions(),
}
"""By the name of the operator as torch prints its packet. Add rows for operators of your own."""


def row_of(name: str) -> OperatorRow | None:
    """The row of an operator; the in-place form shares that of its base. None: the table lacks it."""
    row = TABLE.get(name)
    return TABLE.get(name.removesuffix("_")) if row is None else row


def backward_flop_of(function: str) -> float:
    """How many times its forward arithmetic the backward of a memory-bound operator does; `function` as in `Operator`."""
    name = function.removeprefix(UNLISTED)
    row = row_of(name if "." in name else f"aten.{name}")
    return 2.0 if row is None else row.backward_flop
