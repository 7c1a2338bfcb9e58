"""Randomly generated architectures: sampled twins compute the same function, and derivatives find no factor more."""

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from networks import randomized
from spiritlevel.symmetry import balance, find_symmetries, relative_change
from symmetry_oracle import number_of_symmetries

STEPS = (
    "conv",
    "depthwise",
    "grouped",
    "norm",
    "relu",
    "leaky",
    "gelu",
    "skip",
    "cat",
    "slice",
    "pool",
    "shift",
    "reuse",
)
Recipe = list[tuple[str, int]]


class Assembled(nn.Module):
    """A network built step by step; each step reads the last activation and possibly an earlier one."""

    def __init__(self, recipe: Recipe, channels: int = 2) -> None:
        super().__init__()
        self.recipe, self.layers, self.plan = recipe, nn.ModuleList(), []
        widths, shared = [channels], {}
        for step, number in recipe:
            width = widths[-1]
            earlier = [k for k, w in enumerate(widths) if step == "cat" or w == width]
            other = earlier[number % len(earlier)] if earlier else 0
            layer, new = self._layer(step, width, number, shared)
            if step == "cat":
                new = width + widths[other] if width + widths[other] <= 9 else width
            if step == "slice":
                new = max(1, width - number % 2)
            if layer is not None and layer not in self.layers:
                self.layers.append(layer)
            self.plan.append(
                (step, None if layer is None else [m is layer for m in self.layers].index(True), other, new)
            )
            widths.append(new)
        self.last = nn.Linear(widths[-1], 2)

    @staticmethod
    def _layer(step: str, width: int, number: int, shared: dict[int, nn.Module]) -> tuple[nn.Module | None, int]:
        new, bias = 1 + number % 4, number % 3 > 0
        if step == "conv":
            return nn.Conv2d(width, new, 3, padding=1, bias=bias), new
        if step == "depthwise":
            return nn.Conv2d(width, width, 3, padding=1, groups=width, bias=bias), width
        if step == "grouped" and width % 2 == 0:
            return nn.Conv2d(width, 2 * new, 1, groups=2, bias=bias), 2 * new
        if step == "norm":
            return nn.BatchNorm2d(width, affine=number % 4 > 0), width
        if step == "reuse":
            return shared.setdefault(width, nn.Conv2d(width, width, 1, bias=bias)), width
        return None, width

    def forward(self, x: Tensor) -> Tensor:
        seen = [x]
        for step, layer, other, width in self.plan:
            h = seen[-1]
            if layer is not None:
                h = self.layers[layer](h)
            elif step == "skip":
                h = h + seen[other]
            elif step == "cat":
                h = torch.cat([h, seen[other]], 1)[:, :width] if width > h.shape[1] else h
            elif step == "slice":
                h = h[:, -width:]
            elif step == "shift":
                h = h + 0.5
            elif step in ("relu", "leaky", "gelu"):
                h = {"relu": F.relu, "leaky": F.leaky_relu, "gelu": F.gelu}[step](h)
            elif step == "pool":
                h = F.avg_pool2d(h, 3, stride=1, padding=1)
            seen.append(h)
        return self.last(seen[-1].mean((2, 3)))


recipes = st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 11)), min_size=2, max_size=9)


def made(recipe: Recipe) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = randomized(Assembled(recipe))
    return model, torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(recipes)
def test_sampled_twins_compute_the_same_function(recipe: Recipe) -> None:
    model, x = made(recipe)
    twin = find_symmetries(model, x).sample(strength=1.0, seed=1).apply(model)
    fresh = torch.randn(4, 2, 5, 5, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    with torch.no_grad():
        assert relative_change(model(fresh), twin(fresh)) < 1e-9


@settings(max_examples=30, deadline=None, derandomize=True)
@given(recipes)
def test_no_symmetry_is_missed(recipe: Recipe) -> None:
    # Derivatives do not count the factors of channels that a slice drops.
    model, x = made([(step, n) for step, n in recipe if step != "slice"])
    assert find_symmetries(model, x).dimension == number_of_symmetries(model, (3, 2, 4, 4), least_draws=40)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(recipes)
def test_balancing_finds_the_same_network_from_everywhere_on_the_orbit(recipe: Recipe) -> None:
    model, x = made(recipe)
    symmetries = find_symmetries(model, x)
    twin = symmetries.sample(strength=1.0, seed=2).apply(model)
    mine, theirs = balance(model, symmetries), balance(twin, symmetries)
    assert mine.dead == theirs.dead
    if not mine.dead:
        left = mine.rescaling.transform(dict(model.named_parameters()))
        right = theirs.rescaling.transform(dict(twin.named_parameters()))
        for name, value in left.items():
            torch.testing.assert_close(value, right[name], rtol=1e-7, atol=1e-9)
