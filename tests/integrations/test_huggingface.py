"""The callback for the Trainer of transformers, with the real trainer."""

from typing import Any

import pytest
import torch

import spiritlevel as sl

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from spiritlevel.integrations.huggingface import FlatnessCallback, own_loss  # noqa: E402

# What transformers itself warns of in a training as small as this.
pytestmark = pytest.mark.filterwarnings("ignore")


def language_model() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=20, n_positions=6, n_embd=8, n_layer=1, n_head=2, n_inner=12, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def sentences() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(1, 20, (32, 6), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]


def trained(folder: Any, callback: Any, **options: Any) -> tuple[Any, Any]:
    model = language_model()
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=4, learning_rate=1e-2, report_to=[], save_strategy="no", use_cpu=True,
        disable_tqdm=True, seed=0, **{"max_steps": 6, "logging_steps": 2, **options},
    )  # fmt: skip
    callbacks = [callback] if callback is not None else []
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=sentences(), callbacks=callbacks)
    return model, trainer


@pytest.mark.long
def test_a_training_with_the_callback_is_the_training_without(tmp_path) -> None:
    options = {"gradient_accumulation_steps": 2}
    names = ["riemannian_nodewise_spectral_norm", "preconditioned_largest_eigenvalue", "critical_sharpness"]
    callback = FlatnessCallback(measures=names, every=6, samples=6, tolerance=1e-2)
    followed, trainer = trained(tmp_path, callback, **options)
    trainer.train()
    alone, other = trained(tmp_path, None, **options)
    other.train()
    for name, value in alone.state_dict().items():
        assert torch.equal(value, followed.state_dict()[name]), name
    assert [point["step"] for point in callback.history] == [1, 6]
    rate = callback.history[0].thresholds["critical_sharpness"] / 2  # its inverse
    assert callback.history[0].thresholds["preconditioned_largest_eigenvalue"] == pytest.approx(38 * rate, rel=1e-3)
    assert callback.history[0]["preconditioned_largest_eigenvalue"].value > 0
    assert "no line of stability: the learning rate is 0.0" in callback.history[-1].notes  # the schedule has ended
    cold = sl.measure(followed, callback.tracker.probe, own_loss, measures=[names[0]])
    point = callback.history[-1][names[0]]
    assert point.value == pytest.approx(cold[names[0]].value, abs=point.error + cold[names[0]].error)
    key = f"flatness/{names[0]}"
    logged = {entry["step"]: entry[key] for entry in trainer.state.log_history if key in entry}
    assert logged == {point["step"]: point[names[0]].value for point in callback.history}


def test_points_are_reported_where_the_trainer_reports_to(tmp_path) -> None:
    class Reporter(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            self.seen += [state.global_step] if "flatness/gradient_norm" in logs else []

    reporter = Reporter()
    callback = FlatnessCallback(measures=["gradient_norm"], at_loss=[1e9], samples=8)
    _, trainer = trained(tmp_path, callback, max_steps=3, logging_steps=1)
    trainer.add_callback(reporter)
    callback.log_through(trainer)
    trainer.train()
    assert (
        reporter.seen == [point["step"] for point in callback.history] == [2, 3]
    )  # it logs a step's loss after the step


def test_labels_are_counted_as_the_model_counts_them() -> None:
    model = language_model()
    tokens = torch.stack([row["input_ids"] for row in sentences()[:2]])
    labels = tokens.clone()
    labels[0, 3:] = -100
    assert own_loss(model, {"input_ids": tokens, "labels": labels})[1] == 2 + 5
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=3
    )
    classifier = transformers.BertForSequenceClassification(config)
    assert own_loss(classifier, {"input_ids": tokens, "labels": torch.tensor([0, 2])})[1] == 2
    masked = transformers.BertForMaskedLM(config)
    assert own_loss(masked, {"input_ids": tokens, "labels": labels})[1] == 3 + 6
    with pytest.raises(sl.SpiritLevelError, match="the batches have no labels, only input_ids"):
        own_loss(model, {"input_ids": tokens})
