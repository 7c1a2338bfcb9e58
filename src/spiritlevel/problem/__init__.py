"""A model with its data and its loss: a checked, pure function of the parameters, streamed over the data.

L(w) = mean of (w·x − y)², here ((2w − 2)² + (4w − 4)²)/2 = 10(w − 1)²:

>>> import torch
>>> model = torch.nn.Linear(1, 1, bias=False)
>>> problem = Problem(model, "mse", (torch.tensor([[2.0], [4.0]]), torch.tensor([[2.0], [4.0]])))
>>> w = {"weight": torch.tensor([[2.0]])}
>>> problem.loss(w), problem.gradient(w)[1]["weight"].item()
(10.0, 20.0)

What the engine uses: chunks of the data with their weights in the mean, and the network on one of them.

>>> for chunk, weight in problem.chunks(size=1):
...     print(problem.outputs(w, chunk).item(), problem.chunk_loss(w, chunk).item(), weight == problem.weight_of(chunk))
4.0 4.0 True
8.0 16.0 True
>>> first = problem.first_chunk()
>>> problem.slopes(problem.chunk_outputs(w, first), first)[1].flatten().tolist()  # 2(w·x − y)
[4.0, 8.0]
>>> problem.part_chunk_size(), problem.parameters_like().dtype, list(problem.leaves()), len(problem.known_storages())
(1024, torch.float32, ['weight'], 1)
>>> problem.callers_parameters()["weight"] is model.weight  # `parameters` are copies
True
>>> problem.count("weight"), problem.is_matrix("weight"), problem.alone  # also where a process holds only a part of it
(1, True, True)
>>> problem.bytes_kept(lambda: problem.chunk_loss(problem.leaves(), first)) > 0  # of a pass, by autograd
True

A few samples to look at: the first ones, those whose losses slope the most, and some from everywhere.

>>> len(problem.few_samples(3)), len(problem.telling_samples(1)), sum(map(len, problem.spread_samples(2)))
(3, 1, 2)

In eval mode, in another precision, and with a loss that calls the model itself:

>>> problem.check_derivatives()  # refuses where the gradient is not that of the loss
>>> with problem.undisturbed(), problem.in_precision(torch.float64) as fitting:
...     print(problem.chunk_outputs(problem.parameters, fitting(first)).dtype)
torch.float64
>>> own = Problem(model, lambda model, batch: (model(batch[0]).square().mean(), len(batch[0])), [(torch.ones(3, 1),) * 2])
>>> [number if isinstance(number, float) else number.item() for number in own.whole_loss(w, own.first_chunk())]
[4.0, 3.0]
"""

from spiritlevel.problem.problem import Problem

__all__ = ["Problem"]
