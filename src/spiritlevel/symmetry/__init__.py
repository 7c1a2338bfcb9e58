"""Which changes of its parameters leave a network's function alone, and what can be done with them."""

from spiritlevel.symmetry.canonical import Balance, balance
from spiritlevel.symmetry.discover import find_symmetries
from spiritlevel.symmetry.gram import GroupBalance, balance_groups, canonicalize
from spiritlevel.symmetry.group import Group
from spiritlevel.symmetry.input_maps import MappedInput, affine, standardize, whiten
from spiritlevel.symmetry.layers import rescale_layers
from spiritlevel.symmetry.layerwise import LayerGroup
from spiritlevel.symmetry.manifold import (
    Directions,
    inner,
    layer_directions,
    layer_metric,
    neuron_directions,
    node_metric,
    riemannian_gradient,
)
from spiritlevel.symmetry.moves import relative_change
from spiritlevel.symmetry.reparametrize import Bijection, compose, power_family, radial, weight_normalization
from spiritlevel.symmetry.rescale import Rescaling
from spiritlevel.symmetry.symmetries import Slice, Symmetries, SymmetryGroup
from spiritlevel.symmetry.transformation import Transformation

__all__ = [
    "Balance",
    "Bijection",
    "Directions",
    "Group",
    "GroupBalance",
    "LayerGroup",
    "MappedInput",
    "Rescaling",
    "Slice",
    "Symmetries",
    "SymmetryGroup",
    "Transformation",
    "affine",
    "balance",
    "balance_groups",
    "canonicalize",
    "compose",
    "find_symmetries",
    "inner",
    "layer_directions",
    "layer_metric",
    "neuron_directions",
    "node_metric",
    "power_family",
    "radial",
    "relative_change",
    "rescale_layers",
    "riemannian_gradient",
    "standardize",
    "weight_normalization",
    "whiten",
]
