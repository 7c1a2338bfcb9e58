"""Random networks, losses, data, precisions and options, every number compared with an explicitly formed Hessian.

A small run of it is part of `make test`; `make fuzz` is the long one, whose figures are in docs/reliability.md.
"""
