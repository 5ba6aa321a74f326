"""The table of waits: one row for each wait that crosses a process, a host or a border.

A module that waits takes its seconds from here: `READY_S = wait_limit_s("supervisor.ready")`.
What has to end before what stands in ORDER. `prorl schema --times` prints both, and docs/times.md
is that page.

Not here: pauses between two looks or two tries, budgets of CPU time, `limits` of a run (which are
settings), and waits of the tool server within a sandbox, whose program has no copy of this table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple


class Wait(NamedTuple):
    """A row of the table."""

    name: str
    seconds: float
    waits: str
    """The party that waits, and for what: "RUN: a sandbox that starts"."""
    then: str
    """The event that follows when the time is over."""
    why: str
    """The reason why this long: what fails with less, what is lost with more."""


class WaitOrder(NamedTuple):
    """Waits that lie within each other: each is over before the next."""

    names: tuple[str, ...]
    why: str


HEARTBEATS = (
    Wait(
        "process.beat",
        1.0,
        "supervisor: a heartbeat of each process",
        "nothing; `process.silence` counts",
        "The supervisor writes nothing for it, so that a second costs nothing.",
    ),
    Wait(
        "worker.beat",
        0.5,
        "gateway: a heartbeat of each worker on this host",
        "nothing; `worker.silence` counts",
        "A heartbeat also carries counts, which status shows.",
    ),
    Wait(
        "worker.far_beat",
        2.0,
        "gateway: a heartbeat of each worker on another host",
        "nothing; `worker.silence` counts",
        "A gateway may have hundreds of them, and heartbeats are its first limit.",
    ),
    Wait(
        "process.silence",
        8.0,
        "supervisor: a process whose event loop does not turn",
        "it is killed and started again",
        "Longer than the garbage collector or a slow disk stops a loop; with more, a frozen "
        "process holds its slots for longer.",
    ),
    Wait(
        "process.stacks",
        5.0,
        "a process: its own loop",
        "it writes all its stacks to its log",
        "Before its parent kills it, so that the log says where it stood.",
    ),
    Wait(
        "worker.silence",
        20.0,
        "gateway: any message of a silent worker",
        "it counts as dead, and its attempts are given to others after `worker.least_grace`",
        "The supervisor of its host comes first, since it knows for certain.",
    ),
    Wait(
        "worker.least_grace",
        5.0,
        "gateway: a silent worker that comes back",
        "its attempts are given to others",
        "A worker dials again in less than one second.",
    ),
    Wait(
        "worker.grace",
        15.0,
        "gateway: a worker whose stream ended, of another host or with a journal of turns",
        "its attempts are given to others",
        "gRPC ends a stream ten seconds after data that nobody acknowledged, and dialling takes "
        "less than one; the next incarnation of a worker reads its journal within seconds. Any "
        "other worker of the service's own host is dead with its stream.",
    ),
    Wait(
        "worker.give_up",
        25.0,
        "gateway: a worker of another host, since its last word",
        "its attempts are given to others, whatever else was waited for",
        "The longest that a lost node delays its rollouts.",
    ),
    Wait(
        "worker.claim",
        2.0,
        "gateway: a worker that claims an attempt after a lost stream or a restart",
        "the attempt counts as lost and is given to another",
        "A claim is the first thing that a worker says.",
    ),
    Wait(
        "worker.queued",
        1.0,
        "gateway: RUN's report that a leased row waits there",
        "the row counts as begun",
        "Two heartbeats of RUN, which report it.",
    ),
    Wait(
        "loop.stopped",
        2.0,
        "a process: its own event loop",
        "the time is given back to every deadline that it measures (`ActiveLoop`)",
        "A stop of the process (SIGSTOP, a laptop's lid) is charged to nobody.",
    ),
)

PROCESSES = (
    Wait(
        "supervisor.ready",
        60.0,
        "supervisor: the first heartbeat of each process at a start",
        "the start has failed, with the last lines of that process's log",
        "Imports take seconds, a log of a million events ten; a slow disk doubles both.",
    ),
    Wait(
        "supervisor.ready_again",
        30.0,
        "supervisor: the first heartbeat of a process that is started again",
        "it is killed and started once more",
        "The same with files that are in memory by now.",
    ),
    Wait(
        "supervisor.stop",
        6.0,
        "supervisor: a process after SIGTERM",
        "SIGKILL; what was in hand is played again",
        "sandboxd and the store end in less; each promises to be gone a second before.",
    ),
    Wait(
        "supervisor.stop_worker",
        8.0,
        "supervisor: a worker after SIGTERM",
        "SIGKILL; what was in hand is played again",
        "A chain that leaves takes `chain.leave` and `chain.end_first`.",
    ),
    Wait(
        "supervisor.stop_service",
        14.0,
        "supervisor: the process `service` after SIGTERM",
        "SIGKILL; the log and the outbox bring back what was not committed",
        "Its stages, its store and its gateway end one after the other.",
    ),
    Wait(
        "gateway.stop",
        2.0,
        "gateway: its log and its HTTP requests at the end",
        "they are cut; clients send again",
        "A commit takes milliseconds.",
    ),
    Wait(
        "serve.run",
        5.0,
        "`prorl serve` at a stop: rollouts that RUN is about to end",
        "they are given back",
        "A person waits; a rollout that is not nearly done takes minutes.",
    ),
    Wait(
        "serve.stop",
        30.0,
        "`prorl serve` at a stop: finished rollouts to be scored and stored",
        "the processes are stopped; what was in hand is played again",
        "Verifiers take seconds to minutes; a second interrupt stops at once.",
    ),
    Wait(
        "helper.cancel",
        1.0,
        "a stage: a helper whose question was given up, to clean up behind itself",
        "the helper is killed and a new one started",
        "It is for a user's `finally`; a slot waits meanwhile.",
    ),
    Wait(
        "helper.stacks",
        0.3,
        "a stage: a helper that is about to be killed, to write its stacks",
        "it is killed without them",
        "`faulthandler` takes milliseconds.",
    ),
    Wait(
        "tracker.last",
        30.0,
        "the end of a run or a service: its trackers, which send their last points",
        "they are killed; what they had not sent is lost to them",
        "W&B sends over a network; whoever ends a service has to wait for it.",
    ),
)

EDGES = (
    Wait(
        "flight.accept",
        10.0,
        "a stream's server: its own handler, to accept or refuse the stream",
        "the stream is refused",
        "A gateway that starts reads its log first.",
    ),
    Wait(
        "flight.dial",
        15.0,
        "a stream's client: the stream's acceptance",
        "it dials again, with a pause that doubles",
        "Longer than `flight.accept`, so that the refusal's text arrives.",
    ),
    Wait(
        "flight.idle",
        10.0,
        "a stream's server: something to send",
        "it sends an empty message",
        "Flight has no event for a reader that left; a write finds out.",
    ),
    Wait(
        "flight.close",
        2.0,
        "the end that closes a stream: the other end's goodbye",
        "the stream is cut; unacknowledged rows are sent again",
        "A goodbye takes a round trip.",
    ),
    Wait(
        "flight.refused",
        30.0,
        "a worker: a gateway that refuses it",
        "the worker ends with the refusal",
        "A service that starts may refuse everybody for a moment.",
    ),
    Wait(
        "chain.leave",
        4.0,
        "the first stages of a worker that leaves: what they stopped, to be taken",
        "the worker goes on leaving; the rows are played again",
        "With `chain.end_first` less than a worker has to end.",
    ),
    Wait(
        "chain.end_first",
        2.0,
        "the last stages of a worker that leaves: what the first ones have begun",
        "the worker leaves; the rows are played again",
        "See `chain.leave`.",
    ),
    Wait(
        "chain.alone",
        20.0,
        "a worker that leaves: a gateway that is away",
        "it leaves",
        "By then its attempts are given to others, or will be a moment after the gateway is back.",
    ),
    Wait(
        "store.stray",
        2.0,
        "store: news of a row's run from the log",
        "it asks the gateway what became of the run",
        "The log and the rows come by two ways; the log is behind by milliseconds.",
    ),
    Wait(
        "store.drain",
        3.0,
        "a store that leaves: to write and commit what it has",
        "what was not committed is sent again",
        "Within `supervisor.stop`.",
    ),
    Wait(
        "store.filter",
        5.0,
        "store: one query of a run's filter",
        "the filter has failed for that group, with a message",
        "A filter that never ends must not keep its groups undecided.",
    ),
    Wait(
        "store.filter_grace",
        1.0,
        "store: the filter's process, after `store.filter`",
        "it is killed and started again",
        "It stops its query by itself.",
    ),
    Wait(
        "store.put",
        30.0,
        "store: one try of a put to an object store, besides the time for its bytes",
        "it is tried again, with pauses of half a minute in all; then the process starts again",
        "Object stores answer in less than a second, and throttle for some.",
    ),
    Wait(
        "store.readers",
        60.0,
        "compaction: readers of the parts that it replaced",
        "the old parts are removed",
        "A reader opens its parts in seconds after it listed them.",
    ),
    Wait(
        "store.dying",
        1.0,
        "a start: the lock of a compaction that was killed",
        "the start says which process holds it",
        "The kernel gives a lock back when the process is reaped.",
    ),
)

SANDBOXES = (
    Wait(
        "sandbox.start",
        90.0,
        "INIT, EVAL: sandboxd, to start a sandbox",
        "the attempt failed by infrastructure and is tried again",
        "A start may wait for room and for its turn.",
    ),
    Wait(
        "sandbox.serve",
        30.0,
        "sandboxd: the tool server in a sandbox that starts",
        "the start has failed, with what the launcher said",
        "On a busy machine the imports of a user's tools take ten seconds.",
    ),
    Wait(
        "sandbox.request",
        30.0,
        "a worker: sandboxd, for requests that start nothing",
        "the attempt failed by infrastructure",
        "Ending a sandbox takes `sandbox.stop` and `sandbox.exit`, and sandboxd ends hundreds at "
        "once.",
    ),
    Wait(
        "sandbox.patience",
        20.0,
        "a worker: a sandboxd that is being restarted",
        "the attempt failed by infrastructure",
        "A restart takes one to three seconds; with less every attempt in INIT would be lost.",
    ),
    Wait(
        "sandbox.stop",
        3.0,
        "sandboxd: a sandbox's guard, to end and reap what is inside",
        "the guard is killed, and the janitor ends the rest",
        "Databases and browsers take a second to end.",
    ),
    Wait(
        "sandbox.exit",
        5.0,
        "sandboxd: the end of killed processes",
        "sandboxd goes on; they end when the kernel lets them",
        "A process that writes to a slow disk ends after its write.",
    ),
    Wait(
        "sandbox.cgroup",
        5.0,
        "sandboxd: a control group whose processes are killed",
        "it is removed at the next start",
        "The kernel lets go of it after the last process is reaped.",
    ),
    Wait(
        "sandbox.clean",
        5.0,
        "sandboxd at its end: big folders to be removed",
        "the next sandboxd of this root removes the rest",
        "Within `supervisor.stop`, which ends it otherwise.",
    ),
    Wait(
        "sandbox.fate",
        2.0,
        "sandboxd: a launcher's exit, after its client saw the connection break",
        "the failure is told without its cause",
        "The exit comes within milliseconds; it says whether memory or a limit ended the sandbox.",
    ),
    Wait(
        "sandbox.probe",
        10.0,
        "doctor, sandboxd: a probe's command in a sandbox",
        "this kind does not work here, with a message",
        "A command takes milliseconds.",
    ),
    Wait(
        "sandbox.connect",
        10.0,
        "a stage: a connection to a sandbox's tool server",
        "the sandbox is lost; the attempt is tried again",
        "Its socket listens before it starts: only a full backlog is waited for.",
    ),
    Wait(
        "sandbox.call_grace",
        8.0,
        "a stage: a tool's answer, past the call's own limit",
        "the sandbox is lost; the attempt is tried again",
        "The tool server ends a command by INT, TERM and KILL, which takes two to three seconds.",
    ),
    Wait(
        "sandbox.file",
        30.0,
        "a stage: one piece of a file",
        "the sandbox is lost; the attempt is tried again",
        "A busy disk takes seconds for it.",
    ),
    Wait(
        "sandbox.pack",
        100.0,
        "a stage: a workspace to be packed or unpacked",
        "the call failed",
        "A gigabyte at ten megabytes a second.",
    ),
    Wait(
        "sandbox.alive",
        5.0,
        "RUN after a restart: a sandbox of its last incarnation",
        "the attempt begins anew",
        "A sandbox that runs answers at once.",
    ),
    Wait(
        "image.make",
        900.0,
        "sandboxd: one image, to be fetched and unpacked",
        "the image is called bad for a minute, with the reason",
        "Tens of gigabytes on a slow disk.",
    ),
    Wait(
        "image.claim_beat",
        10.0,
        "nodes with a store of images: a heartbeat of the node that builds one",
        "nothing; `image.claim` counts",
        "A request to the store each time.",
    ),
    Wait(
        "image.claim",
        60.0,
        "nodes with a store of images: the same, missing",
        "another node builds the image",
        "With less, a store that is slow has images built twice; a dead builder costs that long.",
    ),
    Wait(
        "image.end",
        5.0,
        "whoever stops making an image: its child, to end what it has started",
        "its process group is killed",
        "Builders unmount their layers first.",
    ),
    Wait(
        "proxy.head",
        15.0,
        "network proxy: a client's request",
        "the connection is refused (408)",
        "The client is on this machine.",
    ),
    Wait(
        "proxy.resolve",
        15.0,
        "network proxy: a name's addresses",
        "the connection is refused (504)",
        "Clients give up after 15 to 30 s: what takes longer is no use to them.",
    ),
    Wait(
        "proxy.connect",
        15.0,
        "network proxy: a server's acceptance",
        "the connection is refused (504)",
        "See `proxy.resolve`.",
    ),
    Wait(
        "proxy.idle",
        300.0,
        "network proxy: a byte either way",
        "the connection ends",
        "A server that packs a large repository is silent for minutes; one that is forgotten must "
        "not hold a place for a day.",
    ),
    Wait(
        "proxy.refusals",
        5.0,
        "sandboxd: the proxy's list of what it refused for a rollout",
        "the rollout has no such rows",
        "The list is in memory.",
    ),
)

AGENTS = (
    Wait(
        "agent.tool_grace",
        15.0,
        "RUN: a tool call, past its own limit",
        "`sandbox_lost`: the attempt is tried again",
        "Longer than `sandbox.call_grace`: by then the sandbox has answered or is lost.",
    ),
    Wait(
        "agent.artifact",
        45.0,
        "RUN: the artifact, also when the deadline has passed",
        "`sandbox_broken`, which is charged to its agent",
        "The policy is scored by it. `sandbox.file` comes first, since it knows who is to blame; a "
        "sandbox that answers, but slowly, is as its agent has made it.",
    ),
    Wait(
        "run.grace",
        60.0,
        "RUN: an agent, past its deadline",
        "the agent is cancelled, and the attempt is tried again",
        "Longer than `agent.artifact`, and than a last tool call that ends by itself.",
    ),
    Wait(
        "agent.overtime",
        30.0,
        "RUN: a user's agent, past its deadline",
        "its process is killed, and the env is charged",
        "Its next request tells it that the time is over.",
    ),
    Wait(
        "agent.call",
        1.0,
        "RUN: a model call of a program, to see that the attempt's time is over",
        "the call is cut",
        "A call ends by itself at the next token.",
    ),
    Wait(
        "agent.cancel",
        10.0,
        "RUN: the end of a program that is being ended",
        "RUN goes on; the end of its sandbox ends it",
        "Longer than `sandbox.call_grace`.",
    ),
    Wait(
        "model.silent",
        5.0,
        "RUN: a token, when the attempt's time is over",
        "after tokens the answer is cut as truncated; without any the attempt is tried again",
        "A call without a token for so long waits for its server, not for the policy.",
    ),
    Wait(
        "model.cancel",
        5.0,
        "RUN: the end of a cancelled model call",
        "RUN goes on without it",
        "A server answers to a closed connection at its next token.",
    ),
    Wait(
        "model.first_token",
        240.0,
        "RUN: the first token of a call",
        "the call goes to another server; without one it is infrastructure's failure",
        "A busy server's queue, and the prompt's reading.",
    ),
    Wait(
        "model.next_token",
        30.0,
        "RUN: the next token of a call",
        "the call goes on at another server, from the tokens that it has",
        "A server that pauses for new weights says so; one that swaps takes seconds.",
    ),
    Wait(
        "model.gone",
        1.0,
        "RUN: a token of a server that the gateway calls dead",
        "the call goes on at another server",
        "A server that streams is alive, whatever its health page says.",
    ),
    Wait(
        "model.overtaken",
        10.0,
        "RUN: the first token of a call whose later neighbours have had theirs",
        "the call goes to another server",
        "One second more for each 500 tokens of its prompt.",
    ),
    Wait(
        "endpoint.read",
        60.0,
        "model endpoint: a request's body",
        "408, and the rollout is charged",
        "It comes from this host, or a guest's.",
    ),
    Wait(
        "endpoint.write",
        60.0,
        "model endpoint: a client, to take what was written",
        "the connection ends, and the rollout is charged",
        "An agent that computes for a minute without reading its stream is broken.",
    ),
    Wait(
        "endpoint.keep_alive",
        10.0,
        "model endpoint: the reply",
        "the answer begins without it, and sends a keep-alive as often",
        "Clients and proxies give up after 30 to 60 s of silence.",
    ),
    Wait(
        "endpoint.linger",
        2.0,
        "model endpoint: a client, to read that its request is refused before it is sent",
        "the connection is reset",
        "A reset under what is still sent hides the refusal.",
    ),
    Wait(
        "guest.silent",
        30.0,
        "RUN: a heartbeat of a guest that leased an attempt",
        "the lease ends, and the attempt is tried again",
        "Guests show one each ten seconds.",
    ),
    Wait(
        "guest.start",
        30.0,
        "RUN: the first request of a guest that it starts",
        "the next guest may start",
        "Imports of an agent's framework take ten seconds; all at once would take minutes.",
    ),
    Wait(
        "guest.end",
        10.0,
        "RUN: everything that a guest has started, to be killed",
        "what watches over it is killed, and the kernel ends the rest with it",
        "Container runtimes take seconds.",
    ),
    Wait(
        "guest.ask",
        60.0,
        "a guest: an attempt to lease",
        "it gets none, and asks again",
        "Proxies end a request that is silent for a minute.",
    ),
)

ENVS = (
    Wait(
        "env.hook",
        20.0,
        "whoever opens an env: `check`, `messages`, `tools` and other hooks that only compute",
        "the task is called bad, with the hook's name",
        "Less than a client waits for the answer to what it submits.",
    ),
    Wait(
        "env.call_grace",
        12.0,
        "RUN: a user's `call`, past the call's limit",
        "its helper is killed, and the env is charged",
        "Longer than `sandbox.call_grace`, which answers first.",
    ),
    Wait(
        "env.respond",
        60.0,
        "RUN: a user's `respond`",
        "its helper is killed, and the env is charged",
        "It may ask a model, which plays the user.",
    ),
    Wait(
        "env.artifact",
        40.0,
        "RUN: a user's `artifact`",
        "its helper is killed, and the env is charged",
        "Less than `agent.artifact`, so that the env is named.",
    ),
    Wait(
        "env.prepare_lead",
        2.0,
        "INIT: a user's `prepare`, so much before `limits.init_s` is over",
        "its helper is killed, and the env is charged",
        "Otherwise its stage would give up first, which is nobody's fault.",
    ),
    Wait(
        "env.program",
        40.0,
        "RUN: a program of ours in a Harbor task's sandbox, with packing and fetching",
        "the task is called bad",
        "Less than `agent.artifact`.",
    ),
    Wait(
        "rubric.grace",
        5.0,
        "EVAL: a function of a rubric, past its deadline",
        "the function is named as what hangs",
        "One that keeps its deadline says so itself.",
    ),
    Wait(
        "env.score_grace",
        7.0,
        "EVAL: a user's `score`, past its deadline",
        "its helper is killed, and the env is charged",
        "Longer than `rubric.grace`, which names the function.",
    ),
    Wait(
        "eval.grace",
        10.0,
        "EVAL: an env, past `limits.eval_s`",
        "the score failed and is tried again",
        "Longer than `env.score_grace`, which names the env.",
    ),
    Wait(
        "eval.start",
        60.0,
        "EVAL, beside a verifier's own limit: its sandbox and its files",
        "the score failed and is tried again",
        "With less, a verifier that uses its whole time would be the grader's failure.",
    ),
    Wait(
        "tests.runner",
        15.0,
        "EVAL: the runner's own work, beside the tests' limit",
        "the tests gave no report, and are run again",
        "It starts an interpreter and reads a report.",
    ),
    Wait(
        "renderer.make",
        120.0,
        "RUN: a run's renderer, to be made",
        "the attempt failed by infrastructure",
        "A tokenizer of 250,000 words takes seconds, from a cold disk a minute.",
    ),
    Wait(
        "renderer.check",
        600.0,
        "gateway: the proof of a model's chat template",
        "the run is refused",
        "A large template with tools takes a minute on a busy machine.",
    ),
    Wait(
        "renderer.check_users",
        120.0,
        "gateway: a user's renderer, to be made and asked for one prompt",
        "the run is refused",
        "See `renderer.make`.",
    ),
    Wait(
        "renderer.users",
        20.0,
        "RUN: one question to a user's renderer",
        "the task is called bad",
        "A million tokens take ten seconds.",
    ),
)

SERVERS = (
    Wait(
        "probe.health",
        1.0,
        "gateway: a model server's health page",
        "a failed probe; the server is out of the pool until one succeeds",
        "Servers answer it beside their work.",
    ),
    Wait(
        "probe.token",
        5.0,
        "gateway: one token of a server that comes back",
        "it stays out of the pool",
        "An idle server takes milliseconds, and one that just started compiles first.",
    ),
    Wait(
        "probe.loading",
        30.0,
        "gateway: a server that takes new weights",
        "its silence counts again",
        "A checkpoint of tens of gigabytes from a local disk.",
    ),
    Wait(
        "server.check",
        30.0,
        "gateway: a new server's answers to all checks",
        "it is refused, with a message",
        "A server that compiles answers late.",
    ),
    Wait(
        "server.vocabulary",
        10.0,
        "gateway: a server's number of token ids",
        "the run is made without this check, and the log says so",
        "See `server.check`.",
    ),
    Wait(
        "server.open",
        30.0,
        "RUN: a server's answers to the checks before its first rollout",
        "the attempt failed by infrastructure",
        "See `server.check`.",
    ),
    Wait(
        "server.lookout",
        10.0,
        "RUN: one token of a server whose call got none for `model.overtaken`",
        "nothing: the call waits on; a token would have ended it",
        "A busy server's queue is seconds long.",
    ),
    Wait(
        "server.label",
        10.0,
        "RUN: a server's statement of which weights it serves",
        "the call failed, and goes to another server",
        "A server that is loading answers late.",
    ),
    Wait(
        "server.label_cut",
        1.0,
        "RUN: the same for a call that was cut short",
        "the tokens' version is unknown",
        "Whoever waits has no time left.",
    ),
    Wait(
        "weights.stated",
        2.0,
        "gateway: a server's statement of its weights, when others are announced",
        "the announcement is refused: say it again",
        "It takes milliseconds; a frozen server must not hold up who asks for others.",
    ),
    Wait(
        "weights.claim",
        1.0,
        "gateway: the same, when the answer must be of this moment",
        "the announcement is refused: say it again",
        "No server is started anew in less.",
    ),
    Wait(
        "weights.load",
        900.0,
        "gateway, trainer: a server, to load weights",
        "the publication failed",
        "A checkpoint of hundreds of gigabytes from a network disk.",
    ),
    Wait(
        "weights.ask",
        5.0,
        "gateway, trainer: a server's answer that costs nothing",
        "the publication failed",
        "A server that pauses answers at once.",
    ),
    Wait(
        "weights.connect",
        5.0,
        "gateway, trainer: a connection to a server",
        "the publication failed",
        "A server listens before it serves.",
    ),
)

CLIENTS = (
    Wait(
        "client.retry",
        60.0,
        "a client: a service that went away",
        "the call fails",
        "A restart takes seconds, with a long log half a minute.",
    ),
    Wait(
        "client.call",
        30.0,
        "a client: one call, besides what it asks the server to wait",
        "it is sent again",
        "Longer than `submit.check`, and than `renderer.proof`.",
    ),
    Wait(
        "client.stream",
        30.0,
        "a client's stream: groups",
        "it asks again",
        "On a stream that is silent for longer, a server takes gRPC's pings for an attack.",
    ),
    Wait(
        "client.read",
        300.0,
        "a client: one piece of data",
        "it is asked for again",
        "`max_bytes` over a slow link.",
    ),
    Wait(
        "submit.check",
        25.0,
        "gateway: a user's env, to be imported and to check its tasks",
        "the submission is refused",
        "Less than a client waits, which then sends it again.",
    ),
    Wait(
        "renderer.proof",
        10.0,
        "gateway: the proof of a run's renderer, within one request",
        "the client is told that it goes on, and asks again",
        "Less than `client.call`.",
    ),
    Wait(
        "tls.handshake",
        3.0,
        "TLS listener: a stranger's handshake",
        "the connection ends",
        "A handshake takes two round trips; strangers hold few places.",
    ),
    Wait(
        "node.patience",
        20.0,
        "a node that starts: its service",
        "it ends with what to look at",
        "Nodes and service are often started together.",
    ),
    Wait(
        "node.finish",
        60.0,
        "a node whose time ends: what was ended, to be scored and stored",
        "the rest is played elsewhere",
        "A verifier takes seconds to minutes; a quarter of the time at most.",
    ),
    Wait(
        "cli.look",
        2.0,
        "a command: a service that somebody asks for",
        "it says that nothing answers",
        "A person waits.",
    ),
    Wait(
        "cli.gateway",
        40.0,
        "`prorl run`: a gateway that is being restarted",
        "the command ends; `prorl run --resume` continues the run",
        "A restart takes one to three seconds, but on a machine that has much to do half a minute;"
        " the supervisor gives up first, and then the command ends at once.",
    ),
    Wait(
        "cli.metrics",
        5.0,
        "doctor: a server's page of metrics",
        "the server is described without it",
        "A person waits.",
    ),
    Wait(
        "cli.terminal",
        30.0,
        "`prorl sandbox open`: the terminal's program inside",
        "it ends with a message",
        "Python starts late on a machine that has much to do.",
    ),
)

TABLE: Final[dict[str, tuple[Wait, ...]]] = {
    "Heartbeats": HEARTBEATS,
    "Processes": PROCESSES,
    "Streams, stages and store": EDGES,
    "Sandboxes, images and network": SANDBOXES,
    "Agents and model calls": AGENTS,
    "Envs, scores and renderers": ENVS,
    "Model servers and weights": SERVERS,
    "Clients, commands and nodes": CLIENTS,
}

_SECONDS: Final = {row.name: row.seconds for rows in TABLE.values() for row in rows}

ORDER: Final = (
    WaitOrder(("loop.stopped", "process.silence"), "a stop is noticed before it is a death"),
    WaitOrder(
        ("process.beat", "process.stacks", "process.silence", "worker.silence", "worker.give_up"),
        "who knows for certain acts first",
    ),
    WaitOrder(("worker.far_beat", "worker.silence"), "a late heartbeat is no death"),
    WaitOrder(("worker.claim", "worker.least_grace", "worker.grace"), "a claim is the first word"),
    WaitOrder(
        ("chain.end_first", "chain.leave", "supervisor.stop_worker"), "a worker ends by itself"
    ),
    WaitOrder(("store.drain", "supervisor.stop"), "a store ends by itself"),
    WaitOrder(("sandbox.clean", "supervisor.stop"), "sandboxd ends by itself"),
    WaitOrder(
        ("supervisor.stop", "supervisor.stop_worker", "supervisor.stop_service"),
        "`service` ends after all that it may hold",
    ),
    WaitOrder(("serve.run", "serve.stop"), "RUN is asked to end first"),
    WaitOrder(("flight.accept", "flight.dial"), "the refusal's text arrives"),
    WaitOrder(("store.filter_grace", "store.filter"), "a query stops by itself"),
    WaitOrder(("sandbox.stop", "sandbox.request"), "an end is waited for"),
    WaitOrder(("sandbox.serve", "sandbox.start"), "sandboxd says why a start failed"),
    WaitOrder(
        ("sandbox.call_grace", "env.call_grace", "agent.tool_grace"),
        "whoever knows why a call hangs speaks first",
    ),
    WaitOrder(
        ("sandbox.call_grace", "agent.cancel"), "a command ends before its program is given up"
    ),
    WaitOrder(
        ("sandbox.file", "env.artifact", "agent.artifact", "run.grace"),
        "whoever knows why an artifact does not come speaks first",
    ),
    WaitOrder(("env.program", "agent.artifact"), "the task is named"),
    WaitOrder(
        ("rubric.grace", "env.score_grace", "eval.grace"),
        "whoever knows why a score does not come speaks first",
    ),
    WaitOrder(("model.gone", "model.next_token", "model.first_token"), "the surer sign acts first"),
    WaitOrder(("guest.silent", "guest.ask"), "a guest that asks is alive"),
    WaitOrder(
        ("env.hook", "submit.check", "client.call"), "a submission is answered, not sent again"
    ),
    WaitOrder(("renderer.proof", "client.call"), "a proof that goes on is said"),
    WaitOrder(("probe.health", "probe.token"), "the cheap sign is asked first"),
    WaitOrder(("weights.claim", "weights.stated", "weights.ask"), "the gateway answers first"),
    WaitOrder(("client.call", "client.retry"), "a call is tried twice at least"),
    WaitOrder(("supervisor.ready_again", "cli.gateway"), "a restart has its time"),
)


def wait_limit_s(name: str) -> float:
    """Returns the seconds of a row. Raises KeyError for a name that has none."""
    return _SECONDS[name]


def times_page() -> Iterator[str]:
    """Yields docs/times.md, a line each: what `prorl schema --times` prints."""
    yield "# Times"
    yield ""
    yield "`prorl schema --times` prints this page. It lists each wait between processes: which"
    yield "part waits, for what, for how many seconds, what happens when they are over, and why"
    yield "there are so many. Budgets of rollouts (`limits.init_s`, `run_s`, `eval_s`,"
    yield "`tool_s`) are [settings](settings.md)."
    for heading, rows in TABLE.items():
        yield from (
            "",
            f"## {heading}",
            "",
            "| name | seconds | who waits: for what | what happens then | why so long |",
        )
        yield "|---|---|---|---|---|"
        for row in rows:
            yield f"| {row.name} | {row.seconds:g} | {row.waits} | {row.then} | {row.why} |"
    yield from ("", "## Order", "", "| which must be shorter than which | why |", "|---|---|")
    for order in ORDER:
        chain = " < ".join(f"{name} ({wait_limit_s(name):g})" for name in order.names)
        yield f"| {chain} | {order.why} |"
