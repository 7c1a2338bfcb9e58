"""Inputs whose numbers were once wrong, each reduced to what matters, by what it shows."""

from fuzz.networks import Network
from fuzz.subjects import Options, Samples, Subject

EVERYTHING = Options(measures=())


def _only(measure: str, **options: object) -> Options:
    return Options(measures=(measure,), **options)


FOUND: dict[str, Subject] = {
    "curvature where 1 − p is rounding": Subject(trained=7, options=EVERYTHING),
    "curvature of the outputs where it is 1e-5": Subject(
        samples=Samples(count=1), trained=5, options=_only("riemannian_nodewise_spectral_norm")
    ),
    "gradients where 1 − p is rounding": Subject(trained=12, options=_only("fisher_rao_norm")),
    "the same in double precision": Subject(trained=12, precision="float64", options=_only("fisher_rao_norm")),
    "another branch for late samples": Subject(Network("mlp", "squares"), samples=Samples("late", 24)),
    "another branch, a skip connection": Subject(Network("residual", "squares"), samples=Samples("late", 24)),
    "another branch after blank samples": Subject(
        Network("mlp", "squares"), samples=Samples("blank first", 24), options=Options(measures=(), chunk=3)
    ),
    "experts after blank samples": Subject(Network("experts"), samples=Samples("blank first", 9)),
    "experts, one per order of the data": Subject(Network("experts"), samples=Samples("late", 24), options=EVERYTHING),
    "an expert that gets all of a chunk and some of the heaviest": Subject(
        Network("experts", "relu", 1, 2, False, seed=358),
        samples=Samples("blank first", 5, seed=16),
        options=Options(measures=(), dtype="float32", chunk=3),
    ),
    "attention after blank samples": Subject(
        Network("attention", bias=False, seed=147), samples=Samples("blank first", 5, seed=178), stretch=-12.0
    ),
    "attention, blank samples the heaviest": Subject(
        Network("attention", bias=False), samples=Samples("blank first"), trained=8
    ),
    "gradients reversed where they vanish": Subject(
        Network("constant", "reversal", 2, 3, seed=266),
        samples=Samples("duplicates", 5, -12, by_class=True, seed=454),
        trained=5,
        options=_only("hessian_spectral_norm"),
    ),
    "a row that decays, held fixed as padding": Subject(
        Network("words", depth=2), "whole decayed", Samples(count=1, seed=505), options=_only("hessian_spectral_norm")
    ),
    "attention on zeros, as many samples as positions": Subject(
        Network("attention"), samples=Samples("zeros", 3), options=_only("fisher_rao_norm")
    ),
    "a twin times e^25": Subject(Network(bias=False), stretch=25.0, options=EVERYTHING),
    "a twin times e^-25, squared error": Subject(
        Network(bias=False, depth=2), "mse", stretch=-25.0, options=EVERYTHING
    ),
    "large data, squared error": Subject(
        Network("gated", width=4, bias=False, seed=86),
        "mse",
        Samples("late", scale=6, by_class=True, seed=103),
        options=_only("riemannian_spectral_norm"),
    ),
    "once differentiable": Subject(Network("mlp", "once"), options=_only("rho_row_max")),
    "central differences of gradients": Subject(
        Network("mlp", "once"), samples=Samples(count=1), options=_only("riemannian_nodewise_spectral_norm")
    ),
    "central differences of gradients, no spread": Subject(
        Network("residual", "once", seed=451),
        samples=Samples(count=17, by_class=True, shape="ragged", seed=262),
        trained=3,
        options=Options(("riemannian_spectral_norm", "kappa_trace_sum"), 1e-6, 8, seed=8),
    ),
    "differences of gradients across kinks of a twin": Subject(
        Network("mlp", "once"), samples=Samples(count=1), stretch=12.0, options=_only("hessian_spectral_norm")
    ),
    "rounding in exact values of a certain network": Subject(
        Network(depth=2, seed=289), samples=Samples(count=24), trained=12, options=_only("rho_row_max")
    ),
    "another eigenvalue than the largest": Subject(
        Network("shared", "leaky", 1, 2, False, seed=2),
        "module",
        Samples(seed=188),
        precision="bfloat16",
        options=_only("riemannian_spectral_norm", tolerance=0.1, seed=2),
    ),
    "curvature whose square is less than double precision holds": Subject(
        Network(seed=38), samples=Samples("duplicates", scale=3), options=_only("kappa_sum")
    ),
    "a block that is a difference of far larger numbers": Subject(
        Network("attention", "leaky", 1, 4, seed=482), "mse", Samples("one hot", 5, 6, seed=5)
    ),
    "probes beyond the range of single precision": Subject(
        Network("attention"), samples=Samples("one hot", 1, 12), stretch=25.0, options=_only("kappa_trace_sum")
    ),
    "a layer without neurons, a loss that calls it": Subject(
        Network("narrow"), "whole", Samples(count=1), options=_only("rho_max")
    ),
    "rounding of large outputs": Subject(samples=Samples(count=3, scale=3), options=_only("kappa_max")),
    "what is multiplied by a weight drowned in a bias": Subject(
        Network("experts", "gelu", 1, 2, seed=314),
        samples=Samples(count=1, scale=-12),
        stretch=12.0,
        options=_only("rho_row_max"),
    ),
    "a largest eigenvalue that hides": Subject(
        Network("gated", "relu", 1, 2, seed=51),
        samples=Samples("blank first", 17, seed=483),
        options=_only("hessian_spectral_norm", parameters=("*weight",), chunk=1),
    ),
    "a cluster that weight decay makes": Subject(
        Network("attention"),
        "whole decayed",
        Samples(count=1, scale=-3),
        options=_only("riemannian_spectral_norm", seed=5),
    ),
    "single precision behind a layer normalization": Subject(
        Network("mlp", "relu", 2, 2, norm="layer", seed=40),
        samples=Samples("one hot", 1),
        options=_only("rho_row_sum", dtype="float32"),
    ),
    "gradient reversal, and samples to look at that have no slope": Subject(
        Network("shared", "reversal", width=3, bias=False, seed=87),
        samples=Samples("blank first", 17, scale=6, seed=272),
        trained=9,
        options=_only("hessian_spectral_norm"),
    ),
    "rounding of gradients that no sweep reads": Subject(
        Network("experts", width=2, bias=False, seed=32),
        samples=Samples(count=5, seed=250),
        trained=7,
        options=_only("fisher_rao_norm", dtype="float32"),
    ),
    "differences of gradients at a kink": Subject(
        Network("dead", "once", 2, 2, bias=False, seed=261),
        samples=Samples(count=1),
        options=_only("kappa_sum"),
    ),
    "a difference of gradients at a kink that is all but where the weights are": Subject(
        Network("dead", "once", 2, 3, seed=467),
        "smoothed module",
        Samples(count=6, scale=12, seed=570),
        trained=3,
        stretch=-12.0,
        options=_only("kappa_trace_max", tolerance=1e-6, most_probes=64, seed=3),
    ),
    "terms that cancel in double precision": Subject(
        Network("mlp", "tanh", 1, 2, norm="layer", seed=267),
        "mse",
        Samples("late", 2, scale=12, by_class=True, seed=232),
        precision="bfloat16",
        options=_only("kappa_sum", parameters=("*weight",), dtype="float64", seed=7),
    ),
    "equal tokens, whose scores have no effect but rounding": Subject(
        Network("attention", "tanh", 2, 3, seed=426),
        "mse",
        Samples("one hot", 2, scale=3, by_class=True, seed=255),
        stretch=-25.0,
        options=_only("riemannian_nodewise_spectral_norm", tolerance=0.1, seed=4),
    ),
    "differences of gradients that show nothing but rounding": Subject(
        Network("mlp", "tanh", 1, 3),
        "mse",
        Samples(count=1, scale=12, shape="pair"),
        stretch=25.0,
        options=_only("hessian_spectral_norm", parameters=("*weight",)),
    ),
    "differences of gradients looked at on blank samples": Subject(
        Network("constant", "once", 1, 3),
        samples=Samples("blank first", 24, scale=12, shape="pair"),
        options=_only("hessian_spectral_norm"),
    ),
    "rounding in single precision that came out small by chance": Subject(
        Network("gated", "relu", 1, 4, bias=False, seed=365),
        samples=Samples(count=6, shape="pair", seed=414),
        trained=8,
        options=_only("kappa_sum", dtype="float32"),
    ),
    "a layer whose block is rounding, beside others that are not": Subject(
        Network("attention", "relu", 1, 3, bias=False, seed=426),
        samples=Samples("one hot", 9, scale=3, by_class=True, shape="pair", seed=549),
        stretch=12.0,
        options=_only("kappa_max", seed=3),
    ),
    "weights in double precision that are measured in single": Subject(
        Network("convolution", "tanh", 1, 3, bias=False, seed=0),
        samples=Samples("gaussian", 24, scale=3, seed=192),
        stretch=1.0,
        precision="float64",
        options=_only("kappa_sum", dtype="float32"),
    ),
    "a network that autograd does not see, beside weight decay that it does": Subject(
        Network("blind", "relu", 1, 3, bias=False, seed=0),
        loss="whole decayed",
        samples=Samples("gaussian", 2, scale=-3, seed=191),
        precision="float32",
        options=_only("riemannian_spectral_norm"),
    ),
    "a second derivative that is not symmetric": Subject(
        Network("attention", "tanh", 1, 4, bias=False, seed=221),
        samples=Samples("one hot", 2, scale=6, by_class=True, seed=241),
        trained=4,
        precision="bfloat16",
        options=_only("riemannian_nodewise_spectral_norm", tolerance=0.1, seed=3),
    ),
    "unit vectors that vanish at weights of 1e10": Subject(
        Network("mlp", "relu", 1, 3, norm="layer"),
        samples=Samples("one hot", 1),
        stretch=25.0,
        options=_only("rho_row_max", dtype="float32"),
    ),
    "rounding of squares that single precision does not hold": Subject(
        Network("mlp", "relu", 1, 3, seed=378),
        samples=Samples(count=2),
        trained=12,
        stretch=-25.0,
        options=_only("fisher_rao_norm", dtype="float32"),
    ),
    "experts that get all of every chunk, and some of the samples looked at": Subject(
        Network("experts", "relu", 1, 3, bias=False, seed=301),
        samples=Samples("blank first", 24, seed=110),
        trained=12,
        options=Options(measures=(), chunk=1),
    ),
    "weight decay in a closure": Subject(loss="decayed closure"),
    "class weights": Subject(loss="weighted module", samples=Samples(count=24, by_class=True)),
    "class weights, sorted by class": Subject(
        loss="weighted module",
        samples=Samples(count=24, by_class=True),
        options=_only("hessian_spectral_norm", chunk=3),
    ),
    "a sum, and one sample in the first batch": Subject(
        loss="summed module", samples=Samples(count=24, shape="ragged")
    ),
    "float of a tensor in the loss": Subject(loss="whole weighted"),
    "the random state after a loader": Subject(loss="module", samples=Samples(count=1, shape="loader")),
    "hinge": Subject(loss="hinge module"),
    "gradient reversal": Subject(Network("mlp", "reversal"), options=EVERYTHING),
    "no gradient in the forward pass": Subject(Network("blind"), options=_only("hessian_spectral_norm")),
    "no gradient in the forward pass, trace": Subject(Network("blind")),
    "weights written in the forward pass": Subject(Network("clamping"), options=EVERYTHING),
    "a layer of width zero": Subject(Network("narrow"), options=EVERYTHING),
}
