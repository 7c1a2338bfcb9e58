"""A batch that only the loss takes apart is not what the model is called with."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spiritlevel as sl

NEED_THE_GRAPH = ["minimum_sharpness", "minimum_sharpness_neurons", "volume_flatness"]


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"]), len(batch["y"])


@pytest.mark.parametrize("name", NEED_THE_GRAPH)
def test_measures_that_need_the_graph_say_that_they_cannot_be_had(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    batches = [{"x": torch.randn(5, 3), "y": torch.randint(0, 2, (5,))}]
    report = sl.measure(model, batches, loss, measures=[name, "hessian_trace"])
    assert report["hessian_trace"].value > 0
    assert torch.isnan(torch.tensor(report[name].value))
    assert "which only a loss of the form (model, batch) takes apart" in report[name].notes[0]
