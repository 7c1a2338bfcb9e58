"""A recording that follows only what a change of basis could pass, to propose groups of invertible matrices.

In a recording for rescalings every channel keeps its place. Here channels may be mixed with each other, so an operation that
cuts, compares or chooses element by element stops everything that reaches it. Normalizations let their input
through, because a rotation passes them. What is proposed this way is checked on derivatives afterwards (`noether.py`):
rules may propose too much, but must not miss a cut, since within one region of a piecewise function a wrong change of
basis can look right.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from spiritlevel.symmetry import scales as sc
from spiritlevel.symmetry.rules_elementwise import COMPARES
from spiritlevel.symmetry.scales import Scale
from spiritlevel.symmetry.trace import FIX_ALL, Call, Recorder, Result, tensors_in

STEPS = {*COMPARES, "sign", "sgn", "clamp", "clamp_min", "clamp_max", "hardtanh", "threshold", "relu6", "hardsigmoid",
         "floor", "ceil", "round", "trunc", "heaviside", "argmax", "argmin", "bucketize", "searchsorted"}  # fmt: skip
"""Operations whose results can be constant over a region: a mask made by them looks like a number there."""
BATCH_NORMS = ("native_batch_norm", "_native_batch_norm_legit_no_training", "_native_batch_norm_legit",
               "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_no_update", "_batch_norm_with_update")  # fmt: skip
CUTS = STEPS | {
    *("relu", "leaky_relu", "abs", "prelu", "_prelu_kernel", "maximum", "minimum", "amax", "amin", "max", "min", "median"),
    *("rrelu_with_noise", "rrelu_with_noise_functional", "sort", "topk", "cummax"),
    *(f"{kind}{n}d{end}" for n in (1, 2, 3) for kind in ("max_pool", "adaptive_max_pool", "fractional_max_pool")
      for end in ("", "_with_indices")),
    *(f"mkldnn_max_pool{n}d" for n in (1, 2, 3)),
    *BATCH_NORMS,
}  # fmt: skip
BY_ELEMENT = {"mul", "div", "where", "masked_fill", "index_put", "add", "sub", "rsub"}
SQUARES = {"pow", "square", "linalg_vector_norm"}


WEIGHT_AND_BIAS = {"addmm": ("mat2", "self"), "linear": ("weight", "bias"), "convolution": ("weight", "bias"),
                   "_convolution": ("weight", "bias")}  # fmt: skip


@dataclass(frozen=True)
class Normalized:
    """A batch normalization with running statistics: the names of γ, β and ν, and ε."""

    gain: str
    shift: str
    variance: str
    epsilon: float


class LinearRecorder(Recorder):  # type: ignore[no-untyped-call]
    """Proposes which channels share a basis.

    gains: names of parameters that multiply element by element. Their variables come first, so that the scale of what they
    multiply is written as that of the channel and that of the gain, and not the other way round.
    biases: for each weight the bias added to its product. normalized: biases directly in front of a batch normalization.
    """

    def __init__(self, model: nn.Module, gains: Collection[str]) -> None:
        super().__init__(model)
        self._steps: set[int] = set()
        self._shifted: dict[int, str] = {}
        self.biases: dict[str, str] = {}
        self.normalized: list[tuple[str, Normalized]] = []
        for leaf in self.leaves.values():
            if leaf.name in gains:
                leaf.role = "factor"
                self.elementwise(leaf)

    def _by_rule(self, call: Call) -> Result:
        name = call.name.removesuffix("_")
        self._note_biases(call, name)
        if self._meets_a_step(call, name) or name in CUTS:
            return FIX_ALL
        if name in SQUARES or (name == "mul" and call.args[0] is call.args[1]):
            return _unseen(call)
        if name in ("native_layer_norm", "_fused_rms_norm"):
            return self._normalized(call)
        return super()._by_rule(call)

    def _note_biases(self, call: Call, name: str) -> None:
        if name in WEIGHT_AND_BIAS:
            weight, bias = (call[argument] for argument in WEIGHT_AND_BIAS[name])
            owner, added = self._shape_leaf(weight), self._leaf(bias)
            if added is not None:
                self._shifted[id(call.out)] = added
            if owner is not None:
                known = self.biases.get(owner, added)
                self.biases[owner] = added if added == known and added is not None else ""
        elif name in BATCH_NORMS and id(call.args[0]) in self._shifted:
            names = [self._leaf(call.args[1]), self._leaf(call.args[2]), self._buffer(call.args[4])]
            if all(names) and "eps" in {spec.name for spec in call.func._schema.arguments}:
                gain, shift, variance = (str(each) for each in names)
                found = Normalized(gain, shift, variance, float(call["eps"]))
                self.normalized.append((self._shifted[id(call.args[0])], found))

    def _leaf(self, tensor: Any) -> str | None:
        leaf = self.leaves.get(id(tensor))
        return None if leaf is None else leaf.name

    def _shape_leaf(self, tensor: Any) -> str | None:
        """The parameter that a matrix is, or is a transposed view of."""
        leaf = self.scale_of(tensor).leaf if self.is_followed(tensor) and id(tensor) not in self.leaves else None
        whole = leaf is not None and leaf.value.numel() == tensor.numel()
        return leaf.name if leaf is not None and whole else self._leaf(tensor)

    def _buffer(self, tensor: Any) -> str | None:
        leaf = self.statistics.get(id(tensor))
        return None if leaf is None else leaf.name

    def _meets_a_step(self, call: Call, name: str) -> bool:
        """Whether channels meet a mask that was made from activations; results made of such masks are remembered."""
        inputs = [t for t in tensors_in((call.args, call.kwargs)) if self.is_followed(t)]
        masks = [t for t in inputs if id(t) in self._steps]
        if name in STEPS or (masks and len(masks) == len(inputs)):
            self._steps.update(id(t) for t in tensors_in(call.out))
        return bool(masks) and len(masks) < len(inputs) and name in BY_ELEMENT

    def _normalized(self, call: Call) -> Result:
        """The channels of the input, times the gain, with the shift in the same basis."""
        if len(call["normalized_shape"]) != 1:
            return FIX_ALL
        out: Scale = self.scale_of(call["input"])
        shape = call["input"].shape
        if isinstance(call["weight"], Tensor):
            out = sc.product(self.variables, [out, self.scale_of(call["weight"])], shape)
        if call.name == "native_layer_norm" and isinstance(call["bias"], Tensor):
            out = sc.equalized(self.variables, [out, self.scale_of(call["bias"])], shape)
        first = Scale(out.terms, True)
        return (first, *(sc.fixed(t.shape) for t in call.out[1:])) if isinstance(call.out, tuple) else first


def _unseen(call: Call) -> Result:
    """Squares end in a norm, which no rotation changes."""
    if not isinstance(call.out, Tensor):
        return FIX_ALL
    return sc.fixed(call.out.shape)
