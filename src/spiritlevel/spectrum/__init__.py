"""The spectrum of a minimum: the density of the Hessian's eigenvalues and its two ends."""

from spiritlevel.spectrum.spectrum import Spectrum, spectrum

__all__ = ["Spectrum", "spectrum"]
