import pytest
import torch
from torch import nn

import spiritlevel as sl
from spiritlevel.study.measuring import (
    measure_all,
    measure_cell,
    measured_samples,
    moved_along_orbit,
    random_layer_factors,
)
from spiritlevel.study.samples import load_samples
from spiritlevel.study.settings import CellConfig, MeasureSection
from spiritlevel.study.train import build
from spiritlevel.subjects.labels import LabelNoise
from spiritlevel.subjects.networks import build_model


def config(**measure: object) -> CellConfig:
    return CellConfig.model_validate(
        {
            "data": {"name": "random:40,6,3,0", "label_noise": 0.5},
            "model": {"name": "mlp:8-5"},
            "training": {"learning_rate": 0.1, "batch_size": 8, "epochs": 1},
            "measure": {"measures": ["hessian_trace", "kappa_trace_sum", "hessian_spectral_norm"], **measure},
            "seed": 3,
        }
    )


@pytest.fixture(scope="module")
def network() -> nn.Module:
    return build(config(), load_samples(config().data).train)


def test_measures_the_trained_labels_on_the_same_samples_for_every_seed():
    samples = load_samples(config().data)
    x, y = measured_samples(config(), samples)
    assert torch.equal(x, samples.train.x)
    assert torch.equal(y, LabelNoise(0.5, 3).applied(samples.train.y, 3))
    some = config(samples=10)
    x, y = measured_samples(some, samples)
    assert len(x) == len(y) == 10
    other, _ = measured_samples(some.model_copy(update={"seed": 4}), samples)
    assert torch.equal(other, x)
    assert len(measured_samples(config(samples=4000), samples)[0]) == 40


def test_measures_under_further_losses_have_labels_of_their_own(network):
    section = MeasureSection.model_validate(
        {
            "measures": ["normalized_sharpness"],
            "also": [{"loss": "normalized_cross_entropy", "measures": ["normalized_sharpness"]}],
        }
    )
    data = measured_samples(config(), load_samples(config().data))
    report = measure_all(section, network, data)
    assert list(report) == ["normalized_sharpness", "normalized_sharpness(loss=normalized_cross_entropy)"]
    for name, loss in zip(report, ("cross_entropy", "normalized_cross_entropy"), strict=True):
        expected = sl.measure(network, data, loss, measures=["normalized_sharpness"])["normalized_sharpness"]
        assert report[name].value == pytest.approx(expected.value)


def test_a_random_rescaling_moves_the_trace_and_leaves_kappa(network):
    found = measure_cell(config(rescale=[5, 25]), network, measured_samples(config(), load_samples(config().data)))
    before, after = found["measures"]["values"], found["rescaled"]["values"]
    assert after["kappa_trace_sum"]["value"] == pytest.approx(before["kappa_trace_sum"]["value"], rel=1e-4)
    assert after["hessian_trace"]["value"] > 100 * before["hessian_trace"]["value"]
    factors = list(found["rescaling"].values())
    assert len(factors) == 3
    assert all(5 <= factor <= 25 for factor in factors[:2])
    assert factors[2] == pytest.approx(1 / (factors[0] * factors[1]))
    assert found["attacks"] == []


def test_every_network_of_a_seed_is_rescaled_by_factors_of_its_own(network):
    """Equal ones would leave the order of plain measures as it was, however random they are."""
    data = measured_samples(config(), load_samples(config().data))
    cell = config(rescale=[5, 25], measures=["kappa_trace_sum"])

    def factors(**training: object) -> list[float]:
        changed = cell.training.model_copy(update=training)
        found = measure_cell(cell.model_copy(update={"training": changed}), network, data)
        return list(found["rescaling"].values())

    assert factors() == factors() == factors(ensemble=2, evaluate_every=3)  # which say nothing of the network
    for other in (factors(batch_size=4), factors(learning_rate=0.2), factors(schedule="cosine"), factors(epochs=7)):
        assert all(one != pytest.approx(another, rel=1e-3) for one, another in zip(factors(), other, strict=True))


def test_random_factors_are_symmetries_of_every_kind_of_network():
    for name in ("lenet", "resnet8", "convnet"):
        model = build_model(name, input_shape=(1, 16, 16), classes=3).eval()
        example = torch.rand(4, 1, 16, 16)
        factors = random_layer_factors(model, example, (5.0, 25.0), 0)
        twin = sl.rescale_layers(model, factors, example)  # refuses what is no symmetry
        assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
        assert random_layer_factors(model, example, (5.0, 25.0), 0) == factors
        assert random_layer_factors(model, example, (5.0, 25.0), 1) != factors


def test_attacks_reach_their_targets_and_leave_kappa(network):
    data = measured_samples(config(), load_samples(config().data))
    found = measure_cell(config(attack_targets=[1e2, 1e4]), network, data)
    assert [attack["target"] for attack in found["attacks"]] == [1e2, 1e4]
    for attack in found["attacks"]:
        values = attack["measures"]["values"]
        assert values["hessian_spectral_norm"]["value"] >= 0.99 * attack["target"]
        assert values["kappa_trace_sum"]["value"] == pytest.approx(
            found["measures"]["values"]["kappa_trace_sum"]["value"], rel=1e-3
        )
        assert attack["output_change"] < 1e-4


def test_maximisers_are_left_out_of_what_is_stored(network):
    data = measured_samples(config(), load_samples(config().data))
    found = measure_cell(config(measures=["hessian_spectral_norm", "epsilon_sharpness"]), network, data)
    assert {value["witness"] for value in found["measures"]["values"].values()} == {None}
    assert sl.Report.from_dict(found["measures"])["hessian_spectral_norm"].value > 0


def test_a_twin_along_the_orbit_has_the_same_function_and_other_weights():
    model = build_model("transformer-1", input_shape=(1, 8, 8), classes=10, width=0.25).double()
    x = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    twin = moved_along_orbit(model, x, 0.5, seed=0)
    torch.testing.assert_close(twin(x), model(x), rtol=1e-9, atol=1e-9)
    ratio = (twin.blocks[0].q.weight / model.blocks[0].q.weight).detach()
    assert float(ratio.std(1).min()) > 0.1  # no row was only rescaled
