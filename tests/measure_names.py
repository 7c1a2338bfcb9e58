"""The measures that have a closed definition in the Hessian, by how they are computed."""

STATISTICS = (
    "hessian_trace",
    "matrix_normalized_sharpness",
    "normalized_sharpness",
    "fisher_rao_norm",
    "kappa_trace_max",
    "kappa_trace_sum",
    "rho_max",
    "rho_sum",
    "rho_row_max",
    "rho_row_sum",
)
SPECTRAL = (
    "hessian_spectral_norm",
    "riemannian_spectral_norm",
    "riemannian_nodewise_spectral_norm",
    "kappa_max",
    "kappa_sum",
)
DEFINED = (*STATISTICS, *SPECTRAL)
