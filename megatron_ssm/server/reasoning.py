"""Separates the reasoning at the beginning of a reply, up to `</think>`, from the answer after it."""

from megatron_ssm.engine.thinking import BEGIN, END

from .tool_calls import begun_length


class ReasoningSplitter:
    """Splits a reply, as it comes, into its reasoning and its answer, without the white space around them.

    Args:
        is_open: True if the prompt has begun the reasoning. Otherwise, a reply that does not begin with `<think>` has no
            reasoning.
        call_mark: The mark that begins a tool call, if the reply may have one. The reasoning from this mark on is held
            back, because it is a call if the reply ends without `</think>`.
    """

    def __init__(self, is_open: bool, call_mark: str = ""):
        self._is_open, self._call_mark, self._held, self._state = is_open, call_mark, "", "start"
        self._has_reasoning = self._has_begun = False  # _has_begun: some of the reasoning was returned

    @property
    def is_inside(self) -> bool:
        """Return True if the text so far ends within the reasoning."""
        return self._state == "reasoning" or (self._state == "start" and self._is_open)

    def push(self, text: str) -> tuple[str, str]:
        """Add text of the reply; returns the new parts of the reasoning and of the answer that no later text can change."""
        if self._state == "answer":
            return "", text
        self._held += text
        if self._state == "start":
            self._start()
        reasoning = self._reasoning() if self._state == "reasoning" else ""
        if self._state != "gap" or not self._held.strip():
            return reasoning, ""
        self._state = "answer"
        return reasoning, self._held.lstrip() if self._has_reasoning else self._held

    def finish(self) -> tuple[str, str]:
        """Return the rest, after the last text of the reply."""
        held = "" if self._state == "answer" else self._held
        self._held = ""
        if self.is_inside:
            return held.rstrip(), ""
        return "", "" if self._state == "gap" and self._has_reasoning else held

    def _start(self) -> None:
        """Leave the state "start" as soon as it is certain how the reply begins."""
        text = self._held.lstrip()
        if text.startswith(BEGIN):
            self._held, self._has_reasoning, self._state = text[len(BEGIN) :], True, "reasoning"
        elif not BEGIN.startswith(text):
            self._has_reasoning = self._is_open
            self._held, self._state = (text, "reasoning") if self._is_open else (self._held, "gap")

    def _reasoning(self) -> str:
        """The reasoning that no later text can change; its last white space is held back, and left out at the end."""
        if not self._has_begun:
            self._held = self._held.lstrip()
        place = self._held.find(END)
        if place >= 0:
            reasoning, self._held, self._state = self._held[:place].rstrip(), self._held[place + len(END) :], "gap"
            return reasoning
        mark = self._call_mark
        place = self._held.find(mark) if mark else -1
        if place < 0:
            place = len(self._held) - max(begun_length(self._held, END), begun_length(self._held, mark))
        certain = self._held[:place].rstrip()
        self._held = self._held[len(certain) :]
        self._has_begun = self._has_begun or bool(certain)
        return certain
