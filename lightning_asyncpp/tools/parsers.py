"""What every tool of ``asyncpp`` takes: its parser, apart from what it does.

``asyncpp TOOL --help`` is answered from here alone. So this module imports nothing that imports torch or Lightning:
these take seconds.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from jsonargparse.typing import NonNegativeInt, PositiveInt

from lightning_asyncpp.tools.plan.devices import DEVICES
from lightning_asyncpp.tools.tool_parser import KnownPartParser, ToolParser, chosen

DTYPE_NAMES = ("float32", "bfloat16", "float16")
LORA_FORMS = ("merged", "adapter")
SPLITS = ("validation", "train", "all")


def _add_model(parser: ToolParser) -> None:
    """Add what names a model and its tokenizer."""
    parser.add_argument(
        "model", type=str, help="a checkpoint of the Trainer or of Fabric, or a folder with config.json and safetensors"
    )
    parser.add_argument(
        "--config",
        type=str | None,
        default=None,
        help="YAML or JSON file with the fields of GPTConfig, or a recipe, for a checkpoint that does not hold them",
    )
    parser.add_argument(
        "--tokenizer",
        type=str | None,
        default=None,
        help="'byte' or a tokenizer.json, for a checkpoint that does not hold its tokenizer",
    )


def _add_execution(parser: ToolParser) -> None:
    """Add where and how the model is computed."""
    parser.add_argument("--device", type=str, default="cpu", help="where the model runs: cpu, cuda, cuda:1, ...")
    parser.add_argument(
        "--dtype", type=str, default="float32", help=f"of the weights while it runs, of {', '.join(DTYPE_NAMES)}"
    )


def evaluate_parser() -> ToolParser:
    """Of ``asyncpp evaluate``."""
    parser = ToolParser(
        allow_abbrev=False,
        prog="asyncpp evaluate",
        description="Measure a saved model on tokens, in one process: the loss that the Trainer's validation reports.",
    )
    _add_model(parser)
    parser.add_argument(
        "--data", type=str, required=True, help="folder of text or of tokens, 'stdlib', or a URI of tokens"
    )
    parser.add_argument("--split", type=str, default="validation", help=f"which part, of {', '.join(SPLITS)}")
    parser.add_argument(
        "--val-source", type=str | None, default=None, help="tokens to validate on, if --data are tokens"
    )
    parser.add_argument("--val-fraction", type=float | None, default=None, help="share of text files to validate on")
    parser.add_argument("--context-length", type=PositiveInt | None, default=None, help="tokens per sequence")
    parser.add_argument("--batch-size", type=PositiveInt | None, default=None, help="sequences per batch")
    parser.add_argument("--max-bytes", type=PositiveInt | None, default=None, help="most bytes of text to take")
    parser.add_argument(
        "--cache-dir", type=str | None, default=None, help="folder for prepared tokens (default: in your cache folder)"
    )
    parser.add_argument("--limit-batches", type=PositiveInt | None, default=None, help="most batches to evaluate")
    parser.add_argument("--json", type=str | None, default=None, help="write the figures to this file")
    _add_execution(parser)
    return parser


def export_parser() -> ToolParser:
    """Of ``asyncpp export``."""
    parser = ToolParser(
        allow_abbrev=False,
        prog="asyncpp export",
        description="Write a trained model as a folder that Hugging Face transformers loads: safetensors, config.json,"
        " generation_config.json and the tokenizer.",
    )
    _add_model(parser)
    parser.add_argument("--output", type=str, required=True, help="folder to write; it must not exist, or be empty")
    parser.add_argument(
        "--max-shard-size", type=str, default="5GB", help="most bytes of weights per file: 5GB, 500MB, ..."
    )
    parser.add_argument(
        "--dtype",
        type=str | None,
        default=None,
        help=f"of the weights, of {', '.join(DTYPE_NAMES)} (default: as saved)",
    )
    parser.add_argument(
        "--lora",
        type=str,
        default="merged",
        help="of an HFModule with adapters: merged into the weights, or adapter: they alone, as peft loads them",
    )
    return parser


def generate_parser() -> ToolParser:
    """Of ``asyncpp generate``."""
    parser = ToolParser(
        allow_abbrev=False,
        prog="asyncpp generate",
        description="Continue a prompt with a saved model, in one process. It ends where the model ends the document;"
        " what does not fit into its context slides out of it.",
    )
    _add_model(parser)
    parser.add_argument(
        "--prompt", type=str, default="", help="text to continue (default: the beginning of a document)"
    )
    parser.add_argument("--max-new-tokens", type=PositiveInt, default=200, help="most tokens to write")
    parser.add_argument("--temperature", type=float, default=1.0, help="what logits are divided by; 0 is --greedy")
    parser.add_argument("--top-k", type=int | None, default=None, help="draw among so many of the most likely tokens")
    parser.add_argument(
        "--top-p", type=float | None, default=None, help="draw among those that together have this probability"
    )
    parser.add_argument("--greedy", action="store_true", help="take the most likely token every time")
    parser.add_argument("--seed", type=NonNegativeInt, default=0, help="of the draws")
    _add_execution(parser)
    return parser


def import_parser() -> ToolParser:
    """Of ``asyncpp import``."""
    parser = ToolParser(
        allow_abbrev=False,
        prog="asyncpp import",
        description="Read a model folder of Hugging Face transformers (Llama, Qwen3, Mixtral, Qwen3-MoE, GLM-4-MoE"
        " without what a GPT lacks): print the config that a recipe needs, and write the weights as a checkpoint.",
    )
    parser.add_argument("folder", type=str, help="with config.json and model.safetensors, or shards and their index")
    parser.add_argument(
        "--output",
        type=str | None,
        default=None,
        help="checkpoint to write, in fp32 (default: none; training can start from the folder itself)",
    )
    return parser


FORMS = ("full", "weights")
"""Of checkpoints, that ``asyncpp checkpoint convert`` writes."""
_CHECKPOINT = {
    "info": "what it is, who wrote it, and what is in it",
    "convert": "write it as one file, or its weights alone",
}
_CHECK = (
    "Train the first updates of a recipe several ways, as a pipeline and as a single process does, and print where they"
    " differ: a difference ends with code 1."
)


def check_parser() -> KnownPartParser:
    """Of ``asyncpp check``."""
    parser = KnownPartParser(
        "asyncpp check",
        usage="asyncpp check RECIPE [options]",
        description=_CHECK,
        epilog="Beside these: whatever overrides the recipe (--model..., --data..., --trainer...), as for"
        " `asyncpp fit`; --config RECIPE names it, too. The model is trained on the"
        " CPU, in this process: make it small if it is not.",
        allow_abbrev=False,
    )
    parser.add_argument("--stages", type=int, help="number of stages; default: the recipe's")
    parser.add_argument("--micro-batches", type=int, help="pieces of a batch; default: the recipe's")
    parser.add_argument("--updates", type=int, default=4, help="number of updates")
    parser.add_argument("--seed", type=int, default=0, help="of dropout and of layers made on the meta device")
    return parser


def checkpoint_command(argv: Sequence[str] | None) -> tuple[str, list[str]] | None:
    """The command of ``asyncpp checkpoint``, as :func:`chosen` finds it."""
    return chosen("checkpoint", _CHECKPOINT, argv, arguments="CKPT ")


def info_parser() -> ToolParser:
    """Of ``asyncpp checkpoint info``."""
    parser = _checkpoint_parser("info", "Print what a checkpoint is, who wrote it, and what is in it.")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    return parser


def convert_parser() -> ToolParser:
    """Of ``asyncpp checkpoint convert``."""
    parser = _checkpoint_parser("convert", "Write a sharded checkpoint as one file, or the weights of any.")
    parser.add_argument("output", type=str, help="file to write")
    parser.add_argument(
        "--to", type=str, required=True, help=f"of {', '.join(FORMS)}: all in one file; the model's state_dict alone"
    )
    parser.add_argument(
        "--entry", type=str | None, default=None, help="entry of the model in a checkpoint of Fabric with several"
    )
    parser.add_argument("--force", action="store_true", help="write over a checkpoint that is there")
    return parser


def _checkpoint_parser(command: str, description: str) -> ToolParser:
    parser = ToolParser(allow_abbrev=False, prog=f"asyncpp checkpoint {command}", description=description)
    parser.add_argument("checkpoint", type=str, help="file, or folder with an index.json")
    return parser


def doctor_parser() -> ToolParser:
    """Of ``asyncpp doctor``."""
    parser = ToolParser(
        allow_abbrev=False, prog="asyncpp doctor",
        description="Examine this installation: versions, devices, and a training of two"
        " stages (on GPUs over NCCL if there are two, else over gloo) that is compared with the reference. Ends with"
        " code 1 if that fails or differs.",
    )  # fmt: skip
    parser.add_argument("--timeout", type=PositiveInt, default=300, help="seconds that the training may take")
    return parser


def plan_parser() -> KnownPartParser:
    """Of ``asyncpp plan``."""
    parser = KnownPartParser(
        "asyncpp plan",
        usage="asyncpp plan RECIPE [options]",
        description="Say whether a recipe fits on a kind of device, stage by stage, how fast it would be under several"
        " schedules, and what to change if it does not fit. Nothing is trained, and no memory is taken.",
        epilog="Beside these: whatever overrides the recipe (--model..., --data..., --trainer..., --optimizer...), as"
        " for `asyncpp fit`; --config RECIPE names it, too.",
        allow_abbrev=False,
    )
    parser.add_argument("--devices", type=int, help="number of devices, on all nodes; default: the recipe's")
    parser.add_argument("--device", default="h100", choices=DEVICES, help=f"kind: {', '.join(DEVICES)} (default: h100)")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="everything as JSON, alone or in a file")
    parser.add_argument("--mfu", type=float, default=0.4, help="share of the peak that is reached (default: 0.4)")
    parser.add_argument(
        "--bandwidth-share", type=float, default=0.7, help="share of the memory's speed that updates reach (0.7)"
    )
    parser.add_argument("--memory", type=float, help="GiB of a device, in place of the kind's")
    parser.add_argument("--reserve", type=float, help="GiB of it that are left free; default: 2 and 5 %% of it on GPUs")
    parser.add_argument("--tflops", type=float, help="peak in bf16, in place of the kind's")
    parser.add_argument("--bandwidth", type=float, help="GB/s of its memory, in place of the kind's")
    parser.add_argument("--link", type=float, help="GB/s between devices of a node, one direction")
    parser.add_argument("--network", type=float, help="GB/s between nodes, per device and direction")
    parser.add_argument("--devices-per-node", type=int, help="default: those of the recipe's nodes, or the kind's")
    return parser


def prepare_parser() -> ToolParser:
    """Of ``asyncpp prepare``."""
    parser = ToolParser(
        allow_abbrev=False,
        prog="asyncpp prepare", description="Tokenise documents into a dataset that a training streams: parquet files,"
        " JSON lines (.jsonl, .ndjson, also .gz and .zst) and text (.txt, .md), from this machine or from the Hugging"
        " Face Hub. The same command, run again, goes on where it was interrupted.",
    )  # fmt: skip
    parser.add_argument(
        "sources", type=str, nargs="+", help="files, folders, globs, or URLs, for instance"
        " hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT",
    )  # fmt: skip
    parser.add_argument("--output", type=str, required=True, help="folder of the dataset")
    parser.add_argument(
        "--tokenizer", type=str, required=True, help="a name of the hub (HuggingFaceTB/SmolLM-360M, gpt2), a"
        " tokenizer.json, or byte",
    )  # fmt: skip
    parser.add_argument("--end-of-text", type=str | None, default=None, help="token that ends a document, if unusual")
    parser.add_argument("--text-key", type=str, default="text", help="column or field with the text")
    parser.add_argument("--val-fraction", type=float, default=0.001, help="share of the pieces kept for validation")
    parser.add_argument("--num-workers", type=PositiveInt, default=_cores(), help="processes")
    return parser


def _cores() -> int:
    """Cores that this process may use, which in a job are often fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def recipes_parser() -> ToolParser:
    """Of ``asyncpp recipes``."""
    parser = ToolParser(
        allow_abbrev=False, prog="asyncpp recipes",
        description="List the recipes that come with the package, or copy one for editing. Commands take their names"
        " as they take files: asyncpp fit quickstart",
    )  # fmt: skip
    parser.add_argument("--copy", metavar="NAME", help="write this recipe to a file")
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="where --copy writes (default: here)")
    return parser


def trace_parser() -> ToolParser:
    """Of ``asyncpp trace``."""
    parser = ToolParser(
        allow_abbrev=False,
        prog="asyncpp trace", description="Show where the time of a run went that PipelineTrace, `asyncpp fit --trace`"
        " or Fabric's strategy.record_trace() recorded.",
    )  # fmt: skip
    parser.add_argument("run", type=str, help="folder of the recording, or one above it (the newest below is taken)")
    parser.add_argument("--html", type=str | None, default=None, help="write a page with a timeline, for any browser")
    parser.add_argument("--perfetto", type=str | None, default=None, help="write it for https://ui.perfetto.dev")
    parser.add_argument("--json", type=str | None, default=None, help="write the table's figures for other programs")
    parser.add_argument("--from-mini-batch", type=NonNegativeInt | None, default=None, help="the first to look at")
    parser.add_argument("--to-mini-batch", type=NonNegativeInt | None, default=None, help="the last to look at")
    return parser


PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "check": check_parser,
    "checkpoint convert": convert_parser,
    "checkpoint info": info_parser,
    "doctor": doctor_parser,
    "evaluate": evaluate_parser,
    "export": export_parser,
    "generate": generate_parser,
    "import": import_parser,
    "plan": plan_parser,
    "prepare": prepare_parser,
    "recipes": recipes_parser,
    "trace": trace_parser,
}
"""By what follows ``asyncpp``."""


def print_help(tool: str, argv: Sequence[str]) -> None:
    """Print the help of a tool, or of one of its commands, and end; return if the arguments do not ask for it.

    Args:
        tool: its name after ``asyncpp``.
        argv: what follows it.

    Raises:
        SystemExit: with code 0 after the help; with code 2 if what comes before ``--help`` is wrong.
    """
    if tool == "checkpoint":
        if (given := checkpoint_command(argv)) is None:
            sys.exit(0)
        command, argv = given
        tool = f"{tool} {command}"
    PARSERS[tool]().parse_args(list(argv))
