"""Computes what the target knows at its tapped layers, for every token of a packed row.

A `Target` is the frozen decoder of any decoder-only causal LM of transformers: cut off behind the last tapped layer,
tapped by forward hooks, without its head. Two ways lead through it, and both keep the documents of a row apart:

* *packed*: the row is one sequence and attention is kept within documents, on CUDA by the variable-length flash kernel
  that comes with torch, elsewhere by transformers' own masks for restarting position ids. Linear attention and
  convolutions can go this way where transformers finds kernels for them that reset their state (flash-linear-attention
  and causal-conv1d);
* *unpacked*: the documents are the right-padded entries of a few batches. Causal models never look at what stands to
  the right, whatever they are made of: this way is right for linear attention, convolutions and anything else that
  carries state along the sequence.

Which way a model can go is not a list of architectures but an experiment at load time (`trial.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config.sections import RunConfig, TargetConfig
from trainer.data.rows import Row
from trainer.pretrained import TargetError, load_model
from trainer.target.attention import VARLEN, VARLEN_NOTING
from trainer.target.inputs import TargetInputs, spans
from trainer.target.trial import Trial


@dataclass(frozen=True, slots=True)
class Features:
    """What the drafter reads of the target, for the S tokens of a row, on the target's device."""

    hidden: Tensor
    """[S, n * H] outputs of the n tapped layers side by side, in the order of the layer ids"""
    last_hidden: Tensor | None
    """[S, H] behind the final norm, ready for the head; only when loaded for distillation"""


class Target:
    """A frozen target on one device. One thread may use it at a time; it shares nothing with other targets."""

    def __init__(
        self,
        model: Any,
        layer_ids: Sequence[int],
        device: torch.device | str,
        *,
        attention: str = "auto",
        last_hidden: bool = False,
    ) -> None:
        """Take a transformers causal LM apart; use `load` for one on disk.

        Raises:
            TargetError: the model has no decoder layers to tap, or not as many as asked for.
        """
        self.device = torch.device(device)
        self.config = model.config.get_text_config()
        """transformers config of the text model, also for multimodal wrappers"""
        self.layer_ids = tuple(layer_ids)
        decoder = _decoder(model)
        layers = _decoder_layers(decoder, self.config)
        self.num_layers = len(layers)
        self.hidden_size = int(self.config.hidden_size)
        self.vocab_size = int(self.config.vocab_size)
        outside = [number for number in self.layer_ids if not 0 <= number < self.num_layers]
        if outside or not self.layer_ids:
            raise TargetError(
                f"target_layer_ids {list(self.layer_ids)} must name layers between 0 and {self.num_layers - 1}"
            )
        model.requires_grad_(False)
        model.eval()
        output = model.get_output_embeddings()
        if output is None:
            raise TargetError(f"{type(model).__name__} has no language-model head")
        if getattr(output, "bias", None) is not None:
            raise TargetError("the target's head has a bias, which a drafter's head cannot have")
        self._last_hidden = last_hidden
        if not last_hidden:
            # Layers behind the last tap are never run. Truncating is exact, frees their memory and traces cleanly,
            # which an exception raised by a hook would not.
            del layers[max(self.layer_ids) + 1 :]
        tied = output.weight is decoder.get_input_embeddings().weight
        self._decoder = decoder.to(self.device)
        self.embedding: Tensor = decoder.get_input_embeddings().weight.detach()
        """[V, H] on the target's device"""
        self.head: Tensor = self.embedding if tied else output.weight.detach().to("cpu")
        """[V, H]; the embedding where they are tied, else left on the CPU: only drafters use it"""
        kinds = set(getattr(self.config, "layer_types", None) or ())
        self._carries_state = bool(kinds - {"full_attention", "sliding_attention"})
        self._layers = [(layer, layer.forward) for layer in layers]
        self._taps: dict[int, Tensor] = {}
        for number in set(self.layer_ids):
            layers[number].register_forward_hook(self._tap(number))
        trial = self.trial()
        self.attention, reason = trial.choose_attention(attention)
        """How documents are kept apart: "varlen", "masked" or "unpacked" """
        if self.attention == "varlen" and self.device.type == "cuda" and (wait := trial.wait()) is not None:
            reason = f"the target's pass waits for the GPU: {wait}"
        self.uncapturable = reason
        """Why `forward` can't be captured in a CUDA graph; empty where it can"""

    @classmethod
    def load(
        cls,
        config: TargetConfig,
        layer_ids: Sequence[int],
        device: torch.device | str,
        *,
        last_hidden: bool = False,
    ) -> Target:
        """Load the target's weights onto `device`. To be called before worker threads start.

        Raises:
            TargetError: the model cannot be loaded or used; says why.
        """
        return cls(load_model(config, device), layer_ids, device, attention=config.attention, last_hidden=last_hidden)

    @classmethod
    def of_run(cls, config: RunConfig, layer_ids: Sequence[int], device: torch.device) -> Target:
        """Load what a run of `config` needs of its target; see `load`."""
        return cls.load(config.target, layer_ids, device, last_hidden=config.objective.distillation != "none")

    @property
    def packed(self) -> bool:
        """Whether a row is one forward pass of fixed shape."""
        return self.attention != "unpacked"

    @torch.no_grad()
    def forward(self, inputs: TargetInputs) -> Features:
        """Features of a row by one packed pass; only where `packed`."""
        states, last = self._run(inputs)
        return Features(states[0], last[0] if last is not None else None)

    @torch.no_grad()
    def features(self, row: Row) -> Features:
        """Features of a row; no token sees another document. Padding's features are arbitrary but finite."""
        if self.packed:
            return self.forward(TargetInputs.of(row).to(self.device))
        length = len(row.input_ids)
        hidden = torch.zeros(
            length, len(self.layer_ids) * self.hidden_size, dtype=self.embedding.dtype, device=self.device
        )
        last_hidden = hidden.new_zeros(length, self.hidden_size) if self._last_hidden else None
        for documents in _similar_lengths(spans(row)):
            longest = max(end - start for start, end in documents)
            # Right padding repeats tokens of the row: causal layers never show it to the tokens before it.
            places = torch.stack([torch.arange(start, start + longest) for start, _ in documents]).clamp_(
                max=length - 1
            )
            ids = row.input_ids[places].to(self.device)
            states, last = self._run(TargetInputs.unpacked(ids))
            for number, (start, end) in enumerate(documents):
                hidden[start:end] = states[number, : end - start]
                if last_hidden is not None and last is not None:
                    last_hidden[start:end] = last[number, : end - start]
        return Features(hidden, last_hidden)

    def trial(self) -> Trial:
        """The experiments that find out how this target can read packed rows."""
        return Trial(
            decoder=self._decoder,
            config=self.config,
            layers=[layer for layer, _ in self._layers],
            run=self._run,
            vocab_size=self.vocab_size,
            width=len(self.layer_ids) * self.hidden_size,
            device=self.device,
            dtype=self.embedding.dtype,
        )

    def run_layers_by(self, call: Callable[..., Any] | None) -> None:
        """Run each decoder layer by `call(layer, *args, **kwargs)`, say a compiled `decoder_layer`; None: by itself."""
        for layer, own in self._layers:
            layer.forward = partial(call, layer) if call is not None else own

    @property
    def has_plain_layers(self) -> bool:
        """Whether `decoder_layer` is what its layers compute: nobody has put another forward in place of the class's"""
        return all(getattr(own, "__func__", None) is type(layer).forward for layer, own in self._layers)

    def _tap(self, number: int) -> Any:
        def hook(_module: nn.Module, _arguments: Any, output: Tensor | tuple[Tensor, ...]) -> None:
            self._taps[number] = output if isinstance(output, Tensor) else output[0]

        return hook

    def _run(self, inputs: TargetInputs) -> tuple[Tensor, Tensor | None]:
        """Tapped states [D, L, n * H] and, for distillation, final ones [D, L, H]."""
        extra: dict[str, Any] = {}
        if self._decoder.config._attn_implementation in (VARLEN, VARLEN_NOTING):
            extra = {
                "cu_seq_lens_q": inputs.boundaries,
                "cu_seq_lens_k": inputs.boundaries,
                "max_length_q": inputs.longest,
                "max_length_k": inputs.longest,
            }
            if self._carries_state:
                extra["seq_idx"] = inputs.numbers()
        try:
            output = self._decoder(
                input_ids=inputs.input_ids, position_ids=inputs.position_ids, use_cache=False, **extra
            )
            states = torch.cat([self._taps[number] for number in self.layer_ids], dim=-1)
        finally:
            self._taps.clear()
        return states, output.last_hidden_state if self._last_hidden else None


def decoder_layer(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What a decoder layer computes. Layers of one kind compile to one graph, their weights being its inputs."""
    return type(layer).forward(layer, *args, **kwargs)


def _decoder(model: Any) -> Any:
    """The model without its head, which is still in what `get_decoder` returns for some (Llama 4)."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    decoder = model.get_decoder()
    while head is not None and _holds(decoder, head):
        inner = [part for part in decoder.children() if part is not embedding and _holds(part, embedding)]
        if len(inner) != 1:
            break
        decoder = inner[0]
    return decoder


def _holds(whole: nn.Module, part: nn.Module) -> bool:
    return any(module is part for module in whole.modules())


def _decoder_layers(decoder: nn.Module, config: Any) -> nn.ModuleList:
    """The list of decoder layers: `layers`, or the only list of the right length under another name."""
    count = int(config.num_hidden_layers)
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList) and len(module) == count]
    own = getattr(decoder, "layers", None)
    if isinstance(own, nn.ModuleList):
        return own
    if len(lists) != 1:
        raise TargetError(f"{type(decoder).__name__} has no single list of {count} decoder layers to tap")
    return lists[0]


def _similar_lengths(spans: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Batches of documents none of which is shorter than 7/8 of its batch's longest: little padding, few passes."""
    batches: list[list[tuple[int, int]]] = []
    for span in sorted(spans, key=lambda span: span[0] - span[1]):
        length = span[1] - span[0]
        if batches and 8 * length >= 7 * (batches[-1][0][1] - batches[-1][0][0]):
            batches[-1].append(span)
        else:
            batches.append([span])
    return batches
