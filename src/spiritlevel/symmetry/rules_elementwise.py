"""Scales through operations that move, combine or reduce elements: the rules that know no parameter."""

import math
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from spiritlevel.symmetry import scales as sc
from spiritlevel.symmetry.scales import Scale
from spiritlevel.symmetry.trace import FIX_ALL, Call, Recorder, Result, rule
from spiritlevel.symmetry.variables import FIXED, compact

MOVES = (
    *("t", "transpose", "permute", "slice", "select", "split", "split_with_sizes", "unsafe_split", "unbind", "chunk"),
    *("unsafe_split_with_sizes", "expand", "squeeze", "unsqueeze", "narrow", "flip", "roll", "repeat", "diagonal"),
    *("detach", "alias", "lift_fresh", "lift_fresh_copy", "unfold", "tril", "triu", "index_select", "gather"),
    *("select_copy", "slice_copy", "movedim", "swapaxes", "repeat_interleave", "view_copy", "rot90"),
)
MOVES_AS_FLOATS = (
    *("reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d", "replication_pad2d"),
    *("replication_pad3d", "im2col", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle"),
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
)
"""Moves that torch offers for floating-point tensors only."""
KEEPS = ("relu", "leaky_relu", "abs", "neg", "clone", "contiguous", "positive", "dropout", "real")
"""f(αx) = α f(x) for α > 0, element by element."""
COMPARES = ("gt", "lt", "ge", "le", "eq", "ne")
CREATES = (
    *("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"),
    *("new_empty_strided", "empty_strided", "empty", "zeros", "ones", "full", "arange", "scalar_tensor"),
)
"""Constants, whatever tensor lends them its shape."""


def _view_of(recorder: Recorder, tensor: Tensor) -> Scale:
    """The scale of a tensor about to be rearranged: a matrix keeps its rows and columns apart."""
    return recorder.matrix(tensor, 0, 1) if tensor.dim() > 1 and tensor.shape[0] > 1 else recorder.scale_of(tensor)


def _per_output(out: Any, scale: Scale, terms: list[Any]) -> Result:
    """Scales of one output, or of each output of an operation that returns several."""
    coefficients = [c for c, _ in scale.terms]

    def rebuilt(ids: list[Tensor]) -> Scale:
        return Scale(tuple(zip(coefficients, map(compact, ids), strict=True)), scale.from_input, scale.leaf)

    if isinstance(out, Tensor):
        return rebuilt(terms)
    return tuple(rebuilt([ids[k] for ids in terms]) for k in range(len(out)))


@rule(*MOVES, *MOVES_AS_FLOATS, rearranges=True)
def move(recorder: Recorder, call: Call) -> Result:
    """Elements change places: the same operation on the variables themselves."""
    others = [t for t in torch.utils._pytree.tree_leaves((call.args[1:], call.kwargs)) if isinstance(t, Tensor)]
    if any(recorder.is_followed(t) for t in others):
        return FIX_ALL
    scale = _view_of(recorder, call.args[0])
    as_floats = call.name in MOVES_AS_FLOATS

    def moved(ids: Tensor) -> Any:
        result = call.func(ids.double() if as_floats else ids, *call.args[1:], **call.kwargs)
        return result.long() if as_floats else result

    return _per_output(call.out, scale, [moved(ids) for _, ids in scale.terms])


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "unflatten", "flatten", rearranges=True)
def reshape(recorder: Recorder, call: Call) -> Result:
    """Reshaping; an unchanged first dimension along which the scale is constant is kept aside to save work."""
    if not isinstance(call.out, Tensor) or call.out.dtype != call.args[0].dtype:
        return FIX_ALL
    scale = _view_of(recorder, call.args[0])
    old, new = call.args[0].shape, call.out.shape

    def reshaped(ids: Tensor) -> Tensor:
        if old and new and old[0] == new[0] > 1 and ids.stride(0) == 0:
            return ids[:1].reshape([1, *new[1:]]).expand(new)
        return ids.reshape(new)

    return _per_output(call.out, scale, [reshaped(ids) for _, ids in scale.terms])


@rule("cat", "stack", "concat")
def concatenate(recorder: Recorder, call: Call) -> Result:
    """Concatenation joins the scales of its inputs."""
    parts = [_view_of(recorder, tensor) for tensor in call["tensors"] if tensor.numel()]
    from_input = any(part.from_input for part in parts)
    coefficients = [tuple(c for c, _ in part.terms) for part in parts]
    if len(set(coefficients)) > 1:
        parts = [sc.of(sc.merged(recorder.variables, part)) for part in parts]
    columns = zip(*(part.terms for part in parts), strict=True)
    terms = [(column[0][0], compact(call.func([ids for _, ids in column], call["dim"]))) for column in columns]
    return Scale(tuple(terms), from_input)


@rule("constant_pad_nd")
def pad(recorder: Recorder, call: Call) -> Result:
    """Zeros (and infinities) agree with any scale; padding with another number fixes those places only."""
    scale = recorder.scale_of(call["self"])
    value = 0 if call["value"] == 0 or math.isinf(call["value"]) else FIXED
    return _per_output(call.out, scale, [call.func(ids, call["pad"], value) for _, ids in scale.terms])


@rule(*KEEPS)
def keep(recorder: Recorder, call: Call) -> Result:
    """A positively homogeneous function of each element."""
    copies = call.name in ("clone", "_to_copy")
    scale = _view_of(recorder, call["self"]) if copies else recorder.scale_of(call["self"])
    return Scale(scale.terms, scale.from_input, scale.leaf if copies else None)


@rule("_to_copy")
def convert(recorder: Recorder, call: Call) -> Result:
    """A change of precision keeps the scale, a change to integers does not."""
    if call["self"].is_floating_point() and not call.out.is_floating_point():
        return FIX_ALL
    return keep(recorder, call)


@rule("native_dropout", "rrelu_with_noise", "rrelu_with_noise_functional")
def keep_outside_training(recorder: Recorder, call: Call) -> Result:
    """Dropout and randomized ReLU, which are homogeneous when they are not random."""
    training = call["train"] if call.name == "native_dropout" else call["training"]
    if training:
        return FIX_ALL
    first = Scale(recorder.scale_of(call.args[0]).terms, recorder.depends_on_input(call.args[0]))
    return (first, *(sc.fixed(t.shape) for t in call.out[1:])) if isinstance(call.out, tuple) else first


@rule("threshold", "clamp", "clamp_min", "clamp_max", "hardtanh")
def cut(recorder: Recorder, call: Call) -> Result:
    """A cut at zero is homogeneous, any other is not."""
    names = {"threshold": ("threshold", "value"), "clamp": ("min", "max"), "clamp_min": ("min",),
             "clamp_max": ("max",), "hardtanh": ("min_val", "max_val")}[call.name.removesuffix("_")]  # fmt: skip
    bounds = [call[name] for name in names]
    if any(bound is not None and (isinstance(bound, Tensor) or not _unscaled(bound)) for bound in bounds):
        return FIX_ALL
    return keep(recorder, call)


def _unscaled(number: float) -> bool:
    return number == 0 or math.isinf(number)


@rule("add", "sub", "rsub", "maximum", "minimum")
def add(recorder: Recorder, call: Call) -> Result:
    """A sum needs one scale for both summands."""
    return _equalized(recorder, call, "self", "other")


def _factors_of(recorder: Recorder, *tensors: Tensor) -> list[Scale]:
    """The scales of operands; in arithmetic between parameters alone a matrix keeps its rows and columns apart."""
    among_parameters = not any(recorder.depends_on_input(tensor) for tensor in tensors)
    return [_view_of(recorder, t) if among_parameters else recorder.scale_of(t) for t in tensors]


def _adopted(recorder: Recorder, operands: list[Tensor]) -> Scale | None:
    """The scale of a sum of parameters where one was not met before: it takes the scale of the other."""
    for new, other in (operands, operands[::-1]):
        leaf = recorder.leaves.get(id(new))
        unmet = leaf is not None and leaf.terms is None and not recorder.depends_on_input(other)
        if leaf is not None and unmet and other.shape == new.shape and recorder.is_followed(other):
            scale = _view_of(recorder, other)
            leaf.terms, leaf.role = scale.terms, "map" if new.dim() > 1 else leaf.role
            return Scale(scale.terms, False)
    return None


def _equalized(recorder: Recorder, call: Call, *names: str) -> Result:
    operands = [call[name] for name in names]
    if any(not isinstance(value, Tensor) and not _unscaled(value) for value in operands):
        return FIX_ALL
    tensors = [value for value in operands if isinstance(value, Tensor)]
    if len(tensors) == 2 and (adopted := _adopted(recorder, tensors)) is not None:
        return adopted
    parts = _factors_of(recorder, *tensors)
    return sc.equalized(recorder.variables, parts, call.out.shape)


@rule(*COMPARES)
def compare(recorder: Recorder, call: Call) -> Result:
    """The comparison of two tensors of one scale does not see the scale."""
    common = _equalized(recorder, call, "self", "other")
    return sc.fixed(call.out.shape, common.from_input) if isinstance(common, Scale) else common


@rule("sign", "sgn")
def sign(recorder: Recorder, call: Call) -> Result:
    """The sign does not see the scale."""
    return sc.fixed(call.out.shape, recorder.scale_of(call["self"]).from_input)


@rule("where")
def where(recorder: Recorder, call: Call) -> Result:
    """A choice between two tensors needs one scale for both."""
    return _equalized(recorder, call, "self", "other") if len(call.args) == 3 else FIX_ALL


@rule("masked_fill")
def masked_fill(recorder: Recorder, call: Call) -> Result:
    """Filling with zero or infinity keeps the scale."""
    return _equalized(recorder, call, "self", "value")


@rule("mul", "div")
def multiply(recorder: Recorder, call: Call) -> Result:
    """Log-scales of factors add, that of a divisor is subtracted; a number only multiplies."""
    if call.name.startswith("div") and "rounding_mode" in call.kwargs:
        return FIX_ALL
    operands = [value for value in (call["self"], call["other"]) if isinstance(value, Tensor)]
    factors = _factors_of(recorder, *operands)
    if call.name.startswith("div") and len(factors) == 2:
        factors[1] = sc.times(factors[1], -1)
    return sc.product(recorder.variables, factors, call.out.shape)


POWERS = {"sqrt": Fraction(1, 2), "rsqrt": Fraction(-1, 2), "reciprocal": Fraction(-1), "square": Fraction(2)}


@rule(*POWERS, "pow")
def power(recorder: Recorder, call: Call) -> Result:
    """A power multiplies the log-scale."""
    exponent = call["exponent"] if call.name.startswith("pow") else POWERS[call.name.removesuffix("_")]
    if isinstance(exponent, Tensor) or not isinstance(call["self"], Tensor) or exponent == 0:
        return FIX_ALL
    exact = Fraction(exponent).limit_denominator(64)
    if float(exact) != float(exponent):
        return FIX_ALL
    scale = sc.times(recorder.scale_of(call["self"]), exact)
    return sc.product(recorder.variables, [scale], call.out.shape)


@rule("sum", "mean", "amax", "amin", "max", "min", "linalg_vector_norm", "median")
def reduce(recorder: Recorder, call: Call) -> Result:
    """A sum, mean, maximum or norm needs one scale for all it reduces."""
    scale, names = _view_of(recorder, call.args[0]), {spec.name for spec in call.func._schema.arguments}
    if "other" in names:
        return _equalized(recorder, call, "self", "other")
    if call.name == "linalg_vector_norm" and call["ord"] == 0:
        return FIX_ALL
    dims = _dims(call["dim"] if "dim" in names else None, len(scale.shape))
    keepdim = "keepdim" in names and call["keepdim"]
    result = sc.reduced(recorder.variables, scale, dims)
    if not keepdim:
        kept = [slice(None) if d not in dims else 0 for d in range(len(scale.shape))]
        result = Scale(tuple((c, ids[tuple(kept)]) for c, ids in result.terms), scale.from_input)
    if isinstance(call.out, Tensor):
        return result
    return (result, *(sc.fixed(t.shape) for t in call.out[1:]))


@rule("var", "std")
def spread(recorder: Recorder, call: Call) -> Result:
    """A standard deviation is homogeneous, a variance of degree two."""
    result = reduce(recorder, call)
    assert isinstance(result, Scale)
    return result if call.name == "std" else sc.product(recorder.variables, [sc.times(result, 2)], call.out.shape)


def _dims(dim: Any, number: int) -> list[int]:
    if dim is None or dim == []:
        return list(range(number))
    return [d % number for d in ([dim] if isinstance(dim, int) else dim)] if number else []


@rule("cumsum", "sort", "topk", "cummax")
def scan(recorder: Recorder, call: Call) -> Result:
    """Operations that mix elements along one dimension need one scale along it."""
    scale = recorder.scale_of(call["self"])
    tied = sc.reduced(recorder.variables, scale, _dims(call["dim"], len(scale.shape)))
    if isinstance(call.out, Tensor):
        return sc.expanded(tied, call.out.shape)
    return (sc.expanded(tied, call.out[0].shape), *(sc.fixed(t.shape) for t in call.out[1:]))


def _pool(positions: int) -> Any:
    def pool(recorder: Recorder, call: Call) -> Result:
        """Pooling and interpolation mix positions, so all positions of a channel share a scale."""
        scale = recorder.scale_of(call.args[0])
        tied = sc.reduced(recorder.variables, scale, range(-positions, 0))
        if isinstance(call.out, Tensor):
            return sc.expanded(tied, call.out.shape)
        return (sc.expanded(tied, call.out[0].shape), *(sc.fixed(t.shape) for t in call.out[1:]))

    return pool


for _n in (1, 2, 3):
    rule(f"avg_pool{_n}d", f"max_pool{_n}d_with_indices", f"max_pool{_n}d", f"mkldnn_max_pool{_n}d",
         f"adaptive_avg_pool{_n}d", f"_adaptive_avg_pool{_n}d", f"adaptive_max_pool{_n}d",
         f"fractional_max_pool{_n}d")(_pool(_n))  # fmt: skip
rule("upsample_linear1d")(_pool(1))
rule("upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")(_pool(2))
rule("upsample_trilinear3d")(_pool(3))


@rule(*CREATES)
def create(_recorder: Recorder, _call: Call) -> Result:
    """A new constant."""
    return None


@rule("copy")
def copy(recorder: Recorder, call: Call) -> Result:
    """A copy has the scale of its source."""
    return sc.expanded(recorder.scale_of(call["src"]), call.out.shape)


@rule("fill", "zero")
def fill(_recorder: Recorder, call: Call) -> Result:
    """A constant written in place."""
    return sc.of_constant(call.out)


@rule("index_put")
def index_put(recorder: Recorder, call: Call) -> Result:
    """Elements written at constant places."""
    indices = [t for t in call["indices"] if t is not None]
    if call["accumulate"] or any(recorder.is_followed(t) for t in indices):
        return FIX_ALL
    target = sc.merged(recorder.variables, recorder.scale_of(call["self"])).clone()
    values = sc.merged(recorder.variables, recorder.scale_of(call["values"]))
    target = torch.index_put(target, call["indices"], values)
    from_input = any(recorder.depends_on_input(call[name]) for name in ("self", "values"))
    return sc.of(compact(target), from_input)
