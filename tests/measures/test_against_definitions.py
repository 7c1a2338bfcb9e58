"""Every measure on every kind of network, against its definition read off an explicitly formed Hessian."""

import functools

import numpy as np
import pytest
import torch

import cases
import dense_oracle
import spiritlevel as sl
from measure_names import SPECTRAL, STATISTICS


@functools.cache
def expected(name: str) -> dense_oracle.Expected:
    case = cases.by_name(name)
    model, x, y = case.make()
    return dense_oracle.expected(model, case.mean_loss, x, y, case.layers)


def close(found: float, wanted: float, scale: float, tolerance: float) -> bool:
    return abs(found - wanted) <= tolerance * max(abs(wanted), scale)


def assert_same(value: sl.Value, truth: dense_oracle.Expected, tolerance: float) -> None:
    """Value, layers and neurons; what is small next to the whole is compared on the scale of the whole."""
    name, wanted = value.name, truth.values[value.name]
    assert close(value.value, wanted, 0.0, tolerance), (name, value.value, wanted)
    scale = max((abs(entry) for entry in truth.layers.get(name, {}).values()), default=0.0)
    for layer, entry in truth.layers.get(name, {}).items():
        assert close(value.layers[layer], entry, 1e-3 * scale, tolerance), (name, layer, value.layers[layer], entry)
    for layer, entries in truth.neurons.get(name, {}).items():
        atol = tolerance * 1e-3 * np.abs(entries).max()
        np.testing.assert_allclose(value.neurons[layer].numpy(), entries, rtol=tolerance, atol=atol)


@pytest.mark.parametrize("case", cases.EXACT, ids=cases.case_id)
def test_every_measure_is_what_its_definition_says(case):
    model, x, y = case.make()
    truth = expected(case.name)
    report = sl.measure(model, (x, y), case.loss, tolerance=1e-10)
    assert report.loss == pytest.approx(truth.loss, rel=1e-12)
    assert set(report.problem["layers"]) == set(case.layers)
    assert report.problem["estimated_layers"] == {}
    assert set(report) == set(truth.values)
    for value in report.values.values():
        assert_same(value, truth, 1e-8)
        assert set(value.neurons) == set(truth.neurons.get(value.name, {}))
        if value.layers:
            assert set(value.layers) == set(truth.layers[value.name])


@pytest.mark.parametrize("case", cases.EXACT, ids=cases.case_id)
def test_what_is_exact_says_so(case):
    model, x, y = case.make()
    names = [each.name for each in sl.list_measures() if each.name in STATISTICS]
    for value in sl.measure(model, (x, y), case.loss, measures=names).values.values():
        assert (value.exact, value.converged, value.method) == (True, True, "exact sweep")
        assert 0 <= value.error <= 1e-11 * abs(value.value)  # rounding in double precision
        assert all(error <= 1e-11 * abs(value.value) for error in value.layer_errors.values())


@pytest.mark.parametrize("case", cases.ESTIMATED, ids=cases.case_id)
def test_what_is_estimated_lies_within_its_error(case, only_probes):
    model, x, y = case.make()
    truth = expected(case.name)
    report = sl.measure(model, (x, y), case.loss, tolerance=1e-10, most_probes=256)
    assert set(report.problem["layers"]) == set(case.layers)
    assert set(report.problem["estimated_layers"]) == case.estimated
    for name in {*SPECTRAL, "fisher_rao_norm"}:
        assert_same(report[name], truth, 1e-8)
    assert report["fisher_rao_norm"].exact
    for name in set(STATISTICS) - {"fisher_rao_norm"}:
        value, wanted = report[name], truth.values[name]
        concerned = {"hessian_trace": case.estimated_vectors}.get(name, False) or case.estimated
        assert value.exact == (not concerned)
        if value.error <= 1e-11 * abs(wanted):  # nothing estimated, or a maximum that an exact layer attains
            assert value.value == pytest.approx(wanted, rel=1e-8)
            continue
        assert not value.converged
        assert 0 < value.error < 0.5 * abs(wanted)
        assert abs(value.value - wanted) <= 6 * value.error, (name, value, wanted)
        for layer, entry in truth.layers[name].items():
            if layer in value.layer_errors:
                assert abs(value.layers[layer] - entry) <= 6 * value.layer_errors[layer] + 1e-9 * abs(entry)
            elif layer not in case.estimated and layer in case.layers:
                assert value.layers[layer] == pytest.approx(entry, rel=1e-8), (name, layer)


@pytest.mark.parametrize("case", cases.ESTIMATED, ids=cases.case_id)
def test_the_layers_that_can_be_exact_are_exact_in_an_estimated_network(case, only_probes):
    model, x, y = case.make()
    truth = expected(case.name)
    report = sl.measure(model, (x, y), case.loss, measures=["kappa_trace_sum", "rho_sum", "rho_row_sum"])
    for value in report.values.values():
        noisy = {layer for layer, error in value.layer_errors.items() if error > 1e-11 * abs(value.layers[layer])}
        assert noisy <= case.estimated
        for layer in set(case.layers) - case.estimated:
            assert value.layers[layer] == pytest.approx(truth.layers[value.name][layer], rel=1e-8)


@pytest.mark.parametrize("case", cases.ESTIMATED, ids=cases.case_id)
def test_blocks_of_no_more_entries_than_probes_are_formed_whole(case):
    model, x, y = case.make()
    truth = expected(case.name)
    names = sorted(set(STATISTICS) - {"fisher_rao_norm"})
    report = sl.measure(model, (x, y), case.loss, measures=names, tolerance=1e-10, most_probes=256)
    first_round = 3 * 8 * sum(1 for _ in model.parameters())  # of probes, before anyone knows how many it takes
    for value in report.values.values():
        assert value.exact
        assert value.error <= 1e-11 * abs(value.value)
        assert "products with unit vectors" in value.method
        assert value.products <= first_round + sum(p.numel() for p in model.parameters())
        assert_same(value, truth, 1e-8)


def test_estimates_come_closer_with_more_probes_and_stop_at_the_tolerance(only_probes):
    model, x, y = cases.by_name("GELU").make()
    few, many = (
        sl.measure(model, (x, y), measures=["hessian_trace"], tolerance=1e-9, most_probes=n)["hessian_trace"]
        for n in (16, 1024)
    )
    assert many.error < 0.4 * few.error
    loose = sl.measure(model, (x, y), measures=["hessian_trace"], tolerance=0.3, most_probes=1024)["hessian_trace"]
    assert loose.converged
    assert loose.products < many.products / 10


@pytest.mark.parametrize("name", ["mlp", "convolution, max pooling", "batch normalization", "embedding"])
def test_single_precision_agrees_to_single_precision(name):
    case = cases.by_name(name)
    model, x, y = case.make(torch.float32)
    truth = expected(name)
    report = sl.measure(model, (x, y), case.loss, tolerance=1e-5, dtype=torch.float32)
    assert report.problem["dtype"] == "float32"
    for value in report.values.values():
        assert_same(value, truth, 1e-4)


def test_dtype_asks_for_another_precision_than_the_models():
    case = cases.by_name("mlp")
    single, x, y = case.make(torch.float32)
    upcast = case.make(torch.float32)[0].double()
    wanted = dense_oracle.expected(upcast, case.mean_loss, x.double(), y, case.layers)
    report = sl.measure(single, (x, y), tolerance=1e-10, dtype=torch.float64)
    assert report.problem["dtype"] == "float64"
    for value in report.values.values():
        assert_same(value, wanted, 1e-8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("asked", [None, torch.float32], ids=str)
def test_half_precision_is_upcast_and_said(dtype, asked):
    """A small network to double precision, where it costs nothing."""
    case = cases.by_name("mlp")
    model, x, y = case.make(dtype)
    wanted = dense_oracle.expected(case.make(dtype)[0].double(), case.mean_loss, x.double(), y, case.layers)
    report = sl.measure(model, (x, y), tolerance=1e-5, dtype=asked)
    measured_in = "float64" if asked is None else "float32"
    assert report.problem["dtype"] == measured_in
    assert f"parameters in {str(dtype)[6:]} were upcast to {measured_in} for measuring" in report.notes
    assert all(p.dtype == dtype for p in model.parameters())
    for value in report.values.values():
        assert_same(value, wanted, 1e-4)


@functools.cache
def in_one_batch(name: str) -> sl.Report:
    case = cases.by_name(name)
    model, x, y = case.make()
    return sl.measure(model, (x, y), case.loss, tolerance=1e-10)


@pytest.mark.parametrize("sizes", [(5, 5, 2), (1, 11), (12,), (1,) * 12], ids=str)
@pytest.mark.parametrize(
    "name", ["mlp", "mlp, squared error", "convolution, max pooling", "an output for every position"]
)
def test_ragged_batches_weigh_by_their_samples(name, sizes):
    case = cases.by_name(name)
    model, x, y = case.make()
    batches, start = [], 0
    for size in sizes:
        if start < len(y):
            batches.append((x[start : start + size], y[start : start + size]))
        start += size
    parts = sl.measure(model, batches, case.loss, tolerance=1e-10)
    for name, value in in_one_batch(case.name).values.items():
        assert parts[name].value == pytest.approx(value.value, rel=1e-9)


def test_a_loader_with_a_ragged_last_batch_equals_the_pair():
    case = cases.by_name("mlp")
    model, x, y = case.make()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=5)
    truth = expected("mlp")
    for value in sl.measure(model, loader, tolerance=1e-10).values.values():
        assert_same(value, truth, 1e-8)
