"""Reinforcement learning with pictures by the public Tinker client alone. A model sees a coloured
shape and names its colour. The reward says whether the answer was right, never what is right.

    python scripts/rl/tinker_colours.py MODEL

MODEL is the service's name of the model, where the tokenizer is found, too. TINKER_BASE_URL and
TINKER_API_KEY name the service. A model that does not answer with a word yet learns it before, in
`--words` steps, from colours that do not depend on the picture.
"""

import argparse
import io
import random
from statistics import fmean, pstdev
from typing import Any

import tinker
from PIL import Image, ImageDraw
from tinker import types
from transformers import AutoTokenizer

COLOURS = {"red": (230, 20, 20), "green": (20, 160, 50), "blue": (30, 60, 240)}
COLOURS |= {"yellow": (255, 230, 30)}
QUESTION = "What colour is the shape? Answer with a single word."
PLACE, END = "<|image_pad|>", "<|im_end|>"  # where Qwen's templates put a picture, and the end
TOKEN = 32  # side of the square that is one token of Qwen's, in pixels


def picture(colour: str, side: int, draw: random.Random) -> types.ImageChunk:
    """Return a picture of a shape with this colour, at a place that is drawn."""
    image = Image.new("RGB", (side, side), (128, 128, 128))
    size = side * 3 // 8
    x, y = (draw.choice((0, side // 2)) + draw.randint(0, side // 2 - size) for _ in "xy")
    pen, box = ImageDraw.Draw(image), (x, y, x + size - 1, y + size - 1)
    draw.choice((pen.ellipse, pen.rectangle))(box, fill=COLOURS[colour])
    file = io.BytesIO()
    image.save(file, "PNG")
    tokens = (side // TOKEN) ** 2
    return types.ImageChunk(data=file.getvalue(), format="png", expected_tokens=tokens)


class Task:
    """Questions about pictures, as prompts of a model."""

    def __init__(self, model: str, side: int) -> None:
        self.tokenizer, self.side = AutoTokenizer.from_pretrained(model), side
        content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        self.around = [self.encode(part) for part in text.split(PLACE)]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def ask(self, count: int, draw: random.Random) -> list[tuple[str, types.ModelInput]]:
        """Return questions with their colours."""
        before, after = (types.EncodedTextChunk(tokens=ids) for ids in self.around)
        colours = [draw.choice(list(COLOURS)) for _ in range(count)]
        pictures = [picture(colour, self.side, draw) for colour in colours]
        prompts = [types.ModelInput(chunks=[before, each, after]) for each in pictures]
        return list(zip(colours, prompts, strict=True))

    def reward(self, colour: str, answer: types.SampledSequence) -> float:
        text = self.tokenizer.decode(answer.tokens, skip_special_tokens=True)
        return float(text.strip().lower() == colour)

    def score(self, sampler: tinker.SamplingClient, count: int, draw: random.Random) -> float:
        """Return the mean reward of the most likely answers."""
        params = types.SamplingParams(max_tokens=8, temperature=0.0)
        asked = [(c, sampler.sample(prompt, 1, params)) for c, prompt in self.ask(count, draw)]
        return fmean(self.reward(c, each.result().sequences[0]) for c, each in asked)


def datum(prompt: types.ModelInput, answer: list[int], **of: list[float]) -> types.Datum:
    """Return an answer that is learned, with a value for each of its tokens."""
    unseen = prompt.length - 1
    inputs: dict[str, list[Any]] = {"target_tokens": [0] * unseen + answer}
    inputs |= {name: [0.0] * unseen + values for name, values in of.items()}
    return types.Datum(prompt.append(types.EncodedTextChunk(tokens=answer[:-1])), inputs)


def learn(model: tinker.TrainingClient, data: list[types.Datum], loss: Any, rate: float) -> None:
    model.forward_backward(data, loss).result()
    adam = types.AdamParams(learning_rate=rate, beta2=0.98, eps=1e-8, grad_clip_norm=1.0)
    model.optim_step(adam).result()


def learn_words(model: tinker.TrainingClient, task: Task, draw: random.Random, rate: float) -> None:
    """Learn that an answer is the name of a colour, but not which one."""
    data = []
    for _, prompt in task.ask(64, draw):
        answer = task.encode(draw.choice(list(COLOURS)) + END)
        data.append(datum(prompt, answer, weights=[1 / 64] * len(answer)))
    learn(model, data, "cross_entropy", rate)


def main(given: argparse.Namespace) -> None:
    """Learn, and print the mean reward of each step and of held-out pictures."""
    task, draw = Task(given.model, given.side), random.Random(0)
    client = tinker.ServiceClient()
    model = client.create_lora_training_client(given.model, rank=given.rank, seed=0).result()
    for _ in range(given.words):
        learn_words(model, task, draw, given.learning_rate)
    sampler = model.save_weights_and_get_sampling_client().result()
    print(f"held out: {task.score(sampler, 200, random.Random(1)):.3f}")
    for step in range(given.steps):
        asked = task.ask(given.pictures, draw)
        params = types.SamplingParams(max_tokens=8)
        waiting = [sampler.sample(prompt, given.answers, params) for _, prompt in asked]
        data, means = [], []
        for (colour, prompt), each in zip(asked, waiting, strict=True):
            answers = each.result().sequences
            rewards = [task.reward(colour, answer) for answer in answers]
            means.append(fmean(rewards))
            scale = (pstdev(rewards) or 1) * given.pictures * given.answers
            for answer, reward in zip(answers, rewards, strict=True):
                advantages = [(reward - means[-1]) / scale] * len(answer.tokens)
                of = {"logprobs": list(answer.logprobs), "advantages": advantages}
                data.append(datum(prompt, list(answer.tokens), **of))
        learn(model, data, "ppo", given.learning_rate * (1 - step / given.steps))
        print(f"step {step}: reward {fmean(means):.3f}", flush=True)
        sampler = model.save_weights_and_get_sampling_client().result()
    print(f"held out: {task.score(sampler, 200, random.Random(1)):.3f}")
    print(model.save_weights_for_sampler("colours").result().path)


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("model")
    numbers = {"rank": 32, "side": 256, "words": 0, "steps": 60, "pictures": 32, "answers": 8}
    for name, default in numbers.items():
        options.add_argument(f"--{name}", type=int, default=default)
    options.add_argument("--learning-rate", type=float, default=1e-4)
    main(options.parse_args())
