"""Coding agents, as their users install them, work through a whole loop: a call of a tool, its result, an answer.

The model is a script, so that it is known which tool is to be called. Worker aside, all parts are real.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sapwood_testing.router.scripted_model import ScriptedModel, call, tools_of

pytestmark = [pytest.mark.slow, pytest.mark.clients, pytest.mark.timeout(900)]

SECRET = re.compile(r"secret-[0-9a-f]{16}")
# The tools that run a command, by the agents' names, and the argument that holds it.
SHELLS = {
    "exec_command": "cmd",
    "Bash": "command",
    "bash": "command",
    "run_shell_command": "command",
    "shell": "command",
}
NOWHERE = "http://127.0.0.1:9"
MOST_PROMPTS = 12
ASK = "What is the secret?"
Settings = tuple[dict[str, str], list[str]]
"""Variables of the environment, and the arguments."""


@dataclass(frozen=True)
class Agent:
    """A coding agent.

    Attributes:
        package: What is installed, with its version.
        program: Its program.
        settings: Writes its files into its home; takes that and the server's URL.
        npm: Whether the package is npm's; else it is PyPI's.
    """

    package: str
    program: str
    settings: Callable[[Path, str], Settings]
    npm: bool = True


def _codex(home: Path, url: str) -> Settings:
    (home / "config.toml").write_text(f"""
model = "demo"
model_provider = "sapwood"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.sapwood]
name = "Sapwood"
base_url = "{url}/v1"
wire_api = "responses"
""")
    flags = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return {"CODEX_HOME": str(home)}, [*flags, ASK]


def _claude(home: Path, url: str) -> Settings:
    variables = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none", "CLAUDE_CONFIG_DIR": str(home)}
    variables |= {"ANTHROPIC_MODEL": "demo", "ANTHROPIC_SMALL_FAST_MODEL": "demo"}
    variables |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    return variables, ["-p", ASK, "--allowedTools", "Bash(cat:*)"]


def _opencode(home: Path, url: str) -> Settings:
    models = {"demo": {"name": "demo", "limit": {"context": 200_000, "output": 4096}}}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "Sapwood", "models": models}
    config = {
        "autoupdate": False,
        "share": "disabled",
        "small_model": "sapwood/demo",
        "provider": {"sapwood": {**provider, "options": {"baseURL": f"{url}/v1", "apiKey": "none"}}},
        "permission": {"bash": "allow"},
    }
    (home / "opencode.json").write_text(json.dumps(config))
    variables = {"OPENCODE_CONFIG": str(home / "opencode.json")}
    for name in ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS"):
        variables[f"OPENCODE_DISABLE_{name}"] = "1"
    return variables, ["run", "--model", "sapwood/demo", ASK]


def _qwen(home: Path, url: str) -> Settings:
    (home / ".qwen").mkdir()
    settings = {
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False},
    }
    (home / ".qwen" / "settings.json").write_text(json.dumps(settings))
    flags = ["--yolo", "--auth-type", "openai", "--openai-api-key", "none", "--openai-base-url", f"{url}/v1"]
    return {}, [*flags, "--model", "demo", "-p", ASK]


def _pi(home: Path, url: str) -> Settings:
    (home / ".pi" / "agent").mkdir(parents=True)
    model = {"id": "demo", "contextWindow": 200_000, "maxTokens": 4096, "input": ["text"]}
    provider = {"baseUrl": f"{url}/v1", "api": "openai-completions", "apiKey": "none", "models": [model]}
    (home / ".pi" / "agent" / "models.json").write_text(json.dumps({"providers": {"sapwood": provider}}))
    return {"PI_OFFLINE": "1"}, ["--provider", "sapwood", "--model", "demo", "-p", ASK]


def _continue(home: Path, url: str) -> Settings:
    model = {"name": "demo", "provider": "openai", "model": "demo", "apiBase": f"{url}/v1", "apiKey": "none"}
    model |= {"roles": ["chat"], "capabilities": ["tool_use"]}
    config = {"name": "sapwood", "version": "0.0.1", "schema": "v1", "models": [model]}
    (home / "config.yaml").write_text(json.dumps(config))
    return {"CONTINUE_TELEMETRY_ENABLED": "0"}, ["--config", str(home / "config.yaml"), "--auto", "-p", ASK]


def _gptme(home: Path, url: str) -> Settings:
    variables = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none", "GPTME_TELEMETRY_ENABLED": "false"}
    return variables, ["-n", "--tool-format", "tool", "--tools", "shell", "-m", "local/demo", ASK]


def _llm(home: Path, url: str) -> Settings:
    (home / "extra-openai-models.yaml").write_text(
        json.dumps([{"model_id": "demo", "model_name": "demo", "api_base": f"{url}/v1", "supports_tools": True}])
    )
    (home / "functions.py").write_text(
        "import subprocess\n\n\ndef shell(command: str) -> str:\n    return subprocess.getoutput(command)\n"
    )
    variables = {"LLM_USER_PATH": str(home), "OPENAI_API_KEY": "none"}
    return variables, ["-m", "demo", "--functions", str(home / "functions.py"), ASK]


AGENTS = {
    "codex": Agent("@openai/codex@0.171.0", "codex", _codex),
    "claude": Agent("@anthropic-ai/claude-code@2.1.332", "claude", _claude),
    "opencode": Agent("opencode-ai@1.18.33", "opencode", _opencode),
    "qwen": Agent("@qwen-code/qwen-code@0.24.4", "qwen", _qwen),
    "pi": Agent("@mariozechner/pi-coding-agent@0.73.1", "pi", _pi),
    "continue": Agent("@continuedev/cli@1.5.47", "cn", _continue),
    "gptme": Agent("gptme==0.35.1", "gptme", _gptme, npm=False),
    "llm": Agent("llm==0.36", "llm", _llm, npm=False),
}


def aider(url: str) -> Settings:
    """The settings of aider, which edits files by the model's text and runs a test; it has no tools."""
    variables = {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": "none"}
    quiet = ("analytics", "check-update", "show-model-warnings", "show-release-notes", "gitignore", "git")
    flags = ["--model", "openai/demo", "--edit-format", "whole", "--yes-always", "--map-tokens", "0"]
    flags += [f"--no-{each}" for each in quiet]
    flags += ["--auto-test", "--test-cmd", "sh test.sh", "--message", "Write answer.txt", "answer.txt"]
    return variables, flags


def read_the_secret(prompt: str) -> str:
    """Answers with what secret.txt holds, once a tool's result has it; to questions without tools with a title."""
    tools = tools_of(prompt)
    if (found := SECRET.search(prompt)) is not None:
        answered = "The file says" in prompt
        return call("complete", {}) if answered and "complete" in tools else f"The file says {found[0]}."
    for name in SHELLS.keys() & tools.keys():
        return call(name, {SHELLS[name]: "cat secret.txt"})
    return "A title"


def fix_what_the_test_says(prompt: str) -> str:
    """Writes a wrong answer.txt, and the right one once the test has said what is expected."""
    found = re.search(r"expected (\S+)", prompt)
    return f"Here it is.\n\nanswer.txt\n```\n{found[1] if found else 'wrong'}\n```\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedModel]:
    scripted = ScriptedModel(read_the_secret)
    with scripted.serving(tmp_path_factory.mktemp("model")):
        yield scripted


class Run:
    """An agent's folders, and how its program is run in them: it reaches this machine only.

    Args:
        folder: Where its home and project are made.
        model: What it asks.
    """

    def __init__(self, folder: Path, model: ScriptedModel) -> None:
        self.home, self.project, self._model = folder / "home", folder / "project", model
        self.home.mkdir()
        self.project.mkdir()
        self.secret = f"secret-{secrets.token_hex(8)}"
        (self.project / "secret.txt").write_text(f"{self.secret}\n")
        model.prompts.clear()
        model.answers.clear()

    def run(self, program: Path, settings: Settings, code: int = 0) -> str:
        """What the program prints; fails if it ends with another exit code."""
        variables, arguments = settings
        base = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        base |= {"HOME": str(self.home), "PWD": str(self.project), "TERM": "dumb", "NO_COLOR": "1", "CI": "1"}
        base |= {"DO_NOT_TRACK": "1", "DISABLE_TELEMETRY": "1", "DISABLE_AUTOUPDATER": "1"}
        base |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}
        base |= {"HTTP_PROXY": NOWHERE, "HTTPS_PROXY": NOWHERE, "NO_PROXY": "127.0.0.1,localhost"}
        for name, place in {"CONFIG": ".config", "DATA": ".data", "CACHE": ".cache", "STATE": ".state"}.items():
            base[f"XDG_{name}_HOME"] = str(self.home / place)
        try:
            done = subprocess.run(
                [program, *arguments],
                cwd=self.project,
                env=base | variables,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=240,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            pytest.fail(f"still running: {error.stdout!r} {error.stderr!r}"[-3000:])
        said = f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}\n{''.join(self._model.log)[-3000:]}"
        assert done.returncode == code, said
        assert len(self._model.prompts) <= MOST_PROMPTS, said
        assert not [line for line in self._model.log if " ERROR " in line], said
        return done.stdout if code == 0 else done.stderr


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_calls_a_tool_and_answers_with_its_result(
    model: ScriptedModel,
    make_environment: Any,
    install_packages: Any,
    show_versions: Any,
    tmp_path: Path,
    name: str,
) -> None:
    agent = AGENTS[name]
    show_versions(agent.package)
    folder = install_packages(agent.package) / "node_modules/.bin" if agent.npm else make_environment(agent.package)
    run = Run(tmp_path, model)
    printed = run.run(folder / agent.program, agent.settings(run.home, model.http))
    assert f"The file says {run.secret}." in printed
    [called] = [place for place, answer in enumerate(model.answers) if "cat secret.txt" in answer]
    after = next(prompt for prompt in model.prompts[called + 1 :] if run.secret in prompt)
    turns = after.split("<|im_start|>")
    [result] = [place for place, turn in enumerate(turns) if turn.startswith("tool\n") and run.secret in turn]
    assert turns[result - 1].startswith("assistant\n") and "cat secret.txt" in turns[result - 1]


def test_codex_knows_that_the_context_is_full(install_packages: Any, show_versions: Any, tmp_path: Path) -> None:
    codex = AGENTS["codex"]
    show_versions(codex.package)
    small = ScriptedModel(read_the_secret, context_length=2000)
    (tmp_path / "model").mkdir()
    with small.serving(tmp_path / "model"):
        run = Run(tmp_path, small)
        program = install_packages(codex.package) / "node_modules/.bin" / codex.program
        said = run.run(program, codex.settings(run.home, small.http), code=1)
    assert "ran out of room in the model's context window" in said  # else it takes it for a mistake, and never compacts
    assert not small.prompts


def test_aider_edits_until_its_test_passes(
    model: ScriptedModel, make_environment: Any, show_versions: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = "aider-chat==0.86.2"
    show_versions(package)
    monkeypatch.setattr(model, "answer", fix_what_the_test_says)
    run = Run(tmp_path, model)
    (run.project / "test.sh").write_text(
        'cmp -s answer.txt secret.txt || { echo "expected $(cat secret.txt)"; exit 1; }\n'
    )
    run.run(make_environment(package) / "aider", aider(model.http))
    assert (run.project / "answer.txt").read_text().strip() == run.secret
    assert len(model.prompts) == 2
