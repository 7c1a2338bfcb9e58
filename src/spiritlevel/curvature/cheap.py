"""Operations that are cheap to differentiate twice, in place of torch's own while a network runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import functional as F

from spiritlevel.curvature.convolutions import convolved
from spiritlevel.curvature.normalizations import normalized
from spiritlevel.network.layers import function_name
from spiritlevel.network.modes import Mode
from spiritlevel.network.operations import CONVOLUTIONS


class CheapSecondDerivatives(Mode):
    """While a network runs, convolutions and batch normalizations are replaced by ones with the same values and derivatives."""

    def __torch_function__(
        self, function: Callable[..., Any], kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = None
        if function_name(function) in CONVOLUTIONS:
            found = convolved(args, kwargs)
        elif function is F.batch_norm:  # torch.batch_norm takes its arguments in another order
            found = normalized(args, kwargs)
        return function(*args, **kwargs) if found is None else found
