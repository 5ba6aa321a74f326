"""The tasks as an environment of OpenEnv, behind its own server."""

import sys
from typing import Any

import chain
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Do(Action):
    command: str = ""
    answer: str = ""


class Seen(Observation):
    text: str = ""


class Shell(Environment[Do, Seen, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Seen:
        self._number = int(more["number"])
        return Seen(text=chain.prompt(self._number))

    def step(self, action: Do, timeout_s: float | None = None, **more: Any) -> Seen:
        if action.answer:
            return Seen(done=True, reward=chain.reward(self._number, action.answer))
        return Seen(text=chain.shell(action.command))

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Shell, Do, Seen, max_concurrent_envs=256)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False)
