"""Defines what a run is: one pydantic model per section, which refuses unknown keys.

Every field carries its meaning in `description`; `trainer config --explain` prints them, and nothing else
repeats a default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from trainer.core_schema import no_boolean_as_number


class Section(BaseModel):
    """A frozen section that refuses unknown keys, and numbers that are none."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_numbers(cls, value: object, info: ValidationInfo) -> object:
        return no_boolean_as_number(value, cls.model_fields[str(info.field_name)].annotation)


class TargetConfig(Section):
    """The frozen model whose hidden states the drafter reads."""

    path: str = Field(description="Folder or hub name of the target, as transformers' from_pretrained takes it")
    gguf_file: str | None = Field(None, description="File name inside `path` when the target is a GGUF file")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("bfloat16", description="Precision the target runs in")
    attention: Literal["auto", "varlen", "sdpa", "flash_attention_2", "eager"] = Field(
        "auto",
        description="Attention of the target; auto: the fastest that keeps packed documents apart; varlen: the "
        "variable-length kernel, or no start",
    )
    compile: bool = Field(
        True,
        description="In graph mode, compile the target's layers; false: capture the kernels they launch themselves",
    )
    capture: bool = Field(
        True,
        description="In graph mode, capture the target's pass in a CUDA graph; false: run it kernel by kernel, for a "
        "target that cannot be captured",
    )
    trust_remote_code: bool = Field(False, description="Let the target's repository run its own Python code")


class DrafterSection(Section):
    """Shape of the drafter; what is left out follows the target."""

    init_from: Path | None = Field(
        None, description="Folder or hub name of a released drafter to continue training from"
    )
    num_layers: int = Field(5, ge=1, description="Decoder layers of the drafter")
    block_size: int = Field(16, ge=2, description="Tokens in a block: the anchor and block_size - 1 drafted ones")
    target_layer_ids: list[int] | None = Field(
        None,
        min_length=1,
        description="Target layers whose outputs are tapped (0-based); default: the official even spread",
    )
    mask_token_id: int | None = Field(
        None,
        ge=0,
        description="Token id of a masked slot; default: the tokenizer's own, an unowned row, or a reserved one",
    )
    intermediate_size: int | None = Field(None, ge=1, description="MLP width; default: the target's")
    num_attention_heads: int | None = Field(None, ge=1, description="Query heads; default: the target's")
    num_key_value_heads: int | None = Field(None, ge=1, description="Key and value heads; default: the target's")
    head_dim: int | None = Field(None, ge=2, multiple_of=2, description="Width of a head; default: the target's")
    sliding_window: int | None = Field(
        None, ge=1, description="Window of the sliding layers in tokens; null: none slide"
    )
    full_attention_layers: list[int] | None = Field(
        None, description="With a sliding window: layers that keep full attention; default: the last one"
    )


class DataConfig(Section):
    """Documents, their packing into rows, and the anchors."""

    sources: list[Path] = Field(
        min_length=1,
        description="JSONL, JSON or Parquet files, folders or patterns of them, or data sets on the hub; records hold "
        "messages, conversations, text, or input_ids and loss_mask",
    )
    chat_template: Path | None = Field(None, description="Jinja file to render chats with; default: the tokenizer's")
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(
        default_factory=dict, description="Variables for the chat template, as the server will set them"
    )
    sequence_length: int = Field(3072, ge=16, description="Tokens in a row (S)")
    anchors_per_row: int = Field(512, ge=1, description="Blocks in a row (A); missing ones are padded with weight zero")
    max_document_length: int | None = Field(
        None, ge=3, description="Longer documents lose what lies behind; default: sequence_length"
    )
    epochs: int = Field(6, ge=1, description="Passes over the documents; anchors are drawn anew in each")
    max_skipped_rows: int = Field(
        10,
        ge=0,
        description="Rows that may be skipped because the target's features are not finite; one more ends the run",
    )
    held_out: float | Path | None = Field(
        None,
        description="Conversations to measure on and not to train on: a share of data.sources, or sources of their own",
    )
    held_out_every: int = Field(
        200, ge=1, description="Optimizer steps between measurements; another comes before each checkpoint.every"
    )
    held_out_rows: int = Field(32, ge=1, description="Most rows of a measurement, the same ones each time")
    cache_dir: Path | None = Field(None, description="Folder of tokenised documents; default: beside the first source")
    seed: int = Field(0, ge=0, description="Seed of document order and anchors")

    @field_validator("held_out")
    @classmethod
    def _a_share_leaves_something(cls, held_out: float | Path | None) -> float | Path | None:
        if isinstance(held_out, float) and not 0 < held_out < 1:
            raise ValueError("a share must lie between 0 and 1; anything else is a path")
        return held_out

    @model_validator(mode="after")
    def _a_document_fits_into_a_row(self) -> DataConfig:
        if self.max_document_length is not None and self.max_document_length > self.sequence_length:
            raise ValueError("max_document_length must not exceed sequence_length, for documents lie whole in a row")
        return self


class ObjectiveConfig(Section):
    """The loss over the drafted slots."""

    weighting: Literal["decay", "dpace", "uniform"] = Field(
        "decay", description="Slot weights: exponential decay (DFlash), D-PACE, or none"
    )
    decay_gamma: float | None = Field(
        None,
        gt=0,
        description="Decay length in slots; default: 7 for blocks of 16, 5 for 10, 4 for 8, straight between",
    )
    dpace_alpha: float = Field(0.5, ge=0, le=1, description="Smoothing of D-PACE's confidences")
    distillation: Literal["none", "forward_kl", "tv"] = Field(
        "none", description="Learn from the target's distribution beside its tokens"
    )
    distillation_weight: float = Field(0.5, ge=0, le=1, description="Share of the distillation term in the loss")
    head_chunk: int = Field(4096, ge=1, description="Slots whose logits exist at one time")


class OptimizerConfig(Section):
    """Update rule, schedule and batch."""

    name: Literal["adamw", "muon"] = Field("adamw", description="muon: Muon for matrices, AdamW for the rest")
    lr: float = Field(6e-4, gt=0, description="Peak learning rate of AdamW")
    muon_lr: float | None = Field(None, gt=0, description="Peak learning rate of Muon; default: 10 times lr")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's moment decays")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay, on matrices only")
    clip_norm: float = Field(1.0, gt=0, description="Global gradient norm above which gradients are scaled down")
    schedule: Literal["cosine", "wsd", "constant"] = Field("cosine", description="Learning-rate schedule after warm-up")
    warmup_ratio: float = Field(0.04, ge=0, lt=1, description="Share of the steps spent warming up")
    decay_ratio: float = Field(0.2, gt=0, le=1, description="Share of the steps in which WSD decays")
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="Final learning rate as a share of the peak")
    gradient_accumulation_steps: int = Field(1, ge=1, description="Rows per drafter and optimizer step")
    max_steps: int | None = Field(None, ge=1, description="Stop after this many optimizer steps; default: all epochs")
    on_schedule_change: Literal["refuse", "keep", "adopt"] = Field(
        "refuse",
        description="When a resumed run's length changed so that its learning rate would jump: refuse; keep: go on "
        "along the checkpoint's schedule, then at its last rate; adopt: take this run's schedule, with the jump",
    )


class PipelineConfig(Section):
    """Devices, queues and compilation."""

    targets: list[str] = Field(
        default_factory=lambda: ["cuda:0"],
        min_length=1,
        description="Devices that run the target; cuda alone is cuda:$LOCAL_RANK",
    )
    drafters: list[str] = Field(
        default_factory=lambda: ["cuda:0"],
        min_length=1,
        description="Devices that train a drafter; may repeat and may name targets",
    )
    stop_seconds: float = Field(
        20, gt=0, description="Seconds that a stop waits for the step to end; then the last finished step is saved"
    )
    queue_depth: int = Field(2, ge=1, description="Rows that may wait between two workers")
    mode: Literal["graph", "compiled", "eager"] = Field(
        "graph", description="graph: compile and capture CUDA graphs; compiled: no graphs; eager: the reference"
    )
    require_compiled: bool | None = Field(
        None,
        description="Refuse to start when a target or drafter does not get what `mode` asks for; default: true on CUDA",
    )
    compile_cache: Path | None = Field(None, description="Folder of the compile cache; default: $DFLASH_COMPILE_CACHE")


class CheckpointConfig(Section):
    """When to save and what to keep."""

    every: int = Field(1000, ge=1, description="Optimizer steps between checkpoints")
    minutes: float | None = Field(
        15,
        gt=0,
        description="Also save when this many minutes have passed since the last checkpoint; null: by steps only",
    )
    keep_last: int = Field(3, ge=1, description="Newest checkpoints that are kept")
    keep_best: bool = Field(True, description="Also keep the one with the longest expected accepted length")


class TelemetryConfig(Section):
    """Where metrics go."""

    every: int = Field(10, ge=1, description="Optimizer steps between metric lines")
    tensorboard: bool = Field(True, description="Write TensorBoard event files")
    wandb: bool = Field(False, description="Write Weights & Biases files, offline unless WANDB_MODE says otherwise")


RENAMED_KEYS = {"optimizer.accumulate": "optimizer.gradient_accumulation_steps"}
"""Keys of earlier versions, which are refused with the new one's name"""


class RunConfig(Section):
    """A whole run, as `python -m trainer run.yaml` reads it."""

    target: TargetConfig
    drafter: DrafterSection = Field(default_factory=lambda: DrafterSection())
    data: DataConfig
    objective: ObjectiveConfig = Field(default_factory=lambda: ObjectiveConfig())
    optimizer: OptimizerConfig = Field(default_factory=lambda: OptimizerConfig())
    pipeline: PipelineConfig = Field(default_factory=lambda: PipelineConfig())
    checkpoint: CheckpointConfig = Field(default_factory=lambda: CheckpointConfig())
    telemetry: TelemetryConfig = Field(default_factory=lambda: TelemetryConfig())
    seed: int = Field(0, description="Seed of the drafter's initial weights")
