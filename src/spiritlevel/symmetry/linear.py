"""Finding the groups that are not rescalings: invertible matrices, rotations and shifts."""

import warnings
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

from spiritlevel.symmetry.frames import Frame, propose_frames
from spiritlevel.symmetry.linear_trace import LinearRecorder
from spiritlevel.symmetry.noether import verified, witness
from spiritlevel.symmetry.quiet import untouched
from spiritlevel.symmetry.shifts import Centre, Shift, find_shifts
from spiritlevel.symmetry.trace import record


@dataclass(frozen=True)
class LinearGroups:
    """What a network allows beyond rescalings."""

    frames: tuple[Frame, ...] = ()
    shifts: tuple[Shift | Centre, ...] = ()


def find_linear_groups(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], gains: Collection[str]
) -> LinearGroups:
    """Every change of basis and every shift that is proposed by a recording and confirmed by derivatives.

    gains: names of the parameters that multiply element by element. Costs a forward pass, and a forward and backward
    pass of a copy in double precision.
    """
    recorder = LinearRecorder(model, gains)
    with untouched(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        record(model, args, kwargs, recorder)
    proposed = propose_frames(recorder, recorder.variables.solve())
    if not proposed and not recorder.normalized:
        return LinearGroups()
    names = {name for frame in proposed for name in frame.tensors}
    names |= {bias for bias in recorder.biases.values() if bias}
    names |= {name for bias, norm in recorder.normalized for name in (bias, norm.shift)}
    seen = witness(model, args, kwargs, names)
    if seen is None:
        return LinearGroups()
    frames = tuple(part for frame in proposed for part in verified(frame, seen))
    return LinearGroups(frames, find_shifts(frames, recorder, seen))
