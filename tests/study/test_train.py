import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from spiritlevel.errors import SpiritLevelError
from spiritlevel.study import learners
from spiritlevel.study.compiling import how
from spiritlevel.study.evaluation import evaluate, gradient_norm
from spiritlevel.study.samples import load_samples
from spiritlevel.study.settings import CellConfig
from spiritlevel.study.train import Trained, build, ensemble_size, shares_batches, train
from spiritlevel.subjects.seeds import seed_for


def config(
    *,
    seed: int = 0,
    data: dict[str, Any] | None = None,
    model: str = "mlp:8",
    width: float = 1.0,
    start: str = "default",
    **training: Any,
) -> CellConfig:
    settings = {"learning_rate": 0.1, "batch_size": 16, "epochs": 2, **training}
    given = {"name": "random:50,6,3,0", **(data or {})}
    network = {"name": model, "width": width, "initialization": start}
    return CellConfig.model_validate(
        {"data": given, "model": network, "training": settings, "measure": {}, "seed": seed}
    )


def run(*configs: CellConfig) -> list[Trained]:
    return train(configs, load_samples(configs[0].data))


def weights(trained: Trained) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trained.model.parameters()])


def by_torch(cell: CellConfig, optimizer: type[torch.optim.Optimizer], **options: Any) -> torch.Tensor:
    """The same training with torch's own optimizer."""
    samples = load_samples(cell.data)
    model = build(cell, samples.train)
    stepper = optimizer(model.parameters(), lr=cell.training.learning_rate, **options)  # type: ignore[call-arg]
    generator = torch.Generator().manual_seed(seed_for(cell.seed, "batches"))
    for _ in range(cell.training.epochs):
        for chosen in torch.randperm(len(samples.train), generator=generator).split(cell.training.batch_size):
            stepper.zero_grad()
            F.cross_entropy(model(samples.train.x[chosen]), samples.train.y[chosen]).backward()
            stepper.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize(
    ("optimizer", "settings", "options"),
    [
        (torch.optim.SGD, {"optimizer": "sgd"}, {}),
        (
            torch.optim.SGD,
            {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.01},
            {"momentum": 0.9, "weight_decay": 0.01},
        ),
        (
            torch.optim.Adam,
            {"optimizer": "adam", "learning_rate": 0.01, "weight_decay": 0.1},
            {"weight_decay": 0.1},
        ),
    ],
)
def test_trains_as_torchs_optimizers_do(members, optimizer, settings, options):
    cells = [config(seed=seed, epochs=4, **settings) for seed in range(members)]
    for cell, trained in zip(cells, run(*cells), strict=True):
        torch.testing.assert_close(weights(trained), by_torch(cell, optimizer, **options), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", ["convnet", "resnet8", "alexnet"])
def test_convolutions_are_trained_as_torchs_optimizers_do(model):
    cell = config(model=model, data={"name": "random:20,2x8x8,3,0"}, momentum=0.9, epochs=2)
    expected = by_torch(cell, torch.optim.SGD, momentum=0.9)
    torch.testing.assert_close(weights(run(cell)[0]), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("model", "largest"), [("vgg16", 8), ("resnet8", 20)])
def test_a_large_batch_is_taken_in_parts_where_samples_know_of_no_other(model, largest, monkeypatch):
    monkeypatch.setattr(learners, "PART", 8)
    cell = config(
        model=model,
        width=0.125,
        start="kaiming_normal",
        data={"name": "random:30,2x8x8,3,0"},
        batch_size=20,
        momentum=0.9,
    )
    expected = by_torch(cell, torch.optim.SGD, momentum=0.9)
    taken = []
    with torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, given: taken.append(len(given[0])) if module.training else None
    ):
        (trained,) = run(cell)
    assert max(taken) == largest
    torch.testing.assert_close(weights(trained), expected, rtol=1e-3, atol=1e-5)
    assert trained.steps == 4


@pytest.mark.parametrize("members", [1, 3])
def test_the_same_cell_twice_is_the_same_bit_for_bit(members):
    cells = [config(seed=seed, data={"label_noise": 0.5}, optimizer="adam") for seed in range(members)]
    torch.manual_seed(1)
    first = run(*cells)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second = run(*cells)
    assert torch.equal(torch.get_rng_state(), before)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(weights(one), weights(other))
        assert one.curve == other.curve
    assert not torch.equal(weights(first[0]), weights(run(config(seed=9))[0]))


def test_an_ensemble_is_its_members_to_rounding_also_when_some_end_before_others():
    stop = {"stop": {"train_loss": 0.9}, "epochs": 60, "optimizer": "adam", "learning_rate": 0.02}
    cells = [config(seed=seed, **stop) for seed in range(4)]
    together, alone = run(*cells), [run(cell)[0] for cell in cells]
    assert len({len(trained.curve) for trained in alone}) > 1  # they do end at different epochs
    for one, other in zip(together, alone, strict=True):
        assert (len(one.curve), one.steps, one.stop_reason) == (len(other.curve), other.steps, other.stop_reason)
        torch.testing.assert_close(weights(one), weights(other), rtol=1e-3, atol=1e-4)
        assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-2)
        loss, _ = evaluate(one.model, *_training_data(cells[0]))
        assert loss == pytest.approx(one.curve[-1].train_loss)  # the weights are those of its own last epoch
    assert [trained.ensemble for trained in together] == [4] * 4


STARTS = ("xavier_normal", "kaiming_uniform", "normal")


@pytest.mark.parametrize("shape", ["2x8x8", "3x32x32"])
@pytest.mark.parametrize(
    ("optimizer", "settings", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "learning_rate": 0.003}, {"momentum": 0.9}),
        (torch.optim.Adam, {"optimizer": "adam", "learning_rate": 0.003}, {}),
    ],
)
def test_lenets_that_start_from_other_weights_share_their_batches(shape, optimizer, settings, options):
    data = {"name": f"random:30,{shape},3,0"}
    cells = [config(model="lenet5", data=data, start=start, epochs=3, batch_size=8, **settings) for start in STARTS]
    trained = run(*cells)
    assert [each.ensemble for each in trained] == [3] * 3
    for cell, each in zip(cells, trained, strict=True):
        torch.testing.assert_close(weights(each), by_torch(cell, optimizer, **options), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "shape"), [("lenet-caffe", "1x12x12"), ("lenet5", "1x28x28"), ("alexnet", "3x12x12")]
)
def test_a_pooled_network_alone_is_trained_as_torchs_optimizers_do(model, shape):
    cell = config(model=model, data={"name": f"random:30,{shape},3,0"}, epochs=2, batch_size=8, momentum=0.9)
    (trained,) = run(cell)
    torch.testing.assert_close(weights(trained), by_torch(cell, torch.optim.SGD, momentum=0.9), rtol=1e-3, atol=1e-5)
    assert trained.computed_with[0].endswith(f"convolutions {how()}")


def test_images_of_whole_numbers_are_refused_before_a_step():
    cell = config(model="lenet5", data={"name": "random:30,1x8x8,3,0"}, epochs=1)
    samples = load_samples(cell.data)
    whole = replace(samples, train=replace(samples.train, x=samples.train.x.long()))
    with pytest.raises(SpiritLevelError, match=r"images are torch\.int64, and networks are trained on float32"):
        train([cell], whole)


def test_lenets_that_share_their_batches_may_end_one_after_the_other():
    stop = {"stop": {"train_loss": 0.5}, "epochs": 40, "optimizer": "adam", "learning_rate": 0.003}
    data = {"name": "random:40,1x8x8,3,0"}
    cells = [config(model="lenet5", data=data, start=start, **stop) for start in STARTS]
    together, alone = run(*cells), [run(cell)[0] for cell in cells]
    assert len({len(trained.curve) for trained in alone}) > 1
    for one, other in zip(together, alone, strict=True):
        assert (len(one.curve), one.steps, one.stop_reason) == (len(other.curve), other.steps, other.stop_reason)
        torch.testing.assert_close(weights(one), weights(other), rtol=1e-3, atol=1e-4)


def test_lenets_share_batches_that_are_small_unless_asked_not_to():
    samples = load_samples(config(data={"name": "random:20,1x8x8,3,0"}).data)

    def shares(model: str, **training: Any) -> bool:
        cell = config(model=model, **training)
        return shares_batches(cell, build(cell, samples.train))

    assert shares("lenet5", batch_size=64)
    assert not shares("lenet5", batch_size=512)
    assert not shares("lenet5", batch_size=64, ensemble=1)
    assert not shares("convnet", batch_size=64)


def test_a_network_of_the_users_own_is_not_taken_for_a_lenet(tmp_path, monkeypatch):
    """It may compute something else, or freeze a part."""
    lines = (
        "from spiritlevel.subjects.networks.convolutional import LeNet",
        "class Other(LeNet):",
        "    def forward(self, x): return -super().forward(x)",
        "def other(): return Other((1, 8, 8), 3, (6, 16), (120, 84))",
        "def frozen():",
        "    model = LeNet((1, 8, 8), 3, (6, 16), (120, 84))",
        "    model.conv1.requires_grad_(False)",
        "    return model",
    )
    (tmp_path / "own_lenets.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    samples = load_samples(config(data={"name": "random:20,1x8x8,3,0"}).data)
    for name in ("own_lenets:other", "own_lenets:frozen"):
        cell = config(model=name, batch_size=8)
        assert not shares_batches(cell, build(cell, samples.train))


def _training_data(cell: CellConfig) -> tuple[torch.Tensor, torch.Tensor]:
    samples = load_samples(cell.data)
    return samples.train.x, samples.train.y


def test_convolutions_train_together_too():
    cells = [config(seed=seed, model="convnet", data={"name": "random:20,1x8x8,3,0"}) for seed in range(2)]
    for one, other in zip(run(*cells), [run(cell)[0] for cell in cells], strict=True):
        torch.testing.assert_close(weights(one), weights(other), rtol=1e-3, atol=1e-5)


def test_networks_with_buffers_are_trained_alone():
    cells = [config(seed=seed, model="resnet8", data={"name": "random:20,1x8x8,3,0"}, epochs=1) for seed in range(2)]
    with pytest.raises(SpiritLevelError, match=r"cannot be trained together.*bn1.running_mean.*training.ensemble"):
        run(*cells)
    assert run(cells[0])[0].curve[-1].epoch == 1


def test_many_test_samples_are_looked_at_as_seldom_as_training_on_as_many_takes():
    """And always at the end; with fewer test samples than training samples, after every epoch."""

    def tested(train_samples: int, epochs: int) -> list[int]:
        (trained,) = run(config(data={"name": "digits", "train_samples": train_samples}, epochs=epochs))
        return [row.epoch for row in trained.curve if row.test_loss is not None]

    test_samples = len(load_samples(config(data={"name": "digits"}).data).test)
    seldom = math.ceil(test_samples / 100)
    assert seldom > 2
    assert tested(100, seldom + 2) == [seldom, seldom + 2]
    assert tested(test_samples, 3) == [1, 2, 3]
    (trained,) = run(config(data={"name": "digits", "train_samples": 100}, epochs=2))
    assert (trained.curve[0].test_loss, trained.curve[0].test_accuracy) == (None, None)
    samples = load_samples(config(data={"name": "digits"}).data)
    assert (trained.curve[-1].test_loss, trained.curve[-1].test_accuracy) == evaluate(
        trained.model, samples.test.x, samples.test.y
    )


def test_ensembles_where_they_are_faster_or_asked_for():
    samples = load_samples(config().data)

    def size(seeds: int, **training: Any) -> int:
        cell = config(**training)
        return ensemble_size(cell, build(cell, samples.train), seeds)

    assert [size(seeds) for seeds in (1, 5, 6, 16, 17, 33)] == [1, 1, 6, 16, 9, 11]
    assert size(8, batch_size=200_000) == 1
    assert size(8, batch_size=200_000, ensemble=3) == 3
    assert size(8, ensemble=1) == 1


def test_every_stopping_rule_stops():
    for rule in ({"train_loss": 1.0}, {"train_accuracy": 0.6}, {"gradient_norm": 0.15}):
        trained = run(config(epochs=300, learning_rate=0.05, optimizer="adam", stop=rule))[0]
        assert (trained.stop_reason, trained.reached) == ("stop rule", True)
        assert trained.curve[-1].epoch < 300
        [(name, value)] = rule.items()
        found = trained.gradient_norm if name == "gradient_norm" else getattr(trained.curve[-1], name)
        assert found >= value if name == "train_accuracy" else found <= value


def test_a_rule_of_several_conditions_needs_all_of_them():
    rule = {"train_loss": 5.0, "train_accuracy": 0.9}
    trained = run(config(epochs=300, learning_rate=0.05, optimizer="adam", stop=rule))[0]
    assert trained.curve[-1].train_accuracy >= 0.9
    assert trained.curve[-1].epoch > 1


def test_what_did_not_arrive_says_so():
    short = run(config(epochs=1, stop={"train_accuracy": 1.0}))[0]
    assert (short.reached, short.stop_reason) == (False, "epochs")
    without_rule = run(config(epochs=1))[0]
    assert (without_rule.reached, without_rule.stop_reason) == (True, "epochs")
    required = run(config(epochs=3, stop={"train_loss": 50.0}, require={"train_accuracy": 1.0}))[0]
    assert (required.reached, required.stop_reason, len(required.curve)) == (False, "stop rule", 1)


@pytest.mark.parametrize("members", [1, 2])
def test_training_that_diverges_ends_and_says_so(members):
    trained = run(*(config(seed=seed, epochs=500, learning_rate=1e30) for seed in range(members)))
    assert {network.stop_reason for network in trained} == {"diverged"}
    assert not any(network.reached for network in trained)
    assert all(network.curve[-1].epoch < 500 for network in trained)


def test_the_curve_has_an_entry_for_each_evaluation():
    trained = run(config(epochs=5, evaluate_every=2, schedule="cosine", learning_rate=0.4))[0]
    assert [entry.epoch for entry in trained.curve] == [2, 4, 5]
    rates = [0.2 * (1 + math.cos(math.pi * (epoch - 1) / 5)) for epoch in (2, 4, 5)]
    assert [entry.learning_rate for entry in trained.curve] == pytest.approx(rates)
    assert trained.steps == 5 * 4  # 50 samples in batches of 16, the last of 2


def test_a_rate_that_is_halved_is_that_of_torchs_scheduler():
    cell = config(epochs=6, halve_every=2, learning_rate=0.4)
    stepper = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.4)
    scheduler = torch.optim.lr_scheduler.StepLR(stepper, 2, gamma=0.5)
    expected = []
    for _ in range(6):
        expected.append(scheduler.get_last_lr()[0])
        stepper.step()
        scheduler.step()
    assert expected[0] > expected[-1]
    assert [entry.learning_rate for entry in run(cell)[0].curve] == pytest.approx(expected)
    assert not torch.equal(weights(run(cell)[0]), weights(run(config(epochs=6, learning_rate=0.4))[0]))


def test_a_rate_that_is_never_halved_leaves_the_settings_of_a_cell_as_they_were():
    assert "halve_every" not in config().model_dump()["training"]
    assert config(halve_every=3).model_dump()["training"]["halve_every"] == 3
    with pytest.raises(ValueError, match="belongs to schedule = 'constant'"):
        config(halve_every=3, schedule="cosine")


def test_evaluation_is_the_mean_over_all_samples(monkeypatch):
    cell = config()
    samples = load_samples(cell.data)
    model, x, y = build(cell, samples.train), samples.train.x, samples.train.y
    loss = F.cross_entropy(model(x), y)
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    monkeypatch.setattr("spiritlevel.study.evaluation.CHUNK", 7)
    found, accuracy = evaluate(model, x, y)
    assert found == pytest.approx(loss.item())
    assert accuracy == pytest.approx((model(x).argmax(1) == y).float().mean().item())
    assert gradient_norm(model, x, y) == pytest.approx(torch.cat([g.flatten() for g in gradient]).norm().item())


def test_real_targets_are_refused(tmp_path):
    import numpy as np

    path = tmp_path / "real.npz"
    arrays = {f"{a}_{split}": np.zeros((4, 2), dtype=np.float32) for a in "xy" for split in ("train", "test")}
    np.savez(path, **arrays)
    with pytest.raises(
        SpiritLevelError, match=r"studies train classifiers: .* has real targets where labels are needed"
    ):
        load_samples(config(data={"name": str(path)}).data)


def test_test_samples_of_another_shape_are_refused(tmp_path):
    import numpy as np

    path = tmp_path / "other.npz"
    arrays = {f"x_{split}": np.zeros((4, n), dtype=np.float32) for split, n in (("train", 2), ("test", 3))}
    np.savez(path, **arrays, y_train=np.array([0, 1, 0, 1]), y_test=np.array([0, 1, 0, 1]))
    with pytest.raises(SpiritLevelError, match=r"to train on have the shape \(2,\), those to test \(3,\)"):
        load_samples(config(data={"name": str(path)}).data)
