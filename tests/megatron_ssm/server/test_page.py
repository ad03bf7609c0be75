"""The chat page, on real servers in headless Chromium. Oracle: the text that a model repeats forever; recorded replies.

The tests are skipped without playwright or Chromium, and fail instead where CI is true.
"""

import json
import os
import random
import re
import shutil
import signal

import httpx
import pytest
import torch

from megatron_ssm.engine.text import write_byte_tokenizer
from servers import LIMIT_S, TEMPLATE, server
from serving import VOCAB, save_table

TEXT = "<img src=q>"  # 11 tokens, none of which occurs twice
KEY = "sk-of-the-page"
PHONE = dict(viewport={"width": 360, "height": 640}, is_mobile=True, has_touch=True)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """The checkpoint, without a chat template and with one: each character of TEXT is followed by the next one."""
    plain = tmp_path_factory.mktemp("page") / "plain"
    table = torch.zeros(VOCAB, VOCAB)
    table[:, ord(TEXT[0])] = 100
    for character, following in zip(TEXT, TEXT[1:], strict=False):
        table[ord(character)] = 0
        table[ord(character), ord(following)] = 100
    save_table(plain, table, hidden_size=288, head_dim=72)
    write_byte_tokenizer(plain)
    chat = shutil.copytree(plain, plain.with_name("chat"))
    (chat / "chat_template.jinja").write_text(TEMPLATE)
    return plain, chat


@pytest.fixture(scope="module")
def running(directories, tmp_path_factory):
    """A server of chats, whose replies may be endless."""
    with server(directories[1], tmp_path_factory.mktemp("server") / "log", "--max-length", 10**6) as running:
        yield running


@pytest.fixture(scope="module")
def browser():
    """Chromium, started once."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if os.environ.get("CI") != "true":
        pytest.importorskip("playwright.sync_api", reason="there is no package playwright")
        if program is None:
            pytest.skip("there is no Chromium: apt-get install chromium")
    from playwright import sync_api

    assert program, "there is no Chromium: apt-get install chromium"
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """open_page(url, **options of the browser's context): a tab that shows the page there."""
    contexts = []

    def visit(url, **options):
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(1000 * LIMIT_S)
        page.goto(url)
        return page

    yield visit
    for context in contexts:
        context.close()


def send(page, text, longest=11):
    """Type a message and send it. longest: tokens of the reply."""
    page.locator("#longest").evaluate("(field, value) => { field.value = value; }", longest)
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")


def replies(page):
    """The texts of the replies, when none is being written."""
    page.locator("#stop").wait_for(state="hidden")
    return page.locator(".assistant .text").all_text_contents()


def answer_with(page, *deltas):
    """Let the server's replies be recorded events, with a comment in between."""
    events = [f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}" for delta in deltas]
    body = "\n\n".join([": ping", *events, "data: [DONE]", "", ""])
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))


def wait_for(page, element, text):
    """Wait until the element with this id shows the text."""
    page.locator(f"#{element}", has_text=text).wait_for()


def begin_endless(page, text):
    """Send a message, and wait until the reply grows."""
    send(page, text, 500_000)
    written = page.locator(".assistant[aria-busy=true] .text")
    written.filter(has_text=TEXT).wait_for()
    length = len(written.text_content())
    written.filter(has_text=re.compile(f".{{{length + 1}}}")).wait_for()
    assert page.locator("#stop").is_visible()


def test_the_page_loads_nothing_from_elsewhere(running):
    reply = httpx.get(running.url)
    assert reply.status_code == 200 and reply.headers["content-type"] == "text/html; charset=utf-8"
    policy = reply.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
    assert set(re.findall(r'(?:href|src)="?([^">]*)', reply.text)) == {"data:,"} and "://" not in reply.text
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\son\w+=", reply.text)
    described = httpx.get(running.url + "/v1/models").json()["data"][0]
    assert (
        described["has_chat_template"] is True
        and described["has_reasoning"] is True
        and described["max_model_len"] == 10**6
    )


def test_a_conversation(running, open_page):
    """All texts stay texts, and each request has the conversation so far."""
    page, problems = open_page(running.url), []
    page.on("console", lambda message: problems.append(message.text) if message.type in ("warning", "error") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.reload()
    wait_for(page, "model", "chat")
    message = "Hello <b onclick=x>there</b>\n& \N{SNOWMAN}"
    send(page, message)
    assert replies(page) == [TEXT]
    wait_for(page, "notice", "The reply has reached its longest length.")
    with page.expect_request("**/v1/chat/completions") as request:
        send(page, "again")
    assert replies(page) == [TEXT] * 2
    assert request.value.post_data_json["messages"] == [
        {"role": "user", "content": message}, {"role": "assistant", "content": TEXT}, {"role": "user", "content": "again"}
    ]  # fmt: skip
    assert page.locator(".user .text").all_text_contents() == [message, "again"]
    assert page.locator("#conversation").evaluate("log => log.querySelectorAll('b, img').length") == 0
    assert (
        page.evaluate("document.activeElement.id") == "message"
        and page.get_by_label("Your message").input_value() == ""
    )
    page.get_by_role("button", name="New conversation").click()
    with page.expect_request("**/v1/chat/completions") as request:
        send(page, "anew")
    assert len(request.value.post_data_json["messages"]) == 1 and replies(page) == [TEXT]
    assert not problems


def test_messages_wait_for_the_reply(running, open_page):
    """Those written while a reply streams are sent after it, in their order; if it is stopped, they come back."""
    page = open_page(running.url)
    begin_endless(page, "first")
    send(page, "second")
    send(page, "third")
    assert page.locator(".waiting .text").all_text_contents() == ["second", "third"]
    page.keyboard.press("Escape")
    running.wait_until_idle()
    page.locator(".waiting").first.wait_for(state="detached")
    assert page.get_by_label("Your message").input_value() == "second\nthird"
    send(page, "one", 2000)
    send(page, "two", 11)
    send(page, "three", 11)
    page.locator(".assistant").nth(3).wait_for()
    assert list(map(len, replies(page)[1:])) == [2000, 11, 11]
    assert page.locator(".user .text").all_text_contents() == ["first", "one", "two", "three"]


def test_settings_reach_the_model(running, open_page):
    """The system prompt and the sampling; the speed is shown, and a reply can be copied."""
    page = open_page(running.url, permissions=["clipboard-read", "clipboard-write"])
    page.get_by_text("Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Top p").fill("0.5")
    with page.expect_request("**/v1/chat/completions") as request:
        send(page, "Hello")
    assert replies(page) == [TEXT]
    sent = request.value.post_data_json
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."} and sent["top_p"] == 0.5
    page.get_by_role("button", name="Copy").click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == TEXT
    send(page, "More", 500)
    wait_for(page, "notice", re.compile(r"500 tokens, [\d.]+ per second"))


def test_only_settings_that_were_changed_are_sent(running, directories, tmp_path, open_page):
    """Chats have no limit by default; a text without a chat template has one of 256 tokens."""
    page, sent = open_page(running.url), []
    page.on("request", lambda request: request.method == "POST" and sent.append(request.post_data_json))
    answer_with(page, {"content": "Hello!"})
    send(page, "Hi", "")
    assert replies(page) == ["Hello!"] and sent[-1].keys() == {"messages", "stream", "stream_options"}
    page.get_by_text("Settings").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Thinking").select_option("off")
    send(page, "Hi", 30)
    assert len(replies(page)) == 2 and sent[-1].keys() == {
        "messages", "stream", "stream_options", "temperature", "max_tokens", "chat_template_kwargs"
    }  # fmt: skip
    assert sent[-1]["temperature"] == 0 and sent[-1]["chat_template_kwargs"] == {"enable_thinking": False}
    with server(directories[0], tmp_path / "log") as plain:
        page = open_page(plain.url)
        page.on("request", lambda request: request.method == "POST" and sent.append(request.post_data_json))
        page.get_by_text("Settings").click()
        assert not page.get_by_label("Thinking").is_visible()
        page.get_by_role("button", name="Once upon a time").click()
        assert len(replies(page)[0]) == 256
    assert sent[-1].keys() == {"prompt", "stream", "stream_options", "max_tokens"}


def test_reasoning_is_open_while_it_streams(running, open_page):
    """Unless the reader closes it. A reply that ends in it says so, and is kept as it was over a reload."""
    page = open_page(running.url)
    page.get_by_text("Settings").click()
    page.get_by_label("Thinking").select_option("on")
    send(page, "Think", 100_000)
    thoughts = page.locator(".thoughts")
    thoughts.filter(has_text=TEXT).wait_for()
    assert thoughts.is_visible()
    page.get_by_text("Reasoning").click()
    length = len(thoughts.text_content())
    thoughts.filter(has_text=re.compile(f".{{{length + 1}}}")).wait_for(state="attached")
    assert not thoughts.is_visible()
    page.keyboard.press("Escape")
    assert replies(page) == [""]
    page.get_by_text("The reply ended within the reasoning, before an answer.").wait_for()
    length = len(thoughts.text_content())
    page.reload()
    assert replies(page) == [""] and len(thoughts.text_content()) == length and thoughts.is_visible()


def test_reasoning_is_folded(running, open_page):
    """When the answer has begun."""
    page = open_page(running.url)
    answer_with(page, {"reasoning_content": "Two and "}, {"reasoning_content": "two."}, {"content": "Four."})
    send(page, "2 + 2?")
    assert replies(page) == ["Four."]
    assert page.locator(".thoughts").text_content() == "Two and two." and not page.locator(".thoughts").is_visible()
    page.get_by_text("Reasoning").click()
    assert page.locator(".thoughts").is_visible()


def test_the_last_reply_is_regenerated(running, open_page):
    """If that fails, the reply stays."""
    page = open_page(running.url)
    for text in ("one", "two"):
        send(page, text)
        replies(page)
    again = page.get_by_role("button", name="Regenerate")
    assert again.count() == 1
    page.locator("#longest").evaluate("field => { field.value = 22; }")
    with page.expect_request("**/v1/chat/completions") as request:
        again.click()
    assert replies(page) == [TEXT, TEXT * 2] and page.locator(".user .text").all_text_contents() == ["one", "two"]
    assert [message["content"] for message in request.value.post_data_json["messages"]] == ["one", TEXT, "two"]
    page.route("**/v1/chat/completions", lambda route: route.abort())
    again.click()
    wait_for(page, "error", "The connection to the server is broken.")
    assert replies(page) == [TEXT, TEXT * 2] and page.get_by_label("Your message").input_value() == ""
    page.unroute("**/v1/chat/completions")
    send(page, "three")
    assert replies(page) == [TEXT, TEXT * 2, TEXT]


def test_an_earlier_message_is_edited(running, open_page):
    """Its new text replaces it and what follows; Escape cancels."""
    page = open_page(running.url)
    for text in ("one", "two"):
        send(page, text)
        replies(page)
    field = page.get_by_label("Your message")
    field.fill("a draft")
    page.get_by_role("button", name="Edit").nth(1).click()
    assert field.input_value() == "two"
    page.keyboard.press("Escape")
    assert field.input_value() == "a draft" and replies(page) == [TEXT] * 2
    page.get_by_role("button", name="Edit").first.click()
    with page.expect_request("**/v1/chat/completions") as request:
        send(page, "un")
    assert replies(page) == [TEXT] and page.locator(".user .text").all_text_contents() == ["un"]
    assert len(request.value.post_data_json["messages"]) == 1 and field.input_value() == "a draft"
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.get_by_role("button", name="Edit").click()
    send(page, "eins")
    wait_for(page, "error", "The connection to the server is broken.")
    assert replies(page) == [TEXT] and page.locator(".user .text").all_text_contents() == ["un"]
    assert field.input_value() == "eins\na draft"


def test_a_conversation_survives_a_reload(running, open_page):
    """Also while a reply streams; the key does not. A new conversation deletes it."""
    page = open_page(running.url)
    page.get_by_text("Settings").click()
    page.get_by_label("API key").fill(KEY)
    send(page, "one")
    assert replies(page) == [TEXT]
    begin_endless(page, "two")
    page.reload()
    running.wait_until_idle()
    assert page.locator(".user .text").all_text_contents() == ["one", "two"]
    first, second = replies(page)
    assert first == TEXT and len(second) > 11 and set(second) == set(TEXT)
    stored = page.evaluate("JSON.stringify([{...sessionStorage}, {...localStorage}, document.cookie])")
    assert "two" in stored and KEY not in stored
    with page.expect_request("**/v1/chat/completions") as request:
        send(page, "three")
    assert len(request.value.post_data_json["messages"]) == 5 and len(replies(page)) == 3
    page.get_by_role("button", name="New conversation").click()
    assert page.evaluate("sessionStorage.turns") == "[]"
    page.reload()
    assert replies(page) == [] and page.locator("#greeting").is_visible()


MARKDOWN = """\
## A *title*

Some **bold**, `a * b`, snake_case, 2*3*4, a [link](https://example.org/a_(b)_c) and https://example.org/_x_.
![picture](http://example.org/p.png) in the next line.

```python
def f(x):
    return "<b>" * x
```

1. one
   - nested

     more
2. two

| a | b \\| c |
|---|:-:|
| `1` | 2 |

> quoted
> - item

---
3. three
\\*text\\* ~~gone~~ ***both***
"""
RENDERED = (
    "<h3>A <em>title</em></h3><p>Some <strong>bold</strong>, <code>a * b</code>, snake_case, 2*3*4, a "
    '<a href="https://example.org/a_(b)_c" NEW>link</a> and <a href="https://example.org/_x_" NEW>https://example.org/_x_</a>.'
    '\n<a href="http://example.org/p.png" NEW>picture</a> in the next line.</p>'
    '<div><div>python<button>Copy</button></div><pre><code>def f(x):\n    return "&lt;b&gt;" * x</code></pre></div>'
    '<ol start="1"><li><p>one</p><ul><li><p>nested</p><p>more</p></li></ul></li><li><p>two</p></li></ol>'
    "<div><table><tr><th>a</th><th>b | c</th></tr><tr><td><code>1</code></td><td>2</td></tr></table></div>"
    '<blockquote><p>quoted</p><ul><li><p>item</p></li></ul></blockquote><hr><ol start="3"><li><p>three</p></li></ol>'
    "<p>*text* <del>gone</del> <strong>both</strong></p>"
).replace("NEW", 'target="_blank" rel="noopener noreferrer"')


def test_markdown(running, open_page):
    """As it streams and at its end. The server and the clipboard get the text that the model has written."""
    page = open_page(running.url, permissions=["clipboard-read", "clipboard-write"])
    answer_with(page, {"content": MARKDOWN[:99]}, {"content": MARKDOWN[99:]})
    send(page, "Write")
    replies(page)
    shown = page.locator(".assistant .text").inner_html()
    assert re.sub(r' (class="[^"]*"|type="button")', "", shown) == RENDERED
    streamed = """text => {
        const turn = show("assistant");
        for (const character of text) { turn.content += character; draw(turn); }
        const streamed = turn.node.querySelector(".text").innerHTML;
        turn.node.remove();
        return streamed;
    }"""
    assert page.evaluate(streamed, MARKDOWN) == shown
    page.locator(".bar").get_by_role("button", name="Copy").click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == 'def f(x):\n    return "<b>" * x'
    page.get_by_role("button", name="Copy", exact=True).click()
    page.get_by_role("button", name="Copied").nth(1).wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == MARKDOWN
    with page.expect_request("**/v1/chat/completions") as request:
        send(page, "And?")
    assert request.value.post_data_json["messages"][1] == {"role": "assistant", "content": MARKDOWN}


HOSTILE = """\
<script>alert(1)</script><img src=x onerror=alert(1)> [a](javascript:alert(1)) [b](data:text/html,<script>alert(1)</script>)
![c](javascript:alert(1)) <a href="javascript:alert(1)">d</a> [e]( javascript:alert(1)) [f](java
script:alert(1)) <svg/onload=alert(1)> <javascript:alert(1)> [g](vbscript:x) [h](//example.org) [i](file:///etc/passwd)

```"><img src=x onerror=alert(1)>
</code></pre><script>alert(1)</script>
```
"""


def test_html_in_replies_is_text(running, open_page):
    """Nothing runs, loads, or becomes a link."""
    page, problems = open_page(running.url), []
    page.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: "completions" in request.url or problems.append(request.url))
    page.on("console", lambda message: problems.append(message.text))
    answer_with(page, {"reasoning_content": HOSTILE}, {"content": HOSTILE})
    send(page, HOSTILE)
    (text,) = replies(page)
    assert text.count("<script>alert(1)</script>") == HOSTILE.count("<script>alert(1)</script>") and "onload" in text
    assert page.locator("#conversation :is(a, img, script, svg, iframe)").count() == 0
    assert not problems


# Returns what is wrong with how texts are rendered: errors, elements, attributes, and letters that are lost.
CHECK = """texts => {
    const elements = /^(div|pre|code|button|p|h[2-6]|hr|[uo]l|li|blockquote|table|t[rhd]|em|strong|del|a)$/;
    const attributes = {
        class: /^[a-z]*$/, start: /^[0-9]+$/, type: /^button$/,
        href: /^https?:/i, target: /^_blank$/, rel: /^noopener noreferrer$/,
    };
    const letters = text => text.replace(/[^a-z]/gi, "");
    const isFine = each =>
        elements.test(each.localName) && [...each.attributes].every(at => attributes[at.name]?.test(at.value));
    return texts.filter(text => {
        const place = document.createElement("div");
        blocks(text.split("\\n"), place);
        const isAllowed = [...place.querySelectorAll("*")].every(isFine) && !place.querySelector("a a");
        for (const button of place.querySelectorAll("button")) button.remove();
        for (const link of place.querySelectorAll("a")) {  // its address is in its text or in href
            if (link.textContent !== link.getAttribute("href")) link.append(link.getAttribute("href"));
        }
        return !isAllowed || letters(place.textContent) !== letters(text);
    }).map(text => text.slice(0, 200));
}"""
MARKS = """* ** *** _ __ ~~ ` `` ``` ~~~ # ## > >> - + 1. 23) | |-| --- :-: \\ \\| ! [ ] ( ) ]( ![ [a]( http:// https://b.c/d
HTTPS:// javascript: <script> </script> <img onerror=e> <a href=x> &lt; &#106; { } = : ; . , e fg hij""".split()
SPACES = " |  |    |\n|\n\n|\n- |\n> |\n```\n|\t|\r\n|\0|\N{LINE SEPARATOR}|\N{ZERO WIDTH SPACE}\N{SNOWMAN}".split("|")
TOKENS = [*MARKS, *SPACES, "\n| a | b |\n|---|---|\n"]
REPEATED = [
    "*a ",
    "**a *b ",
    "_a*b",
    "`a``",
    "[a](http://b",
    "[a](http://b(",
    "- - ",
    "> - ",
    "\n  - a",
    "a|",
    "\n|-|-|",
]


def test_the_parser_takes_any_text(running, open_page):
    """Random texts of marks, from a fixed seed; and long ones, for which quadratic time would be minutes."""
    page, chosen = open_page(running.url), random.Random(92)
    texts = ["".join(chosen.choices(TOKENS, k=chosen.randint(1, 40))) for _ in range(4000)]
    assert page.evaluate(CHECK, texts) == []
    assert page.evaluate(CHECK, [token * (60_000 // len(token)) for token in [*TOKENS, *REPEATED]]) == []


@pytest.mark.parametrize("width", (1280, 400))
def test_the_page_at_two_widths(running, open_page, width):
    """An example leads to a reply. Wide code and tables scroll within themselves; the rest fits."""
    page = open_page(running.url, viewport={"width": width, "height": 800})
    code, table = "x = " + "1 + " * 100, " | ".join(["cell"] * 40)
    answer_with(page, {"content": f"```\n{code}\n```\n{table}\n{'|'.join(['---'] * 40)}\n{table}\n\n{'o' * 300}"})
    page.locator("#examples button").nth(3).wait_for()
    boxes = [page.locator("#examples button").nth(i).bounding_box() for i in range(4)]
    assert all(0 <= box["x"] and box["x"] + box["width"] <= width for box in boxes)
    page.locator("#examples button").first.click()
    assert len(replies(page)) == 1 and not page.locator("#greeting").is_visible()
    page.get_by_text("Settings").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for wide in (".text pre", ".text .table", "#conversation"):
        inside, outside = page.locator(wide).evaluate("e => [e.scrollWidth, e.clientWidth]")
        assert inside == outside if wide == "#conversation" else inside > outside
    for name in ("Send", "New conversation", "Regenerate", "Edit"):
        box = page.get_by_role("button", name=name).bounding_box()
        assert 0 <= box["x"] and box["x"] + box["width"] <= width


def test_the_end_stays_in_sight(running, open_page):
    """While replies grow above messages that wait, and when a reply is complete."""
    page = open_page(running.url, permissions=["clipboard-read", "clipboard-write"])
    hidden = "log => log.scrollHeight - log.scrollTop - log.clientHeight"
    for text in ("one", "two", "three"):
        send(page, text, 1000)
    page.locator(".assistant .text").nth(1).filter(has_text=re.compile(".{500}")).wait_for()
    assert page.locator("#conversation").evaluate(hidden) < 40
    page.locator(".copy").nth(2).wait_for()
    assert page.locator("#conversation").evaluate(hidden) < 2


@pytest.mark.parametrize(
    "stop", (lambda page: page.locator("#stop").click(), lambda page: page.keyboard.press("Escape"))
)
def test_a_reply_streams_until_it_is_stopped(running, open_page, stop):
    """Its slot is free then, and the conversation goes on."""
    page = open_page(running.url)
    begin_endless(page, "Go on")
    assert running.metric("running") == 1
    stop(page)
    running.wait_until_idle()
    (text,) = replies(page)
    assert 3 < len(text) < 400_000 and text == (TEXT * (len(text) // len(TEXT) + 1))[: len(text)]
    wait_for(page, "notice", "The reply was stopped.")
    send(page, "And now?")
    assert replies(page) == [text, TEXT]


def test_errors_in_plain_words(directories, tmp_path, open_page):
    """A missing key, a busy server, a long conversation, an interrupted server, and none. Messages are not lost."""
    (tmp_path / "keys").write_text(KEY)
    flags = ["--api-key-file", tmp_path / "keys", "--slots", 1, "--max-waiting", 0, "--max-length", 10**6]
    with server(directories[0], tmp_path / "log", *flags, key=KEY) as running, running.client() as client:
        page = open_page(running.url)
        wait_for(page, "error", "This server needs a valid API key: enter it under Settings.")
        for key in ("wrong", "wröng"):
            page.get_by_label("API key").fill(key)
            send(page, "Hi!")
            wait_for(page, "error", "API key" if key == "wrong" else "contains characters that no key has")
            assert replies(page) == [] and page.get_by_label("Your message").input_value() == "Hi!"
        page.get_by_label("API key").fill(KEY)
        send(page, "Hi!")
        assert replies(page) == [TEXT] and page.locator("#error").text_content() == ""

        send(page, "More", 2 * 10**6)
        wait_for(page, "error", "This conversation is too long for the model")
        assert replies(page) == [TEXT] and page.get_by_label("Your message").input_value() == "More"

        endless = {"prompt": "a", "max_tokens": 900_000, "stream": True}
        with client.stream("POST", "/v1/completions", json=endless) as other:
            lines = other.iter_lines()  # the stream ends with it
            next(lines)
            send(page, "More")
            wait_for(page, "error", "The server is busy. Try again in ")
        running.wait_until_idle()
        with page.expect_request("**/v1/completions") as request:
            send(page, "More")
        assert request.value.post_data_json["prompt"] == f"Hi!\n{TEXT}\nMore" and replies(page) == [TEXT] * 2

        begin_endless(page, "More")
        assert running.end(signal.SIGINT)[0] == 130
        wait_for(page, "error", "The server answers: the server was interrupted.")
        assert len(replies(page)) == 3
        send(page, "Still there?")
        wait_for(page, "error", "The connection to the server is broken. Is it still running?")
        assert len(replies(page)) == 3 and page.get_by_label("Your message").input_value() == "Still there?"


def test_on_a_phone(running, open_page):
    """Everything fits on the screen, also with a long conversation and a long word."""
    page = open_page(running.url, **PHONE)
    for _ in range(4):
        page.locator("#longest").evaluate("field => { field.value = 300; }")
        page.get_by_label("Your message").fill("A line\nof " + 300 * "o")
        page.get_by_role("button", name="Send").tap()
        assert len(replies(page)[-1]) == 300
    page.get_by_text("Settings").tap()
    width, wanted = page.evaluate("[innerWidth, document.documentElement.scrollWidth]")
    assert wanted <= width == 360
    for name in ("Send", "New conversation"):
        box = page.get_by_role("button", name=name).bounding_box()
        assert 0 <= box["y"] and box["y"] + box["height"] <= 640 and box["x"] + box["width"] <= 360
        assert box["height"] >= 44, "for fingers"
    assert page.locator("#conversation").evaluate("log => log.scrollHeight > log.clientHeight > 0")
