"""Names in other trainers of what concerns the model, its adapters, its layout and the data."""

MODEL_NAMES = {
    "lora=default trains adapters, as lora.rank=16 does: in lora.targets; without, all weights "
    "are trained but those of model.freeze_vision, model.freeze_merger and model.freeze_language": (
        "peft peft_config use_lora use_peft lora_enable finetuning_type train_type tuner_type "
        "adapter"
    ),
    "lora.targets is a list of parts, such as [attention,mlp], or of names of linear layers, such "
    "as [q_proj,v_proj]": (
        "target_modules lora_target lora_target_modules target_regex exclude_modules"
    ),
    "lora.train names the parts that are trained whole beside adapters, such as [merger]": (
        "modules_to_save additional_target lora_modules_to_save"
    ),
    "adapters begin as PEFT's do by default: A by kaiming_uniform, B at zero": "init_lora_weights",
    "adapters are plain LoRA; lora.rslora scales them by the root of their rank": (
        "use_dora loraplus_lr_ratio lora_ga_* pissa_*"
    ),
    "adapters have no bias": "lora_bias",
    "megatron-vlm export --as merged merges adapters into the model, and checkpoint.export "
    "(merged or both) does it at the end of a run": "merge_lora",
    "few weights are trained by adapters (lora=default) or by freezing parts "
    "(model.freeze_vision, model.freeze_merger, model.freeze_language), and in no other way": (
        "use_galore oft_block_size oft_target galore_* apollo_* badam_* lisa_* boft_* vera_* "
        "adalora_* reft_* fourier_* llamapro_* relora_* oft_*"
    ),
    "lora.base=nf4 or int8 stores the frozen weights beside adapters in 4 or 8 bits, by blocks of "
    "64; there is no other quantization": (
        "qlora quantization_bit load_in_4bit load_in_8bit use_bnb_nested_quant "
        "quantize_moe_experts bnb_* export_quantization_* hqq_*"
    ),
    "model.freeze_vision, model.freeze_merger and model.freeze_language say what does not learn": (
        "tune_mm_vision tune_mm_mlp tune_mm_llm freeze_parameters trainable_parameters "
        "freeze_parameters_ratio freeze_parameters_regex trainable_parameters_regex "
        "unfrozen_parameters"
    ),
    "parallel.tp and parallel.pp divide the model over GPUs, and parallel.distributed_optimizer, "
    "which is on, divides the optimizer's state": (
        "deepspeed fsdp fsdp_config fsdp_version reshard_after_forward local_rank device_map "
        "max_memory low_cpu_mem_usage fsdp_* deepspeed_*"
    ),
    "accelerate's file is not read: its num_processes is --gpus, mixed_precision train.precision, "
    "gradient_clipping optim.clip_grad, an offloaded optimizer optim.offload=1, and for zero_stage "
    "or fsdp_config write `parallel: auto`": "config_file",
    "there is no context parallelism, since it would cut an image's tokens over ranks; "
    "model.recompute=full saves the most memory for long records, and parallel.tp divides layers": (
        "cp context_parallel_size sequence_parallel_size ulysses_sequence_parallel_size"
    ),
    "there is no sequence parallelism, since it would cut the sequence into which visual features "
    "are scattered; model.recompute saves memory instead": "sequence_parallel",
    "experts are not cut by parallel.tp: parallel.ep divides them": "expert_tensor_parallel_size",
    "parallel.layers_per_stage lists the layers of every stage; parallel.layers_per_stage=auto "
    "spreads them by cost": (
        "decoder_first_pipeline_num_layers account_for_embedding_in_pipeline_split "
        "account_for_loss_in_pipeline_split"
    ),
    "parallel.virtual_stages is the number of chunks of each stage, not the layers of a chunk": (
        "num_layers_per_virtual_pipeline_stage"
    ),
    "parallel.overlap_grad_reduce and parallel.overlap_param_gather hide the communication of "
    "data parallel ranks; tensor parallel communication is not overlapped": "tp_comm_overlap",
    "optim.offload=1 keeps main weights and moments in host memory, and "
    "model.offload_activations=1 the activations of decoder layers; model.recompute, "
    "optim.states=int8, lora=default and parallel.pp save memory, too": (
        "optimizer_cpu_offload optimizer_offload_fraction activation_offloading param_offload "
        "grad_offload optimizer_offload offload_params offload_model offload_optimizer"
    ),
    "model.recompute and model.recompute_vision say what is computed again instead of kept; "
    "model.recompute=full recomputes every decoder layer": (
        "gradient_checkpointing vit_gradient_checkpointing gradient_checkpointing_kwargs "
        "activation_checkpointing enable_gradient_checkpointing disable_gradient_checkpointing "
        "recompute_method recompute_num_layers"
    ),
    "model.backend=torch uses SDPA, model.backend=te Transformer Engine": (
        "attn_implementation attn_impl flash_attn attention_backend flash_attention "
        "transformer_impl"
    ),
    "the head computes the supervised tokens alone, in slices of the vocabulary, and "
    "model.compile fuses the small operations of a layer, so that there are no such kernels to "
    "turn on": (
        "use_liger_kernel use_liger cut_cross_entropy cross_entropy_loss_fusion use_v1_kernels "
        "use_kernels liger_*"
    ),
    "model.compile fuses the small operations of a layer; null is on with cuda and a compiler": (
        "torch_compile torch_compile_backend use_torch_compile no_masked_softmax_fusion "
        "lora_mlp_kernel lora_qkv_kernel lora_o_kernel"
    ),
    "model.fp32_weight_gradients says in which type weight gradients are added up": (
        "gradient_accumulation_fusion"
    ),
    "log-probs and the loss are computed in fp32": "attention_softmax_in_fp32",
    "model.router_balance_loss is the coefficient of transformers' load_balancing_loss_func, over "
    "the global batch": "moe_aux_loss_coeff moe_router_load_balancing_type",
    "model.router_z_loss is the coefficient of the mean over layers and tokens": "moe_z_loss_coeff",
    "routing is that of the checkpoint: no token is dropped, and experts run as Megatron's "
    "grouped products; see parallel.ep and model.router_balance_loss": (
        "use_scattermoe experts_impl moe_*"
    ),
    "the sizes of the model and its layers are those of config.json in model.path": (
        "num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention "
        "num_query_groups max_position_embeddings position_embedding_type rotary_base "
        "rotary_percent rope_scaling normalization swiglu untie_embeddings_and_output_weights "
        "disable_bias_linear num_experts mtp_num_layers override_config "
        "override_transformer_config linear_decoupled_in_proj"
    ),
    "the released models have no dropout but lora.dropout": (
        "attention_dropout hidden_dropout disable_dropout"
    ),
    "the code of the families is built in: no code of a checkpoint is run, and model.path is "
    "all that is given": (
        "trust_remote_code model_type model_init_kwargs external_plugins plugins use_cache "
        "use_dist_checkpointing dist_checkpointing_path"
    ),
    "model.path=ORG/NAME@REVISION takes a branch, tag or commit of the Hub": (
        "model_revision revision"
    ),
    "the tokenizer and the processor are those of model.path; data.add_tokens adds tokens to "
    "them": "tokenizer tokenizer_type processor_type pad_token",
    "data.add_tokens lists texts that become tokens, special or not; new rows of the embedding "
    "begin as a mean of the others": "new_special_tokens tokens",
    "fp8 is not trained: it has not run on a GPU; train.precision is auto, bf16 or fp32": "fp8*",
    # Data and templates.
    "data.train and data.eval are files, globs, or names of Hugging Face data sets; "
    "data.train=FOLDER/dataset_info.json:NAME is a set that LLaMA-Factory's file describes": (
        "dataset dataset_name dataset_dir datasets dataset_use"
    ),
    "data.train={path: NAME, streaming: true} reads a data set as it comes": (
        "streaming dataset_streaming"
    ),
    "data.split holds a share of data.train out (0.1), or a number of records (100); data.eval "
    "names data that is held out already": "split",
    "'data.train=[a.jsonl,{path: b.jsonl, weight: 0.5}]' mixes sources: weight is how often an "
    "epoch has each record": "mix_strategy interleave_probs interleave_prob",
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
    "min_pixels or max_pixels": (
        "fps video_fps video_maxlen fps_max_frames video_max_frames video_min_frames base_interval"
    ),
    "min_pixels and max_pixels in data.video={max_pixels: 100352} count the pixels of all frames "
    "of a video together; beside a video in a record, they are of each frame": (
        "video_max_pixels video_min_pixels video_max_token_num video_max_frame_* video_min_frame_*"
    ),
    "data.max_pixels is the pixels of an image, and Qwen3-VL makes a token of 32 x 32 of them": (
        "image_max_token_num"
    ),
    "data.max_tokens counts images, too; data.truncation decides about longer records": (
        "max_seq_length max_length cutoff_len seq_length truncation_strategy truncation_mode "
        "sequence_len max_prompt_length filter_overlong_prompts model_max_length"
    ),
    "rows are never packed (docs/parallelism.md): micro-batches of equal cost are filled up to "
    "train.micro_batch_tokens": (
        "padding_free neat_packing group_by_length sample_packing eval_sample_packing packing "
        "packing_length use_remove_padding pad_to_multiple_of pad_to_sequence_len use_dynamic_bsz "
        "data_flatten data_packing"
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
