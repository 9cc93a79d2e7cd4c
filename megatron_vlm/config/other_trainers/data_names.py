"""Names in other trainers that concern data and templates, and what is here instead."""

_SOURCES = (
    "data.train and data.eval are files, globs, or names of Hugging Face data sets; "
    "data.train=FOLDER/dataset_info.json:NAME is a set that LLaMA-Factory's file describes"
)
_TEMPLATE = "the checkpoint's own chat template is used"
_TEMPLATE_SWITCH = (
    "data.template_kwargs='{enable_thinking: false}' sets it, as any variable that the "
    "checkpoint's chat template reads"
)
_TRAINED = "data.train_on says which messages are learnt: by default those of the assistant"
_BUDGET = (
    "data.video_min_pixels and data.video_max_pixels count the pixels of all frames of a video "
    "together; beside a video in a record, min_pixels and max_pixels are of each frame"
)
_LENGTH = "data.max_tokens counts images, too; data.truncation says what becomes of longer records"
_BALANCED = (
    "rows are not packed, and train.packing must be false: micro-batches of equal cost are filled "
    "up to train.micro_batch_tokens"
)
_LOADER = (
    "data.num_workers processes of each replica read and decode in advance, each with "
    "data.prefetch batches"
)
_CACHED = (
    "text is encoded once, before the first step, and kept in data.cache_dir; "
    "data.cache_dir=null keeps nothing"
)
_FORM = (
    "the form of a record is recognised by its keys, and data.unknown_keys says what becomes of "
    "keys without a meaning: docs/data.md"
)
_MIXED = (
    "'data.train=[a.jsonl,{path: b.jsonl, weight: 0.5}]' mixes sources: weight is how often an "
    "epoch has each record"
)
_SIZE = (
    "pictures keep their proportions; data.min_pixels and data.max_pixels bound width times height"
)
_WRONG_RECORDS = (
    "data.on_error=skip leaves wrong records out, data.on_error=raise stops at the first"
)
_SPECIAL = (
    "data.special_tokens says what becomes of text that spells a special token; the special tokens "
    "are those of the tokenizer in model.path"
)
_BOXES = "`objects` of a record has its boxes, and their `bbox_type` the unit: docs/data.md"
_SPLIT = (
    "data.split holds a share of data.train out (0.1), or a number of records (100); data.eval "
    "names data that is held out already"
)
_COLUMNS = (
    "data.columns={image: photo, question: q} gives for a field the column that it is in, and "
    "data.roles={user: customer} for a role its name in the data"
)
_HELD_OUT = "data.eval names the held-out sets, each of which is scored by itself"
_TEXT_FIELD = "a record is a chat, and raw text is not learnt: docs/data.md has the keys of records"

DATA_SENTENCES = {
    _SOURCES: "dataset dataset_name dataset_path data_path dataset_dir datasets dataset_config "
    "dataset_use custom_dataset_info data_files ds_type datasets_from dataset_mixer "
    "prompt_path mock_data custom_cls pretraining_dataset per_split_data_args_path data_args_path "
    "train_data_config",
    "data.train={path: NAME, streaming: true} reads a data set as it comes": "streaming "
    "dataset_streaming",
    "data.train={path: NAME, subset: NAME, split: train} names a part of a Hugging Face data set": (
        "dataset_train_split dataset_config_name subset dataset_test_split train_split test_split"
    ),
    _SPLIT: "split",
    _HELD_OUT: "test_datasets eval_on_each_dataset valid_path val_path test_data_path",
    _MIXED: "mix_strategy interleave_probs interleave_prob stopping_strategy sampling_ratio "
    "dataset_weights",
    "eval.samples limits an evaluation; for training, give a smaller file": "max_samples "
    "max_train_samples num_train_samples max_eval_samples train_max_samples val_dataset_sample "
    "dataset_shards dataset_shard_num dataset_shard_idx",
    "eval.samples is the samples of each set in an evaluation; null is all of them": "eval_iters "
    "eval_limit val_max_samples max_predict_samples",
    "data.eval is always read in the order of its files": "val_dataset_shuffle validation_shuffle",
    _TEMPLATE: "template chat_template chat_template_path chat_template_jinja custom_chat_template "
    "template_backend use_chat_template prompt_template tool_format tools_prompt agent_template "
    "response_prefix template_type conversation_template use_default_template default_template "
    "use_inference_chat_template return_raw_chat return_full_prompt",
    _TEMPLATE_SWITCH: "enable_thinking reasoning_effort preserve_thinking add_non_thinking_prefix "
    "thinking_mode split_thinking",
    _TRAINED: "train_on_prompt mask_history train_on_inputs assistant_only_loss "
    "completion_only_loss loss_scale roles_to_train train_on_eos train_on_eot "
    "message_field_training message_field_training_detail train_on_responses_only "
    "ignore_empty_think train_on_completions_only answer_only_loss only_last_turn_loss",
    "placeholders and padding are never learnt": "ignore_pad_token_for_loss eod_mask_loss "
    "reset_position_ids reset_attention_mask create_attention_mask_in_dataloader",
    _BUDGET: "video_max_pixels video_min_pixels video_total_pixels video_max_token_num "
    "video_max_frame_pixels video_min_frame_pixels total_pixels",
    "data.max_pixels is the pixels of an image, and Qwen3-VL makes a token of 32 x 32 of them": (
        "image_max_token_num image_max_tokens"
    ),
    "data.min_pixels is the pixels of an image, and Qwen3-VL makes a token of 32 x 32 of them": (
        "image_min_token_num image_min_tokens"
    ),
    _SIZE: "image_size image_resize_algorithm max_ratio image_factor image_do_pan_and_scan "
    "crop_to_patches max_slice_nums resized_height resized_width max_num input_size image_resize",
    "a video has a number of frames that follows from data.video_fps, between "
    "data.video_min_frames and data.video_max_frames": "base_interval nframes num_frames "
    "frame_factor video_segments max_num_frames video_sampling",
    "sound is not learnt": "use_audio_in_video audio_sampling_rate sampling_rate",
    _LENGTH: "max_seq_length max_seq_len max_length cutoff_len model_max_length seq_length "
    "seq_len truncation_strategy truncation_mode sequence_len max_prompt_length "
    "rollout.prompt_length filter_overlong_prompts excess_length_strategy decoder_seq_length "
    "filter_overlong_prompts_workers encoder_seq_length max_tokens_per_sample prompt_length "
    "max_target_length max_source_length truncation_side",
    _BALANCED: "padding_free neat_packing group_by_length sample_packing eval_sample_packing "
    "packing packing_strategy eval_packing packing_length packing_buffer packing_num_proc "
    "data_flatten data_packing batch_flattening mlp_padding_free use_remove_padding "
    "pad_to_multiple_of pad_to_sequence_len multipack train_sampling_strategy length_column_name "
    "sample_packing_eff_est sample_packing_group_size sample_packing_bin_size "
    "sample_pack_sequentially pretraining_sample_concatenation variable_seq_lengths "
    "group_by_modality_length curriculum_sampling total_num_tokens balance_batch "
    "use_dynamic_bsz dynamic_batching pack_sequences use_sequence_packing",
    _LOADER: "dataloader_pin_memory dataloader_persistent_workers dataloader_in_order "
    "dataloader_multiprocessing_context dataloader_type dataloader_save dataset_num_workers "
    "preprocessing_num_workers dataset_num_proc dataset_processes num_proc "
    "preprocessing_batch_size dataset_map_batch_size dataset_writer_batch_size map_num_proc",
    _CACHED: "overwrite_cache tokenized_path dataset_prepared_path load_from_cache_file "
    "lazy_tokenize cached_dataset cached_val_dataset enable_cache download_mode "
    "dataset_keep_in_memory preprocessing skip_prepare_dataset dataset_kwargs data_cache_path "
    "push_dataset_to_hub data_shared_file_system dataset_exact_deduplication mmap_bin_files",
    "data.cache_dir holds encoded text; downloads of the Hub are where HF_HOME says": (
        "cache_dir hub_cache_dir model_cache_dir"
    ),
    "the last batch of an epoch may be smaller, and no row is repeated": "dataloader_drop_last "
    "drop_last",
    _COLUMNS: "columns prompt_key image_key video_key response_key messages_key field_messages "
    "message_property_mappings tools_key prompt_dict_keys response_dict_keys tags",
    _FORM: "dataset_text_field remove_unused_columns "
    "label_names "
    "return_raw_input_ids return_multi_modal_inputs data_source_key reward_model_key "
    "reward_fn_key formatting "
    "drop_system_message multiturn",
    _TEXT_FIELD: "text_field text_column input_column",
    _WRONG_RECORDS: "strict skip_invalid ignore_errors",
    _SPECIAL: "special_tokens",
    _BOXES: "norm_bbox bbox_format",
    "data.train is all that is learnt from: there is no data about the model's name": (
        "model_name model_author"
    ),
}
DATA_FAMILIES = {_LOADER: "dataloader_", _BUDGET: "video_max_frame_ video_min_frame_"}
