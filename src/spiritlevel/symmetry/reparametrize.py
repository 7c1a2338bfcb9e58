"""Other coordinates for the same networks: bijections θ = g(η) of the parameters (Dinh et al. 2017, section 5.1).

The loss L_η = L∘g has gradient ∇gᵀ∇L and Hessian ∇gᵀ H ∇g + Σ_k ∂L/∂θ_k ∇²g_k, so that sharp minima become flat and
conversely while every function stays what it is.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad, jacrev, vjp

from spiritlevel.errors import SpiritLevelError

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Bijection:
    """θ = to_parameters(η) and η = from_parameters(θ), on flat vectors; `to_parameters` is differentiable by torch.

    It may be onto without being one-to-one, as weight normalization is: then `from_parameters` picks one of the η.
    """

    to_parameters: Map
    from_parameters: Map
    name: str = "custom"

    def gradient(self, coordinates: Tensor, gradient: Map) -> Tensor:
        """∇L_η = ∇gᵀ ∇L(g(η)), given θ ↦ ∇L(θ)."""
        theta, pull = _pullback(self.to_parameters, coordinates)
        return pull(gradient(theta))

    def hessian_product(
        self, coordinates: Tensor, vector: Tensor, product: Callable[[Tensor, Tensor], Tensor], gradient: Map
    ) -> Tensor:
        """∇gᵀ H ∇g v + (∇L·∇²g) v, given the product (θ, u) ↦ H(θ)u and the gradient θ ↦ ∇L(θ).

        The second term is the gradient of η ↦ ⟨∇g(η)ᵀc, v⟩ with c = ∇L held still: one product and a few passes of g.
        """
        theta, pushed = _pushforward(self.to_parameters, coordinates, vector)
        _, pull = _pullback(self.to_parameters, coordinates)
        cotangent = gradient(theta).detach()

        def along_vector(eta: Tensor) -> Tensor:
            return _pullback(self.to_parameters, eta)[1](cotangent) @ vector

        bend: Tensor = grad(along_vector)(coordinates)
        return pull(product(theta, pushed)) + bend

    def hessian(self, coordinates: Tensor, product: Callable[[Tensor, Tensor], Tensor], gradient: Map) -> Tensor:
        """The Hessian of L_η as a matrix, one product per column."""
        eye = torch.eye(coordinates.numel(), dtype=coordinates.dtype, device=coordinates.device)
        return torch.stack([self.hessian_product(coordinates, v, product, gradient) for v in eye], dim=1)

    def jacobian(self, coordinates: Tensor) -> Tensor:
        """∇g(η) as a matrix with entries ∂θ_i/∂η_j."""
        return torch.as_tensor(jacrev(self.to_parameters)(coordinates))


def _pushforward(function: Map, point: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
    """f(x) and the derivative of f at x along a vector."""
    value, pull = _pullback(function, point)
    # c ↦ ∇fᵀc is linear, so the transpose of it is ∇f: reverse mode twice, which every operation supports.
    return value, _pullback(pull, torch.zeros_like(value))[1](vector)


def _pullback(function: Map, point: Tensor) -> tuple[Tensor, Map]:
    """f(x) and the map c ↦ ∇f(x)ᵀ c."""
    value, pull = vjp(function, point)[:2]
    return value, lambda cotangent: pull(cotangent)[0]


def radial(center: Tensor, delta: float, radius: float, image: float) -> Bijection:
    """Appendix A: η − θ̂ is θ − θ̂ with its length r replaced by ψ(r): ρ·r/r̂ up to r̂, then linear to δ, then r itself.

    center: θ̂. delta: δ, beyond which nothing moves. radius: r̂. image: ρ = ψ(r̂). Curvature at θ̂ is multiplied by
    (r̂/ρ)². Both r̂ and ρ lie strictly between 0 and δ.
    """
    if not (0 < radius < delta and 0 < image < delta):
        raise SpiritLevelError(
            f"a radial map needs 0 < radius < delta and 0 < image < delta; got radius {radius}, image {image}, delta {delta}"
        )

    def stretch(x: Tensor, knee: float, knee_image: float) -> Tensor:
        offset = x - center
        r = _norm(offset)
        inner = offset * (knee_image / knee)
        safe = torch.where(r > 0, r, 1.0)
        middle = offset * ((knee_image - delta) * (safe - delta) / (knee - delta) + delta) / safe
        return center + torch.where(r <= knee, inner, torch.where(r <= delta, middle, offset))

    return Bijection(lambda eta: stretch(eta, image, radius), lambda theta: stretch(theta, radius, image), "radial")


def _norm(x: Tensor) -> Tensor:
    """‖x‖ with zero gradient at zero."""
    square = x.square().sum()
    return torch.where(square > 0, torch.where(square > 0, square, 1.0).sqrt(), 0.0)


def radial_jacobian(theta: Tensor, center: Tensor, delta: float, radius: float, image: float) -> Tensor:
    """∇g⁻¹(θ) of `radial` in closed form (Appendix A): ψ' I, and between r̂ and δ ψ/r I + (ψ' − ψ/r) uuᵀ, u = (θ−θ̂)/r."""
    offset = theta - center
    r, eye = float(offset.norm()), torch.eye(theta.numel(), dtype=theta.dtype)
    if r > delta:
        return eye
    if r <= radius:
        return eye * (image / radius)
    slope = (image - delta) / (radius - delta)
    ratio = (slope * (r - delta) + delta) / r
    unit = offset / r
    return ratio * eye + (slope - ratio) * torch.outer(unit, unit)


def power_family(center: Tensor, shift: float, exponent: float) -> Bijection:
    """Figure 5: η = (|θ − θ̂|² + b)^a (θ − θ̂) in each coordinate, with b ≥ 0 and a > −1/2.

    center: θ̂. shift: b. exponent: a. At θ̂ the curvature is divided by b^{2a}. The inverse has no closed form: it is
    found by Newton's method to machine precision, and its derivatives from those of η(θ).
    """
    if shift < 0 or exponent <= -0.5 or (shift == 0 and exponent < 0):
        raise SpiritLevelError(
            f"the family needs shift b > 0 (or b = 0 with a ≥ 0) and exponent a > -1/2; got b = {shift}, a = {exponent}"
        )

    def forward(theta: Tensor) -> Tensor:
        offset = theta - center
        return torch.mul((offset.square() + shift) ** exponent, offset)

    def slope(theta: Tensor) -> Tensor:
        square = (theta - center).square()
        return torch.mul((square + shift) ** (exponent - 1), (2 * exponent + 1) * square + shift)

    def inverse(eta: Tensor) -> Tensor:
        theta = center + _power_inverse(eta.detach(), shift, exponent)
        # Two Newton steps from the solution change no digit and carry the first two derivatives.
        for _ in range(2):
            theta = theta - (forward(theta) - eta) / slope(theta)
        return theta

    return Bijection(inverse, forward, "power family")


def _power_inverse(eta: Tensor, shift: float, exponent: float) -> Tensor:
    """The offset u with (u² + b)^a u = η, by bisection in each coordinate: the left side increases with u."""
    target = eta.abs()
    high = torch.ones_like(target)
    for _ in range(2000):
        short = (high.square() + shift) ** exponent * high < target
        if not bool(short.any()):
            break
        high = torch.where(short, 2 * high, high)
    low = torch.zeros_like(target)
    for _ in range(120):
        middle = (low + high) / 2
        below = (middle.square() + shift) ** exponent * middle < target
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return eta.sign() * (low + high) / 2


def weight_normalization(rows: int) -> Bijection:
    """w_i = s_i v_i/‖v_i‖ for each of `rows` rows: η = (s, v), with the free rescaling v_i → α_i v_i.

    Onto the weights without zero rows, one-to-one up to the length of v; `from_parameters` takes v = w, s = ‖w‖.
    """

    def forward(eta: Tensor) -> Tensor:
        s, v = eta[:rows, None], eta[rows:].reshape(rows, -1)
        return torch.flatten(s * v / v.norm(dim=1, keepdim=True))

    def backward(theta: Tensor) -> Tensor:
        w = theta.reshape(rows, -1)
        return torch.cat([w.norm(dim=1), w.flatten()])

    return Bijection(forward, backward, "weight normalization")


def compose(first: Bijection, second: Bijection) -> Bijection:
    """θ = first(second(η))."""
    return Bijection(
        lambda eta: first.to_parameters(second.to_parameters(eta)),
        lambda theta: second.from_parameters(first.from_parameters(theta)),
        f"{first.name} ∘ {second.name}",
    )
