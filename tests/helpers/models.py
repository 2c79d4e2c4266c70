"""Small models of this package and of other libraries, by name, and the data that they are trained on.

Packages that are not installed everywhere are imported in the functions that need them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_asyncpp.adapt.runs import examples_of
from lightning_asyncpp.core.cut.partition_choice import choose_partition
from lightning_asyncpp.core.local_session import LocalSession
from lightning_asyncpp.core.microbatch import UserHooks
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.settings import PipelineSettings
from lightning_asyncpp.data import Tokenizer
from lightning_asyncpp.models import GPT, GPTConfig, MoEConfig, SavedGPT
from lightning_asyncpp.models.hf import write_hf
from lightning_asyncpp.reference import train_reference

_SIZE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 99,
    "max_position_embeddings": 64,
}  # fmt: skip
_GROUPED = {**_SIZE, "num_key_value_heads": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
_DEEPSEEK = {
    **_SIZE, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "qk_nope_head_dim": 8, "first_k_dense_replace": 1,
}  # fmt: skip
_SEQ2SEQ = {
    "d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_layers": 2, "decoder_layers": 3,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 99, "max_position_embeddings": 64,
}  # fmt: skip
_IMAGE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
_BY_HAND = {**_GROUPED, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# name -> class of transformers and options of its configuration
TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 99, "n_positions": 64}),
    "llama": ("LlamaForCausalLM", _GROUPED),
    "mistral": ("MistralForCausalLM", {**_GROUPED, "sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", _GROUPED),
    "qwen3": ("Qwen3ForCausalLM", {**_GROUPED, "head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", {**_GROUPED, "head_dim": 8}),
    "gemma3": ("Gemma3ForCausalLM", {**_GROUPED, "head_dim": 8, "num_hidden_layers": 7, "sliding_window": 4}),
    "phi": ("PhiForCausalLM", _GROUPED),
    "phi3": ("Phi3ForCausalLM", {**_GROUPED, "pad_token_id": 0}),
    "olmo2": ("Olmo2ForCausalLM", _GROUPED),
    "gpt_neox": ("GPTNeoXForCausalLM", _SIZE),
    "mixtral": ("MixtralForCausalLM", {**_GROUPED, "num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**_GROUPED, **_EXPERTS}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", _DEEPSEEK),
    "bert": ("BertForMaskedLM", _SIZE),
    "t5": ("T5ForConditionalGeneration", {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8,
                                          "vocab_size": 99, "decoder_start_token_id": 0}),
    "bart": ("BartForConditionalGeneration", _SEQ2SEQ),
    "vit": ("ViTForImageClassification", {**_IMAGE, "image_size": 32, "patch_size": 8}),
    "swin": ("SwinForImageClassification", {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2],
                                            "num_heads": [2, 4], "window_size": 4}),
    "opt": ("OPTForCausalLM", {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 3,
                               "num_attention_heads": 4, "vocab_size": 99, "max_position_embeddings": 64}),
    "cohere": ("CohereForCausalLM", _BY_HAND),
    "glm4": ("Glm4ForCausalLM", {**_BY_HAND, "head_dim": 8}),
    "gpt_oss": ("GptOssForCausalLM", {**_BY_HAND, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "smollm3": ("SmolLM3ForCausalLM", _BY_HAND),
    "roberta": ("RobertaForMaskedLM", _SIZE),
    "modernbert": ("ModernBertForMaskedLM", {**_SIZE, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1,
                                             "cls_token_id": 1, "sep_token_id": 2}),
}  # fmt: skip


def of_transformers(name: str, **more: Any) -> nn.Module:
    """Return a model of a family; ``more`` adds or replaces options of its configuration."""
    transformers = pytest.importorskip("transformers")
    kind, options = TRANSFORMERS[name]
    model_class = getattr(transformers, kind)
    return model_class(model_class.config_class(**{**options, **more}))


def _with_lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(
        of_transformers("llama"), peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )


def _litgpt() -> nn.Module:
    litgpt = pytest.importorskip("litgpt")
    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 99, "padded_vocab_size": 99, "block_size": 64}
    return litgpt.GPT(litgpt.Config(name="small", **sizes))


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: pytest.importorskip("timm").create_model(name, **options)


def _torchvision(make: Callable[[Any], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: make(pytest.importorskip("torchvision").models)


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda name=name: of_transformers(name) for name in TRANSFORMERS},  # type: ignore[misc]
    "lora": _with_lora,
    "timm_vit": _timm("vit_tiny_patch16_224", depth=3, embed_dim=48, num_heads=3, img_size=32),
    "timm_distilled": _timm("deit_tiny_distilled_patch16_224", depth=3, embed_dim=48, num_heads=3, img_size=32),
    "litgpt": _litgpt,
    "timm_convnext": _timm("convnext_atto", depths=(1, 1, 2, 1), dims=(8, 16, 24, 32)),
    "torchvision_resnet": _torchvision(lambda m: m.ResNet(m.resnet.BasicBlock, [1, 1, 1, 1], num_classes=5)),
    "torchvision_vit": _torchvision(lambda models: models.VisionTransformer(32, 8, 3, 4, 32, 48)),
}
QUICK = (
    "llama", "mixtral", "deepseek_v3", "t5", "vit", "swin", "lora", "timm_vit", "torchvision_resnet",
)  # fmt: skip
"""Families that the default tests train."""
EXAMPLES = {
    **dict.fromkeys(("timm_vit", "timm_distilled", "timm_convnext"), (2, 3, 32, 32)),
    "torchvision_resnet": (2, 3, 64, 64),  # BatchNorm needs several values per channel, even with one sample
}


def example_of(name: str) -> tuple[Tensor, ...] | None:
    """Return arguments for the model, or None if they can be derived from the model itself."""
    return (torch.randn(EXAMPLES[name]),) if name in EXAMPLES else None


def batches_for(name: str, model: nn.Module, count: int = 2) -> list[dict[str, Tensor]]:
    """Return batches of four samples, two of which are shorter if the model takes a mask."""
    args, kwargs = next(iter(examples_of(model))) if name not in EXAMPLES else (example_of(name) or (), {})
    one = {"x": args[0]} if args else {key: value for key, value in kwargs.items() if isinstance(value, Tensor)}
    return [{key: torch.cat([value, value.flip(0)]).roll(i, 0) for key, value in one.items()} for i in range(count)]


def step_of(model: nn.Module) -> Callable[..., Tensor]:
    """Return a training step for a third-party model."""

    def step(batch: dict[str, Tensor], *_: Any) -> Tensor:
        output = model(batch["x"]) if list(batch) == ["x"] else model(**batch)
        if getattr(output, "loss", None) is not None:
            return output.loss
        first = output if isinstance(output, Tensor) else output[0]
        return first.float().square().mean()

    return step


class Trained(L.LightningModule):
    """LightningModule around a third-party model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return step_of(self.model)(batch)

    def configure_optimizers(self) -> Any:
        return _adamw(self)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def _train_in_stages(model: nn.Module, batches: list[dict[str, Tensor]], stages: int) -> None:
    """Train by PipeDream-2BW with all stages in this process."""
    session = LocalSession(PipelineSettings(microbatches=4, delay=1, staleness="uniform"), stages)
    session.mesh = Mesh(1, 1, 0)
    stage = session.cut(model, 5, torch.device("cpu"), choose_partition(model, 0, stages, "uniform"))
    engine = session.start(UserHooks(), torch.device("cpu"), training=True)
    with stage.whole_model():
        optimizer = _adamw(model)
    session.attach(optimizer, lambda _: optimizer.step())
    for batch in batches:
        engine.run(batch, step_of(model))
        session.complete(note=engine.mini_batch)
    session.drain()
    session.close()


def assert_trains(model: nn.Module, batches: list[dict[str, Tensor]], stages: int = 3) -> None:
    """Check that a pipeline trains as one process does, bitwise unless it adds gradients in another order."""
    found, expected = copy.deepcopy(model), copy.deepcopy(model)
    is_exact = model.pipeline_layers.is_exact  # type: ignore[union-attr]
    _train_in_stages(found, batches, stages)
    optimizer = _adamw(expected)
    train_reference(expected, step_of(expected), [[b] for b in batches], optimizer, microbatches=4, delay=1, seed=5)
    assert not all(map(torch.equal, found.parameters(), model.parameters())), "it is trained"
    state = expected.state_dict()
    for name, tensor in found.state_dict().items():
        how = {"rtol": 0, "atol": 0} if is_exact else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(tensor, state[name], **how, msg=lambda m, n=name: f"{n}: {m}")


# -- models of this package, for every class of transformers that they are exported to ---------------------------------

SHAPE = {
    "vocab_size": 96, "context_length": 48, "num_layers": 3, "dim": 32, "num_heads": 4, "mlp_dim": 56,
    "init_std": 0.3, "norm_eps": 2e-5, "rope_base": 5_000.0,
}  # fmt: skip
SOFTMAX = {"num_experts": 5, "top_k": 2, "expert_dim": 24}
GLM = SOFTMAX | {"num_shared_experts": 2, "router": "sigmoid", "routed_scaling": 1.5, "num_dense_layers": 1}

CASES: dict[str, tuple[str, GPTConfig]] = {
    "llama": ("LlamaForCausalLM", GPTConfig(**SHAPE)),
    "llama-tied": ("LlamaForCausalLM", GPTConfig(**SHAPE, tie_embeddings=True, dropout=0.1)),
    "mixtral": ("MixtralForCausalLM", GPTConfig(**SHAPE, num_kv_heads=2, moe=MoEConfig(**SOFTMAX))),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        GPTConfig(**SHAPE, qk_norm=True, moe=MoEConfig(**SOFTMAX, every=2, normalize_top_k=False)),
    ),
    "glm4-moe": ("Glm4MoeForCausalLM", GPTConfig(**SHAPE, num_kv_heads=2, moe=MoEConfig(**GLM))),
    "qwen3-wide": (
        "Qwen3ForCausalLM",
        GPTConfig(**SHAPE, num_kv_heads=1, head_dim=12, qk_norm=True, tie_embeddings=True),
    ),
    "glm4-moe-qk": (
        "Glm4MoeForCausalLM",
        GPTConfig(
            **SHAPE, head_dim=12, qk_norm=True, tie_embeddings=True, moe=MoEConfig(**{**GLM, "num_dense_layers": 0})
        ),
    ),
}


def make_model(config: GPTConfig, seed: int = 0) -> GPT:
    """Return a model whose norms differ from 1 and whose biases differ from 0, as after training."""
    torch.manual_seed(seed)
    model = GPT(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.uniform_(-0.5, 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("balance_bias"):
                buffer.uniform_(-0.3, 0.3)
    return model.eval()


def saved(model: GPT) -> SavedGPT:
    state = model.state_dict()
    return SavedGPT("the model", model.config, state, {name: tuple(tensor.shape) for name, tensor in state.items()})


def exported(config: GPTConfig, folder: Path, seed: int = 0) -> GPT:
    model = make_model(config, seed)
    write_hf(saved(model), folder)
    return model


def tokens_of(config: GPTConfig) -> Tensor:
    return torch.randint(0, config.vocab_size, (2, config.context_length), generator=torch.Generator().manual_seed(7))


# -- folders as ``save_pretrained`` writes them -------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXTS = ["def add(a, b):\n    return a + b\n", "What is two and two? It is four.", "the quick brown fox"]


def make_tokenizer() -> Any:
    """Return a byte-pair tokenizer with 290 tokens and a chat template."""
    import transformers

    backend = Tokenizer.train(TEXTS, vocab_size=286).backend
    backend.add_special_tokens(["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|endoftext|>", model_max_length=64,
        chat_template=TEMPLATE,
    )  # fmt: skip


def make_folder(folder: Path, kind: str = "Llama", head: str = "ForCausalLM", **config: Any) -> Path:
    """Save a model with random weights, its config and a tokenizer in a folder, and return the folder."""
    import transformers

    torch.manual_seed(0)
    shape = {**(_GROUPED if kind in ("Llama", "Mixtral") else _SIZE), "vocab_size": 300, **config}
    model = getattr(transformers, kind + head)(getattr(transformers, f"{kind}Config")(**shape))
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def write_texts(folder: Path, documents: int = 40) -> Path:
    """Write text files of 30 lines, of which no two are equal, to a new folder, and return the folder."""
    folder.mkdir()
    for index in range(documents):
        lines = [f"document {index} line {line} {index * line}\n" for line in range(30)]
        (folder / f"{index}.txt").write_text("".join(lines))
    return folder


def padded_batches(count: int) -> list[dict[str, Tensor]]:
    """Return batches whose samples have different numbers of targets, due to padding."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(count):
        tokens = torch.randint(1, 290, (4, 10), generator=generator)
        mask = torch.ones_like(tokens)
        mask[1, 5:] = 0
        mask[-1, 2:] = 0
        batches.append({"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)})
    return batches


def unigram_loss(train_tokens: Tensor, val_tokens: Tensor, vocab_size: int) -> float:
    """Return the cross-entropy, in nats per token, of a model that knows only the frequency of each token."""
    counts = torch.bincount(train_tokens.flatten().long(), minlength=vocab_size).double() + 1
    return float(-torch.log(counts / counts.sum())[val_tokens.flatten().long()].mean())
