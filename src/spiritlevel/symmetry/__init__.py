"""Which rescalings leave a network's function alone, and what can be done with them."""

from spiritlevel.symmetry.discover import find_symmetries
from spiritlevel.symmetry.layerwise import LayerGroup
from spiritlevel.symmetry.rescale import Rescaling, rescale_layers
from spiritlevel.symmetry.symmetries import Group, Slice, Symmetries

__all__ = ["Group", "LayerGroup", "Rescaling", "Slice", "Symmetries", "find_symmetries", "rescale_layers"]
