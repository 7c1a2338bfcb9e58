"""The benchmark: this library and its peers on the same network, data and accuracy, in costs of one gradient.

`subjects` are trained networks with data, `tasks` what is asked of every library, `ours` and `peers` how each is asked,
`reference` the high-precision values. `worker` is one process of one library; `run` alternates them; `tables` and
`pictures` make what `benchmarks/` shows out of the results.
"""
