"""The training of a recipe of :mod:`.stage_recipe` by a plain loop: ``python -m ...doctor.plain_loop RECIPE``.

No Trainer, no strategy, one version of the weights: what a strategy is measured against.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from lightning_asyncpp.models import GPT, GPTConfig
from lightning_asyncpp.optim import MuonAdamW
from lightning_asyncpp.tools.doctor.stage_callback import RandomTokens, now, peak_resident, peaks


def train(recipe: dict[str, Any]) -> dict[str, Any]:
    """Train, and say how long a mini-batch took and how much memory, as :class:`.StageClock` does."""
    trainer, model_arguments = recipe["trainer"], recipe["model"]["init_args"]
    clock = trainer["callbacks"][0]["init_args"]
    device = torch.device("cuda", 0) if trainer["accelerator"] == "gpu" else torch.device("cpu")
    micro_batches = trainer["strategy"]["init_args"]["micro_batches"]
    resident = peak_resident()
    torch.manual_seed(1)
    config = GPTConfig(**model_arguments["config"])
    model = GPT(config, compile_blocks=model_arguments["compile_blocks"]).to(device)
    optimizer = MuonAdamW(model.named_parameters(), **model_arguments["optimizer"]["init_args"])
    mixed = trainer["precision"] == "bf16-mixed"
    seconds = 0.0
    for index, batch in enumerate(RandomTokens(**recipe["data"]["init_args"]).train_dataloader(), 1):
        if index > clock["warm_up"] + clock["measured"]:
            break
        for tokens in batch.to(device, non_blocking=True).tensor_split(micro_batches):
            with torch.autocast(device.type, torch.bfloat16) if mixed else nullcontext():
                logits = model(tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            (loss / micro_batches).backward()
        clip_grad_norm_(model.parameters(), trainer["gradient_clip_val"])
        optimizer.step()
        optimizer.zero_grad()
        if index == clock["warm_up"]:
            seconds = -now()
    seconds += now()
    return {
        "seconds": seconds / clock["measured"], **peaks(resident), "flops_per_token": config.flops_per_token(),
    }  # fmt: skip


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    result = Path(given["trainer"]["callbacks"][0]["init_args"]["path"])
    result.write_text(json.dumps(train(given)), encoding="utf-8")
