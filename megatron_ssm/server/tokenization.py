"""Texts and conversations as token ids, and back: the endpoints /tokenize and /detokenize, in the shapes of vLLM."""

from .errors import bad_request
from .prepared_request import ServedModel, chat_text
from .reply_models import DetokenizeReply, TokenizeReply
from .request_models import DetokenizeRequest, TokenizeRequest, parse_body


def tokenize(text: bytes | str, served: ServedModel) -> TokenizeReply:
    """Return the ids of the text or the conversation in a body. ApiError 400, or 404 for another model."""
    body = parse_body(TokenizeRequest, text)
    served.adapter_of(body.model)
    if (body.prompt is None) == (not body.messages):
        raise bad_request("give one of prompt and messages", "prompt")
    is_text = body.prompt is not None
    prompt = body.prompt if body.prompt is not None else chat_text(body, served)
    adds_special = is_text if body.add_special_tokens is None else body.add_special_tokens
    ids = served.tokenizer.encode_batch([prompt], add_special_tokens=adds_special)[0].ids
    names = [served.tokenizer.id_to_token(token) or "" for token in ids] if body.return_token_strs else None
    return TokenizeReply(count=len(ids), max_model_len=served.max_length, tokens=ids, token_strs=names)


def detokenize(text: bytes | str, served: ServedModel) -> DetokenizeReply:
    """Return the text of the ids in a body, with special tokens. ApiError 400, or 404 for another model."""
    body = parse_body(DetokenizeRequest, text)
    served.adapter_of(body.model)
    served.check_ids(body.tokens, "tokens")
    return DetokenizeReply(prompt=served.tokenizer.decode_batch([body.tokens], skip_special_tokens=False)[0])
