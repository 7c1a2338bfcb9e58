"""The audit of a small GPT-2, a ViT and a Llama-type network: writes the tables of docs/transformers.md.

    python docs/results/audit_transformers.py            # all three, into the page
    python docs/results/audit_transformers.py llama      # one of them, printed

Weights are random, then trained for some seconds: sums modulo 7 as sequences of two tokens, or scikit-learn's digits. All
in double precision with one seed; each network has some thousand parameters.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from sklearn.datasets import load_digits
from torch import Tensor, nn

import spiritlevel as sl

PAGE = Path(__file__).parents[1] / "transformers.md"
KINDS = ("layer", "neuron", "linear", "rotation")
MORE = ("fisher_rao_full", "relative_flatness", "whitened_flatness", "whitened_flatness_max")  # beside the default set
TOKENS = 7
SMALL = {"bos_token_id": 0, "eos_token_id": 0, "vocab_size": TOKENS}


class Logits(nn.Module):
    """The logits of a Hugging Face model as one tensor; of the last position where there are several."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.inner(x).logits
        return logits[:, -1] if logits.dim() == 3 else logits


def sums() -> tuple[Tensor, Tensor]:
    pairs = torch.cartesian_prod(torch.arange(TOKENS), torch.arange(TOKENS))
    return pairs, pairs.sum(1) % TOKENS


def digits() -> tuple[Tensor, Tensor]:
    found = load_digits()
    images = torch.tensor(found.images[:100], dtype=torch.float64).unsqueeze(1) / 16
    return images, torch.tensor(found.target[:100])


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_positions=2, n_embd=8, n_layer=1, n_head=2, n_inner=16, tie_word_embeddings=False, **SMALL
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=4,
        **SMALL,
    )
    return transformers.LlamaForCausalLM(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=12,
        image_size=8,
        patch_size=4,
        num_channels=1,
        num_labels=10,
    )
    return transformers.ViTForImageClassification(config)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "GPT-2": (gpt2, sums),
    "ViT": (vit, digits),
    "Llama": (llama, sums),
}


def trained(name: str, steps: int = 400) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    build, data = NETWORKS[name]
    torch.manual_seed(0)
    model, (x, y) = Logits(build()).double(), data()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # gains and biases as training would leave them, not at one and zero
                parameter += 0.2 * torch.randn_like(parameter)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval(), (x, y)


def table(name: str) -> str:
    """The factor by which each measure moves under each kind of change, as a table in Markdown."""
    model, data = trained(name)
    symmetries = sl.find_symmetries(model, data[0])
    names = [each.name for each in sl.list_measures() if not each.costly or each.name in MORE]
    audit = sl.audit(model, data, measures=names, kinds=KINDS, strengths=(1.0,), tolerance=1e-2)
    lines = [f"| measure | {' | '.join(audit.kinds)} |", "| --- |" + " --- |" * len(audit.kinds)]
    lines += [f"| `{m}` | {' | '.join(_cell(audit, m, kind) for kind in audit.kinds)} |" for m in names]
    total = {
        kind: sum(g.dimension for g in symmetries.groups if g.kind == kind) for kind in ("linear", "rotation", "shift")
    }
    number = sum(p.numel() for p in model.parameters())
    head = (
        f"{number} parameters, loss {audit.original.loss:.2g}. {symmetries.dimension} rescaling factors; groups of matrices of "
        f"dimension {total['linear']}, of rotations {total['rotation']}, of shifts {total['shift']}; "
        f"the orbit has dimension {symmetries.orbit_dimension}."
    )
    return head + "\n\n" + "\n".join(lines) + "\n"


def _cell(audit: sl.Audit, measure: str, kind: str) -> str:
    finding = audit.finding(measure, kind)
    factor = f"{finding.factor:.3g}" if finding.factor > 1.1 else f"{finding.factor:.3f}"
    if finding.verdict in ("moves", "undecided"):
        return f"{'✗' if finding.verdict == 'moves' else '?'} {factor}"
    return f"✓ {finding.factor - 1:.0e}"


def main(chosen: list[str]) -> None:
    if chosen:
        for name in NETWORKS:
            if name.lower() in chosen:
                print(table(name))
        return
    text = PAGE.read_text()
    for name in NETWORKS:
        part = re.compile(f"(<!-- audit: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text = part.sub(lambda found, name=name: f"{found[1]}\n{table(name)}\n{found[2]}", text)
        PAGE.write_text(text)


if __name__ == "__main__":
    main([argument.lower() for argument in sys.argv[1:]])
