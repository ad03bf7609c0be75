"""The chat page, on real servers in headless Chromium. Oracle: the text that a model repeats for ever."""

import json
import re
import shutil
import signal

import httpx
import pytest
import torch

from megatron_ssm.inference.text import write_byte_tokenizer
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
    playwright = pytest.importorskip("playwright.sync_api", reason="there is no package playwright")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    with playwright.sync_playwright() as driver:
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
    assert described["has_chat_template"] is True and described["max_model_len"] == 10**6


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
    wait_for(page, "notice", re.compile(r"11 tokens, [\d.]+ per second"))
    page.get_by_role("button", name="Copy").click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == TEXT


def test_reasoning_is_folded(running, open_page):
    """Recorded events, with a comment in between."""
    page = open_page(running.url)
    deltas = [{"reasoning_content": "Two and "}, {"reasoning_content": "two."}, {"content": "Four."}]
    events = [f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}" for delta in deltas]
    body = "\n\n".join([": ping", *events, "data: [DONE]", ""])
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    send(page, "2 + 2?")
    assert replies(page) == ["Four."]
    assert page.locator(".thoughts").text_content() == "Two and two." and not page.locator(".thoughts").is_visible()
    page.get_by_text("Reasoning").click()
    assert page.locator(".thoughts").is_visible()


def test_the_end_stays_in_sight(running, open_page):
    """While replies grow above messages that wait, and when a reply is complete."""
    page = open_page(running.url, permissions=["clipboard-read", "clipboard-write"])
    hidden = "log => log.scrollHeight - log.scrollTop - log.clientHeight"
    for text in ("one", "two", "three"):
        send(page, text, 2000)
    page.locator(".assistant .text").nth(1).filter(has_text=re.compile(".{1000}")).wait_for()
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
