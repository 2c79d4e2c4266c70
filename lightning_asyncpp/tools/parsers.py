"""Parsers of the tools of ``asyncpp``.

``asyncpp TOOL --help`` is quick, since this module does not import torch or Lightning, which would take seconds.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from lightning_asyncpp.lightning_cli.help import did_you_mean
from lightning_asyncpp.tools.plan.devices import DEVICES

DTYPE_NAMES = ("float32", "bfloat16", "float16")
_UNRECOGNIZED = "unrecognized arguments: "


class ToolParser(argparse.ArgumentParser):
    """Parser whose errors suggest an option similar to an unknown one, and omit the usage, which would hide them."""

    def __init__(self, **how: Any) -> None:
        super().__init__(allow_abbrev=False, **how)

    def error(self, message: str) -> NoReturn:
        """Print the message with a suggestion, and exit with code 2."""
        words = message.removeprefix(_UNRECOGNIZED).split() if message.startswith(_UNRECOGNIZED) else []
        hints = [did_you_mean(word.partition("=")[0], list(self._option_string_actions)) for word in words]
        hint = next(filter(None, hints), "")
        self.exit(2, f"{self.prog}: error: {message}{hint}\n(`{self.prog} --help` lists the options)\n")


def columns(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Return rows as lines of aligned columns; columns in ``left`` are flush left, all others flush right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]


def count(text: str) -> int:
    """Parse a whole number of at least 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def positive(text: str) -> float:
    """Parse a number above 0."""
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a number above 0")
    return number


def metric(number: float) -> str:
    """Return a number with a metric prefix, behind which a unit may stand: 1.5 M for 1,500,000."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {prefix}"
    return f"{number:g} "


def cores() -> int:
    """Return the number of cores that this process may use; a job often has fewer than the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _add_model(parser: ToolParser) -> None:
    """Add the arguments for a model and its tokenizer."""
    parser.add_argument(
        "model", help="a checkpoint of the Trainer or of Fabric, or a folder with config.json and safetensors"
    )
    parser.add_argument(
        "--tokenizer", help="tokenizer in place of the saved one: 'byte', a tokenizer.json, or a name of the hub"
    )


def export_parser() -> ToolParser:
    """Return the parser of ``asyncpp export``."""
    parser = ToolParser(
        prog="asyncpp export",
        description="Write a trained model as a folder that Hugging Face transformers loads: safetensors, config.json,"
        " generation_config.json and the tokenizer.",
    )
    _add_model(parser)
    parser.add_argument("output", help="folder to write, which must be new or empty")
    parser.add_argument("--dtype", choices=DTYPE_NAMES, help="dtype of the weights (default: as saved)")
    parser.add_argument(
        "--lora",
        default="merged",
        choices=("merged", "adapter"),
        help="merge an HFModule's adapters into the weights, or write only the adapters, for peft (default: merged)",
    )
    return parser


def generate_parser() -> ToolParser:
    """Return the parser of ``asyncpp generate``."""
    parser = ToolParser(
        prog="asyncpp generate",
        description="Continue a prompt with a saved model, in one process, until the model ends the document. The model"
        " sees as many of the last tokens as fit its context.",
    )
    _add_model(parser)
    parser.add_argument("--prompt", default="", help="text to continue (default: the beginning of a document)")
    parser.add_argument("--max-new-tokens", type=count, default=200, help="maximum number of new tokens (default: 200)")
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="divisor of the logits; 0 means --greedy (default: 1)"
    )
    parser.add_argument("--top-k", type=int, help="number of most likely tokens to draw from (default: all)")
    parser.add_argument("--top-p", type=float, help="total probability of the most likely tokens to draw from")
    parser.add_argument("--greedy", action="store_true", help="take the most likely token every time")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws (default: 0)")
    parser.add_argument("--device", default="cpu", help="device of the model: cpu, cuda, cuda:1, ... (default: cpu)")
    parser.add_argument(
        "--dtype", default="float32", choices=DTYPE_NAMES, help="dtype of the weights (default: float32)"
    )
    return parser


def import_parser() -> ToolParser:
    """Return the parser of ``asyncpp import``."""
    parser = ToolParser(
        prog="asyncpp import",
        description="Read a model folder of Hugging Face transformers (Llama, Qwen3, Mixtral, Qwen3-MoE or GLM-4-MoE)"
        " and print the config for a recipe; with --output, also write the weights as a checkpoint. GPTModule must"
        " support all features in config.json.",
    )
    parser.add_argument("folder", help="folder with config.json and model.safetensors (or its shards and their index)")
    parser.add_argument(
        "--output", help="checkpoint to write, in fp32 (default: none; training can start from the folder itself)"
    )
    return parser


def check_parser() -> ToolParser:
    """Return the parser of ``asyncpp check``."""
    parser = ToolParser(
        prog="asyncpp check",
        usage="asyncpp check RECIPE [options]",
        description="Train a recipe for a few updates, once as a pipeline and once as a single process, and print where"
        " the results differ. Ends with code 1 if they differ.",
        epilog="More options override the recipe (--model..., --data..., --trainer...), as for `asyncpp fit`; --config"
        " RECIPE may be written instead of RECIPE. The model is trained on the CPU, in this process, so it should be"
        " small.",
    )
    parser.add_argument("--stages", type=count, help="number of stages (default: the recipe's)")
    parser.add_argument("--microbatches", type=count, help="pieces of a batch (default: the recipe's)")
    parser.add_argument("--updates", type=count, default=4, help="number of updates (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="seed of dropout and of weights on the meta device")
    return parser


def checkpoint_parser() -> ToolParser:
    """Return the parser of ``asyncpp checkpoint``."""
    parser = ToolParser(prog="asyncpp checkpoint", description="Describe a checkpoint, or write it in another form.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{info,convert}")
    does = "print facts about a checkpoint: its form, writer, pipeline and size"
    info = commands.add_parser("info", help=does, description=f"{does.capitalize()}.")
    does = "write a checkpoint, sharded or not, as one file, or write only its weights"
    convert = commands.add_parser("convert", help=does, description=f"{does.capitalize()}.")
    for command in (info, convert):
        command.add_argument("checkpoint", help="file, or folder with an index.json")
    info.add_argument("--json", action="store_true", help="print JSON in place of a table")
    convert.add_argument("output", help="file to write")
    convert.add_argument(
        "--to", required=True, choices=("full", "weights"), help="full: everything; weights: only the state_dict"
    )
    convert.add_argument("--entry", help="entry of the model, if a checkpoint of Fabric has several models")
    convert.add_argument("--force", action="store_true", help="replace the output if it exists")
    return parser


def doctor_parser() -> ToolParser:
    """Return the parser of ``asyncpp doctor``."""
    parser = ToolParser(
        prog="asyncpp doctor",
        description="Report versions and devices of this installation, and compare a training of two stages with a"
        " single-process reference. The training runs over NCCL if there are two GPUs, and over gloo if not. Ends with"
        " code 1 if the training fails or differs.",
    )
    parser.add_argument("--timeout", type=count, default=300, help="seconds that the training may take (default: 300)")
    return parser


def plan_parser() -> ToolParser:
    """Return the parser of ``asyncpp plan``."""
    parser = ToolParser(
        prog="asyncpp plan",
        usage="asyncpp plan RECIPE [options]",
        description="Estimate whether each stage of a recipe fits on a kind of device, and how fast the recipe would be"
        " under several schedules. Nothing is trained, and no memory is allocated for the model.",
        epilog="More options override the recipe (--model..., --data..., --trainer..., --optimizer...), as for"
        " `asyncpp fit`; --config RECIPE may be written instead of RECIPE.",
    )
    parser.add_argument("--devices", type=count, help="number of devices, on all nodes (default: the recipe's)")
    parser.add_argument("--device", default="h100", choices=DEVICES, help=f"kind: {', '.join(DEVICES)} (default: h100)")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="print JSON in place of tables, or write it to FILE"
    )
    parser.add_argument("--memory", type=positive, help="memory of a device in GiB (default: the kind's)")
    parser.add_argument("--mfu", type=positive, default=0.4, help="share of the peak FLOP/s reached (default: 0.4)")
    return parser


def prepare_parser() -> ToolParser:
    """Return the parser of ``asyncpp prepare``."""
    parser = ToolParser(
        prog="asyncpp prepare",
        description="Tokenise documents into a dataset that a training streams. The documents are in parquet files,"
        " JSON lines (.jsonl, .ndjson, also .gz) or text (.txt, .md), on this machine or on the Hugging Face"
        " Hub. After an interruption, the same command resumes.",
    )
    parser.add_argument(
        "sources",
        nargs="+",
        help="files, folders, globs, or URLs, for instance hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT",
    )
    parser.add_argument("--output", required=True, help="folder of the dataset")
    parser.add_argument(
        "--tokenizer", required=True, help="a name of the hub (HuggingFaceTB/SmolLM-360M, gpt2), a tokenizer.json, or"
        " byte",
    )  # fmt: skip
    parser.add_argument("--end-of-text", help="token that ends a document (default: the tokenizer's)")
    parser.add_argument("--text-key", default="text", help="column or field with the text (default: text)")
    parser.add_argument(
        "--val-fraction", type=float, default=0.001, help="share of the data for validation (default: 0.001)"
    )
    parser.add_argument("--num-workers", type=count, default=cores(), help="processes (default: as many as cores)")
    return parser


def recipes_parser() -> ToolParser:
    """Return the parser of ``asyncpp recipes``."""
    parser = ToolParser(
        prog="asyncpp recipes",
        description="List the recipes that come with the package, or copy one for editing. Commands accept the name of"
        " a recipe in place of a file: asyncpp fit quickstart",
    )
    parser.add_argument("--copy", metavar="NAME", help="write this recipe to a file")
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="where --copy writes (default: here)")
    return parser


def trace_parser() -> ToolParser:
    """Return the parser of ``asyncpp trace``."""
    parser = ToolParser(
        prog="asyncpp trace",
        description="Show how a run spent its time, from a recording by `asyncpp fit --trace`, PipelineTrace or"
        " Fabric's strategy.record_trace().",
    )
    parser.add_argument("run", help="folder of the recording, or a folder above it, whose newest recording is shown")
    parser.add_argument("--html", metavar="FILE", help="write a page with a timeline, for any browser")
    parser.add_argument("--perfetto", metavar="FILE", help="write the timeline for https://ui.perfetto.dev")
    parser.add_argument("--json", metavar="FILE", help="write the table's figures for other programs")
    return parser
