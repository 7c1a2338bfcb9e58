"""The ways in which a network may write down a product of an activation with a matrix, or a lookup of its rows.

`x @ W`, `W @ x`, `einsum("io,bi->bo", W, x)` and `tensordot(x, W, ([1], [0]))` are one linear map. Every one of them is read as
φ, whose last dimension is contracted, times the matrix, and as what brings the result into the form that was written.
`W[tokens]` is the lookup of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spiritlevel.network.operations import RECURRENT

# The operations that a product may be written by.
SPELLINGS = frozenset(["matmul", "tensordot", "einsum"])
# Which arguments of an operation are multiplied with each other, and their names where they are given by name.
_MATRIX_PRODUCTS = {
    "matmul": (("input", "self"), ("other", "mat2")),
    "mv": (("input", "self"), ("vec",)),
    "addmm": (("mat1",), ("mat2",)),
    "addmv": (("mat",), ("vec",)),
}
_ADDED = ("addmm", "addmv")  # whose first argument is added to the product


class Product(NamedTuple):
    """φ times a matrix.

    inputs: φ, with the contracted dimension last.
    matrix: The matrix as it was handed to the operation.
    inputs_first: Whether the matrix has the contracted dimension first.
    finish: From (…, outputs) to the result as it was written.
    """

    inputs: Tensor
    matrix: Tensor
    inputs_first: bool
    finish: Callable[[Tensor], Tensor]


def product_of(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], is_matrix: Callable[[Any], bool]
) -> Product | None:
    """What one of `SPELLINGS` says, if it is a product of an activation of two dimensions or more with a matrix; else None."""
    if name == "matmul":
        return _of_matmul(*_factors(name, args, kwargs), is_matrix)
    if name == "tensordot":
        return _of_tensordot(*_bound_tensordot(args, kwargs), is_matrix)
    return _of_einsum(args, is_matrix)


def looked_up(key: Any) -> Tensor | None:
    """The indices in `W[indices]`, also written with `:` or `...` behind them, where it is the lookup of an embedding."""
    first, *rest = key if isinstance(key, tuple | list) and key else (key,)
    whole = all(each is Ellipsis or (isinstance(each, slice) and each == slice(None)) for each in rest)
    return first if whole and are_of_rows(first) else None


def are_of_rows(indices: Any) -> bool:
    """Whether these choose rows for samples and for places within them.

    A single dimension of indices is left out: it may choose those rows of a matrix that all samples are multiplied by.
    """
    return isinstance(indices, Tensor) and indices.dim() >= 2 and indices.dtype in (torch.int64, torch.int32)


def multiplied(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Tensor, bool | None]]:
    """The tensors that an operation multiplies with others, each with whether its first of two dimensions is the contracted
    one; None where that cannot be told."""
    if name in RECURRENT:
        return [(leaf, False) for leaf in _tensors((args, kwargs))]
    if name in _MATRIX_PRODUCTS:
        left, right = _factors(name, args, kwargs)
        return _tensors_with((left, False), (right, True))
    if name == "tensordot":
        left, right, dims = _bound_tensordot(args, kwargs)
        over = _single_dims(left, right, dims)
        return _tensors_with(
            (left, None if over is None else over[0] == 0), (right, None if over is None else over[1] == 0)
        )
    if name == "einsum" and args and isinstance(args[0], str):
        terms, result = _terms(args[0])
        return [(tensor, _contracted_first(term, result)) for term, tensor in zip(terms, _operands(args), strict=False)]
    if name in ("linear", "inner"):  # both contract last dimensions
        return _tensors_with(*((leaf, False) for leaf in (*args[:2], *kwargs.values())))
    return [(leaf, None) for leaf in _tensors((args, kwargs))]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _tensors_with(*pairs: tuple[Any, bool | None]) -> list[tuple[Tensor, bool | None]]:
    return [(leaf, first) for leaf, first in pairs if isinstance(leaf, Tensor)]


def _factors(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The two operands that are multiplied."""
    given = list(args[1:] if name in _ADDED else args)
    found = []
    for names in _MATRIX_PRODUCTS[name]:
        named = next((kwargs[each] for each in names if each in kwargs), None)
        found.append(named if named is not None else given.pop(0) if given else None)
    return found[0], found[1]


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _is_activation(tensor: Any, is_matrix: Callable[[Any], bool]) -> bool:
    return isinstance(tensor, Tensor) and tensor.dim() >= 2 and not is_matrix(tensor)


def _of_matmul(left: Any, right: Any, is_matrix: Callable[[Any], bool]) -> Product | None:
    if is_matrix(right) and _is_activation(left, is_matrix):
        return Product(left, right, True, _same)
    if is_matrix(left) and _is_activation(right, is_matrix):
        return Product(right.mT, left, False, lambda result: result.mT)
    return None


def _bound_tensordot(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    left, right, dims = (args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(("a", "b", "dims")))
    return left, right, 2 if dims is None else dims


def _single_dims(left: Any, right: Any, dims: Any) -> tuple[int, int] | None:
    """The one dimension of each operand that is contracted; None where there are more, or none."""
    if dims == 1 and not isinstance(dims, Tensor):
        return left.dim() - 1, 0
    if not isinstance(dims, list | tuple) or len(dims) != 2:
        return None
    pairs = [list(each) if isinstance(each, list | tuple) else [each] for each in dims]
    if [len(each) for each in pairs] != [1, 1]:
        return None
    return int(pairs[0][0]) % left.dim(), int(pairs[1][0]) % right.dim()


def _of_tensordot(left: Any, right: Any, dims: Any, is_matrix: Callable[[Any], bool]) -> Product | None:
    over = _single_dims(left, right, dims)
    if over is None or left.shape[over[0]] != right.shape[over[1]]:  # a size of one may stand for any other
        return None
    if is_matrix(right) and _is_activation(left, is_matrix):
        return Product(_last(left, over[0]), right, over[1] == 0, _same)
    if is_matrix(left) and _is_activation(right, is_matrix):
        return Product(_last(right, over[1]), left, over[0] == 0, lambda result: result.movedim(-1, 0))
    return None


def _last(tensor: Tensor, dim: int) -> Tensor:
    return tensor if dim == tensor.dim() - 1 else tensor.movedim(dim, -1)


def _operands(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Those of an einsum, which come one by one or in a list."""
    return tuple(args[1]) if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]


def _terms(equation: str) -> tuple[list[str], str]:
    """The subscripts of an einsum's operands, and of its result also where they are not written; a dot stands for an ellipsis."""
    written = equation.replace(" ", "").replace("...", ".")
    left, arrow, result = written.partition("->")
    if not arrow:
        result = "." * ("." in left) + "".join(sorted(c for c in set(left) - {",", "."} if left.count(c) == 1))
    return left.split(","), result


def _contracted_first(term: str, result: str) -> bool | None:
    """Whether the first of two dimensions is summed over, if one of them is."""
    summed = [index not in result for index in term]
    return summed[0] if len(term) == 2 and sum(summed) == 1 else None


def _of_einsum(args: tuple[Any, ...], is_matrix: Callable[[Any], bool]) -> Product | None:
    """One index of the matrix is summed over with one of φ, and the other one is new."""
    operands = _operands(args)
    if len(operands) != 2 or not isinstance(args[0], str):
        return None
    terms, result = _terms(args[0])
    if is_matrix(operands[0]):
        operands, terms = operands[::-1], terms[::-1]
    (phi, matrix), (term, pair) = operands, terms
    if not is_matrix(matrix) or not _is_activation(phi, is_matrix) or len(set(term)) < len(term):
        return None
    first = _contracted_first(pair, result)
    if first is None:
        return None
    over, new = (pair[0], pair[1]) if first else (pair[1], pair[0])
    rest = term.replace(over, "")
    made = rest + new
    if "." in pair or over not in term or new in term or not rest:
        return None
    if sorted(made) != sorted(result) or len(set(made)) < len(made):
        return None
    moved = phi if term == rest + over else _rearranged(phi, term, rest + over)
    if moved.shape[-1] != matrix.shape[0 if first else 1]:  # a size of one may stand for any other
        return None
    return Product(moved, matrix, first, _same if made == result else lambda found: _rearranged(found, made, result))


def _rearranged(tensor: Tensor, before: str, after: str) -> Tensor:
    """With its dimensions in another order, as subscripts name them."""
    several = tensor.dim() - len(before) + 1  # what an ellipsis stands for
    places: dict[str, list[int]] = {}
    next_dim = 0
    for index in before:
        count = several if index == "." else 1
        places[index] = list(range(next_dim, next_dim + count))
        next_dim += count
    return tensor.permute([dim for index in after for dim in places[index]])
