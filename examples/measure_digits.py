"""Measure a small network on real handwritten digits and write a page about it."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import spiritlevel as sl

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 32), nn.ReLU(), nn.Linear(32, 10)
)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(10):
    for chosen in torch.randperm(len(x)).split(64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()

report = sl.measure(model, (x[:600], y[:600]), loss="cross_entropy")
print(report)
for layer, value in report["normalized_sharpness"].layers.items():
    print(f"{layer}: normalized sharpness {value:.3f}")
report.to_html("digits.html")
