"""A model's layers, from what its forward does in evaluation and in training mode, where its code may be another."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lightning_asyncpp.adapt.analysis import Analysis
from lightning_asyncpp.adapt.examples import Call, copied
from lightning_asyncpp.adapt.layers import PipelineLayers
from lightning_asyncpp.adapt.shells import Shell
from lightning_asyncpp.adapt.state import Changes
from lightning_asyncpp.adapt.trace import record
from lightning_asyncpp.errors import ConfigurationError

MOST_RUNS = 16


def layers_of(model: nn.Module, blocks: Sequence[str], call: Call, changed: Changes) -> PipelineLayers:
    """Find them, with the same cuts in both modes.

    The code around blocks runs again for every run of them. Where there would be too many, as with a sum behind each
    block, fewer are blocks, and the others part of that code, which calls them once.

    Args:
        model: it may be left in another mode.
        blocks: names, in the order of calls.
        call: arguments of an example.
        changed: name of a module -> what every forward changes in it.

    Raises:
        ConfigurationError: the model cannot be cut between these blocks.
    """
    shells: dict[str, Shell] = {}
    starts = [0]
    found: list[Analysis] = []
    for is_training in (False, True):
        model.train(is_training)
        try:
            trace = record(model, blocks, *copied(*call))
        except ConfigurationError:
            raise
        except Exception:
            if not is_training:
                raise
            break  # of a model that takes other arguments in training
        found.append(Analysis(model, trace, changed, shells, starts))
        found[-1].find_runs()
    if len(starts) > MOST_RUNS and len(blocks) > MOST_RUNS:
        return layers_of(model, _spread_out(blocks), call, changed)
    for analysis in found:
        analysis.find_needs()
    programs = [analysis.program for analysis in found]
    unused = [name for name in programs[0].unused if all(name in program.unused for program in programs)]
    return PipelineLayers(model, {False: programs[0], True: programs[-1]}, shells, unused)


def _spread_out(blocks: Sequence[str]) -> list[str]:
    """As many blocks as there may be runs, evenly over all."""
    step = (len(blocks) - 1) / (MOST_RUNS - 1)
    return [blocks[round(step * place)] for place in range(MOST_RUNS)]
