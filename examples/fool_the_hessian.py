"""An equivalent twin that the plain Hessian takes for a million times sharper, and the measures that are not fooled."""

import torch
from torch import nn

import spiritlevel as sl

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 4)).double()
x, y = torch.randn(300, 20, dtype=torch.float64), torch.randint(4, (300,))

before = sl.measure(model, (x, y))
attack = sl.sharpen(model, (x, y), loss="cross_entropy", target=1e6 * before["hessian_spectral_norm"].value)
after = sl.measure(attack.model, (x, y))

print(f"the outputs of the twin differ by {attack.output_change:.0e} of the largest")
for record in sl.list_measures():
    if record.name in before:
        ratio = after[record.name].value / before[record.name].value
        claim = "invariant" if record.invariant_under else "plain"
        print(f"{record.name:34} {claim:10} {ratio:.12g} times its value")
