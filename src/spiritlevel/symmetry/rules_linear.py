"""Scales through linear maps and normalizations: the rules where a parameter starts and absorbs scales."""

from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from spiritlevel.network.spellings import are_of_rows
from spiritlevel.symmetry import scales as sc
from spiritlevel.symmetry.rules_elementwise import move
from spiritlevel.symmetry.scales import ONE, Leaf, Scale, Term
from spiritlevel.symmetry.trace import FIX_ALL, Call, Recorder, Result, rule
from spiritlevel.symmetry.variables import ANY, FIXED, broadcast, compact, squeezed


def contract(recorder: Recorder, a: Scale, b: Scale, shape: torch.Size, label: str = "") -> Scale:
    """The scale of out[m, n] = Σ_k a[m, k] b[k, n], with any equal leading dimensions.

    All summands need one scale: a = α[m] + κ[k], b = κ'[k] + β[n] with κ + κ' = t for every k. Then out = α + β + t.
    A parameter met for the first time carries −v_in[k], which becomes κ, so that t = 0.
    """
    variables = recorder.variables
    for scale in (a, b):
        if scale.leaf is not None:
            scale.leaf.role = "map"
    outer_a, inner_a = _split(recorder, a, outer=-2, inner=-1)
    outer_b, inner_b = _split(recorder, b, outer=-1, inner=-2)
    zeros = [sc.meets_zeros(one.leaf, [other]) for one, other in ((a, b), (b, a)) if one.leaf is not None]
    if any(zeros):
        inner_a, inner_b = [], []  # a sum of zeros says nothing about what is summed over
    if a.leaf is not None and b.leaf is not None:
        _close_gauges(recorder, (a.leaf, outer_a), (b.leaf, outer_b))
    inner = [(c, ids.squeeze(-2)) for c, ids in inner_a] + [(c, ids.squeeze(-1)) for c, ids in inner_b]
    total = _inner_total(recorder, inner, [s.leaf for s in (a, b) if s.leaf is not None]) if inner else []
    terms = [*outer_a, *outer_b, *((c, ids.unsqueeze(-1)) for c, ids in total)]
    from_input = a.from_input or b.from_input
    if not terms:
        return sc.fixed(shape, from_input)
    whole = Scale(tuple((c, ids.expand(shape)) for c, ids in terms), from_input)
    if not from_input:
        return whole  # a product of parameters stays separable, for its use as the matrix of a linear map
    return sc.of(compact(sc.merged(variables, whole, label)), from_input)


def _split(recorder: Recorder, scale: Scale, outer: int, inner: int) -> tuple[list[Term], list[Term]]:
    """The terms that vary along the outer dimension, and those that vary along the inner one.

    A term that varies along both is tied along the outer one. Structural zeros count as fixed here. Where only one
    summand exists, a parameter's v_in and an activation count as inner, so that one can absorb the other.
    """
    outers, inners = [], []
    for c, ids in scale.terms:
        short = squeezed(ids)
        if bool(((short == FIXED) | (short == ANY)).all()):
            continue
        known = compact(torch.where(short == ANY, FIXED, short).expand(ids.shape))
        constant_outside = ids.shape[outer] == 1 or known.stride(outer) == 0
        if ids.shape[inner] == 1:
            is_outer = not constant_outside or (scale.leaf is not None and c > 0)
        else:
            is_outer = known.stride(inner) == 0
        if is_outer:
            outers.append((c, known.narrow(inner, 0, 1)))
        else:
            inners.append((c, sc.tied_along(recorder.variables, known, [outer])))
    return outers, inners


def _close_gauges(recorder: Recorder, *operands: tuple[Leaf, list[Term]]) -> None:
    """In a product of two parameters, what they share is scaled by one and undone by the other: the gauge lies outside."""
    for leaf, outer in operands:
        if leaf.gauge_open and outer:
            recorder.variables.fix(outer[0][1].flatten()[:1])
            leaf.gauge_open = False


def _inner_total(recorder: Recorder, inner: list[Term], leaves: list[Leaf]) -> list[Term]:
    """The common value t of Σ c·ids along the last dimension, as terms of length one there."""
    variables, coefficients = recorder.variables, [c for c, _ in inner]
    if len(leaves) == 1 and leaves[0].gauge_open and sorted(coefficients) in ([-1], [-1, 1]):
        ids = dict(inner)
        variables.tie(ids[Fraction(-1)], ids.get(ONE, torch.tensor(FIXED)))
        leaves[0].gauge_open = False
        return []
    if coefficients == [1]:
        return [(ONE, sc.tied_along(variables, inner[0][1], [-1]))]
    shape = broadcast(*(ids for _, ids in inner))[0].shape
    t = variables.fresh(shape[:-1].numel(), "").view([*shape[:-1], 1])
    variables.relate([*coefficients, -1], [*(ids for _, ids in inner), t])
    return [(ONE, t)]


def _with_bias(recorder: Recorder, out: Scale, bias: Any, shape: torch.Size) -> Scale:
    if not isinstance(bias, Tensor):
        return out
    return sc.equalized(recorder.variables, [out, recorder.scale_of(bias)], shape)


def _operands(recorder: Recorder, left: Tensor, right: Tensor) -> tuple[Scale, Scale]:
    """The scales of the operands of a matrix product; a parameter among them is a matrix with known sides."""
    return recorder.matrix(left, left.dim() - 2, left.dim() - 1), recorder.matrix(
        right, right.dim() - 1, right.dim() - 2
    )


@rule("mm", "bmm")
def multiply_matrices(recorder: Recorder, call: Call) -> Result:
    """A product of matrices."""
    left, right = _operands(recorder, call["self"], call["mat2"])
    return contract(recorder, left, right, call.out.shape)


@rule("addmm", "baddbmm")
def multiply_and_add(recorder: Recorder, call: Call) -> Result:
    """A product of matrices plus a bias."""
    names = ("mat1", "mat2") if call.name.startswith("addmm") else ("batch1", "batch2")
    left, right = _operands(recorder, call[names[0]], call[names[1]])
    out = contract(recorder, left, right, call.out.shape)
    return out if call["beta"] == 0 else _with_bias(recorder, out, call["self"], call.out.shape)


@rule("mv", "addmv", "dot")
def multiply_vector(recorder: Recorder, call: Call) -> Result:
    """A product with a vector."""
    names = {"mv": ("self", "vec"), "addmv": ("mat", "vec"), "dot": ("self", "tensor")}[call.name]
    left, right = call[names[0]], call[names[1]]
    a = recorder.matrix(left, 0, 1) if left.dim() == 2 else _mapped(recorder.scale_of(left), lambda i: i[None])
    b = _mapped(recorder.scale_of(right), lambda ids: ids[:, None])
    out = contract(recorder, a, b, torch.Size([a.shape[0], 1]))
    out = _mapped(out, lambda ids: ids.reshape(call.out.shape))
    return _with_bias(recorder, out, call["self"], call.out.shape) if call.name == "addmv" else out


@rule("linear")
def linear(recorder: Recorder, call: Call) -> Result:
    """A linear layer that reached the dispatcher in one piece."""
    x, weight = recorder.scale_of(call["input"]), recorder.matrix(call["weight"], 0, 1)
    rows = _mapped(x, lambda ids: ids.reshape(-1, ids.shape[-1]))
    out = contract(recorder, rows, _mapped(weight, lambda ids: ids.t()), torch.Size([rows.shape[0], weight.shape[0]]))
    return _with_bias(recorder, _mapped(out, lambda i: i.reshape(call.out.shape)), call["bias"], call.out.shape)


def _mapped(scale: Scale, change: Any) -> Scale:
    """The scale of a rearranged tensor."""
    return Scale(tuple((c, change(ids)) for c, ids in scale.terms), scale.from_input, scale.leaf)


@rule("convolution", "_convolution")
def convolution(recorder: Recorder, call: Call) -> Result:
    """A convolution: a matrix product over channels in each group, with one scale for all positions of a channel."""
    groups, transposed, x = call["groups"], call["transposed"], call["input"]
    batched = x.dim() == call["weight"].dim()
    channel = 1 if batched else 0
    scale = sc.reduced(recorder.variables, recorder.scale_of(x), [d for d in range(x.dim()) if d != channel])
    a = _mapped(scale, lambda ids: ids.reshape(groups, 1, -1))
    b = _kernel(recorder, call["weight"], groups, transposed)
    out = contract(recorder, a, b, torch.Size([groups, 1, b.shape[-1]]))
    column = [1 if d != channel else -1 for d in range(x.dim())]
    out = sc.expanded(_mapped(out, lambda ids: ids.reshape(column)), call.out.shape)
    if not isinstance(call["bias"], Tensor):
        return out
    bias = _mapped(recorder.scale_of(call["bias"]), lambda ids: ids.reshape(column))
    return sc.equalized(recorder.variables, [out, bias], call.out.shape)


def _kernel(recorder: Recorder, weight: Tensor, groups: int, transposed: bool) -> Scale:
    """The scale of a kernel as matrices [group, in, out], one scale for all positions of a channel pair."""
    raw = recorder.matrix(weight, *((1, 0) if transposed else (0, 1)), groups=groups)
    flat = sc.reduced(recorder.variables, raw, range(2, weight.dim()))

    def grouped(ids: Tensor) -> Tensor:
        pairs = ids.reshape(groups, weight.shape[0] // groups, weight.shape[1])
        return pairs if transposed else pairs.transpose(1, 2)

    return Scale(tuple((c, grouped(ids)) for c, ids in flat.terms), raw.from_input, raw.leaf)


@rule("native_batch_norm", "_native_batch_norm_legit_no_training", "_native_batch_norm_legit", "cudnn_batch_norm",
      "miopen_batch_norm", "_batch_norm_no_update", "_batch_norm_with_update")  # fmt: skip
def batch_norm(recorder: Recorder, call: Call) -> Result:
    """Batch normalization with running statistics: γ (x − μ)/√(ν + ε) + β.

    A scale a of the input multiplies μ; γ is multiplied by out/a, β by out. ν stays, so that ε does no harm.
    With the statistics of the batch the input is fixed, because of ε.
    """
    x, names = call.args[0], {spec.name for spec in call.func._schema.arguments}
    mean, training = (call["running_mean"] if "running_mean" in names else None), bool(_training(call, names))
    statistic = recorder.statistic(mean) if isinstance(mean, Tensor) and not training else None
    scale = sc.reduced(recorder.variables, recorder.scale_of(x), [d for d in range(x.dim()) if d != 1])
    channels = sc.of(sc.merged(recorder.variables, scale).reshape(-1))
    if statistic is None or statistic.ids is None:
        recorder.fix(x)
        channels = sc.fixed(channels.shape)
        recorder.barriers[call.name] += 1
    else:
        recorder.variables.tie(statistic.ids, _ids(channels))
    return _affine(recorder, call, channels, call["weight"], call["bias"], 1)


def _training(call: Call, names: set[str]) -> bool:
    if "training" in names:
        return bool(call["training"])
    return call.name == "_batch_norm_with_update"


def _ids(scale: Scale) -> Tensor:
    assert scale.ids is not None
    return scale.ids


def _affine(recorder: Recorder, call: Call, channels: Scale, weight: Any, bias: Any, dim: int) -> Result:
    """The scale after a normalization's own factor γ and shift β per channel, for all outputs of the operation."""
    outputs = call.out if isinstance(call.out, tuple | list) else (call.out,)
    out = channels
    if isinstance(weight, Tensor):
        out = _scaled_by(recorder, weight, channels)
    if isinstance(bias, Tensor):
        out = sc.equalized(recorder.variables, [out, recorder.scale_of(bias)], out.shape)
    column = [1] * dim + list(out.shape) + [1] * (outputs[0].dim() - dim - len(out.shape))
    first = sc.expanded(_mapped(out, lambda ids: ids.reshape(column)), outputs[0].shape)
    return (first, *(sc.fixed(t.shape) for t in outputs[1:]))


def _scaled_by(recorder: Recorder, weight: Tensor, channels: Scale) -> Scale:
    """The scale of γ · x; a γ met for the first time becomes out − in with a new variable per channel for out."""
    leaf = recorder.leaves.get(id(weight))
    if leaf is None or leaf.terms is not None:
        return sc.product(recorder.variables, [recorder.scale_of(weight), channels], channels.shape)
    out = recorder.variables.fresh(weight.numel(), leaf.name).view(weight.shape)
    leaf.terms, leaf.role = ((ONE, out), (Fraction(-1), _ids(channels))), "factor"
    return sc.of(out)


@rule("native_layer_norm", "_fused_rms_norm")
def layer_norm(recorder: Recorder, call: Call) -> Result:
    """Layer normalization fixes its input; its factor and shift start a new scale per feature."""
    recorder.fix(call["input"])
    recorder.barriers[call.name] += 1
    shape = torch.Size(call["normalized_shape"])
    bias = call["bias"] if call.name == "native_layer_norm" else None
    return _affine(recorder, call, sc.fixed(shape), call["weight"], bias, call["input"].dim() - len(shape))


@rule("native_group_norm")
def group_norm(recorder: Recorder, call: Call) -> Result:
    """Group normalization fixes its input; its factor and shift start a new scale per channel."""
    recorder.fix(call["input"])
    recorder.barriers[call.name] += 1
    return _affine(recorder, call, sc.fixed([call["C"]]), call["weight"], call["bias"], 1)


@rule("embedding")
def embedding(recorder: Recorder, call: Call) -> Result:
    """An embedding: a linear map of one-hot vectors, one scale per column."""
    return _lookup(recorder, call["weight"], call.out)


@rule("index", rearranges=True)
def index(recorder: Recorder, call: Call) -> Result:
    """`W[tokens]` is an embedding; otherwise elements change places."""
    first, *rest = call["indices"]
    table = call["self"].dim() == 2 and id(call["self"]) in recorder.leaves
    if table and are_of_rows(first) and all(each is None for each in rest):
        return _lookup(recorder, call["self"], call.out)
    return move(recorder, call)


def _lookup(recorder: Recorder, weight: Tensor, out: Tensor) -> Scale:
    leaf = recorder.leaves.get(id(weight))
    if leaf is not None and leaf.terms is None:
        columns = recorder.variables.fresh(leaf.value.shape[1], leaf.name)
        leaf.terms, leaf.role = ((ONE, columns.expand(leaf.value.shape)),), "map"
    tied = sc.reduced(recorder.variables, recorder.scale_of(weight), [0])
    ids = sc.merged(recorder.variables, tied)
    return sc.of(ids.expand([*out.shape[:-1], -1]) if out.dim() > 1 else ids.reshape(-1))


@rule("_prelu_kernel", "prelu")
def prelu(recorder: Recorder, call: Call) -> Result:
    """Parametric ReLU passes the scale on; its slope is fixed."""
    recorder.fix(call["weight"])
    scale = recorder.scale_of(call["self"])
    return Scale(scale.terms, scale.from_input)


@rule("_weight_norm_interface")
def weight_norm(recorder: Recorder, call: Call) -> Result:
    """w = g · v/‖v‖ has the scale of g; v may be multiplied by any number for each g."""
    v, g, dim = call["v"], recorder.scale_of(call["g"]), call["dim"]
    leaf = recorder.leaves.get(id(v))
    if leaf is None or leaf.terms is not None:
        return FIX_ALL
    each = recorder.variables.fresh(v.shape[dim], leaf.name)
    leaf.terms = ((ONE, each.view([-1 if d == dim else 1 for d in range(v.dim())]).expand(v.shape)),)
    return (sc.expanded(g, v.shape), *(sc.fixed(t.shape) for t in call.out[1:]))
