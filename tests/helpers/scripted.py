"""A chat model that says a script, for clients that need sensible replies."""

import json

import torch
from tokenizers import pre_tokenizers

from megatron_ssm.engine.text import BYTE_END_OF_TEXT_ID, END_OF_TEXT, write_byte_tokenizer
from serving import save_table

# A prompt ends with 2 for each result of a tool that contains RESULT, or with 1 if there is none.
TEMPLATE = (
    "{# <tool_call> #}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% for m in messages if m.role == 'tool' and RESULT in m.content %}2{% else %}1{% endfor %}"
)


def save_script(directory, call, result, answer):
    """Save a model that calls a tool until a tool's result contains a text, and then answers.

    call: (name of the tool, its arguments). answer: the text of the answer.

    Each of the two replies is one token, and the model's next token depends on the last one only.
    """
    name, arguments = call
    called = f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    tokens = {END_OF_TEXT: BYTE_END_OF_TEXT_ID, called: BYTE_END_OF_TEXT_ID + 1, answer: BYTE_END_OF_TEXT_ID + 2}
    table = torch.zeros(BYTE_END_OF_TEXT_ID + 3, BYTE_END_OF_TEXT_ID + 3)
    table[:, tokens[END_OF_TEXT]] = 100
    table[ord("1"), tokens[called]] = table[ord("2"), tokens[answer]] = 200
    save_table(directory, table, hidden_size=288, head_dim=72)

    write_byte_tokenizer(directory)
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # writes each byte as a character
    tokenizer["model"]["vocab"] |= {level.pre_tokenize_str(text)[0][0]: token for text, token in tokens.items()}
    path.write_text(json.dumps(tokenizer))
    (directory / "chat_template.jinja").write_text(TEMPLATE.replace("RESULT", json.dumps(result)))
