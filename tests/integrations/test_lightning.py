"""The callback for Lightning, with the real trainer."""

import csv
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spiritlevel as sl
from small_training import Training, mlp

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pl = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.loggers import CSVLogger

    from spiritlevel.integrations.lightning import FlatnessCallback

# What Lightning itself warns of in a training as small as this.
pytestmark = pytest.mark.filterwarnings("ignore")

NAMES = ["rho_sum", "hessian_largest_eigenvalue", "critical_sharpness"]


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Dropout(0.1), mlp())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, _index: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(folder: Path, callback: Any, **options: Any) -> tuple[Module, Any]:
    torch.manual_seed(0)
    module = Module()
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", callbacks=[callback] if callback else [], logger=CSVLogger(folder),
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(*Training().data), batch_size=20, shuffle=True))
    return module, trainer


@pytest.mark.parametrize(
    "options", [{}, {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}], ids=["plain", "amp"]
)
def test_a_training_with_the_callback_is_the_training_without(tmp_path, options) -> None:
    callback = FlatnessCallback(measures=NAMES, every=4, samples=30)
    followed, trainer = fitted(tmp_path, callback, **options)
    alone, _ = fitted(tmp_path / "alone", None, **options)
    for name, value in alone.state_dict().items():
        assert torch.equal(value, followed.state_dict()[name]), name
    assert [point["step"] for point in callback.history] == ([0, 4, 6] if options else [1, 4, 8, 12])
    assert callback.history[-1].thresholds["hessian_largest_eigenvalue"] == pytest.approx(20.0)
    report = sl.measure(followed, callback.tracker.probe, measures=["rho_sum"])
    assert callback.history[-1]["rho_sum"].value == pytest.approx(report["rho_sum"].value, rel=1e-6)
    rows = list(csv.DictReader((Path(trainer.logger.log_dir) / "metrics.csv").read_text().splitlines()))
    logged = {int(row["step"]): float(row["flatness/rho_sum"]) for row in rows if row.get("flatness/rho_sum")}
    assert logged == pytest.approx({point["step"]: point["rho_sum"].value for point in callback.history})


def test_a_part_of_the_module_at_levels_of_its_loss(tmp_path) -> None:
    callback = FlatnessCallback(
        Training().data, module="net", measures=["gradient_norm"], at_loss=[100.0, 1e-9], last=False
    )
    fitted(tmp_path, callback, limit_train_batches=2)
    assert [(point["step"], point.levels) for point in callback.history] == [(1, (100.0,))]
    assert isinstance(callback.tracker.model, nn.Sequential)


def test_the_history_is_in_the_checkpoint(tmp_path) -> None:
    callback = FlatnessCallback(measures=["gradient_norm"], every=100)
    _, trainer = fitted(tmp_path, callback, limit_train_batches=1)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = FlatnessCallback(measures=["gradient_norm"], every=100)
    module = Module()
    later = pl.Trainer(
        max_epochs=3, accelerator="cpu", callbacks=[again], logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, limit_train_batches=1,
    )  # fmt: skip
    loader = DataLoader(TensorDataset(*Training().data), batch_size=20)
    later.fit(module, loader, ckpt_path=tmp_path / "last.ckpt", weights_only=False)
    assert [point["step"] for point in again.history] == [1, 2, 3]
    assert again.history[0]["gradient_norm"].value == callback.history[0]["gradient_norm"].value


def test_data_that_cannot_be_chosen_from(tmp_path) -> None:
    loaders = {"a": DataLoader(TensorDataset(*Training().data))}
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", callbacks=[FlatnessCallback()], logger=False,
                         enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    with pytest.raises(sl.SpiritLevelError, match="cannot choose samples from a dict: pass data="):
        trainer.fit(Module(), loaders)
