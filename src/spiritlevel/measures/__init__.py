"""The measures, one file a paper. A new one is a file, an entry of `PAPERS` and a test."""

from __future__ import annotations

from spiritlevel.measures import (
    andriushchenko2023,
    dasilva2025,
    dinh2017,
    ibayashi2021,
    keskar2017,
    kwon2021,
    liang2019,
    neyshabur2015,
    petzka2019,
    petzka2021,
    rangamani2019,
    spiritlevel2026,
    tsuzuku2019,
)

PAPERS = (
    dinh2017,
    keskar2017,
    rangamani2019,
    tsuzuku2019,
    liang2019,
    petzka2019,
    petzka2021,
    ibayashi2021,
    neyshabur2015,
    kwon2021,
    andriushchenko2023,
    dasilva2025,
    spiritlevel2026,
)
