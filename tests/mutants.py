"""Break the mathematics on purpose and count how often the suite notices.

    python -m tests.mutants [--group GROUP] [--only MODULE] [--every K] [--workers W]

A mutant is the library with one small change to one expression: a sign, an operator, a constant, a comparison, a
transpose, a term left out. Messages and shape checks are not mutated. Each mutant runs in a forked process, where
the changed module is imported instead of the one on disk, against the quick tests; it is killed by the first that
fails, or by time. Survivors are listed in docs/proofs.md: a mutant that computes the same, or a gap in the tests.
"""

import argparse
import ast
import copy
import datetime
import importlib.abc
import importlib.util
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from tests.proofs import PAGE, machine, write_section

REPOSITORY = Path(__file__).parents[1]
SOURCE = REPOSITORY / "src"
_DISTRIBUTIONS = "gamma bartlett mixing base bartlett_wishart wishart inverse_wishart kl conditional support".split()
GROUPS = {
    "distributions": ["deepwishart.linalg", *(f"deepwishart.distributions.{name}" for name in _DISTRIBUTIONS)],
    "layers and training": [f"deepwishart.{name}" for name in ("layers.fused", "layers.posterior", "training.adam")],
    "products": [f"deepwishart.products.{name}" for name in ("kernel", "projection", "scale", "output", "samples")],
    "kernels and likelihoods": [
        *(f"deepwishart.kernels.{name}" for name in ("base", "composite", "dot_product", "exponential", "stationary")),
        *(f"deepwishart.{name}" for name in ("gram", "likelihoods", "objectives", "predictive", "metrics", "joint")),
    ],
    "starting points": [f"deepwishart.{name}" for name in ("shallow", "starting", "inducing")],
}
_TESTS_OF_DISTRIBUTIONS = (
    "kl densities moments sampling gamma gradients conditional edge_cases support validation shapes".split()
)
QUICK_TESTS = {
    "distributions": [
        "tests/test_linalg.py",
        *(f"tests/distributions/test_{name}.py" for name in _TESTS_OF_DISTRIBUTIONS),
    ],
    "layers and training": ["tests/training/test_adam.py", "tests/layers/test_fused.py", "tests/layers/test_layers.py"],
    "products": ["tests/products/test_parts.py", "tests/layers/test_fused.py"],
    "kernels and likelihoods": [
        "tests/kernels",
        *(f"tests/test_{name}.py" for name in ("likelihoods", "metrics", "objectives", "joint")),
        *(f"tests/layers/test_{name}.py" for name in ("layers", "fused", "gaussian")),
        "tests/test_models.py",
    ],
    "starting points": [f"tests/test_{name}.py" for name in ("shallow", "starting", "inducing")],
}
SKIP = "not real_data and not normalised"
PATIENCE = 180.0

_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Pow: ast.Mult,
}
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}


@dataclass(frozen=True)
class Mutant:
    """A module's changed source, and what was changed where."""

    module: str
    line: int
    change: str
    source: str


def mutants_of(module: str) -> Iterator[Mutant]:
    """All mutants of a module, in the order of its lines."""
    tree = ast.parse(_path(module).read_text(encoding="utf-8"))
    for index, node in enumerate(ast.walk(tree)):
        for variant in _variants(node):
            if _is_prose(tree, node):
                continue
            changed = copy.deepcopy(tree)
            target = list(ast.walk(changed))[index]
            _replace(changed, target, variant)
            source = ast.unparse(ast.fix_missing_locations(changed))
            before, after = ast.unparse(node), ast.unparse(variant)
            yield Mutant(module, getattr(node, "lineno", 0), f"{before} → {after}", source)


def _variants(node: ast.AST) -> Iterator[ast.expr]:
    """Small changes of one expression."""
    if isinstance(node, ast.BinOp):
        if type(node.op) in _OPERATORS:
            yield ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right)
        if isinstance(node.op, ast.Add | ast.Sub):
            yield node.left
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield node.operand
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
        yield ast.Compare(node.left, [_COMPARISONS[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Attribute) and node.attr == "mT":
        yield node.value


def _is_prose(tree: ast.Module, node: ast.AST) -> bool:
    """Whether a node lies in an error message, an annotation, a default argument or an index from the end.

    The last are skipped since nearly all of them say shape[-1] of a square matrix, where shape[-2] is the same.
    """
    for parent in ast.walk(tree):
        outside: list[ast.AST] = []
        if isinstance(parent, ast.Raise | ast.JoinedStr | ast.AnnAssign | ast.arguments):
            outside = [parent]
        elif isinstance(parent, ast.Subscript) and isinstance(parent.slice, ast.UnaryOp):
            outside = [parent.slice]
        elif isinstance(parent, ast.FunctionDef):
            outside = [*parent.decorator_list, *([parent.returns] if parent.returns else [])]
            if (
                "message" in parent.name
                or "explain" in parent.name
                or parent.name in ("_check_form", "check", "__repr__")
            ):
                outside = [parent]
        if any(child is node for top in outside for child in ast.walk(top)):
            return True
    return False


def _replace(tree: ast.Module, old: ast.AST, new: ast.expr) -> None:
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, name, new)
            elif isinstance(value, list):
                setattr(parent, name, [new if item is old else item for item in value])


class MutantFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a mutant's source."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.mutant.module:
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=str(_path(fullname)))

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.mutant.source, str(_path(self.mutant.module)), "exec"), module.__dict__)


def group_of(module: str) -> str:
    """The group that a module belongs to."""
    return next(group for group, modules in GROUPS.items() if module in modules)


def _path(module: str) -> Path:
    return SOURCE / (module.replace(".", "/") + ".py")


def start(mutant: Mutant) -> int:
    """Fork a process that tests a mutant; it exits with 0 if the mutant survives."""
    pid = os.fork()
    if pid:
        return pid
    import pytest

    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    sys.meta_path.insert(0, MutantFinder(mutant))
    code = 1
    try:
        options = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning", "-k", SKIP]
        code = int(pytest.main([*options, *QUICK_TESTS[group_of(mutant.module)]]))
    finally:
        os._exit(code)


def survivors(mutants: list[Mutant], workers: int) -> list[Mutant]:
    """Run all mutants, some at a time."""
    alive: list[Mutant] = []
    running: dict[int, tuple[Mutant, float]] = {}
    waiting = list(reversed(mutants))
    while waiting or running:
        while waiting and len(running) < workers:
            mutant = waiting.pop()
            running[start(mutant)] = (mutant, time.monotonic())
        for pid, (mutant, since) in list(running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del running[pid]
                if os.waitstatus_to_exitcode(status) == 0:
                    alive.append(mutant)
                    print(f"survived: {mutant.module}:{mutant.line}: {mutant.change}", flush=True)
            elif time.monotonic() - since > PATIENCE:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return alive


def report(group: str, mutants: list[Mutant], alive: list[Mutant]) -> str:
    """A section for docs/proofs.md."""
    total, left = Counter(m.module for m in mutants), Counter(m.module for m in alive)
    lines = [
        heading(group),
        "",
        f"{datetime.date.today().isoformat()}, {machine()}, `python -m tests.mutants`: {len(mutants)} mutants of the "
        f"mathematics, {len(mutants) - len(alive)} killed by the quick tests.",
        "",
        "| module | mutants | killed |",
        "|---|---:|---:|",
        *(f"| {name.removeprefix('deepwishart.')} | {total[name]} | {total[name] - left[name]} |" for name in total),
        "",
        "Survivors. Most compute the same: a normal is symmetric, a branch is masked, a digit of a series lies "
        "below rounding, a bound is not met.",
        "",
        *(f"- {m.module.removeprefix('deepwishart.')}:{m.line}: `{m.change}`" for m in alive),
    ]
    return "\n".join(lines) + "\n"


def heading(group: str) -> str:
    """Of a group's section in docs/proofs.md."""
    return f"## Mutants of {group}"


def main() -> None:
    """Run the mutants and add their sections to docs/proofs.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", choices=list(GROUPS), help="one group of modules")
    parser.add_argument("--only", help="one module, such as distributions.kl")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    parser.add_argument("--every", type=int, default=1, help="take every K-th mutant")
    arguments = parser.parse_args()
    groups = dict(GROUPS)
    if arguments.group:
        groups = {arguments.group: GROUPS[arguments.group]}
    elif arguments.only:
        module = f"deepwishart.{arguments.only}"
        groups = {group_of(module): [module]}

    # Imported once, before the forks. The library itself must not be.
    import hypothesis  # noqa: F401
    import scipy.stats  # noqa: F401
    import torch

    torch.set_num_threads(1)
    for group, modules in groups.items():
        mutants = [mutant for module in modules for mutant in mutants_of(module)][:: arguments.every]
        alive = try_all(mutants, arguments.workers)
        print(f"{group}: {len(mutants) - len(alive)} of {len(mutants)} killed", flush=True)
        if not arguments.only and arguments.every == 1:
            write_section(PAGE, heading(group), report(group, mutants, alive))


def try_all(mutants: list[Mutant], workers: int) -> list[Mutant]:
    """The survivors among mutants of one group, after a look at whether the tests pass without any."""
    print(f"{len(mutants)} mutants", flush=True)
    module = mutants[0].module
    unchanged = Mutant(module, 0, "nothing", _path(module).read_text(encoding="utf-8"))
    if not survivors([unchanged], 1):
        sys.exit("The quick tests fail on the unchanged library, so they can tell nothing about mutants.")
    return survivors(mutants, workers)


if __name__ == "__main__":
    os.chdir(REPOSITORY)
    main()
