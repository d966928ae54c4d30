"""The web chat's files: how they are served, and that a browser finds nothing in them to load, run or trust."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import chromium
import httpx
import pytest
from live_server import KEY, MODEL, Live, live_server, turn

import openk3
from openk3.serve.keys import Caller, Keys
from openk3.serve.page import FILES, SCRIPTS, STYLES

WEB = Path(openk3.__file__).parent / "serve" / "web"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w.]+)";$', re.MULTILINE)
EXPORT = re.compile(r"^export (?:async )?(?:function\*?|class|const|let) ([\w$]+)", re.MULTILINE)


class Tags(HTMLParser):
    """Every tag with its attributes, and the text inside of scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.code = ""
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """A tag begins."""
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        """A tag ends."""
        self._inside = ""

    def handle_data(self, data: str) -> None:
        """Text."""
        if self._inside in ("script", "style"):
            self.code += data


@pytest.fixture(scope="module")
def page() -> Tags:
    """The page, parsed."""
    tags = Tags()
    tags.feed((WEB / "index.html").read_text(encoding="utf-8"))
    return tags


@pytest.fixture(scope="module")
def guarded() -> Iterator[Live]:
    """A server with a key."""
    with live_server(Keys([(KEY, Caller("ann"))])) as live:
        yield live


@pytest.mark.parametrize("path", FILES)
def test_types_headers_and_etags(live: Live, path: str) -> None:
    """Each file as it is on disk, with its type; asked for again each time, and then not sent again."""
    answer = httpx.get(live.url + path, timeout=60)
    body = (WEB / FILES[path][0]).read_bytes()
    assert answer.status_code == 200 and answer.content == body
    assert answer.headers["content-type"] == f"{KINDS[Path(FILES[path][0]).suffix]}; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache" and answer.headers["x-content-type-options"] == "nosniff"
    etag = answer.headers["etag"]
    assert etag == f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    for header in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        again = httpx.get(live.url + path, headers={"if-none-match": header}, timeout=60)
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag), header
        assert again.headers["content-security-policy"] == answer.headers["content-security-policy"]
    assert httpx.get(live.url + path, headers={"if-none-match": f'"x{etag[1:]}'}, timeout=60).status_code == 200
    head = httpx.head(live.url + path)
    assert (head.status_code, head.content) == (200, b"") and head.headers["content-length"] == str(len(body))
    assert httpx.post(live.url + path, timeout=60).status_code == 405


@pytest.mark.parametrize("path", FILES)
def test_the_policy_allows_this_origin_and_nothing_else(live: Live, path: str) -> None:
    """Nothing by default; scripts, styles and connections of this origin; no frames, forms, bases or HTML from text."""
    headers = httpx.get(live.url + path, timeout=60).headers
    rules = dict(rule.strip().partition(" ")[::2] for rule in headers["content-security-policy"].split(";"))
    assert rules == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "img-src": "'self' data: blob:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    assert headers["x-frame-options"] == "DENY" and headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-opener-policy"] == headers["cross-origin-resource-policy"] == "same-origin"


def test_files_name_nothing_outside() -> None:
    """No address of another server: not a font, not a picture, not a namespace."""
    assert {path.name for path in WEB.iterdir()} == {name for name, _ in FILES.values()}
    for path in WEB.iterdir():
        text = path.read_text(encoding="utf-8")
        found = re.findall(r"(?:https?:|wss?:|[\"'(])//[^\s/]+|@import|url\(", text)
        assert [one for one in found if "\\/" not in one] == [], path.name


def test_the_policy_needs_no_exception(page: Tags) -> None:
    """No inline script, style or handler, so no hash and no nonce; every address is one of the page's own files."""
    assert page.code.strip() == ""
    attributes = [(tag, name, value) for tag, given in page.tags for name, value in given.items()]
    assert [row for row in attributes if row[1].startswith("on") or row[1] in ("style", "srcdoc", "action")] == []
    addresses = {value for _, name, value in attributes if name in ("src", "href")}
    own = {one for one in addresses if one and not one.startswith(("data:image/png;base64,", "#"))}
    assert own == {*STYLES, *SCRIPTS} == {path[1:] for path in FILES if path != "/"}
    assert {tag for tag, _ in page.tags} & {"iframe", "object", "embed", "base"} == set()


def test_scripts_are_modules_that_are_fetched_at_once(page: Tags) -> None:
    """One that starts, the others ahead of what imports them; only the colours are set before anything is painted."""
    scripts = [given for tag, given in page.tags if tag == "script"]
    assert scripts == [{"src": "scheme.js"}, {"type": "module", "src": "chat.js"}]
    ahead = [given["href"] for _, given in page.tags if given.get("rel") == "modulepreload"]
    assert sorted([*ahead, "chat.js", "scheme.js"]) == sorted(SCRIPTS)


def test_modules_import_what_there_is_and_never_each_other() -> None:
    """Every import names an export of a file of the page, every export and module is used, and there is no circle."""
    scripts = {name: (WEB / name).read_text(encoding="utf-8") for name in SCRIPTS}
    imports = {
        name: {found[2]: set(re.findall(r"[\w$]+", found[1])) for found in IMPORT.finditer(text)}
        for name, text in scripts.items()
    }
    assert sum(len(rows) for rows in imports.values()) > 50
    for name, text in scripts.items():
        assert len(re.findall(r"(?m)^import\b|\bimport\(", text)) == len(imports[name]), name  # of no other form
        asked = set().union(*(rows.get(name, set()) for rows in imports.values()))
        assert asked == set(EXPORT.findall(text)), name
        assert len(re.findall(r"(?m)^export\b", text)) == len(EXPORT.findall(text)), name
    left = dict(imports)
    while free := [name for name, rows in left.items() if not rows.keys() & left.keys()]:
        for name in free:
            del left[name]
    assert left == {}
    reached, rest = set(), ["chat.js"]
    while rest:
        reached.add(name := rest.pop())
        rest += imports[name].keys() - reached
    assert reached == {*SCRIPTS} - {"scheme.js"}


def test_the_script_never_makes_html_or_code_of_text() -> None:
    """None of the ways in which a text becomes a document or a program."""
    script = "".join((WEB / name).read_text(encoding="utf-8") for name in SCRIPTS)
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|DOMParser|\beval\b"
    assert re.findall(rf"{ways}|new Function|setTimeout\(\s*[\"'`]|javascript:|srcdoc|createElementNS", script) == []


def test_every_name_in_the_script_is_in_the_page(page: Tags) -> None:
    """Ids are unique, and those that script and labels name exist."""
    ids = [given["id"] for _, given in page.tags if "id" in given]
    assert len(ids) == len(set(ids))
    script = "".join((WEB / name).read_text(encoding="utf-8") for name in SCRIPTS)
    named = set(re.findall(r"\$\.([a-z]\w*)", script)) | set(re.findall(r"\$\[\"([\w-]+)\"\]", script))
    assert len(named) > 30 and named - set(ids) == set()
    icons = set(re.findall(r"icon(?:Button)?\(\"([a-z]+)\"", script)) | {
        given["data-icon"] for _, given in page.tags if "data-icon" in given
    }
    assert len(icons) > 10 and {f"icon-{name}" for name in icons} - set(ids) == set()
    for _, given in page.tags:
        for name in ("for", "aria-labelledby", "aria-describedby", "aria-controls"):
            assert set((given.get(name) or "").split()) <= set(ids)


@pytest.mark.parametrize(
    "path", ["/index.html", "/page.py", "/web/chat.js", "/..%2fpage.py", "/%2e%2e/page.py", "/x.js"]
)
def test_no_other_file_is_served(live: Live, path: str) -> None:
    """A path is looked up in the list, never on the disk."""
    assert httpx.get(live.url + path, timeout=60).status_code == 404


def test_the_page_needs_no_key_and_holds_none(guarded: Live) -> None:
    """It loads, and asks; what it asks for needs the key."""
    for path in FILES:
        assert httpx.get(guarded.url + path, timeout=60).status_code == 200
    assert httpx.get(f"{guarded.url}/v1/models", timeout=60).status_code == 401


def test_the_doorman_checks_the_page_too(live: Live) -> None:
    """On the loopback interface without keys: this machine's names alone, and no page of another server."""
    assert httpx.get(live.url, headers={"host": "evil.example"}, timeout=60).status_code == 421
    assert httpx.get(live.url, headers={"origin": "http://evil.example"}, timeout=60).status_code == 403
    assert httpx.get(live.url, headers={"origin": live.url}, timeout=60).status_code == 200


def test_models_say_what_the_page_asks(live: Live) -> None:
    """Pictures, their limits, and efforts."""
    (model,) = httpx.get(f"{live.url}/v1/models", timeout=60).json()["data"]
    assert model["input_modalities"] == ["text", "image"] and model["reasoning_efforts"] == ["low", "high", "max"]
    config = live.service.config
    assert (model["max_images"], model["max_image_bytes"]) == (config.max_images, config.max_image_bytes)


def test_a_missing_browser_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow tests fail where there is no Chromium or no playwright, and say what to install."""
    monkeypatch.setattr(chromium, "find_spec", lambda name: None)
    monkeypatch.setattr(chromium.shutil, "which", lambda name: None)
    with pytest.raises(pytest.fail.Exception, match="apt-get install chromium"):
        chromium.chromium()
    monkeypatch.setattr(chromium.shutil, "which", lambda name: f"/usr/bin/{name}")
    with pytest.raises(pytest.fail.Exception, match=r"pip install 'openk3\[harness\]'"):
        chromium.chromium()


def test_usage_in_each_chunk(live: Live) -> None:
    """Asked for by continuous_usage_stats: it grows to the last chunk's, and reasoning ends where content begins."""
    live.say("greet", turn("Hi there", "hm hm"))
    body = {"model": MODEL, "messages": [{"role": "user", "content": "greet"}]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = live.events("/v1/chat/completions", {**body, "stream_options": options})[:-1]
    usages = [event["usage"] for event in events if event["usage"]]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts) and len(set(counts)) > 4 and usages[-1] == events[-1]["usage"]
    reasoning = [usage["completion_tokens_details"]["reasoning_tokens"] for usage in usages]
    assert reasoning[0] > 0 and reasoning[-1] == max(reasoning) < counts[-1]
    plain = live.events("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})[:-1]
    assert [event["usage"] for event in plain[:-1]] == [None] * (len(plain) - 1) and plain[-1]["usage"]
