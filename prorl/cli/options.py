"""Options that several commands share: each with its help line, said once.

A command annotates its parameter with one of these and leaves it out of its docstring.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from pydantic import BaseModel

from prorl.config import RunConfig, Sampling
from prorl.waits import wait_limit_s

LOOK_S = wait_limit_s("cli.look")

Flag = Annotated[bool, Parameter(negative="")]
"""An option that is given or not; there is no `--no-` of it."""


def of(model: type[BaseModel], key: str, *names: str) -> Parameter:
    """An option that is a key of a config: its help is the key's description."""
    return Parameter(name=names or None, help=model.model_fields[key].description)


Filter = Annotated[str | None, of(RunConfig, "filter", "--filter")]
AgentName = Annotated[str | None, of(RunConfig, "agent", "--agent")]
Seed = Annotated[int | None, of(RunConfig, "seed")]
Temperature = Annotated[float | None, of(Sampling, "temperature")]

JsonOut = Annotated[bool, Parameter(negative="", help="Print JSON.")]
JsonObject = Annotated[bool, Parameter(negative="", help="Print one JSON object.")]
JsonList = Annotated[bool, Parameter(negative="", help="Print a JSON list.")]

StoredName = Annotated[
    str, Parameter(help="Name of a run in the root, or path of a run directory.")
]

RunsRoot = Annotated[
    str, Parameter(help="Folder of the runs: a path, s3://BUCKET/PREFIX or gs://...")
]

SandboxKind = Annotated[
    str, Parameter(help="Kind of sandbox; auto = pyns where it works, else apptainer.")
]
ServiceRoot = Annotated[Path, Parameter(help="Folder that the service works on.")]
ServiceUrl = Annotated[
    str, Parameter(help="Address of a service elsewhere (its token in PRORL_TOKEN).")
]
ANY_ROOT = (
    "Folder for the control log and the runs, or s3://BUCKET/PREFIX, gs://... for the runs (the log"
    " then lies below prorl-runs). Default: prorl-runs."
)
JobRoot = Annotated[str | None, Parameter(help=ANY_ROOT)]

ConfigFile = Annotated[
    Path | None,
    Parameter(name=["--config", "-c"], help="YAML file; see `prorl schema --config`."),
]
Settings = Annotated[
    list[str] | None,
    Parameter(
        name="--set",
        negative="",
        help="Any setting, as KEY=VALUE, e.g. run.sampling.temperature=0.7.",
    ),
]
ServiceSettings = Annotated[
    list[str] | None,
    Parameter(
        name="--set", negative="", help="Any setting, as KEY=VALUE, e.g. service.init.slots=8."
    ),
]
ModelSettings = Annotated[
    list[str] | None,
    Parameter(
        name="--set", negative="", help="KEY=VALUE of `run.renderer`, e.g. variables.x=false."
    ),
]
Quiet = Annotated[bool, Parameter(name=["--quiet", "-q"], negative="", help="Show no progress.")]
