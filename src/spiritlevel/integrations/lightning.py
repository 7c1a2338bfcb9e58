"""A callback for Lightning that follows flatness while a module trains, and logs through the trainer's own loggers."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spiritlevel.errors import SpiritLevelError
from spiritlevel.integrations.loggers import imported
from spiritlevel.problem.losses import LossLike
from spiritlevel.tracking.history import History
from spiritlevel.tracking.tracker import Tracker

# Both names of the package have their own Callback, and a trainer takes only its own; the newer name first.
_PACKAGE = "lightning.pytorch" if importlib.util.find_spec("lightning") else "pytorch_lightning"

if TYPE_CHECKING:
    Callback = object
else:
    Callback = imported(_PACKAGE, "lightning").Callback


class FlatnessCallback(Callback):
    """Follows the flatness of a LightningModule: `Trainer(callbacks=[FlatnessCallback(loss="cross_entropy")])`.

    Args:
        data: What to choose the probe set from; the trainer's own training data where None.
        loss: As for `measure`: compares what the module returns with the targets of a batch, or calls it itself.
        module: The part of the LightningModule to measure, by its name; all of it where None.
        last: Measure everything at the last step too.
        options: Those of `Tracker`: measures, overhead, every, at_loss, samples, loggers, …

    `history` has the points; it is saved with the trainer's checkpoints, and comes back with them.
    """

    def __init__(
        self,
        data: Any = None,
        loss: LossLike = "cross_entropy",
        *,
        module: str | None = None,
        last: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        self.data, self.loss, self.module, self.last, self.options = data, loss, module, last, options
        self.tracker: Tracker | None = None
        self._earlier = History()

    @property
    def history(self) -> History:
        """The points so far."""
        return self._earlier if self.tracker is None else self.tracker.history

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Choose the probe set, and refuse what cannot be measured before the training begins."""
        if not trainer.is_global_zero:
            return
        model = pl_module if self.module is None else pl_module.get_submodule(self.module)
        data = self._training_data(trainer) if self.data is None else self.data
        optimizer = trainer.optimizers[0] if trainer.optimizers else None
        options: Mapping[str, Any] = {"optimizer": optimizer, **self.options}
        self.tracker = Tracker(model, data, self.loss, **options)
        self.tracker.history = History(list(self._earlier))
        self.tracker.loggers.append(lambda numbers, step: _log(trainer, numbers, step))

    def on_train_batch_end(self, trainer: Any, _module: Any, outputs: Any, _batch: Any, _index: int) -> None:
        """After every batch; with gradient accumulation, after those that end with a step of the optimizer."""
        tracker = self.tracker
        if tracker is None or trainer.global_step == tracker.last_step:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        loss = loss if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None
        tracker.step(trainer.global_step, loss=loss, epoch=trainer.current_epoch)

    def on_train_end(self, trainer: Any, _module: Any) -> None:
        """The last step, whatever it costs."""
        if self.tracker is not None and self.last and trainer.global_step > 0:
            self.tracker.finish(trainer.global_step, epoch=trainer.current_epoch)

    def state_dict(self) -> dict[str, Any]:
        """What goes into a checkpoint of the trainer."""
        return {"history": self.history.to_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What a checkpoint of the trainer holds."""
        self._earlier = History.from_dict(state_dict["history"])

    def _training_data(self, trainer: Any) -> Any:
        loader = trainer.train_dataloader
        if not isinstance(loader, torch.utils.data.DataLoader):
            raise SpiritLevelError(
                f"FlatnessCallback cannot choose samples from a {type(loader).__name__}: pass data=…, anything that "
                "sl.measure takes"
            )
        return loader


def _log(trainer: Any, numbers: Mapping[str, float], step: int) -> None:
    for logger in trainer.loggers:
        logger.log_metrics(dict(numbers), step=step)
