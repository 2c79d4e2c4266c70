"""The plots: which are written, that they are the same bytes every time, and what they show."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from lightning_asyncpp.tools.ablation.report.drawing import Line
from lightning_asyncpp.tools.ablation.report.plots import gaps_by_learning_rate
from lightning_asyncpp.tools.ablation.report.summary import Ablation
from lightning_asyncpp.tools.ablation.results import read_curves
from tests.tools.ablation.examples import left, run, search, seeds, whole_grid, write_curves

matplotlib = pytest.importorskip("matplotlib")
plots = pytest.importorskip("lightning_asyncpp.tools.ablation.report.plots")

SVG = "{http://www.w3.org/2000/svg}"


def draw(folder, runs, curves=True):
    folder.mkdir(exist_ok=True)
    points = read_curves(write_curves(folder, runs)).get("val_loss", {}) if curves else {}
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
    curves = read_curves(write_curves(tmp_path, runs))["val_loss"]
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


def test_no_lr_is_ringed_while_the_search_is_not_over():
    figure = plots.draw_learning_rates(Ablation.of(search({0.1: 1.5, 0.7: 1.6}), [left(0.5, log="x")]))
    assert len(axes_of(figure)[0].lines) == 1
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["async"]


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
    points = gaps_by_learning_rate(without, {0.2: 1.9, 0.1: None, 0.4: 2.0, 0.8: 2.0})
    assert [(lr, gap.mean, gap.diverged) for lr, gap in points] == [(0.1, None, 1), (0.2, pytest.approx(0.3), 0)]


def test_the_forest_of_many_optimizers_has_rows_of_four_panels_each_as_large_as_those_of_few():
    def size(optimizers):
        runs = [run(1.5, delay="0", optimizer=name) for name in optimizers]
        for place, name in enumerate(("none", "EF", "EF-2", "EF-4", "prediction")):
            runs += [run(1.6 + place / 10, correction=name, optimizer=optimizer) for optimizer in optimizers]
        figure = plots.draw_overview(Ablation.of(runs))
        rows, columns = figure.axes[0].get_gridspec().get_geometry()
        return rows, columns, *figure.get_size_inches()

    few, many = size("ABCD"), size("ABCDEFG")
    assert few[:2] == (1, 4)
    assert many[:2] == (2, 4)
    assert many[2] == few[2]
    assert (few[3], many[3]) == pytest.approx((2.45, 4.5))  # a panel of five lines is 2.05 high


@pytest.mark.parametrize("diverged", [{0.1: None, 0.2: None}, {0.1: -0.6, 0.2: -0.65}])
def test_negative_losses_are_inside_an_axis_that_points_up(diverged):
    runs = [*search({0.1: -0.8, 0.2: -0.85, 0.4: -0.7}, delay="0"), *search(diverged)]
    (axes,) = axes_of(plots.draw_learning_rates(Ablation.of(runs)))
    bottom, top = axes.get_ylim()
    assert bottom < -0.85
    assert top > max(loss for loss in (-0.7, *diverged.values()) if loss is not None)


def test_a_useless_lr_does_not_squeeze_the_axis_of_losses_around_zero():
    (axes,) = axes_of(plots.draw_learning_rates(Ablation.of(search({0.1: -0.4, 0.2: -0.5, 0.4: 90.0}, delay="0"))))
    assert -0.4 < axes.get_ylim()[1] < 1


def test_a_delay_of_one_update_with_other_settings_has_a_line_of_its_own():
    runs = [run(1.5, delay="0"), run(1.6), run(1.9, delay="1 micro_batches=4"), run(1.8, delay="2")]
    runs += [run(1.7, delay="1 micro_batches=4", correction="EF"), run(1.65, correction="EF")]
    figure = plots.draw_delay(Ablation.of(runs))
    (axes,) = axes_of(figure)
    drawn = [[round(float(gap), 6) for gap in bars.lines[0].get_ydata()] for bars in axes.containers]
    assert drawn == [[0.1, 0.3], [0.15], [0.4], [0.2]]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["async", "async + EF", "async (micro_batches=4)", "async (micro_batches=4) + EF"]
    looks = [(bars.lines[0].get_color(), bars.lines[0].get_marker()) for bars in axes.containers]
    assert len(set(looks)) == 4


def test_no_two_lines_look_alike_with_or_without_their_markers():
    lines = [Line(place, str(place)) for place in range(2 + 8 * 8)]
    assert len({(line.colour, line.marker) for line in lines}) == len(lines)
    assert len({(line.colour, line.stroke["ls"]) for line in lines}) == len(lines)


def test_the_legend_says_with_which_settings_the_delay_was_run():
    runs = [run(1.5, delay="0 micro_batches=4"), run(1.6, delay="1 micro_batches=4")]
    figure = plots.draw_overview(Ablation.of([*runs, run(1.55, delay="1 micro_batches=4", correction="EF")]))
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["async (micro_batches=4)", "async (micro_batches=4) + EF"]


def test_small_final_losses_are_printed_with_as_many_decimals_as_in_the_tables(tmp_path):
    runs = [run(0.00031, delay="0"), run(0.00044)]
    figure = plots.draw_curves(Ablation.of(runs), read_curves(write_curves(tmp_path, runs))["val_loss"])
    assert {text.get_text() for text in axes_of(figure)[0].texts} == {"sync 0.00031", "async 0.00044"}


def test_many_lines_leave_the_panel_its_height_and_stay_inside_it():
    runs = [run(1.5, delay="0"), *(run(1.6, delay=delay, correction=f"c{n}") for n in range(20) for delay in "12")]
    figure = plots.draw_delay(Ablation.of(runs))
    assert figure.get_figheight() > 4.4  # ten lines of legend above a panel of 2.7
    (axes,) = axes_of(figure)
    left_end, right_end = axes.get_xlim()
    places = [x for bars in axes.containers for x in bars.lines[0].get_xdata()]
    assert left_end < min(places) < max(places) < right_end
