"""Follow flatness while Lightning trains a module; the points go to the trainer's own loggers."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from spiritlevel.integrations.lightning import FlatnessCallback


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


pl.seed_everything(0)
x = torch.randn(320, 10)
loader = DataLoader(TensorDataset(x, x[:, :3].abs().argmax(1)), batch_size=32, shuffle=True)
callback = FlatnessCallback(loss="cross_entropy", measures=["rho_sum", "critical_sharpness"], every=10, samples=128)
trainer = pl.Trainer(max_epochs=2, accelerator="cpu", callbacks=[callback], logger=CSVLogger("logs"))
trainer.fit(Classifier(), loader)
print(callback.history)
