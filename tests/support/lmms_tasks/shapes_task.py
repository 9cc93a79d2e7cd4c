"""Functions of shapes.yaml, which lmms-eval calls in its own environment. As `megatron-vlm eval`
does, they ask for the last answer of a chat."""

from pathlib import Path

from PIL import Image

FOLDER = Path("SHAPES")


def _parts_of(message):
    """Return the parts of a message. A text that looks like a number is read as one."""
    content = message["content"]
    return content if isinstance(content, list) else [{"type": "text", "text": str(content)}]


def _open(part):
    return Image.open(FOLDER / part["image"]).convert("RGB")


def pictures_of(doc):
    parts = [part for message in doc["messages"] for part in _parts_of(message)]
    return [_open(part) for part in parts if part["type"] == "image"]


def question_of(doc, lmms_eval_specific_kwargs=None):
    return _parts_of(doc["messages"][-2])[-1]["text"]


def messages_of(doc, lmms_eval_specific_kwargs=None):
    def shown(part):
        if part["type"] == "image":
            return {"type": "image", "url": _open(part)}
        return {"type": "text", "text": part["text"]}

    return [
        {"role": message["role"], "content": [shown(part) for part in _parts_of(message)]}
        for message in doc["messages"][:-1]
    ]


def answer_of(doc):
    return _parts_of(doc["messages"][-1])[0]["text"]


def scores_of(doc, results):
    return {"exact_match": float(results[0].strip() == answer_of(doc))}
