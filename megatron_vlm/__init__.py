"""megatron_vlm: fine-tune Qwen3-VL on Megatron-Core, equal to Hugging Face at every layout."""

__version__ = "0.1.0"
