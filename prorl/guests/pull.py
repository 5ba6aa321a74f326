"""Guests of this host for a service elsewhere: leases what there is to play, and starts a guest.

    PRORL_TOKEN=... python pull.py http://HOST:PORT NAME [SLOTS] -- python gymnasium_guest.py

Needs Python alone. The guest is started as RUN would start it (docs/guests.md); SSL_CERT_FILE names
ROOT/tls/trust.pem where the service is on another host. Ends with SIGTERM or Ctrl-C.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

ALIVE_S = 10
url, name, *slots = sys.argv[1 : sys.argv.index("--")]
running = set()
argv, token = sys.argv[sys.argv.index("--") + 1 :], os.environ.pop("PRORL_TOKEN")


def post(path, bearer, body, timeout=90):
    head = {"authorization": f"Bearer {bearer}", "content-type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), head)
    for retries in (4, 3, 2, 1, 0):  # the service handles a repeated request once
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return json.load(answer)
        except OSError as error:
            if isinstance(error, urllib.error.HTTPError) or not retries:
                raise
            time.sleep(1)


def kill(group):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def end(*_):
    for group in list(running):
        kill(group)
    os._exit(0)


def play(lease):
    def say(how, **body):
        post(f"/v1/guests/leases/{lease['lease']}/{how}", lease["key"], body)

    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/output", "w+b") as output:
        with open(f"{folder}/task.json", "w") as file:
            json.dump(lease["task"], file)
        os.mkdir(f"{folder}/work")
        guest = subprocess.Popen(
            argv,
            cwd=f"{folder}/work",
            env=os.environ | lease["env"] | {"PRORL_TASK": file.name},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        running.add(guest.pid)
        try:
            while True:
                try:
                    guest.wait(ALIVE_S)
                    break
                except subprocess.TimeoutExpired:
                    say("alive")
        finally:
            kill(guest.pid)  # also what it has left behind
            guest.wait()
            running.discard(guest.pid)
        output.seek(max(0, output.tell() - 8000))
        log = output.read().decode("utf-8", "replace")
        try:
            with open(f"{folder}/work/reward.json") as file:
                outcome = json.load(file)
        except (OSError, ValueError) as error:
            outcome = {"failed": "infra", "message": str(error)}
        if guest.returncode or "failed" in outcome:
            outcome = (
                outcome if "failed" in outcome else {"message": f"exit status {guest.returncode}"}
            )
            say(
                "failed",
                code=outcome.get("failed", "infra"),
                message=f"{outcome['message']}: {log}",
            )
        else:
            say("done", **outcome | {"log": log})


def work():
    while True:
        try:
            for lease in post(f"/v1/guests/{name}/lease", token, {"wait_s": 30}):
                play(lease)
        except (OSError, ValueError) as error:  # also HTTPError: the lease is another's, or over
            print(f"pull: {error}", file=sys.stderr, flush=True)
            if getattr(error, "code", 0) in (401, 403):
                os._exit(1)
            time.sleep(1)


for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, end)
threads = [threading.Thread(target=work, daemon=True) for _ in range(int((slots or ["1"])[0]))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
