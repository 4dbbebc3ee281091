"""What a run is: one pydantic model per section, unknown keys refused.

Every field carries its meaning in `description`; `trainer config --explain` prints them, and nothing else
repeats a default.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails


class ConfigError(Exception):
    """A configuration that cannot be used; one sentence a problem, each naming file, line and cure."""


class Section(BaseModel):
    """A frozen section that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetConfig(Section):
    """The frozen model whose hidden states the drafter reads."""

    path: str = Field(description="Folder or hub name of the target, as transformers' from_pretrained takes it")
    gguf_file: str | None = Field(None, description="File name inside `path` when the target is a GGUF file")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("bfloat16", description="Precision the target runs in")
    attention: Literal["auto", "sdpa", "flash_attention_2", "eager"] = Field(
        "auto", description="Attention of the target; auto: the fastest that keeps packed documents apart"
    )
    compile: bool = Field(
        True,
        description="In graph mode, compile the target's layers; false: capture the kernels they launch themselves",
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
    cache_dir: Path | None = Field(None, description="Folder of tokenised documents; default: beside the first source")
    seed: int = Field(0, ge=0, description="Seed of document order and anchors")

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
    accumulate: int = Field(1, ge=1, description="Rows per drafter and optimizer step")
    max_steps: int | None = Field(None, ge=1, description="Stop after this many optimizer steps; default: all epochs")


class PipelineConfig(Section):
    """Devices, queues and compilation."""

    targets: list[str] = Field(
        default_factory=lambda: ["cuda:0"], description="Devices that run the target; cuda alone is cuda:$LOCAL_RANK"
    )
    drafters: list[str] = Field(
        default_factory=lambda: ["cuda:0"], description="Devices that train a drafter; may repeat and may name targets"
    )
    queue_depth: int = Field(2, ge=1, description="Rows that may wait between two workers")
    mode: Literal["graph", "compiled", "eager"] = Field(
        "graph", description="graph: compile and capture CUDA graphs; compiled: no graphs; eager: the reference"
    )
    require_compiled: bool | None = Field(
        None, description="Refuse to start when a worker is not compiled without graph breaks; default: true on CUDA"
    )
    compile_cache: Path | None = Field(None, description="Folder of the compile cache; default: $DFLASH_COMPILE_CACHE")


class CheckpointConfig(Section):
    """When to save and what to keep."""

    every: int = Field(1000, ge=1, description="Optimizer steps between checkpoints")
    keep_last: int = Field(3, ge=1, description="Newest checkpoints that are kept")
    keep_best: bool = Field(True, description="Also keep the one with the longest expected accepted length")


class TelemetryConfig(Section):
    """Where metrics go."""

    every: int = Field(10, ge=1, description="Optimizer steps between metric lines")
    tensorboard: bool = Field(True, description="Write TensorBoard event files")
    wandb: bool = Field(False, description="Write Weights & Biases files, offline unless WANDB_MODE says otherwise")


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


def load(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's YAML file; `overrides` are "section.field=value" texts that win over the file.

    Raises:
        ConfigError: unreadable file, unknown key, missing or impossible value; says where and what to write instead.
    """
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
        if root is not None:
            _refuse_duplicates(path, root)
        values = None if root is None else loader.construct_document(root)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path} line {mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where} is not YAML: {error.problem}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} has an alias that holds itself") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:  # bytes or characters that no text has
        raise ConfigError(f"{path} is not YAML: {str(error).splitlines()[0]}") from error
    if root is None or not isinstance(values, dict):
        raise ConfigError(f"{path} must be a mapping with the sections {', '.join(RunConfig.model_fields)}")
    try:
        return RunConfig.model_validate(apply_overrides(values, overrides))
    except ValidationError as error:
        set_paths = {override.partition("=")[0].strip() for override in overrides}
        problems = [_sentence(path, root, set_paths, problem) for problem in error.errors()]
        raise ConfigError("\n".join(problems)) from error


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of `values` with "section.field=value" texts applied; values are read as YAML.

    Raises:
        ConfigError: a text is not of that form.
    """
    result = dict(values)
    for override in overrides:
        name, equals, text = override.partition("=")
        keys = name.strip().split(".")
        if not equals or not all(keys):
            raise ConfigError(f"{override!r} is not an override; write section.field=value, as in optimizer.lr=1e-4")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"the value of override {override!r} is not YAML") from error
        section = result
        for key in keys[:-1]:
            inner = section.get(key)
            section[key] = dict(inner) if isinstance(inner, dict) else {}
            section = section[key]
        section[keys[-1]] = value
    return result


def explain() -> str:
    """Every field with its meaning, kind and default, in the shape of the YAML file, for `trainer config --explain`."""
    return "\n".join(_explain(RunConfig, 0))


def _explain(section: type[BaseModel], depth: int) -> Iterator[str]:
    margin = "  " * depth
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield f"{margin}{name}:  # {(inner.__doc__ or '').strip()}"
            yield from _explain(inner, depth + 1)
            yield ""
        else:
            kind = f"{_kind(field.annotation)}{_bounds(field)}"
            yield f"{margin}{name}: {_default(field)}  # {field.description} [{kind}]"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "(required)"
    value = field.get_default(call_default_factory=True)
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...")


def _kind(annotation: Any) -> str:
    """An annotation in words a YAML writer uses."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(arguments[0])
    if origin is Literal:
        return " | ".join(str(argument) for argument in arguments)
    if origin in (Union, types.UnionType):
        return " | ".join(_kind(argument) for argument in arguments)
    if origin in (list, tuple):
        return "list of " + _kind(arguments[0])
    if origin is dict:
        return "mapping"
    names = {type(None): "null", Path: "path", str: "text", bool: "true | false", int: "integer", float: "number"}
    return names.get(annotation, str(annotation))


def _bounds(field: FieldInfo) -> str:
    """Limits of a number, as ", >= 1"."""
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    limits = [
        f"{sign} {getattr(item, name)}"
        for item in field.metadata
        for name, sign in signs.items()
        if getattr(item, name, None) is not None
    ]
    return "".join(f", {limit}" for limit in limits)


def _refuse_duplicates(path: Path, node: yaml.Node) -> None:
    """YAML would quietly take the last of two equal keys."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{path} line {key.start_mark.line + 1}: a key must be a plain word")
            if key.value in seen:
                raise ConfigError(
                    f"{path} line {key.start_mark.line + 1}: {key.value} appears twice; delete one of them"
                )
            seen.add(key.value)
            _refuse_duplicates(path, value)


def _sentence(path: Path, root: yaml.Node, set_paths: set[str], problem: ErrorDetails) -> str:
    """What is wrong, where, and what to write instead."""
    # Behind a field that may be of several types pydantic appends the type it tried: only real keys are shown.
    location = [part for part in problem["loc"] if isinstance(part, int) or "[" not in part]
    name = ".".join(str(part) for part in location)
    line = _line(root, location)
    overridden = any(f"{name}.".startswith(f"{set_path}.") for set_path in set_paths)
    where = "override" if overridden else f"{path} line {line}" if line else str(path)
    if problem["type"] == "extra_forbidden":
        nearest = _nearest(name)
        return f"{where}: {name} is not a known key" + (f"; did you mean {nearest}?" if nearest else "")
    if problem["type"] == "missing":
        return f"{where}: {name} is missing ({_description(name)})"
    message = problem["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    value = problem["input"]
    shown = f" (it is {value!r})" if isinstance(value, str | int | float) or value is None else ""
    return f"{where}: {name}: {message}{shown}"


def _line(root: yaml.Node, location: Sequence[int | str]) -> int | None:
    """Line of the deepest key of `location` that the file holds."""
    node, line = root, None
    for part in location:
        if isinstance(node, yaml.MappingNode):
            found = [(key, value) for key, value in node.value if key.value == str(part)]
            if not found:
                break
            line, node = found[0][0].start_mark.line + 1, found[0][1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
    return line


def _fields(section: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Dotted names of all fields, sections included."""
    for name, field in section.model_fields.items():
        yield prefix + name, field
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _fields(field.annotation, f"{prefix}{name}.")


def _description(name: str) -> str:
    field = dict(_fields()).get(name)
    if field is None:
        return "required"
    inner = field.annotation
    text = field.description or (inner.__doc__ if isinstance(inner, type) else None) or "required"
    return text.strip().rstrip(".")


def _nearest(name: str) -> str | None:
    """The known key that was probably meant: a sibling, or the same name in another section."""
    known = [path for path, _ in _fields()]
    parent, _, last = name.rpartition(".")
    siblings = {path.rpartition(".")[2]: path for path in known if path.rpartition(".")[0] == parent}
    close = difflib.get_close_matches(last, siblings, 1)
    if close:
        return siblings[close[0]]
    elsewhere: dict[str, str] = {}
    for path in known:
        elsewhere.setdefault(path.rpartition(".")[2], path)
    close = difflib.get_close_matches(last, elsewhere, 1)
    return elsewhere[close[0]] if close else None
