"""Tables embedded in pages: written from the CSV files, checked, and refused where a marker is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.embed_tables import END, PageError, embed, embedded, main
from lightning_asyncpp.tools.ablation.report.tables import DEFINITIONS
from tests.tools.ablation.examples import run, write_results

EVIDENCE = Path(__file__).parents[3] / "docs" / "research" / "evidence.md"


def make_page(folder, *lines):
    page = folder / "docs" / "page.md"
    page.parent.mkdir(exist_ok=True)
    page.write_text("\n".join(lines))
    return page


def marked(table="data/demo#main", *inside):
    return [f"<!-- table: {table} -->", *inside, END]


@pytest.fixture
def data(tmp_path):
    write_results(tmp_path / "docs" / "data" / "demo", [run(1.5, delay="0"), run(1.6), run(1.7, delay="2")])
    return tmp_path


def test_what_is_between_the_markers_is_replaced_and_the_rest_is_kept(data):
    page = make_page(data, "# Title", *marked("data/demo#main", "stale"), "between", *marked("data/demo#delays"), "end")
    assert embed(page)
    text = page.read_text()
    assert text.startswith("# Title\n<!-- table: data/demo#main -->\n\n| optimizer | sync |")
    assert "+0.100" in text
    assert "+0.200" in text
    assert "stale" not in text
    assert text.count(END) == 2
    assert text.split(END)[1].startswith("\nbetween\n<!-- table")
    assert text.endswith(f"\n\n{END}\nend")
    assert not embed(page)


def test_what_tables_of_a_kind_say_below_them_stands_once_and_their_counts_everywhere(data):
    page = make_page(data, *marked(), "between", *marked(), *marked("data/demo#delays"))
    first, second, third = embedded(page).split(END)[:3]
    assert "Gap: async less sync, paired by seed." in first
    assert second == first.replace("<!--", "\nbetween\n<!--").replace("\n" + DEFINITIONS["main"] + "\n", "")
    assert "\n\n‡ a single learning rate was run: not searched for. 3 runs (0 diverged)" in second
    assert "paired by seed: mean" in third


def test_the_check_fails_until_the_page_is_written_again(data, capsys):
    page = make_page(data, *marked())
    before = page.read_text()
    with pytest.raises(SystemExit, match=r"Run `python docs/embed_tables\.py .*page\.md`"):
        main([str(page), "--check"])
    assert page.read_text() == before
    main([str(page)])
    main([str(page), "--check"])
    assert "tables written again" in capsys.readouterr().out
    write_results(data / "docs" / "data" / "demo", [run(1.5, delay="0"), run(1.9)])
    with pytest.raises(SystemExit):
        main([str(page), "--check"])


def test_all_wrong_markers_are_named_and_nothing_is_written(data):
    page = make_page(data, END, *marked("data/demo#mian"), *marked("data/demo"), *marked("gone#main"), *marked()[:2])
    before = page.read_text()
    with pytest.raises(PageError) as caught:
        embed(page)
    problems = str(caught.value).replace(str(page), "PAGE").splitlines()
    assert [problem.split(": ")[0] for problem in problems] == ["PAGE:1", "PAGE:2", "PAGE:4", "PAGE:6"]
    tables = "main, corrections, equal, delays, search"
    assert f'no table "mian"; expected FOLDER#TABLE, TABLE one of {tables}' in problems[1]
    assert "no such file" in problems[3]
    assert page.read_text() == before


def test_a_table_that_is_not_closed_is_named(data):
    for lines in (marked()[:1], [*marked()[:1], *marked()]):
        with pytest.raises(PageError, match=rf'page\.md:1: no line "{END}"'):
            embed(make_page(data, *lines))


def test_a_table_without_runs_is_named(data):
    write_results(data / "docs" / "data" / "demo", [run(1.5, delay="0")])
    with pytest.raises(PageError, match='has no runs for the table "delays"'):
        embed(make_page(data, *marked("data/demo#delays")))


@pytest.mark.skipif(not EVIDENCE.exists(), reason="there is no docs/research/evidence.md")
def test_the_evidence_page_is_up_to_date():
    assert embedded(EVIDENCE) == EVIDENCE.read_text(encoding="utf-8")
