"""Runs in the environment of the public client: the loss that plain Hugging Face has on the first
batch of a recipe, per token that is learned, and the norm of the gradients of its sum.

plain_loss.py MODEL BATCH FILE     of chat_sl
plain_loss.py MODEL BATCH          of vlm_classifier, in the working directory
"""

import io
import json
import sys

import torch
from PIL import Image
from tinker.types import ImageChunk
from tinker_cookbook.image_processing_utils import get_image_processor
from tinker_cookbook.recipes.vlm_classifier.data import get_dataset_builder
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from transformers import AutoModelForImageTextToText

RENDERER = "qwen3_vl_instruct"


def first_batch(model, batch, file):
    if file is None:
        builder = get_dataset_builder("caltech101", model, RENDERER, batch_size=batch)
    else:
        common = ChatDatasetBuilderCommonConfig(
            model_name_for_tokenizer=model,
            renderer_name=RENDERER,
            max_length=None,
            batch_size=batch,
        )
        builder = FromConversationFileBuilder(common_config=common, file_path=file)
    dataset = builder()[0]
    dataset.set_epoch(seed=0)
    return dataset.get_batch(0)


def log_probs_of(model, processor, datum):
    ids, images = [], []
    for chunk in datum.model_input.chunks:
        if isinstance(chunk, ImageChunk):
            image = Image.open(io.BytesIO(chunk.data)).convert("RGB")
            images.append(processor(images=[image], return_tensors="pt"))
            count = int(images[-1]["image_grid_thw"].prod()) // processor.merge_size**2
            ids += [model.config.image_token_id] * count
        else:
            ids += chunk.tokens
    ids = torch.tensor([ids])
    names = ("pixel_values", "image_grid_thw") if images else ()
    given = {name: torch.cat([image[name] for image in images]) for name in names}
    types = (ids == model.config.image_token_id).int()
    logits = model(input_ids=ids, mm_token_type_ids=types, **given).logits[0]
    targets = datum.loss_fn_inputs["target_tokens"].to_torch()
    return torch.log_softmax(logits.float(), -1).gather(1, targets[:, None])[:, 0]


def main(path, batch, file=None):
    data = first_batch(path, int(batch), file)
    model = AutoModelForImageTextToText.from_pretrained(path).eval()
    processor = get_image_processor(path)
    total = count = 0.0
    for datum in data:
        weights = datum.loss_fn_inputs["weights"].to_torch()
        loss = -(log_probs_of(model, processor, datum) * weights).sum()
        loss.backward()
        total += float(loss.detach())
        count += float(weights.sum())
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(gradients))
    print(json.dumps({"train_mean_nll": total / count, "grad_norm": norm}))


if __name__ == "__main__":
    main(*sys.argv[1:])
