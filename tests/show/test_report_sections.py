"""A page that carries the audit and the spectrum of the model it reports."""

import torch
from torch import nn

import spiritlevel as sl


def test_a_page_takes_the_audit_and_the_spectrum_of_its_model(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    data = torch.randn(20, 4, dtype=torch.float64), torch.randint(0, 3, (20,))
    report = sl.measure(model, data, measures=["hessian_trace", "rho_sum"])
    audit = sl.audit(model, data, measures=["hessian_trace", "rho_sum"], strengths=(1.0,), kinds=("layer",))
    spectrum = sl.spectrum(model, data, probes=2, steps=8, ends=2)
    report.to_html(tmp_path / "plain.html")
    report.to_html(tmp_path / "full.html", audit=audit, spectrum=spectrum)
    plain, full = ((tmp_path / name).read_text() for name in ("plain.html", "full.html"))
    for anchor in ('id="audit"', 'id="spectrum"'):
        assert anchor not in plain
        assert anchor in full
    assert full.index('id="audit"') < full.index('id="spectrum"') < full.index('id="cost"')
    assert "Density of the eigenvalues" in full
    assert "Measures under layer changes" in full
