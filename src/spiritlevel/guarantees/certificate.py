"""What a PAC-Bayes bound returns: its terms one by one, frozen, that print and save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from spiritlevel.presenting import Shown, show
from spiritlevel.saved import Format, Saved, from_json_ready

if TYPE_CHECKING:
    from spiritlevel.show.drawing import Drawing


@dataclass(frozen=True)
class Certificate(Saved, Shown):
    """With probability at least 1 − δ, the test error of the noisy network Q is at most `bound`.

    Attributes:
        bound: The sum of `terms`; 1 or more says nothing (`vacuous`).
        terms: (4) term by term: "training error" L_S(f), "noise" L_S(Q) − L_S(f) as estimated, "Monte Carlo" what its
            confidence adds, "divergence" Σ (θ−θ₀)²/(2s²)/λ, "scales" the hyperprior's cost/λ, "description" of what has no
            noise/λ, "confidence" ln(number of λ / δ)/λ, "deviation" Ψ/λ.
        kl_bound: The same posterior in the bound of Langford, Seeger and Maurer, kl(L_S(Q) ‖ L_D(Q)) ≤
            (KL + ln(2√m/δ))/m: needs no λ, is smaller where L_S(Q) is, and holds with probability 1 − δ by itself.
        training_error, noisy_training_error: L_S(f) and the Monte Carlo estimate of L_S(Q).
        test_error, noisy_test_error: The same on test data; None without. `noisy_test_error_spread` is one standard error.
        divergence: KL of posterior and prior with all costs of description, in nats.
        layers: Tensor → its share Σ (θ−θ₀)²/(2s²).
        lam, delta, samples, draws: λ chosen, δ, m, and how many networks were drawn.
        num_scales: How many scales σ were named.
        method: How they were found.
        notes: What a reader must know.

    >>> import tempfile
    >>> names = "noise", "Monte Carlo", "scales", "description", "confidence", "deviation"
    >>> terms = {"training error": 0.125, "divergence": 0.25, **dict.fromkeys(names, 0.0)}
    >>> found = Certificate(0.375, terms, 0.3, 0.125, 0.125, 25.0, {"weight": 25.0}, 100.0, 0.05, 1000, 10, 1, "by hand")
    >>> found.vacuous, type(found.drawing()).__name__
    (False, 'Drawing')
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found.save(f"{folder}/bound.json")
    ...     found.to_html(f"{folder}/bound.html")
    ...     Certificate.load(f"{folder}/bound.json") == Certificate.from_dict(found.to_dict()) == found
    True
    """

    _format: ClassVar = Format("spiritlevel-certificate-1", "certificate")

    bound: float
    terms: Mapping[str, float]
    kl_bound: float
    training_error: float
    noisy_training_error: float
    divergence: float
    layers: Mapping[str, float]
    lam: float
    delta: float
    samples: int
    draws: int
    num_scales: int
    method: str
    test_error: float | None = None
    noisy_test_error: float | None = None
    noisy_test_error_spread: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def vacuous(self) -> bool:
        """Whether the bound says nothing: no error exceeds 1."""
        return self.bound >= 1

    @classmethod
    def _from_parts(cls, parts: dict[str, Any]) -> Certificate:
        return cls(**{**from_json_ready(parts), "notes": tuple(parts["notes"])})

    def drawing(self) -> Drawing:
        """The terms as a stacked bar; `.figure` is a matplotlib figure, `.svg()` an element for a page."""
        drawn: Drawing = show(self, "drawing")
        return drawn
