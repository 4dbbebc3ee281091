"""What does the target know at its tapped layers, for every token of a packed row?

A `Target` is the frozen decoder of any decoder-only causal LM of transformers: cut off behind the last tapped layer,
tapped by forward hooks, without its head. Two ways lead through it, and both keep the documents of a row apart:

* *packed*: the row is one sequence and attention is kept within documents, on CUDA by the variable-length flash kernel
  that comes with torch, elsewhere by transformers' own masks for restarting position ids. Linear attention and
  convolutions can go this way where transformers finds kernels for them that reset their state (flash-linear-attention
  and causal-conv1d);
* *unpacked*: the documents are the right-padded entries of a few batches. Causal models never look at what stands to
  the right, whatever they are made of: this way is right for linear attention, convolutions and anything else that
  carries state along the sequence.

Which way a model can go is not a list of architectures but an experiment at load time (`Target._keeps_apart`).
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from transformers import AttentionInterface

from trainer.config.sections import RunConfig, TargetConfig
from trainer.data.rows import Row, RowShape
from trainer.inputs import hub_answers, is_hub_name, require_target

_log = logging.getLogger(__name__)

VARLEN = "within_documents"
"""Name under which transformers finds `_varlen_attention`; one with "flash" in it would be taken for its own kernels"""

# Between two ways to compute the same in half precision; see `disagreement`. Layers amplify the rounding of those
# before them: two right ways through 36 random layers were seen to part by 0.05.
LAYER_TOLERANCE, TOLERANCE = 0.02, 0.15

# While a target is tried out: the window of each call of `_varlen_attention`.
_windows: ContextVar[list[int | None] | None] = ContextVar("_windows", default=None)

# torch 2.11 takes fewer key heads than query heads without being told; later ones want to be told.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


class TargetError(Exception):
    """A target that cannot be used; the text is one sentence."""


@dataclass(frozen=True, slots=True)
class Features:
    """What the drafter reads of the target, for the S tokens of a row, on the target's device."""

    hidden: Tensor
    """[S, n * H] outputs of the n tapped layers side by side, in the order of the layer ids"""
    last_hidden: Tensor | None
    """[S, H] behind the final norm, ready for the head; only when loaded for distillation"""


@dataclass(frozen=True, slots=True)
class TargetInputs:
    """A row as the packed way reads it. With the shape of a whole source, a pass over it can be captured in a graph."""

    input_ids: Tensor
    """[1, S] int64"""
    position_ids: Tensor
    """[1, S] int64"""
    boundaries: Tensor
    """[N + 1] int32: where each of N pieces begins, and S: the documents, then padding, then empty pieces"""
    longest: int
    """No piece has more tokens"""

    @classmethod
    def of(cls, row: Row, shape: RowShape | None = None) -> TargetInputs:
        """A row on the CPU; `boundaries` is as long as any row of the shape needs, or this row if there is none."""
        length = len(row.input_ids)
        documents = _spans(row)
        longest = shape.longest if shape is not None else max(end - start for start, end in documents)
        # Padding is cut to the length of documents, for that is how far into a piece the kernel looks.
        starts = [start for start, _ in documents] + list(range(documents[-1][1], length, longest))
        pieces = _pieces(shape) if shape is not None else len(starts)
        boundaries = torch.full((pieces + 1,), length, dtype=torch.int32)
        boundaries[: len(starts)] = torch.tensor(starts, dtype=torch.int32)
        return cls(row.input_ids[None], row.position_ids[None], boundaries, longest)

    @classmethod
    def trial(cls, shape: RowShape, vocab_size: int, device: torch.device) -> TargetInputs:
        """Buffers for any row of a source, filled with made-up documents of the longest length."""
        places = torch.arange(shape.tokens, device=device)
        starts = torch.arange(_pieces(shape) + 1, device=device) * shape.longest
        return cls(
            _probe_tokens(vocab_size, shape.tokens).to(device)[None],
            (places % shape.longest)[None],
            starts.clamp_(max=shape.tokens).to(torch.int32),
            shape.longest,
        )

    def copy_(self, other: TargetInputs) -> None:
        """Take over another row of the same shape, without waiting for the device."""
        self.input_ids.copy_(other.input_ids, non_blocking=True)
        self.position_ids.copy_(other.position_ids, non_blocking=True)
        self.boundaries.copy_(other.boundaries, non_blocking=True)

    def numbers(self) -> Tensor:
        """[1, S] int32: the piece that each token belongs to, as the kernels of convolutions want to be told."""
        places = torch.arange(self.input_ids.shape[1], device=self.boundaries.device)
        return (torch.searchsorted(self.boundaries, places, right=True, out_int32=True) - 1)[None]

    def to(self, device: torch.device) -> TargetInputs:
        """The same on a device."""
        return TargetInputs(
            self.input_ids.to(device, non_blocking=True),
            self.position_ids.to(device, non_blocking=True),
            self.boundaries.to(device, non_blocking=True),
            self.longest,
        )


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
        decoder = model.get_decoder()
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
        self.attention = self._choose_attention(attention)
        """How documents are kept apart: "varlen", "masked" or "unpacked" """
        self.capturable = self.attention == "varlen" and self._never_waits()
        """Whether `forward` may be captured in a CUDA graph"""

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
        for documents in _similar_lengths(_spans(row)):
            longest = max(end - start for start, end in documents)
            # Right padding repeats tokens of the row: causal layers never show it to the tokens before it.
            places = torch.stack([torch.arange(start, start + longest) for start, _ in documents]).clamp_(
                max=length - 1
            )
            ids = row.input_ids[places].to(self.device)
            states, last = self._run(self._unpacked(ids))
            for number, (start, end) in enumerate(documents):
                hidden[start:end] = states[number, : end - start]
                if last_hidden is not None and last is not None:
                    last_hidden[start:end] = last[number, : end - start]
        return Features(hidden, last_hidden)

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
        if self._decoder.config._attn_implementation == VARLEN:
            extra = {
                "cu_seq_lens_q": inputs.boundaries,
                "cu_seq_lens_k": inputs.boundaries,
                "max_length_q": inputs.longest,
                "max_length_k": inputs.longest,
            }
            if self._carries_state:
                extra["seq_idx"] = inputs.numbers()
        output = self._decoder(input_ids=inputs.input_ids, position_ids=inputs.position_ids, use_cache=False, **extra)
        states = torch.cat([self._taps[number] for number in self.layer_ids], dim=-1)
        self._taps.clear()
        return states, output.last_hidden_state if self._last_hidden else None

    def _unpacked(self, ids: Tensor) -> TargetInputs:
        """One document a line, [D, L]; what the lines are padded with stands to the right."""
        length = ids.shape[1]
        positions = torch.arange(length, device=self.device).expand(len(ids), -1)
        return TargetInputs(ids, positions, torch.tensor([0, length], dtype=torch.int32, device=self.device), length)

    def _probe(self, *lengths: int) -> TargetInputs:
        """Packed documents of these lengths, and an empty piece."""
        starts = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
        return TargetInputs(
            _probe_tokens(self.vocab_size, starts[-1]).to(self.device)[None],
            torch.cat([torch.arange(length) for length in lengths]).to(self.device)[None],
            torch.tensor([*starts, starts[-1]], dtype=torch.int32, device=self.device),
            max(lengths),
        )

    def _choose_attention(self, wanted: str) -> str:
        """Set the fastest way that keeps documents apart on this machine.

        Raises:
            TargetError: not even a document by itself gives features.
        """
        self._check_shape()
        if self._selects():
            _log.info(
                "the target's attention selects among all tokens of a row: documents are batched by length instead"
            )
            return "unpacked"
        if wanted == "auto" and self.device.type == "cuda" and self.embedding.dtype != torch.float32:
            own = self._decoder.config._attn_implementation
            self._decoder.set_attn_implementation(VARLEN)
            if self._keeps_apart("varlen", reference=own):
                return "varlen"
            self._decoder.set_attn_implementation(own)
        if self._keeps_apart("masked"):
            return "masked"
        _log.info("the target cannot read several documents as one sequence: they are batched by length instead")
        return "unpacked"

    def _check_shape(self) -> None:
        """See that layers return what a drafter can read, [D, L, H]."""
        inputs = self._unpacked(self._probe(40).input_ids)
        try:
            with torch.no_grad():
                states, _ = self._run(inputs)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, KeyError, AttributeError) as error:
            reason = str(error).split("\n")[0]
            raise TargetError(
                f"the target can't be run over token ids alone: {type(error).__name__}: {reason}"
            ) from error
        finally:
            self._taps.clear()
        expected = (1, 40, len(self.layer_ids) * self.hidden_size)
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

    def _keeps_apart(self, way: str, reference: str | None = None) -> bool:
        """Whether a packed pass gives every document what it gets alone.

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

        handle = self._decoder.get_input_embeddings().register_forward_hook(watch)
        windows: list[int | None] = []
        noted = _windows.set(windows)
        try:
            with torch.enable_grad():
                states, lowest = self._features_and_lowest(inputs)
                (gradient,) = torch.autograd.grad(states[first:].float().sum(), embedded[0])
        except (RuntimeError, NotImplementedError, TypeError, ValueError, KeyError, TargetError) as error:
            _log.info("packed attention (%s) is not available for this target: %s", way, str(error).split("\n")[0])
            return False
        finally:
            _windows.reset(noted)
            handle.remove()
            self._taps.clear()
        if bool(gradient[0, :first].any()) or not bool(gradient[0, first:].any()):
            return False
        if reference is not None and windows.count(None) > len(windows) - self._sliding(len(windows)):
            _log.warning("the target does not tell its attention of its sliding window: variable-length is not used")
            return False
        own = self._decoder.config._attn_implementation
        for implementation in {own, reference or own}:
            self._decoder.set_attn_implementation(implementation)
            with torch.no_grad():
                alone, lowest_alone = self._features_and_lowest(self._unpacked(inputs.input_ids[:, first:]))
            self._decoder.set_attn_implementation(own)
            parted = disagreement(states[first:].detach(), alone), disagreement(lowest[first:].detach(), lowest_alone)
            if not (parted[0] <= TOLERANCE and parted[1] <= LAYER_TOLERANCE):  # nor not a number
                _log.warning("packed attention (%s) gives other features than each document alone: not used", way)
                return False
        return True

    def _features_and_lowest(self, inputs: TargetInputs) -> tuple[Tensor, Tensor]:
        """Tapped states [L, n * H] of one line, and the first layer's output [L, H]."""
        seen: list[Tensor] = []
        layer, _ = self._layers[0]
        handle = layer.register_forward_hook(
            lambda _module, _arguments, output: seen.append(output if isinstance(output, Tensor) else output[0])
        )
        try:
            states, _ = self._run(inputs)
        finally:
            handle.remove()
        return states[0], seen[0][0]

    def _sliding(self, calls: int) -> int:
        """How many of so many calls of the attention should come with a window."""
        kinds = getattr(self.config, "layer_types", None)
        if kinds:
            return list(kinds)[: len(self._layers)].count("sliding_attention")
        return calls if getattr(self.config, "sliding_window", None) else 0

    def _never_waits(self) -> bool:
        """Whether a packed pass asks nothing of the GPU in between (as some mixtures of experts do)."""
        inputs = self._probe(24, 40)
        before = torch.cuda.get_sync_debug_mode()
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch calls the mode a prototype
                torch.cuda.set_sync_debug_mode("error")
                self._run(inputs)
        except RuntimeError as error:
            _log.info("the target's pass cannot be captured in a CUDA graph: %s", str(error).split("\n")[0])
            return False
        finally:
            torch.cuda.set_sync_debug_mode(before)
            self._taps.clear()
        return True


def decoder_layer(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What a decoder layer computes. Layers of one kind compile to one graph, their weights being its inputs."""
    return type(layer).forward(layer, *args, **kwargs)


def disagreement(mine: Tensor, right: Tensor) -> float:
    """How far one [S, D] is from another, as a share of its norm: the median over tokens, since the router of a mixture
    of experts may send single tokens elsewhere after rounding. Waits for the device."""
    right = right.float()
    return float(((mine.float() - right).norm(dim=-1) / right.norm(dim=-1)).median())


def load_model(config: TargetConfig, device: torch.device | str) -> Any:
    """The transformers model of a config, on `device`, for inference.

    Raises:
        TargetError, InputError: it cannot be loaded; says why.
    """
    from transformers import AutoModelForCausalLM

    device = torch.device(device)
    options: dict[str, Any] = {"dtype": getattr(torch, config.dtype)}
    if config.attention != "auto":
        options["attn_implementation"] = config.attention
    if device.type == "cuda":
        options["device_map"] = {"": device}
    return _from_pretrained(AutoModelForCausalLM, "the target", config, **options)


def load_model_config(config: TargetConfig) -> Any:
    """The target's transformers configuration, without its weights.

    Raises:
        TargetError, InputError: it cannot be loaded; says why.
    """
    from transformers import AutoConfig

    return _from_pretrained(AutoConfig, "the configuration of the target", config)


def load_tokenizer(config: TargetConfig) -> Any:
    """The target's tokenizer.

    Raises:
        TargetError, InputError: it cannot be loaded; says why.
    """
    from transformers import AutoTokenizer

    return _from_pretrained(AutoTokenizer, "the tokenizer of the target", config)


def _from_pretrained(kind: Any, what: str, config: TargetConfig, **options: Any) -> Any:
    require_target(config)
    if config.gguf_file is not None:
        options["gguf_file"] = config.gguf_file
    unreachable = is_hub_name(config.path) and not hub_answers()
    if unreachable:  # what was fetched before can be had all the same
        options["local_files_only"] = True
    try:
        return kind.from_pretrained(config.path, trust_remote_code=config.trust_remote_code, **options)
    except (OSError, ValueError, ImportError) as error:
        if unreachable:
            raise TargetError(
                f"target.path: there is no folder {config.path} in {Path.cwd()}, and the model hub does not answer"
            ) from error
        raise TargetError(f"{what} {config.path} cannot be loaded: {str(error).strip().splitlines()[0]}") from error


def stop_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """The ids at which the target ends an answer, by its generation config or else its tokenizer; perhaps none."""
    ids = model.generation_config.eos_token_id
    if ids is None:
        ids = tokenizer.eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or ())


def _varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within documents by torch's flash kernel, in transformers' calling convention.

    query [1, heads, S, d], key and value [1, kv_heads, S, d]; returns [1, S, heads, d]. `s_aux` are attention sinks
    (gpt-oss): a logit per head that takes part in the softmax and attends to nothing.
    """
    if cu_seq_lens_q is None or max_length_q is None or query.shape[0] != 1:
        raise TargetError("the model does not hand the document boundaries to its attention")
    if softcap is not None:
        raise TargetError("the flash kernel has no soft-capped attention")
    if (windows := _windows.get()) is not None:
        windows.append(sliding_window)
    output: Any = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        return_aux=AuxRequest(lse=True) if s_aux is not None else None,
        **_GROUPED,
    )
    if s_aux is not None:
        output, logsumexp = output  # [S, heads, d], [heads, S]
        output = output * torch.sigmoid(logsumexp.T - s_aux.float()).to(output.dtype)[..., None]
    return output[None], None


AttentionInterface.register(VARLEN, _varlen_attention)


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


def _probe_tokens(vocab_size: int, count: int) -> Tensor:
    """Distinct-looking token ids spread over the vocabulary, without any random generator."""
    return (torch.arange(1, count + 1) * 7919) % vocab_size


def _spans(row: Row) -> list[tuple[int, int]]:
    """Half-open spans of the row's documents, padding left out."""
    starts = torch.unique_consecutive(row.document_start).tolist()
    ends = [*starts[1:], len(row.input_ids)]
    # A padding token is its own document; a real one has at least an anchor and the token behind it.
    return [(start, end) for start, end in zip(starts, ends, strict=True) if end - start > 1]


def _pieces(shape: RowShape) -> int:
    """Pieces that suffice for any row of a shape."""
    return shape.documents + -(-shape.tokens // shape.longest)


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
