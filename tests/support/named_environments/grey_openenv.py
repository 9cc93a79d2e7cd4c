"""An OpenEnv server with a picture in each observation.

    python grey_openenv.py PORT

An episode has two turns, and each is rewarded by the length of its answer."""

import sys

import uvicorn
from grey_pictures import grey_png
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    answer: str


class Seen(Observation):
    text: str
    image: str


class Grey(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.grey, self.turns = seed, 0
        return Seen(text="Which?", image=grey_png(seed))

    def step(self, action, timeout_s=None, **kwargs):
        self.turns += 1
        ending = {"reward": float(len(action.answer) % 5), "done": self.turns == 2}
        return Seen(text="Look again.", image=grey_png(self.grey, 0), **ending)

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    app = create_app(Grey, Guess, Seen, max_concurrent_envs=100)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
