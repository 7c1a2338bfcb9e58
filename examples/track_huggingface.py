"""Follow flatness while the Trainer of Hugging Face trains a small language model."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from spiritlevel.integrations.huggingface import FlatnessCallback

torch.manual_seed(0)
config = GPT2Config(vocab_size=30, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
tokens = torch.randint(1, 30, (64, 8))
callback = FlatnessCallback(measures=["critical_sharpness", "critical_sharpness_invariant"], every=4, samples=8)
trainer = Trainer(
    model=GPT2LMHeadModel(config),
    args=TrainingArguments("out", max_steps=8, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True),
    train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
    callbacks=[callback],
)
callback.log_through(trainer)  # to wherever the trainer reports
trainer.train()
print(callback.history)
