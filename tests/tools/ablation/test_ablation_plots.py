"""The plots: which are written, that they are the same bytes every time, and what they show."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from lightning_asyncpp.tools.ablation.report import read_curves
from lightning_asyncpp.tools.ablation.summary import Ablation
from tests.tools.ablation.examples import run, search, seeds, whole_grid, write_curves

matplotlib = pytest.importorskip("matplotlib")
plots = pytest.importorskip("lightning_asyncpp.tools.ablation.plots")

SVG = "{http://www.w3.org/2000/svg}"


def draw(folder, runs, curves=True):
    folder.mkdir(exist_ok=True)
    points = read_curves(write_curves(folder, runs)) if curves else {}
    return plots.write_plots(folder, Ablation.of(runs), points)


def texts(file):
    return [element.text for element in ElementTree.parse(file).iter(f"{SVG}text")]


def axes_of(figure):
    return [axes for axes in figure.axes if axes.get_visible()]


def test_a_whole_grid_gives_every_plot_and_the_same_bytes_again(tmp_path):
    runs = whole_grid([("Muon", 1.5, 0.05)])
    first, second = tmp_path / "first", tmp_path / "second"
    assert draw(first, runs) == ["gaps.svg", "curves.svg", "lr.svg", "lr_gap.svg", "momentum.svg", "depth.svg"]
    with matplotlib.rc_context({"font.size": 20, "axes.grid": False}):  # the user's own settings do not show
        names = draw(second, runs)
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)
    assert not any(b"<dc:date>" in (first / name).read_bytes() for name in names)


@pytest.mark.parametrize(
    ("runs", "curves", "expected"),
    [
        ([], True, []),
        ([run(1.5, delay="0")], True, ["curves.svg"]),
        ([run(1.5, delay="0")], False, []),
        ([run(1.5, delay="0"), run(1.6)], False, ["gaps.svg"]),
        (search({0.01: 1.5, 0.1: 1.6}), False, ["lr.svg"]),
        (search({0.01: None, 0.1: None}), True, []),
        (
            [*search({0.1: 1.5, 0.2: 1.6}, delay="0"), *search({0.2: 1.7, 0.4: 2})],
            False,
            ["gaps.svg", "lr.svg", "lr_gap.svg"],
        ),
        ([run(1.5, momentum=0.9)], False, []),  # no sync row to measure the gap from
        ([run(1.5, delay="0", momentum=0.9), run(1.6, momentum=0.9)], False, ["gaps.svg", "momentum.svg"]),
        ([run(1.5, delay="0"), run(1.6, delay="pipedream", stages=4)], False, []),  # one depth
        ([run(1.5, delay="0"), *(run(1.6, delay="pipedream", stages=s) for s in (4, 8))], False, ["depth.svg"]),
        ([run(1.6, delay="pipedream", stages=s) for s in (4, 8)], False, []),
    ],
)
def test_a_plot_is_written_where_its_data_exist(tmp_path, runs, curves, expected):
    assert draw(tmp_path, runs, curves) == expected
    assert sorted(file.name for file in tmp_path.glob("*.svg")) == sorted(expected)


def test_a_plot_whose_data_are_gone_is_removed(tmp_path):
    draw(tmp_path, [run(1.5, delay="0"), run(1.6)])
    assert draw(tmp_path, [run(1.5, delay="0")]) == ["curves.svg"]
    assert not (tmp_path / "gaps.svg").exists()


def test_curves_are_the_mean_over_finished_seeds_and_say_who_diverged(tmp_path):
    runs = [*seeds([1.5, 1.7], delay="0"), *seeds([1.8, None, 2.0]), *seeds([None] * 2, correction="EF")]
    curves = read_curves(write_curves(tmp_path, runs))
    figure = plots.draw_curves(Ablation.of(runs), curves)
    (axes,) = axes_of(figure)
    assert [line.get_ydata()[-1] for line in axes.lines] == pytest.approx([1.6, 1.9], abs=0.01)
    assert {text.get_text() for text in axes.texts} == {
        "sync 1.600",
        "async 1.900 (1 of 3 diverged)",
        "async + EF (diverged)",
    }


def test_text_in_the_file_is_text(tmp_path):
    draw(tmp_path, [run(1.5, delay="0"), run(1.6)])
    assert {"Muon", "sync 1.500", "async 1.600"} <= set(texts(tmp_path / "curves.svg"))


def test_the_chosen_lr_is_ringed_and_diverged_ones_are_crossed():
    figure = plots.draw_learning_rates(Ablation.of(search({0.001: 1.7, 0.01: 1.5, 0.1: None, 1.0: None}, delay="0")))
    (axes,) = axes_of(figure)
    line, cross, ring = axes.lines
    assert list(line.get_xdata()) == [0.001, 0.01]
    assert (cross.get_marker(), list(cross.get_xdata())) == ("x", [0.1, 1.0])
    assert (list(ring.get_xdata()), list(ring.get_ydata())) == ([0.01], [1.5])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.001", "0.01", "0.1", "1"]


def test_a_finite_but_useless_lr_does_not_squeeze_the_axis():
    figure = plots.draw_learning_rates(Ablation.of(search({0.001: 1.7, 0.01: 1.5, 0.1: 400.0}, delay="0")))
    assert axes_of(figure)[0].get_ylim()[1] < 2.1


def test_gaps_by_momentum_and_depth_are_those_of_the_summary():
    ablation = Ablation.of(whole_grid())
    adamw, muon = axes_of(plots.draw_momentum(ablation))
    # gap 0.3 at delay 1, times 1.5 - momentum; EF leaves 40 % of it
    assert [list(bars.lines[0].get_ydata()) for bars in adamw.containers] == [
        pytest.approx([0.3, 0.18]),
        pytest.approx([0.12, 0.072]),
    ]
    assert list(muon.containers[0].lines[0].get_ydata()) == pytest.approx([0.05, 0.03])
    first = axes_of(plots.draw_depth(ablation))[0]
    assert first.get_title(loc="left") == "AdamW, momentum 0.5"
    assert list(first.containers[0].lines[0].get_ydata()) == pytest.approx([0.12, 0.24, 0.48])
    assert [line.get_ydata()[0] for line in first.lines if line.get_linestyle() == "--"] == pytest.approx([0.3, 0.12])


def test_the_overview_has_a_mark_per_delayed_row_and_names_diverged_ones():
    runs = [*seeds([1.5, 1.5], delay="0"), *seeds([1.8, 1.6]), *seeds([None, None], correction="EF")]
    (axes,) = axes_of(plots.draw_overview(Ablation.of(runs)))
    (bars,) = axes.containers
    assert list(bars.lines[0].get_xdata()) == pytest.approx([0.2])
    assert [text.get_text() for text in axes.texts] == ["async + EF: diverged"]


def test_many_corrections_have_a_row_each():
    runs = [run(1.5, delay="0"), run(1.9)]
    runs += [run(1.6 + place / 10, correction=name) for place, name in enumerate(("EF", "EF-2", "EF-3", "prediction"))]
    runs += [run(1.3, delay="0", optimizer="AdamW"), run(None, optimizer="AdamW", correction="look-ahead")]
    figure = plots.draw_overview(Ablation.of(runs))
    muon, adamw = axes_of(figure)
    assert [bars.lines[0].get_xdata()[0] for bars in muon.containers] == pytest.approx([0.4, 0.1, 0.2, 0.3, 0.4])
    assert [bars.lines[0].get_ydata()[0] for bars in muon.containers] == [0, 1, 2, 3, 4]
    names = [label.get_text() for label in muon.get_yticklabels()]
    assert names == ["async", "async + EF", "async + EF-2", "async + EF-3", "async + prediction", "async + look-ahead"]
    assert [text.get_text() for text in adamw.texts] == ["diverged"]
    assert [line.get_xdata()[0] for line in muon.lines if line.get_linestyle() == "--"] == [pytest.approx(0.4)]


def test_a_fresh_last_stage_is_drawn_by_depth_and_constant_delays_by_delay(tmp_path):
    runs = [run(1.5, delay="0"), run(1.9), run(1.7, correction="EF"), run(2.1, delay="4"), run(2.0, delay="2")]
    runs += [run(1.6 + 1 / s, delay="fresh_last_stage", stages=s) for s in (2, 4)]
    figure = plots.draw_depth(Ablation.of(runs))
    (axes,) = axes_of(figure)
    assert list(axes.containers[0].lines[0].get_ydata()) == pytest.approx([0.6, 0.35])
    assert [text.get_text() for text in figure.legends[0].get_texts()][-2:] == [plots.FRESH, plots.CONSTANT]
    (axes,) = axes_of(plots.draw_delay(Ablation.of(runs)))
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2", "4"]
    assert list(axes.containers[0].lines[0].get_ydata()) == pytest.approx([0.4, 0.5, 0.6])
    assert list(axes.containers[1].lines[0].get_ydata()) == pytest.approx([0.2])
    assert plots.draw_delay(Ablation.of([r for r in runs if r.delay in ("0", "1")])) is None


def test_a_depth_at_which_a_seed_diverged_has_a_cross_at_the_top():
    runs = [run(1.5, delay="0"), *seeds([1.5, 1.5], delay="0")[1:], run(1.6, delay="pipedream", stages=4)]
    runs += seeds([None, None], delay="pipedream", stages=8)
    figure = plots.draw_depth(Ablation.of(runs))
    (axes,) = axes_of(figure)
    (cross,) = [line for line in axes.lines if line.get_marker() == "x"]
    assert (list(cross.get_xdata()), list(cross.get_ydata())) == ([1.0], [0.97])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["4", "8"]
    assert "a seed diverged" in [text.get_text() for text in figure.legends[0].get_texts()]
    assert plots.draw_depth(Ablation.of([r for r in runs if r.loss is None or r.delay == "0"])) is None


def test_the_gap_at_equal_learning_rates_leaves_out_what_has_no_pair():
    without = {0.1: 1.5, 0.2: 1.6, 0.4: None}
    points = plots._gaps_by_learning_rate(without, {0.2: 1.9, 0.1: None, 0.4: 2.0, 0.8: 2.0})
    assert [(lr, gap.mean, gap.diverged) for lr, gap in points] == [(0.1, None, 1), (0.2, pytest.approx(0.3), 0)]
