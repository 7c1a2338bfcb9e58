"""A model with its data and its loss: a checked, pure function of the parameters, streamed over the data."""

from spiritlevel.problem.problem import Problem

__all__ = ["Problem"]
