"""Reasoning before an answer: when it ends, which a budget may force.

Models that reason write `<think>`, unless their prompt ends with it, the reasoning, and `</think>` before the answer.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .request_tokenizer import RequestTokenizer

BEGIN, END = "<think>", "</think>"


@dataclass(frozen=True)
class Thinking:
    """The reasoning of a request. A grammar of the request describes what follows it.

    Args:
        end_ids: The tokens of END, which the engine appends when the budget is used up.
        is_open: True if the prompt has begun the reasoning; else the reply may begin it.
        budget: The maximum number of tokens of the reasoning; None: no limit.
    """

    end_ids: tuple[int, ...]
    is_open: bool
    budget: int | None = None

    def __post_init__(self):
        if not self.end_ids:
            raise ValueError(f"the tokenizer has no tokens for {END}")


class ThinkingFollower:
    """Follows the tokens of one request through its reasoning.

    is_open: True while the reply reasons. next_token: the token that must come next, or None.
    """

    def __init__(self, thinking: Thinking, tokenizer: "RequestTokenizer"):
        self.is_open = thinking.is_open
        self._begin = None if self.is_open else tokenizer.text_stream((BEGIN,))
        self._end = tokenizer.text_stream((END,))
        self._left, self._forced = thinking.budget, list(thinking.end_ids)

    @property
    def next_token(self) -> int | None:
        """The next token of END if the budget is used up, else None."""
        return self._forced[0] if self.is_open and self._left == 0 else None

    def advance(self, token: int) -> None:
        """Add a token of the reply."""
        if self._begin is not None:
            is_answer = bool(self._begin.push(token).strip())
            self.is_open = self._begin.stopped and not is_answer
            if is_answer or self._begin.stopped:
                self._begin = None
        elif self.is_open:
            self._end.push(token)
            if self._left == 0:
                self._forced.pop(0)
            elif self._left is not None:
                self._left -= 1
            self.is_open = bool(self._forced) and not self._end.stopped
