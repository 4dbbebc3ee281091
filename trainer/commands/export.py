"""Writes a checkpoint as a drafter that other programs load (`python -m trainer export CHECKPOINT OUT`).

OUT gets config.json, one model.safetensors and a model card, in the layout of the released DFlash checkpoints, with
each draft field where any engine looks for it: the official package, vLLM, SGLang, TensorRT-LLM, llama.cpp, MLX.
Embedding and head are the target's and are not in the files. OUT appears whole or not at all.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from torch import Tensor

from trainer.drafter.config import DrafterConfig
from trainer.drafter.released import fingerprint, read_drafter, write_drafter
from trainer.run.checkpoint import find_drafter

_log = logging.getLogger(__name__)


class ExportError(ValueError):
    """An export that cannot be made as asked; the message says what to change."""


def export(source: Path, out: Path, *, dtype: str = "bfloat16", evaluation: Path | None = None) -> Path:
    """Export the drafter that `source` means (a checkpoint, a run directory, or a drafter) to the new folder `out`.

    `evaluation` is what `trainer evaluate --output` wrote about this very drafter; the model card shows it.
    Raises ExportError, DrafterConfigError or CheckpointError.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ExportError(f"{out} exists and is not empty: choose another folder, or remove it")
    folder, run = find_drafter(source)
    _log.info("exporting %s", folder)
    drafter = read_drafter(folder)
    measured = None if evaluation is None else _read_evaluation(evaluation, folder)
    _refuse_lost_numbers(drafter.state_dict(), folder, dtype)
    unfinished: Path | None = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        unfinished.chmod(0o755)
        write_drafter(unfinished, drafter.config, drafter.state_dict(), getattr(torch, dtype))
        card = model_card(out.name, drafter.config, run, _checkpoint_facts(folder), measured)
        (unfinished / "README.md").write_text(card, encoding="utf-8")
        if out.exists():
            out.rmdir()
        unfinished.rename(out)
    except OSError as error:
        raise ExportError(f"{out} cannot be written: {error.strerror or error}") from error
    finally:
        if unfinished is not None:
            shutil.rmtree(unfinished, ignore_errors=True)
    return out


def _refuse_lost_numbers(weights: Mapping[str, Tensor], folder: Path, dtype: str) -> None:
    """Raise ExportError where a weight is no number, or would be none in `dtype`: float16 ends at 65504."""
    for name, tensor in weights.items():
        if not tensor.isfinite().all():
            raise ExportError(f"{name} of {folder} holds numbers that are not finite: export an earlier checkpoint")
        if not tensor.to(getattr(torch, dtype)).isfinite().all():
            largest = float(tensor.abs().max())
            raise ExportError(f"{name} holds {largest:.4g}, which {dtype} cannot hold: export with --dtype bfloat16")


def model_card(
    name: str,
    config: DrafterConfig,
    run: Mapping[str, Any] | None,
    trained: Mapping[str, Any],
    measured: Mapping[str, Any] | None,
) -> str:
    """Return the model card: how to serve it, what was measured, how and on what it was trained.

    `run` is a checkpoint's record of its run, `trained` its step and metrics, `measured` an evaluation; what is not
    known is left out, never guessed.
    """
    settings: Mapping[str, Any] = (run or {}).get("config", {})
    target = settings.get("target", {}).get("path") or (measured or {}).get("target")
    return "\n".join(
        [
            "---",
            yaml.safe_dump(_front_matter(target), sort_keys=False).rstrip(),
            "---",
            "",
            f"# {name}",
            "",
            f"A DFlash drafter for {f'`{_shown(target)}`' if target else 'its target'}: it proposes blocks of "
            f"{config.block_size} tokens ({config.block_size - 1} drafted), which the target checks in one pass. "
            "Embedding and head are the target's own.",
            "",
            *_serving(name, target, config),
            *_measurements(measured, trained),
            *_recipe(settings, run or {}, trained, config),
        ]
    )


def main(options: argparse.Namespace) -> int:
    """Run `python -m trainer export`; returns the exit code."""
    out = export(options.checkpoint, options.out, dtype=options.dtype, evaluation=options.evaluation)
    size = (out / "model.safetensors").stat().st_size / 2**20
    console = Console(stderr=True)
    console.print(f"exported to {out} ({size:.1f} MiB, {options.dtype})", soft_wrap=True)
    for limit in DrafterConfig.read(out).engine_limits():
        console.print(f"note: {limit}", soft_wrap=True)
    return 0


def _front_matter(target: str | None) -> dict[str, Any]:
    front: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    front["tags"] = ["dflash", "speculative-decoding"]
    if target and not Path(target).exists():  # a hub name; a local folder means nothing to others
        front["base_model"] = target
    return front


def _shown(target: str) -> str:
    """A local path says more about the machine it was on than about the model: keep its last part."""
    return Path(target).name if Path(target).exists() or target.startswith(("/", ".", "~")) else target


def _serving(name: str, target: str | None, config: DrafterConfig) -> Iterator[str]:
    served = _shown(target) if target else "TARGET"
    speculative = json.dumps({"method": "dflash", "model": name, "num_speculative_tokens": config.block_size - 1})
    gguf = f"--outtype f32 --outfile {name}.gguf"
    yield from (
        "## Serving",
        "",
        "```sh",
        f"vllm serve {served} --dtype auto --speculative-config '{speculative}'",
        f"python -m sglang.launch_server --model-path {served} --speculative-algorithm DFLASH \\",
        f"  --speculative-draft-model-path {name} --speculative-num-draft-tokens {config.block_size}",
        f"convert_hf_to_gguf.py {served} --outtype f32 --outfile target.gguf",
        f"convert_hf_to_gguf.py {name} --target-model-dir {served} {gguf}",
        f"llama-server -m target.gguf -md {name}.gguf --spec-type draft-dflash \\",
        f"  --spec-draft-n-max {config.block_size - 1}",
        "```",
        "",
        "vLLM: give `--dtype` the precision of the target's files, and a target class that has its EAGLE-3 interface.",
        "",
    )
    for limit in config.engine_limits():
        yield from (limit, "")


def _measurements(measured: Mapping[str, Any] | None, trained: Mapping[str, Any]) -> Iterator[str]:
    yield from ("## Measured acceptance", "")
    if measured is not None:
        sampling = measured["sampling"]
        how = "greedy" if sampling["temperature"] == 0 else f"temperature {sampling['temperature']}"
        yield from (
            f"By real speculative decoding in transformers ({measured['dtype']}, {how}, up to "
            f"{measured['max_new_tokens']} tokens, block {measured['block_size']}). Accepted: mean tokens per pass of "
            "the target, its own included.",
            "",
            "| prompts | accepted | passes of the target saved | answers | identical to the target alone |",
            "|---|---|---|---|---|",
        )
        for row in measured["sets"]:
            same = "sampled" if row["identical"] is None else f"{row['identical']}/{row['answers']}"
            accepted, saved = _number(row["acceptance_length"]), 100 * row["passes_saved"]
            yield f"| {row['name']} | {accepted} | {saved:.0f} % | {row['answers']} | {same} |"
        speeds = ", ".join(f"{_number(r['speedup'])}x for {r['name']} ({r['tokens']} tokens)" for r in measured["sets"])
        yield from ("", f"Speedup in transformers on {measured['device']}: {speeds}; it depends on machine and load.")
    elif (length := trained.get("held_out_accept_length")) is not None:
        yield f"On blocks of conversations held out of training: {length:.2f} tokens. Real decoding was not measured."
    elif (length := trained.get("accept_length")) is not None:
        yield f"On training blocks before the checkpoint: {length:.2f} tokens. Real decoding was not measured."
    else:
        yield "Not measured."
    yield ""


def _number(value: float | None) -> str:
    """A dash for what could not be measured, as where no answer needed a pass."""
    return "–" if value is None else f"{value:.2f}"


def _recipe(
    settings: Mapping[str, Any], run: Mapping[str, Any], trained: Mapping[str, Any], config: DrafterConfig
) -> Iterator[str]:
    yield from ("## Training", "")
    if not settings:
        yield from ("Not recorded: this was exported from a drafter, not from a training checkpoint.", "")
        return
    data = settings.get("data", {})
    start = settings.get("drafter", {}).get("init_from")
    facts = {
        "continued from": Path(start).name if start else None,
        "optimizer steps": trained.get("step"),
        "data hash": run.get("content_hash"),
        "data files": ", ".join(Path(source).name for source in data.get("sources", [])),
        "tapped target layers": list(config.target_layer_ids),
        "mask token": config.mask_token_id,
    }
    yield from ("| | |", "|---|---|")
    for key, value in facts.items():
        if value:
            yield f"| {key} | {value} |"
    recipe = {key: settings[key] for key in ("drafter", "data", "objective", "optimizer", "seed") if key in settings}
    for section, hidden in (("drafter", ("init_from",)), ("data", ("sources", "cache_dir"))):
        if section in recipe:
            recipe[section] = {key: value for key, value in recipe[section].items() if key not in hidden}
    yield from ("", "```yaml", yaml.safe_dump(recipe, sort_keys=False).rstrip(), "```", "")


def _checkpoint_facts(folder: Path) -> dict[str, Any]:
    """Return the step and the metrics that a training checkpoint's manifest holds; nothing for another drafter."""
    manifest = folder / "manifest.json"
    if not manifest.exists():
        return {}
    document = json.loads(manifest.read_text(encoding="utf-8"))
    return {"step": document["step"], **document["metrics"]}


def _read_evaluation(path: Path, folder: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        measured = document["weights_sha256"]
        if not all({"passes_saved", "tokens"} <= row.keys() for row in document["sets"]):
            raise KeyError("passes_saved")
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError):
        raise ExportError(f"{path} is not what this trainer's `evaluate --output` writes: evaluate again") from None
    if measured != fingerprint(folder):
        raise ExportError(f"{path} measured another drafter ({document['drafter']}): evaluate {folder} first")
    return document
