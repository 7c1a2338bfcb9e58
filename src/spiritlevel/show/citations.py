"""The papers that the measures come from: what to cite when a number of theirs is used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Citation:
    """One paper: enough for a reference list, and as BibTeX."""

    key: str
    authors: tuple[str, ...]
    title: str
    venue: str
    year: int
    arxiv: str
    kind: str = "inproceedings"

    @property
    def short(self) -> str:
        """First author and year: `Dinh et al. 2017`."""
        surname = self.authors[0].split(",")[0]
        if len(self.authors) == 2:
            surname += f" and {self.authors[1].split(',')[0]}"
        return f"{surname}{' et al.' if len(self.authors) > 2 else ''} {self.year}"

    @property
    def text(self) -> str:
        """One line of a reference list."""
        people = [" ".join(reversed(author.split(", "))) for author in self.authors]
        listed = people[0] if len(people) == 1 else f"{', '.join(people[:-1])} and {people[-1]}"
        preprint = f" arXiv:{self.arxiv}" if self.arxiv else ""
        return f"{listed}: {self.title}. {self.venue}, {self.year}.{preprint}"

    @property
    def bibtex(self) -> str:
        """An entry for a bibliography."""
        where = {"inproceedings": "booktitle", "article": "journal"}.get(self.kind, "howpublished")
        fields = {
            "author": " and ".join(self.authors),
            "title": f"{{{self.title}}}",
            where: self.venue,
            "year": str(self.year),
            **({"eprint": self.arxiv, "archiveprefix": "arXiv"} if self.arxiv else {}),
        }
        lines = "".join(f"  {name} = {{{entry}}},\n" for name, entry in fields.items())
        return f"@{self.kind}{{{self.key},\n{lines}}}"


_PAPERS = (
    Citation(
        "keskar2017",
        (
            "Keskar, Nitish Shirish",
            "Mudigere, Dheevatsa",
            "Nocedal, Jorge",
            "Smelyanskiy, Mikhail",
            "Tang, Ping Tak Peter",
        ),
        "On Large-Batch Training for Deep Learning: Generalization Gap and Sharp Minima",
        "International Conference on Learning Representations",
        2017,
        "1609.04836",
    ),
    Citation(
        "dinh2017",
        ("Dinh, Laurent", "Pascanu, Razvan", "Bengio, Samy", "Bengio, Yoshua"),
        "Sharp Minima Can Generalize For Deep Nets",
        "International Conference on Machine Learning",
        2017,
        "1703.04933",
    ),
    Citation(
        "liang2019",
        ("Liang, Tengyuan", "Poggio, Tomaso", "Rakhlin, Alexander", "Stokes, James"),
        "Fisher-Rao Metric, Geometry, and Complexity of Neural Networks",
        "International Conference on Artificial Intelligence and Statistics",
        2019,
        "1711.01530",
    ),
    Citation(
        "rangamani2019",
        (
            "Rangamani, Akshay",
            "Nguyen, Nam H.",
            "Kumar, Abhishek",
            "Phan, Dzung",
            "Chin, Sang",
            "Tran, Trac D.",
        ),
        "A Scale Invariant Flatness Measure for Deep Network Minima",
        "arXiv preprint",
        2019,
        "1902.02434",
        "article",
    ),
    Citation(
        "tsuzuku2019",
        ("Tsuzuku, Yusuke", "Sato, Issei", "Sugiyama, Masashi"),
        "Normalized Flat Minima: Exploring Scale Invariant Definition of Flat Minima for Neural Networks "
        "Using PAC-Bayesian Analysis",
        "arXiv preprint",
        2019,
        "1901.04653",
        "article",
    ),
    Citation(
        "petzka2019",
        ("Petzka, Henning", "Adilova, Linara", "Kamp, Michael", "Sminchisescu, Cristian"),
        "A Reparameterization-Invariant Flatness Measure for Deep Neural Networks",
        "arXiv preprint",
        2019,
        "1912.00058",
        "article",
    ),
    Citation(
        "petzka2021",
        (
            "Petzka, Henning",
            "Kamp, Michael",
            "Adilova, Linara",
            "Sminchisescu, Cristian",
            "Boley, Mario",
        ),
        "Relative Flatness and Generalization",
        "Advances in Neural Information Processing Systems",
        2021,
        "2001.00939",
    ),
    Citation(
        "ibayashi2021",
        ("Ibayashi, Hikaru", "Hamaguchi, Takuo", "Imaizumi, Masaaki"),
        "Minimum Sharpness: Scale-invariant Parameter-robustness of Neural Networks",
        "arXiv preprint",
        2021,
        "2106.12612",
        "article",
    ),
    Citation(
        "neyshabur2015",
        ("Neyshabur, Behnam", "Tomioka, Ryota", "Srebro, Nathan"),
        "Norm-Based Capacity Control in Neural Networks",
        "Conference on Learning Theory",
        2015,
        "1503.00036",
    ),
    Citation(
        "kwon2021",
        ("Kwon, Jungmin", "Kim, Jeongseop", "Park, Hyunseo", "Choi, In Kwon"),
        "ASAM: Adaptive Sharpness-Aware Minimization for Scale-Invariant Learning of Deep Neural Networks",
        "International Conference on Machine Learning",
        2021,
        "2102.11600",
    ),
    Citation(
        "andriushchenko2023",
        (
            "Andriushchenko, Maksym",
            "Croce, Francesco",
            "Müller, Maximilian",
            "Hein, Matthias",
            "Flammarion, Nicolas",
        ),
        "A Modern Look at the Relationship between Sharpness and Generalization",
        "International Conference on Machine Learning",
        2023,
        "2302.07011",
    ),
    Citation(
        "dasilva2025",
        ("da Silva, Marvin F.", "Dangel, Felix", "Oore, Sageev"),
        "Hide & Seek: Transformer Symmetries Obscure Sharpness & Riemannian Geometry Finds It",
        "International Conference on Machine Learning",
        2025,
        "2505.05409",
    ),
    Citation(
        "spiritlevel2026",
        ("The spiritlevel developers",),
        "spiritlevel: flatness of trained networks in numbers that no rescaling of weights can fool",
        "software",
        2026,
        "",
        "misc",
    ),
)

CITATIONS: Mapping[str, Citation] = {paper.key: paper for paper in _PAPERS}


def citations(papers: Iterable[str]) -> list[Citation]:
    """The entries of those keys, each once, in order of appearance; a key that is not known here is left out."""
    return [CITATIONS[key] for key in dict.fromkeys(papers) if key in CITATIONS]
