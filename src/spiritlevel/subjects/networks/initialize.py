"""Starting weights by name."""

import math
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import init
from torch.nn.modules.conv import _ConvNd

from spiritlevel.errors import SpiritLevelError

SCHEMES: dict[str, Callable[[Tensor], Tensor]] = {
    "xavier_normal": init.xavier_normal_,
    "xavier_uniform": init.xavier_uniform_,
    "kaiming_normal": lambda weight: init.kaiming_normal_(weight, nonlinearity="relu"),
    "kaiming_uniform": lambda weight: init.kaiming_uniform_(weight, nonlinearity="relu"),
    # petzka2019 gives the variance, 0.1; torch wants the deviation.
    "normal": lambda weight: init.normal_(weight, std=math.sqrt(0.1)),
    "uniform": lambda weight: init.uniform_(weight, -0.1, 0.1),
    "orthogonal": init.orthogonal_,
}


def initialize(model: nn.Module, scheme: str) -> None:
    """Draws the weights of every linear and convolutional module anew by `scheme` and sets their biases to zero.

    `default` leaves what torch drew. Normalization layers keep their ones and zeros.
    """
    if scheme == "default":
        return
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | _ConvNd)]
    if not layers:
        raise SpiritLevelError(
            f"init={scheme!r} draws the weights of linear and convolutional modules, and {type(model).__name__} has none; "
            "use init='default'"
        )
    for layer in layers:
        SCHEMES[scheme](layer.weight)
        if layer.bias is not None:
            init.zeros_(layer.bias)
