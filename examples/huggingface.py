"""A small language model of the Hugging Face library: batches as dicts with labels, split at the model's own logits."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import spiritlevel as sl

torch.manual_seed(0)
config = GPT2Config(
    vocab_size=30, n_positions=8, n_embd=8, n_layer=1, n_head=2, n_inner=16, bos_token_id=0, eos_token_id=0
)
model = GPT2LMHeadModel(config)  # random weights; from_pretrained gives trained ones


def batch(sentences: int, padded: int) -> dict[str, torch.Tensor]:
    """The last tokens are padding: not attended to, and with the label -100 not scored."""
    tokens = torch.randint(1, 30, (sentences, 8))
    mask = (torch.arange(8) < 8 - padded).long().expand(sentences, 8)
    return {"input_ids": tokens * mask, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


data = [batch(4, padded=0), batch(3, padded=3)]  # or a DataLoader of such batches
report = sl.measure(model, data, measures=["riemannian_spectral_norm", "kappa_sum"])
print(report)
