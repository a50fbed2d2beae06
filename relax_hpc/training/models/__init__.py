"""Model families: their settings of megatron-core, tensors and towers."""
