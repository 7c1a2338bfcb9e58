"""Measures by name, as command lines and files of studies write them."""

import pytest

from refusals import refused
from spiritlevel.measuring.registry import read_measure


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("epsilon_sharpness", {"epsilon": 1e-3}),
        ("epsilon_sharpness:epsilon=5e-4", {"epsilon": 5e-4}),
        ("keskar_subspace_sharpness:dimension=20:epsilon=1e-2", {"epsilon": 1e-2, "dimension": 20}),
        ("riemannian_spectral_norm:method=power", {"method": "power", "most_products": 1000}),
    ],
)
def test_options_stand_behind_the_name(text, options) -> None:
    found = read_measure(text)
    assert (found.name, found.options) == (text.partition(":")[0], options)
    assert {name: type(value) for name, value in found.options.items()} == {
        name: type(value) for name, value in options.items()
    }


def test_what_is_not_name_option_value_is_refused() -> None:
    with refused("options of a measure are written name:option=value, got 'epsilon_sharpness:5e-4'"):
        read_measure("epsilon_sharpness:5e-4")
