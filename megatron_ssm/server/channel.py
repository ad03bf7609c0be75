"""Messages from rank 0 to the other ranks before each step of their engines."""

import json
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from megatron_ssm.engine.grammar import Grammar
from megatron_ssm.engine.options import GenerationOptions
from megatron_ssm.parallel.ranks import Ranks

LENGTH_BYTES = 8  # the size of the number that holds a message's length


@dataclass(frozen=True)
class Commands:
    """The changes before a step, the same on every rank.

    Args:
        additions: The prompts and the options of new requests, in their order.
        cancellations: The ids of requests.
        grammars: Grammars to compile. The request of each is added in a later turn, once rank 0 has
            compiled the grammar.
        dropped: Grammars of earlier turns that are not needed, because their requests will not be added.
        is_last: True if this is the last turn.
    """

    additions: tuple[tuple[list[int], GenerationOptions], ...] = ()
    cancellations: tuple[int, ...] = ()
    grammars: tuple[Grammar, ...] = ()
    dropped: tuple[Grammar, ...] = ()
    is_last: bool = False

    def encode(self) -> bytes:
        """The message to the other ranks: JSON, or no bytes if nothing changes."""
        if self == Commands():
            return b""
        added = [(prompt, asdict(options)) for prompt, options in self.additions]
        compile, drop = (list(map(asdict, grammars)) for grammars in (self.grammars, self.dropped))
        values = {"add": added, "cancel": self.cancellations, "compile": compile, "drop": drop}
        return json.dumps({**values, "last": self.is_last}).encode()

    @classmethod
    def decode(cls, message: bytes) -> "Commands":
        """The commands in a message."""
        if not message:
            return cls()
        values = json.loads(message)
        grammars, dropped = (tuple(Grammar.unchecked(**each) for each in values[name]) for name in ("compile", "drop"))
        added = tuple((prompt, GenerationOptions.from_json(options)) for prompt, options in values["add"])
        return cls(added, tuple(values["cancel"]), grammars, dropped, values["last"])


class Channel:
    """Sends messages from rank 0 to the other ranks of the model. All ranks construct it together, and each uses it in one
    thread only.

    A message is sent as its length and, unless that is 0, its bytes. While the engines are busy, the length goes through the
    ranks' shared memory, if they have any, in microseconds. Otherwise it is broadcast by gloo, where a waiting rank does not
    use its processor. sent: the number of bytes that rank 0 has sent to all other ranks together.
    """

    def __init__(self, ranks: Ranks):
        self.sent = 0
        self._rank, self._memory, self._group, self._others = ranks.rank, ranks.memory, ranks.group, ranks.size - 1
        if self._group is not None and dist.get_backend(self._group) != "gloo":
            self._group = dist.new_group(dist.get_process_group_ranks(self._group), backend="gloo")

    def send(self, message: bytes, is_busy: bool) -> None:
        """Send a message from rank 0. is_busy: `Engine.is_busy`, which is the same on all ranks."""
        if self._group is not None:
            length = self._length(len(message), is_busy)
            self.sent += self._others * (LENGTH_BYTES + length)
            if message:
                dist.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), group=self._group, group_src=0)

    def receive(self, is_busy: bool) -> bytes:
        """Receive a message on another rank. RuntimeError if rank 0 has died, or has sent nothing within the group's
        time-out.
        """
        buffer = torch.empty(self._length(0, is_busy), dtype=torch.uint8)
        if len(buffer):
            dist.broadcast(buffer, group=self._group, group_src=0)
        return buffer.numpy().tobytes()

    def _length(self, length: int, is_busy: bool) -> int:
        """Rank 0's `length`, on every rank."""
        tensor = torch.tensor([length])  # int64, LENGTH_BYTES
        if is_busy and self._memory is not None:
            return int(self._memory.all_gather(tensor)[0])
        dist.broadcast(tensor, group=self._group, group_src=0)
        return int(tensor)
