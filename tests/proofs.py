"""Statistical claims with a short form for `make test` and a long one for `make prove`."""

import datetime
import os
import platform
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
from scipy.stats import norm

PAGE = Path(__file__).parents[1] / "docs" / "proofs.md"


def z_limit(cases: int, error: float = 1e-4) -> float:
    """The largest |z| of ``cases`` standard normals stays below this with probability 1 − error (Bonferroni)."""
    return float(norm.isf(error / (2 * cases)))


@dataclass
class Proof:
    """One claim, its size and how close it came to its limit."""

    claim: str
    cases: int
    draws: int
    worst: float
    limit: float
    unit: str


@dataclass
class Proofs:
    """What a test run has shown. ``long`` runs take as many cases and draws as a proof deserves."""

    long: bool
    shown: list[Proof] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)

    def size(self, short: int, long: int) -> int:
        """How many draws or cases to take in this run."""
        return long if self.long else short

    def z_scores(self, claim: str, z: torch.Tensor, draws: int) -> None:
        """Record and check that no z-score is larger than chance allows."""
        cases = z.numel()
        self.record(claim, cases=cases, draws=draws, worst=z.abs().max().item(), limit=z_limit(cases), unit="abs z")

    def p_values(self, claim: str, p: list[float], draws: int) -> None:
        """Record and check that no p-value is smaller than chance allows."""
        smallest, limit = min(p), 1e-4 / len(p)
        self.shown.append(Proof(claim, len(p), draws, smallest, limit, "p"))
        assert smallest >= limit, f"{claim}: the smallest of {len(p)} p-values is {smallest:.2e}"

    def record(self, claim: str, *, cases: int, draws: int = 0, worst: float, limit: float, unit: str) -> None:
        """Record a claim and check that its worst case is within the limit."""
        self.shown.append(Proof(claim, cases, draws, worst, limit, unit))
        assert worst <= limit, f"{claim}: {unit} reached {worst:.3g}, limit {limit:.3g}"

    def report(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """Add a table of what was seen, where there is no limit to compare with."""
        lines = [f"### {title}", "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        self.tables.append("\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]))

    def write(self, path: Path = PAGE) -> None:
        """Write the page of a long run."""
        lines = [
            "# Proofs",
            "",
            "Written by `make prove`: the statistical claims of the test suite at full size. A limit on abs z or p is",
            "one that chance exceeds in one of 10,000 runs, given the number of cases.",
            "",
            f"{datetime.date.today().isoformat()}, {machine()}.",
            "",
            "| claim | cases | draws each | worst | limit |",
            "|---|---:|---:|---:|---:|",
        ]
        lines += [_row(proof) for proof in sorted(self.shown, key=lambda proof: proof.claim)]
        write_section(path, "# Proofs", "\n".join([*lines, "", *sorted(self.tables)]))


def write_section(path: Path, heading: str, text: str) -> None:
    """Put a section into the page of proofs in the place of its earlier version; sections start with # or ##."""
    page = path.read_text(encoding="utf-8") if path.exists() else ""
    sections = [part for part in re.split(r"^(?=##? )", page, flags=re.M) if part.strip()]
    kept = [part.rstrip("\n") + "\n" for part in sections if not part.startswith(heading + "\n")]
    position = 0 if heading.startswith("# ") else len(kept)
    path.write_text("\n".join([*kept[:position], text, *kept[position:]]), encoding="utf-8")


def _row(proof: Proof) -> str:
    draws = f"{proof.draws:,}" if proof.draws else "–"
    relation = "≥" if proof.unit == "p" else "≤"
    worst = f"{proof.unit} = {proof.worst:.2g}"
    claim = proof.claim.replace("|", "\\|")  # a bar would end the table's cell
    return f"| {claim} | {proof.cases:,} | {draws} | {worst} | {relation} {proof.limit:.2g} |"


def machine() -> str:
    """Where a run took place, in words."""
    return (
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}"
    )
