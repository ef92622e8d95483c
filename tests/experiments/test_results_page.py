"""docs/results.md against the results that it shows."""

from tests.results_page import PAGE, refreshed


def test_the_tables_of_the_results_page_are_those_of_its_commands() -> None:
    """Else: python -m tests.results_page."""
    page = PAGE.read_text(encoding="utf-8")
    assert refreshed(page) == page
    assert refreshed(page.replace("3.87 ± 0.04", "3.77 ± 0.04")) == page
