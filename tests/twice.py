"""Second derivatives of a single layer, by torch and by what takes its place; what a kept graph is made of."""

import torch
from torch import nn
from torch.nn import functional as F

from spiritlevel.curvature.cheap import CheapSecondDerivatives
from spiritlevel.curvature.hessian import HessianProducts
from spiritlevel.curvature.twofold import Asked
from spiritlevel.problem.problem import Problem

# Which of input, weight and bias a vector is on.
SETS = [[0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]]


def derivatives(layer: nn.Module, x: torch.Tensor, chosen: list[int], mode: object) -> list[torch.Tensor]:
    """Second derivatives of a function that bends in the layer's result, along vectors on some of x, W, b."""
    leaves = [x, *layer.parameters()]
    with mode:
        gradient = torch.autograd.grad(torch.tanh(layer(x)).pow(2).sum(), leaves, create_graph=True)
    generator = torch.Generator().manual_seed(0)
    vectors = [torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype) for leaf in leaves]
    found = torch.autograd.grad(
        [gradient[i] for i in chosen], leaves, [vectors[i] for i in chosen], retain_graph=True, allow_unused=True
    )
    return [part for part in found if part is not None]


def assert_second_derivatives_of_torch(layer: nn.Module, x: torch.Tensor, chosen: list[int]) -> None:
    """To twelve digits, along vectors on the chosen ones of x, W, b."""
    x = x.detach().requires_grad_()
    plain = derivatives(layer, x, chosen, torch.enable_grad())
    for mode in (CheapSecondDerivatives(), CheapSecondDerivatives(Asked(values=False))):
        cheap = derivatives(layer, x, chosen, mode)
        assert len(cheap) == len(plain) > 0
        for one, other in zip(cheap, plain, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def products_like_torch(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> HessianProducts:
    """Products over ragged batches, compared with double backward: of graphs that are kept, and of those that are built anew."""
    products = HessianProducts(Problem(model, "cross_entropy", list(zip(x.split(5), y.split(5), strict=True))))
    vector = torch.randn(products.flat.size, dtype=torch.float64)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradient = torch.autograd.grad(F.cross_entropy(model(x), y), learned, create_graph=True)
    expected = torch.autograd.grad(gradient, learned, products.flat.split(vector))
    anew = HessianProducts(products.problem, budget=0, method="kept graph")
    for way in (products, products, anew, anew):
        torch.testing.assert_close(way([vector])[0], products.flat.join(expected), rtol=1e-9, atol=1e-12)
    assert products._kept
    assert not anew._kept
    return products


def kinds_of_nodes(products: HessianProducts) -> set[str]:
    """What the kept graphs of products are made of."""
    seen, open_nodes = set(), [products._kept[0].edges[0].node]
    while open_nodes:
        node = open_nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            open_nodes += [parent for parent, _ in node.next_functions]
    return {type(node).__name__ for node in seen}
