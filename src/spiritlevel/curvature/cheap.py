"""Operations that are cheap to differentiate twice, in place of torch's own while a network runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import functional as F

from spiritlevel.curvature.convolutions import convolved
from spiritlevel.curvature.linear_maps import mapped
from spiritlevel.curvature.normalizations import normalized
from spiritlevel.curvature.twofold import Asked
from spiritlevel.network.layers import function_name
from spiritlevel.network.modes import Mode, is_transformed
from spiritlevel.network.operations import CONVOLUTIONS


class CheapSecondDerivatives(Mode):
    """While a network runs, convolutions and batch normalizations are replaced by ones with the same values and derivatives.

    With `asked` so are dense layers, and gradients of weights have values as long as these are asked for.
    """

    def __init__(self, asked: Asked | None = None) -> None:
        super().__init__()
        self._asked = asked

    def __torch_function__(
        self, function: Callable[..., Any], kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = None
        if is_transformed():  # torch has rules for its own operations only
            pass
        elif function_name(function) in CONVOLUTIONS:
            found = convolved(args, kwargs, self._asked)
        elif function is F.batch_norm:  # torch.batch_norm takes its arguments in another order
            found = normalized(args, kwargs)
        elif function is F.linear and self._asked is not None:
            found = mapped(args, kwargs, self._asked)
        return function(*args, **kwargs) if found is None else found
