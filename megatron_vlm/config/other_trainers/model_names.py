"""Names in other trainers that concern the model, adapters and the layout, and what is here
instead."""

_ADAPTERS = (
    "lora=default trains adapters, as lora.rank=16 does: in lora.targets; without, all weights are "
    "trained but those of model.freeze_vision, model.freeze_merger and model.freeze_language"
)
_TARGETS = (
    "lora.targets is a list of parts, such as [attention,mlp], or of names of linear layers, such "
    "as [q_proj,v_proj]"
)
_PLAIN_LORA = "adapters are plain LoRA; lora.rslora scales them by the root of their rank"
_FEW = (
    "few weights are trained by adapters (lora=default) or by freezing parts (model.freeze_vision, "
    "model.freeze_merger, model.freeze_language), and in no other way"
)
_MERGED = (
    "megatron-vlm export --as merged merges adapters into the model, and checkpoint.export (merged "
    "or both) does it at the end of a run"
)
_QUANTIZATION = (
    "lora.base=nf4 or int8 stores the frozen weights beside adapters in 4 or 8 bits, by blocks of "
    "64; there is no other quantization"
)
_TUNE = "model.freeze_vision, model.freeze_merger and model.freeze_language say what does not learn"
_SHARDS = (
    "parallel.tp and parallel.pp divide the model over GPUs, and parallel.distributed_optimizer, "
    "which is on, divides the optimizer's state"
)
_CP = (
    "parallel.cp must be 1, since context parallelism would cut an image's tokens over ranks; "
    "model.recompute=full saves the most memory for long records, and parallel.tp divides layers"
)
_OFFLOAD = (
    "optim.offload=1 keeps main weights and moments in host memory, and "
    "model.offload_activations=1 the activations of decoder layers; "
    "model.recompute, optim.states=int8, lora=default and parallel.pp save memory, too"
)
_RECOMPUTE = (
    "model.recompute and model.recompute_vision say what is computed again instead of kept; "
    "model.recompute=full recomputes every decoder layer"
)
_HEAD = (
    "the head computes the supervised tokens alone, in slices of the vocabulary, and model.compile "
    "fuses the small operations of a layer, so that there are no such kernels to turn on"
)
_SIZES = "the sizes of the model and its layers are those of config.json in model.path"
_NO_CODE = (
    "the code of Qwen's families is built in: no code of a checkpoint is run, and model.path is "
    "all that is given"
)
_REVISION = "model.path=ORG/NAME@REVISION takes a branch, tag or commit of the Hub"
_STAGES = (
    "parallel.layers_per_stage lists the layers of every stage; "
    "parallel.layers_per_stage=auto spreads them by cost"
)
_EXPERTS = (
    "routing is that of the checkpoint: no token is dropped, and experts run as Megatron's grouped "
    "products; see parallel.ep and model.router_balance_loss"
)
_TOKENIZER = (
    "the tokenizer and the processor are those of model.path; data.add_tokens adds tokens to them"
)

MODEL_SENTENCES = {
    _ADAPTERS: "peft use_lora use_peft peft_config finetuning_type train_type tuner_type sft_type "
    "lora_enable adapter lora_config tuner_backend",
    _TARGETS: "target_modules lora_target lora_target_modules lora_target_parameters target_regex "
    "lora_target_linear exclude_modules target_parameters peft_layers_to_transform "
    "layers_to_transform layers_pattern",
    "lora.train names the parts that are trained whole beside adapters, such as [merger]": (
        "modules_to_save additional_target lora_modules_to_save"
    ),
    "lora.init is kaiming or gaussian": "init_lora_weights init_weights peft_init_lora_weights",
    _PLAIN_LORA: "use_dora dora pissa_init pissa_iter pissa_convert loraplus_lr_ratio "
    "lorap_lr_ratio loraplus_lr_embedding peft_use_dora rank_pattern alpha_pattern "
    "layer_replication peft_layer_replication loftq_config lora_fan_in_fan_out fan_in_fan_out "
    "trainable_token_indices ensure_weight_tying",
    "adapters have no bias": "lora_bias bias",
    "adapters are kept in fp32 by the optimizer, and computed in train.precision": "lora_dtype "
    "autocast_adapter_dtype",
    "lora.path continues from one adapter; without it a new one is made": "create_new_adapter "
    "adapter_folder model_adapter_name",
    _MERGED: "merge_lora lora_on_cpu",
    _FEW: "use_galore use_apollo use_badam use_llama_pro use_unsloth "
    "use_unsloth_gc use_reft shift_attn mixture_of_depths s2_attention oft_rank oft_block_size "
    "oft_target module_dropout relora_steps",
    _QUANTIZATION: "qlora quantization_bit load_in_4bit load_in_8bit quant_bits quant_method "
    "quantization_method quantization_type double_quantization quantization_config quantization "
    "quantization_device_map use_bnb_nested_quant bnb_config_kwargs gptq qat hqq_axis "
    "quant_n_samples quant_batch_size group_size quantize_moe_experts",
    _TUNE: "tune_mm_vision tune_mm_mlp tune_mm_llm freeze_parameters trainable_parameters "
    "freeze_parameters_ratio freeze_parameters_regex trainable_parameters_regex "
    "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules unfrozen_parameters "
    "freeze_mm_mlp freeze_mm_modules",
    _SHARDS: "deepspeed fsdp fsdp_config zero_stage deepspeed_config use_fsdp fsdp_version "
    "fsdp_size accelerator_config parallelism_config actor.strategy wrap_policy zero3_init_flag "
    "zero_hpz_partition_size reshard_after_forward data_parallel_sharding_strategy dp_shard_size "
    "model_dtype ds3_gather_for_generation local_rank device_map max_memory low_cpu_mem_usage "
    "tensor_parallel_degree",
    _CP: "context_parallel_size cp_size sequence_parallel_size sequence_parallel_degree "
    "ulysses_sequence_parallel_size context_parallel_degree cp_comm_type heads_k_stride "
    "ring_attn_func",
    "parallel.sequence_parallel must be false, since it would cut the sequence into which visual "
    "features are scattered; model.recompute saves memory instead": "sequence_parallel sp",
    "experts are not cut by parallel.tp: parallel.ep divides them": "expert_tensor_parallel_size "
    "etp_size",
    _STAGES: "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers "
    "pipeline_model_parallel_layout num_layers_in_first_pipeline_stage "
    "num_layers_in_last_pipeline_stage account_for_embedding_in_pipeline_split "
    "account_for_loss_in_pipeline_split",
    "parallel.virtual_stages is the number of chunks of each stage, not the layers of a chunk": (
        "num_layers_per_virtual_pipeline_stage virtual_pipeline_model_parallel_size vpp_size"
    ),
    "the schedule takes micro-batches in groups of parallel.pp": (
        "microbatch_group_size_per_virtual_pipeline_stage"
    ),
    "parallel.overlap_grad_reduce and parallel.overlap_param_gather hide the communication of data "
    "parallel ranks; tensor parallel communication is not overlapped": "tp_comm_overlap "
    "delay_wgrad_compute overlap_moe_expert_parallel_comm overlap_p2p_comm align_grad_reduce "
    "overlap_param_gather_with_optimizer_step",
    _OFFLOAD: "optimizer_cpu_offload optimizer_offload_fraction activation_offloading "
    "enable_activation_offload param_offload grad_offload optimizer_offload cpu_offload "
    "offload_params offload_folder relora_cpu_offload offload_policy "
    "fine_grained_activation_offloading offload_model offload_optimizer",
    _RECOMPUTE: "gradient_checkpointing vit_gradient_checkpointing gradient_checkpointing_kwargs "
    "activation_checkpointing enable_gradient_checkpointing disable_gradient_checkpointing "
    "use_reentrant_gc recompute_method recompute_num_layers recompute_modules "
    "recompute_activations vit_recompute",
    "model.backend=torch uses SDPA, model.backend=te Transformer Engine": "attn_implementation "
    "attn_impl flash_attn use_flash_attn attention_backend flash_attention sdp_attention "
    "xformers_attention eager_attention flash_optimum use_flash_attention_2 transformer_impl "
    "use_mcore_models vit_attn_impl use_te",
    _HEAD: "use_liger_kernel liger_kernel_config use_liger liger_kernel enable_liger_kernel "
    "use_liger_loss use_cce cut_cross_entropy cross_entropy_loss_fusion cross_entropy_fusion_impl "
    "use_fused_kernels fused_linear_cross_entropy use_v1_kernels chunked_cross_entropy use_kernels "
    "fused_kernel_options",
    "model.compile fuses the small operations of a layer; null is on with cuda and a compiler": (
        "torch_compile torch_compile_backend torch_compile_mode use_torch_compile "
        "no_bias_dropout_fusion no_bias_swiglu_fusion no_rope_fusion apply_rope_fusion "
        "masked_softmax_fusion no_masked_softmax_fusion bias_dropout_fusion bias_swiglu_fusion "
        "flash_attn_rms_norm flash_attn_fuse_qkv flash_attn_fuse_mlp flash_attn_cross_entropy "
        "lora_mlp_kernel lora_qkv_kernel lora_o_kernel"
    ),
    "model.fp32_weight_gradients says in which type weight gradients are added up": (
        "no_gradient_accumulation_fusion gradient_accumulation_fusion main_grads_dtype "
        "accumulate_allreduce_grads_in_fp32 grad_reduce_in_bf16 reduce_dtype"
    ),
    "log-probs and the loss are computed in fp32": "cast_lm_head_to_fp32 upcast_lmhead_output "
    "fp32_lm_head attention_softmax_in_fp32 upcast_layernorm apply_query_key_layer_scaling "
    "embeddings_skip_upcast",
    "model.router_balance_loss is the coefficient of transformers' load_balancing_loss_func, over "
    "the global batch": "moe_aux_loss_coeff aux_loss_coeff moe_router_load_balancing_type "
    "moe_aux_loss_coef",
    "model.router_z_loss is the coefficient of the mean over layers and tokens": (
        "moe_z_loss_coeff router_z_loss_coef"
    ),
    _EXPERTS: "output_router_logits freeze_moe_router use_scattermoe experts_implementation "
    "experts_impl",
    _SIZES: "hf_config_path num_layers hidden_size ffn_hidden_size num_attention_heads "
    "group_query_attention "
    "num_query_groups max_position_embeddings position_embedding_type no_position_embedding "
    "rotary_base rotary_percent rope_scaling normalization norm_epsilon swiglu kv_channels "
    "qk_layernorm untie_embeddings_and_output_weights disable_bias_linear add_qkv_bias "
    "padded_vocab_size make_vocab_size_divisible_by num_experts multi_latent_attention q_lora_rank "
    "kv_lora_rank qk_head_dim qk_pos_emb_head_dim apply_layernorm_1p mtp_num_layers "
    "rotary_scaling_factor use_rope_scaling patch_dim img_h img_w language_model_type "
    "vision_model_type disable_vision_class_token hf_overrides override_config "
    "override_transformer_config override_ddp_config override_mcore_model_config "
    "overrides_of_model_config overrides_of_model_kwargs model_config moe_config "
    "use_rotary_position_embeddings vocab_size linear_decoupled_in_proj",
    "the released models have no dropout but lora.dropout": "attention_dropout hidden_dropout "
    "disable_dropout",
    "training starts from the weights of model.path, never from random ones": "init_method_std "
    "train_from_scratch random_init_weights use_cpu_initialization no_initialization init_strategy "
    "init_model_with_meta_device",
    _NO_CODE: "trust_remote_code model_type external_lib external_libs model_kwargs "
    "model_init_kwargs custom_register_path local_repo_path external_plugins plugins load_args "
    "extra_megatron_kwargs use_cache use_kv_cache is_encoder_decoder is_falcon_derived_model "
    "is_llama_derived_model is_qwen_derived_model is_mistral_derived_model base_model_config "
    "base_model_ignore_patterns cls_model_config use_mbridge use_dist_checkpointing "
    "dist_checkpointing_path language_model_only vanilla_mbridge",
    _REVISION: "model_revision revision revision_of_model base_model_revision model_code_revision "
    "use_hf use_modelscope check_model",
    _TOKENIZER: "tokenizer tokenizer_type tokenizer_model tokenizer_config tokenizer_name "
    "tokenizer_path processor_type processor_config use_fast_tokenizer tokenizer_use_fast "
    "tokenizer_legacy eos_token pad_token eot_tokens padding_side padding_value "
    "label_pad_token_id tokenizer_name_or_path split_special_tokens",
    "data.add_tokens lists texts that become tokens, special or not; new rows of the embedding "
    "begin as a mean of the others": "new_special_tokens tokens add_special_tokens "
    "new_special_tokens_config init_special_tokens resize_vocab resize_token_embeddings_to_32x "
    "shrink_embeddings added_tokens_overrides",
}
MODEL_FAMILIES = {
    _FEW: "galore_ apollo_ badam_ lisa_ boft_ vera_ adalora_ reft_ fourier_ llamapro_ relora_ oft_",
    _PLAIN_LORA: "lora_ga_ pissa_",
    _QUANTIZATION: "bnb_ export_quantization_ hqq_",
    "fp8 is not trained; train.precision is auto, bf16 or fp32": "fp8",
    _SHARDS: "fsdp_ deepspeed_",
    _EXPERTS: "moe_",
    _HEAD: "liger_",
}
