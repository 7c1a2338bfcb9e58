"""`spiritlevel bound`, `robustness` and `compare`: what a flatness number buys, and who is flatter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from spiritlevel.cli.options import (
    AccuracyOptions,
    DataName,
    Dtype,
    LossName,
    NetworkOptions,
    PartOptions,
    PreparationOptions,
    Samples,
    SampleSeed,
    Seed,
    Subject,
    read_dtype,
    read_measures,
)
from spiritlevel.cli.output import OutputOptions
from spiritlevel.compare.compare import compare as compare_networks
from spiritlevel.compare.show import ranking_table
from spiritlevel.errors import SpiritLevelError
from spiritlevel.guarantees.pac_bayes import pac_bayes
from spiritlevel.guarantees.robustness import feature_robustness
from spiritlevel.guarantees.show import certificate_table, robustness_table
from spiritlevel.measuring.progress import passes_bar
from spiritlevel.presenting import facts, set_facts
from spiritlevel.problem.ranks import launched

Measures = Annotated[str | None, typer.Option(metavar="A,B,…|all", help="Names, as for `spiritlevel measure`.")]


def bound(
    *,
    network: NetworkOptions,
    method: Annotated[str, typer.Option(metavar="matrix|rows|optimized", help="How the noise is chosen.")] = "matrix",
    vectors: Annotated[
        str, typer.Option(metavar="noise|float32|bfloat16", help="Biases and the like: noisy, or described by bits.")
    ] = "noise",
    delta: Annotated[float, typer.Option(metavar="P", help="The probability that the bound may be wrong.")] = 0.05,
    draws: Annotated[int, typer.Option(metavar="N", help="Networks drawn to estimate the noisy training error.")] = 200,
    prior: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Weights that were fixed without this data, to centre the prior."),
    ] = None,
    test: Annotated[bool, typer.Option("--test", help="Also show the errors on the test split of the data.")] = False,
    seed: Seed = 0,
    dtype: Dtype = None,
    samples: Samples = None,
    sample_seed: SampleSeed = 0,
    output: OutputOptions,
) -> None:
    """Bound the test error of a network with noise on its weights, from its training data.

    Prints the PAC-Bayes bound term by term. It is a certificate, also where it is vacuous.
    """
    part = PartOptions(samples, sample_seed=sample_seed)
    precision = read_dtype(dtype)
    subject = network.read(part)
    centre = None if prior is None else replace(network, checkpoint=prior).read(part).model
    held_out = network.read_data(PartOptions(split="test"))[0] if test else None
    found = pac_bayes(
        *subject.parts,
        test_data=None if held_out is None else (held_out.x, held_out.y),
        method=method,  # type: ignore[arg-type]
        vectors=vectors,  # type: ignore[arg-type]
        delta=delta,
        draws=draws,
        prior=centre,
        seed=seed,
        dtype=precision,
    )
    output.write(found, certificate_table(found))


def robustness(
    *,
    network: NetworkOptions,
    layer: Annotated[str, typer.Option(metavar="NAME", help="The layer: a weight's name or its module's.")],
    delta: Annotated[float, typer.Option(metavar="D", help="The share by which its features move.")] = 0.1,
    matrices: Annotated[
        str, typer.Option(metavar="orthogonal|gaussian", help="Which random matrices mix the features.")
    ] = "orthogonal",
    num_matrices: Annotated[int, typer.Option("--matrix-count", metavar="N", help="How many of them.")] = 8,
    accuracy: AccuracyOptions,
    part: PartOptions,
    output: OutputOptions,
) -> None:
    """How much the loss rises when the features of a layer move.

    Prints the mean rise, the worst one found, what curvature says it should be, and the bound by κ.
    """
    subject = network.read(part)
    found = feature_robustness(
        subject.model,
        subject.pair,
        layer,
        delta,
        subject.loss,
        matrices=matrices,  # type: ignore[arg-type]
        num_matrices=num_matrices,
        **accuracy.arguments,
    )
    output.write(found, robustness_table(found))


def compare(
    *,
    networks: Annotated[
        list[str],
        typer.Argument(metavar="NAME=MODEL@FILE…", help="Two or more, such as small=mlp:64-32@small.safetensors."),
    ],
    data: DataName,
    loss: LossName = "cross_entropy",
    measures: Measures = None,
    confidence: Annotated[float, typer.Option(metavar="P", help="From which probability on an order counts.")] = 0.95,
    these_data: Annotated[
        bool, typer.Option("--these-data", help="Orders on these data only: no sampling error, half the cost.")
    ] = False,
    accuracy: AccuracyOptions,
    part: PartOptions,
    preparation: PreparationOptions,
    output: OutputOptions,
) -> None:
    """Rank several trained networks by every measure.

    Prints who is flatter by which measure, how sure every order is, and what is not decided. Every network is measured again
    on ten parts of the data, so that the order holds for more data of the same kind too. Started by torchrun, the processes
    share the data.
    """
    chosen = read_measures(measures)
    subjects = _read_networks(networks, data, loss, part, preparation)
    first = next(iter(subjects.values()))
    with launched() as rank, passes_bar(shown=rank == 0 and not output.quiet) as listen:
        found = compare_networks(
            {name: subject.model for name, subject in subjects.items()},
            first.pair,
            first.loss,
            measures=chosen,
            confidence=confidence,
            progress=listen,
            sampling=not these_data,
            **accuracy.arguments,
        )
    if rank == 0:
        for name, subject in subjects.items():
            subject.warn_of(found.reports[name].loss)
        output.write(found, ranking_table(found))


def _read_networks(
    networks: list[str], data: str, loss: str, part: PartOptions, preparation: PreparationOptions
) -> dict[str, Subject]:
    """`NAME=MODEL@FILE`, `MODEL@FILE` or `package.module:factory`, each by its name."""
    subjects: dict[str, Subject] = {}
    for text in networks:
        label, equals, rest = text.partition("=")
        spec = rest if equals else text
        model, at, file = spec.rpartition("@")
        name = label if equals else Path(file).stem if at else spec
        if name in subjects:
            raise SpiritLevelError(f"two networks are called {name!r}: give each a name, as in NAME=MODEL@FILE")
        network = NetworkOptions(
            model=model if at else spec,
            data=data,
            checkpoint=Path(file) if at else None,
            loss=loss,
            **vars(preparation),
        )
        subjects[name] = network.read(part)
    if len({subject.data.fingerprint for subject in subjects.values()}) > 1:
        raise SpiritLevelError(
            "the checkpoints bring different preprocessing or labels, so these networks would not be compared on the same data: say "
            "which, by --mean and --std or --standardize, and by --label-noise"
        )
    set_facts({**facts(), "network": ", ".join(networks)})
    return subjects
