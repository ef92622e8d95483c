"""The package as a stranger meets it: imports, README, docstrings, versions."""

import doctest
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import deepwishart
from deepwishart.distributions import wishart
from tests import run_examples

REPOSITORY = Path(__file__).parents[1]


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_importing_the_package_imports_nothing_heavy() -> None:
    done = run_python("import sys, deepwishart; assert not {'torch', 'numpy', 'scipy', 'typer'} & set(sys.modules)")
    assert done.returncode == 0, done.stderr


def test_the_training_core_needs_torch_and_numpy_alone() -> None:
    blocked = (
        "scipy",
        "matplotlib",
        "rich",
        "typer",
        "pydantic",
        "sklearn",
        "pandas",
        "safetensors",
        "jinja2",
        "pooch",
    )
    rooms = ("train", "models", "objectives", "predictive", "distributions", "kernels", "layers", "likelihoods")
    code = f"""
import sys
for name in {blocked!r}:
    sys.modules[name] = None
import deepwishart
for name in {rooms!r}:
    getattr(deepwishart, name)
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_importing_leaves_torchs_settings_alone() -> None:
    code = """
import torch
before = (torch.get_default_dtype(), torch.initial_seed(), torch.distributions.Distribution._validate_args)
import deepwishart.distributions, deepwishart.linalg
assert before == (torch.get_default_dtype(), torch.initial_seed(), torch.distributions.Distribution._validate_args)
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_rooms_are_attributes() -> None:
    assert deepwishart.linalg.__name__ == "deepwishart.linalg"
    assert deepwishart.distributions.Wishart is wishart.Wishart
    assert "distributions" in dir(deepwishart)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = deepwishart.nonsense


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in REPOSITORY.glob("docs/*.md"))])
def test_the_examples_of_every_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_examples.run(REPOSITORY / page) or page != "README.md"


def test_the_docstrings_examples_run() -> None:
    failed, attempted = doctest.testmod(wishart, extraglobs={"torch": torch})
    assert attempted
    assert not failed


def test_the_changelog_knows_the_version() -> None:
    assert f"## {deepwishart.__version__}" in (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")


def test_links_between_the_pages_lead_somewhere() -> None:
    for page in [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text(encoding="utf-8")):
            linked = page.parent / target
            assert linked.exists(), f"{page.name} links to {target}"
            assert linked.stat().st_size, f"{target} is empty"


def test_every_public_name_exists() -> None:
    for name in deepwishart.__all__:
        assert hasattr(deepwishart, name), name
    rooms = [getattr(deepwishart, name) for name in deepwishart.__all__]
    for room in (room for room in rooms if isinstance(room, ModuleType)):
        for name in room.__all__:
            assert hasattr(room, name), f"{room.__name__}.{name}"


def test_the_api_reference_is_built_from_the_docstrings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pdoc", "--docformat", "google", "--math", "--output-directory", str(tmp_path)]
    modules = ["deepwishart", "deepwishart.estimators.regression"]
    done = subprocess.run([*command, *modules], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "deepwishart" / "estimators" / "regression.html").read_text(encoding="utf-8")
    assert "Regression by a deep Wishart process" in page
    assert "predict_quantiles" in page
