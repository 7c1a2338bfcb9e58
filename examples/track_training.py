"""Follow flatness while a network trains: a plain loop, a table, a page."""

import torch
from torch import nn

import spiritlevel as sl

torch.manual_seed(0)
x = torch.randn(600, 10)
y = (x[:, :3].abs()).argmax(1)
model = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

names = ["rho_sum", "hessian_largest_eigenvalue", "critical_sharpness"]
tracker = sl.Tracker(model, (x, y), optimizer=optimizer, measures=names, at_loss=[1, 0.5, 0.25], samples=128)
tracker.step(0, loss=float("inf"), force=True)  # before the training
for step in range(1, 400):
    rows = torch.randint(0, len(x), (64,))
    loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    tracker.step(step, loss=loss, epoch=step * 64 / len(x))
tracker.step(step, force=True)

print(tracker.history)
tracker.to_html("training.html")
