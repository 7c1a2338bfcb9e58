"""What a source of data gives before it is scaled and checked."""

from typing import Literal, NamedTuple

from torch import Tensor

from spiritlevel.errors import SpiritLevelError

Split = Literal["train", "test"]


class Raw(NamedTuple):
    """Samples and targets as they are stored; `scale` is the value of a white pixel where x holds bytes."""

    x: Tensor
    y: Tensor
    classes: int | None = None
    scale: int = 255


def check_labels(y: Tensor, classes: int, where: object) -> None:
    bad = ((y < 0) | (y >= classes)).nonzero()
    if len(bad):
        first = int(bad[0])
        raise SpiritLevelError(
            f"{where}: labels must be 0 to {classes - 1}, found {int(y[first])} at sample {first} "
            f"({len(bad)} of {len(y)} out of range); the file is damaged or of another data set"
        )
