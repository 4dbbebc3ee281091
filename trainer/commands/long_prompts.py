"""Refuses prompts that a target has no positions for, before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.data.prompts import Prompt, prompt_tokens
from trainer.data.templates import RefusedChatError
from trainer.pretrained import TargetError
from trainer.target.positions import learned_positions
from trainer.wording import count

_ANSWER = {"role": "assistant", "content": ""}


def refuse_long_prompts(
    model_config: Any,
    tokenizer: Any,
    sets: Sequence[tuple[str, Sequence[Prompt]]],
    max_new_tokens: int,
    template: str | None,
    variables: Mapping[str, Any],
) -> None:
    """Raise TargetError where a prompt of `sets` (by name) and its longest answers pass the target's last position."""
    positions = learned_positions(model_config)
    if positions is None:
        return
    for name, prompts in sets:
        for number, prompt in enumerate(prompts, 1):
            answers = len(prompt.turns)
            messages = [message for given in prompt.turns for message in (*given, _ANSWER)][:-1]
            try:
                tokens = len(prompt_tokens(tokenizer, messages, prompt.tools, template, variables))
            except RefusedChatError:  # it is told when its turn comes
                continue
            if (room := (positions - tokens) // answers) < max_new_tokens:
                cure = f"give --max-new-tokens {room} or less" if room > 0 else "leave it out"
                raise TargetError(
                    f"the target has learned {positions} positions, too few for prompt {number} of {name}, which has "
                    f"{count(tokens, 'token')}, and {count(answers, 'answer')} of up to {max_new_tokens}: {cure}"
                )
