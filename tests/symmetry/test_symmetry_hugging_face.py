"""Groups of Hugging Face networks: fused projections, rotary positions, grouped queries, normalized queries and keys."""

from typing import Any

import pytest
import torch
from torch import Tensor

from networks import randomized
from spiritlevel.network.rewrites import PlainDerivatives
from spiritlevel.symmetry import find_symmetries, relative_change

transformers = pytest.importorskip("transformers")

TOKENS, LENGTH = 9, 3
TEXT = {"vocab_size": TOKENS, "max_position_embeddings": LENGTH, "bos_token_id": 0, "eos_token_id": 0}
ONE = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 6}
GPT2 = {"n_positions": LENGTH, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_inner": 6, "vocab_size": TOKENS}
IMAGE = {"image_size": 4, "patch_size": 2, "num_channels": 1}


def tokens() -> Tensor:
    return torch.randint(0, TOKENS, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def images() -> Tensor:
    return torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


# Two heads of four channels have matrices of dimension 16; rotary positions leave four numbers instead.
# An embedding tied to the last layer behind a gain leaves no rotation, nor does normalization after each sum (BERT).
CASES: dict[str, tuple[str, str, dict[str, Any], Any, int, int]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2, tokens, 4 * 16, 0),
    "gpt2 eager": ("GPT2Config", "GPT2LMHeadModel", {**GPT2, "attn_implementation": "eager"}, tokens, 4 * 16, 0),
    "gpt2 untied": ("GPT2Config", "GPT2LMHeadModel", {**GPT2, "tie_word_embeddings": False}, tokens, 4 * 16, 21),
    "bert": ("BertConfig", "BertForSequenceClassification", TEXT | ONE, tokens, 4 * 16, 0),
    "vit": ("ViTConfig", "ViTForImageClassification", ONE | IMAGE, images, 4 * 16, 21),
    "llama": (
        *("LlamaConfig", "LlamaForCausalLM"),
        {**TEXT, **ONE, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4},
        *(tokens, 2 * 4 + 2 * 16, 28),
    ),
    "qwen3": (
        *("Qwen3Config", "Qwen3ForCausalLM"),
        {**TEXT, **ONE, "num_key_value_heads": 2, "head_dim": 4},
        *(tokens, 2 * 16, 28),
    ),
    "half rotary": (
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        TEXT | ONE | {"rotary_pct": 0.5},
        tokens,
        2 * (2 + 4 + 16),
        21,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_groups_are_found_and_twins_agree(name: str) -> None:
    config, build, options, inputs, linear, rotation = CASES[name]
    torch.manual_seed(0)
    model = randomized(getattr(transformers, build)(getattr(transformers, config)(**options)))
    symmetries = find_symmetries(model, inputs())
    sizes = {kind: sum(g.dimension for g in symmetries.groups if g.kind == kind) for kind in ("linear", "rotation")}
    assert sizes == {"linear": linear, "rotation": rotation}
    twin = symmetries.sample(0.5, 0, kinds=["rescaling", "linear", "rotation", "shift"]).apply(model)
    with PlainDerivatives(), torch.no_grad():  # Llama rounds to single precision inside
        assert relative_change(model(inputs()).logits, twin(inputs()).logits) < 1e-12
