"""A callback for the Trainer of Hugging Face's transformers that follows flatness while a model trains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from spiritlevel.errors import SpiritLevelError
from spiritlevel.integrations.loggers import imported
from spiritlevel.problem.losses import LossLike
from spiritlevel.tracking.history import History
from spiritlevel.tracking.tracker import Tracker

IGNORED = -100  # the label of what is not scored

if TYPE_CHECKING:
    TrainerCallback = object
else:
    TrainerCallback = imported("transformers", "transformers").TrainerCallback


def own_loss(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, int]:
    """The loss that the model computes from a batch with labels, and how many labels it is a mean over.

    Causal language models predict every token but the first; labels of −100 are not scored.
    """
    if "labels" not in batch:
        raise SpiritLevelError(f"the batches have no labels, only {', '.join(batch)}: pass loss=… to FlatnessCallback")
    labels: Tensor = batch["labels"]
    name = type(model).__name__
    shifted = labels.dim() == 2 and ("CausalLM" in name or "LMHead" in name or "DoubleHeads" in name)
    scored = labels[:, 1:] if shifted else labels
    count = len(labels) if labels.is_floating_point() else int((scored != IGNORED).sum())
    return model(**batch).loss, count


class FlatnessCallback(TrainerCallback):
    """Follows the flatness of a model that a `transformers.Trainer` trains: `Trainer(…, callbacks=[FlatnessCallback()])`.

    Args:
        data: Batches as dicts, or a loader of them; the trainer's own training data where None.
        loss: `(model, batch) -> (mean, count)`; the model's own loss where None.
        last: Measure everything at the last step too.
        options: Those of `Tracker`: measures, overhead, every, at_loss, samples, loggers, …

    Points stand in `trainer.state.log_history`. To send them where the trainer reports to (TensorBoard, Weights & Biases,
    …): `callback.log_through(trainer)` before `trainer.train()`.
    """

    def __init__(self, data: Any = None, loss: LossLike | None = None, *, last: bool = True, **options: Any) -> None:
        super().__init__()
        self.data, self.loss, self.last, self.options = data, own_loss if loss is None else loss, last, options
        self.tracker: Tracker | None = None
        self._trainer: Any = None

    @property
    def history(self) -> History:
        """The points so far."""
        return History() if self.tracker is None else self.tracker.history

    def log_through(self, trainer: Any) -> None:
        """Report every point through this trainer."""
        self._trainer = trainer

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **kwargs: Any) -> None:
        """Choose the probe set, and refuse what cannot be measured before the training begins."""
        if not state.is_world_process_zero:
            return
        data = kwargs.get("train_dataloader") if self.data is None else self.data
        data = getattr(data, "base_dataloader", data)  # what Accelerate puts around a loader
        options = {"optimizer": kwargs.get("optimizer"), **self.options}
        self.tracker = Tracker(kwargs["model"], data, self.loss, **options)
        self.tracker.loggers.append(lambda numbers, step: self._log(state, numbers, step))

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_kwargs: Any) -> None:
        """After every step of the optimizer, however many batches it took."""
        if self.tracker is not None and state.global_step != self.tracker.last_step:
            self.tracker.step(state.global_step, loss=_last_loss(state), epoch=state.epoch)

    def on_train_end(self, _args: Any, state: Any, _control: Any, **_kwargs: Any) -> None:
        """The last step, whatever it costs."""
        if self.tracker is not None and self.last and state.global_step > 0:
            self.tracker.finish(state.global_step, epoch=state.epoch)

    def _log(self, state: Any, numbers: Mapping[str, float], step: int) -> None:
        if self._trainer is not None:
            self._trainer.log(dict(numbers))
        else:
            state.log_history.append({**numbers, "step": step, "epoch": state.epoch})


def _last_loss(state: Any) -> float:
    """The training loss that the trainer logged last, a mean over the steps before; nan until it has logged one."""
    return next((float(entry["loss"]) for entry in reversed(state.log_history) if "loss" in entry), math.nan)
