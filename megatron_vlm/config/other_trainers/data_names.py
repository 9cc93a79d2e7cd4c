"""Names in other trainers that concern data and templates, and what is here instead."""

DATA_NAMES = {
    "data.train and data.eval are files, globs, or names of Hugging Face data sets; "
    "data.train=FOLDER/dataset_info.json:NAME is a set that LLaMA-Factory's file describes": (
        "dataset dataset_name dataset_dir datasets"
    ),
    "data.train={path: NAME, streaming: true} reads a data set as it comes": (
        "streaming dataset_streaming"
    ),
    "data.split holds a share of data.train out (0.1), or a number of records (100); data.eval "
    "names data that is held out already": "split",
    "'data.train=[a.jsonl,{path: b.jsonl, weight: 0.5}]' mixes sources: weight is how often an "
    "epoch has each record": "mix_strategy interleave_probs",
    "eval.samples limits an evaluation; for training, give a smaller file": "max_samples",
    "eval.samples is the samples of each set in an evaluation; null is all of them": "eval_iters",
    "the checkpoint's own chat template is used": "template chat_template use_chat_template",
    "data.template_kwargs='{enable_thinking: false}' sets it, as any variable that the "
    "checkpoint's chat template reads": "enable_thinking add_non_thinking_prefix",
    "data.train_on says which messages are learnt: by default those of the assistant": (
        "train_on_prompt mask_history train_on_inputs assistant_only_loss completion_only_loss "
        "loss_scale roles_to_train"
    ),
    "data.video={fps: 2.0} sets what is not as in the checkpoint: fps, min_frames, max_frames, "
    "min_pixels or max_pixels": "fps video_fps video_maxlen fps_max_frames",
    "min_pixels and max_pixels in data.video={max_pixels: 100352} count the pixels of all frames "
    "of a video together; beside a video in a record, they are of each frame": (
        "video_max_pixels video_min_pixels video_max_token_num video_max_frame_* video_min_frame_*"
    ),
    "data.max_pixels is the pixels of an image, and Qwen3-VL makes a token of 32 x 32 of them": (
        "image_max_token_num"
    ),
    "data.max_tokens counts images, too; data.truncation decides about longer records": (
        "max_seq_length max_length cutoff_len seq_length truncation_strategy truncation_mode "
        "sequence_len max_prompt_length filter_overlong_prompts"
    ),
    "rows are never packed (docs/parallelism.md): micro-batches of equal cost are filled up to "
    "train.micro_batch_tokens": (
        "padding_free neat_packing group_by_length sample_packing eval_sample_packing packing "
        "packing_length use_remove_padding pad_to_multiple_of pad_to_sequence_len use_dynamic_bsz"
    ),
    "data.num_workers processes of each replica read and decode in advance, each with "
    "data.prefetch batches": (
        "dataloader_pin_memory dataloader_persistent_workers dataloader_type "
        "preprocessing_num_workers dataset_num_proc dataloader_*"
    ),
    "text is encoded once, before the first step, and kept in data.cache_dir; data.cache_dir=null "
    "keeps nothing": (
        "overwrite_cache dataset_prepared_path load_from_cache_file lazy_tokenize cached_dataset "
        "skip_prepare_dataset"
    ),
    "data.cache_dir holds encoded text; downloads of the Hub are where HF_HOME says": "cache_dir",
    "data.columns={image: photo, question: q} gives for a field the column that it is in, and "
    "data.roles={user: customer} for a role its name in the data": (
        "columns prompt_key image_key field_messages message_property_mappings"
    ),
    "the form of a record is recognised by its keys, and data.unknown_keys says what becomes of "
    "keys without a meaning: docs/data.md": "dataset_text_field remove_unused_columns",
    "data.max_errors=100 leaves up to 100 wrong records out; 0, the default, stops at the first": (
        "strict"
    ),
    "data.special_tokens says what becomes of text that spells a special token; the special "
    "tokens are those of the tokenizer in model.path": "special_tokens",
    "data.train is all that is learnt from: there is no data about the model's name": (
        "model_name model_author"
    ),
}
