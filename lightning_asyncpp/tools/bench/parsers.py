"""What the benchmarks take; nothing heavy is imported, as in :mod:`lightning_asyncpp.tools.parsers`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from lightning_asyncpp.core.schedule import Slack, Staleness
from lightning_asyncpp.tools.bench.names import (
    ASYNC,
    ASYNC_FABRIC,
    EXTRAS,
    FLOAT32,
    FLOOR,
    GPIPE,
    ONE_F_ONE_B,
    OPTIMIZERS,
    STALENESS,
    SYNC,
    TITLES,
    USUAL,
    ZBV,
)
from lightning_asyncpp.tools.subcommands import chosen
from lightning_asyncpp.tools.tool_parser import ToolParser

_COMMANDS = {  # by the name of their module
    "schedule": "utilisation of sleeping stages under every schedule",
    "compute": "gain when stages really compute",
    "network": "gain of a real training over a slow network (Linux, root)",
    "time-to-loss": "wall-clock time to a loss, with and without a flush",
    "optimizer": "step time of Muon and of Error Feedback",
    "draw": "draw the ideal timeline of a schedule",
}
_COMPUTED = [ASYNC, ASYNC_FABRIC, SYNC, ONE_F_ONE_B, GPIPE, ZBV, FLOOR]
NETWORK_SYSTEMS = (ASYNC, SYNC, ONE_F_ONE_B)
"""That ``asyncpp bench network`` compares."""
NETWORK_EXTRAS = tuple(STALENESS)
"""That it also compares where it is asked to; it records all of ours anyway."""
TIME_TO_LOSS_EXTRAS = tuple(STALENESS)
"""That ``asyncpp bench time-to-loss`` also trains where it is asked to."""


def given_command(argv: Sequence[str] | None) -> tuple[str, list[str]] | None:
    """The benchmark that was given, as :func:`chosen` finds it."""
    return chosen("bench", _COMMANDS, argv, kind="benchmark")


def _shared_parser(name: str, description: str, systems: Sequence[str], known: Iterable[str] = TITLES) -> ToolParser:
    """A parser with the arguments of every benchmark that compares systems.

    Args:
        name: of the benchmark.
        description: in a line.
        systems: that run by default.
        known: that it has.
    """
    parser = ToolParser(allow_abbrev=False, prog=f"asyncpp bench {name}", description=description)
    parser.add_argument(
        "--systems", type=str, nargs="+", default=list(systems), help=f"what is compared, of {', '.join(known)}"
    )
    parser.add_argument(
        "--lookahead", type=NonNegativeInt | None, default=None, help="extra micro-batches in flight (default: auto)"
    )
    parser.add_argument("--mini-batches", type=PositiveInt, default=20, help="measured mini-batches per repeat")
    parser.add_argument("--warm-up", type=PositiveInt, default=6, help="mini-batches before them")
    parser.add_argument("--repeats", type=PositiveInt, default=3, help="how often every system is measured, in turn")
    parser.add_argument(
        "--timeout",
        type=PositiveFloat | None,
        default=None,
        help="seconds until all processes are killed (default: thrice what they should take, at least 1800)",
    )
    parser.add_argument("--json", type=str | None, default=None, help="write the results to this file")
    _add_link(parser)
    return parser


def _add_extras(parser: ToolParser, known: Iterable[str] = EXTRAS) -> None:
    """Add ``--also``."""
    help_text = f"asynchronous pipelines with one thing more, whose price is told: of {', '.join(known)}"
    parser.add_argument("--also", type=str, nargs="+", default=[], help=help_text)


def _add_link(parser: ToolParser) -> None:
    parser.add_argument(
        "--hosts",
        type=PositiveInt,
        default=1,
        help="2: the halves of the stages in two network namespaces with a link between them (Linux, root)",
    )
    parser.add_argument(
        "--link-latency-ms", type=NonNegativeFloat, default=0.0, help="of the link, one way; a relay adds some tenths"
    )
    parser.add_argument(
        "--link-mbit", type=NonNegativeFloat, default=0.0, help="bandwidth of the link, each way; 0: no limit"
    )


def schedule_parser() -> ToolParser:
    """Of ``asyncpp bench schedule``."""
    parser = _shared_parser("schedule", "Utilisation of sleeping stages under every schedule.", USUAL)
    parser.add_argument("--stages", type=PositiveInt, default=8, help="number of stages, one process each")
    parser.add_argument("--micro-batches", type=PositiveInt, default=8, help="micro-batches per mini-batch")
    parser.add_argument("--forward-ms", type=PositiveFloat, default=20.0, help="sleep of a forward, in ms")
    parser.add_argument("--backward-ms", type=PositiveFloat, default=40.0, help="sleep of a backward, in ms")
    parser.add_argument(
        "--weight-share",
        type=ClosedUnitInterval,
        default=0.5,
        help="part of the backward that is the weights' gradient, for schedules that run it apart",
    )
    parser.add_argument("--jitter", type=NonNegativeFloat, default=0.0, help="sigma of the sleeps' lognormal factors")
    parser.add_argument("--seed", type=NonNegativeInt, default=0, help="of the jitter")
    _add_extras(parser)
    parser.add_argument("--trace", type=str | None, default=None, help="write the engine's spans to this JSON file")
    parser.add_argument("--svg", type=str | None, default=None, help="draw the measured timelines to this file")
    return parser


def compute_parser() -> ToolParser:
    """Of ``asyncpp bench compute``."""
    parser = _shared_parser("compute", "Gain of an asynchronous pipeline whose stages multiply matrices.", _COMPUTED)
    parser.add_argument("--stages", type=PositiveInt, default=2, help="number of stages, one process each")
    parser.add_argument(
        "--micro-batches", type=PositiveInt, nargs="+", default=[2, 4, 8], help="per mini-batch; several may be given"
    )
    parser.add_argument("--target-ms", type=PositiveFloat, default=14.0, help="forward + backward of a stage, in ms")
    parser.add_argument("--rows", type=PositiveInt, default=512, help="rows of a micro-batch")
    parser.add_argument("--width", type=PositiveInt, default=128, help="width of the layers")
    _add_extras(parser)
    parser.add_argument("--pin", type=bool, default=True, help="give every process a core of its own")
    return parser


def network_parser() -> ToolParser:
    """Of ``asyncpp bench network``."""
    parser = _shared_parser(
        "network",
        "Gain of an asynchronous pipeline over a slow network, in real trainings.",
        NETWORK_SYSTEMS,
        NETWORK_SYSTEMS,
    )
    parser.set_defaults({"hosts": 2, "link_latency_ms": 10.0, "link_mbit": 100.0})
    parser.add_argument("--stages", type=PositiveInt, default=2, help="number of stages, half of them on each host")
    parser.add_argument("--replicas", type=PositiveInt, default=1, help="number of data-parallel copies of the stages")
    _add_extras(parser, NETWORK_EXTRAS)
    parser.add_argument("--micro-batches", type=PositiveInt, default=4, help="micro-batches per mini-batch")
    parser.add_argument("--layers", type=PositiveInt, default=4, help="blocks of the GPT")
    parser.add_argument("--dim", type=PositiveInt, default=256, help="width of the GPT, a multiple of 64")
    parser.add_argument("--context", type=PositiveInt, default=128, help="tokens of a sequence")
    parser.add_argument("--rows", type=PositiveInt, default=4, help="sequences of a micro-batch")
    parser.add_argument("--lr", type=NonNegativeFloat, default=1e-3, help="learning rate of AdamW")
    return parser


def time_to_loss_parser() -> ToolParser:
    """Of ``asyncpp bench time-to-loss``."""
    parser = ToolParser(
        allow_abbrev=False, prog="asyncpp bench time-to-loss", description="Wall-clock time to a validation loss."
    )
    parser.add_argument("--config", type=str, default="quickstart", help="recipe of `asyncpp fit`: a file or a name")
    parser.add_argument("--stages", type=PositiveInt, default=2, help="number of stages, one process each")
    parser.add_argument("--micro-batches", type=PositiveInt, default=4, help="micro-batches per mini-batch")
    parser.add_argument("--lookahead", type=NonNegativeInt | None, default=None, help="of async_pipeline")
    parser.add_argument("--staleness", type=Staleness, default="least", help="of async_pipeline")
    parser.add_argument("--slack", type=Slack, default=0, help="of async_pipeline, micro-batches or 'exact'")
    known = ", ".join(TIME_TO_LOSS_EXTRAS)
    parser.add_argument("--also", type=str, nargs="+", default=[], help=f"further asynchronous pipelines, of {known}")
    parser.add_argument("--steps", type=PositiveInt, default=300, help="updates of each training")
    parser.add_argument("--validate-every", type=PositiveInt, default=25, help="updates between two validations")
    parser.add_argument("--val-batches", type=PositiveInt, default=24, help="batches of each validation")
    parser.add_argument(
        "--seeds", type=NonNegativeInt, nargs="+", default=[0, 1, 2], help="one training of each system"
    )
    parser.add_argument("--targets", type=PositiveFloat, nargs="+", default=None, help="losses (default: found)")
    parser.add_argument("--sync-lr", type=PositiveFloat | None, default=None, help="instead of the recipe's")
    parser.add_argument("--async-lr", type=PositiveFloat | None, default=None, help="instead of the recipe's")
    parser.add_argument("--timeout", type=PositiveFloat, default=1800.0, help="seconds until a training is killed")
    parser.add_argument("--json", type=str | None, default=None, help="write curves and results to this file")
    return parser


def optimizer_parser() -> ToolParser:
    """Of ``asyncpp bench optimizer``."""
    parser = ToolParser(
        allow_abbrev=False, prog="asyncpp bench optimizer", description="Time of an update of one stage of a GPT."
    )
    sizes: dict[str, tuple[Any, int, str]] = {
        "layers": (PositiveInt, 2, "transformer blocks on the stage; SmolLM-360M on four stages has 8"),
        "width": (PositiveInt, 960, "of the residual stream"),
        "heads": (PositiveInt, 15, "attention heads"),
        "kv-heads": (PositiveInt, 5, "heads of keys and values"),
        "mlp": (PositiveInt, 2560, "inner width of the feed-forward layers"),
        "vocab": (NonNegativeInt, 49152, "rows of the embedding on the stage; 0: a stage in the middle"),
        "context": (PositiveInt, 512, "tokens of the sequence whose forward and backward are timed"),
        "repeats": (PositiveInt, 9, "how often every system steps, in turn"),
        "threads": (NonNegativeInt, 0, "of torch; 0: as many as it takes by itself"),
    }
    for name, (kind, default, text) in sizes.items():
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    systems = [system for system in OPTIMIZERS if system != FLOAT32]
    parser.add_argument("--systems", type=str, nargs="+", default=systems, help=f"some of {', '.join(OPTIMIZERS)}")
    parser.add_argument("--error-feedback", type=bool, default=True, help="measure what Error Feedback adds")
    parser.add_argument("--bfloat16", type=bool, default=True, help="forward and backward under bfloat16 autocast")
    parser.add_argument("--device", type=str, default="cpu", help="cpu or cuda")
    parser.add_argument("--json", type=str | None, default=None, help="write the results to this file")
    return parser


def draw_parser() -> ToolParser:
    """Of ``asyncpp bench draw``."""
    parser = ToolParser(
        allow_abbrev=False, prog="asyncpp bench draw", description="Draw the ideal timelines of both schedules."
    )
    parser.add_argument("--stages", type=PositiveInt, default=4, help="number of stages")
    parser.add_argument("--micro-batches", type=PositiveInt, default=4, help="micro-batches per mini-batch")
    parser.add_argument("--mini-batches", type=PositiveInt, default=3, help="mini-batches to draw")
    parser.add_argument("--lookahead", type=NonNegativeInt, default=0, help="extra micro-batches in flight")
    parser.add_argument("--backward", type=PositiveFloat, default=2.0, help="time of a backward; a forward takes 1")
    parser.add_argument("--svg", type=str, required=True, help="file to write")
    return parser
