"""Files for deploying and their page: flags that exist, limits that agree with each other, and no rights too many."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from live_server import Live

from openk3.commands import flags
from openk3.commands.serve_flags import Serve
from openk3.config.http import ServerConfig

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy"
PAGE = (ROOT / "docs" / "deploying.md").read_text(encoding="utf-8")
SHUTDOWN_SECONDS = 5 + 60  # of the HTTP server and the engine's thread, behind the drain
OTHERS = {"--build-arg", "--gpus", "--stop-timeout"}  # docker's, as prose names them


def dockerfile() -> list[tuple[str, str]]:
    """(instruction, arguments), continued lines joined."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1].strip()) for line in lines]


def said(instruction: str) -> list[str]:
    """Arguments of each instruction of a kind."""
    return [arguments for name, arguments in dockerfile() if name == instruction]


def unit(name: str) -> dict[str, list[str]]:
    """Values of a unit's settings, in order."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / name).read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        if "=" in line and not line.startswith("#"):
            key, value = line.split("=", 1)
            found.setdefault(key, []).append(value)
    return found


def seconds(text: str) -> float:
    """Of 180, 60s or 30min."""
    number, letters = re.fullmatch(r"(\d+)(s|m|min|)", text).groups()  # pyrefly: ignore
    return int(number) * (60 if letters.startswith("m") else 1)


def served(words: list[str]) -> Serve:
    """A command line, read by the command's own parser; it has keys."""
    assert words[:2] in (["openk3", "serve"], ["/opt/openk3/bin/openk3", "serve"]), words
    parsed = flags.parse("serve", words[2:])
    assert parsed.keys is not None
    return parsed


def image_command() -> list[str]:
    """The image's entry point, without the process that hands signals on."""
    (entry,) = said("ENTRYPOINT")
    words = json.loads(entry)
    assert words[:2] == ["tini", "--"]
    return words[2:]


def test_the_image_runs_the_server_without_rights() -> None:
    """Its flags exist; it is no root's, has a signal and a health check, and neither keys nor weights."""
    (command,) = said("CMD")
    parsed = served(image_command() + json.loads(command))
    assert str(parsed.run) == "/model" and parsed.host == "0.0.0.0" and not parsed.open
    assert said("USER") == ["10001:10001"] and said("STOPSIGNAL") == ["SIGTERM"]
    assert said("EXPOSE") == [str(parsed.port)]
    assert all(base == "python:${PYTHON}" for base in (line.split(" AS ")[0] for line in said("FROM")))
    assert re.fullmatch(r"PYTHON=3\.11\.\d+-slim-[a-z]+", said("ARG")[0])
    names = {re.split(r"[= ]", line)[0] for line in said("ARG")}
    assert names == {"PYTHON", "DEVICE", "TORCH_OPTIONS"}
    assert {"/model", "/var/lib/openk3", "/var/cache/openk3"} == set(json.loads(said("VOLUME")[0]))
    last_from = max(n for n, (name, _) in enumerate(dockerfile()) if name == "FROM")
    assert [line for name, line in dockerfile()[last_from:] if name == "COPY"] == [
        "--from=build /opt/openk3 /opt/openk3"
    ]


def test_torch_is_installed_first_and_once() -> None:
    """Its line of constraints.txt, and not as a constraint of what comes behind it."""
    torch, rest = (line for line in said("RUN") if "pip install" in line)
    assert "grep '^torch==' constraints.txt" in torch
    assert "grep -v -e '^torch==' -e '^triton=='" in rest and "-c others.txt" in rest
    assert (ROOT / "constraints.txt").read_text(encoding="utf-8").count("\ntriton==") == 1


def test_what_the_image_copies_is_what_a_build_sees() -> None:
    """Every source exists and is let through by .dockerignore; nothing else is."""
    copied = {word for line in said("COPY") if "--from" not in line for word in line.split()[:-1]}
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*" and {rule[1:] for rule in rules if rule.startswith("!")} == copied
    assert all((ROOT / name).exists() for name in copied)


def test_the_health_check_tells_a_server_that_drains(live: Live) -> None:
    """Exit code 0 while it is well, another one while it takes no calls."""
    (check,) = said("HEALTHCHECK")
    command = json.loads(check.split("CMD ", 1)[1])
    assert command[:2] == ["python", "-c"] and "127.0.0.1:8000/health" in command[2]
    code = command[2].replace("8000", str(live.server.port)).replace("timeout=4", "timeout=60")

    def ask() -> int:
        return subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120).returncode

    assert ask() == 0
    live.service.gate.is_draining = True
    try:
        assert ask() != 0
    finally:
        live.service.gate.is_draining = False


def test_compose_gives_the_image_no_more_than_it_needs() -> None:
    """Read-only, without capabilities, time to drain; its secret is where the flags look for it, its proxy finds it."""
    document: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    service = document["services"]["openk3"]
    parsed = served(image_command() + service["command"])
    assert seconds(service["stop_grace_period"]) >= parsed.drain_seconds + 60
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"] and service["tmpfs"] == ["/tmp"]
    assert service["security_opt"] == ["no-new-privileges:true"] and "ports" not in service
    assert [str(parsed.keys)] == [f"/run/secrets/{name}" for name in service["secrets"]]
    assert set(service["secrets"]) == set(document["secrets"])
    targets = [volume.rsplit(":")[-2 if volume.endswith(":ro") else -1] for volume in service["volumes"]]
    assert targets == json.loads(said("VOLUME")[0]) and service["volumes"][0].endswith("/model:ro")
    assert (ROOT / "deploy" / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    proxy = (DEPLOY / "nginx.conf").read_text(encoding="utf-8")
    assert f"proxy_pass http://openk3:{parsed.port};" in proxy
    assert f"client_max_body_size {parsed.max_body_mib}m;" in proxy and "proxy_buffering off;" in proxy


def test_the_unit_has_time_and_no_rights() -> None:
    """Flags exist, keys are a credential, the stop outlasts the drain, and everything that can be forbidden is."""
    found = unit("openk3.service")
    (line,) = found["ExecStart"]
    parsed = served(shlex.split(line))
    assert parsed.host == "127.0.0.1" and parsed.host in ServerConfig("k3").host
    assert str(parsed.keys) == "${CREDENTIALS_DIRECTORY}/keys" and found["LoadCredential"] == ["keys:/etc/openk3/keys"]
    assert str(parsed.outer_folder).startswith("${STATE_DIRECTORY}/") and found["StateDirectory"] == ["openk3"]
    assert seconds(found["TimeoutStopSec"][0]) >= parsed.drain_seconds + SHUTDOWN_SECONDS
    assert found["Type"] == ["notify"] and seconds(found["WatchdogSec"][0]) >= 30
    assert found["Restart"] == ["on-failure"] and found["RestartPreventExitStatus"] == ["2"]
    wanted = {
        "DynamicUser PrivateTmp PrivateDevices PrivateUsers ProtectHome ProtectClock ProtectControlGroups": "yes",
        "ProtectHostname ProtectKernelLogs ProtectKernelModules ProtectKernelTunables NoNewPrivileges": "yes",
        "LockPersonality RemoveIPC RestrictNamespaces RestrictRealtime RestrictSUIDSGID": "yes",
        "ProtectSystem": "strict",
        "ProtectProc": "invisible",
        "CapabilityBoundingSet AmbientCapabilities": "",
        "SystemCallArchitectures": "native",
        "IPAddressDeny": "any",
        "IPAddressAllow": "localhost",
        "UMask": "0077",
    }
    for names, value in wanted.items():
        assert {name: found[name] for name in names.split()} == {name: [value] for name in names.split()}
    assert found["SystemCallFilter"] == ["@system-service", "~@privileged @resources"]
    assert set(unit("openk3-gpu.conf")) == {"PrivateDevices", "DevicePolicy", "DeviceAllow"}


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    """Where its tool is installed: no complaint but of the missing program, and the exposure that the page states."""
    program = shutil.which("systemd-analyze")
    if program is None:  # the fields are compared by the test above
        return
    copy = tmp_path / "openk3.service"
    copy.write_text((DEPLOY / "openk3.service").read_text(encoding="utf-8"), encoding="utf-8")
    verified = subprocess.run([program, "verify", str(copy)], capture_output=True, text=True, timeout=120)
    complaints = [line for line in verified.stderr.splitlines() if "openk3.service" in line]
    assert all("/opt/openk3/bin/openk3 is not executable" in line for line in complaints), complaints
    command = [program, "security", "--offline=yes", "--no-pager", str(copy)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    (score,) = re.findall(r"Overall exposure level for openk3\.service: ([\d.]+)", shown)
    (most,) = re.findall(r"says ([\d.]+) of 10 or less", PAGE)
    assert float(score) <= float(most)


def test_every_flag_of_the_page_exists() -> None:
    """In prose and behind the image's name; the drain is as long as the page says."""
    known = {f"--{name.replace('_', '-')}" for name in Serve.__dataclass_fields__}
    prose = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    mentioned = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", prose))
    assert mentioned - known <= OTHERS and len(mentioned & known) > 4
    assert f"`--drain-seconds` ({ServerConfig('k3').drain_seconds:g})" in prose
    commands = re.findall(r"docker run [^`]*? openk3((?: --[^\n]*)?)\n", PAGE)
    assert len(commands) == 2 and commands[0] == ""
    assert served(image_command() + shlex.split(commands[1])).draft == "mtp"
    assert set(re.findall(r"openk3_[a-z_]+", prose)) <= set(metric_names())
    assert {path.name for path in DEPLOY.iterdir()} == set(
        re.findall(r"^\| `(.*)` \|", PAGE.replace("`, `", "` |\n| `"), re.M)
    )


def metric_names() -> list[str]:
    """As docs/serving.md lists them."""
    return re.findall(r"^\| `(openk3_[a-z_]+)", (ROOT / "docs" / "serving.md").read_text(encoding="utf-8"), re.M)


@pytest.mark.parametrize("name", sorted(path.name for path in DEPLOY.iterdir()))
def test_no_secret_lies_in_a_file(name: str) -> None:
    """Nothing that looks like a key or a password."""
    text = (DEPLOY / name).read_text(encoding="utf-8")
    assert not re.search(r"sk-[0-9a-f]{8}|BEGIN [A-Z ]*PRIVATE KEY|(?i:password|secret|key)=\S", text)
