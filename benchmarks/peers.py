"""Steps the two public DFlash trainers: their own classes on random weights, behind one function each.

Both packages come from their unpacked PyPI wheels (`--peers DIR`, holding `specforge/` and `speculators/` folders);
nothing of theirs is replaced except optional imports that a training step never calls (openai, datasets, loguru). As in
our own benchmark the target does not run: its features are drawn at random, outside the timed region.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch


@dataclass(frozen=True)
class Shape:
    """One training step's size. Every contestant gets the same tokens, anchors, layers and vocabulary."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    layers: int
    features: int
    block: int
    documents: int
    document_length: int
    anchors: int  # of all documents together

    @property
    def tokens(self) -> int:
        """Context tokens in a step."""
        return self.documents * self.document_length


SHAPES = {
    "qwen3-8b": Shape(4096, 12288, 32, 8, 128, 151936, 5, 5, 16, 4, 2048, 512),
    "qwen3-8b-long": Shape(4096, 12288, 32, 8, 128, 151936, 5, 5, 16, 4, 3072, 2048),
    "qwen3-4b": Shape(2560, 9728, 32, 8, 128, 151936, 5, 5, 16, 4, 2048, 512),
    "smollm2": Shape(576, 1536, 9, 3, 64, 49152, 5, 5, 16, 1, 2048, 128),
    "tiny": Shape(64, 128, 4, 2, 16, 512, 2, 3, 4, 2, 64, 16),
}
LEARNING_RATE = 1e-4
CLIP_NORM = 1.0
PROMPT_SHARE = 0.25  # of each document, unsupervised

Step = Callable[[], torch.Tensor]


def _qwen3_config(shape: Shape, device: torch.device, **extra: object):  # type: ignore[no-untyped-def]
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=max(40960, shape.tokens),
        tie_word_embeddings=False,
        layer_types=["full_attention"] * shape.layers,
        **extra,
    )


def _loss_mask(shape: Shape, device: torch.device) -> torch.Tensor:
    """[documents, document_length] with the first part of each document unsupervised."""
    mask = torch.ones(shape.documents, shape.document_length, dtype=torch.long, device=device)
    mask[:, : int(PROMPT_SHARE * shape.document_length)] = 0
    return mask


def specforge(shape: Shape, device: torch.device, dtype: torch.dtype, source: Path) -> Step:
    """SpecForge's micro-batch through its own TrainerCore, backend and optimizer: documents are batch rows."""
    sys.path.insert(0, str(source / "specforge"))
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from specforge.optimizer import BF16Optimizer
    from specforge.runtime.contracts import TrainBatch
    from specforge.training.backend import FSDPTrainingBackend, ParallelConfig
    from specforge.training.controller import TrainerCore
    from specforge.training.strategies.base import DFlashTrainStrategy

    attention = "flex_attention" if device.type == "cuda" else "sdpa"
    config = _qwen3_config(
        shape,
        device,
        block_size=shape.block,
        num_target_layers=36,
        dflash_config={"mask_token_id": shape.vocab - 1, "target_layer_ids": list(range(1, 1 + shape.features))},
        draft_vocab_size=shape.vocab,
    )
    config._attn_implementation = attention
    draft = DFlashDraftModel(config).to(device=device, dtype=dtype)
    with torch.device(device):
        embedding = torch.nn.Embedding(shape.vocab, shape.hidden, dtype=dtype).requires_grad_(False)
        head = torch.nn.Linear(shape.hidden, shape.vocab, bias=False, dtype=dtype).requires_grad_(False)
    model = OnlineDFlashModel(
        draft_model=draft,
        target_lm_head=head,
        target_embed_tokens=embedding,
        mask_token_id=shape.vocab - 1,
        block_size=shape.block,
        attention_backend=attention,
        num_anchors=shape.anchors // shape.documents,
        loss_decay_gamma=7.0,
        objective_chunk_blocks=128,
        loss_type="dflash",
    ).to(device=device, dtype=dtype)
    backend = FSDPTrainingBackend(
        ParallelConfig(param_dtype=dtype),
        optimizer_factory=lambda module: BF16Optimizer(
            module, lr=LEARNING_RATE, max_grad_norm=CLIP_NORM, warmup_ratio=0.04, total_steps=10_000
        ),
    )
    wrapped = backend.prepare_model(model, wrap=False, optimizer_target=draft)
    wrapped.train()
    core = TrainerCore(DFlashTrainStrategy(wrapped), backend, accumulation_steps=1)
    size = (shape.documents, shape.document_length)
    batch = {
        "input_ids": torch.randint(0, shape.vocab - 1, size, device=device),
        "loss_mask": _loss_mask(shape, device),
        "hidden_states": torch.randn(*size, shape.features * shape.hidden, device=device, dtype=dtype),
    }

    def step() -> torch.Tensor:
        result = core.train_step(TrainBatch(sample_ids=["0"], strategy="dflash", tensors=batch))
        return torch.tensor(float(result.loss))

    return step


class _Absent(types.ModuleType):
    """An optional import that the step never calls: every attribute is an empty class."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {})
        setattr(self, name, value)
        return value


def _let_speculators_import(source: Path) -> None:
    sys.path.insert(0, str(source / "speculators"))
    real_version = importlib.metadata.version
    importlib.metadata.version = lambda name: "0.9.0" if name == "speculators" else real_version(name)
    for name in ("openai", "openai.types", "openai.types.chat", "openai.types.completion", "datasets", "loguru"):
        if name.split(".")[0] in sys.modules or importlib.util.find_spec(name.split(".")[0]) is None:
            module = _Absent(name)
            module.__path__ = []
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            sys.modules[name] = module


def speculators(shape: Shape, device: torch.device, dtype: torch.dtype, source: Path, optimizer: str = "adamw") -> Step:
    """speculators' step as its trainer runs it: compiled drafter, fused loss and optimizer over one packed row."""
    _let_speculators_import(source)
    from speculators.models.dflash import DFlashSpeculatorConfig
    from speculators.models.dflash.core import DFlashDraftModel
    from speculators.train.optimizers import build_optimizers

    if device.type == "cuda":
        from speculators.losses import fused

        # Its kernels share one list of tile sizes, which Dynamo of torch 2.11 refuses ("already tracked for mutation").
        for kernel in vars(fused).values():
            if hasattr(kernel, "configs"):
                kernel.configs = list(kernel.configs)
    config = _qwen3_config(shape, device)
    config._attn_implementation = "simple_flex_attention" if device.type == "cuda" else "sdpa"
    with torch.device(device):
        model = DFlashDraftModel(
            DFlashSpeculatorConfig(
                transformer_layer_config=config,
                draft_vocab_size=shape.vocab,
                block_size=shape.block,
                aux_hidden_state_layer_ids=list(range(1, 1 + shape.features)),
                mask_token_id=shape.vocab - 1,
                sliding_window_non_causal=False,
                sample_from_anchor=False,
            )
        )
    frozen = (model.embed_tokens, model.lm_head, model.verifier_lm_head, model.verifier_norm)
    with torch.no_grad():
        for module in frozen[:3]:
            module.weight.normal_(std=0.02)
        model.verifier_norm.weight.fill_(1.0)
    for module in frozen:
        module.weight.requires_grad_(False)
    model.to(device).train()
    optimizers = build_optimizers(
        model,
        SimpleNamespace(
            optimizer=optimizer,
            lr=LEARNING_RATE,
            weight_decay=0.0,
            muon_lr=10 * LEARNING_RATE,
            muon_momentum=0.95,
            muon_weight_decay=0.0,
            muon_ns_steps=5,
            muon_adjust_lr_fn="match_rms_adamw",
        ),
    )
    options, _ = DFlashDraftModel.get_trainer_kwargs(
        loss_fn="ce",
        loss_implementation="fused" if device.type == "cuda" else "eager",
        dflash_decay_gamma=7.0,
        max_anchors=shape.anchors,
        per_position_loss_weight="fixed-exp-decay",
        dpace_alpha=0.5,
    )
    document = torch.arange(shape.documents, device=device).repeat_interleave(shape.document_length)[None]
    batch = {
        "input_ids": torch.randint(0, shape.vocab - 1, (1, shape.tokens), device=device),
        "loss_mask": _loss_mask(shape, device).bool().view(1, -1),
        "position_ids": torch.arange(shape.document_length, device=device).repeat(shape.documents)[None],
        "document_ids": document,
        "hidden_states": torch.randn(1, shape.tokens, shape.features * shape.hidden, device=device, dtype=dtype),
        "verifier_last_hidden_states": torch.randn(1, shape.tokens, shape.hidden, device=device, dtype=dtype),
    }

    def step() -> torch.Tensor:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            _, loss, _ = model(**batch, **options)
        for one in optimizers:
            one.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        for one in optimizers:
            one.step()
        return loss.detach()

    return step
