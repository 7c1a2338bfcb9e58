"""A model called with keywords that computes its own loss, and a regularized loss of your own."""

import torch
from torch import nn

import spiritlevel as sl


class Tagger(nn.Module):
    """Token ids in, one label a sentence out; returns a dictionary, as many libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(torch.relu(self.embed(tokens)).mean(1))
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits, labels)}


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    found = model(**batch)
    return found["loss"] + 1e-3 * found["logits"].square().mean(), len(batch["labels"])


torch.manual_seed(0)
batches = [{"tokens": torch.randint(50, (n, 12)), "labels": torch.randint(4, (n,))} for n in (32, 32, 9)]
report = sl.measure(Tagger(), batches, loss, measures=["riemannian_spectral_norm", "kappa_trace_sum"], tolerance=0.05)
print(report)
