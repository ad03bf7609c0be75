"""Chat templates. Oracle: transformers' apply_chat_template."""

import json

import pytest
from transformers import AutoTokenizer

from megatron_ssm.engine.text import load_tokenizer, write_byte_tokenizer
from megatron_ssm.server.chat_template import ChatTemplate
from megatron_ssm.server.errors import ApiError

CHATS = [
    [{"role": "user", "content": "Hi <b>&\n"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "naïve — 語"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "and?"},
    ],
]
TEMPLATES = {
    "chatml": """{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}""",
    "special tokens": "{{ bos_token }}{% for m in messages %}{{ m.content | trim }}{{ eos_token }}{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ {'z': 1, 'a': '<é>'} | tojson(indent=2, sort_keys=True) }}",
    "date": "{{ strftime_now('%Y') }}{{ messages[0].content }}",
    "namespace and loop controls": """{% set ns = namespace(found=false) %}
{% for message in messages %}
{% if message.role == 'system' %}{% set ns.found = true %}{% continue %}{% endif %}
{{ message.content }}
{% if loop.index > 2 %}{% break %}{% endif %}
{% endfor %}
{{ ns.found }}{{ tools is none }}{{ documents is none }}""",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
}


@pytest.fixture
def directory(tmp_path):
    write_byte_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mamba2"}')
    return tmp_path


def configure(directory, **fields):
    """Change fields of tokenizer_config.json."""
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


PLACES = ("tokenizer_config.json", "a list of templates", "an object of templates", "chat_template.jinja")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers(directory, name, place):
    template = TEMPLATES[name]
    configure(directory, eos_token={"content": "<|endoftext|>", "special": True, "__type": "AddedToken"})
    if place == "chat_template.jinja":
        (directory / place).write_text(template)
    else:
        several = {"tool_use": "no", "default": template}
        named = [{"name": name, "template": text} for name, text in several.items()]
        written = {"a list of templates": named, "an object of templates": several}.get(place, template)
        configure(directory, chat_template=written)
    ours, theirs = ChatTemplate(directory), AutoTokenizer.from_pretrained(directory)
    for chat in CHATS:
        text = ours.render(chat)
        assert text == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert load_tokenizer(directory).encode(text, add_special_tokens=False).ids == ids


def test_special_tokens_of_other_files(directory):
    """The names that special_tokens_map.json, extra_special_tokens and the class of the tokenizer give to tokens."""
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}{{ image_token }}{{ boi_token }}"
    (directory / "chat_template.jinja").write_text(template)
    older = dict(eos_token=dict(content="<|im_end|>", lstrip=False, normalized=False, rstrip=False, single_word=False))
    (directory / "special_tokens_map.json").write_text(json.dumps(older | dict(image_token="<image>")))
    extra = dict(extra_special_tokens=dict(boi_token="<boi>"))
    for config in (extra, extra | dict(tokenizer_class="GPTNeoXTokenizerFast")):
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        theirs = AutoTokenizer.from_pretrained(directory)
        text = ChatTemplate(directory).render(CHATS[0])
        assert text == theirs.apply_chat_template(CHATS[0], tokenize=False, add_generation_prompt=True)
        assert "<|im_end|>" in text and "<image><boi>" in text


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses the messages: roles must alternate"),
        ("{{ messages[0].content + 1 }}", "refuses the messages: "),
        ("{{ messages.append(1) }}", "refuses the messages: .*unsafe"),  # the sandbox
        ("{{ messages.__class__.__mro__ }}", "refuses the messages: .*unsafe"),
    ],
)
def test_a_refusal_is_a_bad_request(directory, template, message):
    configure(directory, chat_template=template)
    with pytest.raises(ApiError, match=message) as refused:
        ChatTemplate(directory).render(CHATS[0])
    assert refused.value.status == 400


NAMED = [{"name": "tool_use", "template": ""}]


@pytest.mark.parametrize("fields", ({}, {"chat_template": None}, {"chat_template": NAMED}))
def test_there_may_be_no_template(directory, fields):
    configure(directory, **fields)
    template = ChatTemplate(directory)
    assert template.path is None
    with pytest.raises(ApiError, match="the model has no chat template") as refused:
        template.render(CHATS[0])
    assert refused.value.status == 400


def test_a_template_that_is_not_valid_is_named(directory):
    configure(directory, chat_template="{% for %}")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: the chat template is not valid: "):
        ChatTemplate(directory)
    (directory / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not a JSON object"):
        ChatTemplate(directory)


@pytest.mark.parametrize("template", ([{"nam": "x"}], [{"name": "default", "template": None}], ["abc"], 5, {"a": 1}))
def test_a_field_that_is_no_template_is_named(directory, template):
    configure(directory, chat_template=template)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: chat_template must be a text, or a list of objects"):
        ChatTemplate(directory)


def test_a_template_that_is_not_utf_8_is_named(directory):
    (directory / "chat_template.jinja").write_bytes("é".encode("latin-1"))
    with pytest.raises(ValueError, match=r"chat_template\.jinja is not a text in UTF-8"):
        ChatTemplate(directory)


NESTED_LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "expensive, limit",
    [
        ("{{ 'a' * 10**10 }}", "MB"),
        ("{{ messages[0].content | center(10**10) }}", "MB"),
        ("{% set ns = namespace(a='a') %}{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}", "MB"),
        (NESTED_LOOPS, "s of processor time"),
    ],
)
def test_a_template_that_takes_too_much_is_a_bad_request(directory, expensive, limit):
    """It takes seconds at most, and the next request is answered."""
    configure(directory, chat_template="{% if messages | length > 1 %}" + expensive + "{% endif %}ok")
    template = ChatTemplate(directory)
    with pytest.raises(ApiError, match=f"refuses the messages: it takes more than [0-9]+ {limit}") as refused:
        template.render(CHATS[1])
    assert refused.value.status == 400 and template.render(CHATS[0]) == "ok"


@pytest.mark.parametrize(
    "template",
    [
        "{{" + "(" * 3000 + "1" + ")" * 3000 + "}}",
        "{% if true %}" * 3000 + "{% endif %}" * 3000,
        "{% for i in [1] %}" * 30 + "{% endfor %}" * 30,
        "a" * (10**6 + 1),
    ],
    ids=["brackets", "conditions", "loops", "long"],
)
def test_a_template_that_is_too_large_is_named(directory, template):
    configure(directory, chat_template=template)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: the chat template ") as caught:
        ChatTemplate(directory)
    assert len(str(caught.value)) < 1000
