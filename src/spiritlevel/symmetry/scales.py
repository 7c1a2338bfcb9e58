"""Scales of tensors: for each element of a tensor the variables that multiply it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

from spiritlevel.symmetry.variables import ANY, FIXED, Variables, broadcast, compact, squeezed

Term = tuple[Fraction, Tensor]
ONE = Fraction(1)
MOST_ELEMENTS = 1 << 20
"""A tensor whose elements would need more separate variables than this is fixed instead."""


@dataclass(eq=False)
class Leaf:
    """A parameter or buffer of the model, whose scale is found by the way it is used.

    A matrix or kernel starts as v_out[o] − v_in[i]. Adding one number to all of v_out and v_in changes nothing, so its
    first use as a linear map may choose that number (`gauge_open`).
    role: "map" (the matrix or kernel of a linear map), "factor" (multiplies element by element) or "shift" (is added).
    met, met_zeros_only: Whether it was multiplied with anything so far, and with zeros only, as the first state of a recurrent
        network.
    """

    name: str
    value: Tensor
    terms: tuple[Term, ...] | None = None
    gauge_open: bool = False
    role: str = "shift"
    met_zeros_only: bool = False
    met: bool = False


@dataclass(frozen=True, eq=False)
class Scale:
    """The log-scale of each element of a tensor: Σ over terms (c, ids) of c · v[ids].

    from_input: whether the tensor depends on the model's input, not only on parameters and constants.
    leaf: the parameter this tensor is a view of.
    """

    terms: tuple[Term, ...]
    from_input: bool = True
    leaf: Leaf | None = field(default=None, repr=False)

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor."""
        return self.terms[0][1].shape

    @property
    def ids(self) -> Tensor | None:
        """The variables themselves, where the scale is one variable per element."""
        return self.terms[0][1] if len(self.terms) == 1 and self.terms[0][0] == 1 else None


def of(ids: Tensor, from_input: bool = True) -> Scale:
    """The scale with one variable per element."""
    return Scale(((ONE, ids),), from_input)


def fixed(shape: Iterable[int], from_input: bool = True) -> Scale:
    """The scale of a tensor that no factor changes."""
    return of(torch.tensor(FIXED).expand(tuple(shape)), from_input)


def of_constant(value: Tensor) -> Scale:
    """The scale of a constant: one of zeros and infinities agrees with any scale. Beside other numbers they may be there by chance,
    as the first row of a table of sines, and all are fixed."""
    unscaled = value == 0
    if value.is_floating_point():
        unscaled = unscaled | value.isinf()
    return of(torch.tensor(ANY if bool(unscaled.all()) else FIXED).expand(value.shape), from_input=False)


def times(scale: Scale, exponent: Fraction | int) -> Scale:
    """The scale of the tensor raised to a power."""
    return Scale(tuple((c * exponent, ids) for c, ids in scale.terms), scale.from_input, scale.leaf)


def merged(variables: Variables, scale: Scale, label: str = "") -> Tensor:
    """One variable per element that equals the scale, made where the scale is a sum of several."""
    if scale.ids is not None:
        return scale.ids
    columns = broadcast(*(squeezed(ids) for _, ids in scale.terms))
    if columns[0].numel() > MOST_ELEMENTS:
        for ids in columns:
            variables.fix(ids)
        return torch.tensor(FIXED).expand(scale.shape)
    rows, inverse = torch.unique(torch.stack([c.flatten() for c in columns], dim=1), dim=0, return_inverse=True)
    result = _merged_rows(variables, [c for c, _ in scale.terms], rows, label)
    return result[inverse].view(columns[0].shape).expand(scale.shape)


def _merged_rows(variables: Variables, coefficients: list[Fraction], rows: Tensor, label: str) -> Tensor:
    """For each row of ids the variable Σ_k c_k · row[k]: ANY, FIXED, one of them, or a new one."""
    c = torch.tensor([float(value) for value in coefficients])
    moving = rows != FIXED
    single = (moving.sum(1) == 1) & (moving & (c == 1)).any(1)
    result = torch.where(single, torch.where(moving, rows, 0).sum(1), FIXED)
    result[(rows == ANY).any(1)] = ANY
    new = moving.any(1) & ~single & (rows != ANY).all(1)
    if bool(new.any()):
        made = variables.fresh(int(new.sum()), label)
        variables.relate([-ONE, *coefficients], [made, *rows[new].unbind(1)])
        result[new] = made
    return result


def tied_along(variables: Variables, ids: Tensor, dims: Iterable[int]) -> Tensor:
    """Tie all variables along `dims`; returns one of each, with those dimensions of length one."""
    dims = sorted({d % ids.dim() for d in dims}) if ids.dim() else []
    short = squeezed(ids)
    long = [d for d in dims if short.shape[d] > 1]
    one = short.amax(dim=long, keepdim=True) if long and short.numel() else short
    if long:
        variables.tie(short, one)
    shape = [1 if d in dims else n for d, n in enumerate(ids.shape)]
    return one.expand(shape)


def reduced(variables: Variables, scale: Scale, dims: Iterable[int]) -> Scale:
    """The scale of a sum, mean or maximum over `dims`, kept with length one: elements summed share their scale."""
    dims = list(dims)
    return Scale(tuple((c, tied_along(variables, ids, dims)) for c, ids in scale.terms), scale.from_input)


def expanded(scale: Scale, shape: Iterable[int]) -> Scale:
    """The scale broadcast to a shape."""
    shape = tuple(shape)
    return Scale(tuple((c, ids.expand(shape)) for c, ids in scale.terms), scale.from_input)


def equalized(variables: Variables, scales: Iterable[Scale], shape: Iterable[int]) -> Scale:
    """The common scale of tensors that are added, compared or chosen between, element by element."""
    shape, scales = tuple(shape), list(scales)
    total = torch.tensor(ANY)
    for scale in scales:
        ids = squeezed(merged(variables, scale))
        variables.tie(total, ids)
        total = torch.where(total == ANY, ids, total)
    return of(compact(total.expand(shape)), any(scale.from_input for scale in scales))


def meets_zeros(leaf: Leaf, others: Iterable[Scale]) -> bool:
    """Whether a parameter is multiplied with nothing but zeros here; remembers whether it has been so far."""
    zeros = any(
        all(bool((squeezed(ids) == ANY).all()) for _, ids in other.terms) for other in others if other.leaf is None
    )
    leaf.met_zeros_only = zeros and (leaf.met_zeros_only or not leaf.met)
    leaf.met = True
    return zeros


def product(variables: Variables, factors: Iterable[Scale], shape: Iterable[int], label: str = "") -> Scale:
    """The scale of an elementwise product: log-scales add."""
    shape, factors = tuple(shape), list(factors)
    for scale in factors:
        if scale.leaf is not None:
            scale.leaf.role = "factor" if scale.leaf.role == "shift" else scale.leaf.role
            meets_zeros(scale.leaf, [other for other in factors if other is not scale])
    terms = [(c, ids) for scale in factors for c, ids in scale.terms if not _all_fixed(ids)]
    from_input = any(scale.from_input for scale in factors)
    if not terms:
        return fixed(shape, from_input)
    whole = Scale(tuple((c, ids.expand(shape)) for c, ids in terms), from_input)
    return of(merged(variables, whole, label), from_input) if from_input else whole


def _all_fixed(ids: Tensor) -> bool:
    return bool((squeezed(ids) == FIXED).all())
