"""Compare two networks trained to the same loss: with small steps on noisy batches, and on all data at once."""

import torch
from torch import nn

import spiritlevel as sl

torch.manual_seed(0)
x = torch.randn(400, 10)
y = (x[:, :5].sum(1) > 0).long() + (x[:, 5:].sum(1) > 0).long()


def train(batch: int) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    while nn.functional.cross_entropy(model(x), y) > 0.1:
        for chosen in torch.randperm(len(x)).split(batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
    return model


names = ["normalized_sharpness", "rho_sum", "hessian_spectral_norm"]
small, large = (sl.measure(train(batch), (x, y), measures=names) for batch in (8, 400))
print(f"loss: {small.loss:.4f} with small batches, {large.loss:.4f} with all data")
for name in names:
    print(f"{name}: {small[name]} with small batches, {large[name]} with all data")
