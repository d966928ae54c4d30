"""The web chat in real Chromium against a live server: every feature, by keyboard and mouse, as its users have it."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest
from chromium import Chat, asked, conversation, said, started
from live_server import KEY, MODEL, TOKENIZER, Live, live_server, tiny_engine, turn
from PIL import Image

from openk3.serve.keys import Caller, Keys

pytestmark = pytest.mark.slow
CONTEXT = 8192
TOOLS = '[{"name": "get", "parameters": {"type": "object"}}, {"type": "function", "function": {"name": "put"}}]'
CALLS = [("get", [("city", "string", 'Zü "x" <b>'), ("n", "number", "1e2")]), ("put", [])]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One for this file."""
    with started() as browser:
        yield browser


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    """With room for long answers."""
    with live_server(engine=partial(tiny_engine, context=CONTEXT), context=CONTEXT) as live:
        yield live


@pytest.fixture
def chat(server: Live, browser: Any) -> Iterator[Chat]:
    """The page, opened; afterwards it has asked no other server, has not complained, and the engine is idle."""
    chat = Chat(server, browser).open()
    yield chat
    server.slow_down(0.0)
    chat.close()
    server.says.clear()
    server.wait_until_idle(30)


def picture(color: str, kind: str = "PNG") -> bytes:
    """A small one."""
    out = io.BytesIO()
    Image.new("RGB", (56, 42), color).save(out, kind)
    return out.getvalue()


def texts(messages: list[Any]) -> list[tuple[str, Any]]:
    """(role, content) of each."""
    return [(message["role"], message["content"]) for message in messages]


def test_an_answer_arrives_in_pieces(chat: Chat) -> None:
    """What is there is shown while the rest is written, and the end is exactly what the model said."""
    text = "Grüezi 👋 " + " ".join(f"word{n}" for n in range(60))
    chat.live.say("greet", turn(text, "hm"))
    chat.live.slow_down(0.1)
    chat.send("greet")
    whole = json.dumps(text)
    growing = f"""() => {{ const t = document.querySelector('.answer')?.textContent ?? '';
        return t.length > 12 && t.length < {whole}.length && {whole}.startsWith(t) ? t : null; }}"""
    first = chat.page.wait_for_function(growing).json_value()
    longer = f"(first) => {{ const t = ({growing})(); return t && t.length > first.length ? t : null; }}"
    more = chat.page.wait_for_function(longer, arg=first).json_value()
    assert more.startswith(first) and len(first) < len(more) < len(text)
    assert chat.page.is_visible("#stop") and not chat.page.is_visible("#send")
    assert chat.page.get_attribute("#messages", "aria-busy") == "true"
    chat.live.slow_down(0.0)
    answer = chat.ended()
    assert answer.locator(".answer").inner_text() == text
    stats = answer.locator(".stats").inner_text()
    count = len(TOKENIZER.encode_control(turn(text, "hm"))) - 1
    assert stats.startswith(f"{count} tokens · ") and "tokens/s · first after " in stats and "prompt " in stats
    assert chat.page.is_visible("#send") and not chat.page.is_visible("#stop")


def test_thinking_is_open_while_it_lasts_and_goes_along_afterwards(chat: Chat) -> None:
    """Elapsed time and exact tokens; closed when the answer begins; a later request holds it (preserved history)."""
    from playwright.sync_api import expect

    chat.live.say("why", turn("Because.", "First this. " * 12))
    chat.live.slow_down(0.1)
    chat.send("why is that")
    details = chat.page.locator(".thinking")
    expect(details).to_have_attribute("data-live", "")
    expect(details.locator(".thoughts")).to_contain_text("First this. First")
    assert details.evaluate("(node) => node.open") and "Thinking" in details.locator("summary").inner_text()
    chat.shot("thinking-live")
    chat.live.slow_down(0.0)
    chat.ended()
    assert not details.evaluate("(node) => node.open")
    tokens = len(TOKENIZER.encode("First this. " * 12))
    summary = details.locator("summary").inner_text()
    assert summary.startswith("Thought") and " s · " in summary and summary.endswith(f"{tokens} tokens")
    details.locator("summary").click()
    assert details.locator(".thoughts").inner_text() == ("First this. " * 12)
    chat.shot("thinking-open")
    details.locator("summary").press("Enter")
    assert not details.evaluate("(node) => node.open")
    chat.ask("why not")
    assert chat.bodies()[1]["messages"][1] == {
        "role": "assistant",
        "content": "Because.",
        "reasoning_content": "First this. " * 12,
    }


def test_efforts_are_sent(chat: Chat) -> None:
    """max from the start; each of the others; none at all; the choice outlives a reload and a new chat."""
    chat.live.say("hi", turn("Hello."))
    chat.ask("hi")
    for value in ("low", "high", "off"):
        chat.page.check(f"#effort input[value={value}]")
        chat.ask("hi")
    sent = [(body.get("reasoning_effort"), body.get("thinking")) for body in chat.bodies()]
    assert sent == [("max", None), ("low", None), ("high", None), (None, {"type": "disabled"})]
    chat.open()
    assert chat.page.is_checked("#effort input[value=off]")
    chat.page.keyboard.press("Control+k")
    assert chat.page.is_checked("#effort input[value=off]")


@pytest.mark.parametrize("way", ["button", "Escape"])
def test_stop_cancels_on_the_server(chat: Chat, way: str) -> None:
    """The engine's request is gone long before its end; what was written stays, and can be gone on from."""
    chat.live.say("story", turn("once upon a time " * 300))
    chat.live.slow_down(0.1)  # minutes to its end
    chat.send("story")
    chat.page.wait_for_function("() => document.querySelector('.answer')?.textContent.length > 10")
    chat.page.click("#stop") if way == "button" else chat.page.keyboard.press("Escape")
    answer = chat.ended()
    assert "Stopped." in answer.inner_text() and answer.locator(".answer").inner_text().startswith("once upon")
    chat.live.wait_until_idle(30)
    assert 'status="499"' in httpx.get(f"{chat.live.url}/metrics").text
    assert chat.page.is_visible("#send") and len(chat.bodies()) == 1
    chat.live.slow_down(0.0)
    chat.live.says = {"go on": TOKENIZER.encode_control(turn("The end."))}
    assert chat.ask("go on").locator(".answer").inner_text() == "The end."
    assert chat.bodies()[1]["messages"][1]["content"].startswith("once upon")


def test_regenerate_asks_again(chat: Chat) -> None:
    """The same question, without the answer that was not liked."""
    chat.live.say("dice", turn("One."))
    chat.ask("dice")
    chat.live.say("dice", turn("Six."))
    chat.page.click("[aria-label='Answer again']")
    chat.page.wait_for_function("() => document.querySelector('.answer')?.textContent === 'Six.'")
    chat.ended()
    first, second = chat.bodies()
    assert first == second and chat.page.locator(".assistant").count() == 1
    assert [one["content"] for one in chat.kept()[0]["messages"] if one["role"] == "assistant"] == ["Six."]


def test_a_question_is_edited_and_sent_again(chat: Chat) -> None:
    """What came after it goes, and can be brought back; Escape leaves all as it was."""
    chat.live.says = {word: TOKENIZER.encode_control(turn(f"About {word}.")) for word in ("pears", "plums", "apples")}
    chat.ask("apples")
    chat.ask("plums")
    edit = chat.page.locator(".user").first
    edit.locator("[aria-label='Edit the message']").click()
    assert edit.locator("textarea").input_value() == "apples"
    edit.locator("textarea").press("Escape")
    assert chat.page.locator(".bubble").all_inner_texts() == ["apples", "plums"]
    edit.locator("[aria-label='Edit the message']").click()
    edit.locator("textarea").fill("pears")
    edit.locator("textarea").press("Enter")
    chat.page.wait_for_function("() => document.querySelector('.answer')?.textContent === 'About pears.'")
    chat.ended()
    assert texts(chat.bodies()[-1]["messages"]) == [("user", "pears")]
    assert chat.page.locator(".bubble").all_inner_texts() == ["pears"]
    chat.page.click("#notice >> text=Undo")
    assert chat.page.locator(".bubble").all_inner_texts() == ["apples", "plums"]
    assert len(chat.kept()[0]["messages"]) == 4


def give(
    chat: Chat, way: str, data: bytes, name: str = "red.png", kind: str = "image/png", *, padding: int = 0
) -> None:
    """Hand a file to the page, with so many zeros behind it."""
    if way == "choose":
        chat.page.set_input_files("#files", {"name": name, "mimeType": kind, "buffer": data})
        return
    code = """([way, data, name, kind, padding]) => {
        const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0)), transfer = new DataTransfer();
        transfer.items.add(new File([bytes, new Uint8Array(padding)], name, { type: kind }));
        const target = document.getElementById('input'), options = { bubbles: true, cancelable: true };
        if (way === 'paste') target.dispatchEvent(new ClipboardEvent('paste', { ...options, clipboardData: transfer }));
        else for (const event of ['dragenter', 'dragover', 'drop'])
            target.dispatchEvent(new DragEvent(event, { ...options, dataTransfer: transfer })); }"""
    chat.page.evaluate(code, [way, base64.b64encode(data).decode(), name, kind, padding])


@pytest.mark.parametrize("way", ["choose", "drop", "paste"])
def test_a_picture_arrives_at_the_server(chat: Chat, way: str) -> None:
    """Previewed, removable; its exact bytes are sent, the engine gets it, and after a reload it is still there."""
    seen: list[Any] = []
    read = chat.live.service.sources._bytes
    chat.live.say("see", turn("Red."))
    object.__setattr__(chat.live.service.sources, "_bytes", lambda *which: seen.append(read(*which)) or seen[-1])
    try:
        give(chat, way, picture("blue"))
        chat.page.wait_for_selector("#previews img")
        chat.page.click("[aria-label='Remove red.png']")
        assert not chat.page.is_visible("#previews")
        give(chat, way, picture("red"))
        chat.page.wait_for_selector("#previews img")
        chat.shot("picture-preview")
        chat.ask("what do you see")
        assert seen == [picture("red")]
        url = f"data:image/png;base64,{base64.b64encode(picture('red')).decode()}"
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what do you see"}]
        assert chat.bodies()[0]["messages"] == [{"role": "user", "content": parts}]
        assert not chat.page.is_visible("#previews")
        chat.open()
        chat.page.wait_for_function("() => document.querySelector('.pictures img')?.naturalWidth === 56")
        assert url not in json.dumps(chat.kept())
        chat.ask("see it still")
        assert seen == [picture("red")] * 2
        chat.page.click(".pictures button")
        assert chat.page.is_visible("#picture-image")
    finally:
        object.__delattr__(chat.live.service.sources, "_bytes")


def test_what_is_no_picture_is_refused(chat: Chat) -> None:
    """Kinds that no model reads, files that only claim to be one, too many bytes, and a model without eyes."""
    from playwright.sync_api import expect

    notice = chat.page.locator("#notice")
    give(chat, "drop", b"%PDF", "paper.pdf", "application/pdf")
    expect(notice).to_contain_text("paper.pdf: only PNG")
    give(chat, "drop", b"no picture", "fake.png")
    expect(notice).to_contain_text("fake.png cannot be read as a picture")
    give(chat, "drop", picture("red"), "huge.png", padding=chat.live.service.config.max_image_bytes)
    expect(notice).to_contain_text("huge.png is larger than the server takes (16 MiB)")
    assert not chat.page.is_visible("#previews") and chat.page.is_disabled("#send")
    sources, chat.live.service.sources = chat.live.service.sources, None
    try:
        chat.open()
        assert not chat.page.is_visible("#attach")
        give(chat, "paste", picture("red"))
        expect(notice).to_contain_text("tiny-k3 cannot see pictures")
    finally:
        chat.live.service.sources = sources


def test_a_tool_is_called_and_answered(chat: Chat) -> None:
    """Definitions as JSON, cards with exact arguments, results typed, and the model goes on with them."""
    chat.live.say("weather", turn("", "ask both", CALLS))
    chat.page.click("#open-settings")
    chat.page.fill("#tools", '[{"name": "get"')
    assert "No valid JSON" in chat.page.inner_text("#tools-error")
    chat.page.keyboard.press("Escape")
    chat.send("weather")
    assert chat.page.is_visible("#settings") and chat.bodies() == []  # not with tools that are none
    chat.page.fill("#tools", TOOLS)
    chat.page.keyboard.press("Escape")
    assert chat.page.inner_text("#chips") == "2 tools"
    chat.page.press("#input", "Enter")
    chat.ended()
    cards = chat.page.locator(".call")
    assert cards.locator(".name").all_inner_texts() == ["get", "put"]
    assert cards.first.locator("pre").inner_text() == '{\n  "city": "Zü \\"x\\" <b>",\n  "n": 1e2\n}'
    fields = chat.page.locator(".result textarea")
    assert fields.first.evaluate("(node) => document.activeElement === node")  # whoever waits is led there
    fields.first.fill("12 °C <i>cold</i>")
    chat.shot("tool-card")
    chat.page.wait_for_function("() => Object.keys(localStorage).some(k => localStorage[k].includes('12 °C'))")
    chat.open()  # what was typed is kept
    assert fields.first.input_value() == "12 °C <i>cold</i>"
    chat.live.says = {"cold": TOKENIZER.encode_control(turn("It is cold."))}
    fields.nth(1).fill("done")
    fields.nth(1).press("Control+Enter")
    chat.page.wait_for_function("() => document.querySelectorAll('.answer')[1]?.textContent === 'It is cold.'")
    chat.ended()
    body = chat.bodies()[-1]
    assert [tool["function"]["name"] for tool in body["tools"]] == ["get", "put"]
    _, answer, *results = body["messages"]
    assert answer["content"] is None and answer["reasoning_content"] == "ask both"
    assert answer["tool_calls"][0]["function"]["arguments"] == '{"city": "Zü \\"x\\" <b>", "n": 1e2}'
    assert [(one["role"], one["content"]) for one in results] == [("tool", "12 °C <i>cold</i>"), ("tool", "done")]
    assert [one["tool_call_id"] for one in results] == [call["id"] for call in answer["tool_calls"]]
    assert cards.first.locator(".result").inner_text().endswith("12 °C <i>cold</i>")
    assert cards.locator(".state").all_inner_texts() == ["answered", "answered"] and fields.count() == 0


def test_settings_are_sent_and_checked(chat: Chat) -> None:
    """System prompt and numbers as the API takes them; without them the server's; wrong ones are named."""
    chat.live.say("hi", turn("Hello."))
    chat.ask("hi")
    chat.page.click("#open-settings")
    values = {"system": "Be brief.", "temperature": "0.3", "top-p": "0.8", "max-tokens": "50", "seed": "-7"}
    for name, value in values.items():
        chat.page.fill(f"#{name}", value)
    chat.page.keyboard.press("Escape")
    chat.ask("hi")
    plain, full = chat.bodies()
    numbers = {"temperature": 0.3, "top_p": 0.8, "max_tokens": 50, "seed": -7}
    assert {name: full[name] for name in numbers} == numbers and not set(numbers) & set(plain)
    assert full["messages"][0] == {"role": "system", "content": "Be brief."} and plain["model"] == MODEL
    chat.page.click("#open-settings")
    chat.page.fill("#temperature", "3")
    assert chat.page.inner_text("#numbers-error") == "Temperature: must be a number from 0 to 2."
    chat.page.keyboard.press("Escape")
    chat.send("hi")
    assert chat.page.is_visible("#settings") and len(chat.bodies()) == 2


def test_a_reload_loses_nothing(chat: Chat) -> None:
    """Conversations, the one that was open, what was typed; also an answer that was being written."""
    chat.live.say("first", turn("One **two**.", "hm"))
    chat.ask("first")
    shown = chat.page.inner_html("#messages")
    chat.page.fill("#input", "half a thought")
    chat.open()
    assert chat.page.inner_html("#messages") == shown and chat.page.input_value("#input") == "half a thought"
    assert chat.page.inner_text("#title") == "first"
    chat.live.says = {"story": TOKENIZER.encode_control(turn("long ago " * 200))}
    chat.live.slow_down(0.1)
    chat.send("story")
    chat.page.wait_for_function("() => document.querySelectorAll('.answer')[1]?.textContent.length > 8")
    chat.open()
    chat.live.slow_down(0.0)
    cut = chat.page.locator(".assistant").nth(1)
    assert cut.locator(".answer").inner_text().startswith("long ago") and "Stopped." in cut.inner_text()


def test_conversations_are_listed_opened_and_deleted(chat: Chat) -> None:
    """The newest first; deleting can be undone; all at once after a question; a new chat begins empty."""
    chat.live.says = {word: TOKENIZER.encode_control(turn(f"About {word}.")) for word in ("pears", "plums")}
    chat.ask("pears")
    chat.page.click("#new-chat")
    assert chat.page.is_visible("#empty") and chat.page.locator(".message").count() == 0
    chat.ask("plums")
    titles = chat.page.locator("#conversations .open")
    assert titles.all_inner_texts() == ["plums", "pears"]
    titles.nth(1).click()
    assert chat.page.locator(".answer").all_inner_texts() == ["About pears."]
    chat.page.click("[aria-label='Delete pears']")
    assert titles.all_inner_texts() == ["plums"] and len(chat.kept()) == 1 and chat.page.is_visible("#empty")
    chat.page.click("#notice >> text=Undo")
    assert titles.all_inner_texts() == ["plums", "pears"] and len(chat.kept()) == 2
    assert chat.page.locator(".answer").all_inner_texts() == ["About pears."]
    chat.page.click("#open-settings")
    chat.page.click("#delete-all")
    assert chat.kept() == [] and titles.count() == 0 and chat.page.is_visible("#empty")


def test_what_is_kept_is_bounded(chat: Chat) -> None:
    """A hundred conversations, four million characters: the oldest make room, the one at hand stays."""
    many = [conversation(asked(f"q{n}"), said("a"), name=f"c{n}", title=f"t{n}", updated=n) for n in range(103)]
    chat.seed(*many)
    chat.live.say("more", turn("Yes."))
    chat.page.keyboard.press("Control+k")
    chat.ask("more")
    kept = {one["id"] for one in chat.kept()}
    assert len(kept) == 100 and {"c0", "c1", "c2", "c3"}.isdisjoint(kept) and "c102" in kept
    large = [conversation(asked("q"), said("x" * 1_000_000), name=f"c{n}", updated=1000 + n) for n in range(4)]
    chat.seed(*large)
    chat.page.keyboard.press("Control+k")
    chat.ask("more")
    sizes = [len(json.dumps(one, ensure_ascii=False, separators=(",", ":"))) for one in chat.kept()]
    assert sum(sizes) <= 4_000_000 and {"c3", "c2"} <= {one["id"] for one in chat.kept()}


def test_tabs_agree(chat: Chat) -> None:
    """A conversation of one tab appears in the other, and so does its deletion."""
    from playwright.sync_api import expect

    other = chat.tab()
    other.goto(chat.live.url)
    other.wait_for_selector("#model:not(:empty)")
    chat.live.say("pears", turn("About pears."))
    chat.ask("pears")
    expect(other.locator("#conversations .open")).to_have_text(["pears"])
    other.click("#conversations .open")
    expect(other.locator(".answer")).to_have_text(["About pears."])
    chat.page.click("[aria-label='Delete pears']")
    expect(other.locator("#conversations .open")).to_have_count(0)
    expect(other.locator(".message")).to_have_count(0)


def test_dark_mode_follows_the_system_until_it_is_switched(server: Live, browser: Any) -> None:
    """And the switch is kept."""
    from playwright.sync_api import expect

    chat = Chat(server, browser, color_scheme="dark").open()
    ground = "() => getComputedStyle(document.body.parentElement).backgroundColor"
    dark = chat.page.evaluate(ground)
    assert chat.page.get_attribute("#theme", "aria-pressed") == "true"
    chat.page.emulate_media(color_scheme="light")
    expect(chat.page.locator("#theme")).to_have_attribute("aria-pressed", "false")
    light = chat.page.evaluate(ground)
    assert light == "rgb(255, 255, 255)" != dark
    chat.page.click("#theme")
    assert chat.page.evaluate(ground) == dark
    chat.open()
    assert chat.page.evaluate(ground) == dark and chat.page.get_attribute("#theme", "aria-pressed") == "true"
    chat.page.click("#open-settings")
    chat.page.select_option("#scheme", "system")
    assert chat.page.evaluate(ground) == light
    chat.close()


def test_a_walk_without_a_mouse(chat: Chat) -> None:
    """Shift+Enter, Enter, Escape, Ctrl+K; Tab reaches every control in sight, and shows where it is."""
    chat.live.say("hello", turn("Hi.\n\n```python\nx = 1\n```", "hm"))
    keyboard = chat.page.keyboard
    assert chat.page.evaluate("document.activeElement.id") == "input"
    keyboard.type("hello")
    keyboard.press("Shift+Enter")
    keyboard.type("you")
    assert chat.page.input_value("#input") == "hello\nyou" and chat.bodies() == []
    keyboard.press("Enter")
    chat.ended()
    assert chat.bodies()[0]["messages"] == [{"role": "user", "content": "hello\nyou"}]
    here = """() => { const node = document.activeElement, style = getComputedStyle(node);
        const ring = node.type === 'radio' ? getComputedStyle(node.nextElementSibling) : style;
        const box = node.id === 'input' ? getComputedStyle(document.getElementById('composer')) : null;
        const shown = ring.outlineStyle !== 'none' && parseFloat(ring.outlineWidth) >= 2;
        const name = node.getAttribute('aria-label') || node.labels?.[0]?.innerText || node.innerText;
        return node === document.body ? null : [name.trim(), shown || Boolean(box)]; }"""
    chat.page.focus(".skip")
    stops = [chat.page.evaluate(here)]
    for _ in range(60):
        keyboard.press("Tab")
        stop = chat.page.evaluate(here)
        if stop is None or stop in stops[:1]:
            break
        stops.append(stop)
    names = [name for name, _ in stops]
    for wanted in ("Skip to the message box", "New chat", "hello", "Delete hello", "Settings", "Dark mode", "Message"):
        assert any(name.startswith(wanted) for name in names), (wanted, names)
    for wanted in ("Copy the message", "Edit the message", "Copy the answer", "Answer again", "Copy the code", "Max"):
        assert wanted in names, (wanted, names)
    assert "Thought" in str(names) and [name for name, shown in stops if not shown] == []
    chat.page.focus("#open-settings")
    keyboard.press("Enter")
    assert chat.page.evaluate("document.activeElement.closest('dialog')?.id") == "settings"
    keyboard.press("Escape")
    assert chat.page.evaluate("document.activeElement.id") == "open-settings"
    chat.page.focus("#effort input[value=max]")
    keyboard.press("ArrowLeft")
    assert chat.page.is_checked("#effort input[value=high]")
    keyboard.press("Control+k")
    assert chat.page.evaluate("document.activeElement.id") == "input" and chat.page.is_visible("#empty")


def test_a_composed_character_does_not_send(chat: Chat) -> None:
    """Enter that ends an input method's composition is not for the page."""
    chat.page.fill("#input", "にほん")
    chat.page.evaluate("""() => document.getElementById('input').dispatchEvent(
        new KeyboardEvent('keydown', { key: 'Enter', isComposing: true, bubbles: true, cancelable: true }))""")
    assert chat.page.input_value("#input") == "にほん" and chat.bodies() == []


def test_the_key_is_asked_for_and_forgotten(browser: Any) -> None:
    """The page loads without one; a wrong key is named so; the right one is sent, from this tab alone."""
    from playwright.sync_api import expect

    with live_server(Keys([(KEY, Caller("ann"))])) as live:
        chat = Chat(live, browser)
        chat.may_complain = ("401",)
        chat.page.goto(live.url)
        expect(chat.page.locator("#key-dialog")).to_be_visible()
        for wrong, problem in (("sk-wrong-0123456789", "The server refused this key"), ("ключ", "one word of letters")):
            chat.page.fill("#key", wrong)
            chat.page.press("#key", "Enter")
            expect(chat.page.locator("#key-error")).to_contain_text(problem)
        chat.shot("wrong-key")
        chat.page.fill("#key", KEY)
        chat.page.press("#key", "Enter")
        expect(chat.page.locator("#key-dialog")).to_be_hidden()
        expect(chat.page.locator("#model")).to_have_text(MODEL)
        live.say("hi", turn("Hello."))
        assert chat.ask("hi").locator(".answer").inner_text() == "Hello."
        posts = [one for one in chat.requests if one.method == "POST"]
        assert [one.headers["authorization"] for one in posts] == [f"Bearer {KEY}"]
        assert KEY not in chat.page.evaluate("JSON.stringify(localStorage)") and KEY not in chat.page.url
        chat.open()  # the same tab still knows it
        assert not chat.page.is_visible("#key-dialog")
        other = chat.tab()
        other.goto(live.url)
        expect(other.locator("#key-dialog")).to_be_visible()
        chat.page.click("#open-settings")
        chat.page.click("#forget-key")
        expect(chat.page.locator("#key-dialog")).to_be_visible()
        assert chat.page.evaluate("sessionStorage.getItem('openk3.key')") is None
        chat.close()


def test_errors_are_one_line_with_a_way_on(chat: Chat) -> None:
    """A question that is too long, an engine that fails in the middle, a server that is gone; then Retry."""
    from playwright.sync_api import expect

    chat.may_complain = ("Failed to load resource",)
    chat.send("x7 " * 9000)
    fault = chat.page.locator(".fault")
    expect(fault).to_contain_text("tokens")
    assert "\n" not in fault.locator("span").inner_text()
    chat.page.keyboard.press("Control+k")
    chat.context.set_offline(True)
    chat.send("hello")
    expect(fault).to_contain_text("The server cannot be reached.")
    chat.shot("fault")
    chat.context.set_offline(False)
    chat.live.say("hello", turn("Hi."))
    fault.locator("text=Retry").click()
    assert chat.ended().locator(".answer").inner_text() == "Hi." and fault.count() == 0
    chat.live.says = {"poem": TOKENIZER.encode_control(turn("roses are red " * 100))}
    chat.live.slow_down(0.05)
    chat.send("poem")
    chat.page.wait_for_function("() => document.querySelectorAll('.answer')[1]?.textContent.length > 8")
    chat.live.service.thread.cancel_all()  # as at a shutdown that does not wait
    expect(fault).to_contain_text("shutting down")
    chat.live.slow_down(0.0)
    chat.live.say("poem", turn("violets"))
    fault.locator("text=Retry").click()
    chat.page.wait_for_function("() => document.querySelectorAll('.answer')[1]?.textContent === 'violets'")
    chat.ended()


def test_copy_and_export(server: Live, browser: Any) -> None:
    """The answer's own text; the conversation as JSON that the API takes again."""
    chat = Chat(server, browser, permissions=["clipboard-read", "clipboard-write"]).open()
    content = "**Bold** and\n\n```\na < b\n```"
    chat.live.say("code", turn(content, "hm"))
    chat.ask("code")
    for label, text in {"answer": content, "code": "a < b", "message": "code"}.items():
        chat.page.click(f"[aria-label='Copy the {label}']")
        chat.page.wait_for_function("(text) => navigator.clipboard.readText().then((is) => is === text)", arg=text)
    with chat.page.expect_download() as download:
        chat.page.click("#export")
    assert download.value.suggested_filename == "code.json"
    with open(download.value.path(), encoding="utf-8") as file:
        data = json.load(file)
    assert data["messages"][1] == {"role": "assistant", "content": content, "reasoning_content": "hm"}
    assert data["answers"][0]["usage"]["answer"] > 10 and data["model"] == MODEL
    answer = server.post("/v1/chat/completions", {"model": MODEL, "max_tokens": 2, "messages": data["messages"]})
    assert answer.status_code == 200
    chat.close()
    server.says.clear()


@pytest.mark.parametrize("width", [320, 390, 700])
def test_a_narrow_window(server: Live, browser: Any, width: int) -> None:
    """Nothing sticks out; the list of conversations is a drawer; touch targets are large."""
    chat = Chat(server, browser, viewport={"width": width, "height": 720}, has_touch=True).open()
    wide = "| " + " | ".join(f"column {n}" for n in range(12)) + " |\n|" + "-|" * 12 + "\n\n`" + "y" * 300 + "`"
    calls = [{"id": "c", "name": "n" * 90, "arguments": json.dumps({"a": "z" * 400}), "draft": ""}]
    code = f"```\n{'w' * 300}\n```\n\n{'v' * 300}"
    chat.seed(conversation(asked("u" * 300), said(f"{wide}\n\n{code}", "t" * 300, calls=calls, finish="tool_calls")))
    out = """() => [...document.querySelectorAll('body *')].filter((node) => { const box = node.getBoundingClientRect();
        return box.width && box.right > innerWidth + 1 && !node.closest('pre, .table, #sidebar, dialog, .unseen'); })
        .map((node) => node.outerHTML.slice(0, 80))"""
    assert chat.page.evaluate(out) == []
    assert chat.page.evaluate("document.documentElement.scrollWidth") <= width
    assert not chat.page.is_visible("#new-chat")
    chat.page.tap("#open-sidebar")
    chat.page.wait_for_selector("#new-chat", state="visible")
    chat.shot(f"narrow-{width}-drawer")
    chat.page.tap("#conversations .open")
    chat.page.wait_for_selector("#new-chat", state="hidden")
    small = """() => [...document.querySelectorAll('header button, #composer button, #effort span')].filter((node) => {
        const box = node.getBoundingClientRect(); return box.width && (box.width < 32 || box.height < 30); }).length"""
    assert chat.page.evaluate(small) == 0
    chat.shot(f"narrow-{width}")
    chat.close()


def test_two_thousand_tokens_stay_responsive(chat: Chat) -> None:
    """Settled paragraphs are never made again, frames and keys come through meanwhile, and nothing is lost.

    Times are not judged: the longest frame is printed.
    """
    words = [f"w{n:03d}" for n in range(420)]
    text = "\n\n".join(" ".join(words[n : n + 14]) for n in range(0, 420, 14)) + "\n\n```\n" + "code()\n" * 40 + "```"
    answer = TOKENIZER.encode_control(turn(text, "hm"))
    assert len(answer) > 2000
    chat.live.say("long", answer)
    chat.page.evaluate("""() => { window.frames_ = []; let last = performance.now();
        const tick = (now) => { frames_.push(now - last); last = now; requestAnimationFrame(tick); };
        requestAnimationFrame(tick); window.made = 0;
        new MutationObserver((all) => { for (const one of all) for (const node of one.addedNodes)
            if (node.nodeName === 'P' && node.closest('.answer')) made += 1; })
            .observe(document.getElementById('messages'), { childList: true, subtree: true }); }""")
    chat.live.slow_down(0.02)
    chat.send("long")
    chat.page.wait_for_function("() => document.querySelectorAll('.answer p').length > 3")
    chat.page.evaluate("window.second = document.querySelectorAll('.answer p')[1]")
    chat.page.keyboard.type("next question")
    busy = chat.page.get_attribute("#messages", "aria-busy")
    chat.live.slow_down(0.0)
    shown = chat.ended().locator(".answer")
    assert busy == "true" and chat.page.input_value("#input") == "next question"
    assert chat.page.evaluate("second === document.querySelectorAll('.answer p')[1]")
    assert shown.locator("p").all_inner_texts() == text.split("\n\n")[:30]
    assert shown.locator("pre").inner_text() == "code()\n" * 39 + "code()"
    frames, made = chat.page.evaluate("[frames_, made]")
    assert made <= len(frames) + 30 + 30  # one paragraph a frame, and those that a frame settles
    print(f"{len(answer)} tokens, {len(frames)} frames, the longest {max(frames):.0f} ms, {made} paragraphs made")


def test_while_one_answer_is_written_another_conversation_is_open(chat: Chat) -> None:
    """It goes on, is kept, and is shown where it is when its conversation is opened again."""
    chat.live.says = {
        "story": TOKENIZER.encode_control(turn("long ago " * 60)),
        "quick": TOKENIZER.encode_control(turn("Yes.")),
    }
    chat.live.slow_down(0.02)
    chat.send("story")
    chat.page.wait_for_function("() => document.querySelector('.answer')?.textContent.length > 8")
    chat.page.keyboard.press("Control+k")
    assert chat.page.locator("#conversations li[data-busy]").count() == 1 and chat.page.is_visible("#send")
    assert chat.ask("quick").locator(".answer").inner_text() == "Yes."
    chat.page.click("#conversations .open >> text=story")
    chat.live.slow_down(0.0)
    assert chat.ended().locator(".answer").inner_text() == ("long ago " * 60).strip()
    assert chat.page.locator("#conversations li[data-busy]").count() == 0


def test_what_is_being_written_can_be_replaced_and_deleted(chat: Chat) -> None:
    """An edit ends the old answer and begins a new one; a deleted conversation stays deleted."""
    from playwright.sync_api import expect

    chat.live.says = {
        "other": TOKENIZER.encode_control(turn("Something else. " * 40)),
        "story": TOKENIZER.encode_control(turn("long ago " * 300)),
    }
    chat.live.slow_down(0.05)
    chat.send("story")
    chat.page.wait_for_function("() => document.querySelector('.answer')?.textContent.length > 8")
    chat.page.click("[aria-label='Edit the message']")
    chat.page.fill(".edit textarea", "other")
    chat.page.press(".edit textarea", "Enter")
    expect(chat.page.locator(".answer")).to_contain_text("Something")
    assert chat.page.is_visible("#stop") and chat.live.service.gate.num_open <= 2
    chat.page.click("[aria-label='Delete story']")
    chat.live.wait_until_idle(30)
    chat.page.evaluate("() => new Promise((resolve) => setTimeout(resolve, 1500))")  # longer than what is kept late
    assert chat.kept() == [] and chat.page.is_visible("#empty") and chat.page.is_visible("#send")
    chat.open()
    assert chat.page.locator("#conversations li").count() == 0


def test_the_view_follows_unless_somebody_reads_above(chat: Chat) -> None:
    """It stays at the newest line; who scrolls up is left alone, and gets back by a button."""
    chat.live.say("lines", turn("\n".join(f"line {n}" for n in range(150))))
    chat.live.slow_down(0.03)
    chat.send("lines")
    gap = (
        "() => { const s = document.getElementById('scroller'); return s.scrollHeight - s.scrollTop - s.clientHeight; }"
    )
    chat.page.wait_for_function("() => document.getElementById('scroller').scrollTop > 400")
    assert not chat.page.is_visible("#to-end")
    chat.page.mouse.move(700, 300)
    chat.page.mouse.wheel(0, -500)
    chat.page.wait_for_selector("#to-end", state="visible")
    top = chat.page.evaluate("document.getElementById('scroller').scrollTop")
    chat.live.slow_down(0.0)
    chat.ended()
    assert chat.page.evaluate(gap) > 60 and chat.page.evaluate("document.getElementById('scroller').scrollTop") <= top
    chat.page.click("#to-end")
    assert chat.page.evaluate(gap) < 2 and not chat.page.is_visible("#to-end")
