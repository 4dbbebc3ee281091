"""Finds out at load time which way of reading packed rows a target can go.

Which one is not a list of architectures but an experiment: a few short documents are run together and alone.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.pretrained import TargetError
from trainer.target.attention import VARLEN, VARLEN_NOTING, noted_windows
from trainer.target.inputs import TargetInputs

_log = logging.getLogger(__name__)

# Between two ways to compute the same in half precision; see `disagreement`. Layers amplify the rounding of those
# before them: two right ways through 36 random layers were seen to part by 0.05.
LAYER_TOLERANCE, TOLERANCE = 0.02, 0.15


@dataclass(frozen=True)
class Trial:
    """The experiments on one loaded target."""

    decoder: Any
    config: Any
    """transformers config of the text model"""
    layers: list[nn.Module]
    run: Callable[[TargetInputs], tuple[Tensor, Tensor | None]]
    """Tapped states [D, L, n * H], and final ones [D, L, H] for distillation, of inputs"""
    vocab_size: int
    width: int
    """n * H"""
    device: torch.device
    dtype: torch.dtype

    def choose_attention(self, wanted: str) -> tuple[str, str]:
        """Set the fastest way that keeps documents apart on this machine.

        Returns its name, "varlen", "masked" or "unpacked", and why it is not "varlen" (empty where it is).

        Raises:
            TargetError: not even a document by itself gives features, or `wanted` is "varlen" and can't be had.
        """
        self._check_shape()
        way, reason = self._choose_attention(wanted)
        if wanted == "varlen" and way != "varlen":
            raise TargetError(f"target.attention: varlen can't be had: {reason}; set it to auto")
        if way == "unpacked":
            _log.info("%s: documents are batched by length instead", reason)
        return way, reason

    def _choose_attention(self, wanted: str) -> tuple[str, str]:
        if self._selects():
            return "unpacked", "the target's attention selects among all tokens of a row"
        reason = f"target.attention is {wanted}"
        if wanted == "auto" and self.device.type != "cuda":
            reason = "the variable-length kernel needs a GPU"
        elif wanted == "auto" and self.dtype == torch.float32:
            reason = "the variable-length kernel takes bfloat16 and float16, and target.dtype is float32"
        elif wanted in ("auto", "varlen"):
            own = self.decoder.config._attn_implementation
            self.decoder.set_attn_implementation(VARLEN)
            fault = self.keeps_apart("varlen", reference=own)
            if fault is None:
                return "varlen", ""
            self.decoder.set_attn_implementation(own)
            reason = f"the variable-length kernel can't serve this target: {fault}"
        if self.keeps_apart("masked") is None:
            return "masked", reason
        return "unpacked", "the target cannot read several documents as one sequence"

    def _check_shape(self) -> None:
        """See that layers return what a drafter can read, [D, L, H]."""
        inputs = TargetInputs.unpacked(self._probe(40).input_ids)
        try:
            with torch.no_grad():
                states, _ = self.run(inputs)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, KeyError, AttributeError) as error:
            reason = str(error).split("\n")[0]
            raise TargetError(
                f"the target can't be run over token ids alone: {type(error).__name__}: {reason}"
            ) from error
        expected = (1, 40, self.width)
        if states.shape != expected:
            raise TargetError(
                f"the target's tapped layers return {list(states.shape)} for 40 tokens instead of {list(expected)}: "
                "models of its kind can't be targets"
            )

    def _selects(self) -> bool:
        """Whether attention picks tokens by rank or by their place in the row, which no short probe shows.

        Sparse attention (`index_topk`) lets tokens of other documents take places; chunks (Llama 4) count from the
        start of the row in transformers before 5.24.
        """
        kinds = getattr(self.config, "layer_types", None) or ()
        return bool(getattr(self.config, "index_topk", None)) or any(
            word in kind for kind in kinds for word in ("chunk", "sparse", "index", "compress")
        )

    def keeps_apart(self, way: str, reference: str | None = None) -> str | None:
        """None where a packed pass gives every document what it gets alone, else why it does not.

        With a `reference`, the name of another attention implementation, it must also agree with that one.
        The test for leaks is exact at any precision: the gradient of the second document's features with respect to the
        first document's embeddings must be zero, not small. What has no gradient, such as positions that are counted
        from the start of the row, shows in the features: in the first layer before rounding has grown.
        """
        first = 24
        inputs = self._probe(first, 40)
        embedded: list[Tensor] = []

        def watch(_module: nn.Module, _arguments: Any, output: Tensor) -> Tensor:
            embedded.append(output.detach().requires_grad_())
            return embedded[0]

        own = self.decoder.config._attn_implementation
        handle = self.decoder.get_input_embeddings().register_forward_hook(watch)
        try:
            with noted_windows() as windows, torch.enable_grad():
                if own == VARLEN:
                    self.decoder.set_attn_implementation(VARLEN_NOTING)
                states, lowest = self._features_and_lowest(inputs)
                (gradient,) = torch.autograd.grad(states[first:].float().sum(), embedded[0])
        except (RuntimeError, NotImplementedError, TypeError, ValueError, KeyError, TargetError) as error:
            _log.info("packed attention (%s) is not available for this target: %s", way, str(error).split("\n")[0])
            return str(error).split("\n")[0]
        finally:
            self.decoder.set_attn_implementation(own)
            handle.remove()
        if bool(gradient[0, :first].any()) or not bool(gradient[0, first:].any()):
            return "documents of a packed row see each other"
        if reference is not None and windows.count(None) > len(windows) - self._sliding(len(windows)):
            _log.warning("the target does not tell its attention of its sliding window: variable-length is not used")
            return "it does not tell its attention of its sliding window"
        for implementation in {own, reference or own}:
            self.decoder.set_attn_implementation(implementation)
            with torch.no_grad():
                alone, lowest_alone = self._features_and_lowest(TargetInputs.unpacked(inputs.input_ids[:, first:]))
            self.decoder.set_attn_implementation(own)
            parted = disagreement(states[first:].detach(), alone), disagreement(lowest[first:].detach(), lowest_alone)
            if not (parted[0] <= TOLERANCE and parted[1] <= LAYER_TOLERANCE):  # nor not a number
                _log.warning("packed attention (%s) gives other features than each document alone: not used", way)
                return "packed, it gives other features than each document alone"
        return None

    def _features_and_lowest(self, inputs: TargetInputs) -> tuple[Tensor, Tensor]:
        """Tapped states [L, n * H] of one line, and the first layer's output [L, H]."""
        outputs: list[Tensor] = []
        handle = self.layers[0].register_forward_hook(
            lambda _module, _arguments, output: outputs.append(output if isinstance(output, Tensor) else output[0])
        )
        try:
            states, _ = self.run(inputs)
        finally:
            handle.remove()
        return states[0], outputs[0][0]

    def _sliding(self, calls: int) -> int:
        """How many of so many calls of the attention should come with a window."""
        kinds = getattr(self.config, "layer_types", None)
        if kinds:
            return list(kinds)[: len(self.layers)].count("sliding_attention")
        return calls if getattr(self.config, "sliding_window", None) else 0

    def wait(self) -> str | None:
        """What a packed pass asks of the GPU in between (as some mixtures of experts do), None where nothing."""
        inputs = self._probe(24, 40)
        before = torch.cuda.get_sync_debug_mode()
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch calls the mode a prototype
                torch.cuda.set_sync_debug_mode("error")
                self.run(inputs)
        except RuntimeError as error:
            return str(error).split("\n")[0]
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return None

    def _probe(self, *lengths: int) -> TargetInputs:
        return TargetInputs.probe(self.vocab_size, self.device, *lengths)


def disagreement(mine: Tensor, right: Tensor) -> float:
    """How far one [S, D] is from another, as a share of its norm: the median over tokens, since the router of a mixture
    of experts may send single tokens elsewhere after rounding. Waits for the device."""
    right = right.float()
    return float(((mine.float() - right).norm(dim=-1) / right.norm(dim=-1)).median())
