"""A study that takes a moment: random data, tiny networks, cheap measures."""

TINY = """\
title = "tiny"
seeds = 2

[data]
name = "random:60,6,3,0"

[model]
name = "mlp:8"

[training]
optimizer = "sgd"
learning_rate = 0.2
batch_size = 16
epochs = 3

[factors]
training.batch_size = [16, 30]

[measure]
measures = ["hessian_trace", "kappa_trace_sum"]
"""
