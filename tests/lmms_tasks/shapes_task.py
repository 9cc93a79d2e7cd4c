"""Functions of shapes.yaml, which lmms-eval calls in its own environment."""

from pathlib import Path

from PIL import Image

FOLDER = Path("SHAPES")


def _parts(doc, kind):
    return [part[kind] for part in doc["messages"][0]["content"] if part["type"] == kind]


def pictures_of(doc):
    return [Image.open(FOLDER / name).convert("RGB") for name in _parts(doc, "image")]


def question_of(doc, lmms_eval_specific_kwargs=None):
    return _parts(doc, "text")[0]


def messages_of(doc, lmms_eval_specific_kwargs=None):
    pictures = [{"type": "image", "url": picture} for picture in pictures_of(doc)]
    return [{"role": "user", "content": [*pictures, {"type": "text", "text": question_of(doc)}]}]


def answer_of(doc):
    return doc["messages"][1]["content"]


def scores_of(doc, results):
    return {"exact_match": float(results[0].strip() == answer_of(doc))}
