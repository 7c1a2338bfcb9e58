"""Hugging Face models, built from small configurations: dict batches, losses of their own, tied embeddings."""

import copy

import pytest
import torch
from torch.nn import functional as F

import spiritlevel as sl
import zoo
from refusals import refused

transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTH = 8, 5


def gpt2(attention="sdpa", **options):
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=4,
        n_layer=1,
        n_head=2,
        n_inner=4,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation=attention,
        **options,
    )
    return zoo.seeded(lambda: transformers.GPT2LMHeadModel(config))


def bert_config(attention="sdpa", **options):
    return transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=4,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=4,
        max_position_embeddings=LENGTH,
        attn_implementation=attention,
        **options,
    )


def bert(attention="sdpa", **options):
    return zoo.seeded(lambda: transformers.BertForMaskedLM(bert_config(attention, **options)))


def classifier():
    return zoo.seeded(lambda: transformers.BertForSequenceClassification(bert_config(num_labels=3)))


def batches():
    """Two batches with different numbers of scored tokens; token 0, BERT's padding, is among the inputs."""
    first, second = zoo.integers(VOCABULARY, 3, LENGTH, seed=3), zoo.integers(VOCABULARY, 2, LENGTH, seed=4)
    first[0, 1] = 0
    few = first.clone()
    few[0, 2:], few[1, 1:] = -100, -100
    return [{"input_ids": first, "labels": few}, {"input_ids": second, "labels": second}]


def causal_loss(model, batch):
    return model(**batch).loss, int((batch["labels"][:, 1:] != -100).sum())


def masked_loss(model, batch):
    return model(**batch).loss, int((batch["labels"] != -100).sum())


def mean_over_tokens(shift):
    """The mean over all scored tokens of all batches, from the logits; `shift` 1 where a token predicts the next one."""

    def mean(model):
        total, count = 0, 0
        for batch in batches():
            logits, labels = model(batch["input_ids"]).logits[:, : LENGTH - shift], batch["labels"][:, shift:]
            total = total + F.cross_entropy(logits.mT, labels, reduction="sum")
            count += int((labels != -100).sum())
        return total / count

    return mean


@pytest.mark.long
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gpt2_by_scored_tokens(attention):
    report = zoo.check(gpt2(attention), batches(), causal_loss, mean_over_tokens(1), exact=False)
    assert report["hessian_trace"].method == "whole blocks by products with unit vectors"
    assert set(report.problem["estimated_layers"].values()) == {"the loss does not split into outputs and targets"}
    assert "transformer.h.0.attn.c_attn.weight" in report.problem["layers"]
    assert "lm_head.weight" not in report.problem["layers"]  # tied: counted once


@pytest.mark.long
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_bert_whose_padding_row_is_also_an_output(attention):
    model = bert(attention)
    oracle = copy.deepcopy(model)
    oracle.bert.embeddings.word_embeddings.padding_idx = None  # the row moves as an output, so its lookup moves too
    report = zoo.check(model, batches(), masked_loss, mean_over_tokens(0), exact=False, oracle=oracle)
    assert "kept graph" in report["hessian_spectral_norm"].method
    assert any("the padding of a tied embedding" in note for note in report.notes)


def test_single_precision_is_checked_without_false_alarm():
    """A model that casts its logits itself: differences of gradients are taken in double precision all the same."""
    names = ["hessian_spectral_norm"]
    wanted = sl.measure(gpt2(), batches(), causal_loss, measures=names)[names[0]].value
    report = sl.measure(gpt2().float(), batches(), causal_loss, measures=names)
    assert report[names[0]].value == pytest.approx(wanted, rel=1e-3)
    assert "kept graph" in report[names[0]].method


def test_half_precision_is_upcast_on_request():
    low = gpt2().bfloat16()
    wide = copy.deepcopy(low).double()
    zoo.check(low, batches(), causal_loss, mean_over_tokens(1), oracle=wide, exact=False, dtype=torch.float64)
    assert low.lm_head.weight.dtype == torch.bfloat16


def test_a_part_of_a_model_as_adapters_train_it():
    """The base frozen, layer normalization and biases trained."""
    model = gpt2()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("ln_" in name or name.endswith("bias"))
    names = ["hessian_spectral_norm", "riemannian_spectral_norm", "kappa_sum"]
    report = sl.measure(model, batches(), causal_loss, measures=names, tolerance=1e-7)
    H = zoo.hessian(model, mean_over_tokens(1))
    assert report[names[0]].value == pytest.approx(float(torch.linalg.eigvalsh(H).abs().max()), rel=1e-6)
    assert not report["kappa_sum"].available  # no matrix is trained, so there is no layer


class Sentences(torch.utils.data.Dataset):
    """As libraries of data sets have it: one dict for each sample."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        tokens = zoo.integers(VOCABULARY, 5, LENGTH, seed=3)[index]
        return {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "labels": int(index) % 3}

    @staticmethod
    def everything():
        return next(iter(torch.utils.data.DataLoader(Sentences(), batch_size=5)))


def sentence_loss(model, batch):
    return model(**batch).loss, len(batch["labels"])


def test_a_dataset_a_loader_and_encodings_are_the_same_data():
    loader = torch.utils.data.DataLoader(Sentences(), batch_size=3)
    encodings = [transformers.BatchEncoding(dict(batch)) for batch in loader]
    found = [
        sl.measure(classifier(), data, sentence_loss, measures=["hessian_spectral_norm"], tolerance=1e-8)
        for data in (Sentences(), loader, encodings)
    ]
    everything = next(iter(torch.utils.data.DataLoader(Sentences(), batch_size=5)))
    H = zoo.hessian(classifier(), lambda model: model(**everything).loss)
    for report in found:
        assert report.problem["samples"] == 5
        assert report["hessian_spectral_norm"].value == pytest.approx(
            float(torch.linalg.eigvalsh(H).abs().max()), rel=1e-6
        )


def logits_loss(outputs, targets):
    return F.cross_entropy(outputs.logits, targets)


def test_inputs_by_keyword_and_labels_beside_them():
    whole = next(iter(torch.utils.data.DataLoader(Sentences(), batch_size=5)))
    labels = whole.pop("labels")
    report = zoo.check(
        classifier(),
        (whole, labels),
        logits_loss,
        lambda model: logits_loss(model(**whole), labels),
        exact=False,
        measures=zoo.MEASURES,
    )
    reason = "the outputs are not one tensor with a row for every sample"
    assert set(report.problem["estimated_layers"].values()) == {reason}


@pytest.mark.parametrize(("make", "shift"), [(gpt2, 1), (bert, 0)])
def test_dicts_with_labels_are_split_at_the_logits(make, shift):
    """The next token or the same one, positions that do not count, batches that weigh by scored tokens."""
    model, names = make(), ["hessian_spectral_norm"]
    problem = sl.Problem(model, "cross_entropy", batches())
    assert not problem.whole
    assert problem.loss() == pytest.approx(float(mean_over_tokens(shift)(model.eval()).detach()), rel=1e-12)
    own = sl.measure(model, batches(), masked_loss if make is bert else causal_loss, measures=names, tolerance=1e-6)
    assert sl.measure(model, batches(), measures=names, tolerance=1e-6)[names[0]].value == pytest.approx(
        own[names[0]].value, rel=1e-5
    )


def test_the_gauss_newton_part_is_exact_at_the_logits_of_dicts(only_probes):
    model = gpt2()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("c_fc.weight"))
    (parameter,) = (p for p in model.parameters() if p.requires_grad)
    found = sl.measure(model, batches(), measures=["hessian_trace"])["hessian_trace"]
    assert found.method == "exact Gauss–Newton part, remainder by random probes"

    def mean(weight):
        (name,) = (name for name, p in model.named_parameters() if p.requires_grad)
        return mean_over_tokens(1)(lambda *x: torch.func.functional_call(model.eval(), {name: weight}, x))

    truth = float(torch.autograd.functional.hessian(mean, parameter.detach()).reshape(parameter.numel(), -1).trace())
    assert abs(found.value - truth) < 4 * found.error
    assert found.error < 0.3 * abs(truth)


def sentences(labels):
    return [{**dict(Sentences.everything()), "labels": labels}]


def test_the_loss_must_be_the_models_own():
    one = bert_config(num_labels=1)
    regression = zoo.seeded(lambda: transformers.BertForSequenceClassification(one))
    numbers = sentences(torch.linspace(-1, 1, 5).double())
    report = sl.measure(regression, numbers, "mse", measures=["hessian_spectral_norm"])
    assert regression.config.problem_type is None  # which a call with labels would write
    assert report.loss == pytest.approx(float(regression.eval()(**numbers[0]).loss.detach()))
    many = bert_config(num_labels=3, problem_type="multi_label_classification")
    tags = zoo.seeded(lambda: transformers.BertForSequenceClassification(many))
    labels = sentences((torch.arange(15).reshape(5, 3) % 2).double())
    with pytest.raises(sl.SpiritLevelError, match=r"pass loss=torch.nn.BCEWithLogitsLoss\(\), which it is"):
        sl.measure(tags, labels, measures=["hessian_trace"])
    report = sl.measure(tags, labels, torch.nn.BCEWithLogitsLoss(), measures=["hessian_spectral_norm"])
    assert report.loss == pytest.approx(float(tags.eval()(**labels[0]).loss.detach()))


@pytest.mark.long
def test_every_call_takes_dicts_with_labels():
    model, data = classifier(), torch.utils.data.DataLoader(Sentences(), batch_size=3)
    found = sl.audit(model, data, measures=["hessian_spectral_norm"], kinds=["output scale"], strengths=[0.5])
    assert found.verdict("hessian_spectral_norm", "output scale") == "moves"
    assert sl.find_symmetries(model, data).dimension > 0
    assert sl.sharpen(model, data, target=50.0).after >= 50
    assert (
        sl.compare({"a": model, "b": model}, data, measures=["hessian_spectral_norm"], sampling=False).reports["a"].loss
        > 0
    )
    assert sl.spectrum(model, data, steps=4, probes=2, ends=1).top
    assert sl.pac_bayes(model, data, draws=2).terms["training error"] == 0.8


def test_what_people_try_first_is_answered_with_what_works():
    whole = next(iter(torch.utils.data.DataLoader(Sentences(), batch_size=5)))
    labels = whole.pop("labels")
    found = sl.measure(classifier(), (whole, labels), measures=["kappa_sum"])["kappa_sum"]
    assert found.value > 0
    assert found.converged
    with refused(
        "a loss of the form (model, batch) must return (mean loss, count), got CausalLMOutputWithCrossAttentions: return for "
        "example `out.loss, len(batch['input_ids'])`"
    ):
        sl.measure(gpt2(), batches(), lambda model, batch: model(**batch))
