"""Hugging Face models, built from small configurations: dict batches, losses of their own, tied embeddings."""

import copy

import pytest
from torch.nn import functional as F

import zoo

transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTH = 12, 5


def gpt2(attention="sdpa", **options):
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=8,
        n_layer=1,
        n_head=2,
        n_inner=8,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation=attention,
        **options,
    )
    return zoo.seeded(lambda: transformers.GPT2LMHeadModel(config))


def bert_config(attention="sdpa", **options):
    return transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
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


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gpt2_by_scored_tokens(attention):
    report = zoo.check(gpt2(attention), batches(), causal_loss, mean_over_tokens(1), exact=False)
    assert report["hessian_trace"].method == "random probes of the Hessian"
    assert set(report.problem["estimated_layers"].values()) == {"the loss does not split into outputs and targets"}
    assert "transformer.h.0.attn.c_attn.weight" in report.problem["layers"]
    assert "lm_head.weight" not in report.problem["layers"]  # tied: counted once


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_bert_whose_padding_row_is_also_an_output(attention):
    model = bert(attention)
    oracle = copy.deepcopy(model)
    oracle.bert.embeddings.word_embeddings.padding_idx = None  # the row moves as an output, so its lookup moves too
    report = zoo.check(model, batches(), masked_loss, mean_over_tokens(0), exact=False, oracle=oracle)
    assert "kept graph" in report["hessian_spectral_norm"].method
    assert any("the padding of a tied embedding" in note for note in report.notes)
