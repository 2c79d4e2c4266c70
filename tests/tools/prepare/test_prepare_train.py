"""From documents to a training, with the recipe that is meant for it, made small."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.prepare.corpus import make_texts, write

ROOT = Path(__file__).parents[3]
SMALL = (
    "--trainer.accelerator cpu --trainer.devices 2 --trainer.precision 32-true --trainer.val_check_interval 4 "
    "--trainer.strategy.init_args.weight_dtype null "
    "--trainer.limit_val_batches 2 --trainer.strategy.init_args.micro_batches 4 "
    "--trainer.strategy.init_args.lookahead 1 --trainer.logger.init_args.version main --model.init_args.warmup_steps 2 "
    "--model.init_args.total_steps 16 --model.init_args.config.num_layers 2 --model.init_args.config.dim 32 "
    "--model.init_args.config.num_heads 2 --model.init_args.config.num_kv_heads 1 --model.init_args.config.mlp_dim 64 "
    "--model.init_args.config.context_length 32 "
    "--data.init_args.context_length 32 --data.init_args.batch_size 8 --data.init_args.num_workers 0 "
    "--data.init_args.source shards --ckpt_path last"
)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["timeout", "-k", "10", "280", sys.executable, "-m", "lightning_asyncpp", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_documents_are_prepared_trained_on_and_a_training_resumed(tmp_path: Path) -> None:
    write(tmp_path / "source", make_texts(2000), "parquet")
    arguments = ("--val-fraction", "0.05", "--piece-mb", "0.1", "--num-workers", "2")
    prepared = run(
        tmp_path, "prepare", "source", "--output", "shards", "--tokenizer", "bpe", "--vocab-size", "300", *arguments
    )
    assert prepared.returncode == 0, prepared.stderr
    fit = ("fit", "--config", str(ROOT / "recipes" / "smollm_360m.yaml"), *SMALL.split())

    refused = run(tmp_path, *fit, "--trainer.max_steps", "8", "--model.init_args.config.vocab_size", "299")
    assert refused.returncode != 0
    assert "shards has a vocabulary of 300 token ids, and the model only 299" in refused.stderr
    assert not list(tmp_path.glob("runs/**/*.ckpt"))

    for steps in ("8", "16"):
        done = run(tmp_path, *fit, "--trainer.max_steps", steps, "--model.init_args.config.vocab_size", "320")
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        assert f"`Trainer.fit` stopped: `max_steps={steps}` reached." in done.stdout + done.stderr
    assert "Restor" in done.stdout + done.stderr  # ... ing states from the checkpoint of the run before
    (best,) = tmp_path.glob("runs/smollm_360m/main/checkpoints/step=*.ckpt")
    assert float(best.name.split("val_loss=")[1].removesuffix(".ckpt")) < 5.5  # log(300) is 5.7
