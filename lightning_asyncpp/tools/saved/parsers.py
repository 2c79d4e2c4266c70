"""What the commands on saved models take; nothing heavy is imported, as in :mod:`lightning_asyncpp.tools.parsers`."""

from __future__ import annotations

from jsonargparse.typing import NonNegativeInt, PositiveInt

from lightning_asyncpp.tools.tool_parser import ToolParser

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
