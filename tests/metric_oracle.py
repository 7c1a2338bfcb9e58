"""Traces of a layer's block of the Hessian in a metric, from explicitly formed matrices.

Inputs are caught by hooks on the modules and patches laid out by `F.unfold`, independently of the library.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def inputs_of(model: nn.Module, x) -> dict[str, Tensor]:
    """Weight's name → all its inputs as rows, (groups, count, a)."""
    caught: dict[str, Tensor] = {}

    def catch(name, module):
        def hook(_module, args):
            rows = _rows(module, args[0].detach())
            caught[name] = torch.cat([caught[name], rows], 1) if name in caught else rows

        return module.register_forward_pre_hook(hook)

    handles = [
        catch(f"{name}.weight" if name else "weight", module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding)
    ]
    with torch.no_grad():
        model(*x) if isinstance(x, tuple) else model(x)
    for handle in handles:
        handle.remove()
    return caught


def _rows(module: nn.Module, phi: Tensor) -> Tensor:
    if isinstance(module, nn.Embedding):
        return F.one_hot(phi, module.num_embeddings).double().reshape(1, -1, module.num_embeddings)
    if isinstance(module, nn.Linear):
        return phi.double().reshape(1, -1, phi.shape[-1])
    windows = F.unfold(phi.double(), module.kernel_size, module.dilation, module.padding, module.stride)
    parted = windows.reshape(len(phi), module.groups, -1, windows.shape[2])
    return parted.permute(1, 0, 3, 2).flatten(1, 2)


def block(model: nn.Module, loss, x, y, *names: str) -> Tensor:
    """The block of the Hessian of these weights, (entries, entries)."""
    values = {key: value.detach() for key, value in model.named_parameters()}
    sizes = [values[name].numel() for name in names]

    def value(vector: Tensor) -> Tensor:
        parts = zip(names, torch.split(vector, sizes), strict=True)
        moved = {**values, **{name: part.reshape(values[name].shape) for name, part in parts}}
        return loss(functional_call(model, moved, x if isinstance(x, tuple) else (x,)), y)

    start = torch.cat([values[name].reshape(-1) for name in names])
    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
        return torch.autograd.functional.hessian(value, start).double()


def trace(model: nn.Module, loss, x, y, name: str, metric: str) -> float:
    """Σ C_ss' (Σ⁺)_jj' H_sj,s'j', groups of a convolution one by one."""
    parameters = dict(model.named_parameters())
    weight, phi = parameters[name].detach().double(), inputs_of(model, x)[name]
    module = model.get_submodule(name.rpartition(".")[0])
    lookup, groups = isinstance(module, nn.Embedding), len(phi)
    hessian = block(model, loss, x, y, name)
    if lookup:  # stored with its inputs first
        order = torch.arange(weight.numel()).reshape(weight.shape).T.reshape(-1)
        hessian, weight = hessian[order][:, order], weight.T
    rows = weight.reshape(groups, len(weight) // groups, -1)
    size = rows[0].numel()
    total = 0.0
    for g in range(groups):
        own = hessian[g * size : (g + 1) * size, g * size : (g + 1) * size]
        sigma = _sigma(metric, phi[g], 1 if lookup or isinstance(module, nn.Linear) else weight.shape[2:].numel())
        c = rows[g] @ sigma @ rows[g].T
        b, a = rows[g].shape
        inverse = torch.linalg.pinv(sigma, hermitian=True, rtol=1e-12)
        total += float(torch.einsum("st,ij,sitj->", c, inverse, own.reshape(b, a, b, a)))
    return total


def largest(model: nn.Module, loss, x, y, *names: str) -> float:
    """λ_max of (C^½ ⊗ Σ^+½) H (…) of layers without groups, whose weights are stored with their results first."""
    scales = []
    for name in names:
        weight, phi = dict(model.named_parameters())[name].detach().flatten(1), inputs_of(model, x)[name][0]
        sigma = _sigma("whitened", phi, 1)
        inverse = torch.linalg.pinv(sigma, hermitian=True, rtol=1e-12)
        scales.append(torch.kron(_root(weight @ sigma @ weight.T), _root(inverse)))
    both = torch.block_diag(*scales)
    return float(torch.linalg.eigvalsh(both @ block(model, loss, x, y, *names) @ both).max())


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp(min=0).sqrt() @ vectors.T


def _sigma(metric: str, phi: Tensor, taps: int) -> Tensor:
    if metric == "relative":
        return torch.eye(phi.shape[1], dtype=torch.float64)
    if metric == "whitened":
        return phi.T @ phi / len(phi)
    channels = phi.reshape(len(phi), -1, taps).movedim(1, 0).flatten(1)  # (channels, count × taps)
    return torch.diag(channels.var(1, correction=0).repeat_interleave(taps))
