"""Requests to /v1/embeddings: texts as sequences of the engine that end with their prompts, and the reply."""

import base64
import struct
from collections.abc import Sequence as Vectors
from dataclasses import dataclass

from megatron_ssm.engine.options import GenerationOptions

from .errors import bad_request
from .prepared_request import ServedModel, read_prompt, too_many
from .reply_models import EmbeddingObject, EmbeddingReply, EmbeddingUsage
from .request_models import EmbeddingRequest, parse_body
from .sequences import Sequence


@dataclass(frozen=True)
class PreparedEmbeddings:
    """A request that was checked, and its sequences, one for each text."""

    body: EmbeddingRequest
    sequences: list[Sequence]

    def reply(self, vectors: Vectors[list[float]], served: ServedModel) -> EmbeddingReply:
        """Return the reply with the vectors of the texts, in their order."""
        encode = _base64 if self.body.encoding_format == "base64" else list
        data = [
            EmbeddingObject(object="embedding", index=i, embedding=encode(vector)) for i, vector in enumerate(vectors)
        ]
        tokens = sum(len(sequence.prompt) for sequence in self.sequences)
        usage = EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)
        return EmbeddingReply(object="list", data=data, model=self.body.model or served.name, usage=usage)


def prepare_embeddings(text: bytes | str, served: ServedModel) -> PreparedEmbeddings:
    """Check a request, given as JSON, and tokenize its texts. ApiError 400, or 404 for another model."""
    body = parse_body(EmbeddingRequest, text)
    adapter = served.adapter_of(body.model)
    if body.dimensions not in (None, served.hidden_size):
        rule = f"it must be the model's hidden size, {served.hidden_size}"
        raise bad_request(f"dimensions={body.dimensions} is not implemented: {rule}", "dimensions")
    prompts = [read_prompt(prompt, served, "input") for prompt in body.prompts]
    if not all(prompts):
        raise bad_request("a text has no tokens", "input")
    longest = max(map(len, prompts))
    if longest > served.max_length:
        raise too_many(longest, "input", served.max_length)
    options = GenerationOptions(max_new_tokens=1, seed=0, pooling=body.pooling, adapter=adapter)
    return PreparedEmbeddings(body, [Sequence(ids, options, i) for i, ids in enumerate(prompts)])


def _base64(vector: list[float]) -> str:
    """The numbers as float32, in little-endian order."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
