"""The errors a user meets. Each message says what is required, what came, and what to do."""


class SpiritLevelError(ValueError):
    """Something the user passed cannot be measured; the message says what to change."""


class NondeterministicError(SpiritLevelError):
    """Two passes over the problem disagree, so that no second derivative of it means anything."""


class TracingError(SpiritLevelError):
    """The network's graph cannot be followed, so nothing certain can be said about its symmetries."""


class RescalingError(SpiritLevelError):
    """A rescaling would change the function or does not fit the numbers of the model's dtype."""
