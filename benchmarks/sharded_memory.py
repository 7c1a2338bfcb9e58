"""The memory a process takes where a model is in shards, beside that of one process with the whole model.

python benchmarks/sharded_memory.py mlp | gpt [--million 50] [--blocks 12] [--outputs 10] [--samples 8] [--probes 8]
    [--tolerance 0.1] [--measures A,B] [--whole] [--no-product] [--out FILE.json]
torchrun --nproc-per-node 2 benchmarks/sharded_memory.py mlp …

Random weights and a handful of samples. No process ever holds the whole model: it is built without memory, divided by
`fully_shard`, and every weight is drawn for itself. With `--whole` every process has all of it, and data alone are divided. The first process prints the peak of every process, what a product costs and
how many bytes it moves, and the values with their errors.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import spiritlevel as sl
from spiritlevel.curvature.hessian import HessianProducts
from spiritlevel.problem.problem import Problem
from spiritlevel.problem.sharded import Sharded

MEASURES = "hessian_spectral_norm,riemannian_spectral_norm,hessian_trace,normalized_sharpness,kappa_trace_sum,rho_sum"


class Block(nn.Module):
    """Attention and two dense layers, each after a normalization and beside a shortcut, as in GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        parts = self.mixed(self.before(x)).view(samples, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(samples, length, width))
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.between(x))))
        return y


class Transformer(nn.Module):
    """Tokens in, the next token out."""

    def __init__(self, width: int, depth: int, tokens: int, length: int) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(tokens, width), nn.Parameter(torch.empty(length, width))
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(depth))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.last(x[:, -1]))
        return logits


def mlp(million: float, outputs: int) -> nn.Module:
    """Ten hidden layers."""
    width = round(math.sqrt(million * 1e6 / 10))
    sizes = [784, *[width] * 10, outputs]
    layers = [part for pair in itertools.pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def gpt(million: float, blocks: int) -> nn.Module:
    """Blocks whose weights are about three quarters of all."""
    width = max(64, 64 * round(math.sqrt(million * 0.75e6 / (12 * blocks)) / 64))
    return Transformer(width, blocks, max(100, round(million * 0.125e6 / width)), 16)


def built(kind: str, million: float, blocks: int, outputs: int, *, divided: bool) -> nn.Module:
    """The model with its weights, divided among the processes or whole."""
    with torch.device("meta"):
        model = mlp(million, outputs) if kind == "mlp" else gpt(million, blocks)
    if divided:
        for part in list(model.blocks) if isinstance(model, Transformer) else list(model.children()):
            if next(part.parameters(), None) is not None:
                fully_shard(part)
        fully_shard(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            _fill(parameter, index)
    return model


def _fill(parameter: Any, index: int) -> None:
    """Weights of the size that keeps signals as they are; gains of one, biases of zero."""
    if parameter.dim() == 1:
        parameter.fill_(
            1.0 if index % 2 == 0 else 0.0
        )  # of a normalization the gain comes first; biases follow a matrix
        return
    drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
    drawn *= math.sqrt(1.0 / parameter.shape[1])
    if isinstance(parameter, nn.Parameter) and not hasattr(parameter, "device_mesh"):
        parameter.copy_(drawn)
        return
    mesh, placements = parameter.device_mesh, parameter.placements
    parameter.to_local().copy_(distribute_tensor(drawn, mesh, placements).to_local())


def data_of(kind: str, model: nn.Module, samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    if kind == "mlp":
        outputs = list(model.parameters())[-1].shape[0]
        return torch.randn(samples, 784, generator=generator), torch.randint(
            0, outputs, (samples,), generator=generator
        )
    assert isinstance(model, Transformer)
    tokens = model.embedding.num_embeddings
    return (
        torch.randint(0, tokens, (samples, len(model.places)), generator=generator),
        torch.randint(0, tokens, (samples,), generator=generator),
    )


def peak_gigabytes() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20


def one_product(model: nn.Module, data: tuple[Tensor, Tensor], size: int) -> dict[str, float]:
    """Seconds and gigabytes from other processes for one product with the Hessian, its graph being kept."""
    problem = Problem(model, "cross_entropy", data, distributed=size > 1, shards=True)
    products = HessianProducts(problem, method="kept graph")
    vector = torch.randn(products.flat.size)
    products([vector])
    moved = problem.shards.traffic if isinstance(problem.shards, Sharded) else 0
    started = time.perf_counter()
    products([vector])
    seconds = time.perf_counter() - started
    moved = (problem.shards.traffic if isinstance(problem.shards, Sharded) else 0) - moved
    return {"seconds": seconds, "gigabytes": moved / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["mlp", "gpt"])
    parser.add_argument("--million", type=float, default=50.0)
    parser.add_argument("--blocks", type=int, default=12, help="of the transformer")
    parser.add_argument("--outputs", type=int, default=10, help="of the MLP; of more than 200, columns are drawn")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--probes", type=int, default=8)
    parser.add_argument("--tolerance", type=float, default=0.1)
    parser.add_argument("--measures", default=MEASURES)
    parser.add_argument("--whole", action="store_true", help="the whole model in every process")
    parser.add_argument("--no-product", action="store_true", help="end without timing a single product")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        dist.init_process_group("gloo")
    divided = size > 1 and not asked.whole
    model = built(asked.model, asked.million, asked.blocks, asked.outputs, divided=divided)
    data = data_of(asked.model, model, asked.samples)
    started, before = time.perf_counter(), peak_gigabytes()
    names = asked.measures.split(",")
    report = sl.measure(
        model, data, measures=names, tolerance=asked.tolerance, most_probes=asked.probes, dtype=torch.float32
    )
    seconds, peak = time.perf_counter() - started, peak_gigabytes()
    product = None if asked.no_product else one_product(model, data, size)
    peaks: list[Any] = [peak]
    if size > 1:
        peaks = [None] * size
        dist.all_gather_object(peaks, peak)
    found = {
        "model": asked.model,
        "parameters": report.problem["parameters"],
        "processes": size,
        "peaks": peaks,
        "before": before,
        "seconds": seconds,
        "products": report.cost.products,
        "product": product,
        "values": {name: [value.value, value.error] for name, value in report.values.items()},
    }
    if not size > 1 or dist.get_rank() == 0:
        text = json.dumps(found, indent=1)
        print(text)
        if asked.out is not None:
            asked.out.write_text(text + "\n", encoding="utf-8")
    if size > 1:
        dist.barrier()  # or the first to leave takes the others down
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
