"""`prorl schema`: the reference pages of columns, settings and times, generated from the code.

docs/columns.md is its output, docs/settings.md that of `--settings`, docs/times.md that of
`--times`. With `--config` it is the JSON schema of config files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import orjson
from pydantic import create_model

from prorl.cli.options import Flag, JsonObject
from prorl.cli.output import say, say_json
from prorl.cli.settings import Job
from prorl.config import RunConfig, ServiceConfig
from prorl.envs import BUILT_IN, get_env
from prorl.envs.settings import record_of, rows_of
from prorl.schema import APPENDED, CONTROL, EDGE_BACK, EDGES, STREAM, TABLES
from prorl.schema.fields import MEANINGS, SCHEMA_VERSION
from prorl.waits import times_page

if TYPE_CHECKING:
    import pyarrow as pa

    from prorl.types import Json


def schema(
    *,
    config: Flag = False,
    settings: Flag = False,
    times: Flag = False,
    json: JsonObject = False,
) -> int:
    """The columns of every edge and table as Markdown, or the keys of config files.

    Example: prorl schema --config > prorl.schema.json   # completion for config files in editors

    Parameters
    ----------
    config
        The JSON schema of config files instead.
    settings
        Every key of config files instead, with its default and meaning.
    times
        The table of waits between processes instead: who waits for what, how long, why,
        and what happens then.
    """
    if config:
        say_json(config_schema())
    elif settings:
        say("\n".join(settings_page()))
    elif times:
        say("\n".join(times_page()))
    elif json:
        say_json({name: columns(table, name) for name, table in _all().items()})
    else:
        say(columns_page())
    return 0


def config_schema() -> dict[str, Json]:
    """JSON schema of a config file: a job with its service and run sections spelled out."""
    whole = create_model(
        "Config", __base__=Job, service=(ServiceConfig, ServiceConfig()), run=(RunConfig, None)
    )
    return whole.model_json_schema()


VIEWS = {
    "deliveries": "group_id, delivery_seq, min_version: groups in the order of delivery",
    "partial": "as edge/scored: what was sampled by attempts that were not committed",
    "passk": "run_id, group_id, task_id, data_source, n, c, k, pass_at_k: n valid members of a"
    " group, c with a full reward",
    "tool_calls": "run_id, rollout_id, attempt, turn, name, arguments, error, exit_code, timed_out:"
    " a row a call; error where the call could not be parsed; exit_code is 0 unless the reply says"
    " another, null where no reply is stored",
}


def columns(table: pa.Schema, name: str) -> list[dict[str, Json]]:
    """Columns of one schema in order."""
    return [
        {
            "name": field.name,
            "type": str(field.type),
            "nullable": field.nullable,
            "meaning": MEANINGS.get(f"{name}.{field.name}") or MEANINGS.get(field.name, ""),
        }
        for field in table
    ]


def _all() -> dict[str, pa.Schema]:
    edges = {f"edge/{name}": edge for name, edge in EDGES.items()}
    return {
        **edges,
        "edge back (credit, acks)": EDGE_BACK,
        "control": CONTROL,
        **TABLES,
        **APPENDED,
        "stream": STREAM,
    }


def columns_page() -> str:
    """Returns the whole page; each edge shows only what its stage added."""
    lines = [
        f"# prorl schemas, version {SCHEMA_VERSION}",
        "",
        "`prorl schema` prints this page. `edge/NAME` are the streams between the stages; each",
        "edge has the columns of the one before and those listed for it. `edge back` and `control`",
        "are the messages beside them. `stream` is what trainers get. The other sections are the",
        "tables that SQL sees. `prorl/schema/__init__.py` has the rules for changes.",
        "",
    ]
    listed: set[tuple[str, str]] = set()
    for name, table in _all().items():
        rows = columns(table, name)
        if name.startswith("edge/"):
            rows = [row for row in rows if (row["name"], row["type"]) not in listed]
            listed |= {(row["name"], row["type"]) for row in rows}
        lines += [f"## {name}", "", "| column | type | null | meaning |", "|---|---|---|---|"]
        lines += [*map(_line, rows), ""]
    lines += ["## views", "", "SQL also sees these, which are computed from the tables.", ""]
    lines += [
        "| view | columns |",
        "|---|---|",
        *(f"| {name} | {of} |" for name, of in VIEWS.items()),
    ]
    return "\n".join(lines)


class Setting(NamedTuple):
    """One key of a config file."""

    key: str
    """With the sections that it stands in: `run.limits.tool_s`."""
    type: str
    default: str
    meaning: str


def settings_page() -> Iterator[str]:
    """Yields the lines of the page of settings."""
    yield "# Settings"
    yield ""
    yield "`prorl schema --settings` prints this page. The keys stand in a file for `--config`"
    yield "(YAML or JSON): `service` is how a service runs on this machine, `run` is one run."
    yield "On a command line `--set run.limits.tool_s=60` wins over the file. An environment"
    yield "variable such as `PRORL_INIT__SLOTS=8` sets a key of `service`, here"
    yield "`service.init.slots`; it wins over the file, and `--set` wins over it."
    section = None
    for setting in settings_of(config_schema()):
        name = setting.key.rpartition(".")[0]
        if name != section:
            section = name
            yield from ("", f"## {name or 'A job (`prorl run`, `prorl eval`)'}", "")
            yield from ("| key | type | default | meaning |", "|---|---|---|---|")
        yield f"| `{setting.key}` | {setting.type} | {setting.default} | {setting.meaning} |"
    yield ""
    yield from settings_of_envs()


def settings_of(schema: Json) -> list[Setting]:
    """Returns the keys of a JSON schema, those of a section one after the other."""
    sections: list[tuple[str, Json, Json]] = [("", schema, {})]
    settings: list[Setting] = []
    for prefix, section, defaults in sections:  # it grows meanwhile
        for name, declared in section["properties"].items():
            # Two sections of one type may have different defaults: `service.init`, `service.run`.
            field = {**declared, "default": defaults[name]} if name in defaults else declared
            choices = [field, *field.get("anyOf", ())]
            inner = [
                schema["$defs"][choice["$ref"].rpartition("/")[2]]
                for choice in choices
                if "$ref" in choice
            ]
            nested = [choice for choice in inner if "properties" in choice]
            if nested:
                inherited = field.get("default") or {}
                sections += [(f"{prefix}{name}.", choice, inherited) for choice in nested]
            else:
                settings.append(_setting(prefix + name, field, inner))
    return settings


def _setting(key: str, field: Json, inner: list[Json]) -> Setting:
    choices = [
        choice for choice in (*field.get("anyOf", (field,)), *inner) if choice.get("type") != "null"
    ]
    types = [_type(choice) for choice in choices if "$ref" not in choice]
    default = orjson.dumps(field["default"]).decode() if "default" in field else ""
    meaning = " ".join(field.get("description", "").split()).replace("|", "\\|")
    return Setting(key, " or ".join(dict.fromkeys(types)), default and f"`{default}`", meaning)


def _type(field: Json) -> str:
    """Returns the type of a JSON schema, with its choices or bounds."""
    if "const" in field or "enum" in field:
        return ", ".join(f"`{choice}`" for choice in field.get("enum", [field.get("const")]))
    bounds = [f"{sign} {field[name]:,}" for name, sign in _BOUNDS.items() if name in field]
    return " ".join([field.get("type", "any"), ", ".join(bounds)]).strip()


_BOUNDS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}


def settings_of_envs() -> Iterator[str]:
    """Yields the lines of a table of the settings that the built-in envs take."""
    yield "## Settings of envs"
    yield ""
    yield "Given by `--env NAME?KEY=VALUE`, a run's `env`, or a row's `data.settings`."
    yield ""
    yield "| env | setting | type | default | meaning |"
    yield "|---|---|---|---|---|"
    for name in BUILT_IN:
        for row in rows_of(record_of(get_env(name))):
            yield f"| {name} | {row.name} | {row.type} | {row.default} | {row.meaning} |"


def _line(row: dict[str, Json]) -> str:
    null = "yes" if row["nullable"] else ""
    return f"| {row['name']} | `{row['type']}` | {null} | {row['meaning']} |"
